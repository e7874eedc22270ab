"""The kernels' own text, run on the CPU thread by thread (see emulate.py), against integers and float64."""

import emulate
import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import hopper, layout, ops, reference
from svdq.linear import W4A4Linear, W4A4LinearGroup
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")
F16, BF16, F32, D = torch.float16, torch.bfloat16, torch.float32, torch.float64
halves = pytest.mark.parametrize("dtype", [F16, BF16], ids=["f16", "bf16"])


@pytest.fixture(scope="session")
def emulators(tmp_path_factory):
    """sm_80 multiplies nibbles, sm_90 bytes, in clusters of blocks, and sm_100 without them."""
    return {arch: emulate.Emulator(tmp_path_factory.mktemp(f"sm_{arch}"), 10 * arch) for arch in (80, 90, 100)}


@pytest.fixture(params=[90])
def emulated(request, monkeypatch, emulators):
    """The operators' CUDA implementations, on CPU tensors, as for one architecture."""
    monkeypatch.setattr(hopper, "require", lambda device: None)
    monkeypatch.setattr(ops, "cluster_blocks", lambda device: 2 if request.param == 90 else 1)
    for module in (ops, hopper):
        monkeypatch.setattr(module, "launch", emulators[request.param].launch)
    return emulators[request.param]


each = pytest.mark.parametrize("emulated", [80, 90, 100], indirect=True, ids=["sm_80", "sm_90", "sm_100"])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_layer(n, k, rank, *, transform=True, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Layer(
        "layer",
        torch.randint(-7, 8, (n, k), generator=generator, dtype=torch.int8),
        (normal(n, k // 64, seed=seed + 1).abs() * 0.002 + 0.001).half(),
        (normal(k, rank, seed=seed + 2) * 0.05).half(),
        (normal(n, rank, seed=seed + 3) * 0.05).half(),
        normal(n, seed=seed + 4) if bias else None,
        ActivationTransform(normal(k, seed=seed + 5).exp(), True, 0.85) if transform else ActivationTransform(),
    )


def activation(m, k, dtype, seed=7):
    x = normal(m, k, seed=seed)
    x[:, k // 3] *= 300
    x[m // 2] = 0
    return x.to(dtype)


def quantized(linear, x, *norm):
    packed = (linear.down, linear.inv_smooth, linear.rotation, linear.clip)
    return ops.quantize_lora_down(x, *packed, *(norm or (None, None)))


def codes_and_scales(operands, m, k):
    codes, scales, _ = operands
    scales = layout.unpack_matrix("scales", scales, tuple(scales.shape))
    assert not scales[m:].any() and not scales[:, k // 64 :].any()
    return layout.unpack_codes(codes, "codes")[:m, :k], scales[:m, : k // 64]


def float64_result(layer, x):
    codes, scales = layer.transform.quantize(x)
    y = (codes.to(D) * scales.to(D).repeat_interleave(64, 1)) @ layer.weight_hat(D).t()
    y = y + x.to(D) @ layer.proj_down.to(D) @ layer.proj_up.to(D).t()
    return y if layer.bias is None else y + layer.bias.to(D)


def distance(found, wanted):
    return ((found.to(D) - wanted).norm() / wanted.norm()).item()


@pytest.mark.usefixtures("emulated")
class TestQuantizer:
    @halves
    @pytest.mark.parametrize(
        ("m", "k", "rank"), [(1, 64, 0), (5, 576, 16), (16, 1024, 0), (17, 192, 16), (40, 576, 48), (9, 320, 192)]
    )
    def test_codes_and_scales_are_the_references_and_t_is_x_down(self, m, k, rank, dtype):
        layer, x = random_layer(128, k, rank), activation(m, k, dtype)
        operands = quantized(W4A4Linear(layer), x)
        codes, scales = codes_and_scales(operands, m, k)
        wanted_codes, wanted_scales = layer.transform.quantize(x)
        assert torch.equal(codes, wanted_codes) and torch.equal(scales, wanted_scales)
        if rank:
            t = operands[2].sum(0)[:m, :rank].to(D)
            size = x.to(D).abs() @ layer.proj_down.to(D).abs()
            # float32 sums: 2^-24 of the terms' size each
            assert ((t - x.to(D) @ layer.proj_down.to(D)).abs() <= 2e-6 * size).all()

    @halves
    def test_a_nan_or_an_infinity_spoils_its_own_group_alone(self, dtype):
        layer, x = random_layer(128, 192, 0, transform=False), activation(20, 192, dtype)
        x[3, 70], x[18, 0], x[5, 130] = float("nan"), float("inf"), -float("inf")
        found, wanted = (
            codes_and_scales(quantized(W4A4Linear(layer), x), 20, 192),
            layer.transform.quantize(x),
        )
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1].nan_to_num(-1), wanted[1].nan_to_num(-1))

    @halves
    def test_denormal_scales_are_the_references(self, dtype):
        layer = random_layer(128, 128, 0, transform=False)
        x = (normal(4, 128) * torch.tensor([[1e-7], [3e-39], [1e-40], [0.0]])).to(dtype)
        found, wanted = codes_and_scales(quantized(W4A4Linear(layer), x), 4, 128), layer.transform.quantize(x)
        assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])

    @halves
    @pytest.mark.parametrize("m", [3, 18])
    def test_a_norm_on_the_way_in_is_that_of_a_module_before(self, m, dtype):
        linear, x = W4A4Linear(random_layer(128, 192, 16)), activation(m, 192, dtype) + 1
        weight = (1 + 0.2 * normal(192)).to(dtype)
        factor = ops.inv_rms(x, 1e-6)
        wanted = (x.to(D).square().mean(1) + 1e-6).rsqrt()
        assert ((factor - wanted).abs() <= 1e-6 * wanted).all()
        normed = weight * (x.float() * factor[:, None]).to(dtype)
        for found, plain in zip(quantized(linear, x, factor, weight), quantized(linear, normed), strict=True):
            assert torch.equal(found, plain)

    def test_rows_with_a_stride_are_read_as_they_lie(self):
        linear, wide = W4A4Linear(random_layer(128, 128, 16)), torch.full((6, 256), float("nan"), dtype=F16)
        wide[:, 64:192] = activation(6, 128, F16)
        x = wide[:, 64:192]
        for found, plain in zip(quantized(linear, x), quantized(linear, x.contiguous()), strict=True):
            assert torch.equal(found, plain)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("values", [False, True], ids=["codes", "values"])
class TestHoppersQuantizer:
    @pytest.fixture(autouse=True)
    def one_block_a_cluster(self, monkeypatch, values):
        if values:
            monkeypatch.setattr(hopper, "_shares", lambda *sizes: 1)

    @staticmethod
    def check(linear, x, values, *norm):
        """Bytes and scales are the reference's, t is near it: of the rows that are written."""
        activation = (x, linear.down, linear.inv_smooth, linear.rotation, linear.clip, *(norm or (None, None)))
        found = hopper.quantize_lora_down_e4m3(*activation, values)
        shares, rank, rows = found[2].shape
        written = layout.round_up(len(x), 16)
        assert rows == 384 >= written
        wanted = reference.quantize_lora_down_e4m3(*activation, values, shares, rows)
        bytes_, wanted_bytes = (
            layout.unpack_matrix("fp8", part[0], (rows, found[0].shape[1])) for part in (found, wanted)
        )
        assert torch.equal(bytes_[:written], wanted_bytes[:written])
        scales, wanted_scales = (
            part[1] if values else layout.unpack_matrix("token_scales", part[1], tuple(part[1].shape))
            for part in (found, wanted)
        )
        assert torch.equal(scales[:written].nan_to_num(-1), wanted_scales[:written].nan_to_num(-1))
        t, wanted_t = (
            layout.unpack_matrix("token_t", part[2].sum(0), (rows, rank))[:written] for part in (found, wanted)
        )
        if rank:
            assert distance(t, wanted_t.to(D)) < 5e-6  # float32 sums in another order
        return shares

    @halves
    @pytest.mark.parametrize(
        ("m", "k", "rank", "shares"), [(1, 64, 0, 1), (5, 1088, 16, 3), (34, 192, 48, 1), (17, 1600, 192, 4)]
    )
    def test_what_it_stores_is_the_references(self, m, k, rank, shares, dtype, values):
        linear = W4A4Linear(random_layer(128, k, rank))
        assert self.check(linear, activation(m, k, dtype), values) == (1 if values else shares)

    @halves
    def test_a_norm_on_the_way_in_is_the_references(self, dtype, values):
        linear, x = W4A4Linear(random_layer(128, 192, 16)), activation(18, 192, dtype) + 1
        self.check(linear, x, values, ops.inv_rms(x, 1e-6), (1 + 0.2 * normal(192)).to(dtype))

    @halves
    def test_nan_infinity_and_denormals_are_the_references(self, dtype, values):
        linear, x = W4A4Linear(random_layer(128, 192, 0, transform=False)), activation(20, 192, dtype)
        x[3, 70], x[18, 0], x[5, 130] = float("nan"), float("inf"), -float("inf")
        x[7], x[8], x[9] = 3e-39, 1e-40, -0.0
        self.check(linear, x, values)

    def test_what_lies_halfway_between_two_numbers_goes_to_the_even_one(self, values):
        if values:  # at every size; the token's scale is 1
            x = torch.cat([(torch.arange(64) + 0.5) * 2.0**exponent for exponent in range(-10, 3)])
            x[-1] = 448
        else:  # −7, −6.5 … 7; the scale is 1 in both groups
            x = (torch.arange(128) % 29 - 14) / 2
        self.check(W4A4Linear(random_layer(128, len(x), 0, transform=False)), torch.stack([x, -x]).half(), values)


def test_expanded_weights_are_the_codes_in_units_of_2_to_the_minus_9(emulated):
    n, k = 256, 384
    codes = torch.randint(-8, 8, (n, k), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    expanded = torch.zeros(n, k, dtype=torch.uint8)
    packed = layout.pack_codes(codes)
    emulated.launch(kernels.expand_kernel(), None, (k // 64, n // 128), 256, [packed, expanded, k // 64, n])
    numbers = layout.unpack_matrix("fp8", expanded, (n, k)).view(torch.float8_e4m3fn)
    assert torch.equal(numbers.float() * 512, codes.float())


@each
@pytest.mark.usefixtures("emulated")
class TestGemm:
    @pytest.mark.parametrize(
        ("m", "n", "k", "rank"),
        [
            *[(1, 96, 64, 16), (3, 40, 192, 0), (16, 100, 576, 32), (9, 24, 2112, 128), (2, 20, 4160, 16)],
            *[(17, 130, 192, 16), (40, 264, 128, 48), (64, 24, 4160, 16), (25, 70, 4160, 0)],
            *[(129, 96, 64, 0), (70, 264, 192, 48)],
        ],
    )
    def test_float32_outputs_are_float64s_but_for_rounding(self, m, n, k, rank):
        layer, x = random_layer(n, k, rank), activation(m, k, F16)
        linear = W4A4Linear(layer)
        weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias)
        y = ops.w4a4_gemm_lora(*quantized(linear, x), *weight, m, n, F32)
        assert distance(y, float64_result(layer, x)) < 5e-7

    @pytest.mark.parametrize("m", [4, 20, 68])
    def test_group_sums_are_exact(self, m):
        """Scales 1 for one group and 0 for the others: what comes out is that group's integer."""
        layer = random_layer(40, 320, 0, transform=False, bias=False)
        layer.scales.fill_(1)
        linear, rows = W4A4Linear(layer), layout.round_up(m, 16)
        codes = torch.randint(-8, 8, (rows, 384), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
        codes[0], layer.codes[0] = -8, 7
        linear = W4A4Linear(layer)
        for group in range(5):
            scales = torch.zeros(rows, 6)
            scales[:, group] = 1
            operands = (
                layout.pack_codes(codes, "codes"),
                layout.pack_matrix("scales", scales),
                torch.zeros(1, rows, 0),
            )
            y = ops.w4a4_gemm_lora(*operands, linear.qweight, linear.wscales, linear.up, None, m, 40, F32)
            part = slice(64 * group, 64 * group + 64)
            assert torch.equal(y.long(), codes[:m, part].long() @ layer.codes[:, part].long().t())

    @halves
    @pytest.mark.parametrize("m", [6, 33, 65])
    def test_outputs_are_rounded_once(self, m, dtype):
        layer, x = random_layer(50, 192, 16), activation(m, 192, dtype)
        linear = W4A4Linear(layer)
        weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias)
        operands = quantized(linear, x)
        wide, y = (ops.w4a4_gemm_lora(*operands, *weight, m, 50, kind) for kind in (F32, dtype))
        assert torch.equal(y, wide.to(dtype))

    @pytest.mark.parametrize("m", [5, 30, 66])
    def test_siblings_in_one_gemm_are_what_each_is_alone(self, m):
        parts = [random_layer(n, 192, 16, seed=seed) for n, seed in ((40, 1), (130, 2))]
        parts[1].transform = parts[0].transform
        group, x = W4A4LinearGroup(parts), activation(m, 192, F16)
        weight = (group.qweight, group.wscales, group.up, group.packed_bias)
        assert group.first_rank.tolist() == [0, 16, 16]
        y = ops.w4a4_gemm_lora(*quantized(group, x), *weight, m, 384, F32, group.first_rank)
        for part, start in zip(parts, (0, 128), strict=True):
            assert distance(y[:, start : start + part.codes.shape[0]], float64_result(part, x)) < 5e-7

    @pytest.mark.parametrize("m", [16, 48])
    def test_the_bits_of_a_row_do_not_depend_on_its_place(self, m):
        linear, x = W4A4Linear(random_layer(40, 576, 32)), activation(m, 576, F16)
        weight = (linear.qweight, linear.wscales, linear.up, linear.packed_bias)
        y, turned = (ops.w4a4_gemm_lora(*quantized(linear, a), *weight, m, 40, F32) for a in (x, x.flip(0)))
        assert torch.equal(turned.flip(0), y)


@halves
@pytest.mark.parametrize(("d", "heads", "k_heads"), [(64, 3, 1), (128, 2, 2)])
@pytest.mark.parametrize("normed", [False, True])
def test_q_and_k_are_normalized_and_rotated(emulated, d, heads, k_heads, normed, dtype):
    fused = normal(6, (heads + k_heads) * d).to(dtype).view(6, heads + k_heads, d)
    q, k = fused[:, :heads], fused[:, heads:]
    weights = tuple((1 + 0.2 * normal(d, seed=seed)).to(dtype) if normed else None for seed in (1, 2))
    angle = normal(3, d // 2, seed=3).repeat(1, 2)
    cosine, sine = angle.cos().to(dtype), angle.sin().to(dtype)
    found = ops.qknorm_rope(q, k, *weights, cosine, sine, 1e-6)
    for y, x, weight in zip(found, (q, k), weights, strict=True):
        if weight is not None:
            factor = (x.to(D).square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            x = weight * (x.to(D) * factor).to(dtype)
        first, second = x.to(D).chunk(2, -1)
        cos, sin = (table.to(D).repeat(2, 1)[:, None] for table in (cosine, sine))
        wanted = x.to(D) * cos + torch.cat((-second, first), -1) * sin
        assert y.is_contiguous() and distance(y, wanted) < 2 * torch.finfo(dtype).eps
