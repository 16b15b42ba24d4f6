"""A device that is not there: what is to come from it is on its way until it is said to have arrived."""

from narrowgauge.session.tensors import deferred


class Device:
    """Tensors that are no float64 are its; `passed` is whether it is done with them."""

    def __init__(self, monkeypatch):
        self.passed, self.copied = False, []
        leaves = deferred._Copies.leave
        monkeypatch.setattr(deferred, "_on_host", lambda x: x.dtype.itemsize == 8)
        monkeypatch.setattr(deferred._Copies, "arrived", lambda copies, wait: wait or self.passed)
        monkeypatch.setattr(deferred._Copies, "leave", lambda copies: self._leave(copies, leaves))

    def _leave(self, copies, leaves):
        self.copied += [len(scalars) for scalars in copies._scalars.values()]
        leaves(copies)
