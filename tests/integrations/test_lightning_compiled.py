"""A LightningModule that torch.compile made another module of: the Trainer takes that apart, compiles the first one's
methods and calls these. What layers see is measured by hand in an uncompiled execution."""

import pytest
from tests.integrations.differences import TOLERANCES, differences
from tests.integrations.watched import Case
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "Lightning, a compiled module",
    ("lightning",),
    "`torch.compile`, `trainer.fit`; every second step, beside an uncompiled execution",
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker
RECORDED = {2, 4, 6}


@pytest.fixture(scope="module")
def case(tmp_path_factory, warm_python):
    if reason := WORKS.missing():
        pytest.skip(reason)
    case = Case(tmp_path_factory.mktemp("lightning_compiled"), "lightning_fit", warm=warm_python, works=WORKS)
    assert case.by_hand(EVERY="2").code == 0
    return case


@pytest.fixture(scope="module")
def plain(case):
    return case.alone(COMPILED="yes")


@pytest.fixture(scope="module")
def watched(case):
    return case.watched("--every", "2", really=False, COMPILED="yes")


def recorded(rows):
    return {key: row for key, row in rows.items() if key[0] in RECORDED}


def test_the_program_is_as_without_us_and_has_as_many_graphs_and_breaks(plain, watched):
    assert plain.code == watched.code == 0, (plain.err, watched.err)
    assert plain.said["graphs"] > 0
    assert {name: watched.said[name] for name in ("steps", "graphs", "breaks")} == {
        name: plain.said[name] for name in ("steps", "graphs", "breaks")
    }
    for name in ("losses", "validation"):
        assert watched.said[name] == pytest.approx(plain.said[name], rel=1e-5), name


def test_every_tensor_of_a_recorded_step_is_what_it_is_by_hand_without_graphs(case, watched):
    want = recorded(case.rows_by_hand())
    assert {step for step, _ in want} == RECORDED
    assert {site.partition(":")[0] for _, site in want} == {"body.1", "head"}
    assert differences(case.rows(), want, TOLERANCES) == []


def test_losses_are_those_that_lightning_logs(case, watched):
    run, said = case.run(), watched.said["losses"]
    assert (run.meta["not_found"], run.meta["steps"]) == ([], 6)
    means = [(a + b) / 2 for a, b in zip(said[::2], said[1::2], strict=True)]
    found = run.scalars()
    losses = [loss for step, loss in zip(found["step"].tolist(), found["loss"].tolist(), strict=True) if step > 0]
    assert losses == pytest.approx(means, rel=1e-5)


def test_its_layers_are_converted(case, plain):
    ended = case.converted("--every", "2", hand=False, COMPILED="yes")
    assert ended.code == 0, ended.err
    # The validation before the first step was compiled while nothing was converted yet.
    assert ended.said["graphs"] == plain.said["graphs"] + 1
    [row] = [row for row in case.run("converted").meta["conversion"] if row["recipe"] == "current"]
    assert (row["name"], row["calls"] > 0) == ("body.1", True)
    assert ended.said["losses"] != plain.said["losses"]
    assert ended.said["losses"] == pytest.approx(plain.said["losses"], rel=0.02)
    sites = {site for _, site in case.rows("converted")}
    assert {f"body.1:{role}" for role in ("input", "weight", "grad_output")} <= sites
