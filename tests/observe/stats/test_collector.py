"""The Collector: what it watches, what it writes, and that nothing it does can end a training run."""

import faulthandler
import logging
import signal
import threading

import numpy as np
import pytest
import torch
from torch import nn

from narrowgauge.compute.nn import GemmSample, convert, set_observer
from narrowgauge.compute.quant import quantize
from narrowgauge.compute.recipes import BLOCKWISE, CURRENT, DELAYED
from narrowgauge.formats import E4M3FN
from narrowgauge.metrics import OPERAND_COLUMNS, RESULT_COLUMNS, finalize
from narrowgauge.observe.stats import Collector, host, measure, moments
from narrowgauge.observe.stats.packing import Packer
from narrowgauge.observe.store import RunWriter, open_run


class Notebook:
    """A writer that only remembers."""

    def __init__(self):
        self.rows, self.events = {}, []

    def add_tensors(self, step, sites, columns):
        for i, site in enumerate(sites):
            self.rows[step, site] = {name: column[i] for name, column in columns.items()}

    def add_event(self, step, kind, message, site=None, **data):
        self.events.append((step, kind, message, site))


@pytest.fixture
def book():
    return Notebook()


def show(collector, x, module="m", role="input", **options):
    q = quantize(x, E4M3FN)
    collector.operand(module, role, x, q, **options)
    return q


def test_an_operand_becomes_a_row_with_every_column(book):
    collector = Collector(book)
    assert collector.begin_step(3)
    x = torch.randn(40, 64)
    q = show(collector, x, amax_ratio=torch.tensor(1.25))
    collector.end_step()
    row, wanted = book.rows[3, "m:input"], measure(x, q, amax_ratio=1.25)
    assert tuple(row) == OPERAND_COLUMNS
    for name in OPERAND_COLUMNS:
        assert row[name] == pytest.approx(np.array(wanted[name]), rel=1e-4, abs=1e-7, nan_ok=True), name


def test_a_result_becomes_a_row_with_its_moments_and_the_check(book):
    collector = Collector(book)
    collector.begin_step(0)
    y, want = torch.randn(40, 64), torch.randn(4, 64)
    collector.result("m", "output", y, GemmSample(want * 1.5, want))
    collector.result("m", "grad_weight", y, None)
    collector.end_step()
    row = book.rows[0, "m:output"]
    assert tuple(row) == RESULT_COLUMNS
    assert row["gemm_gain"] == pytest.approx(1.5)
    assert row["std"] == pytest.approx(y.std(correction=0).item(), rel=1e-5)
    assert np.isnan(book.rows[0, "m:grad_weight"]["gemm_gain"])


def test_microbatches_of_a_step_are_one_row(book):
    collector = Collector(book)
    collector.begin_step(0)
    parts = torch.randn(3, 40, 64)
    for part in parts:
        q = quantize(part, E4M3FN, scale=0.01)
        collector.operand("m", "input", part, q, amax_ratio=part.amax())
        collector.result("m", "output", part, None)
    collector.end_step()
    whole = parts.reshape(120, 64)
    wanted = measure(whole, quantize(whole, E4M3FN, scale=0.01), amax_ratio=parts.amax().item())
    for name in OPERAND_COLUMNS:
        assert book.rows[0, "m:input"][name] == pytest.approx(np.array(wanted[name]), rel=1e-4, abs=1e-7), name
    assert book.rows[0, "m:output"]["numel"] == whole.numel()
    assert len(book.rows) == 2


def test_a_microbatch_with_a_nan_and_one_without_are_one_row(book):
    collector = Collector(book)
    collector.begin_step(0)
    good, bad = torch.randn(2, 40, 64)
    bad[3, 5] = torch.nan
    for part in (good, bad, good):
        show(collector, part)
    collector.end_step()
    row = book.rows[0, "m:input"]
    assert (row["numel"], row["nan_count"]) == (3 * 2560, 1)
    whole = torch.cat((good, bad, good))
    assert row["amax"] == whole[whole.isfinite()].abs().max()
    assert row["sqnr_db"] == pytest.approx(
        measure(good, quantize(good, E4M3FN))["sqnr_db"], abs=1e-6
    )  # bad has no scale


@pytest.mark.parametrize("recipe", [CURRENT, BLOCKWISE], ids=lambda recipe: recipe.name)
def test_what_is_judged_is_what_is_quantized_and_shown(recipe, book):
    rule, x, w = recipe.uses("input")[0], torch.randn(2, 130, 96), torch.randn(32, 96)
    for step, shown in enumerate((True, False)):
        collector = Collector(book)
        collector.begin_step(step)
        for part in x:
            if shown:
                q = quantize(part, rule.fmt, rule.granularity, scaling=rule.scaling)
                collector.operand("m", "input", part, q)
            else:
                assert collector.judge("m", "input", part, rule)
        for _ in range(2):
            if shown:
                collector.operand("m", "weight", w, quantize(w, rule.fmt, rule.granularity, scaling=rule.scaling))
            else:
                assert collector.judge("m", "weight", w, rule)
        collector.end_step()
        assert collector.failures == 0
    for site in ("m:input", "m:weight"):
        for name in OPERAND_COLUMNS:
            want, found = book.rows[0, site][name], book.rows[1, site][name]
            assert found == pytest.approx(want, rel=1e-12, nan_ok=True), (site, name)
    assert book.rows[1, "m:weight"]["numel"] == w.numel()


def test_what_cannot_be_judged_is_left_to_be_shown(book, monkeypatch):
    collector, rule = Collector(book), CURRENT.uses("input")[0]
    x = torch.randn(4, 16)
    assert not collector.judge("m", "input", x, rule)  # no step is open
    collector.begin_step(0)
    assert not collector.judge("m", "input", torch.full((4, 16), torch.inf), rule)
    assert not collector.judge("m", "input", x.to("meta"), rule)
    monkeypatch.setattr(host, "ready", lambda: False)
    assert not collector.judge("m", "input", x, rule)
    collector.end_step()
    assert (book.rows, collector.failures) == ({}, 0)


def test_a_weight_is_looked_at_once_a_step(book):
    collector = Collector(book)
    for step in range(2):
        collector.begin_step(step)
        for _ in range(3):
            show(collector, torch.randn(8, 16), role="weight")
        collector.end_step()
    assert [book.rows[step, "m:weight"]["numel"] for step in range(2)] == [128, 128]


def test_only_every_nth_step_is_watched(book):
    collector = Collector(book, every=3)
    watched = []
    for step in range(7):
        assert collector.begin_step(step) == collector.wants("m")
        watched.append(collector.wants("m"))
        show(collector, torch.randn(4, 16))
        collector.end_step()
        assert not collector.wants("m")
    assert watched == [True, False, False, True, False, False, True]
    assert sorted(step for step, _ in book.rows) == [0, 3, 6]


def test_layers_may_appear_in_some_steps_only(book):
    collector = Collector(book)
    for step, modules in enumerate((["a"], ["a", "b"], [], ["b"])):
        collector.begin_step(step)
        for module in modules:
            show(collector, torch.randn(4, 16), module)
        collector.end_step()
    assert set(book.rows) == {(0, "a:input"), (1, "a:input"), (1, "b:input"), (3, "b:input")}


def test_a_step_left_open_ends_with_the_next_and_with_flush(book):
    collector = Collector(book)
    collector.begin_step(0)
    show(collector, torch.randn(4, 16))
    collector.begin_step(1)
    show(collector, torch.randn(4, 16))
    collector.flush()
    collector.flush()
    assert set(book.rows) == {(0, "m:input"), (1, "m:input")}


def test_nothing_is_looked_at_between_steps(book):
    collector = Collector(book)
    show(collector, torch.randn(4, 16))
    collector.result("m", "output", torch.randn(4, 16), None)
    collector.end_step()
    assert book.rows == {}
    assert collector.seconds == 0


def test_empty_tensors_leave_no_row(book):
    collector = Collector(book)
    collector.begin_step(0)
    show(collector, torch.zeros(0, 16))
    collector.result("m", "output", torch.zeros(0, 16), None)
    collector.end_step()
    assert book.rows == {}
    assert collector.failures == 0


def test_moments_that_the_quantizer_made_are_taken_as_they_are(book):
    collector = Collector(book)
    collector.begin_step(0)
    x, other = torch.randn(8, 32), torch.randn(8, 32)
    packed = moments(other, quantize(other, E4M3FN))
    show(collector, x, moments=packed)
    collector.end_step()
    wanted = finalize(packed[None].numpy())
    assert book.rows[0, "m:input"]["amax"] == wanted["amax"][0]
    assert book.rows[0, "m:input"]["p5_col_sqnr_db"] == wanted["p5_col_sqnr_db"][0]


def test_it_states_its_own_cost(book):
    collector = Collector(book)
    collector.begin_step(0)
    show(collector, torch.randn(200, 256))
    first = collector.seconds
    assert first > 0
    collector.end_step()
    assert collector.seconds > first


def test_the_end_of_a_step_counts_once(book, monkeypatch):
    collector = Collector(book)
    collector.begin_step(1)
    show(collector, torch.randn(8, 8))
    before, seconds = collector.seconds, []
    monkeypatch.setattr(collector, "_spent", seconds.append)
    collector.end_step()
    assert len(seconds) == 2  # packing, and handing over
    assert collector.seconds == before  # nothing by another way


def test_a_failure_is_one_warning_one_event_and_never_an_exception(book, caplog):
    collector = Collector(book)
    with caplog.at_level(logging.WARNING):
        collector.begin_step(5)
        x = torch.randn(4, 16)
        collector.operand("bad", "input", x, quantize(torch.randn(3, 16), E4M3FN))
        collector.operand("bad", "inputs", x, quantize(x, E4M3FN))
        collector.result("bad", "output", torch.randn(4, 16), GemmSample(x, x[:2]))
        show(collector, x, "good")
        collector.end_step()
    assert collector.failures == 3
    assert set(book.rows) == {(5, "good:input")}
    assert len(caplog.records) == 1
    assert "watching bad:input failed at step 5: ShapeError: the tensor is [4, 16]" in caplog.text
    assert "Training goes on" in caplog.text
    assert [(step, kind, site) for step, kind, _, site in book.events] == [(5, "watch_failed", "bad:input")]


def test_a_writer_that_fails_does_not_end_training(caplog):
    class Broken:
        def add_tensors(self, *args):
            raise OSError("no space left on device")

        add_event = add_tensors

    collector = Collector(Broken())
    for step in range(3):
        collector.begin_step(step)
        show(collector, torch.randn(4, 16))
        collector.end_step()
    collector.flush()
    assert collector.failures == 3
    assert len(caplog.records) == 1
    assert "no space left on device" in caplog.text


def train(recipe, collector, steps=2, microbatches=2):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 32))
    model, _ = convert(model, recipe)
    set_observer(model, collector)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(1)
    for step in range(steps):
        collector.begin_step(step)
        for _ in range(microbatches):
            model(torch.randn(40, 64, generator=g)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    collector.flush()
    return model


@pytest.mark.parametrize("recipe", [CURRENT, DELAYED, BLOCKWISE], ids=lambda recipe: recipe.name)
def test_a_converted_model_is_watched_through_the_one_door(recipe, book):
    collector = Collector(book)
    train(recipe, collector, steps=3)
    assert collector.failures == 0
    assert {step for step, _ in book.rows} == {0, 1, 2}
    last = {site: row for (step, site), row in book.rows.items() if step == 2}
    assert {"0:input", "0:weight", "4:grad_output", "2:grad_input", "0:grad_weight", "4:output"} <= set(last)
    assert "0:grad_input" not in last  # nobody asked for the gradient of the data
    assert last["0:input"]["numel"] == 2 * 40 * 64
    assert last["0:input"]["sqnr_db"] == pytest.approx(31.5, abs=0.6)
    for role in ("output", "grad_input", "grad_weight"):  # each was checked once in three steps
        checked = [book.rows[step, f"2:{role}"] for step in range(3)]
        assert [row["gemm_gain"] for row in checked if row["gemm_gain"] == row["gemm_gain"]] == [
            pytest.approx(1, abs=0.02)
        ]
        assert max(row["gemm_sqnr_db"] for row in checked if row["gemm_sqnr_db"] == row["gemm_sqnr_db"]) > 20
    assert np.isnan(last["0:input"]["amax_ratio"]) == (recipe is not DELAYED)


def test_watching_changes_no_number_of_the_training(book):
    class Nobody(Collector):
        def wants(self, module):
            return False

    watched, alone = train(DELAYED, Collector(book)), train(DELAYED, Nobody(book))
    for a, b in zip(watched.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_folder_holds_what_was_watched(tmp_path):
    with RunWriter(tmp_path / "run", {}) as writer:
        collector = Collector(writer, every=2)
        train(CURRENT, collector, steps=3)
    run = open_run(tmp_path / "run")
    table = run.tensors(sites=["2:input", "2:output"])
    assert sorted(set(table["step"].tolist())) == [0, 2]
    assert run.series("2:input", "sqnr_db")
    assert collector.failures == 0
    assert collector.seconds > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_looked_at_can_still_be_freed_by_its_owner(dtype, book):
    # FSDP2 frees a gathered weight by resizing its storage, which numpy forbids for what it was shown.
    x = torch.randn(16, 32).to(dtype)
    collector = Collector(book)
    collector.begin_step(1)
    show(collector, x)
    collector.result("m", "output", x, GemmSample(x[:2], x[:2].float()))
    collector.end_step()
    collector.flush()
    assert {site for _, site in book.rows} == {"m:input", "m:output"}
    x.untyped_storage().resize_(0)


def test_what_was_counted_in_inference_mode_is_added_to_outside_of_it():
    host.wait()
    rows = []
    for inference in (False, True):
        book, generator = Notebook(), torch.Generator().manual_seed(0)
        collector = Collector(book)
        collector.begin_step(1)
        with torch.inference_mode(inference):
            for _ in range(2):
                show(collector, torch.randn(16, 32, generator=generator))
        show(collector, torch.randn(16, 32, generator=generator))
        collector.flush()
        assert not book.events
        rows.append({name: repr(value) for name, value in book.rows[1, "m:input"].items()})
    assert rows[0] == rows[1]


RULE = CURRENT.uses("input")[0]


def judged(collector, x):
    """The short way of what was judged."""
    assert collector.judge("m", "input", x, RULE)
    again = collector.again("m", "input", x, RULE)
    return lambda: again(x, RULE, None)


def test_the_first_tensor_of_a_step_goes_the_short_way_too(book):
    host.wait()
    collector = Collector(book)
    collector.begin_step(0)
    counts = judged(collector, torch.randn(20, 64))
    collector.begin_anew()
    assert counts()
    collector.begin_step(1)
    assert counts()
    collector.flush()
    assert {(step, row["numel"]) for (step, _), row in book.rows.items()} == {(0, 1280), (1, 1280)}


def test_what_a_late_thread_leaves_is_no_other_steps(book, monkeypatch):
    host.wait()
    collector, x = Collector(book, every=2), torch.randn(20, 64)
    collector.begin_step(0)
    counts = judged(collector, x)
    held_on = Collector._held_on

    def late(self, device):
        monkeypatch.setattr(Collector, "_held_on", held_on)
        self.end_step()  # another thread's, meanwhile
        return held_on(self, device)

    monkeypatch.setattr(Collector, "_held_on", late)
    collector.judge("late", "input", x, RULE)
    collector.begin_step(1)
    assert not counts()
    collector.begin_step(2)
    assert counts()
    collector.flush()
    assert {site: row["numel"] for site, row in book.rows.items()} == {(0, "m:input"): 1280, (2, "m:input"): 1280}


def test_a_step_that_cannot_be_begun_loses_no_tensor_that_can_be_counted(book, monkeypatch):
    host.wait()
    collector = Collector(book)
    collector.begin_step(0)
    counts = judged(collector, torch.randn(20, 64))
    with monkeypatch.context() as patch:
        patch.setattr(host, "prepare", lambda: 1 / 0)
        assert collector.begin_step(1)
    assert not counts()
    assert collector.judge("m", "input", torch.randn(20, 64), RULE)
    collector.flush()
    assert [(step, site) for step, site in book.rows] == [(0, "m:input"), (1, "m:input")]
    assert [kind for _, kind, _, _ in book.events] == ["watch_failed"]


def test_a_signal_that_comes_while_something_is_counted_may_end_the_run(book, monkeypatch):
    host.wait()
    collector = Collector(book)
    collector.begin_step(0)
    counts = judged(collector, torch.randn(20, 64))
    add = Packer.add_counted

    def interrupted(packer, *args):
        monkeypatch.setattr(Packer, "add_counted", add)
        ended = threading.Timer(20, faulthandler.dump_traceback_later, (0.1,), {"exit": True})  # a handler that waits
        ended.start()
        signal.raise_signal(signal.SIGTERM)
        ended.cancel()
        return add(packer, *args)

    before = signal.signal(signal.SIGTERM, lambda *args: collector.flush())
    try:
        monkeypatch.setattr(Packer, "add_counted", interrupted)
        assert counts()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert book.rows[0, "m:input"]["numel"] == 1280
