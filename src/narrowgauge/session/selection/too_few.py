"""A program that ended before its first recorded step, and what to write so that the next one does not.

It is no setting that was not met, and nothing that a program lacks: a sentence of its own among a run's facts.
"""

from __future__ import annotations

from narrowgauge.metrics.site import OPERAND_ROLES
from narrowgauge.session.plan import Plan
from narrowgauge.session.selection.selection import Selection


def too_few(plan: Plan, selection: Selection, steps: int, converted: bool) -> str:
    """The sentence; "" if a step was recorded, if none was to be recorded in any case, or if another message says it.

    Args:
        plan: of a program that is watched; a comparison chooses its cadence by the number of steps.
        selection: what its session recorded.
        steps: how many the program made.
        converted: whether layers that narrowgauge converted are looked at.
    """
    if not plan.compiling or not steps or (selection.first is not None and selection.first <= steps):
        return ""
    if plan.watch.get("steps") or _nothing_in_any_case(plan, selection, converted):  # ranges are told as settings
        return ""
    made = f"{steps} step" if steps == 1 else f"{steps} steps"
    write = "every=1" if plan.command == ("ng.watch",) else "--every 1"
    return (
        f"No tensor was recorded: the program made {made}, and tensors are recorded every {plan.every} steps. Write "
        f"`{write}` to record each step."
    )


def _nothing_in_any_case(plan: Plan, selection: Selection, converted: bool) -> bool:
    wishes = [plan.watch.get(key) for key in ("sites", "skip", "roles", "metrics", "ranks")]
    if plan.dump and plan.every == Plan.every and not any(wishes) and (plan.seldom or not plan.what_if):
        return True  # only dumps were asked for
    results_alone = not set(plan.watch.get("roles") or OPERAND_ROLES).intersection(OPERAND_ROLES)
    return selection.sites.closed or not (converted or (plan.judge and not results_alone))
