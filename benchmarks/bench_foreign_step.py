"""What recording a step costs of layers that are not ours: a Llama of nn.Linear, of torchao's, of TransformerEngine's.

    plain       a step that is not recorded: no hook is there
    recorded    every operand of every layer is read once more, and what FP8 would make of it counted
    session     the same with all that `narrowgauge run` records of a step (norms, updates, the loss)      on a GPU

The model is one and the same, and its steps take turns, so neither memory nor a drifting clock tilts them; medians. On
a CPU the process's own time is taken, of all its threads, which a busy machine does not stretch; on a GPU the time
between events around blocks of steps, in which the host waits for nothing. A session begins and ends around its blocks,
in turn with blocks without one; its first steps, in which it opens its run and Python may look through all objects for
garbage, are not counted, but the very first told by itself.
Limits that the project set itself: recording costs at most 30% of a recorded step on a CPU, and 10% on an H200.

A kind is plain, torchao, torchao-rowwise, te-current, te-delayed or te-blockwise; -bf16 behind it makes weights and all
else BF16, instead of autocast over float32 weights; -compiled compiles the blocks, and then a recorded step runs
without the graphs; -graphs compiles them too, and a recorded step has graphs of its own. TransformerEngine's are
measured where it is installed.

    python -m benchmarks.bench_foreign_step [--rounds 12] [--kinds plain,torchao]
    python -m benchmarks.bench_foreign_step --device cuda --size 1b --rounds 3
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import record
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.bench.shapes import KEPT, sized
from narrowgauge.bench.timing import interleave, wait
from narrowgauge.bench.variants import many_graphs
from narrowgauge.observe.stats import Collector
from narrowgauge.observe.store import RunWriter
from narrowgauge.scripts import gpt
from narrowgauge.session.doors.compiled_calls import CompiledCalls
from narrowgauge.session.sites.choice import Choice, Wish
from narrowgauge.session.sites.plain_sites import PlainSites

KINDS = {
    "cpu": (
        *("plain", "torchao", "torchao-rowwise"),
        *("plain-compiled", "plain-graphs", "torchao-compiled", "torchao-graphs"),
    ),
    "cuda": (
        *("plain", "plain-bf16", "plain-bf16-compiled", "plain-bf16-graphs"),
        *("torchao-bf16", "torchao-bf16-compiled", "torchao-bf16-graphs"),
        *("te-current-bf16", "te-delayed-bf16", "te-blockwise-bf16"),
    ),
}
BLOCK = 4  # steps of a sample on a GPU
SETTLED = 20  # steps of a session that come before those that count


def made(plain: nn.Module, kind: str, emulate: bool) -> nn.Module:
    """A copy of the model, converted by torchao if so asked; its head stays high, as ours does."""
    model = copy.deepcopy(plain)
    words = kind.split("-")
    if "bf16" in words:
        model = model.bfloat16()
    if words[0] == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        base = Float8LinearConfig.from_recipe_name("rowwise" if "rowwise" in words else "tensorwise")
        config = Float8LinearConfig(**{**vars(base), "emulate": emulate})
        model = convert_to_float8_training(model, config=config, module_filter_fn=lambda m, name: name != KEPT)
    if words[0] == "te":
        import transformer_engine.pytorch as te

        for name, layer in list(model.named_modules()):
            if isinstance(layer, nn.Linear) and name != KEPT:
                own = te.Linear(layer.in_features, layer.out_features, bias=False, params_dtype=torch.bfloat16)
                with torch.no_grad():
                    own.weight.copy_(layer.weight)
                model.set_submodule(name, own)
    if compiled_in(kind):
        for block in model.blocks:
            block.compile()
    return model


def compiled_in(kind: str) -> bool:
    """Whether the program compiles."""
    return not {"compiled", "graphs"}.isdisjoint(kind.split("-"))


class Program(CompiledCalls):
    """Hears what the program of a kind compiles, of which all is training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.listener = self
        self._kind = kind

    def any(self) -> bool:
        """Whether it compiles, whatever the kinds before it did."""
        return compiled_in(self._kind)

    def told(self) -> bool:
        """Nobody hears of graphs here."""
        return False

    def compiled_begins(self, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nobody need know."""

    def compiled_ended(self, known: Any, output: Any, *, left: bool) -> None:
        """Nor of this."""

    def update_begins(self, optimizer: Any) -> None:
        """Nor of that."""

    def compiles(self) -> None:
        """Nor of anything else."""

    def learns(self) -> bool:
        """Whether it is called with gradients."""
        return True


def in_fp8(kind: str) -> Callable[[], AbstractContextManager[object]]:
    """What a program opens around its forward."""
    words = kind.split("-")
    if words[0] != "te":
        return nullcontext
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    scaling = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling", "blockwise": "Float8BlockScaling"}
    return partial(te.autocast, enabled=True, recipe=getattr(recipes, scaling[words[1]])())


class Stepper:
    """A training step, and the same recorded."""

    def __init__(
        self, model: nn.Module, size: gpt.Size, device: torch.device, kind: str, program: CompiledCalls
    ) -> None:
        self.model, self.size, self.device, self.program = model, size, device, program
        self.optimizer = gpt.make_optimizer(model, size.lr, device)
        self.autocast, self.in_fp8 = "bf16" not in kind, in_fp8(kind)
        self.collector = Collector(RunWriter(tempfile.mkdtemp(), {}), every=1)
        self.way: Wish = "graphs" if "graphs" in kind else "uncompiled"
        self.sites = PlainSites(
            "current",
            eager=True,
            training=lambda: True,
            compilations=program,
            choice=Choice(self.way),
        )
        self.layers = len(self.sites.add(model, self.collector))
        self.steps = 0

    def plain(self) -> None:
        """One step; returns without waiting for a device."""
        tokens, targets = torch.randint(self.size.vocab, (2, self.size.batch, self.size.seq), device=self.device)
        self._loss(tokens, targets).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def recorded(self) -> None:
        """One step whose layers are recorded."""
        self.steps += 1
        self.collector.begin_step(self.steps)
        self.sites.begin()
        self.plain()
        self.sites.end(seen=True)
        self.collector.end_step()

    def _loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.autocast:
            return gpt.next_byte_loss(self.model, tokens, targets)
        with self.in_fp8():
            logits = self.model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def on_cpu(stepper: Stepper, rounds: int) -> dict[str, list[float]]:
    """The process's milliseconds of every step, but for the first of each."""
    found: dict[str, list[float]] = {"plain": [], "recorded": []}
    for round_ in range(rounds + 3):
        for name, call in (("plain", stepper.plain), ("recorded", stepper.recorded)):
            began = time.process_time()
            call()
            if round_ >= 3:
                found[name].append(1e3 * (time.process_time() - began))
    return found


def on_gpu(stepper: Stepper, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, in blocks, and how long the host was busy with one."""
    device, settings = stepper.device, {"rounds": rounds, "samples": 2, "block": BLOCK, "lead": 2}
    for call in (stepper.plain, *3 * (stepper.recorded,)):  # in which kernels are compiled
        call()
    stepper.collector.flush()
    before = stepper.collector.seconds, stepper.steps
    calls: dict[str, Callable[[], object]] = {"plain": stepper.plain, "recorded": stepper.recorded}
    took = interleave(calls, device, **settings)
    row: dict[str, Any] = {name: [timing.median] for name, timing in took.items()}
    row |= {f"{name} host ms": round(timing.host or 0.0, 1) for name, timing in took.items()}
    stepper.collector.flush()
    spent, steps = stepper.collector.seconds - before[0], stepper.steps - before[1]
    row["own ms, by events"] = round(1e3 * spent / steps, 2)
    row["session"], row["beside"], first, host = [], [], [], []
    in_session = {**settings, "rounds": 1, "samples": 4, "lead": SETTLED}
    stepper.program.close()  # a session hears for itself what was compiled
    for _ in range(rounds):
        row["beside"].append(interleave({"": stepper.plain}, device, **{**settings, "rounds": 1})[""].median)
        settings_file = Path(tempfile.mkdtemp()) / "narrowgauge.toml"
        settings_file.write_text(f'[watch]\nevery = 1\nwhat_if = ["current"]\ncompiled = "{stepper.way}"\n')
        with ng.watch(stepper.model, out=settings_file.parent / "run", config=settings_file):
            began = time.perf_counter()
            stepper.plain()
            wait(device)
            first.append(1e3 * (time.perf_counter() - began))
            timing = interleave({"": stepper.plain}, device, **in_session)[""]
        row["session"].append(timing.median)
        host.append(timing.host or 0.0)
    row["session host ms"] = round(statistics.median(host), 1)
    row["a session's first step, ms"] = [round(x) for x in first]
    return row


def measured(stepper: Stepper, rounds: int) -> dict[str, Any]:
    """One row: medians of plain and of recorded steps."""
    gpu = stepper.device.type == "cuda"
    found: dict[str, Any] = on_gpu(stepper, rounds) if gpu else on_cpu(stepper, rounds)
    stepper.collector.flush()
    times = {name: found.pop(name) for name in ("plain", "recorded", "session", "beside") if name in found}
    medians = {name: statistics.median(some) for name, some in times.items()}
    least = {name: min(some) for name, some in times.items()}
    row = {
        "layers": stepper.layers,
        "plain ms": round(medians["plain"], 2),
        "recorded ms": round(medians["recorded"], 2),
        "recording, % of the recorded step": _share(medians, "recorded"),
    }
    if gpu:
        row["session ms"] = round(medians["session"], 2)
        row["session, % of its step"] = _share(medians, "session", "beside")
        row["rounds without and with it"] = [
            [round(x, 1) for x in pair] for pair in zip(times["beside"], times["session"], strict=True)
        ]
        row |= found
    else:
        row["the same, of the quickest steps"] = _share(least, "recorded")
    return {**row, "failures": stepper.collector.failures}


def _share(milliseconds: dict[str, float], name: str, plain: str = "plain") -> float:
    return round(100 * (milliseconds[name] - milliseconds[plain]) / milliseconds[name], 1)


def row_of(kind: str, plain: nn.Module, size: gpt.Size, device: torch.device, rounds: int) -> dict[str, Any]:
    """A kind's row; the model is gone afterwards."""
    program = Program(kind)
    with many_graphs():
        stepper = Stepper(made(plain, kind, device.type == "cpu"), size, device, kind, program)
        row = measured(stepper, rounds)
    program.close()
    print(f"{kind}: {' '.join(stepper.sites.notes)}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny", choices=gpt.SIZES)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--kinds", default="", help="separated by commas")
    args = parser.parse_args()
    device, size = torch.device(args.device), sized(args.size)
    kinds = args.kinds.split(",") if args.kinds else KINDS[device.type]
    if any(kind.startswith("te-") for kind in kinds):
        import transformer_engine.pytorch  # noqa: F401    before torch loads another cuDNN
    torch.manual_seed(0)
    with device:
        plain = gpt.Llama(size)
    rows: list[dict[str, Any]] = []
    settings = {
        "device": args.device, "size": args.size, "rounds": args.rounds, "threads": torch.get_num_threads(),
        "batch": size.batch, "seq": size.seq, "vocab": size.vocab,
    }  # fmt: skip
    for kind in kinds:
        began = time.perf_counter()
        try:
            rows.append({"kind": kind, **row_of(kind, plain, size, device, args.rounds)})
        except Exception:  # one that fails costs none of the others
            traceback.print_exc()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"{kind}: {time.perf_counter() - began:.0f} s", flush=True)
        if rows:  # what was measured is kept if a later one never ends
            record("foreign_step", settings, rows)


if __name__ == "__main__":
    main()
