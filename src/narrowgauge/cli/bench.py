"""`narrowgauge bench`: what FP8 costs and gains on this machine, measured beside BF16 and, if asked, a peer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from narrowgauge.cli.options import check_writable
from narrowgauge.errors import UsageError

if TYPE_CHECKING:
    import torch

    from narrowgauge.bench.result import Result

_STARTED = time.perf_counter()
SIZES = ("1b", "8b-slice", "tiny", "small", "medium", "large")
RECIPES = "current,delayed,rowwise,blockwise"
Command = TypeVar("Command", bound=Callable[..., Any])


def shared_options(command: Command) -> Command:
    """The options that every subject has."""
    for option in (
        click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the JSON to FILE."),
        click.option("--json", "as_json", is_flag=True, help="Print the JSON, and nothing else."),
        click.option(
            "--device",
            type=click.Choice(["cuda", "cpu"]),
            default="cuda",
            show_default=True,
            help="cpu measures tiny shapes, which says that the command works and nothing about speed.",
        ),
    ):
        command = option(command)
    return command


def size_option(command: Command) -> Command:
    """Which model."""
    return click.option(
        "--size", type=click.Choice(SIZES), help="The packaged Llama to train (default: 1b, on a CPU tiny)."
    )(command)


def recipes_option(command: Command) -> Command:
    """Which recipes."""
    return click.option("--recipes", default=RECIPES, show_default=True, help="FP8 recipes, comma-separated.")(command)


def peer_option(command: Command) -> Command:
    """Which peer."""
    return click.option("--peer", metavar="NAME", help="Measure this peer as well: torchao.")(command)


def mode_options(command: Command) -> Command:
    """How every variant runs; compiled if neither is given."""
    for option in (
        click.option(
            "--cuda-graphs", "mode", flag_value="cuda-graphs", help="Every variant with mode='reduce-overhead'."
        ),
        click.option("--eager", "mode", flag_value="eager", help="Every variant without torch.compile."),
    ):
        command = option(command)
    return command


rounds_option = click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="Turns that each variant takes.")


def words(text: str) -> tuple[str, ...]:
    """What stands between the commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def finish(result: Result, as_json: bool, out: Path | None) -> None:
    """Print a result, and write it if asked."""
    if out is not None and not result.reason:
        out.write_text(result.to_json(), encoding="utf-8")
    click.echo(result.to_json() if as_json else result.table(), nl=not as_json)


def keeper(out: Path | None) -> Callable[[Result], None]:
    """Writes what there is so far, so that a benchmark that is ended early leaves it; nothing without a file."""

    def keep(result: Result) -> None:
        if out is not None:
            out.write_text(result.to_json(), encoding="utf-8")

    return keep


def tell(line: str) -> None:
    """How far a benchmark is, for who waits; on stderr, so that stdout is the result alone."""
    click.echo(f"narrowgauge: {time.perf_counter() - _STARTED:4.0f} s: {line}", err=True)


def nothing(benchmark: str, reason: str) -> Result:
    """A result that says why there is none."""
    from narrowgauge.bench.result import Result

    return Result(benchmark, {}, reason=reason)


def rounds_of(rounds: int | None) -> dict[str, Any]:
    """The argument, if it was given; each benchmark has a default of its own."""
    return {} if rounds is None else {"rounds": rounds}


def sides(text: str, names: str) -> tuple[int, ...]:
    """`8192x4096x14336` -> its numbers, as many as `names` has letters; UsageError otherwise."""
    parts = text.lower().split("x")
    if len(parts) != len(names) or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"--shape is {text!r}; expected {'x'.join(names)}, such as {'x'.join(['4096'] * len(names))}.")
    return tuple(int(part) for part in parts)


def device_or_reason(name: str, what: str, out: Path | None) -> tuple[torch.device | None, str]:
    """The device, or None and the line that says what was not measured and how to have it.

    Raises UsageError if `out` cannot be written: better now than after the measurement.
    """
    import torch

    if out is not None:
        check_writable(out)
    if name == "cpu":
        return torch.device("cpu"), ""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), ""
    return None, (
        f"no GPU here, so this was not measured: {what}. Run it on a machine with a CUDA GPU; "
        "--device cpu tries the command out on tiny shapes."
    )


class Subjects(click.Group):
    """Whose subjects end with one message where memory ends."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subject; UsageError if the device has no room for it."""
        try:
            return super().invoke(ctx)
        except RuntimeError as error:  # torch's of a GPU is one of its own, of a CPU's memory it is no other
            said = _OUT_OF_MEMORY.search(str(error))
            if said is None:
                raise
            raise UsageError(
                f"the device has too little memory for this ({said[0]}). Choose a smaller --shape or --size; --out "
                "keeps what step and overhead have measured so far."
            ) from error


_OUT_OF_MEMORY = re.compile(  # what torch says of a GPU, of a CPU, and of what has more bytes than a number of 64 bits
    r"out of memory(\. Tried to allocate [\d.]+ \w+)?|can't allocate memory: you tried to allocate \d+ bytes"
    r"|size calculation overflowed"
)


@click.group("bench", cls=Subjects)
def bench_command() -> None:
    """Measure what FP8 costs and gains on this machine, beside BF16 and, if asked, a peer.

    Without a GPU each subject says in one line what was not measured, and ends with 0.
    """


@bench_command.command("quantize")
@recipes_option
@click.option("--shape", "shapes", multiple=True, metavar="MxK", help="Rows x columns; may be given several times.")
@peer_option
@rounds_option
@shared_options
def quantize_command(
    recipes: str,
    shapes: tuple[str, ...],
    peer: str | None,
    rounds: int | None,
    device: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure amax and quantizing against a plain copy: bytes per second, for every operand of every recipe."""
    wanted = [sides(shape, "MK") for shape in shapes]
    found, reason = device_or_reason(device, "the quantize kernels", out)
    if found is None:
        finish(nothing("quantize", reason), as_json, out)
        return
    from narrowgauge.bench.quantize import bench_quantize

    pairs = [(m, k) for m, k in wanted]
    result = bench_quantize(found, recipes=words(recipes), shapes=pairs, peer=peer, **rounds_of(rounds))
    finish(result, as_json, out)


@bench_command.command("gemm")
@click.option("--shape", "shapes", multiple=True, metavar="MxKxN", help="Tokens x inputs x outputs; several times.")
@click.option("--sweep", is_flag=True, help="Draw the map: where FP8 pays, over a grid of M, K and N.")
@recipes_option
@peer_option
@rounds_option
@shared_options
def gemm_command(
    shapes: tuple[str, ...],
    sweep: bool,
    recipes: str,
    peer: str | None,
    rounds: int | None,
    device: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure a linear layer's three products in FP32, TF32, FP16, BF16 and FP8.

    By default those of the two compared models; with --peer also whole layers, casts included. With --sweep, the
    speed-up of every recipe over BF16 on a grid of shapes, forward and backward, with and without quantizing: what
    convert(skip_slow=...) reads.
    """
    wanted = {shape: sides(shape, "MKN") for shape in shapes}
    if sweep and wanted:
        raise UsageError("--sweep has a grid of its own; leave --shape out.")
    if sweep and peer:
        raise UsageError("--sweep draws the map of our own layers; leave --peer out.")
    found, reason = device_or_reason(device, "the speed map" if sweep else "the products of linear layers", out)
    if found is None:
        finish(nothing("map" if sweep else "gemm", reason), as_json, out)
        return
    from narrowgauge.bench.gemm import bench_gemm
    from narrowgauge.bench.sweep import bench_sweep

    if sweep:
        result = bench_sweep(found, recipes=words(recipes), **rounds_of(rounds))
    else:
        named = {name: (m, n, k) for name, (m, k, n) in wanted.items()}
        result = bench_gemm(found, shapes=named or None, peer=peer, **rounds_of(rounds))
    finish(result, as_json, out)


@bench_command.command("step")
@size_option
@recipes_option
@click.option("--precisions", default="", metavar="LIST", help="Also measure fp32, tf32, fp16, comma-separated.")
@peer_option
@click.option("--brief", is_flag=True, help="Leave out energy and phases, which take longer than the steps.")
@mode_options
@rounds_option
@shared_options
def step_command(
    size: str | None,
    recipes: str,
    precisions: str,
    peer: str | None,
    brief: bool,
    mode: str | None,
    rounds: int | None,
    device: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure a training step: forward, backward and AdamW of the packaged Llama."""
    found, reason = device_or_reason(device, f"step of {size or '1b'} (bf16, {', '.join(words(recipes))})", out)
    if found is None:
        finish(nothing("step", reason), as_json, out)
        return
    from narrowgauge.bench.step import bench_step

    result = bench_step(
        size or ("1b" if found.type == "cuda" else "tiny"),
        found,
        recipes=words(recipes),
        precisions=words(precisions),
        peer=peer,
        mode=mode or "compiled",
        brief=brief,
        tell=tell,
        keep=keeper(out),
        **rounds_of(rounds),
    )
    finish(result, as_json, out)


@bench_command.command("overhead")
@size_option
@recipes_option
@peer_option
@mode_options
@rounds_option
@shared_options
def overhead_command(
    size: str | None,
    recipes: str,
    peer: str | None,
    mode: str | None,
    rounds: int | None,
    device: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure what watching costs: a step with every statistic recorded, every step and every ten."""
    found, reason = device_or_reason(device, f"the watched step of {size or '1b'} ({', '.join(words(recipes))})", out)
    if found is None:
        finish(nothing("overhead", reason), as_json, out)
        return
    from narrowgauge.bench.overhead import bench_overhead

    name = size or ("1b" if found.type == "cuda" else "tiny")
    ways: dict[str, Any] = {"mode": mode or "compiled", "tell": tell, "keep": keeper(out), **rounds_of(rounds)}
    result = bench_overhead(name, found, recipes=words(recipes), peer=peer, **ways)
    finish(result, as_json, out)
