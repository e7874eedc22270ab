"""The sums of one site, taken batch by batch: float32 products of bounded chunks, accumulated in float64.

First the per-channel energy (for the smoothing) and absmax, then Σ x'x'ᵀ, Σ x'x̂ᵀ and Σ x̂x̂ᵀ through the run-time
quantizer. Sums, not means, so that the shares of data-parallel workers add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from svdq.objective import ActivationSums
from svdq.products import gram, matmul
from svdq.ranks import Ranks
from svdq.rounding import ActivationTransform

CHUNK_TOKENS = 4096
_SMOOTH_FLOOR, _SMOOTH_RANGE = 1e-5, (1e-2, 1e2)


class ChannelStatistics:
    """First pass: Σ x² and max |x| per channel, and the number of tokens."""

    def __init__(self, channels: int, device: torch.device):
        self.energy = torch.zeros(channels, dtype=torch.float64, device=device)
        self.absmax = torch.zeros(channels, dtype=torch.float32, device=device)
        self.tokens = 0

    def add(self, x: Tensor) -> bool:
        """x (tokens, k) any float dtype. Returns whether everything in it was finite."""
        x = x.float()
        self.energy += x.square().sum(0, dtype=torch.float64)
        self.absmax = torch.maximum(self.absmax, x.abs().amax(0)) if len(x) else self.absmax
        self.tokens += len(x)
        return bool(torch.isfinite(self.energy).all())

    def smoothing(self, exponent: float) -> Tensor | None:
        """s_k = rms_k^exponent; None for exponent 0."""
        if exponent == 0.0:
            return None
        rms = (self.energy / max(self.tokens, 1)).sqrt()
        return finish_smoothing(rms.clamp_min(_SMOOTH_FLOOR) ** exponent, rms > 0)


def add_up(statistics: Sequence[ChannelStatistics], ranks: Ranks) -> None:
    """In place: each site's statistics of all ranks' tokens, on all ranks."""
    if ranks.count == 1 or not statistics:
        return
    sizes = [len(one.energy) for one in statistics]
    counts = statistics[0].energy.new_tensor([one.tokens for one in statistics])  # whole numbers, exact in float64
    added = torch.cat([one.energy for one in statistics] + [counts])
    largest = torch.cat([one.absmax for one in statistics])
    ranks.add(added)
    ranks.largest(largest)
    *energies, counts = added.split([*sizes, len(sizes)])
    for one, energy, absmax, tokens in zip(statistics, energies, largest.split(sizes), counts.tolist(), strict=True):
        one.energy, one.absmax, one.tokens = energy, absmax, int(tokens)


def finish_smoothing(smooth: Tensor, alive: Tensor) -> Tensor:
    """(k,) float64 → float32 with geometric mean 1 over the channels that are alive, clamped.

    A channel that never fired keeps 1: any other value would only amplify its weights' rounding. Values are rounded to
    8 bits of mantissa (nobody can tell), so that float16 and bfloat16 packings both hold them exactly.
    """
    if alive.any():
        smooth = smooth / smooth[alive].log().mean().exp()
    return torch.where(alive, smooth.clamp(*_SMOOTH_RANGE), 1.0).bfloat16().float()


class SumAccumulator:
    """Second pass: the three (k, k) sums in float64."""

    def __init__(self, absmax: Tensor, transform: ActivationTransform):
        channels, device = len(absmax), absmax.device
        self.absmax, self.transform = absmax, transform
        self.xx, self.xq, self.qq = (
            torch.zeros(channels, channels, dtype=torch.float64, device=device) for _ in range(3)
        )
        self.tokens = 0

    def add(self, x: Tensor) -> None:
        """x (tokens, k), raw inputs."""
        for chunk in x.split(CHUNK_TOKENS):
            transformed = self.transform.apply(chunk)
            quantized = self.transform.fake_quantize(transformed)
            self.xx += gram(transformed)
            self.xq += matmul(transformed.t(), quantized)
            self.qq += gram(quantized)
        self.tokens += len(x)

    def add_up(self, ranks: Ranks, owner: int, tokens: int) -> None:
        """The sums over all ranks' tokens, so many, on the owner."""
        for tensor in (self.xx, self.xq, self.qq):
            ranks.add_on(owner, tensor)
        self.tokens = tokens

    def finish(self, dtype: torch.dtype = torch.float32) -> ActivationSums:
        """The sums; float32 is what the store keeps. Each float64 matrix goes as its copy comes."""
        for name in ("xx", "xq", "qq"):
            setattr(self, name, getattr(self, name).to(dtype))
        return ActivationSums(self.xx, self.xq, self.qq, self.absmax, self.tokens, self.transform)
