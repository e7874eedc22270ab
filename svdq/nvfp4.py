"""NVFP4: 4-bit floating point (E2M1) in groups of 16 along k, one 8-bit floating-point scale (E4M3) a group.

    value = level(code) · scale · wcscale[n]        level = 0, ½, 1, 1½, 2, 3, 4, 6 or its negative

Weights: an E4M3 scale lies between 2⁻⁹ and 448, so a factor for the whole matrix brings the largest group's there. It
is a power of two: dividing by it is exact, it is exact in float16 and bfloat16 alike, and a weight has at most six
significant bits. absmax / 2688, the usual factor, would use half a binade more, on average, of the scales' seventeen.

Activations: scales alone, no factor, which the formula has no place for. Numbers beyond 6 · 448 = 2688 are cut off, and
groups whose largest is below 0.0005 become zeros; a smoothing may divide by any constant besides.

Rounding to a level is half to even, in the level's last bit: ties at ¼, ¾, 1¼, 1¾, 2½, 3½, 5. A scale has four
significant bits, so no quotient by it is rounded onto a tie that it does not lie on.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from svdq import grid
from svdq.errors import NumericsError

GROUP = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 … 7; 8 more is the sign
LARGEST = LEVELS[-1]
SCALE_DTYPE = torch.float8_e4m3fn
LARGEST_SCALE = 448.0
SMALLEST_SCALE = 2.0**-9  # the smallest positive e4m3: of groups of zeros too, so that no stored scale is 0
NEIGHBOURS = range(-2, 8)  # the scales tried, in steps of E4M3 from absmax / 6: 0.8 to 1.9 times it

# ------------------------------------------------------------------------------------------------------ codes


def nearest_levels(ratios: Tensor) -> Tensor:
    """value / scale → the level it is rounded to, signed. Float of any shape; not changed.

    What lies beyond 6 becomes 6. The sign of what becomes 0 is kept, as the hardware's conversion does.
    """
    size = ratios.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(size.dtype)
    return size.div_(step).round_().mul_(step).clamp_(max=LARGEST).copysign_(ratios)


def encode_levels(levels: Tensor) -> Tensor:
    """Signed levels → codes uint8 0 … 15: bit 3 the sign, below it the level's index."""
    size = levels.abs()
    index = torch.where(size <= 2, size * 2, torch.where(size <= 4, size + 2, size + 1))
    return index.to(torch.uint8) | (levels.signbit().to(torch.uint8) << 3)


def decode_levels(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse of `encode_levels`. codes any integers whose low four bits are the code."""
    table = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=dtype, device=codes.device)
    return table[(codes & 0xF).long()]


def encode(values: Tensor, scales: Tensor) -> Tensor:
    """Round to the nearest level. values (n, k) float32, scales (n, k/16) > 0, any factor in them → uint8 (n, k)."""
    return encode_levels(nearest_levels(values.unflatten(-1, (-1, GROUP)) / scales.float()[..., None])).flatten(-2)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes (n, k), scales (n, k/16) → values (n, k).

    A level has two significant bits and an E4M3 scale four: a product has six at most and lies between 2⁻¹⁰ and 2688,
    so it is exact in float32, bfloat16 and float16. With a factor that is a power of two it still is in the first two.
    """
    levels = decode_levels(codes, dtype).unflatten(-1, (-1, GROUP))
    return (levels * scales.to(dtype)[..., None]).flatten(-2)


def pack_codes(codes: Tensor) -> Tensor:
    """Two codes a byte: low nibble = even k. uint8 (n, k) → uint8 (n, k/2)."""
    return grid.pack_nibbles(codes)


def unpack_codes(packed: Tensor) -> Tensor:
    """The inverse of `pack_codes`: uint8 (n, k) in 0 … 15."""
    return grid.unpack_nibbles(packed).to(torch.uint8) & 0xF


# ------------------------------------------------------------------------------------------------------ weights


def round_scales(scales: Tensor) -> Tensor:
    """The nearest E4M3 number, half to even, from 2⁻⁹ to 448. float32, not negative → float32."""
    return scales.clamp(max=LARGEST_SCALE).to(SCALE_DTYPE).float().clamp_min_(SMALLEST_SCALE)


def tensor_factor(weight: Tensor, where: str) -> float:
    """The power of two that brings the scales of a matrix's groups into E4M3's range: the largest into (224, 448].

    where   named in the error
    Raises  NumericsError if a weight is not finite or the factor exceeds float16
    """
    absmax = float(weight.abs().max()) if weight.numel() else 0.0
    if not math.isfinite(absmax):
        raise NumericsError(f"{where}: a weight is {absmax}; NVFP4 needs finite ones")
    mantissa, exponent = math.frexp(absmax / (LARGEST * LARGEST_SCALE))  # 0.5 ≤ mantissa < 1, or both 0
    factor = math.ldexp(1.0, max(exponent - (mantissa == 0.5), -24))  # 2⁻²⁴ is the smallest positive float16
    check_wcscale(torch.tensor([factor]), where)
    return factor


def check_wcscale(wcscale: Tensor, where: str) -> None:
    """Raises NumericsError unless every factor is a positive, finite number in float32, bfloat16 and float16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = wcscale.to(dtype)
        wrong = ~(stored.isfinite() & (stored > 0))
        if wrong.any():
            raise NumericsError(
                f"{where}: the factor {wcscale[wrong][0]:.3g} is {stored[wrong][0]:.3g} in {dtype}; "
                f"leave it in 16 bits with --ignore '{where}'"
            )


def group_scales(weight: Tensor, factor: float, *, search: bool = True, importance: Tensor | None = None) -> Tensor:
    """A scale per row for ONE group of columns, times the factor: what `encode` and `decode` take.

    weight      (n, 16) float32, the columns of one group. Not changed.
    factor      from `tensor_factor` of the whole matrix
    search      the best by squared error among the E4M3 numbers around absmax/6 (NEIGHBOURS); otherwise the nearest one
    importance  (16,) float32 ≥ 0, weight of each column's squared error; None = equal
    Returns     (n,) float32 > 0: an E4M3 number times factor; of a group of zeros the smallest
    """
    columns = weight.t()  # (16, n), as svdq.gptq keeps its matrix
    nearest = round_scales(columns.abs().amax(0) / (LARGEST * factor))
    if not search:
        return nearest * factor
    bits = nearest.to(SCALE_DTYPE).view(torch.uint8).int()  # of positive numbers the order is that of their bits
    weights = torch.ones_like(columns[:, 0]) if importance is None else importance
    best, best_error = nearest * factor, torch.full_like(nearest, torch.inf)
    for step in NEIGHBOURS:
        scale = (bits + step).clamp_(1, 126).to(torch.uint8).view(SCALE_DTYPE).float() * factor
        ratio = columns / scale
        error = (weights @ (nearest_levels(ratio) - ratio).square_()).mul_(scale.square())
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, scale, best)
    return best


def round_to_nearest(
    weight: Tensor, where: str, *, search: bool = False, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """weight (n, k) float32 → codes uint8 (n, k), scales float8_e4m3fn (n, k/16), wcscale float32 (n,)."""
    factor = tensor_factor(weight, where)
    parts = [None] * (weight.shape[1] // GROUP) if importance is None else importance.split(GROUP)
    scales = torch.stack(
        [
            group_scales(group, factor, search=search, importance=part)
            for group, part in zip(weight.split(GROUP, 1), parts, strict=True)
        ],
        dim=1,
    )
    wcscale = torch.full((weight.shape[0],), factor, dtype=torch.float32, device=weight.device)
    return encode(weight, scales), (scales / factor).to(SCALE_DTYPE), wcscale


def weight_hat(codes: Tensor, scales: Tensor, wcscale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What the layer multiplies by: level · scale · wcscale, (n, k)."""
    return decode(codes, scales, dtype) * wcscale.to(dtype)[:, None]


# ------------------------------------------------------------------------------------------------------ activations


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Qa: codes and scales of the transformed activation, per token and 16 channels; the kernels' numerics contract.

    x        (..., k) float32, already smoothed and rotated. Not changed.
    Returns  codes uint8 (..., k), scales float8_e4m3fn (..., k/16): the E4M3 number nearest to min(absmax/6, 448), at
             least 2⁻⁹. A NaN or an infinity anywhere in a group makes its scale NaN and its codes 0.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    absmax = groups.abs().amax(-1)
    scales = round_scales(absmax / absmax.new_full((), LARGEST))  # a tensor: see svdq.rounding
    codes = encode_levels(nearest_levels(groups / scales[..., None]))
    finite = absmax.isfinite()
    codes = torch.where(finite[..., None], codes, 0)
    return codes.flatten(-2), torch.where(finite, scales, torch.nan).to(SCALE_DTYPE)


def fake_quantize_activation(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x̂ = level · scale (..., k): what the GEMM sees of x."""
    return decode(*quantize_activation(x), dtype)
