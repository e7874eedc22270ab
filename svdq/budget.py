"""Which linears deserve which rank, or 16 bits, for a number of bytes.

Every linear is quantized in memory with each rank in turn, from a store's sums, as `quantize` would. A choice costs

'gradient'  D · J / J₀: D is how far quantizing this linear alone moves the model's output (svdq.sensitivity: nats a
            token for a language model), measured with one of the ranks; J the objective, J₀ with that rank
'error'     √(J/‖X'W'ᵀ‖²), the layer error that `quantize` prints, so that their mean falls

Costs add up over the linears, as the distances do where they are small. Then bytes are spent where a byte saves most:
of each linear the choices on the lower convex hull of (bytes, cost), all linears' steps in one order of falling saving
per byte. Every prefix of that order is the best for its bytes; a budget takes steps while they fit. Rejected: an exact
knapsack, which could only gain what the last steps leave over.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from svdq import preflight
from svdq.calibration.store import Store
from svdq.config import LayerConfig, QuantConfig
from svdq.errors import ConfigError
from svdq.formats import FORMATS
from svdq.layer import PreparedSite, QuantizedLinear
from svdq.linear import W4A4Linear
from svdq.models import Linear, Model, read_weight
from svdq.objective import ActivationSums, Objective
from svdq.pipeline import calibration_identity
from svdq.preflight import Plan
from svdq.quantized import Layer
from svdq.store_checks import layer_error, map_sites, quantize_again

WEIGHTINGS = ("gradient", "error")
RANKS = (16, 32, 48, 64)
_UNITS = {"bits": 0, "%": 0, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Choice:
    """One way to store a linear. rank None: in 16 bits. bytes: of all its tensors in the file; error: √(J/‖X'W'ᵀ‖²)."""

    rank: int | None
    bytes: int
    error: float
    cost: float


@dataclass(frozen=True)
class Choices:
    """A linear and the ways to store it, by rising bytes. why_not: why a rank is not among them."""

    name: str
    weights: int
    choices: tuple[Choice, ...]
    why_not: tuple[str, ...] = ()


@dataclass(frozen=True)
class Budget:
    """kind 'bits' (a weight of the linears), 'bytes' (of the file's tensors) or 'error' (mean layer error)."""

    kind: str
    value: float
    text: str


@dataclass(frozen=True)
class Allocation:
    """A choice for every linear. linear_bytes: what they take in the file, those in 16 bits included; mean_error: over
    the quantized ones, as `quantize` prints it; cost: the sum of all."""

    chosen: dict[str, Choice]
    linear_bytes: int
    cost: float
    mean_error: float


def parse_budget(text: str) -> Budget:
    """'4.5bits', '130MB' or '7%'. Raises ConfigError."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(%|[A-Za-z]+)", text.strip())
    if not found or found[2] not in _UNITS or not float(found[1]) > 0:
        raise ConfigError(
            f"--budget {text!r}: wanted bits a weight ('4.5bits'), the file's size ('130MB') or a mean error ('7%')"
        )
    value, unit = float(found[1]), found[2]
    if unit == "bits":
        return Budget("bits", value, text)
    return Budget("error", value / 100, text) if unit == "%" else Budget("bytes", value * _UNITS[unit], text)


# ---------------------------------------------------------------------------------------------- what each choice costs


def measure(
    model: Model,
    store: Store,
    config: QuantConfig,
    *,
    ranks: Sequence[int] = RANKS,
    in_16_bits: bool = True,
    quantized: dict[str, W4A4Linear] | None = None,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> list[Choices]:
    """The choices of every linear that `config` selects, in the model's order; knobs but the rank are as `config` says.
    They cost what 'error' says.

    quantized  is filled with the linears as they are with the middle rank that each can have, on the CPU
    Raises ConfigError if the store does not fit the model, the linears or W4A4, the format that plans are for.
    """
    device = torch.device(device)
    the_plan = preflight.plan(model, config)
    calibration_identity(model, the_plan, config, store, None, None)
    linears = the_plan.linears
    run = partial(_measure_site, model, config, sorted(set(ranks)), quantized, device)
    found: dict[str, tuple[list[Choice], list[str]]] = {}
    for results in map_sites(model, store, linears, run, device, partial(progress, "choices")):
        found |= results
    measured = []
    for linear in linears:
        choices, why_not = found.get(linear.name, ([], ["the store has no sums of its input"]))
        if in_16_bits or not choices:
            kept = model.files.info(f"{linear.name}.weight").nbytes + _bias_bytes(model, linear)
            choices = [*choices, Choice(None, kept, 0.0, 0.0)]
        ordered = tuple(sorted(choices, key=lambda choice: choice.bytes))
        measured.append(Choices(linear.name, linear.n * linear.k, ordered, tuple(why_not)))
    return measured


def _measure_site(
    model: Model,
    config: QuantConfig,
    ranks: list[int],
    quantized: dict[str, W4A4Linear] | None,
    device: torch.device,
    sums: ActivationSums,
    members: list[Linear],
) -> dict[str, tuple[list[Choice], list[str]]]:
    """name → (its choices but 16 bits, why others are none) of the linears of one site."""
    moved = sums.to(device)
    weights = {linear.name: read_weight(model, linear).to(device) for linear in members}
    prepared: dict[LayerConfig, PreparedSite] = {}
    again: dict[int, dict[str, QuantizedLinear | str]] = {}
    for rank in ranks:
        able = [linear.name for linear in members if rank <= min(linear.n, linear.k)]
        configs = {name: replace(config.for_layer(name), rank=rank) for name in able}
        again[rank] = quantize_again(weights, configs, moved, prepared)
    traces = [matrix.double() for matrix in (moved.xx, moved.xq, moved.qq)]
    found = {}
    for linear in members:
        name, choices, why_not, layers = linear.name, list[Choice](), list[str](), list[Layer]()
        bias = model.files.read(f"{name}.bias") if linear.bias else None
        objective = Objective(moved.transform.weight(weights[name]), *traces)
        for rank in ranks:
            result = again[rank].get(name, f"exceeds its size {linear.n} x {linear.k}")
            if isinstance(result, str):
                why_not.append(f"rank {rank}: {result}")
                continue
            layer = Layer(name, result.codes, result.scales, result.proj_down, result.proj_up, bias, moved.transform)
            error = layer_error(objective, layer)
            stored = FORMATS[layer.format].tensors(result, config.for_layer(name), moved.transform)
            size = sum(tensor.nbytes for tensor in stored.values()) + _bias_bytes(model, linear)
            choices.append(Choice(rank, size, error, error))
            layers.append(layer)
        if quantized is not None and layers:
            quantized[name] = W4A4Linear(layers[(len(layers) - 1) // 2].to(torch.device("cpu")), "reference")
        found[name] = (choices, why_not)
    return found


def weigh(
    measured: list[Choices], distances: Mapping[str, float], quantized: Mapping[str, W4A4Linear]
) -> list[Choices]:
    """The same choices at the cost that 'gradient' says. distances: of svdq.sensitivity, of these quantized linears."""

    def weighed(one: Choices) -> Choices:
        if one.name not in quantized:
            return one  # 16 bits alone
        error = next(choice.error for choice in one.choices if choice.rank == quantized[one.name].rank)
        factor = distances[one.name] / error**2 if error else 0.0
        return replace(one, choices=tuple(replace(choice, cost=factor * choice.error**2) for choice in one.choices))

    return [weighed(one) for one in measured]


def _bias_bytes(model: Model, linear: Linear) -> int:
    return model.files.info(f"{linear.name}.bias").nbytes if linear.bias else 0


# ---------------------------------------------------------------------------------------------- what the bytes buy


def front(measured: list[Choices]) -> list[Allocation]:
    """Every best allocation, by rising bytes: from each linear's smallest choice, one step more at a time."""
    chosen = {one.name: one.choices[0] for one in measured}
    allocations = [_allocation(chosen)]
    for name, choice in _steps(measured):
        chosen = {**chosen, name: choice}
        allocations.append(_allocation(chosen))
    return allocations


def allocate(measured: list[Choices], most_bytes: float) -> Allocation:
    """The best allocation whose linears take at most so many bytes. Raises ConfigError if the smallest takes more."""
    chosen = {one.name: one.choices[0] for one in measured}
    left = most_bytes - sum(choice.bytes for choice in chosen.values())
    if left < 0:
        raise ConfigError(f"the smallest choices take {most_bytes - left:,.0f} bytes for the linears")
    closed: set[str] = set()
    for name, choice in _steps(measured):
        more = choice.bytes - chosen[name].bytes
        if name in closed or more > left:
            closed.add(name)  # its further steps start from this one
            continue
        chosen[name] = choice
        left -= more
    return _allocation(chosen)


def _steps(measured: list[Choices]) -> list[tuple[str, Choice]]:
    """(linear, its next choice) in order of falling saving per byte; of one linear, in order of its bytes."""
    steps = []
    for one in measured:
        hull = _hull(one.choices)
        for before, after in pairwise(hull):
            saving = (before.cost - after.cost) / (after.bytes - before.bytes)
            steps.append((-saving, one.name, after))
    steps.sort(key=lambda step: step[0])  # stable: along a hull the saving falls, and equal ones stay in order
    return [(name, choice) for _, name, choice in steps]


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull of (bytes, cost) that falls, from the smallest choice on."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bytes, choice.cost)):
        if hull and choice.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], choice) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(before: Choice, after: Choice) -> float:
    return (after.cost - before.cost) / (after.bytes - before.bytes)


def _allocation(chosen: dict[str, Choice]) -> Allocation:
    errors = [choice.error for choice in chosen.values() if choice.rank is not None]
    return Allocation(
        chosen=dict(chosen),
        linear_bytes=sum(choice.bytes for choice in chosen.values()),
        cost=math.fsum(choice.cost for choice in chosen.values()),
        mean_error=fmean(errors) if errors else 0.0,
    )


def uniform(measured: list[Choices], rank: int) -> Allocation:
    """This rank everywhere; 16 bits, or else the largest rank, where a linear cannot have it."""
    chosen = {}
    for one in measured:
        same = [choice for choice in one.choices if choice.rank == rank]
        chosen[one.name] = same[0] if same else one.choices[-1]
    return _allocation(chosen)


def check_before(run: Plan, budget: Budget, store: Store) -> None:
    """What needs no measuring: the smallest rank everywhere is within the budget. run: the plan of that rank.

    The clips are left out, and smoothing where the store has none. Raises ConfigError.
    """
    smoothed = bool(store.manifest["config"]["smoothing"])
    spare = sum((0 if smoothed else 4 * linear.k) + 4 for linear in run.linears)
    weights = sum(linear.n * linear.k for linear in run.linears)
    least = {"bits": 8 * (run.work_bytes - spare) / weights, "bytes": run.output_bytes - spare}.get(budget.kind, 0.0)
    if budget.value < least:
        found = f"{least:.2f} bits a weight" if budget.kind == "bits" else f"{least / 1e6:,.1f} MB, the whole file"
        raise ConfigError(
            f"--budget {budget.text!r}: the smallest of --ranks takes {found}; allow more, or smaller --ranks"
        )


def meet(measured: list[Choices], budget: Budget, other_bytes: int) -> Allocation:
    """The best allocation within the budget. other_bytes: of the file's tensors that belong to none of these linears.

    Raises ConfigError where no choice is within it, saying what is.
    """
    if budget.kind == "error":
        allocations = front(measured)
        if good := [one for one in allocations if one.mean_error <= budget.value]:
            return good[0]
        least = min(one.mean_error for one in allocations)
        raise ConfigError(
            f"--budget {budget.text!r}: the smallest mean layer error of these choices is {100 * least:.2f} %; "
            "allow more, or larger --ranks"
        )
    weights, smallest = sum(one.weights for one in measured), sum(one.choices[0].bytes for one in measured)
    most = budget.value * weights / 8 if budget.kind == "bits" else budget.value - other_bytes
    if most < smallest:
        raise ConfigError(
            f"--budget {budget.text!r}: the smallest choices take {8 * smallest / weights:.2f} bits a weight, "
            f"{(smallest + other_bytes) / 1e6:.1f} MB with the other tensors; allow more, or smaller --ranks"
        )
    return allocate(measured, most)


# ---------------------------------------------------------------------------------------------- said, written, drawn


def other_bytes(model: Model, linears: list[Linear]) -> int:
    """Of the file's tensors that belong to none of these linears."""
    owned = {f"{linear.name}.{suffix}" for linear in linears for suffix in ("weight", "bias")}
    return sum(model.files.info(key).nbytes for key in model.files.tensors if key not in owned | model.ties.keys())


def facts(model: Model, measured: list[Choices], chosen: Allocation, weigh: str) -> dict[str, Any]:
    """The plan, equal ranks beside it, the whole front and every linear's choices, as plain JSON values."""
    weights = sum(one.weights for one in measured)
    names = {one.name for one in measured}
    others = other_bytes(model, [linear for linear in model.linears if linear.name in names])

    def numbers(one: Allocation) -> dict[str, Any]:
        return {
            "linear_bytes": one.linear_bytes,
            "bits_per_weight": 8 * one.linear_bytes / weights,
            "tensor_bytes": one.linear_bytes + others,
            "cost": one.cost,
            "mean_error": one.mean_error,
        }

    ranks = sorted({choice.rank for one in measured for choice in one.choices if choice.rank is not None})
    distance = "nats a token" if model.is_causal_lm else "of the states' energy"
    return {
        "weigh": weigh,
        "unit": distance if weigh == "gradient" else "sum of layer errors",
        "linears": len(measured),
        "weights": weights,
        "predicted": numbers(chosen),
        "uniform": {rank: numbers(uniform(measured, rank)) for rank in ranks},
        "front": [numbers(one) for one in front(measured)],
        "chosen": {name: choice.rank for name, choice in chosen.chosen.items()},
        "choices": {one.name: [asdict(choice) for choice in one.choices] for one in measured},
        "why_not": {one.name: list(one.why_not) for one in measured if one.why_not},
    }


def override_file(chosen: Allocation, config: QuantConfig, predicted: dict[str, Any]) -> str:
    """The text of what `svdq quantize --overrides` reads: config's own patterns, then the most frequent rank for all,
    then the others by name. predicted: for the reader."""
    ranks = {name: choice.rank for name, choice in chosen.chosen.items()}
    kept = [name for name, rank in ranks.items() if rank is None]
    overrides: list[list] = [[pattern, dict(values)] for pattern, values in config.overrides]
    counted = Counter(rank for rank in ranks.values() if rank is not None).most_common(1)
    for common, _ in counted:
        overrides.append(["*", {"rank": common}])
        overrides += [[name, {"rank": rank}] for name, rank in ranks.items() if rank not in (None, common)]
    lists: dict[str, list] = {"overrides": overrides, "ignore": [*config.ignore, *kept]}
    rows = {
        key: ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in entries) for key, entries in lists.items()
    }
    parts = [f'"{key}": [\n  {text}\n ]' if text else f'"{key}": []' for key, text in rows.items()]
    return "{\n " + ",\n ".join([*parts, f'"predicted": {json.dumps(predicted)}']) + "\n}\n"


def plot(facts: dict[str, Any], path: str | Path) -> None:
    """The front as .png or .svg, equal ranks and the plan on it. facts: of `facts`; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.step(*_coordinates(facts["front"]), where="post", label="the best for its bytes")
    axes.plot(*_coordinates(facts["uniform"].values()), "s:", color="C1", label="one rank for all")
    for rank, one in facts["uniform"].items():
        axes.annotate(str(rank), (one["bits_per_weight"], one["cost"]), textcoords="offset points", xytext=(6, 4))
    axes.plot(*_coordinates([facts["predicted"]]), "o", color="C2", markersize=9, label="this plan")
    smallest = min(one["cost"] for one in (*facts["uniform"].values(), facts["predicted"]))
    axes.set(xlabel="bits a weight of the linears", ylabel=f"predicted, {facts['unit']}")
    bits = [one["bits_per_weight"] for one in (*facts["uniform"].values(), facts["predicted"])]
    axes.set(xlim=(0.95 * min(bits), 1.1 * max(bits)), ylim=(0.9 * smallest, None), yscale="log")
    axes.set_title(f"{facts['linears']} linears, {facts['weights'] / 1e6:,.1f} million weights")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend()
    figure.savefig(path)


def _coordinates(allocations: Iterable[dict[str, Any]]) -> tuple[list[float], list[float]]:
    found = list(allocations)
    return [one["bits_per_weight"] for one in found], [one["cost"] for one in found]
