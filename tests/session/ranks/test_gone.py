"""Why ranks are apart is told in one line, and by ranks, whatever C++ says of it."""

import os
import socket

import pytest

from narrowgauge.observe.store import manifest as manifests
from narrowgauge.session.ranks.gone import in_words

PAIR = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "
CLOSED = PAIR + "Read error [127.0.0.1]:59027: Connection reset by peer. This is typically caused by a bug.\nCheck it."
TIMED = "the ranks did not meet: " + PAIR + "timed out connecting: SO_ERROR"
STORE = "Broken pipe\nException raised from sendBytes at Utils.hpp:653 (most recent call first):\nframe #0: c10::Error"


def writes(folder, rank, pid):
    process = {"pid": pid, "started": manifests.process_started(pid), "host": socket.gethostname()}
    manifests.write(folder, {**manifests.fresh(rank, {}), "process": process})


@pytest.mark.parametrize(
    ("text", "world", "words"),
    [
        (CLOSED, 2, "rank 1 is gone (RuntimeError: Read error [127.0.0.1]:59027: Connection reset by peer)"),
        (CLOSED, 3, "rank 2 is gone (RuntimeError: Read error [127.0.0.1]:59027: Connection reset by peer)"),
        (TIMED, 3, "rank 2 is gone (RuntimeError: the ranks did not meet: timed out connecting: SO_ERROR)"),
        (TIMED, 2, "RuntimeError: the ranks did not meet: timed out connecting: SO_ERROR"),
        (STORE, 2, "RuntimeError: Broken pipe"),
        ("", 2, "RuntimeError"),
    ],
)
def test_it_is_told_in_one_line(tmp_path, text, world, words):
    writes(tmp_path, 0, os.getpid())
    writes(tmp_path, 1, os.getpid())
    writes(tmp_path, 2, 2**22 + 1)
    assert in_words(RuntimeError(text), tmp_path, 0, world) == words


def test_of_many_that_all_may_be_gone_none_is_named(tmp_path):
    said = "another rank is gone (RuntimeError: Read error [127.0.0.1]:59027: Connection reset by peer)"
    assert in_words(RuntimeError(CLOSED), tmp_path, 0, 3) == said
