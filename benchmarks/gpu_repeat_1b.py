"""How far chance alone drives runs of a comparison apart: one billion parameters, 100 steps, several times each.

Every run starts from the script's own weights, multiplied by 1 + noise·N(0,1); the gaps are the verdict's, to the BF16
run without noise. Nothing is recorded but losses. Ten minutes on one large GPU.

    python -m benchmarks.gpu_repeat_1b [--out DIR]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import record

from narrowgauge.observe.store import open_run
from narrowgauge.observe.verdict import Evidence
from narrowgauge.observe.verdict.gap import paired_gap
from narrowgauge.scripts import gpt
from narrowgauge.session.plan import Plan
from narrowgauge.session.process.launch import launch

ARGS = ("--size", "1b", "--steps", "100", "--eval-every", "50", "--eval-batches", "8")
NOISE: dict[str | None, tuple[float, ...]] = {
    None: (0.0, 1e-6, 2e-6, 3e-6, -1e-6),
    "current": (0.0, 1e-6, 2e-6, -1e-6),
    "delayed": (0.0, 1e-6, 2e-6),
    "blockwise": (0.0,),
}


def one(folder: Path, recipe: str | None, noise: float, args: tuple[str, ...]) -> Evidence:
    """Train once; what it recorded."""
    name = f"{recipe or 'bf16'}_{noise:g}"
    plan = Plan(
        variant=name, out=str(folder / name), command=(gpt.__file__, *args), recipe=recipe, noise=noise, every=10**9
    )
    ended = launch(plan)
    if ended.code:
        raise SystemExit("\n".join(ended.last_lines))
    return Evidence(name, open_run(plan.folder), 0, "")


def row(recipe: str | None, noise: float, run: Evidence, baseline: Evidence) -> dict[str, Any]:
    gap = paired_gap(run.series("loss"), baseline.series("loss"))
    ours, theirs = run.eval_value(), baseline.eval_value()
    assert gap is not None
    assert ours is not None
    assert theirs is not None
    return {
        "run": recipe or "bf16",
        "noise": noise,
        "loss_gap_pct": round(gap.pct, 3),
        "eval_loss": round(ours, 4),
        "eval_gap_pct": round(100.0 * (ours / theirs - 1.0), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep the runs here")
    parser.add_argument("args", nargs="*", help="other arguments of the script, behind --")
    chosen = parser.parse_args()
    args = tuple(chosen.args) or ARGS
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.out or Path(scratch)
        runs = [(recipe, noise, one(folder, recipe, noise, args)) for recipe in NOISE for noise in NOISE[recipe]]
        rows = [row(recipe, noise, run, runs[0][2]) for recipe, noise, run in runs]
    record("repeat_1b", {"script": "gpt.py " + " ".join(args)}, rows)


if __name__ == "__main__":
    main()
