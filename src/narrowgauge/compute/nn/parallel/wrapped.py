"""The class of a layer on which `fully_shard` was called, and how to change what lies beneath.

    fully_shard(layer)     class FSDPLinear(FSDPModule, nn.Linear)        made by torch, one per class of layers
    converted              class FSDPFp8Linear(FSDPModule, Fp8Linear)     the same wrapper around another class

The wrapper's state is kept by the module, not by its class, so exchanging the class below leaves it as it was.
"""

from __future__ import annotations

from torch import nn

_EXCHANGED: dict[tuple[type, type], type] = {}


def class_of(module: nn.Module) -> type:
    """The class of a module without the one that torch's sharding puts in front.

    >>> class_of(nn.Linear(2, 2)).__name__
    'Linear'
    """
    kind = type(module)
    return kind.__bases__[1] if _wraps(kind) else kind


def exchange(module: nn.Module, new: type) -> None:
    """Make `new` the class of a module, below what torch's sharding puts in front; back again gives the first class."""
    kind = type(module)
    if not _wraps(kind):
        module.__class__ = new
        return
    wrapper, old = kind.__bases__
    if (kind, new) not in _EXCHANGED:
        prefix = kind.__name__.removesuffix(old.__name__)
        body = {"__deepcopy__": vars(kind)["__deepcopy__"], "__module__": kind.__module__}
        made = type(f"{prefix}{new.__name__}", (wrapper, new), body)
        _EXCHANGED[kind, new], _EXCHANGED[made, old] = made, kind
    module.__class__ = _EXCHANGED[kind, new]


def _wraps(kind: type) -> bool:
    """Whether it is what torch makes: its wrapper, the wrapped class, and nothing of its own but a refusal to copy."""
    bases = kind.__bases__
    if len(bases) != 2 or not bases[0].__module__.startswith("torch.distributed."):
        return False
    return vars(kind).keys() - {"__module__", "__doc__"} == {"__deepcopy__"}
