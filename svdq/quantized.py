"""A quantized file, opened: which layers it holds, and each of them as plain tensors, canonical or packed alike.

A header is hostile until checked: `open_quantized` accepts a file only if every layer that the metadata names has all
its tensors with the types and shapes that the schema asks for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq import export_formats, nf4, schema
from svdq.checkpoint import SafetensorsFile, open_file
from svdq.config import ROTATIONS, LayerConfig
from svdq.directory import open_shards
from svdq.errors import CheckpointError, ConfigError
from svdq.export import DTYPES, PackedSizes, unpack_layers
from svdq.formats import FORMATS, Decoded
from svdq.models import file_kind
from svdq.rounding import ActivationTransform

ACTIVATIONS = ("int4", "fp8")  # W4A4, W4A8


@dataclass
class Layer:
    """One quantized linear in row-major order.

    codes int8 (n, k), scales (n, k/group) and unit (n,) or None, as svdq.grid has them; proj_down (k, r), proj_up
    (n, r), bias (n,) or None; stored: the file's own tensors, of formats whose kernels read those
    """

    name: str
    codes: Tensor
    scales: Tensor
    proj_down: Tensor
    proj_up: Tensor
    bias: Tensor | None
    transform: ActivationTransform
    unit: Tensor | None = None
    format: str = "w4a4"
    stored: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Layer:
        return Layer(
            self.name,
            self.codes.to(device),
            self.scales.to(device),
            self.proj_down.to(device),
            self.proj_up.to(device),
            None if self.bias is None else self.bias.to(device),
            self.transform.to(device),
            None if self.unit is None else self.unit.to(device),
            self.format,
            {suffix: tensor.to(device) for suffix, tensor in self.stored.items()},
        )

    @property
    def group_size(self) -> int:
        return nf4.BLOCK if self.format == "nf4" else self.codes.shape[1] // self.scales.shape[1]

    def weight_hat(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized residual, (n, k)."""
        return FORMATS[self.format].weight_hat(Decoded(self.codes, self.scales, self.unit), dtype)


class QuantizedFile:
    """See the module. `layers`: name → (n, k, rank, group) for every linear, parts of fused ones included."""

    def __init__(self, file: SafetensorsFile, activations: str = "int4"):
        if activations not in ACTIVATIONS:
            raise ConfigError(f"activations={activations!r}; wanted {' or '.join(ACTIVATIONS)}")
        self.file, self.activations = file, activations
        self.kind = file_kind(file.metadata)
        if self.kind is None:
            raise CheckpointError(
                f"{file.path}: no svdq quantization_config in its header; wanted a file of svdq quantize"
            )
        self.config: dict[str, Any] = self.meta(schema.QUANTIZATION_CONFIG, dict)
        self.ties: dict[str, str] = self.meta(schema.TIES, dict)
        self.report: dict[str, Any] = self.meta(schema.REPORT, dict)
        self._check_metadata()
        if activations != "int4" and self.format.name != "w4a4":
            raise ConfigError(f"activations={activations!r}: a choice of w4a4, {file.path} is {self.format.name}")
        self.rotation = self.config["rotation"] != "none"
        one = DTYPES.get(str(self.config["packing"].get("dtype")))
        if self.kind == "packed" and one is None:
            raise CheckpointError(f"{self.file.path}: its packing names no 16-bit type")
        one_type = one is not None and self.format.name == "w4a4"  # the others' linears keep their types
        self._free_types = [one] if one_type else [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        self._order = "rows"  # of a canonical file too
        self._rules = self.format.rules if self.kind == "canonical" else schema.PACKED
        if self.kind == "packed" and self.format.name != "w4a4":
            self._order = str(self.config["packing"]["layout"])
            try:
                self._rules = export_formats.rules(self.format.name, self._order, self.format.rules)
            except CheckpointError as error:
                raise CheckpointError(f"{file.path}: {error}") from None
        entries = self.meta(schema.LAYERS, dict)
        self.layers: dict[str, tuple[int, int, int, int]] = {}
        self._packed: dict[str, tuple[str, PackedSizes]] = {}  # part name → (packed name, its sizes)
        for name, entry in entries.items():
            if self.format.name != "w4a4" or self.kind == "canonical":
                self.layers[name] = n, k, rank, group = schema.layer_sizes(entry, name, self.format.group_unit)
                whole = {"w8a16": k, "nf4": nf4.BLOCK}.get(self.format.name, group)
                if group != whole or (rank and self.format.name == "nf4"):
                    raise CheckpointError(f"{file.path}: {name} has group {group}, rank {rank}; wanted {whole}, 0")
                self._check(name, self._rules, {**export_formats.padded(self._order, n, k, rank), "g": group})
            else:
                packed = PackedSizes.from_dict(entry, name)
                self._check(name, schema.PACKED, packed.padded())
                for part in packed.parts:
                    self.layers[part.name] = (part.n, packed.k, part.rank, packed.group_size)
                    self._packed[part.name] = (name, packed)
        owned = {f"{name}.{rule.suffix}" for name in entries for rule in self._rules}
        self.other_tensors = [name for name in file.tensors if name not in owned]

    def meta(self, key: str, kind: type) -> Any:
        """One metadata value, parsed. Raises CheckpointError if it is missing or not of this kind."""
        try:
            value = json.loads(self.file.metadata[key])
        except (KeyError, ValueError, RecursionError):
            raise CheckpointError(f"{self.file.path}: header metadata '{key}' is missing or not JSON") from None
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.file.path}: header metadata '{key}' is not a JSON {kind.__name__}")
        return value

    def _check_metadata(self) -> None:
        """A form that this version does not know is refused, not misread; so are values of the wrong type."""
        config, where = self.config, self.file.path
        name = config.get("format", "w4a4")  # which files from before the others do not say
        if not isinstance(name, str) or name not in FORMATS:
            raise CheckpointError(f"{where}: its format is {name!r}, this svdq knows {', '.join(FORMATS)}")
        self.format = FORMATS[name]
        activation = self.format.config(LayerConfig())["activation"]
        rotations = ROTATIONS if self.format.activation is not None else ("none",)
        known = {
            "packing.version": (config["packing"].get("version"), (schema.FORMAT_VERSION,)),
            "rotation": (config.get("rotation"), rotations),
            "weight.dtype": (_entry(config, "weight", "dtype"), self.format.dtypes),
            "activation.dtype": (_entry(config, "activation", "dtype"), (_entry(activation or {}, "dtype"),)),
        }
        for label, (found, wanted) in known.items():
            if found not in wanted:
                raise CheckpointError(
                    f"{where}: its {label} is {found!r}, this svdq knows {', '.join(map(str, wanted))}"
                )
        texts = {
            "quantization_config.ignore": config.get("ignore", []),
            "svdq.report.repairs": self.report.get("repairs", []),
            "svdq.ties": [*self.ties, *self.ties.values()],
        }
        for label, values in texts.items():
            if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
                raise CheckpointError(f"{where}: header metadata '{label}' is not a list of names")
        clip = _entry(self.meta(schema.RUN_CONFIG, dict), "activation", "act_clip")
        if not isinstance(clip, (int, float)) or isinstance(clip, bool) or not 0 < clip <= 1:
            raise CheckpointError(f"{where}: header metadata 'svdq.config' holds no act_clip in (0, 1]")
        self.act_clip = float(clip)
        if not isinstance(config.get("producer", {}), dict):
            raise CheckpointError(f"{where}: header metadata 'quantization_config.producer' is not an object")

    def _check(self, name: str, rules: tuple[schema.TensorRule, ...], sizes: dict[str, int]) -> None:
        for rule in rules:
            key = f"{name}.{rule.suffix}"
            info = self.file.tensors.get(key)
            if info is None:
                if rule.optional and not (rule.suffix.startswith(("proj_", "lora_")) and sizes["r"]):
                    continue
                raise CheckpointError(f"{self.file.path}: tensor '{key}' is missing")
            wanted = rule.resolve(**sizes)
            if info.shape != wanted and wanted != (-1,):
                raise CheckpointError(f"{self.file.path}: {key} has shape {list(info.shape)}, wanted {list(wanted)}")
            allowed = [rule.dtype] if rule.dtype is not None else self._free_types
            if info.dtype not in allowed:
                raise CheckpointError(f"{self.file.path}: {key} has type {info.dtype}, wanted {allowed[0]}")

    def layer(self, name: str) -> Layer:
        """Read one linear. Raises CheckpointError for a name that the file does not hold."""
        if name not in self.layers:
            raise CheckpointError(f"{self.file.path}: holds no quantized linear '{name}'")
        if name in self._packed:
            return self._unpacked(name)
        return self.layer_of(name, {suffix: self.file.read(f"{name}.{suffix}") for suffix in self.suffixes(name)})

    def suffixes(self, name: str) -> list[str]:
        """Which tensors the file holds of a linear that is not packed with others."""
        return [rule.suffix for rule in self._rules if f"{name}.{rule.suffix}" in self.file.tensors]

    def layer_of(self, name: str, tensors: dict[str, Tensor]) -> Layer:
        """The linear that these tensors are, by the suffixes of the file."""
        if self.kind == "packed":
            tensors = export_formats.unpack(self.format.name, self._order, tensors, *self.layers[name][:3])
        if self.format.name == "nf4":
            nf4.check(tensors, *self.layers[name][:2], name)
        clip = float(tensors["act_clip"]) if "act_clip" in tensors else 1.0
        (n, k, *_), decoded = self.layers[name], self.format.load(tensors)
        return Layer(
            name,
            decoded.codes,
            decoded.scales,
            tensors["proj_down"] if "proj_down" in tensors else torch.zeros(k, 0, dtype=torch.float16),
            tensors["proj_up"] if "proj_up" in tensors else torch.zeros(n, 0, dtype=torch.float16),
            tensors.get("bias"),
            self._transform(tensors.get("smooth"), clip),
            decoded.unit,
            self.format.name,
            {} if self.format.name == "w4a4" else tensors,
        )

    def _unpacked(self, name: str) -> Layer:
        packed_name, sizes = self._packed[name]
        tensors = {rule.suffix: self.file.read(f"{packed_name}.{rule.suffix}") for rule in schema.PACKED}
        number = [part.name for part in sizes.parts].index(name)
        part = unpack_layers(tensors, sizes)[number]
        smooth = part.pop("smooth")
        transform = self._transform(smooth.float() if sizes.smooth else None, sizes.act_clip)
        return Layer(name=name, transform=transform, **part)

    def _transform(self, smooth: Tensor | None, clip: float) -> ActivationTransform:
        if self.format.name != "w4a4":
            return ActivationTransform(smooth, self.rotation, clip, self.format.activation)
        return ActivationTransform(smooth, self.rotation, clip, self.activations)


def _entry(config: dict[str, Any], *path: str) -> Any:
    value: Any = config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def open_quantized(path: str | Path, activations: str = "int4") -> QuantizedFile:
    """A file of svdq quantize, or a directory of it.

    activations: 'int4', or 'fp8' for layers with W4A8's 8-bit ones. Raises ConfigError for another name.
    """
    return QuantizedFile(open_shards(path) if Path(path).is_dir() else open_file(path), activations)
