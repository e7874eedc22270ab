"""The work of a quantize run on one site: the linears that share an input, prepared once, stacked, quantized."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from svdq.calibration.capture import BlockSums
from svdq.config import WEIGHT_ONLY, LayerConfig, QuantConfig
from svdq.errors import NumericsError
from svdq.layer import PreparedSite, QuantizedLinear, prepare_site, quantize_linears, round_linear
from svdq.models import Linear, Model, read_weight
from svdq.objective import ActivationSums
from svdq.preflight import Plan
from svdq.rounding import ActivationTransform, rotate

Result = tuple[Linear, QuantizedLinear, ActivationTransform]
NOT_QUANTIZED = ActivationTransform(dtype=None)  # 16-bit activations


def without_sums(the_plan: Plan, block: int) -> BlockSums:
    """A block whose linears are rounded by themselves: each a site, and nothing known of its input."""
    names = [linear.name for linear in the_plan.linears if linear.block == block]
    return BlockSums({name: [name] for name in names}, {}, [])


def site_jobs(the_plan: Plan, block: int, sums: BlockSums) -> list[tuple[str, list[Linear]]]:
    """One job a site, the most expensive first."""
    by_name = {linear.name: linear for linear in the_plan.linears if linear.block == block}
    jobs = []
    for site, names in sums.sites.items():
        if members := [by_name[name] for name in names if name in by_name]:
            jobs.append((site, members))
    return sorted(jobs, key=lambda job: -sum(3 * m.k**3 + m.n * m.k**2 for m in job[1]))


def quantize_site(
    model: Model,
    sums: dict[str, ActivationSums],
    site: str,
    members: list[Linear],
    config: QuantConfig,
    device: torch.device,
    threads: int,
) -> list[Result]:
    """The linears of one site, whose sums are used up; without any, each is rounded to nearest by itself.

    Raises NumericsError with a name.
    """
    torch.set_num_threads(threads)  # per call: a part of this setting is one for all threads
    started = time.perf_counter()
    results: list[Result] = []
    if site not in sums:
        for linear in members:
            with _named(linear):
                result = round_linear(read_weight(model, linear).to(device), config.for_layer(linear.name))
            results.append((linear, result, NOT_QUANTIZED))
    else:
        results = _quantize_on_sums(model, sums.pop(site).to(device), members, config, device)
    seconds = time.perf_counter() - started
    for linear, result, _ in results:
        result.report["seconds"] = round(seconds * linear.n / sum(member.n for member in members), 3)
    return results


def _quantize_on_sums(
    model: Model, moved: ActivationSums, members: list[Linear], config: QuantConfig, device: torch.device
) -> list[Result]:
    if config.layer.format in WEIGHT_ONLY:
        moved = raw_sums(moved)
    prepared: dict[tuple, PreparedSite] = {}
    stacks: dict[LayerConfig, list[Linear]] = {}
    for linear in members:
        layer = config.for_layer(linear.name)
        stacks.setdefault(layer, []).append(linear)
        if (key := (layer.damping, layer.objective)) not in prepared:
            with _named(linear):
                prepared[key] = prepare_site(moved, layer)
    transform = moved.transform
    del moved  # of a wide site, 2.5 GB
    results: list[Result] = []
    for layer, stack in stacks.items():
        weights = [read_weight(model, linear).to(device) for linear in stack]
        for linear, result in zip(stack, _quantize_stack(stack, weights, prepared, layer), strict=True):
            results.append((linear, result, transform))
    return results


def raw_sums(sums: ActivationSums) -> ActivationSums:
    """Σ x xᵀ of the inputs as they are, from a store that was taken through a transform: for 16-bit activations.

    x = diag(smooth)·R·x', so that Σ x xᵀ is Σ x'x'ᵀ with both sides turned back.
    """
    raw, smooth = sums.xx.double(), sums.transform.smooth
    if sums.transform.rotation:
        raw = rotate(rotate(raw).t())
    if smooth is not None:
        raw = raw * smooth.double().outer(smooth.double())
    return replace(sums, xx=raw, xq=raw, qq=raw, transform=NOT_QUANTIZED)


def _quantize_stack(
    stack: list[Linear], weights: list[Tensor], prepared: dict[tuple, PreparedSite], layer: LayerConfig
) -> list[QuantizedLinear]:
    """The linears of one site and configuration. Raises NumericsError with the name of the one that it is about."""
    site = prepared[layer.damping, layer.objective]
    try:
        return quantize_linears(weights, site, layer)
    except NumericsError:
        results = []
        for linear, weight in zip(stack, weights, strict=True):
            with _named(linear):
                results += quantize_linears([weight], site, layer)
        return results


@contextmanager
def _named(linear: Linear) -> Iterator[None]:
    """A NumericsError inside gets the linear's name."""
    try:
        yield
    except NumericsError as error:
        raise NumericsError(f"{linear.name}: {error}") from None
