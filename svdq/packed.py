"""Decoder models on packed sequences, with a CUDA graph for each of a few lengths.

Requests of different lengths are laid end to end: no padding between them, one product a linear for all. On a GPU a
forward of such a batch is hundreds of small kernels whose launches take longer than they run, so it is captured once
for every bucket of a few total lengths, and replayed: the tokens are padded to the next bucket, and where the sequences
begin is an input of the graph. The padding is a sequence of its own, so that no real token attends to it; everything
else in a decoder layer works token by token. The graphs share one pool of memory, as only one runs at a time.

Attention is torch's: `torch.nn.attention.varlen` for 16-bit tensors on a GPU where torch has it, else
`scaled_dot_product_attention` with a mask (there a NaN in one sequence reaches the others: masked, it is still added).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from svdq.decoder import FAMILIES, W4A4DecoderBlock, is_fusable
from svdq.errors import ConfigError

BUCKETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_NAME = "svdq_packed"  # of the attention among transformers' own


@dataclass(frozen=True)
class _Packing:
    """Where the sequences of a batch lie: starts (sequences + 1,) int32; sequence, position (tokens,) of each token."""

    starts: Tensor
    sequence: Tensor
    position: Tensor

    @cached_property
    def mask(self) -> Tensor:
        """(tokens, tokens): which earlier tokens of its own sequence each token sees."""
        same = self.sequence[:, None] == self.sequence[None, :]
        return same & (self.position[None, :] <= self.position[:, None])


def _packing(starts: Tensor, tokens: int) -> _Packing:
    index = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), index, right=True, out_int32=True)
    return _Packing(starts, sequence, index - starts[sequence])


@cache
def _varlen() -> tuple[Any, frozenset[str]]:
    """(torch's attention of packed sequences or None, the names of its arguments)."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10
    except ImportError:
        return None, frozenset()
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: _Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers asks: query (1, heads, tokens, d), key, value (1, k_heads, tokens, d) → (1, tokens, heads, d)."""
    tokens, d = query.shape[2:]
    scaling = d**-0.5 if scaling is None else scaling
    varlen, names = _varlen()
    able = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and ("scale" in names or scaling == d**-0.5)
    if varlen and able:
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        options: dict[str, Any] = {"scale": scaling} if "scale" in names else {}
        if "enable_gqa" in names:
            options["enable_gqa"] = q.shape[1] != k.shape[1]
        elif q.shape[1] != k.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        if "window_size" in names:
            options["window_size"] = (sliding_window - 1 if sliding_window else -1, 0)
        elif not sliding_window:
            options["is_causal"] = True
        if "window_size" in names or not sliding_window:
            return varlen(q, k, v, packing.starts, packing.starts, tokens, tokens, **options)[None], None
    mask = packing.mask
    if sliding_window:
        mask = mask & (packing.position[:, None] - packing.position[None, :] < sliding_window)
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)


class PackedRunner:
    """Runs the decoder layers of a model on packed sequences; on a GPU by CUDA graphs.

    model          a causal language model or backbone of svdq.decoder.FAMILIES, quantized or not, in eval mode. Its
                   parameters must stay where they are while the runner lives.
    buckets        total lengths to pad to. What is longer than the last one runs as it is, without a graph, and so does
                   everything if there are none.
    max_sequences  in one batch at most
    embeddings     inputs are embeddings (tokens, hidden), not token ids (tokens,)
    graphs         whether to capture graphs; None: on a GPU

    A runner owns its inputs' buffers and its graphs' memory: one thread, one stream at a time. No autocast inside.
    captures counts the graphs that were captured, eager_runs the batches that ran without one.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        buckets: Sequence[int] = BUCKETS,
        max_sequences: int = 64,
        embeddings: bool = False,
        graphs: bool | None = None,
    ):
        body: Any = getattr(model, "model", model)
        layers = getattr(body, "layers", ())
        if not layers or not all(is_fusable(layer) or isinstance(layer, W4A4DecoderBlock) for layer in layers):
            raise ConfigError(
                f"found {type(model).__name__}; wanted a model of decoder layers of {', '.join(FAMILIES)}"
            )
        if sorted(set(buckets)) != list(buckets) or min(buckets, default=1) < 1:
            raise ConfigError(f"buckets={tuple(buckets)}: wanted lengths that grow")
        if max_sequences < 1:
            raise ConfigError(f"max_sequences={max_sequences}: wanted at least 1")
        if any(layer.self_attn.config is not body.config for layer in layers):
            raise ConfigError(f"{type(model).__name__}: its layers' configuration is not the model's own object")
        parameter = next(body.parameters())
        self.body, self.device = body, parameter.device
        self.buckets, self.max_sequences, self.embeddings = tuple(buckets), max_sequences, embeddings
        self.graphs = self.device.type == "cuda" if graphs is None else graphs
        if self.graphs and self.device.type != "cuda":
            raise ConfigError(f"graphs=True: the model is on {self.device}")
        longest = max(buckets, default=0)
        shape = (longest, body.config.hidden_size) if embeddings else (longest,)
        kind = body.norm.weight.dtype if embeddings else torch.long
        self._inputs = torch.zeros(shape, dtype=kind, device=self.device)
        self._starts = torch.zeros(max_sequences + 2, dtype=torch.int32, device=self.device)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._stream: Any = torch.cuda.Stream(self.device) if self.graphs else None  # of every capture
        self._warned = False
        self.captures = self.eager_runs = 0

    def warm_up(self) -> None:
        """Capture every bucket now, so that no request has to wait for it."""
        for bucket in reversed(self.buckets):  # the largest first: the others find its memory
            if self.graphs and bucket not in self._captured:
                self._capture(bucket)

    @torch.no_grad()
    def __call__(self, inputs: Tensor, lengths: Sequence[int]) -> Tensor:
        """inputs of all sequences end to end, their lengths → hidden states after the last norm, (tokens, hidden).

        Raises ConfigError if the lengths do not add up to the inputs or are too many, or for inputs of another kind.
        """
        tokens = len(inputs)
        wanted = (tokens, *self._inputs.shape[1:])
        if inputs.shape != wanted or inputs.is_floating_point() != self.embeddings:
            kind = "embeddings" if self.embeddings else "token ids"
            raise ConfigError(f"inputs: found {inputs.dtype} {list(inputs.shape)}; wanted {kind} {list(wanted)}")
        if sum(lengths) != tokens or min(lengths, default=0) < 1:
            raise ConfigError(f"lengths={list(lengths)}: wanted at least 1 each, {tokens} in sum")
        if len(lengths) > self.max_sequences:
            raise ConfigError(f"found {len(lengths)} sequences; wanted at most max_sequences={self.max_sequences}")
        bucket = next((size for size in self.buckets if size >= tokens), None)
        starts = torch.zeros(self.max_sequences + 2, dtype=torch.int32)
        starts[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        starts[len(lengths) + 1 :] = bucket or tokens  # the padding, then sequences of no tokens
        if bucket is None:
            if self.buckets and not self._warned:
                self._warned = True
                longest = f"longer than the last bucket, {self.buckets[-1]}"
                warnings.warn(f"{tokens} tokens: {longest}; they run without a graph", stacklevel=2)
            self.eager_runs += 1
            return self._forward(inputs.to(self.device, self._inputs.dtype), starts.to(self.device))
        self._starts.copy_(starts)
        self._inputs[:tokens].copy_(inputs)
        self._inputs[tokens:bucket].zero_()
        if not self.graphs:
            self.eager_runs += 1
            return self._forward(self._inputs[:bucket], self._starts)[:tokens].clone()
        if bucket not in self._captured:
            self._capture(bucket)
        graph, output = self._captured[bucket]
        graph.replay()
        return output[:tokens].clone()  # the next replay of any bucket may write there

    @torch.no_grad()
    def _capture(self, bucket: int) -> None:
        begin = torch.full_like(self._starts, bucket)
        begin[0] = 0
        kept = self._starts.clone()
        self._starts.copy_(begin)
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # what is compiled or set up at the first call must not be captured
                self._forward(self._inputs[:bucket], self._starts)
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = self._forward(self._inputs[:bucket], self._starts)
        self._pool = graph.pool()
        self._captured[bucket] = graph, output
        self.captures += 1
        self._starts.copy_(kept)

    def _forward(self, inputs: Tensor, starts: Tensor) -> Tensor:
        body = self.body
        packing = _packing(starts, len(inputs))
        hidden = (inputs if self.embeddings else body.embed_tokens(inputs))[None]
        positions = packing.position[None]
        rotary = body.rotary_emb(hidden, positions)
        before, body.config._attn_implementation = body.config._attn_implementation, _NAME
        try:
            with torch.autocast(self.device.type, enabled=False):
                for layer in body.layers:
                    hidden = layer(
                        hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary, packing=packing
                    )
        finally:
            body.config._attn_implementation = before
        return body.norm(hidden)[0]
