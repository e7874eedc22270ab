"""Write what a quantize run made: block files on the way, the checkpoint at the end, one tensor in memory at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from svdq import schema
from svdq.calibration.capture import BlockSums
from svdq.checkpoint import Entry, SafetensorsFile, write_file
from svdq.config import QuantConfig, to_dict
from svdq.directory import fill
from svdq.formats import FORMATS
from svdq.layer import QuantizedLinear
from svdq.models import Linear, Model
from svdq.preflight import Plan
from svdq.rounding import ActivationTransform


def write_block(the_plan: Plan, block: int, sums: BlockSums, results: list, config: QuantConfig, path: Path) -> None:
    """One finished block: its stored tensors, and its report in the header, in one file that appears whole."""
    entries: list[Entry] = []
    layers: dict[str, dict] = {}
    for linear, result, transform in results:
        entries += _canonical_entries(linear, result, config, transform)
        layers[linear.name] = {
            "n": linear.n,
            "k": linear.k,
            "rank": result.proj_up.shape[1],
            "group_size": config.for_layer(linear.name).group_size or linear.k,
            **result.report,
        }
    selected = [linear.name for linear in the_plan.linears if linear.block == block]
    report = {
        "layers": {name: layers[name] for name in selected if name in layers},
        "never_ran": [name for name in sums.never_ran if name in selected],
    }
    write_file(path, entries, {"report": json.dumps(report), "sites": json.dumps(sums.sites)})


def _canonical_entries(
    linear: Linear, result: QuantizedLinear, config: QuantConfig, transform: ActivationTransform
) -> list[Entry]:
    layer = config.for_layer(linear.name)
    tensors = FORMATS[layer.format].tensors(result, layer, transform)
    return [Entry(f"{linear.name}.{suffix}", t.dtype, tuple(t.shape), t.cpu) for suffix, t in tensors.items()]


def assemble(
    model: Model,
    out: Path,
    config: QuantConfig,
    activation: dict,
    calibrated: dict,
    finished: list[SafetensorsFile],
    layers: dict[str, dict],
    left: list[str],
    repairs: list[str],
    shard_bytes: int | None = None,
) -> None:
    """The checkpoint: every finished block's tensors, the source's other tensors unchanged, the header of schema.py.

    shard_bytes  of a directory's shards (see svdq.directory.fill); None: `out` is one file

    Nothing that differs between two runs goes in: the layers' seconds stay in the block files.
    """
    entries = []
    for file in finished:
        for name, info in file.tensors.items():
            entries.append(Entry(name, info.dtype, info.shape, partial(file.chunks, name)))
    quantized = {f"{name}.weight" for name in layers}
    for key in model.files.tensors:
        if key in quantized or key in model.ties:
            continue
        if config.linears_only and key.removesuffix(".bias") not in layers:
            continue
        info = model.files.info(key)
        entries.append(Entry(key, info.dtype, info.shape, partial(model.files.chunks, key)))
    sites: dict[str, list[str]] = {}
    for file in finished:
        sites.update(json.loads(file.metadata["sites"]))
    sizes = {name: {key: layer[key] for key in ("n", "k", "rank", "group_size")} for name, layer in layers.items()}
    timeless = {
        name: {k: v for k, v in layer.items() if k != "seconds" and k not in sizes[name]}
        for name, layer in layers.items()
    }
    metadata = {
        schema.QUANTIZATION_CONFIG: schema.quantization_config(
            format=config.layer.format,
            numbers=FORMATS[config.layer.format].config(config.layer),
            rank=config.layer.rank,
            smooth=activation["smoothing"] != 0.0,
            rotation=activation["rotation"],
            ignore=sorted(left),
            packing=schema.CANONICAL_PACKING,
        ),
        schema.RUN_CONFIG: {"quantize": to_dict(config), "activation": activation},
        schema.CALIBRATION: calibrated,
        schema.SOURCE: model.files.source_fingerprint(),
        schema.LAYERS: sizes,
        schema.REPORT: {"layers": timeless, "repairs": repairs, "sites": sites},
        schema.TIES: model.ties,
        schema.MODEL_CONFIG: model.config,
    }
    header = {key: json.dumps(value, sort_keys=True) for key, value in metadata.items()}
    if shard_bytes is None:
        write_file(out, entries, header)
    else:
        fill(out, entries, header, model.directory, shard_bytes)
