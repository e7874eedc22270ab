"""Tune a finished checkpoint: weight scales and low-rank factors by gradient, end to end, codes and smoothing fixed.

The quantized model (the student) is run on calibration text with Qa in every linear, its gradient passed straight
through the rounding, and its outputs are drawn towards the original's: for a language model the divergence
KL(original ‖ quantized) of the next token, in nats a token; else the mean over tokens of ‖e_t‖²/‖h_t‖² of the states.

Every parameter is its stored value plus a step in units of itself (a scale) or of its matrix's root mean square (a
factor), so that one learning rate serves all; Adam, a short warm-up, cosine decay. The last sequences are held out:
if the result, rounded to float16 as it is stored, is not better there, the layers stay as they were.

Measured against tuning block by block on each block's output: see CHANGELOG. Unlike all else in svdq this needs the
whole model in memory at once, in float32, with what a step keeps for its gradient.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from svdq.calibration.data import TokenData, batches
from svdq.checkpoint import Entry, write_file
from svdq.config import TuneConfig, to_dict
from svdq.directory import write_directory
from svdq.errors import ConfigError, DataError, NumericsError
from svdq.grid import SMALLEST_SCALE
from svdq.models import Model, materialize, release
from svdq.quantized import Layer, QuantizedFile
from svdq.rounding import ActivationTransform, fake_quantize_activation, rotate

TUNED = "svdq.tuned"  # metadata key: what was done
HELD_OUT = 8  # one sequence in so many
WARM_UP = 5  # steps
_FACTOR_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TuneReport:
    """Distance of the held-out outputs from the original's before and after; `kept` says whether it fell."""

    steps: int
    tokens: int
    held_out_tokens: int
    unit: str
    before: float
    after: float

    @property
    def kept(self) -> bool:
        return self.after < self.before


def check_tunable(quantized: QuantizedFile) -> None:
    """Raises ConfigError for a packed file, and for another format than w4a4."""
    if quantized.format.name != "w4a4":
        raise ConfigError(f"{quantized.file.path}: {quantized.format.name}; tuning knows w4a4 alone")
    if quantized.kind != "canonical":
        raise ConfigError(f"{quantized.file.path}: a packed file; wanted the canonical one that it was packed from")


def tune(
    model: Model,
    quantized: QuantizedFile,
    data: TokenData,
    config: TuneConfig,
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> tuple[dict[str, Layer], TuneReport]:
    """name → layer, tuned, or as it was where that was no worse; the file is not changed.

    Raises ConfigError for a packed file or another format, DataError for fewer than two sequences, NumericsError if a
    step diverges.
    """
    device = torch.device(device)
    check_tunable(quantized)
    if len(data.sequences) < 2:
        raise DataError(f"{data.source}: one sequence; wanted at least two, one of them held out")
    held = max(1, len(data.sequences) // HELD_OUT)
    learned, unseen = data.sequences[:-held], data.sequences[-held:]
    materialize(model, "", device, torch.float32)
    try:
        student = _Student(model, quantized, device)
        check = batches(unseen, config.tokens_per_step)
        before = student.distance(check)
        optimizer = torch.optim.Adam(student.parameters(), lr=config.rate, betas=_FACTOR_BETAS)
        draws = _draws(learned, config)
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.rate * _schedule(step, config.steps)
            loss = student.loss(next(draws).to(device))
            if not torch.isfinite(loss):
                raise NumericsError(f"tuning: step {step + 1} gave a distance of {loss.item()}; lower --rate")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            progress("tune", step + 1, config.steps)
        optimizer.zero_grad()
        layers = {name: linear.finish() for name, linear in student.linears.items()}
        for name, linear in student.linears.items():
            linear.restart(layers[name])
        after = student.distance(check)
    finally:
        release(model, "")
    unit = "nats a token" if model.is_causal_lm else "of the states' energy"
    tokens, held_out = (sum(len(sequence) for sequence in part) for part in (learned, unseen))
    report = TuneReport(config.steps, tokens, held_out, unit, before, after)
    cpu = torch.device("cpu")
    return {name: layer.to(cpu) if report.kept else quantized.layer(name) for name, layer in layers.items()}, report


def write_tuned(
    quantized: QuantizedFile,
    layers: dict[str, Layer],
    out: str | Path,
    config: TuneConfig,
    data: dict,
    report: TuneReport,
    as_directory: tuple[Path, int] | None = None,
) -> None:
    """The same checkpoint with these layers' scales and factors; the header says what was done.

    as_directory  the model directory and the bytes of a shard, for an output that is a directory
    """
    changed: dict[str, Tensor] = {}
    for name, layer in layers.items():
        changed |= {f"{name}.w_scales": layer.scales, f"{name}.proj_up": layer.proj_up}
        changed[f"{name}.proj_down"] = layer.proj_down
    entries = []
    for name, info in quantized.file.tensors.items():
        read = changed[name].contiguous if name in changed else partial(quantized.file.chunks, name)
        entries.append(Entry(name, info.dtype, info.shape, read))
    done = {"config": to_dict(config), "data": data, "before": report.before, "after": report.after}
    done["kept"] = report.kept
    metadata = {**quantized.file.metadata, TUNED: json.dumps(done, sort_keys=True)}
    if as_directory is None:
        write_file(out, entries, metadata)
    else:
        write_directory(out, entries, metadata, *as_directory)


def _schedule(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def _draws(sequences: list[Tensor], config: TuneConfig) -> Iterator[Tensor]:
    """Batches without end: every sequence once in an order of its own, then again in another."""
    generator = torch.Generator().manual_seed(config.seed)
    while True:
        order = torch.randperm(len(sequences), generator=generator).tolist()
        # equal lengths beside each other, so that they can be stacked; the batches then in an order of chance
        stacked = batches(sorted((sequences[i] for i in order), key=len), config.tokens_per_step)
        for i in torch.randperm(len(stacked), generator=generator).tolist():
            yield stacked[i]


class _Student:
    """The model's own modules with W4A4 forwards in place of the quantized linears'."""

    def __init__(self, model: Model, quantized: QuantizedFile, device: torch.device):
        self.model, self.device = model, device
        inputs = _Inputs()
        modules = {linear.name: linear.module for linear in model.linears}
        self.linears = {name: _TunedLinear(quantized.layer(name).to(device), inputs) for name in quantized.layers}
        self._places = [(model.tree.get_submodule(modules[name]), linear) for name, linear in self.linears.items()]

    def parameters(self) -> list[Tensor]:
        return [parameter for linear in self.linears.values() for parameter in linear.steps]

    def loss(self, batch: Tensor) -> Tensor:
        """Mean distance of a batch's tokens. batch int64 (sequences, length)."""
        with torch.no_grad():
            wanted = self.model.tree(input_ids=batch)[0].float()
        for module, linear in self._places:
            module.forward = linear.forward
        try:
            found = self.model.tree(input_ids=batch)[0].float()
        finally:
            for module, _ in self._places:
                del module.forward
        if self.model.is_causal_lm:
            wanted, found = (functional.log_softmax(logits, -1).flatten(0, -2) for logits in (wanted, found))
            return functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
        error = (found - wanted).square().sum(-1)
        return (error / wanted.square().sum(-1).clamp_min(1e-30)).mean()

    @torch.no_grad()
    def distance(self, parts: list[Tensor]) -> float:
        tokens = sum(part.numel() for part in parts)
        return sum(self.loss(part.to(self.device)).item() * part.numel() for part in parts) / tokens


class _TunedLinear:
    """One linear: y = Qa(R(x / s)) · (codes · scales)ᵀ + (x · down) · upᵀ + bias, scales and factors with steps."""

    def __init__(self, layer: Layer, inputs: _Inputs):
        self.inputs = inputs
        self.restart(layer)

    def restart(self, layer: Layer) -> None:
        self.layer = layer
        self._codes = layer.codes.float().unflatten(1, (-1, layer.group_size))
        self._starts = [layer.scales.float(), layer.proj_up.float(), layer.proj_down.float()]
        self._units = [
            self._starts[0],
            *(start.square().mean().sqrt() if start.numel() else 1.0 for start in self._starts[1:]),
        ]
        self.steps = [torch.zeros_like(start, requires_grad=True) for start in self._starts]

    def _values(self) -> list[Tensor]:
        return [start + unit * step for start, unit, step in zip(self._starts, self._units, self.steps, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        scales, up, down = self._values()
        weight_hat = (self._codes * scales.unsqueeze(-1)).flatten(1)
        y = functional.linear(self.inputs(x, self.layer.transform), weight_hat) + x @ down @ up.t()
        return y if self.layer.bias is None else y + self.layer.bias

    def finish(self) -> Layer:
        """The layer as it is stored. Raises NumericsError for what float16 cannot hold."""
        scales, up, down = (value.detach().half() for value in self._values())
        if not all(torch.isfinite(value).all() for value in (scales, up, down)):
            raise NumericsError(f"{self.layer.name}: tuned beyond float16; lower --rate")
        return replace(self.layer, scales=scales.clamp_min(SMALLEST_SCALE), proj_up=up, proj_down=down)


class _Inputs:
    """Quantized inputs; linears that read the same tensor with the same transform one after another share them."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, ActivationTransform, Tensor] | None = None

    def __call__(self, x: Tensor, transform: ActivationTransform) -> Tensor:
        if self._last is None or self._last[0] is not x or not self._last[1].same(transform):
            self._last = (x, transform, _StraightThrough.apply(x, transform))
        return self._last[2]


class _StraightThrough(torch.autograd.Function):
    """x̂ = Qa(R(x / s)), with the gradient of R(x / s)."""

    @staticmethod
    def forward(ctx, x: Tensor, transform: ActivationTransform) -> Tensor:
        ctx.transform = transform
        return fake_quantize_activation(transform.apply(x), transform.clip)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        back = rotate(gradient.contiguous()) if ctx.transform.rotation else gradient
        return back if ctx.transform.smooth is None else back / ctx.transform.smooth, None
