"""The layer objective J(Q̂, L) = ‖X'·W'ᵀ − X̂·Q̂ᵀ − X'·Lᵀ‖²_F in closed form, from three K×K sums.

    J = tr(W'HxxW'ᵀ) − 2tr(W'HxqQ̂ᵀ) − 2tr(W'HxxLᵀ) + tr(LHxxLᵀ) + 2tr(LHxqQ̂ᵀ) + tr(Q̂HqqQ̂ᵀ)
with Hxx = X'ᵀX', Hqq = X̂ᵀX̂, Hxq = X'ᵀX̂. The products of W' with the sums do not change while Q̂ and L do, so they
are kept; L enters through its thin factors. One n×k×k product a call is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from svdq.rounding import ActivationTransform


@dataclass(frozen=True)
class ActivationSums:
    """What calibration knows of one site: every linear that reads the same input shares it.

    xx, xq, qq  (k, k) float32 or float64: Σ x'x'ᵀ, Σ x'x̂ᵀ, Σ x̂x̂ᵀ over tokens, x' = transform(x), x̂ = Qa(x')
    absmax      (k,) float32, largest |x| per channel, before the transform
    tokens      number of tokens summed
    """

    xx: Tensor
    xq: Tensor
    qq: Tensor
    absmax: Tensor
    tokens: int
    transform: ActivationTransform

    def to(self, device: torch.device) -> ActivationSums:
        moved = {name: getattr(self, name).to(device) for name in ("xx", "xq", "qq")}
        return replace(self, transform=self.transform.to(device), **moved)


class Objective:
    """J for one weight. weight (n, k); xx, xq, qq (k, k) float64 sums over tokens. Everything is float64."""

    def __init__(self, weight: Tensor, xx: Tensor, xq: Tensor, qq: Tensor):
        self.weight = weight.double()
        self.xx, self.xq, self.qq = xx, xq, qq
        self.weight_xx = self.weight @ xx
        self.weight_xq = self.weight @ xq
        self.output_energy = (self.weight_xx * self.weight).sum().item()  # ‖X'W'ᵀ‖²

    def __call__(self, weight_hat: Tensor, up: Tensor, down: Tensor) -> float:
        """J, a sum over tokens. weight_hat (n, k), up (n, r), down (k, r)."""
        up, down, hat = up.double(), down.double(), weight_hat.double()
        energy = (self.weight_xx * self.weight).sum(1)
        codes = ((hat @ self.qq - 2 * self.weight_xq) * hat).sum(1)
        own = ((up @ (down.t() @ self.xx @ down)) * up).sum(1)
        with_both = ((hat @ (self.xq.t() @ down) - self.weight_xx @ down) * up).sum(1)
        return (energy + codes + own + 2 * with_both).sum().item()


def relative(value: float, energy: float) -> float:
    """√(J/‖X'W'ᵀ‖²): the relative output error; 0 where the layer puts out nothing."""
    return (max(value, 0.0) / energy) ** 0.5 if energy > 0 else 0.0
