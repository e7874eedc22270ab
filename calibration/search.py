"""The smoothing of SVDQuant as published: searched over ratios of largest values, by the error of plain rounding.

s_k = max|x_k|^a / max|w_k|^b for a in steps of 0.1 and b = 0 or 1 − a; each candidate's site is quantized by the plain
means of that method (L = SVD of W, the rest rounded to nearest) and run on a sample of the site's own inputs. Slower
than rms^0.75, which `quality` uses, and worse: it is here to be measured against.

Source: Li et al. 2024, arXiv:2411.05007, and the grid of their tool, deepcompressor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from svdq.calibration.statistics import finish_smoothing
from svdq.grid import INT4_WEIGHT
from svdq.lowrank import low_rank
from svdq.rounding import ActivationTransform, fake_quantize_activation, round_to_nearest

SAMPLE_TOKENS = 256
STEPS = 10
RANK = 16  # of the L that a candidate is judged with


def search_smoothing(absmax: Tensor, rows: Tensor, weights: list[Tensor], *, rotation: bool, clip: float) -> Tensor:
    """(k,) float32: the candidate with the smallest output error; ones are a candidate too.

    absmax   (k,) float32, largest |x_k| over all tokens; rows (tokens, k), the sample
    weights  (n_i, k) of the linears that share the input
    """
    rows = rows.float()
    weights = [weight.to(rows) for weight in weights]
    wanted = [rows @ weight.t() for weight in weights]
    best, smallest = torch.ones_like(rows[0]), torch.inf
    for smooth in _candidates(absmax.to(rows), torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)):
        transform = ActivationTransform(smooth, rotation, clip)
        inputs = transform.apply(rows)
        quantized = fake_quantize_activation(inputs, clip)
        error = 0.0
        for weight, target in zip(weights, wanted, strict=True):
            transformed = transform.weight(weight)
            up, down = low_rank(transformed, min(RANK, *transformed.shape))
            codes, scales = round_to_nearest(transformed - up @ down.t(), INT4_WEIGHT)
            output = quantized @ INT4_WEIGHT.decode(codes, scales).t() + inputs @ down @ up.t()
            error += (output - target).square().sum(dtype=torch.float64).item()
        if error < smallest:
            best, smallest = smooth, error
    return best


def _candidates(inputs: Tensor, weights: Tensor) -> Iterator[Tensor]:
    """inputs, weights: (k,) largest absolute values."""
    yield torch.ones_like(inputs)
    alive = (inputs > 0) & (weights > 0)
    for step in range(1, STEPS + 1):
        a = step / STEPS
        for b in (0.0, 1.0 - a):
            yield finish_smoothing(inputs.double() ** a / weights.double().clamp_min(1e-30) ** b, alive)
