"""Compiles every kernel for a GPU, on a machine that has none, and prints what each of them takes there.

Triton's interpreter knows neither its compiler nor the PTX that the kernels hold. Here all their callers run with
tensors on the CPU, and each launch is compiled, assembled by the `ptxas` that Triton brings, and not made.

    python -m tests.compute.kernels.for_gpus [89] [all]   prints a JSON line per kernel; 89: for Ada, not Hopper (90);
                                                          `all`: in every dtype
"""

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from benchmarks.producers import norm, swiglu
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from narrowgauge.compute.kernels import Given
from narrowgauge.compute.kernels.fused import amax, launch, moved, quantize, roll
from narrowgauge.compute.kernels.fused.watched import result
from narrowgauge.compute.kernels.fused.watched.looks import Looks
from narrowgauge.compute.recipes import by_name

M, K = 512, 768
RECIPES = ("current", "delayed", "rowwise", "blockwise")
CPU = torch.device("cpu")
_COMPILED = {}  # by a hash of the binary: the kernel's name, its warps, the binary, and what `fed` says


class Unlaunched:
    """A compiled kernel that is not there to be run."""

    function = packed_metadata = 0

    def run(self, *args):
        pass


def only_compile(capability):
    """A GPU for Triton to compile for; whatever is launched is kept, and does nothing."""
    target = GPUTarget("cuda", capability, 32)
    nothing = {"get_current_device": lambda: 0, "get_current_stream": lambda device=None: 0}
    driver.set_active(SimpleNamespace(**nothing, get_current_target=lambda: target))
    torch._C._cuda_getDevice = lambda: 0
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    run = JITFunction.run

    def compiled(self, *args, grid, warmup, **kwargs):
        found = run(self, *args, grid=grid, warmup=True, **kwargs)
        binary = found.asm["cubin"]
        _COMPILED[hash(binary)] = self.fn.__name__, found.metadata.num_warps, binary, fed(found.asm["ttgir"])
        return Unlaunched()

    JITFunction.run = compiled


def casts(dtype, recipes):
    """What quantizes, watched or not, both layouts or one; and what only counts."""
    looks = Looks(CPU)
    for name in recipes:
        recipe = by_name(name)
        for role in ("input", "weight", "grad_output"):
            rule, turned = recipe.uses(role)
            if role == "weight" and rule == recipe.uses("input")[0]:
                continue
            x = torch.randn(M, K).to(dtype)
            given, counted = None, [None]
            if name == "delayed":
                one = torch.ones(())
                given = Given(one, one, torch.zeros(1), torch.zeros(2, dtype=torch.int32))
                counted = [given, Given(None, one)]
            options = {"shared": recipe.shares(role), "given": given, "amax": None if given else torch.ones(())}
            for wanted in ((rule, turned), (rule, None), (None, turned)):
                quantize.quantize_both(x, *wanted, **options)
            for wanted in ((rule, turned), (rule, None)):
                look = looks.open(f"{name}:{role}", x, rule, 0, turned=wanted[1] is not None)
                if look is not None:
                    quantize.quantize_both(x, *wanted, **options, look=look)
            for scale in counted:
                look = looks.open(f"{name}:{role}", x, rule, 0, turned=False)
                if look is not None:
                    quantize.count(x, rule, look, scale)
    looks.pack()
    amax.amax(torch.randn(M, K).to(dtype))
    result.look_at_result(torch.randn(M, K).to(dtype), torch.zeros(100, dtype=torch.float64))


def producers():
    """What quantizes as it makes, and only makes."""
    rule, one = by_name("delayed").uses("input")[0], torch.ones(())
    given = Given(one, one, torch.zeros(1), torch.zeros(2, dtype=torch.int32))
    x, wide, dy = (torch.randn(M, n).bfloat16() for n in (K, 2 * K, K))
    weight = torch.ones(K, dtype=torch.bfloat16)
    norm.rms_norm_given(x, weight, 1e-5, rule, given)
    norm.rms_norm_amax(x, weight, 1e-5)
    swiglu.swiglu_given(wide, rule, given)
    swiglu.swiglu_amax(wide)
    swiglu.swiglu_grad_given(wide, dy, rule, given)
    swiglu.swiglu_grad_amax(wide, dy)


def histories():
    """The update of all delayed scales."""
    S, H = 24, 16
    numbers = {name: torch.ones(S) for name in ("goal", "floor")}
    whole = {name: torch.ones(S, dtype=torch.int32) for name in ("window", "every", "pow2")}
    roll.roll(torch.ones(S, H), torch.ones(S), torch.ones(S), torch.ones(S), SimpleNamespace(**numbers, **whole), 3)


def weights(dtype):
    """What is copied of weights, and how far they move."""
    x = torch.randn(M, K).to(dtype)
    copies = moved.Copies([x.numel()], [dtype], CPU, 7)
    _, copied = copies.copy([x.data_ptr()], 0)
    copies.moved([x.data_ptr()], 0, copied)


def fed(text):
    """How what the tensor cores are fed lies: per layout, whether nothing is there twice, and a thread's numbers of it.

    One layout, for what they gather must stay where it is until it is read.
    """
    layouts = dict(re.findall(r"^(#\w+) = #ttg.blocked<(.*)>$", text, re.M))
    found = {}
    for line in text.splitlines():
        if "elementwise_inline_asm" in line and ("mma.sync" in line or "%laneid" in line):
            for shape, name in re.findall(r"tensor<([\dx]+)x[if]\d+, (#\w+)>", line):
                sizes = [int(size) for size in shape.split("x")]
                parts = [
                    json.loads(part)
                    for part in re.findall(r"(?:sizePerThread|threadsPerWarp|warpsPerCTA) = (\[.*?\])", layouts[name])
                ]
                tile = [math.prod(of) for of in zip(*parts, strict=True)]
                threads = math.prod(parts[1]) * math.prod(parts[2])
                once = all(size % part == 0 for size, part in zip(sizes, tile, strict=True))
                found[shape, layouts[name]] = once, math.prod(sizes) // threads
    return list(found.values())


def resources(binary):
    """Registers, bytes of stack and of shared memory of a program."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", told)}
    return {"registers": found["REG"], "stack": found["STACK"] + found["LOCAL"], "shared": found["SHARED"]}


def main():
    assert not launch.INTERPRETED
    words = sys.argv[1:]
    only_compile(capability := 89 if "89" in words else 90)
    casts(torch.bfloat16, RECIPES)
    weights(torch.bfloat16)
    if "all" in words:
        casts(torch.float32, RECIPES)
        casts(torch.float16, RECIPES)
        weights(torch.float32)
        weights(torch.float16)
    if capability == 90:  # they are for measurements
        producers()
    histories()
    for name, warps, binary, lies in _COMPILED.values():
        print(json.dumps({"kernel": name, "warps": warps, "fed": lies, **resources(binary)}))


if __name__ == "__main__":
    main()
