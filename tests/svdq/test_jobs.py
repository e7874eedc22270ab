"""What `svdq inspect` says of a job's directory while it runs, when it is dead, and when it is done."""

import json
import os

import pytest

from svdq.checkpoint import write_file
from svdq.errors import CheckpointError
from svdq.jobs import state
from svdq.report import job_text

START = 1_000_000.0


def block(path, at, layers, never_ran=()):
    report = {"layers": layers, "never_ran": list(never_ran)}
    write_file(path, [], {"report": json.dumps(report), "sites": "{}"})
    os.utime(path, (at, at))


def layer(error, repairs=()):
    return {"error": error, "rounds": [{"error": 2 * error}], "seconds": 1.5, "damping": 0.01, "repairs": list(repairs)}


@pytest.fixture
def work(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"blocks": 5}))
    os.utime(tmp_path / "run.json", (START, START))
    return tmp_path


def test_a_job_without_a_block_knows_no_pace(work):
    found = state(work, START + 3)
    assert (found["kind"], found["done"], found["blocks"]) == ("quantize", 0, 5)
    assert found["seconds_a_block"] is None and not found["seems_dead"]
    assert "0 of 5 blocks done" in job_text(found)


def test_the_first_block_gives_the_pace_since_the_start_and_later_ones_the_median(work):
    block(work / "block-00000.safetensors", START + 10, {"a": layer(0.1)})
    found = state(work, START + 12)
    assert found["seconds_a_block"] == 10 and found["seconds_left"] == 40
    for number, at in ((1, 14), (2, 18), (3, 4000)):  # killed, and resumed an hour later
        block(work / f"block-0000{number}.safetensors", START + at, {f"b{number}": layer(0.3)})
    found = state(work, START + 4002)
    assert found["seconds_a_block"] == 4 and found["seconds_left"] == 4 and found["silent_seconds"] == 2
    assert list(found["layers"]) == ["a", "b1", "b2", "b3"]
    text = job_text(found, every_layer=True)
    assert "4.0 s a block, 4 s left; last block 2 s ago" in text
    assert "4 linears, mean error 25.00 %" in text
    assert text.splitlines()[-4].split() == ["a", "20.00", "%", "10.00", "%", "1.50", "0.01", "0"]


def test_a_job_that_is_silent_for_long_seems_dead(work):
    block(work / "block-00000.safetensors", START + 30, {"a": layer(0.1, ["damping raised 1x"])}, ["gone"])
    assert not state(work, START + 30 + 140)["seems_dead"]  # five blocks' time has not passed
    found = state(work, START + 30 + 160)
    assert found["seems_dead"]
    text = job_text(found)
    assert "nothing new for 160 s" in text and "a: damping raised 1x" in text and "gone" in text


def test_a_store_is_finished_when_its_manifest_says_so(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"blocks": 2, "finished": True}))
    for number in range(2):
        write_file(tmp_path / f"block-0000{number}.safetensors", [], {"sites": "{}"})
    found = state(tmp_path, (tmp_path / "manifest.json").stat().st_mtime + 10**6)
    assert (found["kind"], found["done"], found["finished"], found["seems_dead"]) == ("calibrate", 2, True, False)
    assert job_text(found).endswith("2 of 2 blocks done, finished")


@pytest.mark.parametrize("content", [None, "[]", "{}", "broken"])
def test_another_directory_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        state(tmp_path)


def test_a_block_without_a_report_is_named(work):
    write_file(work / "block-00000.safetensors", [], {"other": "{}"})
    with pytest.raises(CheckpointError, match=r"block-00000\.safetensors: no report"):
        state(work)


def test_inspect_reads_what_a_killed_run_left(svdq, toy, calibration_ids, tmp_path, monkeypatch):
    from svdq import pipeline

    original, written = pipeline.write_block, []

    def write_block(*arguments):
        if written:
            raise KeyboardInterrupt
        written.append(original(*arguments))

    monkeypatch.setattr(pipeline, "write_block", write_block)
    out = tmp_path / "out.safetensors"
    assert svdq("quantize", toy("llama"), out, "--data", calibration_ids, "--min-tokens", "1").code == 130
    result = svdq("inspect", f"{out}.work", "-v")
    assert result.code == 0 and "1 of 2 blocks done" in result.out
    assert "model.layers.0.mlp.down_proj" in result.out and "model.layers.1" not in result.out
