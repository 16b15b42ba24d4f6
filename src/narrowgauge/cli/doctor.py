"""`narrowgauge doctor`: what this machine can run in FP8, what is emulated, and what to change.

    facts (probed, frozen)  ->  abilities and advice (pure)  ->  a page of text

It always exits with 0: a machine without FP8 hardware is not an error.
"""

from __future__ import annotations

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from narrowgauge.cli.advice import Ability, abilities, advice
from narrowgauge.cli.facts import BF16_FLAGS, Machine, probe

GIB = 2**30


def page(machine: Machine) -> RenderableType:
    """Everything that is known of a machine, ready to print."""
    parts: list[RenderableType] = [_facts(machine)]
    if rows := abilities(machine):
        parts += [Text(), _recipes(rows), Text(), *_reasons(rows)]
    parts += [Text(), Text("What to do", style="bold")]
    parts += [Text(f"- {line}") for line in advice(machine)]
    return Group(*parts)


def doctor(machine: Machine | None = None) -> str:
    """The same page as plain text, 100 columns wide; of this machine unless another one is given."""
    console = Console(width=100, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(page(machine or probe()))
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _facts(machine: Machine) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for gpu in machine.gpus:
        kind = gpu.architecture or "compute capability " + ".".join(map(str, gpu.capability))
        memory = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        grid.add_row("GPU", f"{gpu.name}, {kind}, {memory}")
    if not machine.gpus:
        grid.add_row("GPU", "none that torch can use")
    fast = [flag for flag in BF16_FLAGS if flag in machine.cpu_flags]
    bf16 = f"BF16 by {', '.join(fast)}" if fast else "no BF16 instructions"
    threads = f"{machine.threads} thread{'' if machine.threads == 1 else 's'}"
    grid.add_row("CPU", f"{machine.cpu or 'unknown'}, {threads}, {bf16}")
    if machine.memory_total:
        grid.add_row("memory", f"{machine.memory_free / GIB:.1f} of {machine.memory_total / GIB:.1f} GiB available")
    grid.add_row("torch", f"{machine.torch or 'cannot be imported'}, {_built_for(machine)}")
    grid.add_row("driver", machine.driver or "none")
    grid.add_row("Python", machine.python)
    return grid


def _built_for(machine: Machine) -> str:
    if machine.cuda:
        return f"built for CUDA {machine.cuda}"
    return f"built for ROCm {machine.hip}" if machine.hip else "built for CPUs"


def _recipes(rows: tuple[Ability, ...]) -> Table:
    """One line per recipe: what runs it here, and whether this GPU's tensor cores could."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("recipe", "FP8 is", "backend", "tensor cores"):
        table.add_column(title)
    for row in rows:
        table.add_row(
            row.recipe,
            Text("native", style="green") if row.native else Text("emulated", style="yellow"),
            row.backend,
            row.hardware or "yes",
        )
    return table


def _reasons(rows: tuple[Ability, ...]) -> list[Text]:
    """Why each backend was chosen, recipes with the same reason together."""
    together: dict[str, list[str]] = {}
    for row in rows:
        together.setdefault(f"{row.backend}: {row.reason}", []).append(row.recipe)
    if len(together) == 1:
        return [Text(reason, style="dim") for reason in together]
    return [Text(f"{', '.join(names)} by {reason}", style="dim") for reason, names in together.items()]


@click.command("doctor")
def doctor_command() -> None:
    """What this machine can run in FP8, what is emulated, and what to change."""
    Console(highlight=False).print(page(probe()))
