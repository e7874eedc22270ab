"""svdq plan, and quantize --overrides: a budget in, a file out that the next command takes; mistakes in one line."""

import json
import os

import pytest
import safetensors.torch
import torch

from svdq.config import QuantConfig, read_overrides
from svdq.errors import ConfigError
from svdq.preflight import free_bytes


@pytest.fixture(scope="module")
def store(toy, calibration_ids, read_ids, tmp_path_factory):
    from svdq import pipeline
    from svdq.config import CalibrationConfig
    from svdq.models import open_model

    path = tmp_path_factory.mktemp("store") / "calibration"
    pipeline.calibrate(open_model(toy("qwen3")), path, read_ids(calibration_ids), CalibrationConfig())
    return path


@pytest.mark.parametrize("weigh", ["gradient", "error"])
def test_a_plan_becomes_a_file_of_the_size_that_it_says(svdq, toy, store, tmp_path, weigh):
    plan, out, numbers, drawn = (tmp_path / name for name in ("plan.json", "out.safetensors", "n.json", "front.svg"))
    made = svdq("plan", toy("qwen3"), "--calib", store, "--budget", "7bits", "-o", plan, "--weigh", weigh, "--ranks",
                "0,16,32", "--json", numbers, "--plot", drawn)  # fmt: skip
    assert made.code == 0, made.err
    facts = json.loads(numbers.read_text())
    assert facts["predicted"]["bits_per_weight"] <= 7
    assert facts["unit"] == ("nats a token" if weigh == "gradient" else "sum of layer errors")
    assert [one["linear_bytes"] for one in facts["front"]] == sorted(one["linear_bytes"] for one in facts["front"])
    assert "<svg" in drawn.read_text()
    assert svdq("quantize", toy("qwen3"), out, "--calib", store, "--overrides", plan, "-q").code == 0
    stored = safetensors.torch.load_file(out)
    owned = sum(t.nbytes for key, t in stored.items() if key.startswith(tuple(f"{name}." for name in facts["chosen"])))
    assert owned == facts["predicted"]["linear_bytes"]
    assert sum(t.nbytes for t in stored.values()) == facts["predicted"]["tensor_bytes"]


def test_a_plan_spends_better_than_one_rank_for_all(svdq, toy, store):
    made = svdq("plan", toy("qwen3"), "--calib", store, "--budget", "9bits", "--ranks", "0,8,16,32", "--json", "-")
    facts = json.loads(made.out)
    same = [one for one in facts["uniform"].values() if one["bits_per_weight"] <= 9]
    assert same and facts["predicted"]["cost"] < min(one["cost"] for one in same)


@pytest.mark.parametrize("budget", ["100kB", "4bits", "8.3bits"])  # 8.37 are needed, 0.25 of them for smoothing
def test_a_budget_below_the_smallest_rank_is_refused_before_anything_is_measured(svdq, toy, store, monkeypatch, budget):
    monkeypatch.setattr("svdq.budget.measure", lambda *arguments, **options: pytest.fail("measured"))
    refused = svdq("plan", toy("qwen3"), "--calib", store, "--budget", budget)
    assert refused.code == 2 and f"--budget '{budget}': the smallest of --ranks takes" in refused.err


def test_a_model_that_memory_cannot_hold_is_refused_before_anything_is_measured(refused, toy, store, monkeypatch):
    monkeypatch.setattr("svdq.preflight.free_bytes", lambda device: 10**6)
    monkeypatch.setattr("svdq.budget.measure", lambda *arguments, **options: pytest.fail("measured"))
    said = refused("plan", toy("qwen3"), "--calib", store, "--budget", "9bits")
    assert "--weigh gradient" in said and "are free on cpu" in said and "--weigh error" in said


def test_what_is_free_is_less_than_the_machine_has():
    free, whole = free_bytes(torch.device("cpu")), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < free < whole


def test_a_containers_limit_counts_and_its_cached_files_do_not(monkeypatch, tmp_path):
    monkeypatch.setattr("svdq.preflight._GROUP", tmp_path)
    stat = "anon 400\ninactive_anon 30\nactive_file 200\ninactive_file 50\n"
    for name, text in {"max": "1000\n", "current": "900\n", "stat": stat}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_bytes(torch.device("cpu")) == 1000 - 900 + 250
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(torch.device("cpu")) > 1000


def test_without_16_bits_every_linear_is_quantized(svdq, toy, store):
    made = svdq(
        "plan", toy("qwen3"), "--calib", store, "--budget", "1MB", "--ranks", "0,16", "--no-16bit", "--json", "-"
    )
    assert set(json.loads(made.out)["chosen"].values()) == {16}
    made = svdq("plan", toy("qwen3"), "--calib", store, "--budget", "9MB", "--ranks", "0,16", "--json", "-")
    assert set(json.loads(made.out)["chosen"].values()) == {None}


def test_ignored_linears_and_other_knobs_are_part_of_the_file(svdq, toy, store, tmp_path):
    plan = tmp_path / "plan.json"
    made = svdq("plan", toy("qwen3"), "--calib", store, "--budget", "6bits", "-o", plan, "--ranks", "0,16", "--weigh",
                "error", "--ignore", "o_proj", "--override", "q_proj:group_size=128")  # fmt: skip
    assert made.code == 0, made.err
    overrides, ignore = read_overrides(plan)
    assert "o_proj" in ignore and overrides[0] == ("q_proj", {"group_size": 128})
    config = QuantConfig(ignore=ignore, overrides=overrides)
    assert config.for_layer("model.layers.0.self_attn.q_proj").group_size == 128
    assert not config.selects("model.layers.1.self_attn.o_proj")


def test_an_override_on_the_command_line_wins_over_the_file(svdq, toy, store, tmp_path):
    plan, numbers = tmp_path / "plan.json", tmp_path / "n.json"
    plan.write_text('{"overrides": [["*", {"rank": 8}]], "ignore": ["down_proj"]}')
    made = svdq("quantize", toy("qwen3"), tmp_path / "out.safetensors", "--calib", store, "--overrides", plan,
                "--override", "v_proj:rank=32", "--json", numbers)  # fmt: skip
    assert made.code == 0, made.err
    facts = json.loads(numbers.read_text())
    assert {name.rpartition(".")[2] for name in facts["left_16bit"]} == {"down_proj"}
    ranks = {name.rpartition(".")[2]: layer["rank"] for name, layer in facts["layers"].items()}
    assert ranks["v_proj"] == 32 and ranks["q_proj"] == 8


@pytest.mark.parametrize(("arguments", "words"), [
    (["--budget", "much"], ["--budget 'much'", "4.5bits"]),
    (["--budget", "1bits", "--ranks", "0"], ["--budget '1bits'", "smallest of --ranks takes 4.50 bits"]),
    (["--budget", "0.001%", "--ranks", "0", "--no-16bit"], ["smallest mean layer error", "--ranks"]),
    (["--budget", "6bits", "--ranks", "0,many"], ["--ranks", "0,16,32"]),
    (["--budget", "6bits", "--override", "q_proj:rank=8"], ["--override", "the plan chooses ranks"]),
    (["--budget", "6bits", "--ranks", "0", "--preset", "plain"], ["calibrated with", "same --preset"]),
    (["--budget", "6bits", "--plot", "front.pdf"], ["front.pdf", ".png"]),
    (["--budget", "6bits", "-o", "nowhere/plan.json"], ["nowhere/plan.json"]),
])  # fmt: skip
def test_a_mistake_is_one_line(refused, toy, store, arguments, words):
    said = refused("plan", toy("qwen3"), "--calib", store, *arguments, "--weigh", "error")
    assert [word for word in words if word not in said] == []


@pytest.mark.parametrize(("text", "said"), [
    ("{", "not JSON"),
    ("[]", "wanted {"),
    ('{"overrides": []}', "wanted {"),
    ('{"overrides": [["a"]], "ignore": []}', "wanted {"),
    ('{"overrides": [["a", {"depth": 3}]], "ignore": []}', "unknown knob 'depth'"),
    ('{"overrides": [["a", {"rank": -3}]], "ignore": []}', "a: rank"),
    ('{"overrides": [["a", {"rank": true}]], "ignore": []}', "a: rank"),
    ('{"overrides": [[7, {"rank": 3}]], "ignore": []}', "7 is not a text"),
    ('{"overrides": [], "ignore": "o_proj"}', "a list"),
])  # fmt: skip
def test_a_file_of_overrides_is_checked(tmp_path, text, said):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--overrides .*plan\.json") as error:
        read_overrides(tmp_path / "plan.json")
    assert said in str(error.value)


def test_a_missing_file_of_overrides_is_named(refused, toy, store, tmp_path):
    said = refused(
        "quantize", toy("qwen3"), tmp_path / "o.safetensors", "--calib", store, "--overrides", "nowhere.json"
    )
    assert "--overrides nowhere.json" in said
