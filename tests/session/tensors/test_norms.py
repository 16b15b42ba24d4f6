"""Norms over sharded tensors: each rank's part, weighed by how many hold the same, without a collective."""

import math

import pytest
import torch
import torch.distributed as dist
from tests.session.inline import followed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrowgauge.session.tensors.norms import PIECE, Parts, Squares, Term, named, of_clips, of_norm


@pytest.fixture
def mesh():
    """This process is rank 0 of four, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    dist.destroy_process_group()


def part(local, mesh, *placements):
    return DTensor.from_local(local, mesh, placements, run_check=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_and_tensors_add_up_in_float64_whatever_the_program_s_default_is(dtype):
    big, small = 0.1e60, torch.tensor(1e59 / 3, dtype=torch.float64)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            for terms in ((Term(big), Term(small)), (Term(small), Term(big)), (Term(big), Term(float(small)))):
                assert float(Squares(*terms).total) == pytest.approx(big + float(small), rel=1e-15)
    finally:
        torch.set_default_dtype(before)


def test_plain_tensors_are_whole():
    x, y = torch.randn(5, 7), torch.randn(3, dtype=torch.bfloat16)
    found = Parts([x, y]).squares()
    assert not found.partial
    assert float(found.total) == pytest.approx(float(x.double().square().sum() + y.double().square().sum()), rel=1e-6)
    assert list(named("grad", found)) == ["grad_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_large_tensor_s_norm_is_as_sure_as_a_small_one_s(dtype):
    """In float32, one by one, eight million equal squares add up to one percent too much."""
    x = torch.full((8000, 1000), 0.3, dtype=dtype)
    y = torch.full((100, 7), 5.0)
    for tensor in (x, x.T):
        found = Parts([tensor, y]).squares([1.0, 2.0])
        want = tensor.numel() * float(x[0, 0]) ** 2 + 2 * 700 * 25.0
        assert float(found.total) == pytest.approx(want, rel=2e-4)


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-22, 1e-12, 1e18, 1e20, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_whose_squares_float32_has_not_have_a_norm(dtype, size):
    x = [(torch.randn(shape, generator=torch.Generator().manual_seed(0)) * size).to(dtype) for shape in (50, 3 * PIECE)]
    found = Parts(x).squares()
    assert math.sqrt(found.total) == pytest.approx(
        math.hypot(*(float(each.double().norm()) for each in x)), rel=1e-5, abs=0.0
    )


@pytest.mark.parametrize(("last", "norm"), [(0.0, 0.0), (math.inf, math.inf), (math.nan, math.nan)])
def test_of_zeros_and_of_what_is_not_finite_the_norm_is_what_float32_says(last, norm):
    x = [torch.tensor([0.0, last]), torch.zeros(3)]
    assert float(Parts(x).squares().total) == pytest.approx(norm, nan_ok=True)


def test_both_parts_of_complex_numbers_count(tmp_path):
    w = nn.Parameter(torch.tensor([3 + 4j, 12j]))
    assert float(Parts([w.detach().conj(), torch.ones(2)]).squares().total) == pytest.approx(25 + 144 + 2)
    with followed(tmp_path, every=1) as (session, writer):
        optimizer = torch.optim.SGD([w, nn.Parameter(torch.ones(2))], lr=0.5)
        (w * w.conj()).real.sum().backward()  # its gradient is 2 w
        optimizer.step()
    assert writer.scalars[1]["grad_norm"] == pytest.approx(26.0)
    assert writer.scalars[1]["param_norm"] == pytest.approx(math.sqrt(171))
    assert writer.scalars[1]["update_ratio"] == pytest.approx(13 / math.sqrt(171))
    assert session.hearing.notes == []


def test_sparse_and_empty_tensors_are_left_out():
    assert Parts([torch.ones(3).to_sparse(), torch.ones(0)]).squares() is None
    assert float(Parts([torch.ones(3).to_sparse(), torch.ones(2)]).squares().total) == pytest.approx(2.0)


def test_a_rank_s_part_counts_once_among_all_that_hold_it(mesh):
    x = torch.randn(6, 4)
    found = Parts([part(x, mesh, Replicate(), Shard(0))]).squares()  # two ranks hold this half
    assert found.partial
    assert float(found.total) == pytest.approx(float(x.double().square().sum()) / 2, rel=1e-6)
    assert list(named("grad", found)) == ["grad_square_local"]


def test_what_every_rank_holds_is_whole(mesh):
    x = torch.randn(6, 4)
    found = Parts([part(x, mesh, Replicate(), Replicate())]).squares()
    assert (found.partial, float(found.total)) == (False, pytest.approx(float(x.double().square().sum()), rel=1e-6))


def test_the_ranks_parts_sum_to_the_whole_beside_plain_tensors(mesh):
    whole, bias = torch.randn(8, 4), torch.randn(4)
    parts = [
        Parts([part(shard, mesh, Shard(0), Shard(0)), bias]).squares().total
        for shard in whole.chunk(4)  # as each of the four ranks would see it
    ]
    assert float(sum(parts)) == pytest.approx(float(whole.double().square().sum() + bias.double().square().sum()))


def test_what_lies_on_a_smaller_mesh_is_the_same_on_the_ranks_beside_it(mesh):
    whole, head = torch.randn(8, 4), torch.randn(4, 4)
    parts = []
    for rank, shard in enumerate(whole.chunk(4)):  # the head is sharded along the first dimension alone
        mine = part(head.chunk(2)[rank // 2], mesh["copies"], Shard(0))
        parts.append(Parts([part(shard, mesh, Shard(0), Shard(0)), mine]).squares().total)
    assert float(sum(parts)) == pytest.approx(float(whole.double().square().sum() + head.double().square().sum()))


def test_summands_say_nothing(mesh):
    assert Parts([part(torch.ones(2, 2), mesh, Replicate(), Partial())]).squares() is None


def test_gradients_of_which_a_rank_has_a_summand_are_told(mesh, tmp_path):
    """As SequenceParallel leaves those of norms: without a word the norm was that of the others alone."""
    whole = nn.Parameter(part(torch.ones(4), mesh, Replicate(), Replicate()))
    summed = nn.Parameter(part(torch.ones(4), mesh, Replicate(), Replicate()))
    for clips in (False, True):
        with followed(tmp_path, every=1) as (session, writer):
            optimizer = torch.optim.SGD([whole, summed], lr=0.5)
            whole.grad = part(torch.full((4,), 3.0), mesh, Replicate(), Replicate())
            summed.grad = part(torch.full((4,), 4.0), mesh, Replicate(), Partial())
            if clips:
                nn.utils.clip_grad_norm_([whole, summed], 100.0)
            optimizer.step()
        told = [note for note in session.facts()["notes"] if "summand" in note]
        assert [note[:40] for note in told] == ([] if clips else ["Of 1 gradient each rank had a summand (P"])
        if not clips:
            assert writer.scalars[1]["grad_norm"] == pytest.approx(6.0)


def test_sparse_gradients_are_told(tmp_path):
    """Without a word the norm was that of the few others, or was missing."""
    torch.manual_seed(0)
    table, head = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)
    with followed(tmp_path, every=1) as (session, writer):
        optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.5)
        for _ in range(2):
            head(table(torch.tensor([1, 1, 3]))).square().mean().backward()
            optimizer.step()
    told = [note for note in session.facts()["notes"] if "sparse" in note]
    assert told == ["1 gradient was sparse (an embedding's, say): grad_norm is that of the others, if there are any."]
    dense = math.hypot(*(p.grad.norm().item() for p in head.parameters()))
    assert writer.scalars[2]["grad_norm"] == pytest.approx(dense)


def test_a_flat_parameter_s_piece_is_a_part():
    x = nn.Parameter(torch.ones(4))
    x._fsdp_flattened = True  # as torch.distributed.fsdp marks the pieces that it gives to an optimizer
    assert Parts([x]).squares().partial
    assert Parts([torch.ones(4)], [x]).squares().partial


def test_the_norm_of_a_clip_that_is_not_reduced_yet_is_this_rank_s_part(mesh):
    found = of_norm(part(torch.tensor(6.0), mesh, Replicate(), _NormPartial(2)))
    assert (found.partial, float(found.total)) == (True, 36.0 / 2)
    found = of_norm(part(torch.tensor(6.0), mesh, Replicate(), Replicate()))
    assert (found.partial, float(found.total)) == (False, 36.0)
    found = of_norm(torch.tensor(3.0))
    assert (found.total.item(), found.partial, found.ranks) == (9.0, False, 1)


def test_sharded_weights_train_and_leave_local_squares_without_a_collective(mesh, tmp_path, monkeypatch):
    model = nn.Linear(8, 8, bias=False)
    with followed(tmp_path, every=1) as (session, writer):
        weight = distribute_tensor(model.weight.detach(), mesh, [Shard(0), Shard(0)])
        model.weight = nn.Parameter(weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = part(torch.ones(4, 8), mesh, Replicate(), Replicate())
        y = model(x)
        y.backward(torch.ones_like(y))
        before, gradient = weight.to_local().clone(), model.weight.grad.to_local().clone()
        with CommDebugMode() as collectives:
            optimizer.step()
    assert collectives.get_total_counts() == 0
    assert session.hearing.notes == []
    squares = {name: float(t.double().square().sum()) for name, t in (("grad", gradient), ("param", before))}
    for name, value in squares.items():
        assert writer.column(f"{name}_square_local") == pytest.approx({1: value}, rel=1e-6)
    assert writer.column("update_square_local") == pytest.approx({1: squares["grad"] / 4}, rel=1e-5)
    assert not {"grad_norm", "param_norm", "update_ratio"} & set(writer.scalars[1])
    assert math.isfinite(writer.scalars[1]["peak_memory_bytes"])


def test_norms_that_a_program_took_are_those_of_all_it_clipped():
    assert of_clips([torch.tensor(3.0)]) == {"grad_norm": torch.tensor(3.0)}
    assert of_clips([torch.tensor(3.0), torch.tensor(4.0)]) == {"grad_norm": torch.tensor(5.0, dtype=torch.float64)}
    assert of_clips([]) == {}
