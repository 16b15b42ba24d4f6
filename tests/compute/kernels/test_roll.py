"""One launch rolls a table as the operations of torch do, bit for bit."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from narrowgauge.compute.nn.scaling.rolling import roll_at_once, roll_by_groups, rules_of
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.compute.quant import CURRENT_POW2
from narrowgauge.compute.recipes import DELAYED, STATIC, Gemm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pow2(recipe):
    gemms = {}
    for name in ("fprop", "dgrad", "wgrad"):
        gemm = getattr(recipe, name)
        gemms[name] = Gemm(replace(gemm.a, scaling=CURRENT_POW2), replace(gemm.b, scaling=CURRENT_POW2))
    return replace(recipe, **gemms)


RECIPES = {
    "long": DELAYED.with_(history=37),
    "one": DELAYED.with_(history=1, initial="one"),
    "recent": DELAYED.with_(history=5, algorithm="most_recent", margin=2),
    "powers": pow2(DELAYED.with_(history=4)),
    "never": STATIC.with_(initial="one"),
    "renewed": STATIC.with_(refresh_every=3),
}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_same_table_after_every_step():
    slow = ScaleTable(DEVICE)
    for name, recipe in RECIPES.items():
        slow.add(name, recipe)
    fast = copy.deepcopy(slow)
    generator = torch.Generator().manual_seed(0)
    hard = [0.0, 1e-45, 1e-38, 3e38, 448.0]
    for step in range(12):
        for row in range(len(slow.sites)):
            for _ in range(step % 3):  # none in some steps
                pick = int(torch.randint(len(hard) + 4, (), generator=generator))
                amax = torch.tensor(hard[pick]) if pick < len(hard) else torch.rand((), generator=generator).exp()
                for table in (slow, fast):
                    table.record(row, amax.to(DEVICE))
        slow.fold()
        fast.fold()
        groups = [(group, torch.tensor(group.rows, device=DEVICE)) for group in slow._groups]
        roll_by_groups(slow.history, slow.amax_now, slow.scale, slow.inv_scale, groups, step + 1)
        rules = rules_of(fast._groups, fast.scale.device)
        roll_at_once(fast.history, fast.amax_now, fast.scale, fast.inv_scale, rules, step + 1)
        for name in ("history", "scale", "inv_scale", "amax_now"):
            assert torch.equal(getattr(slow, name), getattr(fast, name)), (step, name)
    assert (slow.scale > 0).all()
