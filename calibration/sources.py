"""Where rows come from: files, saved datasets, the hub; and what a row is: text, chat messages or token ids.

Every fault of a file is a DataError that names the file and the line or row. Readers are generators: nothing is read
before it is asked for.
"""

from __future__ import annotations

import csv
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from svdq.errors import DataError

_SUFFIXES = (".txt", ".jsonl", ".json", ".csv", ".parquet")
_COLUMNS = ("input_ids", "text", "messages", "conversations", "content")  # the first one present is read


# ---- where the rows are


def locate(source: str) -> tuple[str, list[Path], str | None]:
    """What a source names: ("files", files, column), ("saved", [directory], column) or ("hub", [], column)."""
    name, *rest = source.split(":")
    head, _, last = source.rpartition(":")
    with foreign_errors(source[:100], "give a file, a directory or a hub name"):
        whole = Path(source).exists() or not head
        path, column = (Path(source), None) if whole else (Path(head), last or None)
        if not source.strip() or not path.exists():
            path = Path(name)
            typed = re.fullmatch(r"\.[A-Za-z]\w*", path.suffix) and "/" not in name  # not "wikitext-2.0"
            beside = "/" in name and path.parent.is_dir()
            if typed or beside or path.suffix.lower() in _SUFFIXES or name.startswith((".", "/", "~")) or not name:
                raise DataError(f"{name or source!r}: no such file or directory; check the path")
            if len(rest) > 3:
                raise DataError(f"{source}: {len(rest) + 1} parts, wanted name:config:split:column")
            return "hub", [], rest[2] or None if len(rest) == 3 else None
    known = ", ".join(_SUFFIXES)
    if not path.is_dir():
        if path.suffix.lower() not in _SUFFIXES or not path.is_file():
            raise DataError(f"{path}: unknown kind of file {path.suffix!r}; give one of {known}")
        return "files", [path], column
    if (path / "dataset_dict.json").exists():
        with foreign_errors(str(path), "save the dataset again"):
            splits = json.loads((path / "dataset_dict.json").read_bytes())["splits"]
            if "train" not in splits and len(splits) != 1:
                raise DataError(f"{path}: has splits {', '.join(splits)} and no train; name one, as {path / splits[0]}")
            path = path / ("train" if "train" in splits else Path(splits[0]).name)  # never outside the directory
    if (path / "state.json").exists():
        return "saved", [path], column
    with foreign_errors(str(path), "check its permissions"):
        found = sorted(p for p in path.iterdir() if p.name[0] != "." and not p.is_dir())
    files = [p for p in found if p.suffix.lower() in _SUFFIXES]
    if not files:
        raise DataError(f"{path}: no file of a known kind in it; give {known} files or a saved dataset")
    return "files", files, column


def read_items(
    source: str,
    kind: str,
    paths: list[Path],
    column: str | None,
    counts: Counter[str],
    vocab_size: int | None,
    limit: int,
) -> Iterator[tuple[str, Any]]:
    """Yield (where, value), value being text, chat messages or int64 ids, until `limit` characters or ids are read."""
    read, ids = 0, None
    for path in paths or [Path()]:
        if kind != "files":
            rows = _dataset_rows(source, kind, path, column)
        elif path.suffix.lower() == ".txt":
            rows = _text_rows(path, counts, limit - read)
        elif path.suffix.lower() == ".parquet":
            rows = _parquet_rows(path, column)
        else:
            rows = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}[path.suffix.lower()](path)
        for where, row in rows:
            counts["found"] += 1
            value = _value(where, row, column, vocab_size)
            if value is None:
                counts["blank"] += 1
                continue
            if ids not in (None, isinstance(value, torch.Tensor)):
                raise DataError(f"{where}: text and pre-tokenised rows in one source; give one kind")
            ids = isinstance(value, torch.Tensor)
            yield where, value
            read += len(value) if not isinstance(value, list) else sum(len(str(m["content"])) for m in value)
            if read >= limit:
                return


def first_item(source: str, items: Iterator[Any], counts: Counter[str], has_tokenizer: bool) -> tuple[str, Any]:
    first = next(items, None)
    if first is None:
        raise DataError(f"{source}: empty ({counts['found']:,} rows, all blank); give a source with text")
    if not has_tokenizer and not isinstance(first[1], torch.Tensor):
        raise no_tokenizer(source)
    return first


# ---- one reader for each kind of file, yielding (where, row)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield f"{path}, line {number}", raw.decode()
    except UnicodeDecodeError as error:
        bad = f"byte {raw[error.start]:#04x} is not UTF-8"
        raise DataError(f"{path}, line {number}: {bad}; convert the file to UTF-8") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file and its permissions") from error


def _text_rows(path: Path, counts: Counter[str], limit: int) -> Iterator[tuple[str, str]]:
    """One row, the document; its lines are what is counted."""
    kept: list[str] = []
    read = 0
    for _, line in _lines(path):
        if line.strip():
            kept.append(line.rstrip("\r\n"))
            read += len(line)
        counts["found"] += 1
        counts["blank"] += not line.strip()
        if read >= limit:
            break
    if kept:
        counts["found"] -= 1  # the caller counts one
        yield str(path), "\n".join(kept)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for where, line in _lines(path):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: not JSON ({one_line(error)}); give one JSON value a line") from None
            yield where, row


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """A list of rows, or else one row a line."""
    lines = _lines(path)
    start = next((line for _, line in lines if line.strip()), "")
    if not start.lstrip().startswith("["):
        yield from _jsonl_rows(path)
        return
    try:
        rows = json.loads("".join(line for _, line in _lines(path)))
    except (ValueError, RecursionError) as error:
        at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{path}{at}: not JSON ({one_line(error)}); give one list of rows") from None
    for i, row in enumerate(rows, 1):
        yield f"{path}, row {i}", row


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(line for _, line in _lines(path))
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row:
                raise DataError(f"{where}: more fields than the header has; quote fields that hold commas")
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error}); repair it or give .jsonl") from None


def _parquet_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet

    with foreign_errors(str(path), "write the parquet file again"), pyarrow.parquet.ParquetFile(path) as file:
        names = _wanted(file.schema_arrow.names, column)
        tables = file.iter_batches(batch_size=256, columns=names)
        for i, row in enumerate(chain.from_iterable(table.to_pylist() for table in tables), 1):
            yield f"{path}, row {i}", row


def _dataset_rows(source: str, kind: str, path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    import datasets

    with foreign_errors(source, "check the name and the network" if kind == "hub" else "save the dataset again"):
        if kind == "hub":
            name, config, split = [*source.split(":"), "", ""][:3]
            rows = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        else:
            rows = datasets.load_from_disk(str(path))
        if rows.column_names:
            rows = rows.select_columns(_wanted(rows.column_names, column))  # images are not decoded in vain
        for i, row in enumerate(rows.with_format(None), 1):
            yield f"{source}, row {i}", row


# ---- from a row to text or ids


def _wanted(names: list[str], column: str | None) -> list[str]:
    """The columns to read: one, with the mask that belongs to ids; all if `pick_column` has to look at the values."""
    name = column or next((known for known in _COLUMNS if known in names), None)
    if name not in names:
        return names
    return [n for n in names if n == name or (n == "attention_mask" and name == "input_ids")]


def pick_column(where: str, row: dict[str, Any], column: str | None) -> str | None:
    """The column to read; None if the only candidates are null in this row."""
    name = column or next((known for known in _COLUMNS if known in row), None)
    found = ", ".join(map(str, row)) or "none"
    if name and name not in row:
        raise DataError(f"{where}: no column {name!r}, found {found}")
    strings = [n for n, value in row.items() if isinstance(value, str)]
    if name or (not strings and None in row.values()):
        return name
    if len(strings) != 1:
        raise DataError(f"{where}: no text column, found {found}; name one by adding :COLUMN to the source")
    return strings[0]


def _value(where: str, row: Any, column: str | None, vocab_size: int | None) -> Any:
    """The row's text, chat messages or ids; None if it is blank."""
    if not isinstance(row, (str, dict)):
        raise DataError(f"{where}: a row of type {type(row).__name__}, wanted an object or a string")
    row = {"text": row} if isinstance(row, str) else row
    name = pick_column(where, row, column)
    value = row.get(name)
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and name not in ("input_ids", "messages", "conversations"):
        return value
    if isinstance(value, list) and name not in ("input_ids", "text", "content") and isinstance(value[0], dict):
        for message in value:
            if not (isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message):
                raise DataError(f"{where}: {name} holds {reprlib.repr(message)}, wanted messages of role and content")
        return value
    if isinstance(value, list) and name not in _COLUMNS[1:]:
        return _ids(where, str(name), value, row.get("attention_mask") if name == "input_ids" else None, vocab_size)
    raise DataError(f"{where}: {name} is of type {type(value).__name__}, wanted text, chat messages or a list of ids")


def _ids(where: str, name: str, ids: list[Any], mask: Any, vocab_size: int | None) -> torch.Tensor | None:
    """Checked ids without the positions that the mask calls padding; None if none is left."""
    end = vocab_size or 1 << 63
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < end:  # isinstance would take a bool
            raise DataError(f"{where}: {name}[{i}] is {reprlib.repr(token)}, wanted an integer from 0 to {end - 1}")
    if mask is not None:
        if not isinstance(mask, list) or len(mask) != len(ids) or any(type(m) not in (int, bool) for m in mask):
            raise DataError(f"{where}: attention_mask is {reprlib.repr(mask)}, wanted {len(ids)} zeros and ones")
        ids = [token for token, seen in zip(ids, mask, strict=True) if seen]
    return torch.tensor(ids, dtype=torch.int64) if ids else None


# ---- errors


@contextmanager
def foreign_errors(where: str, do: str) -> Iterator[None]:
    """Other libraries raise anything at bad input: say where and what in one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{where}: {type(error).__name__}: {one_line(error)}; {do}") from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def no_tokenizer(source: str) -> DataError:
    do = "put the tokenizer's files there, or give pre-tokenised .jsonl rows of input_ids"
    return DataError(f"{source}: holds text, and the model directory has no tokenizer files; {do}")
