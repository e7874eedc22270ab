"""NF4: 4-bit codes of normal quantiles, 64 weights a scale, the scales themselves in 8 bits; as bitsandbytes stores it.

A weight matrix is read row by row as one long vector, cut into blocks of 64; each block is divided by its largest
magnitude and every value becomes the nearest of 16 levels. The scales (absmax) less their mean are cut into blocks of
256 and become, after division by the largest of them, one of the 256 values of the dynamic map: that is double
quantization, 4.13 bits a weight. Blocks do not end with a row, and the last one of either kind may be short.

    scale(block)  = nested_quant_map[absmax[block]] · nested_absmax[block / 256] + nested_offset
    weight_hat(i) = quant_map[code(i)] · scale(i / 64)          both in float32, each operation rounded

Names, types, shapes and values of the tensors are bitsandbytes' own, so that its loader reads what `encode` gives and
`decode` what its quantizer gives. Its quantizers for CPUs and for GPUs disagree in some 0.2 % of the scales' codes, by
one: the former first rounds a value to one of 65,536 places. `encode` follows it, on every device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from svdq.errors import CheckpointError, NumericsError

BLOCK = 64  # weights that share a scale
NESTED_BLOCK = 256  # scales that share one of their own
STATE = "weight.quant_state.bitsandbytes__nf4"
OPERANDS = ("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

_OUTERMOST = 0.9677083  # the quantile that becomes ±1
_PLACES = 65535  # of the scales' quantizer, less one
_SMALLEST = 1e-38  # takes the place of 0 as a divisor
_STATE_BYTES = 4096  # no longer one is read
_CHUNK = 2**22  # weights worked on at a time


@dataclass(frozen=True)
class State:
    """What is stored beside the tensors: the weight's shape, its type before, and the mean of its scales."""

    n: int
    k: int
    dtype: torch.dtype
    offset: float


@cache
def levels() -> Tensor:
    """float32 (16,) rising: quantiles of the normal distribution at equal steps, eight above 0, seven below.

    The quantiles are float32 numbers first, which decides the last bits. Source: Dettmers et al., arXiv:2305.14314.
    """
    above, below = (torch.linspace(_OUTERMOST, 0.5, count)[:-1].tolist() for count in (9, 8))
    quantiles = [-NormalDist().inv_cdf(p) for p in below] + [0.0] + [NormalDist().inv_cdf(p) for p in reversed(above)]
    table = torch.tensor(quantiles)
    return table / table.max()


@cache
def scale_map() -> Tensor:
    """float32 (256,) rising, the signed dynamic map: 2^i values between 10^(i−7) and 10^(i−6), i = 0 … 6, and 0, 1.

    Source: Dettmers et al., arXiv:2110.02861.
    """
    magnitudes = []
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        magnitudes.append(10.0 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2))
    positive = torch.cat(magnitudes)
    return torch.cat((-positive, torch.tensor([0.0, 1.0]), positive)).sort().values


@cache
def _place_codes() -> Tensor:
    """int64 (65536,): for each place between −1 and 1 the nearest value of the dynamic map."""
    values = scale_map()
    places = torch.arange(_PLACES + 1) / _PLACES * 2 - 1
    return torch.bucketize(places, (values[:-1] + values[1:]) / 2)


def tensor_sizes(n: int, k: int, dtype: torch.dtype) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Suffix → (type, shape) of every tensor of a linear, from its sizes alone. dtype is the source's."""
    blocks = -(-n * k // BLOCK)
    return {
        "weight": (torch.uint8, ((n * k + 1) // 2, 1)),
        "weight.absmax": (torch.uint8, (blocks,)),
        "weight.quant_map": (torch.float32, (16,)),
        "weight.nested_absmax": (torch.float32, (-(-blocks // NESTED_BLOCK),)),
        "weight.nested_quant_map": (torch.float32, (256,)),
        STATE: (torch.uint8, (len(_state_text(State(n, k, dtype, 0.0))),)),
    }


def encode(weight: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Round a weight to NF4: every tensor of `tensor_sizes`, by its suffix, on the weight's device.

    weight  (n, k) floating point, rows are outputs. Not changed.
    dtype   what a loader decodes to, by default the weight's own: float16, bfloat16 or float32
    Raises  NumericsError if a value is not finite or the scales overflow.
    """
    dtype = dtype or weight.dtype
    _dtype_name(dtype)
    n, k = weight.shape
    values, sizes = weight.reshape(-1), tensor_sizes(n, k, dtype)
    scales = torch.empty(sizes["weight.absmax"][1], device=weight.device)
    packed = torch.empty(sizes["weight"][1][0], dtype=torch.uint8, device=weight.device)
    for start in range(0, n * k, _CHUNK):
        blocks, first = _encode_chunk(values[start : start + _CHUNK].float()), start // BLOCK
        scales[first : first + len(blocks[0])] = blocks[0]
        packed[start // 2 : start // 2 + len(blocks[1])] = blocks[1]
    offset = scales.mean()
    if not offset.isfinite():
        raise NumericsError("a value of the weight is not finite, or their scales overflow; NF4 cannot hold it")
    scale_codes, nested_scales = _encode_scales(scales - offset)
    return {
        "weight": packed.unsqueeze(1),
        "weight.absmax": scale_codes,
        "weight.quant_map": levels().to(weight.device, copy=True),
        "weight.nested_absmax": nested_scales,
        "weight.nested_quant_map": scale_map().to(weight.device, copy=True),
        STATE: torch.tensor(list(_state_text(State(n, k, dtype, offset.item()))), dtype=torch.uint8),
    }


def decode(
    tensors: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype = torch.float32, name: str = "linear"
) -> Tensor:
    """weight_hat (n, k), rounded once to dtype. Raises CheckpointError like `check`."""
    offset = check(tensors, n, k, name).offset
    packed, absmax, quant_map, nested_absmax, nested_map = (tensors[suffix] for suffix in OPERANDS)
    return dequantize(packed, absmax, quant_map, nested_absmax, nested_map, offset, n, k, dtype)


def block_scales(tensors: Mapping[str, Tensor], n: int, k: int) -> Tensor:
    """float32, one for each block of the flattened weight."""
    _, absmax, _, nested_absmax, nested_map = (tensors[suffix] for suffix in OPERANDS)
    return _scales(absmax, nested_absmax, nested_map, check(tensors, n, k).offset)


def multiply(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes (n, k) and the blocks' scales → weight_hat (n, k) float32."""
    padded = torch.nn.functional.pad(codes.flatten(), (0, scales.numel() * BLOCK - codes.numel()))
    values = levels().to(codes.device)[padded.int()].view(-1, BLOCK) * scales.unsqueeze(1)
    return values.flatten()[: codes.numel()].view(codes.shape)


def _scales(absmax: Tensor, nested_absmax: Tensor, nested_map: Tensor, offset: float) -> Tensor:
    nested = nested_absmax.repeat_interleave(NESTED_BLOCK)[: absmax.numel()]
    return nested_map[absmax.int()] * nested + offset


def dequantize(
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    nested_absmax: Tensor,
    nested_quant_map: Tensor,
    offset: float,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    """What `decode` computes, of tensors that are known to fit."""
    pairs = packed.reshape(-1)
    codes = torch.stack((pairs >> 4, pairs & 15), dim=-1).flatten()  # the first of two codes is the high nibble
    padded = torch.nn.functional.pad(codes, (0, absmax.numel() * BLOCK - codes.numel()))
    scales = _scales(absmax, nested_absmax, nested_quant_map, offset)
    values = quant_map[padded.int()].view(-1, BLOCK) * scales.unsqueeze(1)
    return values.flatten()[: n * k].to(dtype).view(n, k)


def sizes(tensors: Mapping[str, Tensor], name: str = "linear") -> tuple[int, int]:
    """(n, k) as the state says, unchecked against the tensors. Raises CheckpointError if it is none."""
    if STATE not in tensors:
        raise CheckpointError(f"{name}: {STATE} is missing; wanted a linear that bitsandbytes stored as NF4")
    state = _read_state(tensors[STATE], f"{name}.{STATE}")
    return state.n, state.k


def check(tensors: Mapping[str, Tensor], n: int, k: int, name: str = "linear") -> State:
    """The state of a linear of n outputs and k inputs, all of whose tensors are there and fit. Trusts nothing.

    Raises  CheckpointError that names the first tensor that does not
    """
    if STATE not in tensors:
        raise CheckpointError(f"{name}: {STATE} is missing; wanted a linear that bitsandbytes stored as NF4")
    state = _read_state(tensors[STATE], f"{name}.{STATE}")
    if (state.n, state.k) != (n, k):
        raise CheckpointError(f"{name}.{STATE}: found the shape [{state.n}, {state.k}]; the model's is [{n}, {k}]")
    for suffix, (dtype, shape) in tensor_sizes(n, k, state.dtype).items():
        if suffix not in tensors:
            raise CheckpointError(f"{name}: {suffix} is missing")
        found = tensors[suffix]
        if suffix != STATE and (found.dtype != dtype or tuple(found.shape) != shape):
            kind = str(found.dtype).removeprefix("torch.")
            wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            raise CheckpointError(f"{name}.{suffix}: found {kind} {list(found.shape)}; wanted {wanted}")
    if not torch.equal(tensors["weight.quant_map"].cpu(), levels()):
        raise CheckpointError(f"{name}.weight.quant_map: found other levels than those of NF4")
    for suffix in ("weight.nested_absmax", "weight.nested_quant_map"):
        if not tensors[suffix].isfinite().all():
            raise CheckpointError(f"{name}.{suffix}: found values that are not finite")
    return state


# ------------------------------------------------------------------------------------------------ rounding


def _encode_chunk(values: Tensor) -> tuple[Tensor, Tensor]:
    """(scales, packed codes) of values, float32, whole blocks but for the last."""
    whole = len(values) // BLOCK * BLOCK
    blocks, rest = values[:whole].view(-1, BLOCK), values[whole:]
    scales = blocks.abs().amax(1)
    scaled = (blocks * (1 / scales.clamp(min=_SMALLEST)).unsqueeze(1)).flatten()
    if len(rest):  # bitsandbytes multiplies by the reciprocal above, but divides here
        last = rest.abs().max().clamp(min=_SMALLEST)
        scales, scaled = torch.cat((scales, last[None])), torch.cat((scaled, rest / last))
    table = levels().to(values.device)
    codes = torch.bucketize(scaled, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)
    if len(codes) % 2:
        codes = torch.nn.functional.pad(codes, (0, 1), value=7)  # the code of 0
    return scales, codes[0::2] << 4 | codes[1::2]


def _encode_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """(codes of the dynamic map, float32 scales of 256 each); a block of zeros has the code 0."""
    padding = -len(scales) % NESTED_BLOCK
    blocks = torch.nn.functional.pad(scales, (0, padding)).view(-1, NESTED_BLOCK)
    nested = blocks.abs().amax(1)
    scaled = (blocks * (1 / nested).unsqueeze(1)).clamp_(-1, 1)
    places = ((scaled + 1) * 0.5 * _PLACES + 0.5).nan_to_num_(0).int()
    return _place_codes().to(scales.device)[places].to(torch.uint8).flatten()[: len(scales)], nested


# ------------------------------------------------------------------------------------------------ the state's text


def _dtype_name(dtype: torch.dtype) -> str:
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"NF4: found {dtype}; wanted one of {', '.join(DTYPES)}")


def _state_text(state: State) -> bytes:
    """JSON as bitsandbytes reads it. The offset has always as many digits: the length follows from shape and type."""
    head = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": _dtype_name(state.dtype), "shape": [state.n, state.k]}
    nested = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
    return f'{json.dumps(head | nested)[:-1]}, "nested_offset": {state.offset:.16e}}}'.encode()


def _read_state(tensor: Tensor, where: str) -> State:
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not 0 < tensor.numel() <= _STATE_BYTES:
        raise CheckpointError(f"{where}: found {tensor.dtype} {list(tensor.shape)}; wanted up to {_STATE_BYTES} bytes")
    try:
        found = json.loads(bytes(tensor.tolist()))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{where}: found bytes that are not JSON") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: found JSON that is not an object")
    wanted = {
        "quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32",
    }  # fmt: skip
    for key, value in wanted.items():
        if found.get(key) != value or isinstance(found.get(key), bool):
            hint = "; quantize with bnb_4bit_use_double_quant=True" if key.startswith("nested") else ""
            raise CheckpointError(f"{where}: found {key} {_short(found.get(key))}; wanted {value!r}{hint}")
    shape, offset = found.get("shape"), found.get("nested_offset")
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int and size > 0 for size in shape):
        raise CheckpointError(f"{where}: found shape {_short(shape)}; wanted two sizes")
    if not isinstance(found.get("dtype"), str) or found["dtype"] not in DTYPES:
        raise CheckpointError(f"{where}: found dtype {_short(found.get('dtype'))}; wanted one of {', '.join(DTYPES)}")
    if type(offset) is not float or not math.isfinite(offset):
        raise CheckpointError(f"{where}: found nested_offset {_short(offset)}; wanted a finite number")
    return State(shape[0], shape[1], DTYPES[found["dtype"]], offset)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
