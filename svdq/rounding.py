"""Rounding: group scales for weights, and the run-time activation quantizer Qa with its smoothing and rotation.

Qa is the numerics contract with the kernels: float32, IEEE operations only, in a fixed order, so that codes and scales
of the CPU, of this code on a GPU and of the CUDA kernels are equal bit for bit. That is why the Hadamard transform is
six explicit add stages instead of a matrix product (whose sums may be taken in any order), and why 7 is a tensor:
torch on CUDA turns a division by a Python number into a multiplication by its rounded reciprocal.

Weight scales: absmax/7 per group, or the best of eleven fractions of it (0.60, 0.64 … 1.00) by squared error, each
error weighted by the channel's mean square if that is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from svdq import nvfp4
from svdq.config import ACTIVATION_GROUP
from svdq.grid import INT4_ACTIVATION, Grid

SCALE_FRACTIONS = tuple(round(0.60 + 0.04 * i, 2) for i in range(11))
E2M1_FRACTIONS = tuple(round(1.08**i, 2) for i in range(-3, 9))  # at 1.5 the largest becomes 4, not 6: steps are even
_CACHED_GROUPS = 512  # two buffers of 64 x 512 floats stay in a core's cache
E4M3_MAX = 448.0  # the largest float8_e4m3fn


def fit_group(
    weight: Tensor,
    grid: Grid,
    *,
    search: bool = True,
    importance: Tensor | None = None,
    unit: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """What a code is multiplied by, per row, for ONE group of columns, as the stored type has it; and the zero points.

    weight      (n, g) float32, the columns of one group. Not changed.
    search      choose among SCALE_FRACTIONS (of E2M1 its own) of the range; otherwise the whole range
    importance  (g,) float32 ≥ 0, weight of each column's squared error; None = equal
    unit        (n,) float32, what the stored scale is multiplied by; None = 1
    Returns     (n,) float32, finite and > 0: an all-zero group gets the smallest positive scale; and the zero points
                (n,) float32 of an asymmetric grid, whose range always holds 0, or None.
    """
    columns = weight.t()  # (g, n): GPTQ's working matrix is stored that way, so this is contiguous there
    fractions = (E2M1_FRACTIONS if grid.e2m1 else SCALE_FRACTIONS) if search else (1.0,)
    if grid.asymmetric:
        low, high = columns.amin(0).clamp_max(0), columns.amax(0).clamp_min(0)
        span = high - low
    else:
        span = columns.abs().amax(0)
    steps = grid.hi - grid.lo if grid.asymmetric else grid.hi
    weights = torch.ones_like(columns[:, 0]) if importance is None else importance
    ratio, code = torch.empty_like(columns), torch.empty_like(columns)
    best, best_zero, best_error = None, None, None
    for fraction in reversed(fractions):
        scale = grid.per_code(grid.store_scales(span * (fraction / steps), unit), unit)
        zero = (-low * fraction / scale).round_().clamp_(grid.lo, grid.hi) if grid.asymmetric else None
        if not search:
            return scale, zero
        torch.div(columns, scale, out=ratio)
        grid.round(ratio, code, zero)
        error = (weights @ code.sub_(ratio).square_()).mul_(scale.square())
        if best is None or best_error is None:
            best, best_zero, best_error = scale, zero, error
            continue
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, scale, best)
        if zero is not None and best_zero is not None:
            best_zero = torch.where(better, zero, best_zero)
    assert best is not None
    return best, best_zero


def round_to_nearest(
    weight: Tensor, grid: Grid, *, search: bool = False, importance: Tensor | None = None, unit: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """weight (n, k) float32 → codes int8 (n, k), scales (n, k/group) in the grid's scale dtype."""
    codes, scales = [], []
    for start in range(0, weight.shape[1], grid.group):
        members = weight[:, start : start + grid.group]
        weights = None if importance is None else importance[start : start + grid.group]
        scale, zero = fit_group(members, grid, search=search, importance=weights, unit=unit)
        scales.append(grid.store_scales(scale, unit))
        zero = None if zero is None else zero.unsqueeze(1)
        codes.append(grid.round(members / scale.unsqueeze(1), zero=zero).to(torch.int8))
    return torch.cat(codes, 1), torch.stack(scales, 1)


def rotate(x: Tensor) -> Tensor:
    """The normalized 64-point Hadamard transform inside every group of 64 channels; its own inverse.

    x (..., k) float32 or float64. Stages h = 1, 2, 4 … 32: (a, b) ← (a+b, a−b) at positions i and i+h, then · 0.125.
    """
    groups = x.reshape(-1, ACTIVATION_GROUP)
    out = torch.empty_like(groups)
    chunk = len(groups) if x.is_cuda else _CACHED_GROUPS
    for part, place in zip(groups.split(chunk), out.split(chunk), strict=True):
        lanes = part.t().clone(memory_format=torch.contiguous_format)  # a copy also where a transpose is contiguous
        place.copy_(_hadamard_lanes(lanes).t())
    return out.view(x.shape)


def _hadamard_lanes(lanes: Tensor) -> Tensor:
    """(64, groups): lane i of every group is one row, so that each stage adds whole rows. May overwrite its input."""
    other = torch.empty_like(lanes)
    for stage in range(6):
        h = 1 << stage
        pairs, sums = (t.view(ACTIVATION_GROUP // (2 * h), 2, h, -1) for t in (lanes, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=sums[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=sums[:, 1])
        lanes, other = other, lanes
    return lanes.mul_(0.125)


def quantize_activation(x: Tensor, clip: float = 1.0) -> tuple[Tensor, Tensor]:
    """Qa: codes and scales of the transformed activation, per token and group of 64 channels.

    x        (..., k) float32, already smoothed and rotated. Not changed.
    clip     the scale is clip · absmax / 7
    Returns  codes int8 (..., k) in [-8, 7], scales float32 (..., k/64); a group of zeros has scale 0 and codes 0.
             A NaN anywhere in a group makes its scale NaN and its codes 0; an Inf gives scale Inf and codes 0.
    """
    groups = x.unflatten(-1, (-1, ACTIVATION_GROUP))
    absmax = groups.abs().amax(-1)
    if clip != 1.0:
        absmax = absmax * clip
    scales = absmax / absmax.new_full((), float(INT4_ACTIVATION.hi))
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    codes = (groups * inverse.unsqueeze(-1)).round_().clamp_(INT4_ACTIVATION.lo, INT4_ACTIVATION.hi)
    return codes.nan_to_num_(nan=0.0).to(torch.int8).flatten(-2), scales


def quantize_activation_e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit activations of W4A8: x (..., k) float32, smoothed and rotated → e4m3 numbers, one scale per token.

    Returns  float8_e4m3fn (..., k) and scales float32 (...), absmax / 448; a token of zeros has scale 0 and numbers 0.
             A NaN in a token makes its scale NaN and its numbers 0; an Inf gives scale Inf and numbers 0.
    """
    scales = x.abs().amax(-1) / x.new_full((), E4M3_MAX)
    inverse = torch.where(scales > 0, scales.reciprocal(), 0.0)
    numbers = (x * inverse.unsqueeze(-1)).nan_to_num_(nan=0.0).clamp_(-E4M3_MAX, E4M3_MAX)
    return numbers.to(torch.float8_e4m3fn), scales


def fake_quantize_activation(x: Tensor, clip: float = 1.0) -> Tensor:
    """x̂ = code · scale, float32 (..., k): what the GEMM sees of x."""
    codes, scales = quantize_activation(x, clip)
    return INT4_ACTIVATION.decode(codes, scales)


@dataclass(frozen=True)
class ActivationTransform:
    """What happens to a layer's input before its GEMM: x' = R(x / smooth), then Qa with a clip.

    smooth    (k,) float32 > 0, or None for 1
    rotation  whether R is the 64-point Hadamard transform (else the identity)
    clip      the activation scale is clip · absmax / 7
    dtype     of the numbers: 'int4' (W4A4), 'fp8' (W4A8: 8 bits, one scale a token, no clip), 'nvfp4' (E2M1, an e4m3
              scale for 16 channels, no clip), or None where activations stay as they are
    """

    smooth: Tensor | None = None
    rotation: bool = False
    clip: float = 1.0
    dtype: str | None = "int4"

    def to(self, device: torch.device) -> ActivationTransform:
        return self if self.smooth is None else replace(self, smooth=self.smooth.to(device))

    def same(self, other: ActivationTransform) -> bool:
        """Whether two layers can share one activation quantizer. The clip is compared as float32, as it is stored."""
        kinds = [(one.rotation, one.smooth is None, one.dtype) for one in (self, other)]
        if kinds[0] != kinds[1]:
            return False
        clips = torch.tensor([self.clip, other.clip], dtype=torch.float32)
        return bool(clips[0] == clips[1]) and (
            self.smooth is None or other.smooth is None or torch.equal(self.smooth, other.smooth)
        )

    def apply(self, x: Tensor) -> Tensor:
        """x' in float32; x (..., k) of any float dtype."""
        x = x.float()
        if self.smooth is not None:
            x = x * (1.0 / self.smooth)  # the kernels hold the reciprocal, computed once in float32
        return rotate(x) if self.rotation else x

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes int8 (..., k) and scales float32 (..., k/64) of the raw input x."""
        return quantize_activation(self.apply(x), self.clip)

    def approximate(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """x̂ (..., k) of this dtype: what the GEMM sees of the raw input x. Codes and scales are float32 arithmetic."""
        if self.dtype is None:
            return x.to(dtype)
        return self.fake_quantize(self.apply(x), dtype)

    def fake_quantize(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """x̂ (..., k) of this dtype, from x' in float32."""
        if self.dtype == "fp8":
            numbers, scales = quantize_activation_e4m3(x)
            return numbers.to(dtype) * scales.to(dtype).unsqueeze(-1)
        if self.dtype == "nvfp4":
            return nvfp4.fake_quantize_activation(x, dtype)
        return INT4_ACTIVATION.decode(*quantize_activation(x, self.clip), dtype)

    def weight(self, weight: Tensor) -> Tensor:
        """W' = W·diag(smooth)·R, the weight that x' meets; (n, k), float32 unless weight is float64."""
        weight = weight if weight.dtype == torch.float64 else weight.float()
        if self.smooth is not None:
            weight = weight * self.smooth
        return rotate(weight) if self.rotation else weight

    def down_to_raw(self, down: Tensor) -> Tensor:
        """diag(1/smooth)·R·down: the low-rank factor that reads the raw input. down (k, r)."""
        down = rotate(down.t()).t() if self.rotation else down
        return down if self.smooth is None else down / self.smooth[:, None].to(down.dtype)

    def down_from_raw(self, down: Tensor) -> Tensor:
        """The inverse of `down_to_raw`."""
        down = down if self.smooth is None else down * self.smooth[:, None].to(down.dtype)
        return rotate(down.t()).t() if self.rotation else down
