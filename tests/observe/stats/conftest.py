"""Both ways through a tensor on the CPU: the compiled walk, and the passes that run on any device."""

import pytest

from narrowgauge.observe.stats import host


@pytest.fixture(params=["walk", "passes"])
def way(request, monkeypatch):
    if request.param == "passes":
        monkeypatch.setattr(host, "ready", lambda: False)
    return request.param
