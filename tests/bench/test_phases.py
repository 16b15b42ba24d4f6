"""Kernels by name: those of torch, of its compiler, of cuDNN and our own, as an H200 showed them."""

import pytest

from narrowgauge.bench import phases

SEEN = {
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "gemm",
    "nvjet_sm90_qrtst_128x128_128x6_2x1_v_bz_coopA_algo2_TNT": "gemm",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel": "gemm",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_1x4x1_cga1x1x1": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)": "optimizer",
    "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<unsigned long": "data",
    "triton_poi_fused__unsafe_view_cat_mul_silu_silu_backward_split_view_3": "rest",
    "triton_poi_fused__fused_rms_norm__scaled_mm__to_copy_clamp_clone_mul_reciprocal_t_view_12": "quantize",
    "triton_red_fused_abs_max_view_10": "quantize",
    "triton_red_fused__fused_rms_norm__unsafe_view_add_7": "rest",
    "triton_poi_fused_mm_silu_1": "rest",
    "Memset (Device)": "rest",
}


@pytest.mark.parametrize("name", SEEN)
def test_a_kernel_falls_into_its_phase(name):
    assert phases.phase_of(name) == SEEN[name]


def test_our_own_kernels_are_known_by_where_they_are_defined():
    assert "_cast" in phases.own_kernels()
    assert {phases.phase_of(name) for name in phases.own_kernels()} == {"quantize"}


@pytest.mark.parametrize("name", ["Optimizer.step#AdamW.step", "narrowgauge.data", "ProfilerStep*"])
def test_named_stretches_are_no_kernels(name):
    assert phases.is_span(name)


@pytest.mark.parametrize(
    "name",
    [
        *SEEN,
        "void at::native::(anonymous namespace)::distribution_elementwise_grid_stride_kernel<unsigned long, 2, "
        "at::native::templates::cuda::random_from_to_kernel<at::CUDAGeneratorImpl*>(...)::{lambda(unsigned long)#2}>",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(...)::{lambda()#3}>(int)",
    ],
)
def test_kernels_are_no_stretches(name):
    assert not phases.is_span(name)


def test_time_is_split_per_step_and_gaps_are_idle():
    kernels = [("nvjet_x", 0.0, 4.0), ("other", 3.0, 5.0), ("nvjet_x", 9.0, 11.0)]
    found = phases.split(kernels, steps=2)
    assert found["phases"] == {
        "data": 0.0, "quantize": 0.0, "gemm": 3.0, "attention": 0.0, "rest": 1.0, "optimizer": 0.0, "idle": 2.0,
    }  # fmt: skip
    assert found["kernels"] == [["nvjet_x", 3.0, 1.0, "gemm"], ["other", 1.0, 0.5, "rest"]]


def test_no_kernel_is_no_error():
    assert set(phases.split([], steps=1)["phases"].values()) == {0.0}
