"""The formats that `svdq quantize --format` knows: what a linear's tensors are, and how they become codes and scales.

A format is a grid (svdq.grid), a list of stored tensors (svdq.schema), the two functions between them here, and the
numbers that activations become. The pipeline, the verifier and the exporter read these and nothing else of a format;
its kernels hang on the module that svdq.linear makes of a layer.

name    weights                                                   activations
w4a4    4-bit integers, groups of 64, low rank                    4-bit integers, a scale a token and 64 channels
w4a16   4-bit integers, groups of 128, zero points, low rank      16 bits
w8a16   8-bit integers, a scale a row                             16 bits
nf4     normal quantiles, blocks of 64, scales in 8 bits          16 bits
nvfp4   E2M1, an E4M3 scale for 16 weights, low rank              the same, a scale a token and 16 channels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from svdq import nf4, schema
from svdq.config import LayerConfig
from svdq.grid import E2M1, INT4_WEIGHT, INT8, NF4_CODES, UINT4, Grid, pack_nibbles, unpack_nibbles, zero_points
from svdq.layer import QuantizedLinear
from svdq.rounding import ActivationTransform
from svdq.schema import TensorRule

_E2M1_CODES = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12], dtype=torch.int8)  # doubles of the magnitudes, by index


@dataclass(frozen=True)
class Decoded:
    """A stored linear's weights. codes int8 (n, k); scales (n, k/group) and unit (n,) or None as svdq.grid has them."""

    codes: Tensor
    scales: Tensor
    unit: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """One format; see the module.

    activation  what ActivationTransform.dtype is, unless a run asks for another; None: 16 bits
    rules       the stored tensors of a linear
    store       (codes and scales, whether without zero points) → their stored tensors
    load        its inverse
    dtypes      what quantization_config may call the weights
    grid        what decodes the weights, and their range of codes
    """

    name: str
    activation: str | None
    rules: tuple[TensorRule, ...]
    store: Callable[[Decoded, bool], dict[str, Tensor]]
    load: Callable[[dict[str, Tensor]], Decoded]
    dtypes: tuple[str, ...]
    grid: Grid

    def weight_hat(self, weights: Decoded, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized weights, (n, k)."""
        if self.name == "nf4":
            return nf4.multiply(weights.codes, weights.scales).to(dtype)
        grid = self.grid.with_group(weights.codes.shape[1] // weights.scales.shape[1])
        return grid.decode(weights.codes, weights.scales, dtype, weights.unit)

    @property
    def group_unit(self) -> int:
        """What a group's size is a multiple of, as far as the file's structure goes."""
        return {"w4a4": 64, "w4a16": 8, "nvfp4": 16}.get(self.name, 1)

    def tensors(self, result: QuantizedLinear, layer: LayerConfig, transform: ActivationTransform) -> dict[str, Tensor]:
        """All stored tensors of a linear but its bias, in the order of the rules."""
        decoded = Decoded(result.codes, result.scales, result.unit)
        tensors = dict(result.stored) or self.store(decoded, layer.symmetric)
        if layer.rank or self.name == "w4a4":
            tensors |= {"proj_down": result.proj_down, "proj_up": result.proj_up}
        if self.activation is not None and transform.smooth is not None:
            tensors["smooth"] = transform.smooth
        if self.activation is not None and transform.clip != 1.0:
            tensors["act_clip"] = torch.tensor(transform.clip, dtype=torch.float32)
        return tensors

    def stored_bytes(self, n: int, k: int, layer: LayerConfig) -> int:
        """Of a linear's tensors without its bias, smoothing and clip counted where they can be. Of NF4's state, whose
        length depends on the source's type, that of float16's and float32's."""
        if self.name == "nf4":
            return sum(
                t.itemsize * torch.Size(shape).numel() for t, shape in nf4.tensor_sizes(n, k, torch.float16).values()
            )
        absent = {"bias"} | ({"w_zeros"} if layer.symmetric else set())
        if not layer.rank:
            absent |= {"proj_down", "proj_up"}
        sizes = {"n": n, "k": k, "r": layer.rank, "g": layer.group_size or k}
        rules = [rule for rule in self.rules if rule.suffix not in absent]
        return sum(rule.dtype.itemsize * torch.Size(rule.resolve(**sizes)).numel() for rule in rules if rule.dtype)

    def config(self, layer: LayerConfig) -> dict[str, Any]:
        """`weight` and `activation` of the header's quantization_config."""
        dtype = self.dtypes[-1] if layer.symmetric else self.dtypes[0]
        scale = {"nvfp4": "float8_e4m3fn", "nf4": "uint8"}.get(self.name, "float16")
        symmetric = self.name != "w4a16" or layer.symmetric
        weight = {"dtype": dtype, "group_size": layer.group_size, "scale_dtype": scale, "symmetric": symmetric}
        groups = {"int4": 64, "nvfp4": 16}
        activation = None
        if self.activation is not None:
            kind = "int4" if self.activation == "int4" else "float4_e2m1"
            activation = {"dtype": kind, "group_size": groups[self.activation], "dynamic": True, "symmetric": True}
        return {"weight": weight, "activation": activation}


def _store_w4a4(weights: Decoded, symmetric: bool) -> dict[str, Tensor]:
    return {"qweight": pack_nibbles(weights.codes), "w_scales": weights.scales}


def _load_w4a4(tensors: dict[str, Tensor]) -> Decoded:
    return Decoded(unpack_nibbles(tensors["qweight"]), tensors["w_scales"])


def _store_w4a16(weights: Decoded, symmetric: bool) -> dict[str, Tensor]:
    if symmetric:
        return {"qweight": pack_words(weights.codes + 8), "w_scales": weights.scales}
    group = weights.codes.shape[1] // weights.scales.shape[1]
    zeros = zero_points(weights.codes, group)
    codes = weights.codes + zeros.to(torch.int8).repeat_interleave(group, 1)
    return {"qweight": pack_words(codes), "w_scales": weights.scales, "w_zeros": zeros}


def _load_w4a16(tensors: dict[str, Tensor]) -> Decoded:
    codes, scales = unpack_words(tensors["qweight"]), tensors["w_scales"]
    if "w_zeros" not in tensors:
        return Decoded(codes - 8, scales)
    zeros = tensors["w_zeros"].to(torch.int8)
    return Decoded(codes - zeros.repeat_interleave(codes.shape[1] // zeros.shape[1], 1), scales)


def _store_w8a16(weights: Decoded, symmetric: bool) -> dict[str, Tensor]:
    return {"qweight": weights.codes, "w_scales": weights.scales}


def _load_w8a16(tensors: dict[str, Tensor]) -> Decoded:
    return Decoded(tensors["qweight"], tensors["w_scales"])


def _store_nvfp4(weights: Decoded, symmetric: bool) -> dict[str, Tensor]:
    assert weights.unit is not None
    magnitude = torch.searchsorted(_E2M1_CODES.to(weights.codes.device), weights.codes.abs()).to(torch.int8)
    negative = (weights.codes < 0).to(torch.int8) << 3
    return {"qweight": pack_nibbles(magnitude | negative), "w_scales": weights.scales, "wcscale": weights.unit}


def _load_nvfp4(tensors: dict[str, Tensor]) -> Decoded:
    nibbles = unpack_nibbles(tensors["qweight"])
    magnitude = _E2M1_CODES.to(nibbles.device)[(nibbles & 7).int()]
    codes = torch.where(nibbles < 0, -magnitude, magnitude)
    return Decoded(codes, tensors["w_scales"], tensors["wcscale"])


def _store_nf4(weights: Decoded, symmetric: bool) -> dict[str, Tensor]:
    """The codes alone: the scales' codes are not to be had from the scales."""
    codes = torch.nn.functional.pad(weights.codes.flatten().to(torch.uint8), (0, weights.codes.numel() % 2), value=7)
    return {"weight": (codes[0::2] << 4 | codes[1::2]).unsqueeze(1)}


def _load_nf4(tensors: dict[str, Tensor]) -> Decoded:
    """Codes 0 … 15 (n, k) and a float32 scale for each block of the flattened weight."""
    n, k = nf4.sizes(tensors)
    pairs = tensors["weight"].flatten()
    codes = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[: n * k]
    return Decoded(codes.view(n, k).to(torch.int8), nf4.block_scales(tensors, n, k))


def pack_words(codes: Tensor) -> Tensor:
    """Eight codes 0 … 15 a word, the lowest k in the lowest nibble: int8 (n, k) → int32 (n, k/8)."""
    return pack_nibbles(codes).contiguous().view(torch.int32)  # two a byte, and bytes little-endian


def unpack_words(words: Tensor) -> Tensor:
    """The inverse of `pack_words`: int8 (n, k) in 0 … 15."""
    return unpack_nibbles(words.contiguous().view(torch.uint8)) & 0xF


FORMATS = {
    one.name: one
    for one in (
        Format("w4a4", "int4", schema.CANONICAL, _store_w4a4, _load_w4a4, ("int4",), INT4_WEIGHT),
        Format("w4a16", None, schema.W4A16, _store_w4a16, _load_w4a16, ("uint4", "int4"), UINT4),
        Format("w8a16", None, schema.W8A16, _store_w8a16, _load_w8a16, ("int8",), INT8),
        Format("nf4", None, schema.NF4, _store_nf4, _load_nf4, ("nf4",), NF4_CODES),
        Format("nvfp4", "nvfp4", schema.NVFP4, _store_nvfp4, _load_nvfp4, ("float4_e2m1",), E2M1),
    )
}
