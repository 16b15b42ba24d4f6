"""A small TransformerEngine for a CPU: what its layers, quantizers and autocast do, as far as switches depend on it.

Held against the source of 2.20: who makes quantizers when, which product takes which direction of an operand, that one
scale per tensor is never quantized by columns alone, that a product has two FP8 operands or none, that an autocast
counts its depth and moves delayed scales as the outermost ends, that a forward without gradients has no use for its
input by columns. The real one is run by `benchmarks/gpu_check_te_switches.py`.
"""

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

ROOT = "transformer_engine.pytorch"
MAX = 448.0
DType = Enum("DType", ["kFloat8E4M3"])


@dataclass
class Recipe:
    delayed: bool = False
    backward_override: str | None = None


class State:
    enabled = calibrating = recomputes = False
    recipe, depth, metas = Recipe(), 0, []

    is_fp8_enabled = classmethod(lambda cls: cls.enabled)
    is_fp8_calibration = classmethod(lambda cls: cls.calibrating)
    get_fp8_recipe = classmethod(lambda cls: cls.recipe)
    get_autocast_state = classmethod(lambda cls: (cls.enabled, cls.calibrating, cls.recipe))

    @classmethod
    def set_autocast_state(cls, state):
        cls.enabled, cls.calibrating, cls.recipe = state


class Autocast:
    def __init__(self, enabled=True, calibrating=False, recipe=None):
        self.wanted = enabled, calibrating, recipe or Recipe()

    def __enter__(self):
        self.before = State.get_autocast_state()
        State.set_autocast_state(self.wanted)
        State.depth += 1

    def __exit__(self, *error):
        State.set_autocast_state(self.before)
        State.depth -= 1
        if self.wanted[0] and State.depth == 0 and torch.is_grad_enabled():
            for amax, scale in State.metas:
                scale.copy_(torch.where(amax > 0, MAX / amax, scale))
                amax.zero_()


class Codes:
    """A tensor in FP8; `columns`: whether its transpose is there."""

    def __init__(self, x, scale, columns):
        self.codes = (x.float() * scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn)
        self.scale, self.dtype, self.columns = scale.clone(), x.dtype, columns

    def dequantize(self, *, dtype=None):
        return (self.codes.float() / self.scale).to(dtype or self.dtype)


class Bottom:
    """As `abc.ABC` is at the bottom of the real ones: a class with a second base has another layout than they have."""

    __slots__ = ()


class Quantizer(Bottom):
    def __init__(self):
        self.rowwise_usage = self.columnwise_usage = True
        self.internal = self.optimize_for_gemm = False

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.rowwise_usage = self.rowwise_usage if rowwise is None else rowwise
        self.columnwise_usage = self.columnwise_usage if columnwise is None else columnwise

    def quantize(self, x):
        return self.quantize_impl(x)


class PerTensor(Quantizer):
    dtype, force_pow_2_scales, amax_epsilon = DType.kFloat8E4M3, False, 0.0

    def quantize_impl(self, x):
        if not self.rowwise_usage:
            raise NotImplementedError("by columns alone")
        return Codes(x, self.scale_of(x), self.columnwise_usage)

    def update_quantized(self, src, dst, *, noop_flag=None):
        dst.__dict__.update(self.quantize_impl(src).__dict__)


class Float8CurrentScalingQuantizer(PerTensor):
    def scale_of(self, x):
        return MAX / x.float().abs().max()

    def copy(self):
        return Float8CurrentScalingQuantizer()


class Float8Quantizer(PerTensor):
    def __init__(self, scale, amax):
        super().__init__()
        self.scale, self.amax = scale, amax

    def scale_of(self, x):
        self.amax.copy_(torch.maximum(self.amax, x.float().abs().max()))
        return self.scale

    def copy(self):
        return Float8Quantizer(self.scale, self.amax)


class Held:
    """What an IdentityQuantizer makes."""

    def __init__(self, x):
        self.x = x

    def dequantize(self, *, dtype=None):
        return self.x if dtype is None else self.x.to(dtype)


class IdentityQuantizer(Quantizer):
    def __init__(self, *, dtype=None):
        super().__init__()
        self.dtype = dtype

    def copy(self):
        return IdentityQuantizer(dtype=self.dtype)

    def quantize_impl(self, x):
        return Held(x.detach().to(self.dtype or x.dtype))

    def update_quantized(self, src, dst, *, noop_flag=None):
        dst.x = src.detach().to(self.dtype or src.dtype)


class Two:
    """What a HybridQuantizer makes; it keeps a copy of its quantizer, by which it is updated."""

    def __init__(self, by_rows, by_columns, quantizer):
        self.by_rows, self.by_columns, self.quantizer = by_rows, by_columns, quantizer.copy()


class HybridQuantizer(Quantizer):
    def __init__(self, *, rowwise_quantizer, columnwise_quantizer, columnwise_source="original"):
        super().__init__()
        self.rowwise_quantizer, self.columnwise_quantizer = rowwise_quantizer, columnwise_quantizer
        self.columnwise_source = columnwise_source
        rowwise_quantizer.set_usage(rowwise=True, columnwise=False)
        columnwise_quantizer.set_usage(rowwise=False, columnwise=True)

    def copy(self):
        made = HybridQuantizer(
            rowwise_quantizer=self.rowwise_quantizer.copy(),
            columnwise_quantizer=self.columnwise_quantizer.copy(),
            columnwise_source=self.columnwise_source,
        )
        made.set_usage(rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)
        return made

    def quantize_impl(self, x):
        rows = self.rowwise_quantizer.quantize(x) if self.rowwise_usage else None
        source = rows.dequantize(dtype=x.dtype) if self.columnwise_source != "original" else x
        return Two(rows, self.columnwise_quantizer.quantize(source) if self.columnwise_usage else None, self)

    def update_quantized(self, src, dst, *, noop_flag=None):
        if dst.by_rows is not None:
            self.rowwise_quantizer.update_quantized(src, dst.by_rows)
        source = dst.by_rows.dequantize(dtype=src.dtype) if self.columnwise_source != "original" else src
        if dst.by_columns is not None:
            self.columnwise_quantizer.update_quantized(source, dst.by_columns)


def taken(x, *, columns):
    """An operand as a product takes it: codes or a plain tensor."""
    if isinstance(x, Two):
        x = x.by_columns if columns else x.by_rows
    if isinstance(x, Codes) and columns and not x.columns:
        raise RuntimeError("the transpose is not there")
    return x.dequantize() if isinstance(x, Held) else x


def product(a, b, *, turn):
    """turn(a, b) of both codes, or of neither."""
    if isinstance(a, Codes) != isinstance(b, Codes):
        raise RuntimeError("a product of FP8 and something else")
    if isinstance(a, Codes):
        return (turn(a.codes.float(), b.codes.float()) / a.scale / b.scale).to(a.dtype)
    return turn(a, b)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, x_made, w_made, dy_quantizer):
        ctx.made = x_made, w_made, dy_quantizer
        return product(taken(x_made, columns=False), taken(w_made, columns=False), turn=lambda x, w: x @ w.t())

    @staticmethod
    def backward(ctx, dy):
        x, w, quantizer = ctx.made
        if quantizer is not None:
            quantizer.set_usage(rowwise=True, columnwise=True)
            dy = quantizer.quantize(dy)
        dx = product(taken(dy, columns=False), taken(w, columns=True), turn=lambda dy, w: dy @ w)
        dw = product(taken(dy, columns=True), taken(x, columns=True), turn=lambda dy, x: dy.t() @ x)
        return dx, dw, None, None, None


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fp8 = self.fp8_initialized = False
        self.fp8_meta, self.quantizers = {}, {"scaling_fwd": [], "scaling_bwd": []}
        self._fp8_workspaces, self.activation_dtype = {}, torch.float32

    def init_fp8_metadata(self, num_gemms=1):
        self.fp8 = State.is_fp8_enabled()
        if not self.fp8:
            self.fp8_initialized = False
            return
        recipe, known = State.get_fp8_recipe(), self.fp8_meta.get("recipe")
        if self.fp8_initialized and recipe == known:
            return
        self.fp8_meta["recipe"], self.fp8_initialized = recipe, True
        if known is None or known.delayed != recipe.delayed:  # a state of this kind is kept otherwise
            for key, count in (("scaling_fwd", 3 * num_gemms), ("scaling_bwd", 2 * num_gemms)):
                self.quantizers[key] = [self._quantizer(recipe) for _ in range(count)]

    def _quantizer(self, recipe):
        if not recipe.delayed:
            return Float8CurrentScalingQuantizer()
        State.metas.append((torch.zeros(()), torch.ones(())))
        return Float8Quantizer(State.metas[-1][1], State.metas[-1][0])

    def multiply(self, gemm, x, w, cache=None, first=None):
        if not self.fp8:
            return Multiply.apply(x, w, x, w, None)
        forward, backward = self.quantizers["scaling_fwd"], self.quantizers["scaling_bwd"]
        forward[3 * gemm].set_usage(rowwise=True, columnwise=torch.is_grad_enabled())  # not in a checkpoint's first
        forward[3 * gemm + 1].set_usage(rowwise=True, columnwise=True)
        kept = self._fp8_workspaces.get(cache)
        if kept is None:
            kept = forward[3 * gemm + 1].quantize(w.detach())
        elif first:
            (kept.quantizer if isinstance(kept, Two) else forward[3 * gemm + 1]).update_quantized(w.detach(), kept)
        if first is not None:
            self._fp8_workspaces[cache] = kept
        return Multiply.apply(x, w, forward[3 * gemm].quantize(x.detach()), kept, backward[2 * gemm])


def layer_class(name, file):
    """A class of this name, as if it came from TransformerEngine's file."""
    return type(name, (Base,), {"__module__": f"{ROOT}.module.{file}"})


class Linear(layer_class("Linear", "linear")):
    weight_names = ("weight",)

    def __init__(self, inputs=32, outputs=48, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, dtype=dtype))

    def forward(self, inp, is_first_microbatch=None):
        if not (self.fp8 and State.recomputes):
            self.init_fp8_metadata(1)
        return self.multiply(0, inp, self.weight, "weight", is_first_microbatch)


class LayerNormMLP(layer_class("LayerNormMLP", "layernorm_mlp")):
    zero_centered_gamma, normalization, eps = False, "RMSNorm", 1e-5

    def __init__(self):
        super().__init__()
        self.fc1_weight, self.fc2_weight = nn.Parameter(torch.randn(64, 32)), nn.Parameter(torch.randn(32, 64))
        self.layer_norm_weight = nn.Parameter(torch.ones(32))

    def forward(self, inp):
        self.init_fp8_metadata(2)
        normed = F.rms_norm(inp, (32,), self.layer_norm_weight, self.eps)
        return self.multiply(1, self.multiply(0, normed, self.fc1_weight).relu(), self.fc2_weight)


class GroupedLinear(layer_class("GroupedLinear", "grouped_linear")):
    def __init__(self):
        super().__init__()
        self.num_gemms = 2
        self.weight0, self.weight1 = (nn.Parameter(torch.randn(48, 32)) for _ in range(2))

    def forward(self, inp, m_splits):
        self.init_fp8_metadata(2)
        parts = inp.split(m_splits)
        return torch.cat([self.multiply(i, x, getattr(self, f"weight{i}")) for i, x in enumerate(parts)])


def install(monkeypatch):
    """As if TransformerEngine were there."""
    State.enabled = State.calibrating = State.recomputes = False
    State.recipe, State.depth, State.metas = Recipe(), 0, []
    modules = {
        "transformer_engine": {"__version__": "2.20.2"},
        ROOT: {"autocast": Autocast},
        f"{ROOT}.quantization": {"FP8GlobalStateManager": State},
        f"{ROOT}.distributed": {"in_fp8_activation_recompute_phase": lambda: State.recomputes},
        f"{ROOT}.tensor": {},
        f"{ROOT}.tensor.hybrid_tensor": {"HybridQuantizer": HybridQuantizer},
        f"{ROOT}.tensor.identity_tensor": {"IdentityQuantizer": IdentityQuantizer},
    }
    for name, holds in modules.items():
        module = ModuleType(name)
        vars(module).update(holds)
        monkeypatch.setitem(sys.modules, name, module)
    return SimpleNamespace(autocast=Autocast, recipe=Recipe)
