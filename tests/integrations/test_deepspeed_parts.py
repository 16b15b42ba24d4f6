"""DeepSpeed's experts and its pipeline engines: each rank has a part, and the run has all of them, as the whole does.

In float32 DeepSpeed 0.19 clips a pipeline by the norm of the first stage's gradients, and tells none: it is the run's.
Where ZeRO or a scale is, the norm is of both stages.
"""

import math

import pytest
from tests.integrations.differences import differences
from tests.integrations.watched import NEAR, play
from tests.integrations.works_with import WorksWith

WORKS = WorksWith(
    "DeepSpeed",
    ("deepspeed",),
    "its `PipelineModule` in two stages, float32 and FP16; its layer of experts, two on each rank, and not its gate",
    ranks=2,
)
EXPERTS, STEPS = 2, 3  # steps of the experts; of each engine, which come after
ENGINES = ("float32", "clipped", "fp16")
LAYERS = {1: 0, 3: 0, 4: 1, 6: 1}  # the pipelines' linear ones: the rank of each

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # executed once, by one worker


@pytest.fixture(scope="module")
def seen(tmp_path_factory, warm_python):
    launcher, engines = ("torchrun", "--nproc-per-node", "2", "--master-port", "PORT"), " ".join(ENGINES)
    return play(WORKS, tmp_path_factory, "deepspeed_parts", launcher, warm_python, really=False, ENGINES=engines)


def named(step, site):
    """Its name in the run: a later model's layers have its class in front, and its number."""
    which = (step - 1 - EXPERTS) // STEPS
    return site if step <= EXPERTS else f"PipelineModule{which or ''}.{site}"


def rows(seen):
    """What each engine told of its steps, with the run's scalars."""
    table = seen.case.run().scalars()
    names = ("loss", "lr", "grad_norm", "param_norm", "update_ratio", "loss_scale", "skipped", "microbatches", "tokens")
    found = [dict(zip(names, row, strict=True)) for row in zip(*(table[name].tolist() for name in names), strict=True)]
    pairs = list(zip(seen.watched.said, found, strict=True))[EXPERTS:]
    return {engine: [pair for pair in pairs if pair[0]["engine"] == engine] for engine in ENGINES}


def test_every_layer_of_both_ranks_has_rows_of_its_own_with_the_values_by_hand(seen):
    assert seen.watched.code == 0, seen.watched.err
    assert seen.watched.said == seen.case.alone().said  # what counts by hand moves memory, and with it last digits
    want = {(step, named(step, site)): row for (step, site), row in seen.case.rows_by_hand().items()}
    layers = "moe.deepspeed_moe"
    names = {f"{layers}.experts.deepspeed_experts.{expert}.{layer}" for expert in range(4) for layer in (0, 2)}
    names |= {f"PipelineModule{which}.{layer}" for which in ("", 1, 2) for layer in LAYERS}
    assert {site.partition(":")[0] for _, site in want} == names
    # The gate, which both ranks have, multiplies without calling its layer: the run sees it, who counts by hand not.
    found = {
        key: row for key, row in seen.case.rows(ranks=[1, 2]).items() if not key[1].startswith(f"{layers}.gate.wg:")
    }
    overflown = {(EXPERTS + 2 * STEPS + 1, f"PipelineModule2.{layer}:grad_output") for layer in LAYERS}
    assert not overflown & want.keys()
    assert differences(found, want | {key: found[key] for key in overflown}, NEAR) == []


def test_each_rank_s_batch_counts_beside_experts_of_its_own(seen):
    assert seen.case.run().scalars()["tokens"].tolist()[:EXPERTS] == [2 * 2] * EXPERTS


def test_of_the_stages_every_number_is_that_of_the_whole(seen):
    for engine, pairs in rows(seen).items():
        for said, row in pairs:
            assert row["loss"] == pytest.approx(said["loss"], rel=1e-6)
            assert (row["lr"], row["microbatches"], row["tokens"]) == (0.01, 4, 4 * 4 * 31)
            if said["skipped"]:
                continue
            assert row["param_norm"] == pytest.approx(math.hypot(*said["weights"]), rel=1e-5)
            moved = math.hypot(*said["moved"]) / math.hypot(*said["weights"])
            assert row["update_ratio"] == pytest.approx(moved, rel=1e-3)
            counted = said["gradients"][:1] if engine == "clipped" else said["gradients"]
            # Gradients of the FP16 engine are added up in FP16.
            norm = math.hypot(*counted) / (said["scale"] or 1.0)
            assert row["grad_norm"] == pytest.approx(norm, rel=2**-10 if engine == "fp16" else 1e-5)
            assert said["norm"] is None or row["grad_norm"] == pytest.approx(said["norm"], rel=1e-6)
    assert seen.case.run().meta["error"] == ""
    assert "on something else than numbers" not in " ".join(seen.case.run().meta["notes"])  # what the first stage did


def test_the_last_stage_s_scale_is_told_and_a_step_that_overflowed_was_skipped(seen):
    for engine, pairs in rows(seen).items():
        told = [(row["skipped"], row["loss_scale"]) for _, row in pairs]
        scaled = engine == "fp16"
        skips = [said["skipped"] for said, _ in pairs]
        assert skips == [scaled, False, False]
        scales = [said["scale"] if scaled else math.nan for said, _ in pairs]
        want = [(1.0 if skip else math.nan, scale) for skip, scale in zip(skips, scales, strict=True)]
        assert told == [pytest.approx(each, nan_ok=True) for each in want]
    said, row = rows(seen)["fp16"][0]
    assert scales == [1024.0, 512.0, 512.0]
    assert (said["norm"], row["grad_norm"], said["gradients"]) == (math.inf, math.inf, [None, None])
    assert math.isnan(row["param_norm"])
    assert math.isnan(row["update_ratio"])
