"""A session around code of the test itself, and what it would have written."""

from contextlib import contextmanager

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

    def update_meta(self, **facts):
        self.meta.update(facts)

    def add_event(self, step, kind, message, site=None, **data):
        self.events.append((step, kind, message))

    def column(self, name):
        return {step: row[name] for step, row in sorted(self.scalars.items()) if name in row}


@contextmanager
def followed(tmp_path, **plan):
    """What is done inside is followed; yields the session and its writer, which are whole afterwards."""
    writer = Writer()
    session = Session(Plan(variant="x", out=str(tmp_path), command=("train.py",), **plan), writer)
    try:
        yield session, writer
    finally:
        session.finish()
