"""The ranks of one program as one: their tables are merged on the device, in one collective per recorded step."""

from narrowgauge.session.ranks.open_step import Told
from narrowgauge.session.ranks.ranks import Ranks

__all__ = ["Ranks", "Told"]
