"""Lightning's Trainer: accumulation, clipping, a validation before the first step and after the last; one device, and
two, of which it starts the second process itself."""

import pytest
from tests.integrations.watched import check_converted, check_scalars, check_tensors, check_unharmed, play
from tests.integrations.works_with import WorksWith

WORKS = (
    WorksWith("Lightning", ("lightning",), "`trainer.fit`, accumulation, clipping, validation", converted=True),
    WorksWith("Lightning, two devices", ("lightning",), "strategy `ddp`, its own launcher", ranks=2, converted=True),
)
DDP = {"DEVICES": "2", "STRATEGY": "ddp"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module", params=zip(WORKS, ({}, DDP), strict=True), ids=("one", "two"))
def seen(request, tmp_path_factory, warm_python):
    works, env = request.param
    return play(works, tmp_path_factory, "lightning_fit", warm=warm_python, really=works.ranks > 1, **env)


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_scalars(seen)


def test_every_tensor_is_what_it_is_by_hand(seen):
    want = seen.case.rows_by_hand()
    check_tensors(seen, want)
    assert {site.partition(":")[0] for _, site in want} == {"body.1", "head"}


def test_losses_are_those_that_lightning_logs(seen):
    said, run = seen.watched.said, seen.case.run()
    steps = 6 // seen.case.ranks
    assert run.meta["steps"] == said["steps"] == steps
    found = run.scalars()
    trained = [step > 0 for step in found["step"].tolist()]
    losses = [loss for loss, kept in zip(found["loss"].tolist(), trained, strict=True) if kept]
    microbatches = said["losses"]
    means = [(a + b) / 2 for a, b in zip(microbatches[::2], microbatches[1::2], strict=True)]
    first = seen.case.losses_by_hand()[0]  # rank 0's: Lightning logs its own, the run has all ranks'
    assert [first[step] for step in sorted(first)] == pytest.approx(means, rel=1e-5)
    if seen.case.ranks == 1:
        assert losses == pytest.approx(means, rel=1e-5)
        assert found["eval_loss"].tolist()[-1] == pytest.approx(said["validation"][-1], rel=1e-5)


def test_its_layers_are_converted(seen):
    check_converted(seen)
