"""Synthetic runs and their verdict under one name."""

from synthetic_runs import COMMAND, SICK, conversion, losses, modules, write_all, write_run
from synthetic_verdict import variant, verdict

__all__ = ["COMMAND", "SICK", "conversion", "losses", "modules", "variant", "verdict", "write_all", "write_run"]
