"""A compiled function that calls its models several times counts as one call, and is told to."""

import pytest
import torch
from tests.session.inline import followed
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's, of an input

BATCH, LENGTH = 4, 16


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(self, ids):
        return self.head(self.embedding(ids))


def ids(length=LENGTH):
    return torch.randint(0, 32, (BATCH, length))


def apart(model, x, y):
    return model(x).square().mean() - model(y).mean()


WAYS = {
    "two batches": lambda model: (lambda x, y: apart(model, x, y), ids, ids),
    "by names": lambda model: (
        lambda batch: apart(model, batch["chosen_input_ids"], batch["rejected_input_ids"]),
        lambda: {"chosen_input_ids": ids(), "rejected_input_ids": ids(8)},
    ),
    "twice the same": lambda model: (lambda x: apart(model, x, x), ids),
    "given its model": lambda model: (apart, lambda: model, ids, ids),
}
ONCE = {
    "halves": lambda model: (lambda x: apart(model, x[:2], x[2:]), ids),
    "one call": lambda model: (lambda x: model(x).square().mean(), ids),
    "a reference": lambda model: (lambda x, y: model(x).square().mean() - unlearned(model, y), ids, ids),
}


def unlearned(model, y):
    with torch.no_grad():
        return model(y).mean()


def trained(tmp_path, way, wrap=lambda function: function, *, steps=7, compiling=True):
    """The tokens of each step, and what is told of what is called inside."""
    with followed(tmp_path, every=3, judge="current", compiling=compiling) as (session, writer):
        model = Text()
        function, *given = way(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        call = wrap(function)
        for _ in range(steps):
            call(*(make() for make in given)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not session.hearing.notes
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    told = [note for note in session.facts()["notes"] if note.startswith("A compiled function called models")]
    return set(writer.column("tokens").values()), told


def compiled(function):
    return torch.compile(function, backend="eager")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_its_models_are_given_is_told_where_it_is_more(tmp_path, way):
    (wanted,), none = trained(tmp_path / "plain", way, compiling=False)
    (found,), (note,) = trained(tmp_path / "compiled", way, compiled)
    assert (none, found) == ([], BATCH * LENGTH)
    assert note == (
        f"A compiled function called models 2 times in one call of its own, and gave them {wanted:g} tokens or "
        "samples, as a recorded step showed that ran uncompiled. In its graphs nobody hears of these calls: tokens, "
        f"and tokens_per_second, count what it is given as one call's, {found:g} there."
    )


@pytest.mark.parametrize("way", ONCE.values(), ids=ONCE)
def test_where_that_is_the_same_nothing_is(tmp_path, way):
    wanted = trained(tmp_path / "plain", way, compiling=False)
    assert trained(tmp_path / "compiled", way, compiled) == wanted == ({BATCH * LENGTH}, [])


def test_a_compiled_function_in_it_ends_nothing(tmp_path):
    def way(model):
        squares = compiled(torch.square)
        return lambda x, y: squares(model(x)).mean() - model(y).mean(), ids, ids

    _, (note,) = trained(tmp_path, way, compiled)
    assert f"{2 * BATCH * LENGTH} tokens" in note


def test_one_that_is_left_by_an_error_tells_nothing(tmp_path):
    def way(model):
        def halves(x):
            loss = apart(model, x[:1], x[1:2])
            if x.shape[1] == 8:
                raise RuntimeError("out of memory")
            return loss + model(x[2:]).mean()

        return halves, ids

    def careful(function):
        call = compiled(function)

        def again(x):
            try:
                return call(x[:, :8])
            except RuntimeError:
                return call(x)

        return again

    assert trained(tmp_path, way, careful) == ({BATCH * LENGTH}, [])


def test_what_one_model_made_for_another_is_no_more_than_was_given(tmp_path):
    with followed(tmp_path, every=2, judge="current", compiling=True) as (session, _):
        generator, judge = nn.Linear(8, 16), nn.Linear(16, 1)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (generator, judge)]
        fools = compiled(lambda z: judge(generator(z)).square().mean())
        judges = compiled(lambda x, made: judge(x).square().mean() - judge(made).mean())
        for _ in range(4):
            fools(torch.randn(3, 8)).backward()
            judges(torch.randn(3, 16), generator(torch.randn(3, 8)).detach()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert not session.hearing.notes
    assert not [note for note in session.facts()["notes"] if note.startswith("A compiled")]


def test_a_teacher_in_it_that_was_trained_before_adds_nothing(tmp_path):
    with followed(tmp_path, every=2, judge="current", compiling=True) as (session, writer):
        teacher, student = nn.Linear(8, 8), nn.Linear(8, 8)
        taught = compiled(lambda x: teacher(x).square().mean())
        learns = compiled(lambda x, y: student(x).square().mean() + teacher(y).mean())
        for step in range(5):
            optimizer = torch.optim.SGD((student if step else teacher).parameters(), lr=0.1)
            (learns(torch.ones(4, 8), torch.ones(4, 8)) if step else taught(torch.ones(4, 8))).backward()
            optimizer.step()
            teacher.requires_grad_(False)
    assert not session.hearing.notes
    assert not [note for note in session.facts()["notes"] if note.startswith("A compiled")]
    assert set(writer.column("tokens").values()) == {4.0}


def test_it_has_the_graphs_that_it_has_unwatched(tmp_path):
    from torch._dynamo.testing import CompileCounterWithBackend

    counts = []
    for watched in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        function = lambda call, counter=counter: torch.compile(call, backend=counter)  # noqa: E731
        if watched:
            assert trained(tmp_path, WAYS["two batches"], function)[1]
        else:
            model = Text()
            call = function(WAYS["two batches"](model)[0])
            for _ in range(7):
                call(ids(), ids()).backward()
        counts.append((counter.frame_count, counter.op_count))
    assert counts[0] == counts[1]
