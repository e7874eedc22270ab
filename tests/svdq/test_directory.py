"""A Hugging Face directory as output and as input: what a file would hold, in shards, with what transformers needs."""

import json

import pytest
import torch
from safetensors import safe_open

from svdq import directory
from svdq.checkpoint import open_file
from svdq.directory import content_bytes, is_directory, open_shards
from svdq.errors import CheckpointError
from svdq.quantized import open_quantized


def run(kind, data, out, *options):
    return ["quantize", kind, out, "--data", data, "--min-tokens", "1", "--rounds", "1", *options]


def raw(file):
    return {name: b"".join(file.chunks(name)) for name in file.tensors}


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_slash_or_a_directory_that_is_there_means_a_directory(tmp_path):
    assert is_directory(f"{tmp_path}/new/") and is_directory(tmp_path)
    assert not is_directory(tmp_path / "new") and not is_directory(tmp_path / "new.safetensors")


def test_quantize_writes_the_tensors_and_metadata_of_a_file_in_shards(svdq, toy_copy, calibration_ids, tmp_path):
    source = toy_copy("llama")
    (source / "vocabulary.txt").write_text("words")
    (source / "pytorch_model.bin").write_bytes(b"old")
    (source / ".gitattributes").write_text("hidden")
    assert svdq(*run(source, calibration_ids, tmp_path / "one.safetensors")).code == 0
    told = svdq(*run(source, calibration_ids, f"{tmp_path}/out/", "--max-shard-size", "100KB"))
    assert told.code == 0 and f"{tmp_path}/out: 14 linears quantized" in told.out
    out, one = tmp_path / "out", open_file(tmp_path / "one.safetensors")
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    held = {}
    for name in shards:
        with safe_open(out / name, "pt") as shard:
            sizes = {key: shard.get_tensor(key).nbytes for key in shard.keys()}  # noqa: SIM118
            assert sum(sizes.values()) <= 100_000 or len(sizes) == 1
            assert shard.metadata() == {**one.metadata, "format": "pt"}
            held |= dict.fromkeys(sizes, name)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": sum(map(len, raw(one).values()))}, "weight_map": held}
    assert raw(open_shards(out)) == raw(one)
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    given = json.loads((source / "config.json").read_text())
    stored = json.loads(one.metadata["quantization_config"])
    assert json.loads((out / "config.json").read_text()) == {**given, "quantization_config": stored}
    small = {"config.json", "generation_config.json", "model.safetensors.index.json", "vocabulary.txt"}
    assert {path.name for path in out.iterdir()} == small | set(shards)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one.safetensors", "out"]


def test_a_small_model_is_one_shard_without_an_index(as_directory):
    _, _, out = as_directory("qwen3", size=10**9)
    assert [path.name for path in out.glob("model*")] == ["model.safetensors"]
    assert open_shards(out).size == (out / "model.safetensors").stat().st_size < content_bytes(out)


def test_an_interrupted_run_leaves_no_directory_and_ends_with_the_same_bytes(
    svdq, toy, calibration_ids, tmp_path, monkeypatch
):
    arguments = run(toy("llama"), calibration_ids, f"{tmp_path}/out/", "--max-shard-size", "100KB")
    write, names = directory.write_file, []

    def interrupted(path, *rest):  # in the second shard; nothing is tidied up, as after a kill
        names.append(path.name)
        if len(names) == 2:
            raise KeyboardInterrupt
        write(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_file", interrupted)
        assert svdq(*arguments).code == 130
    work = tmp_path / "out.work"
    assert not (tmp_path / "out").exists() and [path.name for path in (work / "output").iterdir()] == names[:1]
    assert svdq(*arguments).code == 0 and not work.exists()
    assert svdq(*run(toy("llama"), calibration_ids, f"{tmp_path}/other/", "--max-shard-size", "100KB")).code == 0
    assert content(tmp_path / "out") == content(tmp_path / "other")


def test_a_directory_that_holds_something_is_left_alone(refused, toy, calibration_ids, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    assert "not empty" in refused(*run(toy("llama"), calibration_ids, tmp_path / "out"))
    assert content(tmp_path / "out") == {"mine": b"kept"}


@pytest.mark.parametrize(
    ("out", "options", "words"),
    [
        ("file/", [], ["a file", "wanted a new directory"]),
        ("new", ["--max-shard-size", "5GB"], ["--max-shard-size", "one file", "slash"]),
        ("new/", ["--max-shard-size", "some"], ["--max-shard-size", "'some' is no size"]),
        ("new/", ["--max-shard-size", "0"], ["--max-shard-size 0", "5GB"]),
        ("new/", ["--linears-only"], ["--linears-only", "path of a file"]),
        ("nowhere/new/", [], ["nowhere", "no such directory"]),
    ],
)
def test_what_cannot_become_a_directory_is_refused(refused, toy, calibration_ids, tmp_path, out, options, words):
    (tmp_path / "file").write_text("")
    message = refused(*run(toy("llama"), calibration_ids, f"{tmp_path}/{out}", *options))
    assert all(word in message for word in words), message


def test_an_empty_directory_becomes_the_output_tuned(svdq, toy, calibration_ids, tmp_path):
    (tmp_path / "out").mkdir()
    assert svdq(*run(toy("llama"), calibration_ids, tmp_path / "out", "--tune", "1")).code == 0
    assert "svdq.tuned" in open_quantized(tmp_path / "out").file.metadata
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_shards_of_different_runs_are_found_out(as_directory, tmp_path):
    _, _, out = as_directory("llama")
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = min(tmp_path.glob("*.safetensors"))
    first.write_bytes(
        first.read_bytes().replace(b'\\"rank\\":16', b'\\"rank\\":17').replace(b'"rank\\": 16', b'"rank\\": 17')
    )
    with pytest.raises(CheckpointError, match="of different runs"):
        open_quantized(tmp_path)


def test_a_directory_of_something_else_is_refused(refused, toy):
    assert "no svdq quantization_config" in refused("inspect", toy("llama"))


def test_a_quantized_directory_is_not_quantized_again(refused, as_directory, calibration_ids, tmp_path):
    _, _, out = as_directory("llama")
    assert "already quantized (svdquant)" in refused(*run(out, calibration_ids, tmp_path / "again"))


def test_the_commands_take_a_directory_for_a_file(svdq, as_directory, heldout_ids, tmp_path):
    source, file, out = as_directory("llama")
    inspected = svdq("inspect", out)
    assert inspected.code == 0 and "canonical W4A4 checkpoint" in inspected.out
    text = ["--data", heldout_ids, "--samples", "2", "--min-tokens", "1"]
    ours, theirs = (svdq("verify", what, "--model", source, *text) for what in (out, file))
    assert ours.code == 0 and ours.out == theirs.out
    for what, packed in ((out, "a.safetensors"), (file, "b.safetensors")):
        assert svdq("export-packed", what, tmp_path / packed).code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    tuned = svdq("tune", source, out, f"{tmp_path}/tuned/", *text, "--steps", "1", "--max-shard-size", "100KB")
    assert tuned.code == 0, tuned.err
    assert open_shards(tmp_path / "tuned").tensors.keys() == open_file(file).tensors.keys()
    assert len(list((tmp_path / "tuned").glob("*.safetensors"))) > 1


def test_a_sentence_encoder_keeps_its_other_modules(as_directory, toy_copy, tmp_path):
    from svdq.directory import copy_small_files

    source = toy_copy("bert")
    modules = [{"path": ""}, {"path": "1_Dense"}, {"path": "../outside"}]
    (source / "modules.json").write_text(json.dumps(modules))
    (source / "1_Dense").mkdir()
    (source / "1_Dense" / "model.safetensors").write_bytes(b"dense")
    (source.parent / "outside").mkdir()
    (source / "runs").mkdir()
    out = tmp_path / "copy"
    out.mkdir()
    copy_small_files(source, out)
    assert {path.name for path in out.iterdir()} == {"config.json", "modules.json", "1_Dense"}
    assert (out / "1_Dense" / "model.safetensors").read_bytes() == b"dense"


def test_a_stored_tensor_is_read_from_its_shard(as_directory):
    _, file, out = as_directory("llama")
    one, shards = open_file(file), open_shards(out)
    assert all(torch.equal(one.read(name), shards.read(name)) for name in one.tensors)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        shards.read("nothing")
