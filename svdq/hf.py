"""svdq's directories in transformers: `from_pretrained`, `save_pretrained` and the rest through its own registry.

Before loading, every quantized linear becomes empty buffers under the checkpoint's own names, of the types and shapes
that the shards' headers state. So transformers reads them, counts them for `device_map` and puts them where they belong
like any tensor of the model. After loading, each is packed on the device that it lies on and a W4A4Linear takes its
place. On saving, the packed order is undone: the same tensors, bit for bit. Importing this module registers it.

Rejected: transformers' weight converters, which pack tensor by tensor under way but whose interface differs between the
versions that this must work with (5.17 on); modules that pack themselves at their first forward, which a shared or
compiled model may run at once in several threads.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from svdq import schema
from svdq.directory import join_files
from svdq.errors import CheckpointError, ConfigError
from svdq.export import packed_sizes
from svdq.grid import pack_nibbles
from svdq.kernels import hopper, layout
from svdq.kernels.launch import require
from svdq.linear import W4A4Linear, check_path, linear_of, path_in_words
from svdq.models import is_linear, linear_sizes, stored_name
from svdq.quantized import Layer, QuantizedFile

_DEFAULTS = ("auto", "int4")  # kernels, activations
_LOADING = (
    "LOADING_ATTRIBUTES_CONFIG_TYPES"  # the config classes whose options `from_pretrained` merges into the stored
)
_NAMED = (schema.LAYERS, schema.REPORT)  # metadata whose keys are names of linears


class SvdqConfig(QuantizationConfigMixin):
    """What config.json says of a checkpoint, with how to run it, which is not stored.

    kernels, activations  as `svdq.load_quantized` takes them
    stored                the `quantization_config` of the file
    Raises ConfigError for an unknown kernels or activations.
    """

    def __init__(self, kernels: str = "auto", activations: str = "int4", **stored: Any):
        check_path(kernels, activations)
        if (kernels, activations) != _DEFAULTS and not hasattr(auto, _LOADING):
            raise ConfigError("SvdqConfig: this transformers would ignore its options; wanted 5.17 or newer")
        self.kernels, self.activations, self.stored = kernels, activations, stored
        self.quant_method = schema.QUANT_METHOD  # type: ignore[assignment]  # transformers lists its own methods only

    def to_dict(self) -> dict[str, Any]:
        return {**self.stored, "quant_method": schema.QUANT_METHOD}

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config given to `from_pretrained` may change of the stored one."""
        return {"kernels": self.kernels, "activations": self.activations}


class _Unpacked(nn.Module):
    """A quantized linear's tensors as the checkpoint has them, until they are loaded."""

    def __init__(self, name: str, quantized: QuantizedFile):
        super().__init__()
        for suffix in quantized.suffixes(name):
            info = quantized.file.tensors[f"{name}.{suffix}"]
            self.register_buffer(suffix, torch.empty(info.shape, dtype=info.dtype, device="meta"))
        # for models whose _init_weights look into their linears, as transformers calls it whatever was loaded
        self.weight = torch.empty(0)
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]
        if "bias" not in self._buffers:
            self.bias = None


class LoadedLinear(W4A4Linear):
    """A W4A4Linear that can be written out as it was read."""

    def __init__(self, layer: Layer, suffixes: list[str], kernels: str, activations: str):
        super().__init__(layer, kernels, activations)
        self.suffixes, self.sizes = suffixes, packed_sizes([layer])
        self.bias_dtype = None if layer.bias is None else layer.bias.dtype
        # what divides is kept: its reciprocal, with which the kernels multiply, does not always lead back to it
        self.smooth = None if layer.transform.smooth is None else layer.transform.smooth.cpu()

    def stored(self) -> dict[str, Tensor]:
        """The tensors of `schema.CANONICAL`, on the CPU."""
        n, k, rank, padded = self.out_features, self.in_features, self.rank, self.sizes.padded()
        down, up = self.down.cpu(), self.up.cpu()
        if rank:
            down = layout.unpack_matrix("down", down, (padded["k"], padded["r"]))
            up = layout.unpack_matrix("lora_up", up, (padded["n"], padded["r"]))
        groups = layout.unpack_matrix("wscales", self.wscales.cpu(), (padded["n"], padded["k"] // layout.TILE_K))
        tensors = {
            "qweight": pack_nibbles(layout.unpack_codes(self.qweight.cpu())[:n, :k].contiguous()),
            "w_scales": groups[:n, : k // layout.TILE_K : self.sizes.group_size // layout.TILE_K],
            "proj_down": down[:k, :rank],
            "proj_up": up[:n, :rank],
            "act_clip": torch.tensor(self.clip, dtype=torch.float32),
        }
        if self.smooth is not None:
            tensors["smooth"] = self.smooth
        if self.bias_dtype is not None and self.packed_bias is not None:
            bias = layout.unpack_matrix("channel", self.packed_bias.cpu(), (padded["n"],))
            tensors["bias"] = bias[:n].to(self.bias_dtype)
        return {suffix: tensors[suffix].contiguous() for suffix in self.suffixes}


class SvdqQuantizer(HfQuantizer):
    """The steps that transformers asks of a quantizer; see the module."""

    requires_calibration = True  # so that a model that is not quantized is refused: svdq quantize does that
    quantization_config: SvdqConfig

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        if not checkpoint_files:
            raise CheckpointError("svdq: a state dict in place of files; wanted a directory of svdq quantize")
        quantized = QuantizedFile(join_files(checkpoint_files), self.quantization_config.activations)
        if quantized.kind != "canonical":
            raise CheckpointError(f"{quantized.file.path}: packed; wanted the directory of svdq quantize")
        self._quantized: QuantizedFile | None = quantized
        self._metadata = dict(quantized.file.metadata)
        self._places = _places(model, quantized)
        for path, name in self._places.items():
            (n, k, *_), wanted = quantized.layers[name], linear_sizes(model.get_submodule(path))
            if (n, k) != wanted:
                raise CheckpointError(
                    f"{quantized.file.path}: {name} is {n} x {k}, config.json asks for {wanted[0]} x {wanted[1]}"
                )
            model.set_submodule(path, _Unpacked(name, quantized))

    def _process_model_after_weight_loading(self, model, **kwargs):
        quantized, config = self._quantized, self.quantization_config
        assert quantized is not None
        devices = set()
        for path, name in self._places.items():
            module = model.get_submodule(path)
            tensors = {suffix: tensor for suffix, tensor in module._buffers.items() if tensor is not None}
            device = _check_loaded(quantized, name, tensors)
            if device not in devices and device.type == "cuda" and config.kernels != "reference":
                require(device)
                if config.activations == "fp8":
                    hopper.require(device)
            devices.add(device)
            layer = quantized.layer_of(name, tensors)
            how = config.kernels, config.activations
            linear = LoadedLinear(layer, list(tensors), *how) if layer.format == "w4a4" else linear_of(layer, *how)
            model.set_submodule(path, linear)
            if hasattr(module, "_hf_hook"):  # accelerate's, which moves the input to this linear's device
                from accelerate.hooks import add_hook_to_module

                add_hook_to_module(linear, module._hf_hook)
        self._quantized = None
        model.requires_grad_(False)  # the operators have no gradient
        model.svdq_path = "; ".join(
            path_in_words(device, model.dtype, config.kernels, config.activations, quantized.format.name)
            for device in sorted(devices, key=str)
        )
        return model

    def get_state_dict_and_metadata(self, model):
        """What `save_pretrained` writes: canonical tensors, and the metadata that `svdq quantize` had written."""
        state = model.state_dict()
        for path in self._places:
            module = model.get_submodule(path)
            for buffer in module._buffers:
                state.pop(f"{path}.{buffer}", None)
            state.update({f"{path}.{suffix}": tensor for suffix, tensor in module.stored().items()})
        names = {name: path for path, name in self._places.items()}
        return state, {**self._metadata, **_renamed(self._metadata, names)}

    def is_serializable(self, **kwargs) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _places(model: nn.Module, quantized: QuantizedFile) -> dict[str, str]:
    """Module path → name of the quantized linear that belongs there."""
    weights = {f"{name}.weight" for name in quantized.layers}
    prefix = getattr(model, "base_model_prefix", "")
    found = {
        path: key.removesuffix(".weight")
        for path, module in model.named_modules()
        if is_linear(module) and (key := stored_name(f"{path}.weight", prefix, weights)) is not None
    }
    if lost := quantized.layers.keys() - set(found.values()):
        raise CheckpointError(
            f"{quantized.file.path}: {type(model).__name__} has no linear for its {min(lost)}; "
            "wanted the class that config.json names"
        )
    return found


def _check_loaded(quantized: QuantizedFile, name: str, tensors: dict[str, Tensor]) -> torch.device:
    """Where the tensors of a linear lie. Raises CheckpointError if they are on no device, or not those of the file.

    transformers only warns of a tensor that it did not find, and leaves whatever was in memory there. What it did load
    it marks, in a way that another of its versions may drop: then the values are compared.
    """
    for suffix, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise CheckpointError(
                f"{name}: lies on no device, to be fetched for every use; wanted quantized linears where they run, "
                "leave offload_buffers out"
            )
        if getattr(tensor, "_is_hf_initialized", False):
            continue
        if not torch.equal(tensor.cpu(), quantized.file.read(f"{name}.{suffix}")):
            raise CheckpointError(f"{quantized.file.path}: transformers did not load {name}.{suffix}")
    return next(iter(tensors.values())).device


def _renamed(metadata: dict[str, str], names: dict[str, str]) -> dict[str, str]:
    """The entries of the metadata whose keys are linears, under the names that they are saved with."""
    if all(old == new for old, new in names.items()):
        return {}
    renamed = {key: json.loads(metadata[key]) for key in _NAMED}
    layers, report = renamed[schema.LAYERS], renamed[schema.REPORT]
    renamed[schema.LAYERS] = {names[name]: entry for name, entry in layers.items()}
    report["layers"] = {names.get(name, name): entry for name, entry in report.get("layers", {}).items()}
    return {key: json.dumps(value, sort_keys=True) for key, value in renamed.items()}


def register() -> None:
    """Enter both classes in transformers' registry, once. The options' part has no call there."""
    if schema.QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantization_config(schema.QUANT_METHOD)(SvdqConfig)
    auto.register_quantizer(schema.QUANT_METHOD)(SvdqQuantizer)
    if hasattr(auto, _LOADING):
        setattr(auto, _LOADING, (*getattr(auto, _LOADING), SvdqConfig))


register()
