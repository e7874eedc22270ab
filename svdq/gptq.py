"""GPTQ: round a matrix column by column; the columns still free absorb each column's error.

Minimises tr((Q̂ − T) H (Q̂ − T)ᵀ) greedily. Rows are independent, so a column step is one vector operation over all
rows; columns go in blocks, and what a block owes the columns to its right is one GEMM. The inverse Hessian is never
formed: the upper R with H⁻¹ = RᵀR comes from a Cholesky factorization of the flipped matrix and a triangular solve.
A group's scale is chosen when its first column is reached, from the weights as the error so far has moved them.
Act-order was tried in the prototype (< 1 %) and is left out.

Source: Frantar et al. 2022, arXiv:2210.17323.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from svdq.grid import SMALLEST_SCALE, Grid
from svdq.kernels import quantizer
from svdq.rounding import SCALE_FRACTIONS, fit_group


def upper_cholesky(hessian: Tensor) -> tuple[Tensor, bool]:
    """(upper, ok) with hessian = upper·upperᵀ; not ok if it is not positive definite. hessian (k, k). Not changed."""
    lower, info = torch.linalg.cholesky_ex(hessian.flip(0, 1))  # flip(H) = L·Lᵀ  ⇒  H = flip(L)·flip(L)ᵀ
    return lower.flip(0, 1), info.item() == 0


def inverse_factor(upper: Tensor) -> Tensor:
    """Upper-triangular R with H⁻¹ = RᵀR, for H = upper·upperᵀ (k, k)."""
    identity = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True)


def gptq(
    target: Tensor,
    factor: Tensor,
    grid: Grid,
    *,
    search: bool = True,
    importance: Tensor | None = None,
    unit: Tensor | None = None,
    block: int = 64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose codes column by column.

    target      (n, k) float, rows are outputs. Not changed.
    factor      (k, k) from `inverse_factor`, of the damped Hessian. Not changed.
    search      pick each group's scale among fractions of its absmax, else absmax
    importance  (k,) float32, weights of the columns' squared errors in that search (the Hessian's diagonal)
    unit        (n,) float32, what a row's stored scales are multiplied by; None = 1
    block       columns per block; a multiple or a divisor of the group
    Returns     codes int8 (n, k), which count from the zero point where there is one, scales (n, k/group) in the grid's
                scale dtype, and each row's objective ‖(q̂ − t)·R⁻¹‖², float64 (n,): its every column is an error over
                R's diagonal
    Cost        O(n k²) time in float32, two copies of target. On a GPU a group of 64 is one launch of a kernel, where
                it runs (svdq.kernels.quantizer); its sums have another order, so codes may differ near ties.
    """
    n, k = target.shape
    working = target.float().t().clone(memory_format=torch.contiguous_format)  # (k, n): a column is a row here
    factor = factor.float()
    # a column's error, moved on: target[j] −= steps[i, j] · error[i]
    steps = (factor / factor.diagonal()[:, None]).contiguous()
    device, fused = target.device, _fused(target.device, grid)
    block = grid.group if fused else block
    codes = torch.empty((k, n), dtype=torch.int8 if fused else torch.float32, device=device)
    scales = torch.empty((k // grid.group, n), dtype=torch.float32, device=device)  # what a code is multiplied by
    errors = torch.empty((block, n), dtype=torch.float32, device=device)
    losses = torch.zeros(n, dtype=torch.float32 if fused else torch.float64, device=device)
    squares = factor.diagonal().square().reciprocal()
    zeros = torch.zeros_like(scales) if grid.asymmetric else None
    fit = partial(fit_group, grid=grid, search=search, unit=unit)
    if fused:
        weights = torch.ones(k, device=device) if importance is None else importance.float().contiguous()
        tried = [fraction / grid.hi for fraction in (reversed(SCALE_FRACTIONS) if search else (1.0,))]
        fractions = torch.tensor(tried, dtype=torch.float32, device=device)
    for start in range(0, k, block):
        stop = min(start + block, k)
        if fused:
            columns, local = slice(start, stop), steps[start:stop, start:stop]
            group = working[columns], local, weights[columns], squares[columns]
            chosen = codes[columns], scales[start // block], errors, losses
            quantizer.walk(*group, fractions, SMALLEST_SCALE, grid.lo, grid.hi, *chosen)
        else:
            _walk_block(working, steps, grid, fit, importance, codes, scales, zeros, errors, start, stop)
            losses += (squares[start:stop] @ errors[: stop - start].square()).double()
        if stop < k:
            working[stop:].addmm_(steps[start:stop, stop:].t(), errors[: stop - start], alpha=-1.0)
    stored = grid.store_scales(scales.t(), None if unit is None else unit[:, None])
    return codes.t().to(torch.int8).contiguous(), stored.contiguous(), losses.double()


def _fused(device: torch.device, grid: Grid) -> bool:
    kept = grid.group == quantizer.GROUP and grid.scale_dtype == torch.float16 and not grid.asymmetric
    return kept and device.type == "cuda" and quantizer.why_not(device) is None


def _walk_block(
    working: Tensor,
    steps: Tensor,
    grid: Grid,
    fit: Callable,
    importance: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    errors: Tensor,
    start: int,
    stop: int,
) -> None:
    """Columns start … stop of `gptq`, without what they owe the columns from stop on."""
    local_steps = steps[start:stop, start:stop]
    columns, rounded, missed = working[start:stop].unbind(), codes[start:stop].unbind(), errors.unbind()
    for i, (column, code, error) in enumerate(zip(columns, rounded, missed, strict=False)):
        position = start + i
        if position % grid.group == 0:
            end = position + grid.group
            members = working[position:end]
            if end > stop and i > 0:  # the group reaches beyond this block: bring its tail up to date first
                members = members.clone()
                members[stop - position :] -= steps[start:position, stop:end].t() @ errors[:i]
            scale, zero = fit(members.t(), importance=None if importance is None else importance[position:end])
            scales[position // grid.group] = scale
            if zeros is not None:
                zeros[position // grid.group] = zero
        scale = scales[position // grid.group]
        torch.div(column, scale, out=code)
        grid.round(code, code, None if zeros is None else zeros[position // grid.group])
        torch.addcmul(column, code, scale, value=-1, out=error)
        if i + 1 < stop - start:
            working[position + 1 : stop].addr_(local_steps[i, i + 1 :], error, alpha=-1.0)


def coordinate_descent(
    codes: Tensor,
    scales: Tensor,
    target: Tensor,
    hessian: Tensor,
    grid: Grid,
    sweeps: int,
    unit: Tensor | None = None,
    block: int = 64,
) -> Tensor:
    """Move one code at a time to its best value given all others; scales stay.

    codes, scales, target, hessian, unit as for `gptq` (hessian itself, not its factor). Not changed.
    Returns  codes int8 (n, k). tr((Q̂−T)H(Q̂−T)ᵀ) never rises beyond float32 rounding.
    """
    metric = hessian.float()
    wanted = target.float().t().contiguous()
    step = grid.per_code(scales, unit).t()
    current = codes.t().float()
    for _ in range(sweeps):
        expanded = step.repeat_interleave(grid.group, 0)
        gradient = metric @ (current * expanded - wanted)
        for start in range(0, len(current), block):
            stop = min(start + block, len(current))
            local = gradient[start:stop].clone()
            moved = torch.zeros_like(local)
            square = metric[start:stop, start:stop]
            for i in range(stop - start):
                column = start + i
                scale = step[column // grid.group]
                value = current[column] * scale - local[i] / square[i, i]
                best = grid.round(value / scale)
                torch.mul(best - current[column], scale, out=moved[i])
                current[column] = best
                local.addr_(square[:, i], moved[i])
            gradient.addmm_(metric[:, start:stop], moved)
    return current.t().to(torch.int8).contiguous()
