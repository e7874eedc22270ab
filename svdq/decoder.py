"""Decoder layers of Llama, Qwen2 and Qwen3 as one module that runs the kernels end to end.

The layer of transformers normalizes, quantizes and multiplies for every linear by itself. Here the RMSNorm is done by
the activation quantizer on its way in, q, k and v (and gate and up) read one quantized input and are one GEMM, and
the head norms and the rotary embedding of q and k are one kernel:

    inv_rms → quantize (with norm) → GEMM q, k, v → qknorm_rope → cache, attention → quantize → GEMM o → add
    inv_rms → quantize (with norm) → GEMM gate, up → act(gate) · up → quantize → GEMM down → add

Attention, cache and masks stay transformers' own. A block is an instance of the class that it replaces, and so is its
attention: transformers records hidden states and attentions by class, and reads attributes off both, which are taken
over. Rejected: patching the forward of transformers' modules, which hides from a reader of the tree what runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from svdq.errors import ConfigError
from svdq.export import packed_sizes
from svdq.kernels import reference
from svdq.linear import W4A4Linear, W4A4LinearGroup
from svdq.models import linear_sizes
from svdq.quantized import Layer

FAMILIES = ("llama", "qwen2", "qwen3")  # transformers.models.<family>
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
LINEARS = (*QKV, "self_attn.o_proj", *GATE_UP, "mlp.down_proj")
_CACHE_TAKES_POSITIONS = "cache_kwargs" in inspect.signature(Cache.update).parameters  # the first versions of 5.x


def _operators(kernels: str) -> Any:
    return reference if kernels == "reference" else torch.ops.svdq


def _adopt(module: nn.Module, source: nn.Module) -> None:
    """Start a module with the plain attributes of another: whatever transformers set in its class's `__init__`,
    which is not run (it would allocate the weights that are replaced)."""
    nn.Module.__init__(module)
    module.__dict__.update({name: value for name, value in vars(source).items() if not name.startswith("_")})


@functools.cache
def _replacing(kind: Any, replaced: Any) -> Any:
    """A class that is both: one for each replaced class, so that all blocks of a model share their compiled code."""
    return type(f"W4A4{replaced.__name__}", (kind, replaced), {})


class FusedNorm(nn.Module):
    """The weight of an RMSNorm that a kernel applies. It is never called, so hooks on it are refused, not ignored."""

    weight: nn.Parameter
    epsilon: float

    def __init__(self, norm: Any):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def inputs(self, x: Tensor, kernels: str) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., k) → what a W4A4LinearGroup takes to normalize it: x, row factor (rows,) float32, weight (k,)."""
        if torch.is_autocast_enabled(x.device.type):  # before the factor: x and the weight must be of one type
            x = x.to(torch.get_autocast_dtype(x.device.type))
        factor = _operators(kernels).inv_rms(x.reshape(-1, x.shape[-1]), self.epsilon)
        return x, factor, self.weight.to(x.dtype)

    def register_forward_hook(self, *args, **kwargs):
        raise ConfigError("a norm of a fused decoder block runs inside a kernel, no hook sees it; load with fuse=False")

    register_forward_pre_hook = register_forward_hook

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.epsilon}"


class W4A4Attention(nn.Module):
    """The attention of a block; its forward takes what `FusedNorm.inputs` gives. See W4A4DecoderBlock."""

    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float

    def __init__(self, attention: Any, layers: dict[str, Layer], *path: str):
        _adopt(self, attention)
        self.qkv = W4A4LinearGroup([layers[suffix] for suffix in QKV], *path)
        self.o_proj = W4A4Linear(layers["self_attn.o_proj"], *path)
        self.q_norm, self.k_norm = (
            FusedNorm(norm) if (norm := getattr(attention, name, None)) is not None else None
            for name in ("q_norm", "k_norm")
        )
        # Llama's module does not pass a window on, the others pass theirs even where it is None
        self.window = {"sliding_window": attention.sliding_window} if hasattr(attention, "sliding_window") else {}
        self.eager_attention = sys.modules[type(attention).__module__].eager_attention_forward

    def forward(
        self,
        x: Tensor,
        row_factor: Tensor,
        norm_weight: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Cache | None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """x (batch, tokens, k), not normalized → the same shape, and the attention weights where they are computed."""
        batch, tokens = x.shape[:2]
        q, k, v = (part.view(batch, tokens, -1, self.head_dim) for part in self.qkv(x, row_factor, norm_weight))
        cosine, sine = position_embeddings
        if cosine.shape[1:] != (tokens, self.head_dim) or cosine.shape[0] not in (1, batch):
            raise ConfigError(
                f"position_embeddings: found {list(cosine.shape)}; "
                f"wanted [1 or {batch}, {tokens}, {self.head_dim}], a row for each token"
            )
        q, k = _operators(self.qkv.kernels).qknorm_rope(
            q.flatten(0, 1),
            k.flatten(0, 1),
            None if self.q_norm is None else self.q_norm.weight.to(q.dtype),
            None if self.k_norm is None else self.k_norm.weight.to(q.dtype),
            cosine.flatten(0, 1),
            sine.flatten(0, 1),
            0.0 if self.q_norm is None else self.q_norm.epsilon,
        )
        q, k, v = (part.view(batch, tokens, -1, self.head_dim).transpose(1, 2) for part in (q, k, v))
        positions = kwargs.pop("cache_position", None)
        if cache is not None and _CACHE_TAKES_POSITIONS:
            options = {"sin": sine, "cos": cosine, "cache_position": positions}
            k, v = cache.update(k, v, self.layer_idx, options)
        elif cache is not None:  # a paged cache writes into kwargs what its attention reads
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attend = _attention_interface(self.config._attn_implementation, self.eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        attended, weights = attend(
            self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **self.window, **kwargs
        )
        return self.o_proj(attended.reshape(batch, tokens, -1)), weights


def _attention_interface(name: str, eager: Callable) -> Callable:
    if hasattr(ALL_ATTENTION_FUNCTIONS, "get_interface"):
        return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]  # transformers 5.0


class W4A4MLP(nn.Module):
    """down(act(gate) · up); its forward takes what `FusedNorm.inputs` gives."""

    def __init__(self, mlp: Any, layers: dict[str, Layer], *path: str):
        super().__init__()
        self.gate_up = W4A4LinearGroup([layers[suffix] for suffix in GATE_UP], *path)
        self.down_proj = W4A4Linear(layers["mlp.down_proj"], *path)
        self.act_fn = mlp.act_fn

    def forward(self, x: Tensor, row_factor: Tensor, norm_weight: Tensor) -> Tensor:
        gate, up = self.gate_up(x, row_factor, norm_weight)
        return self.down_proj(self.act_fn(gate) * up)


class W4A4DecoderBlock(nn.Module):
    """A decoder layer of FAMILIES on quantized linears; made by `decoder_block`, called as the layer it replaces.

    What is computed is what the layer would with W4A4Linear modules, to float32 rounding; in 16 bits q and k are
    rounded once where transformers rounds after each step of the norm and the rotary embedding. For inference: the
    operators have no gradient. Hooks see the true outputs of the block, `self_attn` and `mlp`; the inputs of the last
    two are not normalized. Norms refuse hooks.
    """

    def __init__(self, layer: Any, layers: dict[str, Layer], kernels: str, activations: str):
        _adopt(self, layer)
        self.kernels = kernels
        attention: Any = type(layer.self_attn)
        self.self_attn = _replacing(W4A4Attention, attention)(layer.self_attn, layers, kernels, activations)
        self.mlp = W4A4MLP(layer.mlp, layers, kernels, activations)
        self.input_layernorm = FusedNorm(layer.input_layernorm)
        self.post_attention_layernorm = FusedNorm(layer.post_attention_layernorm)
        # Older models say past_key_values, and may pass a paged cache through to the attention function as `cache`
        self.takes_cache = "cache" in inspect.signature(type(layer).forward).parameters

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs,
    ) -> Tensor:
        """hidden_states (batch, tokens, k) → the same shape. The cache may also come as `cache`, where the layer's
        does. ConfigError if the rotary tables do not have a row for each token."""
        if self.takes_cache and (cache := kwargs.pop("cache", None)) is not None:
            past_key_values = cache
        attended, _ = self.self_attn(
            *self.input_layernorm.inputs(hidden_states, self.kernels),
            attention_mask,
            position_embeddings,
            past_key_values,
            position_ids=position_ids,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(*self.post_attention_layernorm.inputs(hidden_states, self.kernels))


def is_fusable(module: nn.Module) -> bool:
    kind = type(module)
    return any(
        (kind.__module__, kind.__name__)
        == (f"transformers.models.{family}.modeling_{family}", f"{family.capitalize()}DecoderLayer")
        for family in FAMILIES
    )


def decoder_block(
    hf_layer: nn.Module, layers: dict[str, Layer], kernels: str = "auto", activations: str = "int4"
) -> W4A4DecoderBlock:
    """A block with hf_layer's norms and configuration, and quantized linears in place of its own.

    hf_layer  a decoder layer of FAMILIES; not changed, its norms' parameters are shared. Its linears are not read,
              they may be on the meta device
    layers    by suffix, the seven of LINEARS; on the device where the block shall run
    kernels, activations  see svdq.load_quantized
    Raises    ConfigError for another class, missing or wrong-sized layers, and siblings with different smoothing,
              rotation or clip.
    """
    if not is_fusable(hf_layer):
        raise ConfigError(f"found a {type(hf_layer).__name__}; wanted a decoder layer of {', '.join(FAMILIES)}")
    if set(layers) != set(LINEARS):
        raise ConfigError(f"found layers {', '.join(sorted(layers))}; wanted {', '.join(LINEARS)}")
    for suffix, layer in layers.items():
        wanted = linear_sizes(hf_layer.get_submodule(suffix))
        if tuple(layer.codes.shape) != wanted:
            n, k = layer.codes.shape
            raise ConfigError(
                f"{layer.name or suffix}: found {n} x {k}, the layer's {suffix} is {wanted[0]} x {wanted[1]}"
            )
    kind: Any = type(hf_layer)
    return _replacing(W4A4DecoderBlock, kind)(hf_layer, layers, kernels, activations).train(hf_layer.training)


@dataclass(frozen=True)
class Fusion:
    """What fuse=True did: paths of the replaced decoder layers; path → reason of those left with single linears."""

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def linears(self) -> set[str]:
        """Module paths of the linears that blocks now hold."""
        return {f"{path}.{suffix}" for path in self.replaced for suffix in LINEARS}


def fuse_layers(
    tree: nn.Module, names: dict[str, str], read: Callable[[str], Layer], kernels: str, activations: str = "int4"
) -> Fusion:
    """Replace every decoder layer of a tree that can be, in place.

    names   module path → name of the quantized linears; read(name) gives one, on the device where it shall run
    Raises  ConfigError if no layer could be replaced. A layer that is left is named in a warning.
    """
    found = [(path, module) for path, module in tree.named_modules() if is_fusable(module)]
    fusion = Fusion()
    for path, module in found:
        if absent := [suffix for suffix in LINEARS if f"{path}.{suffix}" not in names]:
            fusion.left[path] = f"{', '.join(absent)} not quantized"
            continue
        layers = {suffix: read(names[f"{path}.{suffix}"]) for suffix in LINEARS}
        try:
            for siblings in (QKV, GATE_UP):
                packed_sizes([layers[suffix] for suffix in siblings])
        except ConfigError as error:
            fusion.left[path] = str(error).removeprefix("--fuse: ")
            continue
        parent, _, leaf = path.rpartition(".")
        setattr(tree.get_submodule(parent), leaf, decoder_block(module, layers, kernels, activations))
        fusion.replaced.append(path)
    reasons = "; ".join(f"{path}: {reason}" for path, reason in list(fusion.left.items())[:2])
    reasons += f"; and {len(fusion.left) - 2} more" if len(fusion.left) > 2 else ""
    if not fusion.replaced:
        raise ConfigError(
            f"fuse=True: found {reasons or f'no decoder layer in {type(tree).__name__}'}; "
            f"wanted a decoder layer of {', '.join(FAMILIES)} with its seven linears quantized; load with fuse=False"
        )
    if reasons:
        warnings.warn(f"fuse=True left {len(fusion.left)} of {len(found)} decoder layers: {reasons}", stacklevel=3)
    return fusion
