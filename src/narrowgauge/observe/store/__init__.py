"""Runs on disk: write them while training, read them anywhere. No torch on this floor."""

from narrowgauge.observe.store.compaction import Compaction, compact
from narrowgauge.observe.store.reader import Run, open_run
from narrowgauge.observe.store.schema import SCHEMA, role_of
from narrowgauge.observe.store.table import Table
from narrowgauge.observe.store.writer import RunWriter

__all__ = ["SCHEMA", "Compaction", "Run", "RunWriter", "Table", "compact", "open_run", "role_of"]
