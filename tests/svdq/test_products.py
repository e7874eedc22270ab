"""The large products: gram on a CPU, and the float16 pieces that a GPU multiplies."""

import pytest
import torch

from svdq.products import gram, pieces

D = torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


@pytest.mark.parametrize("shape", [(5, 192), (300, 64), (1, 4), (7, 3), (9, 1), (0, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gram_is_the_matrix_transposed_times_itself(shape, dtype):
    matrix = normal(*shape).to(dtype)
    wanted = torch.zeros(shape[1], shape[1], dtype=D)
    for row in matrix.double():
        wanted += torch.outer(row, row)
    bound = 1e-6 if dtype == torch.float32 else 1e-14  # rounding of sums of up to 300 products
    assert gram(matrix).dtype == dtype
    assert (gram(matrix).double() - wanted).norm() <= bound * wanted.norm()


def test_gram_is_exactly_symmetric():
    square = gram(normal(50, 192).float())
    # diagonal blocks come from one product each; mirrored ones are copies
    edge = 48
    for i in range(4):
        for j in range(i):
            a = square[i * edge : (i + 1) * edge, j * edge : (j + 1) * edge]
            assert torch.equal(a, square[j * edge : (j + 1) * edge, i * edge : (i + 1) * edge].t())


def test_gram_does_not_change_its_input():
    matrix = normal(5, 8)
    kept = matrix.clone()
    gram(matrix)
    assert torch.equal(matrix, kept)


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 65504.0, 2.0**-126])
def test_two_pieces_hold_22_bits_of_an_entry_whatever_the_size_of_the_matrix(size):
    matrix = (normal(64, 48) * torch.logspace(0, -12, 48, dtype=D) * size).float()
    first, second, unit = pieces(matrix)
    assert first.dtype == second.dtype == torch.float16
    again = (first.to(D) + second.to(D)) * unit.to(D)
    allowed = 2.0**-22 * matrix.abs().to(D) + 2.0**-38 * matrix.abs().max().to(D)
    assert ((again - matrix.to(D)).abs() <= allowed).all()


def test_a_zero_matrix_has_zero_pieces():
    first, second, unit = pieces(torch.zeros(3, 4))
    assert not first.any() and not second.any() and torch.isfinite(unit)


def test_pieces_do_not_change_the_matrix():
    matrix = normal(5, 8).float()
    kept = matrix.clone()
    pieces(matrix)
    assert torch.equal(matrix, kept)
