"""Number formats as data: which integers exist, how many share a scale, what the scale is stored as.

A format is a value of `Grid`, not a class tree: the rounding, GPTQ, the packer and the verifier all read the same
few fields, so that a new format is a new value here. The weight and activation grids of W4A4 differ in one code:
activations use -8 (with a clip below 1 it is worth 1.5 % perplexity), weights do not (the packed kernels multiply by
a magnitude of 3 bits and a sign).

Codes are integers that a scale multiplies, in every format: those of E2M1 are its values' doubles, those of an
asymmetric format count from the zero point, which is a matter of storing them (`zero_points`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from svdq.config import ACTIVATION_GROUP, ROW, LayerConfig

SMALLEST_SCALE = 2.0**-24  # the smallest positive float16, so that no stored scale is 0
_SMALLEST_E4M3, _LARGEST_E4M3 = 2.0**-9, 448.0


@dataclass(frozen=True)
class Grid:
    """A format with one scale per `group` consecutive values: value = code · step · scale (· unit, one a row).

    lo, hi       smallest and largest code; of an asymmetric grid before the zero point is taken off
    group        values along K that share a scale
    scale_dtype  how the scale is stored; decoding multiplies in float32
    asymmetric   codes run from lo − zero to hi − zero, with a zero point in [lo, hi] for each row and group
    e2m1         codes are the doubles of the E2M1 numbers: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives
    """

    name: str
    lo: int
    hi: int
    group: int
    scale_dtype: torch.dtype
    asymmetric: bool = False
    e2m1: bool = False

    @property
    def step(self) -> float:
        return 0.5 if self.e2m1 else 1.0

    def with_group(self, group: int) -> Grid:
        return replace(self, group=group)

    def round(self, ratio: Tensor, out: Tensor | None = None, zero: Tensor | None = None) -> Tensor:
        """ratio, in codes → the nearest code, ties to even, as float. zero: of an asymmetric grid, broadcast."""
        out = torch.empty_like(ratio) if out is None else out
        if self.e2m1:
            magnitude = ratio.abs()
            spacing = 1.0 + (magnitude > 4) + 2.0 * (magnitude > 8)
            return torch.div(ratio, spacing, out=out).round_().mul_(spacing).clamp_(self.lo, self.hi)
        torch.round(ratio, out=out)
        if zero is None:
            return out.clamp_(self.lo, self.hi)
        return out.clamp_(self.lo - zero, self.hi - zero)

    def store_scales(self, per_code: Tensor, unit: Tensor | None = None) -> Tensor:
        """What a code is multiplied by → the nearest scale that can be stored, finite and > 0, in its type."""
        if self.scale_dtype != torch.float8_e4m3fn:
            return per_code.to(self.scale_dtype).clamp_min(SMALLEST_SCALE)
        wanted = per_code / self.step if unit is None else per_code / (unit * self.step)
        return wanted.clamp(_SMALLEST_E4M3, _LARGEST_E4M3).to(self.scale_dtype)

    def per_code(self, scales: Tensor, unit: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """What a code is multiplied by, from the stored scales: (n, …), unit (n,)."""
        wide = scales.to(dtype)
        wide = wide * self.step if self.e2m1 else wide
        return wide if unit is None else wide * unit.to(dtype).view(-1, *[1] * (wide.dim() - 1))

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        """Round to the nearest code, ties to even. values (n, k) float32, scales (n, k/group) → int8 (n, k)."""
        grouped = values.unflatten(-1, (-1, self.group)) / scales.float().unsqueeze(-1)
        return grouped.round_().clamp_(self.lo, self.hi).to(torch.int8).flatten(-2)

    def decode(
        self, codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, unit: Tensor | None = None
    ) -> Tensor:
        """codes (n, k) int8, scales (n, k/group) → values (n, k): exact in float32 for float16 scales, unit None."""
        per_code = self.per_code(scales, unit, dtype)
        return (codes.unflatten(-1, (-1, self.group)).to(dtype) * per_code.unsqueeze(-1)).flatten(-2)


INT4_WEIGHT = Grid("int4", -7, 7, 64, torch.float16)
INT4_ACTIVATION = Grid("int4", -8, 7, ACTIVATION_GROUP, torch.float32)
UINT4 = Grid("uint4", 0, 15, 128, torch.float16, asymmetric=True)
INT4_WHOLE = Grid("int4", -8, 7, 128, torch.float16)  # UINT4 with the zero point 8 everywhere
INT8 = Grid("int8", -127, 127, ROW, torch.float16)
NF4_CODES = Grid("nf4", 0, 15, 64, torch.float32)  # the range of the codes; its values are svdq.nf4's
E2M1 = Grid("e2m1", -12, 12, 16, torch.float8_e4m3fn, e2m1=True)


def weight_grid(layer: LayerConfig, k: int) -> Grid:
    """The grid of a linear of k in_features; a group size of ROW becomes k. NF4 is no grid: see svdq.nf4."""
    grids = {"w4a4": INT4_WEIGHT, "w4a16": INT4_WHOLE if layer.symmetric else UINT4, "w8a16": INT8, "nvfp4": E2M1}
    return grids[layer.format].with_group(layer.group_size or k)


def zero_points(codes: Tensor, group: int) -> Tensor:
    """The zero points of an asymmetric grid's codes (n, k), which count from them: uint8 (n, k/group).

    Codes of one group lie in [−z, 15 − z] for its zero point z, and so in that range for the smallest z that reaches
    the lowest of them; rounding to nearest always takes the lowest, so that this is its z = round(−min / scale).
    """
    return (-codes.unflatten(-1, (-1, group)).amin(-1)).clamp_min(0).to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte: low nibble = even k, high nibble = odd k, two's complement. int8 (n, k) → uint8 (n, k/2)."""
    nibbles = codes.to(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 (n, k/2) → int8 (n, k) in [-8, 7]."""
    signed = packed.view(torch.int8)
    low = (signed << 4) >> 4  # arithmetic shifts extend the sign
    return torch.stack((low, signed >> 4), dim=-1).flatten(-2)
