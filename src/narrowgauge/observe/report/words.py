"""Numbers and names as a reader wants them: sensible digits, a real minus sign, units, no paths of this machine."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

NONE = "—"
NAN_STEPS = "loss, or gradient of an update, not finite"
SKIPPED_STEPS = "no update: gradients not finite under the loss scale"


def percent(value: float | None, *, signed: bool = True) -> str:
    """Percent with two decimals, fewer for large values and three for tiny ones; "—" for None.

    >>> percent(0.1149), percent(-12.34), percent(0.0021, signed=False), percent(1.743e8)
    ('+0.11 %', '−12.3 %', '0.002 %', '+1.7e8 %')
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    size = abs(value)
    digits = 3 if size < 0.00995 else 2 if size < 9.995 else 1 if size < 99.95 else 0
    text = f"{size:,.{digits}f} %" if size < 99_999.5 else f"{size:.1e} %".replace("e+0", "e").replace("e+", "e")
    if float(f"{size:.{digits}f}") == 0:
        return text
    return ("−" if value < 0 else "+" if signed else "") + text


def seconds(value: float | None) -> str:
    """A duration with three digits and its unit.

    >>> seconds(0.5461), seconds(12.3456), seconds(7.5e-5)
    ('546 ms', '12.3 s', '75 µs')
    >>> seconds(0.00099996), seconds(0.99996)
    ('1 ms', '1 s')
    """
    if value is None or not math.isfinite(value):
        return NONE
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s")):
        if abs(value) < limit * 0.9995:  # what three digits round up to the limit has the next unit
            return f"{_three(value * factor)} {unit}"
    return NONE


def power_of_ten(value: float) -> str:
    """The nearest one to a positive number.

    >>> power_of_ten(0.01), power_of_ten(1e-6)
    ('10⁻²', '10⁻⁶')
    """
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def memory(value: float | None) -> str:
    """Bytes as MiB or GiB.

    >>> memory(1_402_000_000), memory(250_000_000)
    ('1.31 GiB', '238 MiB')
    """
    if value is None or not math.isfinite(value):
        return NONE
    gib = value / 2**30
    return f"{_three(gib)} GiB" if gib >= 1 else f"{_three(value / 2**20)} MiB"


def count(value: float | None) -> str:
    """A large count rounded to three digits.

    >>> count(15003.2), count(7)
    ('15,000', '7')
    """
    if value is None or not math.isfinite(value):
        return NONE
    if abs(value) < 1000:
        return _three(value)
    magnitude = 10 ** (math.floor(math.log10(abs(value))) - 2)
    return f"{round(value / magnitude) * magnitude:,}"


def exact(value: float | None) -> str:
    """A count that its reader knows by heart (a batch's tokens), to the last digit.

    >>> exact(1024.0), exact(1_048_576), exact(62.5)
    ('1,024', '1,048,576', '62.5')
    """
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def loss(value: float | None) -> str:
    """A loss with four decimals, as far as they can be compared; large and tiny ones with four digits."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if 0.01 <= abs(value) < 100 else f"{value:.4g}"


def cosine(value: float | None) -> str:
    """A cosine near 1, with enough digits to see the distance.

    >>> cosine(0.99891), cosine(0.99999969)
    ('0.99891', '1 − 3.1e-07')
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not finite"
    rest = 1 - value
    return f"1 − {rest:.1e}" if 0 < rest < 1e-5 else f"{value:.5f}"


def number(value: float | None) -> str:
    """Any metric with four digits."""
    return NONE if value is None else f"{value:.4g}" if math.isfinite(value) else "not finite"


def command_line(command: Any) -> str:
    """The command as one line, from a list of arguments or a string."""
    if isinstance(command, (list, tuple)):
        return shlex.join(str(part) for part in command)
    return str(command or "")


_PATH = re.compile(r"(?<![\w:/.…~-])(?:~?/|[A-Za-z]:\\)(?:[^\s'\"<>|:,;()\\/]+[\\/])+(?=[^\s'\"<>|:,;()\\/])")


def scrub(text: str) -> str:
    """The same text with folders of absolute paths removed: a report is sent to people, a home folder is not.

    >>> scrub("no such file: '/home/ada/data/corpus.txt'")
    "no such file: '…/corpus.txt'"
    """
    return _PATH.sub("…/", text)


def listing(names: Sequence[str]) -> str:
    """
    Names in a sentence.

    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1] if names else ""


def _three(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    digits = max(2 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
