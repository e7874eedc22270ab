"""Situations of real users that no other file tests by name: what a text source and a tokenizer may look like.

The others are found by their number: `grep -rn test_case_ tests`.
"""

import json

import pytest
import torch

from svdq.checkpoint import ModelFiles, SafetensorsFile


@pytest.fixture
def model(toy_copy, add_tokenizer):
    directory = toy_copy("llama")
    add_tokenizer(directory)
    return directory


@pytest.fixture
def no_weight_is_read(monkeypatch):
    def read(self, name, *_):
        raise AssertionError(f"{name} was read")

    for kind in (SafetensorsFile, ModelFiles):
        for method in ("read", "chunks"):
            monkeypatch.setattr(kind, method, read)


def words(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [f"w{i}" for i in torch.randint(2, 200, (count,), generator=generator).tolist()]


def test_case_16_blank_lines_are_counted_and_short_rows_joined(svdq, model, tmp_path):
    text = tmp_path / "text.txt"
    lines = [" ".join(words(10, seed=i)) if i % 10 < 3 else "" for i in range(200)]  # 70 % blank
    text.write_text("\n".join(lines) + "\n")
    arguments = ["-o", tmp_path / "store", "--data", text, "--seq-len", "200", "--min-tokens", "500"]
    result = svdq("calibrate", model, *arguments)
    assert result.code == 0, result.err
    assert "60 rows used of 200 (140 blank)" in result.out
    assert "600 of 25,600 requested tokens in 3 sequences of up to 200" in result.out  # 60 rows of 10 words, joined


def test_five_short_lines_are_one_sequence_however_long_it_may_be(svdq, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(words(5, seed=i)) for i in range(5)))
    arguments = ["-o", tmp_path / "store", "--data", text, "--seq-len", "2048", "--min-tokens", "25"]
    result = svdq("calibrate", model, *arguments)
    assert result.code == 0, result.err
    assert "5 rows used of 5 (0 blank); 25 of" in result.out and "in 1 sequences" in result.out


def test_too_few_tokens_are_an_error_before_a_weight_is_read(refused, model, tmp_path, no_weight_is_read):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(words(5, seed=i)) for i in range(5)))
    message = refused("calibrate", model, "-o", tmp_path / "store", "--data", text, "--seq-len", "2048")
    assert "found 25 tokens" in message and "1,024" in message and "--min-tokens" in message


def test_case_18_pre_tokenised_rows_need_no_tokenizer(svdq, toy_copy, calibration_ids, tmp_path):
    directory = toy_copy("llama")
    assert not [path for path in directory.iterdir() if "token" in path.name]
    out = tmp_path / "out.safetensors"
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    assert svdq("quantize", directory, out, *data, "--rounds", "1").code == 0
    assert svdq("verify", out, "--model", directory, *data).code == 0


def test_a_tokenizer_with_neither_pad_nor_eos_token_works(svdq, model, tmp_path):
    config = json.loads((model / "tokenizer_config.json").read_text())
    assert config.get("pad_token") is None and config.get("eos_token") is None
    text = tmp_path / "text.txt"
    text.write_text(" ".join(words(300)))
    result = svdq("calibrate", model, "-o", tmp_path / "store", "--data", text, "--min-tokens", "300")
    assert result.code == 0, result.err
    assert "300 of" in result.out


def test_text_without_a_tokenizer_is_one_line_before_a_weight_is_read(refused, toy_copy, tmp_path, no_weight_is_read):
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3")
    message = refused("calibrate", toy_copy("llama"), "-o", tmp_path / "store", "--data", text)
    assert "no tokenizer files" in message and "input_ids" in message


def test_a_tokenizer_of_vocab_and_merges_alone_works(svdq, toy_copy, tmp_path):
    from tokenizers import ByteLevelBPETokenizer

    directory = toy_copy("gpt2", vocab_size=300)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(text)], vocab_size=270)
    tokenizer.save_model(str(directory))  # vocab.json and merges.txt, as older checkpoints have it
    result = svdq("calibrate", directory, "-o", tmp_path / "store", "--data", text, "--min-tokens", "16")
    assert result.code == 0, result.err


def test_sequences_are_no_longer_than_a_learned_position_table(svdq, toy, ids_file, tmp_path):
    ids = ids_file(tmp_path / "ids.jsonl", [600], seed=0)  # the table has 256 rows
    result = svdq("calibrate", toy("gpt2"), "-o", tmp_path / "store", "--data", ids, "--min-tokens", "1")
    assert result.code == 0, result.err
    assert "3 sequences of up to 256" in result.out


def test_ids_beyond_the_vocabulary_are_one_line_before_a_weight_is_read(refused, toy, tmp_path, no_weight_is_read):
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [1, 2, 200]}\n')
    message = refused("calibrate", toy("llama"), "-o", tmp_path / "store", "--data", ids, "--min-tokens", "1")
    assert "input_ids[2] is 200" in message
