"""What an observer is shown, and what the gemm check can see."""

import pytest
import torch
from tests.compute.nn.layers import Counting, Seen, adopt, calc_diff
from torch import nn

from narrowgauge.compute.nn.linear import set_observer
from narrowgauge.compute.nn.observer import spread
from narrowgauge.compute.recipes import CATALOG, CURRENT, ROWWISE

M, K, N = 40, 64, 48


RESULTS = ("output", "grad_input", "grad_weight")


def turn_of(layer, role):
    """Make it the turn of a result to be checked in the next step."""
    layer._fp8.check = (-1, RESULTS.index(role) + 2, 1)


def watched(recipe=CURRENT, *, checked="output", **kwargs):
    torch.manual_seed(0)
    layer, seen = adopt(nn.Linear(K, N), recipe, **kwargs), Seen()
    set_observer(layer, seen)
    turn_of(layer, checked)
    x = torch.randn(2, M // 2, K, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    return layer, seen, x, y, dy


@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_each_operand_is_shown_once_with_the_copy_that_is_multiplied(recipe):
    layer, seen, x, _, dy = watched(recipe)
    high = {"input": x.reshape(M, K), "weight": layer.weight, "grad_output": dy.reshape(M, N)}
    for role, tensor in high.items():
        [(shown, q, ratio)] = seen.operands["layer", role]
        rule = recipe.uses(role)[0]
        assert torch.equal(shown, tensor)
        assert (q.fmt, q.granularity, q.shape) == (rule.fmt, rule.granularity, tuple(tensor.shape))
        assert calc_diff(tensor, q.dequantize()) < 2.5e-3
        assert (ratio is None) == (recipe.state == "none")


@pytest.mark.parametrize("role", RESULTS)
@pytest.mark.parametrize("recipe", CATALOG.values(), ids=lambda r: r.name)
def test_each_result_is_shown_and_one_with_a_part_recomputed_exactly(recipe, role):
    layer, seen, x, y, dy = watched(recipe, checked=role)
    x_MK, dy_MN, w_NK = x.detach().reshape(M, K), dy.reshape(M, N), layer.weight.detach()
    exact = {
        "output": x_MK @ w_NK.T + layer.bias.detach(),
        "grad_input": dy_MN @ w_NK,
        "grad_weight": dy_MN.T @ x_MK,
    }
    for other, found in {"output": y, "grad_input": x.grad, "grad_weight": layer.weight.grad}.items():
        [(result, check)] = seen.results["layer", other]
        assert torch.equal(result, found.reshape(exact[other].shape))
        assert (check is not None) == (other == role)
    [(_, check)] = seen.results["layer", role]
    assert check.got.shape == check.want.shape == {"output": (4, N), "grad_input": (4, K), "grad_weight": (N, 16)}[role]
    assert {check.got.dtype, check.want.dtype} == {torch.float32}
    want = exact[role]
    part = want[:, spread(K, 16, 0)] if role == "grad_weight" else want[spread(M, 4, 0)]
    torch.testing.assert_close(check.want, part, rtol=1e-5, atol=1e-5)
    assert 1e-5 < calc_diff(check.want, check.got) < 3e-3


def test_results_are_checked_in_turn_and_layers_begin_elsewhere():
    first = set()
    for name in "abcdef":
        layer, seen = adopt(nn.Linear(K, N), name=name), Seen()
        set_observer(layer, seen)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for _ in range(6):
            for _ in range(2):
                layer(torch.randn(M, K, requires_grad=True)).sum().backward()
            optimizer.step()
        turns = [[check is not None for _, check in seen.results[name, role]] for role in RESULTS]
        assert [sum(checks) for checks in zip(*turns, strict=True)] == [1] * 12  # one a step, in all its microbatches
        assert all(checks[:6] == checks[6:] for checks in turns)
        first.add([checks[0] for checks in turns].index(True))
    assert len(first) > 1


def test_of_a_wide_layer_some_rows_of_its_gradient_are_checked():
    layer, seen = adopt(nn.Linear(K, 256)), Seen()
    set_observer(layer, seen)
    turn_of(layer, "grad_weight")
    x, dy = torch.randn(M, K), torch.randn(M, 256)
    layer(x).backward(dy)
    [(dw, check)] = seen.results["layer", "grad_weight"]
    rows, columns = spread(256, 128, 0), spread(K, 16, 0)
    assert torch.equal(check.got, dw[rows][:, columns])
    torch.testing.assert_close(check.want, (dy.T @ x)[rows][:, columns], rtol=1e-5, atol=1e-5)


def test_a_wrong_gain_shows_in_the_check():
    for role in RESULTS:
        _, seen, *_ = watched(backend=Counting(gain=2.0), checked=role)
        [(_, check)] = seen.results["layer", role]
        gain = (check.got * check.want).sum() / check.want.square().sum()
        assert gain.item() == pytest.approx(2.0, rel=0.02)


def test_without_dgrad_the_other_copy_is_shown_upright():
    layer, seen = adopt(nn.Linear(K, N), ROWWISE), Seen()
    set_observer(layer, seen)
    dy = torch.randn(M, N)
    layer(torch.randn(M, K)).backward(dy)
    [(shown, q, _)] = seen.operands["layer", "grad_output"]
    assert q.shape == tuple(shown.shape) == (M, N)
    assert calc_diff(dy, q.dequantize()) < 1e-3
    assert ("layer", "grad_input") not in seen.results


def test_who_does_not_want_to_look_costs_nothing():
    layer, seen = adopt(nn.Linear(K, N)), Seen(wanted=False)
    set_observer(layer, seen)
    layer(torch.randn(M, K)).sum().backward()
    assert seen.counts() == {}
    set_observer(layer, Seen())
    with torch.no_grad():
        layer(torch.randn(M, K))
    assert layer._fp8.observer.counts() == {}
    set_observer(layer, None)
    layer(torch.randn(M, K)).sum().backward()


def test_an_empty_batch_has_nothing_to_check():
    layer, seen = adopt(nn.Linear(K, N)), Seen()
    set_observer(layer, seen)
    layer(torch.randn(0, K, requires_grad=True)).sum().backward()
    assert [seen.results["layer", role][0][1] for role in ("output", "grad_input")] == [None, None]


def test_watching_changes_no_bit():
    results = []
    for observer in (None, Seen()):
        torch.manual_seed(0)
        layer = adopt(nn.Linear(K, N))
        set_observer(layer, observer)
        y = layer(torch.randn(M, K))
        y.square().sum().backward()
        results.append((y, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_set_observer_counts_layers():
    model = nn.Sequential(adopt(nn.Linear(K, N)), nn.Linear(N, K))
    assert set_observer(model, Seen()) == 1


def test_samples_are_spread_and_rotate():
    assert spread(3, 4, 9) == [0, 1, 2]
    assert spread(40, 4, 0) == [0, 10, 20, 30]
    assert spread(40, 4, 35) == [5, 15, 25, 35]
    assert set().union(*(spread(40, 4, turn) for turn in range(10))) == set(range(40))
    assert all(len(set(spread(41, 4, turn))) == 4 for turn in range(50))
