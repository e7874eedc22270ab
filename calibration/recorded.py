"""Recorded calls of a diffusion transformer: what it is calibrated and checked on, in place of text.

A directory of safetensors files, one a call. Tensor names are the arguments of the transformer's forward
(`hidden_states`, `encoder_hidden_states`, `timestep`, …); `a.b` is entry b of an argument a that is a dictionary. What
is no tensor (`img_shapes`) stands as JSON under `arguments` in the header's metadata. A call may hold several pictures;
it is run as it was recorded. `recording` writes such files while a pipeline runs; anything else may write them too.

Rejected: recording what every block reads, which takes hundreds of times the space and ties the files to one version of
the model. The transformer's own inputs are small, and its blocks' inputs follow from them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from svdq.calibration.data import TokenData
from svdq.calibration.sources import locate
from svdq.checkpoint import Entry, SafetensorsFile, open_file, write_file
from svdq.errors import ConfigError, DataError

_MAIN = "hidden_states"
_TEXT_MASKS = ("encoder_attention_mask", "encoder_hidden_states_mask")
_ARGUMENTS = "arguments"


@dataclass(frozen=True)
class RecordedCall:
    """One call. `tokens` counts those of its pictures."""

    file: SafetensorsFile
    tokens: int

    def read(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of the forward. Tensors of the type of hidden_states become dtype, but for vectors (timesteps),
        which 16 bits would round."""
        main = self.file.tensors[_MAIN].dtype

        def read(name: str) -> Tensor:
            tensor = self.file.read(name)
            return tensor.to(device, dtype if tensor.dim() > 1 and tensor.dtype == main else tensor.dtype)

        return _arguments(self.file, read)

    def real_text(self, device: torch.device) -> Tensor | None:
        """bool (pictures, tokens of the text): which are no padding; None without a mask."""
        name = next((name for name in _TEXT_MASKS if name in self.file.tensors), None)
        if name is None or len(self.file.tensors[name].shape) != 2:
            return None
        return self.file.read(name).to(device) != 0


@dataclass(frozen=True)
class RecordedInputs:
    """Calls and where they came from; has what `svdq.calibration.data.TokenData` has, where the two are used alike.

    sequences  the calls, by file name
    rows_used  calls in the directory
    tokens     of the pictures in all calls: rows that the linears of the picture's stream read
    """

    sequences: list[RecordedCall]
    source: str
    rows_used: int
    tokens: int

    def sha256(self) -> str:
        """Hex digest of every file's bytes."""
        digest = hashlib.sha256()
        for call in self.sequences:
            digest.update(call.file.size.to_bytes(8, "little"))
            with call.file.path.open("rb") as handle:
                while piece := handle.read(1 << 20):
                    digest.update(piece)
        return digest.hexdigest()

    def summary(self) -> str:
        return f"{self.source}: {len(self.sequences):,} of {self.rows_used:,} recorded calls, {self.tokens:,} tokens"


CalibrationData = TokenData | RecordedInputs


def data_identity(data: CalibrationData) -> dict[str, Any]:
    """What the store and the file record of the data; of a local path the name alone, so that no machine shows."""
    hub = isinstance(data, TokenData) and locate(data.source)[0] == "hub"
    return {
        "source": data.source if hub else Path(data.source).name,
        "rows": data.rows_used,
        "sequences": len(data.sequences),
        "tokens": data.tokens,
        "sha256": data.sha256(),
    }


def load_inputs(source: str, config: dict[str, Any], *, samples: int, seed: int) -> RecordedInputs:
    """Open the headers of a directory of recorded calls, at most `samples` of them: a seeded draw, in order of names.

    config  the transformer's config.json: its patch_size says how many tokens a picture has
    Raises  DataError if the directory holds no call, or a file that is none
    """
    if samples < 1:
        raise ConfigError(f"--samples {samples}: give at least 1")
    directory = Path(source)
    paths = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not paths:
        raise DataError(
            f"{source}: no *.safetensors in it; wanted a directory of recorded calls of the transformer "
            "(svdq record makes one)"
        )
    found = len(paths)
    if found > samples:
        draw = torch.randperm(found, generator=torch.Generator().manual_seed(seed))[:samples]
        paths = [paths[i] for i in draw.sort().values.tolist()]
    calls = [_open_call(path, config) for path in paths]
    return RecordedInputs(calls, source, found, sum(call.tokens for call in calls))


def _open_call(path: Path, config: dict[str, Any]) -> RecordedCall:
    file = open_file(path)
    main = file.tensors.get(_MAIN)
    if main is None or not main.dtype.is_floating_point or len(main.shape) not in (3, 4, 5):
        raise DataError(
            f"{path}: holds no {_MAIN} of 3 to 5 dimensions; wanted the arguments of the transformer's forward"
        )
    _arguments(file, lambda name: name)
    rows = main.shape[0] * (main.shape[1] if len(main.shape) == 3 else math.prod(main.shape[2:]))
    patch = config.get("patch_size", 1)
    sides = [patch] * 2 if isinstance(patch, int) else patch if isinstance(patch, list) else []
    area = 1 if len(main.shape) == 3 else math.prod(side for side in sides if isinstance(side, int) and side > 0)
    return RecordedCall(file, rows // area)


def _arguments(file: SafetensorsFile, read: Callable[[str], Any]) -> dict[str, Any]:
    """The arguments of the forward, `read` giving the tensors.

    JSON knows no tuples: a list of numbers alone becomes one, as shapes are written.
    """

    def tuples(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: tuples(entry) for key, entry in value.items()}
        if isinstance(value, list):
            numbers = value and all(isinstance(entry, (int, float)) for entry in value)
            return tuple(value) if numbers else [tuples(entry) for entry in value]
        return value

    try:
        arguments = tuples(json.loads(file.metadata.get(_ARGUMENTS, "{}")))
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise DataError(f"{file.path}: header metadata '{_ARGUMENTS}' is not a JSON object")
    for name in file.tensors:
        *path, leaf = name.split(".")
        owner = arguments
        for key in path:
            owner = owner.setdefault(key, {}) if isinstance(owner, dict) else None
        if not isinstance(owner, dict) or leaf in owner:
            raise DataError(f"{file.path}: its tensor {name} and another argument exclude each other")
        owner[leaf] = read(name)
    return arguments


@contextmanager
def recording(transformer: nn.Module, directory: str | Path) -> Iterator[None]:
    """Inside, every call of a transformer is written to the directory, which must be new or empty.

    Raises  DataError for an argument that is neither tensor nor JSON, ConfigError for a directory with files in it
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ConfigError(f"{directory}: not empty; wanted a new directory for the recorded calls")
    signature, count = inspect.signature(transformer.forward), 0

    def see(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal count
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        arguments.pop("return_dict", None)
        write_call(directory / f"call-{count:05d}.safetensors", arguments)
        count += 1

    handle = transformer.register_forward_pre_hook(see, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def write_call(path: Path, arguments: dict[str, Any]) -> None:
    """One call's arguments as a file. Those that are None are left out."""
    tensors: dict[str, Tensor] = {}

    def split(value: Any, name: str) -> Any:
        """What of it is no tensor; the tensors go to `tensors`."""
        if isinstance(value, Tensor):
            tensors[name] = value
            return None
        if isinstance(value, dict):
            rest = {key: split(entry, f"{name}.{key}") for key, entry in value.items()}
            return {key: entry for key, entry in rest.items() if f"{name}.{key}" not in tensors}
        return value

    other = {name: split(value, name) for name, value in arguments.items() if value is not None}
    other = {name: value for name, value in other.items() if name not in tensors}
    try:
        text = json.dumps(other)
    except (TypeError, ValueError):
        raise DataError(
            f"{path}: one of {', '.join(other)} is neither a tensor nor JSON; it cannot be recorded"
        ) from None
    entries = [Entry(name, t.dtype, tuple(t.shape), t.detach().cpu) for name, t in tensors.items()]
    write_file(path, entries, {_ARGUMENTS: text})
