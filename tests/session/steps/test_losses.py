"""Evaluation losses are found wherever a program computes them, once each."""

import copy
import functools
import pickle
import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.session.around import Around
from tests.session.inline import followed
from torch import nn

from narrowgauge.session.doors.seams import Seams
from narrowgauge.session.steps.losses import MOST_KNOWN, EvalLosses, scalar_loss


class Named(NamedTuple):
    loss: torch.Tensor | None
    router: torch.Tensor


@dataclass(slots=True)
class Slotted:
    loss: torch.Tensor
    router: torch.Tensor


class ByItem(dict):
    """An output as many write one: what it lacks is a KeyError, where Python expects an AttributeError."""

    __getattr__ = dict.__getitem__


class Wrapping:
    """The same around a dict, without one of its own."""

    __slots__ = ("held",)

    def __init__(self, **held):
        self.held = held

    def __getattr__(self, name):
        return self.held[name]


MODEL = nn.Identity()


@pytest.fixture
def evals():
    seams = Seams()
    found = EvalLosses()
    found.watch(seams)
    yield found
    seams.close()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (torch.tensor(2.0), 2.0),
        ((torch.ones(3, 4), torch.tensor(2.0)), 2.0),
        (SimpleNamespace(loss=torch.tensor(2.0), logits=torch.ones(3)), 2.0),
        ({"loss": torch.tensor([2.0])}, 2.0),
        (Named(torch.tensor(2.0), torch.tensor(1.0)), 2.0),
        (Named(None, torch.tensor(1.0)), None),
        (Slotted(torch.tensor(2.0), torch.tensor(1.0)), 2.0),
        ([torch.ones(3, 4), torch.tensor(2.0)], 2.0),
        (("text", torch.tensor(2.0), torch.tensor(3)), 2.0),
        ((torch.tensor(1.0), torch.tensor(2.0)), None),  # which of the two?
        (torch.ones(3), None),
        (torch.tensor(3), None),
        ("text", None),
        (None, None),
    ],
)
def test_scalar_loss(output, expected):
    found = scalar_loss(output)
    assert (None if found is None else float(found)) == expected


@pytest.mark.parametrize("kind", [ByItem, Wrapping])
def test_an_output_that_refuses_in_its_own_way_is_no_failure(evals, kind):
    with_one, without = kind(loss=torch.tensor(2.0)), kind(logits=torch.ones(3))
    assert (scalar_loss(with_one), scalar_loss(without)) == (torch.tensor(2.0), None)
    evals.training_ended(MODEL, with_one)
    evals.training_ended(MODEL, without)


def test_functional_losses_without_grad_are_averaged(evals):
    with torch.no_grad():
        F.mse_loss(torch.tensor([1.0]), torch.tensor([0.0]))
        nn.MSELoss()(torch.tensor([2.0]), torch.tensor([0.0]))
    assert float(evals.take()[0]) == pytest.approx((1 + 4) / 2)
    assert not evals.take()


def test_losses_with_grad_or_without_a_scalar_do_not_count(evals):
    F.mse_loss(torch.tensor([1.0], requires_grad=True), torch.tensor([0.0]))
    with torch.no_grad():
        F.mse_loss(torch.ones(3), torch.zeros(3), reduction="none")
    assert not evals.take()


def test_what_the_model_returns_replaces_what_it_computed_inside(evals):
    with torch.no_grad():
        evals.model_begins(MODEL)
        F.mse_loss(torch.tensor([9.0]), torch.tensor([0.0]))
        evals.model_ended({"loss": torch.tensor(5.0)})
    assert float(evals.take()[0]) == 5.0


def test_a_model_that_returns_no_loss_keeps_those_inside(evals):
    with torch.no_grad():
        evals.model_begins(MODEL)
        F.mse_loss(torch.tensor([3.0]), torch.tensor([0.0]))
        evals.model_ended(torch.ones(4))
    assert float(evals.take()[0]) == 9.0


@pytest.mark.parametrize("around", [lambda output: output, list])
def test_a_number_beside_other_things_is_not_the_loss_that_is_made_of_them(evals, around):
    with torch.no_grad():
        for router in 1.0, 2.0:
            evals.model_begins(MODEL)
            logits = torch.tensor([router + 2, router + 2])
            evals.model_ended(around((logits, torch.tensor(router))))
            F.mse_loss(logits, torch.zeros(2))
    assert float(evals.take()[0]) == (9 + 16) / 2


def test_it_is_where_nothing_is_made_of_them_or_another_models_output_is_compared(evals):
    teacher = nn.Linear(2, 2)
    with torch.no_grad():
        evals.model_begins(MODEL)
        evals.model_ended((torch.ones(2), torch.tensor(2.0)))
        evals.module_called(teacher, lambda: [])
        F.mse_loss(torch.ones(2), teacher(torch.ones(2)))
    assert float(evals.take()[0]) == 2.0


def test_a_loss_in_a_graph_is_no_break_of_it():
    def evaluate(x):
        return F.mse_loss(x * 2, torch.ones(3)) + F.cross_entropy(x[None], torch.tensor([1]))

    torch.compile(F.relu, backend="eager")(torch.ones(3))  # dynamo has noted by now which functions are torch's
    seams, evals = Seams(), EvalLosses()
    evals.watch(seams)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(evaluate, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            found = compiled(torch.ones(3))
            assert not evals.take()
            assert torch.equal(found, evaluate(torch.ones(3)))
        assert evals.take()
    finally:
        seams.close()


def test_losses_of_several_tasks_are_told_as_such(evals):
    model = nn.Linear(4, 4)
    for tasks in (2, 1, 3):
        evals.model_begins(model)
        with torch.no_grad():
            y = model(torch.randn(3, 4))
            evals.model_ended(y)
            for _ in range(tasks):
                F.mse_loss(y, y + 1)
    (note,) = evals.notes
    assert note.startswith("3 losses were computed without gradients of what another one had been computed of")
    assert list(evals.take().values()) == [1.0]


def test_losses_of_several_tasks_that_are_left_out_are_none_of_the_mean(evals):
    model, averaged = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        evals.model_begins(model)
        evals.model_ended(y := model(torch.randn(3, 4)))
        F.mse_loss(y, y + 1)
        F.l1_loss(y, y + 3)
        for _ in range(2):
            evals.module_called(averaged, lambda: {id(p) for p in model.parameters()})
            F.mse_loss(y, y + 5)
            F.l1_loss(y, y + 5)
    assert list(evals.take().values()) == [2.0]
    left, several = evals.notes
    assert left.startswith("4 losses were computed without gradients of models that do not train")
    assert several.startswith("1 loss was computed without gradients of what another one had been computed of")


BY_HAND = {
    F.mse_loss: lambda y, target: (y - target).square().mean().item(),
    F.l1_loss: lambda y, target: (y - target).abs().mean().item(),
}


@pytest.mark.parametrize("functions", [(F.mse_loss, F.l1_loss), (F.l1_loss, F.mse_loss, F.huber_loss)])
@pytest.mark.parametrize("trains", [True, False])
def test_a_metric_of_what_the_loss_is_of_is_left_out(evals, functions, trains):
    model, target, wanted = nn.Linear(4, 4), torch.randn(3, 4), []
    for at in range(3):
        if trains and at == 1:  # it was evaluated before it trained
            assert evals.take() == {}
            F.mse_loss(model(torch.randn(3, 4)), target).backward()
        evals.model_begins(model)
        with torch.no_grad():
            evals.model_ended(y := model(torch.randn(3, 4)))
            for function in functions:
                function(y, target)
            wanted.append(BY_HAND[F.mse_loss if trains else functions[0]](y, target))
    assert list(evals.take(ended=not trains).values()) == [pytest.approx(sum(wanted) / 3)]
    (note,) = evals.notes
    assert note.startswith(f"{3 * len(functions) - 3} losses were computed without gradients of the same tensors")


@pytest.mark.parametrize("apart", ["trains by both", "another prediction", "another target", "is gone"])
def test_what_is_no_metric_of_the_same_counts(evals, apart):
    model, target = nn.Linear(4, 4), torch.randn(3, 4)
    if apart == "trains by both":
        y = model(torch.randn(3, 4))
        (F.mse_loss(y, target) + F.l1_loss(y, target)).backward()
    evals.model_begins(model)
    with torch.no_grad():
        evals.model_ended(y := model(torch.randn(3, 4)))
        F.mse_loss(y.clone() if apart == "is gone" else y, target)
        z = {"another prediction": y + 1, "is gone": y.clone()}.get(apart, y)
        to = target + 1 if apart == "another target" else target
        F.l1_loss(z, to)
        wanted = BY_HAND[F.mse_loss](y, target), BY_HAND[F.l1_loss](z, to)
    assert list(evals.take().values()) == [pytest.approx(sum(wanted) / 2)]
    (note,) = evals.notes
    assert note.startswith("1 loss was computed without gradients of what another one had been computed of")


def test_a_loss_that_a_model_returned_is_measured_by_nothing(evals):
    y, target = torch.randn(3, 4), torch.randn(3, 4)
    with torch.no_grad():
        evals.model_begins(MODEL)
        inside = F.mse_loss(y, target)
        evals.model_ended({"loss": 2 * inside})
        F.l1_loss(y, target)
    mean = (2 * BY_HAND[F.mse_loss](y, target) + BY_HAND[F.l1_loss](y, target)) / 2
    assert list(evals.take().values()) == [pytest.approx(mean)]


def test_losses_of_no_models_call_are_of_nobody_knows_how_many_tasks(evals):
    for _ in range(3):
        F.mse_loss(torch.ones(3), torch.zeros(3))
    assert evals.notes == []


def test_closing_the_seams_leaves_torch_as_it_was():
    def found():
        return torch._C._nn.cross_entropy_loss, torch.autograd.backward, torch.compile, torch.optim.Optimizer.__init__

    before, seams = found(), Seams()
    EvalLosses().watch(seams)
    assert found()[0] is not before[0]
    seams.close()
    assert found() == before


def test_a_loss_that_the_program_took_before_is_heard_wherever_it_is_and_stays_torchs():
    held, partly = {"loss": F.mse_loss}, functools.partial(F.mse_loss, reduction="sum")
    seams, evals = Seams(), EvalLosses()
    evals.watch(seams)
    try:
        with torch.no_grad():
            held["loss"](torch.tensor([3.0]), torch.tensor([0.0]))
            partly(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
        assert float(evals.take()[0]) == (9 + 5) / 2
        assert held["loss"] is F.mse_loss
        assert pickle.loads(pickle.dumps(held)) == held
    finally:
        seams.close()


LOSSES = {
    "cross entropy": lambda x, y: F.cross_entropy(x, y.softmax(1)),
    "classes": lambda x, y: F.nll_loss(x.log_softmax(1), y.argmax(1)),
    "squares": F.mse_loss,
    "magnitudes": F.l1_loss,
    "smooth": F.smooth_l1_loss,
    "Huber's": F.huber_loss,
    "Huber's, weighted": lambda x, y: F.huber_loss(x, y, weight=y.exp()),
    "probabilities": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "divergence": lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
    "alignments": lambda x, y: F.ctc_loss(
        x[:, None].log_softmax(2), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])
    ),
    "counts": lambda x, y: F.poisson_nll_loss(x, y.exp()),
    "triplets": lambda x, y: F.triplet_margin_loss(x, y, x + y),
    "angles": lambda x, y: F.cosine_embedding_loss(x, y, y[:, 0].sign()),
    "ranks": lambda x, y: F.margin_ranking_loss(x, y, y.sign()),
    "hinges": lambda x, y: F.hinge_embedding_loss(x, y.sign()),
    "margins": lambda x, y: F.multi_margin_loss(x, y.argmax(1)),
    "margins of several labels": lambda x, y: F.multilabel_margin_loss(x, y.argsort(1)),
    "soft margins": lambda x, y: F.soft_margin_loss(x, y.sign()),
}


def test_functions_below_can_be_pickled(evals):
    for function in (torch.binary_cross_entropy_with_logits, torch.kl_div, F.huber_loss):
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("compute", LOSSES.values(), ids=LOSSES)
def test_each_loss_is_heard_as_the_program_gets_it(evals, compute):
    with torch.no_grad():
        loss = compute(torch.randn(4, 5), torch.randn(4, 5))
    assert float(evals.take()[0]) == float(loss)
    assert evals.facts() == {}


@pytest.mark.parametrize(
    "compute",
    [
        functools.partial(F.huber_loss, weight=torch.arange(20.0).view(4, 5), reduction="sum"),
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="sum"),
        lambda x, y: F.triplet_margin_loss(x, y, x + y, reduction="sum"),
        lambda x, y: F.multi_margin_loss(x, y.argmax(1), reduction="sum"),
        lambda x, y: F.poisson_nll_loss(x, y.exp(), reduction="sum"),
    ],
)
def test_a_sum_is_told_as_one_whatever_torch_makes_it_of(evals, compute):
    with torch.no_grad():
        loss = compute(torch.randn(4, 5), torch.randn(4, 5))
    assert float(evals.take()[0]) == float(loss)
    assert evals.facts() == {"eval_sums": [1, 1]}


def test_a_weighted_loss_that_nobody_reduced_is_told_as_that(evals):
    with torch.no_grad():
        F.huber_loss(torch.ones(3), torch.zeros(3), weight=torch.ones(3), reduction="none")
    assert not evals.take()
    assert len(evals.notes) == 1


def test_a_scripted_function_has_its_losses_as_without(evals):
    def distance(x, y):
        return F.mse_loss(x, y)

    x, y = torch.randn(3), torch.randn(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.jit.script(distance)(x, y), distance(x, y))


def test_a_metric_of_a_batch_that_trains_is_no_evaluation(tmp_path):
    with followed(tmp_path, every=1) as (session, writer):
        model, x, y = nn.Linear(4, 4), torch.randn(2, 4), torch.randn(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wanted = {}
        for step in range(1, 5):
            out = model(x)
            F.l1_loss(out, y).backward()
            with torch.no_grad():
                F.mse_loss(out, y)
            optimizer.step()
            with torch.no_grad():
                F.mse_loss(out.detach(), y)
                if step % 2 == 0:
                    wanted[step] = float(F.mse_loss(model(y), x))
    assert writer.column("eval_loss") == pytest.approx(wanted)
    told = "8 losses were computed without gradients of batches that train (a metric, say); eval_loss leaves them out."
    assert told in session.facts()["notes"]


def test_a_teacher_that_is_asked_between_a_batch_and_its_step_makes_no_evaluation(tmp_path):
    with followed(tmp_path, every=1) as (_, writer):
        model, teacher, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            out = model(x)
            with torch.no_grad():
                wanted = teacher(x)
            F.mse_loss(out, wanted).backward()
            optimizer.step()
            with torch.no_grad():
                F.l1_loss(out.detach(), wanted)
    assert writer.column("eval_loss") == {}


def test_losses_of_an_evaluation_that_nobody_reduced_are_told(evals):
    with torch.no_grad():
        F.cross_entropy(torch.randn(4, 5), torch.zeros(4, dtype=torch.long), reduction="none").mean()
    assert not evals.take()
    (note,) = evals.notes
    assert note.startswith('1 losses of evaluations were computed with reduction="none"')


def test_evaluations_are_of_the_steps_that_were_made(tmp_path):
    with followed(tmp_path, every=1) as (_, writer):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def evaluate(value):
            with torch.no_grad():
                model(torch.ones(2, 4))
                F.mse_loss(torch.full((4,), value), torch.zeros(4))

        evaluate(1.0)
        for microbatch in range(1, 8):
            model(torch.ones(2, 4)).square().mean().backward()
            if microbatch % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if microbatch in (4, 5):  # the first has made a step, and the next is open
                evaluate(float(microbatch))
            if microbatch == 6:
                evaluate(6.0)
    assert writer.column("eval_loss") == {0: 1.0, 1: (16 + 25) / 2, 2: 36.0}
    assert writer.column("microbatches") == {1: 3, 2: 3}


def evaluated(model, *data, criterion=nn.MSELoss()):  # noqa: B008  # has no state
    one_by_one(model, data, criterion)


def one_by_one(model, data, criterion=nn.MSELoss()):  # noqa: B008  # has no state
    with torch.no_grad():
        for x in data:
            criterion(model(x), torch.zeros(()).expand_as(x))


def trained_beside_a_copy(tmp_path, evaluate):
    """What a session wrote as `eval_loss` of a program that keeps an averaged copy, and its notes."""
    with followed(tmp_path) as (session, writer):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        copy = torch.optim.swa_utils.AveragedModel(model)
        with torch.no_grad():
            for p in copy.parameters():
                p.mul_(3.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted = evaluate(model, copy)
    return writer.column("eval_loss").get(2), wanted, session.steps.evals.notes


@pytest.mark.parametrize("order", [1, -1])
def test_an_averaged_copys_losses_are_not_mixed_with_the_models(tmp_path, order):
    data = [torch.randn(3, 4), torch.randn(3, 4)]

    def evaluate(model, copy):
        for each in (model, copy)[::order]:
            evaluated(each, *data)
        with torch.no_grad():
            return sum(float(model(x).square().mean()) for x in data) / 2

    found, wanted, notes = trained_beside_a_copy(tmp_path, evaluate)
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    assert notes == [
        "4 losses were computed without gradients of models that do not train (an averaged copy, say); eval_loss "
        "leaves them out."
    ]


def test_of_an_evaluation_of_the_copy_alone_it_is_told(tmp_path):
    x = torch.randn(3, 4)

    def evaluate(model, copy):
        evaluated(copy, x)
        with torch.no_grad():
            return float(copy(x).square().mean())

    found, wanted, (note,) = trained_beside_a_copy(tmp_path, evaluate)
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    assert note.startswith(
        "2 losses of models that do not train (an averaged copy, say) are eval_loss where no others "
    )


def test_a_loss_of_the_model_against_a_teacher_is_the_models(tmp_path):
    x = torch.randn(3, 4)

    def evaluate(model, copy):
        with torch.no_grad():
            wanted = float(F.mse_loss(model(x), copy(x)))
            F.mse_loss(copy(x), model(x))
            return wanted

    found, wanted, notes = trained_beside_a_copy(tmp_path, evaluate)
    assert float(found) == pytest.approx(wanted, rel=1e-6)
    assert notes == []


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_several_passes_over_data_are_told(tmp_path, passes):
    x = torch.randn(6, 4)

    def evaluate(model, _copy):
        for _ in range(passes):
            evaluated(model, *torch.utils.data.DataLoader(x, batch_size=2))
        with torch.no_grad():
            return float(model(x).square().mean())

    found, wanted, notes = trained_beside_a_copy(tmp_path, evaluate)
    assert float(found) == pytest.approx(wanted, rel=1e-5)
    told = f"Evaluations took up to {passes} passes over data loaders between two steps: eval_loss is the mean over all"
    assert notes == ([f"{told} of them."] if passes > 1 else [])


def ahead(loader):
    """Accelerate's loaders fetch the next batch before they give one, so that the last is known as such."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


@pytest.mark.parametrize("size", [2, 6])
@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_batch_that_was_fetched_ahead_is_of_the_pass_that_has_ended(tmp_path, passes, size):
    x = torch.randn(6, 4)

    def evaluate(model, _copy):
        for _ in range(passes):
            one_by_one(model, ahead(torch.utils.data.DataLoader(x, batch_size=size)))

    _, _, notes = trained_beside_a_copy(tmp_path, evaluate)
    told = f"Evaluations took up to {passes} passes over data loaders between two steps: eval_loss is the mean over all"
    assert notes == ([f"{told} of them."] if passes > 1 else [])


def test_what_a_wrapper_holds_is_the_model(tmp_path):
    """Its inner module is evaluated, beside an averaged copy, and a teacher is asked in every training step."""
    with followed(tmp_path) as (session, writer):
        model = Around(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        copy, teacher = torch.optim.swa_utils.AveragedModel(model.inner), nn.Linear(4, 4).requires_grad_(False)
        with torch.no_grad():
            for p in copy.parameters():
                p.mul_(3.0)
        optimizer, x, wanted = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(3, 4), []
        for _ in range(3):
            y = model(x)
            with torch.no_grad():
                target = teacher(x)
            (y - target).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            evaluated(model.inner, x)
            evaluated(copy, x)
            with torch.no_grad():
                wanted.append(float(model.inner(x).square().mean()))
    assert list(writer.column("eval_loss").values()) == pytest.approx(wanted, rel=1e-6)
    assert session.steps.evals.notes[0].startswith("3 losses were computed without gradients of models that do not")
    assert session.hearing.notes == []


class Listed(nn.Linear):
    """A module whose author returns a list where torch has an iterator."""

    def parameters(self, recurse=True):
        return list(super().parameters(recurse))


def trained_and(then):
    """Steps of a small model, and something without gradients, as soon as there is an optimizer and after a step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            then(model)
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()


def traced(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(nn.Linear(4, 4).bfloat16(), torch.randn(2, 4).bfloat16())


@pytest.mark.parametrize(
    "then",
    [
        lambda model: Listed(4, 4)(torch.randn(2, 4)),
        lambda model: nn.Linear(4, 4, device="meta", dtype=torch.bfloat16)(torch.randn(2, 4, device="meta").bfloat16()),
        traced,
    ],
)
def test_modules_of_any_kind_may_be_called_without_gradients(tmp_path, then):
    with followed(tmp_path) as (session, _):
        trained_and(then)
    assert session.ledger.steps == 2
    assert session.hearing.notes == []


def test_a_meta_copy_in_half_precision_may_be_called_with_gradients(tmp_path):
    with followed(tmp_path) as (session, _):
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        nn.Linear(4, 4, device="meta", dtype=torch.bfloat16)(torch.randn(2, 4, device="meta").bfloat16())
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    assert session.ledger.steps == 1


def test_a_copy_that_is_evaluated_before_the_first_step_is_not_taken_for_trained(tmp_path):
    with followed(tmp_path) as (session, _):
        trained_and(lambda model: copy.deepcopy(model).bfloat16()(torch.randn(2, 4).bfloat16()))
        assert len(session.optimizers.ids()) <= 4


def test_a_module_is_asked_once_for_what_it_holds(tmp_path):
    asked = []

    class Asked(nn.Sequential):
        def parameters(self, recurse=True):
            asked.append(recurse)
            return super().parameters(recurse)

    with followed(tmp_path):
        inner = Asked(*(nn.Linear(4, 4) for _ in range(5)))
        model = Around(inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            asked.clear()
            with torch.no_grad():
                for _ in range(10):
                    inner(torch.randn(2, 4))
            evaluations = len(asked)
            model(torch.randn(3, 4)).square().sum().backward()
            optimizer.step()
    assert evaluations <= 1


def test_a_program_may_go_on_with_a_loss_in_place(evals):
    with torch.no_grad():
        total = F.mse_loss(torch.tensor([2.0]), torch.tensor([0.0]))
        total += F.mse_loss(torch.tensor([4.0]), torch.tensor([0.0]))
        total.div_(2)
    assert float(evals.take()[0]) == (4 + 16) / 2


@pytest.mark.parametrize("way", ["group", "state"])
def test_a_part_that_is_trained_from_some_step_on_is_the_models_from_then_on(tmp_path, way):
    """An encoder is thawed: its losses were another model's, as a teacher's are that is evaluated beside it."""
    x = torch.randn(3, 4)
    with followed(tmp_path) as (session, writer):
        model, teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4).requires_grad_(False)
        encoder, head = model
        optimizer, wanted = torch.optim.SGD(head.parameters(), lr=0.1), {}
        for step in range(1, 5):
            if step == 3:
                if way == "group":
                    optimizer.add_param_group({"params": list(encoder.parameters())})
                else:
                    groups = [*optimizer.param_groups, {**optimizer.param_groups[0], "params": [*encoder.parameters()]}]
                    optimizer.__setstate__({"param_groups": groups})
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses = [float(F.mse_loss(each(x), x)) for each in (encoder, teacher)]
            wanted[step] = losses[0] if step > 2 else sum(losses) / 2
    assert {step: float(loss) for step, loss in writer.column("eval_loss").items()} == pytest.approx(wanted, rel=1e-6)
    assert [note.split()[0] for note in session.steps.evals.notes] == ["2", "4"]


def test_an_optimizer_is_told_once_however_many_groups_it_is_made_with(tmp_path):
    with followed(tmp_path) as (session, _):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.1)
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        assert session.optimizers_made == len(session.optimizers) == 1
        assert len(session.optimizers.ids()) == 5


def test_losses_that_are_sums_over_their_batches_are_told_as_such(evals):
    x, y = torch.ones(4, 1), torch.zeros(4, 1)
    with torch.no_grad():
        F.mse_loss(x, y)
    evals.take()
    assert (evals.notes, evals.facts()) == ([], {})
    with torch.no_grad():
        nn.MSELoss(reduction="sum")(x, y)
        F.mse_loss(x, y, reduction="sum")
    assert float(evals.take()[0]) == 4.0
    assert evals.notes == [
        '2 of 3 losses of evaluations were computed with reduction="sum": eval_loss is the mean of such sums over a '
        "batch, before the program divides them, and no measure beside a training loss that is a mean."
    ]
    assert evals.facts() == {"eval_sums": [2, 3]}


def test_a_sum_that_a_model_divides_before_it_returns_it_is_none(evals):
    with torch.no_grad():
        evals.model_begins(MODEL)
        evals.model_ended({"loss": F.mse_loss(torch.ones(4, 1), torch.zeros(4, 1), reduction="sum") / 4})
    assert float(evals.take()[0]) == 1.0
    assert (evals.notes, evals.facts()) == ([], {})


class Returning(nn.Module):
    """Returns its cross entropy, as models of language do, and what it is made of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, x.argmax(1)), "logits": logits}


PART = (
    "3 of 3 losses of evaluations are what the model's call returned, which is only a part of what backward was called"
)
NOTHING = "3 of 3 losses of evaluations are what the model's call returned, which backward was not called on"


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda out: out["loss"], None),
        (lambda out: (out["loss"] / 4).float() * torch.tensor(2.0), None),
        (lambda out: out["loss"] + 0.1 * out["logits"].square().mean(), PART),
        (lambda out: -F.logsigmoid(out["logits"].log_softmax(-1).diff(dim=1)).mean(), NOTHING),
        (lambda out: [out["loss"], out["logits"].square().mean()], PART),
    ],
)
def test_what_a_model_returns_and_the_program_does_not_train_by_is_told(tmp_path, loss, told):
    with followed(tmp_path) as (session, _):
        model = Returning()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            torch.autograd.backward(loss(model(torch.randn(8, 16))))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(8, 16))
    notes = session.steps.evals.notes
    assert len(notes) == (told is not None)
    assert told is None or notes[0].startswith(told)
    assert not session.hearing.notes


class Tower(nn.Module):
    """Returns features and a temperature, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 16), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x), self.scale.exp()


def test_a_temperature_is_no_evaluation(tmp_path):
    with followed(tmp_path) as (session, writer):
        model = Tower()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            features, scale = model(torch.randn(8, 16))
            F.cross_entropy(features * scale, torch.arange(8)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(8, 16))
    assert not any("eval_loss" in row for row in writer.scalars.values())
    (note,) = session.steps.evals.notes
    assert note.startswith("3 numbers that a model's call without gradients returned beside other things")


def test_a_program_that_comes_to_train_by_what_is_returned_is_heard_late(tmp_path):
    with followed(tmp_path) as (session, _):
        model = Returning()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(60):
            out = model(torch.randn(8, 16))
            (out["loss"] if step > 25 else out["logits"].square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(8, 16))
    assert not session.steps.evals.notes + session.hearing.notes


def test_nothing_is_told_of_losses_of_several_calls_nor_of_an_edge_of_a_graph(tmp_path):
    with followed(tmp_path) as (session, _):
        model = Returning()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for several in True, False:
            losses = [model(torch.randn(8, 16))["loss"] for _ in range(2 if several else 1)]
            torch.autograd.backward(sum(losses) / 2 if several else torch.autograd.graph.get_gradient_edge(losses[0]))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.randn(8, 16))
    assert not session.steps.evals.notes + session.hearing.notes


def loss_of(value):
    return F.mse_loss(torch.tensor([value]), torch.zeros(1))


def returns(evals, output):
    evals.model_begins(MODEL)
    evals.model_ended(output)


def trained_by_what_is_returned(evals, around=lambda loss: loss, backward=lambda loss, x: loss):
    """One step of such a program, or of another that calls backward on something else."""
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        loss = x.sum()
        evals.training_begins()
        evals.training_ended(MODEL, around(loss))
        evals.trains_by.backward(backward(loss, x))
    evals.stepped()


LOGITS = torch.ones(2)


@torch.no_grad()
def test_what_torch_returns_beside_a_models_loss_counts_until_the_program_is_known_to_train_by_that(evals):
    returns(evals, {"loss": torch.tensor(5.0)})
    loss_of(3.0)
    assert float(evals.take()[0]) == (5 + 9) / 2
    trained_by_what_is_returned(evals)
    returns(evals, {"loss": torch.tensor(5.0)})
    loss_of(3.0)
    assert float(evals.take()[0]) == 5.0
    (note,) = [note for note in evals.notes if "when a model's call had returned" in note]
    assert note.startswith("1 loss was")


@torch.no_grad()
def test_a_loss_that_no_model_returned_before_counts_however_the_program_trains(evals):
    trained_by_what_is_returned(evals)
    returns(evals, torch.tensor(5.0))
    evals.take()
    evals.stepped()
    loss_of(3.0)
    loss_of(1.0)
    assert float(evals.take()[0]) == (9 + 1) / 2


@torch.no_grad()
def test_a_loss_of_another_model_behind_the_models_is_left_out_as_such(evals):
    trained_by_what_is_returned(evals)
    returns(evals, torch.tensor(5.0))
    evals.module_called(nn.Linear(2, 2), list)
    loss_of(3.0)
    assert float(evals.take()[0]) == 5.0
    assert [note.partition(" that ")[0] for note in evals.notes] == ["1 loss was computed without gradients of models"]


@torch.no_grad()
def test_a_part_that_is_called_behind_the_models_loss_has_another(evals):
    part = nn.Linear(2, 2)
    trained_by_what_is_returned(evals)
    returns(evals, (LOGITS, torch.tensor(5.0)))
    evals.module_called(part, lambda: [id(part.weight)])
    loss_of(3.0)
    assert float(evals.take()[0]) == (5 + 9) / 2


@torch.no_grad()
def test_only_the_first_loss_is_in_place_of_a_number_beside_other_things(evals):
    returns(evals, (LOGITS, torch.tensor(5.0)))
    loss_of(3.0)
    loss_of(1.0)
    assert float(evals.take()[0]) == (9 + 1) / 2
    returns(evals, (LOGITS, torch.tensor(5.0)))
    assert float(evals.take()[0]) == 5.0
    loss_of(3.0)  # what it would be in place of is taken
    assert float(evals.take()[0]) == 9.0
    returns(evals, (LOGITS, torch.tensor(5.0)))
    evals.stepped()
    loss_of(3.0)
    assert float(evals.take()[0]) == (5 + 9) / 2


@torch.no_grad()
def test_what_a_model_returns_counts_once_and_only_of_a_call_that_began(evals):
    evals.model_ended(torch.tensor(5.0))
    returns(evals, torch.tensor(5.0, device="meta"))
    assert not evals.take()
    returns(evals, torch.tensor(5.0))
    evals.model_ended(torch.tensor(7.0))
    assert float(evals.take()[0]) == 5.0


@torch.no_grad()
def test_where_a_program_trains_by_something_else_a_number_beside_other_things_counts_if_it_may_be_made_of_a_loss(
    evals,
):
    trained_by_what_is_returned(evals, backward=lambda loss, x: (x * 2).sum())
    returns(evals, {"loss": torch.tensor(5.0)})
    assert float(evals.take()[0]) == 5.0
    for around in tuple, list:
        returns(evals, around((LOGITS, torch.tensor(5.0))))
        evals.model_ended(torch.tensor(7.0))  # of no call that began
        assert not evals.take()
        evals.model_begins(MODEL)
        half = loss_of(3.0) / 2
        evals.model_ended(around((LOGITS, half)))
        assert float(evals.take()[0]) == 9 / 2


@torch.no_grad()
def test_a_model_that_asks_a_teacher_for_its_loss_returns_its_own(evals):
    evals.model_begins(MODEL)
    loss_of(3.0)
    evals.module_called(nn.Linear(2, 2), list)
    evals.model_ended(torch.tensor(5.0))
    assert float(evals.take()[0]) == 5.0
    assert evals.notes == []


@pytest.mark.parametrize(
    "around",
    [
        lambda loss: loss,
        lambda loss: {"loss": loss},
        lambda loss: [LOGITS, loss],
        lambda loss: (LOGITS, loss),
        lambda loss: SimpleNamespace(loss=loss),
    ],
)
def test_what_holds_a_loss_that_a_program_trains_by(evals, around):
    trained_by_what_is_returned(evals, around)
    assert evals.trains_by.of(MODEL).whole


def test_a_loss_that_is_computed_when_it_is_asked_is_not_asked_in_training(evals):
    class Output:
        @property
        def loss(self):
            raise RuntimeError

    trained_by_what_is_returned(evals, lambda loss: Output())
    assert not evals.trains_by.of(MODEL).whole


def test_what_is_returned_is_looked_at_in_some_steps(evals):
    for _ in range(17):
        trained_by_what_is_returned(evals, backward=lambda loss, x: (x * 2).sum())
    trained_by_what_is_returned(evals)
    assert not evals.trains_by.of(MODEL).whole
    for _ in range(14):
        trained_by_what_is_returned(evals, backward=lambda loss, x: (x * 2).sum())
    trained_by_what_is_returned(evals)
    assert evals.trains_by.of(MODEL).whole


def test_a_loss_without_gradients_of_what_has_some_is_a_metric(evals):
    y = torch.ones(2, requires_grad=True) * 2
    with torch.no_grad():
        F.mse_loss(y, torch.zeros(2))
    assert not evals.take()
    (note,) = evals.notes
    assert note.startswith("1 loss was computed without gradients of batches that train")


@torch.no_grad()
def test_a_part_that_is_evaluated_between_a_batch_and_its_step_is_heard(evals):
    part = nn.Linear(2, 2)

    def called():
        if not evals.knows(part):
            evals.module_called(part, lambda: [id(part.weight)])

    called()
    evals.training_begins()
    loss_of(1.0)
    called()
    loss_of(3.0)
    assert float(evals.take()[0]) == 9.0


@torch.no_grad()
def test_what_was_called_before_a_step_has_no_loss_behind_it(evals):
    evals.module_called(nn.Linear(2, 2), list)
    evals.stepped()
    loss_of(3.0)
    assert float(evals.take()[0]) == 9.0
    assert evals.notes == []


def test_what_is_known_of_modules(evals):
    class Asked(nn.Linear):
        def parameters(self, recurse=True):
            asked.append("parameters")
            return super().parameters(recurse)

    trained, other, bare, never = nn.Linear(2, 2), Asked(2, 2), nn.ReLU(), nn.Linear(2, 2)
    asked = []

    def ids():
        asked.append("ids")
        return [id(trained.weight)]

    for module, known in (
        (other, [False, True, False, False]),
        (trained, [True] * 4),
        (bare, [False, False, True, False]),
    ):
        assert not evals.knows(module)
        evals.module_called(module, ids)
        assert [evals.knows(each) for each in (trained, other, bare, never)] == known, module
        evals.stepped()
    evals.module_called(other, ids)
    evals.model_begins(MODEL)
    assert evals.knows(never)
    assert asked == ["ids", "parameters"]


def at_an_address_again(evals, gone, make):
    """A module at the address of one that was called and is gone."""
    modules = [gone() for _ in range(64)]
    for at in range(64):
        evals.module_called(modules[at], list)
    addresses = {id(module) for module in modules}
    modules.clear()
    while not modules or id(modules[-1]) not in addresses:
        modules.append(make())
    return modules[-1]


@torch.no_grad()
def test_a_module_at_the_address_of_one_that_is_gone_is_another(evals):
    assert not evals.knows(at_an_address_again(evals, nn.ReLU, lambda: nn.Linear(2, 2)))
    bare = at_an_address_again(evals, lambda: nn.Linear(2, 2), nn.ReLU)
    evals.stepped()
    evals.module_called(bare, list)
    loss_of(3.0)
    assert float(evals.take()[0]) == 9.0
    assert evals.notes == []


def test_so_many_modules_are_known(evals):
    modules = [nn.Identity() for _ in range(MOST_KNOWN + 1)]
    for module in modules[:-1]:
        evals.module_called(module, list)
    assert evals.knows(modules[0])
    evals.module_called(modules[-1], list)
    assert [evals.knows(module) for module in (modules[0], modules[-1])] == [False, True]


@pytest.mark.parametrize("order", [1, -1])
def test_a_pass_of_each_of_several_models_is_one_pass(tmp_path, order):
    data = torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2)

    def evaluate(model, copy):
        for _ in data:  # of a training without losses
            pass
        for each in (model, copy)[::order]:
            evaluated(each, *data)

    _, _, (note,) = trained_beside_a_copy(tmp_path, evaluate)
    assert note.startswith("6 losses were computed without gradients of models that do not train")
