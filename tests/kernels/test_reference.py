"""The linear in plain torch against integer group sums, dequantized and added up in float64."""

import pytest
import torch

from svdq.kernels.reference import w4a4_linear
from svdq.rounding import ActivationTransform, quantize_activation

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
