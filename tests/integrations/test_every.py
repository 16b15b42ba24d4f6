"""One step in three is recorded, of programs that gather weights, recompute, or count steps themselves: the next two
leave no row, and in the third all is heard again, as it was."""

import json
from dataclasses import replace

import pytest
from tests.integrations import test_compiled, test_deepspeed, test_lightning, test_torch
from tests.integrations.watched import OF_RECORDED, check_scalars, check_tensors, check_unharmed, play

STEPS = 7  # of each model
# Program -> what it works with, how it is made that long, the class of its second model.
PROGRAMS = {
    "fsdp2": (test_torch.WORKS[1], {"COUNT": "56"}, ""),
    "deepspeed_zero": (test_deepspeed.WORKS, {"COUNT": "112", "ENGINES": "3 bf16-3"}, "Sequential1"),
    "hf_compiled": (test_compiled.WORKS, {"STEPS": "7", "COMPILED": "no", "CHECKPOINTS": "yes"}, ""),
    "lightning_fit": (test_lightning.WORKS[1], {"COUNT": "112", **test_lightning.DDP}, ""),
}
# Measuring by hand moves its memory, and so the last place of its sums.
NEAR = {"hf_compiled": 1e-6}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_recorded_steps_are_what_they_are_by_hand_and_scalars_are_of_all(program, tmp_path_factory, warm_python):
    works, env, second = PROGRAMS[program]
    works = replace(works, converted=False)
    seen = play(works, tmp_path_factory, program, warm=warm_python, really=False, EVERY="3", **env)
    check_unharmed(seen, NEAR.get(program, 0.0))
    hand = {key: row for key, row in seen.case.rows_by_hand().items() if key[0] % seen.case.every == 0}
    want = {(n, f"{second}.{site}" if n > STEPS else site): row for (n, site), row in hand.items()}
    assert {step for step, _ in want} == set(range(3, STEPS * (1 + bool(second)) + 1, 3))
    check_tensors(seen, want)
    if program == "deepspeed_zero":
        test_deepspeed.check_rate_and_tokens(seen)
        check_engines(seen)
    else:
        check_scalars(seen)
    if program == "fsdp2":
        check_hooks(seen)


def check_hooks(seen):
    """Layers have one more in recorded steps, each of these, and none of ours between: the program has looked.

    Without them products are heard instead, and the rows are the same.
    """
    alone, watched = (json.loads((seen.case.folder / name / "hooks.json").read_text()) for name in ("plain", "watched"))
    own = [min(layer) for layer in zip(*watched, strict=True)]
    assert len(watched) == len(alone) == STEPS
    assert own == alone[0]
    assert watched == [[own_count + (step % 3 == 0) for own_count in own] for step in range(1, STEPS + 1)]


def check_engines(seen):
    """Norms are those that the engines say: of gradients in all steps, of weights and their update in recorded ones."""
    said, found = seen.watched.said, seen.case.run().scalars()
    for name in ("grad_norm", *OF_RECORDED):
        steps = [n for n in range(len(said)) if name not in OF_RECORDED or (n + 1) % seen.case.every == 0]
        near = 1e-3 if name == "update_ratio" else 1e-5
        assert found[name][steps].tolist() == pytest.approx([said[n][name] for n in steps], rel=near), name
