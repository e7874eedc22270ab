"""Read and write safetensors: a lazy reader over shards, and an atomic streaming writer.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and raw tensor bytes. The header
maps each name to {dtype, shape, data_offsets}, and `__metadata__` to an object of strings. Three decisions:

Lazy    Opening reads the header alone; `read` seeks and fills one tensor. Rejected: mmap, whose touched pages count as
        resident memory, and which turns a file truncated under way into a SIGBUS instead of an error.
Hostile A header is a stranger's input. Lengths, types, duplicates, products and ranges are checked before a byte of
        data is read, and the ranges must tile the file: no overlap, no hole, nothing after the last tensor. So a
        truncated download is found on opening, without hashing gigabytes.
Atomic  Tensors are asked for one at a time and written to a hidden file beside the target, which takes its name when
        whole and on disk. A crash, a full disk or Ctrl-C leaves what was there before, and the bytes depend on the
        arguments alone. Rejected: safetensors' own saver, which wants every tensor in memory at once.

Every fault is a CheckpointError of one line that names the file and the tensor.
Source: https://huggingface.co/docs/safetensors (the format), safetensors/src/tensor.rs (order and limits).
"""

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief  # bounded in length and depth, whatever a hostile value holds
from typing import Any, BinaryIO, NamedTuple

import torch

from svdq.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64,
    "I64": torch.int64, "F64": torch.float64,
}  # fmt: skip
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 64  # torch's own, for most operations
CHUNK_BYTES = 16 << 20
_SURROGATE = re.compile("[\ud800-\udfff]")


class TensorInfo(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """One file whose header has been checked. Holds no tensor and no open file."""

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]  # in the order of the header
    header_sha256: str  # of the JSON bytes, padding included
    size: int  # bytes of the whole file

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor on the CPU, writable, in memory of its own.

        Raises   CheckpointError if the file has no such tensor, or has shrunk since it was opened.
        """
        info = self._info(name)
        buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        view, filled = buffer.numpy().data, 0
        with _reading(self.path), self.path.open("rb", buffering=0) as handle:
            handle.seek(info.offset)
            while filled < info.nbytes:  # one call returns 2 GiB at most
                filled += self._some(handle.readinto(view[filled:]), name)
        return buffer.view(info.dtype).reshape(info.shape)

    def chunks(self, name: str, bytes_per_chunk: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield the raw bytes of one tensor in pieces, to copy it without holding it. Raises as `read` does."""
        info, done = self._info(name), 0
        with _reading(self.path), self.path.open("rb", buffering=0) as handle:
            handle.seek(info.offset)
            while done < info.nbytes:
                chunk = handle.read(min(bytes_per_chunk, info.nbytes - done))
                done += self._some(len(chunk), name)
                yield chunk

    def sample_sha256(self) -> str:
        """Hash of 64 evenly spread pieces of 4 KiB: tells a fine-tune from its base in milliseconds."""
        digest = hashlib.sha256()
        with _reading(self.path), self.path.open("rb", buffering=0) as handle:
            for piece in range(64):
                handle.seek(max(self.size - 4096, 0) * piece // 63)
                digest.update(handle.read(4096))
        return digest.hexdigest()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise CheckpointError(f"{_shown(self.path)}: no tensor {_shown(name)} among its {len(self.tensors)}")
        return self.tensors[name]

    def _some(self, count: int, name: str) -> int:
        if count == 0:
            where = f"{_shown(self.path)}: tensor {_shown(name)}"
            raise CheckpointError(f"{where}: the file has shrunk since it was opened; start again once it is stable")
        return count


def same_bytes(a: SafetensorsFile, name_a: str, b: SafetensorsFile, name_b: str) -> bool:
    """Whether two stored tensors have the same type, shape and bytes."""
    ours, theirs = a.tensors[name_a], b.tensors[name_b]
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return all(x == y for x, y in zip(a.chunks(name_a), b.chunks(name_b), strict=True))


def open_file(path: str | Path) -> SafetensorsFile:
    """Read and check the header of one safetensors file; the tensors stay on disk.

    Raises   CheckpointError for anything but a regular file whose header is valid and whose tensors tile its data.
    """
    path = Path(path)
    where = _shown(path)
    with _reading(path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{where}: not a regular file; wanted a .safetensors file")
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                found = f"{where}: header length {length} in a file of {size} bytes (limit {MAX_HEADER_BYTES})"
                raise CheckpointError(f"{found}; truncated or not safetensors, download it again")
            raw = handle.read(length)
    start = 8 + length
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{where}: the header does not begin with '{{'; wanted a .safetensors file")
    header = _parse_json(raw, f"{where}: header", _unique_keys)
    metadata = header.pop("__metadata__", {})
    if not _is_text_to_text(metadata):
        raise CheckpointError(f"{where}: __metadata__ is {brief(metadata)}; wanted strings mapped to strings")
    tensors = {}
    for name, entry in header.items():
        tensors[name] = _tensor_info(f"{where}: tensor {_shown(name)}", name, entry, start, size)
    position, last = start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != position:
            fault = "overlaps" if info.offset < position else f"leaves a hole of {info.offset - position} bytes after"
            raise CheckpointError(f"{where}: tensor {_shown(name)}: {fault} {last}; damaged, download it again")
        position, last = position + info.nbytes, f"tensor {_shown(name)}"
    if position != size:
        raise CheckpointError(f"{where}: {size - position} bytes follow {last}; wanted none, download it again")
    return SafetensorsFile(path, metadata, tensors, hashlib.sha256(raw).hexdigest(), size)


def _tensor_info(where: str, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    """Check one header entry; `start` is where the data begin, `size` where the file ends, both in bytes."""
    if not _is_text(name):
        raise CheckpointError(f"{where}: the name is not valid Unicode; rename it")
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: entry is {brief(entry)}; wanted an object of dtype, shape and data_offsets")
    offsets: Any
    dtype_name, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {brief(dtype_name)}; wanted one of {' '.join(DTYPES)}")
    if not isinstance(shape, list) or not _is_shape(shape):
        wanted = f"at most {MAX_DIMENSIONS} non-negative integers whose product is below 2**63"
        raise CheckpointError(f"{where}: shape {brief(shape)}; wanted {wanted}")
    integers = isinstance(offsets, list) and [type(item) for item in offsets] == [int, int]
    begin, end = offsets if integers else (-1, -1)
    if not 0 <= begin <= end:
        raise CheckpointError(f"{where}: data_offsets {brief(offsets)}; wanted [begin, end] with 0 <= begin <= end")
    if end > size - start:
        found = f"data_offsets {brief(offsets)} but the file holds {size - start} bytes of data"
        raise CheckpointError(f"{where}: {found}; truncated, download it again")
    dtype = DTYPES[dtype_name]
    nbytes = math.prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        raise CheckpointError(f"{where}: data_offsets span {end - begin} bytes; {dtype_name} {shape} takes {nbytes}")
    return TensorInfo(dtype, tuple(shape), start + begin, nbytes)


def _is_shape(shape: Sequence[Any]) -> bool:
    """True for a shape that torch can hold. Zeros count as ones: strides overflow even where the product is 0."""
    if len(shape) > MAX_DIMENSIONS or not all(type(extent) is int and 0 <= extent < 2**63 for extent in shape):
        return False
    return math.prod(max(extent, 1) for extent in shape) < 2**63


@dataclass(frozen=True)
class ModelFiles:
    """The safetensors files of one model directory, seen as one set of tensors."""

    directory: Path
    files: dict[str, SafetensorsFile]  # by file name, sorted
    tensors: dict[str, SafetensorsFile]  # by tensor name: the file that holds it

    def info(self, name: str) -> TensorInfo:
        return self._holder(name).tensors[name]

    def read(self, name: str) -> torch.Tensor:
        return self._holder(name).read(name)

    def chunks(self, name: str, bytes_per_chunk: int = CHUNK_BYTES) -> Iterator[bytes]:
        return self._holder(name).chunks(name, bytes_per_chunk)

    def source_fingerprint(self) -> dict[str, Any]:
        """What identifies the source without reading all of it: size, header hash and data sample of every file."""
        return {
            "files": {
                key: {"size": f.size, "header_sha256": f.header_sha256, "sample_sha256": f.sample_sha256()}
                for key, f in self.files.items()
            }
        }

    def _holder(self, name: str) -> SafetensorsFile:
        if name not in self.tensors:
            raise CheckpointError(f"{_shown(self.directory)}: no tensor {_shown(name)} in its {len(self.files)} files")
        return self.tensors[name]


def open_model_dir(directory: str | Path) -> ModelFiles:
    """Open every header of a Hugging Face model directory.

    Looks for model.safetensors or its index, then for diffusers' own, then takes all *.safetensors files. Symlinks are
    followed (the hub's cache is made of them); a path written in the index must be a plain file name.
    Raises   CheckpointError naming the file, and the tensors it should hold, if anything is missing or contradictory.
    """
    directory = Path(directory)
    where = _shown(directory)
    try:
        names = sorted(item.name for item in directory.iterdir() if not item.name.startswith("."))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise CheckpointError(f"{where}: {_reason(error)}; wanted a model directory, download it first") from error
    for whole in ("model.safetensors", "diffusion_pytorch_model.safetensors"):
        if whole in names:
            return _merge(directory, [whole])
        if (index := f"{whole}.index.json") in names:
            return _follow_index(directory, index, names)
    weights = [name for name in names if name.endswith(".safetensors")]
    if weights:
        return _merge(directory, weights)
    if pickles := [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]:
        cure = "convert with model.save_pretrained(directory, safe_serialization=True)"
        raise CheckpointError(f"{where}: only pickle files ({_first_five(pickles)}); wanted safetensors only, {cure}")
    raise CheckpointError(f"{where}: no *.safetensors file; wanted a model's weights, download them here")


def _merge(directory: Path, names: list[str]) -> ModelFiles:
    files = {name: open_file(directory / name) for name in names}
    tensors: dict[str, SafetensorsFile] = {}
    for file in files.values():
        for tensor in file.tensors:
            if tensor in tensors:
                both = f"{_shown(tensors[tensor].path.name)} and {_shown(file.path.name)}"
                raise CheckpointError(f"{_shown(directory)}: {both} both hold tensor {_shown(tensor)}; remove one file")
            tensors[tensor] = file
    return ModelFiles(directory, files, tensors)


def _follow_index(directory: Path, index: str, names: list[str]) -> ModelFiles:
    where = _shown(directory / index)
    parsed = read_json(directory / index)
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not weight_map or not _is_text_to_text(weight_map):
        raise CheckpointError(f"{where}: weight_map is {brief(weight_map)}; wanted tensor names mapped to file names")
    promised: dict[str, list[str]] = {}
    for tensor, shard in weight_map.items():
        promised.setdefault(shard, []).append(tensor)
    files = {}
    for shard, tensors in sorted(promised.items()):
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard:
            found = f"tensor {_shown(tensors[0])} is in {_shown(shard)}"
            raise CheckpointError(f"{where}: {found}; wanted a plain file name in the same directory")
        if shard not in names or not (directory / shard).exists():  # the second: a link that leads nowhere
            others = [name for name in names if name.endswith(".safetensors") and name not in promised]
            cure = f"rename it back if it is {_first_five(others)}" if others else "download it again"
            missing = f"shard {_shown(shard)} is missing"
            raise CheckpointError(f"{where}: {missing}; it should hold {_first_five(tensors)}; {cure}")
        files[shard] = open_file(directory / shard)
        absent = [tensor for tensor in tensors if tensor not in files[shard].tensors]
        if absent:
            found = f"shard {_shown(shard)} does not hold {_first_five(absent)}"
            raise CheckpointError(f"{where}: {found}; wanted what the index promises, download both from one revision")
    return ModelFiles(directory, files, {tensor: files[shard] for tensor, shard in weight_map.items()})


class Entry(NamedTuple):
    """One tensor to write. `data` is called once, when its turn comes, for a tensor or for its raw bytes in pieces."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: Callable[[], torch.Tensor | Iterable[bytes | memoryview]]


def write_file(path: str | Path, entries: Iterable[Entry], metadata: dict[str, str], *, overwrite: bool = True) -> None:
    """Write a safetensors file, one tensor in memory at a time; it appears under its name only when it is whole.

    entries  in any order; stored, and asked for their data, by descending item size and then by name, so that every
             tensor starts at a multiple of its item size.
    Raises   CheckpointError if the path cannot be written, or an entry does not deliver what it declared.
    """
    path = Path(path)
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    header = _header(_shown(path), entries, metadata)
    with _atomic(path, overwrite) as handle:
        _write_all(handle, header)
        for entry in entries:
            _write_entry(handle, entry, f"{_shown(path)}: tensor {_shown(entry.name)}")


def _header(where: str, entries: list[Entry], metadata: dict[str, str]) -> bytes:
    """The length prefix and the JSON, padded with spaces to a multiple of 8 bytes."""
    if not _is_text_to_text(metadata):
        raise CheckpointError(f"{where}: metadata is {brief(metadata)}; wanted strings mapped to strings")
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, dtype, shape, _ in entries:
        if not _is_text(name) or name in header or name == "__metadata__":
            raise CheckpointError(f"{where}: tensor {_shown(name)}: name repeated, reserved or not valid Unicode")
        if dtype not in DTYPE_NAMES or not _is_shape(shape):
            raise CheckpointError(f"{where}: tensor {_shown(name)}: safetensors cannot store {dtype} {brief(shape)}")
        end = position + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(f"{where}: header of {len(raw)} bytes; readers refuse more than {MAX_HEADER_BYTES}")
    return len(raw).to_bytes(8, "little") + raw


def _write_entry(handle: BinaryIO, entry: Entry, where: str) -> None:
    """Ask for one tensor and write it. A function of its own, so that the tensor dies before the next is made."""
    arrived = entry.data()
    wanted, written = math.prod(entry.shape) * entry.dtype.itemsize, 0
    if isinstance(arrived, torch.Tensor):
        if (arrived.dtype, tuple(arrived.shape)) != (entry.dtype, tuple(entry.shape)):
            found = f"{arrived.dtype} {tuple(arrived.shape)}"
            raise CheckpointError(f"{where}: got {found}, wanted {entry.dtype} {tuple(entry.shape)} as declared")
        dense = arrived.detach().cpu().contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))  # a lone element is contiguous whatever its stride says
        arrived = [flat.view(torch.uint8).numpy().data]
    for chunk in arrived:
        written += len(chunk)
        if written > wanted:
            break
        _write_all(handle, chunk)
    if written != wanted:
        raise CheckpointError(f"{where}: got {written} bytes{' or more' * (written > wanted)}, wanted {wanted}")


def write_json(path: str | Path, obj: Any) -> None:
    """Write JSON as atomically as `write_file`: sorted keys, one space of indent, a newline at the end."""
    raw = json.dumps(obj, sort_keys=True, indent=1).encode() + b"\n"
    with _atomic(Path(path), overwrite=True) as handle:
        _write_all(handle, raw)


def read_json(path: str | Path) -> Any:
    """Parse a UTF-8 JSON file. Raises CheckpointError if it is missing or broken."""
    path = Path(path)
    with _reading(path):
        raw = path.read_bytes()
    return _parse_json(raw, _shown(path))


@contextmanager
def _atomic(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """Yield a file beside `path` that takes its place if the block ends well, and is deleted if it does not."""
    where = _shown(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        if not path.parent.is_dir():
            raise CheckpointError(f"{where}: the folder {_shown(path.parent)} does not exist; create it first")
        if path.exists() and not path.is_file():  # renaming over /dev/null would replace it
            raise CheckpointError(f"{where}: exists and is not a regular file; choose another output path")
        if path.exists() and not overwrite:
            raise CheckpointError(f"{where}: already exists; remove it or choose another output path")
        try:
            # Unbuffered, so that closing after a failed write has nothing left to write and cannot fail again.
            with temporary.open("wb", buffering=0) as handle:
                yield handle
                os.fsync(handle.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be written: {_reason(error)}") from error


def _write_all(handle: BinaryIO, raw: bytes | memoryview) -> None:
    view = memoryview(raw)
    while view:  # one call may write less than it was given
        view = view[handle.write(view) :]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise CheckpointError(f"{_shown(path)}: cannot be read: {_reason(error)}") from error


def _parse_json(raw: bytes, where: str, pairs_hook: Callable[[list], dict] | None = None) -> Any:
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=pairs_hook)
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply; damaged or hostile, do not use it") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of more digits than Python converts
        raise CheckpointError(f"{where}: not UTF-8 JSON: {error}; download it again") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:  # readers differ in which one they take
            raise ValueError(f"duplicate key {_shown(key)}")
        result[key] = value
    return result


def _is_text(value: Any) -> bool:
    """True for a string that UTF-8 can hold: JSON escapes can smuggle in half of a surrogate pair."""
    return isinstance(value, str) and not _SURROGATE.search(value)


def _is_text_to_text(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(item) for pair in value.items() for item in pair)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _shown(name: str | Path) -> str:
    """A name for a message: one line of bounded length, whatever the name is made of."""
    text = str(name)
    text = text if text and text.isprintable() else ascii(text)
    return text if len(text) <= 300 else text[:300] + "…"


def _first_five(names: list[str]) -> str:
    listed = ", ".join(_shown(name) for name in names[:5])
    return listed if len(names) <= 5 else f"{listed} and {len(names) - 5} more, {len(names)} in all"
