"""The end of a program: scalars that no gather has taken go through the store that all ranks share."""

from __future__ import annotations

import json
import time

from narrowgauge.observe.store import RunWriter
from narrowgauge.session.ranks.agreement import Agreement
from narrowgauge.session.ranks.landing import Landing
from narrowgauge.session.ranks.scalars import Waiting

POLL = 0.01


def leave(agreement: Agreement, waiting: Waiting, writer: RunWriter, patience: float) -> None:
    """Leave them for rank 0; what it does not fetch within `patience` seconds is written here."""
    rest, deadline = waiting.rest(), time.monotonic() + patience
    agreement.leave(json.dumps(rest))
    while not agreement.was_read() and time.monotonic() < deadline:
        time.sleep(POLL)
    if not agreement.was_read():
        for step, row in rest:
            writer.add_scalars(step, **row)


def fetch(agreement: Agreement, waiting: Waiting, landing: Landing, world: int, patience: float) -> None:
    """On rank 0: join those of all ranks that come within `patience` seconds."""
    rest, deadline = waiting.rest(), time.monotonic() + patience
    landing.look(wait=True)
    landing.join(0, rest)
    others = set(range(1, world))
    while others and time.monotonic() < deadline:
        for rank in sorted(others):
            text = agreement.left(rank)
            if text is not None:
                others.discard(rank)
                landing.join(rank, [(step, row) for step, row in json.loads(text)])
        time.sleep(POLL if others else 0.0)
    landing.finish()
