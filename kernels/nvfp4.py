"""NVFP4 on a GPU: operators, and a linear's canonical tensors in the order that they read.

    nvfp4_quantize(x, down, inv_smooth, rotation) -> codes, scales, t
    nvfp4_gemm(codes, scales, t, qweight, wscales, wcscale, up, bias, m, n, dtype) -> y

    y = (x̂ · ŵᵀ) · wcscale + t · proj_upᵀ + bias        x̂, ŵ: E2M1 codes times E4M3 scales, sixteen channels each

Tensor cores with 4-bit floating-point operands are in GPUs of compute capability 12 (there is a kernel for them, which
has never run). All others multiply the same numbers in 16 bits: code · scale has six significant bits at most, so the
operands are exact and only sums are rounded, in float32. Up to FEW_TOKENS rows one kernel reads the 4-bit weights; for
more, both operands are expanded to bfloat16 for torch's own product, which takes 2·n·k + 2·m·k + 4·m·n bytes meanwhile.

Operands are as in svdq.kernels.ops, with M' = m padded to 16, K' and N' to 128, except
    codes    (M', K'/2) uint8      order `codes`         scales   (M', K'/16) uint8   order `fp4_scales`
    qweight  (N', K'/2) uint8      order `qweight`       wscales  (K'/16, N') uint8   order `fp4_wscales`
    wcscale  (N') float32          order `channel`         (scales are the bytes of E4M3 numbers)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from svdq import nvfp4
from svdq.grid import unpack_nibbles
from svdq.kernels import compile as kernels
from svdq.kernels import layout, ops
from svdq.kernels.compile import Kernel
from svdq.kernels.launch import launch
from svdq.rounding import ActivationTransform

FEW_TOKENS = 64
E4M3 = torch.float8_e4m3fn
OUT = (torch.float16, torch.bfloat16, torch.float32)  # as the kernels number them


@cache
def has_fp4_cores(device: torch.device) -> bool:
    """Whether a GPU's tensor cores take E2M1 operands in a warp's product."""
    return torch.cuda.get_device_capability(device)[0] == 12


# ------------------------------------------------------------------------------------------------- nvfp4_quantize


def nvfp4_quantize(x: Tensor, down: Tensor, inv_smooth: Tensor | None, rotation: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x (m, k) → codes, scales, t: Qa(R(x · inv_smooth)) by svdq.nvfp4, and x · proj_down, x read once."""
    if x.dtype not in ops.SCALAR:
        return _quantize_reference(x, down, inv_smooth, rotation)
    ops.check_quantize("nvfp4_quantize", x, down, inv_smooth, None, None)
    x = ops.aligned_rows(x)
    m, k = x.shape
    padded_k, rank = down.shape
    codes, scales, t = _quantize_fake(x, down, inv_smooth, rotation)
    if m:
        parts = _rank_parts(rank)
        launch(
            kernels.quantize_kernel(ops.SCALAR[x.dtype], rank // parts, 2, 3),
            x.device,
            (len(codes) // layout.PANEL, len(t), parts),
            256,
            [
                x, np.int64(x.stride(0)), m, k, padded_k // layout.TILE_K, down, inv_smooth, int(rotation), 1.0, None,
                None, codes, scales, t, rank, codes.shape[0],
            ],
            early=True,
        )  # fmt: skip
    return codes, scales, t


def _rank_parts(rank: int) -> int:
    """Into how many parts, of 16 columns, the quantizer cuts t."""
    return rank // 16 or 1


def _shares(m: int, groups: int) -> int:
    """Over how many blocks the quantizer spreads a panel's groups: as many as fill a GPU, of eight groups or more.

    The product adds as many sums of t.
    """
    panels = (m + layout.PANEL - 1) // layout.PANEL
    return max(1, min(-(-264 // max(1, panels)), -(-groups // 8)))


def _quantize_fake(x, down, inv_smooth, rotation):
    (padded_k, rank), rows = down.shape, (x.shape[0] + layout.PANEL - 1) // layout.PANEL * layout.PANEL
    return (
        x.new_empty((rows, padded_k // 2), dtype=torch.uint8),
        x.new_empty((rows, padded_k // nvfp4.GROUP), dtype=torch.uint8),
        x.new_empty((_shares(x.shape[0], padded_k // layout.TILE_K), rows, rank), dtype=torch.float32),
    )


def _quantize_reference(x, down, inv_smooth, rotation):
    ops.check_quantize("nvfp4_quantize", x, down, inv_smooth, None, None)
    (m, k), (padded_k, rank) = x.shape, down.shape
    rows = layout.round_up(m, layout.PANEL)
    t = x.new_zeros((_shares(m, padded_k // layout.TILE_K), rows, rank), dtype=torch.float32)
    if rank:
        t[0, :m] = x.float() @ layout.unpack_matrix("down", down, (padded_k, rank))[:k].float()
    scaled = ActivationTransform(rotation=rotation).apply(x if inv_smooth is None else x.float() * inv_smooth)
    codes, scales = nvfp4.quantize_activation(layout.pad(scaled, rows, padded_k))
    packed = layout.pack_codes(codes.view(torch.int8), "codes").view(torch.uint8)
    return packed, layout.pack_matrix("fp4_scales", scales.view(torch.uint8)), t


# ------------------------------------------------------------------------------------------------- nvfp4_gemm


def nvfp4_gemm(
    codes: Tensor,
    scales: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    wcscale: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    """→ y (m, n) of dtype: scaled products, t · proj_upᵀ, bias, one rounding. n counts from the first packed column."""
    if dtype not in OUT:
        return _gemm_reference(codes, scales, t, qweight, wscales, wcscale, up, bias, m, n, dtype)
    _check_gemm(codes, scales, t, qweight, wscales, wcscale, up, bias, m, n)
    y = codes.new_empty((m, n), dtype=dtype)
    if not m or not n:
        return y
    device, out, rank = codes.device, OUT.index(dtype), up.shape[1]
    rows, padded_n, groups = codes.shape[0], qweight.shape[0], qweight.shape[1] * 2 // layout.TILE_K
    operands = [codes, scales, t, len(t), qweight, wscales, wcscale, up, bias, y, out, m, n, groups, rank]
    if m <= FEW_TOKENS:
        grid = (-(-n // layout.TILE_N) * 4, rows // layout.PANEL)
        launch(Kernel("fp4_small_m"), device, grid, 512, operands, early=True)
    elif has_fp4_cores(device):
        tiles = -(-m // layout.TILE_N) * -(-n // layout.TILE_N)
        launch(Kernel("fp4_gemm_lora"), device, (tiles,), 256, operands)
    else:
        weights = _expand(qweight, wscales, True, groups)
        sums = _product(_expand(codes, scales, False, groups), weights)
        launch(
            Kernel("fp4_finish"),
            device,
            (-(-n // layout.TILE_N), -(-rows // 64)),
            256,
            [sums, t, len(t), wcscale, up, bias, y, out, m, n, rows, padded_n, rank],
        )
    return y


def _expand(codes: Tensor, scales: Tensor, weights: bool, groups: int) -> Tensor:
    """Packed codes and scales → bfloat16 (rows, k), row-major, exact."""
    rows = codes.shape[0]
    expanded = codes.new_empty((rows, groups * layout.TILE_K), dtype=torch.bfloat16)
    grid = (groups, -(-rows // (128 if weights else 64)))
    launch(kernels.fp4_expand_kernel(weights), codes.device, grid, 256, [codes, scales, expanded, groups, rows])
    return expanded


def _product(x: Tensor, weights: Tensor) -> Tensor:
    """float32 sums of bfloat16 products."""
    return torch.mm(x, weights.t(), out_dtype=torch.float32)


def _check_gemm(
    codes: Tensor,
    scales: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    wcscale: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
) -> None:
    operator = "nvfp4_gemm"
    if (qweight.dim(), up.dim(), t.dim()) != (2, 2, 3):
        found = f"qweight {list(qweight.shape)}, up {list(up.shape)}, t {list(t.shape)}"
        raise ValueError(f"{operator}: found {found}; wanted 2, 2 and 3 axes")
    (padded_n, half_k), rank, rows = qweight.shape, up.shape[1], layout.round_up(m, layout.PANEL)
    if half_k % 64 or padded_n % layout.TILE_N or rank % layout.RANK_TILE or not 0 <= n <= padded_n:
        found = f"qweight {list(qweight.shape)}, rank {rank}, n {n}"
        raise ValueError(f"{operator}: found {found}; wanted multiples of 128 and 64, of 16, and at most {padded_n}")
    ops.check_tensors(
        operator,
        codes,
        ("codes", codes, (rows, half_k), torch.uint8),
        ("scales", scales, (rows, half_k // 8), torch.uint8),
        ("t", t, (len(t), rows, rank), torch.float32),
        ("qweight", qweight, (padded_n, half_k), torch.uint8),
        ("wscales", wscales, (half_k // 8, padded_n), torch.uint8),
        ("wcscale", wcscale, (padded_n,), torch.float32),
        ("up", up, (padded_n, rank), torch.float16),
        ("bias", bias, (padded_n,), torch.float32),
    )
    if max(codes.numel() // 4, qweight.numel() // 4, t.numel()) >= 2**31:  # the kernels count them in 32 bits
        raise ValueError(
            f"{operator}: {m} rows or {n} columns are too many at once for {half_k * 2} channels, rank {rank}"
        )


def _gemm_reference(codes, scales, t, qweight, wscales, wcscale, up, bias, m, n, dtype):
    _check_gemm(codes, scales, t, qweight, wscales, wcscale, up, bias, m, n)
    x_hat = nvfp4.decode(
        layout.unpack_codes(codes, "codes"),
        layout.unpack_matrix("fp4_scales", scales, tuple(scales.shape)).view(E4M3),
    )
    wide = unpack(qweight, wscales, wcscale, up, bias)
    y = x_hat[:m] @ nvfp4.decode(wide.codes[:n], wide.scales[:n]).t() * wide.wcscale[:n]
    if up.shape[1]:
        y += t.sum(0)[:m] @ wide.up[:n].float().t()
    if wide.bias is not None:
        y += wide.bias[:n]
    return y.to(dtype)


def _gemm_fake(codes, scales, t, qweight, wscales, wcscale, up, bias, m, n, dtype):
    return codes.new_empty((m, n), dtype=dtype)


# ------------------------------------------------------------------------------------------------- a linear


@dataclass(frozen=True)
class Packed:
    """A linear's operands, packed; and what it does to its input."""

    qweight: Tensor
    wscales: Tensor
    wcscale: Tensor
    down: Tensor
    up: Tensor
    bias: Tensor | None
    inv_smooth: Tensor | None
    rotation: bool
    n: int


@dataclass(frozen=True)
class Unpacked:
    """Weights row by row: codes (N', K') int8 whose low four bits are the code, scales (N', K'/16), up (N', r)."""

    codes: Tensor
    scales: Tensor
    wcscale: Tensor
    up: Tensor
    bias: Tensor | None


def pack(
    qweight: Tensor,
    w_scales: Tensor,
    wcscale: Tensor,
    proj_down: Tensor | None,
    proj_up: Tensor | None,
    transform: ActivationTransform,
    bias: Tensor | None,
) -> Packed:
    """A checkpoint's tensors of one linear → operands, on the device where they are.

    qweight (n, k/2) uint8, w_scales (n, k/16) float8_e4m3fn, wcscale (n,) float32; proj_down (k, r) and proj_up (n, r)
    float16 or None; bias (n,) or None. Padding is codes 0, scales 1.
    """
    n, k = qweight.shape[0], qweight.shape[1] * 2
    padded_n, padded_k = layout.round_up(n, layout.TILE_N), layout.round_up(k, layout.PAD_K)
    if proj_down is None or proj_up is None:
        proj_down, proj_up = (qweight.new_empty((size, 0), dtype=torch.float16) for size in (k, n))
    rank = layout.round_up(proj_up.shape[1], layout.RANK_TILE)
    codes = layout.pad(unpack_nibbles(qweight), padded_n, padded_k)
    one = 0x38  # 1 in E4M3
    scales = layout.pad(w_scales.view(torch.uint8), padded_n, padded_k // nvfp4.GROUP, value=one)

    def channels(vector: Tensor) -> Tensor:
        return layout.pack_matrix("channel", layout.pad(vector.float(), padded_n))

    return Packed(
        layout.pack_codes(codes).view(torch.uint8),
        layout.pack_matrix("fp4_wscales", scales, (padded_k // nvfp4.GROUP, padded_n)),
        channels(wcscale),
        layout.pack_matrix("down", layout.pad(proj_down.half(), padded_k, rank)),
        layout.pack_matrix("lora_up", layout.pad(proj_up.half(), padded_n, rank)),
        None if bias is None else channels(bias),
        None if transform.smooth is None else 1.0 / transform.smooth,
        transform.rotation,
        n,
    )


def unpack(qweight: Tensor, wscales: Tensor, wcscale: Tensor, up: Tensor, bias: Tensor | None) -> Unpacked:
    """The inverse of `pack`, padding included."""
    padded_n, groups = wcscale.shape[0], wscales.shape[0]
    return Unpacked(
        layout.unpack_codes(qweight),
        layout.unpack_matrix("fp4_wscales", wscales, (padded_n, groups)).view(E4M3),
        layout.unpack_matrix("channel", wcscale, (padded_n,)),
        layout.unpack_matrix("lora_up", up, tuple(up.shape)),
        None if bias is None else layout.unpack_matrix("channel", bias, (padded_n,)),
    )


def linear(x: Tensor, packed: Packed, dtype: torch.dtype | None = None) -> Tensor:
    """x (m, k) → y (m, n) of dtype, or of x's."""
    operands = torch.ops.svdq.nvfp4_quantize(x, packed.down, packed.inv_smooth, packed.rotation)
    weight = (packed.qweight, packed.wscales, packed.wcscale, packed.up, packed.bias)
    return torch.ops.svdq.nvfp4_gemm(*operands, *weight, len(x), packed.n, dtype or x.dtype)


ops.register(
    "nvfp4_quantize(Tensor x, Tensor down, Tensor? inv_smooth, bool rotation) -> (Tensor, Tensor, Tensor)",
    nvfp4_quantize,
    _quantize_reference,
    _quantize_fake,
)
ops.register(
    "nvfp4_gemm(Tensor codes, Tensor scales, Tensor t, Tensor qweight, Tensor wscales, Tensor wcscale, Tensor up, "
    "Tensor? bias, SymInt m, SymInt n, ScalarType dtype) -> Tensor",
    nvfp4_gemm,
    _gemm_reference,
    _gemm_fake,
)
