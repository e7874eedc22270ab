"""Where the time of a model's forward goes: torch's profiler, its events sorted into a few categories.

On a GPU the events are kernels, copies and fills, and what lies between them is time in which the GPU waits for the
next launch. On a CPU they are torch's operators, each with its own time, without what it calls.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

_OPERATORS = {  # of torch, without aten:: and underscores around
    "memory": "copy clone contiguous to to_copy cat empty empty_like empty_strided new_empty fill zero zeros "
    "zeros_like ones index index_select gather slice select view reshape expand transpose permute unsqueeze squeeze "
    "split narrow as_strided t detach embedding arange pad constant_pad_nd stack chunk unbind flatten unflatten repeat",
    "reduction": "softmax log_softmax norm layer_norm native_layer_norm rms_norm mean sum amax max min any all argmax "
    "cumsum",
}
CATEGORIES = {  # the first whose pattern is found in an event's name
    "attention": r"flash|fmha|attention|sdpa",
    "GEMM": r"gemm|gemv|splitk|cutlass|cublas|xmma|nvjet|w4a4|wgmma|matmul"
    r"|aten::(_?linear|mm|addmm|bmm|baddbmm|einsum|dot|mv)_?$",
    **{kind: rf"^aten::_*({'|'.join(names.split())})_*$" for kind, names in _OPERATORS.items()},
    "elementwise": r"^aten::|elementwise|quantize_lora_down|rope",  # what is left of torch's operators
}
_KERNELS = {  # between GEMM and the operators
    "memory": r"memcpy|memset|copy|catarray|gather|index|fillfunctor|expand_codes",
    "reduction": r"reduce|softmax|(?<!qk)norm|inv_rms",
}
OTHER = "other"


def peak_bytes(device: torch.device | str) -> int:
    """The most memory of this process so far: on a GPU torch's allocations there, else what it had in memory at most; 0
    where the system does not tell."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")  # Linux; its ru_maxrss would be the parent's, if that had more at the fork
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    try:
        from resource import RUSAGE_SELF, getrusage
    except ImportError:  # Windows
        return 0
    return getrusage(RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def category(name: str) -> str:
    """A kernel's or an operator's, by its name."""
    lower = name.lower()
    patterns = list(CATEGORIES.items())
    if not lower.startswith("aten::"):
        patterns[2:2] = _KERNELS.items()
    return next((kind for kind, pattern in patterns if re.search(pattern, lower)), OTHER)


@dataclass(frozen=True)
class Event:
    """One kernel or operator: µs of its own, and on a GPU when it ran."""

    name: str
    own: float
    start: float = 0.0
    end: float = 0.0


def profile(
    run: Callable[[], Any], device: torch.device, steps: int, trace: str | Path | None = None
) -> dict[str, Any]:
    """The table of `steps` runs after one that warms up; see `summary`. trace: a Chrome trace is written there."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.no_grad():
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=activities) as recorded:
            for _ in range(steps):
                run()
            if on_gpu:
                torch.cuda.synchronize(device)
    if trace is not None:
        recorded.export_chrome_trace(str(trace))
    events = []
    for event in recorded.events() or []:
        span = event.time_range
        if on_gpu and event.device_type == DeviceType.CUDA:
            events.append(Event(event.name, span.end - span.start, span.start, span.end))
        elif not on_gpu and event.device_type == DeviceType.CPU:
            events.append(Event(event.name, event.self_cpu_time_total))
    return summary(events, steps, on_gpu)


def summary(events: list[Event], steps: int, on_gpu: bool) -> dict[str, Any]:
    """Per step: µs and calls by category, most first, and the ten events that take most; on a GPU the share of the
    timeline, from the first kernel to the last, in which none runs."""
    total = sum(event.own for event in events)
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    by_name: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events:
        for group, key in ((by_kind, category(event.name)), (by_name, event.name)):
            group[key][0] += event.own
            group[key][1] += 1

    def rows(groups: dict[str, list[float]]) -> list[dict[str, Any]]:
        ordered = sorted(groups.items(), key=lambda item: -item[1][0])
        return [
            {"name": name, "us": spent / steps, "calls": calls / steps, "share": spent / total if total else 0.0}
            for name, (spent, calls) in ordered
        ]

    top = [row | {"category": category(row["name"])} for row in rows(by_name)[:10]]
    return {
        "steps": steps,
        "us": total / steps,
        "calls": len(events) / steps,
        "gap_share": gap_share(events) if on_gpu and events else None,
        "categories": rows(by_kind),
        "top": top,
    }


def gap_share(events: Iterable[Event]) -> float:
    """Of the time from the first start to the last end, the share that no event covers."""
    spans = sorted((event.start, event.end) for event in events)
    first, covered, reached = spans[0][0], 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - covered / (reached - first) if reached > first else 0.0
