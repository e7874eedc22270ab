"""What every kernel must compute, in plain torch: the oracle of the tests, and what runs on a CPU.

    y = Qa(R(x / smooth)) · weight_hatᵀ + (x · proj_down) · proj_upᵀ + bias

Codes and scales of the activation are exact (svdq.rounding). The GEMM multiplies dequantized values in float32: a
weight code times its float16 scale is exact there, an activation code times its scale is rounded once, so the result
differs from exact integer group sums by float32 rounding only (a few 1e-7 relative), at the speed of one GEMM instead
of K/64. The low-rank product takes operands as they are (16-bit in a 16-bit model) and accumulates in float32. One
rounding to the output type at the end.

`w4a4_linear` takes plain matrices. The functions after it take and give the kernels' packed operands (svdq.kernels.ops
says which); they unpack, compute, and pack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from svdq.config import ACTIVATION_GROUP
from svdq.grid import INT4_ACTIVATION, INT4_WEIGHT
from svdq.kernels import layout
from svdq.rounding import ActivationTransform, quantize_activation, quantize_activation_e4m3, rotate


def w4a4_linear(
    x: Tensor,
    weight_hat: Tensor,
    proj_down: Tensor,
    proj_up: Tensor,
    bias: Tensor | None,
    transform: ActivationTransform,
) -> Tensor:
    """x (..., k) float; weight_hat (n, k), proj_down (k, r), proj_up (n, r), bias (n,) → (..., n).

    The result has x's type, or float64 if weight_hat has.

    The arithmetic is done in weight_hat's type: float32, or float64 for the dequantized math that errors are
    measured against. The activation's codes and scales are float32 arithmetic in both.
    """
    work = weight_hat.dtype
    rows = x.reshape(-1, x.shape[-1])
    y = transform.approximate(rows, work) @ weight_hat.t()
    if proj_up.shape[1]:
        y += (rows.to(work) @ proj_down.to(work)) @ proj_up.to(work).t()
    if bias is not None:
        y += bias.to(work)
    return y.to(work if work == torch.float64 else x.dtype).reshape(*x.shape[:-1], weight_hat.shape[0])


def quantize_lora_down(
    x: Tensor,
    down: Tensor,
    inv_smooth: Tensor | None,
    rotation: bool,
    clip: float,
    row_factor: Tensor | None,
    norm_weight: Tensor | None,
    shares: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See svdq.kernels.ops. All of t is in its first share."""
    m, k = x.shape
    padded_k, rank = down.shape
    rows = layout.round_up(m, layout.PANEL)
    x = _normalized(x, row_factor, norm_weight)
    t = x.new_zeros((shares, rows, rank), dtype=torch.float32)
    if rank:
        t[0, :m] = x.float() @ layout.unpack_matrix("down", down, (padded_k, rank))[:k].float()
    codes, scales = quantize_activation(_transformed(x, inv_smooth, rotation), clip)
    codes = layout.pad(codes, rows, padded_k)
    scales = layout.pad(scales, rows, padded_k // ACTIVATION_GROUP)
    return layout.pack_codes(codes, "codes"), layout.pack_matrix("scales", scales), t


def w4a4_gemm_lora(
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
    """See svdq.kernels.ops."""
    x_hat = INT4_ACTIVATION.decode(
        layout.unpack_codes(codes, "codes"),
        layout.unpack_matrix("scales", scales, (codes.shape[0], wscales.shape[0])),
    )
    return _product(x_hat, t, qweight, wscales, up, bias, m, n, dtype, first_rank)


def _normalized(x: Tensor, row_factor: Tensor | None, norm_weight: Tensor | None) -> Tensor:
    if row_factor is None or norm_weight is None:
        return x
    return norm_weight.to(x.dtype) * (x.float() * row_factor[:, None]).to(x.dtype)


def _transformed(x: Tensor, inv_smooth: Tensor | None, rotation: bool) -> Tensor:
    scaled = x.float() if inv_smooth is None else x.float() * inv_smooth
    return rotate(scaled) if rotation else scaled


def _product(
    x_hat: Tensor,
    t: Tensor,
    qweight: Tensor,
    wscales: Tensor,
    up: Tensor,
    bias: Tensor | None,
    m: int,
    n: int,
    dtype: torch.dtype,
    first_rank: Tensor | None,
) -> Tensor:
    groups, padded_n = wscales.shape
    weight_scales = layout.unpack_matrix("wscales", wscales, (padded_n, groups))
    y = x_hat[:m] @ INT4_WEIGHT.decode(layout.unpack_codes(qweight)[:n], weight_scales[:n]).t()
    if up.shape[1]:
        rows, sums = layout.unpack_matrix("lora_up", up, tuple(up.shape))[:n].float(), t.sum(0)[:m]
        if first_rank is None:
            y += sums @ rows.t()
        else:
            for tile, first in enumerate(first_rank.tolist()[: -(-n // layout.TILE_N)]):
                part = slice(tile * layout.TILE_N, (tile + 1) * layout.TILE_N)
                y[:, part] += sums[:, first : first + up.shape[1]] @ rows[part].t()
    if bias is not None:
        y += layout.unpack_matrix("channel", bias, (padded_n,))[:n]
    return y.to(dtype)


def quantize_lora_down_e4m3(
    x: Tensor,
    down: Tensor,
    inv_smooth: Tensor | None,
    rotation: bool,
    clip: float,
    row_factor: Tensor | None,
    norm_weight: Tensor | None,
    values: bool,
    shares: int,
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See svdq.kernels.hopper. All of t is in its first share; rows from m on are zeros."""
    padded_k, rank = down.shape
    x = _normalized(x, row_factor, norm_weight)
    t = x.new_zeros((shares, rank, rows), dtype=torch.float32)
    if rank:
        first = x.float() @ layout.unpack_matrix("down", down, (padded_k, rank))[: x.shape[1]].float()
        t[0] = layout.pack_matrix("token_t", layout.pad(first, rows, rank), (rank, rows))
    scaled = _transformed(x, inv_smooth, rotation)
    if values:
        numbers, scales = quantize_activation_e4m3(scaled)
        scales = layout.pad(scales, rows)
    else:
        codes, scales = quantize_activation(scaled, clip)
        numbers = codes.float().to(torch.float8_e4m3fn)
        scales = layout.pack_matrix("token_scales", layout.pad(scales, rows, padded_k // ACTIVATION_GROUP))
    bytes_ = layout.pad(numbers.view(torch.uint8), rows, padded_k)
    return layout.pack_matrix("fp8", bytes_), scales, t


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
    """See svdq.kernels.hopper."""
    groups = wscales.shape[0]
    numbers = layout.unpack_matrix("fp8", codes, tuple(codes.shape)).view(torch.float8_e4m3fn).float()
    if scales.dim() == 1:
        x_hat = numbers * scales[:, None]
    else:
        per_group = layout.unpack_matrix("token_scales", scales, (codes.shape[0], groups))
        x_hat = numbers * per_group.repeat_interleave(ACTIVATION_GROUP, 1)
    t = layout.unpack_matrix("token_t", t.sum(0), (t.shape[2], t.shape[1]))[None]
    return _product(x_hat, t, qweight, wscales, up, bias, m, n, dtype, first_rank)


def inv_rms(x: Tensor, epsilon: float) -> Tensor:
    """x (m, k) → (m,) float32: 1 / sqrt(mean(x²) + epsilon) of every row."""
    return (x.float().square().mean(-1) + epsilon).rsqrt()


def qknorm_rope(
    q: Tensor,
    k: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cosine: Tensor,
    sine: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """See svdq.kernels.ops."""

    def one(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = norm.to(x.dtype) * (x.float() * inv_rms(x.reshape(-1, x.shape[-1]), epsilon).view(*x.shape[:-1], 1)).to(
                x.dtype
            )
        repeats = len(x) // max(len(cosine), 1)
        cos, sin = (table.to(x.dtype).float().repeat(repeats, 1)[:, None] for table in (cosine, sine))
        first, second = x.float().chunk(2, -1)
        return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype).contiguous()

    return one(q, q_norm), one(k, k_norm)
