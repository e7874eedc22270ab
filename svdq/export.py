"""Canonical → packed: a pure re-ordering into the fragment order of the kernels, with its inverse.

N is padded to 128 and K to 128 (codes 0, scales 1), the rank to 16. Linears that share an input may be fused into one:
each part is padded before they are concatenated, their down factors lie side by side and their up factors on a block
diagonal. True sizes stay in the header. All 16-bit tensors of a packed file have one type, since the runtimes that read
it silently misread a mixed file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from svdq import schema
from svdq.checkpoint import Entry, write_file
from svdq.errors import CheckpointError, ConfigError
from svdq.export_formats import export_stored
from svdq.kernels import layout

if TYPE_CHECKING:
    from svdq.quantized import Layer, QuantizedFile

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
PACKING = {"layout": "mma", "version": schema.FORMAT_VERSION, "tile_n": layout.TILE_N, "tile_k": layout.TILE_K}


@dataclass(frozen=True)
class Part:
    name: str
    n: int
    rank: int
    bias: bool


@dataclass(frozen=True)
class PackedSizes:
    """The true sizes of one packed linear; `parts` has one element unless linears were fused."""

    k: int
    group_size: int
    act_clip: float
    smooth: bool
    parts: tuple[Part, ...]

    def padded(self) -> dict[str, int]:
        """n, k, r of the stored tensors."""
        return {
            "n": sum(layout.round_up(part.n, layout.TILE_N) for part in self.parts),
            "k": layout.round_up(self.k, layout.PAD_K),
            "r": sum(layout.round_up(part.rank, layout.RANK_TILE) for part in self.parts),
        }

    @staticmethod
    def from_dict(entry: Any, name: str) -> PackedSizes:
        """Raises CheckpointError if the metadata entry is not what `asdict` of this class gives."""
        try:
            parts = tuple(Part(p["name"], p["n"], p["rank"], p["bias"]) for p in entry["parts"])
            sizes = PackedSizes(entry["k"], entry["group_size"], entry["act_clip"], entry["smooth"], parts)
        except (TypeError, KeyError):
            raise CheckpointError(f"{name}: its svdq.layers entry is not one of a packed linear") from None
        clip = sizes.act_clip
        sound = (
            bool(parts)
            and isinstance(clip, (int, float))
            and not isinstance(clip, bool)
            and 0 < clip <= 1
            and isinstance(sizes.smooth, bool)
            and all(isinstance(part.name, str) and isinstance(part.bias, bool) for part in parts)
            and len({part.name for part in parts}) == len(parts)
        )
        if not sound:
            raise CheckpointError(f"{name}: its svdq.layers entry is not one of a packed linear")
        for part in parts:
            part_sizes = {"n": part.n, "k": sizes.k, "rank": part.rank, "group_size": sizes.group_size}
            schema.layer_sizes(part_sizes, part.name)
        return sizes


def packed_sizes(parts: list[Layer]) -> PackedSizes:
    """The sizes of these layers as one packed linear. Raises ConfigError if their inputs cannot be quantized as one."""
    first = parts[0]
    for other in parts[1:]:
        same = (
            other.codes.shape[1] == first.codes.shape[1]
            and other.group_size == first.group_size
            and other.transform.same(first.transform)
        )
        if not same:
            raise ConfigError(
                f"--fuse: {other.name} and {first.name} do not share an input (smoothing, clip or K differ)"
            )
    return PackedSizes(
        k=first.codes.shape[1],
        group_size=first.group_size,
        act_clip=first.transform.clip,
        smooth=first.transform.smooth is not None,
        parts=tuple(Part(p.name, p.codes.shape[0], p.proj_up.shape[1], p.bias is not None) for p in parts),
    )


def pack_layers(parts: list[Layer], dtype: torch.dtype) -> dict[str, Tensor]:
    """Layers that share an input (or one alone) → the stored tensors of `schema.PACKED`."""
    sizes = packed_sizes(parts)
    padded = sizes.padded()
    k, rank = padded["k"], padded["r"]
    codes, scales, ups, downs, biases = [], [], [], [], []
    column = 0
    for part, meta in zip(parts, sizes.parts, strict=True):
        n = layout.round_up(meta.n, layout.TILE_N)
        codes.append(layout.pad(part.codes, n, k))
        groups = part.scales.repeat_interleave(sizes.group_size // layout.TILE_K, 1).to(dtype)
        scales.append(layout.pad(groups, n, k // layout.TILE_K, value=1))
        width = layout.round_up(meta.rank, layout.RANK_TILE)
        up = part.proj_up.new_zeros((n, rank), dtype=dtype)
        up[: meta.n, column : column + meta.rank] = part.proj_up.to(dtype)
        ups.append(up)
        downs.append(layout.pad(part.proj_down.to(dtype), k, width))
        bias = part.scales.new_zeros(meta.n, dtype=dtype) if part.bias is None else part.bias.to(dtype)
        biases.append(layout.pad(bias, n, value=1))  # padded like a scale, as in that runtime's own files
        column += width
    smooth = parts[0].transform.smooth
    smooth = parts[0].scales.new_ones(sizes.k, dtype=dtype) if smooth is None else smooth.to(dtype)
    smooth = layout.pack_matrix("channel", layout.pad(smooth, k, value=1))
    logical_up, logical_down = torch.cat(ups), torch.cat(downs, 1)
    return {
        "qweight": layout.pack_codes(torch.cat(codes)),
        "wscales": layout.pack_matrix("wscales", torch.cat(scales), (k // layout.TILE_K, padded["n"])),
        "lora_down": layout.pack_matrix("lora_down", logical_down) if rank else logical_down,
        "lora_up": layout.pack_matrix("lora_up", logical_up) if rank else logical_up,
        "smooth": smooth,
        "smooth_orig": smooth.clone(),
        "bias": layout.pack_matrix("channel", torch.cat(biases)),
    }


def unpack_layers(tensors: dict[str, Tensor], sizes: PackedSizes) -> list[dict[str, Any]]:
    """The inverse of `pack_layers`: per part its codes, scales, proj_down, proj_up, bias (None if the source had none),
    and the smooth that all share."""
    padded = sizes.padded()
    n, k, rank = padded["n"], padded["k"], padded["r"]
    codes = layout.unpack_codes(tensors["qweight"])
    scales = layout.unpack_matrix("wscales", tensors["wscales"], (n, k // layout.TILE_K))
    up = layout.unpack_matrix("lora_up", tensors["lora_up"], (n, rank)) if rank else tensors["lora_up"]
    down = layout.unpack_matrix("lora_down", tensors["lora_down"], (k, rank)) if rank else tensors["lora_down"]
    bias = layout.unpack_matrix("channel", tensors["bias"], (n,))
    smooth = layout.unpack_matrix("channel", tensors["smooth"], (k,))[: sizes.k]
    parts = []
    row = column = 0
    for part in sizes.parts:
        rows, columns = slice(row, row + part.n), slice(column, column + part.rank)
        parts.append(
            {
                "codes": codes[rows, : sizes.k].contiguous(),
                "scales": scales[rows, : sizes.k // layout.TILE_K : sizes.group_size // layout.TILE_K].contiguous(),
                "proj_down": down[: sizes.k, columns].contiguous(),
                "proj_up": up[rows, columns].contiguous(),
                "bias": bias[rows].clone() if part.bias else None,
                "smooth": smooth,
            }
        )
        row += layout.round_up(part.n, layout.TILE_N)
        column += layout.round_up(part.rank, layout.RANK_TILE)
    return parts


def parse_fuse(text: str) -> tuple[str, list[str]]:
    """'qkv_proj=q_proj,k_proj,v_proj' → (fused name, part names)."""
    fused, equals, parts = text.partition("=")
    names = [part.strip() for part in parts.split(",")]
    if not equals or not fused or len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"--fuse {text!r}: wanted 'NAME=PART,PART,…', e.g. qkv_proj=q_proj,k_proj,v_proj")
    return fused, names


def fusion_groups(names: list[str], fuses: list[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Packed name → the layers in it, in file order. Raises ConfigError if a fuse finds nothing to fuse."""
    groups: dict[str, list[str]] = {}
    taken: set[str] = set()
    available = set(names)
    for fused, parts in fuses:
        found = False
        for first in names:
            parent, _, leaf = first.rpartition(".")
            members = [f"{parent}.{part}" if parent else part for part in parts]
            if leaf == parts[0] and all(member in available for member in members):
                if taken & set(members):
                    raise ConfigError(f"--fuse {fused}: {members[0]} or a sibling is already fused")
                name = f"{parent}.{fused}" if parent else fused
                if name in groups or (name in available and name not in members):
                    raise ConfigError(f"--fuse {fused}: the name {name} is taken; choose another")
                groups[name] = members
                taken.update(members)
                found = True
        if not found:
            raise ConfigError(f"--fuse {fused}: no quantized siblings named {', '.join(parts)}")
    groups.update({name: [name] for name in names if name not in taken})
    return groups


def check_exportable(
    source: QuantizedFile, runtime: str | None, order: str | None = None, fuses: Sequence[Any] = ()
) -> None:
    """Refuse what cannot be packed so, or what the named runtime would misread."""
    if source.kind == "packed":
        raise CheckpointError(f"{source.file.path}: already packed; wanted the canonical file of svdq quantize")
    form = source.format.name
    if form == "w4a4" and order == "rows":
        raise ConfigError("--layout rows: W4A4's kernels read fragments; wanted --layout mma")
    if form != "w4a4" and (fuses or runtime == "nunchaku"):
        what = "--fuse" if fuses else "--for nunchaku"
        raise ConfigError(f"{what}: knows w4a4 alone, {source.file.path} is {form}")
    if runtime == "nunchaku":
        clipped = [name for name in source.layers if f"{name}.act_clip" in source.file.tensors]
        if source.rotation or clipped:
            what = "a rotation" if source.rotation else "an activation clip"
            raise ConfigError(
                f"{source.file.path}: quantized with {what}, which nunchaku's runtime does not know; "
                "calibrate and quantize with --preset nunchaku"
            )


def export_packed(
    source: QuantizedFile,
    out: str | Path,
    *,
    dtype: str = "float16",
    order: str | None = None,
    fuses: list[tuple[str, list[str]]] | None = None,
    runtime: str | None = None,
    linears_only: bool = False,
    progress=lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write the packed file. Returns {'layers', 'fused', 'bytes', 'dtype', 'layout'}.

    order  the layout: 'mma' (W4A4, NVFP4) or 'rows' (all others, NVFP4); None = the format's first

    Raises ConfigError if a value overflows the chosen 16-bit type, naming the layer.
    """
    check_exportable(source, runtime, order, fuses or ())
    kind = DTYPES[dtype]
    if source.format.name != "w4a4":
        return export_stored(source, out, order, kind, linears_only, progress)
    groups = fusion_groups(list(source.layers), fuses or [])
    entries: list[Entry] = []
    sizes: dict[str, Any] = {}
    cache: dict[str, dict[str, Tensor]] = {}

    def stored(name: str, suffix: str) -> Tensor:
        # Entries of one layer are asked for far apart (files are ordered by type), so nothing large is kept.
        tensors = _packed(name) if name not in cache else cache[name]
        cache.clear()
        cache[name] = tensors
        return tensors[suffix]

    def _packed(name: str) -> dict[str, Tensor]:
        tensors = pack_layers([source.layer(part) for part in groups[name]], kind)
        for suffix, tensor in tensors.items():
            if not torch.isfinite(tensor.float()).all():
                raise ConfigError(f"{name}.{suffix}: exceeds {dtype}; export with --dtype bfloat16")
        return tensors

    def cast(name: str) -> Tensor:
        tensor = source.file.read(name).to(kind)
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{name}: exceeds {dtype}; export with --dtype bfloat16")
        return tensor

    for number, (name, parts) in enumerate(groups.items()):
        layer_sizes = packed_sizes([source.layer(part) for part in parts])
        sizes[name] = asdict(layer_sizes)
        padded = layer_sizes.padded()
        for rule in schema.PACKED:
            entries.append(
                Entry(
                    f"{name}.{rule.suffix}",
                    rule.dtype or kind,
                    rule.resolve(**padded),
                    partial(stored, name, rule.suffix),
                )
            )
        progress("export", number + 1, len(groups))
    if not linears_only:
        for name in source.other_tensors:
            info = source.file.tensors[name]
            if info.dtype in DTYPES.values() and info.dtype != kind:
                entries.append(Entry(name, kind, info.shape, partial(cast, name)))
            else:
                entries.append(Entry(name, info.dtype, info.shape, partial(source.file.chunks, name)))
    metadata = dict(source.file.metadata)
    metadata[schema.LAYERS] = json.dumps(sizes, sort_keys=True)
    config = {**source.config, "packing": {**PACKING, "dtype": dtype}}
    metadata[schema.QUANTIZATION_CONFIG] = json.dumps(config, sort_keys=True)
    write_file(out, entries, metadata)
    return {
        "layers": len(source.layers),
        "fused": sum(len(parts) > 1 for parts in groups.values()),
        "bytes": Path(out).stat().st_size,
        "dtype": dtype,
        "layout": "mma",
    }
