"""Number formats as data: which integers exist, how many share a scale, what the scale is stored as.

A format is a value of `Grid`, not a class tree: the rounding, GPTQ, the packer and the verifier all read the same
few fields, so that a new format is a new value here. The weight and activation grids of W4A4 differ in one code:
activations use -8 (with a clip below 1 it is worth 1.5 % perplexity), weights do not (the packed kernels multiply by
a magnitude of 3 bits and a sign).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from svdq.config import ACTIVATION_GROUP


@dataclass(frozen=True)
class Grid:
    """A symmetric integer format with one scale per `group` consecutive values: value = code · scale.

    lo, hi       smallest and largest code
    group        values along K that share a scale
    scale_dtype  how the scale is stored; decoding multiplies in float32
    """

    name: str
    lo: int
    hi: int
    group: int
    scale_dtype: torch.dtype

    def with_group(self, group: int) -> Grid:
        return replace(self, group=group)

    def encode(self, values: Tensor, scales: Tensor) -> Tensor:
        """Round to the nearest code, ties to even. values (n, k) float32, scales (n, k/group) → int8 (n, k)."""
        grouped = values.unflatten(-1, (-1, self.group)) / scales.float().unsqueeze(-1)
        return grouped.round_().clamp_(self.lo, self.hi).to(torch.int8).flatten(-2)

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """codes (n, k) int8, scales (n, k/group) → values (n, k): exact in float32 for float16 scales."""
        return (codes.unflatten(-1, (-1, self.group)).to(dtype) * scales.to(dtype).unsqueeze(-1)).flatten(-2)


INT4_WEIGHT = Grid("int4", -7, 7, 64, torch.float16)
INT4_ACTIVATION = Grid("int4", -8, 7, ACTIVATION_GROUP, torch.float32)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two codes a byte: low nibble = even k, high nibble = odd k, two's complement. int8 (n, k) → uint8 (n, k/2)."""
    nibbles = codes.to(torch.uint8) & 0xF
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`: uint8 (n, k/2) → int8 (n, k) in [-8, 7]."""
    signed = packed.view(torch.int8)
    low = (signed << 4) >> 4  # arithmetic shifts extend the sign
    return torch.stack((low, signed >> 4), dim=-1).flatten(-2)
