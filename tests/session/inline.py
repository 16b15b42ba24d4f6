"""A session around code of the test itself, and what it would have written."""

from contextlib import contextmanager

import torch

from narrowgauge.metrics import finalize
from narrowgauge.session.attach import Session
from narrowgauge.session.plan import Plan


class Writer:
    """Keeps what a RunWriter would have written."""

    rank = 0

    def __init__(self):
        self.scalars, self.tensors, self.events, self.meta = {}, [], [], {}

    def add_scalars(self, step, **values):
        self.scalars.setdefault(step, {}).update(values)

    def add_tensors(self, step, sites, columns):
        self.tensors.append((step, list(sites), columns))

    def add_moments(self, step, sites, table, names, further):
        self.add_tensors(step, sites, finalize(table, columns=names) | dict(further))

    def update_meta(self, **facts):
        self.meta.update(facts)

    def add_event(self, step, kind, message, site=None, **data):
        self.events.append((step, kind, message))

    def column(self, name):
        return {step: row[name] for step, row in sorted(self.scalars.items()) if name in row}


@contextmanager
def followed(tmp_path, probe=None, **plan):
    """What is done inside is followed; yields the session and its writer, which are whole afterwards."""
    writer = Writer()
    session = Session(Plan(variant="x", out=str(tmp_path), command=("train.py",), **plan), writer, probe)
    try:
        yield session, writer
    finally:
        session.finish()


class _Nested(torch.autograd.Function):
    """Its backward runs backward again, so many levels deep, and calls a function in the innermost."""

    @staticmethod
    def forward(ctx, x, levels, then):
        ctx.levels, ctx.then = levels, then
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        with torch.enable_grad():
            if ctx.levels:
                _Nested.apply(torch.ones((), requires_grad=True), ctx.levels - 1, ctx.then).backward()
            else:
                ctx.then()
        return dy, None, None


def through_a_backward_thread(x, then):
    """`x`, whose backward calls `then` inside the backward pass, but in a thread of torch's own: as on a GPU.

    Beyond 60 nested backward passes torch goes on in another thread, and the one that began waits for it.
    """
    return _Nested.apply(x, 61, then)
