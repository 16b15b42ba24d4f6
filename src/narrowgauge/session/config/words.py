"""The words that a settings file may use as values: roles, gemms, metrics, recipes, globs, ranges, sizes.

Each check returns what it was given, or raises what pydantic turns into an error with its place; the message says what
was found, what was expected and what is nearest.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date, time
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_core import PydanticCustomError

from narrowgauge.errors import RecipeError, nearest
from narrowgauge.metrics import COLUMNS
from narrowgauge.metrics.site import OPERAND_ROLES, ROLES
from narrowgauge.session.selection import step_ranges

WILD = "*?["
GEMMS = ("fprop", "dgrad", "wgrad")


def wrong(message: str, *at: str | int) -> PydanticCustomError:
    """An error whose text is ours; braces in it are no places to fill. `at` is where in what is checked."""
    return PydanticCustomError("narrowgauge", "{text}", {"text": message, "at": at})


def as_toml(value: Any) -> str:
    """A value as the file has it, where Python writes it otherwise.

    >>> as_toml([True, {"every": 1}])
    '[true, {every = 1}]'
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {as_toml(part)}" for key, part in value.items()) + "}"
    return str(value) if isinstance(value, date | time) else repr(value)


def _one_of(kind: str, options: Iterable[str]) -> AfterValidator:
    known = tuple(options)

    def check(word: str) -> str:
        if word not in known:
            raise wrong(f"there is no {kind} {word!r}; {nearest(word, known)}")
        return word

    return AfterValidator(check)


def _metric(word: str) -> str:
    if not any(fnmatchcase(column, word) for column in COLUMNS):
        raise wrong(f"no metric is called {word!r}; {nearest(word, COLUMNS)}")
    return word


def _recipe(word: str) -> str:
    from narrowgauge.compute.recipes import by_name  # torch loads here, for those who name recipes

    try:
        by_name(word)
    except RecipeError as error:
        raise wrong(str(error)) from None
    return word


def _backend(word: str) -> str:
    from narrowgauge.compute.kernels.choose import BACKENDS  # torch loads here, for those who name one

    if word not in BACKENDS:
        raise wrong(f"no backend is called {word!r}; {nearest(word, BACKENDS)}")
    return word


def _glob(word: str) -> str:
    if not word.removeprefix("!"):
        raise wrong(f"{word!r} matches nothing; expected a glob on module names, or module:role")
    return word


def _site_glob(word: str) -> str:
    _, colon, role = word.removeprefix("!").rpartition(":")
    if colon and not any(fnmatchcase(known, role) for known in ROLES):
        raise wrong(f"{word!r} ends in no role; {nearest(role, ROLES)}")
    return _glob(word)


def _span(value: Any) -> step_ranges.Span:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise wrong(f'{as_toml(value)} is no range of steps; expected "7", "0-100" or "500-"')
    try:
        return step_ranges.parse(value)
    except ValueError as error:
        raise wrong(str(error)) from None


def _some(value: list[Any]) -> list[Any]:
    """An empty list is a mistake where it would choose everything."""
    if not value:
        raise wrong("an empty list chooses nothing; name at least one, or leave it out")
    return value


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Role = Annotated[str, _one_of("role", ROLES)]
OperandRole = Annotated[str, _one_of("operand", OPERAND_ROLES)]
GemmName = Annotated[str, _one_of("gemm", GEMMS)]
MetricGlob = Annotated[str, AfterValidator(_metric)]
BackendName = Annotated[str, AfterValidator(_backend)]
RecipeName = Annotated[str, AfterValidator(_recipe)]
Glob = Annotated[str, AfterValidator(_glob)]
SiteGlob = Annotated[str, AfterValidator(_site_glob)]
Spans = Annotated[list[Annotated[step_ranges.Span, BeforeValidator(_span)]], BeforeValidator(_listed)]
Some = AfterValidator(_some)
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Size = Annotated[ByteSize, Field(ge=1)]
