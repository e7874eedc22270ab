"""Packed files of the formats beside W4A4: a linear's tensors in the order that its kernels read, and back.

rows  W4A16, W8A16 and NF4 as they are, for their kernels read the canonical order; NVFP4 with scales (k/16, n), as
      runtimes take them that want row-major operands
mma   NVFP4 in fragments of m16n8k64, padded: codes as W4A4's, scales in tiles of 512 bytes (svdq.kernels.layout)

The linears' tensors keep their types. What a packed file casts to its one 16-bit type is the rest of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from svdq import schema
from svdq.checkpoint import Entry, write_file
from svdq.errors import CheckpointError, ConfigError
from svdq.grid import pack_nibbles, unpack_nibbles
from svdq.kernels import layout
from svdq.schema import TensorRule

if TYPE_CHECKING:
    from svdq.quantized import QuantizedFile

LAYOUTS = {"w4a16": ("rows",), "w8a16": ("rows",), "nf4": ("rows",), "nvfp4": ("mma", "rows")}  # the default first


def rules(form: str, order: str, canonical: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The stored tensors of a linear in this order. Raises CheckpointError for one that the format has not."""
    if order not in LAYOUTS[form]:
        raise CheckpointError(f"packing.layout is {order!r}; wanted {' or '.join(LAYOUTS[form])} for {form}")
    if form != "nvfp4":
        return canonical
    return schema.PACKED_NVFP4 if order == "mma" else schema.ROWS_NVFP4


def padded(order: str, n: int, k: int, rank: int) -> dict[str, int]:
    """n, k, r of the stored tensors."""
    if order == "rows":
        return {"n": n, "k": k, "r": rank}
    sizes = layout.round_up(n, layout.TILE_N), layout.round_up(k, layout.PAD_K), layout.round_up(rank, layout.RANK_TILE)
    return dict(zip("nkr", sizes, strict=True))


def pack(form: str, order: str, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The canonical tensors of one linear → those of the packed file."""
    if form != "nvfp4":
        return stored
    scales = stored["w_scales"].view(torch.uint8)
    rest = {key: tensor for key, tensor in stored.items() if key != "w_scales"}
    if order == "rows":
        return {**rest, "wscales": _as_scales(scales.t().contiguous())}
    n, k = scales.shape[0], stored["qweight"].shape[1] * 2
    rank = stored["proj_up"].shape[1] if "proj_up" in stored else 0
    size = padded(order, n, k, rank)
    codes = layout.pad(unpack_nibbles(stored["qweight"]), size["n"], size["k"])
    scales = layout.pad(scales, size["n"], size["k"] // 16, value=0x38)  # 1 in e4m3
    packed = {
        "qweight": layout.pack_codes(codes).view(torch.uint8),
        "wscales": _as_scales(layout.pack_matrix("fp4_wscales", scales, (size["k"] // 16, size["n"]))),
        "wcscale": layout.pack_matrix("channel", layout.pad(stored["wcscale"], size["n"], value=1)),
    }
    if rank:
        packed["lora_down"] = layout.pack_matrix("lora_down", layout.pad(stored["proj_down"], size["k"], size["r"]))
        packed["lora_up"] = layout.pack_matrix("lora_up", layout.pad(stored["proj_up"], size["n"], size["r"]))
    for suffix, length in (("smooth", size["k"]), ("bias", size["n"])):
        if suffix in stored:
            packed[suffix] = layout.pack_matrix("channel", layout.pad(stored[suffix], length, value=1))
    return packed


def unpack(form: str, order: str, tensors: dict[str, Tensor], n: int, k: int, rank: int) -> dict[str, Tensor]:
    """The inverse of `pack`."""
    if form != "nvfp4":
        return tensors
    tensors = dict(tensors)
    scales = tensors.pop("wscales").view(torch.uint8)
    if order == "rows":
        return {**tensors, "w_scales": _as_scales(scales.t().contiguous())}
    size = padded(order, n, k, rank)
    codes = layout.unpack_codes(tensors["qweight"].view(torch.int8))[:n, :k]
    scales = layout.unpack_matrix("fp4_wscales", scales, (size["n"], size["k"] // 16))[:n, : k // 16]
    stored = {
        "qweight": pack_nibbles(codes),
        "w_scales": _as_scales(scales.contiguous()),
        "wcscale": layout.unpack_matrix("channel", tensors["wcscale"], (size["n"],))[:n].contiguous(),
    }
    if rank:
        down = layout.unpack_matrix("lora_down", tensors["lora_down"], (size["k"], size["r"]))
        up = layout.unpack_matrix("lora_up", tensors["lora_up"], (size["n"], size["r"]))
        stored |= {"proj_down": down[:k, :rank].contiguous(), "proj_up": up[:n, :rank].contiguous()}
    for suffix, length, true in (("smooth", size["k"], k), ("bias", size["n"], n)):
        if suffix in tensors:
            stored[suffix] = layout.unpack_matrix("channel", tensors[suffix], (length,))[:true].contiguous()
    return stored


def _as_scales(raw: Tensor) -> Tensor:
    return raw.view(torch.float8_e4m3fn)


def export_stored(
    source: QuantizedFile,
    out: str | Path,
    order: str | None,
    kind: torch.dtype,
    linears_only: bool,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """Write the packed file of another format than w4a4. Returns as svdq.export.export_packed."""
    form, dtype = source.format.name, str(kind).removeprefix("torch.")
    order = order or LAYOUTS[form][0]
    if order not in LAYOUTS[form]:
        raise ConfigError(f"--layout {order}: {form} has {' and '.join(LAYOUTS[form])}")
    entries: list[Entry] = []
    for number, name in enumerate(source.layers):
        packed = pack(form, order, source.layer(name).stored)
        for suffix, tensor in packed.items():
            make = partial(_packed, source, name, order, suffix)
            entries.append(Entry(f"{name}.{suffix}", tensor.dtype, tuple(tensor.shape), make))
        progress("export", number + 1, len(source.layers))
    for name in () if linears_only else source.other_tensors:
        info = source.file.tensors[name]
        if info.dtype in (torch.float16, torch.bfloat16) and info.dtype != kind:
            entries.append(Entry(name, kind, info.shape, partial(_cast, source, name, kind)))
        else:
            entries.append(Entry(name, info.dtype, info.shape, partial(source.file.chunks, name)))
    config = {**source.config, "packing": {"layout": order, "version": schema.FORMAT_VERSION, "dtype": dtype}}
    metadata = {**source.file.metadata, schema.QUANTIZATION_CONFIG: json.dumps(config, sort_keys=True)}
    write_file(out, entries, metadata)
    return {
        "layers": len(source.layers), "fused": 0, "bytes": Path(out).stat().st_size, "dtype": dtype, "layout": order,
    }  # fmt: skip


def _packed(source: QuantizedFile, name: str, order: str, suffix: str) -> Tensor:
    return pack(source.format.name, order, source.layer(name).stored)[suffix]


def _cast(source: QuantizedFile, name: str, kind: torch.dtype) -> Tensor:
    tensor = source.file.read(name).to(kind)
    if not torch.isfinite(tensor).all():
        raise ConfigError(f"{name}: exceeds {str(kind).removeprefix('torch.')}; export with --dtype bfloat16")
    return tensor
