"""The kernel of GPTQ's inner loop: its own text, run on the CPU (see emulate.py), inside the loop that uses it."""

import emulate
import pytest
import torch

from svdq import gptq as module
from svdq.grid import INT4_WEIGHT
from svdq.kernels import quantizer

pytestmark = pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return emulate.Emulator(tmp_path_factory.mktemp("walk"), 900)


@pytest.fixture
def both(emulator, monkeypatch):
    """gptq(…) column by column in torch, and through the kernel."""

    def run(*args, **kwargs):
        by_columns = module.gptq(*args, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(quantizer, "launch", emulator.launch)
            patch.setattr(module, "_fused", lambda device, grid: True)
            return by_columns, module.gptq(*args, **kwargs)

    return run


def problem(n, k, seed=0):
    """(target, factor, importance): inputs with common factors and channels of different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, k, generator=generator) + torch.randn(1024, 8, generator=generator) @ torch.randn(
        8, k, generator=generator
    )
    x *= torch.randn(k, generator=generator).mul(0.5).exp()
    hessian = (x.t() @ x).double()
    hessian += torch.eye(k) * 0.01 * hessian.diagonal().mean()
    upper, positive = module.upper_cholesky(hessian)
    assert positive
    return torch.randn(n, k, generator=generator), module.inverse_factor(upper), hessian.diagonal().float()


@pytest.mark.parametrize(("n", "k"), [(1, 64), (64, 128), (100, 192)])
@pytest.mark.parametrize("search", [True, False])
def test_codes_and_scales_are_those_of_the_columns_in_torch(both, n, k, search):
    target, factor, importance = problem(n, k)
    target[n // 2, 5] = 20.0  # an outlier
    if n > 64:
        target[7], target[70] = 0, 1e-9  # zeros, and values below every float16 scale
    (codes, scales, loss), (kernel_codes, kernel_scales, kernel_loss) = both(
        target, factor, INT4_WEIGHT, search=search, importance=importance if search else None
    )
    # its sums have another order: a candidate's error may tie differently, and its row goes another way from there
    rows = (codes != kernel_codes).any(1) | (scales != kernel_scales).any(1)
    assert rows.sum() <= n // 50
    assert kernel_loss[~rows].tolist() == pytest.approx(loss[~rows].tolist(), rel=1e-5)
    assert kernel_codes.dtype == torch.int8 and kernel_scales.dtype == torch.float16
    assert (kernel_codes != 0).any()


def test_a_nan_stays_in_its_row(both):
    target, factor, importance = problem(70, 128)
    clean, _ = both(target, factor, INT4_WEIGHT, importance=importance)
    target[66, 3] = float("nan")
    _, (codes, scales, _) = both(target, factor, INT4_WEIGHT, importance=importance)
    others = torch.arange(70) != 66
    assert torch.equal(codes[others], clean[0][others]) and torch.equal(scales[others], clean[1][others])
