"""Which kernels and which pauses a watched step adds: the same step profiled unwatched and watched, in turn.

    busy      milliseconds per step in which any kernel ran        pauses   in which none did, between first and last
    kernels   milliseconds and launches per step, unwatched -> watched, where they differ most

A GPU that has rested is faster or slower for some steps, so a pair of profiles comes twice, and the second one counts.
The wall's own times stand above it, of ten steps in turn, not profiled. The transcript goes to results/.

python -m benchmarks.gpu_watched_kernels [--size 8b-slice] [--recipes rowwise,blockwise]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from benchmarks.record import transcript

from narrowgauge.bench.overhead import BLOCK, WARM
from narrowgauge.bench.phases import Kernel, kernels_of, phase_of, union
from narrowgauge.bench.shapes import sized
from narrowgauge.bench.timing import interleave
from narrowgauge.bench.variants import Stepper, Variant, many_graphs
from narrowgauge.bench.watched import Watched

STEPS = 6
MOST = 16
DEVICE = torch.device("cuda")
Table = dict[str, tuple[float, float]]  # by a kernel's name: milliseconds and launches per step


def table(found: Sequence[Kernel]) -> Table:
    """What each kernel took, per step."""
    sums: Table = {}
    for name, begin, end in found:
        ms, launches = sums.get(name, (0.0, 0.0))
        sums[name] = (ms + (end - begin) / STEPS, launches + 1 / STEPS)
    return sums


def told(name: str, found: Sequence[Kernel]) -> str:
    """A profile in a line."""
    span = (max(end for *_, end in found) - min(begin for _, begin, _ in found)) / STEPS
    busy, by_phase = union(found) / STEPS, dict[str, float]()
    for kernel, (ms, _) in table(found).items():
        by_phase[phase_of(kernel)] = by_phase.get(phase_of(kernel), 0.0) + ms
    phases = ", ".join(f"{phase} {ms:.2f}" for phase, ms in sorted(by_phase.items(), key=lambda item: -item[1]))
    return f"  {name}: busy {busy:.2f} ms, pauses {span - busy:.2f} ms, {len(found) / STEPS:.0f} launches; {phases}"


def compared(plain: Table, watched: Table) -> Iterator[str]:
    """The kernels that differ most, largest first."""
    none = (0.0, 0.0)
    more = {name: watched.get(name, none)[0] - plain.get(name, none)[0] for name in plain | watched}
    for name in sorted(more, key=lambda name: -abs(more[name]))[:MOST]:
        (ms, launches), (ms_watched, launches_watched) = plain.get(name, none), watched.get(name, none)
        yield (
            f"    {more[name]:+.3f} ms   {ms:.3f} in {launches:.0f} -> {ms_watched:.3f} in {launches_watched:.0f}"
            f"   {name[:80]}"
        )


def measured(size: str, recipe: str) -> Iterator[str]:
    """A recipe's lines."""
    with ExitStack() as stack, many_graphs():
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        plain = Stepper(Variant(recipe, recipe=recipe), sized(size), DEVICE)
        watched = Watched(Stepper(plain.variant, sized(size), DEVICE, like=plain), 1, folder)
        stack.callback(watched.close)
        calls: dict[str, Callable[[], None]] = {"unwatched": plain, "watched": watched}
        for call in calls.values():
            for _ in range(WARM):
                call()
        took = interleave(calls, DEVICE, rounds=6, block=BLOCK, lead=2)
        yield f"{size}, {recipe}, every step"
        for name, timing in took.items():
            yield f"  {name}: {timing.median:.2f} ms ({timing.p10:.2f} to {timing.p90:.2f}), host {timing.host:.1f} ms"
        for _ in range(2):
            profiles = {name: kernels_of(call, DEVICE, STEPS) for name, call in calls.items()}
        yield from (told(name, found) for name, found in profiles.items())
        yield from compared(*(table(found) for found in profiles.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="8b-slice")
    parser.add_argument("--recipes", default="rowwise,blockwise")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="no GPU here, so nothing was measured\n")
    command = f"python -m benchmarks.gpu_watched_kernels --size {args.size} --recipes {args.recipes}"
    lines = [line for recipe in args.recipes.split(",") for line in measured(args.size, recipe)]
    print(transcript(f"watched_kernels_{args.size}", command, lines).read_text())


if __name__ == "__main__":
    main()
