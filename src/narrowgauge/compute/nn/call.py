"""What one forward of a converted layer decides before autograd takes over.

**Who writes state.** A forward with grad writes amaxes and is observed. One without grad only reads. A
forward inside a backward pass is a recomputed one, and what it saw is only *noted* on its own graph node.
Under non-reentrant checkpointing that node never runs backward (the original does), and the note is dropped;
under reentrant checkpointing the first forward ran without grad and the recomputed node is the one that runs,
and then the note is delivered. So every forward that a backward consumes counts once, shared layers and
nested checkpoints included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.compute.nn.observer import ResultRole, selects
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes

if TYPE_CHECKING:
    from narrowgauge.compute.nn.layer_state import LayerState

Mode = Literal["read", "write", "note", "again"]  # again: what the forward recorded is quantized once more


@dataclass
class Call:
    """One use of a layer; lives on the graph node until its backward."""

    state: LayerState
    compute_dtype: torch.dtype
    mode: Mode
    watched: bool
    turn: int
    checked: ResultRole | None
    notes: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def begin(cls, state: LayerState, compute_dtype: torch.dtype, mode: Mode, captured: bool = False) -> Call:
        """A call in `mode`, watched if the layer's observer wants this step; what is `captured` cannot be watched."""
        if state.table is not None:
            wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)  # whose forward runs
            if wrapper is not None:
                state.table.runs_in(wrapper, captured=captured)
        watched = mode != "read" and state.observer is not None and not captured and state.observer.wants(state.name)
        turn = state.clock.step
        checked = state.result_to_check(turn) if watched else None
        if checked is not None and not selects(state.observer, state.name, checked):
            checked = None
        return cls(state, compute_dtype, mode, watched, turn, checked)

    def shows(self, result: ResultRole) -> bool:
        """Whether a result is looked at: on a GPU only in its turn."""
        if not self.watched or not (result == self.checked or not self.state.backend.watches):
            return False
        return selects(self.state.observer, self.state.name, result)

    def tell(self, note: Callable[[], object]) -> None:
        """Run `note` now, or when the backward pass shows that this forward was not recomputed in vain."""
        if self.mode == "write":
            unseen_by_modes(note)
        elif self.mode == "note":
            self.notes.append(note)

    def deliver(self) -> None:
        """Run the notes; whatever follows is written directly."""
        notes, self.notes, self.mode = self.notes, [], "write"
        for note in notes:
            note()


def compute_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The dtype F.linear would compute in, None if it would refuse."""
    if not (x.is_floating_point() and weight.is_floating_point()):
        return None
    device_type = x.device.type
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if torch.is_autocast_enabled(device_type) and torch.float64 not in dtypes:
        return torch.get_autocast_dtype(device_type)
    return x.dtype if len(dtypes) == 1 else None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Autocast off: what must be float32 in here is float32 on purpose."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
