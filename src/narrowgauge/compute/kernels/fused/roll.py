"""The end of a step for every delayed and static scale of a model, in one launch: one program per site.

    history_s <- [amax_now_s, history_s[:-1]]        only sites with data
    assumed_s  = max(history_s[:window_s]) or history_s[0]
    inv_scale_s = rule(assumed_s), scale_s = 1 / inv_scale_s      kept when assumed_s is 0, and where it is not the turn
    amax_now_s <- -1

Thirty small operations by torch take the host half a millisecond, at the one place where it has nothing to hide behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class RollRules:
    """How each site's scale follows from its history; all [S], on the table's device.

    goal: what the assumed amax is scaled to, float32. floor: the least amax, float32. window: steps that are looked
    back on, int32. every: the scale changes in the steps that this divides, 0 is never, int32. pow2: 1 where inv_scale
    is rounded down to a power of two, int32.
    """

    goal: Tensor
    floor: Tensor
    window: Tensor
    every: Tensor
    pow2: Tensor


@triton.jit
def _roll(
    history_ptr, amax_now_ptr, scale_ptr, inv_scale_ptr, goal_ptr, floor_ptr, window_ptr, every_ptr, pow2_ptr,
    width, steps, BLOCK: tl.constexpr,
):  # fmt: skip
    site = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    row_ptr = history_ptr + site * width
    now = tl.load(amax_now_ptr + site)
    has_data = now >= 0
    shifted = tl.load(row_ptr + at - 1, mask=(at > 0) & (at < width), other=0.0)
    kept = tl.load(row_ptr + at, mask=at < width, other=0.0)
    rolled = tl.where(has_data, tl.where(at == 0, now, shifted), kept)
    assumed = tl.max(tl.where(at < tl.load(window_ptr + site), rolled, 0.0), 0)
    tl.debug_barrier()  # everything is read before anything is overwritten
    tl.store(row_ptr + at, rolled, mask=at < width)
    tl.store(amax_now_ptr + site, -1.0)

    safe = tl.maximum(tl.where(assumed > 0, assumed, 1.0), tl.load(floor_ptr + site))
    fresh = tl.math.div_rn(tl.load(goal_ptr + site), safe)
    fresh = tl.minimum(tl.maximum(fresh, 1.1754943508222875e-38), 3.4028234663852886e38)
    lowered = (fresh.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    fresh = tl.where(tl.load(pow2_ptr + site) != 0, lowered, fresh)
    every = tl.load(every_ptr + site)
    turn = (every > 0) & (steps % tl.maximum(every, 1) == 0) & (assumed > 0)
    tl.store(inv_scale_ptr + site, fresh, mask=turn)
    tl.store(scale_ptr + site, tl.math.div_rn(1.0, fresh), mask=turn)


def roll(history: Tensor, amax_now: Tensor, scale: Tensor, inv_scale: Tensor, rules: RollRules, steps: int) -> None:
    """Roll history [S, H]; scale, inv_scale and amax_now [S] follow, all float32 and in place.

    `amax_now` is finite, or negative without data; `steps` counts the steps, this one included.
    """
    sites, width = history.shape
    if not sites:
        return
    with torch.cuda.device_of(history):  # kernels run on the current device
        _roll[(sites,)](
            history, amax_now, scale, inv_scale, rules.goal, rules.floor, rules.window, rules.every, rules.pow2,
            width, steps, triton.next_power_of_2(max(width, 2)), num_warps=4,
        )  # fmt: skip
