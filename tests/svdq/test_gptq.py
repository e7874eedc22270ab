"""GPTQ against the plain algorithm: one column at a time, an explicit inverse Hessian, float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.gptq import coordinate_descent, gptq, inverse_factor, upper_cholesky
from svdq.grid import INT4_WEIGHT
from svdq.rounding import round_to_nearest


def rng(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=rng(seed))


def correlated_hessian(k, seed=0, tokens=1024):
    """Damped Σ x xᵀ of inputs with common factors and channels of different size, float64."""
    g = rng(seed)
    own, common, loads, sizes = (
        torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((tokens, k), (tokens, 8), (8, k), (k,))
    )
    x = (own + common @ loads) * torch.exp(0.5 * sizes)
    hessian = x.t() @ x
    return hessian + torch.eye(k, dtype=torch.float64) * (0.01 * hessian.diagonal().mean())


def factor_of(hessian):
    upper, positive = upper_cholesky(hessian)
    assert positive
    return inverse_factor(upper)


def scale_of_group(columns, importance, search):
    """(n, g) → (n,): the best fraction of absmax/7 by weighted squared error, the larger one on a tie. Float64."""
    absmax = np.abs(columns).max(1)
    best = best_error = None
    for percent in range(100, 59, -4) if search else (100,):
        scale = np.maximum((absmax * (percent / 100 / 7)).astype(np.float16).astype(np.float64), 2.0**-24)
        rounded = np.clip(np.rint(columns / scale[:, None]), -7, 7) * scale[:, None]
        error = ((rounded - columns) ** 2 * importance).sum(1)
        if best is None:
            best, best_error = scale, error
        else:
            better = error < best_error
            best, best_error = np.where(better, scale, best), np.where(better, error, best_error)
    return best


def column_by_column(target, hessian, group, search=True, importance=None):
    """Optimal brain surgery: a column's error moves on along its row of the inverse, which is then eliminated."""
    working, inverse = target.double().numpy().copy(), np.linalg.inv(hessian.double().numpy())
    n, k = working.shape
    weights = np.ones(k) if importance is None else importance.double().numpy()
    codes, scales = np.zeros((n, k)), np.zeros((n, k // group))
    for j in range(k):
        if j % group == 0:
            scales[:, j // group] = scale_of_group(working[:, j : j + group], weights[j : j + group], search)
        scale = scales[:, j // group]
        codes[:, j] = np.clip(np.rint(working[:, j] / scale), -7, 7)
        error = (working[:, j] - codes[:, j] * scale) / inverse[j, j]
        working[:, j + 1 :] -= np.outer(error, inverse[j, j + 1 :])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return torch.from_numpy(codes).to(torch.int8), torch.from_numpy(scales).half()


def error_in_metric(codes, scales, target, hessian, group):
    """tr((Q̂−T)H(Q̂−T)ᵀ) per row, float64."""
    difference = codes.double() * scales.double().repeat_interleave(group, 1) - target.double()
    return ((difference @ hessian.double()) * difference).sum(1)


@pytest.mark.parametrize(
    ("k", "group", "block"), [(256, 64, 128), (256, 64, 64), (256, 128, 64), (384, 192, 128), (384, 192, 64)]
)
def test_case_4_gptq_equals_the_float64_column_loop_code_for_code(k, group, block):
    target, hessian = normal(32, k), correlated_hessian(k)
    target[5], target[7, 40] = 0, 20.0  # a zero row and an outlier
    importance = hessian.diagonal().float()
    grid = INT4_WEIGHT.with_group(group)
    codes, scales, _ = gptq(target, factor_of(hessian), grid, importance=importance, block=block)
    wanted_codes, wanted_scales = column_by_column(target, hessian, group, importance=importance)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scales, wanted_scales)


@pytest.mark.parametrize("block", [64, 128])
def test_gptq_with_absmax_scales_equals_the_float64_column_loop(block):
    target, hessian = normal(32, 256, seed=1), correlated_hessian(256, seed=1)
    codes, scales, _ = gptq(target, factor_of(hessian), INT4_WEIGHT, search=False, block=block)
    wanted_codes, wanted_scales = column_by_column(target, hessian, 64, search=False)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scales, wanted_scales)


@settings(deadline=None, derandomize=True, max_examples=10)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([64, 128]))
def test_with_a_diagonal_hessian_gptq_rounds_to_nearest(seed, search, group):
    target = normal(7, 256, seed=seed)
    hessian = torch.diag(torch.rand(256, generator=rng(seed), dtype=torch.float64) + 0.1)
    importance = hessian.diagonal().float()
    grid = INT4_WEIGHT.with_group(group)
    codes, scales, _ = gptq(target, factor_of(hessian), grid, search=search, importance=importance)
    wanted_codes, wanted_scales = round_to_nearest(target, grid, search=search, importance=importance)
    assert torch.equal(codes, wanted_codes)
    assert torch.equal(scales, wanted_scales)


@settings(deadline=None, derandomize=True, max_examples=10)
@given(st.integers(0, 10**6))
def test_permuting_rows_permutes_codes_and_scales(seed):
    # column 0 owes to columns of its own block only, element by element: no GEMM whose order depends on a row's place
    target = torch.randint(-9, 10, (16, 128), generator=rng(seed)).float()
    hessian = torch.eye(128, dtype=torch.float64)
    hessian[0, 1:9] = hessian[1:9, 0] = 0.0625
    factor = factor_of(hessian)
    order = torch.randperm(16, generator=rng(seed))
    codes, scales, _ = gptq(target, factor, INT4_WEIGHT)
    moved_codes, moved_scales, _ = gptq(target[order], factor, INT4_WEIGHT)
    assert torch.equal(moved_codes, codes[order])
    assert torch.equal(moved_scales, scales[order])


def test_a_correlated_hessian_makes_gptq_better_than_rounding_to_nearest():
    target, hessian = normal(48, 192, seed=2), correlated_hessian(192, seed=2)
    importance = hessian.diagonal().float()
    found = gptq(target, factor_of(hessian), INT4_WEIGHT, importance=importance)
    nearest = round_to_nearest(target, INT4_WEIGHT, search=True, importance=importance)
    error, plain = (error_in_metric(*pair, target, hessian, 64).sum() for pair in (found[:2], nearest))
    assert error < 0.8 * plain  # eight common factors: most of the rounding error can be moved out of their way


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("group", [64, 192])
def test_the_returned_loss_is_the_objective_in_the_metric(group, block):
    target, hessian = normal(48, 192, seed=2), correlated_hessian(192, seed=2)
    codes, scales, loss = gptq(target, factor_of(hessian), INT4_WEIGHT.with_group(group), block=block)
    wanted = error_in_metric(codes, scales, target, hessian, group)
    assert loss.tolist() == pytest.approx(wanted.tolist(), rel=1e-5)  # float32 errors of a column


def test_a_zero_row_gets_codes_0_and_positive_scales():
    target = normal(4, 128)
    target[2] = 0
    codes, scales, _ = gptq(target, factor_of(correlated_hessian(128)), INT4_WEIGHT)
    assert not codes[2].any()
    assert (scales > 0).all()


def test_no_code_is_minus_8():
    codes, *_ = gptq(-normal(16, 128).abs(), factor_of(correlated_hessian(128)), INT4_WEIGHT)
    assert codes.min() == -7


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gptq_does_not_change_its_inputs(rows, dtype):
    hessian = correlated_hessian(128)
    target, factor, importance = normal(rows, 128).to(dtype), factor_of(hessian).to(dtype), hessian.diagonal().to(dtype)
    importance = importance.float()
    kept = target.clone(), factor.clone(), importance.clone()
    gptq(target, factor, INT4_WEIGHT, importance=importance)
    assert torch.equal(target, kept[0])
    assert torch.equal(factor, kept[1])
    assert torch.equal(importance, kept[2])


def test_the_inverse_factor_is_upper_and_gives_the_inverse():
    hessian = correlated_hessian(96)
    factor = factor_of(hessian)
    assert torch.equal(factor, factor.triu())
    wanted = torch.linalg.inv(hessian)
    assert (factor.t() @ factor - wanted).norm() <= 1e-9 * wanted.norm()  # condition about 1e4 in float64


def test_upper_cholesky_says_when_a_matrix_is_indefinite():
    assert upper_cholesky(torch.diag(torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)))[1] is False


def test_upper_cholesky_does_not_change_its_input():
    hessian = correlated_hessian(64)
    kept = hessian.clone()
    upper_cholesky(hessian)
    assert torch.equal(hessian, kept)


# ------------------------------------------------------------------------------------------------ coordinate descent


@settings(deadline=None, derandomize=True, max_examples=10)
@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from([64, 192]))
def test_coordinate_descent_never_raises_the_error_of_a_row(seed, sweeps, group):
    target, hessian = normal(12, 192, seed=seed), correlated_hessian(192, seed=seed, tokens=256)
    grid = INT4_WEIGHT.with_group(group)
    codes, scales, _ = gptq(target, factor_of(hessian), grid)
    before = error_in_metric(codes, scales, target, hessian, group)
    swept = coordinate_descent(codes, scales, target, hessian, grid, sweeps)
    after = error_in_metric(swept, scales, target, hessian, group)
    assert (after <= before * (1 + 1e-5)).all()  # float32 gradients may take a step that is a tie


def test_coordinate_descent_lowers_the_error_of_rounding_to_nearest():
    target, hessian = normal(24, 192, seed=3), correlated_hessian(192, seed=3)
    codes, scales = round_to_nearest(target, INT4_WEIGHT)
    swept = coordinate_descent(codes, scales, target, hessian, INT4_WEIGHT, 2)
    before, after = (error_in_metric(c, scales, target, hessian, 64).sum() for c in (codes, swept))
    assert after < 0.8 * before  # what GPTQ gains on this Hessian, reached by another road


def test_a_sweep_equals_a_scalar_loop_that_moves_one_code_at_a_time():
    target, hessian = normal(6, 128, seed=4), correlated_hessian(128, seed=4)
    codes, scales = round_to_nearest(target, INT4_WEIGHT)
    swept = coordinate_descent(codes, scales, target, hessian, INT4_WEIGHT, 1)
    steps, wanted = scales.double().numpy().repeat(64, 1), codes.double().numpy().copy()
    metric, goal = hessian.numpy(), target.double().numpy()
    for row in range(6):
        for j in range(128):
            gradient = (wanted[row] * steps[row] - goal[row]) @ metric[:, j]
            value = wanted[row, j] - gradient / metric[j, j] / steps[row, j]
            wanted[row, j] = np.clip(np.rint(value), -7, 7)
    assert torch.equal(swept, torch.from_numpy(wanted).to(torch.int8))


def test_after_enough_sweeps_no_single_code_can_be_improved():
    target, hessian = normal(4, 64, seed=5), correlated_hessian(64, seed=5)
    codes, scales = round_to_nearest(target, INT4_WEIGHT)
    swept = coordinate_descent(codes, scales, target, hessian, INT4_WEIGHT, 30)
    reached = error_in_metric(swept, scales, target, hessian, 64)
    for j in range(64):
        for step in (-1, 1):
            moved = swept.clone()
            moved[:, j] = (moved[:, j] + step).clamp(-7, 7)
            assert (error_in_metric(moved, scales, target, hessian, 64) >= reached * (1 - 1e-5)).all()


def test_coordinate_descent_does_not_change_its_inputs():
    target, hessian = normal(1, 128), correlated_hessian(128)
    codes, scales = round_to_nearest(target, INT4_WEIGHT)
    inputs = (codes, scales, target, hessian)
    kept = [t.clone() for t in inputs]
    coordinate_descent(codes, scales, target, hessian, INT4_WEIGHT, 2)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


def test_coordinate_descent_with_float32_inputs_of_one_row_does_not_change_them():
    target, hessian = normal(1, 128), correlated_hessian(128).float()
    codes, scales = round_to_nearest(target, INT4_WEIGHT)
    inputs = (codes, scales, target, hessian)
    kept = [t.clone() for t in inputs]
    coordinate_descent(codes, scales, target, hessian, INT4_WEIGHT, 2)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
