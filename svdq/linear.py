"""The quantized linear as a torch module, and a whole model made of it.

Weights are held in the order that the kernels read, repacked once on the device that they are on. A forward is two
operators of svdq.kernels.ops: CUDA kernels for 16-bit activations on a GPU, else the reference in plain torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from svdq.errors import CheckpointError, ConfigError
from svdq.export import pack_layers, packed_sizes
from svdq.kernels import layout, reference
from svdq.kernels import ops as _ops  # noqa: F401  registers torch.ops.svdq
from svdq.kernels.launch import require
from svdq.models import build_quantized_tree, linear_sizes
from svdq.quantized import Layer, open_quantized

KERNELS = ("auto", "reference")


class _Packed(nn.Module):
    """Linears that share an input, as one packed linear: their columns side by side, each padded to 128.

    parts    their layers; they must have one smoothing, rotation and clip, or ConfigError says which differ
    kernels  'auto': CUDA kernels for float16 and bfloat16 on a GPU; 'reference': plain torch everywhere
    """

    def __init__(self, parts: list[Layer], kernels: str = "auto"):
        super().__init__()
        if kernels not in KERNELS:
            raise ConfigError(f"kernels={kernels!r}; wanted {' or '.join(KERNELS)}")
        sizes, transform = packed_sizes(parts), parts[0].transform
        padded = sizes.padded()
        packed = pack_layers(parts, torch.float16)
        for name in ("wscales", "lora_up", "lora_down"):
            if not torch.isfinite(packed[name]).all():
                raise CheckpointError(f"{parts[0].name}: a scale or projection exceeds float16")
        down = packed["lora_down"]
        if padded["r"]:
            down = layout.unpack_matrix("lora_down", down, (padded["k"], padded["r"]))
            down = layout.pack_matrix("down", down)
        biased = any(part.bias is not None for part in parts)
        self.kernels = kernels
        self.in_features = sizes.k
        self.columns = [part.n for part in sizes.parts]
        self.rotation, self.clip = transform.rotation, transform.clip
        self.qweight: Tensor
        self.wscales: Tensor
        self.down: Tensor
        self.up: Tensor
        self.inv_smooth: Tensor | None
        self.packed_bias: Tensor | None
        self.register_buffer("qweight", packed["qweight"])
        self.register_buffer("wscales", packed["wscales"])
        self.register_buffer("down", down)
        self.register_buffer("up", packed["lora_up"])
        self.register_buffer("inv_smooth", None if transform.smooth is None else 1.0 / transform.smooth)
        self.register_buffer("packed_bias", _packed_bias(parts) if biased else None)

    def run(self, x: Tensor, row_factor: Tensor | None, norm_weight: Tensor | None, n: int) -> Tensor:
        """x (..., k) → (..., n), n counted in packed columns. With a row factor, x is RMS-normalized on the way in."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{type(self).__name__}: x has {x.shape[-1]} channels; wanted {self.in_features}")
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rows = x.reshape(-1, self.in_features)
        with torch.autocast(device, enabled=False):  # the reference's float32 products are meant as they stand
            activation = (rows, self.down, self.inv_smooth, self.rotation, self.clip, row_factor, norm_weight)
            if self.kernels == "reference":
                codes, scales, t = reference.quantize_lora_down(*activation, shares=1)
                gemm = reference.w4a4_gemm_lora
            else:
                codes, scales, t = torch.ops.svdq.quantize_lora_down(*activation)
                gemm = torch.ops.svdq.w4a4_gemm_lora
            y = gemm(codes, scales, t, self.qweight, self.wscales, self.up, self.packed_bias, len(rows), n, x.dtype)
        return y.view(*x.shape[:-1], n)

    def _apply(self, fn, recurse=True):
        """Move between devices, never between types: the stored types are the format (model.half() leaves them)."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        return self


def _packed_bias(parts: list[Layer]) -> Tensor:
    """float32 holds every source type's bias exactly."""
    biases = []
    for part in parts:
        n = part.codes.shape[0]
        bias = part.scales.new_zeros(n, dtype=torch.float32) if part.bias is None else part.bias.float()
        biases.append(layout.pad(bias, layout.round_up(n, layout.TILE_N)))
    return layout.pack_matrix("channel", torch.cat(biases))


class W4A4Linear(_Packed):
    """y = Qa(R(x / smooth)) · weight_hatᵀ + (x · proj_down) · proj_upᵀ + bias, x (..., k) → (..., n)."""

    def __init__(self, layer: Layer, kernels: str = "auto"):
        super().__init__([layer], kernels)
        self.out_features, self.rank = layer.codes.shape[0], layer.proj_up.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, None, None, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"


class W4A4LinearGroup(_Packed):
    """Siblings that read one input (q, k, v; gate, up): it is quantized once, and one GEMM computes all of them."""

    def forward(self, x: Tensor, row_factor: Tensor | None = None, norm_weight: Tensor | None = None) -> list[Tensor]:
        """x (..., k) → one (..., n) a part, views of one tensor. See svdq.kernels.ops for the normalization."""
        starts, end = [], 0
        for n in self.columns:
            starts.append(end)
            end += layout.round_up(n, layout.TILE_N)
        y = self.run(x, row_factor, norm_weight, end)
        return [y[..., start : start + n] for start, n in zip(starts, self.columns, strict=True)]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.columns}"


def load_quantized(
    model_dir: str | Path,
    file: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str = "auto",
    fuse: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A running transformers model whose quantized linears are `W4A4Linear`.

    model_dir  a directory with config.json; the weights come from the file (written without --linears-only)
    dtype      of everything that is not quantized; default float32 on CPUs, config.json's type elsewhere
    kernels    'auto': CUDA kernels for float16 and bfloat16 on a GPU; 'reference': plain torch everywhere
    fuse       replace the decoder layers of Llama, Qwen2 and Qwen3 by `svdq.decoder.W4A4DecoderBlock`; the model's
               attribute `svdq_fusion` says which, and why another was left
    Raises     KernelError if the kernels are wanted and cannot run on this device.
               CheckpointError if the file lacks tensors of the model or is of another model.
               ConfigError if fuse is set and no decoder layer can be replaced.
    """
    device = torch.device(device)
    if device.type == "cuda" and kernels != "reference":
        require(device)
    quantized = open_quantized(file)
    if not quantized.other_tensors:
        raise CheckpointError(f"{file}: holds the linears only (--linears-only); wanted a file of the whole model")
    tree, keys, modules = build_quantized_tree(
        Path(model_dir), quantized.other_tensors, quantized.layers, trust_remote_code
    )
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else getattr(tree.config, "dtype", None) or torch.float16
    for name, path in modules.items():
        n, k, *_ = quantized.layers[name]
        wanted = linear_sizes(tree.get_submodule(path))
        if (n, k) != wanted:
            raise CheckpointError(f"{file}: {name} is {n} x {k}, config.json asks for {wanted[0]} x {wanted[1]}")
    in_blocks: set[str] = set()
    if fuse:
        from svdq.decoder import fuse_layers  # needs transformers at import, and this module

        names = {path: name for name, path in modules.items()}
        fusion = fuse_layers(tree, names, lambda name: quantized.layer(name).to(device), kernels)
        in_blocks, tree.svdq_fusion = fusion.linears, fusion  # type: ignore[assignment]
    for name, path in modules.items():
        if path not in in_blocks:
            parent, _, leaf = path.rpartition(".")
            setattr(tree.get_submodule(parent), leaf, W4A4Linear(quantized.layer(name).to(device), kernels))
    loaded: dict[str, nn.Parameter] = {}
    for path, owner in tree.named_modules():
        if isinstance(owner, _Packed):
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
