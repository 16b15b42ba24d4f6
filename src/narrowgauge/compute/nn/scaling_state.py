"""The scaling state of a whole model as one flat dict of tensors, for safetensors and sharded checkpoints.

    "narrowgauge.<module>.history" [3, H]   amaxes of the last H steps, newest first
    "narrowgauge.<module>.scale" [3]        x ≈ codes * scale; 0 = not known yet
    "narrowgauge.<module>.inv_scale" [3]    what x is multiplied with; not always exactly 1 / scale
    "narrowgauge.<module>.amax_now" [3]     amax of the running step; -1 = no data yet
    "narrowgauge.<module>.steps" []         int64, steps that the state has seen

The 3 rows are input, weight and grad_output.
`torch.save(model.state_dict())` needs none of this: there the same tensors travel in the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from narrowgauge.compute.nn.conversion.structure import clean, is_wrapper
from narrowgauge.compute.nn.layer_state import LayerState
from narrowgauge.compute.nn.linear import Fp8Linear
from narrowgauge.compute.nn.scaling.state_io import KEY, restore_to, saved_from
from narrowgauge.errors import ConversionError, nearest


def scaling_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the delayed and static scales of every converted layer; empty if the recipe keeps none."""
    return {
        f"{KEY}.{name}.{field}": value
        for name, state in _stateful(model).items()
        for field, value in saved_from(state).items()
    }


def load_scaling_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore what `scaling_state` gave; also takes a whole `state_dict` that carries it in its metadata.

    Load the weights first: loading weights starts the scales afresh. Other keys than "narrowgauge." are left
    alone, so weights and scaling state may share a file. All or nothing: raises ConversionError naming the
    modules that are missing or unexpected, ShapeError if the history differs, and then changes nothing.
    """
    layers = _stateful(model)
    if not layers:
        raise ConversionError(
            f"{type(model).__name__} has no converted layer that keeps scales between steps; convert it "
            "first, with a delayed or static recipe."
        )
    saved = _by_module(_from_metadata(model, state) or state)
    if not saved:
        raise ConversionError(
            "there is no scaling state in what was given: expected keys 'narrowgauge.<module>.scale' or a "
            "state_dict with its metadata. Save scaling_state(model) next to the weights."
        )
    missing, unexpected = sorted(layers.keys() - saved.keys()), sorted(saved.keys() - layers.keys())
    if missing or unexpected:
        parts = [f"it lacks {_list(missing)}"] if missing else []
        if unexpected:
            parts.append(f"it has {_list(unexpected)}, unknown here ({nearest(unexpected[0], layers)})")
        raise ConversionError(
            f"the scaling state does not fit the converted layers: {'; '.join(parts)}. "
            "Convert with the recipe and rules that it was saved with."
        )
    for name, layer in layers.items():
        if layer.table is not None:
            layer.table.check(layer.name, saved[name])
    for name, layer in layers.items():
        if layer.table is not None:
            restore_to(layer, saved[name])
            layer.table.lost = ""


def _stateful(model: nn.Module) -> dict[str, LayerState]:
    """Qualified name -> state, of the layers that keep scales between steps."""
    wrapped = is_wrapper(model)
    return {
        clean(name, wrapped=wrapped): module._fp8
        for name, module in model.named_modules()
        if isinstance(module, Fp8Linear) and module._fp8.table is not None
    }


def _from_metadata(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The flat form of what a state_dict carries in its metadata."""
    wrapped = is_wrapper(model)
    return {
        f"{KEY}.{clean(name, wrapped=wrapped)}.{field}": value
        for name, metadata in getattr(state, "_metadata", {}).items()
        for field, value in metadata.get(KEY, {}).items()
    }


def _by_module(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    modules: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        if key.startswith(f"{KEY}."):
            name, _, field = key.removeprefix(f"{KEY}.").rpartition(".")
            modules.setdefault(name, {})[field] = value
    return modules


def _list(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")
