"""Hopper's operators against their reference and float64: W4A4 codes as e4m3 numbers, and W4A8.

The forward of a W4A4 linear of more than 64 tokens takes them too on Hopper: test_linear.py.
"""

from dataclasses import replace

import pytest
import torch
from oracle import (
    DEVICE,
    HALVES,
    KINDS,
    ON_GPU,
    READY,
    D,
    check,
    inputs,
    layer,
    module,
    normal,
    normalized,
    with_specials,
)

from svdq.kernels import hopper, layout, reference
from svdq.kernels.layout import unpack_matrix
from svdq.linear import W4A4Linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not READY, reason="no CUDA device"),
    pytest.mark.skipif(ON_GPU and READY and not hopper.runs_on(DEVICE), reason="not a Hopper GPU"),
]
values_or_codes = pytest.mark.parametrize("values", [False, True], ids=["codes", "values"])
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])
SIZES = [  # m, n, k, rank, transform
    (17, 128, 64, 16, ""),
    (40, 100, 192, 0, "rotation"),
    (129, 300, 576, 48, "smooth rotation clip"),
    (700, 256, 1024, 16, "smooth"),
    (1100, 640, 1088, 128, "smooth rotation clip"),
]


def quantize(linear, x, values, factor=None, norm=None):
    activation = (linear.down, linear.inv_smooth, linear.rotation, linear.clip, factor, norm)
    return torch.ops.svdq.quantize_lora_down_e4m3(x, *activation, values)


def sum_of_t(t):
    """(rows, rank)"""
    return unpack_matrix("token_t", t.sum(0), (t.shape[2], t.shape[1]))


def check_quantized(found, wanted, m, padded_k):
    """Codes and scales equal, t near; rows past the last panel are not written."""
    panels = layout.round_up(m, layout.PANEL)
    shape = (found[0].shape[0], padded_k)
    codes, wanted_codes = (unpack_matrix("fp8", part[0].cpu(), shape)[:panels].int() for part in (found, wanted))
    check(codes, wanted_codes, what="code (row, channel)")
    scales, wanted_scales = found[1].cpu(), wanted[1].cpu()
    if scales.dim() == 2:
        scales, wanted_scales = (
            unpack_matrix("token_scales", part, tuple(part.shape)) for part in (scales, wanted_scales)
        )
    check(scales[:panels], wanted_scales[:panels], what="scale")
    t, wanted_t = (sum_of_t(part[2]).cpu()[:panels].to(D) for part in (found, wanted))
    finite = wanted_t.isfinite().all(1) & t.isfinite().all(1)
    allowed = 1e-5 * wanted_t[finite].abs().amax() if finite.any() and wanted_t.shape[1] else 0.0
    check(t[finite], wanted_t[finite], allowed, "t")


@values_or_codes
@halves
@pytest.mark.parametrize("kind", [*KINDS, "specials"])
@pytest.mark.parametrize(("m", "n", "k", "rank", "parts"), SIZES)
def test_codes_and_scales_are_the_references_bit_for_bit(m, n, k, rank, parts, kind, dtype, values):
    linear = module(layer(n, k, rank, parts=parts))
    x = with_specials(m, k, dtype) if kind == "specials" else inputs(kind, m, k, dtype)
    wanted = quantize(module(layer(n, k, rank, parts=parts)).to("cpu"), x, values)
    check_quantized(quantize(linear, x.to(DEVICE), values), wanted, m, linear.down.shape[0])


@values_or_codes
@halves
def test_a_norm_on_the_way_in(dtype, values):
    m, k = 130, 576
    linear = module(layer(192, k, 16, parts="smooth rotation clip"))
    x = inputs("random", m, k, dtype).to(DEVICE)
    factor = torch.ops.svdq.inv_rms(x, 1e-6)
    norm = (1 + 0.2 * normal(k, seed=6)).to(DEVICE, dtype)
    wanted = quantize(linear, normalized(x, factor, norm), values)
    check_quantized(quantize(linear, x, values, factor, norm), wanted, m, linear.down.shape[0])


@values_or_codes
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "parts"),
    [*SIZES, (1500, 257, 3072, 16, ""), (64, 4096, 4096, 16, ""), (2500, 1600, 256, 16, "")],
)
def test_the_product_is_near_float64(m, n, k, rank, parts, values):
    """Codes are exact, and rounded as float32 sums; products of 8-bit values are cut off, a group at a time."""
    linear = module(layer(n, k, rank, parts=parts))
    x = inputs("random", m, k, torch.bfloat16).to(DEVICE)
    codes, scales, t = quantize(linear, x, values)
    weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias)
    y = torch.ops.svdq.w4_gemm_lora_e4m3(codes, scales, t, *weight, m, n, torch.float32)
    rows, padded_k = codes.shape
    numbers = unpack_matrix("fp8", codes, (rows, padded_k))[:m].view(torch.float8_e4m3fn).to(D)
    if values:
        x_hat = numbers * scales[:m, None].to(D)
    else:
        groups = unpack_matrix("token_scales", scales, tuple(scales.shape))[:m].to(D)
        x_hat = numbers * groups.repeat_interleave(64, 1)
    weight_scales = layout.unpack_matrix("wscales", linear.wscales, (linear.wscales.shape[1], padded_k // 64))
    weight_hat = layout.unpack_codes(linear.qweight).to(D) * weight_scales.to(D).repeat_interleave(64, 1)
    wanted, total = x_hat @ weight_hat[:n].t(), x_hat.abs() @ weight_hat[:n].abs().t()
    up = layout.unpack_matrix("lora_up", linear.up, tuple(linear.up.shape))[:n].to(D)
    low_rank = sum_of_t(t)[:m].to(D)
    bias = layout.unpack_matrix("channel", linear.packed_bias, (linear.packed_bias.shape[0],))[:n].to(D)
    wanted, total = wanted + low_rank @ up.t() + bias, total + low_rank.abs() @ up.abs().t() + bias.abs()
    unit = 2.0**-12 if values else (8 + 3 * (k / 64) ** 0.5 + rank) * 2.0**-24
    check(y, wanted, unit * total, "y")
    rounded = torch.ops.svdq.w4_gemm_lora_e4m3(codes, scales, t, *weight, m, n, torch.bfloat16)
    assert torch.equal(rounded, y.to(torch.bfloat16))
    again = torch.ops.svdq.w4_gemm_lora_e4m3(codes, scales, t, *weight, m, n, torch.float32)
    assert torch.equal(again, y)


@pytest.mark.parametrize("m", [1, 16, 40, 700])
def test_w4a8_is_nearer_to_the_unquantized_activation_than_w4a4(m):
    made = layer(256, 1024, 16, parts="rotation")
    x = inputs("random", m, 1024, torch.float16)
    exact = (
        x.to(D) @ (made.transform.weight(torch.eye(1024).to(D)) @ made.weight_hat(D).t())
        + x.to(D) @ made.proj_down.to(D) @ made.proj_up.to(D).t()
        + made.bias.to(D)
    )
    errors = {}
    for activations in ("int4", "fp8"):
        y = W4A4Linear(made.to(DEVICE), activations=activations)(x.to(DEVICE)).cpu().to(D)
        errors[activations] = ((y - exact).norm() / exact.norm()).item()
    assert errors["fp8"] < errors["int4"] / 2


@pytest.mark.parametrize("m", [1, 40, 700])
@halves
def test_the_forward_of_w4a8_is_the_references(m, dtype):
    made = layer(300, 576, 48, parts="smooth rotation clip")
    x = inputs("random", m, 576, dtype).to(DEVICE)
    y, wanted = (W4A4Linear(made.to(DEVICE), kernels, "fp8")(x) for kernels in ("auto", "reference"))
    check(y, wanted, 4 * torch.finfo(dtype).eps * wanted.abs().amax().double(), "y")


def test_rows_with_nan_and_infinity_leave_the_others_alone():
    made, m, k = layer(300, 192, 48, parts="smooth rotation"), 40, 192
    x = with_specials(m, k, torch.bfloat16)
    hurt = ~x.isfinite().all(1)
    run = W4A4Linear(made.to(DEVICE), activations="fp8")
    y, wanted = (run(part.to(DEVICE)) for part in (x, x.masked_fill(hurt[:, None], 0)))
    assert y[hurt].isnan().all()
    check(y[~hurt], wanted[~hurt], what="y of the finite rows")


def test_wrong_operands_are_named():
    linear = module(layer(128, 128, 16))
    x = normal(20, 128).half().to(DEVICE)
    codes, scales, t = quantize(linear, x, True)
    weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias)
    with pytest.raises(ValueError, match=r"w4_gemm_lora_e4m3: codes: .*wanted torch.uint8 \[768, 128\]"):
        torch.ops.svdq.w4_gemm_lora_e4m3(codes, scales, t, *weight, 385, 128, torch.float16)
    with pytest.raises(ValueError, match="w4_gemm_lora_e4m3: scales"):
        torch.ops.svdq.w4_gemm_lora_e4m3(codes, scales[:-1], t, *weight, 20, 128, torch.float16)


def test_the_reference_of_codes_is_the_one_of_svdq_kernels_ops():
    """The same codes, scales and product in another order of storage."""
    made = layer(128, 192, 16, parts="smooth rotation clip")
    linear = W4A4Linear(replace(made), kernels="reference").to("cpu")
    x = normal(20, 192).half()
    activation = (linear.down, linear.inv_smooth, linear.rotation, linear.clip, None, None)
    weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias, 20, 128, torch.float32)
    one = reference.w4a4_gemm_lora(*reference.quantize_lora_down(x, *activation, shares=1), *weight)
    bytes_ = reference.quantize_lora_down_e4m3(x, *activation, False, 1, 32)
    assert torch.equal(one, reference.w4_gemm_lora_e4m3(*bytes_, *weight))
