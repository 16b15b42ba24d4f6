"""Two watched ranks of a program, each a warm process of its own, over gloo."""

import contextlib
import os
import sys

from tests.session.test_watch import PLAIN

from narrowgauge.session.plan import Plan
from narrowgauge.session.process.launch import INJECTED


def started(warm_python, folder, port, program, word, every=1, world=2, **watch):
    """Both ranks, or so many, running `program` with `word`; what they say goes to `said0`, ..., the run to `out`."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(program)
    options = {"every": every, "judge": "current", "compiling": True, "watch": watch}
    plan = Plan("asis", str(folder / "out"), ("train.py",), **options).write()
    environment = {
        **PLAIN, "OMP_NUM_THREADS": "1", "NARROWGAUGE_PLAN": str(plan), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "PYTHONPATH": os.pathsep.join([str(INJECTED), PLAIN["PYTHONPATH"]]),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context((folder / f"said{r}").open("wb")) for r in range(world)]
        return [
            warm_python.popen(
                [sys.executable, "train.py", word], cwd=folder, env={**environment, "RANK": str(r)}, stdout=outputs[r]
            )
            for r in range(world)
        ]
