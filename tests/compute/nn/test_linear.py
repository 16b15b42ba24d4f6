"""Fp8Linear as a module: adopted and released in place, copied, pickled, printed."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from tests.compute.nn.layers import Seen, adopt, adopt_all
from torch import nn

from narrowgauge.compute.kernels import BACKENDS
from narrowgauge.compute.nn.linear import Fp8Linear, clock_of, set_observer
from narrowgauge.compute.nn.scaling.clock import StepClock
from narrowgauge.compute.recipes import CURRENT, DELAYED
from narrowgauge.errors import ConversionError


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    adopt_all(model, DELAYED.with_(history=4))
    return model


def steps(model, count, seed=1):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(count):
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adoption_touches_nothing_but_the_class():
    layer = nn.Linear(32, 16)
    rng, keys, weight, bias = torch.get_rng_state(), list(layer.state_dict()), layer.weight, layer.bias
    state = Fp8Linear.adopt(
        layer, name="a", recipe=CURRENT, backend=BACKENDS["reference"], table=None, clock=StepClock()
    )
    assert type(layer) is Fp8Linear
    assert isinstance(layer, nn.Linear)
    assert state is layer._fp8
    assert torch.equal(torch.get_rng_state(), rng)
    assert list(layer.state_dict()) == keys
    assert layer.weight is weight
    assert layer.bias is bias
    Fp8Linear.release(layer)
    assert type(layer) is nn.Linear
    assert not hasattr(layer, "_fp8")
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), F.linear(x, weight, bias))


def test_hooks_keep_working():
    layer, called = nn.Linear(32, 16), []
    layer.register_forward_pre_hook(lambda *_: called.append("pre"))
    layer.register_forward_hook(lambda *_: called.append("post"))
    adopt(layer)(torch.randn(4, 32))
    assert called == ["pre", "post"]


def test_it_counts_calls_and_rows():
    layer = adopt(nn.Linear(32, 16))
    layer(torch.randn(3, 5, 32))
    with torch.no_grad():
        layer(torch.randn(99, 32))
    assert (layer._fp8.calls, layer._fp8.rows_seen) == (2, 15)


def test_it_prints_what_it_is():
    assert repr(adopt(nn.Linear(32, 16))) == (
        "Fp8Linear(in_features=32, out_features=16, bias=True, recipe=current, backend=reference)"
    )


def test_a_copy_shares_nothing_that_changes(model):
    steps(model, 2)
    set_observer(model, Seen())
    twin = copy.deepcopy(model)
    ours, theirs = model[0]._fp8, twin[0]._fp8
    assert theirs.observer is None
    assert ours.observer is not None
    assert theirs.table is twin[2]._fp8.table is not ours.table
    assert theirs.clock is twin[2]._fp8.clock is not ours.clock
    assert theirs.recipe is ours.recipe
    before = [t.clone() for t in (theirs.table.history, theirs.table.scale)]
    expected = steps(copy.deepcopy(model), 3)
    assert steps(model, 3) == expected
    assert torch.equal(theirs.table.history, before[0])
    assert torch.equal(theirs.table.scale, before[1])
    assert steps(twin, 3) == expected


def test_a_copied_layer_works_alone(model):
    layer = copy.deepcopy(model[0])
    assert layer._fp8.table is not model[0]._fp8.table
    steps(layer, 2)
    assert layer._fp8.table.steps == 2
    assert model[0]._fp8.table.steps == 0


def test_a_pickled_model_goes_on_where_it_was(model):
    steps(model, 2)
    set_observer(model, Seen())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert twin[0]._fp8.observer is None
    assert twin[0]._fp8.table is twin[2]._fp8.table
    assert steps(twin, 3) == steps(model, 3)
    assert clock_of(twin).step == 5


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of the strided layout, in torch's words
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # asked by torch's compiler
@pytest.mark.parametrize(("layout", "compiled"), [(torch.jagged, False), (torch.jagged, True), (torch.strided, False)])
def test_pieces_of_a_nested_tensor_are_multiplied_as_the_rows_of_one_batch(layout, compiled):
    torch.manual_seed(0)
    layer = adopt(nn.Linear(32, 32))
    twin = copy.deepcopy(layer)
    call, dense = (
        torch.compile(each, fullgraph=True, backend="aot_eager") if compiled else each for each in (layer, twin)
    )
    pieces = [torch.randn(rows, 32, requires_grad=True) for rows in (3, 7, 6)]
    batch = torch.cat([piece.detach() for piece in pieces]).requires_grad_()
    x = torch.nested.as_nested_tensor(pieces, layout=layout)
    y = x + call(x)  # which torch allows those alone that are nested alike
    rows = torch.cat(y.unbind())
    expected = batch + dense(batch)
    assert torch.equal(rows, expected)
    dy = torch.randn_like(expected)
    (rows * dy).sum().backward()
    (expected * dy).sum().backward()
    assert torch.equal(torch.cat([piece.grad for piece in pieces]), batch.grad)
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert torch.equal(layer.bias.grad, twin.bias.grad)


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr], ids=["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_input_is_refused(sparse):
    layer = adopt(nn.Linear(32, 32))
    with pytest.raises(ConversionError) as caught:
        layer(sparse(torch.eye(4, 32)))
    layout = "torch.sparse_coo" if sparse is torch.Tensor.to_sparse else "torch.sparse_csr"
    assert str(caught.value) == (
        f"the converted layer 'layer' was given a sparse tensor ({layout}), and FP8 products are those of dense ones. "
        "Keep the layer high (skip=['layer'], or `skip` of [convert] in a settings file, --config), or give it "
        "x.to_dense()."
    )


def test_what_a_plain_layer_refuses_of_nested_tensors_is_refused_in_the_same_words():
    layer = nn.Linear(32, 32)
    starts, lengths = torch.tensor([0, 1]), torch.tensor([3, 4])
    holes = torch.nested.narrow(torch.randn(2, 9, 32), 1, starts, lengths, layout=torch.jagged)
    heads = torch.nested.nested_tensor([torch.randn(rows, 4, 32) for rows in (3, 7)], layout=torch.jagged)
    for x in (holes, heads.transpose(1, 2)):
        with pytest.raises(ValueError) as plain:
            layer(x)
        with pytest.raises(ValueError) as converted:
            adopt(copy.deepcopy(layer))(x)
        assert str(converted.value) == str(plain.value)


def test_conversions_that_make_no_sense_are_refused():
    class Custom(nn.Linear):
        pass

    with pytest.raises(ConversionError) as caught:
        adopt(Custom(32, 16), name="head")
    assert str(caught.value) == (
        "'head' is a Custom, and only a plain nn.Linear can be converted in place; leave it out (skip=...), "
        "or revert it first."
    )
    with pytest.raises(ConversionError, match="'layer' is a Fp8Linear"):
        adopt(adopt(nn.Linear(32, 16)))
    with pytest.raises(ConversionError, match="recipe 'delayed' keeps state and 'a' was given no ScaleTable for it"):
        Fp8Linear.adopt(
            nn.Linear(32, 16), name="a", recipe=DELAYED, backend=BACKENDS["reference"], table=None, clock=StepClock()
        )
    with pytest.raises(ConversionError, match="a Linear was never converted"):
        Fp8Linear.release(nn.Linear(32, 16))
    with pytest.raises(ConversionError, match="Fp8Linear is not constructed"):
        Fp8Linear(32, 16)
