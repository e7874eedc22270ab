"""The quantized linear as a torch module, and a whole model made of it.

On a CPU, `W4A4Linear` runs the reference of svdq.kernels.reference: the exact arithmetic of the format, not its speed.
Weights stay packed, two codes a byte; a forward unpacks them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from svdq.errors import CheckpointError
from svdq.grid import INT4_WEIGHT, pack_nibbles, unpack_nibbles
from svdq.kernels.reference import w4a4_linear
from svdq.models import build_quantized_tree, linear_sizes
from svdq.quantized import Layer, open_quantized
from svdq.rounding import ActivationTransform


class W4A4Linear(nn.Module):
    """y = Qa(R(x / smooth)) · weight_hatᵀ + (x · proj_down) · proj_upᵀ + bias, x (..., k) → (..., n)."""

    def __init__(self, layer: Layer):
        super().__init__()
        self.out_features, self.in_features = layer.codes.shape
        self.rank, self.group_size = layer.proj_up.shape[1], layer.group_size
        self.rotation, self.clip = layer.transform.rotation, layer.transform.clip
        self.qweight: Tensor
        self.w_scales: Tensor
        self.proj_down: Tensor
        self.proj_up: Tensor
        self.smooth: Tensor | None
        self.bias: Tensor | None
        self.register_buffer("qweight", pack_nibbles(layer.codes))
        self.register_buffer("w_scales", layer.scales)
        self.register_buffer("proj_down", layer.proj_down)
        self.register_buffer("proj_up", layer.proj_up)
        self.register_buffer("smooth", layer.transform.smooth)
        self.register_buffer("bias", layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        grid = INT4_WEIGHT.with_group(self.group_size)
        weight_hat = grid.decode(unpack_nibbles(self.qweight), self.w_scales)
        transform = ActivationTransform(self.smooth, self.rotation, self.clip)
        return w4a4_linear(x, weight_hat, self.proj_down, self.proj_up, self.bias, transform)

    def _apply(self, fn, recurse=True):
        """Move between devices, never between types: the stored types are the format (model.half() leaves them)."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


def load_quantized(
    model_dir: str | Path,
    file: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A running transformers model whose quantized linears are `W4A4Linear`.

    model_dir  a directory with config.json; the weights come from the file (written without --linears-only)
    dtype      of everything that is not quantized; default float32 on CPUs, config.json's type elsewhere
    Raises     CheckpointError if the file lacks tensors of the model or is of another model.
    """
    device = torch.device(device)
    quantized = open_quantized(file)
    if not quantized.other_tensors:
        raise CheckpointError(f"{file}: holds the linears only (--linears-only); wanted a file of the whole model")
    tree, keys, modules = build_quantized_tree(
        Path(model_dir), quantized.other_tensors, quantized.layers, trust_remote_code
    )
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else getattr(tree.config, "dtype", None) or torch.float16
    for name, path in modules.items():
        parent, _, leaf = path.rpartition(".")
        n, k, *_ = quantized.layers[name]
        wanted = linear_sizes(tree.get_submodule(path))
        if (n, k) != wanted:
            raise CheckpointError(f"{file}: {name} is {n} x {k}, config.json asks for {wanted[0]} x {wanted[1]}")
        setattr(tree.get_submodule(parent), leaf, W4A4Linear(quantized.layer(name)).to(device))
    loaded: dict[str, nn.Parameter] = {}
    for path, owner in tree.named_modules():
        if isinstance(owner, W4A4Linear):
            continue
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{leaf}" if path else leaf
            key = keys.get(name)
            if key is None:
                raise CheckpointError(f"{file}: holds no tensor for {name}")
            stored = quantized.file.tensors[key].shape
            if stored != tuple(parameter.shape):
                raise CheckpointError(
                    f"{file}: {key} has shape {list(stored)}, config.json asks for {list(parameter.shape)}"
                )
            if key not in loaded:
                loaded[key] = nn.Parameter(quantized.file.read(key).to(device, dtype), requires_grad=False)
            owner._parameters[leaf] = loaded[key]
        for leaf, buffer in owner._buffers.items():
            name = f"{path}.{leaf}" if path else leaf
            if buffer is not None:
                value = quantized.file.read(keys[name]).to(buffer.dtype) if name in keys else buffer
                owner._buffers[leaf] = value.to(device)
    if (Path(model_dir) / "generation_config.json").is_file():
        from transformers import GenerationConfig

        generation = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
        tree.generation_config = generation  # type: ignore[assignment]
    tree.config.use_cache = True  # type: ignore[union-attr]
    return tree.eval()
