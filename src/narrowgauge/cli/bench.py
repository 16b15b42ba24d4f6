"""`narrowgauge bench`: what FP8 costs and gains on this machine, measured beside BF16 and, if asked, a peer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    import torch

    from narrowgauge.bench.result import Result

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


def words(text: str) -> tuple[str, ...]:
    """What stands between the commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def finish(result: Result, as_json: bool, out: Path | None) -> None:
    """Print a result, and write it if asked."""
    if out is not None and not result.reason:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(result.to_json(), encoding="utf-8")
    click.echo(result.to_json() if as_json else result.table(), nl=not as_json)


def device_or_reason(name: str, what: str) -> tuple[torch.device | None, str]:
    """The device, or None and the line that says what was not measured and how to have it."""
    import torch

    if name == "cpu":
        return torch.device("cpu"), ""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), ""
    return None, (
        f"no GPU here, so this was not measured: {what}. Run it on a machine with a CUDA GPU; "
        "--device cpu tries the command out on tiny shapes."
    )


@click.group("bench")
def bench_command() -> None:
    """Measure what FP8 costs and gains on this machine, beside BF16 and, if asked, a peer.

    Without a GPU each subject says in one line what was not measured, and ends with 0.
    """


@bench_command.command("step")
@size_option
@recipes_option
@click.option("--precisions", default="", metavar="LIST", help="Also measure fp32, tf32, fp16, comma-separated.")
@peer_option
@click.option("--eager", "mode", flag_value="eager", help="Every variant without torch.compile.")
@click.option("--cuda-graphs", "mode", flag_value="cuda-graphs", help="Every variant with mode='reduce-overhead'.")
@click.option("--rounds", type=click.IntRange(min=1), default=6, show_default=True, help="Turns of each variant.")
@shared_options
def step_command(
    size: str | None,
    recipes: str,
    precisions: str,
    peer: str | None,
    mode: str | None,
    rounds: int,
    device: str,
    as_json: bool,
    out: Path | None,
) -> None:
    """Measure a training step: forward, backward and AdamW of the packaged Llama."""
    from narrowgauge.bench.result import Result
    from narrowgauge.bench.step import bench_step

    found, reason = device_or_reason(device, f"step of {size or '1b'} (bf16, {', '.join(words(recipes))})")
    if found is None:
        finish(Result("step", {"size": size, "recipes": words(recipes)}, reason=reason), as_json, out)
        return
    result = bench_step(
        size or ("1b" if found.type == "cuda" else "tiny"),
        found,
        recipes=words(recipes),
        precisions=words(precisions),
        peer=peer,
        mode=mode or "compiled",
        rounds=rounds,
    )
    finish(result, as_json, out)
