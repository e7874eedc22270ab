"""The whole model's outputs, original against quantized: perplexity, final states or a diffusion transformer's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from svdq.calibration.capture import BlockStream
from svdq.calibration.recorded import CalibrationData
from svdq.layer_checks import ratio
from svdq.models import Model


@dataclass
class OutputReport:
    """The whole model on one source: perplexities for a causal LM, else how far the final states are apart; for a
    diffusion transformer the relative error of its output on recorded calls."""

    source: str
    tokens: int
    original: float | None = None
    quantized: float | None = None
    state_error: float | None = None
    state_cosine: float | None = None
    output_error: float | None = None


def compare_outputs(
    model: Model, stream: BlockStream, states: list[Any], owner: list[int], data: Sequence[CalibrationData]
) -> list[OutputReport]:
    """One report a source. The stream has run all blocks; states: the quantized model's, where the stream has its own.

    owner  of each batch or call the source that it is from
    """
    compare = _transformer if model.is_diffusion else _perplexity if model.is_causal_lm else _states
    return compare(stream, states, owner, data)


def _perplexity(
    stream: BlockStream, states: list[Any], owner: list[int], data: Sequence[CalibrationData]
) -> list[OutputReport]:
    losses = [[0.0, 0.0] for _ in data]
    counts = [[0, 0] for _ in data]
    position = [0, 0]

    def consume(which: int, batch: Tensor, logits: Tensor) -> None:
        source = owner[position[which]]
        position[which] += 1
        for row, ids in zip(logits, batch.to(logits.device), strict=True):
            losses[source][which] += functional.cross_entropy(row[:-1].float(), ids[1:], reduction="sum").item()
            counts[source][which] += len(ids) - 1

    stream.finish(consume, [stream.hidden, states])
    reports = []
    for source, loss, count in zip(data, losses, counts, strict=True):
        original, quantized = (
            torch.tensor(a / b, dtype=torch.float64).exp().item() for a, b in zip(loss, count, strict=True)
        )
        reports.append(OutputReport(source.source, source.tokens, original, quantized))
    return reports


def _states(
    stream: BlockStream, states: list[Any], owner: list[int], data: Sequence[CalibrationData]
) -> list[OutputReport]:
    outputs: list[list[Tensor]] = [[], []]
    stream.finish(
        lambda which, batch, out: outputs[which].append(out.flatten(0, -2).double().cpu()), [stream.hidden, states]
    )
    reports = []
    for number, source in enumerate(data):
        a, b = (torch.cat([out for out, o in zip(side, owner, strict=True) if o == number]) for side in outputs)
        cosine = functional.cosine_similarity(a, b, dim=1).mean().item()
        reports.append(OutputReport(source.source, source.tokens, state_error=ratio(b - a, a), state_cosine=cosine))
    return reports


def _transformer(
    stream: BlockStream, states: list[Any], owner: list[int], data: Sequence[CalibrationData]
) -> list[OutputReport]:
    """Relative Frobenius error over all calls of a source, whose outputs may differ in size."""
    originals: list[Tensor] = []
    sums = torch.zeros(len(data), 2, dtype=torch.float64)  # ‖off‖², ‖original‖²
    compared = iter(owner)

    def consume(which: int, _call: Any, output: Tensor) -> None:
        if which == 0:
            originals.append(output.double())
            return
        original = originals.pop(0)
        sums[next(compared)] += torch.stack(
            [(output.double() - original).square().sum(), original.square().sum()]
        ).cpu()

    stream.finish(consume, [stream.hidden, states])
    errors = (sums[:, 0] / sums[:, 1]).sqrt().tolist()
    return [
        OutputReport(source.source, source.tokens, output_error=error)
        for source, error in zip(data, errors, strict=True)
    ]
