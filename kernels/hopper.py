"""Operators for Hopper, whose tensor cores have no 4-bit integers: activations as e4m3 bytes, weights as they are.

    quantize_lora_down_e4m3(x, down, inv_smooth, rotation, clip, row_factor, norm_weight, values) -> codes, scales, t
    w4_gemm_lora_e4m3(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank) -> y

values = False is W4A4: the codes and scales of svdq.kernels.ops, a code −8 … 7 being an e4m3 number, so that a group's
sum is the same integer. values = True is W4A8: x' in 8 bits, one scale a token, absmax / 448, and no clip; the same
packed weights. The tensor cores cut sums off below their largest product, so the group sums of W4A8 are not exact:
relative errors of 3e-05 were measured.

Operands are as in svdq.kernels.ops, except, with `rows` the padded number of tokens:
    codes    uint8 (rows, k): e4m3 bytes in the order `fp8` of svdq.kernels.layout
    scales   float32 (rows, k / 64) in the order `token_scales`; values: (rows,)
    t        float32 (shares, rank, rows), a share in the order `token_t`
The rows past the last panel of 16 tokens are not written, and what is computed from them is not stored.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from svdq.kernels import compile as kernels
from svdq.kernels import layout, ops, reference, tiles
from svdq.kernels.compile import KernelError
from svdq.kernels.launch import launch

CAPABILITY = (9, 0)
PAD_ROWS = 384  # a whole number of tiles of every size
MOST_ROWS = 2**24 - PAD_ROWS  # the kernels count the bytes of a stage's rows in 32 bits


def runs_on(device: torch.device) -> bool:
    """Whether a device is a GPU that runs these kernels."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


@cache
def require(device: torch.device) -> None:
    """Raises KernelError unless it is."""
    if not runs_on(device):
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        raise KernelError(
            f"activations of a byte need a Hopper GPU (compute capability 9.0), {device} has {found}; "
            "use activations='int4', or kernels='reference'"
        )


def _shares(m: int, groups: int, values: bool) -> int:
    """Over how many blocks the quantizer spreads a panel's groups: a group for each of a block's eight warps, as far as
    two blocks a multiprocessor go. Blocks that wait for each other's largest magnitude are better fewer."""
    panels = (m + layout.PANEL - 1) // layout.PANEL
    return max(1, min(8, (groups + 7) // 8, max(2, (176 if values else 264) // max(1, panels))))


def _rows(m: int) -> int:
    return layout.round_up(m, PAD_ROWS)


# ------------------------------------------------------------------------------------------ quantize_lora_down_e4m3


def quantize_lora_down_e4m3(
    x: Tensor,
    down: Tensor,
    inv_smooth: Tensor | None,
    rotation: bool,
    clip: float,
    row_factor: Tensor | None,
    norm_weight: Tensor | None,
    values: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """x (m, k) → codes, scales, t; see svdq.kernels.ops.quantize_lora_down for the arguments."""
    if x.dtype not in ops.SCALAR:
        return _quantize_reference(x, down, inv_smooth, rotation, clip, row_factor, norm_weight, values)
    _check_quantize(x, down, inv_smooth, row_factor, norm_weight)
    require(x.device)
    x = ops.aligned_rows(x)
    norm_weight = None if norm_weight is None else ops.aligned_vector(norm_weight, x)
    m, k = x.shape
    padded_k, rank = down.shape
    codes, scales, t = _quantize_fake(x, down, inv_smooth, rotation, clip, row_factor, norm_weight, values)
    if m:
        parts = ops.rank_parts(rank)
        launch(
            kernels.quantize_kernel(ops.SCALAR[x.dtype], rank // parts, 2, 2 if values else 1),
            x.device,
            (-(-m // layout.PANEL), t.shape[0], parts),
            256,
            [
                x, np.int64(x.stride(0)), m, k, padded_k // layout.TILE_K, down, inv_smooth, int(rotation), float(clip),
                row_factor, norm_weight, codes, scales, t, rank, codes.shape[0],
            ],
            early=True,
            cluster=(1, t.shape[0], 1) if values else (),
        )  # fmt: skip
    return codes, scales, t


def _quantize_fake(x, down, inv_smooth, rotation, clip, row_factor, norm_weight, values):
    (padded_k, rank), rows = down.shape, (x.shape[0] + PAD_ROWS - 1) // PAD_ROWS * PAD_ROWS
    groups = padded_k // layout.TILE_K
    return (
        x.new_empty((rows, padded_k), dtype=torch.uint8),
        x.new_empty((rows,) if values else (rows, groups), dtype=torch.float32),
        x.new_empty((_shares(x.shape[0], groups, values), rank, rows), dtype=torch.float32),
    )


def _check_quantize(
    x: Tensor, down: Tensor, inv_smooth: Tensor | None, row_factor: Tensor | None, norm_weight: Tensor | None
) -> None:
    operator = "quantize_lora_down_e4m3"
    ops.check_quantize(operator, x, down, inv_smooth, row_factor, norm_weight)
    if x.shape[0] >= MOST_ROWS:
        raise ValueError(f"{operator}: {x.shape[0]} rows are too many at once")


def _quantize_reference(x, down, inv_smooth, rotation, clip, row_factor, norm_weight, values):
    _check_quantize(x, down, inv_smooth, row_factor, norm_weight)
    shares = _shares(x.shape[0], down.shape[0] // layout.TILE_K, values)
    return reference.quantize_lora_down_e4m3(
        x, down, inv_smooth, rotation, clip, row_factor, norm_weight, values, shares, _rows(x.shape[0])
    )


# ------------------------------------------------------------------------------------------ w4_gemm_lora_e4m3


def w4_gemm_lora_e4m3(
    codes: Tensor,
    scales: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    dtype: torch.dtype,
    first_rank: Tensor | None = None,
) -> Tensor:
    """→ y (m, n) of dtype. On the way the weights lie in a buffer of n · k bytes, a byte each."""
    if dtype not in ops.OUT:
        return _gemm_reference(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank)
    _check_gemm(codes, scales, t, qweight, wscales, up, bias, m, n, first_rank)
    require(codes.device)
    y = codes.new_empty((m, n), dtype=dtype)
    (groups, padded_n), rank, token_scale = wscales.shape, up.shape[1], scales.dim() == 1
    if not m or not n:
        return y
    expanded = codes.new_empty((padded_n, groups * layout.TILE_K))
    launch(
        kernels.expand_kernel(),
        codes.device,
        (groups, padded_n // layout.TILE_N),
        256,
        [qweight, expanded, groups, padded_n],
        early=True,
    )
    processors = _processors(codes.device.index)
    tile = tiles.hopper_tile(_wide_tiles(m, n, processors), token_scale, y.element_size())
    blocks = -(-m // tile.tokens) * -(-n // layout.TILE_N)
    launch(
        kernels.wgmma_kernel(ops.OUT[dtype], tile),
        codes.device,
        (min(blocks, processors),),
        tile.threads,
        [
            codes, scales, t, t.shape[0], codes.shape[0], expanded, padded_n, wscales, up, bias, y, m, n, groups, rank,
            t.shape[1], first_rank,
        ],
        early=True,
        shared_bytes=tile.shared_bytes,
    )  # fmt: skip
    return y


def _wide_tiles(m: int, n: int, processors: int) -> bool:
    """Whether tiles of 192 tokens end sooner than those of 64, beside which each takes some 2.2 times as long."""

    def rounds(tokens: int) -> int:
        return -(-(-(-m // tokens) * -(-n // layout.TILE_N)) // processors)

    return 2.2 * rounds(192) < rounds(64)


@cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _check_gemm(
    codes: Tensor,
    scales: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    first_rank: Tensor | None,
) -> None:
    operator = "w4_gemm_lora_e4m3"
    rows, groups = _rows(m), wscales.shape[0] if wscales.dim() == 2 else 0
    shares = _shares(m, groups, scales.dim() == 1)
    ops.check_weights(operator, codes, t, qweight, wscales, up, bias, m, n, first_rank)
    if groups % 2 or m >= MOST_ROWS:
        raise ValueError(f"{operator}: found {groups} groups, m {m}; wanted an even number, m below {MOST_ROWS}")
    ops.check_tensors(
        operator,
        codes,
        ("codes", codes, (rows, groups * layout.TILE_K), torch.uint8),
        ("scales", scales, (rows,) if scales.dim() == 1 else (rows, groups), torch.float32),
        ("t", t, (shares, ops.rank_of_t(t.shape[1], up, first_rank), rows), torch.float32),
    )


def _gemm_reference(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank=None):
    _check_gemm(codes, scales, t, qweight, wscales, up, bias, m, n, first_rank)
    return reference.w4_gemm_lora_e4m3(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank)


def _gemm_fake(codes, scales, t, qweight, wscales, up, bias, m, n, dtype, first_rank=None):
    return codes.new_empty((m, n), dtype=dtype)


ops.register(
    "quantize_lora_down_e4m3(Tensor x, Tensor down, Tensor? inv_smooth, bool rotation, float clip, Tensor? row_factor, "
    "Tensor? norm_weight, bool values) -> (Tensor, Tensor, Tensor)",
    quantize_lora_down_e4m3,
    _quantize_reference,
    _quantize_fake,
)
ops.register(
    "w4_gemm_lora_e4m3(Tensor codes, Tensor scales, Tensor t, Tensor qweight, Tensor wscales, Tensor up, Tensor? bias, "
    "SymInt m, SymInt n, ScalarType dtype, Tensor? first_rank=None) -> Tensor",
    w4_gemm_lora_e4m3,
    _gemm_reference,
    _gemm_fake,
)
