"""A diffusion transformer as the one file that nunchaku's loaders read.

What they want, from their sources (nothing here has been run in that runtime; see docs/nunchaku.md):

- q, k, v fused, with names of their own for Flux and diffusers' names for Qwen-Image. One rank for the whole file, so
  the low-rank parts of q, k and v lie side by side and every other linear is padded with zero columns to their sum.
- Linears behind a GELU read activations that are shifted by 0.171875 and quantized without sign. The shift is undone in
  their bias: b − Ŵ·(shift / smooth); the low-rank part reads the activation unshifted.
- The last linear of Flux's single blocks reads attention and MLP side by side: it is cut along K into two, whose
  outputs the runtime adds. Exact: the groups of the scales do not cross the cut, and both keep the whole `lora_up`.
- Adaptive norms in 4 bits by weight alone (groups of 64, scale and zero point), shifts, scales and gates interleaved
  channel by channel, and the 1 of `1 + scale` added to the bias. They are rounded to nearest here, at export.
- A bias everywhere, zeros where there is none; every tensor in one 16-bit type; the rank in the header.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq import __version__, schema
from svdq.checkpoint import Entry, write_file
from svdq.errors import ConfigError
from svdq.export import DTYPES, check_exportable, pack_layers
from svdq.kernels import layout
from svdq.kernels.layout import Layout
from svdq.quantized import Layer, QuantizedFile

SHIFT = 0.171875  # what that runtime adds to a GELU's output, which is never below -0.17
GROUP = 64  # along K, of an adaptive norm's weight
# int16 words of four codes, low nibble first; four rows and 64 columns together
ADAPTIVE = Layout("rt rr:4", "kt ka:2 kj:4 kb:8", "rt kt rr ka kb kj")


@dataclass(frozen=True)
class _Linear:
    """One linear of the file. `parts`: whose rows are stacked, all reading one input.

    behind_gelu  its input is shifted and has no sign
    columns      of the only part, by its share of the input: 0 the attention's, 1 the MLP's; None: all
    """

    parts: tuple[str, ...]
    behind_gelu: bool = False
    columns: int | None = None


@dataclass(frozen=True)
class _Class:
    """How a class of diffusers is laid out. linears, adaptive, moved: names inside a block, by the list it is in.

    adaptive  name → how many vectors the norm gives
    moved     what is only renamed
    suffixes  as `schema.PACKED` has them → as this loader does
    """

    model_class: str
    linears: dict[str, dict[str, _Linear]]
    adaptive: dict[str, dict[str, int]]
    moved: dict[str, str]
    suffixes: dict[str, str]


_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED_QKV = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
CLASSES = {
    "FluxTransformer2DModel": _Class(
        "NunchakuFluxTransformer2dModel",
        {
            "transformer_blocks": {
                "qkv_proj": _Linear(_QKV),
                "qkv_proj_context": _Linear(_ADDED_QKV),
                "out_proj": _Linear(("attn.to_out.0",)),
                "out_proj_context": _Linear(("attn.to_add_out",)),
                "mlp_fc1": _Linear(("ff.net.0.proj",)),
                "mlp_fc2": _Linear(("ff.net.2",), behind_gelu=True),
                "mlp_context_fc1": _Linear(("ff_context.net.0.proj",)),
                "mlp_context_fc2": _Linear(("ff_context.net.2",), behind_gelu=True),
            },
            "single_transformer_blocks": {
                "qkv_proj": _Linear(_QKV),
                "out_proj": _Linear(("proj_out",), columns=0),
                "mlp_fc1": _Linear(("proj_mlp",)),
                "mlp_fc2": _Linear(("proj_out",), behind_gelu=True, columns=1),
            },
        },
        {
            "transformer_blocks": {"norm1.linear": 6, "norm1_context.linear": 6},
            "single_transformer_blocks": {"norm.linear": 3},
        },
        {f"attn.{norm}.weight": f"{norm}.weight" for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k")},
        {},
    ),
    "QwenImageTransformer2DModel": _Class(
        "NunchakuQwenImageTransformer2DModel",
        {
            "transformer_blocks": {
                "attn.to_qkv": _Linear(_QKV),
                "attn.add_qkv_proj": _Linear(_ADDED_QKV),
                "attn.to_out.0": _Linear(("attn.to_out.0",)),
                "attn.to_add_out": _Linear(("attn.to_add_out",)),
                "img_mlp.net.0.proj": _Linear(("img_mlp.net.0.proj",)),
                "img_mlp.net.2": _Linear(("img_mlp.net.2",), behind_gelu=True),
                "txt_mlp.net.0.proj": _Linear(("txt_mlp.net.0.proj",)),
                "txt_mlp.net.2": _Linear(("txt_mlp.net.2",), behind_gelu=True),
            }
        },
        {"transformer_blocks": {"img_mod.1": 6, "txt_mod.1": 6}},
        {},
        {
            "lora_down": "proj_down",
            "lora_up": "proj_up",
            "smooth": "smooth_factor",
            "smooth_orig": "smooth_factor_orig",
        },
    ),
}


def is_known(source: QuantizedFile) -> bool:
    """Whether the file is of a diffusion transformer, so that it is exported whole and not linear by linear."""
    return "_class_name" in source.meta(schema.MODEL_CONFIG, dict)


def export(
    source: QuantizedFile,
    out: str | Path,
    *,
    dtype: str = "float16",
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Write the file. Returns {'layers', 'fused', 'bytes', 'dtype', 'rank', 'adaptive'}.

    Raises ConfigError for what that runtime cannot read: a rotation or clip, a class that it does not load, a linear
    left in 16 bits, sizes that are no multiples of 128, a value beyond the 16-bit type.
    """
    check_exportable(source, "nunchaku")
    config = source.meta(schema.MODEL_CONFIG, dict)
    known = CLASSES.get(config.get("_class_name"))
    if known is None:
        raise ConfigError(
            f"{source.file.path}: a {config.get('_class_name')}; svdq knows nunchaku's loaders of {', '.join(CLASSES)}"
        )
    if not source.other_tensors:
        raise ConfigError(f"{source.file.path}: holds the linears only (--linears-only); wanted a whole model's file")
    kind = DTYPES[dtype]
    linears = _linears(source, known)
    rank = max(sum(_padded_rank(source, part) for part in linear.parts) for linear in linears.values())
    entries: list[Entry] = []
    latest = _Latest()
    for number, (name, linear) in enumerate(linears.items()):
        entries += _linear_entries(source, name, linear, rank, kind, known.suffixes, latest)
        progress("export", number + 1, len(linears))
    adaptive = _adaptive(source, known)
    taken = set()
    for name, splits in adaptive.items():
        entries += _adaptive_entries(source, name, splits, kind, latest)
        taken |= {f"{name}.weight", f"{name}.bias"}
    for name in source.other_tensors:
        if name not in taken:
            entries.append(_plain_entry(source, name, _moved(name, known), kind))
    write_file(out, entries, _metadata(source, config, known.model_class, rank))
    return {
        "layers": len(source.layers),
        "fused": sum(len(linear.parts) > 1 for linear in linears.values()),
        "bytes": Path(out).stat().st_size,
        "dtype": dtype,
        "rank": rank,
        "adaptive": len(adaptive),
    }


def _blocks(source: QuantizedFile, known: _Class) -> list[tuple[str, str]]:
    """(list, block) for every block, in order."""
    found = set()
    for name in [*source.layers, *source.other_tensors]:
        where, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        if where in known.linears and index.isdigit():
            found.add((where, int(index)))
    return [(where, f"{where}.{index}") for where, index in sorted(found)]


def _linears(source: QuantizedFile, known: _Class) -> dict[str, _Linear]:
    """Name in the file → the linear, its parts by their full names. Raises ConfigError where one cannot be exported."""
    found = {}
    for where, block in _blocks(source, known):
        for name, linear in known.linears[where].items():
            whole = replace(linear, parts=tuple(f"{block}.{part}" for part in linear.parts))
            for part in whole.parts:
                if part not in source.layers:
                    raise ConfigError(
                        f"{part}: left in 16 bits, which nunchaku's loader cannot read; quantize all linears for it"
                    )
                n, k, _, _ = source.layers[part]
                if n % layout.TILE_N or k % layout.PAD_K:
                    raise ConfigError(f"{part}: {n} x {k}; nunchaku's loader wants multiples of {layout.TILE_N}")
            found[f"{block}.{name}"] = whole
    return found


def _adaptive(source: QuantizedFile, known: _Class) -> dict[str, int]:
    return {
        f"{block}.{name}": splits
        for where, block in _blocks(source, known)
        for name, splits in known.adaptive[where].items()
    }


def _moved(name: str, known: _Class) -> str:
    """The file's name of a tensor that is only renamed."""
    where, index, rest = (*name.split(".", 2), "", "")[:3]
    return f"{where}.{index}.{known.moved[rest]}" if where in known.linears and rest in known.moved else name


def _metadata(source: QuantizedFile, config: dict[str, Any], model_class: str, rank: int) -> dict[str, str]:
    grid = {"dtype": "int4", "scale_dtype": None, "group_size": 64}
    quantization = {
        "method": schema.QUANT_METHOD,
        "weight": grid,
        "activation": grid,
        "rank": rank,
        "producer": {"name": "svdq", "version": __version__},
    }
    return {
        "config": json.dumps(config, sort_keys=True),
        "model_class": model_class,
        "quantization_config": json.dumps(quantization, sort_keys=True),
        schema.CALIBRATION: json.dumps(source.meta(schema.CALIBRATION, dict), sort_keys=True),
    }


# ---------------------------------------------------------------------------------------------- tensors


def _padded_rank(source: QuantizedFile, name: str) -> int:
    return layout.round_up(source.layers[name][2], layout.RANK_TILE)


class _Latest:
    """The tensors of the linear that was asked for last: a file's order has those of one type and linear together."""

    def __init__(self) -> None:
        self.name = ""
        self.tensors: dict[str, Tensor] = {}

    def get(self, name: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        if name != self.name:
            self.tensors = {}  # before the next are made
            self.name, self.tensors = name, make()
        return self.tensors


def _linear_entries(
    source: QuantizedFile,
    name: str,
    linear: _Linear,
    rank: int,
    kind: torch.dtype,
    suffixes: dict[str, str],
    latest: _Latest,
) -> list[Entry]:
    n = sum(source.layers[part][0] for part in linear.parts)
    k = _share(source, linear).stop - _share(source, linear).start

    def stored(suffix: str) -> Tensor:
        tensors = latest.get(name, lambda: pack_layers(_parts(source, linear, rank), kind))
        return _finite(tensors[suffix], f"{name}.{suffix}")

    return [
        Entry(
            f"{name}.{suffixes.get(rule.suffix, rule.suffix)}",
            rule.dtype or kind,
            rule.resolve(n=n, k=k, r=rank),
            partial(stored, rule.suffix),
        )
        for rule in schema.PACKED
    ]


def _share(source: QuantizedFile, linear: _Linear) -> slice:
    """The columns of the parts that the linear has: all, or a share of a linear that reads attention and MLP."""
    n, k, _, _ = source.layers[linear.parts[0]]
    if linear.columns is None:
        return slice(0, k)
    return slice(0, n) if linear.columns == 0 else slice(n, k)  # the attention's channels come first, as many as go out


def _parts(source: QuantizedFile, linear: _Linear, rank: int) -> list[Layer]:
    """The layers as that runtime computes them; the last is padded to the file's rank."""
    share = _share(source, linear)
    parts = [_cut(source.layer(name), share) for name in linear.parts]
    if linear.columns == 0:  # the sum of both shares has the bias once
        parts = [replace(part, bias=None) for part in parts]
    if linear.behind_gelu:
        parts = [replace(part, bias=unshifted_bias(part)) for part in parts]
    last, width = parts[-1], sum(_padded_rank(source, name) for name in linear.parts[:-1])
    down, up = (layout.pad(m, m.shape[0], rank - width) for m in (last.proj_down, last.proj_up))
    return [*parts[:-1], replace(last, proj_down=down, proj_up=up)]


def _cut(layer: Layer, share: slice) -> Layer:
    """Some of a layer's columns, group by group. Raises ConfigError if the cut lies inside a group."""
    group = layer.group_size
    if share.start % group or share.stop % group:
        raise ConfigError(
            f"{layer.name}: its groups of {group} cross channel {share.start or share.stop}; use groups of 64"
        )
    smooth = layer.transform.smooth
    return replace(
        layer,
        codes=layer.codes[:, share],
        scales=layer.scales[:, share.start // group : share.stop // group],
        proj_down=layer.proj_down[share],
        transform=replace(layer.transform, smooth=None if smooth is None else smooth[share]),
    )


def unshifted_bias(layer: Layer) -> Tensor:
    """(n,) float32: the bias with which a linear on x + SHIFT, its low-rank part on x, gives what it gives on x."""
    shift = torch.full((layer.codes.shape[1],), SHIFT, dtype=torch.float64)
    if layer.transform.smooth is not None:
        shift = shift / layer.transform.smooth.double()
    added = layer.weight_hat(torch.float64) @ shift
    return ((0.0 if layer.bias is None else layer.bias.double()) - added).float()


def _adaptive_entries(source: QuantizedFile, name: str, splits: int, kind: torch.dtype, latest: _Latest) -> list[Entry]:
    n, k = source.file.tensors[f"{name}.weight"].shape
    if n % (4 * splits) or k % GROUP:
        raise ConfigError(f"{name}: {n} x {k}; nunchaku's loader wants multiples of {4 * splits} and {GROUP}")

    def packed() -> dict[str, Tensor]:
        bias = f"{name}.bias"
        held = source.file.read(bias) if bias in source.file.tensors else torch.zeros(n)
        return pack_adaptive(*round_adaptive(source.file.read(f"{name}.weight"), kind), held.to(kind), splits)

    def stored(suffix: str) -> Tensor:
        return _finite(latest.get(name, packed)[suffix], f"{name}.{suffix}")

    shapes = {"qweight": (n // 4, k // 2), "wscales": (k // GROUP, n), "wzeros": (k // GROUP, n), "bias": (n,)}
    return [
        Entry(f"{name}.{suffix}", torch.int32 if suffix == "qweight" else kind, shape, partial(stored, suffix))
        for suffix, shape in shapes.items()
    ]


def round_adaptive(weight: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """weight (n, k) → codes uint8 (n, k) in [0, 15], scales and zeros (n, k/64) of this type; ŵ = code·scale + zero."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).to(kind)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))  # a constant group: all codes 0
    zeros = low.to(kind)
    codes = ((groups - zeros.float()[..., None]) / scales.float()[..., None]).round().clamp(0, 15)
    return codes.to(torch.uint8).flatten(1), scales, zeros


def pack_adaptive(codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor, splits: int) -> dict[str, Tensor]:
    """The stored tensors of an adaptive norm that gives `splits` vectors: 3 (shift, scale, gate) or twice those."""

    def interleaved(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (splits, -1)).transpose(0, 1).flatten(0, 1)

    one = torch.zeros(splits, dtype=bias.dtype)
    one[[1, splits - 2]] = 1  # the scales
    flat = ADAPTIVE.pack(interleaved(codes))
    words = (flat[0::2] | (flat[1::2] << 4)).contiguous().view(torch.int32)
    return {
        "qweight": words.reshape(codes.shape[0] // 4, codes.shape[1] // 2),
        "wscales": interleaved(scales).t().contiguous(),
        "wzeros": interleaved(zeros).t().contiguous(),
        "bias": interleaved(bias + one.repeat_interleave(len(bias) // splits)),
    }


def _plain_entry(source: QuantizedFile, name: str, stored_name: str, kind: torch.dtype) -> Entry:
    info = source.file.tensors[name]
    if not info.dtype.is_floating_point or info.dtype == kind:
        return Entry(stored_name, info.dtype, info.shape, partial(source.file.chunks, name))
    return Entry(stored_name, kind, info.shape, lambda: _finite(source.file.read(name).to(kind), name))


def _finite(tensor: Tensor, name: str) -> Tensor:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ConfigError(f"{name}: exceeds {tensor.dtype}; export with --dtype bfloat16")
    return tensor
