"""The end of a program: scalars that no gather has taken go through the store that all ranks share."""

from __future__ import annotations

import json
import time

from narrowgauge.observe.store import RunWriter
from narrowgauge.session.ranks.agreement import Agreement
from narrowgauge.session.ranks.landing import Landing
from narrowgauge.session.ranks.patience import POLL, Patience
from narrowgauge.session.ranks.scalars import Waiting

KNOWN = 0.5  # seconds for ranks whose last words were read to know that


def leave(agreement: Agreement, waiting: Waiting, writer: RunWriter, patience: float) -> None:
    """Leave them for rank 0; what it does not fetch within `patience` seconds is written here."""
    rest, deadline = waiting.rest(), time.monotonic() + patience
    agreement.leave(json.dumps(rest))
    while not (read := agreement.was_read()) and time.monotonic() < deadline:
        time.sleep(POLL)
    if not read:
        for step, row in rest:
            writer.add_scalars(step, **row)


def fetch(agreement: Agreement, waiting: Waiting, landing: Landing, world: int, patience: Patience) -> str:
    """On rank 0: join those of all ranks that come while there is `patience`; who did not, and what is missing then."""
    landing.look(wait=True)
    landing.join(0, waiting.rest())
    others = set(range(1, world))

    def all_joined() -> bool:
        for rank in sorted(others):
            text = agreement.left(rank)
            if text is not None:
                others.discard(rank)
                landing.join(rank, [(step, row) for step, row in json.loads(text)])
        return not others

    patience.wait(all_joined, lambda: any(map(patience.coming, others)))
    # This process may have the store, and those that still ask it would take it to be lost.
    deadline, joined = time.monotonic() + KNOWN, set(range(1, world)) - others
    while not all(map(agreement.knows, joined)) and time.monotonic() < deadline:
        time.sleep(POLL)
    steps = landing.lacking(others)
    landing.finish()
    if not steps:
        return _of_later_steps([rank for rank in sorted(others) if patience.coming(rank)])
    who = f"rank {', '.join(map(str, sorted(others)))}"
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    if not any(map(agreement.is_here, others)):  # it evaluates, or feeds the others: there may be nothing to tell
        return f"{who} made no step: loss, tokens and others of {which} are of the other ranks alone"
    return f"{who} had not told the last numbers when rank 0 ended: loss, tokens and others of {which} are without them"


def _of_later_steps(ranks: list[int]) -> str:
    """What may be missing of these, who live and of whom nothing else is known to be."""
    if not ranks:
        return ""
    who = f"rank {', '.join(map(str, ranks))}"
    return f"{who} had not ended when rank 0 did: loss, tokens and others of steps after that are in no row of the run"
