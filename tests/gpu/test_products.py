"""float32 products in float16 pieces on tensor cores, against float64."""

import pytest
import torch
from oracle import DEVICE, ON_GPU, READY, normal

from svdq import products
from svdq.products import gram, matmul, product_of_pieces

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (READY and ON_GPU), reason="no CUDA device")]


def error(found, wanted, scale):
    """Largest error over |a|·|b|."""
    return ((found.double() - wanted).abs() / scale.clamp_min(1e-300)).max().item()


def allowed(terms):
    """16 terms are added at a time, and what is cut off is below 2⁻²² of the sum so far."""
    return 2.0**-20 + terms / 16 * 2.0**-22


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
@pytest.mark.parametrize(("m", "k", "n"), [(576, 1536, 576), (4096, 1024, 4096), (1, 64, 7), (100, 14336, 130)])
def test_a_product_loses_what_tensor_cores_cut_off_its_sums_and_no_more(m, k, n, size):
    a, b = normal(m, k, seed=1).to(DEVICE) * size, normal(k, n, seed=2).to(DEVICE)
    a[:, 3] *= 300  # an outlier channel
    wanted, scale = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    found, plain = error(product_of_pieces(a, b), wanted, scale), error(a @ b, wanted, scale)
    print(f"error of {m} x {k} x {n}: {found:.1e}, in float32 {plain:.1e}")
    assert found < allowed(k)


@pytest.mark.parametrize(("m", "k"), [(4096, 1536), (4096, 576), (7, 64)])
def test_a_gram_matrix_loses_no_more(m, k, monkeypatch):
    monkeypatch.setattr(products, "_SMALL", 0)
    x = normal(m, k, seed=1).to(DEVICE)
    x[:, 5] *= 1000
    wanted, scale = x.double().t() @ x.double(), x.double().abs().t() @ x.double().abs()
    found = error(gram(x), wanted, scale)
    print(f"error of {m} x {k}: {found:.1e}")
    assert found < allowed(m)


def test_float64_and_empty_matrices_are_multiplied_as_they_are():
    a = normal(5, 6).to(DEVICE).double()
    assert torch.equal(matmul(a, a.t()), a @ a.t())
    assert matmul(normal(4, 64).to(DEVICE), torch.zeros(64, 0, device=DEVICE)).shape == (4, 0)
