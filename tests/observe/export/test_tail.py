"""Every row goes out once and in order, whatever the writer merges meanwhile."""

import math

import numpy as np
import pytest
from tests.observe.export.recorded import EVERY, SITES, STEPS, column, rows, scalars, summary, write

from narrowgauge.observe.export.summing import MOST_SITES, Chosen
from narrowgauge.observe.export.tail import Tail
from narrowgauge.observe.store import RunWriter, compact


def times(folder):
    return dict(reversed(rows(folder, "scalars", "step, wall_time")))


def drain(tail, final=True):
    points = [point for batch in tail.points(final=final) for point in batch]
    return points, list(tail.looks()), list(tail.events())


def test_what_goes_out_is_what_lies_in_the_run(run):
    points, looks, events = drain(Tail(run))
    stored = scalars(run)
    assert [point.step for point in points] == list(range(1, STEPS + 1))
    for point in points:
        assert point.values.keys() == stored.keys() - {"data_digest"}
        for name, value in point.values.items():
            assert value == stored[name][point.step] or (math.isnan(value) and math.isnan(stored[name][point.step]))
    assert {p.step: p.wall_time for p in points} == times(run)
    assert [look.step for look in looks] == list(range(EVERY, STEPS + 1, EVERY))
    assert [(e.step, e.kind, e.site) for e in events] == [(7, "nan", ""), (7, "watch_failed", SITES[0])]


def test_sums_are_those_of_numpy_and_the_worst_site_is_named(run):
    _, looks, _ = drain(Tail(run))
    for look in looks:
        found = {(s.metric, s.role): s for s in look.summaries}
        assert found.keys() == {("amax", r) for r in ("input", "weight", "output")} | {
            ("sqnr_db", "input"), ("sqnr_db", "weight"),
        }  # fmt: skip
        for (metric, role), told in found.items():
            assert dict(told.items()) == pytest.approx(summary(run, metric, role, look.step), rel=1e-12)
            sites = column(run, metric, role, look.step)
            worst = max if metric == "amax" else min
            assert told.worst == worst(sites, key=sites.get)
        assert look.wall_time == times(run)[look.step]


def test_single_sites_where_asked(run):
    _, looks, _ = drain(Tail(run, ["layers.1", "!*:weight", "head:output"]))
    for look in looks:
        assert look.sites.keys() == {"layers.1.up:input", "head:output"}
        for metric in ("amax", "sqnr_db"):
            value = column(run, metric, "input", look.step)["layers.1.up:input"]
            assert look.sites["layers.1.up:input"][metric] == value
            assert look.numbers()[f"sites/layers.1.up.input/{metric}"] == value
        assert look.sites["head:output"].keys() == {"amax"}


def test_a_run_that_grows_and_merges_meanwhile_is_read_once(tmp_path):
    tail, steps, events = Tail(tmp_path), [], []
    looks = []
    with RunWriter(tmp_path) as writer:
        for step in range(1, 71):  # a segment each: merged at every 16th, which nobody sees alone
            write(writer, step)
            if step % 3 == 0:
                writer.add_event(step, "skipped", "a step was skipped")
            writer.flush()
            if step % 5 == 0:
                new = drain(tail, final=False)
                steps += [point.step for point in new[0]]
                looks += [look.step for look in new[1]]
                events += [event.step for event in new[2]]
    new = drain(tail)
    assert len(list((tmp_path / "scalars").glob("*.parquet"))) < 16
    assert steps + [point.step for point in new[0]] == list(range(1, 71))
    assert looks + [look.step for look in new[1]] == list(range(10, 71, 10))
    assert sorted(events + [event.step for event in new[2]]) == sorted([7, 7, *range(3, 71, 3)])
    compact(tmp_path)
    assert drain(tail) == ([], [], [])


def test_a_step_whose_rows_are_parted_by_a_segment_is_whole_in_the_end(tmp_path):
    """One half was read; the other comes in a file that holds both."""
    tail = Tail(tmp_path)
    with RunWriter(tmp_path) as writer:
        for part in range(16):
            writer.add_scalars(1 + part // 2, **{f"half{part % 2}": float(part)})
            role = ("input", "output")[part % 2]
            writer.add_tensors(1 + part // 2, [f"a:{role}"], {"amax": np.array([float(part)])})
            writer.flush()
            if part == 14:
                first = drain(tail, final=False)
    second = drain(tail)
    assert [p.values for p in first[0] + second[0]] == [{"half0": 2.0 * n, "half1": 2.0 * n + 1} for n in range(8)]
    assert [(s.role, s.greatest) for look in second[1] for s in look.summaries] == [("output", 15.0)]
    assert len(first[1]) == 15


def test_what_all_ranks_say_of_a_step_takes_the_place_of_what_the_first_said(tmp_path):
    tail, told = Tail(tmp_path), []
    with RunWriter(tmp_path) as writer:
        for step in range(1, 30):
            writer.add_scalars(step, loss=1.0, tokens=8.0)
            if step % 4 == 0:  # of the four steps before the last
                for merged in range(max(1, step - 5), step - 1):
                    writer.add_scalars(merged, loss=2.0 + merged, tokens=16.0)
            if step % 5 == 0:
                writer.flush()
                told += drain(tail, final=False)[0]
    told += drain(tail)[0]
    assert [point.step for point in told] == list(range(1, 30))
    assert [p.values for p in told[:26]] == [{"loss": 2.0 + step, "tokens": 16.0} for step in range(1, 27)]


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ({"loss": 2.0, "nonfinite": 0.0, "grad_norm": math.nan, "tokens": math.nan}, {"loss": 2.0, "nonfinite": 0.0}),
        ({"loss": math.nan, "nonfinite": 1.0, "tokens": math.nan}, {"loss": math.nan, "nonfinite": 1.0}),
        ({"loss": math.nan, "nonfinite": math.nan, "tokens": math.nan}, {}),
    ],
)
def test_what_a_brief_row_of_all_ranks_takes_back_goes_out_as_no_number(tmp_path, row, want):
    with RunWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.add_scalars(step, loss=1.0, nonfinite=0.0, grad_norm=math.nan, microbatches=1.0, tokens=8.0)
        writer.add_scalars(2, **{"grad_norm": math.nan, "microbatches": math.nan} | row)
    whole, brief = (point.values for point in drain(Tail(tmp_path))[0])
    assert math.isnan(whole["grad_norm"])  # which a program may have
    assert brief == pytest.approx(want, nan_ok=True)


def rank_zero(folder, within, until=40, merged=lambda step: step % 8 == 0 and range(step - 11, step - 3)):
    """A run whose segments hold two steps; what `merged(step)` gives is merged then. After each: the step, the tail."""
    tail = Tail(folder)
    with RunWriter(folder) as writer:
        writer.update_meta(merged_within=within)
        for step in range(1, until + 1):
            writer.add_scalars(step, loss=1.0, tokens=8.0)
            for each in merged(step) or ():
                if each > 0:
                    writer.add_scalars(each, loss=2.0 + each, tokens=16.0)
            if step % 2 == 0:
                assert writer.flush()
                yield step, writer, tail


def test_where_ranks_merge_slower_than_segments_come_a_step_waits_for_what_all_of_them_say(tmp_path):
    told = []
    for step, _, tail in rank_zero(tmp_path, 24):
        told += drain(tail, final=False)[0]
        assert [p.step for p in told] == list(range(1, step // 8 * 8 - 3))  # what was merged, as soon as it was
    told += drain(tail)[0]
    assert [p.step for p in told] == list(range(1, 41))
    assert [p.values["loss"] for p in told] == [*(2.0 + step for step in range(1, 37)), *[1.0] * 4]


def test_what_does_not_come_in_the_steps_that_a_merge_takes_is_waited_for_no_longer(tmp_path):
    told = []
    for step, _, tail in rank_zero(tmp_path, 10, merged=lambda step: ()):
        told += drain(tail, final=False)[0]
        assert [p.step for p in told] == list(range(1, max(step - 10, 0) + 1))
    assert {p.values["loss"] for p in told} == {1.0}


def test_nor_where_ranks_do_not_merge_any_more(tmp_path):
    told = []
    for step, writer, tail in rank_zero(tmp_path, 24, merged=lambda step: ()):
        if step == 10:
            writer.update_meta(merged_within=0)
        told += drain(tail, final=False)[0]
        assert [p.step for p in told] == list(range(1, step - 1 if step > 10 else 1))


def test_what_is_read_late_is_read_and_handed_over_in_pieces(tmp_path, monkeypatch):
    """Sixteen segments are one by then; a piece ends within a step, and between what one rank and all ranks said."""
    for _ in rank_zero(tmp_path, 24, merged=lambda step: step % 8 == 0 and range(step - 7, step - 3)):
        pass
    assert len(list((tmp_path / "scalars").glob("*.parquet"))) < 8
    whole = [point for batch in Tail(tmp_path).points(final=True) for point in batch]
    monkeypatch.setattr("narrowgauge.observe.export.tail.CHUNK", 3)
    monkeypatch.setattr("narrowgauge.observe.export.tail.FAR", 6)
    pieces = list(Tail(tmp_path).points(final=True))
    assert [point for piece in pieces for point in piece] == whole
    assert [p.values["loss"] for p in whole] == [2.0 + n if (n - 1) % 8 < 4 else 1.0 for n in range(1, 41)]
    assert max(map(len, pieces)) <= 7


def test_of_a_resumed_run_every_step_goes_out_once_as_it_was_made_last(tmp_path):
    """The first attempt made six steps and was killed; the second began again behind the third."""

    def record(attempt, steps):
        with RunWriter(tmp_path, resume=True) as writer:
            if attempt:  # whoever follows it begins before it has recorded anything
                yield
            for step in steps:
                writer.add_scalars(step, loss=10.0 * attempt + step)
                writer.add_tensors(step, ["a:input"], {"amax": np.array([100.0 * attempt + step])})
                writer.add_event(step, "nan", f"attempt {attempt}")
                writer.flush()

    assert list(record(0, range(1, 7))) == []
    tail = Tail(tmp_path)
    for _ in record(1, range(4, 9)):
        points, looks, events = drain(tail, final=False)
        assert (points, looks, len(events)) == ([], [], 6)  # which of them count is not known yet
    points, looks, events = drain(tail)
    assert [(p.step, p.values["loss"]) for p in points] == [(s, s + 10.0 * (s > 3)) for s in range(1, 9)]
    amax = [(look.step, s.greatest) for look in looks for s in look.summaries]
    assert amax == [(s, s + 100.0 * (s > 3)) for s in range(1, 9)]
    assert [(e.step, e.message) for e in events] == [(s, "attempt 1") for s in range(4, 9)]


def test_a_resumed_run_that_recorded_nothing_more_goes_out_as_it_was(tmp_path):
    with RunWriter(tmp_path) as writer:
        writer.add_scalars(1, loss=1.0)
    RunWriter(tmp_path, resume=True).close()
    assert [p.values for p in drain(Tail(tmp_path))[0]] == [{"loss": 1.0}]


def test_a_damaged_segment_is_told_and_the_rest_goes_out(run):
    segment = sorted((run / "scalars").glob("*.parquet"))[1]
    segment.write_bytes(segment.read_bytes()[:-40])
    tail = Tail(run)
    points, looks, _ = drain(tail)
    assert [point.step for point in points] == [*range(1, 10), *range(19, STEPS + 1)]
    assert len(looks) == STEPS // EVERY
    assert len(tail.notes) == 1
    assert f"{segment.name} of scalars cannot be read" in tail.notes[0]


def test_globs_that_match_nothing_or_too_much_are_told(run):
    tail = Tail(run, ["lm_head"])
    drain(tail)
    [told] = tail.unmet
    assert told.startswith("export.sites: no recorded site matches 'lm_head'; there are: 'head', 'layers.0.up', ")
    assert told.endswith(" and 1 more.")
    assert tail.notes == []
    chosen = Chosen(["layers"])
    assert sum(chosen.takes(f"layers.{n}:input") for n in range(MOST_SITES + 3)) == MOST_SITES
    assert chosen.unmet() == [f"export.sites: 3 sites beyond the first {MOST_SITES} that match were left out."]


@pytest.mark.parametrize(
    ("globs", "says"),
    [
        (["!*"], "'!*' leaves out every recorded site; there are: 'layers.0', 'head'."),
        (["!layers", "!head"], "'!layers', '!head' leave out every recorded site; there are: 'layers.0', 'head'."),
        (["head", "!*"], "'!*' leaves out every recorded site that the others match; there are: 'layers.0', 'head'."),
        (["haed", "!*"], "no recorded site matches 'haed'; there are: 'layers.0', 'head'."),
    ],
)
def test_globs_that_leave_out_everything_are_told_as_such(globs, says):
    chosen = Chosen(globs)
    assert [chosen.takes(site) for site in ("layers.0:input", "head:input")] == [False, False]
    assert chosen.unmet() == [f"export.sites: {says}"]


def test_a_name_with_brackets_is_that_name():
    chosen = Chosen(["m.heads[0]", "!m.x[1]:weight"])
    sites = ["m.heads[0].up:input", "m.heads[1]:input", "m.x[1]:weight"]
    assert [chosen.takes(site) for site in sites] == [True, False, False]
    assert chosen.unmet() == []


def test_each_glob_that_no_site_matches_is_told():
    chosen = Chosen(["layers", "haed", "!layers.0"])
    assert chosen.unmet() == []  # nobody asked
    assert [chosen.takes(site) for site in ("layers.0:input", "layers.1:input", "head:input")] == [False, True, False]
    assert chosen.unmet() == [
        "export.sites: no recorded site matches 'haed'; there are: 'layers.0', 'layers.1', 'head'."
    ]
