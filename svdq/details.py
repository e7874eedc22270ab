"""What a picture of a quantized file shows beside the verifier's errors: codes, outlying channels, bytes, seconds.

The verifier hands over what it has in memory anyway, one linear at a time; what is kept is a few numbers a channel.
Nothing here knows a number format: a code is an integer, a kind of bytes goes by the tensor's last name.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from svdq.models import Model
from svdq.quantized import Layer, QuantizedFile

CODES, SCALES, LOW_RANK = "weight codes", "scales", "low-rank factors"
ACTIVATION, BIASES, OF_LINEARS = "smoothing, clips", "biases", "other of the linears"
MATRICES, VECTORS, HEADER = "embeddings, heads, other matrices", "norms, other vectors", "header"
ORIGINAL = "weights of the linears"
ORDER = (ORIGINAL, CODES, SCALES, LOW_RANK, ACTIVATION, BIASES, OF_LINEARS, MATRICES, VECTORS, HEADER)
_KINDS = {
    CODES: "qweight weight",
    SCALES: "w_scales wscales w_zeros wcscale absmax nested_absmax quant_map nested_quant_map",
    LOW_RANK: "proj_down proj_up lora_down lora_up",
    ACTIVATION: "smooth smooth_orig act_clip",
    BIASES: "bias",
}
KIND_OF = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}


@dataclass(frozen=True)
class LayerDetails:
    """One linear. codes: code → how many weights have it.

    Per channel, the largest absolute value over `tokens` tokens, float32 (k,) on the CPU, or None without data:
    absmax       of the input as it arrives
    absmax_read  of what the quantizer reads of it, smoothed and rotated; None where nothing is done to it
    """

    codes: dict[int, int]
    tokens: int = 0
    absmax: Tensor | None = None
    absmax_read: Tensor | None = None


@dataclass
class Details:
    """Filled while a file is verified. layers: only where they are wanted; seconds: of each phase, in order."""

    wanted: bool = False
    layers: dict[str, LayerDetails] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _running: tuple[str, float] | None = None

    def enter(self, phase: str | None, device: torch.device | None = None) -> None:
        """What follows is of this phase; None ends the last. Work that a GPU still has is waited for."""
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        if self._running is not None:
            name, since = self._running
            self.seconds[name] = self.seconds.get(name, 0.0) + now - since
        self._running = None if phase is None else (phase, now)

    def see(self, layer: Layer, x: Tensor | None = None) -> None:
        """A linear, and its inputs (tokens, k) if there are any."""
        if self.wanted:
            self.layers[layer.name] = layer_details(layer, x)


def layer_details(layer: Layer, x: Tensor | None = None) -> LayerDetails:
    values, counts = layer.codes.unique(return_counts=True)
    codes = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if x is None or not len(x):
        return LayerDetails(codes)
    transform = layer.transform
    changed = transform.smooth is not None or transform.rotation
    read = transform.apply(x).abs().amax(0).cpu() if changed else None
    return LayerDetails(codes, len(x), x.abs().amax(0).float().cpu(), read)


def bytes_by_kind(quantized: QuantizedFile) -> dict[str, int]:
    """Kind → bytes in the file, largest first; they add up to the file's size."""
    others, kinds = set(quantized.other_tensors), Counter[str]()
    for name, info in quantized.file.tensors.items():
        if name in others:
            kinds[MATRICES if len(info.shape) > 1 else VECTORS] += info.nbytes
        else:
            kinds[KIND_OF.get(name.rpartition(".")[2], OF_LINEARS)] += info.nbytes
    kinds[HEADER] = quantized.file.size - sum(kinds.values())
    return {kind: count for kind, count in kinds.most_common() if count}


def source_bytes_by_kind(model: Model, quantized: QuantizedFile) -> dict[str, int]:
    """The same of the original's tensors: the linears that are quantized in the file, and all others."""
    weights, kinds = {f"{name}.weight" for name in quantized.layers}, Counter[str]()
    for name in model.files.tensors:
        info = model.files.info(name)
        if name in weights:
            kinds[ORIGINAL] += info.nbytes
        else:
            kinds[MATRICES if len(info.shape) > 1 else VECTORS] += info.nbytes
    return dict(kinds.most_common())


def quantizer_report(quantized: QuantizedFile, name: str) -> dict[str, Any] | None:
    """What the header keeps of the quantizer's report on this linear; None where it lacks that or holds something else.

    rounds      √(J/‖X'W'ᵀ‖²) of each, on the calibration tokens: damped_after_codes, damped_after_lowrank, and error,
                which is undamped
    kept_round  the one whose tensors are in the file, from 1; damping is λ / mean diag Hxx
    """
    layers = quantized.report.get("layers")
    entry: Any = layers.get(name) if isinstance(layers, dict) else None
    keys = ("damped_after_codes", "damped_after_lowrank", "error")
    try:
        return {
            "rounds": [{key: float(errors[key]) for key in keys} for errors in entry["rounds"]],
            "kept_round": int(entry["kept_round"]),
            "damping": float(entry["damping"]),
        }
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def layer_format(quantized: QuantizedFile, name: str) -> str:
    """What a linear is stored in and runs with, as 'W4A4'."""
    return "W4A8" if quantized.activations == "fp8" else quantized.format.name.upper()
