"""A warning names the line of the program that it names without us."""

import logging
import warnings
from pathlib import Path

import pytest
import torch
from tests.session.inline import followed
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F


def warns(x):
    warnings.warn("two above", stacklevel=3)
    return x * 2


def program():
    """Calls what we replace, where torch or the program tells the caller something."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.Optimizer([next(model.parameters())] * 2, {})
    for loss in (F.mse_loss, F.l1_loss):
        loss(model(torch.ones(4, 8)), torch.ones(1, 8))
    nn.MSELoss()(model(torch.ones(4, 8)), torch.ones(1, 8))
    torch.autograd.backward(model(torch.ones(4, 8)).sum(), grad_variables=torch.ones(()))

    def closure():
        for above in range(2, 6):
            warnings.warn("a closure", stacklevel=above)
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    model._is_replica = True
    model.zero_grad()
    torch.compile(warns, backend="eager")(torch.ones(2))


def told_by(run):
    """Message and place of each warning, as they would be shown."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
    return [(str(each.message), each.filename, each.lineno) for each in told]


def test_warnings_name_the_same_lines(tmp_path):
    wanted = told_by(program)
    with followed(tmp_path, every=1, judge="current", compiling=True) as (session, _):
        found = told_by(program)
    assert found == wanted
    assert len({line for _, name, line in found if name == __file__}) == 5
    assert session.hearing.notes == []


def test_a_product_of_the_programs_own_names_who_called_it(tmp_path, monkeypatch):
    original = F.linear

    def own(x, weight, bias=None):
        warnings.warn("my own", stacklevel=2)
        return original(x, weight, bias)

    monkeypatch.setattr(F, "linear", own)
    with followed(tmp_path, every=1, judge="current") as (_, writer):
        weight = nn.Parameter(torch.ones(16, 16))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = weight

            def forward(self, x):
                return F.linear(x, self.weight)

        model = Model()

        def program():
            model(torch.ones(8, 16)).sum().backward()
            optimizer.step()

        told = [told_by(program) for _ in range(2)]
    assert [name for each in told for _, name, _ in each] == [__file__] * 2
    assert "(model):input" in writer.tensors[-1][1]


def test_a_log_names_the_line_that_called(tmp_path, caplog, monkeypatch):
    def told(x, target):
        logging.getLogger("program").warning("a loss", stacklevel=2)
        return (x - target).square().mean()

    monkeypatch.setattr(F, "mse_loss", told)
    with followed(tmp_path):
        F.mse_loss(torch.ones(2), torch.zeros(2))
    assert [record.pathname for record in caplog.records] == [__file__]


def test_what_is_compiled_once_stays_so_from_watch_to_watch(tmp_path):
    torch._dynamo.reset()
    graphs = CompileCounter()
    compiled = torch.compile(lambda x: F.mse_loss(x, 2 * x), backend=graphs, fullgraph=True)
    for _ in range(3):
        with followed(tmp_path):
            compiled(torch.ones(2))
    assert graphs.frame_count == 1


def test_an_error_shows_our_lines_as_ever(tmp_path):
    with followed(tmp_path), pytest.raises(RuntimeError, match="only for scalar outputs") as raised:
        nn.Linear(8, 8)(torch.ones(4, 8)).backward()
    shown = str(raised.getrepr())
    assert "updating.py" in shown
    assert "original(tensors, *args, **kwargs)" in shown


class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        if number:
            raise ValueError("a bad sample")
        return torch.ones(2)


def test_the_error_of_a_dataset_passes_one_line_of_ours(tmp_path):
    loader = torch.utils.data.DataLoader(Broken())

    def program():
        with pytest.raises(ValueError, match="a bad sample") as raised:
            list(loader)
        return [(frame.path, frame.lineno) for frame in raised.traceback if "program" not in frame.name]

    alone = program()
    with followed(tmp_path) as (session, _):
        found = program()
        iterator = iter(loader)
        kept = type(iterator).__next__
    ours = [path for path, line in found if (path, line) not in alone]
    assert [path.name for path in map(Path, ours)] == ["calling.py <unseen, as importlib._bootstrap>"]
    session.loading.batch_loaded = None  # whom nobody tells after the end
    assert torch.equal(kept(iterator), torch.ones(1, 2))
