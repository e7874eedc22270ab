"""Run a model block by block, and watch what its linears read.

The whole model never exists. One skeleton run with every block replaced by a pass-through records, per batch, with
which arguments each block is called (masks, rotary tables: they differ between blocks in some models). Then each
block gets its weights, maps the hidden states of all batches to the next ones, and loses its weights again. That
holds if a block takes the hidden states first and hands them, untouched, to the next block; the skeleton run checks
it instead of assuming it. A block that the model visits twice is run twice, and its sums hold both visits.

Linears that read the same tensor form a site: seen by identity of the input, not by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from svdq.calibration.search import SAMPLE_TOKENS, search_smoothing
from svdq.calibration.states import Room, States
from svdq.calibration.statistics import ChannelStatistics, SumAccumulator, add_up
from svdq.config import CalibrationConfig
from svdq.errors import CheckpointError, DataError
from svdq.models import Linear, Model, materialize, read_weight, release
from svdq.objective import ActivationSums
from svdq.ranks import ALONE, Ranks
from svdq.rounding import ActivationTransform

REPLAY_BYTES = 2 << 30  # a block's inputs up to this size are kept between the two passes instead of run again


@dataclass
class _Call:
    """One call of a block in the skeleton run, the hidden states taken out."""

    args: tuple
    kwargs: dict[str, Any]

    @torch.no_grad()
    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        if "hidden_states" in self.kwargs:
            output = block(*self.args, **(self.kwargs | {"hidden_states": hidden}))
        else:
            output = block(hidden, *self.args[1:], **self.kwargs)
        return output if isinstance(output, Tensor) else output[0]


@dataclass
class Visit:
    """One visit of one block: its module holds weights while this is the current item of the iteration."""

    block: int
    path: str
    module: nn.Module
    calls: list[_Call]
    inputs: States
    last: bool  # no later visit of the same block
    earlier: list[tuple[list[_Call], States]]  # calls and inputs of earlier visits of the same block

    def run(self) -> States:
        outputs = self.inputs.empty()
        for call, x in zip(self.calls, self.inputs, strict=True):
            outputs.append(call.run(self.module, x))
        return outputs

    def run_all(self) -> None:
        """Run every visit of this block so far, for the hooks' sake; outputs are dropped."""
        for calls, inputs in [*self.earlier, (self.calls, self.inputs)]:
            for call, x in zip(calls, inputs, strict=True):
                call.run(self.module, x)


class BlockStream:
    """The hidden states of all batches on their way through the blocks.

    batches  int64 (B, T) token ids, each
    dtype    what the blocks compute in
    room     where hidden states may lie; by default in memory without limit
    """

    def __init__(
        self,
        model: Model,
        batches: list[Tensor],
        device: torch.device,
        dtype: torch.dtype,
        room: Room | None = None,
    ):
        self.model, self.batches, self.device, self.dtype = model, batches, device, dtype
        self._rest = list(dict.fromkeys(path.rpartition(".")[0] for path in model.blocks))  # the lists of blocks
        self._modules = [model.tree.get_submodule(path) for path in model.blocks]
        self._as_tuple: bool | None = None  # what blocks return: not known before one has run
        self._order: list[int] = []
        self._calls: list[list[_Call]] = []  # per visit, per batch
        self.hidden = States(room or Room(device))
        with torch.no_grad():
            self._skeleton_run()

    def _skeleton_run(self) -> None:
        base_name = getattr(self.model.tree, "base_model_prefix", "")
        base = getattr(self.model.tree, base_name, self.model.tree) if base_name else self.model.tree
        base_path = base_name if base is not self.model.tree else ""
        materialize(self.model, base_path, self.device, self.dtype, skip=self._rest)
        for batch in self.batches:
            recorder = _SkeletonBatch(self)
            with _ReplacedForwards(self._modules, recorder.visit):
                try:
                    base(input_ids=batch.to(self.device))
                except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                    raise CheckpointError(
                        f"{type(self.model.tree).__name__}: does not run with its blocks taken out ({reason}); "
                        "svdq streams models whose blocks feed each other one hidden state"
                    ) from error
            order = [index for index, _ in recorder.calls]
            if self._order and order != self._order:
                raise CheckpointError("the order of the blocks differs between batches; svdq cannot stream this model")
            self._order = order
            self._calls.extend([] for _ in range(len(order) - len(self._calls)))
            for position, (_, call) in enumerate(recorder.calls):
                self._calls[position].append(call)
        release(self.model, base_path, skip=self._rest)

    def packed(self, hidden: Tensor) -> Tensor | tuple[Tensor]:
        """Hidden states in the form in which this model's blocks return them."""
        return (hidden,) if self._as_tuple else hidden

    @property
    def visits(self) -> int:
        """How many block visits an iteration yields."""
        return len(self._order)

    def __iter__(self) -> Iterator[Visit]:
        """Each visit in turn; after the consumer is done with it, `hidden` moves on to the next block's inputs."""
        remaining = {index: self._order.count(index) for index in set(self._order)}
        earlier: dict[int, list] = {}
        for position, index in enumerate(self._order):
            path, module = self.model.blocks[index], self._modules[index]
            materialize(self.model, path, self.device, self.dtype)
            remaining[index] -= 1
            visit = Visit(
                index,
                path,
                module,
                self._calls[position],
                self.hidden,
                remaining[index] == 0,
                earlier.get(index, []),
            )
            self._next: States | None = None
            yield visit
            if self._next is None:
                self._next = visit.run()
            if remaining[index]:
                earlier.setdefault(index, []).append((visit.calls, visit.inputs))
            else:
                earlier.pop(index, None)
            self.hidden = self._next
            self._calls[position] = []
            release(self.model, path)

    def advance(self, outputs: States) -> None:
        """The consumer has run the current visit itself: these are its outputs."""
        self._next = outputs

    def finish(self, consume: Callable[[int, Tensor, Tensor], None], streams: Sequence[Sequence[Tensor]]) -> None:
        """Run the model's tail (norm, head) on final hidden states: consume(stream, batch, output) for each.

        streams  lists of final hidden states, one per batch; output is the model's first output (logits, states)
        """
        materialize(self.model, "", self.device, self.dtype, skip=self._rest)
        with torch.no_grad():
            for number, states in enumerate(streams):
                for batch, final in zip(self.batches, states, strict=True):

                    def visit(index, original, args, kwargs, final=final):
                        return self.packed(final)

                    with _ReplacedForwards(self._modules, visit):
                        consume(number, batch, self.model.tree(input_ids=batch.to(self.device))[0])
        release(self.model, "", skip=self._rest)


class _SkeletonBatch:
    """What the blocks of the skeleton are called with for one batch."""

    def __init__(self, stream: BlockStream):
        self.stream = stream
        self.calls: list[tuple[int, _Call]] = []
        self.previous: Tensor | None = None
        self.version = 0

    def visit(self, index: int, original: Callable, args: tuple, kwargs: dict) -> Tensor | tuple[Tensor]:
        """Stands in for the forward of block `index`: records the call, hands the hidden states on."""
        stream, path = self.stream, self.stream.model.blocks[index]
        by_name = "hidden_states" in kwargs
        hidden = kwargs["hidden_states"] if by_name else args[0] if args else None
        if not isinstance(hidden, Tensor):
            raise CheckpointError(f"{path}: its first argument is not a tensor of hidden states")
        if self.previous is None:
            stream.hidden.append(hidden)
        elif (hidden.data_ptr(), hidden.shape, hidden._version) != (
            self.previous.data_ptr(),
            self.previous.shape,
            self.version,  # an operation in place leaves the address and counts this up
        ):
            raise CheckpointError(
                f"{path}: the model changes the hidden states between its blocks; "
                "svdq can stream only blocks that feed each other directly"
            )
        if stream._as_tuple is None:
            stream._as_tuple = self._run_once(index, original, args, kwargs, hidden)
        call = _Call(args, {**kwargs, "hidden_states": None}) if by_name else _Call((None, *args[1:]), kwargs)
        self.calls.append((index, call))
        self.previous, self.version = hidden, hidden._version
        return stream.packed(hidden)

    def _run_once(self, index: int, original: Callable, args: tuple, kwargs: dict, hidden: Tensor) -> bool:
        """Run the real block, to see whether it returns a tensor or a tuple."""
        stream, path = self.stream, self.stream.model.blocks[index]
        materialize(stream.model, path, stream.device, stream.dtype)
        output = original(*args, **kwargs)
        release(stream.model, path)
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, Tensor) or states.shape != hidden.shape:
            raise CheckpointError(f"{path}: does not map hidden states to hidden states")
        return isinstance(output, tuple)


class _ReplacedForwards:
    """Inside, every block's forward is `visit(index, original forward, args, kwargs)`; the modules stay themselves."""

    def __init__(self, modules: list[nn.Module], visit: Callable):
        self.modules, self.visit = modules, visit

    def __enter__(self) -> None:
        for index, module in enumerate(self.modules):
            original = module.forward

            def forward(*args, _index=index, _original=original, **kwargs):
                return self.visit(_index, _original, args, kwargs)

            module.forward = forward  # type: ignore[method-assign]

    def __exit__(self, *exception) -> None:
        for module in self.modules:
            del module.forward


class _Hooks:
    """Call `see(linear, input)` before each of these linears runs, while the context lasts."""

    def __init__(self, tree: nn.Module, linears: list[Linear], see: Callable[[Linear, Tensor], None]):
        self.tree, self.linears, self.see = tree, linears, see

    def __enter__(self) -> None:
        self.handles = []
        for linear in self.linears:
            module = self.tree.get_submodule(linear.module)

            def hook(_module, args, _linear=linear):
                self.see(_linear, args[0])

            self.handles.append(module.register_forward_pre_hook(hook))

    def __exit__(self, *exception) -> None:
        for handle in self.handles:
            handle.remove()


def watch_inputs(tree: nn.Module, linears: list[Linear], see: Callable[[Linear, Tensor], None]) -> _Hooks:
    return _Hooks(tree, linears, see)


_real_tokens: ContextVar[Tensor | None] = ContextVar("real_tokens", default=None)


@contextmanager
def real_tokens(mask: Tensor | None) -> Iterator[None]:
    """Inside, `token_rows` leaves padding out of inputs of this shape. mask: bool (rows, tokens), True for a token."""
    before = _real_tokens.set(mask)
    try:
        yield
    finally:
        _real_tokens.reset(before)


def token_rows(x: Tensor, channels: int) -> Tensor:
    """Any input of a linear as (tokens, k): [1, 1, K] and [1, K] are both one token."""
    mask = _real_tokens.get()
    return x[mask] if mask is not None and x.shape[:-1] == mask.shape else x.reshape(-1, channels)


@dataclass
class BlockSums:
    """What one block's calibration gives: site leader → the names that share its input, and its sums."""

    sites: dict[str, list[str]]
    sums: dict[str, ActivationSums]
    never_ran: list[str]


def record_block(
    stream: BlockStream, visit: Visit, linears: list[Linear], config: CalibrationConfig, ranks: Ranks = ALONE
) -> BlockSums | None:
    """Both passes over one block; also advances the stream. None until the block's last visit.

    ranks   with several, the rank that owns the block has the sums, the others have none
    Raises  DataError naming linear and sequence if an input is not finite.
    """
    if not visit.last:
        return None
    first = _FirstPass(visit, samples=config.smoothing == "search")
    with watch_inputs(stream.model.tree, linears, first.see):
        stream.advance(first.run())
    ranks.check_same(first.members, f"{visit.path}: which linears share an input")
    add_up(list(first.statistics.values()), ranks)
    by_name = {linear.name: linear for linear in linears}
    accumulators: dict[str, SumAccumulator] = {}
    sums: dict[str, ActivationSums] = {}

    def finish(name: str) -> None:
        accumulator = accumulators.pop(name)
        if ranks.count > 1:
            accumulator.add_up(ranks, ranks.owner(visit.block), first.statistics[name].tokens)
        if ranks.owns(visit.block):
            sums[name] = accumulator.finish()

    for leader, statistics in first.statistics.items():
        rotation, smooth = config.rotation != "none", None
        if isinstance(config.smoothing, str):
            weights = [read_weight(stream.model, by_name[name]) for name in first.members[leader]]
            rows = torch.cat(first.sampled[leader])
            smooth = search_smoothing(statistics.absmax, rows, weights, rotation=rotation, clip=config.act_clip)
        else:
            smooth = statistics.smoothing(config.smoothing)
        transform = ActivationTransform(smooth, rotation, config.act_clip, config.activation)
        accumulators[leader] = SumAccumulator(statistics.absmax, transform)
        if first.kept is not None:  # one site at a time: of a wide one the float64 sums are gigabytes
            for rows in first.kept.pop(leader):
                accumulators[leader].add(rows)
            finish(leader)
    if first.kept is None:
        leaders = [linear for linear in linears if linear.name in accumulators]
        with watch_inputs(
            stream.model.tree, leaders, lambda linear, x: accumulators[linear.name].add(token_rows(x, linear.k))
        ):
            visit.run_all()
        for leader in first.statistics:
            finish(leader)
    never_ran = [linear.name for linear in linears if linear.name not in first.leader_of]
    return BlockSums(first.members, sums, never_ran)


class _FirstPass:
    """One run of a block over all its inputs: which linears share an input, and each site's channel statistics.

    A site is named by its leader, the first linear that read the input. `kept` holds the leaders' inputs for the
    second pass, or None once they would take more than REPLAY_BYTES, or than the room has left; with `samples`,
    `sampled` holds every so-manieth
    row of them for the search of a smoothing.
    """

    def __init__(self, visit: Visit, *, samples: bool):
        self.visit = visit
        self.sampled: dict[str, list[Tensor]] = {}
        self._stride = max(1, visit.inputs.tokens // SAMPLE_TOKENS) if samples else 0
        self.members: dict[str, list[str]] = {}  # leader → the names that share its input
        self.leader_of: dict[str, str] = {}
        self.statistics: dict[str, ChannelStatistics] = {}  # by leader
        self.kept: dict[str, list[Tensor]] | None = {}
        self._kept_bytes, self._most = 0, min(REPLAY_BYTES, visit.inputs.room.spare(visit.inputs.nbytes))
        self._read: dict[tuple, str] = {}  # input identity → leader, within one run of the block
        self._alive: list[Tensor] = []  # inputs are held while the block runs, so that no address is used twice
        self._batch = 0

    def run(self) -> States:
        """The outputs of the current visit; earlier visits of the same block are run for their inputs alone."""
        outputs = self.visit.inputs.empty()
        for calls, inputs in [*self.visit.earlier, (self.visit.calls, self.visit.inputs)]:
            for self._batch, (call, x) in enumerate(zip(calls, inputs, strict=True)):
                output = call.run(self.visit.module, x)
                if inputs is self.visit.inputs:
                    outputs.append(output)
                self._read.clear()
                self._alive.clear()
        return outputs

    def see(self, linear: Linear, x: Tensor) -> None:
        """The hook: `linear` is about to read x."""
        identity = (x.data_ptr(), x.shape, x.stride(), x._version)
        shared = self._read.get(identity) if x.numel() else None  # empty tensors all have the address 0
        leader = self.leader_of.setdefault(linear.name, shared or linear.name)
        if leader != linear.name:  # its leader speaks for it
            if linear.name not in self.members[leader]:
                self.members[leader].append(linear.name)
            return
        self._read[identity] = leader
        self._alive.append(x)
        rows = token_rows(x, linear.k)
        if leader not in self.statistics:
            self.members[leader] = [leader]
            self.statistics[leader] = ChannelStatistics(linear.k, x.device)
        if not self.statistics[leader].add(rows):
            raise DataError(_not_finite(linear, x, self.visit.inputs, self._batch))
        self._keep(leader, rows)
        if self._stride:
            self.sampled.setdefault(leader, []).append(rows[:: self._stride].clone())

    def _keep(self, leader: str, rows: Tensor) -> None:
        self._kept_bytes += rows.numel() * rows.element_size()
        if self._kept_bytes > self._most:
            self.kept = None
        if self.kept is not None:
            self.kept.setdefault(leader, []).append(rows.clone())


def _not_finite(linear: Linear, x: Tensor, inputs: States, batch: int) -> str:
    row = sum(len(states) for states in inputs[:batch])
    if x.dim() > 2 and x.shape[0] == inputs[batch].shape[0]:
        bad = (~torch.isfinite(x)).flatten(1).any(1).nonzero()
        row += int(bad[0]) if len(bad) else 0
    return (
        f"{linear.name}: its input holds a NaN or Inf in calibration sequence {row}; "
        "wanted finite activations; check that sequence and the model's weights"
    )
