"""What is evaluated when the optimizer is gone: it was a local of the function that trained."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.session.inline import followed
from torch import nn

Y = torch.zeros(8, dtype=torch.long)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)


def trained(call, model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        F.cross_entropy(call(torch.randn(8, 8)), Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def evaluated(call):
    with torch.no_grad():
        return F.cross_entropy(call(torch.randn(8, 8)), Y).item()


@pytest.mark.parametrize("compiled", ["not", "wrapped", "in place", "function"])
def test_a_model_whose_optimizer_is_gone(tmp_path, compiled):
    torch._dynamo.reset()
    with followed(tmp_path, compiling=compiled != "not") as (session, writer):
        call = model = Model()
        if compiled == "wrapped":
            call = torch.compile(model, backend="eager")
        elif compiled == "in place":
            model.compile(backend="eager")
        elif compiled == "function":
            call = torch.compile(lambda x: model(x), backend="eager")
        wanted = {}
        for steps in (2, 4):
            trained(call, model)
            wanted[steps] = evaluated(call)
    assert writer.column("eval_loss") == pytest.approx(wanted, rel=1e-6)
    assert not session.steps.evals.notes


def test_a_model_that_is_made_of_others(tmp_path):
    """Federated: copies are trained, each by an optimizer of its own, and their average is evaluated."""
    with followed(tmp_path) as (session, writer):
        model = Model()
        wanted = {}
        for steps in (4, 8):
            states = [trained(one, one) for one in (copy.deepcopy(model), copy.deepcopy(model))]
            model.load_state_dict({name: (states[0][name] + states[1][name]) / 2 for name in states[0]})
            wanted[steps] = evaluated(model)
    assert writer.column("eval_loss") == pytest.approx(wanted, rel=1e-6)
    (note,) = session.steps.evals.notes
    assert note.startswith("2 losses of models that do not train")


@pytest.mark.parametrize("scalars", ["all", "loss"])
@pytest.mark.parametrize("alive", [False, True])
def test_a_teacher_that_was_trained_before_is_left_out_beside_its_student(tmp_path, alive, scalars):
    """Unless its optimizer is there still: then it may go on."""
    with followed(tmp_path, watch={"scalars": scalars}) as (session, writer):
        teacher, student = Model(), Model()
        kept = torch.optim.SGD(teacher.parameters(), lr=0.1) if alive else None
        trained(teacher, teacher)
        wanted = {2: evaluated(teacher)}
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for step in range(3, 9):
            x = torch.randn(8, 8)
            with torch.no_grad():
                target = teacher(x).softmax(1)
            F.cross_entropy(student(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 5:
                wanted[5] = evaluated(teacher)  # alone
            if step == 7:
                both = evaluated(student), evaluated(teacher)
                wanted[7] = sum(both) / 2 if alive else both[0]
        del kept
    assert writer.column("eval_loss") == pytest.approx(wanted, rel=1e-6)
    assert bool(session.steps.evals.notes) is not alive
