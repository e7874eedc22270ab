"""GPTQ through its kernel against the same column by column in torch, on the GPU and on the CPU."""

import pytest
import torch
from oracle import DEVICE, ON_GPU, READY, normal

from svdq import gptq as module
from svdq.grid import INT4_WEIGHT
from svdq.kernels import quantizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not (READY and ON_GPU), reason="no CUDA device")]


def problem(n, k, seed=0):
    x = (normal(4 * k, k, seed=seed) + normal(4 * k, 8, seed=seed + 1) @ normal(8, k, seed=seed + 2)).double()
    hessian = x.t() @ x
    hessian += torch.eye(k) * 0.01 * hessian.diagonal().mean()
    upper, positive = module.upper_cholesky(hessian)
    assert positive
    return normal(n, k, seed=seed + 3), module.inverse_factor(upper), hessian


def objective(codes, scales, loss, target, hessian):
    missed = INT4_WEIGHT.decode(codes.cpu(), scales.cpu(), torch.float64) - target.double()
    found = ((missed @ hessian) * missed).sum().item()
    assert abs(loss.sum().item() / found - 1) < 1e-4
    return found


@pytest.mark.parametrize(("n", "k"), [(64, 64), (576, 576), (1000, 1536), (3072, 1024), (1, 256)])
@pytest.mark.parametrize("search", [True, False])
def test_codes_differ_near_ties_only_and_the_objective_does_not(n, k, search):
    target, factor, hessian = problem(n, k)
    target[n // 2, 5] = 20.0
    importance = hessian.diagonal().float()
    wanted = module.gptq(target, factor, INT4_WEIGHT, search=search, importance=importance)
    assert quantizer.why_not(DEVICE) is None
    on_gpu = [tensor.to(DEVICE) for tensor in (target, factor, importance)]
    found = module.gptq(*on_gpu[:2], INT4_WEIGHT, search=search, importance=on_gpu[2])
    different = (found[0].cpu() != wanted[0]).float().mean().item()
    assert different < 1e-3, f"{different:.2%} of codes differ"  # a row that meets a tie goes another way from there
    ratio = objective(*found, target, hessian) / objective(*wanted, target, hessian)
    assert abs(ratio - 1) < 1e-4
    again = module.gptq(*on_gpu[:2], INT4_WEIGHT, search=search, importance=on_gpu[2])
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_groups_of_128_take_the_path_in_torch():
    target, factor, hessian = problem(64, 256)
    grid = INT4_WEIGHT.with_group(128)
    wanted = module.gptq(target, factor, grid, importance=hessian.diagonal().float())
    found = module.gptq(target.to(DEVICE), factor.to(DEVICE), grid, importance=hessian.diagonal().float().to(DEVICE))
    assert (found[0].cpu() != wanted[0]).float().mean() < 1e-3
