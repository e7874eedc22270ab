"""NVFP4's packed orders, its operators' references on a CPU, and the kernels' own text run there (see emulate.py)."""

from dataclasses import replace

import emulate
import pytest
import torch

from svdq import nvfp4
from svdq.grid import E2M1, pack_nibbles, unpack_nibbles
from svdq.kernels import layout
from svdq.kernels import nvfp4 as ops
from svdq.kernels.layout import FP4_ROWS, MMA
from svdq.rounding import ActivationTransform, round_to_nearest

D = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def canonical(n, k, rank, bias=True):
    """A checkpoint's tensors of a random linear, with smoothing and rotation."""
    weight = normal(n, k) / k**0.5
    weight[:, k // 2] *= 30
    wcscale = nvfp4.tensor_factor(weight)
    codes, scales = round_to_nearest(weight, E2M1, unit=wcscale)
    down, up = (normal(k, rank, seed=2) / k**0.5).half(), normal(n, rank, seed=3).half()
    transform = ActivationTransform(normal(k, seed=4).exp(), True)
    return (
        pack_nibbles(nvfp4.to_nibbles(codes)),
        scales,
        wcscale,
        down,
        up,
        transform,
        normal(n, seed=5) if bias else None,
    )


def quantize(x, one):
    return ops._quantize_reference(x, one.down, one.inv_smooth, one.rotation)


def weights(one):
    return one.qweight, one.wscales, one.wcscale, one.up, one.bias


def expected(made, x):
    """float64, by the words of the format: the low-rank part reads the raw input and wcscale is not its own."""
    qweight, scales, wcscale, down, up, transform, bias = made
    hat = nvfp4.decode(unpack_nibbles(qweight), scales, D) * wcscale[:, None]
    y = nvfp4.fake_quantize_activation(transform.apply(x), D) @ hat.t() + x.to(D) @ down.to(D) @ up.to(D).t()
    return y if bias is None else y + bias


def distance(found, wanted):
    return ((found.to(D) - wanted).norm() / wanted.norm()).item()


# ---- orders


def weight_scale_index(n, g, k):
    m = n % 128
    return ((n // 128) * (k // 64) + g // 4) * 512 + (m % 8) * 64 + ((m // 8) % 4) * 16 + (m // 32) * 4 + g % 4


def test_weight_scales_lie_in_tiles_of_512_bytes():
    n, k = 256, 192
    flat = MMA["fp4_wscales"].pack(torch.arange(n * k // 16).view(n, k // 16))
    found = {(row, g): flat[weight_scale_index(row, g, k)].item() for row in range(n) for g in range(k // 16)}
    assert found == {(row, g): row * (k // 16) + g for row in range(n) for g in range(k // 16)}


def test_a_weight_scale_by_hand():
    """n 37 = 32 + 8·0 + 5, group 6 = 4 + 2 of k 128: the second tile, 5 · 64 + 0 · 16 + 1 · 4 + 2."""
    scales = torch.zeros(128, 8)
    scales[37, 6] = 1
    assert MMA["fp4_wscales"].pack(scales).nonzero().tolist() == [[512 + 320 + 0 + 4 + 2]]


def test_activation_scales_are_words_of_four_by_panel_k_tile_and_row():
    scales = torch.zeros(32, 8)
    scales[16 + 11, 6] = 1  # the second panel, the second k tile, row 11, the third group of the four
    assert MMA["fp4_scales"].pack(scales).nonzero().tolist() == [[((1 * 2 + 1) * 16 + 11) * 4 + 2]]


def test_the_scales_of_row_major_operands_are_transposed():
    assert FP4_ROWS.pack(torch.tensor([[1, 2, 3], [4, 5, 6]])).view(3, 2).tolist() == [[1, 4], [2, 5], [3, 6]]


@pytest.mark.parametrize("order", [MMA["fp4_wscales"], MMA["fp4_scales"], FP4_ROWS], ids=["weights", "acts", "rows"])
@pytest.mark.parametrize("shape", [(128, 8), (256, 12), (384, 4)])
def test_unpacking_scales_is_the_inverse_of_packing_them(order, shape):
    scales = torch.randint(0, 127, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(order.unpack(order.pack(scales), shape), scales)


@pytest.mark.parametrize(("n", "k", "rank"), [(96, 192, 16), (128, 128, 0), (130, 64, 40)])
def test_a_linear_unpacks_to_what_was_packed_and_is_padded_with_codes_0_and_scales_1(n, k, rank):
    qweight, scales, wcscale, down, up, transform, bias = canonical(n, k, rank)
    one = ops.pack(qweight, scales, wcscale, down, up, transform, bias)
    wide = ops.unpack(*weights(one))
    assert wide.codes.shape == (-(-n // 128) * 128, -(-k // 128) * 128) and one.n == n
    assert torch.equal(wide.codes[:n, :k], unpack_nibbles(qweight))
    assert torch.equal(wide.scales[:n, : k // 16].float(), scales.float())
    assert not wide.codes[n:].any() and not wide.codes[:, k:].any()
    assert (wide.scales[n:].float() == 1).all() and (wide.scales[:, k // 16 :].float() == 1).all()
    assert torch.equal(wide.wcscale[:n], wcscale) and torch.equal(wide.bias[:n], bias)
    assert torch.equal(wide.up[:n, :rank], up) and not wide.up[:, rank:].any()
    assert torch.equal(layout.unpack_matrix("down", one.down, tuple(one.down.shape))[:k, :rank], down)


# ---- operators on a CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "n", "k", "rank"), [(1, 96, 192, 16), (70, 130, 64, 0), (16, 128, 128, 40)])
def test_a_linear_is_the_formula_in_float64_but_for_its_last_rounding(m, n, k, rank, dtype):
    made, x = canonical(n, k, rank), normal(m, k, seed=7).to(dtype)
    y, wanted = ops.linear(x, ops.pack(*made)), expected(made, x)
    assert y.dtype == dtype and distance(y, wanted) < 5e-7 + torch.finfo(dtype).eps / 2


def test_without_a_low_rank_a_bias_or_a_transform():
    qweight, scales, wcscale, *_ = canonical(96, 192, 0)
    one = ops.pack(qweight, scales, wcscale, None, None, ActivationTransform(), None)
    x = normal(3, 192)
    hat = nvfp4.decode(unpack_nibbles(qweight), scales, D) * wcscale[:, None]
    assert distance(ops.linear(x, one), nvfp4.fake_quantize_activation(x, D) @ hat.t()) < 5e-7


def test_the_factor_of_a_column_scales_the_quantized_product_alone():
    made, x = canonical(96, 192, 16), normal(4, 192)
    factors = torch.rand(96) + 1  # no powers of two
    qweight, scales, wcscale, down, up, transform, bias = made
    y, zero = (ops.linear(x, ops.pack(qweight, scales, f, down, up, transform, bias)) for f in (wcscale, 0 * wcscale))
    scaled = ops.linear(x, ops.pack(qweight, scales, wcscale * factors, down, up, transform, bias))
    assert distance(scaled - zero, ((y - zero) * factors).double()) < 1e-6
    assert distance(zero, x.double() @ down.double() @ up.double().t() + bias) < 1e-6


@pytest.mark.parametrize("m", [0, 70])
def test_the_operators_are_what_torch_compile_takes(m):
    one, x = ops.pack(*canonical(130, 192, 16)), normal(m, 192).half()
    torch.library.opcheck(torch.ops.svdq.nvfp4_quantize.default, (x, one.down, one.inv_smooth, True))
    torch.library.opcheck(torch.ops.svdq.nvfp4_gemm.default, (*quantize(x, one), *weights(one), m, 130, torch.float16))


def test_wrong_operands_are_named():
    one, x = ops.pack(*canonical(130, 192, 16)), normal(20, 192)
    operands = quantize(x, one)
    with pytest.raises(ValueError, match=r"nvfp4_quantize: x has 128 channels"):
        ops.linear(x[:, :128], one)
    with pytest.raises(ValueError, match=r"nvfp4_gemm: codes: .*wanted torch.uint8 \[48, 128\]"):
        torch.ops.svdq.nvfp4_gemm(*operands, *weights(one), 33, 130, torch.float16)
    with pytest.raises(ValueError, match=r"nvfp4_gemm: found .*n 257; wanted .*at most 256"):
        torch.ops.svdq.nvfp4_gemm(*operands, *weights(one), 20, 257, torch.float16)
    with pytest.raises(ValueError, match=r"nvfp4_gemm: wscales"):
        wrong = one.qweight, one.wscales[:-1], one.wcscale, one.up, one.bias
        torch.ops.svdq.nvfp4_gemm(*operands, *wrong, 20, 130, torch.float16)


# ---- the kernels' text


@pytest.fixture(scope="module")
def emulators(tmp_path_factory):
    return {arch: emulate.Emulator(tmp_path_factory.mktemp(f"sm_{arch}"), 10 * arch) for arch in (90, 120)}


@pytest.fixture
def emulated(monkeypatch, emulators):
    """Makes the operators run their CUDA implementation on CPU tensors, as for one architecture."""

    def use(arch):
        monkeypatch.setattr(ops, "launch", emulators[arch].launch)
        monkeypatch.setattr(ops, "has_fp4_cores", lambda device: arch == 120)
        monkeypatch.setattr(ops, "_product", lambda x, weights: (x.to(D) @ weights.t().to(D)).float())

    return use


needs_compiler = pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")


@needs_compiler
def test_the_quantizers_codes_and_scales_are_the_references(emulated):
    emulated(90)
    one, x = ops.pack(*canonical(96, 576, 16)), normal(18, 576, seed=8)
    x[:, 5] *= 100
    x *= torch.logspace(-6, 3, 18)[:, None]
    x[2] = 0
    x[7, 100], x[17, 300] = float("nan"), float("inf")
    found, wanted = ops.nvfp4_quantize(x.half(), one.down, one.inv_smooth, True), quantize(x.half(), one)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    t, wanted_t = (part[2].sum(0) for part in (found, wanted))
    size = x.half().float().abs() @ made_down(one).abs()
    assert ((t - wanted_t)[:17].nan_to_num() <= 2e-6 * size[:17].nan_to_num(posinf=1)).all()


def made_down(one):
    return layout.unpack_matrix("down", one.down, tuple(one.down.shape))[:576].float()


@needs_compiler
def test_the_quantizer_rounds_ties_and_what_is_beside_them_as_the_reference(emulated):
    """For every scale, 6 times it being the largest of a group: float32 values, which inv_smooth brings."""
    emulated(90)
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    at = scales * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    above, below = (torch.nextafter(at, torch.tensor(to)) for to in (torch.inf, 0.0))
    largest, zero = 6 * scales, torch.zeros(126, 1)
    values = torch.cat((largest, at, -above, zero, largest, -at, below, zero), 1).flatten()  # 126 times two groups
    values = layout.pad(values, 64 * 64)
    qweight, scales, wcscale, *_ = canonical(96, 64 * 64, 0)
    one = replace(ops.pack(qweight, scales, wcscale, None, None, ActivationTransform(), None), inv_smooth=values.abs())
    x = values.sign().half()[None]
    found, wanted = ops.nvfp4_quantize(x, one.down, one.inv_smooth, False), quantize(x, one)
    assert torch.equal(found[1], wanted[1]) and torch.equal(found[0], wanted[0])
    codes = layout.unpack_codes(found[0], "codes")[0, : 126 * 32].view(126, 32)
    assert (codes[:, 1:8] == torch.tensor([0, 2, 2, 4, 4, 6, 6])).all()  # to the even side
    assert (codes[:, 8:15] & 7 == torch.tensor([1, 2, 3, 4, 5, 6, 7])).all()
    assert (codes[:, 24:31] == torch.tensor([0, 1, 2, 3, 4, 5, 6])).all()


@needs_compiler
@pytest.mark.parametrize(("arch", "m", "n", "rank"), [(90, 20, 97, 80), (90, 70, 100, 16), (120, 70, 100, 16)])
def test_products_are_the_formulas(emulated, arch, m, n, rank):
    """Up to 64 rows from 4-bit weights, then by expanding both operands, or on cores that take them (sm_120)."""
    made, x = canonical(n, 192, rank), normal(m, 192, seed=9).half()
    one, wanted = ops.pack(*made), expected(made, x)
    operands = quantize(x, one)
    operands = (*operands[:2], torch.cat((operands[2] / 4, operands[2] * 3 / 4)))  # in two shares
    emulated(arch)
    y = ops.nvfp4_gemm(*operands, *weights(one), m, n, torch.float32)
    assert distance(y, wanted) < 5e-7
    assert torch.equal(ops.nvfp4_gemm(*operands, *weights(one), m, n, torch.bfloat16), y.bfloat16())


@needs_compiler
@pytest.mark.parametrize(("arch", "m"), [(90, 7), (120, 70)])
def test_a_nan_of_the_activation_is_a_nan_in_its_row_alone(emulated, arch, m):
    made, x = canonical(100, 192, 0, bias=False), normal(m, 192).half()
    x[3, 70] = float("nan")
    one = ops.pack(*made)
    operands = quantize(x, one)
    emulated(arch)
    y = ops.nvfp4_gemm(*operands, *weights(one), m, 100, torch.float16)
    assert y.isnan().all(1).nonzero().tolist() == [[3]] and y.isnan().any(1).sum() == 1
