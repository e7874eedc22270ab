"""The linear in plain torch against integer group sums, dequantized and added up in float64; and Hopper's operators
against the others, and against float64."""

import pytest
import torch

from svdq.kernels import hopper, layout, reference
from svdq.kernels.reference import w4a4_linear
from svdq.linear import W4A4Linear
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform, quantize_activation, quantize_activation_e4m3

D = torch.float64


def rng(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=rng(seed))


def layer(n=40, k=192, rank=16, group=64, seed=0):
    """codes int64 (n, k), float16 scales, factors and bias; one zero row, one zero group."""
    codes = torch.randint(-7, 8, (n, k), generator=rng(seed))
    codes[2], codes[3, :64] = 0, 0
    scales = (normal(n, k // group, seed=seed + 1).abs() * 0.02 + 1e-3).half()
    down, up = (normal(k, rank, seed=seed + 2) * 0.1).half(), (normal(n, rank, seed=seed + 3) * 0.1).half()
    return codes, scales, down, up, normal(n, seed=seed + 4).half()


def dequantized(codes, scales, dtype=torch.float32):
    group = codes.shape[1] // scales.shape[1]
    return codes.to(dtype) * scales.to(dtype).repeat_interleave(group, 1)


def inputs(tokens=7, k=192, seed=7):
    x = normal(tokens, k, seed=seed)
    x[:, 3::50] *= 30
    x[1] = 0
    return x


def by_groups(x, codes, scales, down, up, bias, transform):
    """Σ over groups of the exact integer product times both scales, then low rank and bias; float64. x (m, k)."""
    x_codes, x_scales = quantize_activation(transform.apply(x), transform.clip)
    x_codes = x_codes.long()
    y = torch.zeros(len(x), len(codes), dtype=D)
    per_scale = codes.shape[1] // scales.shape[1] // 64
    for g in range(codes.shape[1] // 64):
        part = slice(64 * g, 64 * (g + 1))
        integers = x_codes[:, part] @ codes[:, part].t()
        assert integers.abs().max() <= 3584
        y += integers.double() * (x_scales[:, g].double()[:, None] * scales[:, g // per_scale].double()[None])
    y += (x.double() @ down.double()) @ up.double().t()
    return y if bias is None else y + bias.double()


def relative_error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


BARE = ActivationTransform()
FULL = ActivationTransform((normal(192, seed=3).abs() + 0.5).bfloat16().float(), True, 0.85)


@pytest.mark.parametrize("transform", [BARE, FULL], ids=["bare", "full"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rank", [0, 16])
def test_it_equals_integer_group_sums_to_float32_rounding(rank, biased, transform):
    codes, scales, down, up, bias = layer(rank=rank)
    bias = bias if biased else None
    x = inputs()
    y = w4a4_linear(x, dequantized(codes, scales), down, up, bias, transform)
    assert y.dtype == torch.float32
    # float32 sums of 192 terms: a few times 6e-8
    assert relative_error(y, by_groups(x, codes, scales, down, up, bias, transform)) <= 1e-6


@pytest.mark.parametrize("transform", [BARE, FULL], ids=["bare", "full"])
def test_a_float64_weight_gives_float64_results_without_any_further_rounding(transform):
    codes, scales, down, up, bias = layer()
    x = inputs()
    y = w4a4_linear(x, dequantized(codes, scales, D), down, up, bias, transform)
    assert y.dtype == D
    assert relative_error(y, by_groups(x, codes, scales, down, up, bias, transform)) <= 1e-14  # float64 rounding


def test_a_group_of_192_shares_one_weight_scale_over_three_activation_scales():
    codes, scales, down, up, bias = layer(group=192)
    x = inputs()
    y = w4a4_linear(x, dequantized(codes, scales), down, up, bias, FULL)
    assert relative_error(y, by_groups(x, codes, scales, down, up, bias, FULL)) <= 1e-6  # float32 rounding


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 2.0**-11), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("transform", [BARE, FULL], ids=["bare", "full"])
def test_half_inputs_are_rounded_once_at_the_end(transform, dtype, step):
    codes, scales, down, up, bias = layer()
    x = inputs().to(dtype)
    y = w4a4_linear(x, dequantized(codes, scales), down, up, bias, transform)
    wanted = by_groups(x.float(), codes, scales, down, up, bias, transform)
    assert y.dtype == dtype
    # half a unit in the last place per element, besides sums in float32
    assert ((y.double() - wanted).abs() <= step * wanted.abs() + 1e-5 * wanted.abs().max()).all()


def test_the_bias_is_added_as_it_is():
    codes, scales, down, up, bias = layer()
    y = w4a4_linear(torch.zeros(3, 192), dequantized(codes, scales), down, up, bias, FULL)
    assert torch.equal(y, bias.float().expand(3, 40))


def test_the_low_rank_part_reads_the_raw_input():
    _, _, down, up, _ = layer()
    x = inputs()
    y = w4a4_linear(x, torch.zeros(40, 192), down, up, None, FULL)
    wanted = x.double() @ down.double() @ up.double().t()
    assert relative_error(y, wanted) <= 1e-6  # float32 sums


@pytest.mark.parametrize("shape", [(192,), (1, 192), (1, 1, 192), (2, 3, 192), (2, 1, 3, 192)])
def test_leading_dimensions_are_kept(shape):
    codes, scales, down, up, bias = layer()
    x = normal(*shape)
    y = w4a4_linear(x, dequantized(codes, scales), down, up, bias, FULL)
    assert y.shape == (*shape[:-1], 40)
    wanted = by_groups(x.reshape(-1, 192), codes, scales, down, up, bias, FULL)
    assert relative_error(y.reshape(-1, 40), wanted) <= 1e-6  # float32 rounding


@pytest.mark.parametrize("shape", [(0, 192), (2, 0, 192), (0, 3, 192)])
@pytest.mark.parametrize("transform", [BARE, FULL], ids=["bare", "full"])
def test_no_tokens_give_an_empty_output(transform, shape):
    codes, scales, down, up, bias = layer()
    y = w4a4_linear(torch.zeros(shape), dequantized(codes, scales), down, up, bias, transform)
    assert y.shape == (*shape[:-1], 40)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("transform", [BARE, FULL], ids=["bare", "full"])
def test_case_8_the_output_of_5_tokens_does_not_depend_on_what_the_other_rows_of_the_tile_hold(transform, poison):
    codes, scales, down, up, bias = layer()
    tile = torch.full((128, 192), poison)
    tile[:5] = inputs(5)
    y = w4a4_linear(tile, dequantized(codes, scales), down, up, bias, transform)[:5]
    assert relative_error(y, by_groups(inputs(5), codes, scales, down, up, bias, transform)) <= 1e-6  # float32 rounding


def test_a_zero_row_of_codes_without_low_rank_puts_out_nothing():
    codes, scales, down, up, _ = layer(rank=0)
    y = w4a4_linear(inputs(), dequantized(codes, scales), down, up, None, FULL)
    assert not y[:, 2].any()
    assert y[0].count_nonzero() >= 38


@pytest.mark.parametrize("shape", [(1, 64), (5, 192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_input_is_not_changed(shape, dtype):
    codes, scales, down, up, bias = layer(k=shape[1])
    x = normal(*shape).to(dtype)
    kept = x.clone()
    w4a4_linear(x, dequantized(codes, scales), down, up, bias, ActivationTransform(None, True, 0.85))
    assert torch.equal(x, kept)


def test_the_same_call_gives_the_same_bits():
    codes, scales, down, up, bias = layer()
    x, weight_hat = inputs(), dequantized(codes, scales)
    first, second = (w4a4_linear(x, weight_hat, down, up, bias, FULL) for _ in range(2))
    assert torch.equal(first, second)


# ---- 8-bit activations


E4M3 = torch.float8_e4m3fn


def test_numbers_of_a_token_are_rounded_to_e4m3_at_absmax_over_448():
    x = inputs(40)
    numbers, scales = quantize_activation_e4m3(x)
    assert (numbers.dtype, numbers.shape, scales.dtype, scales.shape) == (E4M3, x.shape, torch.float32, (40,))
    assert torch.equal(scales, x.abs().amax(1) / torch.tensor(448.0))
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    assert torch.equal(numbers.float(), (x * inverse[:, None]).clamp(-448, 448).to(E4M3).float())
    used = scales > 0
    assert torch.equal(numbers.float().abs().amax(1)[used], torch.full((39,), 448.0))
    # 3 bits after the leading one, or 2^-9 where that is more: half a step, and float32's rounding
    step = torch.maximum(x.abs() * 2.0**-4, scales[:, None] * 2.0**-10) * (1 + 1e-5)
    assert ((numbers.float() * scales[:, None] - x).abs() <= step).all()


def test_every_number_of_e4m3_is_its_own_nearest():
    every = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    every = every[every.isfinite()]
    numbers, scales = quantize_activation_e4m3(torch.stack([every, every * 2.0**-20, every * 2.0**30]))
    assert scales.tolist() == [1, 2.0**-20, 2.0**30]
    assert torch.equal(numbers.float(), every.expand(3, -1))


def test_a_number_halfway_goes_to_the_even_one():
    x = torch.tensor([448.0, 8.5, 9.5, -8.5, 2.0**-10, 3 * 2.0**-10, 0.0])
    assert quantize_activation_e4m3(x)[0].float().tolist() == [448, 8, 10, -8, 0, 2.0**-8, 0]


def test_a_token_of_zeros_has_scale_0_and_numbers_0():
    numbers, scales = quantize_activation_e4m3(torch.zeros(2, 64))
    assert not scales.any() and not numbers.view(torch.uint8).any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_token_with_nan_or_infinity_has_numbers_0_and_that_scale(poison):
    x = inputs(4)
    wanted = quantize_activation_e4m3(x)
    x[2, 5] = poison
    numbers, scales = quantize_activation_e4m3(x)
    assert not numbers[2].float().any()
    assert scales[2].isnan() if poison != poison else scales[2] == float("inf")
    others = torch.tensor([0, 1, 3])
    assert torch.equal(numbers.float()[others], wanted[0].float()[others])
    assert torch.equal(scales[others], wanted[1][others])


@pytest.mark.parametrize("shape", [(64,), (2, 3, 64), (0, 64), (2, 0, 64)])
def test_leading_dimensions_of_tokens_are_kept(shape):
    numbers, scales = quantize_activation_e4m3(normal(*shape))
    assert (numbers.shape, scales.shape) == (shape, shape[:-1])


# ---- Hopper's operators


def module(transform=FULL, rank=16, bias=True):
    codes, scales, down, up, offset = layer(rank=rank)
    return W4A4Linear(Layer("layer", codes.to(torch.int8), scales, down, up, offset if bias else None, transform))


def weight_of(linear):
    return linear.qweight, linear.wscales, linear.up, linear.packed_bias


def activation_of(linear, x, normed=False):
    norm = (torch.ops.svdq.inv_rms(x, 1e-6), 1 + 0.2 * normal(x.shape[1], seed=9)) if normed else (None, None)
    return x, linear.down, linear.inv_smooth, linear.rotation, linear.clip, *norm


cases = pytest.mark.parametrize(
    ("transform", "rank", "normed"),
    [(BARE, 16, False), (FULL, 0, False), (FULL, 16, True)],
    ids=["bare", "full", "norm"],
)


@cases
@pytest.mark.parametrize("m", [1, 20, 385])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_codes_in_a_byte_each_give_what_codes_of_4_bits_give(m, dtype, transform, rank, normed):
    linear, x = module(transform, rank), inputs(max(m, 2))[:m].to(dtype)
    activation = activation_of(linear, x, normed)
    codes, scales, t = torch.ops.svdq.quantize_lora_down(*activation)
    bytes_, byte_scales, byte_t = torch.ops.svdq.quantize_lora_down_e4m3(*activation, False)
    rows, k = bytes_.shape
    numbers = layout.unpack_matrix("fp8", bytes_, (rows, k)).view(E4M3).float()
    unpacked = layout.unpack_codes(codes, "codes").float()
    assert torch.equal(numbers[: len(unpacked)], unpacked) and not numbers[m:].any()
    groups = layout.unpack_matrix("token_scales", byte_scales, (rows, k // 64))
    assert torch.equal(groups[: len(unpacked)], layout.unpack_matrix("scales", scales, tuple(scales.shape)))
    assert torch.equal(layout.unpack_matrix("token_t", byte_t.sum(0), (rows, rank))[:m], t.sum(0)[:m])
    product = (*weight_of(linear), m, 40, torch.float32)
    y = torch.ops.svdq.w4_gemm_lora_e4m3(bytes_, byte_scales, byte_t, *product)
    assert torch.equal(y, torch.ops.svdq.w4a4_gemm_lora(codes, scales, t, *product))


@cases
@pytest.mark.parametrize("m", [1, 20, 385])
def test_values_of_8_bits_are_those_of_the_transformed_tokens(m, transform, rank, normed):
    linear, x = module(transform, rank), inputs(max(m, 2))[:m]
    activation = activation_of(linear, x, normed)
    bytes_, scales, t = torch.ops.svdq.quantize_lora_down_e4m3(*activation, True)
    if normed:
        x = activation[-1] * (x * activation[-2][:, None])
    wanted, wanted_scales = quantize_activation_e4m3(transform.apply(x))
    rows, k = bytes_.shape
    stored = layout.unpack_matrix("fp8", bytes_, (rows, k))
    assert torch.equal(stored[:m, :192], wanted.view(torch.uint8))
    assert not stored[m:].any() and not stored[:, 192:].any()
    assert torch.equal(scales[:m], wanted_scales) and not scales[m:].any()
    sums = layout.unpack_matrix("token_t", t.sum(0), (rows, rank))[:m]
    assert torch.equal(sums, x @ layer(rank=rank)[2].float())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transform", [BARE, FULL], ids=["bare", "full"])
def test_the_product_of_8_bit_values_is_the_dequantized_one(transform, bias):
    linear, x = module(transform, bias=bias), inputs(20)
    operands = torch.ops.svdq.quantize_lora_down_e4m3(*activation_of(linear, x), True)
    y = torch.ops.svdq.w4_gemm_lora_e4m3(*operands, *weight_of(linear), 20, 40, torch.float32)
    codes, scales, down, up, offset = layer()
    numbers, token_scales = quantize_activation_e4m3(transform.apply(x))
    wanted = numbers.to(D) * token_scales.to(D)[:, None] @ dequantized(codes, scales, D).t()
    wanted += x.to(D) @ down.to(D) @ up.to(D).t() + (offset.to(D) if bias else 0)
    assert relative_error(y, wanted) <= 1e-6  # float32 sums


def test_values_of_8_bits_do_not_know_of_the_clip():
    linear = module(FULL)
    activation = activation_of(linear, inputs(20))
    found = reference.quantize_lora_down_e4m3(*activation, True, 1, 32)
    wanted = reference.quantize_lora_down_e4m3(*activation[:4], 1.0, None, None, True, 1, 32)
    assert linear.clip == 0.85 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("values", [None, False, True], ids=["4 bits", "codes", "values"])
def test_a_tile_of_columns_meets_the_part_of_t_that_is_its_own(values):
    """As if proj_up had zeros beside it."""
    n, k, m = 256, 256, 20
    x, down = inputs(m, k), layout.pack_matrix("down", normal(k, 48, seed=1).half(), (k, 48))
    weight = (
        layout.pack_codes(torch.randint(-7, 8, (n, k), generator=rng(2), dtype=torch.int8)),
        (normal(k // 64, n, seed=3).abs() * 0.01).half(),
    )
    own, whole = normal(n, 16, seed=4).half(), torch.zeros(n, 48, dtype=torch.float16)
    whole[:128, 32:], whole[128:, 16:32] = own[:128], own[128:]
    first_rank = torch.tensor([32, 16], dtype=torch.int32)
    if values is None:
        quantize, gemm, kind = torch.ops.svdq.quantize_lora_down, torch.ops.svdq.w4a4_gemm_lora, ()
    else:
        quantize, gemm, kind = torch.ops.svdq.quantize_lora_down_e4m3, torch.ops.svdq.w4_gemm_lora_e4m3, (values,)
    operands = quantize(x, down, None, True, 1.0, None, None, *kind)
    for columns in (256, 130, 100):
        rest = (None, m, columns, torch.float32)
        up, whole_up = (layout.pack_matrix("lora_up", part) for part in (own, whole))
        y = gemm(*operands, *weight, up, *rest, first_rank)
        # sums of 16 products, or of 48 of which 32 are zeros
        assert relative_error(y, gemm(*operands, *weight, whole_up, *rest).to(D)) <= 1e-6


def test_all_of_t_is_in_its_first_share():
    linear, x = module(), inputs(20, 192)
    t = reference.quantize_lora_down_e4m3(*activation_of(linear, x), True, 3, 32)[2]
    assert t.shape == (3, 16, 32) and t[0].any() and not t[1:].any()
    assert hopper._shares(20, 48, True) == 6
