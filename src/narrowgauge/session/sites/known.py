"""The kinds of layers that are known, first come first served. A new one: a file beside this one, and a line here."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.conv import _ConvNd

from narrowgauge.session.sites import convolution, linear
from narrowgauge.session.sites.conv1d import HuggingFaceConv1D
from narrowgauge.session.sites.megatron import Megatron
from narrowgauge.session.sites.part import Kind
from narrowgauge.session.sites.torchao import TorchAO
from narrowgauge.session.sites.transformer_engine import TransformerEngine

KINDS: tuple[Kind, ...] = (
    *(TorchAO(), TransformerEngine(), Megatron(), HuggingFaceConv1D()),
    *(linear.Plain(), linear.Derived(), convolution.Plain(), convolution.Derived()),
)


def kind_of(module: nn.Module) -> Kind | None:
    """The kind that the module is of; None if nobody knows it."""
    return next((kind for kind in KINDS if kind.knows(module)), None)


def weight_shape(module: nn.Module | None) -> tuple[int, ...] | None:
    """The shape of the weight that a layer computes for itself; None if nobody knows it."""
    if isinstance(module, _ConvNd):
        return convolution.weight_shape(module)
    return linear.weight_shape(module) if isinstance(module, nn.Linear) else None
