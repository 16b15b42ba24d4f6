"""The page in a real browser, offline: every picture is painted, selectors switch, nothing is requested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import synthetic

from narrowgauge.observe.report import html
from narrowgauge.observe.store import open_run

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
EVIL = "layers.0.<img src=x onerror=window.hit=1><script>window.hit=2</script>$$x^2$$"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=f"no {CHROMIUM}: apt-get install chromium"),
]

# A canvas that holds more than one colour was painted. BokehJS draws inside shadow roots.
PAINTED = """place => {
  const canvases = [];
  const walk = node => {
    if (node.tagName === "CANVAS") canvases.push(node);
    for (const child of [...(node.shadowRoot?.children ?? []), ...node.children]) walk(child);
  };
  walk(document.getElementById(place));
  return canvases.some(canvas => canvas.width > 100 && new Set(new Uint32Array(
    canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size > 1);
}"""
IMAGE = """() => {
  for (const document of Bokeh.documents) for (const root of document.roots()) for (const swap of root.tags ?? [])
    if (swap.name === "swap:gain") return Math.min(...[...root.renderers[0].data_source.data.image[0]]);
}"""


# Of each name at a line's end, by how many pixels it is wider than the room that it has.
CUT = """() => {
  const context = document.createElement("canvas").getContext("2d"), found = [];
  for (const shown of Bokeh.documents) for (const root of shown.roots()) {
    for (const label of (root.center ?? []).filter(each => each.type === "Label" && each.text_font_style === "bold")) {
      if (!root.inner_width) continue;
      context.font = `bold ${label.text_font_size} ${label.text_font}`;
      const {start, end} = root.x_range, x = root.inner_width * (label.x - start) / (end - start);
      found.push(x + label.x_offset + context.measureText(label.text).width - root.inner_width);
    }
  }
  return found;
}"""

TICKS = """() => Bokeh.documents.flatMap(shown => shown.roots()).filter(root => root.x_range?.tags?.length)
  .map(root => root.below[0].ticker.desired_num_ticks)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with api.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"),
            executable_path=str(CHROMIUM),
            args=ARGUMENTS,
            viewport={"width": 1280, "height": 900},
            offline=True,
        )
        yield context
        context.close()


def opened(browser, path: Path):
    """The page in a tab that notes every request and every problem."""
    tab = browser.new_page()
    tab.requested, tab.problems = [], []
    tab.on("request", lambda request: tab.requested.append(request.url))
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on("console", lambda message: message.type == "error" and tab.problems.append(message.text))
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-drawn=yes]", timeout=60_000)
    return tab


@pytest.fixture(scope="module")
def page(browser, report_file: Path):
    return opened(browser, report_file)


def test_nothing_but_the_file_is_requested(page):
    assert page.requested == [page.url]
    assert page.problems == []


def test_every_visible_picture_is_painted(page):
    places = page.eval_on_selector_all(".figure", "all => all.filter(e => e.offsetWidth).map(e => e.id)")
    assert {"loss", "gap", "gradients", "heat-gain", "scale-input"} <= set(places)
    page.wait_for_function(f"places => places.every({PAINTED})", arg=places, timeout=30_000)


def test_switching_the_variant_switches_the_pictures(page):
    page.check("input[value=delayed]", force=True)
    assert page.evaluate(IMAGE) < 0.9
    page.check("input[value=current]", force=True)
    assert page.evaluate(IMAGE) > 0.99
    assert page.is_visible('[data-variant="current"]')
    assert not page.is_visible('[data-variant="delayed"]')
    place = page.eval_on_selector('[data-variant="current"] .figure', "e => e.id")
    page.wait_for_function(PAINTED, arg=place, timeout=30_000)


def test_nothing_overflows_sideways(page):
    for width in (900, 1600, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_names_at_the_ends_of_lines_are_whole_on_a_narrow_page_too(page):
    for width in (420, 900, 420, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(500)
        cut = page.evaluate(CUT)
        assert len(cut) >= 6
        assert max(cut) <= 0
        assert page.evaluate(TICKS) == [3 if width == 420 else 6] * 2  # of 16,000 more would lie over each other


def test_a_dark_page_is_redrawn_in_its_own_colours(page):
    page.check("input[value=current]", force=True)
    page.emulate_media(color_scheme="dark")
    drawn_in = "Bokeh.documents.map(d => d.roots()[0].below[0].major_label_text_color).join()"
    page.wait_for_function(f"{drawn_in} === '#b3afa6'", timeout=30_000)
    assert page.evaluate("getComputedStyle(document.querySelector('main')).getPropertyValue('--c0072b2')") == "#4aa8e0"
    page.wait_for_function(PAINTED, arg="loss", timeout=30_000)
    page.wait_for_function(f"({IMAGE})() > 0.99", timeout=10_000)  # redrawn as it was chosen, not as it was opened
    page.emulate_media(color_scheme="light")
    page.wait_for_function(f"{drawn_in} === '#55524c'", timeout=30_000)
    assert page.problems == []


@pytest.fixture(scope="module")
def single(browser, tmp_path_factory):
    """The page of one run, as narrow as a telephone."""
    folder = tmp_path_factory.mktemp("single")
    names = [f"model.layers.{i}.self_attn.a_long_projection" for i in range(7)]
    run = synthetic.write_run(folder / "current", "current", steps=10, layers=1, names=names)
    tab = opened(browser, html(None, {"current": open_run(run)}, folder / "report.html"))
    tab.set_viewport_size({"width": 420, "height": 900})
    tab.wait_for_timeout(200)
    return tab


def test_a_narrow_page_has_the_facts_of_a_run_beside_their_names(single):
    ends = single.eval_on_selector_all(".summary.slim tbody td", "all => all.map(e => e.getBoundingClientRect().right)")
    assert ends
    assert max(ends) <= 420


def test_many_runs_with_long_names_lie_beside_each_other_and_the_page_is_no_wider(browser, tmp_path: Path):
    run = synthetic.write_run(tmp_path / "current", "current", steps=10, layers=1)
    runs = {f"sweep_of_learning_rates/lr_0.00{i}": open_run(run) for i in range(12)}
    page = opened(browser, html(None, runs, tmp_path / "report.html"))
    for width in (420, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        wider = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
        assert page.eval_on_selector_all(".summary thead th, .summary tbody td", wider) == []


def test_a_narrow_page_leaves_the_names_of_converted_layers_whole_as_far_as_it_can(single):
    widths = single.eval_on_selector_all(".conversion td:first-child", "all => all.map(e => e.offsetWidth)")
    assert widths
    assert min(widths) > 120


def test_a_page_of_one_run_says_nothing_of_equal_hashes(single, page):
    assert "Equal hashes" not in single.inner_text("#facts")
    assert "Equal hashes" in page.inner_text("#facts")


def test_a_page_of_one_run_says_nothing_of_a_baseline(single, page):
    assert (single.inner_text("#facts h2"), page.inner_text("#facts h2")) == ("The run", "The runs")
    assert "Baseline" not in single.inner_text("#facts")
    assert "Baseline" in page.inner_text("#facts")
    assert "baseline" not in single.inner_text("footer")
    assert "mean|baseline|" in page.inner_text("footer")


def test_names_are_never_markup_nor_tex(browser, tmp_path: Path):
    names = [EVIL + str(i) for i in range(7)]
    run = synthetic.write_run(tmp_path / "current", "current", steps=10, layers=1, names=names)
    page = opened(browser, html(None, {"current": open_run(run)}, tmp_path / "report.html"))
    picture = page.locator("#heat-sqnr_db")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 50)
    page.wait_for_function("document.body.textContent.includes('x^2')", timeout=10_000)
    page.wait_for_timeout(300)
    assert page.evaluate("window.hit") is None
    assert page.requested == [page.url]
    assert page.problems == []
