"""What is said, once, when training goes on with scales that it should not have: new ones, or for ever the first.

Scales that start afresh do no lasting harm (a delayed history fills again in its own length), but a run
resumed without them is no longer the same run, bit for bit, and nobody would notice. Scales that never advance
saturate as soon as amaxes have grown.
"""

from __future__ import annotations

import warnings

from torch.optim import Optimizer

from narrowgauge.errors import NarrowgaugeWarning


def warn_lost(name: str) -> None:
    """Say that training goes on with fresh scales after weights were loaded without their scaling state."""
    warnings.warn(
        f"weights were loaded into a converted model without their scaling state (first: {name!r}), so its "
        "scales start again from the next tensors. To continue a run bit for bit, load the state_dict as the "
        "model gave it (torch.save keeps the scaling state; dict(...) and safetensors drop it), or save "
        "narrowgauge.scaling_state(model) beside it and call narrowgauge.load_scaling_state after loading.",
        NarrowgaugeWarning,
        stacklevel=2,
    )


def warn_fresh_after(steps: int) -> None:
    """Say that an optimizer came with a past and the scales did not."""
    warnings.warn(
        f"the optimizer has already taken {steps} step{'s' * (steps > 1)}, but the model's scales are new. If this "
        "resumes an FP8 run, its scaling state was not loaded: convert the model before load_state_dict, or call "
        "narrowgauge.load_scaling_state(model, checkpoint). If training switches to FP8 here, all is well.",
        NarrowgaugeWarning,
        stacklevel=2,
    )


def warn_unowned(steps: int) -> None:
    """Say that optimizers step, but never one that owns a parameter of the model whose scales wait for it."""
    warnings.warn(
        f"optimizers took {steps} steps, none of which owned a parameter of the converted model, so its scales do not "
        "advance. If it is trained through master copies of its parameters, or is frozen and only passes gradients "
        "on, use a recipe that keeps no scales between steps: 'current', 'rowwise' or 'blockwise'.",
        NarrowgaugeWarning,
        stacklevel=2,
    )


def warn_joined() -> None:
    """Say that ranks which may run out of data keep their scales to themselves."""
    warnings.warn(
        "inside of DistributedDataParallel's join() some ranks may have no data left, so amaxes are not reduced over "
        "the ranks there: each has scales of its own. To have them the same, give all ranks as many batches.",
        NarrowgaugeWarning,
        stacklevel=2,
    )


def steps_taken(optimizer: Optimizer) -> int:
    """How many steps the optimizer counts; 0 when it keeps no count (plain SGD)."""
    counts = (state.get("step", 0) for state in optimizer.state.values() if isinstance(state, dict))
    return max((int(count) for count in counts), default=0)
