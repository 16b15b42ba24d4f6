from __future__ import annotations

import pytest
from hypothesis import settings

from narrowgauge.formats import CATALOG, Format

# Wall-clock limits per example fail on a busy machine and say nothing about numbers.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(params=CATALOG.values(), ids=CATALOG.keys())
def fmt(request: pytest.FixtureRequest) -> Format:
    return request.param
