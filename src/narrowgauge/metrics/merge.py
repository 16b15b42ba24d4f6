"""The merge law in numpy, float64: the oracle for the one that runs on the device.

Groups of central moments, k parts at once: n = sum n_i, mean = sum n_i mean_i / n, delta_i = mean_i - mean, and

    M2 = sum  M2_i + n_i delta_i^2
    M3 = sum  M3_i + 3 delta_i M2_i + n_i delta_i^3
    M4 = sum  M4_i + 4 delta_i M3_i + 6 delta_i^2 M2_i + n_i delta_i^4

which for k = 2 is the pairwise law of Chan, Golub and LeVeque (1979), extended to higher powers by Pébay
(SAND2008-6212).
A part of zeros alone brings no scale, and one that holds Inf or NaN no ratio of amaxes: its own is no number.
Every term that squares delta is added, never subtracted: a wrong sign there makes a variance negative.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from narrowgauge.metrics.layout import MOMENTS, Layout

Vector = npt.NDArray[np.float64]


def merge(parts: Vector, layout: Layout = MOMENTS) -> Vector:
    """One vector that says what all the parts say together.

    Args:
        parts: [P, ..., width] packed moments of P tiles, microbatches or ranks; `layout.empty()` for no data.
        layout: what the slots are.

    Returns:
        [..., width] float64.
    """
    parts = np.array(parts, dtype=np.float64)
    parts[parts[..., layout["amax"]] == 0, layout.scales] = layout.neutral[layout.scales]
    ratio = parts[..., layout["amax_ratio"]]
    ratio[_spoiled(parts, layout) & ~(ratio < np.inf)] = -np.inf
    out = parts.sum(0)
    for law, reduce in (("min", np.min), ("max", np.max)):
        columns = list(layout.columns(law))
        out[..., columns] = reduce(parts[..., columns], axis=0)
    for names in layout.groups:
        out[..., [layout[name] for name in names]] = _group(*(parts[..., layout[name]] for name in names))
    return np.asarray(out)


def _spoiled(parts: Vector, layout: Layout) -> npt.NDArray[np.bool_]:
    return np.asarray(parts[..., layout["nan_count"]] + parts[..., layout["inf_count"]] > 0)


def _group(n: Vector, mean: Vector, m2: Vector, m3: Vector | None = None, m4: Vector | None = None) -> Vector:
    """Merge of one group over axis 0: [P, ...] each -> [..., 3 or 5]."""
    total = n.sum(0)
    center = (n * mean).sum(0) / np.maximum(total, 1)
    delta = np.where(n > 0, mean - center, 0.0)
    merged = [total, center, (m2 + n * delta**2).sum(0)]
    if m3 is not None and m4 is not None:
        merged.append((m3 + 3 * delta * m2 + n * delta**3).sum(0))
        merged.append((m4 + 4 * delta * m3 + 6 * delta**2 * m2 + n * delta**4).sum(0))
    return np.stack(merged, -1)
