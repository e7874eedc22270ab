"""The quantizer's own kernel: GPTQ's walk along one group, for all rows at once (svdq.gptq has the loop around it)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from svdq.kernels.compile import KernelError, walk_kernel
from svdq.kernels.launch import launch, require

GROUP = 64
THREADS = 64


@cache
def why_not(device: torch.device) -> str | None:
    """Why the kernel does not run on this CUDA device, or None."""
    try:
        require(device)
    except KernelError as error:
        return str(error)
    return None


def walk(
    working: Tensor,
    steps: Tensor,
    importance: Tensor,
    weights: Tensor,
    fractions: Tensor,
    smallest: float,
    lo: int,
    hi: int,
    codes: Tensor,
    scales: Tensor,
    errors: Tensor,
    losses: Tensor,
) -> None:
    """Choose one group's scales and codes. All float32 on one CUDA device, but for codes.

    working     (64, n) the group's columns as rows, contiguous. Not changed.
    steps       (64, 64) elements adjacent; entry [i, j > i]: what column j owes to the error of column i
    importance  (64,) weights of the columns' squared errors in the search for the scale
    weights     (64,) weights of the columns' squared errors in the objective
    fractions   (count,) falling: the scales tried are these times absmax, as float16, at least `smallest`
    codes       int8 (64, n), scales (n,), errors (64, n), contiguous: what is written
    losses      (n,): each row's part of the objective is added to it
    Raises      KernelError if the kernel cannot be compiled here (see `why_not`).
    """
    n = working.shape[1]
    group = [working, steps, steps.stride(0), importance, weights]
    tried = [fractions, len(fractions), smallest, float(lo), float(hi), n]
    launch(walk_kernel(), working.device, (-(-n // THREADS),), THREADS, [*group, *tried, codes, scales, errors, losses])
