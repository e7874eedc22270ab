"""svdq roofline: its table, its numbers, its picture, and one line for what it cannot do."""

import json
import sys

import pytest
import torch


def test_the_table_names_every_format_and_operation(svdq, toy, tmp_path):
    run = svdq("roofline", toy("llama"), "--gpu", "h200", "--plot", tmp_path / "r.svg")
    assert run.code == 0
    for word in ("NVIDIA H200", "W4A4: fp8", "q_proj", "attention", "floor of the blocks for 700 tokens"):
        assert word in run.out
    assert (tmp_path / "r.svg").stat().st_size > 1000


def test_json_on_standard_output_is_all_there_is(svdq, toy):
    facts = json.loads(svdq("roofline", toy("bert"), "--gpu", "l4", "--full-attention", "--json", "-").out)
    assert facts["tokens"] == 700 and facts["gpu"]["bandwidth"] == 300e9
    names = [row["name"] for row in facts["operations"]]
    assert names.count("attention") == 1 and "query" in names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpu", "gtx"], ["--gpu 'gtx'", "h200"]),
        (["--gpu", "l4", "--measure"], ["--measure", "no CUDA device"]),
        (["--gpu", "l4", "--plot", "r.pdf"], ["r.pdf", ".png or .svg"]),
        (["--gpu", "l4", "--plot", "nowhere/r.png"], ["nowhere/r.png", "cannot be written"]),
        (["--gpu", "l4", "--tokens", "0"], ["--tokens"]),
    ],
)
def test_what_cannot_be_done_is_one_line(refused, toy, monkeypatch, options, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refused("roofline", toy("llama"), *options)
    assert all(word in line for word in words)


def test_without_matplotlib_the_plot_names_the_extra(refused, toy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "svdq[plot]" in refused("roofline", toy("llama"), "--gpu", "l4", "--plot", tmp_path / "r.png")
