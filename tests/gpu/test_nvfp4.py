"""NVFP4's operators against their reference and float64, on tensor cores without 4-bit floating point."""

import pytest
import torch
from oracle import DEVICE, HALVES, KINDS, ON_GPU, READY, D, check, inputs, normal, nvfp4_tensors, with_specials

from svdq import nvfp4
from svdq.grid import unpack_nibbles
from svdq.kernels import layout
from svdq.kernels import nvfp4 as ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])
SIZES = [  # m, n, k, rank, transform
    (1, 96, 192, 16, "smooth rotation"),
    (9, 300, 64, 0, ""),
    (17, 130, 576, 48, "rotation"),
    (64, 97, 1088, 80, "smooth"),
    (65, 96, 192, 16, "smooth rotation"),
    (700, 256, 1024, 16, "smooth rotation"),
    (1100, 643, 576, 128, "rotation"),
]


def packed(made, device=DEVICE):
    *tensors, down, up, transformed, bias = made
    tensors = [tensor.to(device) for tensor in (*tensors, down, up)]
    return ops.pack(*tensors, transformed.to(device), bias.to(device))


def quantize(x, one):
    return torch.ops.svdq.nvfp4_quantize(x, one.down, one.inv_smooth, one.rotation)


def product(operands, one, m, dtype, n=None):
    weight = (one.qweight, one.wscales, one.wcscale, one.up, one.bias)
    return torch.ops.svdq.nvfp4_gemm(*operands, *weight, m, one.n if n is None else n, dtype)


def expected(made, x):
    """y float64 by the words of the format, and how far float32 sums may be from it.

    A tensor core cuts off below its largest term: less than two units of 2^-24 of the sum of absolute values for each
    of k/16 products, one for each of the sums behind; t by its k/8 products, and 22 bits of it.
    """
    qweight, scales, wcscale, down, up, transformed, bias = made
    x_hat = nvfp4.fake_quantize_activation(transformed.apply(x), D)
    weight = nvfp4.decode(unpack_nibbles(qweight), scales, D) * wcscale[:, None]
    rank, k = up.shape[1], x.shape[1]
    y = x_hat @ weight.t() + x.to(D) @ down.to(D) @ up.to(D).t() + bias
    total = x_hat.abs() @ weight.abs().t() + bias.abs() + x.to(D).abs() @ down.to(D).abs() @ up.to(D).abs().t()
    return y, (k / 8 + k / 4 * bool(rank) + rank / 4 + 20) * 2.0**-24 * total + 2.0**-112


@halves
@pytest.mark.parametrize("kind", [*KINDS, "specials"])
@pytest.mark.parametrize(("m", "n", "k", "rank", "parts"), SIZES)
def test_codes_and_scales_are_the_references_bit_for_bit(m, n, k, rank, parts, kind, dtype):
    if kind == "specials" and m < 9:
        pytest.skip("specials are in seven rows")
    made = nvfp4_tensors(n, k, rank, parts)
    x = with_specials(m, k, dtype) if kind == "specials" else inputs(kind, m, k, dtype)
    found = [part.cpu() for part in quantize(x.to(DEVICE), packed(made))]
    wanted = quantize(x, packed(made, "cpu"))
    shape = (found[0].shape[0], found[0].shape[1] * 2)
    check(*(layout.unpack_codes(part[0], "codes").int() for part in (found, wanted)), what="code (row, channel)")
    bytes_ = (layout.unpack_matrix("fp4_scales", part[1], (shape[0], shape[1] // 16)).int()
              for part in (found, wanted))  # fmt: skip
    check(*bytes_, what="scale (row, group)")
    t, wanted_t = (part[2].sum(0)[:m].to(D) for part in (found, wanted))
    finite = wanted_t.isfinite().all(1) & t.isfinite().all(1)
    assert finite.any() or kind in ("huge", "specials") or not rank
    allowed = 1e-5 * wanted_t[finite].abs().amax() if finite.any() and rank else 0.0
    check(t[finite], wanted_t[finite], allowed, "t")


def test_ties_and_the_floats_beside_them_are_rounded_as_the_reference_does():
    """For every scale, 6 times it being the largest of a group: float32 values, which inv_smooth brings."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    at = scales * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above, below = (torch.nextafter(at, torch.tensor(to)) for to in (torch.inf, 0.0))
    values = torch.cat((6 * scales, at, above, 0 * scales, 6 * scales, at, below, 0 * scales), 1).flatten()
    values, signs = layout.pad(values, 64 * 64), normal(1, 64 * 64).sign().half()
    operands = signs, torch.empty(64 * 64, 0).half(), values, False
    wanted = torch.ops.svdq.nvfp4_quantize(*operands)
    found = torch.ops.svdq.nvfp4_quantize(*(part.to(DEVICE) for part in operands[:3]), False)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, wanted, strict=True))


@halves
@pytest.mark.parametrize("kind", ["random", "outlier", "zero rows"])
@pytest.mark.parametrize(("m", "n", "k", "rank", "parts"), SIZES)
def test_the_sums_are_float64s_but_for_float32s_rounding(m, n, k, rank, parts, kind, dtype):
    made, x = nvfp4_tensors(n, k, rank, parts), inputs(kind, m, k, dtype)
    y, noise = expected(made, x)
    one = packed(made)
    operands = quantize(x.to(DEVICE), one)
    found = product(operands, one, m, torch.float32)
    check(found.cpu().to(D), y, noise, "y")
    assert (found.cpu().to(D) - y).norm() <= 2e-6 * y.norm()
    assert torch.equal(product(operands, one, m, dtype), found.to(dtype))  # one rounding, at the end
    assert torch.equal(product(quantize(x.to(DEVICE), one), one, m, torch.float32), found)  # the same in every run


@pytest.mark.parametrize("m", [40, 70])
def test_rows_with_nan_and_infinity_become_nan_and_leave_the_others_alone(m):
    made, x = nvfp4_tensors(130, 192, 16, "rotation"), with_specials(m, 192, torch.bfloat16)
    hurt = ~x.isfinite().all(1)
    one = packed(made)
    y, wanted = (ops.linear(part.to(DEVICE), one).cpu() for part in (x, x.masked_fill(hurt[:, None], 0)))
    assert y[hurt].isnan().all() and torch.equal(y[~hurt], wanted[~hurt])


@pytest.mark.parametrize("m", [0, 3, 70])
def test_rows_that_are_not_aligned_and_fewer_columns(m):
    made, x = nvfp4_tensors(300, 192, 16, "smooth"), normal(m, 200).half()
    one = packed(made)
    wide = x.to(DEVICE)
    y = product(quantize(wide[:, 3:195], one), one, m, torch.float16, n=200)
    assert torch.equal(y, ops.linear(x[:, 3:195].contiguous().to(DEVICE), one)[:, :200])


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("m", [5, 100])
def test_a_cuda_graph_replays_it_on_new_inputs(m):
    one, x = packed(nvfp4_tensors(130, 192, 16, "smooth rotation")), normal(m, 192).half().to(DEVICE)
    ops.linear(x, one)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.linear(x, one)
    x.copy_(normal(m, 192, seed=9))
    graph.replay()
    assert torch.equal(y, ops.linear(x, one))


@pytest.mark.parametrize("m", [5, 100])
def test_the_operators_are_what_torch_compile_takes(m):
    one, x = packed(nvfp4_tensors(130, 192, 16, "smooth rotation")), normal(m, 192).half().to(DEVICE)
    torch.library.opcheck(torch.ops.svdq.nvfp4_quantize, (x, one.down, one.inv_smooth, True))
    weight = (one.qweight, one.wscales, one.wcscale, one.up, one.bias)
    torch.library.opcheck(torch.ops.svdq.nvfp4_gemm, (*quantize(x, one), *weight, m, 130, torch.float16))
