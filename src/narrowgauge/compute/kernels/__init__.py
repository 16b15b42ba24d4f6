"""Gemms of quantized operands: the exact reference, torch's scaled_mm, our own quantizers before it, and the choice."""

from narrowgauge.compute.kernels.backend import Backend
from narrowgauge.compute.kernels.both import Both, Given
from narrowgauge.compute.kernels.choose import BACKENDS, choose
from narrowgauge.compute.kernels.reference import Reference
from narrowgauge.compute.kernels.scaled_mm import ScaledMM

__all__ = ["BACKENDS", "Backend", "Both", "Given", "Reference", "ScaledMM", "choose"]
