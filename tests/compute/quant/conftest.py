from __future__ import annotations

from hypothesis import settings

# Wall-clock limits per example fail on a busy machine and say nothing about numbers.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
