"""Linears of the formats beside W4A4, as torch modules: they hold a file's tensors, and each is one operator.

W4A16, W8A16 and NF4 are read in the order that they are stored in; NVFP4 is repacked once, on the device that it is on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from svdq import nf4
from svdq.formats import FORMATS
from svdq.kernels import nf4 as nf4_kernels
from svdq.kernels import nvfp4, reference, weight_only
from svdq.quantized import Layer


def move_buffers(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Move between devices, never between types: the stored types are the format (model.half() leaves them)."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            moved = fn(buffer)
            module._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)


class StoredLinear(nn.Module):
    """y = Qa(x) · weight_hatᵀ + (x · proj_down) · proj_upᵀ + bias, x (..., k) → (..., n); Qa only in NVFP4.

    kernels  'auto': CUDA kernels for float16 and bfloat16 on a GPU; 'reference': plain torch everywhere
    """

    FEW_TOKENS = 0  # up to here a kernel reads the stored weights; for more they are expanded first

    def __init__(self, layer: Layer, kernels: str = "auto"):
        super().__init__()
        self.format, self.kernels, self.transform = layer.format, kernels, layer.transform
        self.out_features, self.in_features = layer.codes.shape
        self.rank = layer.proj_up.shape[1]
        self._suffixes = tuple(layer.stored)
        for suffix, tensor in layer.stored.items():
            self.register_buffer(_buffer(suffix), tensor)
        self._prepare()

    def stored(self) -> dict[str, Tensor]:
        """The file's tensors, by their suffix."""
        return {suffix: self.get_buffer(_buffer(suffix)) for suffix in self._suffixes}

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{type(self).__name__}: x has {x.shape[-1]} channels; wanted {self.in_features}")
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rows = x.reshape(-1, self.in_features)
        with torch.autocast(device, enabled=False):
            y = self.sums(rows) if self.kernels == "reference" else self.product(rows, x.dtype)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def sums(self, rows: Tensor) -> Tensor:
        """By plain torch in float32: rows (m, k) → (m, n) of rows' type."""
        tensors, form = self.stored(), FORMATS[self.format]
        none = rows.new_zeros((self.in_features, 0)), rows.new_zeros((self.out_features, 0))
        low_rank = (tensors.get("proj_down", none[0]), tensors.get("proj_up", none[1]))
        transform = self.transform.to(rows.device)
        weight_hat = form.weight_hat(form.load(tensors))
        return reference.w4a4_linear(rows, weight_hat, *low_rank, tensors.get("bias"), transform)

    def product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """By the operator: rows (m, k) → (m, n) of dtype, rows' own or float32."""
        raise NotImplementedError

    def _prepare(self) -> None:
        """Whatever of the tensors depends on the device that they are on."""

    def _apply(self, fn, recurse=True):
        move_buffers(self, fn)
        self._prepare()
        return self

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
        return f"{sizes}, format={self.format}"


class W4A16Linear(StoredLinear):
    """Weights in 4 bits with zero points or without, activations in 16 (svdq.kernels.weight_only)."""

    FEW_TOKENS = weight_only.FEW_TOKENS

    def product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        t = self.stored()
        group = self.in_features // t["w_scales"].shape[1]
        low_rank = (t.get("proj_down"), t.get("proj_up"), t.get("bias"))
        return torch.ops.svdq.w4a16_linear(rows, t["qweight"], t["w_scales"], t.get("w_zeros"), group, *low_rank, dtype)


class W8A16Linear(StoredLinear):
    """Weights in 8 bits, a scale a row, activations in 16 (svdq.kernels.weight_only)."""

    FEW_TOKENS = weight_only.FEW_TOKENS

    def product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        t = self.stored()
        low_rank = (t.get("proj_down"), t.get("proj_up"), t.get("bias"))
        return torch.ops.svdq.w8a16_linear(rows, t["qweight"], t["w_scales"], *low_rank, dtype)


class NF4Linear(StoredLinear):
    """Weights as bitsandbytes stores NF4, activations in 16 bits (svdq.kernels.nf4)."""

    FEW_TOKENS = nf4_kernels.FEW_ROWS

    def _prepare(self) -> None:
        t = self.stored()
        self.offset = nf4.check(t, self.out_features, self.in_features).offset

    def product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        t = self.stored()
        operands = [t[suffix] for suffix in nf4.OPERANDS]
        return torch.ops.svdq.nf4_linear(rows, *operands, self.offset, self.out_features, t.get("bias"))


class NVFP4Linear(StoredLinear):
    """Weights and activations in E2M1 (svdq.kernels.nvfp4)."""

    FEW_TOKENS = nvfp4.FEW_TOKENS

    def _prepare(self) -> None:
        t = self.stored()
        weight = (t["qweight"], t["w_scales"], t["wcscale"], t.get("proj_down"), t.get("proj_up"))
        self.packed = nvfp4.pack(*weight, self.transform.to(t["qweight"].device), t.get("bias"))

    def product(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return nvfp4.linear(rows, self.packed, dtype)


_MODULES = {"w4a16": W4A16Linear, "w8a16": W8A16Linear, "nf4": NF4Linear, "nvfp4": NVFP4Linear}


def stored_linear(layer: Layer, kernels: str = "auto") -> StoredLinear:
    """The module of a layer of another format than w4a4."""
    return _MODULES[layer.format](layer, kernels)


def _buffer(suffix: str) -> str:
    return suffix.replace(".", "_")  # a module's buffers cannot have dots in their names
