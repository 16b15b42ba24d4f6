from __future__ import annotations

import pytest

from narrowgauge.formats import CATALOG, Format


@pytest.fixture(params=CATALOG.values(), ids=CATALOG.keys())
def fmt(request: pytest.FixtureRequest) -> Format:
    return request.param
