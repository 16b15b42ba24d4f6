"""The first gather of a GPU's group, here of a group that never ends it."""

from types import SimpleNamespace

import pytest
import torch

from narrowgauge.session.ranks import group


class Never:
    """A process group one of whose ranks is gone."""

    def __init__(self, done, error=""):
        self.aborted, self.sizes, self._done, self.error = False, [], done, error

    def gather(self, rows, mine, options):
        self.sizes.append(mine[0].numel())
        return SimpleNamespace(is_completed=lambda: self._done, wait=self._wait)

    def _wait(self):
        if self.error:
            raise RuntimeError(self.error)

    def abort(self):
        self.aborted = True


@pytest.fixture
def met(monkeypatch):
    monkeypatch.setattr(group, "MEETING", 0.05)
    met = object.__new__(group.Group)
    met._stream, met._rank, met._world = None, 0, 2
    return met


def test_a_first_gather_that_a_rank_never_joins_is_ended(met):
    ranks = Never(done=False)
    with pytest.raises(RuntimeError, match="a rank was gone before the first gather"):
        met._first(ranks, torch.zeros(1, dtype=torch.float64))
    assert ranks.aborted


def test_a_first_gather_that_fails_is_none(met):
    with pytest.raises(RuntimeError, match="unhandled"):
        met._first(Never(done=True, error="unhandled cuda error"), torch.zeros(1, dtype=torch.float64))


def test_a_first_gather_that_all_join_is_of_one_number(met):
    ranks = Never(done=True)
    met._first(ranks, torch.zeros(1, dtype=torch.float64))
    assert (ranks.sizes, ranks.aborted) == ([1], False)
