"""`[[high]]` on TransformerEngine's own layers, to the bit; needs a GPU with FP8.

    alone       a program that knows nothing of narrowgauge (`gpu_te_switched_program.py`): layers in FP8 and in BF16
    switched    the same program under `narrowgauge run` with the settings below; layers differ by their names alone

    a product that stays high        BF16's, bit by bit; the layer's other products are those of FP8
    a layer without a switch         what it was
    its rows                         as of the layer without a switch; none of operands that stay high
    bf16_gemm, or one operand high   the BF16 product of what TransformerEngine's codes stand for
    at the end                       the layer is as it was, in this process, under `ng.watch`

A layer that norms inside rounds the normed input to BF16 first where its input stays high in some product; otherwise
its kernel may take amax and codes from more digits. So there the measure of its other products is a norm and a linear
layer, one after the other.

TransformerEngine compiles the GELU of its LayerNormMLP outside of FP8, and a recorded step runs uncompiled: there it
rounds to BF16 after each operation. In recorded steps the measure is the BF16 layer of the same run.

Each case is tried by itself; one that raises is a line. The transcript goes to results/.

    python -m benchmarks.gpu_check_te_switches
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.record import transcript

import narrowgauge as ng
from narrowgauge.observe.store import open_run

PROGRAM = Path(__file__).with_name("gpu_te_switched_program.py")
GEMMS = ("fprop", "dgrad", "wgrad")
HIGH = {  # case -> its table, and the products that are BF16's
    "whole": ("", GEMMS),
    "plain": (None, ()),
    "fprop": ('gemms = ["fprop"]', ("fprop",)),
    "dgrad": ('gemms = ["dgrad"]', ("dgrad",)),
    "wgrad": ('gemms = ["wgrad"]', ("wgrad",)),
    "backward": ('gemms = ["dgrad", "wgrad"]', ("dgrad", "wgrad")),
    "operand": ('gemms = ["dgrad", "wgrad"]\nroles = ["grad_output"]', ("dgrad", "wgrad")),
    "codes": ('keep = "bf16_gemm"', GEMMS),
}
ROLES = {  # case -> operands with a row
    "whole": (),
    "plain": ("input", "weight", "grad_output"),
    "fprop": ("input", "weight", "grad_output"),
    "dgrad": ("input", "weight", "grad_output"),
    "wgrad": ("input", "weight", "grad_output"),
    "backward": ("input", "weight"),
    "operand": ("input", "weight"),
    "codes": ("input", "weight", "grad_output"),
}
OF_INPUT = {"fprop", "wgrad"}  # the products that multiply it
EVERY = 2
SETTINGS = f"[watch]\nevery = {EVERY}\n" + "".join(
    f'\n[[high]]\nsites = ["*_{case}"]\n{table}\n' for case, (table, _) in HIGH.items() if table is not None
)


def program(folder: Path, watched: bool) -> str:
    """Run it into a folder; what went wrong."""
    folder.mkdir()
    (folder / "narrowgauge.toml").write_text(SETTINGS)
    ours = [sys.executable, "-m", "narrowgauge.cli.main", "run", "--config", str(folder / "narrowgauge.toml")]
    command = [sys.executable, str(PROGRAM), str(folder)]
    command = [*ours, "--out", str(folder / "run"), "--", *command] if watched else command
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired as late:
        return f"took longer than {late.timeout} s: {(late.stderr or b'')[-1500:]!r}"
    seconds = f"{time.perf_counter() - began:.0f} s"
    (folder / "stderr.txt").write_text(done.stderr)
    print(f"{folder.name}: {seconds}, exit code {done.returncode}", flush=True)
    return f"exit code {done.returncode} after {seconds}: {done.stderr[-2500:]}" if done.returncode else ""


class Both:
    """What the program made alone, and switched; and the run."""

    def __init__(self, folder: Path) -> None:
        with ThreadPoolExecutor(2) as pool:
            self.failures = dict(
                zip(
                    ("alone", "switched"),
                    pool.map(program, (folder / "alone", folder / "switched"), (False, True)),
                    strict=True,
                )
            )
        self.made = {name: self._read(folder / name / "made.pt") for name in self.failures}
        self.run = open_run(folder / "switched" / "run") if (folder / "switched" / "run").exists() else None

    def _read(self, path: Path) -> dict[str, Any]:
        return torch.load(path, weights_only=True) if path.exists() else {"steps": [], "errors": {}}


def ran(both: Both) -> Iterator[str]:
    """Both ended well, and no layer raised."""
    wrong = [f"{name}: {failure}" for name, failure in both.failures.items() if failure]
    for name, made in both.made.items():
        wrong += [f"{name}, {layer}: {error}" for layer, error in made["errors"].items()]
    yield f"  {len(both.made['alone']['steps'])} and {len(both.made['switched']['steps'])} steps"
    if both.run is not None:
        meta = both.run.meta
        yield f"  switched: {meta.get('switched')}"
        yield from (f"  note: {note}" for note in meta.get("notes", []))
        wrong += [f"unmet: {told}" for told in meta.get("unmet", [])]
    if wrong:
        raise AssertionError("; ".join(wrong))


def differ(found: torch.Tensor, want: torch.Tensor) -> str:
    """In words; "" if they are the same to the bit."""
    if found.shape != want.shape:
        return f"shape {tuple(found.shape)}, expected {tuple(want.shape)}"
    count = int((found != want).sum())
    worst = float((found.float() - want.float()).abs().max() / want.float().abs().max().clamp_min(1e-30))
    return f"{count} of {found.numel()} differ, by {worst:.1e} of the largest" if count else ""


def products(both: Both, recipe: str, kind: str, case: str) -> Iterator[str]:
    """All products of a layer in all steps."""
    name, high, wrong, rounded = f"{recipe}.{kind}_{case}", HIGH[case][1], [], set()
    steps = list(zip(both.made["alone"]["steps"], both.made["switched"]["steps"], strict=True))
    for number, (alone, switched) in enumerate(steps):
        if name not in switched:
            raise AssertionError(f"{name} made nothing in step {number}: {both.made['switched']['errors'].get(name)}")
        fp8, found = alone[f"{recipe}.{kind}_plain"], switched[name]
        recorded = (number + 1) % EVERY == 0
        bf16 = (switched if kind == "mlp" and recorded else alone)[f"none.{kind}_plain"]
        if kind == "mlp" and case == "whole":
            gap = differ(bf16["fprop"], alone["none.mlp_plain"]["fprop"])
            yield f"  step {number}, BF16's output against that of the program alone: {gap or 'the same'}"
        if case in ("codes", "operand"):
            if kind != "linear":  # the same tensors with other scales: only that nothing fails
                bf16 = {}
            elif f"{recipe}: {case}" not in alone:
                raise AssertionError("what the codes stand for was not read")
            else:
                bf16 = alone[f"{recipe}: {case}"]
        for gemm in GEMMS:
            want = bf16.get(gemm) if gemm in high else fp8[gemm]
            if kind == "norm" and gemm not in high and gemm in OF_INPUT and OF_INPUT & set(high):
                want = alone[f"{recipe}.pair_plain"][gemm]
                if differ(want, fp8[gemm]):
                    rounded.add(gemm)
            if want is None:
                continue
            gap = differ(found[gemm], want)
            if gap:
                wrong.append(f"step {number} {gemm}: {gap}")
        if case not in ("plain", "codes") and kind == "linear" and not differ(bf16[high[0]], fp8[high[0]]):
            wrong.append(f"step {number}: {high[0]} would be the same in FP8, so this shows nothing")
        if kind in ("bias", "norm") and number == len(steps) - 1:
            gap = differ(found["others"], fp8["others"])
            yield f"  gradients of its bias and norm against FP8's: {gap or 'the same'}"
    if wrong:
        raise AssertionError("; ".join(wrong[:6]))
    told = f"; of a normed input that is rounded first: {', '.join(sorted(rounded))}" if rounded else ""
    yield f"  {len(steps)} steps: {', '.join(high) or 'nothing'} high, the rest FP8's, bit by bit{told}"


def rows(both: Both, recipe: str) -> Iterator[str]:
    """Which operands of the switched layers were recorded, and that they are those of the plain one."""
    if both.run is None:
        raise AssertionError("there is no run")
    sites, wrong = set(both.run.sites), []
    columns = ("amax", "std", "sqnr_db", "underflow_pct", "scale_max")
    for case, roles in ROLES.items():
        missing = {"input"} if recipe == "blockwise" and case == "fprop" else set()  # by column: not recorded
        missing |= {"grad_output"} if recipe == "blockwise" and case == "dgrad" else set()
        want = {f"{recipe}.linear_{case}:{role}" for role in roles if role not in missing}
        found = {site for site in sites if site.startswith(f"{recipe}.linear_{case}:")}
        if found != want:
            wrong.append(f"{case}: recorded {sorted(found)}, expected {sorted(want)}")
        for site in sorted(found & want):
            plain = site.replace(f"_{case}:", "_plain:")
            table, reference = (both.run.tensors(sites=[s], steps=[4]) for s in (site, plain))
            for column in columns:
                a, b = float(table[column][0]), float(reference[column][0])
                if a != b:
                    wrong.append(f"{site} {column}: {a}, of the plain layer {b}")
    if wrong:
        raise AssertionError("; ".join(wrong))
    yield f"  {', '.join(f'{case}: {len(roles)}' for case, roles in ROLES.items())} operands"


def undone(recipe: Callable[[], Any], table: str, layer: Callable[[], Any]) -> Iterator[str]:
    """Before, during and after a watch in this process; a second microbatch of a kept weight after it, too."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    net = torch.nn.Sequential(layer())
    how = recipe()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    x, dy = (torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step(first: bool | None = None) -> list[torch.Tensor]:
        optimizer.zero_grad()
        mine = x.clone().requires_grad_()
        with te.autocast(enabled=True, recipe=how):
            y = net[0](mine, is_first_microbatch=first)
        y.backward(dy)  # the same, whatever y is: a delayed scale goes on as if nothing had been
        optimizer.step()
        return [y.detach(), mine.grad, *(p.grad.clone() for p in net.parameters())]

    before = [step(True) for _ in range(6)][-1]
    own = [type(q).__name__ for held in net[0].quantizers.values() for q in held]
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "narrowgauge.toml"
        config.write_text(f"[[high]]\n{table}\n")
        with ng.watch(net, out=Path(name) / "run", every=1, config=config) as watching:
            during = step(False)
        meta = open_run(watching.folder).meta
    after = step(False)  # it finds no weight that was kept before, or by others
    if not any(differ(a, b) for a, b in zip(during, before, strict=True)):
        raise AssertionError(f"nothing was switched: {meta.get('switched')} {meta.get('notes')}")
    gaps = [gap for a, b in zip(after, before, strict=True) if (gap := differ(a, b))]
    left = [type(q).__name__ for held in net[0].quantizers.values() for q in held]
    if gaps or left != own or net[0]._forward_pre_hooks or net[0]._forward_hooks:
        raise AssertionError(f"{gaps}; quantizers {left}, before {own}; hooks {list(net[0]._forward_pre_hooks)}")
    yield f"  switched {meta.get('switched')}; afterwards as before, bit by bit"


def cost() -> Iterator[str]:
    """What a switch costs in a step of a layer; not judged."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    from narrowgauge.session.switches import foreign

    how, x = recipes.Float8CurrentScaling(), torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16)
    for tables in ([], [{}], [{"gemms": ["wgrad"]}], [{"gemms": ["fprop"]}], [{"keep": "bf16_gemm"}]):
        layer = te.Linear(2048, 2048, bias=False, params_dtype=torch.bfloat16, device="cuda")
        kept = foreign.switch(layer, tables, torch.nn.Identity(), converting=False) if tables else None
        mine, times = x.clone().requires_grad_(), []
        for _ in range(30):
            torch.cuda.synchronize()
            began = time.perf_counter()
            with te.autocast(enabled=True, recipe=how):
                y = layer(mine)
            y.backward(y.detach())
            launched = time.perf_counter()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began, launched - began))
        whole, host = (sorted(1e3 * t[i] for t in times[10:])[10] for i in (0, 1))
        yield f"  {tables or 'no switch'}: {whole:.2f} ms a step, of which {host:.2f} ms until it is launched"
        if kept is not None:
            kept.undo()


def cases(both: Both) -> Iterator[tuple[str, Callable[[], Iterator[str]]]]:
    """All, by name."""
    yield "the program, alone and switched", partial(ran, both)
    sites = [name for step in both.made["alone"]["steps"][:1] for name in step if ":" not in name]
    for name in sorted(sites):
        recipe, layer = name.split(".")
        kind, case = layer.split("_")
        if recipe != "none":
            yield name, partial(products, both, recipe, kind, case)
    if not sites:
        yield "products", lambda: iter([][0])  # nothing was made: not as it should be
    for recipe in ("delayed", "current", "blockwise"):
        yield f"rows, {recipe}", partial(rows, both, recipe)

    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    linear = partial(te.Linear, 256, 256, bias=False, params_dtype=torch.bfloat16, device="cuda")
    for recipe in (recipes.Float8CurrentScaling, partial(recipes.DelayedScaling, amax_history_len=4)):
        for table in ('sites = ["*"]', 'gemms = ["wgrad"]', 'gemms = ["fprop"]'):
            kind = getattr(recipe, "func", recipe).__name__
            yield f"undone, {kind}, {table}", partial(undone, recipe, table, linear)
    yield "what it costs", cost


def main() -> None:
    began = time.perf_counter()
    lines: list[str] = []
    failed: list[str] = []
    tried = 0
    with tempfile.TemporaryDirectory() as name:
        both = Both(Path(name))
        for name, check in cases(both):
            tried += 1
            at = len(lines)
            lines.append(name)
            try:
                for line in check():
                    lines.append(line)
            except Exception as error:
                failed.append(name)
                lines.append("  FAILED " + " ".join(f"{type(error).__name__}: {error}".split()))
                traceback.print_exc(limit=4)
            print("\n".join(lines[at:]), flush=True)
    lines.append(f"{tried - len(failed)} of {tried} cases as they should be")
    print(lines[-1])
    print("failed:", failed, f"{time.perf_counter() - began:.0f} s")
    further = {"transformer_engine": version("transformer_engine")}
    print(
        transcript("gpu_te_switches", "python -m benchmarks.gpu_check_te_switches", lines, further=further).read_text()
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
