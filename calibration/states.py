"""The hidden states between two blocks, one tensor a batch: on the GPU, in host memory or on disk.

A batch lies where there is room first and is given back on the device, one at a time, with the same values wherever it
was. Files stand in the run's own directory and have no name there: the system frees them when the process ends,
however it ends, so that a killed run leaves nothing to clear away. Rejected: mapped files, whose touched pages count as
resident memory, and which turn a full disk into a SIGBUS instead of an error.
"""

from __future__ import annotations

import math
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch import Tensor

from svdq.errors import CheckpointError
from svdq.models import return_freed_memory

DEVICE_BYTES = 2 << 30  # hidden states up to this size stay on a GPU
_CPU = torch.device("cpu")


class Room:
    """How many bytes of hidden states still fit where. What a `States` took comes back when nothing refers to it.

    host_bytes  the most in host memory; None = no limit
    directory   where what exceeds that is written
    """

    def __init__(self, device: torch.device, host_bytes: int | None = None, directory: Path | None = None):
        if host_bytes is not None and directory is None:
            raise ValueError("a limit of host memory wants a directory for what exceeds it")
        self.device, self.directory = device, directory
        self._left: dict[torch.device, float] = {} if device.type == "cpu" else {device: DEVICE_BYTES}
        self._left[_CPU] = math.inf if host_bytes is None else host_bytes

    def take(self, nbytes: int) -> torch.device | None:
        """The first place with so much room, which is then taken; None for the disk."""
        place = next((place for place, left in self._left.items() if nbytes <= left), None)
        if place is not None:
            self._left[place] -= nbytes
        return place

    def give_back(self, taken: list[tuple[torch.device, int]]) -> None:
        for place, nbytes in taken:
            self._left[place] += nbytes

    def spare(self, expected: int) -> float:
        """Host memory that is left for other activations on a CPU once `expected` more bytes of states are there."""
        return self._left[_CPU] - expected if self.device.type == "cpu" else math.inf


class _OnDisk(NamedTuple):
    offset: int
    dtype: torch.dtype
    shape: torch.Size


class States(Sequence[Tensor]):
    """Hidden states in the order of the batches. Reading one gives a tensor on the room's device.

    Raises CheckpointError if the disk does not take what has to lie there.
    """

    def __init__(self, room: Room):
        self.room, self.nbytes, self.tokens = room, 0, 0
        self._held: list[Tensor | _OnDisk] = []
        self._taken: list[tuple[torch.device, int]] = []
        self._file: IO[bytes] | None = None
        weakref.finalize(self, room.give_back, self._taken)

    def empty(self) -> States:
        """Of the same kind and in the same room, with nothing in them yet."""
        return type(self)(self.room)

    def append(self, states: Tensor) -> None:
        states = states.contiguous()  # as it would come back from a file
        self.nbytes += states.nbytes
        self.tokens += states.shape[:-1].numel()
        place = self.room.take(states.nbytes)
        if place is None:
            self._held.append(self._write(states))
        else:
            self._taken.append((place, states.nbytes))
            self._held.append(states.to(place))
        if self.room.device.type == "cpu":
            return_freed_memory()  # after every batch: without, a calibration took 40 % more than its tensors

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.read(index)

    def read(self, number: int) -> Tensor:
        held = self._held[number]
        return (held if isinstance(held, Tensor) else self._read(held)).to(self.room.device)

    def _write(self, states: Tensor) -> _OnDisk:
        try:
            if self._file is None:
                # hidden, and .tmp, for file systems where it has a name for a moment: a run clears such files away
                self._file = tempfile.TemporaryFile(  # noqa: SIM115, it lives as long as this object
                    dir=self.room.directory, prefix=".", suffix=".tmp"
                )
                weakref.finalize(self, self._file.close)
            offset = self._file.seek(0, 2)
            self._file.write(_bytes(states.cpu()))
            self._file.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self.room.directory}: cannot hold the hidden states: {error.strerror}; "
                "free some space, raise --max-host-memory or take fewer --samples"
            ) from None
        return _OnDisk(offset, states.dtype, states.shape)

    def _read(self, stored: _OnDisk) -> Tensor:
        assert self._file is not None
        states = torch.empty(stored.shape, dtype=stored.dtype)
        self._file.seek(stored.offset)
        if self._file.readinto(_bytes(states)) != states.nbytes:  # type: ignore[attr-defined]
            raise CheckpointError(f"{self.room.directory}: hidden states on disk are lost; start again")
        return states


def _bytes(states: Tensor) -> memoryview:
    return states.reshape(-1).view(torch.uint8).numpy().data
