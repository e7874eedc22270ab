"""What a model directory is: its files, its module tree without weights, its blocks, its linears.

There is no table of model families. The tree is built by transformers, or by diffusers where its config.json says so,
with every parameter on the meta device (buffers stay real: rotary tables and position ids are computed, not stored).
Blocks are the outermost module lists whose members hold linears. A parameter's tensor is found in the files under its
own name or with the base model's prefix added or removed, as bare and headed checkpoints of one model differ. Which
linears share an input is not decided here: it is seen when a block runs (svdq.calibration.capture).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from svdq import diffusion
from svdq.checkpoint import ModelFiles, open_file, open_model_dir, read_json, same_bytes
from svdq.errors import CheckpointError, ConfigError
from svdq.schema import QUANTIZATION_CONFIG


@dataclass(frozen=True)
class Linear:
    """One linear inside a block. `name` is its module path as the checkpoint spells it, `module` as the model does."""

    name: str
    module: str
    block: int
    n: int
    k: int
    bias: bool
    transposed: bool  # GPT-2's Conv1D stores its weight as (in, out)


@dataclass(frozen=True)
class Model:
    """A model directory, opened without reading a weight.

    tree    the module tree, parameters on the meta device, buffers real
    keys    parameter or buffer name in the tree → tensor name in the files
    ties    tensor names (as the files would spell them) that are another tensor: {'lm_head.weight': 'model.embed…'}
    blocks  module paths of the repeated blocks, in order
    adaptive  linears of the blocks that are an adaptive norm's, and not among `linears`: see svdq.diffusion
    """

    directory: Path
    config: dict[str, Any]
    files: ModelFiles
    tree: nn.Module
    keys: dict[str, str]
    ties: dict[str, str]
    blocks: list[str]
    linears: list[Linear]
    adaptive: list[str]

    @property
    def is_diffusion(self) -> bool:
        """A diffusion transformer of diffusers, run on recorded inputs instead of tokens."""
        return diffusion.is_diffusion(self.config)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding table; ids beyond it are an error in the data."""
        embeddings = getattr(self.tree, "get_input_embeddings", lambda: None)()
        return embeddings.weight.shape[0] if isinstance(embeddings, nn.Embedding) else None

    @property
    def is_causal_lm(self) -> bool:
        head = getattr(self.tree, "get_output_embeddings", lambda: None)()
        return head is not None and type(self.tree).__name__.endswith(("CausalLM", "LMHeadModel"))


def open_model(directory: str | Path, *, trust_remote_code: bool = False) -> Model:
    """Open a Hugging Face model directory.

    Raises CheckpointError for everything that keeps it from being quantized: missing or broken files, an unknown
    architecture, remote code, tensors that are missing, blocks that cannot be found, a model already quantized.
    """
    directory = Path(directory)
    if directory.is_file():
        raise CheckpointError(_not_a_directory(directory))
    if (directory / "model_index.json").is_file():
        raise CheckpointError(f"{directory}: a pipeline of diffusers; name its transformer: --subfolder transformer")
    files = open_model_dir(directory)
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / 'config.json'}: not a JSON object")
    _refuse_quantized(directory, config, files)
    tree = _build_tree(directory, config, trust_remote_code)
    keys, ties = _match_tensors(directory, config, tree, files.tensors)
    _check_shapes(directory, tree, keys, files)
    _check_ties(directory, ties, files)
    blocks = _find_blocks(tree, several=diffusion.is_diffusion(config))
    if not blocks:
        raise CheckpointError(f"{directory}: no repeated list of blocks with linears found in {type(tree).__name__}")
    linears, adaptive = _find_linears(tree, blocks, keys), []
    if diffusion.is_diffusion(config):
        adaptive = [linear.name for linear in linears if diffusion.is_adaptive(linear.module)]
        linears = [linear for linear in linears if not diffusion.is_adaptive(linear.module)]
    return Model(directory, config, files, tree, keys, ties, blocks, linears, adaptive)


def _not_a_directory(path: Path) -> str:
    try:
        kind = file_kind(open_file(path).metadata)
    except CheckpointError:
        kind = None
    if kind:
        return f"{path}: already quantized, this is a {kind} svdq file; wanted the original model's directory"
    return f"{path}: a file; wanted a model directory with config.json and safetensors"


def file_kind(metadata: dict[str, str]) -> str | None:
    """'canonical' or 'packed' for a file that svdq wrote, else None."""
    import json

    try:
        packing = json.loads(metadata.get(QUANTIZATION_CONFIG, "null"))["packing"]["layout"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return None
    return "canonical" if packing == "canonical" else "packed"


def _refuse_quantized(directory: Path, config: dict, files: ModelFiles) -> None:
    quantized = config.get("quantization_config")
    if isinstance(quantized, dict):
        method = quantized.get("quant_method", "unknown method")
        raise CheckpointError(f"{directory}: already quantized ({method}); wanted the original 16- or 32-bit model")
    for file in files.files.values():
        if kind := file_kind(file.metadata):
            raise CheckpointError(
                f"{file.path}: already quantized, this is a {kind} svdq file; wanted the original model"
            )


def build_quantized_tree(
    directory: Path, stored: Collection[str], quantized: Collection[str], trust_remote_code: bool
) -> tuple[nn.Module, dict[str, str], dict[str, str]]:
    """The module tree of a quantized file: (tree on meta, `keys` as in `Model`, quantized name → module path).

    stored, quantized  names of the file's plain tensors and of its quantized linears
    """
    config = read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise CheckpointError(f"{directory / 'config.json'}: not a JSON object")
    tree = _build_tree(directory, config, trust_remote_code)
    weights = {f"{name}.weight" for name in quantized}
    biases = {f"{name}.bias" for name in quantized}  # they come with their layer
    keys, _ = _match_tensors(directory, config, tree, {*stored, *weights, *biases})
    modules = {
        key.removesuffix(".weight"): name.removesuffix(".weight") for name, key in keys.items() if key in weights
    }
    if lost := [name for name in quantized if name not in modules]:
        raise CheckpointError(f"{directory}: config.json describes no module for the quantized linear {lost[0]}")
    return tree, keys, modules


@contextlib.contextmanager
def _meta_parameters() -> Iterator[None]:
    """Inside, parameters of new modules are moved to the meta device as they are registered; buffers stay real."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _build_tree(directory: Path, config: dict, trust_remote_code: bool) -> nn.Module:
    if diffusion.is_diffusion(config):
        with _meta_parameters(), torch.random.fork_rng(devices=[]):
            return diffusion.build(directory, config).requires_grad_(False).eval()
    import transformers

    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"{directory / 'config.json'}: architectures is {named!r}; wanted a list of class names")
    architecture = named[0] if named else None
    known = getattr(transformers, architecture, None) if architecture else None
    if "auto_map" in config and known is None and not trust_remote_code:
        raise CheckpointError(
            f"{directory}: the model brings its own code (auto_map in config.json); read it, then --trust-remote-code"
        )
    if architecture and known is None and not trust_remote_code:
        raise CheckpointError(
            f"{directory}: unknown architecture {architecture!r} for transformers {transformers.__version__}; "
            "a newer transformers may know it, or --trust-remote-code if the model brings its own code"
        )
    try:
        parsed = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code and known is None, local_files_only=True
        )
        parsed.use_cache = False
        with _meta_parameters(), torch.random.fork_rng(devices=[]):
            if known is not None:
                tree = known._from_config(parsed, dtype=torch.float32)
            else:
                kind = transformers.AutoModelForCausalLM if "CausalLM" in str(architecture) else transformers.AutoModel
                tree = kind.from_config(parsed, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises whatever a wrong value happens to break
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"{directory / 'config.json'}: transformers cannot build the model: {reason}") from error
    tree.requires_grad_(False)
    return tree.eval()


def _match_tensors(
    directory: Path, config: dict, tree: nn.Module, names: Container[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(`keys`, `ties`) of `Model`, given the tensor names that the files hold."""
    prefix = getattr(tree, "base_model_prefix", "")
    aliases: dict[int, list[str]] = {}
    for name, parameter in tree.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    keys: dict[str, str] = {}
    ties: dict[str, str] = {}
    missing: list[str] = []
    for group in aliases.values():
        found = next((key for name in group if (key := stored_name(name, prefix, names)) is not None), None)
        if found is None:
            missing.append(group[0])
            continue
        for name in group:
            keys[name] = found
            spelled = stored_name(name, prefix, names) or name
            if spelled != found:
                ties[spelled] = found
    for name, _ in tree.named_buffers():
        if (key := stored_name(name, prefix, names)) is not None:
            keys[name] = key
    if missing:
        raise CheckpointError(_missing_message(directory, config, tree, missing))
    return keys, ties


def _check_shapes(directory: Path, tree: nn.Module, keys: dict[str, str], files: ModelFiles) -> None:
    for name, parameter in tree.named_parameters():
        stored = files.info(keys[name]).shape
        if tuple(parameter.shape) != stored:
            raise CheckpointError(
                f"{directory}: {keys[name]} has shape {list(stored)}, config.json asks for {list(parameter.shape)}"
            )


def _check_ties(directory: Path, ties: dict[str, str], files: ModelFiles) -> None:
    """A tensor that the configuration ties may lie in the files as a copy, but not as another tensor."""
    for alias, target in ties.items():
        if alias in files.tensors and not same_bytes(files.tensors[alias], alias, files.tensors[target], target):
            raise CheckpointError(
                f"{directory}: config.json ties {alias} to {target}, but the files hold two different tensors; "
                "set tie_word_embeddings to false, or remove the one that is not meant"
            )


def stored_name(name: str, prefix: str, names: Container[str]) -> str | None:
    """How the files spell a parameter: as the model does, with or without the base prefix, or in BERT's old way."""
    candidates = [name]
    if prefix:
        candidates.append(name.removeprefix(prefix + ".") if name.startswith(prefix + ".") else f"{prefix}.{name}")
    for candidate in candidates:
        old = candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for spelled in (candidate, old):
            if spelled in names:
                return spelled
    return None


def _missing_message(directory: Path, config: dict, tree: nn.Module, missing: list[str]) -> str:
    head = "lm_head.weight"
    if missing == [head] and not config.get("tie_word_embeddings", False):
        return (
            f"{directory}: the files hold no {head} and config.json does not tie it to the embeddings "
            "(tie_word_embeddings is not true); set it to true if the model is tied, or restore the tensor"
        )
    shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return f"{directory}: {len(missing)} tensors of {type(tree).__name__} are not in the files: {shown}"


def is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (nn.Linear, Conv1D))


def linear_sizes(module: nn.Module) -> tuple[int, int]:
    """(out features, in features) of a linear; GPT-2's Conv1D keeps its weight transposed."""
    rows, columns = module.get_parameter("weight").shape
    return (rows, columns) if isinstance(module, nn.Linear) else (columns, rows)


def _find_blocks(tree: nn.Module, *, several: bool) -> list[str]:
    """Members of the outermost module lists that hold linears; lists inside blocks (experts) are not blocks.

    several  whether more than one list is allowed
    """
    lists: list[list[str]] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            where = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList) and any(is_linear(m) for m in child.modules()):
                lists.append([f"{where}.{i}" for i in range(len(child))])
            else:
                walk(child, where)

    walk(tree, "")
    if len(lists) > 1 and not several:
        named = ", ".join(f"{members[0].rpartition('.')[0]} ({len(members)})" for members in lists)
        raise CheckpointError(
            f"{type(tree).__name__}: found {len(lists)} lists of blocks: {named}; "
            "svdq streams models with one list of blocks"
        )
    return [block for members in lists for block in members]


def _find_linears(tree: nn.Module, blocks: list[str], keys: dict[str, str]) -> list[Linear]:
    linears = []
    seen: set[int] = set()
    for index, block in enumerate(blocks):
        for path, module in tree.get_submodule(block).named_modules():
            if not is_linear(module) or id(module) in seen:
                continue
            seen.add(id(module))
            full = f"{block}.{path}"
            transposed = not isinstance(module, nn.Linear)
            n, k = linear_sizes(module)
            name = keys[f"{full}.weight"].removesuffix(".weight")
            linears.append(Linear(name, full, index, n, k, getattr(module, "bias", None) is not None, transposed))
    return linears


# ---------------------------------------------------------------------------------------------- weights


def materialize(
    model: Model, module_path: str, device: torch.device, dtype: torch.dtype, *, skip: Collection[str] = ()
) -> None:
    """Give the parameters and stored buffers under a module real values from the files.

    module_path  '' for the whole tree
    dtype        floating parameters are cast to it
    skip         module paths whose parameters are left alone
    """
    module = model.tree.get_submodule(module_path)
    loaded: dict[str, nn.Parameter] = {}
    for path, owner in module.named_modules():
        full = ".".join(part for part in (module_path, path) if part)
        if any(full == left or full.startswith(left + ".") for left in skip):
            continue
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter.device.type != "meta":
                continue
            key = model.keys[f"{full}.{name}" if full else name]
            if key not in loaded:  # tied parameters stay one parameter
                loaded[key] = nn.Parameter(_load(model.files, key, device, dtype), requires_grad=False)
            owner._parameters[name] = loaded[key]
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            stored = model.keys.get(f"{full}.{name}" if full else name)
            owner._buffers[name] = (
                buffer.to(device) if stored is None else _load(model.files, stored, device, buffer.dtype)
            )


def release(model: Model, module_path: str, *, skip: Collection[str] = ()) -> None:
    """Put the parameters under a module back on the meta device."""
    for path, owner in model.tree.get_submodule(module_path).named_modules():
        full = ".".join(part for part in (module_path, path) if part)
        if any(full == left or full.startswith(left + ".") for left in skip):
            continue
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owner._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return_freed_memory()


def return_freed_memory() -> None:
    """Give freed pages back to the system: glibc keeps blocks' weights in its arenas, and they would add up."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _load(files: ModelFiles, key: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = files.read(key)
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def read_weight(model: Model, linear: Linear) -> Tensor:
    """(n, k) in the source's dtype, on the CPU."""
    weight = model.files.read(f"{linear.name}.weight")
    return weight.t().contiguous() if linear.transposed else weight


def compute_dtype(model: Model, device: torch.device) -> torch.dtype:
    """float32 on CPUs, where 16-bit GEMMs are slow; the checkpoint's own 16-bit type on GPUs."""
    if device.type == "cpu":
        return torch.float32
    kinds = {model.files.info(f"{linear.name}.weight").dtype for linear in model.linears}
    return torch.bfloat16 if torch.bfloat16 in kinds else torch.float16 if kinds == {torch.float16} else torch.float32


def resolve_device(name: str) -> torch.device:
    """'auto', 'cpu', 'cuda' or 'cuda:i' → a device that exists. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"--device {name!r}: wanted auto, cpu, cuda or cuda:0, cuda:1 …") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name!r}: wanted auto, cpu, cuda or cuda:0, cuda:1 …")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"--device {name}: found {torch.cuda.device_count()} CUDA devices; use --device cpu or auto")
    return device
