"""Scaling state rides along in `state_dict`, beside the weights and without a key of its own.

    state_dict()._metadata[module]["narrowgauge"] = {history [3, H], scale, inv_scale, amax_now [3], steps []}

`_metadata` is where torch keeps each module's version: `torch.save` writes it, `torch.load` reads it (also
with `weights_only=True`), and a model that knows nothing of narrowgauge ignores it. So the keys are those of
the plain model, and checkpoints load strictly both ways. What drops it is whatever rebuilds the dict:
`dict(state)`, safetensors, sharded checkpoints; those use `scaling_state` and `load_scaling_state`.

Loading before converting works too: a plain `nn.Linear` would ignore the state, so once this module is
imported it keeps it aside until `convert` asks. Loading weights *without* state into a layer that has some
starts its scales afresh, because they belong to other weights, and the next training step says so once.

Legend: H = history; the 3 rows are input, weight, grad_output.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from narrowgauge.compute.nn.parallel.wrapped import class_of
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling.scale_table import ScaleTable
from narrowgauge.errors import ShapeError

KEY = "narrowgauge"
_PENDING = "_narrowgauge_pending"


class Stateful(Protocol):
    """What is needed of a converted layer's state."""

    name: str
    table: ScaleTable | None
    clock: StepClock


def saved_from(state: Stateful) -> dict[str, Tensor]:
    """What is saved of a layer; empty without scales of its own. A step that is over is ended first.

    Unless its end takes other ranks, of which one may be saving alone: then the step is saved as one that still runs.
    """
    if state.table is None or not state.table.asks_others:
        state.clock.catch_up()
    return {} if state.table is None else state.table.state(state.name)


def restore_to(state: Stateful, saved: dict[str, Tensor]) -> None:
    """Load what `saved_from` gave; ShapeError if it does not fit. The step that was running goes on."""
    if state.table is not None:
        state.table.load(state.name, saved)
        if (saved["amax_now"] >= 0).any():
            state.clock.saw_data()


def save_into(destination: Any, prefix: str, state: Stateful) -> None:
    """Put the layer's scaling state into the metadata of a state_dict being made."""
    metadata = getattr(destination, "_metadata", None)
    if state.table is not None and metadata is not None:
        metadata.setdefault(prefix[:-1], {})[KEY] = saved_from(state)


def load_from(state: Stateful, metadata: dict[str, Any], has_weight: bool, errors: list[str]) -> None:
    """Restore the layer's scaling state from a module's metadata, or start it afresh with its new weight."""
    if state.table is None:
        return
    saved = metadata.get(KEY)
    if saved is not None:
        try:
            restore_to(state, saved)
        except ShapeError as error:
            errors.append(f"{error} Loading dict(state_dict) drops it.")
    elif has_weight:
        state.table.reset(state.name)
        state.table.lost = state.table.lost or state.name


def take_pending(module: nn.Module) -> dict[str, Tensor] | None:
    """The scaling state that was loaded into this module while it was a plain layer; asked once."""
    pending: dict[str, Tensor] | None = module.__dict__.pop(_PENDING, None)
    return pending


def _keep_for_later(
    module: nn.Linear, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any, **named: Any
) -> None:
    # Not nn.Module's: what the program's class has behind nn.Linear may load in its own way.
    super(nn.Linear, module)._load_from_state_dict(state_dict, prefix, local_metadata, *rest, **named)
    if class_of(module) is not nn.Linear:
        return
    module.__dict__.pop(_PENDING, None)
    if KEY in local_metadata:
        module.__dict__[_PENDING] = {k: v.detach().clone() for k, v in local_metadata[KEY].items()}


# The only place where torch lets a plain layer see its metadata; there is no hook for all modules.
nn.Linear._load_from_state_dict = _keep_for_later  # type: ignore[method-assign,assignment]
