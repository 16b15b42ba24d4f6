"""The process that exports:  python -m narrowgauge.observe.export  with one line of JSON on its standard input.

    {"folder": "runs/a", "settings": {"tensorboard": true}, "patience": 60}        then nothing: the end of the input is
                                                                                   the end of the program that trains
Whoever started it may be killed as well: its end of the pipe then closes, and what is left is taken over. How it went
is written to `export.json` in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from narrowgauge.observe.export.follower import Follower
from narrowgauge.observe.export.names import chosen, make

REPORT = "export.json"
NICE = 10  # whatever trains goes first


def main() -> None:
    """Start a follower for every exporter, wait for the end of the input, then for them."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(NICE)
    asked = json.loads(sys.stdin.readline())
    folder, settings = Path(asked["folder"]), asked["settings"]
    followers = {
        name: Follower(name, partial(make, name, folder, table), folder, list(settings.get("sites") or ()))
        for name, table in chosen(settings).items()
    }
    for follower in followers.values():
        follower.start()
    sys.stdin.read()
    deadline = time.monotonic() + asked["patience"]
    for follower in followers.values():
        follower.end()
    for follower in followers.values():
        follower.join(max(0.0, deadline - time.monotonic()))
    report = {name: follower.report() for name, follower in followers.items()}
    (folder / REPORT).write_text(json.dumps(report, indent=1))
    sys.stdout.flush()
    sys.stderr.flush()
    if any(follower.is_alive() for follower in followers.values()):
        os._exit(1)  # packages of trackers wait at exit for what does not answer


if __name__ == "__main__":
    main()
