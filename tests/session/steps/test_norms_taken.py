"""Of steps that are not recorded gradients are read for their norm while it is not known how long steps take; then only
where the program has read them itself, to clip them."""

import pytest
import torch
import torch.nn.functional as F
from tests.session.steps.alone import Model, batch, made, notes, nothing_is_compiled, run
from torch import nn

from narrowgauge.session.steps import pace

__all__ = ["nothing_is_compiled"]  # a fixture for each test here

SETTLED = 12
EACH = list(range(1, 25))


@pytest.fixture(autouse=True)
def long_steps(monkeypatch):
    """None is left alone, however short; and a dozen of them settle that."""
    monkeypatch.setattr(pace, "SHORT", 0.0)
    monkeypatch.setattr(pace, "SETTLED", SETTLED)


def program(losses, *, clips=False):
    model, optimizer = made()
    for number in EACH:
        x = batch(number)
        loss = F.mse_loss(model(x), x)
        loss.backward()
        losses.append(loss.item())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("scalars", "clips", "taken"),
    [
        ("auto", False, [at for at in EACH if at <= SETTLED or at == 20]),
        ("auto", True, EACH),
        ("all", False, EACH),
    ],
)
def test_a_norm_is_taken_where_it_is_for_nothing_or_recorded_or_asked_for(tmp_path, scalars, clips, taken):
    _, session, writer = run(tmp_path, lambda losses: program(losses, clips=clips), scalars)
    _, _, wanted = run(tmp_path, lambda losses: program(losses, clips=clips), "all")
    norms = writer.column("grad_norm")
    assert list(norms) == taken
    assert norms == {at: wanted.column("grad_norm")[at] for at in taken}
    for name in ("loss", "tokens", "data_digest", "nonfinite", "microbatches"):
        assert writer.column(name) == wanted.column(name)
    assert not notes(session)


def test_no_gradient_is_read_where_no_norm_is_taken(tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr("narrowgauge.session.steps.looking._gradients", lambda line, *args: read.append(line.step))
    run(tmp_path, program, "auto")
    assert read == [at for at in EACH if at <= SETTLED or at == 20]


@pytest.mark.parametrize("clips", ["up", "down"])
def test_of_two_optimizers_a_norm_of_one_s_gradients_is_never_that_of_all(tmp_path, clips):
    def program(losses):
        model = Model()
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model.up, model.down)]
        idle = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.01)  # has no gradient, and steps
        for number in EACH:
            x = batch(number)
            F.mse_loss(model(x), x).backward()
            for optimizer, part in zip(optimizers, ("up", "down"), strict=True):
                if part == clips or number > 21:
                    nn.utils.clip_grad_norm_(getattr(model, part).parameters(), 0.5)
                optimizer.step()
            idle.step()
            model.zero_grad()

    _, _, writer = run(tmp_path, program, "auto")
    _, _, wanted = run(tmp_path, program, "all")
    norms = writer.column("grad_norm")
    assert list(norms) == [at for at in EACH if at <= SETTLED or at == 20 or at > 21]
    assert norms == {at: wanted.column("grad_norm")[at] for at in norms}
