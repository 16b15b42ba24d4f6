"""doctor: machines and what it says of each, causes of "no GPU", agreement with the backends' own answer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from narrowgauge.cli import facts
from narrowgauge.cli.advice import abilities, advice, numbers
from narrowgauge.cli.doctor import doctor, doctor_command
from narrowgauge.cli.facts import Choice, Gpu, Machine, probe
from narrowgauge.compute.kernels import choose
from narrowgauge.compute.recipes import CATALOG
from narrowgauge.session.machine import cpu

GIB = 2**30
EMULATED = tuple(Choice(name, "reference", "emulated: no FP8 tensor cores on 'cpu'") for name in CATALOG)
CPU = Machine(
    torch="2.13.0+cpu",
    choices=EMULATED,
    cpu="A Processor",
    threads=2,
    cpu_flags=frozenset({"avx2", "amx_bf16"}),
    memory_total=16 * GIB,
    memory_free=8 * GIB,
)


def gpu(name: str, capability: tuple[int, int], architecture: str = "") -> Gpu:
    return Gpu(name, capability, 80 * GIB, 79 * GIB, architecture)


def machine(monkeypatch: pytest.MonkeyPatch, card: Gpu, cuda: str = "13.0", hip: str | None = None) -> Machine:
    """A machine with this GPU, its backends chosen by the code that training uses."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: card.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: card.name)
    monkeypatch.setattr(torch.version, "cuda", None if hip else cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    picked = [(name, *choose(recipe, torch.device("cuda"))) for name, recipe in CATALOG.items()]
    choices = tuple(Choice(name, backend.name, reason) for name, backend, reason in picked)
    return replace(
        CPU,
        torch="2.11.0",
        cuda="" if hip else cuda,
        hip=hip or "",
        driver="" if hip else "580.95.05",
        gpus=(card,),
        choices=choices,
    )


def native(found: Machine) -> set[str]:
    return {ability.recipe for ability in abilities(found) if ability.native}


def can(found: Machine) -> set[str]:
    return {ability.recipe for ability in abilities(found) if not ability.hardware}


TENSORWISE = {"current", "delayed", "static"}


def test_cpu_is_exact_but_says_nothing_about_speed():
    assert native(CPU) == can(CPU) == set()
    assert advice(CPU) == (
        "No GPU: FP8 is emulated. Every number is exact, so whether FP8 is safe can be judged here; whether it "
        "is worth it cannot. For that, run the same command on a GPU with compute capability 8.9 or more "
        "(L40S, H100, H200, B200).",
    )


@pytest.mark.parametrize(("number", "said"), [(1, "1 thread"), (2, "2 threads")])
def test_threads_are_counted_in_words(number, said):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        assert cpu().endswith(f", {said}")
    finally:
        torch.set_num_threads(before)
    assert f"A Processor, {said}, BF16" in doctor(replace(CPU, threads=number))


def test_cpu_without_bf16_instructions_is_told_about_its_step_times():
    assert "neither AMX nor AVX512-BF16" in advice(replace(CPU, cpu_flags=frozenset({"avx512f"})))[1]


def test_a100_has_no_fp8_hardware(monkeypatch: pytest.MonkeyPatch):
    found = machine(monkeypatch, gpu("NVIDIA A100-SXM4-80GB", (8, 0)))
    assert native(found) == can(found) == set()
    (only,) = advice(found)
    assert only.startswith("NVIDIA A100-SXM4-80GB has no FP8 tensor cores (they begin with compute capability 8.9)")
    assert "needs 8.9, this is 8.0" in doctor(found)


def test_h100_runs_all_but_mx(monkeypatch: pytest.MonkeyPatch):
    found = machine(monkeypatch, gpu("NVIDIA H100 80GB HBM3", (9, 0)))
    assert native(found) == can(found) == TENSORWISE | {"rowwise", "blockwise"}
    assert advice(found) == ("Nothing to change: FP8 runs natively here.",)


def test_h100_with_an_older_cuda_emulates_blocks(monkeypatch: pytest.MonkeyPatch):
    found = machine(monkeypatch, gpu("NVIDIA H100 80GB HBM3", (9, 0)), cuda="12.8")
    assert native(found) == can(found) == TENSORWISE | {"rowwise"}
    assert advice(found) == (
        "blockwise is emulated: its gemms need a torch built with CUDA 12.9 or newer, this one has 12.8.",
    )


def test_l40s_runs_tensorwise_and_rowwise(monkeypatch: pytest.MonkeyPatch):
    found = machine(monkeypatch, gpu("NVIDIA L40S", (8, 9)))
    assert native(found) == can(found) == TENSORWISE | {"rowwise"}


def test_b200_could_run_mx(monkeypatch: pytest.MonkeyPatch):
    found = machine(monkeypatch, gpu("NVIDIA B200", (10, 0)))
    assert can(found) == TENSORWISE | {"rowwise", "mxfp8", "mxfp8-ocp"}
    assert native(found) <= can(found)
    if "mxfp8" not in native(found):
        assert "NVIDIA B200 could multiply MXFP8 natively; this version of narrowgauge emulates it." in advice(found)[0]


def test_mi300_multiplies_another_variant(monkeypatch: pytest.MonkeyPatch):
    """Its capability reads (9, 4), which must not pass for a Hopper."""
    found = machine(monkeypatch, gpu("AMD Instinct MI300X", (9, 4), "gfx942"), hip="6.4")
    assert native(found) == can(found) == set()
    assert "FNUZ variants of FP8 (largest E4M3 value 240, not 448)" in advice(found)[0]
    assert "built for ROCm 6.4" in doctor(found)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("cuda", ["12.6", "12.9", "13.0"])
def test_nothing_runs_natively_that_the_hardware_cannot(
    capability: tuple[int, int], cuda: str, monkeypatch: pytest.MonkeyPatch
):
    found = machine(monkeypatch, gpu("a GPU", capability), cuda=cuda)
    assert native(found) <= can(found)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"driver": "580.95"},
            "There is an NVIDIA driver (580.95), but torch 2.13.0+cpu was built without CUDA.",
        ),
        (
            {"driver": "550.54.15", "cuda": "13.0"},
            "The driver is 550.54.15 and torch's CUDA 13.0 needs 580 or newer",
        ),
        ({"driver": "470.1", "cuda": "12.9"}, "The driver is 470.1 and torch's CUDA 12.9 needs 525 or newer"),
        ({"driver": "580.95", "cuda": "13.0"}, "check CUDA_VISIBLE_DEVICES"),
        ({"torch": "2.9.1"}, "torch 2.9.1 is too old: narrowgauge needs 2.10."),
        (
            {"torch": "", "torch_error": "libcudnn.so.9: not found"},
            "cannot be imported (libcudnn.so.9: not found)",
        ),
    ],
)
def test_what_to_change_names_the_cause(change: dict[str, str], says: str):
    assert says in advice(replace(CPU, **change))[0]


def test_a_busy_gpu_and_a_second_one_are_mentioned(monkeypatch: pytest.MonkeyPatch):
    found = machine(monkeypatch, gpu("NVIDIA H200", (9, 0)))
    busy = replace(found.gpus[0], free_bytes=10 * GIB)
    assert advice(replace(found, gpus=(busy, busy))) == (
        "Only 10 of 80 GiB of GPU memory are free: another process holds the rest (nvidia-smi names it) and "
        "disturbs every step time measured here.",
        "2 GPUs are here; compare and run use one process and so one GPU. CUDA_VISIBLE_DEVICES says which.",
    )


def test_page_names_everything(monkeypatch: pytest.MonkeyPatch):
    text = doctor(machine(monkeypatch, gpu("NVIDIA H200", (9, 0))))
    for word in (
        "NVIDIA H200, compute capability 9.0, 79.0 of 80.0 GiB free",
        "580.95.05",
        "built for CUDA 13.0",
    ):
        assert word in text
    for recipe in CATALOG:
        assert f"\n{recipe} " in text
    assert "current, delayed, static, rowwise, blockwise by fused: native FP8 tensor cores on NVIDIA H200" in text


def test_versions_are_read_as_numbers():
    assert numbers("2.13.0+cpu") == (2, 13, 0)
    assert numbers("2.10.0a0") > numbers("2.9.1")
    assert numbers("") == ()


def test_this_machine_is_probed_and_the_command_exits_with_zero():
    found = probe()
    assert found.torch == torch.__version__
    assert found.memory_total >= found.memory_free >= 0
    assert [choice.recipe for choice in found.choices] == list(CATALOG)
    result = CliRunner().invoke(doctor_command)
    assert result.exit_code == 0
    assert "What to do" in result.output


@pytest.mark.parametrize("raised", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_a_missing_or_hanging_nvidia_smi_is_no_error(raised: Exception, monkeypatch: pytest.MonkeyPatch):
    def run(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr(facts.subprocess, "run", run)
    monkeypatch.setattr(facts.Path, "read_text", lambda self: "NVRM version: Kernel Module  550.54.15  Tue Mar 5\n")
    assert facts._driver() == "550.54.15"


def test_the_package_runs_as_the_command_does():
    found, direct = (
        subprocess.run([*command, "doctor", "--help"], capture_output=True, text=True, check=True).stdout
        for command in ([sys.executable, "-m", "narrowgauge"], [Path(sys.executable).parent / "narrowgauge"])
    )
    assert found == direct != ""
