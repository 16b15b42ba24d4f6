"""`[[dump]]`: chosen operands of chosen steps, written whole: the tensor, its codes and its scale.

choice.py   one table of the settings: which sites and steps, and how much it may still write
dumper.py   takes the operands as they are quantized, without waiting for the device
file.py     one file per step and rank, written by a thread of its own, aside and then renamed
"""

from narrowgauge.session.dumps.dumper import Dumper

__all__ = ["Dumper"]
