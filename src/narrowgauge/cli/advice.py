"""What a machine can run natively in FP8, what is emulated, and what to change: a pure function of facts.

                        tensor cores that can                              source
    tensorwise          compute capability 8.9 (Ada), 9.0 (Hopper) and up  torch._scaled_mm
    rowwise             the same                                           torch._scaled_mm
    blockwise           9.0 only, with CUDA 12.9                           cuBLAS, 1D and 2D block scaling
    mxfp8               10.0 (Blackwell) and up                            cuBLAS, 1D block scaling
    AMD gfx942 (MI300)  FP8 in the FNUZ variant, which is not what these recipes use: emulated

What the hardware can do and what this version uses of it are two answers; both are given.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.cli.facts import BF16_FLAGS, Gpu, Machine

TORCH_NEEDED = (2, 10)
CUDA_FOR_BLOCKS = (12, 9)
# CUDA major version -> smallest driver (NVIDIA, CUDA minor version compatibility).
DRIVERS = {11: 450, 12: 525, 13: 580}
KINDS = {
    "current": "tensorwise",
    "delayed": "tensorwise",
    "static": "tensorwise",
    "rowwise": "rowwise",
    "blockwise": "blockwise",
    "mxfp8": "mxfp8",
    "mxfp8-ocp": "mxfp8",
}


@dataclass(frozen=True)
class Ability:
    """One recipe on this machine: can its hardware, and what runs it here."""

    recipe: str
    hardware: str  # "" if the hardware can, else the reason why not
    backend: str
    reason: str

    @property
    def native(self) -> bool:
        """Whether FP8 products run on FP8 hardware."""
        return self.backend != "reference"


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" -> (2, 13, 0)."""
    parts = []
    for part in version.partition("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def hardware_lacks(kind: str, gpu: Gpu | None, cuda: str) -> str:
    """Why the tensor cores of `gpu` cannot multiply operands of this kind; "" if they can."""
    if gpu is None:
        return "no GPU"
    if gpu.architecture:
        if gpu.architecture.startswith("gfx94"):
            return "FP8 here is FNUZ (E4M3FNUZ, E5M2FNUZ), the recipes are FN"
        return f"not known for {gpu.architecture}"
    dots = ".".join(map(str, gpu.capability))
    if kind == "mxfp8":
        return "" if gpu.capability >= (10, 0) else f"needs 10.0, this is {dots}"
    if gpu.capability < (8, 9):
        return f"needs 8.9, this is {dots}"
    if kind == "blockwise":
        if gpu.capability != (9, 0):
            return f"needs 9.0, this is {dots}"
        if numbers(cuda) < CUDA_FOR_BLOCKS:
            return f"needs CUDA 12.9, torch was built with {cuda}"
    return ""


def abilities(machine: Machine) -> tuple[Ability, ...]:
    """One line per recipe of the catalog, in its order."""
    gpu = machine.gpus[0] if machine.gpus else None
    return tuple(
        Ability(
            choice.recipe,
            hardware_lacks(KINDS.get(choice.recipe, "tensorwise"), gpu, machine.cuda),
            choice.backend,
            choice.reason,
        )
        for choice in machine.choices
    )


def advice(machine: Machine) -> tuple[str, ...]:
    """What to change, most important first; each sentence names the cause and the next step."""
    found = [*_torch(machine), *_no_gpu(machine), *_gpu(machine)]
    if not machine.gpus and machine.cpu_flags and machine.cpu_flags.isdisjoint(BF16_FLAGS):
        found.append(
            "This CPU has neither AMX nor AVX512-BF16, so BF16 matmuls are slower than float32 ones: "
            "do not read anything into step times here."
        )
    return tuple(found) or ("Nothing to change: FP8 runs natively here.",)


def _torch(machine: Machine) -> list[str]:
    if not machine.torch:
        return [f"torch cannot be imported ({machine.torch_error}). Install it again: pip install torch"]
    if numbers(machine.torch) < TORCH_NEEDED:
        return [f"torch {machine.torch} is too old: narrowgauge needs 2.10. pip install -U torch"]
    return []


def _no_gpu(machine: Machine) -> list[str]:
    """Why torch sees no GPU: none there, a build without CUDA, a driver too old, or none visible."""
    if machine.gpus or not machine.torch:
        return []
    if not machine.driver:
        return [
            "No GPU: FP8 is emulated. Every number is exact, so whether FP8 is safe can be judged here; "
            "whether it is worth it cannot. For that, run the same command on a GPU with compute "
            "capability 8.9 or more (L40S, H100, H200, B200)."
        ]
    if not machine.cuda:
        return [
            f"There is an NVIDIA driver ({machine.driver}), but torch {machine.torch} was built without "
            "CUDA. Install a build with CUDA: pip install torch (not its CPU build)."
        ]
    needed = DRIVERS.get(numbers(machine.cuda)[0], 0)
    if numbers(machine.driver)[0] < needed:
        return [
            f"The driver is {machine.driver} and torch's CUDA {machine.cuda} needs {needed} or newer: update "
            "the driver, or install a torch built for an older CUDA."
        ]
    return [
        f"The NVIDIA driver ({machine.driver}) is new enough for CUDA {machine.cuda}, but torch sees no GPU: "
        "check CUDA_VISIBLE_DEVICES, and that this container was given one (nvidia-smi lists it)."
    ]


def _gpu(machine: Machine) -> list[str]:
    """What stands between the first GPU and native FP8, then what disturbs a measurement on it."""
    if not machine.gpus:
        return []
    gpu, found = machine.gpus[0], []
    if gpu.architecture.startswith("gfx94"):
        found.append(
            f"{gpu.name} multiplies the FNUZ variants of FP8 (largest E4M3 value 240, not 448), which no "
            "recipe here uses: FP8 is emulated. Its numbers are those of FN; its speed says nothing."
        )
    elif gpu.architecture:
        found.append(f"{gpu.name}: AMD GPUs other than MI300 are not known here. FP8 is emulated.")
    elif gpu.capability < (8, 9):
        found.append(
            f"{gpu.name} has no FP8 tensor cores (they begin with compute capability 8.9): FP8 is emulated. "
            "Whether FP8 is safe can be judged here; whether it is worth it needs an L40S, H100, H200 "
            "or B200."
        )
    elif gpu.capability == (9, 0) and numbers(machine.cuda) < CUDA_FOR_BLOCKS:
        found.append(
            f"blockwise is emulated: its gemms need a torch built with CUDA 12.9 or newer, this one has {machine.cuda}."
        )
    elif gpu.capability >= (10, 0) and any(a.recipe == "mxfp8" and not a.native for a in abilities(machine)):
        found.append(
            f"{gpu.name} could multiply MXFP8 natively; this version of narrowgauge emulates it. "
            "Judge its numbers here, not its speed."
        )
    if gpu.total_bytes and gpu.free_bytes < 0.5 * gpu.total_bytes:
        found.append(
            f"Only {gpu.free_bytes / 2**30:.0f} of {gpu.total_bytes / 2**30:.0f} GiB of GPU memory are free: "
            "another process holds the rest (nvidia-smi names it) and disturbs every step time measured here."
        )
    if len(machine.gpus) > 1:
        found.append(
            f"{len(machine.gpus)} GPUs are here; compare and run use one process and so one GPU. "
            "CUDA_VISIBLE_DEVICES says which."
        )
    return found
