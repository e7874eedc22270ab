"""Roofline arithmetic by hand, the table of GPUs, and what is measured."""

import pytest
import torch

from svdq import roofline
from svdq.errors import ConfigError
from svdq.models import open_model
from svdq.report import roofline_facts, roofline_text
from svdq.roofline import FORMATS, GPUS, Gpu, attention_work, linear_work

L4, H200 = GPUS["l4"], GPUS["h200"]
CPU = torch.device("cpu")


def test_the_write_ups_example_has_its_exact_figures():
    work = linear_work(700, 2048, 1024, "FP16", L4)
    assert work.operations == {"fp16": 2_936_012_800}
    assert work.bytes == 8_495_104  # 700·1024 + 1024·2048 + 700·2048 values of two bytes
    assert work.intensity == pytest.approx(345.6, abs=0.05)
    assert L4.break_even("FP16") == pytest.approx(403.3, abs=0.05)
    seconds, bound = work.seconds(L4)
    assert bound == "memory" and seconds == pytest.approx(8_495_104 / 300e9)
    assert L4.rates["int4"] == 485e12


def test_a_4_bit_weight_has_half_a_byte_a_scale_for_64_and_its_low_rank_part():
    work = linear_work(700, 2048, 1024, "W4A4", L4, rank=16)
    assert work.operations == {"int4": 2 * 700 * 2048 * 1024, "fp16": 2 * 700 * 16 * (2048 + 1024)}
    assert work.bytes == 2 * 700 * 3072 + 2048 * 1024 / 2 + 2 * 2048 * 1024 / 64 + 2 * 16 * 3072
    assert linear_work(700, 2048, 1024, "W4A4", L4, rank=0).operations == {"int4": 2 * 700 * 2048 * 1024}
    assert linear_work(1, 2048, 1024, "W8A8", L4).bytes == 2 * 3072 + 2048 * 1024 + 4 * 2048


def test_what_bounds_an_operation_follows_the_longer_time():
    gpu = Gpu("toy", 100.0, {"fp16": 1000.0}, "by hand")
    assert roofline.Work({"fp16": 2000.0}, 100.0).seconds(gpu) == (2.0, "compute")
    assert roofline.Work({"fp16": 500.0}, 100.0).seconds(gpu) == (1.0, "memory")


def test_attention_counts_the_pairs_that_are_looked_at():
    work = attention_work(5, 4, 2, 64, causal=True)
    assert work.total == 2 * 2 * 64 * 4 * (1 + 2 + 3 + 4 + 5)
    assert work.bytes == 2 * 5 * 64 * (4 + 2 + 2 + 4)  # q, k, v, output
    assert attention_work(5, 4, 2, 64, causal=False).total == 2 * 2 * 64 * 4 * 25


def test_a_format_runs_in_the_first_operand_type_that_the_gpu_has():
    assert [L4.rate(kind)[0] for kind in FORMATS] == ["fp16", "int8", "fp8", "int4"]
    assert H200.rate("W4A4")[0] == "fp8"  # Hopper has no INT4 tensor cores
    assert GPUS["a100"].rate("W4A8")[0] == "int8"  # Ampere has no FP8


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_gpu_has_dense_rates_that_fall_with_the_bits_and_a_source(gpu):
    assert gpu.source
    assert 1.9 < gpu.rates["int8"] / gpu.rates["fp16"] < 4.1  # twice, four times where 32-bit sums halve fp16
    assert gpu.rates.get("int4", gpu.rates["int8"]) >= gpu.rates["int8"]
    assert 1e11 < gpu.bandwidth < 1e13


def test_a_models_linears_stand_in_one_row_a_name_and_size(toy):
    rows = roofline.rows(open_model(toy("llama")), 100, L4)
    assert [(row.name, row.count) for row in rows][-1] == ("attention", 2)
    assert sum(row.count for row in rows[:-1]) == len(open_model(toy("llama")).linears)
    for row in rows[:-1]:
        k, n = map(int, row.shape.split(" -> "))
        assert row.work == linear_work(100, n, k, "FP16", L4)
        assert row.floors["W4A4"] == linear_work(100, n, k, "W4A4", L4).seconds(L4)
    assert roofline.rows(open_model(toy("gpt2")), 100, L4)[-1].name == "attention"


def test_a_measured_time_gives_the_share_of_the_floor(toy):
    rows = roofline.rows(open_model(toy("llama")), 100, L4, timed=lambda m, n, k: 1e-3)
    assert rows[0].reached == pytest.approx(rows[0].floors["FP16"][0] / 1e-3)
    text = roofline_text(roofline_facts(rows, L4, 100))
    assert "reached in 16 bits" in text and "1.00 x" in text


def test_facts_add_up_the_floors(toy):
    rows = roofline.rows(open_model(toy("llama")), 100, L4)
    facts = roofline_facts(rows, L4, 100)
    assert facts["seconds"]["W4A4"] == pytest.approx(sum(row.count * row.floors["W4A4"][0] for row in rows))
    assert facts["break_even"]["W4A4"] == pytest.approx(485e12 / 300e9)


def test_what_is_measured_replaces_bandwidth_and_rate_and_keeps_the_ratios():
    found = roofline.measured(L4, CPU, torch.float32, size=256)
    assert found.bandwidth != L4.bandwidth and found.bandwidth > 0
    assert found.rates["int4"] / found.rates["fp16"] == pytest.approx(L4.rates["int4"] / L4.rates["fp16"])
    assert "measured" in found.source
    assert roofline.timer(CPU, torch.float32)(8, 2048, 1024) > 0


def test_another_gpu_than_the_one_here_is_not_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA X")
    with pytest.raises(ConfigError, match="here is NVIDIA X, not NVIDIA L4"):
        roofline.measured(L4, torch.device("cuda"), torch.float16)


@pytest.mark.parametrize("name", ["l5", "", "L4"])
def test_an_unknown_gpu_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match="wanted auto or one of a10, a100"):
        roofline.find_gpu(name)


def test_auto_is_the_gpu_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        roofline.find_gpu("auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert roofline.find_gpu("auto") is H200
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
    with pytest.raises(ConfigError, match="NVIDIA X is not in the table"):
        roofline.find_gpu("auto")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot_is_a_picture(toy, tmp_path, suffix):
    roofline.plot(roofline.rows(open_model(toy("llama")), 100, L4), L4, tmp_path / f"r.{suffix}")
    start = (tmp_path / f"r.{suffix}").read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<?xml" in start
