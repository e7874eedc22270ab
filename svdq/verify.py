"""Check a quantized file: structure, then every layer with the two errors apart, then the whole model.

quantization error  what the format costs: dequantized math in float64 against the original layer
kernel error        the reference in float32, or the CUDA kernels on 16-bit inputs, on packed operands, against the same
                    dequantized math in float64; near zero, or the path has a bug (svdq.layer_checks)

With data, the original model and the quantized one are streamed through the blocks side by side: layer errors are
taken on the original's activations, perplexity on both ends; the quantized model runs the path whose kernel error is
reported. Without data, layer errors are those of the weights, on standard normal inputs for the kernel error. With a
calibration store, its sums give one more error of every layer, and what other knobs would give (svdq.store_checks).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from svdq.calibration.capture import token_rows, watch_inputs
from svdq.calibration.diffusion import open_stream, pieces
from svdq.calibration.recorded import CalibrationData
from svdq.calibration.store import Store
from svdq.checkpoint import same_bytes
from svdq.details import Details, quantizer_report
from svdq.errors import CheckpointError, ConfigError
from svdq.export import DTYPES
from svdq.formats import FORMATS
from svdq.kernels.reference import w4a4_linear
from svdq.layer_checks import KernelLinear, kernel_dtype, layer_errors, ratio, require_kernels
from svdq.models import Linear, Model, compute_dtype, read_weight
from svdq.outputs import OutputReport, compare_outputs
from svdq.quantized import Layer, QuantizedFile
from svdq.store_checks import Change, WhatIf, check_on_store, plan_changes

KERNELS = ("reference", "cuda")
LAYER_TOKENS = 512  # held-out tokens on which a layer's errors are taken
TOKENS_PER_BATCH = 2048
NF4_KERNEL_ERROR = 2e-4  # its kernel for few tokens holds the 16 levels in float16: 8e-5 of the weights


@dataclass
class LayerReport:
    """Errors of one linear. Relative Frobenius errors of outputs (of weights without data); token_error is the root
    mean over tokens of the squared relative error of each, which no few massive tokens can own.

    kernel_dtype  type of the inputs that the kernel error is measured on
    codes_differ  activation codes and scales of the CUDA kernels that are not the CPU's; None for the reference
    quantizer     what the quantizer reported when it wrote the file: see `quantizer_report`
    """

    name: str
    n: int
    k: int
    rank: int
    group_size: int
    quantization_error: float
    kernel_error: float
    kernel_dtype: str
    roundtrip: bool
    codes_differ: int | None = None
    token_error: float | None = None
    store_error: float | None = None
    quantizer: dict[str, Any] | None = None


@dataclass
class Report:
    file: str
    kind: str
    kernels: str = "reference"  # or "cuda": the path of the kernel errors and of the quantized model
    activations: str = "int4"  # or "fp8": W4A8
    format: str = "w4a4"  # of svdq.formats
    structure: list[str] = field(default_factory=list)  # problems; empty = sound
    layers: list[LayerReport] = field(default_factory=list)
    outputs: list[OutputReport] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    what_if: list[WhatIf] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # of each phase

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Thresholds:
    """A check fails above these. None = not checked."""

    kernel_error: float = 1e-5
    quantization_error: float | None = 0.5
    perplexity_ratio: float | None = None


def check_activations(activations: str, on_store: bool, kernels: str) -> None:
    """Raises ConfigError for 8-bit activations where only 4-bit ones can be looked at."""
    if activations == "fp8" and (on_store or kernels == "cuda"):
        other = "--calib: its sums are" if on_store else "--kernels cuda: its errors are"
        raise ConfigError(f"--activations fp8, {other} of 4-bit activations; leave one out")


def verify(
    model: Model,
    quantized: QuantizedFile,
    *,
    data: Sequence[CalibrationData] | None = None,
    store: Store | None = None,
    changes: Sequence[Change] = (),
    thresholds: Thresholds | None = None,
    device: torch.device | str = "cpu",
    kernels: str = "reference",
    details: Details | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Report:
    """See the module. kernels: 'reference', or 'cuda' on a CUDA device. changes: of knobs, each asked of the store.
    details: filled on the way, for a page.

    Raises CheckpointError if the file is not of this model at all, or holds numbers that the kernels cannot.
           ConfigError or KernelError if the kernels are wanted and cannot run on this device.
           ConfigError if the store is another model's, or changes cannot be asked of it (svdq.store_checks).
    """
    thresholds = thresholds or Thresholds()
    device = torch.device(device)
    if kernels not in KERNELS:
        raise ConfigError(f"kernels={kernels!r}; wanted {' or '.join(KERNELS)}")
    if kernels == "cuda":
        require_kernels(device)
    check_activations(quantized.activations, store is not None, kernels)
    linears = {linear.name: linear for linear in model.linears}
    for name, (n, k, _, _) in quantized.layers.items():
        linear = linears.get(name)
        if linear is None:
            raise CheckpointError(f"{quantized.file.path}: its linear {name} is not one of {model.directory}")
        if (n, k) != (linear.n, linear.k):
            raise CheckpointError(
                f"{quantized.file.path}: its {name} is {n} x {k}, that of {model.directory} is {linear.n} x {linear.k}"
            )
    if store is not None:
        store.check_model(model.files.source_fingerprint())
    plan_changes(quantized, store, changes)  # before the long part
    report = Report(
        str(quantized.file.path), str(quantized.kind), kernels, quantized.activations, quantized.format.name
    )
    report.repairs = list(quantized.report.get("repairs", []))
    half = kernel_dtype(model, quantized) if kernels == "cuda" else None
    details = details or Details()
    details.enter("structure")
    report.structure = check_structure(model, quantized)
    if data:
        _verify_on_data(model, quantized, data, report, details, device, half, progress)
    else:
        details.enter("layer errors")
        for done, name in enumerate(quantized.layers, 1):
            layer = quantized.layer(name)
            runner = None if half is None else KernelLinear(layer.to(device), half)
            report.layers.append(_verify_on_weights(model, linears[name], layer, runner))
            details.see(layer)
            progress("verify", done, len(quantized.layers))
    on_store: dict[str, float] = {}
    if store is not None:
        details.enter("errors on the store", device)
        on_store, report.what_if = check_on_store(model, quantized, store, changes, device=device, progress=progress)
    details.enter(None, device)
    report.seconds = dict(details.seconds)
    place = {name: number for number, name in enumerate(quantized.layers)}
    report.layers.sort(key=lambda row: place[row.name])
    for row in report.layers:
        row.store_error, row.quantizer = on_store.get(row.name), quantizer_report(quantized, row.name)
    report.failures = failures(report, thresholds)
    return report


def failures(report: Report, thresholds: Thresholds) -> list[str]:
    found = [f"structure: {problem}" for problem in report.structure]
    for row in report.layers:
        if not row.roundtrip:
            found.append(f"{row.name}: packing and unpacking does not give the same tensors back")
        most = thresholds.kernel_error
        if report.format == "nf4" and report.kernels == "cuda":
            most = max(most, NF4_KERNEL_ERROR)
        if not row.kernel_error <= most:
            found.append(f"{row.name}: kernel error {row.kernel_error:.2e}, wanted at most {most:.0e}")
        if row.codes_differ:
            found.append(f"{row.name}: {row.codes_differ} activation codes or scales of its kernel are not the CPU's")
        limit = thresholds.quantization_error
        if limit is not None and not row.quantization_error <= limit:
            found.append(f"{row.name}: quantization error {row.quantization_error:.3f}, wanted at most {limit}")
    for output in report.outputs:
        numbers = (output.original, output.quantized, output.state_error, output.state_cosine, output.output_error)
        if not all(math.isfinite(number) for number in numbers if number is not None):
            found.append(f"{output.source}: the outputs are not finite")
        limit = thresholds.perplexity_ratio
        if limit is not None and output.original and output.quantized is not None:
            ratio = output.quantized / output.original
            if not ratio <= limit:
                found.append(f"{output.source}: perplexity ratio {ratio:.3f}, wanted at most {limit}")
    return found


# ---------------------------------------------------------------------------------------------- structure


def check_structure(model: Model, quantized: QuantizedFile) -> list[str]:
    """Problems of the content, one line each: values, code range, and that every source tensor is accounted for."""
    problems = []
    linears = {linear.name: linear for linear in model.linears}
    for name in quantized.layers:
        layer = quantized.layer(name)
        problems += _layer_problems(model, linears[name], layer) + _transform_problems(quantized, layer)
    linears_only = not quantized.other_tensors
    replaced = {f"{name}.{leaf}" for name in quantized.layers for leaf in ("weight", "bias")}
    for key in model.files.tensors:
        if key in replaced or key in model.ties or linears_only:
            continue
        if key not in quantized.file.tensors:
            problems.append(f"{key}: of the source, is not in the file")
        elif not _same_tensor(model, quantized, key):
            problems.append(f"{key}: differs from the source")
    for key in quantized.other_tensors:
        if key not in model.files.tensors:
            problems.append(f"{key}: not a tensor of the source")
    return problems


def _same_tensor(model: Model, quantized: QuantizedFile, key: str) -> bool:
    """Stored unchanged; in a packed file, 16-bit tensors may have been cast to the file's one 16-bit type."""
    source, stored = model.files.tensors[key], quantized.file.tensors[key].dtype
    if quantized.kind == "packed" and {source.tensors[key].dtype, stored} == set(DTYPES.values()):
        return torch.equal(source.read(key).to(stored), quantized.file.read(key))
    return same_bytes(quantized.file, key, source, key)


def _layer_problems(model: Model, linear: Linear, layer: Layer) -> list[str]:
    problems = []
    name = linear.name
    grid = FORMATS[layer.format].grid
    low = -grid.hi if grid.asymmetric else grid.lo  # codes count from the zero point
    if layer.codes.amin() < low or layer.codes.amax() > grid.hi:
        problems.append(f"{name}: codes leave [{low}, {grid.hi}]")
    scales = grid.per_code(layer.scales, layer.unit)
    if "w_zeros" in layer.stored and layer.stored["w_zeros"].amax() > 15:
        problems.append(f"{name}.w_zeros: a zero point beyond 15")
    positive = layer.format == "nf4" or bool((scales > 0).all())  # NF4's are rounded, to 0 and beyond
    if not (torch.isfinite(scales).all() and positive):
        problems.append(f"{name}: a weight scale is not finite and positive")
    for label, tensor in (("proj_down", layer.proj_down), ("proj_up", layer.proj_up), ("bias", layer.bias)):
        if tensor is not None and not torch.isfinite(tensor.float()).all():
            problems.append(f"{name}.{label}: holds a NaN or Inf")
    smooth = layer.transform.smooth
    if smooth is not None and not (torch.isfinite(smooth).all() and (smooth > 0).all()):
        problems.append(f"{name}.smooth: not finite and positive")
    if not 0 < layer.transform.clip <= 1:
        problems.append(f"{name}.act_clip: {layer.transform.clip} is not in (0, 1]")
    if not layer.codes.any() and not layer.proj_up.any() and read_weight(model, linear).any():
        problems.append(f"{name}: all zero, the source's weight is not")
    if linear.bias != (layer.bias is not None):
        problems.append(f"{name}: {'lacks' if linear.bias else 'has'} a bias, unlike the source")
    elif layer.bias is not None:
        source = model.files.read(f"{name}.bias")
        if not torch.equal(source.to(layer.bias.dtype), layer.bias):
            problems.append(f"{name}: its bias differs from the source's")
    return problems


def _transform_problems(quantized: QuantizedFile, layer: Layer) -> list[str]:
    """What the header says of the activation side, against what the layer holds."""
    problems = []
    if bool(quantized.config.get("smooth")) != (layer.transform.smooth is not None):
        problems.append(
            f"{layer.name}: {'lacks' if quantized.config.get('smooth') else 'has'} smooth, unlike its header"
        )
    if not layer.transform.same(replace(layer.transform, clip=quantized.act_clip)):
        problems.append(
            f"{layer.name}: its act_clip is {layer.transform.clip:.4g}, its header says {quantized.act_clip}"
        )
    return problems


# ---------------------------------------------------------------------------------------------- layers


def original_parameters(model: Model, linear: Linear) -> tuple[Tensor, Tensor | None]:
    """(weight (n, k), bias) of a linear whose block holds weights at the moment."""
    module = model.tree.get_submodule(linear.module)
    weight, bias = module.get_parameter("weight"), module.get_parameter("bias") if linear.bias else None
    return (weight.t() if linear.transposed else weight), bias


def _row(linear: Linear, layer: Layer, errors: dict[str, Any]) -> LayerReport:
    return LayerReport(linear.name, linear.n, linear.k, layer.proj_up.shape[1], layer.group_size, **errors)


def _verify_on_weights(model: Model, linear: Linear, layer: Layer, kernels: KernelLinear | None) -> LayerReport:
    weight, layer = read_weight(model, linear), layer.to(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, linear.k, generator=generator)
    errors = layer_errors(weight, None, _without_bias(layer), x, kernels)
    transformed = layer.transform.weight(weight.double())
    down = layer.transform.down_from_raw(layer.proj_down.double())
    distance = transformed - layer.weight_hat(torch.float64) - layer.proj_up.double() @ down.t()
    errors.update(quantization_error=ratio(distance, transformed), token_error=None)
    return _row(linear, layer, errors)


def _without_bias(layer: Layer) -> Layer:
    return replace(layer, bias=None)


# ---------------------------------------------------------------------------------------------- the model


class _QuantizedForwards:
    """Inside, these linears of the block compute the W4A4 arithmetic instead of their own."""

    def __init__(self, model: Model, linears: list[Linear], forwards: dict[str, Callable[[Tensor], Tensor]]):
        self.modules = [(model.tree.get_submodule(linear.module), forwards[linear.name]) for linear in linears]

    def __enter__(self) -> None:
        for module, forward in self.modules:
            module.forward = forward  # type: ignore[method-assign, assignment]

    def __exit__(self, *exception) -> None:
        for module, _ in self.modules:
            del module.forward


def _reference_forward(layer: Layer) -> Callable[[Tensor], Tensor]:
    return partial(
        w4a4_linear,
        weight_hat=layer.weight_hat(),
        proj_down=layer.proj_down,
        proj_up=layer.proj_up,
        bias=layer.bias,
        transform=layer.transform,
    )


def _verify_on_data(
    model: Model,
    quantized: QuantizedFile,
    data: Sequence[CalibrationData],
    report: Report,
    details: Details,
    device: torch.device,
    half: torch.dtype | None,
    progress: Callable[[str, int, int], None],
) -> None:
    """half: what the CUDA kernels' inputs are cast to, or None for the reference."""
    parts = [pieces(model, source.sequences, TOKENS_PER_BATCH) for source in data]
    calibrated = quantized.meta("svdq.calibration", dict)
    for source in data:
        if source.sha256() == calibrated.get("sha256"):
            what = "calls" if model.is_diffusion else "tokens"
            report.notes.append(f"{source.source}: these are the calibration {what}, not held-out ones")
    owner = [number for number, part in enumerate(parts) for _ in part]
    details.enter("original model")
    stream = open_stream(model, [batch for part in parts for batch in part], device, compute_dtype(model, device))
    states = [hidden.clone() for hidden in stream.hidden]
    linears = [linear for linear in model.linears if linear.name in quantized.layers]
    done = 0
    for visit in stream:
        members = [linear for linear in linears if linear.block == visit.block]
        layers = {linear.name: quantized.layer(linear.name).to(device) for linear in members}
        runners = {} if half is None else {name: KernelLinear(layer, half) for name, layer in layers.items()}
        seen: dict[str, list[Tensor]] = {}
        counts: dict[str, int] = {}

        def see(linear: Linear, x: Tensor, seen=seen, counts=counts) -> None:
            rows = token_rows(x, linear.k)[: LAYER_TOKENS - counts.get(linear.name, 0)]
            if len(rows):
                seen.setdefault(linear.name, []).append(rows)
                counts[linear.name] = counts.get(linear.name, 0) + len(rows)

        with watch_inputs(model.tree, members, see):
            stream.advance(visit.run())
        details.enter("layer errors", device)
        if visit.last:
            for linear in members:
                layer, runner = layers[linear.name], runners.get(linear.name)
                x = torch.cat(seen[linear.name]) if linear.name in seen else None
                details.see(layer, x)
                if x is None:
                    report.notes.append(f"{linear.name}: never ran on this data, checked on its weights")
                    report.layers.append(_verify_on_weights(model, linear, layer, runner))
                    continue
                weight, bias = original_parameters(model, linear)
                errors = layer_errors(weight, bias, layer, x, runner)
                report.layers.append(_row(linear, layer, errors))
        details.enter("quantized model", device)
        forwards = {name: runners.get(name) or _reference_forward(layer) for name, layer in layers.items()}
        with _QuantizedForwards(model, members, forwards):
            states = [call.run(visit.module, x) for call, x in zip(visit.calls, states, strict=True)]
        for name, runner in runners.items():
            note = f"{name}: float16 overflows on this data, its kernels ran in bfloat16"
            if runner.dtype != half and note not in report.notes:
                report.notes.append(note)
        done += 1
        progress("verify", done, stream.visits)
        details.enter("original model", device)
    details.enter("outputs")
    report.outputs += compare_outputs(model, stream, states, owner, data)
