"""Without a GPU, Triton's kernels run in its interpreter, which must be said before they are imported."""

import os

import torch
from tests import quick_interpreter

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.install()
