"""FP8 linear layers: convert a model and turn it back, see what was done, save and restore its scales."""

from narrowgauge.compute.nn.conversion.convert import convert, revert
from narrowgauge.compute.nn.conversion.report import ConversionReport
from narrowgauge.compute.nn.conversion.rules import O1, O2, Rule
from narrowgauge.compute.nn.linear import Fp8Linear, clock_of, set_observer
from narrowgauge.compute.nn.observer import GemmSample, Observer
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.nn.scaling_state import load_scaling_state, scaling_state

__all__ = [
    "O1",
    "O2",
    "ConversionReport",
    "Fp8Linear",
    "GemmSample",
    "Observer",
    "Rule",
    "StepClock",
    "clock_of",
    "convert",
    "load_scaling_state",
    "revert",
    "scaling_state",
    "set_observer",
]
