"""Norms of what Megatron-Core has cut: shares add up over the group, what is next to them counts once."""

import sys
from types import SimpleNamespace

import pytest
import torch

from narrowgauge.session.steps.trained import Trained
from narrowgauge.session.tensors import shares
from narrowgauge.session.tensors.movement import Movement
from narrowgauge.session.tensors.norms import Parts

GROUP = [2, 3]


@pytest.fixture(autouse=True)
def megatron(monkeypatch, request):
    """Megatron-Core is there, and this rank is one of two that share its layers."""
    state = SimpleNamespace(get_tensor_model_parallel_group=lambda: "group")
    monkeypatch.setitem(sys.modules, shares.PLACE, state)
    monkeypatch.setattr(shares, "members", lambda group: GROUP if group == "group" else [])
    return state


def weight(**marks):
    x = torch.nn.Parameter(torch.ones(8))
    for name, value in marks.items():
        setattr(x, name, value)
    return x


def cut():
    return weight(tensor_model_parallel=True)


def whole(rank_total):
    """Of both ranks, which have the same numbers here."""
    return rank_total.ranks * rank_total.total.item()


@pytest.mark.parametrize(
    ("parameters", "square"),
    [
        ([cut(), weight()], 16 + 8),
        ([cut(), weight(tensor_model_parallel=False)], 16 + 8),
        ([cut(), weight(tensor_model_parallel=True, allreduce=False)], 16 + 16),
        ([cut(), weight(allreduce=False)], 16 + 16),
        ([weight(), weight()], 8 + 8),
    ],
)
def test_each_counts_as_often_as_it_is_there(parameters, square):
    assert whole(Parts(parameters).squares()) == pytest.approx(square)
    one_by_one = [Parts([p]).squares() for p in parameters]  # as in optimizers of their own
    assert whole(one_by_one[0].and_also(one_by_one[1])) == pytest.approx(square)
    assert whole(one_by_one[1].and_also(one_by_one[0])) == pytest.approx(square)


@pytest.mark.parametrize("mark", [{"in_parts": True}, {}])
def test_parts_of_which_nobody_says_whose_the_others_are_count_as_they_are(mark):
    """ZeRO's and FSDP1's flat parameters, next to what Megatron-Core has cut."""
    flat = torch.ones(8)
    if not mark:
        flat._fsdp_flattened = True
    found, beside = Parts([flat], **mark).squares(), Parts([cut()]).squares()
    for both in (found.and_also(beside), beside.and_also(found)):
        assert (both.total.item(), both.partial, both.ranks) == (pytest.approx(16.0), True, 2)
    if not mark:
        assert Parts([flat, cut()]).squares().total.item() == pytest.approx(16.0)


@pytest.mark.parametrize(("other", "square"), [(weight, 16 + 8), (lambda: weight(allreduce=False), 16 + 16)])
def test_weights_and_their_update_over_optimizers_of_their_own(other, square):
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in (cut(), other())]
    seen = Movement()
    for optimizer in optimizers:
        seen.before(optimizer)
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"][0].grad = torch.ones(8)
        optimizer.step()
        seen.after(optimizer)
    found = seen.scalars()
    assert 2 * found["param_square_local"].item() == pytest.approx(square)
    assert 2 * found["update_square_local"].item() == pytest.approx(square / 4)
    trained = Trained()
    for optimizer in optimizers:
        trained.add(optimizer, optimizer.param_groups[0]["params"])
    assert trained.mesh() == GROUP[0]


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
def test_optimizers_may_come_in_any_order(order):
    flat = Parts([torch.full([8], 2.0)], in_parts=True).squares()  # others have more, and nobody says who
    found = [flat, Parts([weight()]).squares(), Parts([cut()]).squares()]
    first, second, third = (found[i] for i in order)
    assert whole(first.and_also(second).and_also(third)) == pytest.approx(2 * 32 + 8 + 16)


def test_what_an_optimizer_holds_in_parts_counts_once_over_a_group_that_has_it_all(megatron):
    """Megatron-Core's distributed optimizer: shards of what is cut carry its mark, both ranks have a norm's."""
    norms = torch.full([8], 3.0)
    assert whole(Parts([cut(), norms], in_parts=True).squares()) == pytest.approx(16 + 72)


STAGE = {  # world, tensor, expert and expert-tensor parallel ranks: how many ranks hold the same part of an expert
    (2, 2, 2, 1): 1,
    (4, 4, 2, 1): 2,
    (4, 2, 4, 1): 1,
    (4, 2, 2, 2): 1,
    (4, 1, 2, 1): 2,
}


@pytest.mark.parametrize("sizes", STAGE, ids=str)
def test_experts_count_once_however_they_lie_beside_what_is_dense(monkeypatch, sizes):
    world, tp, ep, etp = sizes
    groups = {"stage": list(range(world)), "tp": list(range(tp)), "experts": list(range(STAGE[sizes]))}
    state = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: "tp",
        get_tensor_and_data_parallel_group=lambda with_context_parallel: "stage",
        get_expert_data_parallel_group=lambda: "experts",
    )
    monkeypatch.setitem(sys.modules, shares.PLACE, state)
    monkeypatch.setattr(shares, "members", lambda group: groups.get(group, []))
    dense, norm, expert = weight(tensor_model_parallel=True), weight(), weight(allreduce=False)
    parts = [dense, norm, expert]
    square = 8 * tp + 8 + 8 * ep * etp  # of ones: each distinct part once
    found = Parts(parts).squares()
    assert found.ranks == world
    assert whole(found) == pytest.approx(square)
    one_by_one = [Parts([p]).squares() for p in parts]
    assert whole(one_by_one[0].and_also(one_by_one[1]).and_also(one_by_one[2])) == pytest.approx(square)
    trained, optimizer = Trained(), torch.optim.SGD(parts, lr=0.1)
    trained.add(optimizer, parts)
    assert trained.mesh() == 0


def test_without_a_group_everything_is_here(megatron):
    def none():
        raise AssertionError("tensor model parallel group is not initialized")

    megatron.get_tensor_model_parallel_group = none
    found = Parts([cut(), weight()]).squares()
    assert (found.total.item(), found.partial) == (pytest.approx(16.0), False)


@pytest.mark.parametrize(("where", "mark"), shares.TIED, ids=["Megatron-Core", "DeepSpeed"])
@pytest.mark.parametrize("beside", [weight, cut])
def test_what_is_tied_to_an_earlier_stage_s_counts_there(monkeypatch, where, mark, beside):
    """The head of a pipeline's last stage that is the first one's embedding."""
    monkeypatch.setitem(sys.modules, where, sys.modules.get(where, SimpleNamespace()))
    own, tied = beside(), weight(**{mark: True})
    square = Parts([own]).squares().total.item()
    gradients = [torch.full([8], 3.0) for _ in range(2)]
    assert Parts([own, tied]).squares().total.item() == square
    assert Parts(gradients, [own, tied]).squares().total.item() == pytest.approx(9 * square)
    assert Parts([tied]).squares() is None
    first = weight(**{mark: False})  # DeepSpeed marks those of all stages
    assert Parts([own, first]).squares().total.item() > square


@pytest.mark.parametrize(("where", "mark"), shares.TIED, ids=["Megatron-Core", "DeepSpeed"])
def test_its_update_counts_there_too(monkeypatch, where, mark):
    monkeypatch.setitem(sys.modules, where, sys.modules.get(where, SimpleNamespace()))
    own, tied = weight(), weight(**{mark: True})
    own.grad, tied.grad = torch.ones(8), torch.full([8], 7.0)
    seen, optimizer = Movement(), torch.optim.SGD([own, tied], lr=0.5)
    seen.before(optimizer)
    optimizer.step()
    seen.after(optimizer)
    found = seen.scalars()
    assert [float(found[name]) for name in ("param_norm", "update_ratio")] == pytest.approx([8**0.5, 0.5])


@pytest.mark.parametrize(("where", "mark"), shares.TIED, ids=["Megatron-Core", "DeepSpeed"])
def test_a_mark_of_such_a_name_says_nothing_where_nobody_ties_stages(monkeypatch, where, mark):
    monkeypatch.delitem(sys.modules, where, raising=False)
    assert Parts([weight(), weight(**{mark: True})]).squares().total.item() == pytest.approx(16.0)
