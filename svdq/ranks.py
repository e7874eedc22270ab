"""Several processes on one job, as torchrun starts them: who they are, what they agree on, what they add up.

Calibration is data-parallel: each rank runs its share of the sequences, and a block's sums are added up on the rank
that owns the block. Quantization is block-parallel: each rank writes the block files it owns into the work directory,
which all must see, and rank 0 writes the checkpoint when they are all there. Gloo carries what lies on CPUs, NCCL what
lies on GPUs.

A rank that fails ends the job: the others find its connection closed or, once `timeout` seconds bring nothing new, give
up; one of them says why (see `is_first_to_fail`), and finished blocks stay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

from svdq.errors import ConfigError, SvdqError

if TYPE_CHECKING:  # the commands read the options' defaults here, and `svdq --help` loads no torch
    import torch
    from torch import Tensor

T = TypeVar("T")
TIMEOUT = 1800.0  # seconds
_POLL = 0.05
_FAILED = "svdq/failed"


class RanksError(SvdqError):
    """Another rank ended, or does not answer."""


class Ranks:
    """This process among `count`; on its own, every method does nothing or what one process would do."""

    def __init__(self, rank: int = 0, count: int = 1, timeout: float = TIMEOUT):
        self.rank, self.count, self.timeout = rank, count, timeout

    def share(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.rank :: self.count]

    def owner(self, block: int) -> int:
        return block % self.count

    def owns(self, block: int) -> bool:
        return self.owner(block) == self.rank

    def agree(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on all ranks. An SvdqError of rank 0 is raised there, a RanksError on the others."""
        if self.count == 1:
            return make()
        outcome: list[Any] = [None]
        failure: SvdqError | None = None
        if self.rank == 0:
            try:
                outcome = [(True, make())]
            except SvdqError as error:
                failure, outcome = error, [(False, str(error))]
        with _connection() as distributed:
            distributed.broadcast_object_list(outcome, src=0)
        if failure is not None:
            raise failure
        fine, value = outcome[0]
        if not fine:
            raise RanksError(value)
        return value

    def check_same(self, value: Any, what: str) -> None:
        """Raises ConfigError if it is not the same on all ranks."""
        if self.count > 1:
            found: list[Any] = [None] * self.count
            with _connection() as distributed:
                distributed.all_gather_object(found, value)
            if any(one != found[0] for one in found):
                raise ConfigError(f"{what}: not the same on all ranks; calibrate in one process")

    def add(self, tensor: Tensor) -> None:
        """In place: the sum over all ranks."""
        self._reduce("all_reduce", tensor, "SUM")

    def largest(self, tensor: Tensor) -> None:
        """In place: the largest value over all ranks, elementwise."""
        self._reduce("all_reduce", tensor, "MAX")

    def add_on(self, owner: int, tensor: Tensor) -> None:
        """In place on the owner: the sum over all ranks; elsewhere the tensor is used up."""
        self._reduce("reduce", tensor, "SUM", dst=owner)

    def _reduce(self, collective: str, tensor: Tensor, operation: str, **options: Any) -> None:
        if self.count > 1:
            if _warming is not None:  # GPUs must meet in the same order on all ranks
                _warming.join()
            with _connection() as distributed:
                getattr(distributed, collective)(tensor, op=getattr(distributed.ReduceOp, operation), **options)

    def wait(self) -> None:
        """Until all ranks are here."""
        if self.count > 1:
            with _connection() as distributed:
                distributed.barrier()

    def wait_until(self, done: Callable[[], int], total: int, what: str) -> None:
        """Until done() is total. Raises RanksError if a rank fails, or `timeout` seconds bring nothing new."""
        reached, since = done(), time.monotonic()
        while reached < total:
            time.sleep(_POLL)
            if _another_failed():
                raise RanksError("another rank failed; finished blocks are kept")
            if (now := done()) > reached:
                reached, since = now, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                raise RanksError(
                    f"{reached} of {total} {what}, and nothing new for {self.timeout:g} seconds: another rank ended or "
                    "hangs; the same command goes on from there"
                )


ALONE = Ranks()
_warming: Thread | None = None
_joined = ALONE  # what `join` made: a command that does not join is one process, whatever the environment says


def wanted() -> bool:
    """Whether a launcher says that there are several processes."""
    return _number("WORLD_SIZE", 1) > 1


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: wanted a number, as torchrun sets it") from None


def rank() -> int:
    return _joined.rank


def local_device(name: str) -> str:
    """'cuda' and 'auto' mean this rank's own GPU where there are several processes."""
    import torch

    if wanted() and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{_number('LOCAL_RANK', 0)}"
    return name


def join(device: torch.device, timeout: float) -> Ranks:
    """Meet the other processes that the launcher's environment names.

    Raises RanksError if they do not come, ConfigError if the environment lacks something.
    """
    global _joined
    if not wanted():
        _start_warm_up(device)
        return ALONE
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
    with _connection() as distributed:
        if not distributed.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            try:
                distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
            except ValueError as error:  # a variable is missing
                raise ConfigError(f"{error}; WORLD_SIZE says that there are several processes: use torchrun") from None
        _joined = Ranks(distributed.get_rank(), distributed.get_world_size(), timeout)
    _start_warm_up(device)
    return _joined


def _start_warm_up(device: torch.device) -> None:
    """On a GPU, beside imports that take seconds: the first collective, which connects the GPUs, and the first
    factorization, which loads a library."""
    global _warming
    import torch

    def warm_up() -> None:
        with suppress(RuntimeError):  # it comes again where the result is wanted
            torch.linalg.cholesky(torch.eye(8, dtype=torch.float64, device=device))
            if _joined.count > 1:
                torch.distributed.all_reduce(torch.zeros(1, device=device))

    if device.type == "cuda":
        _warming = Thread(target=warm_up, daemon=True)
        _warming.start()


def is_first_to_fail() -> bool:
    """Whether this process should say why the job ends: one of the ranks does, the first."""
    if _joined is ALONE:
        return True
    try:
        return _shared().add(_FAILED, 1) == 1
    except (RuntimeError, ValueError):  # it ended with the rank that kept it
        return True


def leave() -> None:
    """Part from the others, where all ended well."""
    global _joined
    if _joined is not ALONE:
        from torch import distributed

        distributed.destroy_process_group()
        _joined = ALONE


def _shared() -> Any:
    """The keys and values that all ranks see."""
    from torch import distributed

    return distributed.distributed_c10d._get_default_store()


def _another_failed() -> bool:
    if _joined is ALONE:
        return False
    try:
        return bool(_shared().check([_FAILED]))
    except (RuntimeError, ValueError):
        return True


@contextmanager
def _connection() -> Iterator[Any]:
    """Gives torch.distributed; what it raises about another rank becomes a RanksError."""
    from torch import distributed

    try:
        yield distributed
    except RuntimeError as error:  # of gloo, NCCL or the store; their own types derive from it
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RanksError(
            f"another rank ended or does not answer ({reason[:200]}); finished blocks are kept, "
            "the same command goes on from there"
        ) from None
