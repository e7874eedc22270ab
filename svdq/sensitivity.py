"""How far an error of each linear's output moves the model's: the mean squared gradient at every output channel.

A small error e at a linear's output moves a language model's next-token distribution p by KL ≈ ½·eᵀ·F·e, F = E[g·gᵀ],
g = ∂(uᵀ·logits) for a random u of covariance diag p − p·pᵀ: the Fisher information of the model's own distribution, in
which the text's next tokens play no part. Of F the diagonal is kept. A model that is no language model is measured by
‖Δh‖²/‖h‖² of its final states, whose F is that of g = ∂(vᵀh/‖h‖), v standard normal. One forward and one backward pass
give all linears at once; errors of different tokens are taken as independent. Rejected: u from one token drawn by p,
whose rare tokens are few and heavy.

As tuning does, this needs the whole model in memory at once, in float32, with what one sequence keeps for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from svdq.calibration.data import TokenData
from svdq.models import Linear, Model, materialize, release

TOKENS = 4096


def channel_sensitivity(
    model: Model,
    linears: list[Linear],
    data: TokenData,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Tensor]:
    """name → (n,) float64 s on the CPU: an error with mean square e_c² a token at channel c moves the model's output by
    about Σ_c s_c·e_c², in nats a token or in ‖Δh‖²/‖h‖². A linear that never runs gets zeros.

    tokens  sequences are read until there are so many
    """
    device = torch.device(device)
    squares = {linear.name: torch.zeros(linear.n, dtype=torch.float64) for linear in linears}
    generator = torch.Generator().manual_seed(seed)
    chosen, count = [], 0
    for sequence in data.sequences:
        if count < tokens:
            chosen.append(sequence)
            count += len(sequence)
    materialize(model, "", device, torch.float32)
    handles = [
        model.tree.get_submodule(linear.module).register_forward_hook(_watch(squares[linear.name]))
        for linear in linears
    ]
    try:
        for number, sequence in enumerate(chosen):
            with torch.enable_grad():
                output = model.tree(input_ids=sequence[None].to(device))[0].float()
                _drawn(output[0], model.is_causal_lm, generator).backward()
            progress("sensitivity", number + 1, len(chosen))
    finally:
        for handle in handles:
            handle.remove()
        release(model, "")
    factor = 0.5 if model.is_causal_lm else 1.0
    return {name: square * (factor / count) for name, square in squares.items()}


def _watch(square: Tensor) -> Callable:
    def add(gradient: Tensor) -> None:
        square.add_(gradient.detach().flatten(0, -2).double().square().sum(0).cpu())

    def hook(module: torch.nn.Module, inputs: tuple, output: Tensor) -> None:
        if not output.requires_grad:  # the first of the model: no parameter has a gradient
            output.requires_grad_()
        output.register_hook(add)

    return hook


def _drawn(output: Tensor, is_causal_lm: bool, generator: torch.Generator) -> Tensor:
    """A scalar whose gradient g has E[g·gᵀ] = F. output (tokens, vocabulary or hidden)."""
    fixed = output.detach()
    drawn = torch.randn(output.shape, generator=generator).to(output)
    if is_causal_lm:  # (diag √p − p·√pᵀ)·z has the covariance diag p − p·pᵀ, the Fisher information of the logits
        probability = fixed.softmax(-1)
        drawn = drawn * probability.sqrt()
        drawn = drawn - probability * drawn.sum(-1, keepdim=True)
    else:
        drawn = drawn / fixed.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    return (drawn * output).sum()
