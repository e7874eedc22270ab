"""The activation quantizer against a scalar loop in float32, the rotation against the Hadamard matrix, weight scales
against a search in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.grid import INT4_WEIGHT
from svdq.rounding import (
    ActivationTransform,
    fake_quantize_activation,
    fit_group,
    quantize_activation,
    rotate,
    round_to_nearest,
)

F = np.float32
CLIPS = [1.0, 0.85]


def rng(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64).to(dtype)


def outlier_tokens(tokens, channels, seed=0):
    """Signed, with channels 30 times as large, a zero token and a zero group."""
    x = normal(tokens, channels, seed=seed)
    x[:, 5::37] *= 30
    x[1] = 0
    x[0, :64] = 0
    return x


def hadamard_64():
    """Sylvester's matrix by its closed form: entry (i, j) is (−1)^popcount(i & j) / 8."""
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]
    return torch.tensor(signs, dtype=torch.float64) / 8


def scalar_quantizer(row, smooth, rotation, clip):
    """kernels.md's recipe, one float32 operation after another. row: 64·G numpy float32 → codes, scales."""
    codes, scales = [], []
    with np.errstate(all="ignore"):
        inverse_smooth = None if smooth is None else [F(1) / F(s) for s in smooth]
        for start in range(0, len(row), 64):
            values = [F(v) for v in row[start : start + 64]]
            if inverse_smooth is not None:
                values = [v * inverse_smooth[start + i] for i, v in enumerate(values)]
            if rotation:
                for stage in range(6):
                    h = 1 << stage
                    for i in range(64):
                        if not i & h:
                            values[i], values[i + h] = values[i] + values[i + h], values[i] - values[i + h]
                values = [v * F(0.125) for v in values]
            absmax = F(0)
            for v in values:
                absmax = max(absmax, abs(v))
            if clip != 1.0:
                absmax = F(clip) * absmax
            scale = absmax / F(7)
            inverse = F(1) / scale if scale > 0 else F(0)
            codes += [int(min(max(np.rint(v * inverse), -8), 7)) for v in values]
            scales.append(scale)
    return codes, scales


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_codes_and_scales_equal_the_scalar_float32_loop_bit_for_bit(smoothed, rotation, clip):
    x = outlier_tokens(4, 192)
    smooth = normal(192, seed=3).abs() + 0.3 if smoothed else None
    codes, scales = ActivationTransform(smooth, rotation, clip).quantize(x)
    wanted = [scalar_quantizer(row, None if smooth is None else smooth.numpy(), rotation, clip) for row in x.numpy()]
    assert torch.equal(codes, torch.tensor([c for c, _ in wanted], dtype=torch.int8))
    assert torch.equal(scales, torch.from_numpy(np.array([s for _, s in wanted], dtype=np.float32)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_widened_before_anything_else(dtype):
    x = outlier_tokens(3, 64).to(dtype)
    codes, scales = ActivationTransform(None, True, 0.85).quantize(x)
    wanted = [scalar_quantizer(row, None, True, 0.85) for row in x.float().numpy()]
    assert codes.tolist() == [c for c, _ in wanted]
    assert torch.equal(scales, torch.from_numpy(np.array([s for _, s in wanted], dtype=np.float32)))


def test_codes_round_ties_to_even():
    x = torch.zeros(1, 64)
    x[0, :5] = torch.tensor([7.0, 0.5, 1.5, 2.5, -1.5])  # scale is exactly 1
    codes, scales = quantize_activation(x)
    assert scales.item() == 1.0
    assert codes[0, :5].tolist() == [7, 0, 2, 2, -2]


def test_without_a_clip_no_code_is_minus_8():
    codes, _ = quantize_activation(-outlier_tokens(64, 192).abs())
    assert codes.min() == -7


def test_with_a_clip_the_most_negative_value_gets_code_minus_8():
    x = torch.zeros(1, 64)
    x[0, 3], x[0, 9] = -10.0, 10.0
    codes, _ = quantize_activation(x, 0.8)
    assert codes[0, 3] == -8
    assert codes[0, 9] == 7


def test_a_group_of_zeros_has_scale_0_and_codes_0():
    x = normal(2, 192)
    x[1, 64:128] = 0
    codes, scales = quantize_activation(x, 0.85)
    assert scales[1, 1] == 0
    assert not codes[1, 64:128].any()
    assert (scales.flatten()[[0, 1, 2, 3, 5]] > 0).all()


def test_a_nan_makes_its_groups_scale_nan_and_its_codes_0():
    x = normal(2, 128)
    x[0, 70] = float("nan")
    codes, scales = quantize_activation(x)
    assert scales.isnan().tolist() == [[False, True], [False, False]]
    assert not codes[0, 64:].any()


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_an_inf_makes_its_groups_scale_inf_and_its_codes_0(value):
    x = normal(2, 128)
    x[1, 3] = value
    codes, scales = quantize_activation(x, 0.85)
    assert scales.isinf().tolist() == [[False, False], [True, False]]
    assert not codes[1, :64].any()


def test_a_nan_in_one_group_leaves_every_other_group_alone():
    x = normal(3, 192)
    poisoned = x.clone()
    poisoned[1, 64:128] = float("nan")
    clean_codes, clean_scales = quantize_activation(x)
    codes, scales = quantize_activation(poisoned)
    clean_codes[1, 64:128], clean_scales[1, 1] = 0, 0
    assert torch.equal(codes, clean_codes)
    assert torch.equal(scales.nan_to_num(0.0), clean_scales)


@pytest.mark.parametrize("clip", CLIPS)
def test_fake_quantization_is_code_times_scale(clip):
    x = outlier_tokens(3, 128)
    codes, scales = quantize_activation(x, clip)
    wanted = [[float(F(int(codes[t, k])) * F(scales[t, k // 64])) for k in range(128)] for t in range(3)]
    assert fake_quantize_activation(x, clip).tolist() == wanted


def test_leading_dimensions_are_kept():
    x = normal(2, 3, 128)
    codes, scales = ActivationTransform(None, True).quantize(x)
    flat_codes, flat_scales = ActivationTransform(None, True).quantize(x.reshape(6, 128))
    assert torch.equal(codes, flat_codes.reshape(2, 3, 128))
    assert torch.equal(scales, flat_scales.reshape(2, 3, 2))


# ------------------------------------------------------------------------------------------------ rotation


def test_the_rotation_is_the_hadamard_matrix():
    x = outlier_tokens(5, 192).double()
    wanted = (x.reshape(-1, 64) @ hadamard_64()).reshape(x.shape)
    assert (rotate(x) - wanted).norm() <= 1e-14 * wanted.norm()  # float64: six adds deep


def test_the_rotation_in_float32_is_the_hadamard_matrix_to_1e_6():
    x = outlier_tokens(5, 192)
    wanted = (x.double().reshape(-1, 64) @ hadamard_64()).reshape(x.shape)
    assert (rotate(x) - wanted).norm() <= 1e-6 * wanted.norm()  # six float32 roundings of 6e-8 each


def test_the_rotation_is_its_own_inverse():
    x = outlier_tokens(5, 192)
    assert (rotate(rotate(x)) - x).norm() <= 1e-6 * x.norm()  # twelve float32 roundings


def test_more_groups_than_one_chunk_are_rotated_alike():
    x = normal(1030, 64)
    alone = torch.stack([rotate(row.clone()) for row in x])
    assert torch.equal(rotate(x), alone)


def test_a_strided_view_is_rotated_as_what_it_shows():
    x = normal(128, 6)
    assert torch.equal(rotate(x.t()), rotate(x.t().contiguous()))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 128), (513, 64), (9, 64 * 57)])
def test_the_rotation_does_not_change_its_input(shape):
    x = normal(*shape)  # (513, 64) and (9, 3648) leave one group for the last chunk of 512
    before = x.clone()
    rotate(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rotating_a_weight_of_one_group_does_not_change_it(dtype):
    weight = normal(1, 64, dtype=dtype)
    before = weight.clone()
    ActivationTransform(None, True).weight(weight)
    assert torch.equal(weight, before)


def test_quantizing_one_token_of_one_group_does_not_change_it():
    x = normal(1, 64)
    before = x.clone()
    ActivationTransform(None, True, 0.85).quantize(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("tokens", [1, 4])
def test_quantizing_without_a_transform_does_not_change_the_input(tokens):
    x = outlier_tokens(4, 64)[:tokens].clone()
    before = x.clone()
    ActivationTransform(None, False, 0.85).quantize(x)
    assert torch.equal(x, before)


# ------------------------------------------------------------------------------------------------ transform


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_the_transformed_weight_on_the_transformed_input_gives_the_same_output(smoothed, rotation):
    x, weight = outlier_tokens(7, 192), normal(33, 192, seed=1)
    # powers of two, so that float32 division by them is exact and only the products' order is left
    smooth = 2.0 ** torch.randint(-3, 4, (192,), generator=rng(2)).float() if smoothed else None
    transform = ActivationTransform(smooth, rotation)
    x64 = x.double() if smooth is None else x.double() / smooth.double()
    x64 = rotate(x64) if rotation else x64
    y = x64 @ transform.weight(weight.double()).t()
    wanted = x.double() @ weight.double().t()
    assert (y - wanted).norm() <= 1e-12 * wanted.norm()  # float64 rounding of sums of 192


@pytest.mark.parametrize("rotation", [False, True])
def test_the_transform_keeps_the_output_to_float32_rounding(rotation):
    x, weight = outlier_tokens(7, 192), normal(33, 192, seed=1)
    transform = ActivationTransform(normal(192, seed=2).abs() + 0.1, rotation)
    y = transform.apply(x).double() @ transform.weight(weight).double().t()
    wanted = x.double() @ weight.double().t()
    assert (y - wanted).norm() <= 1e-6 * wanted.norm()  # about eight float32 roundings on each side


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_down_from_raw_undoes_down_to_raw(smoothed, rotation):
    down = normal(192, 16, dtype=torch.float64)
    transform = ActivationTransform(normal(192, seed=2).abs() + 0.1 if smoothed else None, rotation)
    again = transform.down_from_raw(transform.down_to_raw(down))
    assert (again - down).norm() <= 1e-14 * down.norm()  # float64 rounding


@pytest.mark.parametrize("rotation", [False, True])
def test_the_raw_down_factor_gives_on_raw_inputs_what_the_other_gives_on_transformed_ones(rotation):
    x, down = outlier_tokens(7, 192).double(), normal(192, 16, dtype=torch.float64)
    smooth = normal(192, seed=2).abs() + 0.1
    transformed = x / smooth.double()
    if rotation:
        transformed = (transformed.reshape(-1, 64) @ hadamard_64()).reshape(x.shape)
    wanted = transformed @ down
    y = x @ ActivationTransform(smooth, rotation).down_to_raw(down)
    assert (y - wanted).norm() <= 1e-12 * wanted.norm()  # float64 rounding of sums of 192


# ------------------------------------------------------------------------------------------------ weight scales


def weighted_error(weight, scale, importance):
    """Σ importance·(w − ŵ)², per row, in float64."""
    codes = (weight.double() / scale.double()[:, None]).round().clamp(-7, 7)
    return ((codes * scale.double()[:, None] - weight.double()).square() * importance.double()).sum(1)


def test_without_a_search_a_scale_is_absmax_over_7_as_float16():
    weight = normal(33, 64)
    wanted = torch.tensor([float(np.float16(max(abs(v) for v in row) / 7)) for row in weight.tolist()])
    assert torch.equal(fit_group(weight, INT4_WEIGHT, search=False)[0], wanted)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_searched_scale_is_the_best_of_eleven_fractions(weighted):
    weight = normal(33, 64)
    weight[3, 7] = 40.0  # an outlier: a small fraction would pay if it were not for this value
    importance = normal(64, seed=1).square() + 1e-3 if weighted else torch.ones(64)
    scales = fit_group(weight, INT4_WEIGHT, importance=importance if weighted else None)[0]
    candidates = [(weight.abs().amax(1) * (f / 100 / 7)).half().float() for f in range(60, 101, 4)]
    errors = torch.stack([weighted_error(weight, c, importance) for c in candidates])
    reached = weighted_error(weight, scales, importance)
    assert (reached <= errors.amin(0) * (1 + 1e-5)).all()  # float32 sums may swap candidates that are 1e-6 apart


def test_a_search_has_a_smaller_weighted_error_than_absmax():
    weight, importance = normal(33, 64), normal(64, seed=1).square()
    searched = weighted_error(weight, fit_group(weight, INT4_WEIGHT, importance=importance)[0], importance)
    absmax = weighted_error(weight, fit_group(weight, INT4_WEIGHT, search=False)[0], importance)
    assert (searched <= absmax).all()
    # Gaussian weights: the best clip of a 15-level grid is well below the largest of 64 values
    assert searched.sum() < 0.95 * absmax.sum()


def test_the_importance_decides_which_columns_the_scale_serves():
    weight = normal(8, 64)
    weight[:, 0] = 30.0  # alone it would make the others' step coarse
    ignored = torch.ones(64)
    ignored[0] = 0.0
    found = fit_group(weight, INT4_WEIGHT, importance=ignored)[0]
    assert found.tolist() == [float(np.float16(0.60 * 30 / 7))] * 8  # the smallest fraction there is


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-8, -5.9e-8, 1e-30, 1e-44])
def test_case_23_tiny_and_zero_groups_get_a_finite_positive_float16_scale(value, search):
    weight = normal(3, 64)
    weight[1] = value
    scales = fit_group(weight, INT4_WEIGHT, search=search, importance=torch.ones(64) if search else None)[0]
    assert (scales.half() > 0).all()
    assert torch.isfinite(scales.half()).all()


@pytest.mark.parametrize("search", [False, True])
def test_tiny_weights_get_codes_0(search):
    weight = normal(3, 128)
    weight[1], weight[2, 64:] = 2e-8, -2.5e-8  # below half of 2⁻²⁴, the smallest scale
    codes, scales = round_to_nearest(weight, INT4_WEIGHT, search=search)
    assert not codes[1].any()
    assert not codes[2, 64:].any()
    assert codes[2, :64].any()
    assert (scales > 0).all()


def test_a_group_whose_importance_is_all_zero_keeps_a_usable_scale():
    weight = normal(4, 64)
    scales = fit_group(weight, INT4_WEIGHT, importance=torch.zeros(64))[0]
    absmax = weight.abs().amax(1) / 7
    assert (scales >= 0.59 * absmax).all()  # still a fraction from 0.60 to 1.00, float16 rounding aside
    assert (scales <= 1.01 * absmax).all()


def test_rounding_to_nearest_leaves_half_a_step_at_most_without_a_search():
    weight = normal(17, 192)
    codes, scales = round_to_nearest(weight, INT4_WEIGHT)
    assert scales.dtype == torch.float16
    steps = scales.double().repeat_interleave(64, 1)
    # absmax/7 rounded down to float16 may clip the largest value by 7 · 2⁻¹¹ of a step: below half a step
    assert ((codes.double() * steps - weight.double()).abs() <= (0.5 + 1e-6) * steps).all()


def test_rounding_to_nearest_in_wide_groups_uses_each_groups_importance():
    weight, importance = normal(5, 384), normal(384, seed=1).square()
    grid = INT4_WEIGHT.with_group(192)
    _, scales = round_to_nearest(weight, grid, search=True, importance=importance)
    for g in range(2):
        part = slice(192 * g, 192 * (g + 1))
        alone = fit_group(weight[:, part].contiguous(), grid, importance=importance[part])[0]
        assert torch.equal(scales[:, g].float(), alone)


@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.integers(0, 10**6), st.booleans())
def test_permuting_rows_permutes_codes_and_scales(seed, search):
    weight = normal(9, 128, seed=seed)
    order = torch.randperm(9, generator=rng(seed))
    codes, scales = round_to_nearest(weight, INT4_WEIGHT, search=search)
    moved_codes, moved_scales = round_to_nearest(weight[order], INT4_WEIGHT, search=search)
    assert torch.equal(moved_codes, codes[order])
    assert torch.equal(moved_scales, scales[order])


@pytest.mark.parametrize("rows", [1, 5])
def test_rounding_does_not_change_the_weight(rows):
    weight, importance = normal(rows, 128), normal(128, seed=1).square()
    kept = weight.clone(), importance.clone()
    round_to_nearest(weight, INT4_WEIGHT, search=True, importance=importance)
    assert torch.equal(weight, kept[0])
    assert torch.equal(importance, kept[1])
