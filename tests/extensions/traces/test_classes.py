"""Classes of kernels: names drawn by time from public traces of GPUs, judged by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from perseus_planner.extensions.traces.classes import (
    ATTENTION,
    COMMUNICATION,
    MEMORY,
    OTHER,
    PRODUCT,
    kernel_class,
)

JUDGED = Path(__file__).resolve().parents[3] / "benchmarks" / "kernel_names.csv"


def test_names_drawn_by_time_have_the_class_judged_by_hand():
    with JUDGED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 100
    right = sum(kernel_class(row["name"], row["category"]) == row["judged"] for row in rows)
    assert right >= 97


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", COMMUNICATION),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKv", ATTENTION),
        ("attn_fwd", ATTENTION),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT", PRODUCT),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x16x32", PRODUCT),
        ("cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1", PRODUCT),
        # Words of products in the names of copies and sums.
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int, int)", MEMORY),
        ("void splitKreduce_kernel<float, float>(cublasSplitKParams<float>)", MEMORY),
        ("triton_red_fused__to_copy_add_addmm_div_mean_31", MEMORY),
        ("void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16>()", MEMORY),
        # The case of a letter, which the first patterns missed.
        ("void at::native::cunn_SoftMaxForward<8, c10::BFloat16, float>()", MEMORY),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", OTHER),
    ],
)
def test_a_name_is_of_the_first_class_whose_pattern_it_has(name: str, wanted: str):
    assert kernel_class(name) == wanted


def test_copies_and_fills_are_of_the_memory():
    assert kernel_class("anything", "gpu_memcpy") == MEMORY
    assert kernel_class("anything", "Memset") == MEMORY
