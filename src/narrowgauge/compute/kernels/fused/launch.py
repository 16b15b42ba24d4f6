"""Launching a kernel again: what Triton found out about its arguments the first time is not found out again.

    kernel[(programs,)](...)        inspects all arguments and every global that the kernel names
    Launch(kernel, programs, ...)   the first time the same; from then on a look into a small dictionary
    launch(kernel, programs, ...)   finds the Launch of these sizes and constants, or makes it
    again(x, x.data_ptr(), late)    a launch once more, for a first tensor that lies elsewhere: nothing is looked up

A compiled kernel serves all arguments of which Triton would say the same: dtypes, whether an address is a multiple of
16, whether an integer is 1 or a multiple of 16, constants. What is looked up by here is finer: the integers themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs

from narrowgauge.compute.kernels.fused.rules import INTERPRETED

LAUNCHER_OF = "3.6."  # the version of Triton whose launcher is known
MOST = 8192  # launches remembered: sequence lengths that never come back would else pile up
_LAUNCHES: dict[Hashable, Launch] = {}


class Again:
    """Launches once more, one behind the other, on the device that they were made on: it has to be the current one.

    All tensors are those of before but the first, which has to lie as that one did, its address modulo 16 too.
    """

    __slots__ = ("_device", "_made", "_runs")

    def __init__(self, device: int, *made: Made) -> None:
        self._device, self._made = device, made
        self._runs = tuple(
            (each.run, each.programs, each.facts, (*each.before, *each.ahead), each.numbered, each.after)
            for each in made
        )

    def __call__(self, first: Tensor, place: int, late: tuple[int, ...]) -> None:
        """Run them on the current stream. `place` is the address of `first`; `late` as in `Launch`."""
        if INTERPRETED:
            for made in self._made:
                made.launch((first, *made.rest), (*made.ahead, *late) if made.numbered else made.ahead)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if _somebody_profiles():
            for made in self._made:
                more = (*made.ahead, *late) if made.numbered else made.ahead
                made.compiled[(made.programs, 1, 1)](place, *made.before, *more, *made.after, stream=stream)
            return
        for run, programs, facts, before, numbered, after in self._runs:
            if numbered:
                run(programs, 1, 1, stream, *facts, place, *before, *late, *after)
            else:
                run(programs, 1, 1, stream, *facts, place, *before, *after)

    def then(self, other: Again) -> Again:
        """These, and others behind them."""
        return Again(self._device, *self._made, *other._made)

    def told(self, *ahead: int) -> Again:
        """These, told integers ahead of all `late` ones."""
        return Again(self._device, *[made._replace(ahead=(*ahead, *made.ahead)) for made in self._made])

    def alone(self) -> Again:
        """These, told nothing late."""
        return Again(self._device, *[made._replace(numbered=False) for made in self._made])


class Made(NamedTuple):
    """A launch that was made: of what, by what, with what; `rest` holds the tensors that `before` has addresses of."""

    launch: Launch
    compiled: Any
    run: Callable[..., None]
    programs: int
    facts: tuple[Any, ...]
    before: tuple[Any, ...]
    ahead: tuple[int, ...]
    numbered: bool
    after: tuple[Hashable, ...]
    rest: tuple[Tensor | None, ...]


class Launch:
    """A kernel with all that it is launched with but its tensors, whose dtypes are the same in every call.

    Args:
        kernel: a `triton.jit` function with its parameters in this order: tensors, sizes, late, constants.
        programs: how many run.
        sizes: integers.
        constants: its `tl.constexpr` parameters.
        options: of the compiler.
    """

    __slots__ = ("_constants", "_kernel", "_options", "_programs", "_ready", "_sizes")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        sizes: tuple[int, ...],
        constants: tuple[Hashable, ...],
        **options: int | None,
    ) -> None:
        self._kernel, self._programs, self._options = kernel, programs, options
        self._sizes, self._constants = sizes, constants
        self._ready: dict[Hashable, Any] = {}

    def __call__(self, tensors: Sequence[Tensor | None], late: Sequence[int] = ()) -> None:
        """Run it on the current device and stream.

        `tensors` are where it reads and writes, None where it does not; `late` the integers that it declares in
        `do_not_specialize`.
        """
        if INTERPRETED:
            self._kernel[(self._programs,)](*tensors, *self._sizes, *late, *self._constants, **self._options)
            return
        device = torch._C._cuda_getDevice()
        places = [None if t is None else t.data_ptr() for t in tensors]
        key = (device, *[place and place & 15 for place in places])
        compiled = self._ready.get(key)
        if compiled is None:
            compiled = self._kernel[(self._programs,)](*tensors, *self._sizes, *late, *self._constants, **self._options)
            self._ready[key] = compiled
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        if _somebody_profiles():
            compiled[(self._programs, 1, 1)](*places, *self._sizes, *late, *self._constants, stream=stream)
            return
        compiled.run(
            self._programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
            *places, *self._sizes, *late, *self._constants,
        )  # fmt: skip

    def again(self, tensors: Sequence[Tensor | None]) -> Again | None:
        """What launches it once more as it was with these tensors, which it keeps; None if it never was."""
        rest = tuple(tensors[1:])
        if INTERPRETED:
            return Again(-1, Made(self, None, _nothing, 0, (), (), (), True, (), rest))
        device = torch._C._cuda_getDevice()
        places = [None if t is None else t.data_ptr() for t in tensors]
        compiled = self._ready.get((device, *[place and place & 15 for place in places]))
        if compiled is None:
            return None
        run, facts = _launcher(compiled)
        before, after = (*places[1:], *self._sizes), self._constants
        return Again(device, Made(self, compiled, run, self._programs, facts, before, (), True, after, rest))


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor | None],
    sizes: tuple[int, ...],
    constants: tuple[Hashable, ...],
    late: Sequence[int] = (),
    **options: int | None,
) -> None:
    """Run kernel[(programs,)](*tensors, *sizes, *late, *constants, **options), everything as for `Launch`.

    The options have to follow from sizes and constants.
    """
    key = (id(kernel), programs, sizes, constants, *[None if t is None else t.dtype for t in tensors])
    known = _LAUNCHES.get(key)
    if known is None:
        if len(_LAUNCHES) >= MOST:
            _LAUNCHES.clear()
        known = _LAUNCHES[key] = Launch(kernel, programs, sizes, constants, **options)
    known(tensors, late)


def _launcher(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What launches a kernel, and what it is told between the stream and the arguments.

    Triton's launcher asks each time, in Python, for the room that a kernel may need. Of a version that is known, one
    that needs none is launched by what the launcher ends in.
    """
    run, function, facts = compiled.run, compiled.function, (compiled.packed_metadata, None, None, None)
    needs = getattr(run, "global_scratch_size", None), getattr(run, "profile_scratch_size", None)
    if needs == (0, 0) and triton.__version__.startswith(LAUNCHER_OF) and type(run).__name__ == "CudaLauncher":
        return run.launch, (function, run.launch_cooperative_grid, run.launch_pdl, None, None, *facts)
    return run, (function, *facts)


def _nothing(*args: Any) -> None:
    """Where Triton's interpreter runs, nothing is launched."""


def _somebody_profiles() -> bool:
    """Whether somebody asked Triton to be told of every launch, as its profiler does."""
    hook: Any = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))  # a chain of them, or one or None in other versions
