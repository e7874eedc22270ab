"""Run a diffusion transformer block by block.

Its blocks read and return several tensors (picture, text), may lie in several lists, and may read what a block far
before them returned. One skeleton run of each recorded call shows what flows where: every block is replaced by one that
returns placeholders, NaN tensors that take no memory, in the form and of the shapes that the block itself returns when
it is run on the meta device. A placeholder that arrives at a later block is a value that flows between the two; all
else that a block is called with (time embedding, rotary tables, masks) is fixed and kept. A NaN in what is fixed means
that the model computes between its blocks, and such a model is refused.

Then the blocks get their weights one at a time, as in svdq.calibration.capture, and map the values that are alive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from svdq.calibration.capture import BlockStream, _ReplacedForwards, real_tokens
from svdq.calibration.data import batches
from svdq.calibration.recorded import RecordedCall
from svdq.calibration.states import Room, States
from svdq.errors import CheckpointError, DataError
from svdq.models import Model, materialize, release

Key = tuple[int, int]  # a value: the visit that returned it, and the how manieth tensor of what that returned


@dataclass(frozen=True)
class _Value:
    """Stands for a value in the arguments of a call."""

    key: Key


@dataclass(frozen=True)
class _Form:
    """Stands for a tensor in what a block returns."""

    shape: torch.Size
    dtype: torch.dtype

    def placeholder(self, device: torch.device) -> Tensor:
        return torch.full((), torch.nan, dtype=self.dtype, device=device).expand(self.shape)


@dataclass(frozen=True)
class Values:
    """The values that are alive between two blocks, for one recorded call.

    shape  of the hidden states that enter the first block, (pictures, tokens, channels)
    """

    tensors: dict[Key, Tensor]
    shape: torch.Size

    def clone(self) -> Values:
        return Values({key: tensor.clone() for key, tensor in self.tensors.items()}, self.shape)

    def __len__(self) -> int:
        return self.shape[0]


class CallStates(States):
    """`States` of recorded calls: one `Values` a call, each of its tensors where there is room for it."""

    def __init__(self, room: Room):
        super().__init__(room)
        self._calls: list[tuple[dict[Key, int], torch.Size]] = []  # value → which of the tensors it is

    def append(self, values: Values) -> None:  # type: ignore[override]
        places = {}
        for key, tensor in values.tensors.items():
            places[key] = len(self._held)
            super().append(tensor)
        self._calls.append((places, values.shape))
        self.tokens = sum(shape[:-1].numel() for _, shape in self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        places, shape = self._calls[index]
        return Values({key: self.read(place) for key, place in places.items()}, shape)


@dataclass
class _BlockCall:
    """One call of a block in the skeleton run.

    text  bool (pictures, tokens of the text), True for one that is no padding; None where no mask was recorded
    kept  the values that are alive after it
    """

    position: int
    args: tuple
    kwargs: dict[str, Any]
    form: Any  # of what the block returns, its tensors as `_Form`
    text: Tensor | None
    kept: frozenset[Key] = frozenset()

    @torch.no_grad()
    def run(self, block: torch.nn.Module, values: Values) -> Values:
        def place(leaf: Any) -> Any:
            return values.tensors[leaf.key] if isinstance(leaf, _Value) else leaf

        args, kwargs = _map(place, self.args), _map(place, self.kwargs)
        read = [leaf for leaf in _leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in read]
        with real_tokens(self.text):
            output = block(*args, **kwargs)
        if versions != [tensor._version for tensor in read]:
            raise CheckpointError(f"{type(block).__name__}: writes into its inputs; svdq cannot run it twice")
        returned = [leaf for leaf in _leaves(output) if isinstance(leaf, Tensor)]
        alive = {key: tensor for key, tensor in values.tensors.items() if key in self.kept}
        for number, tensor in enumerate(returned):
            if (self.position, number) in self.kept:
                alive[self.position, number] = tensor
        return Values(alive, values.shape)


class DiffusionStream(BlockStream):
    """`BlockStream` on recorded calls: `hidden` holds `Values`, one a call."""

    batches: list[RecordedCall]  # type: ignore[assignment]

    def __init__(
        self,
        model: Model,
        calls: list[RecordedCall],
        device: torch.device,
        dtype: torch.dtype,
        room: Room | None = None,
    ):
        self._forms: dict[tuple, Any] = {}
        super().__init__(model, calls, device, dtype, room)  # type: ignore[arg-type]

    def _skeleton_run(self) -> None:
        release(self.model, "")  # of a run that was stopped inside a block: `form_of` wants none with weights
        materialize(self.model, "", self.device, self.dtype, skip=self._rest)
        self.hidden = CallStates(self.hidden.room)
        for recorded in self.batches:
            skeleton = _Skeleton(self, recorded.real_text(self.device))
            with _ReplacedForwards(self._modules, skeleton.visit):
                self._forward(recorded)
            if not skeleton.calls:
                raise CheckpointError(f"{type(self.model.tree).__name__}: runs without its blocks; nothing to stream")
            skeleton.check_text(recorded)
            if self._order and skeleton.order != self._order:
                raise CheckpointError("the order of the blocks differs between calls; svdq cannot stream this model")
            self._order = skeleton.order
            self._calls.extend([] for _ in range(len(self._order) - len(self._calls)))
            for position, call in enumerate(skeleton.finished()):
                self._calls[position].append(call)  # type: ignore[arg-type]
            self.hidden.append(Values({}, skeleton.shape))
        self._returned = [[call.form for call in calls] for calls in self._calls]  # type: ignore[attr-defined]
        release(self.model, "", skip=self._rest)

    def _forward(self, recorded: RecordedCall) -> Tensor:
        """The transformer's first output on a recorded call. Raises DataError naming the file if it does not run."""
        arguments = recorded.read(self.device, self.dtype)
        try:
            return self.model.tree(**arguments, return_dict=False)[0]
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(
                f"{recorded.file.path}: {type(self.model.tree).__name__} does not run on it with its blocks taken out "
                f"({reason}); wanted its forward's arguments, of a model that only passes tensors between its blocks"
            ) from error

    def form_of(self, index: int, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What a block returns when it is called so, its tensors as `_Form`: seen on the meta device."""
        stored = next(self._modules[index].parameters()).dtype  # not what it will compute in: it holds no weights now

        def to_meta(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.empty_like(leaf, device="meta", dtype=stored if leaf.is_floating_point() else leaf.dtype)

        leaves = _leaves([args, kwargs])
        shapes = tuple(leaf.shape if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        if (index, shapes) not in self._forms:
            output = original(*_map(to_meta, args), **_map(to_meta, kwargs))
            form = _map(lambda leaf: _Form(leaf.shape, self.dtype) if isinstance(leaf, Tensor) else leaf, output)
            self._forms[index, shapes] = form
        return self._forms[index, shapes]

    def finish(self, consume: Callable[[int, Any, Tensor], None], streams: Sequence[Sequence[Any]]) -> None:
        """Run the model's tail on final states: consume(stream, recorded call, the transformer's output) for each."""
        materialize(self.model, "", self.device, self.dtype, skip=self._rest)
        with torch.no_grad():
            for number, states in enumerate(streams):
                for batch, (recorded, final) in enumerate(zip(self.batches, states, strict=True)):
                    forms = iter([forms[batch] for forms in self._returned])
                    position = iter(range(self.visits))

                    def visit(index, original, args, kwargs, forms=forms, position=position, final=final):
                        return _filled(next(forms), next(position), self.device, final.tensors)

                    with _ReplacedForwards(self._modules, visit):
                        output = self._forward(recorded)
                    finite = all(torch.isfinite(tensor).all() for tensor in final.tensors.values())
                    if finite and torch.isnan(output).any():
                        raise CheckpointError(
                            f"{type(self.model.tree).__name__}: its output depends on blocks before the last one; "
                            "svdq cannot compute it block by block"
                        )
                    consume(number, recorded, output)
        release(self.model, "", skip=self._rest)


def pieces(model: Model, sequences: Sequence[Any], tokens_per_batch: int) -> list[Any]:
    """What a stream runs at a time: batches of token sequences, or recorded calls if it is a diffusion transformer."""
    return list(sequences) if model.is_diffusion else batches(sequences, tokens_per_batch)


def open_stream(
    model: Model, parts: list[Any], device: torch.device, dtype: torch.dtype, room: Room | None = None
) -> BlockStream:
    return (DiffusionStream if model.is_diffusion else BlockStream)(model, parts, device, dtype, room)


@dataclass
class _Skeleton:
    """The blocks of the skeleton in one recorded call."""

    stream: DiffusionStream
    text: Tensor | None
    order: list[int] = field(default_factory=list)
    calls: list[_BlockCall] = field(default_factory=list)
    shape: torch.Size = field(default_factory=torch.Size)

    def __post_init__(self) -> None:
        self._keys: dict[int, Key] = {}  # id of a placeholder → what it stands for
        self._alive: list[Tensor] = []  # placeholders and checked tensors are held, so that no id is used twice
        self._sound: set[int] = set()

    def visit(self, index: int, original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Stands in for the forward of block `index`: records the call, returns placeholders."""
        stream, position = self.stream, len(self.calls)
        path = stream.model.blocks[index]
        if position == 0:
            tensors = [kwargs.get("hidden_states"), *args, *kwargs.values()]
            self.shape = next((leaf.shape for leaf in tensors if isinstance(leaf, Tensor)), torch.Size([0, 0, 0]))
        form = stream.form_of(index, original, args, kwargs)

        def name(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in self._keys:
                return _Value(self._keys[id(leaf)])
            self._check(leaf, path)
            return leaf

        self.order.append(index)
        self.calls.append(_BlockCall(position, _map(name, args), _map(name, kwargs), form, self.text))
        output = _filled(form, position, stream.device, {})
        for number, leaf in enumerate(leaf for leaf in _leaves(output) if isinstance(leaf, Tensor)):
            self._keys[id(leaf)] = (position, number)
            self._alive.append(leaf)
        return output

    def _check(self, tensor: Tensor, path: str) -> None:
        if id(tensor) in self._sound or not tensor.is_floating_point():
            return
        if torch.isnan(tensor).any():
            raise CheckpointError(
                f"{path}: what it reads is computed from another block's output between the two, or is NaN; "
                "svdq can stream only blocks that feed each other directly, on finite inputs"
            )
        self._sound.add(id(tensor))
        self._alive.append(tensor)

    def check_text(self, recorded: RecordedCall) -> None:
        """Padding is found by the length of what a linear reads, so text and picture must not be of one length."""
        if self.text is not None and not self.text.all() and self.text.shape[1] == self.shape[1]:
            raise DataError(
                f"{recorded.file.path}: {self.text.shape[1]} tokens of text, some of them padding, and as many of the "
                "picture; wanted another length of the two, to leave the padding out"
            )

    def finished(self) -> list[_BlockCall]:
        """The calls, each with the values that are alive after it: a later block reads them, or the tail may."""
        last = len(self.calls) - 1
        until = {}  # value → the last visit that reads it
        for call in self.calls:
            until.update({leaf.key: call.position for leaf in _leaves([call.args, call.kwargs]) if _is_value(leaf)})
        returned = [leaf for leaf in _leaves(self.calls[last].form) if isinstance(leaf, _Form)]
        until.update({(last, number): last + 1 for number in range(len(returned))})
        for call in self.calls:
            call.kept = frozenset(key for key, end in until.items() if key[0] <= call.position < end)
        return self.calls


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, _Value)


def _filled(form: Any, position: int, device: torch.device, values: dict[Key, Tensor]) -> Any:
    """A form with a tensor in place of every `_Form`: its value where there is one, else a placeholder."""
    count = iter(range(1 << 30))

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, _Form):
            return leaf
        number = next(count)
        return values[position, number] if (position, number) in values else leaf.placeholder(device)

    return _map(fill, form)


def _map(change: Callable[[Any], Any], nested: Any) -> Any:
    """The same tuples, lists and dictionaries with every leaf changed, from left to right."""
    if isinstance(nested, (tuple, list)):
        return type(nested)(_map(change, entry) for entry in nested)
    if isinstance(nested, dict):
        return {key: _map(change, entry) for key, entry in nested.items()}
    return change(nested)


def _leaves(nested: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, nested)
    return found
