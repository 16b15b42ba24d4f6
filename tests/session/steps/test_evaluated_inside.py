"""A program that trains a model through what wraps it, and evaluates the model itself: by the loss that it returns."""

import gc

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from torch import nn


class Model(nn.Module):
    """Its loss is a sum over tokens, divided by a number that it is given, as Hugging Face's are."""

    def __init__(self, *, fails=False):
        super().__init__()
        self.head = nn.Linear(4, 8)
        self.fails = fails

    def forward(self, x, y, count=6):
        logits = self.head(x)
        loss = F.cross_entropy(logits, y, reduction="sum") / count
        if self.fails and not torch.is_grad_enabled():
            raise RuntimeError("the program's")
        return {"loss": loss, "logits": logits}


WRAPPERS = {
    "data parallel": nn.DataParallel,  # without a GPU it calls the model
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.fixture(params=WRAPPERS)
def wrapper(request):
    yield WRAPPERS[request.param]
    torch._dynamo.reset()


def trained(tmp_path, model, wrapped, evaluate):
    """What is written as `eval_loss` after each of three steps, what was computed, and the notes."""
    wanted = []
    with followed(tmp_path, compiling=True) as (session, writer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x, y = torch.randn(6, 4), torch.randint(8, (6,))
            wrapped(x, y)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted.append(evaluate(x, y))
    assert not session.hearing.notes
    return writer.column("eval_loss"), wanted, session.steps.evals.notes


def test_its_loss_is_what_its_call_returns(tmp_path, wrapper):
    torch.manual_seed(0)
    model = Model()

    def evaluate(x, y):
        with torch.no_grad():
            return (model(x, y)["loss"].item() + model(x[:3], y[:3], count=3)["loss"].item()) / 2

    found, wanted, notes = trained(tmp_path, model, wrapper(model), evaluate)
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(wanted, rel=1e-6)
    assert notes == []
    assert not model._forward_hooks


def test_one_that_raises_leaves_nothing_behind(tmp_path, wrapper):
    torch.manual_seed(1)
    model = Model(fails=True)

    def evaluate(x, y):
        with torch.no_grad(), pytest.raises(RuntimeError, match="the program's"):
            model(x, y)
        assert not model._forward_hooks

    trained(tmp_path, model, wrapper(model), evaluate)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_a_model_makes_its_loss_of_is_nothing_beside_it(tmp_path, reduction):
    class Both(Model):
        """Its loss is of two, as CLIP's is."""

        def forward(self, x, y):
            logits = self.head(x)
            parts = (F.cross_entropy(each, y, reduction=reduction) for each in (logits, -logits))
            return {"loss": sum(part.mean() for part in parts)}

    model = Both()

    def evaluate(x, y):
        with torch.no_grad():
            return model(x, y)["loss"].item()

    found, wanted, notes = trained(tmp_path, model, model, evaluate)
    assert [found[step] for step in (1, 2, 3)] == pytest.approx(wanted, rel=1e-6)
    assert notes == []


def test_a_part_that_outlives_its_model_disturbs_no_evaluation(tmp_path):
    with followed(tmp_path) as (session, _):
        model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(6, 4)
        first, second = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        second(first(x)).square().sum().backward()  # called part by part
        optimizer.step()
        del model
        gc.collect()
        with torch.no_grad():
            nn.Linear(4, 2)(first(x))
    assert not session.hearing.notes
