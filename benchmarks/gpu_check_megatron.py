"""Megatron-Core's own loop on TransformerEngine's layers, alone and watched; needs a GPU with FP8.

    said      losses and gradient norms that the program logs: the same to the bit
    run       loss, gradient norm, learning rate, microbatches and tokens are those, step by step
    sites     every linear layer, by the names that the model gives them
    tensors   the last step's rows of all of them, by what the program itself summed of the same tensors: in FP8 by
              TransformerEngine's own quantizers, SQNR and scales too, and a delayed amax ratio by the layer's history

Each case is a program of its own (`gpu_megatron_program.py`), by its recipe, or `plain` on Megatron's own layers;
`sharded` has the distributed optimizer, `experts` a router and four experts; on two GPUs, under torchrun, `parallel`
has tensor-parallel layers, and `pipeline` two stages and its 1F1B schedule. A tensor-parallel layer is cut by columns
of its result, which all its ranks are given the same input for, or by what is summed over, K, and all hold the same
result; the ranks' parts of all else make one tensor. What a layer norms itself is normed by hand as well, of which a
BF16 number in ten thousand may be rounded otherwise. A case that raises is a line. The transcript goes to results/.

    python -m benchmarks.gpu_check_megatron [--cases "delayed,delayed parallel"]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.gpu_megatron_program import BATCH, MICROBATCHES, NORMING, RATE, ROUTER, SEQ, STEPS, names_of, norms
from benchmarks.gpu_operand_sums import row, worst
from benchmarks.record import transcript

from narrowgauge.observe.store import open_run

PROGRAM = Path(__file__).with_name("gpu_megatron_program.py")
CASES = (
    *("none", "delayed", "tensorwise", "blockwise", "plain", "delayed sharded"),
    *("none experts", "delayed experts", "tensorwise experts", "blockwise experts", "plain experts"),
    *("none parallel", "delayed parallel", "none pipeline", "delayed pipeline", "plain pipeline"),
)
AT_ONCE = 6  # cases, of two programs each
RANKS = 2  # of these kinds
SPREAD = ("parallel", "pipeline")
BY_COLUMNS = (*NORMING, "output_layer")
SAME_BITS = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
WORST = {True: 1e-4, False: 1e-5}  # whether it was normed by hand
FAILED = "  FAILED "


def program(case: str, folder: Path, watched: bool) -> str:
    """Run it into a folder; what went wrong."""
    folder.mkdir()
    recipe, _, kind = case.partition(" ")
    ours = [sys.executable, "-m", "narrowgauge.cli.main", "run", "--every", "2", "--out", str(folder / "run"), "--"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    started = [sys.executable, *(ranks if kind in SPREAD else ()), str(PROGRAM), recipe, str(folder), kind]
    command = [*(ours if watched else ()), *started]
    path = os.pathsep.join([str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, **SAME_BITS, "PYTHONPATH": path}
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
    said = [said_by(folder / name, rank) for name in ("alone", "watched") for rank in ranks_of(case)]
    if any(each != said[0] for each in said):
        raise AssertionError(f"said alone, then watched, by each rank: {said}")
    losses, lengths = ([step[name] for step in said[0]] for name in ("loss", "norm"))
    yield f"  {STEPS} losses and norms the same to the bit, {losses[0]:.5f} to {losses[-1]:.5f}"
    run, (recipe, _, kind) = open_run(folder / "watched" / "run"), case.partition(" ")
    table, each = run.scalars(), {"lr": RATE, "microbatches": MICROBATCHES, "tokens": MICROBATCHES * BATCH * SEQ}
    wanted = {"loss": losses, "grad_norm": lengths, **{name: [value] * STEPS for name, value in each.items()}}
    for name, want in wanted.items():
        found = table[name].tolist()
        if len(found) != STEPS or any(not math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, want, strict=True)):
            raise AssertionError(f"{name} {found}, the program's {want}")
    told = f"norms {min(lengths):.3f} to {max(lengths):.3f}, clipped at 0.5"
    yield f"  so are loss, norm, learning rate, microbatches and tokens of the run; {told}"
    layers, found = names_of(recipe, kind), {site for site in run.sites if not of_router(site)}
    sites = {f"{name}:{role}" for name in layers for role in ("input", "weight", "grad_output")}
    if sites != found:
        raise AssertionError(f"not seen: {sorted(sites - found)}; seen: {sorted(run.sites)}")
    yield f"  {len(sites)} sites, of all {len(layers)} linear layers; {len(run.sites) - len(sites)} of routers"
    yield from rows(run, seen_in(folder / "watched", kind, ranks_of(case)), recipe)
    yield from (f"  note: {note}" for note in run.meta.get("notes", []))


def ranks_of(case: str) -> range:
    """All that write of it."""
    return range(RANKS if case.endswith(SPREAD) else 1)


def said_by(folder: Path, rank: int) -> list[dict[str, float]]:
    """Of each step."""
    said: list[dict[str, float]] = json.loads((folder / f"said.{rank}.json").read_text())
    return said


def seen_in(folder: Path, kind: str, ranks: range) -> dict[str, dict[str, float]]:
    """What the ranks summed of a site's parts, by a metric's name; of what all of them hold, the first one's."""
    parts: dict[str, list[dict[str, float]]] = defaultdict(list)
    for rank in ranks:
        for site, of_rank in json.loads((folder / f"seen.{rank}.json").read_text()).items():
            if not (rank and kind == "parallel" and alike(site)):
                parts[site] += of_rank
    return {site: row(of_ranks) for site, of_ranks in parts.items()}


def alike(site: str) -> bool:
    """Whether all ranks of its layer hold the same of it."""
    name, _, role = site.rpartition(":")
    return role == ("input" if name.endswith(BY_COLUMNS) else "grad_output")


def of_router(site: str) -> bool:
    """Whether it is one of what multiplies in TransformerEngine's kernel, unseen, or in torch's, by Megatron's word."""
    return site.rpartition(":")[0].endswith(ROUTER)


def rows(run: Any, seen: dict[str, dict[str, float]], recipe: str) -> Iterator[str]:
    """The last step's, against the program's own sums."""
    seen = {site: want for site, want in seen.items() if site in run.sites or not of_router(site)}
    if not set(seen) <= set(run.sites):
        raise AssertionError(f"the program saw {sorted(seen)}")
    for site, want in seen.items():
        table = run.tensors(sites=[site], steps=[STEPS])
        if table.rows != 1:
            raise AssertionError(f"{site}: {table.rows} rows")
        found = {name: float(table[name][0]) for name in want}
        gap = worst(found, want)
        name, _, role = site.rpartition(":")
        if found["numel"] != want["numel"] or not gap <= WORST[role == "input" and norms(recipe, name)]:
            raise AssertionError(f"{site}: recorded {found}, by hand {want}")
        told = f"numel {int(found['numel'])}, amax {found['amax']:.5g}, {found['sqnr_db']:.4f} dB"
        yield f"  {site}: {told}, worst of {len(want)} columns {gap:.1e}"
    delayed = [want["amax_ratio"] for want in seen.values() if "amax_ratio" in want]
    apart = sum(abs(ratio - 1) > 1e-3 for ratio in delayed)
    powers = sum(
        all(math.log2(want[name]).is_integer() for name in ("scale_min", "scale_max")) for want in seen.values()
    )
    yield f"  {len(delayed)} delayed scales, of which {apart} are not those of now; {powers} operands by powers of two"
    in_fp8 = len(seen) - 3 - sum(map(of_router, seen))  # the output layer and routers are in BF16
    if not {"delayed": len(delayed) == in_fp8 and apart, "blockwise": powers >= in_fp8}.get(recipe, True):
        raise AssertionError("under another rule the rows would be the same")


def outcome(case: str) -> list[str]:
    """Its lines; the last one of a case that fails says so."""
    lines = [case]
    try:
        with tempfile.TemporaryDirectory() as folder:
            lines.extend(checked(case, Path(folder)))
    except Exception as error:
        lines.append(FAILED + " ".join(f"{type(error).__name__}: {error}".split()))
    print(f"{case}: {lines[-1].strip()}", file=sys.stderr, flush=True)  # of a run that is cut off
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    cases = parser.parse_args().cases.split(",")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(outcome, cases))
    lines = list(chain(*found))
    passed = sum(not each[-1].startswith(FAILED) for each in found)
    lines.append(f"{passed} of {len(cases)} cases as they should be")
    further = {name: version(name) for name in ("megatron-core", "transformer_engine")}
    print(transcript("gpu_megatron", "python -m benchmarks.gpu_check_megatron", lines, further=further).read_text())
    sys.exit(passed != len(cases))


if __name__ == "__main__":
    main()
