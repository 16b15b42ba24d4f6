"""`narrowgauge.toml`: its tables as checked data, read with the line and the nearest key of whatever is wrong.

    file -> tomllib -> tables (pydantic) -> Config -> plain data in the Plan -> the watched processes

Only the command itself reads the file. A watched process gets plain data and never imports pydantic.
"""

from narrowgauge.session.config.load import load
from narrowgauge.session.config.tables import Config

__all__ = ["Config", "load"]
