"""The shortcuts in triton's interpreter are in place, and its numbers the same: without them tests only take longer."""

import dataclasses
import os

import pytest
import torch
from tests import quick_interpreter

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here, not interpreted"
)
A, B = 8, 16


@triton.jit
def _halving(a, n, a_, n_):
    return 0.5 * a + a_, n * 31 + n_  # whoever takes them in another order has another number


@triton.jit
def _larger(a, a_):
    return tl.where(a_ > a, a_, a) + 1


@triton.jit
def _reduced(
    x_ptr, n_ptr, out_ptr, counted_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    i, j = tl.arange(0, A), tl.arange(0, B)
    at = i[:, None] * B + j[None, :]
    x, n = tl.load(x_ptr + at), tl.load(n_ptr + at)
    found, counted = tl.reduce((x + i[:, None], n + j), AXIS, _halving, keep_dims=KEEP)
    more = tl.reduce(x, AXIS, _larger, keep_dims=KEEP)
    if KEEP:
        tl.store(out_ptr + at, found + more + x)
        tl.store(counted_ptr + at, counted * n)
    else:
        k = j if AXIS == 0 else i
        tl.store(out_ptr + k, found + more)
        tl.store(counted_ptr + k, counted)
        tl.store(out_ptr + A * B, tl.reduce(found, 0, _larger))
        last, of_all = tl.reduce((more, counted), 0, _halving)
        tl.store(out_ptr + A * B + 1, last)
        tl.store(counted_ptr + A * B, of_all)


def reduced(axis, keep, dtype):
    x = torch.randn(A, B, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, 5], x[4, 6], x[5, 5] = torch.inf, torch.nan, -torch.inf
    n = torch.arange(A * B, dtype=torch.int32) * 0x1234567  # sums and products overflow
    out, counted = torch.zeros(A * B + 2), torch.zeros(A * B + 1, dtype=torch.int32)
    _reduced[(1,)](x, n, out, counted, axis, keep, A, B)
    assert out.isnan().any()
    assert out.isfinite().sum() > A
    return out.view(torch.int32), counted


@triton.jit
def _unlike(out_ptr, ONE: tl.constexpr, OTHER: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, ONE), tl.arange(0, ONE) + tl.arange(0, OTHER))


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_numbers_are_those_of_its_own_ways(axis, keep, dtype, monkeypatch):
    found = reduced(axis, keep, dtype)
    for owner, name in ((interpreter.ReduceOps, "generic_reduce"), (TritonSemantic, "broadcast_impl_value")):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
    for ours, theirs in zip(found, reduced(axis, keep, dtype), strict=True):
        assert torch.equal(ours, theirs)


@interpreted
def test_shapes_that_do_not_go_together_are_refused():
    with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
        _unlike[(1,)](torch.zeros(8, dtype=torch.int32), 4, 8)


@interpreted
def test_the_interpreter_of_this_triton_is_one_that_we_know():
    assert interpreter._patch_lang.__module__ == quick_interpreter.__name__


def test_another_interpreter_is_left_as_it_is(monkeypatch):
    monkeypatch.delattr(interpreter, "_patch_builtin")
    before = dict(vars(interpreter))
    assert not quick_interpreter.install()
    assert vars(interpreter) == before
