"""A quantized checkpoint as a Hugging Face directory: shards, their index, config.json, the source's small files.

Every shard's header holds the metadata that a single file would hold, as transformers' own `save_pretrained` writes it,
so that any shard says what it is and a directory whose shards are of different runs is found out. config.json gets the
`quantization_config` by which transformers knows what it loads. Tensors are spread in the order given, one in memory at
a time; the directory takes its name when all of it is on disk.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from svdq.checkpoint import (
    CHUNK_BYTES,
    Entry,
    SafetensorsFile,
    open_file,
    open_model_dir,
    read_json,
    write_file,
    write_json,
)
from svdq.errors import CheckpointError
from svdq.schema import QUANTIZATION_CONFIG

FORMAT = "pt"  # what transformers asks of a header's "format", which only shards have
_WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".npz",
    ".mlmodel", ".index.json",
)  # fmt: skip


@dataclass(frozen=True)
class Shards(SafetensorsFile):
    """A directory's shards, read as if they were one file. `header_sha256` is empty, `size` that of all shards."""

    holders: dict[str, SafetensorsFile]  # by tensor name

    def read(self, name: str) -> torch.Tensor:
        self._info(name)
        return self.holders[name].read(name)

    def chunks(self, name: str, bytes_per_chunk: int = CHUNK_BYTES) -> Iterator[bytes]:
        self._info(name)
        return self.holders[name].chunks(name, bytes_per_chunk)


def open_shards(directory: str | Path) -> Shards:
    """The shards of a directory. Raises CheckpointError if their headers are not of one run."""
    files = open_model_dir(directory)
    return _join(Path(directory), list(files.files.values()), files.tensors)


def join_files(paths: Iterable[str | Path]) -> Shards:
    """Files that transformers has found for one model: shards of one run."""
    files = [open_file(path) for path in paths]
    return _join(files[0].path.parent, files, {name: file for file in files for name in file.tensors})


def _join(directory: Path, files: list[SafetensorsFile], holders: dict[str, SafetensorsFile]) -> Shards:
    first = files[0]
    for other in files[1:]:
        if other.metadata != first.metadata:
            raise CheckpointError(
                f"{directory}: {other.path.name} and {first.path.name} are of different runs (their metadata differ); "
                "wanted the shards of one"
            )
    tensors = {name: file.tensors[name] for name, file in holders.items()}
    metadata = {key: value for key, value in first.metadata.items() if key != "format"}
    return Shards(directory, metadata, tensors, "", sum(file.size for file in files), holders)


# ---------------------------------------------------------------------------------------------- what is asked for


def is_directory(name: str | Path) -> bool:
    """Whether an output's name means a directory: it ends in a slash, or a directory is there."""
    text = str(name)
    return text.endswith(tuple(filter(None, (os.sep, os.altsep)))) or Path(text).is_dir()


# ---------------------------------------------------------------------------------------------- writing


def write_directory(
    out: str | Path, entries: list[Entry], metadata: dict[str, str], source: Path, shard_bytes: int
) -> None:
    """Write a checkpoint of a model as a directory that appears under its name only when it is whole.

    entries      as `write_file` takes them; tensors of one shard are written in its order
    source       the model directory, whose config.json and small files go in
    shard_bytes  a shard is closed before it would exceed this; a larger tensor has a shard of its own
    """
    out = Path(out)
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        fill(temporary, entries, metadata, source, shard_bytes)
        publish(temporary, out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def fill(directory: Path, entries: list[Entry], metadata: dict[str, str], source: Path, shard_bytes: int) -> None:
    """The content of `write_directory`, at a place that has no reader yet. What a killed run left there goes."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir()
    shards = _spread(entries, shard_bytes)
    names = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        write_file(directory / name, shard, {**metadata, "format": FORMAT})
    if len(shards) > 1:
        held = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(_nbytes(entry) for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": held}
        write_json(directory / "model.safetensors.index.json", index)
    copy_small_files(source, directory)
    config = read_json(source / "config.json")
    quantization = json.loads(metadata[QUANTIZATION_CONFIG])
    if quantization.get("format") == "nf4":
        quantization = _of_bitsandbytes(config, [entry.name for entry in entries])
    config[QUANTIZATION_CONFIG] = quantization
    write_json(directory / "config.json", config)


def _of_bitsandbytes(config: dict, tensors: list[str]) -> dict:
    """What transformers needs to load NF4 by bitsandbytes, whose tensors these are: all linears but those it names."""
    quantized = {name.removesuffix(".weight.absmax") for name in tensors if name.endswith(".weight.absmax")}
    kept = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")} - quantized
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_compute_dtype": config.get("dtype") or config.get("torch_dtype") or "float16",
        "llm_int8_skip_modules": sorted(kept | {"lm_head"}),
    }


def publish(written: Path, out: Path) -> None:
    """Give a whole directory its name; an empty one may stand there."""
    try:
        if out.is_dir():
            out.rmdir()
        written.replace(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror}") from error


def content_bytes(path: Path) -> int:
    """Bytes of a file, or of a directory's files."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def _spread(entries: list[Entry], shard_bytes: int) -> list[list[Entry]]:
    """In the order given, a new shard where the last would grow too large."""
    shards: list[list[Entry]] = [[]]
    filled = 0
    for entry in entries:
        size = _nbytes(entry)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += size
    return shards


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.dtype.itemsize


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def copy_small_files(source: Path, directory: Path) -> None:
    """Tokenizer, generation settings, templates, licence, code: every file at the top that is neither weights nor
    hidden, and the folders that make a sentence encoder of a model."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.lower().endswith(_WEIGHTS):
            shutil.copyfile(file, directory / file.name)
    for folder in ("additional_chat_templates", *_sentence_modules(source)):
        if (source / folder).is_dir():
            shutil.copytree(source / folder, directory / folder, copy_function=shutil.copyfile, dirs_exist_ok=True)


def _sentence_modules(source: Path) -> list[str]:
    """What sentence-transformers' modules.json names beside the model itself: '1_Pooling', '2_Dense' …"""
    if not (source / "modules.json").is_file():
        return []
    modules: Any = read_json(source / "modules.json")
    found = [module.get("path") for module in modules if isinstance(module, dict)] if isinstance(modules, list) else []
    return [path for path in found if isinstance(path, str) and re.fullmatch(r"\w[\w.-]*", path)]
