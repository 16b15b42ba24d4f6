"""Doing a recorded computation again: a loss and its gradients, and no other trace.

    loss, grads = replay(plan, leaves, ...)

Every recorded call runs under its own random states and modes, in its own order, on the values that this replay has
computed. Gradients come from `torch.autograd.grad`, so nothing is accumulated; a model with reentrant activation
checkpoints refuses that, and gets a real backward pass with every `.grad` set aside.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.session.same_weights.ambient import Modes, Rng
from narrowgauge.session.same_weights.frozen_model import ModelState, quiet
from narrowgauge.session.same_weights.plan import Entry, NotMeasurable, Plan
from narrowgauge.session.same_weights.tree import External, tensors, thaw, walk

Gradients = tuple[Tensor | None, ...]


def check_inputs(plan: Plan) -> None:
    """Raise NotMeasurable when a tensor that the computation started from has been written to since."""
    for entry in plan.entries:
        for leaf in walk(entry.args):
            if isinstance(leaf, External) and leaf.version >= 0 and leaf.tensor._version != leaf.version:
                shape = tuple(leaf.tensor.shape)
                raise NotMeasurable(
                    f"an input of {entry.name}, shape {shape}, was changed in place between its use and the end "
                    "of backward"
                )


@contextmanager
def untouched(plan: Plan, leaves: Sequence[Tensor]) -> Iterator[ModelState]:
    """Whatever happens inside, the program finds its random states, model state, hooks and `.grad` as they were."""
    rng, after = Rng.now(), ModelState(plan.roots)
    others = {id(e.tensor): e.tensor for e in plan.externals() if e.tensor.requires_grad and e.tensor.is_leaf}
    others.update((id(p), p) for root in plan.roots for p in root.parameters())
    others.update((id(p), p) for p in leaves)
    with quiet(others.values()):
        try:
            torch.clear_autocast_cache()
            yield after
        finally:
            after.apply()
            torch.clear_autocast_cache()
            rng.restore()


def replay(plan: Plan, leaves: Sequence[Tensor], *, keep_hooks: bool = False) -> tuple[Tensor, Gradients]:
    """The loss and its gradient with respect to `leaves`, computed anew (None where the loss does not depend on one).

    Call it inside of `untouched`, with the modules converted or not. Raises NotMeasurable when the computation takes
    another course than the recorded one.
    """
    try:
        loss = forward(plan, keep_hooks)
        with torch.enable_grad():
            return loss.detach(), torch.autograd.grad(loss, list(leaves), allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
    # A reentrant checkpoint. The attempt has freed parts of the graph, so the forward is needed once more.
    loss = forward(plan, keep_hooks)
    for leaf in leaves:
        leaf.grad = None
    # The session listens at torch.autograd.backward; it must not hear of this one.
    inspect.unwrap(torch.autograd.backward)(loss)
    grads = tuple(leaf.grad for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    return loss.detach(), grads


def forward(plan: Plan, keep_hooks: bool = False) -> Tensor:
    """The loss, with its graph."""
    for state in plan.before:
        state.apply(converted=True)
        state.drop_hooks(keep_users=keep_hooks)
    values: list[Any] = [None] * plan.size
    modes: Modes | None = None
    with ExitStack() as outer:
        current = outer.enter_context(ExitStack())
        for entry in plan.entries:
            if entry.modes != modes:  # one autocast region stays one: leaving it would drop its cache of cast weights
                current.close()
                modes = entry.modes
                current = outer.enter_context(modes.enter())
            if entry.rng is not None:
                entry.rng.restore()
            _step(entry, values)
    loss = values[plan.loss]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise NotMeasurable("replaying the computation did not lead to a scalar loss with gradients")
    return loss


def _step(entry: Entry, values: list[Any]) -> None:
    args, kwargs = thaw(entry.args, values)
    out = entry.call(*args, **kwargs)
    results = [out] if type(out) is float else tensors(out)
    if len(results) != len(entry.outputs):
        raise NotMeasurable(
            f"{entry.name} returned {len(results)} tensors when it was replayed, and {len(entry.outputs)} when recorded"
        )
    for slot, result in zip(entry.outputs, results, strict=True):
        values[slot] = result
    for slot, module, name, key in entry.attributes:
        values[slot] = _attribute(module, name, key)


def _attribute(module: nn.Module, name: str, key: Any) -> Any:
    held = vars(module).get(name)
    if key is None:
        return held
    try:
        return held[key]  # type: ignore[index]
    except (LookupError, TypeError):
        return None
