"""The W4A4 linear in plain torch: what every kernel must compute, and what runs on a CPU.

    y = Qa(R(x / smooth)) · weight_hatᵀ + (x · proj_down) · proj_upᵀ + bias

Codes and scales of the activation are exact (svdq.rounding). The GEMM multiplies dequantized values in float32: a
weight code times its float16 scale is exact there, an activation code times its scale is rounded once, so the result
differs from exact integer group sums by float32 rounding only (a few 1e-7 relative), at the speed of one GEMM instead
of K/64. The low-rank product takes operands as they are (16-bit in a 16-bit model) and accumulates in float32. One
rounding to the output type at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from svdq.grid import INT4_ACTIVATION
from svdq.rounding import ActivationTransform


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
    codes, scales = transform.quantize(rows)
    y = INT4_ACTIVATION.decode(codes, scales, work) @ weight_hat.t()
    if proj_up.shape[1]:
        y += (rows.to(work) @ proj_down.to(work)) @ proj_up.to(work).t()
    if bias is not None:
        y += bias.to(work)
    return y.to(work if work == torch.float64 else x.dtype).reshape(*x.shape[:-1], weight_hat.shape[0])
