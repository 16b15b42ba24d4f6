"""One function per picture: plain arrays in, a Bokeh figure out. No file, no torch, no global state."""

from narrowgauge.observe.figures.exponents import exponent_histogram
from narrowgauge.observe.figures.gap import loss_gap
from narrowgauge.observe.figures.gradients import gradient_errors
from narrowgauge.observe.figures.heatmap import METRICS, HeatMetric, heatmap
from narrowgauge.observe.figures.loss import loss_curves
from narrowgauge.observe.figures.palette import DARK, variant_colors
from narrowgauge.observe.figures.scales import scale_steps, scale_traces
from narrowgauge.observe.figures.traces import Trace, shared_steps

__all__ = [
    "DARK",
    "METRICS",
    "HeatMetric",
    "Trace",
    "exponent_histogram",
    "gradient_errors",
    "heatmap",
    "loss_curves",
    "loss_gap",
    "scale_steps",
    "scale_traces",
    "shared_steps",
    "variant_colors",
]
