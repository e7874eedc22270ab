"""The large matrix products: float32 or float64 as they are on a CPU, float32 on a GPU's tensor cores.

A GPU multiplies float32 matrices without tensor cores, at a twelfth of their speed, and TF32 would lose 13 bits. Two
float16 numbers hold 22 of float32's 24 bits: of their four products the three large ones are added up in float32. What
is lost is lost in those sums, for tensor cores cut off where they should round: of 4,096 terms 2.2e-5 of Σ|a·b| was
seen on an H200 (tests/gpu/test_products.py).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_SMALL = 1 << 34  # multiplications below which the pieces cost more than they save


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a·b, (m, k)·(k, n). On a GPU a large float32 product is made of pieces."""
    if not (a.is_cuda and a.dtype == b.dtype == torch.float32) or a.numel() * b.shape[1] < _SMALL:
        return a @ b
    return product_of_pieces(a, b)


def product_of_pieces(a: Tensor, b: Tensor) -> Tensor:
    (a_first, a_second, a_unit), (b_first, b_second, b_unit) = pieces(a), pieces(b)
    out = torch.mm(a_first, b_first, out_dtype=torch.float32)
    out += torch.mm(a_first, b_second, out_dtype=torch.float32)
    out += torch.mm(a_second, b_first, out_dtype=torch.float32)
    return out.mul_(a_unit * b_unit)


def gram(matrix: Tensor, blocks: int = 4) -> Tensor:
    """matrixᵀ·matrix (k, k) of a (m, k) matrix, in its type. On a GPU a large one in pieces, by two products.

    Elsewhere only blocks on or above the diagonal are multiplied, the others mirrored: 5/8 of the products; torch has
    no symmetric rank-k update.
    """
    k = matrix.shape[1]
    if matrix.is_cuda and matrix.dtype == torch.float32 and matrix.numel() * k >= _SMALL:
        first, second, unit = pieces(matrix)
        mixed = torch.mm(first.t(), second, out_dtype=torch.float32)
        square = torch.mm(first.t(), first, out_dtype=torch.float32)
        return square.add_(mixed).add_(mixed.t()).mul_(unit * unit)
    out = matrix.new_empty((k, k))
    edges = [k * i // blocks for i in range(blocks + 1)]
    for low, high in pairwise(edges):
        torch.matmul(matrix[:, low:high].t(), matrix[:, low:], out=out[low:high, low:])
        out[high:, low:high] = out[low:high, high:].t()
    return out


def pieces(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 → two float16 matrices and a power of two, a float32 scalar: (first + second)·unit = matrix.

    To 2⁻²³ of an entry, or 2⁻³⁸ of the largest one where that is more: float16 ends there.
    """
    exponent = torch.frexp(matrix.abs().amax())[1]
    unit = torch.ldexp(matrix.new_ones(()), exponent - 14)
    scaled = matrix / unit
    first = scaled.half()
    return first, scaled.sub_(first).half(), unit
