"""Every stored tensor, once: its name, type, shape rule and meaning, for reader, writer, packer, verifier and README.

n = out features, k = in features, r = rank, g = group size along k; in a packed file n, k and r are the padded sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from svdq import __version__
from svdq.errors import CheckpointError

FORMAT_VERSION = 1
QUANT_METHOD = "svdquant"

# metadata keys of a file's header; every value is a JSON string
QUANTIZATION_CONFIG = "quantization_config"
RUN_CONFIG = "svdq.config"
CALIBRATION = "svdq.calibration"
SOURCE = "svdq.source"
REPORT = "svdq.report"
LAYERS = "svdq.layers"
TIES = "svdq.ties"
MODEL_CONFIG = "config"


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a quantized linear. dtype None = the source's; shape is a tuple of expressions in n, k, r, g."""

    suffix: str
    shape: tuple[str, ...]
    dtype: torch.dtype | None
    meaning: str
    optional: bool = False

    def resolve(self, **sizes: int) -> tuple[int, ...]:
        return tuple(_EXPRESSIONS[axis](sizes) for axis in self.shape)


_EXPRESSIONS = {
    "n": lambda s: s["n"],
    "k": lambda s: s["k"],
    "r": lambda s: s["r"],
    "k/2": lambda s: s["k"] // 2,
    "k/g": lambda s: s["k"] // s["g"],
    "k/64": lambda s: s["k"] // 64,
    "k/16": lambda s: s["k"] // 16,
    "k/8": lambda s: s["k"] // 8,
    "1": lambda s: 1,
    "16": lambda s: 16,
    "256": lambda s: 256,
    "nk/2": lambda s: -(-s["n"] * s["k"] // 2),
    "nk/64": lambda s: -(-s["n"] * s["k"] // 64),
    "nk/16384": lambda s: -(-s["n"] * s["k"] // 16384),
    "*": lambda s: -1,  # any
}

CANONICAL = (
    TensorRule(
        "qweight", ("n", "k/2"), torch.uint8, "codes, two a byte: low nibble = even k; two's complement in [-7, 7]"
    ),
    TensorRule("w_scales", ("n", "k/g"), torch.float16, "group scale: weight_hat = code · scale; finite, > 0"),
    TensorRule("proj_down", ("k", "r"), torch.float16, "low-rank down; acts on the raw input"),
    TensorRule("proj_up", ("n", "r"), torch.float16, "low-rank up"),
    TensorRule(
        "smooth", ("k",), torch.float32, "the activation is divided by it before it is quantized; absent = 1", True
    ),
    TensorRule("act_clip", (), torch.float32, "activation scale = act_clip · absmax / 7; absent = 1", True),
    TensorRule("bias", ("n",), None, "only where the source has one", True),
)

_LOW_RANK = (
    TensorRule("proj_down", ("k", "r"), torch.float16, "low-rank down; absent at rank 0", True),
    TensorRule("proj_up", ("n", "r"), torch.float16, "low-rank up; absent at rank 0", True),
)
_BIAS = CANONICAL[-1]
W4A16 = (
    TensorRule("qweight", ("n", "k/8"), torch.int32, "codes 0 to 15, eight a word: lowest nibble = lowest k"),
    TensorRule("w_scales", ("n", "k/g"), torch.float16, "weight_hat = (code − zero) · scale; finite, > 0"),
    TensorRule("w_zeros", ("n", "k/g"), torch.uint8, "the zero point, 0 to 15; absent = 8 everywhere", True),
    *_LOW_RANK,
    _BIAS,
)
W8A16 = (
    TensorRule("qweight", ("n", "k"), torch.int8, "codes in [-127, 127]"),
    TensorRule("w_scales", ("n", "1"), torch.float16, "weight_hat = code · scale; finite, > 0"),
    *_LOW_RANK,
    _BIAS,
)
NVFP4 = (
    TensorRule(
        "qweight", ("n", "k/2"), torch.uint8, "E2M1 codes, two a byte: low nibble = even k; sign, then magnitude"
    ),
    TensorRule("w_scales", ("n", "k/g"), torch.float8_e4m3fn, "weight_hat = e2m1(code) · scale · wcscale; finite, > 0"),
    TensorRule("wcscale", ("n",), torch.float32, "the factor of a row, one for the linear; finite, > 0"),
    *_LOW_RANK,
    CANONICAL[4],  # smooth
    _BIAS,
)

PACKED_NVFP4 = (
    TensorRule("qweight", ("n", "k/2"), torch.uint8, "codes in m16n8k64 fragment order"),
    TensorRule("wscales", ("k/16", "n"), torch.float8_e4m3fn, "group scales in tiles of 512 bytes"),
    TensorRule("wcscale", ("n",), torch.float32, "in fragment order"),
    TensorRule("lora_down", ("k", "r"), torch.float16, "low-rank down in fragment order; absent at rank 0", True),
    TensorRule("lora_up", ("n", "r"), torch.float16, "low-rank up in fragment order; absent at rank 0", True),
    TensorRule("smooth", ("k",), torch.float32, "in fragment order; absent = 1", True),
    TensorRule("bias", ("n",), None, "in fragment order; only where the source has one", True),
)
ROWS_NVFP4 = tuple(
    TensorRule("wscales", ("k/16", "n"), rule.dtype, rule.meaning) if rule.suffix == "w_scales" else rule
    for rule in NVFP4
)

# As bitsandbytes names and stores them; blocks run through the flattened weight.
NF4 = (
    TensorRule("weight", ("nk/2", "1"), torch.uint8, "codes, two a byte: high nibble = the first"),
    TensorRule("weight.absmax", ("nk/64",), torch.uint8, "code of each block's scale in the dynamic map"),
    TensorRule("weight.quant_map", ("16",), torch.float32, "the levels"),
    TensorRule("weight.nested_absmax", ("nk/16384",), torch.float32, "scale of 256 scales"),
    TensorRule("weight.nested_quant_map", ("256",), torch.float32, "the dynamic map"),
    TensorRule("weight.quant_state.bitsandbytes__nf4", ("*",), torch.uint8, "JSON: shape, type, the scales' mean"),
    _BIAS,
)

# Sizes here are the padded ones. All 16-bit tensors of a packed file share one dtype, recorded in the header.
PACKED = (
    TensorRule("qweight", ("n", "k/2"), torch.int8, "codes in m16n8k64 fragment order"),
    TensorRule("wscales", ("k/64", "n"), None, "group scales; stored order [n/128][k/64][128]"),
    TensorRule("lora_down", ("k", "r"), None, "low-rank down in fragment order"),
    TensorRule("lora_up", ("n", "r"), None, "low-rank up in fragment order"),
    TensorRule("smooth", ("k",), None, "smoothing, 1 where there is none"),
    TensorRule("smooth_orig", ("k",), None, "the same again, as that runtime's files have it"),
    TensorRule("bias", ("n",), None, "zeros where the source has none"),
)


def canonical_shapes(n: int, k: int, rank: int, group: int) -> dict[str, tuple[int, ...]]:
    return {rule.suffix: rule.resolve(n=n, k=k, r=rank, g=group) for rule in CANONICAL}


def quantization_config(
    *, format: str, numbers: dict, rank: int, smooth: bool, rotation: str, ignore: list[str], packing: dict
) -> dict:
    """The header's `quantization_config`; the rank is always written, readers elsewhere assume 32 without it.

    numbers  `weight` and `activation`, of svdq.formats
    """
    return {
        "quant_method": QUANT_METHOD,
        "method": QUANT_METHOD,
        "format": format,
        "rank": rank,
        **numbers,
        "smooth": smooth,
        "rotation": rotation,
        "ignore": ignore,
        "packing": packing,
        "producer": {"name": "svdq", "version": __version__},
    }


def markdown_table(rules: tuple[TensorRule, ...]) -> str:
    """The rules as the table that README shows (a test compares the two)."""
    lines = ["| tensor | shape | type | meaning |", "|---|---|---|---|"]
    for rule in rules:
        dtype = "16-bit, one for the file" if rule.dtype is None else str(rule.dtype).removeprefix("torch.")
        dtype = "as the source" if rule.suffix == "bias" and rule.optional else dtype
        lines.append(f"| `{rule.suffix}` | [{', '.join(rule.shape)}] | {dtype} | {rule.meaning} |")
    return "\n".join(lines)


CANONICAL_PACKING = {"layout": "canonical", "version": FORMAT_VERSION}


def layer_sizes(entry: Any, name: str, unit: int = 64) -> tuple[int, int, int, int]:
    """(n, k, rank, group) of one entry of the `svdq.layers` metadata, checked: a header is hostile.

    unit  what the format's groups are multiples of
    """
    try:
        sizes = tuple(entry[key] for key in ("n", "k", "rank", "group_size"))
    except (TypeError, KeyError):
        raise CheckpointError(f"{name}: its svdq.layers entry lacks n, k, rank or group_size") from None
    n, k, rank, group = sizes
    if not all(isinstance(s, int) and not isinstance(s, bool) for s in sizes) or min(n, k, group) < 1 or rank < 0:
        raise CheckpointError(f"{name}: its svdq.layers entry {entry!r} is not a set of sizes")
    if group % unit or (k % group and unit != 1):  # unit 1: NF4, whose blocks run on through the rows
        raise CheckpointError(f"{name}: in_features {k} do not divide into groups of {group} (a multiple of {unit})")
    return n, k, rank, group
