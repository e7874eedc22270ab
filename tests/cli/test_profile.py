"""svdq profile on a CPU: the table, the trace, a quantized file, and one line for what cannot be."""

import json

from svdq.cli.inputs import longest_sequence
from svdq.models import open_model


def test_a_model_and_its_quantized_file_are_profiled(svdq, quantized, tmp_path):
    directory, file = quantized("llama")
    step = ("--tokens", "20", "--steps", "1", "--device", "cpu")
    run = svdq("profile", directory, *step, "--trace", tmp_path / "t.json")
    assert run.code == 0
    assert "GEMM" in run.out and "attention" in run.out and "aten::mm" in run.out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    facts = json.loads(svdq("profile", directory, "--quantized", file, *step, "--json", "-").out)
    assert facts["quantized"] and facts["tokens"] == 20 and facts["gap_share"] is None
    assert any(row["name"] == "GEMM" for row in facts["categories"])


def test_without_tokens_a_short_model_gets_what_it_takes(svdq, toy):
    facts = json.loads(svdq("profile", toy("bert"), "--steps", "1", "--device", "cpu", "--json", "-").out)
    assert facts["tokens"] == min(700, longest_sequence(open_model(toy("bert"))))


def test_what_cannot_be_done_is_one_line(refused, toy):
    assert "--fuse" in refused("profile", toy("llama"), "--fuse", "--device", "cpu")
    for kind in ("llama", "gpt2"):  # config.json calls the limit by two names
        assert "--tokens 100000" in refused("profile", toy(kind), "--tokens", "100000", "--device", "cpu")
    assert "the path of a file" in refused("profile", toy("llama"), "--trace", "-", "--device", "cpu")
    assert "cannot be written" in refused("profile", toy("llama"), "--trace", "nowhere/t.json", "--device", "cpu")
