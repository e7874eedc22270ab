"""One linear layer, from weight and activation sums to codes and factors: the only place that knows the order of steps.

`quality` (objective "output") alternates two exact-or-nearly-exact minimisers of J:
    T = (W' − L)·A          the best unrounded Q̂ for this L          → GPTQ rounds T in the metric of Hqq
    E = W' − Q̂·B            the best full-rank L for this Q̂          → truncated SVD of E in the metric of Hxx
starting from the joint optimum over rank-r L and unrounded Q̂ (the Schur complement). `plain` (objective "weight") is
the write-up's alternation of GPTQ(W' − L) and SVD(W' − Q̂), which cannot see the error of 4-bit activations; `svdquant`
(objective "svd") is its first step from L = SVD(W'), as SVDQuant does it.

J is followed in completed squares instead of its six traces. With S = Hxx − A·Hxqᵀ, C·Cᵀ = Hxx and E as above,
    J(Q̂, L) = tr((W' − L)·S·(W' − L)ᵀ) + tr((Q̂ − T)·Hqq·(Q̂ − T)ᵀ)     T of this L; the second term is GPTQ's own loss
            = ‖(E − L)·C‖² + r(Q̂)                                    r: what no L can repair of these codes
so that each half-step gives J for nothing, and float32 is enough (svdq.objective has the traces in float64; a test
compares the two). E·C = W'·C − Q̂·(C⁻¹·Hxq)ᵀ, its truncated SVD gives L·C: one n×k×k product a round besides GPTQ's.

A site's factorizations serve all its linears and are made once, in `prepare_site`, in float64: S is a difference of
large matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from svdq import nf4, nvfp4
from svdq.config import LayerConfig
from svdq.errors import NumericsError
from svdq.gptq import coordinate_descent, gptq, inverse_factor, upper_cholesky
from svdq.grid import Grid, weight_grid
from svdq.lowrank import factors, low_rank, top_left_vectors
from svdq.objective import ActivationSums, relative
from svdq.products import gram, matmul
from svdq.rounding import ActivationTransform, round_to_nearest

MAX_RATIO = 20.0  # of the mean diagonal: 12 raises from 1e-6; more would be another matrix


def damping_ratio(channels: int, tokens: int) -> float:
    """λ / mean diag Hxx: few tokens for many channels need more; 1 % overfits at T ≈ K … 4K."""
    return min(max(channels / max(tokens, 1), 0.01), 0.5)


@dataclass(frozen=True)
class PreparedSite:
    """The factorizations that the linears of one site share: all (k, k) float32, of the damped sums."""

    transform: ActivationTransform
    tokens: int
    damping: float  # the ratio used
    shift: float  # λ itself
    chol_xx: Tensor  # C with C·Cᵀ = Hxx
    seen_codes: Tensor  # Hxqᵀ·C⁻ᵀ: Q̂ times it is what X'·Lᵀ can repair of X̂·Q̂ᵀ, in the metric C
    rest: Tensor | None  # Hqq − seen_codes·seen_codesᵀ, the rest of it; None where it is 0 or not needed ('output')
    to_codes: Tensor | None  # A = Hxq·Hqq⁻¹; None for the objectives that do not see Qa, and without Qa: A = 1
    chol_schur: Tensor | None  # C with C·Cᵀ = S + jitter, S = Hxx − A·Hxqᵀ; None for these
    jitter: float
    hessian: Tensor  # the metric that GPTQ rounds in: Hqq, or Hxx for these
    factor: Tensor  # upper triangular, hessian⁻¹ = factorᵀ·factor
    repairs: tuple[str, ...]


@dataclass
class QuantizedLinear:
    """A quantized layer, and what happened on the way.

    codes int8 (n, k), scales (n, k/group) in the grid's type, proj_down float16 (k, r) for the raw input, proj_up
    float16 (n, r), unit float32 (n,) that the scales are multiplied by (NVFP4) or None; NF4's are in `stored` alone
    """

    codes: Tensor
    scales: Tensor
    proj_down: Tensor
    proj_up: Tensor
    unit: Tensor | None = None
    stored: dict[str, Tensor] = field(default_factory=dict)  # by suffix, of a format that rounds by its own code (NF4)
    report: dict = field(default_factory=dict)


def prepare_site(sums: ActivationSums, config: LayerConfig) -> PreparedSite:
    """Damp the sums and factorize them.

    Where a factorization fails, the damping (of all three sums alike) or the Schur complement's jitter is raised ×4,
    a bounded number of times, and counted as a repair. The Schur complement, a difference of large matrices, starts
    with a jitter of 1e-6 as a matter of course.
    Raises NumericsError on non-finite sums, or if no allowed jitter makes a matrix definite.
    """
    for label, matrix in (("xx", sums.xx), ("xq", sums.xq), ("qq", sums.qq)):
        if not torch.isfinite(matrix).all():
            raise NumericsError(f"the activation sums '{label}' hold a NaN or Inf; recalibrate with finite inputs")
    repairs: list[str] = []
    channels = len(sums.xx)
    mean_energy = sums.xx.diagonal().double().mean().item()
    if mean_energy == 0.0:
        repairs.append("inputs all zero: identity metric")
        mean_energy = 1.0
    ratio = damping_ratio(channels, sums.tokens) if config.damping is None else config.damping
    exact = sums.transform.dtype is None  # 16-bit activations: all three sums are one
    sees_codes = config.objective == "output" and not exact
    metric = sums.qq if sees_codes else sums.xx

    def damped(matrix: Tensor, ratio: float) -> Tensor:
        copy = matrix.to(torch.float64, copy=True)
        copy.diagonal().add_(mean_energy * ratio)
        return copy

    def factorize(ratio: float) -> tuple[Tensor, Tensor] | None:
        chol_xx, info = torch.linalg.cholesky_ex(damped(sums.xx, ratio))
        upper, passed = upper_cholesky(damped(metric, ratio))
        return (chol_xx, upper) if passed and info.item() == 0 else None

    ratio, (chol_xx, upper), raises = _raise_until(factorize, ratio, first=1e-6, label="Hxx or Hqq")
    if raises:
        repairs.append(f"damping raised {raises}x to {ratio:.1e}")
    # A site of 14,336 channels has 1.6 GB in each float64 matrix: they are made one after another, and few at a time.
    if exact:
        chol_xx = chol_xx.float()
        seen_codes, rest = chol_xx, None
    else:
        seen = torch.linalg.solve_triangular(chol_xx, damped(sums.xq, ratio), upper=False)
        seen_codes, chol_xx = seen.t().float().contiguous(), chol_xx.float()
        rest = None if sees_codes else damped(sums.qq, ratio).sub_(gram(seen)).float()
    to_codes, chol_schur, jitter = None, None, 0.0
    if sees_codes:
        seen = torch.linalg.solve_triangular(upper, damped(sums.xq, ratio).t(), upper=True)
        schur = damped(sums.xx, ratio)
        floor = schur.diagonal().mean() * 1e-10
        schur -= gram(seen)
        to_codes = torch.linalg.solve_triangular(upper.t(), seen, upper=False).t().float().contiguous()
        scale = torch.maximum(schur.diagonal().clamp_min(0).mean(), floor)

        def factorize_schur(jitter: float) -> Tensor | None:
            raised = schur.clone()
            raised.diagonal().add_(scale * jitter)
            lower, info = torch.linalg.cholesky_ex(raised)
            return lower if info.item() == 0 else None

        del seen
        jitter, lower, raises = _raise_until(factorize_schur, 1e-6, first=0.0, label="the Schur complement")
        chol_schur = lower.float()
        del schur, lower
        if raises:
            repairs.append(f"Schur complement: jitter raised {raises}x to {jitter:.1e} of its mean diagonal")
        jitter *= scale.item()
    return PreparedSite(
        transform=sums.transform,
        tokens=sums.tokens,
        damping=ratio,
        shift=ratio * mean_energy,
        chol_xx=chol_xx,
        seen_codes=seen_codes,
        rest=rest,
        to_codes=to_codes,
        chol_schur=chol_schur,
        jitter=jitter,
        hessian=damped(metric, ratio).float(),
        factor=inverse_factor(upper).float(),
        repairs=tuple(repairs),
    )


def _raise_until(attempt, value: float, *, first: float, label: str) -> tuple[float, Any, int]:
    """(value, attempt(value), raises) for the first value, raised ×4 up to MAX_RATIO, that gives a result."""
    raises = 0
    while (result := attempt(value)) is None:
        value, raises = max(4 * value, first), raises + 1
        if value > MAX_RATIO:
            raise NumericsError(f"{label} stays indefinite after {raises} raises; calibrate with more tokens")
    return value, result, raises


def quantize_linears(weights: Sequence[Tensor], site: PreparedSite, config: LayerConfig) -> list[QuantizedLinear]:
    """Quantize linears of one site, each as if it were alone, in one go: their rows are stacked.

    Stacked sums may round otherwise than those of a linear alone, so that codes at ties may differ.

    weights  (n_i, k) any float dtype, rows are outputs. Not changed.
    Returns  per linear the stored tensors and a report: relative output error √(J/‖X'W'ᵀ‖²) of each half-step, damped
             and not.
    Raises   NumericsError on a non-finite weight or a value that float16 cannot hold.
    """
    if not all(torch.isfinite(weight).all() for weight in weights):
        raise NumericsError("the weight holds a NaN or Inf")
    transform = site.transform
    stack = _Stack([len(weight) for weight in weights], config)
    weight = torch.cat([transform.weight(weight).float() for weight in weights])
    grid = weight_grid(config, weight.shape[1])
    unit = _units(weight, stack) if grid.e2m1 else None
    importance = site.hessian.diagonal() if config.scale_search else None
    seen = matmul(weight, site.chol_xx)
    energy = stack.energies(seen)
    undamped_energy = energy - site.shift * stack.energies(weight)

    if site.to_codes is None or site.chol_schur is None:  # what is rounded is W' − L itself
        if config.objective == "output":  # 16-bit activations: the best L for unrounded Q̂ = W − L would be any
            up, down = stack.low_rank(weight, seen)
        else:
            up, down = stack.low_rank(weight, rank=config.rank if config.objective == "svd" else 0)
        full_target = weight
    else:
        seen_schur = matmul(weight, site.chol_schur)
        up, down = stack.low_rank(weight, seen_schur)
        full_target = matmul(weight, site.to_codes)
    best = [_Round() for _ in weights]
    for _ in range(config.rounds if config.rank and config.objective != "svd" else 1):
        seen_down = down.t() if site.to_codes is None else down.t() @ site.to_codes
        target = full_target - up @ seen_down
        codes, scales, losses = gptq(
            target, site.factor, grid, search=config.scale_search, importance=importance, unit=unit
        )
        weight_hat = grid.decode(codes, scales, unit=unit)
        if config.sweeps:
            codes = coordinate_descent(codes, scales, target, site.hessian, grid, config.sweeps, unit)
            weight_hat = grid.decode(codes, scales, unit=unit)
            missed = weight_hat - target
            losses = ((missed @ site.hessian) * missed).sum(1, dtype=torch.float64)
        _refuse_overflow(scales)
        measured = seen - matmul(weight_hat, site.seen_codes)
        repairable = stack.energies(measured - up @ (down.t() @ site.chol_xx))
        if site.chol_schur is not None:
            left = stack.energies(seen_schur - up @ (down.t() @ site.chol_schur))
            after_codes = left - site.jitter * stack.energies(weight - up @ down.t()) + stack.sums(losses)
            unrepaired = after_codes - repairable
        else:
            lost = torch.zeros_like(losses) if site.rest is None else ((weight_hat @ site.rest) * weight_hat).sum(1)
            unrepaired = stack.sums(lost.double())
            after_codes = unrepaired + repairable
        if config.objective == "weight":
            up, down = stack.low_rank(weight - weight_hat)
        elif config.objective == "output":
            up, down = stack.factors(measured, site.chol_xx, up)
        stored_up, stored_down = up.half(), transform.down_to_raw(down.double()).half()
        _refuse_overflow(stored_up, stored_down)
        up, down = stored_up.float(), transform.down_from_raw(stored_down.double()).float()
        after_lowrank = unrepaired + stack.energies(measured - up @ (down.t() @ site.chol_xx))
        undamped = after_lowrank - site.shift * stack.energies(weight - weight_hat - up @ down.t())
        steps = [(after_codes, energy), (after_lowrank, energy), (undamped, undamped_energy)]
        errors = [[relative(*pair) for pair in zip(*map(Tensor.tolist, step), strict=True)] for step in steps]
        for number, (one, value, *of_one) in enumerate(zip(best, after_lowrank.tolist(), *errors, strict=True)):
            rows, columns = stack.rows[number], stack.columns(number)
            factors_of_one = stored_down[:, columns].contiguous(), stored_up[rows, columns].contiguous()
            units = None if unit is None else unit[rows]
            one.offer(value, of_one, (codes[rows], scales[rows], *factors_of_one, units))
        if not any(one.goes_on for one in best):
            break

    results = []
    for rows, one in zip(stack.rows, best, strict=True):
        repairs = [*site.repairs, *_tiny_groups(weight[rows], grid)]
        common = {"damping": site.damping, "tokens": site.tokens, "repairs": repairs}
        codes, scales, down, up, units = one.tensors
        results.append(QuantizedLinear(codes, scales, down, up, units, report={**one.report(), **common}))
    return results


def round_linear(weight: Tensor, config: LayerConfig) -> QuantizedLinear:
    """Every weight to its nearest code, scales from each group's range: no data, no low rank. weight (n, k)."""
    if not torch.isfinite(weight).all():
        raise NumericsError("the weight holds a NaN or Inf")
    wide, (n, k) = weight.float(), weight.shape
    none = wide.new_zeros((0,), dtype=torch.float16)
    down, up = none.view(k, 0), none.view(n, 0)
    if config.format == "nf4":
        tensors = nf4.encode(weight if weight.dtype in nf4.DTYPES.values() else wide)
        missed = wide - nf4.decode(tensors, n, k)
        report = nearest_report(relative(missed.square().sum().item(), wide.square().sum().item()), [])
        return QuantizedLinear(none, none, down, up, stored=tensors, report=report)
    grid = weight_grid(config, k)
    codes, scales = round_to_nearest(wide, grid)
    _refuse_overflow(scales)
    error = relative((wide - grid.decode(codes, scales)).square().sum().item(), wide.square().sum().item())
    report = nearest_report(error, _tiny_groups(wide, grid))
    return QuantizedLinear(codes, scales, down, up, report=report)


def nearest_report(error: float, repairs: list[str]) -> dict[str, Any]:
    """As `quantize_linears` reports. error: of the weights, ‖W − Ŵ‖ / ‖W‖; no data was seen."""
    return {"error": error, "rounds": [], "kept_round": 0, "damping": 0.0, "tokens": 0, "repairs": repairs}


def _units(weight: Tensor, stack: _Stack) -> Tensor:
    """(n,) float32: each linear's factor of NVFP4."""
    return torch.cat([nvfp4.tensor_factor(weight[rows]) for rows in stack.rows])


class _Stack:
    """Stacked linears: their rows, and low-rank parts that stand on a block diagonal, `rank` columns for each.

    Energies and sums are float64, one a linear, on the CPU.
    """

    def __init__(self, sizes: list[int], config: LayerConfig):
        self.rank, self.svd = config.rank, config.svd
        ends = list(accumulate(sizes))
        self.rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def columns(self, number: int) -> slice:
        """Of the low-rank factors, those of one linear."""
        return slice(number * self.rank, (number + 1) * self.rank)

    def sums(self, by_row: Tensor) -> Tensor:
        return torch.stack([by_row[rows].sum() for rows in self.rows]).cpu()

    def energies(self, matrix: Tensor) -> Tensor:
        """‖rows of a linear‖², of each."""
        norms = [torch.linalg.vector_norm(matrix[rows], dtype=torch.float64) for rows in self.rows]
        return torch.stack(norms).square().cpu()

    def low_rank(self, matrix: Tensor, seen: Tensor | None = None, rank: int | None = None) -> tuple[Tensor, Tensor]:
        rank = self.rank if rank is None else rank
        return self._diagonal(
            [low_rank(matrix[rows], rank, None if seen is None else seen[rows], self.svd) for rows in self.rows]
        )

    def factors(self, measured: Tensor, metric: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """See svdq.lowrank. before: the up factors that are replaced, near the new ones."""
        parts = []
        for number, rows in enumerate(self.rows):
            start = before[rows, self.columns(number)]
            parts.append(factors(measured[rows], top_left_vectors(measured[rows], self.rank, self.svd, start), metric))
        return self._diagonal(parts)

    def _diagonal(self, parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return torch.block_diag(*(up for up, _ in parts)), torch.cat([down for _, down in parts], 1)


class _Round:
    """The best round of one linear so far. The first that is no better is its last, whatever others of its stack do."""

    def __init__(self) -> None:
        self.goes_on, self.smallest, self.kept = True, math.inf, 0
        self.tensors: tuple[Any, ...] = ()
        self.errors: list[dict[str, float]] = []

    def offer(self, value: float, errors: list[float], tensors: tuple[Any, ...]) -> None:
        if not self.goes_on:
            return
        self.errors.append(dict(zip(("damped_after_codes", "damped_after_lowrank", "error"), errors, strict=True)))
        self.goes_on = value < self.smallest or not self.tensors
        if self.goes_on:
            self.smallest, self.tensors, self.kept = value, tensors, len(self.errors)

    def report(self) -> dict[str, Any]:
        return {"error": self.errors[self.kept - 1]["error"], "rounds": self.errors, "kept_round": self.kept}


def _tiny_groups(weight: Tensor, grid: Grid) -> list[str]:
    if grid.scale_dtype != torch.float16:
        return []
    absmax = weight.unflatten(1, (-1, grid.group)).abs().amax(2)
    tiny = int(((absmax > 0) & ((absmax / grid.hi).half() == 0)).sum())
    return [f"{tiny} groups too small for a float16 scale, rounded to 0"] if tiny else []


def _refuse_overflow(*stored: Tensor) -> None:
    if not all(torch.isfinite(tensor.float()).all() for tensor in stored):
        raise NumericsError("a stored scale or low-rank factor exceeds float16 (65504); leave it in 16 bits: --ignore")
