"""torchao's casts of tensors that are spread over ranks are heard in recorded steps, and torchao is left as it was."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from narrowgauge.session.sites import torchao_casts
from narrowgauge.session.sites.torchao_casts import Casts

training_tensor = pytest.importorskip("torchao.float8.float8_training_tensor")
FUNCTION = training_tensor._ToFloat8ConstrFunc


@pytest.fixture
def part(two_ranks):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    return DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def cast(x, scale=3.0):
    mesh = x.device_mesh
    scale = DTensor.from_local(torch.tensor(scale), mesh, run_check=False)
    return training_tensor.hp_tensor_and_scale_to_float8(x, scale, torch.float8_e4m3fn)


def shown(casts, x):
    """What is told of x: the tensors and the rules, as they come."""
    told = []
    assert casts.show(x, None, lambda held, own: told.append((held.tensor, own and own("input", held.tensor))))
    return told


def rule_is(told, x, scale):
    (tensor, rule) = told
    assert torch.equal(tensor, x.to_local())
    assert rule.given.inv_scale == scale
    assert str(rule.operand.granularity) == str(torchao_casts.PerTensor())


def test_what_was_cast_is_known_by_its_memory_and_as_its_codes(part):
    casts = Casts()
    with casts.heard():
        codes = cast(part)
        (before,) = shown(casts, part)
        (after,) = shown(casts, codes)
    rule_is(before, part, 3.0)
    rule_is(after, part, 3.0)


def test_what_is_cast_later_is_told_then(part):
    casts = Casts()
    with casts.heard():
        told = shown(casts, part)
        assert told == []
        cast(part, 5.0)
        cast(part, 7.0)
    (only,) = told
    rule_is(only, part, 5.0)


def test_what_is_never_cast_is_told_when_the_step_ends(part):
    casts = Casts()
    with casts.heard():
        told = shown(casts, part)
        cast(part[:2])  # of the same memory, and another tensor
    assert [rule for _, rule in told] == [torchao_casts.UNHEARD]


def test_what_fails_as_it_is_shown_is_told_and_hides_no_other(part):
    casts, told = Casts(), []

    def failing(held, own):
        if own("input", held.tensor) != torchao_casts.UNHEARD:
            raise RuntimeError("a quantizer's")
        told.append("not heard")

    with casts.heard():
        assert casts.show(part, None, failing)
        others = shown(casts, part)
        cast(part, 5.0)
        assert told == ["not heard"]
    (only,) = others
    rule_is(only, part, 5.0)


def test_what_nobody_heard_is_told_without_a_rule(part):
    codes, casts = cast(part), Casts()
    with casts.heard():
        ((tensor, rule),) = shown(casts, codes)
    assert type(tensor).__name__ == "Float8TrainingTensor"
    assert rule is None


def test_plain_tensors_are_none_of_its_business(part):
    casts = Casts()
    with casts.heard():
        assert not casts.show(torch.ones(2, 2), None, lambda *_: pytest.fail("told"))


def test_torchao_is_as_it_was_and_nothing_is_held_afterwards(part):
    before, casts = vars(FUNCTION)["forward"], Casts()
    with casts.heard():
        assert vars(FUNCTION)["forward"] is not before
        with casts.heard():  # of a second watch
            cast(part)
    assert vars(FUNCTION)["forward"] is before
    assert not casts._latest
    assert not casts._waiting


def test_an_error_of_ours_does_not_reach_the_cast(part, monkeypatch):
    casts = Casts()
    with casts.heard():
        monkeypatch.setattr(torchao_casts, "here", lambda x: 1 / 0)
        codes = cast(part)
    monkeypatch.undo()
    assert torch.equal(codes.to_local()._data.float(), cast(part).to_local()._data.float())


def test_where_nothing_can_be_spread_torchao_is_left_alone():
    before = vars(FUNCTION)["forward"]
    with Casts().heard():
        assert vars(FUNCTION)["forward"] is before
