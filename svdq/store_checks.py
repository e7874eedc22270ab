"""The layers of a file on a calibration store's sums: their error now, and what other knobs would give.

error    √(J/‖X'W'ᵀ‖²) of the stored tensors, undamped, by the traces of svdq.objective in float64
what if  every layer quantized again, in memory, from the same sums and with the file's own configuration but for the
         changed knobs; then measured by the same traces. A knob that keeps its value gives the same tensors, and so
         the same error to the last bit, on the machine and device kind that the file was made on

Both errors are those on the calibration tokens, which the layers were fitted to. A store of other tokens than the
file's is refused for a what-if: its gain would be that of the tokens as well. Rejected: measuring a what-if on held-out
text too, which takes the original model's activations of every layer once more; quantize with that knob, then verify.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from svdq import schema
from svdq.calibration.store import Store
from svdq.config import WEIGHT_ONLY, LayerConfig, QuantConfig
from svdq.errors import CheckpointError, ConfigError, NumericsError
from svdq.layer import PreparedSite, QuantizedLinear, prepare_site, quantize_linears
from svdq.models import Linear, Model, read_weight
from svdq.objective import ActivationSums, Objective, relative
from svdq.preflight import WIDE
from svdq.quantized import Layer, QuantizedFile
from svdq.sites import raw_sums

KNOBS: dict[str, type] = {"rank": int, "group_size": int, "rounds": int, "sweeps": int, "damping": float}
T = TypeVar("T")
Change = dict[str, Any]  # knob → value, all of them changed together


@dataclass
class ChangedLayer:
    """One linear under a change. gain = error_now − error_then; bytes_more counts the canonical file's tensors;
    quantizer is the report of svdq.layer.quantize_linears: errors of every round, kept_round, damping, repairs."""

    name: str
    error_now: float
    error_then: float
    gain: float
    bytes_more: int
    quantizer: dict[str, Any]


@dataclass
class WhatIf:
    """The answer for one change, layers in file order. left_out: name → why it has no answer; the means and the bytes
    are those of the other layers."""

    change: Change
    layers: list[ChangedLayer]
    left_out: dict[str, str]
    mean_now: float | None
    mean_then: float | None
    bytes_more: int


@dataclass(frozen=True)
class _Question:
    change: Change
    configs: dict[str, LayerConfig]  # of the layers that can take the change
    left_out: dict[str, str]


def parse_changes(texts: Sequence[str], calib: str | None) -> list[Change]:
    """The command line's --what-if options; calib is its --calib. Raises ConfigError."""
    if texts and not calib:
        raise ConfigError(f"--what-if {texts[0]!r}: quantizes again from a store's sums; wanted --calib CALIB_DIR too")
    return [parse_change(text) for text in texts]


def parse_change(text: str) -> Change:
    """'rank=32,sweeps=2' → {knob: value}. Raises ConfigError for anything else, values out of range included."""
    change: Change = {}
    for assignment in text.split(","):
        knob, equals, value = (part.strip() for part in assignment.partition("="))
        if knob not in KNOBS or not equals:
            raise ConfigError(
                f"--what-if {text!r}: unknown knob {knob!r}; wanted KNOB=VALUE[,…] with one of {', '.join(KNOBS)}"
            )
        if knob in change:
            raise ConfigError(f"--what-if {text!r}: {knob} stands twice; give each value a --what-if of its own")
        try:
            change[knob] = KNOBS[knob](value)
        except ValueError:
            kind = "a number" if KNOBS[knob] is float else "an integer"
            raise ConfigError(f"--what-if {text!r}: {knob}={value!r} is not {kind}") from None
    try:
        replace(LayerConfig(), **change)  # range checks
    except ConfigError as error:
        raise ConfigError(f"--what-if {text!r}: {error}") from None
    return change


def change_text(change: Change) -> str:
    return ",".join(f"{knob}={value}" for knob, value in change.items())


def plan_changes(quantized: QuantizedFile, store: Store | None, changes: Sequence[Change]) -> list[_Question]:
    """Every layer's configuration under each change; no tensor is read.

    Raises ConfigError if there is no store, or not that of the file; if the file is packed; if no layer can take a
    change. CheckpointError if the header does not hold the configuration of the file's run.
    """
    if not changes:
        return []
    where = quantized.file.path
    if store is None:
        raise ConfigError("changes of knobs are asked of a calibration store; found none")
    if quantized.format.name != "w4a4":
        raise ConfigError(f"--what-if: knows w4a4 alone, {where} is {quantized.format.name}")
    if quantized.kind == "packed":
        raise ConfigError(f"--what-if: {where} is packed; wanted the canonical file of svdq quantize")
    calibrated = quantized.meta(schema.CALIBRATION, dict)
    if calibrated.get("sha256") != store.manifest["data"].get("sha256"):
        raise ConfigError(
            f"--what-if: {store.directory} holds sums of other tokens than {where} was quantized on, so its errors "
            f"would not compare; wanted the store of {calibrated.get('source')!r}, {calibrated.get('tokens')!r} tokens"
        )
    run = _run_config(quantized)
    return [_question(quantized, run, change) for change in changes]


def _run_config(quantized: QuantizedFile) -> QuantConfig:
    """The configuration of the run that wrote the file, as far as layers go. Checked: a header is hostile."""
    found = quantized.meta(schema.RUN_CONFIG, dict).get("quantize")
    try:
        overrides = tuple((pattern, dict(values)) for pattern, values in found["overrides"])
        config = QuantConfig(LayerConfig(**found["layer"]), overrides=overrides)
        for name in quantized.layers:
            config.for_layer(name)
    except (ConfigError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{quantized.file.path}: header metadata 'svdq.config' is not the configuration of a quantize run: {error}"
        ) from None
    return config


def _question(quantized: QuantizedFile, run: QuantConfig, change: Change) -> _Question:
    configs: dict[str, LayerConfig] = {}
    left_out: dict[str, str] = {}
    for name, (n, k, rank, group) in quantized.layers.items():
        # rank and group size as the stored tensors have them, which the header was checked against
        config = replace(run.for_layer(name), **{"rank": rank, "group_size": group, **change})
        if config.rank > min(n, k):
            left_out[name] = f"rank {config.rank} exceeds its size {n} x {k}"
        elif k % config.group_size:
            left_out[name] = f"in_features {k} is not a multiple of the group size {config.group_size}"
        else:
            configs[name] = config
    if not configs:
        name, why = next(iter(left_out.items()), ("it", "holds none"))
        raise ConfigError(
            f"--what-if {change_text(change)!r}: no linear of {quantized.file.path} can take it; {name}: {why}"
        )
    return _Question(change, configs, left_out)


def check_on_store(
    model: Model,
    quantized: QuantizedFile,
    store: Store,
    changes: Sequence[Change] = (),
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> tuple[dict[str, float], list[WhatIf]]:
    """(name → error now, the answer to each change) of the file's layers, block by block. Writes nothing.

    Raises CheckpointError if a layer was quantized with another transform than the store's; see also plan_changes.
    """
    questions = plan_changes(quantized, store, changes)
    device = torch.device(device)
    linears = [linear for linear in model.linears if linear.name in quantized.layers]
    now: dict[str, float] = {}
    answers: list[dict[str, ChangedLayer | str]] = [{} for _ in questions]
    run = partial(_check_site, model, quantized, store, questions, device)
    for results in map_sites(model, store, linears, run, device, partial(progress, "errors on store")):
        for name, error, found in results:
            now[name] = error
            for answer, layer in zip(answers, found, strict=True):
                if layer is not None:
                    answer[name] = layer
    return now, [_answer(*pair, list(quantized.layers)) for pair in zip(questions, answers, strict=True)]


def map_sites(
    model: Model,
    store: Store,
    linears: Sequence[Linear],
    run: Callable[[ActivationSums, list[Linear]], T],
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Iterator[T]:
    """run(sums, members) of every site that some of these linears read, in order; progress(blocks done, in all).

    Sites run as in svdq.pipeline, on as many threads: see _quantize_blocks there for why.
    """
    threads = torch.get_num_threads()
    wide = device.type != "cpu" or any(linear.k >= WIDE for linear in linears)
    wanted = {linear.name: linear for linear in linears}

    def work(job: tuple[ActivationSums, list[Linear]]) -> T:
        torch.set_num_threads(threads if wide else 1)  # per call: a part of this setting is one for all threads
        return run(*job)

    with ThreadPoolExecutor(1 if wide else min(threads, 8)) as pool:
        try:
            for block in range(len(model.blocks)):
                recorded = store.read(block)
                jobs = []
                for site, names in recorded.sites.items():
                    if members := [wanted[name] for name in names if name in wanted]:
                        jobs.append((recorded.sums[site], members))
                yield from pool.map(work, jobs)
                progress(block + 1, len(model.blocks))
        finally:
            torch.set_num_threads(threads)


def _check_site(
    model: Model,
    quantized: QuantizedFile,
    store: Store,
    questions: list[_Question],
    device: torch.device,
    sums: ActivationSums,
    members: list[Linear],
) -> list[tuple[str, float, list[ChangedLayer | str | None]]]:
    """Per linear of a site its name, its error now, and for each question the answer, why there is none, or None where
    the question leaves it out."""
    if quantized.format.name in WEIGHT_ONLY:
        sums = raw_sums(sums)
    moved = sums.to(device)
    for linear in members:
        if not quantized.layer(linear.name).transform.same(sums.transform):
            raise CheckpointError(
                f"{store.directory}: {linear.name} was quantized with another smoothing, rotation or clip, or format"
            )
    weights = {linear.name: read_weight(model, linear).to(device) for linear in members}
    prepared: dict[LayerConfig, PreparedSite] = {}
    again = [quantize_again(weights, question.configs, moved, prepared) for question in questions]
    traces = [matrix.double() for matrix in (moved.xx, moved.xq, moved.qq)]
    results = []
    for name, weight in weights.items():
        layer = quantized.layer(name).to(device)
        objective = Objective(layer.transform.weight(weight), *traces)
        now = layer_error(objective, layer)
        found: list[ChangedLayer | str | None] = []
        for question, answers in zip(questions, again, strict=True):
            result = answers.get(name)
            if isinstance(result, QuantizedLinear):
                parts = (result.codes, result.scales, result.proj_down, result.proj_up)
                then = layer_error(objective, Layer(name, *parts, None, layer.transform))
                (n, k, rank, group), config = quantized.layers[name], question.configs[name]
                more = _bytes(n, k, config.rank, config.group_size) - _bytes(n, k, rank, group)
                found.append(ChangedLayer(name, now, then, now - then, more, result.report))
            else:
                found.append(result)
        results.append((name, now, found))
    return results


def quantize_again(
    weights: dict[str, Tensor],
    configs: dict[str, LayerConfig],
    sums: ActivationSums,
    prepared: dict[LayerConfig, PreparedSite],
) -> dict[str, QuantizedLinear | str]:
    """The linears of one site that have a configuration, quantized, or why not; stacked as a run stacks them."""
    stacks: dict[LayerConfig, list[str]] = {}
    for name in weights:
        if name in configs:
            stacks.setdefault(configs[name], []).append(name)
    results: dict[str, QuantizedLinear | str] = {}
    for config, names in stacks.items():
        # everything of a configuration but these four, of which prepare_site reads none
        shared = replace(config, rank=0, group_size=LayerConfig.group_size, rounds=1, sweeps=0)
        try:
            if shared not in prepared:
                prepared[shared] = prepare_site(sums, config)
            site = prepared[shared]
            results |= zip(names, quantize_linears([weights[name] for name in names], site, config), strict=True)
        except NumericsError as error:
            if len(names) == 1:
                results[names[0]] = str(error)
            else:  # one of them
                for name in names:
                    results |= quantize_again({name: weights[name]}, configs, sums, prepared)
    return results


def layer_error(objective: Objective, layer: Layer) -> float:
    """√(J/‖X'W'ᵀ‖²) of a layer as it is stored."""
    down = layer.transform.down_from_raw(layer.proj_down.double())
    return relative(objective(layer.weight_hat(), layer.proj_up, down), objective.output_energy)


def _bytes(n: int, k: int, rank: int, group: int) -> int:
    """The tensors of a canonical layer whose size a knob can change: float16 factors and scales."""
    return 2 * rank * (n + k) + 2 * n * (k // group)


def _answer(question: _Question, found: dict[str, ChangedLayer | str], names: list[str]) -> WhatIf:
    layers: list[ChangedLayer] = []
    left_out: dict[str, str] = {}
    for name in names:
        entry = found.get(name) or question.left_out.get(name) or "the store has no sums of its input"
        if isinstance(entry, str):
            left_out[name] = entry
        else:
            layers.append(entry)

    def mean(errors: list[float]) -> float | None:
        return math.fsum(errors) / len(errors) if errors else None

    return WhatIf(
        change=question.change,
        layers=layers,
        left_out=left_out,
        mean_now=mean([layer.error_now for layer in layers]),
        mean_then=mean([layer.error_then for layer in layers]),
        bytes_more=sum(layer.bytes_more for layer in layers),
    )
