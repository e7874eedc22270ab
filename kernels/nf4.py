"""NF4 on CUDA: the tensors of bitsandbytes as they are stored, see svdq.nf4 for their meaning.

    nf4_dequantize(packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, k, dtype) -> weight_hat (n, k)
    nf4_linear(x, packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, bias) -> y (m, n) of x's type

Both are torch operators, torch.ops.svdq.*. The dequantized weight is bitsandbytes' own, bit for bit: float32 products
rounded once. nf4_linear of up to FEW_ROWS rows in 16 bits, k a multiple of 64, is one launch that looks codes up on the
way and sums in float32; its levels are rounded to float16 (see nf4_few_rows.cu), which costs less than rounding y does.
Else, and for float32 inputs, it dequantizes to x's type and takes torch's product. On a CPU both run plain torch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from svdq import nf4
from svdq.kernels import compile as kernels
from svdq.kernels import ops
from svdq.kernels.launch import launch

FEW_ROWS = 32  # a block of threads takes up to 16
BLOCK_WEIGHTS = nf4.BLOCK * nf4.NESTED_BLOCK  # of one block of threads of the dequantization
WARPS = 8  # of a block of nf4_few_rows.cu
AT_ONCE = 256  # strips up to which a block has one of them: so many are there at once, two a multiprocessor
SHARED_BYTES = 1024 + 260 * 256 + 256 * 4  # what may be left out at its beginning, levels and x, scales
MOST = 2**31 - 1  # rows, columns and scales are counted in 32 bits


def nf4_dequantize(
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested_absmax: Tensor,
    nested_quant_map: Tensor,
    offset: float,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """weight_hat (n, k) of dtype: float16, bfloat16 or float32."""
    _check("nf4_dequantize", packed, absmax, quant_map, nested_absmax, nested_quant_map, n, k)
    if dtype not in ops.OUT:
        raise ValueError(f"nf4_dequantize: found {dtype}; wanted float16, bfloat16 or float32")
    weight = packed.new_empty((n, k), dtype=dtype)
    launch(
        kernels.nf4_dequantize_kernel(ops.OUT[dtype]),
        packed.device,
        (-(-n * k // BLOCK_WEIGHTS),),
        256,
        [packed, absmax, quant_map, nested_absmax, nested_quant_map, float(offset), weight, np.int64(n * k)],
        early=True,
    )
    return weight


def nf4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested_absmax: Tensor,
    nested_quant_map: Tensor,
    offset: float,
    n: int,
    bias: Tensor | None,
) -> Tensor:
    """x (m, k) · weight_hatᵀ + bias → (m, n) of x's type; bias (n,) or None."""
    _check_linear(x, packed, absmax, quant_map, nested_absmax, nested_quant_map, n, bias)
    (m, k), weight = x.shape, (packed, absmax, quant_map, nested_absmax, nested_quant_map, offset)
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    if x.dtype not in ops.SCALAR or m > FEW_ROWS or k % nf4.BLOCK:
        return torch.nn.functional.linear(x, nf4_dequantize(*weight, n, k, x.dtype), bias)
    x, y = ops.aligned_rows(x), x.new_empty((m, n))
    if m:
        tiles = 1 if m <= 4 else 2 if m <= 8 else 4
        strips = 1 if tiles == 1 and -(-n // 16) <= AT_ONCE else 2
        launch(
            kernels.nf4_few_rows_kernel(ops.SCALAR[x.dtype], tiles, strips),
            x.device,
            (-(-n // (16 * strips)), -(-m // (4 * tiles))),
            WARPS * 32,
            [
                x, np.int64(x.stride(0)), packed, absmax, quant_map, nested_absmax, nested_quant_map, float(offset),
                bias, y, m, n, k // nf4.BLOCK,
            ],
            early=True,
            shared_bytes=SHARED_BYTES + WARPS * 4 * tiles * 8,  # and the units of x
        )  # fmt: skip
    return y


def _check(
    operator: str,
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested_absmax: Tensor,
    nested_quant_map: Tensor,
    n: int,
    k: int,
) -> None:
    """Raises ValueError unless the tensors are those of an (n, k) weight."""
    if n < 1 or k < 1 or n * k > nf4.BLOCK * MOST:
        raise ValueError(f"{operator}: found n {n}, k {k}; wanted at least 1, and up to {MOST} blocks of {nf4.BLOCK}")
    tensors = (packed, absmax, quant_map, nested_absmax, nested_quant_map)
    names = ("packed", "absmax", "quant_map", "nested_absmax", "nested_quant_map")
    sizes = nf4.tensor_sizes(n, k, torch.float32).values()
    wanted = [(name, x, shape, dtype) for name, x, (dtype, shape) in zip(names, tensors, sizes, strict=False)]
    ops.check_tensors(operator, packed, *wanted)


def _check_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested_absmax: Tensor,
    nested_quant_map: Tensor,
    n: int,
    bias: Tensor | None,
) -> None:
    operator = "nf4_linear"
    if x.dim() != 2 or x.dtype not in ops.OUT or x.device != packed.device:
        found = f"{x.dtype} {list(x.shape)} on {x.device}"
        raise ValueError(f"{operator}: x: found {found}; wanted a matrix in 16 or 32 bits on {packed.device}")
    _check(operator, packed, absmax, quant_map, nested_absmax, nested_quant_map, n, x.shape[1])
    ops.check_tensors(operator, x, ("bias", bias, (n,), None))


def _dequantize_reference(packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, k, dtype):
    _check("nf4_dequantize", packed, absmax, quant_map, nested_absmax, nested_quant_map, n, k)
    return nf4.dequantize(packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, k, dtype)


def _dequantize_fake(packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, k, dtype):
    return packed.new_empty((n, k), dtype=dtype)


def _linear_reference(x, packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, bias):
    """Of float32 values, in float32, with one rounding at the end."""
    _check_linear(x, packed, absmax, quant_map, nested_absmax, nested_quant_map, n, bias)
    maps = (packed, absmax, quant_map, nested_absmax, nested_quant_map)
    weight = nf4.dequantize(*maps, offset, n, x.shape[1], torch.float32)
    y = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
    return y.to(x.dtype)


def _linear_fake(x, packed, absmax, quant_map, nested_absmax, nested_quant_map, offset, n, bias):
    return x.new_empty((x.shape[0], n))


_MAPS = "Tensor quant_map, Tensor nested_absmax, Tensor nested_quant_map"
_WEIGHT = f"Tensor packed, Tensor absmax, {_MAPS}, float offset, SymInt n"
ops.register(
    f"nf4_dequantize({_WEIGHT}, SymInt k, ScalarType dtype) -> Tensor",
    nf4_dequantize,
    _dequantize_reference,
    _dequantize_fake,
)
ops.register(f"nf4_linear(Tensor x, {_WEIGHT}, Tensor? bias) -> Tensor", nf4_linear, _linear_reference, _linear_fake)
