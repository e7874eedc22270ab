"""The least time that a model's linears and attention can take on a GPU: operations over rates, bytes over bandwidth.

Linears are those of the blocks, one by one; embedding and output head are not counted. Every operand is counted once:
activations come and go in 16 bits whatever the format, weights have their bits, scales and low-rank factors. The floor
of an operation is the longer of its two times; which one it is says what bounds it. Rates are dense ones and of tensor
cores with 32-bit sums.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from svdq.errors import ConfigError
from svdq.models import Model

FORMATS = ("FP16", "W8A8", "W4A8", "W4A4")
_WEIGHT_BYTES = {"FP16": 2.0, "W8A8": 1.0, "W4A8": 0.5, "W4A4": 0.5}
_MULTIPLIERS = {  # the operand types that a format's products run in, the first that the GPU has; W4A8 is FP8's
    "FP16": ("fp16",),
    "W8A8": ("int8",),
    "W4A8": ("fp8", "int8"),
    "W4A4": ("int4", "fp8", "int8"),
}
_GROUP = 64
_CACHE_BYTES = 128 << 20  # more than a second-level cache of today holds


@dataclass(frozen=True)
class Gpu:
    """bandwidth in bytes/s; rates in operations/s by operand type, dense, a product and a sum being two."""

    name: str
    bandwidth: float
    rates: dict[str, float]
    source: str

    def rate(self, kind: str) -> tuple[str, float]:
        """The operand type that this format runs in here, and its rate. kind one of FORMATS."""
        operands = next(one for one in _MULTIPLIERS[kind] if one in self.rates)
        return operands, self.rates[operands]

    def break_even(self, kind: str) -> float:
        """Operations per byte from which the arithmetic takes longer than the memory."""
        return self.rate(kind)[1] / self.bandwidth


def _gpu(name: str, gigabytes: float, source: str, **tera: float) -> Gpu:
    return Gpu(name, gigabytes * 1e9, {operands: rate * 1e12 for operands, rate in tera.items()}, source)


_ADA = "NVIDIA Ada GPU architecture white paper 2.01, appendices"
GPUS = {
    "a10": _gpu("NVIDIA A10", 600, "NVIDIA A10 datasheet", fp16=125, int8=250, int4=500),
    "a100": _gpu(
        "NVIDIA A100-SXM4-80GB", 2039, "NVIDIA A100 datasheet; int4: A100 architecture white paper",
        fp16=312, int8=624, int4=1248,
    ),
    "h100": _gpu(
        "NVIDIA H100 80GB HBM3", 3350, "NVIDIA H100 datasheet (SXM), half of its rates with sparsity",
        fp16=989.4, fp8=1978.9, int8=1978.9,
    ),
    "h200": _gpu(
        "NVIDIA H200", 4800, "NVIDIA H200 datasheet (SXM), half of its rates with sparsity",
        fp16=989.4, fp8=1978.9, int8=1978.9,
    ),
    "l4": _gpu("NVIDIA L4", 300, f"NVIDIA L4 datasheet, half of its rates with sparsity; int4: {_ADA}",
               fp16=121, fp8=242.5, int8=242.5, int4=485),
    "l40s": _gpu("NVIDIA L40S", 864, "NVIDIA L40S datasheet", fp16=362.05, fp8=733, int8=733, int4=733),
    "rtx3090": _gpu(
        "NVIDIA GeForce RTX 3090", 936, "NVIDIA Ampere GA102 white paper, fp16 with 32-bit sums",
        fp16=71, int8=284, int4=568,
    ),
    "rtx4090": _gpu(
        "NVIDIA GeForce RTX 4090", 1008, f"{_ADA}, fp16 and fp8 with 32-bit sums",
        fp16=165.2, fp8=330.3, int8=660.6, int4=1321.2,
    ),
}  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """A name of GPUS, or 'auto' for the first GPU here. Raises ConfigError."""
    if name != "auto":
        if name not in GPUS:
            raise ConfigError(f"--gpu {name!r}: wanted auto or one of {', '.join(GPUS)}")
        return GPUS[name]
    if not torch.cuda.is_available():
        raise ConfigError(f"--gpu auto: found no CUDA device; name one of {', '.join(GPUS)}")
    here = torch.cuda.get_device_name()
    for gpu in GPUS.values():
        if here == gpu.name:
            return gpu
    raise ConfigError(f"--gpu auto: {here} is not in the table; name one of {', '.join(GPUS)}")


@dataclass(frozen=True)
class Work:
    """operations by operand type, and bytes moved, of one call."""

    operations: dict[str, float]
    bytes: float

    @property
    def total(self) -> float:
        return sum(self.operations.values())

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.total / self.bytes

    def seconds(self, gpu: Gpu) -> tuple[float, str]:
        """The floor on this GPU, and what bounds it: 'memory' or 'compute'."""
        compute = sum(count / gpu.rates[operands] for operands, count in self.operations.items())
        memory = self.bytes / gpu.bandwidth
        return max(compute, memory), "compute" if compute > memory else "memory"


def linear_work(m: int, n: int, k: int, kind: str, gpu: Gpu, rank: int = 16) -> Work:
    """One linear, (m, k) activations and an (n, k) weight, in one of FORMATS.

    W8A8 has a float32 scale a row; the 4-bit weights a float16 scale for 64, and `rank` columns in 16 bits.
    """
    operations = {gpu.rate(kind)[0]: 2.0 * m * n * k}
    moved = 2.0 * m * (k + n) + _WEIGHT_BYTES[kind] * n * k
    if kind == "W8A8":
        moved += 4.0 * n
    elif kind != "FP16":
        moved += 2.0 * n * k / _GROUP + 2.0 * rank * (n + k)
        if rank:
            operations["fp16"] = operations.get("fp16", 0.0) + 2.0 * m * rank * (n + k)
    return Work(operations, moved)


def attention_work(m: int, heads: int, kv_heads: int, head_dim: int, *, causal: bool) -> Work:
    """One sequence of m tokens in 16 bits: q·kᵀ and p·v; q, k, v and the output once, no scores in memory."""
    pairs = m * (m + 1) / 2 if causal else m * m
    return Work({"fp16": 4.0 * pairs * heads * head_dim}, 4.0 * m * head_dim * (heads + kv_heads))


@dataclass(frozen=True)
class Row:
    """One kind of operation of the model. floors: seconds of one call by format, and what bounds it."""

    name: str
    count: int
    shape: str
    work: Work  # in FP16
    floors: dict[str, tuple[float, str]]
    works: dict[str, Work]
    reached: float | None = None  # floor over measured time in 16 bits


def rows(
    model: Model,
    tokens: int,
    gpu: Gpu,
    *,
    rank: int = 16,
    causal: bool = True,
    timed: Callable[[int, int, int], float] | None = None,
) -> list[Row]:
    """The model's linears, those of one name and size in one row, then attention, where config.json gives its heads.

    timed  (m, n, k) → seconds that such a linear took in 16 bits
    """
    counts: dict[tuple[str, int, int], int] = {}
    for linear in model.linears:
        key = (linear.name.rpartition(".")[2], linear.n, linear.k)
        counts[key] = counts.get(key, 0) + 1
    found = []
    for (name, n, k), count in counts.items():
        works = {kind: linear_work(tokens, n, k, kind, gpu, rank) for kind in FORMATS}
        floors = {kind: work.seconds(gpu) for kind, work in works.items()}
        reached = floors["FP16"][0] / timed(tokens, n, k) if timed else None
        found.append(Row(name, count, f"{k} -> {n}", works["FP16"], floors, works, reached))
    if heads := _heads(model.config):
        work = attention_work(tokens, *heads, causal=causal)
        floors = dict.fromkeys(FORMATS, work.seconds(gpu))
        shape = f"{heads[0]}/{heads[1]} x {heads[2]}"
        found.append(Row("attention", len(model.blocks), shape, work, floors, dict.fromkeys(FORMATS, work)))
    return found


def _heads(config: dict[str, Any]) -> tuple[int, int, int] | None:
    """(heads, key/value heads, channels of a head); None where config.json does not say."""
    heads, hidden = (config.get(key) or config.get(old) for key, old in
                     (("num_attention_heads", "n_head"), ("hidden_size", "n_embd")))  # fmt: skip
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads


# ---------------------------------------------------------------------------------------------- measured


def measured(gpu: Gpu, device: torch.device, dtype: torch.dtype, *, size: int = 8192) -> Gpu:
    """The same GPU with the bandwidth of a copy and the rate of a size³ product; other rates by the table's ratios.

    Raises ConfigError if the CUDA device is another GPU.
    """
    if device.type == "cuda" and (here := torch.cuda.get_device_name(device)) != gpu.name:
        raise ConfigError(f"--measure: the GPU here is {here}, not {gpu.name}; use --gpu auto")
    block = torch.empty(size * size, dtype=dtype, device=device)
    target = torch.empty_like(block)
    bandwidth = 2 * block.numel() * block.element_size() / _seconds(lambda: target.copy_(block), device)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    share = 2.0 * size**3 / _seconds(lambda: a @ b, device) / gpu.rates["fp16"]
    rates = {operands: rate * share for operands, rate in gpu.rates.items()}
    return Gpu(gpu.name, bandwidth, rates, "measured: a copy and a 16-bit product; others by the table's ratios")


def timer(device: torch.device, dtype: torch.dtype) -> Callable[[int, int, int], float]:
    """(m, n, k) → seconds of torch's linear on random operands: the median of several, each weight out of the cache."""

    def timed(m: int, n: int, k: int) -> float:
        x, buffers = torch.randn(m, k, device=device, dtype=dtype), max(2, -(-_CACHE_BYTES // (n * k * dtype.itemsize)))
        weights = cycle(torch.randn(buffers, n, k, device=device, dtype=dtype).unbind())
        return _seconds(lambda: torch.nn.functional.linear(x, next(weights)), device)

    return timed


def _seconds(call: Callable[[], Any], device: torch.device, repeats: int = 11) -> float:
    """Median time of one call after three that warm up."""
    times = []
    for number in range(3 + repeats):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            spent = start.elapsed_time(stop) / 1e3
        else:
            began = time.perf_counter()
            call()
            spent = time.perf_counter() - began
        if number >= 3:
            times.append(spent)
    return statistics.median(times)


# ---------------------------------------------------------------------------------------------- shown


def require_plot() -> None:
    """Raises ConfigError without matplotlib."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise ConfigError("--plot: matplotlib is not installed; pip install 'svdq[plot]'") from None


def plot(found: list[Row], gpu: Gpu, path: str | Path) -> None:
    """The roofline as .png or .svg. Raises ConfigError without matplotlib."""
    require_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    points = [work.intensity for row in found for work in row.works.values()]
    edges = [gpu.break_even(kind) for kind in FORMATS]
    low, high = min(*points, *edges) / 2, max(*points, *edges) * 2
    for number, kind in enumerate(FORMATS):
        operands, rate = gpu.rate(kind)
        corners = [low, gpu.break_even(kind), high]
        roof = [min(x * gpu.bandwidth, rate) / 1e12 for x in corners]
        axes.plot(corners, roof, color=f"C{number}", alpha=0.5)
        works = [(row.works[kind], row.floors[kind][0]) for row in found if row.name != "attention"]
        reached = [work.total / floor / 1e12 for work, floor in works]
        label = f"{kind} ({operands}, {rate / 1e12:,.0f} T/s)"
        axes.plot([work.intensity for work, _ in works], reached, "os+x"[number], color=f"C{number}", label=label)
    for row in found:
        if row.name == "attention":
            floor = row.floors["FP16"][0]
            axes.plot([row.work.intensity], [row.work.total / floor / 1e12], "k^", label="attention")
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10¹² operations per second, at most")
    axes.set_title(f"{gpu.name}: {gpu.bandwidth / 1e9:,.0f} GB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.tick_params(which="minor", labelsize="x-small")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path)
