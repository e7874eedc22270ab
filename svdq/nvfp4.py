"""NVFP4: 4-bit floating point (E2M1) in groups of 16 along k, one 8-bit floating-point scale (E4M3) a group.

    value = level(code) · scale · wcscale[n]        level = 0, ½, 1, 1½, 2, 3, 4, 6 or its negative

Here is what svdq.grid.E2M1, whose codes are the levels' doubles, does not say: nibbles, the factor of a matrix, and Qa.

Weights: an E4M3 scale lies between 2⁻⁹ and 448, so a factor for the whole matrix brings the largest group's there. It
is a power of two: dividing by it is exact, it is exact in float16 and bfloat16 alike, and a weight has at most six
significant bits. absmax / 2688, the usual factor, would use half a binade more, on average, of the scales' seventeen.

Activations: scales alone, no factor, which the formula has no place for. Numbers beyond 6 · 448 = 2688 are cut off, and
groups whose largest is below 0.0005 become zeros; a smoothing may divide by any constant besides.

Rounding to a level is half to even, in the level's last bit: ties at ¼, ¾, 1¼, 1¾, 2½, 3½, 5. A scale has four
significant bits, so no quotient by it is rounded onto a tie that it does not lie on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from svdq.errors import NumericsError
from svdq.grid import E2M1

GROUP = E2M1.group
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the nibbles 0 … 7; 8 more is the sign
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-9, 448.0  # of groups of zeros too: no stored scale is 0


def to_nibbles(codes: Tensor) -> Tensor:
    """Codes of the grid, integers or float → uint8 0 … 15: bit 3 the sign, below it the level's index."""
    size = codes.abs()
    index = torch.where(size <= 4, size, torch.where(size <= 8, size // 2 + 2, 7)).to(torch.uint8)
    return index | (torch.signbit(codes).to(torch.uint8) << 3)


def decode(nibbles: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """nibbles (n, k), of which the low four bits count, and scales (n, k/16) → level · scale (n, k).

    A level has two significant bits and an E4M3 scale four: a product has six at most and lies between 2⁻¹⁰ and 2688,
    so it is exact in float32, bfloat16 and float16.
    """
    levels = torch.tensor([*LEVELS, *(-level for level in LEVELS)], dtype=dtype, device=nibbles.device)
    values = levels[(nibbles & 0xF).int()].unflatten(-1, (-1, GROUP))
    return (values * scales.to(dtype)[..., None]).flatten(-2)


def tensor_factor(weight: Tensor) -> Tensor:
    """wcscale of a matrix (n, k): the power of two that brings its largest scale into (224, 448], (n,) float32.

    Raises NumericsError if float16 has no such number.
    """
    mantissa, exponent = torch.frexp(weight.abs().amax() / (LEVELS[-1] * LARGEST_SCALE))  # ½ ≤ mantissa < 1, or both 0
    factor = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    wcscale = factor.clamp_min_(2.0**-24).float().expand(len(weight)).contiguous()  # the smallest positive float16
    check_wcscale(wcscale)
    return wcscale


def check_wcscale(wcscale: Tensor) -> None:
    """Raises NumericsError unless every factor is a positive, finite number in float32, bfloat16 and float16."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        stored = wcscale.to(dtype)
        wrong = ~(stored.isfinite() & (stored > 0))
        if wrong.any():
            found = f"the factor {wcscale[wrong][0]:.3g} is {stored[wrong][0]:.3g} in {dtype}"
            raise NumericsError(f"{found}; leave it in 16 bits: --ignore")


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Qa, the numerics contract with the kernels: per token and 16 channels, in float32.

    x        (..., k) float32, already smoothed and rotated. Not changed.
    Returns  nibbles uint8 (..., k) and scales float8_e4m3fn (..., k/16): the E4M3 number nearest to min(absmax/6, 448),
             at least 2⁻⁹. The sign of what becomes 0 is kept, as hardware conversions do. A NaN or an infinity anywhere
             in a group makes its scale NaN and its nibbles 0.
    """
    groups = x.unflatten(-1, (-1, GROUP))
    absmax = groups.abs().amax(-1)
    sixth = absmax / absmax.new_full((), LEVELS[-1])  # a tensor: see svdq.rounding
    scales = sixth.clamp(SMALLEST_SCALE, LARGEST_SCALE).to(E2M1.scale_dtype)
    codes = E2M1.round(groups / (scales.float() * E2M1.step)[..., None])
    finite = absmax.isfinite()
    nibbles = torch.where(finite[..., None], to_nibbles(codes.nan_to_num_(nan=0.0)), 0)
    return nibbles.flatten(-2), torch.where(finite, scales.float(), torch.nan).to(E2M1.scale_dtype)


def fake_quantize_activation(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x̂ = level · scale (..., k): what the GEMM sees of x."""
    return decode(*quantize_activation(x), dtype)
