"""The profile's categories, its arithmetic, and a real profile of a toy on the CPU."""

import json

import pytest
import torch

from svdq.profiling import Event, category, gap_share, profile, summary
from svdq.report import profile_text

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("aten::mm", "GEMM"),
        ("aten::addmm", "GEMM"),
        ("aten::add_", "elementwise"),
        ("aten::nan_to_num", "elementwise"),
        ("aten::__rshift__", "elementwise"),
        ("aten::_to_copy", "memory"),
        ("aten::t", "memory"),
        ("aten::mean", "reduction"),
        ("aten::_softmax", "reduction"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("svdq::w4a4_gemm_lora", "GEMM"),
        ("svdq::quantize_lora_down", "elementwise"),
        ("svdq::inv_rms", "reduction"),
        ("w4a4_small_m", "GEMM"),
        ("qknorm_rope", "elementwise"),
        ("Memcpy DtoD (Device -> Device)", "memory"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor>", "elementwise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp>", "reduction"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "GEMM"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "GEMM"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::AutoVectorizingCopy>>", "GEMM"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<cute::Copy_Atom>>", "attention"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "memory"),
        ("what_is_this", "other"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
    ],
)
def test_an_events_category_follows_from_its_name(name, wanted):
    assert category(name) == wanted


def test_gaps_are_what_no_event_covers():
    spans = [(0, 10), (5, 12), (20, 30), (22, 25)]
    events = [Event("k", end - start, start, end) for start, end in spans]
    assert gap_share(events) == pytest.approx(8 / 30)
    assert gap_share([Event("k", 5, 3, 8)]) == 0.0
    assert gap_share([Event("k", 0, 3, 3)]) == 0.0


def test_a_summary_is_per_step_and_its_shares_add_up():
    events = [Event("aten::mm", 30, 0, 30), Event("aten::mul", 10, 40, 50), Event("aten::mm", 20, 50, 70)]
    found = summary(events, 2, on_gpu=True)
    assert (found["us"], found["calls"], found["gap_share"]) == (30.0, 1.5, pytest.approx(10 / 70))
    kinds = [(row["name"], row["us"], row["calls"]) for row in found["categories"]]
    assert kinds == [("GEMM", 25.0, 1.0), ("elementwise", 5.0, 0.5)]
    assert sum(row["share"] for row in found["categories"]) == pytest.approx(1.0)
    assert found["top"][0] == {"name": "aten::mm", "us": 25.0, "calls": 1.0, "share": 50 / 60, "category": "GEMM"}


def test_nothing_recorded_is_a_table_of_nothing():
    found = summary([], 1, on_gpu=True)
    assert found["us"] == 0 and found["gap_share"] is None
    assert "0.000 ms in 0 kernels" in profile_text(found | {"tokens": 5, "device": "cuda"})


def test_a_profile_on_the_cpu_finds_the_products_and_leaves_a_trace(tmp_path):
    a = torch.randn(400, 400)
    found = profile(lambda: (a @ a).relu().sum(), CPU, 3, tmp_path / "trace.json")
    kinds = {row["name"]: row for row in found["categories"]}
    assert kinds["GEMM"]["us"] > 0 and {"elementwise", "reduction"} <= set(kinds)
    assert next(row for row in found["top"] if row["name"] == "aten::mm")["calls"] == 1.0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
