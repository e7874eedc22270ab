"""Low-rank factors against the full SVD of torch.linalg in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.lowrank import factors, low_rank, top_left_vectors

METHODS = ["exact", "krylov"]


def rng(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=rng(seed), dtype=torch.float64).to(dtype)


def matrix_with(spectrum, n, k, seed=0):
    """(n, k) float32 with these singular values."""
    left = torch.linalg.qr(normal(n, len(spectrum), seed=seed, dtype=torch.float64))[0]
    right = torch.linalg.qr(normal(k, len(spectrum), seed=seed + 1, dtype=torch.float64))[0]
    return (left * torch.tensor(spectrum, dtype=torch.float64) @ right.t()).float()


def orthonormality_error(vectors):
    return (vectors.double().t() @ vectors.double() - torch.eye(vectors.shape[1], dtype=torch.float64)).norm()


def residual(matrix, up, down):
    return (matrix.double() - up.double() @ down.double().t()).norm()


def best_residual(matrix, rank):
    return torch.linalg.svdvals(matrix.double())[rank:].norm()


@pytest.mark.parametrize("shape", [(120, 210), (210, 120), (129, 115)])
def test_krylov_captures_the_energy_of_the_exact_vectors_on_a_flat_spectrum(shape):
    matrix = normal(*shape)
    captured = (top_left_vectors(matrix, 8, "krylov").t() @ matrix).double().square().sum()
    wanted = torch.linalg.svdvals(matrix.double())[:8].square().sum()
    # Gaussian matrices have no gap at all: the worst case. Six steps miss well under 1 % of the top 8
    assert 0.99 * wanted <= captured <= (1 + 1e-5) * wanted


def test_krylov_reaches_the_optimum_to_float32_rounding_where_the_spectrum_falls():
    matrix = matrix_with([0.95**i for i in range(120)], 130, 120)
    up, down = low_rank(matrix, 8, method="krylov")
    assert residual(matrix, up, down) <= (1 + 1e-5) * best_residual(matrix, 8)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(120, 150), (150, 120)])
def test_vectors_are_orthonormal(method, shape):
    vectors = top_left_vectors(normal(*shape), 8, method)
    assert vectors.shape == (shape[0], 8)
    assert orthonormality_error(vectors) <= 1e-5  # float32


@pytest.mark.parametrize("method", METHODS)
def test_vectors_come_by_falling_singular_value(method):
    matrix = matrix_with([0.8**i for i in range(60)], 130, 120)
    energies = (top_left_vectors(matrix, 8, method).t() @ matrix).norm(dim=1)
    wanted = torch.tensor([0.8**i for i in range(8)])
    assert (energies - wanted).norm() <= 1e-4 * wanted.norm()  # float32; a swap of two would make 10 %


@pytest.mark.parametrize("true_rank", [0, 1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_vectors_of_a_matrix_of_lower_rank_are_orthonormal(method, true_rank):
    matrix = matrix_with([float(i + 1) for i in range(true_rank)], 130, 120) if true_rank else torch.zeros(130, 120)
    assert orthonormality_error(top_left_vectors(matrix, 8, method)) <= 1e-5  # float32


@pytest.mark.parametrize("true_rank", [1, 3, 7])
@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_of_lower_rank_is_captured_whole(method, true_rank):
    matrix = matrix_with([float(i + 1) for i in range(true_rank)], 130, 120)
    assert residual(matrix, *low_rank(matrix, 8, method=method)) <= 1e-5 * matrix.norm()  # float32


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_with_a_few_nonzero_rows_is_captured_whole(method):
    matrix = torch.zeros(130, 120)
    matrix[[3, 60, 127]] = normal(3, 120)
    assert residual(matrix, *low_rank(matrix, 8, method=method)) <= 1e-5 * matrix.norm()  # float32


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_with_a_few_nonzero_elements_is_captured_whole(method):
    matrix = torch.zeros(130, 120)
    matrix[0, 0], matrix[1, 1], matrix[2, 2] = 1.0, -2.0, 3.0
    assert residual(matrix, *low_rank(matrix, 8, method=method)) <= 1e-5 * matrix.norm()  # float32


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(24, 70), (70, 24)])
def test_at_full_rank_nothing_is_left(method, shape):
    matrix = normal(*shape)
    assert residual(matrix, *low_rank(matrix, 24, method=method)) <= 1e-5 * matrix.norm()  # float32


@settings(deadline=None, max_examples=15)
@given(st.integers(2, 20), st.integers(2, 20), st.integers(1, 20), st.integers(0, 10**6))
def test_the_plain_approximation_is_as_good_as_the_truncated_svd(n, k, rank, seed):
    matrix, rank = normal(n, k, seed=seed), min(rank, n, k)
    # float32 leaves a few 1e-7 of the whole where the optimum is 0
    assert residual(matrix, *low_rank(matrix, rank)) <= best_residual(matrix, rank) * (1 + 1e-5) + 1e-5 * matrix.norm()


@pytest.mark.parametrize("method", METHODS)
def test_the_weighted_approximation_is_the_best_in_its_metric(method):
    matrix = normal(40, 48)
    metric = torch.linalg.cholesky(normal(200, 48, seed=1).t() @ normal(200, 48, seed=1) + torch.eye(48))
    up, down = low_rank(matrix, 8, matrix @ metric, "exact" if method == "exact" else "auto")
    reached = ((matrix.double() - up.double() @ down.double().t()) @ metric.double()).norm()
    # Eckart–Young for M·C: the truncated SVD of M·C, un-whitened, is the minimiser
    assert reached <= (1 + 1e-5) * best_residual(matrix.double() @ metric.double(), 8)


def test_one_step_from_nearby_vectors_is_as_good_as_six_from_none():
    matrix = normal(400, 300) * 0.98 ** torch.arange(300)  # a flat spectrum
    moved = matrix + 0.05 * matrix.norm() / 300 * normal(400, 300, seed=1)
    start = top_left_vectors(matrix, 16) * torch.linspace(3, 0.1, 16)  # directions count, not sizes
    found, cold = (moved - left @ (left.t() @ moved) for left in
                   (top_left_vectors(moved, 16, start=start), top_left_vectors(moved, 16)))  # fmt: skip
    assert found.norm() <= best_residual(moved.double(), 16) * (1 + 1e-4)
    assert found.norm() <= cold.norm() * (1 + 1e-5)


def test_rank_0_gives_empty_factors():
    up, down = low_rank(normal(6, 9), 0)
    assert up.shape == (6, 0)
    assert down.shape == (9, 0)
    assert top_left_vectors(normal(6, 9), 0).shape == (6, 0)


def test_corresponding_columns_of_the_factors_have_equal_norms():
    up, down = low_rank(matrix_with([10.0, 3.0, 0.1, 0.01], 30, 50), 4)
    assert (up.norm(dim=0) - down.norm(dim=0)).norm() <= 1e-5 * up.norm()  # float32


def test_factors_of_given_vectors_project_onto_them():
    matrix, left = normal(20, 30), torch.linalg.qr(normal(20, 3, seed=1))[0]
    up, down = factors(matrix, left)
    wanted = left.double() @ (left.double().t() @ matrix.double())
    assert (up.double() @ down.double().t() - wanted).norm() <= 1e-6 * wanted.norm()  # float32


def test_factors_in_a_metric_are_those_of_the_matrix_before_it():
    matrix, left = normal(20, 30).double(), torch.linalg.qr(normal(20, 3, seed=1).double())[0]
    metric = torch.linalg.cholesky((normal(200, 30, seed=2).t() @ normal(200, 30, seed=2)).double())
    up, down = factors(matrix @ metric, left, metric)
    wanted = left @ (left.t() @ matrix)
    assert (up @ down.t() - wanted).norm() <= 1e-12 * wanted.norm()  # float64
    assert (up.norm(dim=0) - down.norm(dim=0)).norm() <= 1e-12 * up.norm()


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_matrix_gives_finite_factors_whose_product_is_zero(method):
    up, down = low_rank(torch.zeros(130, 120), 4, method=method)
    assert torch.isfinite(up).all()
    assert not (up @ down.t()).any()


@pytest.mark.parametrize("method", METHODS)
def test_the_same_call_gives_the_same_bits(method):
    matrix = normal(130, 120)
    assert torch.equal(top_left_vectors(matrix, 8, method), top_left_vectors(matrix.clone(), 8, method))


def test_the_callers_random_state_is_left_alone():
    seed, state = torch.initial_seed(), torch.get_rng_state()
    top_left_vectors(normal(130, 120), 8, "krylov")
    assert torch.initial_seed() == seed
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", METHODS)
def test_the_matrix_is_not_changed(method):
    matrix = normal(130, 120)
    kept = matrix.clone()
    low_rank(matrix, 4, method=method)
    assert torch.equal(matrix, kept)


def test_auto_is_exact_on_small_matrices_and_krylov_on_large_ones():
    small, large = normal(60, 300), normal(264, 260)
    assert torch.equal(top_left_vectors(small, 8), top_left_vectors(small, 8, "exact"))
    assert torch.equal(top_left_vectors(large, 8), top_left_vectors(large, 8, "krylov"))
