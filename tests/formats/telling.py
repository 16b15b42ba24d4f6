"""What every test of the formats looks at: all values, all ties, their neighbours, all specials."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from narrowgauge.formats import Format, codec


def magnitudes(fmt: Format) -> npt.NDArray[np.float64]:
    """Every finite magnitude, ascending, then the next one that the format would have had."""
    finite = [codec.decode(code, fmt) for code in range(fmt.max_code + 1)]
    step = finite[-1] - finite[-2] if fmt.mantissa_bits else finite[-1]
    return np.array([*finite, finite[-1] + step])


def telling_values(fmt: Format) -> npt.NDArray[np.float32]:
    """Every value, every midpoint of two, each one's float32 neighbours, and the specials; both signs."""
    exact = magnitudes(fmt)
    with np.errstate(over="ignore"):
        points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2, [fmt.flush_below, fmt.max * 1.5]])
        points = points.astype(np.float32)
        near = [np.nextafter(points, np.float32(side)) for side in (np.inf, -np.inf)]
    values = np.concatenate([points, *near, np.float32([0.0, np.inf, 1e-45, 1e38])])
    values = values[~np.isnan(values)]
    signed = np.concatenate([values, -values])
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001], np.uint32).view(np.float32)
    return np.concatenate([signed, nans]) if fmt.has_nan else signed
