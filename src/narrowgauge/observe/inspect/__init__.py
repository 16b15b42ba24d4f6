"""A file of tensors, looked at offline: what each tensor holds, and what every FP8 recipe would make of it.

Read in this order: entry (what is in a file), safetensors_file, numpy_scalars, torch_file, opening, scales, walk,
ranking, inspection, page.
"""

from narrowgauge.observe.inspect.inspection import Inspection, inspect
from narrowgauge.observe.inspect.opening import open_checkpoint
from narrowgauge.observe.inspect.page import page, plain

__all__ = ["Inspection", "inspect", "open_checkpoint", "page", "plain"]
