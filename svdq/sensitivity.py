"""How far the error of each linear, as it is when quantized, moves the model's output.

Small errors e_t at a linear's output, t the tokens, move a language model's next-token distributions p by
KL ≈ ½·E[(Σ_t g_tᵀ·e_t)²], g_t = ∂(uᵀ·logits)/∂y_t for a random u of covariance diag p − p·pᵀ at every position: the
Fisher information of the model's own distributions, in which the text's next tokens play no part. A model that is no
language model is measured by ‖Δh‖²/‖h‖² of its final states, whose g is that of vᵀh/‖h‖, v standard normal. One forward
and one backward pass give all linears at once.

Taken is ½·Σ_t E[(g_tᵀ·e_t)²], errors of different tokens as independent: in SmolLM2 the cross terms add 3 % in all, and
of few draws much noise. Each e_t stays beside its own g_t. Rejected: the mean of g² at every channel beside the mean of
e²; SmolLM2's value projections so came out at four times the distance that quantizing one of them has (CHANGELOG has
the figures).

As tuning does, this needs the whole model in memory at once, in float32, with what one sequence keeps for its gradient,
and the quantized linears beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from svdq.calibration.data import TokenData
from svdq.models import Model, materialize, release

TOKENS = 4096


def output_distances(
    model: Model,
    quantized: Mapping[str, nn.Module],
    data: TokenData,
    *,
    tokens: int = TOKENS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, float]:
    """name → by how much the model's output moves if that linear alone is quantized, in nats a token or as
    ‖Δh‖²/‖h‖². A linear that never runs gets 0.

    quantized  name → x (..., k) float32 → (..., n), with its bias; moved to the device
    tokens     sequences are read until there are so many
    """
    device = torch.device(device)
    modules = {linear.name: linear.module for linear in model.linears}
    squares = {name: torch.zeros((), dtype=torch.float64) for name in quantized}
    generator = torch.Generator().manual_seed(seed)
    chosen, count = [], 0
    for sequence in data.sequences:
        if count < tokens:
            chosen.append(sequence)
            count += len(sequence)
    materialize(model, "", device, torch.float32)
    handles = [
        model.tree.get_submodule(modules[name]).register_forward_hook(_watch(one.to(device), squares[name]))
        for name, one in quantized.items()
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
    return {name: square.item() * factor / count for name, square in squares.items()}


def _watch(quantized: nn.Module, square: Tensor) -> Callable:
    def hook(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        with torch.no_grad():
            error = quantized(inputs[0]) - output

        def add(gradient: Tensor) -> None:
            square.add_((gradient * error).sum(-1).double().square().sum().cpu())

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
