"""What a model is given that is mostly tensors alone: said in few functions, and as by the long way."""

import random

import pytest
import torch
from torch import nn

from narrowgauge.session.tensors import batches as module
from narrowgauge.session.tensors.batches import Batches

KINDS = [
    "new",
    "kept",
    "written",
    "view",
    "made",
    "moves",
    "sparse",
    "meta",
    "inference",
    "none",
    "parameter",
    "listed",
]


def one(kind, kept, made):
    """A tensor, or what is given in the place of one."""
    x = torch.ones(2, 3)
    if kind in ("kept", "written"):
        x = random.choice(kept)
        if kind == "written" and not x.is_inference():
            x.add_(1.0)
    elif kind == "view":
        x = random.choice(kept)[:1]
    elif kind == "made" and made:
        x = random.choice(made)
    elif kind == "moves":
        x.requires_grad_()
    elif kind == "sparse":
        x = x.to_sparse()
    elif kind == "meta":
        x = x.to("meta")
    elif kind == "inference":
        with torch.inference_mode():
            x = x.clone()
    elif kind == "parameter":
        x = nn.Parameter(x)
    return {"none": None, "listed": [x]}.get(kind, x)


def told(batches):
    """All that is known of what was given."""
    before = {key: whose[:2] for key, whose in batches._before._by.items()}
    return before, batches._before._latest, batches._given, {*batches._last}, {*batches._made}, batches.notes


@pytest.mark.parametrize("seed", range(40))
def test_it_is_known_as_by_the_long_way(seed, monkeypatch):
    random.seed(seed)
    short, long = Batches(), Batches()
    kept, made, answers = [torch.ones(4, 3) for _ in range(3)], [], []

    def by_both(ask):
        found = ask(short)
        with monkeypatch.context() as patched:
            patched.setattr(module, "plain_tensors", lambda inputs: None)
            assert ask(long) == found
        assert told(short) == told(long)
        answers.append(found)

    for _ in range(40):
        given = [
            one(random.choice(KINDS[: random.choice((3, len(KINDS)))]), kept, made)
            for _ in range(random.choice((1, 2)))
        ]
        placed = random.choice((0, 1, 2))
        inputs = tuple(given[:placed]), dict(zip("ab", given[placed:], strict=False))
        what = random.choice(("met", "met", "trains", "once_more", "made", "begin_anew"))
        if what == "met":
            model = random.choice((1, 1, 2))
            by_both(lambda batches, inputs=inputs, model=model: batches.met(inputs, model))
        elif what == "made":
            made.append(torch.ones(2))
            by_both(lambda batches, inputs=inputs: batches.made([made[-1], *kept[:1]], inputs))
        elif what == "begin_anew":
            by_both(Batches.begin_anew)
        else:
            by_both(lambda batches, inputs=inputs, what=what: getattr(batches, what)(inputs))
    assert answers


def test_both_answers_are_met():
    batches, x = Batches(), torch.ones(2)
    assert not batches.once_more(((x,), {}))
    assert batches.once_more(((), {"x": x, "y": None}))
    batches.met(((x,), {}), 1)
    assert batches.trains(((x,), {}))
    x.add_(1.0)
    assert not batches.trains(((x,), {}))
