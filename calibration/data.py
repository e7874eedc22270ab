"""Turn a text source into token sequences for calibration and evaluation.

A source is read row by row. Text and chat rows are tokenized, joined into one stream and cut into sequences of
seq_len tokens, so a short row still counts and nothing is ever padded; pre-tokenised rows stay apart, one sequence a
row. When there is more than asked for, a seeded draw spreads the choice over the whole source, in source order; of
a large source it first draws the texts to tokenize, since tokenizing all of it can take a minute.
Rejected: one padded sequence a row (padding enters the sums, short rows waste the batch), and taking the first
sequences (a file's beginning is rarely like the rest).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from svdq.calibration.sources import first_item, foreign_errors, locate, no_tokenizer, pick_column, read_items
from svdq.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer*.json", "*.model", "vocab.*", "*.tiktoken")
_MAX_READ = 50_000_000  # characters (or ids) read of one source: beyond this a draw gains nothing
_SURPLUS = 32  # characters read from the hub, and tokenized of any source, for each token asked for; a token has 3 to 5
_SMALL = 1 << 21  # characters that are always tokenized: one or two seconds
_PIECE = 1 << 14  # characters of one string given to the tokenizer, where a document is longer
_BATCH = 128  # such strings in one call: the tokenizer keeps over 100 bytes a token while it works


@dataclass(frozen=True, eq=False)
class TokenData:
    """Token sequences and where they came from.

    sequences         int64 [T_i], 2 ≤ T_i ≤ seq_len, never padded, in source order; rows of ids from the shortest on
    rows_found        rows read: lines of a .txt file, else records
    rows_blank        rows without any text or ids
    rows_used         rows from which the sequences were drawn
    requested_tokens  samples · seq_len
    tokens            Σ T_i
    """

    sequences: list[torch.Tensor]
    source: str
    rows_found: int
    rows_blank: int
    rows_used: int
    requested_tokens: int
    tokens: int

    def sha256(self) -> str:
        """Hex digest of each sequence's length and ids, as little-endian int64."""
        digest = hashlib.sha256()
        for sequence in self.sequences:
            digest.update(len(sequence).to_bytes(8, "little") + sequence.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """One line for the user: rows found, blank and used; tokens requested and used."""
        return (
            f"{self.source}: {self.rows_used:,} rows used of {self.rows_found:,} ({self.rows_blank:,} blank); "
            f"{self.tokens:,} of {self.requested_tokens:,} requested tokens in {len(self.sequences):,} sequences "
            f"of up to {max(map(len, self.sequences), default=0):,}"
        )


def load_tokens(
    source: str,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    samples: int,
    seq_len: int,
    min_tokens: int,
    seed: int,
    vocab_size: int | None = None,
) -> TokenData:
    """Read a source and return at most `samples` sequences of at most `seq_len` tokens.

    source      a .txt, .jsonl, .json, .csv or .parquet file, a directory of them, a saved `datasets` directory (each
                may end in :column), or a hub name `name[:config[:split[:column]]]`
    tokenizer   may be None if the rows hold input_ids
    seed        of the draw; the same call gives the same tokens, and no global random state is touched
    vocab_size  ids must lie below it, if given
    Raises      DataError: unreadable, empty, of an unknown kind, or fewer than min_tokens tokens
    """
    if samples < 1 or seq_len < 2:
        raise ConfigError(f"--samples {samples} --seq-len {seq_len}: give at least 1 sample of at least 2 tokens")
    kind, paths, column = locate(source)
    counts: Counter[str] = Counter()
    wanted = _SURPLUS * samples * seq_len
    limit = min(wanted, _MAX_READ) if kind == "hub" else _MAX_READ
    items = read_items(source, kind, paths, column, counts, vocab_size, limit)
    first = first_item(source, items, counts, tokenizer is not None)
    items = chain([first], items)
    generator = torch.Generator().manual_seed(seed)
    if isinstance(first[1], torch.Tensor):
        sequences = list(_split_rows(items, seq_len, counts))
    else:
        texts = _thin(list(_texts(items, tokenizer)), max(wanted, _SMALL), generator)
        sequences = list(_cut_stream(source, texts, tokenizer, seq_len, vocab_size))
    if len(sequences) > samples:
        draw = torch.randperm(len(sequences), generator=generator)[:samples]
        sequences = [sequences[i] for i in draw.sort().values.tolist()]
    if isinstance(first[1], torch.Tensor):
        sequences.sort(key=len)  # rows of ids have lengths of their own: only neighbours of equal length share a batch
    tokens, requested = sum(map(len, sequences)), samples * seq_len
    used = counts["found"] - counts["blank"] - counts["short"]
    if tokens < max(min_tokens, 2):
        do = "raise --samples or --seq-len" if requested < min_tokens else "give more text"
        raise DataError(
            f"{source}: found {tokens:,} tokens in {used:,} rows ({counts['blank']:,} blank ones skipped), "
            f"wanted at least {max(min_tokens, 2):,}; {do} or lower --min-tokens"
        )
    own = [sequence.clone() for sequence in sequences]  # a view would keep the whole stream in memory
    return TokenData(own, source, counts["found"], counts["blank"], used, requested, tokens)


def batches(sequences: Iterable[torch.Tensor], tokens_per_batch: int) -> list[torch.Tensor]:
    """Stack neighbours of equal length into int64 [B, T], B·T ≤ tokens_per_batch unless B is 1.

    Order is kept, and lengths never mix, so there is no padding to mask.
    """
    groups: list[list[torch.Tensor]] = []
    for sequence in sequences:
        last = groups[-1] if groups else []
        if last and len(last[0]) == len(sequence) and (len(last) + 1) * len(sequence) <= tokens_per_batch:
            last.append(sequence)
        else:
            groups.append([sequence])
    return [torch.stack(group) for group in groups]


def has_tokenizer_files(model_dir: str | Path) -> bool:
    return any(path.is_file() for pattern in _TOKENIZER_FILES for path in Path(model_dir).glob(pattern))


def load_tokenizer(model_dir: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase | None:
    """The model directory's tokenizer, or None if it has no tokenizer files. Never asks the hub.

    Raises DataError if the files are there but cannot be used.
    """
    if not has_tokenizer_files(model_dir):
        return None
    from transformers import AutoTokenizer

    with foreign_errors(f"{model_dir}: tokenizer", "copy the tokenizer's files again"):
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True, trust_remote_code=trust_remote_code)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what a missing vocabulary file comes out as
            raise DataError(f"{model_dir}: the tokenizer has no vocabulary; copy the tokenizer's files again")
    return tokenizer


def check_source(source: str, has_tokenizer: bool) -> None:
    """Raise DataError if `load_tokens` is sure to fail, judged by names and the first row that is not blank.

    A hub name is only parsed: the preflight does not wait for the network.
    """
    kind, paths, column = locate(source)
    if kind == "files":
        counts: Counter[str] = Counter()
        first_item(source, read_items(source, kind, paths, column, counts, None, 1), counts, has_tokenizer)
    elif kind == "saved":  # its schema, without the second that importing `datasets` takes
        with foreign_errors(str(paths[0]), "save the dataset again"):
            features = json.loads((paths[0] / "dataset_info.json").read_bytes())["features"]
            strings = {n for n, f in features.items() if isinstance(f, dict) and "string" in f.get("dtype", "")}
            name = pick_column(str(paths[0]), {n: "" if n in strings else 0 for n in features}, column)
        if not has_tokenizer and (name in strings or name in ("messages", "conversations")):
            raise no_tokenizer(source)


# ---- from text or ids to sequences


def _split_rows(items: Iterable[tuple[str, Any]], seq_len: int, counts: Counter[str]) -> Iterator[torch.Tensor]:
    for _, ids in items:
        counts["short"] += len(ids) < 2
        yield from (piece for piece in ids.split(seq_len) if len(piece) >= 2)


def _cut_stream(
    source: str, texts: list[tuple[bool, str]], tokenizer: Any, seq_len: int, vocab_size: int | None
) -> Iterator[torch.Tensor]:
    """Tokenize documents, join them (with bos and eos where the tokenizer has them), cut; encoders get cls … sep."""
    bos, wrap = _special_ids(tokenizer)
    eos, last = tokenizer.eos_token_id, None
    before, after = torch.tensor(wrap[:1], dtype=torch.int64), torch.tensor(wrap[1:], dtype=torch.int64)
    size = seq_len - len(wrap)
    if size < 1:
        raise ConfigError(f"--seq-len {seq_len}: no room beside the tokenizer's cls and sep; give at least 3")
    held = torch.empty(0, dtype=torch.int64)
    for batch in (texts[i : i + _BATCH] for i in range(0, len(texts), _BATCH)):
        stream: list[int] = []
        for (starts, _), ids in zip(batch, _encode(tokenizer, [text for _, text in batch], False), strict=True):
            if starts and eos is not None and last not in (None, eos):
                stream.append(eos)
            if starts and bos is not None and ids[:1] != [bos]:  # chat templates often write it themselves
                stream.append(bos)
            stream += ids
            last = stream[-1] if stream else last
        if vocab_size and max(stream, default=0) >= vocab_size:
            found = f"the tokenizer gives id {max(stream)}, the model's vocabulary has {vocab_size}"
            raise DataError(f"{source}: {found}; use the tokenizer that belongs to the model")
        held = torch.cat([held, torch.tensor(stream, dtype=torch.int64)])
        whole = len(held) // size * size
        yield from (torch.cat([before, piece, after]) for piece in held[:whole].split(size) if len(piece))
        held = held[whole:]
    if len(held) and len(held) + len(wrap) >= 2:
        yield torch.cat([before, held, after])


def _special_ids(tokenizer: Any) -> tuple[int | None, list[int]]:
    """(bos if the tokenizer begins a text with it, [cls, sep] if it wraps a text in them, else [])."""
    plain, full = _encode(tokenizer, ["a"], False)[0], _encode(tokenizer, ["a"], True)[0]
    cls, sep, bos = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id
    if len(full) > len(plain) and None not in (cls, sep) and (full[0], full[-1]) == (cls, sep):
        return None, [cls, sep]
    return (bos if bos is not None and full[:1] == [bos] and plain[:1] != [bos] else None), []


def _encode(tokenizer: Any, texts: list[str], special: bool) -> list[list[int]]:
    # Padding and truncation are said off: tokenizer.json can switch them on. Not verbose: texts may exceed the model.
    off = dict.fromkeys(("padding", "truncation", "return_attention_mask", "return_token_type_ids", "verbose"), False)
    return tokenizer(texts, add_special_tokens=special, **off)["input_ids"]


def _texts(items: Iterable[tuple[str, Any]], tokenizer: Any) -> Iterator[tuple[bool, str]]:
    """Yield (starts a document, text of at most _PIECE characters)."""
    for where, text in items:
        if isinstance(text, list) and not tokenizer.chat_template:
            raise DataError(f"{where}: chat messages, and the tokenizer has no chat template; give rows of text")
        with foreign_errors(where, "repair or remove this row"):
            text = tokenizer.apply_chat_template(text, tokenize=False) if isinstance(text, list) else text
            text.encode()  # JSON can spell half a surrogate pair, which tokenizers refuse
        yield from ((start == 0, text[start:end]) for start, end in _pieces(text))


def _thin(texts: list[tuple[bool, str]], budget: int, generator: torch.Generator) -> list[tuple[bool, str]]:
    """Draw texts, in source order, until `budget` characters are there; a text after a gap starts a document."""
    if sum(len(text) for _, text in texts) <= budget:
        return texts
    kept: set[int] = set()
    for i in torch.randperm(len(texts), generator=generator).tolist():
        kept.add(i)
        budget -= len(texts[i][1])
        if budget <= 0:
            break
    return [(starts or i - 1 not in kept, text) for i, (starts, text) in enumerate(texts) if i in kept]


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Cut (start, end) after a line end, else before a space, else anywhere."""
    start = 0
    while len(text) - start > _PIECE:
        stop = start + _PIECE
        end = text.rfind("\n", start, stop) + 1 or text.rfind(" ", start, stop)
        end = end if end > start else stop
        yield start, end
        start = end
    yield start, len(text)
