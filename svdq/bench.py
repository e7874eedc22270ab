"""How fast a decoder model runs on packed sequences: 16 bits and quantized, with and without CUDA graphs.

Weights are random and rounded to nearest: what a kernel costs does not depend on them. All variants run the same
decoder layers on the same inputs, and their attention is the same function (svdq.packed), so that they differ in their
linears, in what is fused around those, and in how they are launched; a graph's tokens are padded to its bucket, as a
runner pads them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from svdq.decoder import LINEARS, decoder_block
from svdq.errors import ConfigError
from svdq.grid import INT4_WEIGHT
from svdq.kernels import hopper
from svdq.kernels.launch import require
from svdq.packed import BUCKETS, PackedRunner
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform, round_to_nearest

SHAPES: dict[str, dict[str, Any]] = {  # of decoders without their embeddings; as transformers' Qwen3Config names them
    "qwen3-0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072,
    },
    "llama-8b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336,
    },
    "tiny": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "intermediate_size": 256,
    },
}  # fmt: skip
RANK = 16
REPEATS = 5


@dataclass(frozen=True)
class Row:
    """One variant. ms_per_step: the median of REPEATS, spread_ms the largest less the smallest.

    peak_bytes  of the GPU's memory, weights too; None on a CPU
    """

    variant: str
    ms_per_step: float
    spread_ms: float
    peak_bytes: int | None
    linear_bytes: int


def backbone(shape: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """A Qwen3 model of this shape with random weights."""
    from transformers import Qwen3Config, Qwen3Model

    config = Qwen3Config(**SHAPES[shape], vocab_size=64)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        torch.manual_seed(0)
        model: nn.Module = Qwen3Model(config)
    return model.to(dtype).eval().requires_grad_(False)


def quantize_layers(model: Any, activations: str) -> None:
    """Replace the decoder layers, in place, by W4A4DecoderBlock with the weights rounded to nearest."""
    for index, layer in enumerate(model.layers):
        model.layers[index] = decoder_block(
            layer,
            {suffix: _layer(suffix, layer.get_submodule(suffix).weight) for suffix in LINEARS},
            activations=activations,
        )


def _layer(name: str, weight: Tensor) -> Layer:
    """Smoothed and rotated, as the default method leaves a linear; siblings alike."""
    n, k = weight.shape
    smooth = torch.linspace(0.5, 2.0, k, device=weight.device)
    transform = ActivationTransform(smooth, rotation=True, clip=0.85)
    codes, scales = round_to_nearest(transform.weight(weight), INT4_WEIGHT)
    low_rank = torch.randn(n + k, RANK, device=weight.device) / (n + k) ** 0.5
    return Layer(name, codes, scales, low_rank[:k].half(), low_rank[k:].half(), None, transform)


def linear_bytes(model: Any) -> int:
    """Of the decoder layers' linears, as they lie in memory."""
    total = 0
    for layer in model.layers:
        norms = sum(t.nbytes for name, t in layer.named_parameters() if "norm" in name)
        total += sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())) - norms
    return total


def bench(
    shape: str,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float16,
    tokens: int = 700,
    sequences: int = 4,
    steps: int = 32,
    compile_too: bool = True,
    progress: Callable[[str], None] = lambda variant: None,
) -> list[Row]:
    """Every variant that this device can run, one after the other; a step is one forward of the whole packed batch.

    progress  is called with a variant's name before it is timed
    Raises    ConfigError for an unknown shape or too few tokens, KernelError if the kernels cannot run here
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape {shape!r}: wanted {', '.join(SHAPES)}")
    if device.type == "cuda":
        require(device)
    lengths = [tokens // sequences + (i < tokens % sequences) for i in range(sequences)]
    if tokens < sequences:
        raise ConfigError(f"{tokens} tokens are too few for {sequences} sequences")
    inputs = torch.randn(tokens, SHAPES[shape]["hidden_size"], generator=torch.Generator().manual_seed(0))
    inputs = inputs.to(device, dtype)
    gpu = device.type == "cuda"
    names = {torch.float16: "FP16", torch.bfloat16: "BF16", torch.float32: "FP32"}
    paths = [(None, names[dtype]), ("int4", "W4A4"), *([("fp8", "W4A8")] if hopper.runs_on(device) else [])]
    rows = []
    for activations, name in paths:
        model = backbone(shape, device, dtype)
        if activations:
            quantize_layers(model, activations)
        variants: list[tuple[str, bool, bool]] = [("eager", False, False)]
        if gpu:
            variants.append(("CUDA graph", True, False))
            if compile_too and not activations:
                variants.append(("torch.compile", False, True))
        for variant, graphs, compiled in variants:
            progress(f"{name} {variant}")
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            buckets = (_bucket(tokens),) if graphs else ()
            runner = PackedRunner(model, embeddings=True, buckets=buckets, max_sequences=sequences)
            if compiled:
                for layer in runner.body.layers:
                    layer.compile()
            seconds = _time(partial(runner, inputs, lengths), steps, device)
            peak = torch.cuda.max_memory_allocated(device) if gpu else None
            middle = statistics.median(seconds)
            rows.append(
                Row(f"{name} {variant}", middle * 1e3, (max(seconds) - min(seconds)) * 1e3, peak, linear_bytes(model))
            )
            del runner
        del model
    return rows


def _bucket(tokens: int) -> int:
    """What a runner's graph of so many tokens is padded to; more than the last bucket are not."""
    return next((size for size in BUCKETS if size >= tokens), tokens)


def _time(step: Callable[[], Any], steps: int, device: torch.device) -> list[float]:
    """Seconds a step, REPEATS times."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        step()
    wait()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        seconds.append((time.perf_counter() - start) / steps)
    return seconds
