"""The calibration store: a directory with one safetensors file per block and a manifest that is written last.

Per site (named by the first linear that read its input): `<site>.xx`, `.xq`, `.qq` (k, k), `.smooth` (k,) where there
is smoothing, `.absmax` (k,), `.tokens` (int64). The manifest holds the configuration, the data's and the model's
fingerprints, which linears share which site, and whether the store is finished; an unfinished one can be resumed.
tokens.safetensors holds the sequences themselves, `ids` and `lengths`, so that tuning needs no other text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from svdq.calibration.capture import BlockSums
from svdq.calibration.data import TokenData
from svdq.checkpoint import Entry, open_file, read_json, write_file, write_json
from svdq.config import first_difference
from svdq.errors import CheckpointError, ConfigError
from svdq.objective import ActivationSums
from svdq.rounding import ActivationTransform

_TOKENS = "tokens.safetensors"
BEHIND_BYTES = 256 << 20  # sums of a block up to this size may be written while the next ones are taken
_FORMAT = {"format": "svdq-calibration", "version": 1}


def _written(behind: list[tuple[int, Future[None]]]) -> Iterator[int]:
    while behind:
        block, writing = behind.pop()
        writing.result()
        yield block


def block_entries(sums: dict[str, ActivationSums]) -> list[Entry]:
    """The tensors of one block's file."""
    entries = []
    for site, s in sums.items():
        tensors = {"xx": s.xx, "xq": s.xq, "qq": s.qq, "absmax": s.absmax, "tokens": torch.tensor(s.tokens)}
        if s.transform.smooth is not None:
            tensors["smooth"] = s.transform.smooth
        for key, tensor in tensors.items():
            entries.append(Entry(f"{site}.{key}", tensor.dtype, tuple(tensor.shape), tensor.cpu))
    return entries


class Store:
    """An open store. `manifest` is the JSON object on disk."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory, self.manifest = directory, manifest

    @staticmethod
    def create_or_resume(directory: str | Path, identity: dict[str, Any], blocks: int) -> Store:
        """identity: config, data and model fingerprints; a store with another identity is refused, naming the field."""
        directory = Path(directory)
        if directory.exists() and not directory.is_dir():
            raise CheckpointError(f"{directory}: a file; wanted a directory for the calibration store")
        if (directory / "manifest.json").exists():
            store = Store.open(directory, finished=False)
            for leftover in directory.glob(".*.tmp"):
                leftover.unlink()
            if difference := first_difference(identity, {key: store.manifest.get(key) for key in identity}):
                raise ConfigError(
                    f"{directory}: holds another calibration: {difference}; use another directory or delete this one"
                )
            return store
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{directory}: cannot be created: {error.strerror}") from None
        for leftover in directory.glob(".*.tmp"):  # of a run that was killed while it wrote
            leftover.unlink()
        if any(directory.iterdir()):
            raise CheckpointError(f"{directory}: not empty and not a calibration store; wanted a new directory")
        manifest = {**_FORMAT, **identity, "blocks": blocks, "finished": False}
        write_json(directory / "manifest.json", manifest)
        return Store(directory, manifest)

    @staticmethod
    def open(directory: str | Path, *, finished: bool = True) -> Store:
        directory = Path(directory)
        if not (directory / "manifest.json").exists():
            raise CheckpointError(f"{directory}: no manifest.json; wanted a store written by svdq calibrate")
        manifest = read_json(directory / "manifest.json")
        if not isinstance(manifest, dict) or any(manifest.get(key) != value for key, value in _FORMAT.items()):
            raise CheckpointError(f"{directory / 'manifest.json'}: not the manifest of a calibration store")
        kinds = {"config": dict, "data": dict, "model": dict, "linears": list}
        for key, kind in kinds.items():
            if not isinstance(manifest.get(key), kind):
                raise CheckpointError(f"{directory / 'manifest.json'}: '{key}' is missing or broken; calibrate again")
        if finished and not manifest.get("finished"):
            raise CheckpointError(f"{directory}: unfinished; run the same svdq calibrate command again to resume it")
        return Store(directory, manifest)

    def check_model(self, fingerprint: dict[str, Any]) -> None:
        """Raises ConfigError if the store was taken from another model."""
        if difference := first_difference(fingerprint, self.manifest["model"]):
            raise ConfigError(f"{self.directory}: calibrated on another model: {difference}; calibrate this model")

    def keep_tokens(self, sequences: list[Tensor]) -> None:
        """Write the sequences, int64 (T_i), where they are not there yet."""
        path = self.directory / _TOKENS
        if not path.exists():
            tensors = {"ids": torch.cat(sequences).int(), "lengths": torch.tensor([len(one) for one in sequences])}
            write_file(path, [Entry(key, t.dtype, tuple(t.shape), t.cpu) for key, t in tensors.items()], {})

    def tokens(self) -> TokenData:
        """The sequences that the sums were taken on. Raises CheckpointError if the store is too old to have them."""
        path, data = self.directory / _TOKENS, self.manifest["data"]
        if not path.exists():
            raise CheckpointError(f"{self.directory}: holds no {_TOKENS}; calibrate again, or give svdq tune a text")
        file = open_file(path)
        sequences = list(file.read("ids").long().split(file.read("lengths").tolist()))
        total = sum(map(len, sequences))
        return TokenData(sequences, str(data.get("source")), len(sequences), 0, len(sequences), total, total)

    def path(self, block: int) -> Path:
        return self.directory / f"block-{block:05d}.safetensors"

    def has(self, block: int) -> bool:
        return self.path(block).exists()

    def write(self, block: int, result: BlockSums) -> None:
        metadata = {"sites": json.dumps(result.sites), "never_ran": json.dumps(result.never_ran)}
        write_file(self.path(block), block_entries(result.sums), metadata)

    def write_all(self, recorded: Iterable[tuple[int, BlockSums | None]], owns: Callable[[int], bool]) -> Iterator[int]:
        """Write this rank's blocks, each while the next one's sums are taken; yields each block once it is done.

        With several ranks the next sums wait for every rank: one that wrote would keep the others waiting.
        """
        behind: list[tuple[int, Future[None]]] = []
        with ThreadPoolExecutor(1) as writer:
            for block, sums in recorded:
                yield from _written(behind)
                if sums is None or not owns(block):
                    yield block
                    continue
                size = sum(m.nbytes for s in sums.sums.values() for m in (s.xx, s.xq, s.qq))
                behind.append((block, writer.submit(self.write, block, sums)))
                del sums
                if size > BEHIND_BYTES:
                    yield from _written(behind)
            yield from _written(behind)

    def finish(self) -> None:
        self.manifest = {**self.manifest, "finished": True}
        write_json(self.directory / "manifest.json", self.manifest)

    def read(self, block: int) -> BlockSums:
        """Raises CheckpointError if the file is missing, broken or lacks a tensor."""
        file = open_file(self.path(block))
        config = self.manifest["config"]
        try:
            sites = json.loads(file.metadata["sites"])
            never_ran = json.loads(file.metadata["never_ran"])
        except (KeyError, ValueError):
            raise CheckpointError(f"{file.path}: no site list in its header; calibrate again") from None
        sums = {}
        for site in sites:
            smooth = file.read(f"{site}.smooth") if f"{site}.smooth" in file.tensors else None
            rotation, kind = config["rotation"] != "none", config.get("activation", "int4")
            transform = ActivationTransform(smooth, rotation, config["act_clip"], kind)
            xx, xq, qq, absmax = (file.read(f"{site}.{key}") for key in ("xx", "xq", "qq", "absmax"))
            sums[site] = ActivationSums(xx, xq, qq, absmax, int(file.read(f"{site}.tokens")), transform)
        return BlockSums(sites, sums, never_ran)
