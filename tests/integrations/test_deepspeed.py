"""DeepSpeed's engine on two ranks, started by its own launcher: ZeRO 0 to 3, float32, BF16 and FP16.

Of DeepSpeed 0.19's engines in FP16 those of ZeRO scale their losses. The others do not, and yet divide by the scale:
so small are the gradients that they step by, and the norm that FusedAdam's tells.
"""

import math

import pytest
from tests.integrations.watched import Case, Seen, check_converted, check_tensors, check_unharmed
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "DeepSpeed",
    ("deepspeed",),
    "`deepspeed`, ZeRO 0 to 3, its BF16 and FP16 optimizers, accumulation, clipping, a skipped step",
    ranks=2,
    converted=True,
)

FP32, BF16, FP16 = ("0", "1", "2", "3"), ("bf16", "bf16-1", "bf16-3"), ("fp16", "fp16-fused", "fp16-1", "fp16-3")
ENGINES = (*FP32, *BF16, *FP16)
SCALES = [1024.0, 512.0, 512.0, 1024.0, 2048.0]  # halved by a skipped step, doubled by the second one after

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    if reason := WORKS.missing():
        pytest.skip(reason)
    launcher, folder = ("deepspeed", "--num_gpus", "2", "--master_port", "PORT"), tmp_path_factory.mktemp("deepspeed")
    engines = {"ENGINES": " ".join(ENGINES)}
    case = Case(folder, "deepspeed_zero", launcher, WORKS.ranks, warm_python, WORKS, **engines)
    plain = case.by_hand()
    assert plain.code == 0, plain.err
    return Seen(case, plain, case.watched(), case.converted(ENGINES="0 2 3 bf16-1 bf16-3"))


def naming(said):
    """A site's name in the run: a later model's layers have its class in front."""
    engines = [row["model"] for row in said]
    order = list(dict.fromkeys(engines))

    def named(step, site):
        which = order.index(engines[step - 1])
        return f"Sequential{which}.{site}" if which else site

    return named


def engine(site):
    """Which engine's layer it is."""
    before, _, rest = site.partition(".")
    return ENGINES[int(before.removeprefix("Sequential") or 0)] if rest else ENGINES[0]


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
    said, named, found = seen.watched.said, naming(seen.watched.said), seen.case.rows()
    want = {(step, named(step, site)): row for (step, site), row in seen.case.rows_by_hand().items()}
    skipped = [step for step, row in enumerate(said, 1) if row.get("skipped")]
    overflown = {(step, named(step, f"{layer}:grad_output")) for step in skipped for layer in "13"}
    assert not overflown & want.keys()
    check_tensors(seen, want | {key: found[key] for key in overflown})
    table = seen.case.run().tensors()
    keys = zip(table["step"].tolist(), table["site"].tolist(), strict=True)
    counts = table["inf_count"] + table["nan_count"]  # behind an infinite gradient it may be no number
    assert {key for key, count in zip(keys, counts.tolist(), strict=True) if count} == overflown
    sites = {site for _, site in want}
    assert {engine(site) for site in sites} == set(ENGINES)
    assert "Sequential3.3:weight" in sites  # ZeRO 3's, gathered while its layer runs


def test_its_notes_say_what_was_not_seen(seen):
    notes = seen.case.run().meta["notes"]
    count, share = len(ENGINES), 128 * 32 / (128 * 32 + 32 * 64 + 64 + 64 * 128 + 128)
    assert f"Embedding ({count} of them, {share:.1%} of all parameters, looked up, not multiplied)" in " ".join(notes)


def test_an_engine_s_step_is_one_step_with_its_rate_and_its_norm_from_before_clipping(seen):
    said, found = seen.watched.said, seen.case.run().scalars()
    assert found["step"].tolist() == list(range(1, len(said) + 1))
    assert set(found["microbatches"].tolist()) == {2}
    assert found["lr"].tolist() == pytest.approx([row["learning_rate"] for row in said], rel=1e-6)
    # An engine without a wrapped optimizer clips, and keeps no norm: it is that of the same weights under ZeRO 1.
    norms = [row["grad_norm"] or said[n + 2]["grad_norm"] for n, row in enumerate(said)]
    assert found["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert max(filter(math.isfinite, norms)) > 0.5 > min(norms)


def test_scales_and_skipped_steps_of_fp16_are_told_and_norms_are_those_of_the_gradients(seen):
    found = seen.case.run().scalars()
    columns = zip(*(found[name].tolist() for name in ("skipped", "loss_scale", "grad_norm", "nonfinite")), strict=True)
    turns = list(zip(found["turn"].tolist(), (row["model"] for row in seen.watched.said), strict=True))
    assert set(turns[2:]) == set(list(enumerate(ENGINES))[1:])  # a skipped step is one of its own optimizer
    told = {name: [] for name in ENGINES}
    for row, each in zip(seen.watched.said, columns, strict=True):
        told[row["model"]].append((row, *each))
    assert all(math.isnan(skipped) and math.isnan(scale) for n in (*FP32, *BF16) for _, skipped, scale, *_ in told[n])
    for name in FP16:
        rows, skipped, scales, norms, nonfinite = zip(*told[name], strict=True)
        assert [row["skipped"] for row in rows] == [True, False, False, False]
        assert list(skipped) == pytest.approx([1.0, math.nan, math.nan, math.nan], nan_ok=True)
        assert set(nonfinite) == {0.0}
        assert [*(row["scales"][0] for row in rows), rows[-1]["scales"][1]] == SCALES
        scaled = name in ("fp16-1", "fp16-3")
        assert list(scales) == pytest.approx(SCALES[:4] if scaled else [math.nan] * 4, nan_ok=True)
        divided = {"fp16": [1.0] * 4, "fp16-1": SCALES}.get(name, SCALES[1:])  # those two: by the next step's
        assert [row["gradient"] is None for row in rows] == [True, False, False, False]
        want = [row["gradient"] / by for row, by in zip(rows[1:], divided[1:], strict=False)]
        assert norms[0] == math.inf
        assert list(norms[1:]) == pytest.approx(want, rel=1e-5)


def test_weights_and_their_update_are_those_that_the_optimizer_has(seen):
    said, found = seen.watched.said, seen.case.run().scalars()
    ours = zip(said, found["param_norm"].tolist(), found["update_ratio"].tolist(), strict=True)
    compared = 0
    for row, norm, ratio in ours:
        if row["model"] == "bf16":  # its float32 weights are not to be had from it
            assert math.isfinite(ratio)
            continue
        if row.get("skipped"):
            assert math.isnan(norm)
            assert math.isnan(ratio)
            assert row["update_ratio"] == 0.0
            continue
        compared += 1
        assert norm == pytest.approx(row["param_norm"], rel=1e-5)
        assert ratio == pytest.approx(row["update_ratio"], rel=1e-3)
    assert compared == 2 * 6 + 3 * 4


@pytest.mark.parametrize("engine", ["3", "fp16-1"])
def test_between_recorded_steps_rows_are_brief_and_say_what_whole_ones_do(tmp_path, warm_python, engine):
    launcher = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT")
    case = Case(tmp_path, "deepspeed_zero", launcher, 2, warm_python, ENGINES=engine, TIMES="4", EVERY="8")
    found = {}
    for scalars in ("all", "loss"):
        settings = tmp_path / f"{scalars}.toml"
        settings.write_text(f'[watch]\nscalars = "{scalars}"\n')
        ended = case.watched("--config", str(settings), really=False, name=scalars)
        assert ended.code == 0, ended.err
        table = case.run(scalars).scalars()
        rows = zip(*(table[name].tolist() for name in table), strict=True)
        found[scalars] = [dict(zip(table, row, strict=True)) for row in rows], ended.said
    (whole, said), (brief, said_in_brief) = found["all"], found["loss"]
    assert said_in_brief == said
    assert len(brief) == len(whole) == len(said)
    assert case.run("loss").meta["watch"]["steps_in_brief"] == sum(math.isnan(row["grad_norm"]) for row in brief) >= 5
    for one, other in zip(brief, whole, strict=True):
        for name in {"loss", "lr", "skipped", "loss_scale"} & other.keys():
            assert one[name] == pytest.approx(other[name], rel=1e-12, nan_ok=True)


def test_its_layers_are_converted(seen):
    check_converted(seen, named=naming(seen.converted.said), steps=[1, 2, 5, 6, 7, 8, 11, 12, 13, 14])
    names = {row["name"] for row in seen.case.run("converted").meta["conversion"] if row["recipe"] == "current"}
    said = {}
    for row in seen.converted.said:
        said.setdefault(row["model"], []).append(row["loss"])
    assert said["3"] == pytest.approx(said["0"], rel=1e-6)  # a weight that is gathered is quantized as one that stays
    assert names == {"1", *(f"Sequential{which}.1" for which in range(1, 5))}  # and not their heads
