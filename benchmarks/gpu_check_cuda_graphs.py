"""Programs whose steps are CUDA graphs, watched, and by hand of the same tensors; needs a GPU.

What is run are the tests of tests/integrations/test_cuda_graphs.py that are marked `gpu`: a step captured whole and
replayed, modules that `make_graphed_callables` has graphed, and what `torch.compile(mode="reduce-overhead")` replays,
where a recorded step runs uncompiled or in graphs of its own. The transcript goes to results/.

    python -m benchmarks.gpu_check_cuda_graphs
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.record import transcript

ROOT = Path(__file__).parents[1]
TESTS = "tests/integrations/test_cuda_graphs.py"
FAILED = "  FAILED "


def outcome(case: ElementTree.Element) -> Iterator[str]:
    """A test as lines: what it shows, and what it has compared, or how it failed."""
    name, _, how = case.get("name", "").removeprefix("test_").rstrip("]").partition("[")
    how = "-".join(part for part in how.split("-") if part != "cuda")
    yield name.replace("_", " ") + (f" ({how})" if how else "")
    for told in case.iterfind("properties/property[@name='seen']"):
        yield f"  {told.get('value')}"
    for kind in ("failure", "error", "skipped"):
        for told in case.iterfind(kind):
            yield FAILED + re.sub(r"\s+", " ", told.get("message") or kind)[:300]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tests.xml"
        words = f"-m pytest -q -p no:cacheprovider -p no:benchmark -m gpu -n 4 {TESTS}".split()
        subprocess.run([sys.executable, *words, f"--junitxml={file}"], cwd=ROOT, check=False)
        found = sorted(list(outcome(case)) for case in ElementTree.parse(file).iter("testcase"))
    lines = [line for each in found for line in each]
    passed = sum(not any(line.startswith(FAILED) for line in each) for each in found)
    lines.append(f"{passed} of {len(found)} cases as they should be")
    print(transcript("gpu_cuda_graphs", "python -m benchmarks.gpu_check_cuda_graphs", lines).read_text())
    sys.exit(passed != len(found) or not found)


if __name__ == "__main__":
    main()
