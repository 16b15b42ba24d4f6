"""The page: self-contained, escaped, the verdict first, honest about what is missing."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import synthetic
import synthetic_verdict

from narrowgauge.errors import RunError
from narrowgauge.metrics.bins import EXPONENT_BINS
from narrowgauge.observe.report import html
from narrowgauge.observe.report.facts import common_facts
from narrowgauge.observe.report.gather import histogram, layers, merge_columns
from narrowgauge.observe.report.layout import script_json
from narrowgauge.observe.store import RunWriter, open_run

EVIL = "layers.0.<script>window.hit=1</script>$$x$$"


class Page(HTMLParser):
    """What a browser would load and show: addresses, and text outside of scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self._silent = 0
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]
        self._silent += tag in ("script", "style")

    def handle_endtag(self, tag):
        self._silent -= tag in ("script", "style")

    def handle_data(self, data):
        if not self._silent:
            self.text += " " + " ".join(data.split())


@pytest.fixture(scope="module")
def source(report_file: Path) -> str:
    return report_file.read_text()


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_nothing_is_loaded_from_anywhere(page: Page, source: str):
    assert page.addresses == []
    own = source.replace(source[source.index("/* BEGIN bokeh") : source.index('<script type="application/json"')], "")
    assert not re.findall(r"url\(|@import|https?://", own)
    assert not {"link", "iframe", "img", "object", "embed"} & set(page.tags)


def test_the_file_is_small_enough_to_send(source: str):
    assert len(source.encode()) < 4e6


def test_the_verdict_comes_first(page: Page):
    first = page.text.index("is safe;")
    assert first < page.text.index("Training loss") < page.text.rindex("At the same weights")
    assert (
        page.text.rindex("At the same weights")
        < page.text.index("Inside the FP8 tensors")
        < page.text.index("The runs")
    )


@pytest.mark.parametrize(
    "said",
    [
        "Not known yet: the loss gap of +0.11% is inside the noise band",
        "Run 1,200 steps or more",
        "the baseline again from weights perturbed by 10⁻²;",
        "inside the noise band",
        "outside the noise band",
        "emulated, no speed verdict",
        "+1.37 %",
        "±0.24 %",
        "0.99468",
        "87.3 %",
        "15,000",
        "1.31 GiB",
        "The program calls torch.compile; it ran eager in every variant.",
        "layers.2.mlp.down:grad_output",
        "lm_head stays high by default",
        "never called",
        "5d0c9a7e11f2b360",
        "every 10 steps, 3.21 s",
        "train.py --steps 300 --size demo",
        "layers.0–3.mlp.down",
    ],
)
def test_the_page_says(page: Page, said: str):
    assert said in page.text


def test_one_colour_per_variant(source: str):
    for name, color in (("current", "0072b2"), ("delayed", "d55e00"), ("blockwise", "009e73")):
        assert f'style="--run:var(--c{color})">{name}</b>' in source
        assert f"--c{color}: #{color}" in source


def test_the_selector_opens_on_the_variant_in_trouble(source: str):
    assert re.search(r'value="delayed" data-place="\w+" checked', source)
    assert source.count(" checked>") == 2


def test_no_path_of_this_machine(source: str, synthetic_paths: dict[str, Path]):
    assert str(next(iter(synthetic_paths.values())).parent) not in source
    assert str(Path.home()) + "/" not in source


def test_strings_are_text(tmp_path: Path):
    names = [EVIL + str(i) for i in range(7)]
    path = synthetic.write_run(
        tmp_path / "current",
        "current",
        steps=10,
        layers=1,
        names=names,
        command=["t.py", "</script><b>x"],
        notes=["</script><img src=x onerror=alert(1)>", "see /home/ada/data/corpus.txt"],
        error="boom </style>",
    )
    text = html(None, {"<i>current": open_run(path)}, tmp_path / "report.html").read_text()
    shown = Page(text)
    assert "img" not in shown.tags
    assert "i" not in shown.tags
    assert shown.tags.count("script") == 3
    assert shown.tags.count("style") == 1
    assert EVIL in shown.text
    assert "</script><b>x" in shown.text
    assert "…/corpus.txt" in shown.text
    assert "home/ada" not in text


@pytest.mark.parametrize("ranks", [{}, {"ranks": {"world": 2, "merged_steps": 0, "apart_steps": 0}}])
def test_what_was_not_found_of_a_program_is_among_the_notes(tmp_path: Path, ranks: dict[str, object]):
    missing = "No model was found: no module was called."
    facts = {"steps": 3, "layers": 1, "not_found": [missing], **ranks}
    path = synthetic.write_run(tmp_path / "current", "current", **facts)
    shown = Page(html(None, {"current": open_run(path)}, tmp_path / "report.html").read_text())
    assert (missing in shown.text) == (not ranks)


def test_what_runs_differ_in_is_told_of_each(tmp_path: Path):
    """The first run's command stood for all: of two learning rates, only one was to be read."""
    runs = {}
    for name, command, started in (("a", "t.py --lr 1", "09"), ("b", "t.py --lr 2", "10"), ("c", "t.py --lr 2", "")):
        writer = RunWriter(tmp_path / name, {"command": command, "hardware": "a GPU", "baseline_dtype": "float32"})
        writer.close()
        runs[name] = open_run(tmp_path / name)
        runs[name].manifest["started"] = started and f"2026-05-04T{started}:30:00.000+00:00"
    assert common_facts(runs, None) == [
        ("Command: a", "t.py --lr 1"),
        ("Command: b, c", "t.py --lr 2"),
        ("Hardware", "a GPU"),
        ("High precision", "float32"),
        ("Started: a", "2026-05-04 09:30 UTC"),
        ("Started: b", "2026-05-04 10:30 UTC"),
    ]
    assert common_facts({"b": runs["b"]}, None)[0] == ("Command", "t.py --lr 2")
    together = common_facts(runs, replace(synthetic_verdict.verdict(), started=""))
    assert [pair for pair in together if "Started" in pair[0]] == [("Started", "2026-05-04 09:30 UTC")]
    page = html(None, runs, tmp_path / "report.html").read_text()
    assert page.count('<dd class="code">t.py --lr') == 2
    assert "Command: b, c" in Page(page).text


@pytest.mark.parametrize("lacking", [None, 1, 2, 4])
def test_the_hash_of_all_data_is_told_where_each_step_has_one(tmp_path: Path, lacking: int | None):
    """Rows in brief have none; before the first step an evaluation has a row, and no data."""
    with RunWriter(tmp_path / "a", {"watch": {"every": 10, "steps_in_brief": 15003}}) as writer:
        writer.add_scalars(0, eval_loss=1.0)
        for step in (1, 2, 3, 4):
            writer.add_scalars(step, loss=1.0, **({} if step == lacking else {"data_digest": 4096.0 + step}))
    page = Page(html(None, {"a": open_run(tmp_path / "a")}, tmp_path / "report.html").read_text()).text
    assert ("0000000001004" in page) == (lacking in (None, 1))
    assert "every 10 steps, 15,000 of the others in brief (loss, learning rates and time)" in page


def test_json_in_a_script_cannot_end_it():
    assert "<" not in script_json({"a": "</script><!--", "b": "\u2028"})


def test_a_run_that_left_nothing(tmp_path: Path):
    RunWriter(tmp_path / "current", {"recipe": "current"}).close("failed")
    crashed = synthetic.variant(
        "current",
        0,
        outcome="fail",
        safe="no",
        gap_pct=None,
        window=None,
        same_weights=(),
        worst=(),
        conversion=(),
        exit_code=1,
        error="RuntimeError: '/home/ada/model.py' exploded",
        sentence="Not safe: it ended with an error.",
        step_seconds=None,
        tokens_per_second=None,
        peak_memory_bytes=None,
        eval_name="",
        eval_gap_pct=None,
    )
    verdict = synthetic.verdict(0, variants=(crashed,), noise=None, notes=())
    text = Page(html(verdict, {"current": open_run(tmp_path / "current")}, tmp_path / "r.html").read_text()).text
    for said in (
        "No finite loss was recorded",
        "No tensor statistics were recorded",
        "No conversion was recorded",
        "RuntimeError: '…/model.py' exploded",
        "not evaluated",
        "at step 0",
        "exit code 1",
    ):
        assert said in text


def test_a_run_that_converted_nothing_says_what_its_tensors_were_put_through(tmp_path: Path):
    path = synthetic.write_run(tmp_path / "plain", "plain", steps=40, recipe=None, conversion=[], judged_by="current")
    text = Page(html(None, {"plain": open_run(path)}, tmp_path / "r.html").read_text()).text
    for said in (
        "What FP8 would do to the tensors",
        "This command converted nothing.",
        "put through the recipe current , counted, and thrown away",
    ):
        assert said in text
    for unsaid in ("Inside the FP8 tensors", "No conversion was recorded"):
        assert unsaid not in text


def test_no_run_left_anything(tmp_path: Path):
    verdict = synthetic.verdict(0, judged=False, why_not="The baseline run ended with an error.", variants=())
    text = Page(html(verdict, {}, tmp_path / "r.html").read_text()).text
    assert "No FP8 variant was run." in text
    assert "The baseline run ended with an error." in text


def test_sick_runs_are_shown_as_they_are(tmp_path: Path, synthetic_paths: dict[str, Path]):
    loss = synthetic.losses("delayed", 60)
    sick = loss.copy()
    sick[30:] = np.nan
    paths = {
        "baseline": synthetic_paths["baseline"],
        "current": synthetic.write_run(
            tmp_path / "current", "current", loss=loss[:20], status="stopped", tensors=False
        ),
        "delayed": synthetic.write_run(tmp_path / "delayed", "delayed", loss=sick, tensors=False),
    }
    verdict = synthetic.verdict(
        60,
        noise=None,
        judged=False,
        why_not="The runs saw different data.",
        variants=(
            synthetic.variant(
                "current", 20, outcome="unjudged", band_pct=None, same_weights=(), same_weights_note="Why not."
            ),
            synthetic.variant("delayed", 60, outcome="fail", nan_steps=30),
        ),
    )
    text = Page(html(verdict, {n: open_run(p) for n, p in paths.items()}, tmp_path / "r.html").read_text()).text
    for said in (
        "Nothing was judged.",
        "The runs saw different data.",
        "the watch stopped early",
        "There was no noise twin",
        "step 31 and 29 more",
        "Why not.",
        "not judged",
        "No histogram was recorded",
    ):
        assert said in " ".join(text.split())


@pytest.mark.parametrize("errs", [True, False])
def test_gradients_that_are_all_exact_have_no_picture(tmp_path: Path, errs):
    snapshot = synthetic.variant("current", 60).same_weights[-1]
    if not errs:
        snapshot = replace(snapshot, layers=tuple((name, 1.0, 0.0) for name, _, _ in snapshot.layers))
    current = synthetic.variant("current", 60, outcome="unjudged", same_weights=(snapshot,))
    verdict = synthetic.verdict(60, judged=False, why_not="", variants=(current,))
    with RunWriter(tmp_path / "current") as writer:
        writer.add_scalars(1, loss=2.0)
    runs = {"current": open_run(tmp_path / "current")}
    text = " ".join(Page(html(verdict, runs, tmp_path / "r.html").read_text()).text.split())
    assert ("Worst parameters, last snapshot" in text) is errs
    assert "No variant ran in FP8 to a point where it could be compared with the baseline." in text


def test_errors_say_what_to_do(tmp_path: Path, synthetic_runs):
    with pytest.raises(RunError, match="There is no run to report on; expected at least one run folder"):
        html(None, {}, tmp_path / "r.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"written \((File exists|Not a directory)\). Choose another file with -o"):
        html(synthetic.verdict(variants=()), {}, tmp_path / "file" / "r.html")


def test_long_runs_keep_their_worst_cell():
    grid = np.array([[1.0, 9.0, np.nan, 2.0, np.nan]])
    assert merge_columns(grid, 2, "underflow_pct").tolist()[0][:2] == [9.0, 2.0]
    assert np.isnan(merge_columns(grid, 2, "underflow_pct")[0, 2])
    assert merge_columns(grid, 2, "sqnr_db")[0, 0] == 1.0
    assert merge_columns(np.array([[1.1, 0.7]]), 2, "gain")[0, 0] == 0.7


def test_layers_come_in_forward_order_and_grids_agree(synthetic_runs):
    runs = {name: run for name, run in synthetic_runs.items() if run.metrics}
    found = layers(runs, synthetic.modules())
    assert list(found.names) == synthetic.modules()
    assert found.variants == ("current", "delayed", "blockwise")
    row, column = found.names.index(synthetic.SICK), list(found.steps).index(200)
    steps, values = runs["delayed"].series(f"{synthetic.SICK}:grad_output", "gain")
    assert found.grids["gain"]["delayed|grad_output"][row, column] == pytest.approx(
        values[list(steps).index(200)], rel=1e-3
    )
    assert layers({}).names == ()


def test_a_step_in_which_a_tensor_was_all_zeros_is_no_histogram_and_no_scale(tmp_path: Path):
    counts = np.zeros(EXPONENT_BINS, dtype=np.uint32)
    with RunWriter(tmp_path / "run", {}) as writer:
        for step, scale in ((1, 2.0**-20), (2, 2.0**-21), (3, np.nan)):
            counts[0 if scale != scale else 40] = 9
            columns = {"scale_max": [scale], "scale_min": [scale], "exponent_histogram": counts[None]}
            writer.add_tensors(step, ["a:grad_output"], columns)
    run = open_run(tmp_path / "run")
    assert (histogram(run, "a:grad_output").step, histogram(run, "a:grad_output").inv_scale) == (2, 2.0**21)
    drawn = layers({"run": run}).grids["scale_max"]["run|grad_output"][0]
    assert np.log2(drawn[np.isfinite(drawn)]).tolist() == [-20, -21]


def test_a_run_without_rows_of_gradients_shows_what_it_has(tmp_path: Path):
    with RunWriter(tmp_path / "run", {"gradients_not_seen": ["a"]}) as writer:
        for step in (1, 2):
            columns = {"sqnr_db": [30.0, 31.0], "scale_max": [0.1, 0.2], "scale_min": [0.1, 0.2]}
            writer.add_tensors(step, ["a:input", "a:weight"], columns)
    page = html(None, {"run": open_run(tmp_path / "run")}, tmp_path / "page.html").read_text()
    assert 'value="input" checked' in page
    assert 'name="role" value="grad_output"' not in page
    assert "SQNR over layers and steps" in page


def test_rows_that_ranks_wrote_for_themselves_are_shown_and_told(tmp_path: Path):
    """Step 1 is merged; of step 2 each rank has rows of its own, of layers that are on both or on one of them."""
    counts = np.zeros(EXPONENT_BINS, dtype=np.uint32)

    def row(writer, step, amax, ranks):
        sites, scale = list(amax), np.array([value / 448 for value in amax.values()])
        sqnr, largest = np.full(len(sites), 30.0), np.array(list(amax.values()))
        columns = {"amax": largest, "sqnr_db": sqnr - largest, "scale_max": scale, "scale_min": scale}
        counts[40] = int(largest[0])
        histograms = np.tile(counts, (len(sites), 1))
        whole = {**columns, "exponent_histogram": histograms, "ranks": np.full(len(sites), ranks)}
        writer.add_tensors(step, sites, whole)

    first, second = (RunWriter(tmp_path / "run", {}, rank=rank) for rank in (0, 1))
    row(first, 1, {"a:input": 2.0, "b:input": 3.0}, 2)
    row(first, 2, {"a:input": 1.0}, 1)
    row(second, 2, {"a:input": 5.0, "b:input": 4.0}, 1)
    first.update_meta(ranks={"world": 2, "merged_steps": 1, "apart_steps": 1, "backend": "gloo"})
    second.close()
    first.close()
    run = open_run(tmp_path / "run")

    found = layers({"run": run})
    assert found.names == ("a", "b")
    assert found.steps.tolist() == [1, 2]
    assert found.grids["scale_max"]["run|input"] * 448 == pytest.approx(np.array([[2, 5], [3, 4]]), rel=1e-3)
    assert found.grids["sqnr_db"]["run|input"] == pytest.approx(np.array([[28, 25], [27, 26]]), rel=1e-3)
    shown = histogram(run, "b:input")
    assert (shown.step, shown.counts.sum()) == (2, 5)
    assert shown.inv_scale == pytest.approx(448 / 4.0)
    said = Page(html(None, {"run": run}, tmp_path / "page.html").read_text()).text
    assert "1 of 2 recorded steps are not merged over the ranks: of these the page shows the most extreme" in said


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        ({"amax": [3.0]}, ()),
        ({"sqnr_db": [25.0]}, ("Layers over steps",)),
        ({"sqnr_db": [25.0], "scale_max": [0.5], "scale_min": [0.5]}, ("Layers over steps", "Scales")),
        (
            {
                **{"sqnr_db": [25.0], "scale_max": [0.5], "scale_min": [0.5]},
                "exponent_histogram": np.full((1, EXPONENT_BINS), 9, np.uint32),
            },
            ("Layers over steps", "Scales", "Share of elements per power of two"),
        ),
    ],
)
def test_no_heading_stands_above_pictures_that_are_not_there(columns, shown, tmp_path: Path):
    """`[watch] metrics` stores what is asked for alone."""
    with RunWriter(tmp_path / "run", {"judged_by": "current"}) as writer:
        writer.add_scalars(1, loss=1.0)
        writer.add_tensors(1, ["a:grad_output"], columns)
    text = Page(html(None, {"run": open_run(tmp_path / "run")}, tmp_path / "r.html").read_text()).text
    above = ("Layers over steps", "Scales", "Share of elements per power of two")
    assert tuple(each for each in above if each in text) == shown
    assert "inv_scale" not in text
    assert text.count("No histogram") == ("sqnr_db" in columns and "exponent_histogram" not in columns)
    assert ("No tensor was recorded with a number" in text) == ("sqnr_db" not in columns)


@pytest.mark.parametrize(
    ("told", "apart"),
    [
        ({}, True),  # of `watch.ranks`
        ({"ranks": {"world": 2}}, True),  # each trains by itself
        ({"ranks": {"world": 2}, "merged_within": 256}, False),  # killed
        ({"ranks": {"world": 2, "merged_steps": 2, "apart_steps": 0}}, False),
    ],
)
def test_of_ranks_side_by_side_a_page_says_whose_loss_it_shows(tmp_path: Path, told: dict[str, object], apart: bool):
    """Rank 0's loss and tokens per step stood on the page of `ranks/` as if they were of all."""
    for rank in (0, 1):
        writer = RunWriter(tmp_path / "ranks", told, rank=rank)
        for step in (1, 2):
            writer.add_scalars(step, loss=1.0 + rank, tokens=64 + rank)
        writer.close()
    shown = Page(html(None, {"ranks": open_run(tmp_path / "ranks")}, tmp_path / "report.html").read_text())
    said = (
        "Each of 2 ranks wrote its own rows here, and none is of all of them: the loss, tokens per step and all else "
        "that a step has one number of are rank 0's alone; of tensors the page shows the most extreme of the ranks' "
        "own rows, and ranks them by all."
    )
    assert (said in shown.text) == apart
