"""TransformerEngine's own codes beside those that the watch counts, layer by layer and recipe by recipe; needs a GPU.

    codes       of every operand that leaves its layer: those that a copy of the layer's quantizer makes (so that its
                history is left alone) against ours by the rule read from it
    columns     what was recorded against the tensors that hooks caught
    history     delayed: the recorded amax stands in the layer's own history, and the scale is the one that it held
    drift       inputs that grow eightfold: what the delayed scale saturates, current scaling does not
    training    TransformerEngine's own loop (`gpu_te_program.py`), with `narrowgauge run` and without: the same losses
                to the bit, and rows that its own FP8 tensors confirm, their scale too
    loop        a longer one (`gpu_te_loop_program.py`) in the same way, of all layers, with two microbatches, experts
                and a checkpointed block: every row of every recorded step by the layers' own quantizers and histories
    grown       the first layer's input of that loop, delayed and current, in a step in which it has grown eightfold,
                which saturates, and in one in which it has shrunk, which underflows

Each case is tried by itself; one that raises is a line. The transcript goes to results/.

    python -m benchmarks.gpu_check_transformer_engine
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu_operand_sums import row as row_of
from benchmarks.gpu_operand_sums import worst as worst_of
from benchmarks.record import transcript
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.compute.quant import quantize
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import open_run
from narrowgauge.session.sites.plain_sites import PlainSites
from narrowgauge.session.sites.te_quantizers import rule_of

COLUMNS = ("amax", "std", "sqnr_db", "gain")
PROGRAM, LOOP = (Path(__file__).with_name(f"gpu_te_{name}.py") for name in ("program", "loop_program"))
STEPS, EVERY = 8, 4
GROWN, SHRUNK = "6", "8"  # of the loop, whose every second step is recorded
NORMED = 1e-4  # of what a layer norms itself: by hand a BF16 number in ten thousand may be rounded otherwise
WORST = 1e-5  # of a column, relative: our sums against float64 are within 4e-7, a BF16 rounding is not
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}


class Rows:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}

    def add_tensors(self, step: int, sites: list[str], columns: dict[str, Any]) -> None:
        for i, site in enumerate(sites):
            self.rows[site] = {name: values[i] for name, values in columns.items()}  # histograms are arrays

    def add_event(self, step: int, kind: str, message: str, site: str | None = None, **data: Any) -> None:
        raise RuntimeError(message)


def their_codes(quantizer: Any, x: Tensor) -> Tensor:
    """The bytes that a copy of the quantizer makes; its amax goes into memory of our own."""
    mine = frozen(quantizer.copy())
    mine.internal = False
    made = mine(x.detach().contiguous())
    data = made._data if hasattr(made, "_data") else made._rowwise_data
    return data.view(torch.uint8).reshape(x.shape)


def frozen(quantizer: Any) -> Any:
    """A quantizer as it is now."""
    mine = copy.copy(quantizer)
    for name in ("scale", "amax"):
        if isinstance(getattr(mine, name, None), Tensor):
            setattr(mine, name, getattr(mine, name).clone())
    return mine


class Case:
    """A layer under a recipe: two steps that fill the histories, then a recorded one."""

    def __init__(self, layer: nn.Module, recipe: Any, *args: Any, grow: float = 1.0) -> None:
        import transformer_engine.pytorch as te

        self.te, self.layer, self.recipe, self.args = te, layer, recipe, args
        self.writer = Rows()
        collector = Collector(self.writer, every=1)
        self.sites = PlainSites("current", eager=True, training=lambda: True)
        self.sites.add(nn.ModuleDict({"l": layer}), collector)
        self.seen: dict[str, tuple[Tensor, Any]] = {}
        x = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2):
            self._step(x)
        collector.begin_step(1)
        self.sites.begin()
        self._step((grow * x).detach().requires_grad_(), keep=True)
        self.sites.end()
        collector.flush()
        torch.cuda.synchronize()
        if collector.failures:
            raise RuntimeError(f"{collector.failures} failures in the collector")
        self.rows = self.writer.rows

    def _step(self, x: Tensor, keep: bool = False) -> None:
        with self.te.autocast(enabled=True, recipe=self.recipe):
            y = self.layer(x, *self.args)
            if keep:
                self._keep(x, y)
        (y.float().cos().sum() / 100).backward()

    def _keep(self, x: Tensor, y: Tensor) -> None:
        """Each tensor that can be caught from outside, and its quantizer as it is when the layer has used it."""
        forward, backward = (self.layer.quantizers[f"scaling_{way}"] for way in ("fwd", "bwd"))
        kind = type(self.layer).__name__
        if kind == "GroupedLinear":
            for i, part in enumerate(x.detach().split(self.args[0])):
                self.seen[f"l.{i}:input"] = part, frozen(forward[3 * i])
                self.seen[f"l.{i}:weight"] = getattr(self.layer, f"weight{i}").detach(), frozen(forward[3 * i + 1])
            y.register_hook(self._gradients(backward, [f"l.{i}:grad_output" for i in range(len(self.args[0]))]))
        elif kind == "LayerNormMLP":
            for i in range(2):
                weight = getattr(self.layer, f"fc{i + 1}_weight").detach()
                self.seen[f"l.fc{i + 1}:weight"] = weight, frozen(forward[3 * i + 1])
            y.register_hook(self._gradients(backward[2:], ["l.fc2:grad_output"]))
        else:
            if kind == "Linear":
                self.seen["l:input"] = x.detach(), frozen(forward[0])
            self.seen["l:weight"] = self.layer.weight.detach(), frozen(forward[1])
            y.register_hook(self._gradients(backward, ["l:grad_output"]))

    def _gradients(self, quantizers: Any, sites: list[str]) -> Callable[[Tensor], None]:
        def arrived(dy: Tensor) -> None:
            parts = dy.detach().split(self.args[0]) if len(sites) > 1 else [dy.detach()]
            for i, (site, part) in enumerate(zip(sites, parts, strict=True)):
                self.seen[site] = part.clone(), frozen(quantizers[2 * i])

        return arrived


def codes(layer: Callable[[], nn.Module], recipe: Any, *args: Any) -> Iterator[str]:
    """Codes and columns of every operand; of a delayed recipe, its history."""
    case = Case(layer(), recipe, *args)
    missing = sorted(set(case.seen) - set(case.rows))
    if missing:
        raise AssertionError(f"not recorded: {missing}; notes: {case.sites.notes}")
    for site, (t, quantizer) in case.seen.items():
        role = site.partition(":")[2]
        rule = rule_of(quantizer, role, 0)
        if isinstance(rule, str):
            raise AssertionError(rule)
        scales = {} if rule.given is None else {"scale": rule.given.scale, "inv_scale": rule.given.inv_scale}
        q = quantize(t, rule.operand.fmt, rule.operand.granularity, scaling=rule.operand.scaling, **scales)
        differ = int((q.codes.view(torch.uint8) != their_codes(quantizer, t)).sum())
        row, want = case.rows[site], ng.measure(t, q)
        worst = max(abs(row[c] - want[c]) / max(abs(want[c]), 1e-9) for c in COLUMNS)
        kind = f"{rule.operand.fmt.name} {rule.operand.granularity}"
        line = f"  {site:18} {kind:34} codes that differ {differ} of {t.numel()}  worst column {worst:.1e}"
        if rule.given is not None:
            line += f"  {history(case, site, row, quantizer)}"
        yield line
        if worst > WORST or differ:
            raise AssertionError(f"{site}: codes that differ {differ}, worst column {worst:.1e}")
    hidden = sorted(set(case.rows) - set(case.seen))
    if hidden:
        yield "  recorded, but not to be caught from outside: " + ", ".join(
            f"{site} ({case.rows[site]['sqnr_db']:.2f} dB)" for site in hidden
        )
    for note in case.sites.notes:
        yield f"  note: {note}"


def history(case: Case, site: str, row: dict[str, float], quantizer: Any) -> str:
    """A delayed scale is the layer's own, and its history has the recorded amax."""
    backward = site.endswith("grad_output")
    state = case.layer.fp8_meta["scaling_bwd" if backward else "scaling_fwd"]
    found = bool((state.amax_history == row["amax"]).any())
    scale = 1 / float(quantizer.scale)
    if not found or not math.isclose(row["scale_max"], scale, rel_tol=1e-6):
        raise AssertionError(
            f"{site}: amax {row['amax']} {'' if found else 'not '}in the history, scale {row['scale_max']}, its {scale}"
        )
    return f"amax in its history, scale its own, amax ratio {row['amax_ratio']:.3f}"


def drift(layer: Callable[[], nn.Module], delayed: Any, current: Any) -> Iterator[str]:
    """The same growth under both."""
    rows = []
    for recipe in (delayed, current):
        torch.manual_seed(1)
        rows.append(Case(layer(), recipe, grow=8.0).rows["l:input"])
    for name, row in zip(("delayed", "current"), rows, strict=True):
        yield (
            f"  {name}: amax ratio {row['amax_ratio']:.3f}  saturated {row['saturation_pct']:.3f} %  "
            f"SQNR {row['sqnr_db']:.2f} dB  gain {row['gain']:.4f}"
        )
    if not (rows[0]["amax_ratio"] > 4 and rows[0]["saturation_pct"] > rows[1]["saturation_pct"] == 0):
        raise AssertionError("the delayed scale should saturate, and the current one not")


def program(words: list[str], every: int, folder: Path, watched: bool) -> str:
    """Run a loop, alone or under the watch, into a folder; what went wrong."""
    folder.mkdir()
    watch = [sys.executable, "-m", "narrowgauge.cli.main", "run", "--every", str(every), "--out", str(folder / "run")]
    command = [sys.executable, *words, str(folder)]
    command = [*watch, "--", *command] if watched else command
    path = os.pathsep.join([str(PROGRAM.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    return f"exit code {done.returncode}: {done.stderr[-800:]}" if done.returncode else ""


def both(words: list[str], every: int, folder: Path) -> tuple[list[float], Any, Any]:
    """A loop alone and under the watch: the losses of either, the run, and what the watched one saw by itself."""
    folders = folder / "alone", folder / "watched"
    with ThreadPoolExecutor(2) as pool:
        failures = list(pool.map(program, (words,) * 2, (every,) * 2, folders, (False, True)))
    if any(failures):
        raise AssertionError("; ".join(filter(None, failures)))
    losses = [json.loads((each / "losses.json").read_text()) for each in folders]
    if losses[0] != losses[1]:
        raise AssertionError(f"losses differ: {losses}")
    return losses[0], open_run(folders[1] / "run"), json.loads((folders[1] / "seen.json").read_text())


def training(recipe: str) -> Iterator[str]:
    """The program alone, and under the watch."""
    with tempfile.TemporaryDirectory() as name:
        losses, run, seen = both([str(PROGRAM), recipe, str(STEPS)], EVERY, Path(name))
        yield f"  {STEPS} losses the same to the bit, {losses[0]:.6f} to {losses[-1]:.6f}"
        yield f"  sites: {', '.join(run.sites)}"
        for site, want in seen.items():
            table = run.tensors(sites=[site], steps=[STEPS])
            row = {name: float(table[name][0]) for name in table.columns if name in want}
            worst = max(abs(row[c] - want[c]) / max(abs(want[c]), 1e-9) for c in want)
            yield f"  {site}: by its own FP8 tensor, worst column {worst:.1e}  {want}"
            if worst > WORST:
                raise AssertionError(f"{site}: recorded {row}")
        for note in run.meta.get("notes", []):
            yield f"  note: {note}"


def loop(recipe: str, kept: dict[str, Any]) -> Iterator[str]:
    """The longer one; the rows of its first layer's input are `kept`, by recipe and step."""
    with tempfile.TemporaryDirectory() as name:
        losses, run, seen = both([str(LOOP), recipe], 2, Path(name))
        yield f"  {len(losses)} losses the same to the bit, {losses[0]:.6f} to {losses[-1]:.6f}"
        yield f"  SQNR in steps {', '.join(seen)}"
        if run.scalars()["microbatches"].tolist() != [2] * len(losses):
            raise AssertionError(f"microbatches {run.scalars()['microbatches'].tolist()}")
        apart = 0
        for site in run.sites:
            gaps, decibels, normed = [], [], site in ("norm:input", "mlp.fc1:input")
            for step, sites in seen.items():
                if set(sites) != set(run.sites):
                    raise AssertionError(f"recorded {run.sites}, by hand in step {step} {sorted(sites)}")
                table, want = run.tensors(sites=[site], steps=[int(step)]), row_of(sites[site])
                if table.rows != 1 or ("amax_ratio" in want) != (recipe == "delayed"):
                    raise AssertionError(f"{site}, step {step}: {table.rows} rows, by hand {want}")
                row = {name: float(table[name][0]) for name in want}
                gaps.append(worst_of(row, want))
                decibels.append(f"{row['sqnr_db']:.3f}")
                apart += abs(want.get("amax_ratio", 1.0) - 1) > 1e-3
                if not gaps[-1] <= (NORMED if normed else WORST):
                    raise AssertionError(f"{site}, step {step}: recorded {row}, by hand {want}")
                if site == "first:input":
                    kept[recipe, step] = {c: float(table[c][0]) for c in (*want, "amax_ratio")}
            yield f"  {site:19} {', '.join(decibels)} dB, worst of {len(want)} columns {max(gaps):.1e}"
        yield f"  {apart} delayed scales are not those of now"
        if recipe == "delayed" and not apart:
            raise AssertionError("under a current scale the rows would be the same")
        for note in run.meta.get("notes", []):
            yield f"  note: {note}"


def grown(kept: dict[str, Any]) -> Iterator[str]:
    """Delayed and current, of the same tensors."""
    for step, name in ((GROWN, "saturation_pct"), (SHRUNK, "underflow_pct")):
        delayed, current = kept["delayed", step], kept["current", step]
        for recipe, row in (("delayed", delayed), ("current", current)):
            columns = ("amax", "amax_ratio", "saturation_pct", "underflow_pct", "sqnr_db")
            yield f"  step {step}, {recipe}: {', '.join(f'{c} {row[c]:.5g}' for c in columns)}"
        same = worst_of(delayed, {c: current[c] for c in ("numel", "amax", "l2", "mean")}) < WORST
        far = step != GROWN or delayed["amax_ratio"] > 4  # the larger one of two microbatches
        if not (same and far and delayed[name] > 5 > 1 > current[name] and delayed["sqnr_db"] < current["sqnr_db"] - 3):
            raise AssertionError(f"the delayed scale should show in {name} and SQNR, of the same tensors")


def cases() -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """All, by name."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    made: dict[str, Callable[[], Any]] = {
        "delayed": partial(recipes.DelayedScaling, amax_history_len=4),
        "current": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
    }
    layers: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
        "Linear": (partial(te.Linear, 128, 256, **BF16), ()),
        "LayerNormLinear": (partial(te.LayerNormLinear, 128, 256, **BF16), ()),
        "LayerNormLinear, RMSNorm": (partial(te.LayerNormLinear, 128, 256, normalization="RMSNorm", **BF16), ()),
        "LayerNormMLP": (partial(te.LayerNormMLP, 128, 512, **BF16), ()),
        "GroupedLinear": (partial(te.GroupedLinear, 2, 128, 256, **BF16), ([128, 128],)),
    }
    for recipe, new in made.items():
        for layer, (build, args) in layers.items():
            yield f"{recipe}, {layer}", partial(_of, codes, build, new, args)
    linear = layers["Linear"][0]
    yield "drift, Linear", lambda: drift(linear, made["delayed"](), made["current"]())
    for recipe in made:
        yield f"training, {recipe}", partial(training, recipe)
    kept: dict[str, Any] = {}
    for recipe in made:
        yield f"loop, {recipe}", partial(loop, recipe, kept)
    yield "grown, delayed and current", partial(grown, kept)


def _of(check: Any, build: Any, recipe: Callable[[], Any], args: tuple[Any, ...]) -> Iterator[str]:
    yield from check(build, recipe(), *args)


def main() -> None:
    torch.manual_seed(0)
    lines: list[str] = []
    passed = tried = 0
    for name, check in cases():
        tried += 1
        at = len(lines)
        try:
            lines += [name]
            for line in check():
                lines.append(line)
            passed += 1
        except Exception as error:
            lines.append("  FAILED " + " ".join(f"{type(error).__name__}: {error}".split()))
            traceback.print_exc()
        print("\n".join(lines[at:]), flush=True)
    lines.append(f"{passed} of {tried} cases as they should be")
    print(lines[-1])
    further = {"transformer_engine": version("transformer_engine")}
    print(
        transcript(
            "gpu_transformer_engine", "python -m benchmarks.gpu_check_transformer_engine", lines, further=further
        )
    )
    sys.exit(passed != tried)


if __name__ == "__main__":
    main()
