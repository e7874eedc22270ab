"""The quantized linear as a torch module, and a whole model made of it. Other formats than W4A4: svdq.format_linears.

Weights are held in the order that the kernels read, repacked once on the device that they are on. A forward is two
operators of svdq.kernels.ops: CUDA kernels for 16-bit activations on a GPU, else the reference in plain torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from svdq.errors import CheckpointError, ConfigError
from svdq.export import pack_layers, packed_sizes
from svdq.format_linears import StoredLinear, move_buffers, stored_linear
from svdq.kernels import hopper, layout, ops, reference
from svdq.kernels.launch import require
from svdq.models import build_quantized_tree, linear_sizes
from svdq.quantized import ACTIVATIONS, Layer, open_quantized

KERNELS = ("auto", "reference")


def check_path(kernels: str, activations: str) -> None:
    """Raises ConfigError for a name that is none of KERNELS, ACTIVATIONS."""
    for option, value, names in (("kernels", kernels, KERNELS), ("activations", activations, ACTIVATIONS)):
        if value not in names:
            raise ConfigError(f"{option}={value!r}; wanted {' or '.join(names)}")


class _Packed(nn.Module):
    """Linears that share an input, as one packed linear: their columns side by side, each padded to 128.

    parts    their layers; they must have one smoothing, rotation and clip, or ConfigError says which differ
    kernels  'auto': CUDA kernels for float16 and bfloat16 on a GPU; 'reference': plain torch everywhere
    activations  'int4': W4A4; 'fp8': W4A8, on a GPU for Hopper only
    """

    def __init__(self, parts: list[Layer], kernels: str = "auto", activations: str = "int4"):
        super().__init__()
        check_path(kernels, activations)
        if activations != "fp8" and any(part.transform.dtype == "fp8" for part in parts):
            raise ConfigError(f"{parts[0].name}: a layer with 8-bit activations, activations={activations!r}")
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
        self.kernels, self.activations = kernels, activations
        self.in_features = sizes.k
        self.columns = [part.n for part in sizes.parts]
        self.rotation, self.clip = transform.rotation, transform.clip
        self.qweight: Tensor
        self.wscales: Tensor
        self.down: Tensor
        self.up: Tensor
        self.inv_smooth: Tensor | None
        self.packed_bias: Tensor | None
        self.first_rank: Tensor | None
        self.register_buffer("qweight", packed["qweight"])
        self.register_buffer("wscales", packed["wscales"])
        self.register_buffer("down", down)
        up, first_rank = _own_ranks(packed["lora_up"], parts)
        self.register_buffer("up", up)
        self.register_buffer("first_rank", first_rank)
        self.register_buffer("inv_smooth", None if transform.smooth is None else 1.0 / transform.smooth)
        self.register_buffer("packed_bias", _packed_bias(parts) if biased else None)
        self.on_hopper = hopper.runs_on(self.qweight.device)

    def run(self, x: Tensor, row_factor: Tensor | None, norm_weight: Tensor | None, n: int) -> Tensor:
        """x (..., k) → (..., n), n counted in packed columns. With a row factor, x is RMS-normalized on the way in."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{type(self).__name__}: x has {x.shape[-1]} channels; wanted {self.in_features}")
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        rows = x.reshape(-1, self.in_features)
        with torch.autocast(device, enabled=False):  # the reference's float32 products are meant as they stand
            y = self.product(self.quantize(rows, row_factor, norm_weight), len(rows), n, x.dtype)
        return y.view(*x.shape[:-1], n)

    def quantize(
        self, rows: Tensor, row_factor: Tensor | None = None, norm_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """rows (m, k) → codes, scales, t, in the order of the product that is next: svdq.kernels.ops or hopper's."""
        activation = (rows, self.down, self.inv_smooth, self.rotation, self.clip, row_factor, norm_weight)
        values = self.activations == "fp8"
        if self.kernels == "reference" and values:
            padded = layout.round_up(len(rows), layout.PANEL)
            return reference.quantize_lora_down_e4m3(*activation, values, 1, padded)
        if self.kernels == "reference":
            return reference.quantize_lora_down(*activation, shares=1)
        if values or (self.on_hopper and len(rows) > ops.FEW_TOKENS):
            return torch.ops.svdq.quantize_lora_down_e4m3(*activation, values)
        return torch.ops.svdq.quantize_lora_down(*activation)

    def product(self, operands: tuple[Tensor, Tensor, Tensor], m: int, n: int, dtype: torch.dtype) -> Tensor:
        """What `quantize` gives for m rows → y (m, n)."""
        family = reference if self.kernels == "reference" else torch.ops.svdq
        gemm = family.w4_gemm_lora_e4m3 if operands[0].dtype == torch.uint8 else family.w4a4_gemm_lora
        weight = (self.qweight, self.wscales, self.up, self.packed_bias)
        return gemm(*operands, *weight, m, n, dtype, self.first_rank)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.on_hopper = hopper.runs_on(self.qweight.device)  # not where it was saved

    def _apply(self, fn, recurse=True):
        move_buffers(self, fn)
        self.on_hopper = hopper.runs_on(self.qweight.device)
        return self


def _own_ranks(up: Tensor, parts: list[Layer]) -> tuple[Tensor, Tensor | None]:
    """Of linears packed as one, whose `up` has zeros where one's columns would meet another's part of t: without them.

    Returns  `up` and None, or `up` of one part's rank and the `first_rank` of svdq.kernels.ops.
    """
    rank = parts[0].proj_up.shape[1]
    if len(parts) == 1 or rank % layout.RANK_TILE or not rank or any(part.proj_up.shape[1] != rank for part in parts):
        return up, None
    tiles = [layout.round_up(part.codes.shape[0], layout.TILE_N) // layout.TILE_N for part in parts]
    first_rank = torch.arange(len(parts), dtype=torch.int32).repeat_interleave(torch.tensor(tiles)) * rank
    whole = layout.unpack_matrix("lora_up", up, tuple(up.shape)).view(-1, layout.TILE_N, up.shape[1])
    own = [tile[:, first : first + rank] for tile, first in zip(whole, first_rank.tolist(), strict=True)]
    return layout.pack_matrix("lora_up", torch.cat(own)), first_rank.to(up.device)


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

    def __init__(self, layer: Layer, kernels: str = "auto", activations: str = "int4"):
        super().__init__([layer], kernels, activations)
        self.out_features, self.rank = layer.codes.shape[0], layer.proj_up.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, None, None, self.out_features)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}"
        return f"{sizes}, activations={self.activations}"


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
        return f"in_features={self.in_features}, out_features={self.columns}, activations={self.activations}"


def linear_of(layer: Layer, kernels: str = "auto", activations: str = "int4") -> W4A4Linear | StoredLinear:
    """The module of a layer, by its format. Raises ConfigError for 8-bit activations of another than w4a4."""
    if layer.format == "w4a4":
        return W4A4Linear(layer, kernels, activations)
    check_path(kernels, activations)
    return stored_linear(layer, kernels)


def path_in_words(device: torch.device, dtype: torch.dtype, kernels: str, activations: str, form: str = "w4a4") -> str:
    """How linears are computed there, in words."""
    if form != "w4a4":
        plain = device.type != "cuda" or kernels == "reference" or dtype not in ops.SCALAR
        return f"{form.upper()}, {'in plain torch' if plain else 'CUDA kernels'} on {device}"
    what = "W4A8: activations in e4m3" if activations == "fp8" else "W4A4"
    if device.type != "cuda" or kernels == "reference" or dtype not in ops.SCALAR:
        return f"{what}, in plain torch on {device}"
    if hopper.runs_on(device):
        few = "" if activations == "fp8" else f"; up to {ops.FEW_TOKENS} tokens 8-bit integer ones"
        return f"{what}, 8-bit floating-point tensor cores{few}"
    return f"{what}, integer tensor cores"


def load_quantized(
    model_dir: str | Path,
    file: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    kernels: str = "auto",
    activations: str = "int4",
    fuse: bool = False,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A running transformers or diffusers model whose quantized linears are `W4A4Linear`, or the module of the file's
    format.

    model_dir  a directory with config.json, of a pipeline its transformer's; the weights come from the file (written
               without --linears-only)
    dtype      of everything that is not quantized; default float32 on CPUs, elsewhere config.json's type or, where that
               names none, the 16-bit type of the file's other tensors
    kernels    'auto': CUDA kernels for float16 and bfloat16 on a GPU; 'reference': plain torch everywhere
    activations  'int4': W4A4, what the file was made for. 'fp8': W4A8, activations in 8 bits with one scale a token,
               from the same file: closer to the original; on a GPU for Hopper only, faster there from some thousand
               tokens on and several times slower for a few
    fuse       replace the decoder layers of Llama, Qwen2 and Qwen3 by `svdq.decoder.W4A4DecoderBlock`; the model's
               attribute `svdq_fusion` says which, and why another was left
    Returns    the model; its attribute `svdq_path` says how its linears were to be computed when it was loaded
    Raises     KernelError if the kernels are wanted and cannot run on this device.
               CheckpointError if the file lacks tensors of the model or is of another model.
               ConfigError if fuse is set and no decoder layer can be replaced.
    """
    device = torch.device(device)
    check_path(kernels, activations)
    if device.type == "cuda" and kernels != "reference":
        require(device)
        if activations == "fp8":
            hopper.require(device)
    quantized = open_quantized(file, activations)
    if fuse and quantized.format.name != "w4a4":
        raise ConfigError(f"fuse: knows w4a4 alone, {file} is {quantized.format.name}")
    if not quantized.other_tensors:
        raise CheckpointError(f"{file}: holds the linears only (--linears-only); wanted a file of the whole model")
    tree, keys, modules = build_quantized_tree(
        Path(model_dir), quantized.other_tensors, quantized.layers, trust_remote_code
    )
    if dtype is None:
        kinds = {quantized.file.tensors[name].dtype for name in quantized.other_tensors}
        own = torch.bfloat16 if torch.bfloat16 in kinds else torch.float16
        dtype = torch.float32 if device.type == "cpu" else getattr(tree.config, "dtype", None) or own
    for name, path in modules.items():
        n, k, *_ = quantized.layers[name]
        wanted = linear_sizes(tree.get_submodule(path))
        if (n, k) != wanted:
            raise CheckpointError(f"{file}: {name} is {n} x {k}, config.json asks for {wanted[0]} x {wanted[1]}")
    in_blocks: set[str] = set()
    if fuse:
        from svdq.decoder import fuse_layers  # needs transformers at import, and this module

        names = {path: name for name, path in modules.items()}
        fusion = fuse_layers(tree, names, lambda name: quantized.layer(name).to(device), kernels, activations)
        in_blocks, tree.svdq_fusion = fusion.linears, fusion  # type: ignore[assignment]
    for name, path in modules.items():
        if path not in in_blocks:
            parent, _, leaf = path.rpartition(".")
            module = linear_of(quantized.layer(name).to(device), kernels, activations)
            setattr(tree.get_submodule(parent), leaf, module)
    loaded: dict[str, nn.Parameter] = {}
    for path, owner in tree.named_modules():
        if isinstance(owner, (_Packed, StoredLinear)):
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
    if hasattr(tree.config, "use_cache"):  # diffusers' configurations have none, and are frozen
        tree.config.use_cache = True  # type: ignore[union-attr]
    form = quantized.format.name
    tree.svdq_path = path_in_words(device, dtype, kernels, activations, form)  # type: ignore[assignment]
    return tree.eval()
