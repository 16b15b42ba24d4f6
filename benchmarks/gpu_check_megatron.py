"""Megatron-Core's own loop on TransformerEngine's layers, alone and watched; needs a GPU with FP8.

    said      losses and gradient norms that the program logs: the same to the bit
    run       loss, gradient norm, microbatches and learning rate are those, step by step
    sites     every linear layer, by the names that the model gives them
    tensors   the last step's rows, by what the program itself summed of the same tensors

Each case is a program of its own (`gpu_megatron_program.py`), by its recipe; `sharded` has the distributed optimizer.
One that raises is a line. The transcript goes to results/.

    python -m benchmarks.gpu_check_megatron
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.gpu_megatron_program import LOOKED_AT, MICROBATCHES, STEPS
from benchmarks.record import transcript

from narrowgauge.observe.store import open_run

PROGRAM = Path(__file__).with_name("gpu_megatron_program.py")
CASES = ("none", "delayed", "tensorwise", "blockwise", "delayed sharded")
LAYERS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
SAME_BITS = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
WORST = 1e-5
FAILED = "  FAILED "


def program(case: str, folder: Path, watched: bool) -> str:
    """Run it into a folder; what went wrong."""
    folder.mkdir()
    recipe, _, sharded = case.partition(" ")
    ours = [sys.executable, "-m", "narrowgauge.cli.main", "run", "--every", "2", "--out", str(folder / "run"), "--"]
    command = [*(ours if watched else ()), sys.executable, str(PROGRAM), recipe, str(folder)]
    environment = {**os.environ, **SAME_BITS, "SHARDED": "yes" if sharded else ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    except subprocess.TimeoutExpired as late:
        return f"took longer than {late.timeout} s: {(late.stderr or b'')[-1500:]!r}"
    return f"exit code {done.returncode}: {done.stderr[-1500:]}" if done.returncode else ""


def checked(case: str, folder: Path) -> Iterator[str]:
    """A case's lines."""
    with ThreadPoolExecutor(2) as pool:
        failures = list(pool.map(program, (case,) * 2, (folder / "alone", folder / "watched"), (False, True)))
    if any(failures):
        raise AssertionError("; ".join(filter(None, failures)))
    said = [json.loads((folder / name / "said.json").read_text()) for name in ("alone", "watched")]
    if said[0] != said[1]:
        raise AssertionError(f"said alone {said[0]}, watched {said[1]}")
    losses, norms = ([step[name] for step in said[0]] for name in ("loss", "norm"))
    yield f"  {STEPS} losses and norms the same to the bit, {losses[0]:.5f} to {losses[-1]:.5f}"
    run = open_run(folder / "watched" / "run")
    table = run.scalars()
    for name, want in (("loss", losses), ("grad_norm", norms), ("microbatches", [MICROBATCHES] * STEPS)):
        found = table[name].tolist()
        if len(found) != STEPS or any(not math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, want, strict=True)):
            raise AssertionError(f"{name} {found}, the program's {want}")
    yield f"  so are loss, microbatches and norm of the run; norms {min(norms):.3f} to {max(norms):.3f}, clipped at 0.5"
    names = {f"decoder.layers.{i}.{layer}" for i in range(2) for layer in LAYERS} | {"output_layer"}
    sites = {site.rpartition(":")[0] for site in run.sites}
    if not names <= sites:
        raise AssertionError(f"not seen: {sorted(names - sites)}; seen: {sorted(sites)}")
    yield f"  {len(run.sites)} sites, of all {len(names)} linear layers"
    yield from rows(run, json.loads((folder / "watched" / "seen.json").read_text()))
    yield from (f"  note: {note}" for note in run.meta.get("notes", []))


def rows(run: Any, seen: dict[str, dict[str, float]]) -> Iterator[str]:
    """The last step's, against the program's own sums."""
    if len(seen) != 3 * len(LOOKED_AT):
        raise AssertionError(f"the program saw {sorted(seen)}")
    for site, want in seen.items():
        table = run.tensors(sites=[site], steps=[STEPS])
        if not table.rows:
            yield f"  {site}: not recorded"
            continue
        row = {name: float(table[name][0]) for name in want}
        typical = want["l2"] / want["numel"] ** 0.5
        worst = max(abs(row[c] - want[c]) / max(abs(want[c]), typical) for c in want)
        if row["numel"] != want["numel"] or worst > WORST:
            raise AssertionError(f"{site}: recorded {row}, by hand {want}")
        yield f"  {site}: numel {int(row['numel'])}, amax {row['amax']:.5g}, worst of {', '.join(want)} {worst:.1e}"


def outcome(case: str) -> list[str]:
    """Its lines; the last one of a case that fails says so."""
    lines = [case]
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines.extend(checked(case, Path(folder)))
    except Exception as error:
        lines.append(FAILED + " ".join(f"{type(error).__name__}: {error}".split()))
    return lines


def main() -> None:
    with ThreadPoolExecutor(len(CASES)) as pool:
        found = list(pool.map(outcome, CASES))
    lines = list(chain(*found))
    passed = sum(not each[-1].startswith(FAILED) for each in found)
    lines.append(f"{passed} of {len(CASES)} cases as they should be")
    further = {name: version(name) for name in ("megatron-core", "transformer_engine")}
    print(transcript("gpu_megatron", "python -m benchmarks.gpu_check_megatron", lines, further=further).read_text())
    sys.exit(passed != len(CASES))


if __name__ == "__main__":
    main()
