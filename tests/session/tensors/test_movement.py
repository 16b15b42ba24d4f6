"""How far a step moved the weights: the compiled walk says what torch's passes say."""

import math
import weakref

import pytest
import torch
from torch import nn

from narrowgauge.observe.stats import device, host
from narrowgauge.session.tensors.movement import Movement
from narrowgauge.session.tensors.rooms import MOST, SMALL, WALKED, Room


def made(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in ((64, 48), (5,), (1, 1, 7))]
    for w in weights:
        w.grad = torch.randn(w.shape, generator=g).to(dtype)
    return torch.optim.SGD(weights, lr=0.1)


def told(optimizer, room=None):
    movement = Movement(room=room)
    movement.before(optimizer)
    optimizer.step()
    movement.after(optimizer)
    assert movement.share == 1.0
    return {name: float(value) for name, value in movement.scalars().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_say_the_same(dtype, monkeypatch):
    before = torch.cat([p.detach().double().flatten() for p in made(dtype).param_groups[0]["params"]])
    optimizer = made(dtype)
    walked = told(optimizer)
    after = torch.cat([p.detach().double().flatten() for p in optimizer.param_groups[0]["params"]])
    monkeypatch.setattr(host, "ready", lambda: False)
    passed = told(made(dtype))
    close = 1e-12 if dtype == torch.float32 else 1e-6
    assert walked["param_norm"] == pytest.approx(float(before.norm()), rel=close)
    assert walked["update_ratio"] == pytest.approx(float((after - before).norm() / before.norm()), rel=close)
    assert walked == pytest.approx(passed, rel=1e-6)


@pytest.mark.parametrize("walks", [True, False])
@pytest.mark.parametrize(("by", "ratio"), [(1.0, math.inf), (0.0, math.nan)])
def test_of_weights_that_are_nothing_the_ratio_is_that_of_numbers(walks, by, ratio, monkeypatch):
    weight = nn.Parameter(torch.zeros(40, 16))
    weight.grad = torch.full_like(weight, by)
    if not walks:
        monkeypatch.setattr(host, "ready", lambda: False)
    found = told(torch.optim.SGD([weight], lr=0.1))
    assert found == pytest.approx({"param_norm": 0.0, "update_ratio": ratio}, nan_ok=True)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("more", [0, 1], ids=["the same weights", "others as well"])
def test_weights_that_two_optimizers_step_count_once_and_no_update_is_told(more, ready, monkeypatch):
    """An outer optimizer behind the inner one (DiLoCo), or two of one encoder: the weights before are held no more."""
    if not ready:
        monkeypatch.setattr(host, "ready", lambda: False)
    inner = made()
    (group,) = inner.param_groups
    others = [nn.Parameter(torch.full((30, 2), 0.5)) for _ in range(more)]
    outer = torch.optim.SGD([*group["params"], *others], lr=0.7)
    want = torch.cat([p.detach().double().flatten() for p in [*group["params"], *others]]).norm()
    movement = Movement()
    for optimizer in (inner, outer):
        movement.before(optimizer)
        optimizer.step()
        movement.after(optimizer)
    assert movement.scalars().keys() == {"param_norm"}
    assert float(movement.scalars()["param_norm"]) == pytest.approx(float(want), rel=1e-6)
    movement.begin_anew()
    movement.before(inner)
    inner.step()
    movement.after(inner)
    assert movement.scalars().keys() == {"param_norm", "update_ratio"}


@pytest.mark.parametrize("walked", [0, 1])
def test_what_one_optimizer_walked_and_another_passed_adds_up(walked):
    """The other's weights are float64, of which the walk knows nothing."""
    g = torch.Generator().manual_seed(0)
    some = [nn.Parameter(torch.randn(30, 20, generator=g)), nn.Parameter(torch.randn(9, generator=g).double())]
    before = [p.detach().double().clone() for p in some]
    movement = Movement()
    optimizers = [torch.optim.SGD([p], lr=0.5) for p in (some if walked else reversed(some))]
    for p in some:
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        movement.before(optimizer)
        optimizer.step()
        movement.after(optimizer)
    norm = sum(float(p.square().sum()) for p in before) ** 0.5
    moved = sum(float((p.detach() - old).square().sum()) for p, old in zip(some, before, strict=True)) ** 0.5
    found = {name: float(value) for name, value in movement.scalars().items()}
    assert found == pytest.approx({"param_norm": norm, "update_ratio": moved / norm}, rel=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1e20, 1e-25])
def test_what_moved_may_be_a_number_where_weights_are_a_tensor(factor):
    """Two optimizers, of which only the one that was walked has stepped."""
    g = torch.Generator().manual_seed(0)
    walked, passed = (nn.Parameter(torch.randn(9, generator=g) * factor), nn.Parameter(torch.ones(3).double()))
    movement, old = Movement(), walked.detach().double().clone()
    walked.grad = torch.full_like(walked, factor)
    optimizer = torch.optim.SGD([walked], lr=0.5)
    movement.before(optimizer)
    optimizer.step()
    movement.after(optimizer)
    movement.before(torch.optim.SGD([passed], lr=0.5))
    moved = float((walked.detach().double() - old).norm())
    norm = (float(old.square().sum()) + 3.0) ** 0.5
    assert float(movement.scalars()["update_ratio"]) == pytest.approx(moved / norm, rel=1e-6)


def test_weights_of_several_dtypes_are_measured_as_in_float64():
    g = torch.Generator().manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    weights = [nn.Parameter(torch.randn(300, 70, generator=g).to(dtype)) for dtype in dtypes]
    for w in weights:
        w.grad = torch.ones_like(w)
    before = [w.detach().double().clone() for w in weights]
    found = told(torch.optim.SGD(weights, lr=0.01))
    norm = sum(float(x.square().sum()) for x in before) ** 0.5
    moved = sum(float((w.detach().double() - x).square().sum()) for w, x in zip(weights, before, strict=True)) ** 0.5
    assert found["param_norm"] == pytest.approx(norm, rel=1e-6)
    assert found["update_ratio"] == pytest.approx(moved / norm, rel=1e-6)


def test_weights_that_are_no_plain_memory_go_the_other_way():
    optimizer = made()
    turned = nn.Parameter(torch.randn(6, 9).T)
    turned.grad = torch.ones(9, 6)
    optimizer.add_param_group({"params": [turned]})
    expected = torch.cat([p.detach().double().flatten() for group in optimizer.param_groups for p in group["params"]])
    assert told(optimizer)["param_norm"] == pytest.approx(float(expected.norm()), rel=1e-6)


def test_what_became_ready_in_between_changes_nothing(monkeypatch):
    optimizer = made()
    movement = Movement()
    monkeypatch.setattr(host, "ready", lambda: False)
    movement.before(optimizer)
    optimizer.step()
    monkeypatch.undo()
    movement.after(optimizer)
    assert movement.scalars()["update_ratio"] > 0


def test_small_models_find_their_room_again():
    room = Room()
    first = room.of(1, 35)
    assert room.of(1, 35) is first
    assert room.of(2, 35) is not first  # another optimizer's, in the same step
    assert room.of(1, 5).shape == (5,)  # its parameters are others now
    assert room.of(3, SMALL + 1) is not room.of(3, SMALL + 1)
    for number in range(4, 4 + MOST):
        room.of(number, 35)
    last = room.of(number, 35)
    assert room.of(1, 35) is not first  # optimizers come and go, the oldest first
    assert room.of(number, 35) is last


def test_room_that_was_used_before_changes_no_number():
    room = Room()
    told(made(), room)
    again, fresh = made(), made()
    for optimizer in (again, fresh):
        optimizer.step()
    assert told(again, room) == told(fresh)


def test_a_plan_is_kept_until_weights_are_elsewhere_and_holds_none():
    room, optimizer = Room(), made()
    (weights,) = (group["params"] for group in optimizer.param_groups)
    first = room.plan(1, weights, 1 << 17)
    assert room.plan(1, weights, 1 << 17) is first
    assert room.plan(1, weights, 1000).stride == 5  # 3084 elements
    elsewhere = weights[1].data = weights[1].data.clone()
    other = room.plan(1, weights, 1 << 17)
    assert other is not first
    assert other.whole.numbers[1] == elsewhere.data_ptr()
    weights[2].data = weights[2].data.view(7)
    assert room.plan(1, weights, 1 << 17).whole.kinds[0][2] == (7,)
    kept = weakref.ref(weights[0])
    del optimizer, weights
    assert kept() is None


def test_empty_weights_and_many_of_one_optimizer_are_measured_as_in_float64():
    weights = [nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n))) for n in (0, 1, 17, 0, 4099, 3)]
    before = torch.cat([w.detach().double() for w in weights])
    for w in weights:
        w.grad = torch.ones_like(w)
    found = told(torch.optim.SGD(weights, lr=0.5))
    assert found["param_norm"] == pytest.approx(float(before.norm()), rel=1e-12)
    assert found["update_ratio"] == pytest.approx(0.5 * before.numel() ** 0.5 / float(before.norm()), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "columns"), [((600, 1000), slice(0, 16)), ((400, 1536), slice(0, None, 2))])
def test_a_few_columns_that_move_are_seen_in_every_turn(shape, columns, dtype):
    seen = []
    for turn in range(5):
        weight = nn.Parameter(torch.ones(shape, dtype=dtype))
        weight.grad = torch.zeros(shape, dtype=dtype)
        weight.grad[:, columns] = 1.0
        optimizer, movement = torch.optim.SGD([weight], lr=0.5), Movement(turn, budget=weight.numel() // 2 + 1)
        movement.before(optimizer)
        optimizer.step()
        movement.after(optimizer)
        seen.append(float(movement.scalars()["update_ratio"]))
    true = 0.5 * (len(range(*columns.indices(shape[1]))) / shape[1]) ** 0.5
    assert seen == pytest.approx([true] * 5, rel=0.02)


def test_a_short_last_line_counts_as_one_of_many():
    """Beside a large weight only one line of a bias is copied, which may be that of one number."""
    sizes, seen = (1 << 20, 129), []
    for turn in range(9):
        weights = [nn.Parameter(torch.ones(n)) for n in sizes]
        for w in weights:
            w.grad = torch.zeros_like(w)
        weights[1].grad[-1] = 1.0
        optimizer, movement = torch.optim.SGD(weights, lr=1.0), Movement(turn)
        movement.before(optimizer)
        optimizer.step()
        movement.after(optimizer)
        seen.append(float(movement.scalars()["update_ratio"]) ** 2 * sum(sizes))
    assert sum(seen) / 9 == pytest.approx(1.0, rel=1e-3)
    assert max(seen) <= 9.001  # its lines


@pytest.mark.parametrize("turn", [0, 1, 7])
def test_of_more_weights_every_kth_line_of_memory_tells_the_update(turn):
    sizes, budget, line = (1, 15, 16, 17, 4099, 20_000, 33), 5000, 16
    weights = [nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(n))) for n in sizes]
    for w in weights:
        w.grad = torch.randn(w.shape, generator=torch.Generator().manual_seed(w.numel() + 1))
    before = [w.detach().double() for w in weights]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    movement = Movement(turn=turn, budget=budget)
    movement.before(optimizer)
    assert [walked.plan.copies.size for walked in movement._copied.values()] <= [budget + line * len(sizes)]
    optimizer.step()
    movement.after(optimizer)
    k, square, seen = 5, 0.0, 0  # the next prime from 24181 / 5000 on
    for w, old in zip(weights, before, strict=True):
        lines = torch.arange(w.numel()) // line
        taken = lines % k == turn % min(k, int(lines[-1]) + 1)
        taken |= int(lines[-1]) < 8  # of few lines, all
        factor = lines.unique().numel() / lines[taken].unique().numel()
        square += float((w.detach().double() - old)[taken].square().sum()) * factor
        seen += int(taken.sum())
    norm = float(torch.cat(before).norm())
    found = {name: float(value) for name, value in movement.scalars().items()}
    assert found["param_norm"] == pytest.approx(norm, rel=1e-12)
    assert found["update_ratio"] == pytest.approx(square**0.5 / norm, rel=1e-12)
    assert movement.share == seen / sum(sizes)


def ratio(weights, gradients, turn=0):
    """The update's, as told, by what it is; of a gradient step."""
    before = torch.cat([w.detach().double().flatten() for w in weights]).norm()
    for w, gradient in zip(weights, gradients, strict=True):
        w.grad = gradient
    optimizer = torch.optim.SGD(weights, lr=1.0)
    movement = Movement(turn=turn)
    movement.before(optimizer)
    optimizer.step()
    movement.after(optimizer)
    assert movement.share < 1
    update = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    return float(movement.scalars()["update_ratio"]) / float(update / before)


@pytest.mark.parametrize("width", [1024, 768])
def test_blocks_of_columns_that_move_are_not_missed_or_met_alone(width):
    """A distance that divides a row's lines would meet the same columns in every row."""
    weight = nn.Parameter(torch.randn(3 * WALKED // width // 2, width, generator=torch.Generator().manual_seed(0)))
    gradient = torch.zeros_like(weight)
    gradient.view(len(weight), -1, 16)[:, ::2] = 0.01
    for turn in (0, 1):
        assert ratio([weight], [gradient], turn) == pytest.approx(1, rel=0.02)


def test_a_short_line_does_not_stand_for_a_whole_tensor():
    frozen, bias = nn.Parameter(torch.ones(2 * WALKED)), nn.Parameter(torch.ones(17))
    gradient = torch.zeros(17)
    gradient[16] = 1
    for turn in range(3):
        assert ratio([frozen, bias], [torch.zeros(2 * WALKED), gradient], turn) == pytest.approx(1, rel=1e-6)


def test_a_share_of_large_weights_tells_an_update_with_outliers_to_a_percent():
    g = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(2 * WALKED + 5, generator=g))
    weight.grad = torch.randn(weight.shape, generator=g) * torch.randn(weight.shape, generator=g) ** 2
    optimizer = torch.optim.SGD([weight], lr=1.0)
    movement = Movement()
    movement.before(optimizer)
    optimizer.step()
    movement.after(optimizer)
    assert 0.33 < movement.share < 0.34
    want = float(weight.grad.double().norm()) / float((weight.detach() + weight.grad).double().norm())
    assert float(movement.scalars()["update_ratio"]) == pytest.approx(want, rel=0.011)


def test_an_update_that_is_a_small_last_layer_s_is_told_to_some_percent():
    g = torch.Generator().manual_seed(0)
    shapes, sizes = ((600, 600), (600, 600), (10, 600)), (0.01, 0.01, 1.0)  # as plain SGD has it
    gradients = [torch.randn(shape, generator=g) * size for shape, size in zip(shapes, sizes, strict=True)]
    told = [ratio([nn.Parameter(torch.ones(shape)) for shape in shapes], gradients, turn) for turn in range(7)]
    assert all(each == pytest.approx(1, rel=0.05) for each in told)
    assert max(told) - min(told) > 0.01  # the docs say so


def moved(change, ready, monkeypatch, elements=6000):
    """What is told of weights, half of them in a part of a larger piece of memory, once `change` was done to them."""
    monkeypatch.setattr(host, "ready", lambda: ready)
    weights = [nn.Parameter(torch.ones(elements)), nn.Parameter(torch.ones(2 * elements)[elements:])]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    movement = Movement(budget=4 * elements if ready else elements)
    movement.before(optimizer)
    with torch.no_grad():
        for w in weights:
            change(w)
    movement.after(optimizer)
    return {name: float(value) for name, value in movement.scalars().items()}


@pytest.mark.parametrize("ready", [True, False])
def test_a_step_may_put_new_memory_in_a_weight_s_place(ready, monkeypatch):
    told = moved(lambda w: setattr(w, "data", w.data - 0.25), ready, monkeypatch)
    assert told["update_ratio"] == pytest.approx(0.25)


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.untyped_storage().resize_(0),
        lambda w: setattr(w, "data", torch.ones(3)),
        lambda w: setattr(w, "data", w.data.bfloat16()),
        lambda w: setattr(w, "data", torch.ones(2 * w.numel())[::2]),
    ],
    ids=["freed", "another shape", "another dtype", "other strides"],
)
def test_of_weights_that_are_gone_after_the_step_no_update_is_told(change, ready, monkeypatch):
    assert set(moved(change, ready, monkeypatch)) == {"param_norm"}


def test_no_compiler_is_asked_for_where_nothing_was_walked(monkeypatch):
    def kernel():
        raise RuntimeError("this numba does not load")

    monkeypatch.setattr(host, "kernel", kernel)
    monkeypatch.setattr(host, "ready", lambda: False)
    assert told(made())["update_ratio"] > 0


def test_weights_for_whose_copies_there_is_no_memory_are_not_looked_at_again(monkeypatch):
    room, optimizer = Room(), made()

    class Full:
        share = 1.0

        def copy(self, turn):
            raise MemoryError

    movement = Movement(room=room)
    with monkeypatch.context() as patched:
        patched.setattr(room, "plan", lambda *args: Full())
        with pytest.raises(MemoryError):
            movement.before(optimizer)
    optimizer.step()
    movement.after(optimizer)
    assert movement.scalars() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("budget", [1 << 24, 30_000])
def test_one_kernel_on_a_gpu_says_what_passes_say(budget, monkeypatch):
    def found():
        g = torch.Generator().manual_seed(0)
        kinds = ((300, 201), torch.float32), ((1,), torch.float32), ((640, 96), torch.bfloat16), ((33,), torch.float16)
        weights = [nn.Parameter(torch.randn(shape, generator=g).to("cuda", dtype)) for shape, dtype in kinds]
        for w in weights:
            w.grad = torch.randn(w.shape, generator=g).to("cuda", w.dtype)
        optimizer, room, told = torch.optim.SGD(weights, lr=0.25), Room(), []
        for turn in range(3):
            movement = Movement(turn, budget, room)
            before = [w.detach().double() for w in weights]
            movement.before(optimizer)
            optimizer.step()
            weights[1].data = weights[1].data.clone()  # it lies elsewhere now
            movement.after(optimizer)
            norm = sum(float(w.square().sum()) for w in before) ** 0.5
            assert float(movement.scalars()["param_norm"]) == pytest.approx(norm, rel=1e-6)
            by = [w.detach().double() - x for w, x in zip(weights, before, strict=True)]
            if movement.share == 1.0:
                ratio = sum(float(x.square().sum()) for x in by) ** 0.5 / norm
                assert float(movement.scalars()["update_ratio"]) == pytest.approx(ratio, rel=1e-6)
            told.append({name: float(value) for name, value in movement.scalars().items()})
        return told, movement.share

    by_kernel, share = found()
    monkeypatch.setattr(device, "ready", lambda where: False)
    by_passes, other = found()
    assert share == pytest.approx(other, rel=1e-3)
    for mine, theirs in zip(by_kernel, by_passes, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
