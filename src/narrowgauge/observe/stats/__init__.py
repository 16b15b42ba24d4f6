"""From tensors to metrics while a model trains: computed where the data is, read back once per step."""

from narrowgauge.observe.stats.collector import Collector
from narrowgauge.observe.stats.measure import measure
from narrowgauge.observe.stats.merging import merge
from narrowgauge.observe.stats.moments import moments

__all__ = ["Collector", "measure", "merge", "moments"]
