"""What a program that trains has, and one was not seen to have."""

from __future__ import annotations

from narrowgauge.session.models.roots import Roots
from narrowgauge.session.steps.updates import Updates


def not_found(
    optimizers: int,
    steps: int,
    roots: Roots,
    updates: Updates,
    *,
    scripted: bool,
    others: bool,
    converting: bool,
    elsewhere: bool,
    estimates: bool,
    forks: int,
    closed: bool,
    gone: int | None,
) -> list[str]:
    """One sentence for each; empty if everything was found.

    Args:
        optimizers, steps: how many were made.
        roots, updates: the session's.
        scripted: whether a model that trains is TorchScript.
        others: whether an optimizer holds parameters of other models alone than the one that was to be watched.
        converting: whether something was to be converted.
        elsewhere: whether another rank has a loss.
        estimates: whether an optimizer was made on the meta device.
        forks: how many children this process forked.
        closed: whether something ran that was compiled before anybody listened.
        gone: steps made when the model that was to be watched was gone and others trained; None if it never was.
    """
    found: list[str] = []
    if others and not optimizers:
        found.append(
            "No optimizer of the watched model was found: those that there are hold none of its parameters (was one of "
            "the two made anew, by a cell that ran again?). Make the optimizer of this model's parameters, or call "
            "ng.watch with the model that they train. No step was seen."
        )
    elif not optimizers:
        found.append("No optimizer was found: none that derives from torch.optim.Optimizer was made. No step was seen.")
    elif not steps:
        beside = " One was made on the meta device, where nothing is trained." if estimates else ""
        whose = " of the watched model" if others else ""
        if forks:
            beside += (
                " What a forked child trains is not seen where its optimizer was made before the fork: make it in the "
                "child, or start the child by spawn."
            )
        found.append(f"No step was seen: no torch.optim optimizer{whose} stepped.{beside}")
    if steps and not roots.taken:
        why = (
            "no module that owns what the optimizers train was called with gradients on (a forward(...) that is called "
            "by name, or under a transform of torch.func, is not heard)."
        )
        if closed:  # the model may well be inside of it
            why = "what calls it was compiled before the watch began. Call torch.compile after ng.watch."
        if scripted:
            why = "what is trained is TorchScript, whose modules take no hooks."
        found.append(f"No model was found: {why}{' Nothing was converted.' if converting else ''}")
    if gone is not None:
        found.append(
            f"The watched model was gone after step {gone}: what trained behind it is another model (made anew by a "
            "cell that ran again?), which was not watched. Call ng.watch with that one, or without a model."
        )
    if elsewhere:
        return found
    if steps and not updates.backwards:
        found.append("No loss was found: backward was never called (torch.autograd.grad and torch.func are not heard).")
    elif steps and not updates.losses.numbers:
        found.append("No loss was found: backward was called on no scalar.")
    return found
