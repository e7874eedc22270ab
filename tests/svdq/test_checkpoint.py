"""The reader and the writer of safetensors, against hand-made bytes and against the safetensors library itself."""

import errno
import gc
import hashlib
import json
import os
import resource
import struct
import subprocess
import sys
import weakref

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from svdq.checkpoint import (
    DTYPE_NAMES,
    DTYPES,
    Entry,
    open_file,
    open_model_dir,
    read_json,
    write_file,
    write_json,
)
from svdq.errors import CheckpointError

HUGE = 2**63


def raw_file(header, body=b"", length=None):
    """The bytes of a file: `header` as an object, a JSON string or bytes; `length` overrides the true prefix."""
    if isinstance(header, dict):
        header = json.dumps(header)
    if isinstance(header, str):
        header = header.encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + body


def entry(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def message_of(call, *arguments, **options):
    with pytest.raises(CheckpointError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 3000
    return message


def debris(directory):
    return [item.name for item in directory.iterdir() if item.name.endswith(".tmp")]


def of(tensor, name="w"):
    return Entry(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


# --- hostile headers -------------------------------------------------------------------------------------------------

BODY = bytes(4)
WHOLE_FILE_FAULTS = {
    "empty file": (b"", "header length 0 in a file of 0 bytes"),
    "seven bytes": (b"\x02\0\0\0\0\0\0", "in a file of 7 bytes"),
    "length 0": (raw_file("{}", length=0), "header length 0"),
    "length 2**63": (raw_file("{}", length=HUGE), f"header length {HUGE}"),
    "length 2**64 - 1": (raw_file("{}", length=2**64 - 1), f"header length {2**64 - 1}"),
    "length beyond the file": (raw_file("{}", length=3), "header length 3 in a file of 10 bytes"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "UTF-8"),
    "UTF-16": (raw_file("{}".encode("utf-16")), "begin with '{'"),
    "not JSON": (raw_file("{nonsense}"), "JSON"),
    "two documents": (raw_file("{}{}"), "JSON"),
    "not an object": (raw_file("[1, 2]"), "begin with '{'"),
    "recursion bomb": (raw_file('{"w": ' + "[" * 200_000 + "]" * 200_000 + "}"), "nested too deeply"),
    "object recursion bomb": (raw_file('{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deeply"),
    "integer of 10,000 digits": (raw_file('{"w": ' + "9" * 10_000 + "}"), "JSON"),
    "duplicate field": (raw_file('{"w": {"dtype": "U8", "dtype": "I8"}}'), "duplicate key dtype"),
    "duplicate metadata": (raw_file('{"__metadata__": {"a": "b", "a": "c"}}'), "duplicate key a"),
    "metadata a list": (raw_file({"__metadata__": ["a"]}), "__metadata__"),
    "metadata null": (raw_file({"__metadata__": None}), "__metadata__"),
    "metadata of numbers": (raw_file({"__metadata__": {"rank": 16}}), "__metadata__"),
    "metadata half a surrogate pair": (raw_file('{"__metadata__": {"a": "\\ud800"}}'), "__metadata__"),
    "bytes without tensors": (raw_file({}, b"xyz"), "3 bytes follow"),
}

TENSOR_FAULTS = {
    "entry not an object": ([1], BODY, "wanted an object"),
    "no fields": ({}, BODY, "dtype None"),
    "unknown dtype": (entry("Q4_K"), BODY, "unknown dtype 'Q4_K'"),
    "dtype a list": (entry(["U8"]), BODY, "unknown dtype"),
    "dtype null": (entry(None), BODY, "unknown dtype"),
    "shape missing": ({"dtype": "U8", "data_offsets": [0, 4]}, BODY, "shape None"),
    "shape a number": (entry(shape=4), BODY, "shape 4"),
    "shape a string": (entry(shape="4"), BODY, "shape '4'"),
    "shape of floats": (entry(shape=[4.0]), BODY, "shape [4.0]"),
    "shape of bools": (entry(shape=[4, True]), BODY, "shape [4, True]"),
    "shape negative": (entry(shape=[-2, -2]), BODY, "shape [-2, -2]"),
    "shape nested": (entry(shape=[[4]]), BODY, "shape [[4]]"),
    "product wraps to 4 in 64 bits": (entry(shape=[2**62 + 1, 4]), BODY, "product"),
    "product wraps to 0": (entry(shape=[2**32, 2**32], offsets=[0, 0]), b"", "product"),
    "strides overflow beside a zero": (entry(shape=[0, 2**40, 2**40], offsets=[0, 0]), b"", "product"),
    "product of a million": (entry(shape=[2] * 1_000_000), BODY, "shape"),
    "bytes overflow": (entry("F64", [2**61], [0, 0]), b"", "span 0 bytes"),
    "65 dimensions": (entry(shape=[1] * 64 + [4]), BODY, "shape"),
    "offsets missing": ({"dtype": "U8", "shape": [4]}, BODY, "data_offsets None"),
    "offsets a number": (entry(offsets=4), BODY, "data_offsets 4"),
    "one offset": (entry(offsets=[0]), BODY, "data_offsets [0]"),
    "three offsets": (entry(offsets=[0, 2, 4]), BODY, "data_offsets [0, 2, 4]"),
    "offsets of strings": (entry(offsets=["0", "4"]), BODY, "data_offsets"),
    "offsets of floats": (entry(offsets=[0.0, 4.0]), BODY, "data_offsets"),
    "offsets of bools": (entry(shape=[1], offsets=[False, True]), b"x", "data_offsets"),
    "offsets negative": (entry(offsets=[-4, 0]), BODY, "data_offsets [-4, 0]"),
    "offsets reversed": (entry(offsets=[4, 0]), BODY, "data_offsets [4, 0]"),
    "end past the file": (entry(shape=[5], offsets=[0, 5]), BODY, "holds 4 bytes"),
    "end at 2**64": (entry(offsets=[0, 2**64]), BODY, "holds 4 bytes"),
    "range too short": (entry("F32", [2], [0, 4]), BODY, "span 4 bytes; F32 [2] takes 8"),
    "range too long": (entry(shape=[3]), BODY, "span 4 bytes; U8 [3] takes 3"),
    "hole before the first": (entry(shape=[3], offsets=[1, 4]), BODY, "hole of 1 bytes after the header"),
    "truncated by a byte": (entry(), BODY[:3], "holds 3 bytes"),
    "extra byte at the end": (entry(), BODY + b"x", "1 bytes follow"),
}


@pytest.mark.parametrize(("raw", "expected"), WHOLE_FILE_FAULTS.values(), ids=WHOLE_FILE_FAULTS.keys())
def test_a_broken_file_is_refused_by_name(tmp_path, raw, expected):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(raw)
    message = message_of(open_file, path)
    assert "hostile.safetensors" in message
    assert expected in message


@pytest.mark.parametrize(("fault", "body", "expected"), TENSOR_FAULTS.values(), ids=TENSOR_FAULTS.keys())
def test_a_broken_entry_is_refused_naming_file_and_tensor(tmp_path, fault, body, expected):
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(raw_file({"layers.0.q_proj": fault}, body))
    message = message_of(open_file, path)
    assert "hostile.safetensors" in message
    assert "layers.0.q_proj" in message
    assert expected in message


def test_a_header_beyond_100_megabytes_is_refused_unread(tmp_path):
    path = tmp_path / "big.safetensors"
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", 100_000_001) + b"{}")
        handle.truncate(100_000_100)  # sparse
    assert "100000001" in message_of(open_file, path)


def test_overlapping_tensors_are_refused_naming_both(tmp_path):
    path = tmp_path / "overlap.safetensors"
    path.write_bytes(raw_file({"first": entry(), "second": entry(offsets=[2, 6])}, bytes(6)))
    message = message_of(open_file, path)
    assert "tensor second: overlaps tensor first" in message
    assert str(path) in message


def test_two_names_for_the_same_bytes_are_refused(tmp_path):
    path = tmp_path / "alias.safetensors"
    path.write_bytes(raw_file({"first": entry(), "second": entry()}, BODY))
    assert "overlaps" in message_of(open_file, path)


def test_a_hole_between_tensors_is_refused_naming_both(tmp_path):
    path = tmp_path / "hole.safetensors"
    path.write_bytes(raw_file({"first": entry(), "second": entry(offsets=[7, 11])}, bytes(11)))
    assert "tensor second: leaves a hole of 3 bytes after tensor first" in message_of(open_file, path)


def test_an_empty_tensor_inside_another_is_refused(tmp_path):
    path = tmp_path / "inside.safetensors"
    path.write_bytes(raw_file({"full": entry(), "void": entry(shape=[0], offsets=[2, 2])}, BODY))
    assert "tensor void" in message_of(open_file, path)


def test_a_duplicate_tensor_is_refused_by_name(tmp_path):
    path = tmp_path / "twice.safetensors"
    one = json.dumps(entry())
    path.write_bytes(raw_file(f'{{"w": {one}, "w": {one}}}', BODY))
    message = message_of(open_file, path)
    assert "twice.safetensors" in message
    assert "duplicate key w" in message


@pytest.mark.parametrize("name", ["line\nbreak", "\ud800", "x" * 100_000, "", "\x1b[2J"])
def test_a_hostile_name_cannot_break_the_message(tmp_path, name):
    path = tmp_path / "names.safetensors"
    path.write_bytes(raw_file({name: entry(shape=[3])}, BODY))
    message = message_of(open_file, path)
    assert message.isprintable()
    message.encode()


def test_half_a_surrogate_pair_is_refused_as_a_name(tmp_path):
    path = tmp_path / "names.safetensors"
    path.write_bytes(raw_file('{"\\ud800": ' + json.dumps(entry()) + "}", BODY))
    assert "not valid Unicode" in message_of(open_file, path)


def test_a_missing_file_is_named(tmp_path):
    assert "none.safetensors: cannot be read: No such file" in message_of(open_file, tmp_path / "none.safetensors")


def test_a_directory_is_not_a_file(tmp_path):
    assert "not a regular file" in message_of(open_file, tmp_path)


def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "not a regular file" in message_of(open_file, tmp_path / "pipe.safetensors")


def test_a_nul_in_a_path_is_an_error_like_any_other():
    assert "null byte" in message_of(open_file, "a\0b.safetensors")


# --- reading ---------------------------------------------------------------------------------------------------------

SAMPLES = {
    name: torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    if dtype == torch.bool
    else torch.tensor([[1, 2, 3], [64, 100, 0]]).to(dtype)
    for name, dtype in DTYPES.items()
}


def same_bytes(left, right):
    """Bitwise, since float8 and unsigned tensors have few operators of their own."""
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    return left.reshape(-1).view(torch.uint8).tolist() == right.reshape(-1).view(torch.uint8).tolist()


def test_dtype_names_are_the_inverse_of_dtypes():
    assert {DTYPE_NAMES[dtype]: dtype for dtype in DTYPE_NAMES} == DTYPES
    assert len(DTYPES) == 15


@pytest.mark.parametrize("name", DTYPES)
def test_what_safetensors_writes_is_read_back(tmp_path, name):
    path = tmp_path / "one.safetensors"
    safetensors.torch.save_file({"w": SAMPLES[name]}, path)
    opened = open_file(path)
    assert opened.tensors["w"].dtype == DTYPES[name]
    assert same_bytes(opened.read("w"), SAMPLES[name])


@pytest.mark.parametrize("name", DTYPES)
def test_what_is_written_safetensors_reads_back(tmp_path, name):
    path = tmp_path / "one.safetensors"
    write_file(path, [of(SAMPLES[name])], {})
    assert same_bytes(safetensors.torch.load_file(path)["w"], SAMPLES[name])


def test_hand_made_bytes_are_read_as_the_format_says(tmp_path):
    path = tmp_path / "hand.safetensors"
    header = json.dumps({"__metadata__": {"k": "v"}, "w": entry("F32", [1, 2], [0, 8])}) + "   "
    raw = raw_file(header, struct.pack("<2f", 1.5, -2.0))
    path.write_bytes(raw)
    opened = open_file(path)
    assert opened.read("w").tolist() == [[1.5, -2.0]]
    assert opened.tensors["w"] == (torch.float32, (1, 2), 8 + len(header), 8)
    assert opened.metadata == {"k": "v"}
    assert opened.size == len(raw)
    assert opened.header_sha256 == hashlib.sha256(header.encode()).hexdigest()


def test_a_file_without_tensors_is_legal(tmp_path):
    (tmp_path / "none.safetensors").write_bytes(raw_file({}))
    assert open_file(tmp_path / "none.safetensors").tensors == {}


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (2**40, 0)])
def test_a_tensor_of_no_elements_keeps_its_shape(tmp_path, shape):
    path = tmp_path / "void.safetensors"
    tensors = {"full": torch.ones(2), "void": torch.empty(shape)}
    safetensors.torch.save_file(tensors, path)
    assert open_file(path).read("void").shape == shape
    write_file(path, [of(tensor, name) for name, tensor in tensors.items()], {})
    assert safetensors.torch.load_file(path)["void"].shape == shape
    assert list(open_file(path).chunks("void")) == []


def test_a_scalar_keeps_its_empty_shape(tmp_path):
    path = tmp_path / "scalar.safetensors"
    write_file(path, [of(torch.tensor(0.75, dtype=torch.bfloat16))], {})
    assert open_file(path).read("w").shape == ()
    assert safetensors.torch.load_file(path)["w"].item() == 0.75


def test_a_read_tensor_is_writable_and_its_own(tmp_path):
    path = tmp_path / "own.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path)
    opened = open_file(path)
    opened.read("w").fill_(7)
    assert opened.read("w").tolist() == [0, 0, 0]


@pytest.mark.parametrize("bytes_per_chunk", [1, 5, 12, 100])
def test_chunks_join_to_the_raw_bytes(tmp_path, bytes_per_chunk):
    path = tmp_path / "chunks.safetensors"
    safetensors.torch.save_file({"a": torch.zeros(5), "w": torch.tensor([1, -2, 3], dtype=torch.int32)}, path)
    chunks = list(open_file(path).chunks("w", bytes_per_chunk))
    assert b"".join(chunks) == struct.pack("<3i", 1, -2, 3)
    assert max(map(len, chunks)) <= bytes_per_chunk


def consume(opened, how, name):
    return opened.read(name) if how == "read" else list(opened.chunks(name))


@pytest.mark.parametrize("how", ["read", "chunks"])
def test_an_unknown_tensor_is_named_with_its_file(tmp_path, how):
    path = tmp_path / "known.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path)
    message = message_of(consume, open_file(path), how, "layers.9.up")
    assert str(path) in message
    assert "layers.9.up" in message


@pytest.mark.parametrize("how", ["read", "chunks"])
@pytest.mark.parametrize("kept", [0, 5])
def test_a_file_that_shrinks_after_opening_is_named_with_the_tensor(tmp_path, how, kept):
    path = tmp_path / "shrinks.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path)
    opened = open_file(path)
    os.truncate(path, opened.tensors["w"].offset + kept)
    message = message_of(consume, opened, how, "w")
    assert str(path) in message
    assert "tensor w" in message


@pytest.mark.parametrize("how", ["read", "chunks"])
def test_a_file_removed_after_opening_is_named(tmp_path, how):
    path = tmp_path / "gone.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path)
    opened = open_file(path)
    path.unlink()
    assert str(path) in message_of(consume, opened, how, "w")


# --- model directories -----------------------------------------------------------------------------------------------


def sharded(directory, **shards):
    """Write shard files {stem: tensor names} and their index; returns the directory."""
    weight_map = {}
    for stem, names in shards.items():
        tensors = {name: torch.full((2,), float(len(weight_map) + i)) for i, name in enumerate(names)}
        safetensors.torch.save_file(tensors, directory / f"{stem}.safetensors")
        weight_map |= dict.fromkeys(names, f"{stem}.safetensors")
    write_index(directory, weight_map)
    return directory


def write_index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_an_index_joins_its_shards(tmp_path):
    model = open_model_dir(sharded(tmp_path, one=["a", "b"], two=["c"]))
    assert sorted(model.tensors) == ["a", "b", "c"]
    assert list(model.files) == ["one.safetensors", "two.safetensors"]
    assert model.read("c").tolist() == [2, 2]
    assert model.info("b").shape == (2,)
    assert b"".join(model.chunks("b")) == struct.pack("<2f", 1, 1)


def test_the_single_file_wins_over_an_index(tmp_path):
    sharded(tmp_path, one=["a"])
    safetensors.torch.save_file({"z": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert list(open_model_dir(tmp_path).tensors) == ["z"]


def test_a_lone_file_of_any_name_is_a_model(tmp_path):
    safetensors.torch.save_file({"z": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    assert list(open_model_dir(str(tmp_path)).tensors) == ["z"]


def test_files_without_an_index_are_joined(tmp_path):
    sharded(tmp_path, one=["a"], two=["b"])
    (tmp_path / "model.safetensors.index.json").unlink()
    assert sorted(open_model_dir(tmp_path).tensors) == ["a", "b"]


def test_a_tensor_in_two_files_without_an_index_is_refused_naming_all_three(tmp_path):
    sharded(tmp_path, one=["a", "w"], two=["w"])
    (tmp_path / "model.safetensors.index.json").unlink()
    message = message_of(open_model_dir, tmp_path)
    assert "one.safetensors and two.safetensors both hold tensor w" in message
    assert str(tmp_path) in message


def test_hidden_files_are_not_weights(tmp_path):
    sharded(tmp_path, one=["a"])
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "._one.safetensors").write_bytes(b"a resource fork")
    assert list(open_model_dir(tmp_path).files) == ["one.safetensors"]


def test_an_unknown_tensor_of_a_model_is_named_with_its_directory(tmp_path):
    model = open_model_dir(sharded(tmp_path, one=["a"]))
    for call in (model.info, model.read, model.chunks):
        message = message_of(call, "layers.9.up")
        assert str(tmp_path) in message
        assert "layers.9.up" in message


def test_the_fingerprint_holds_size_and_header_hash_of_every_file(tmp_path):
    model = open_model_dir(sharded(tmp_path, one=["a"], two=["b"]))
    expected = {}
    for name in ("one.safetensors", "two.safetensors"):
        raw = (tmp_path / name).read_bytes()
        header = raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]]
        expected[name] = {"size": len(raw), "header_sha256": hashlib.sha256(header).hexdigest()}
    found = model.source_fingerprint()["files"]
    assert {name: {key: found[name][key] for key in expected[name]} for name in found} == expected


def test_the_fingerprint_tells_other_data_of_the_same_sizes_apart(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [1 << 20], "data_offsets": [0, 1 << 20]}}
    raw = json.dumps(header).encode()
    prints = []
    for name, byte in (("one", b"\x00"), ("two", b"\x01")):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "model.safetensors"
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + byte * (1 << 20))
        prints.append(open_model_dir(tmp_path / name).source_fingerprint()["files"]["model.safetensors"])
    assert prints[0]["header_sha256"] == prints[1]["header_sha256"]
    assert prints[0]["sample_sha256"] != prints[1]["sample_sha256"]


def test_a_missing_directory_is_named(tmp_path):
    assert "nowhere: No such file or directory" in message_of(open_model_dir, tmp_path / "nowhere")


def test_a_file_is_not_a_model_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "config.json: Not a directory" in message_of(open_model_dir, tmp_path / "config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "epoch.ckpt"])
def test_pickle_files_are_refused_with_the_way_to_convert(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80\x04N.")
    message = message_of(open_model_dir, tmp_path)
    assert name in message
    assert "safetensors only" in message
    assert "safe_serialization=True" in message


def test_a_directory_without_weights_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path}: no *.safetensors file" in message_of(open_model_dir, tmp_path)


BROKEN_INDEXES = [b"", b"{", b"\xff\xfe", b"[" * 200_000, b"[]", b"{}"]
BROKEN_INDEXES += [b'{"weight_map": %s}' % value for value in (b"null", b"{}", b'["a"]', b'{"a": 1}', b'{"a": ["b"]}')]


@pytest.mark.parametrize("text", BROKEN_INDEXES, ids=lambda text: text[:40].decode(errors="replace"))
def test_a_broken_index_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    assert str(tmp_path / "model.safetensors.index.json") in message_of(open_model_dir, tmp_path)


@pytest.mark.parametrize(
    "shard", ["../{}", "/etc/{}", "a/../../{}", "sub/{}", "..\\{}", "C:\\{}", "..", ".", "", "./{}", "//host/{}"]
)
def test_a_shard_path_that_could_leave_the_directory_is_refused(tmp_path, shard):
    shard = shard.format("model-1.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    safetensors.torch.save_file({"layers.0.q": torch.zeros(1)}, tmp_path / "model-1.safetensors")
    write_index(inside, {"layers.0.q": shard})
    message = message_of(open_model_dir, inside)
    assert "plain file name" in message
    assert "layers.0.q" in message
    assert "index.json" in message


@pytest.mark.parametrize("shard", ["x" * 5000, "a\0b"])
def test_a_shard_name_that_no_file_can_have_is_missing(tmp_path, shard):
    write_index(tmp_path, {"layers.0.q": shard})
    assert "is missing" in message_of(open_model_dir, tmp_path)


def test_a_symlink_to_a_blob_outside_is_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "blobs" / "0123abcd")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/0123abcd")
    write_index(snapshot, {"a": "model-1.safetensors"})
    assert open_model_dir(snapshot).read("a").tolist() == [1]


def test_a_missing_shard_is_named_with_the_tensors_it_should_hold(tmp_path):
    sharded(tmp_path, one=["z"], two=[f"layers.{i}.q" for i in range(8)])
    (tmp_path / "two.safetensors").unlink()
    message = message_of(open_model_dir, tmp_path)
    assert "two.safetensors is missing" in message
    assert "layers.0.q, layers.1.q, layers.2.q, layers.3.q, layers.4.q and 3 more, 8 in all" in message


def test_a_link_that_leads_nowhere_is_a_missing_shard(tmp_path):
    sharded(tmp_path, one=["z"])
    (tmp_path / "one.safetensors").unlink()
    (tmp_path / "one.safetensors").symlink_to("../../blobs/gone")
    message = message_of(open_model_dir, tmp_path)
    assert "one.safetensors is missing; it should hold z" in message


def test_a_renamed_shard_is_suggested(tmp_path):
    sharded(tmp_path, one=["z"])
    (tmp_path / "one.safetensors").rename(tmp_path / "one (1).safetensors")
    message = message_of(open_model_dir, tmp_path)
    assert "one.safetensors is missing" in message
    assert "rename it back if it is one (1).safetensors" in message


def test_a_promise_that_the_shard_does_not_keep_names_both(tmp_path):
    sharded(tmp_path, one=["a"])
    write_index(tmp_path, {"a": "one.safetensors", "layers.7.k": "one.safetensors"})
    assert "shard one.safetensors does not hold layers.7.k" in message_of(open_model_dir, tmp_path)


def test_a_truncated_shard_is_named(tmp_path):
    sharded(tmp_path, one=["a"], two=["b"])
    os.truncate(tmp_path / "two.safetensors", os.path.getsize(tmp_path / "two.safetensors") - 1)  # noqa: PTH202
    message = message_of(open_model_dir, tmp_path)
    assert str(tmp_path / "two.safetensors") in message
    assert "tensor b" in message


# --- writing ---------------------------------------------------------------------------------------------------------


def mixed_entries():
    tensors = {
        "b.odd": torch.arange(3, dtype=torch.uint8),
        "a.flag": torch.tensor(True),
        "z.scale": torch.tensor([[0.5, -1.5]]),
        "c.half": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
        "a.count": torch.tensor(9),
        "b.up": torch.arange(5, dtype=torch.float32),
    }
    return tensors, [of(tensor, name) for name, tensor in tensors.items()]


def test_safe_open_sees_names_metadata_and_values(tmp_path):
    tensors, entries = mixed_entries()
    write_file(tmp_path / "m.safetensors", entries, {"format": "pt", "ünï": "c\nøde"})
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "ünï": "c\nøde"}
        assert set(opened.keys()) == set(tensors)
        assert all(same_bytes(opened.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_the_bytes_are_those_of_safetensors_own_writer(tmp_path):
    # One dtype of each size: within a size safetensors orders by dtype first, this writer by name alone.
    tensors, entries = mixed_entries()
    kept = ["b.odd", "z.scale", "c.half", "a.count", "b.up"]
    write_file(tmp_path / "ours.safetensors", [entry for entry in entries if entry.name in kept], {"format": "pt"})
    theirs = safetensors.torch.save({name: tensors[name] for name in kept}, {"format": "pt"})
    assert (tmp_path / "ours.safetensors").read_bytes() == theirs


def test_the_header_is_laid_out_as_promised(tmp_path):
    _, entries = mixed_entries()
    write_file(tmp_path / "m.safetensors", entries, {"zeta": "1", "alpha": "2"})
    raw = (tmp_path / "m.safetensors").read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = raw[8 : 8 + length].decode()
    assert length % 8 == 0
    assert header.startswith('{"__metadata__":{"alpha":"2","zeta":"1"},"a.count":{"dtype":"I64","shape":[],')
    assert list(json.loads(header)) == ["__metadata__", "a.count", "b.up", "z.scale", "c.half", "a.flag", "b.odd"]


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path):
    _, entries = mixed_entries()
    write_file(tmp_path / "m.safetensors", entries, {"k": "v"})
    infos = open_file(tmp_path / "m.safetensors").tensors.values()
    assert [info.offset % info.dtype.itemsize for info in infos] == [0] * 6


def test_the_same_input_gives_the_same_bytes(tmp_path):
    _, entries = mixed_entries()
    write_file(tmp_path / "one.safetensors", entries, {"a": "1", "b": "2"})
    write_file(tmp_path / "two.safetensors", iter(reversed(entries)), {"b": "2", "a": "1"})
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[2::5],
        torch.arange(12.0)[3:][::5][:1],  # one element whose stride is 5
        torch.tensor([1.5]).expand(4),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "strided", "lone strided element", "expanded", "parameter"],
)
def test_any_memory_layout_is_written_in_row_major_order(tmp_path, tensor):
    write_file(tmp_path / "m.safetensors", [of(tensor)], {})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "m.safetensors")["w"], tensor)


def test_chunks_of_one_file_feed_another(tmp_path):
    _, entries = mixed_entries()
    write_file(tmp_path / "one.safetensors", entries, {})
    source = open_file(tmp_path / "one.safetensors")
    copies = [
        Entry(name, info.dtype, info.shape, lambda name=name: source.chunks(name, 3))
        for name, info in source.tensors.items()
    ]
    write_file(tmp_path / "two.safetensors", copies, {})
    assert (tmp_path / "two.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_only_one_tensor_is_alive_at_a_time(tmp_path):
    alive, peak = weakref.WeakSet(), []

    def make():
        tensor = torch.ones(4)
        alive.add(tensor)
        gc.collect()
        peak.append(len(alive))
        return tensor

    write_file(tmp_path / "m.safetensors", [Entry(f"w{i}", torch.float32, (4,), make) for i in range(5)], {})
    assert peak == [1] * 5


WRONG_DELIVERIES = {
    "dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "shape": lambda: torch.ones(3, 2),
    "too few bytes": lambda: [bytes(20), bytes(3)],
    "too many bytes": lambda: [bytes(20), bytes(5)],
    "no bytes": lambda: iter(()),
}


@pytest.mark.parametrize("deliver", WRONG_DELIVERIES.values(), ids=WRONG_DELIVERIES.keys())
def test_a_tensor_unlike_its_declaration_is_refused_by_name(tmp_path, deliver):
    wrong = Entry("layers.3.up", torch.float32, (2, 3), deliver)
    message = message_of(write_file, tmp_path / "m.safetensors", [wrong], {})
    assert str(tmp_path / "m.safetensors") in message
    assert "layers.3.up" in message
    assert list(tmp_path.iterdir()) == []


BAD_ENTRIES = {
    "repeated": [Entry("layers.3.up", torch.uint8, (), list)] * 2,
    "complex": [Entry("layers.3.up", torch.complex64, (), list)],
    "negative": [Entry("layers.3.up", torch.uint8, (-1,), list)],
    "too large": [Entry("layers.3.up", torch.uint8, (2**40, 2**40), list)],
}


@pytest.mark.parametrize("entries", BAD_ENTRIES.values(), ids=BAD_ENTRIES.keys())
def test_an_entry_that_cannot_be_stored_is_refused_by_name(tmp_path, entries):
    assert "layers.3.up" in message_of(write_file, tmp_path / "m.safetensors", entries, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_readers_refuse_is_not_written(tmp_path, name):
    assert "not valid Unicode" in message_of(
        write_file, tmp_path / "m.safetensors", [Entry(name, torch.uint8, (), list)], {}
    )


@pytest.mark.parametrize("metadata", [{"rank": 16}, {1: "a"}, {"a": "\ud800"}, {"a": None}])
def test_metadata_must_be_strings(tmp_path, metadata):
    assert "metadata" in message_of(write_file, tmp_path / "m.safetensors", [], metadata)


# --- atomicity -------------------------------------------------------------------------------------------------------


def failing(error):
    def data():
        raise error

    return [of(torch.ones(1000), "a"), Entry("b", torch.float32, (3,), data)]


@pytest.mark.parametrize("error", [KeyError("bug"), KeyboardInterrupt(), CheckpointError("named"), SystemExit(1)])
def test_an_exception_under_way_leaves_the_old_file_and_no_debris(tmp_path, error):
    path = tmp_path / "m.safetensors"
    path.write_bytes(b"what was there before")
    with pytest.raises(type(error)) as caught:
        write_file(path, failing(error), {})
    assert caught.value is error
    assert path.read_bytes() == b"what was there before"
    assert [item.name for item in tmp_path.iterdir()] == ["m.safetensors"]


def test_the_target_appears_only_when_whole(tmp_path):
    path = tmp_path / "m.safetensors"
    seen = []

    def look():
        seen.append((path.exists(), len(debris(tmp_path))))
        return torch.ones(1)

    write_file(path, [Entry("w", torch.float32, (1,), look)], {})
    assert seen == [(False, 1)]
    assert debris(tmp_path) == []


def test_an_older_file_is_replaced_unless_that_is_forbidden(tmp_path):
    path = tmp_path / "m.safetensors"
    write_file(path, [of(torch.zeros(1))], {})
    write_file(path, [of(torch.ones(1))], {})
    assert "already exists" in message_of(write_file, path, [of(torch.zeros(1))], {}, overwrite=False)
    assert open_file(path).read("w").item() == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES])
def test_a_refusal_by_the_system_names_path_and_reason(tmp_path, monkeypatch, code):
    path = tmp_path / "m.safetensors"

    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    message = message_of(write_file, path, [of(torch.ones(3))], {})
    assert message == f"{path}: cannot be written: {os.strerror(code)}"
    assert list(tmp_path.iterdir()) == []


def test_a_file_size_limit_is_reported_and_leaves_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    program = (
        "import torch; from svdq.checkpoint import Entry, write_file\n"
        f"try: write_file({str(path)!r}, [Entry('w', torch.uint8, (100_000,), lambda: [bytes(100_000)])], {{}})\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", program], preexec_fn=limit, capture_output=True, text=True)
    assert done.stdout == f"CheckpointError {path}: cannot be written: {os.strerror(errno.EFBIG)}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")  # noqa: PTH110
def test_a_device_is_not_replaced_by_a_file():
    assert "not a regular file" in message_of(write_file, "/dev/full", [], {})
    assert not os.path.isfile("/dev/full")  # noqa: PTH113


def test_a_directory_is_not_replaced_by_a_file(tmp_path):
    (tmp_path / "m.safetensors").mkdir()
    assert f"{tmp_path / 'm.safetensors'}: exists and is not" in message_of(
        write_file, tmp_path / "m.safetensors", [], {}
    )


def test_a_missing_parent_is_named(tmp_path):
    path = tmp_path / "none" / "m.safetensors"
    assert f"the folder {tmp_path / 'none'} does not exist" in message_of(write_file, path, [], {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_may_not_be_written_is_named(tmp_path):
    tmp_path.chmod(0o500)
    message = message_of(write_file, tmp_path / "m.safetensors", [], {})
    tmp_path.chmod(0o700)
    assert message == f"{tmp_path / 'm.safetensors'}: cannot be written: {os.strerror(errno.EACCES)}"


def test_a_name_too_long_for_the_system_is_reported(tmp_path):
    assert os.strerror(errno.ENAMETOOLONG) in message_of(write_file, tmp_path / ("x" * 5000), [], {})


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_is_written_sorted_with_one_space_and_a_newline(tmp_path):
    write_json(tmp_path / "m.json", {"b": [1], "a": "é"})
    assert (tmp_path / "m.json").read_bytes() == b'{\n "a": "\\u00e9",\n "b": [\n  1\n ]\n}\n'
    assert read_json(tmp_path / "m.json") == {"a": "é", "b": [1]}
    assert debris(tmp_path) == []


def test_what_json_cannot_hold_leaves_the_old_file(tmp_path):
    write_json(tmp_path / "m.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "m.json", {"a": object()})
    assert read_json(tmp_path / "m.json") == 1
    assert debris(tmp_path) == []


def test_json_into_a_missing_folder_is_an_error(tmp_path):
    assert "does not exist" in message_of(write_json, tmp_path / "none" / "m.json", {})


@pytest.mark.parametrize("raw", [b"", b"{", b'"\xff"', b"[" * 200_000, b"1" * 10_000, b"\xef\xbb\xbf{}"])
def test_broken_json_is_named(tmp_path, raw):
    (tmp_path / "m.json").write_bytes(raw)
    assert str(tmp_path / "m.json") in message_of(read_json, tmp_path / "m.json")


def test_missing_json_is_named(tmp_path):
    assert str(tmp_path / "m.json") in message_of(read_json, tmp_path / "m.json")


# --- fuzz ------------------------------------------------------------------------------------------------------------

FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def opens_or_refuses(path, raw):
    path.write_bytes(raw)
    try:
        opened = open_file(path)
        for name in opened.tensors:
            opened.read(name)
    except CheckpointError as error:
        assert str(path) in str(error)
        assert "\n" not in str(error)


@FUZZ
@given(raw=st.binary(max_size=200), framed=st.booleans())
def test_arbitrary_bytes_open_or_are_refused(tmp_path, raw, framed):
    opens_or_refuses(tmp_path / "fuzz.safetensors", raw_file(b"{" + raw) if framed else raw)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**66) | st.floats() | st.text(max_size=3) | st.just("U8"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@FUZZ
@given(entries=st.dictionaries(
    st.text(max_size=4) | st.just("__metadata__"),
    JSON_VALUES | st.fixed_dictionaries({"dtype": JSON_VALUES, "shape": JSON_VALUES, "data_offsets": JSON_VALUES}),
    max_size=3,
))  # fmt: skip
def test_arbitrary_json_opens_or_is_refused(tmp_path, entries):
    opens_or_refuses(tmp_path / "fuzz.safetensors", raw_file(entries, b"12345678"))


VALID = safetensors.torch.save(
    {"a": torch.ones(2, 3), "flag": torch.tensor([True]), "void": torch.empty(0)}, {"format": "pt"}
)


@FUZZ
@given(
    how=st.sampled_from(["flip", "insert", "truncate"]),
    position=st.integers(0, len(VALID) - 1),
    inserted=st.binary(min_size=1, max_size=4),
    mask=st.integers(1, 255),
)
def test_a_damaged_file_opens_or_is_refused(tmp_path, how, position, inserted, mask):
    raw = bytearray(VALID)
    if how == "flip":
        raw[position] ^= mask
    elif how == "insert":
        raw[position:position] = inserted
    else:
        del raw[position:]
    opens_or_refuses(tmp_path / "fuzz.safetensors", bytes(raw))


def test_every_truncation_of_a_valid_file_is_refused(tmp_path):
    path = tmp_path / "short.safetensors"
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        message_of(open_file, path)
