"""DeepSpeed's engine on two ranks, started by its own launcher: ZeRO 0 to 3, float32 and BF16."""

import math

import pytest
from tests.integrations.watched import Case, Seen, check_converted, check_tensors, check_unharmed
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "DeepSpeed",
    ("deepspeed",),
    "`deepspeed`, ZeRO 0 to 3, its BF16 optimizers, accumulation, clipping",
    ranks=2,
    converted=True,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    if reason := WORKS.missing():
        pytest.skip(reason)
    launcher = ("deepspeed", "--num_gpus", "2", "--master_port", "PORT")
    case = Case(tmp_path_factory.mktemp("deepspeed"), "deepspeed_zero", launcher, WORKS.ranks, warm_python, WORKS)
    plain = case.by_hand()
    assert plain.code == 0, plain.err
    return Seen(case, plain, case.watched(), case.converted(STAGES="0 2 3 bf16-1 bf16-3"))


def named(step, site):
    """Its name in the run: each engine makes two steps, and a later model's layers have its class in front."""
    which = (step - 1) // 2
    return f"Sequential{which}.{site}" if which else site


def engine(site, names):
    """Which engine's layer it is: a later model's has its class in front."""
    before, _, rest = site.partition(".")
    return names[int(before.removeprefix("Sequential") or 0)] if rest else names[0]


def check_rate_and_tokens(seen):
    """As `check_scalars`; of gradients and weights its optimizers have shares, the gradients already clipped."""
    found, ranks = seen.case.run().scalars(), list(seen.case.scalars_by_hand().values())
    assert found["step"].tolist() == sorted(ranks[0])
    assert found["lr"].tolist() == pytest.approx([ranks[0][step]["lr"] for step in sorted(ranks[0])], rel=1e-5)
    assert found["tokens"].tolist() == [sum(rank[step]["tokens"] for rank in ranks) for step in sorted(ranks[0])]


def test_the_program_is_as_without_us(seen):
    check_unharmed(seen)
    check_rate_and_tokens(seen)


def test_every_tensor_of_both_ranks_is_what_it_is_by_hand(seen):
    names = list(dict.fromkeys(row["model"] for row in seen.watched.said))
    want = {(step, named(step, site)): row for (step, site), row in seen.case.rows_by_hand().items()}
    check_tensors(seen, want)
    sites = {site for _, site in want}
    assert {engine(site, names) for site in sites} == {"0", "1", "2", "3", "bf16", "bf16-1", "bf16-3"}
    assert "Sequential3.3:weight" in sites  # ZeRO 3's, gathered while its layer runs


def test_its_notes_say_what_was_not_seen(seen):
    notes = seen.case.run().meta["notes"]
    embeddings = 7 * 128 * 32 / (7 * (128 * 32 + 32 * 64 + 64 + 64 * 128 + 128))
    assert f"Embedding (7 of them, {embeddings:.1%} of all parameters, looked up, not multiplied)" in " ".join(notes)


def test_an_engine_s_step_is_one_step_with_its_rate_and_its_norm_from_before_clipping(seen):
    said, found = seen.watched.said, seen.case.run().scalars()
    assert found["step"].tolist() == list(range(1, len(said) + 1))
    assert set(found["microbatches"].tolist()) == {2}
    assert found["lr"].tolist() == pytest.approx([row["learning_rate"] for row in said], rel=1e-6)
    # An engine without a wrapped optimizer clips, and keeps no norm: it is that of the same weights under ZeRO 1.
    norms = [row["grad_norm"] or said[n + 2]["grad_norm"] for n, row in enumerate(said)]
    assert found["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert max(norms) > 0.5 > min(norms)


def test_weights_and_their_update_are_those_that_the_optimizer_has(seen):
    said, found = seen.watched.said, seen.case.run().scalars()
    ours = zip(said, found["param_norm"].tolist(), found["update_ratio"].tolist(), strict=True)
    compared = 0
    for row, norm, ratio in ours:
        if row["model"] == "bf16":  # its float32 weights are not to be had from it
            assert math.isfinite(ratio)
            continue
        compared += 1
        assert norm == pytest.approx(row["param_norm"], rel=1e-5)
        assert ratio == pytest.approx(row["update_ratio"], rel=1e-3)
    assert compared == 12


def test_its_layers_are_converted(seen):
    check_converted(seen, named=named, steps=[1, 2, 5, 6, 7, 8, 11, 12, 13, 14])
    names = {row["name"] for row in seen.case.run("converted").meta["conversion"] if row["recipe"] == "current"}
    said = {}
    for row in seen.converted.said:
        said.setdefault(row["model"], []).append(row["loss"])
    assert said["3"] == pytest.approx(said["0"], rel=1e-6)  # a weight that is gathered is quantized as one that stays
    assert names == {"1", *(f"Sequential{which}.1" for which in range(1, 5))}  # and not their heads
