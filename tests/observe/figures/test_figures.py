"""Every picture is built from plain arrays, survives odd ones, and shows what it should."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from bokeh.document import Document
from bokeh.models import CustomJS, Label
from hypothesis import example, given
from hypothesis import strategies as st

from narrowgauge.formats import E4M3FN, E5M2
from narrowgauge.observe import figures
from narrowgauge.observe.figures import DARK, METRICS, Trace
from narrowgauge.observe.figures.exponents import _fold
from narrowgauge.observe.figures.frame import distinct, plain, shorten, spread
from narrowgauge.observe.figures.heatmap import trim_common
from narrowgauge.observe.figures.palette import variant_colors


def as_json(figure) -> str:
    document = Document()
    document.add_root(figure)
    return json.dumps(document.to_json(deferred=False), ensure_ascii=False)


def trace(name: str, values, start: int = 1) -> Trace:
    values = np.asarray(values, dtype=float)
    return Trace(name, variant_colors([name])[name], np.arange(start, start + len(values), dtype=float), values)


@pytest.mark.parametrize("values", [[2.0], [2.0, np.nan, 1.5], [3.0] * 50], ids=["one step", "a NaN", "flat"])
def test_loss_and_gap_survive(values):
    traces = [trace("baseline", values), trace("current", values)]
    assert "training loss" in as_json(figures.loss_curves(traces))
    assert "loss gap to baseline, %" in as_json(figures.loss_gap(traces[0], traces[1:]))


def test_small_losses_are_no_powers_of_ten():
    figure = figures.loss_curves([trace("run", [0.007, 0.004, 0.002])])
    assert 10.0 ** figure.yaxis[0].formatter.power_limit_low < 0.0001


def test_a_step_without_a_finite_loss_is_marked():
    healthy = as_json(figures.loss_curves([trace("current", [3.0, 2.0, 1.0])]))
    sick = as_json(figures.loss_curves([trace("current", [3.0, np.nan, 1.0])]))
    assert '"marker": {"type": "value", "value": "x"}' not in healthy
    assert '"marker": {"type": "value", "value": "x"}' in sick


def spiky(*spikes: int, steps: int = 400) -> np.ndarray:
    values = 3 - np.arange(steps) / steps
    values[list(spikes)] = 50 + np.arange(len(spikes))
    return values


def triangles(picture) -> list[tuple[float, float]]:
    """Of each triangle its step and the loss that it stands for."""
    found = [r for r in picture.renderers if getattr(r.glyph, "marker", None) == "triangle"]
    assert all(np.ptp(r.data_source.data["edge"]) == 0 for r in found)
    assert all(r.data_source.data["edge"][0] < picture.y_range.end for r in found)
    return [pair for r in found for pair in zip(r.data_source.data["step"], r.data_source.data["value"], strict=True)]


def test_a_spike_above_the_picture_is_marked_where_it_is():
    picture = figures.loss_curves([trace("current", spiky(99, 299, 300))])
    assert picture.y_range.end < 50
    assert triangles(picture) == [(100, 50.0), (301, 52.0)]  # two steps in a row are one spike
    assert triangles(figures.loss_curves([trace("current", spiky())])) == []


def test_a_run_that_leaves_the_picture_for_good_has_no_bar_of_marks():
    sick = np.concatenate([np.full(100, 2.0), np.full(300, 1e6)])
    assert triangles(figures.loss_curves([trace("baseline", np.full(400, 2.5)), trace("current", sick)])) == []


def test_of_many_spikes_the_highest_are_marked():
    found = triangles(figures.loss_curves([trace("current", spiky(*range(10, 9000, 30), steps=10000))]))
    assert len(found) == 200
    assert found == sorted(found)
    assert min(value for _, value in found) == 50 + 300 - 200


@pytest.mark.parametrize(("steps", "bounds"), [(40, (1, 40)), (1, "auto")])
def test_no_tick_is_right_of_the_last_step(steps, bounds):
    assert figures.loss_curves([trace("current", [2.0] * steps)]).xaxis.bounds == bounds


def test_a_diverged_run_does_not_flatten_the_others():
    healthy = [trace(name, np.linspace(5, 2, 100)) for name in ("baseline", "current")]
    sick = trace("delayed", np.linspace(5, 1e6, 100))
    assert figures.loss_curves([*healthy, sick]).y_range.end < 30


def test_the_gap_shows_band_thresholds_window_and_the_judged_level():
    steps = np.ones(200) * 2
    data = as_json(
        figures.loss_gap(
            trace("baseline", steps),
            [trace("current", steps * 1.003)],
            noise=trace("noise", steps * 1.001),
            band_pct=0.31,
            means={"current": ((151, 200), 0.3)},
        )
    )
    for said in ("0.25 %: pass below", "1 %: fail above", "judged: steps 151–200", "noise twin", "-0.31"):
        assert said in data


@pytest.mark.parametrize("gap", [0.1, -5.0, -40.0, 0.95, 30.0, 400.0])
@pytest.mark.parametrize("height", [200, 280])
def test_words_in_the_gap_have_room_and_no_line_runs_through_them(gap, height):
    steps = np.ones(200) * 2
    found = figures.loss_gap(
        trace("baseline", steps),
        [trace("current", steps * (1 + gap / 100))],
        means={"current": ((1, 200), gap)},
        height=height,
    )
    per_pixel = (found.y_range.end - found.y_range.start) / (height - 60)
    notes = {note.text: note for note in found.select(Label)}
    above = [notes["1 %: fail above"], notes["0.25 %: pass below"]]
    judged = notes["judged: steps 1–200"]
    assert judged.y == found.y_range.end
    for note in above:
        assert note.y + 32 * per_pixel <= judged.y + 1e-9
    (fail, passes) = above
    beside = passes.x_offset - fail.x_offset
    assert beside > 80 if passes.y == fail.y else fail.y - passes.y >= 16 * per_pixel
    assert not any(passes.y < line < passes.y + 16 * per_pixel for line in (0.25, 1.0))


@pytest.mark.parametrize("layers", [1, 300])
@pytest.mark.parametrize("steps", [[7], [1, 10, 20, 30], [1, 2, 3, 1000]], ids=["one", "even", "bursts"])
def test_heatmaps_of_any_shape(layers: int, steps: list[int]):
    names = [f"layers.{i}.up" for i in range(layers)]
    grid = np.full((layers, len(steps)), np.nan, dtype=np.float32)
    grid[0, 0] = 0.5
    for metric in (METRICS[0], METRICS[-1]):
        figure = figures.heatmap(metric, names, np.array(steps, float), {"a|input": grid}, shown="a|input")
        assert figure.height <= 460
        (swap,) = figure.tags
        assert isinstance(swap, CustomJS)
        assert swap.name == f"swap:{metric.column}"
        image = figure.renderers[0].data_source.data["image"][0]
        assert image.shape[0] == layers
        assert np.isfinite(image[-1]).any(), "the first layer is the last row: images grow upwards"
        assert np.isnan(image[:-1]).all()


def test_row_names_are_thinned_and_lose_what_all_share():
    names = [f"model.layers.{i}.up" for i in range(300)]
    figure = figures.heatmap(METRICS[0], names, np.array([1.0]), {"k": np.ones((300, 1), np.float32)}, shown="k")
    ticks = figure.yaxis[0].major_label_overrides
    assert len(ticks) == 30
    assert ticks[299.5] == "0.up"
    assert trim_common(["a.b.up", "a.b.down"]) == ["up", "down"]
    assert trim_common(["fc"]) == ["fc"]


@pytest.mark.parametrize("value", [np.nan, 0.0, 0.25])
def test_scale_traces(value: float):
    grid = np.full((3, 4), value, dtype=np.float32)
    figure = figures.scale_traces(
        {"current": grid},
        np.arange(4.0),
        ["a", "b", "c"],
        colors={"current": "#0072b2"},
        named={"current": ["b", "gone"]},
        shown="current",
    )
    assert figure.y_range.end - figure.y_range.start >= 2.3
    assert figure.tags[0].name == "swap:scales"


def interval(ticker, span: float) -> float:
    """The one that bokeh takes: of its mantissas by powers of ten, that which makes about as many ticks as desired."""
    taken = (m * 10.0**k for m in ticker.mantissas for k in range(8))
    return min(taken, key=lambda width: abs(ticker.desired_num_ticks - span / width))


@pytest.mark.parametrize("last", [30, 999, 16_500, 20_000, 99_900, 480_000])
def test_the_steps_under_three_pictures_in_a_row_do_not_lie_over_each_other(last: int):
    steps = np.linspace(1.0, last, 4)
    grid = np.ones((1, 4), dtype=np.float32)
    p = figures.scale_traces({"x": grid}, steps, ["a"], colors={"x": "#000"}, named={}, shown="x")
    first, end = p.xaxis.bounds  # between which ticks are made
    apart = interval(p.xaxis.ticker, end - first) / (p.x_range.end - p.x_range.start)
    pixels, letter = 320, 6.7  # of the picture's width on a page, and of a figure of twelve
    assert apart * pixels > len(f"{last:,}") * letter + 8


@example([1, 2, 3, 4, 5], -20.0)
@example([1, 2, 3, 4, 5], 10.0)
@given(st.lists(st.integers(0, 10**6), min_size=5, max_size=60), st.floats(-60, 60))
def test_folding_an_exponent_histogram_loses_no_element(counts: list[int], shift: float):
    left = np.arange(len(counts)) + shift
    bars, folded, exponents = _fold(left, np.array(counts, float), np.arange(len(counts)), -18.0, 13.0)
    assert folded.sum() == sum(counts)
    assert len(bars) == len(folded) == len(exponents)


@pytest.mark.parametrize(("fmt", "biggest"), [(E4M3FN, 448), (E5M2, 57344)])
def test_a_histogram_knows_what_is_lost(fmt, biggest):
    exponents = np.arange(-40.0, 31.0)
    counts = np.where(np.abs(exponents) < 30, 100.0, 0.0)
    bars = figures.exponent_histogram(counts, exponents, 1.0, fmt, color="#0072b2").renderers[-1].data_source.data
    fate = dict(zip((np.asarray(bars["left"]) - 0.06).round(6), bars["fate"], strict=True))
    assert fate[np.floor(np.log2(biggest))] == "normal"
    assert fate[np.floor(np.log2(biggest)) + 1] == "saturated"
    assert fate[np.log2(fmt.min_normal)] == "normal"
    assert fate[np.log2(fmt.min_normal) - 1] == "subnormal"
    assert fate[np.log2(fmt.flush_below) - 1] == "flushed to zero"


def test_a_bar_that_only_reaches_over_the_format_s_end_is_clipped_only_if_anything_was():
    counts, exponents = np.array([5.0, 3.0]), np.array([7.0, 8.0])
    inv_scale = 448 / 300  # an amax of 300 lies at the format's end, and its binade reaches from 382 to 765
    for clipped, fate in ((False, "normal"), (True, "saturated")):
        picture = figures.exponent_histogram(counts, exponents, inv_scale, E4M3FN, color="#0072b2", clipped=clipped)
        bars = picture.renderers[-1].data_source.data
        assert bars["fate"][-1] == fate
        assert (bars["right"][-1] <= np.log2(448)) == (not clipped)


def test_a_larger_inv_scale_moves_the_histogram_right():
    exponents, counts = np.array([0.0, 1.0]), np.array([10.0, 10.0])

    def left(inv_scale: float) -> float:
        picture = figures.exponent_histogram(counts, exponents, inv_scale, E4M3FN, color="#0072b2")
        return float(picture.renderers[-1].data_source.data["left"][0])

    assert left(8.0) - left(1.0) == pytest.approx(3.0)


def test_gradient_errors_are_sorted_and_survive_zeros():
    rows = [("a.weight", 0.999, 0.03), ("b.weight", 0.9, 0.4), ("c.weight", 1.0, 0.0), ("d.weight", np.nan, np.nan)]
    figure = figures.gradient_errors({"current": rows}, {"current": "#0072b2"})
    assert figure.y_range.factors == ["c.weight", "a.weight", "b.weight"]
    assert figures.gradient_errors({}, {}).height > 0


def test_one_colour_per_variant_and_a_dark_twin_for_each():
    names = ["baseline", "noise", "current", "delayed", "blockwise", "rowwise", "mxfp8", "static", "mine", "other"]
    colors = variant_colors(names)
    assert len(set(colors.values())) == len(names)
    assert variant_colors(["current"])["current"] == colors["current"]
    assert set(colors.values()) <= set(DARK)
    assert not set(DARK) & set(DARK.values()), "a colour swapped twice would come back"


@pytest.mark.parametrize("text", ["$$x$$", r"\(x\)", r"\[x\]"])
def test_tex_is_never_recognized(text: str):
    assert text not in plain(text)
    assert plain(text).replace("\u200b", "") == text


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(0.01, 1))
def test_labels_keep_their_distance_and_stay_inside(wanted: list[float], gap: float):
    placed = spread(wanted, gap, -10.0, 10.0)
    ordered = sorted(placed)
    assert all(b - a >= gap * 0.999 for a, b in pairwise(ordered))
    assert ordered[0] >= -10.001
    assert ordered[-1] <= 10.001


def test_rows_of_different_layers_do_not_read_alike():
    parts = ("self_attn.q_proj", "self_attn.in_proj_weight", "mlp.gate_proj")
    names = [f"model.layers.{i}.{part}" for i in (0, 11) for part in parts] + ["lm_head"]
    shown = distinct(names, 24)
    assert shown[:2] == ["…0.self_attn.q_proj", "…0…in_proj_weight"]
    assert len(set(shown)) == len(names)
    assert max(map(len, shown)) <= 24
    figure = figures.heatmap(METRICS[0], names, np.array([1.0]), {"k": np.ones((7, 1), np.float32)}, shown="k")
    assert list(figure.yaxis[0].major_label_overrides.values()) == shown


def test_names_without_room_are_cut_in_their_middle_as_ever():
    names = ["a" * 40 + "." + "b" * 40, "a" * 40 + ".c." + "b" * 40]
    assert distinct(names, 20) == [shorten(name, 20) for name in names]


def test_shorten_keeps_both_ends():
    assert shorten("short") == "short"
    assert len(shorten("a" * 99, 20)) == 20


def test_the_names_at_the_ends_of_lines_have_the_room_that_they_need():
    def room(name: str, last: int) -> float:
        return figures.shared_steps([trace(name, np.zeros(last), 1), trace("z", np.zeros(101), 1)]).end - 101.0

    assert room("current", 101) == pytest.approx(11.0)
    assert room("s11_accum_eval/current", 101) == pytest.approx(16.2)  # cut to 18 letters
    assert room("s11_accum_eval/current", 50) == pytest.approx(16.2 + 0.9 * len(" (ended)"))
