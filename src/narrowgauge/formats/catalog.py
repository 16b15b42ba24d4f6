"""The six formats narrowgauge knows.

name        e m bias      max   min normal  min subnormal   used for
E4M3FN      4 3    7      448        2^-6           2^-9    activations, weights, finely scaled gradients
E5M2        5 2   15    57344       2^-14          2^-16    gradients with one scale per tensor
E4M3FNUZ    4 3    8      240        2^-7          2^-10    AMD MI300; a byte means half of its FN value
E5M2FNUZ    5 2   16    57344       2^-15          2^-17    AMD MI300; likewise
E8M0        8 0  127    2^127      2^-127         2^-127    the scale of a microscaling block
E2M1        2 1    1        6           1            0.5    the element of MXFP4 and NVFP4
"""

from __future__ import annotations

from types import MappingProxyType

from narrowgauge.errors import FormatError, nearest
from narrowgauge.formats.spec import Format, Specials

E4M3FN = Format("E4M3FN", exponent_bits=4, mantissa_bits=3, bias=7, specials=Specials.FN)
E5M2 = Format("E5M2", exponent_bits=5, mantissa_bits=2, bias=15, specials=Specials.IEEE)
E4M3FNUZ = Format("E4M3FNUZ", exponent_bits=4, mantissa_bits=3, bias=8, specials=Specials.FNUZ)
E5M2FNUZ = Format("E5M2FNUZ", exponent_bits=5, mantissa_bits=2, bias=16, specials=Specials.FNUZ)
E8M0 = Format("E8M0", exponent_bits=8, mantissa_bits=0, bias=127, specials=Specials.SCALE)
E2M1 = Format("E2M1", exponent_bits=2, mantissa_bits=1, bias=1, specials=Specials.FINITE)

CATALOG = MappingProxyType({fmt.name: fmt for fmt in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0, E2M1)})


def by_name(name: str) -> Format:
    """Return the format called `name`, any case; FormatError names the nearest match."""
    found = CATALOG.get(name.upper())
    if found is None:
        raise FormatError(f"no number format is called {name!r}; {nearest(name, CATALOG)}")
    return found
