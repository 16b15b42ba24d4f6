"""What pictures are made of, as the run has it."""

import numpy as np
import pytest

from narrowgauge.metrics.bins import EXPONENT_BINS
from narrowgauge.observe.report.gather import histogram, layers
from narrowgauge.observe.store import RunWriter, open_run


@pytest.mark.parametrize(("saturation", "clipped"), [(0.0, False), (1e-7, True), (np.nan, True), (None, True)])
def test_only_where_nothing_is_known_to_be_clipped_a_histogram_says_so(tmp_path, saturation, clipped):
    """NaN: of no element the scale was finite, so nobody counted. A run without the metric knows as little."""
    columns = {name: np.ones(1) for name in ("scale_max", "scale_min")}
    columns["exponent_histogram"] = np.ones((1, EXPONENT_BINS), np.uint32)
    if saturation is not None:
        columns["saturation_pct"] = np.array([saturation])
    with RunWriter(tmp_path / "run") as writer:
        writer.add_tensors(1, ["a:input"], columns)
    assert histogram(open_run(tmp_path / "run"), "a:input").clipped == clipped


@pytest.mark.parametrize(
    ("order", "names", "by_name"),
    [((), ("down", "up"), True), (("up", "down"), ("up", "down"), False), (("up",), ("up", "down"), True)],
)
def test_layers_say_whether_they_are_in_the_order_in_which_they_run(tmp_path, order, names, by_name):
    """A run that converted nothing has no table of its layers."""
    with RunWriter(tmp_path / "run") as writer:
        writer.add_tensors(1, ["up:input", "down:input"], {"sqnr_db": np.array([30.0, 31.0])})
    found = layers({"run": open_run(tmp_path / "run")}, order)
    assert (found.names, found.by_name) == (names, by_name)
