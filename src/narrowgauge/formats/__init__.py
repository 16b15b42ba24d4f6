"""Number formats as frozen data, and the oracle that says what every code means. No torch.

Read in this order: spec (what a format is), catalog (the six), codec (one number, exactly), codec_array
(many).
"""

from narrowgauge.formats.catalog import CATALOG, E2M1, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, by_name
from narrowgauge.formats.codec import decode, encode, round_to
from narrowgauge.formats.spec import Format, Specials

__all__ = [
    "CATALOG",
    "E2M1",
    "E4M3FN",
    "E4M3FNUZ",
    "E5M2",
    "E5M2FNUZ",
    "E8M0",
    "Format",
    "Specials",
    "by_name",
    "decode",
    "encode",
    "round_to",
]
