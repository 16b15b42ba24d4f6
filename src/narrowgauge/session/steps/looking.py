"""What is to be known of an optimizer that is about to step: learning rates, its gradients, whether it skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from narrowgauge.compute.nn.scaling.clock import inside_backward
from narrowgauge.compute.nn.tracing.modes import unseen_by_modes
from narrowgauge.errors import let_pass
from narrowgauge.session.steps.clips import Clips
from narrowgauge.session.steps.line import Line
from narrowgauge.session.tensors.norms import Parts, Squares, named

MOST_RATES = 16  # parameter groups whose learning rates are told apart


def look(
    line: Line,
    optimizer: Optimizer,
    clips: Clips,
    in_parts: Callable[[Optimizer], bool],
    trained: Callable[[], Iterable[Tensor]],
    *,
    measures: bool = True,
) -> None:
    """Write it into the step's line.

    Args:
        clips: the norms of each clip since the last step, which are then the step's.
        in_parts: whether other ranks hold more of what an optimizer trains.
        trained: the parameters of all optimizers.
        measures: whether gradients are read for their norm, where the program has not told it by clipping them.
    """
    learning_rates(line, optimizer)
    may_skip(line, optimizer)
    line.clips.join(clips)
    owners: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    if line.clips:
        held = [*chain.from_iterable(group["params"] for group in optimizer.param_groups)]
        owners = line.clips.left_out(held, trained)
    if not measures:
        line.unheard |= any(True for _ in owners)  # whether there are some
    elif read := [*owners]:
        _gradients(line, optimizer, read, in_parts(optimizer))
    if line.movement is not None:
        line.movement.before(optimizer, in_parts=in_parts(optimizer))


def may_skip(line: Line, optimizer: Optimizer) -> None:
    """Write down whether an optimizer skips, if it decides on the device: a fused one under a gradient scaler."""
    found = getattr(optimizer, "found_inf", None)
    if isinstance(found, Tensor):
        before = line.scalars.get("skipped")  # of another optimizer of this step
        found = found.detach().clone()
        line.scalars["skipped"] = found if before is None else found.maximum(torch.as_tensor(before).to(found))


def _gradients(line: Line, optimizer: Optimizer, owners: list[Tensor], in_parts: bool) -> None:
    if inside_backward() and not line.recorded:  # thousands of optimizers, each with a norm of its own
        line.unheard = True
        return
    with torch.no_grad():
        parts = Parts([p.grad for p in owners if p.grad is not None], owners, in_parts=in_parts)
        line.summands += parts.summands
        line.sparse += parts.sparse
        found = parts.squares()
        if found is None:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer unscales as it steps
        if isinstance(scale, Tensor):
            found = found.over(scale.double().square())
        line.unclipped.append((frozenset(map(id, owners)), found))


def gradients(line: Line) -> Mapping[str, Tensor | float]:
    """The gradients' norm of the optimizers that were looked at, or this rank's part of it; nothing if it is not whole.

    Nobody took the norm of what was not clipped where an optimizer steps in backward, or where reading it would take
    too long, unless the step is recorded.
    """
    if line.norm is not None:
        return {"grad_norm": line.norm}
    if line.unheard:
        return {}
    if line.clips:
        return line.clips.norms(line.unclipped)
    found = Squares.of_all([squares for _, squares in line.unclipped])
    return {} if found is None else named("grad", found)


def left_out(summands: int, sparse: int) -> list[str]:
    """What is to be said of so many gradients that are in no norm: no rank had the sum, or they were sparse."""
    notes = []
    if summands:
        notes.append(
            f"Of {summands} {'gradient' if summands == 1 else 'gradients'} each rank had a summand (Partial) as the "
            "optimizer stepped: grad_norm leaves them out. Clipping by torch's clip_grad_norm_ takes the norm of all, "
            "which is then the run's."
        )
    if sparse:
        many = "1 gradient was" if sparse == 1 else f"{sparse} gradients were"
        notes.append(f"{many} sparse (an embedding's, say): grad_norm is that of the others, if there are any.")
    return notes


def learning_rates(line: Line, optimizer: Optimizer) -> None:
    """Write down the learning rates of an optimizer's groups: `lr`, and `lr_0`, `lr_1`, ... if they differ."""
    take_rates(line.rates, optimizer)
    line.scalars.update(named_rates([*line.rates.values()]))


def take_rates(taken: dict[int, float | Tensor], optimizer: Optimizer) -> None:
    """Take the learning rates of an optimizer's groups, by their ids, as far as they are not.

    What is stepped group by group has no parameters in the others meanwhile, and in none before its first step.
    """
    groups = optimizer.param_groups
    if len(groups) > 1:
        groups = [group for group in groups if group["params"]] or groups
    for group in groups:
        rate, at = group.get("lr"), id(group)
        if rate is not None and at not in taken and len(taken) < MOST_RATES:
            number = rate if type(rate) is float else unseen_by_modes(_as_it_is, rate)
            if number is not None:
                taken[at] = number


def _as_it_is(rate: Any) -> float | Tensor | None:
    """The number that it is; None where it is none: an optimizer of the program's own may hold a function there."""
    if isinstance(rate, Tensor):
        return rate.detach().clone() if rate.numel() == 1 else None
    try:
        return float(rate)
    except Exception as error:  # an object may refuse by any
        let_pass(error)
        return None


def named_rates(rates: Sequence[float | Tensor]) -> dict[str, float | Tensor]:
    """Learning rates by their names."""
    if not rates:
        return {}
    named = {"lr": rates[0]}
    differ = isinstance(rates[0], Tensor) and len(rates) > 1  # nobody asks a tensor what it is: a device would wait
    for rate in rates[1:]:
        differ = differ or isinstance(rate, Tensor) or rate != rates[0]
    if differ:
        named.update({f"lr_{number}": rate for number, rate in enumerate(rates)})
    return named
