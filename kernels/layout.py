"""Packed layouts as data: an index split into named digits, and the order in which the digits are stored.

`n = "nt np:8 ns:2 nl:8"` reads n as a mixed-radix number, most significant digit first; the first digit has no size
and takes what is left. `stored` lists all digits of both indices, slowest first. Packing is then one reshape, one
permutation, one copy, and unpacking the inverse permutation; the constants that a CUDA kernel needs are `strides`.
A chain of view and permute calls per tensor says the same, but neither shows the order nor gives the inverse.

`mma` is the fragment order of m16n8k64, which nunchaku's kernels read too (a lane reads one 16-byte vector of codes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """One tensor's stored order. rows, columns: digits of the two indices ('' = that index does not exist)."""

    rows: str
    columns: str
    stored: str

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Every digit's size for a logical shape. Raises ValueError if the shape is not a multiple of the tile."""
        sizes: dict[str, int] = {}
        for extent, digits in zip(shape, self._indices(), strict=True):
            head, *rest = digits
            inner = math.prod(size for _, size in rest)
            if extent % inner:
                raise ValueError(f"extent {extent} is not a multiple of {inner}")
            sizes[head[0]] = extent // inner
            sizes.update(rest)
        return sizes

    def pack(self, logical: Tensor) -> Tensor:
        """logical (rows, columns) or (rows,) → flat, in stored order."""
        sizes = self.sizes(tuple(logical.shape))
        names = list(sizes)
        order = [names.index(name) for name in self.stored.split()]
        return logical.reshape(list(sizes.values())).permute(order).reshape(-1)

    def unpack(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The inverse of `pack`; shape is the logical one."""
        sizes = self.sizes(shape)
        stored = self.stored.split()
        order = [stored.index(name) for name in sizes]
        return flat.reshape([sizes[name] for name in stored]).permute(order).reshape(shape)

    def strides(self, shape: tuple[int, ...]) -> dict[str, int]:
        """Digit → distance in the stored buffer, in elements."""
        sizes = self.sizes(shape)
        strides, step = {}, 1
        for name in reversed(self.stored.split()):
            strides[name] = step
            step *= sizes[name]
        return strides

    def constants(self) -> dict[str, int]:
        """The strides that no shape changes: up to and including the fastest digit without a size."""
        sizes = {name: size for digits in self._indices() for name, size in digits}
        constants, step = {}, 1
        for name in reversed(self.stored.split()):
            constants[name] = step
            if not sizes[name]:
                break
            step *= sizes[name]
        return constants

    def _indices(self) -> list[list[tuple[str, int]]]:
        return [
            [(name, int(size or 0)) for name, _, size in (digit.partition(":") for digit in index.split())]
            for index in (self.rows, self.columns)
            if index
        ]


TILE_N, TILE_K, RANK_TILE = 128, 64, 16
PANEL = 16  # tokens that one tensor-core operand holds
PAD_K = 128  # two k tiles: what the runtime's pipeline consumes per step

_CHANNEL = "nt na:8 nb:2 nc:4 nd:2"  # a 128-channel tile as the accumulator fragment holds it
MMA = {
    "qweight": Layout("nt np:8 ns:2 nl:8", "kt ks:2 kl:4 kr:8", "nt kt np nl kl ns ks kr"),
    "wscales": Layout(_CHANNEL, "g", "nt g na nc nb nd"),
    "channel": Layout(_CHANNEL, "", "nt na nc nb nd"),  # bias, smooth
    "lora_down": Layout("kt kb:2 kc:4 kd:2", "jt jb:2 jl:8", "kt jt jl kc jb kb kd"),
    "lora_up": Layout("nt nb:2 nl:8", "jt jb:2 jc:4 jd:2", "nt jt nl jc nb jb jd"),
    # In no file: activations by panels of 16 tokens, and proj_down as the lanes of the quantizer hold x
    "codes": Layout("mb ms:2 ml:8", "kt ks:2 kl:4 kr:8", "mb kt ms ml kl ks kr"),
    "scales": Layout("mb ms:2 ml:8", "kt", "mb kt ml ms"),
    # 8-bit activations of Hopper's kernels: a k tile of 128 after the other, 8 rows by 16 bytes together; the parity of
    # k is a digit of its own, as the even and odd codes of a packed word of weights become operands of their own
    "fp8": Layout("mg ml:8", "kt ks:4 kl:4 kb:4 kp:2", "kt mg ks kp ml kl kb"),
    "token_scales": Layout("ma mb:2 mc:4 md:2", "kt kg:2", "kt ma kg mc mb md"),
    "token_t": Layout("mp ml:8", "jt jh:2 jc:4 je:2", "jt mp jh ml jc je"),
    "down": Layout("kt ks:2 kl:4 kp:4 kd:2", "jb jl:8", "kt jb jl kl ks kp kd"),
    # NVFP4's scales, a byte for 16 channels: of weights in tiles of 512 bytes, in 16 of them one row of every 32; of
    # activations (in no file) as the lanes of m16n8k64 hold operand a
    "fp4_wscales": Layout("nt nd:4 nc:4 nl:8", "kt kg:4", "nt kt nl nc nd kg"),
    "fp4_scales": Layout("mb ms:2 ml:8", "kt kg:4", "mb kt ms ml kg"),
}
FP4_ROWS = Layout("n", "g", "g n")  # NVFP4's scales beside row-major codes: [K/16, rows]


def pad(tensor: Tensor, *extents: int, value: float = 0) -> Tensor:
    """Grow a tensor at the end of each axis to these extents."""
    if tuple(tensor.shape) == extents:
        return tensor
    padded = torch.full(extents, value, dtype=tensor.dtype, device=tensor.device)
    padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pack_codes(codes: Tensor, name: str = "qweight") -> Tensor:
    """codes int8 (N, K), padded → int8 (N, K/2) in fragment order; of two codes the even k is the low nibble."""
    flat = MMA[name].pack(codes).view(torch.uint8) & 0xF
    return (flat[0::2] | (flat[1::2] << 4)).view(torch.int8).reshape(codes.shape[0], codes.shape[1] // 2)


def unpack_codes(packed: Tensor, name: str = "qweight") -> Tensor:
    """The inverse of `pack_codes`."""
    n, k = packed.shape[0], packed.shape[1] * 2
    signed = packed.reshape(-1).view(torch.int8)
    flat = torch.stack(((signed << 4) >> 4, signed >> 4), dim=-1).reshape(-1)
    return MMA[name].unpack(flat, (n, k))


def pack_matrix(name: str, logical: Tensor, stored_shape: tuple[int, ...] | None = None) -> Tensor:
    """Pack by the layout of this name; the result takes `stored_shape`, or the logical one."""
    return MMA[name].pack(logical).reshape(stored_shape or tuple(logical.shape))


def unpack_matrix(name: str, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    return MMA[name].unpack(stored.reshape(-1), shape)
