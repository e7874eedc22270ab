"""Weight-only linears as torch operators: weights in 4 or 8 bits, activations in 16.

    w4a16_linear(x, qweight, w_scales, w_zeros, group, proj_down, proj_up, bias, dtype) -> y
    w8a16_linear(x, qweight, w_scales, proj_down, proj_up, bias, dtype) -> y

    y = x · weight_hatᵀ + (x · proj_down) · proj_upᵀ + bias,    weight_hat = (code − zero) · scale

    x        (..., k) float16 or bfloat16; float32 and what is on a CPU is computed in plain torch
    qweight  int32 (n, k/8): eight codes 0..15 in a word, the lowest k in the lowest bits; or int8 (n, k), −127..127
    w_scales float16 (n, k/group); of 8 bits (n, 1)      w_zeros  uint8 (n, k/group), 0..15; None: 8 everywhere
    group    32, 64, 128 or k                            proj_down, proj_up  float16 (k, r), (n, r), or both None
    bias     (n,), as rounded to x's type, or None       dtype    of y: x's, or float32 for the sums as they are

Canonical tensors are read as they are: the packed layout of these formats is their canonical order. k is a multiple of
32, n and m are any number. Up to 64 rows of x weight_only.cu streams the weights once, code − zero being exact on the
tensor cores and all sums float32. More rows are a matrix product of 16-bit numbers: expand_weight.cu writes them a part
at a time, rounded to x's type, torch multiplies, and the low rank is r more columns of both operands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from svdq.grid import unpack_nibbles
from svdq.kernels import compile as kernels
from svdq.kernels import layout, tiles
from svdq.kernels.launch import launch
from svdq.kernels.ops import SCALAR, aligned_rows, check_tensors, register

GROUPS = (32, 64, 128)
FEW_TOKENS = 64  # up to here the weights stream once, through weight_only.cu
EXPANDED_BYTES = 1 << 26  # of weights in 16 bits at a time
_RANK_TILE = 8  # columns of the low rank that a kernel reads at once
_WHOLE_ROW = 30  # the group's logarithm that puts all k in group 0


@dataclass(frozen=True)
class Weight:
    """A weight's canonical tensors; zeros None: 8 everywhere for 4 bits, 0 for 8."""

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * (8 if self.bits == 4 else 1)

    @property
    def group_shift(self) -> int:
        return _WHOLE_ROW if self.group == self.shape[1] else self.group.bit_length() - 1

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """(n, k): (code − zero) · scale, exact in float32."""
        if self.bits == 8:
            return self.codes.to(dtype) * self.scales.to(dtype)
        zeros = 8 if self.zeros is None else self.zeros.to(dtype)[..., None]
        codes = unpack_nibbles(self.codes.view(torch.uint8)) & 0xF  # bytes of a word are little-endian
        grouped = codes.to(dtype).unflatten(-1, (-1, self.group))
        return ((grouped - zeros) * self.scales.to(dtype)[..., None]).flatten(-2)


@dataclass(frozen=True)
class LowRank:
    down: Tensor
    up: Tensor


# ------------------------------------------------------------------------------------------- the operators


def w4a16_linear(
    x: Tensor,
    qweight: Tensor,
    w_scales: Tensor,
    w_zeros: Tensor | None,
    group: int,
    proj_down: Tensor | None,
    proj_up: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See the module. Raises ValueError for operands that do not fit, KernelError where kernels cannot run."""
    weight = Weight(4, qweight, w_scales, w_zeros, group)
    return _linear("w4a16_linear", x, weight, proj_down, proj_up, bias, dtype)


def w8a16_linear(
    x: Tensor,
    qweight: Tensor,
    w_scales: Tensor,
    proj_down: Tensor | None,
    proj_up: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See the module and `w4a16_linear`."""
    weight = Weight(8, qweight, w_scales, None, qweight.shape[-1])
    return _linear("w8a16_linear", x, weight, proj_down, proj_up, bias, dtype)


def _linear(
    operator: str,
    x: Tensor,
    weight: Weight,
    down: Tensor | None,
    up: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    low_rank = _check(operator, x, weight, down, up, bias, dtype)
    n, k = weight.shape
    if x.dtype not in SCALAR:
        return _computed(x, weight, low_rank, bias, dtype)
    rows = aligned_rows(x.reshape(-1, k))
    bias = None if bias is None else bias.to(x.dtype)
    if low_rank is not None and low_rank.up.shape[1] % _RANK_TILE:
        rank = layout.round_up(low_rank.up.shape[1], _RANK_TILE)
        low_rank = LowRank(layout.pad(low_rank.down, k, rank), layout.pad(low_rank.up, n, rank))
    if not len(rows) or not n:
        y = x.new_empty((len(rows), n), dtype=dtype or x.dtype)
    elif len(rows) <= FEW_TOKENS:
        y = _of_few_rows(rows, weight, low_rank, bias, dtype or x.dtype)
    else:
        y = _of_many_rows(rows, weight, low_rank, bias, dtype or x.dtype)
    return y.view(*x.shape[:-1], n)


def _of_few_rows(
    x: Tensor, weight: Weight, low_rank: LowRank | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    (n, k), m = weight.shape, len(x)
    t, up, rank = None, None, 0
    if low_rank is not None:
        t, up, rank = _projected(x, low_rank.down), low_rank.up, low_rank.up.shape[1]
    y = x.new_empty((m, n), dtype=dtype)
    tile = tiles.weight_only_tile(weight.bits, m, weight.group)
    launch(
        kernels.weight_only_kernel(SCALAR[x.dtype], tile),
        x.device,
        (-(-n // tile.rows), -(-m // tile.tokens)),
        32 * tile.warps,
        [
            x, np.int64(x.stride(0)), weight.codes, weight.scales, weight.zeros, t, up, bias, y, m, n, k,
            weight.group_shift, rank, int(dtype == torch.float32),
        ],
        early=True,
        shared_bytes=tile.shared_bytes,
    )  # fmt: skip
    return y


def _of_many_rows(
    x: Tensor, weight: Weight, low_rank: LowRank | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    n, k = weight.shape
    width = k
    if low_rank is not None:
        width += low_rank.up.shape[1]
        x = torch.cat((x, _projected(x, low_rank.down).to(x.dtype)), 1)
    y = x.new_empty((len(x), n), dtype=dtype)
    count = max(1, EXPANDED_BYTES // (2 * width))
    expanded = x.new_empty((min(n, count), width))
    for first in range(0, n, count):
        part = slice(first, min(n, first + count))
        numbers = expanded[: part.stop - first]
        _expand(weight, part, numbers)
        if low_rank is not None:
            numbers[:, k:] = low_rank.up[part]
        if dtype != x.dtype:
            y[:, part] = torch.mm(x, numbers.t(), out_dtype=dtype)
            if bias is not None:
                y[:, part] += bias[part]
        elif bias is None:
            torch.mm(x, numbers.t(), out=y[:, part])
        else:
            torch.addmm(bias[part], x, numbers.t(), out=y[:, part])
    return y


def _expand(weight: Weight, part: slice, numbers: Tensor) -> None:
    """Rows of the weight into the first k columns of `numbers`."""
    k = weight.shape[1]
    zeros = None if weight.zeros is None else weight.zeros[part]
    launch(
        kernels.expand_weight_kernel(SCALAR[numbers.dtype], weight.bits),
        numbers.device,
        (-(-k // 2048), min(len(numbers), 1024)),
        256,
        [
            weight.codes[part], weight.scales[part], zeros, numbers, len(numbers), k, weight.group_shift,
            numbers.stride(0),
        ],
        early=True,
    )  # fmt: skip


def _projected(x: Tensor, down: Tensor) -> Tensor:
    """x · proj_down, float32 (m, r)."""
    if x.is_cuda and x.dtype == down.dtype:
        return torch.mm(x, down, out_dtype=torch.float32)
    return x.float() @ down.float()


# ------------------------------------------------------------------------------------------- checks, reference


def _check(
    operator: str,
    x: Tensor,
    weight: Weight,
    down: Tensor | None,
    up: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> LowRank | None:
    """Raises ValueError unless the operands fit each other. Returns the low rank if there is one."""
    if weight.codes.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[1]:
        found = f"x {list(x.shape)}, qweight {list(weight.codes.shape)}"
        raise ValueError(f"{operator}: found {found}; wanted (..., k) and a matrix of n rows for k")
    (n, k), group = weight.shape, weight.group
    if not k or k % 32:
        raise ValueError(f"{operator}: found k {k}; wanted a multiple of 32")
    if group != k and (group not in GROUPS or k % group):
        raise ValueError(f"{operator}: found group {group}; wanted 32, 64, 128, dividing k, or k = {k}")
    if dtype not in (None, x.dtype, torch.float32):
        raise ValueError(f"{operator}: dtype: found {dtype}; wanted {x.dtype} or torch.float32")
    if (down is None) != (up is None):
        raise ValueError(f"{operator}: proj_down and proj_up go together")
    if weight.codes.numel() * weight.codes.element_size() >= 1 << 35:  # vectors of 16 bytes, counted in 31 bits
        raise ValueError(f"{operator}: qweight: found {list(weight.codes.shape)}; wanted less than 32 GiB")
    rank = 0 if down is None else down.shape[-1]
    check_tensors(
        operator,
        x,
        ("qweight", weight.codes, tuple(weight.codes.shape), torch.int32 if weight.bits == 4 else torch.int8),
        ("w_scales", weight.scales, (n, k // group), torch.float16),
        ("w_zeros", weight.zeros, (n, k // group), torch.uint8),
        ("proj_down", down, (k, rank), torch.float16),
        ("proj_up", up, (n, rank), torch.float16),
        ("bias", bias, (n,), None),
    )
    return LowRank(down, up) if down is not None and up is not None and rank else None


def _computed(
    x: Tensor, weight: Weight, low_rank: LowRank | None, bias: Tensor | None, dtype: torch.dtype | None
) -> Tensor:
    """In plain torch: float32 arithmetic (float64 for such x), one rounding at the end."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = x.to(work)
    y = rows @ weight.dequantized(work).t()
    if low_rank is not None:
        y += (rows @ low_rank.down.to(work)) @ low_rank.up.to(work).t()
    if bias is not None:
        y += bias.to(x.dtype)
    return y.to(dtype or x.dtype)


def _w4_reference(x, qweight, w_scales, w_zeros, group, proj_down, proj_up, bias, dtype=None):
    weight = Weight(4, qweight, w_scales, w_zeros, group)
    return _computed(x, weight, _check("w4a16_linear", x, weight, proj_down, proj_up, bias, dtype), bias, dtype)


def _w8_reference(x, qweight, w_scales, proj_down, proj_up, bias, dtype=None):
    weight = Weight(8, qweight, w_scales, None, qweight.shape[-1])
    return _computed(x, weight, _check("w8a16_linear", x, weight, proj_down, proj_up, bias, dtype), bias, dtype)


def _w4_fake(x, qweight, w_scales, w_zeros, group, proj_down, proj_up, bias, dtype=None):
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=dtype or x.dtype)


def _w8_fake(x, qweight, w_scales, proj_down, proj_up, bias, dtype=None):
    return x.new_empty((*x.shape[:-1], qweight.shape[0]), dtype=dtype or x.dtype)


register(
    "w4a16_linear(Tensor x, Tensor qweight, Tensor w_scales, Tensor? w_zeros, SymInt group, Tensor? proj_down, "
    "Tensor? proj_up, Tensor? bias, ScalarType? dtype=None) -> Tensor",
    w4a16_linear,
    _w4_reference,
    _w4_fake,
)
register(
    "w8a16_linear(Tensor x, Tensor qweight, Tensor w_scales, Tensor? proj_down, Tensor? proj_up, Tensor? bias, "
    "ScalarType? dtype=None) -> Tensor",
    w8a16_linear,
    _w8_reference,
    _w8_fake,
)
