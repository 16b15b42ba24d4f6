"""Reading the file, and saying what is wrong with it: where, what was found, what was expected, what is nearest.

narrowgauge.toml:4: watch.evry: there is no such key; did you mean 'every'?
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from narrowgauge.errors import UsageError, nearest
from narrowgauge.session.config.lines import line_of
from narrowgauge.session.config.tables import Config
from narrowgauge.session.config.words import as_toml

EXPECTED = {  # in plainer words than pydantic's
    "int_type": "expected a whole number",
    "string_type": "expected a text in quotes",
    "bool_type": "expected true or false",
    "byte_size": 'expected bytes, or a number with a unit such as "2 GiB"',
    "byte_size_unit": 'expected bytes, or a number with a unit such as "2 GiB"',
}


def load(path: Path | None) -> Config:
    """Read a settings file; the defaults if `path` is None.

    Raises UsageError for a file that cannot be read, broken TOML, and everything that the tables refuse: one line for
    each mistake, with its place.
    """
    if path is None:
        return Config()
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
        data = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: it is not UTF-8 ({error.reason}).") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}.") from error
    except ValueError as error:  # of Python itself, which reads so many digits and no more
        raise UsageError(f"{path} is not valid TOML: a number in it has too many digits.") from error
    except RecursionError as error:
        raise UsageError(f"{path} nests too deep; expected tables with keys.") from error
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        found = [(_place(mistake), mistake) for mistake in error.errors(include_url=False)]
        mistakes = sorted((line_of(text, where), _said(where, mistake)) for where, mistake in found)
        raise UsageError("\n".join(f"{path}:{line}: {said}" for line, said in mistakes)) from None


def _place(mistake: Any) -> tuple[str | int, ...]:
    """Which key it is about, also where a whole table was checked."""
    return (*mistake["loc"], *mistake.get("ctx", {}).get("at", ()))


def _said(where: tuple[str | int, ...], mistake: Any) -> str:
    """One mistake without its line in the file."""
    name, kind, value = dotted(where), mistake["type"], mistake["input"]
    if kind == "extra_forbidden":
        table = _table(where[:-1])
        return f"{name}: there is no such key; {nearest(str(where[-1]), table.model_fields)}"
    if kind == "missing":
        return f"{name}: it must be given. {_table(where[:-1]).model_fields[str(where[-1])].description}"
    if kind == "narrowgauge":
        text = mistake["msg"]
        return f"{name}: {text}" if text.endswith(("?", ".")) else f"{name}: {text}."
    expected = EXPECTED.get(kind, mistake["msg"].replace("Input should be", "expected"))
    if kind in ("model_type", "dict_type"):
        of_list = bool(where) and isinstance(where[-1], int)
        expected = f"expected a table: [[{dotted(where[:-1])}]]" if of_list else f"expected a table: [{name}]"
    if kind == "list_type":
        one = f": {json.dumps([value])}" if isinstance(value, str) else ""
        expected = f"expected a list of tables: [[{name}]]" if _holds_tables(where) else f"expected a list{one}"
    return f"{name} is {as_toml(value)}; {expected}."


def _holds_tables(where: Sequence[str | int]) -> bool:
    return inner_table(_table(where[:-1]).model_fields[str(where[-1])].annotation) is not None


def dotted(where: Sequence[str | int]) -> str:
    """A place as one would write it.

    >>> dotted(("high", 0, "keep"))
    'high[0].keep'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).removeprefix(".")


def _table(where: Sequence[str | int]) -> type[BaseModel]:
    """The class of the table at a place."""
    table: type[BaseModel] = Config
    for part in where:
        if isinstance(part, str):
            table = inner_table(table.model_fields[part].annotation) or table
    return table


def inner_table(annotation: Any) -> type[BaseModel] | None:
    """The table in a field's annotation, if it is one, a list of it, or one that may be left out."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for inner in get_args(annotation) if (table := inner_table(inner)) is not None), None)
