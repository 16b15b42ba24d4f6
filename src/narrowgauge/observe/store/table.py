"""Table: named columns of equal length, as numpy arrays: what a reader hands out.

Nulls: a float column has NaN there; an integer column that has nulls comes as float64 with NaN; texts and
histograms come as object arrays with None.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from narrowgauge.errors import RunError, nearest
from narrowgauge.observe.store import asked

Array = npt.NDArray[Any]


class Table(Mapping[str, Array]):
    """An immutable mapping from column name to array [rows]; `rows` is the common length.

    >>> table = Table({"step": np.arange(3), "loss": np.array([2.0, 1.5, 1.25])})
    >>> table.rows, table.columns, float(table["loss"][-1])
    (3, ('step', 'loss'), 1.25)
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._columns = dict(columns)
        self.rows = len(next(iter(self._columns.values()))) if self._columns else 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The column names, in order."""
        return tuple(self._columns)

    def __getitem__(self, name: str) -> Array:
        if not isinstance(name, str):
            raise asked.wrong("the column", name, f"one name of {', '.join(self._columns)}; row(index) reads a row")
        if name not in self._columns:
            raise RunError(f"there is no column {name!r}; {nearest(name, self._columns)}")
        return self._columns[name]

    def get(self, name: str, default: Any = None) -> Any:
        """A column, or `default` where there is none of that name."""
        return self._columns.get(name, default) if isinstance(name, str) else default

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Table({self.rows} rows: {', '.join(self._columns)})"

    def row(self, index: int) -> dict[str, Any]:
        """One row as plain Python values; a negative index counts from the end."""
        index = asked.whole("index", index, least=-self.rows)
        if index >= self.rows:
            raise RunError(f"there is no row {index}: the table has {self.rows}, counted from 0.")
        row = {name: values[index] for name, values in self._columns.items()}
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in row.items()}

    def to_pandas(self) -> Any:
        """The same as a pandas.DataFrame; pandas is not among narrowgauge's own requirements."""
        return importlib.import_module("pandas").DataFrame(self._columns)


def plain_column(values: Any) -> Array:
    """A column as DuckDB fetched it, with its mask turned into NaN or None."""
    if not isinstance(values, np.ma.MaskedArray):
        return np.asarray(values)
    mask = np.ma.getmaskarray(values)
    data = np.asarray(np.ma.getdata(values))
    if data.dtype.kind not in "fiu":
        data = data.astype(object)
        data[mask] = None
    elif mask.any():
        data = data.astype(data.dtype if data.dtype.kind == "f" else np.float64)
        data[mask] = np.nan
    return data
