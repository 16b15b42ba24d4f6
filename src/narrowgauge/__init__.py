"""narrowgauge: train in FP8, watch every number, and know whether it was safe and worth it.

    import narrowgauge as ng
    model, report = ng.convert(model, recipe=ng.recipes.CURRENT)   # in place; parameters keep their identity
    q = ng.quantize(x, ng.formats.E4M3FN)                            # q.codes, q.scale, q.dequantize()
    with ng.watch(model, out="runs/a"): ...                          # records what this process trains
    run = ng.open_run("runs/a")                                      # needs no torch

Names load on first use (PEP 562), so `import narrowgauge` costs milliseconds and never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> (module, attribute; "" for the module itself)
_LAZY: dict[str, tuple[str, str]] = {
    "Block": ("narrowgauge.compute.quant", "Block"),
    "PerColumn": ("narrowgauge.compute.quant", "PerColumn"),
    "PerRow": ("narrowgauge.compute.quant", "PerRow"),
    "PerTensor": ("narrowgauge.compute.quant", "PerTensor"),
    "convert": ("narrowgauge.compute.nn", "convert"),
    "errors": ("narrowgauge.errors", ""),
    "formats": ("narrowgauge.formats", ""),
    "load_scaling_state": ("narrowgauge.compute.nn", "load_scaling_state"),
    "measure": ("narrowgauge.observe.stats", "measure"),
    "open_run": ("narrowgauge.observe.store", "open_run"),
    "quantize": ("narrowgauge.compute.quant", "quantize"),
    "recipes": ("narrowgauge.compute.recipes", ""),
    "revert": ("narrowgauge.compute.nn", "revert"),
    "rules": ("narrowgauge.compute.nn.conversion.rules", ""),
    "scaling_state": ("narrowgauge.compute.nn", "scaling_state"),
    "watch": ("narrowgauge.session.watching", "watch"),
}

__all__ = [
    "Block",
    "PerColumn",
    "PerRow",
    "PerTensor",
    "convert",
    "errors",
    "formats",
    "load_scaling_state",
    "measure",
    "open_run",
    "quantize",
    "recipes",
    "revert",
    "rules",
    "scaling_state",
    "watch",
]

if TYPE_CHECKING:
    from narrowgauge import errors, formats
    from narrowgauge.compute import recipes
    from narrowgauge.compute.nn import convert, load_scaling_state, revert, scaling_state
    from narrowgauge.compute.nn.conversion import rules
    from narrowgauge.compute.quant import Block, PerColumn, PerRow, PerTensor, quantize
    from narrowgauge.observe.stats import measure
    from narrowgauge.observe.store import open_run
    from narrowgauge.session.watching import watch
else:

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            from narrowgauge.errors import nearest

            raise AttributeError(f"narrowgauge has no {name!r}; {nearest(name, _LAZY)}")
        module, attribute = _LAZY[name]
        found = import_module(module)
        value = getattr(found, attribute) if attribute else found
        globals()[name] = value  # the next use finds it without this function
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
