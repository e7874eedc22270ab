"""What a killed run leaves behind never blocks the next one, and what belongs to others is never mixed in."""

import json

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from svdq import pipeline
from svdq.calibration.store import Store
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.errors import ConfigError
from svdq.export import export_packed
from svdq.linear import load_quantized
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import verify

FAST = QuantConfig(layer=LayerConfig(rank=8, rounds=1))


@pytest.fixture
def quantize(calibration_ids, read_ids):
    def run(directory, out):
        return pipeline.quantize(
            open_model(directory), out, FAST, data=read_ids(calibration_ids), calibration=CalibrationConfig()
        )

    return run


def test_a_half_written_run_file_is_cleared_away(toy, quantize, tmp_path):
    work = tmp_path / "out.work"
    work.mkdir()
    (work / ".run.json.123.tmp").write_text("{")
    quantize(toy("llama"), tmp_path / "out")
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_a_half_written_manifest_is_cleared_away(toy, calibration_ids, read_ids, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (store / ".manifest.json.123.tmp").write_text("{")
    pipeline.calibrate(open_model(toy("llama")), store, read_ids(calibration_ids), CalibrationConfig())
    assert Store.open(store).manifest["finished"]
    assert not [item.name for item in store.iterdir() if item.name.endswith(".tmp")]


def test_a_run_killed_while_it_cleared_up_ends_with_the_same_bytes(toy, quantize, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def killed(path):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pipeline.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            quantize(toy("llama"), out)
    first = out.read_bytes()
    assert [item.name for item in (tmp_path / "out.work").iterdir()] == ["run.json"]
    quantize(toy("llama"), out)
    assert out.read_bytes() == first
    assert [item.name for item in tmp_path.iterdir()] == ["out"]


def test_the_bytes_do_not_hold_the_path_of_the_data(toy, quantize, tmp_path, calibration_ids, read_ids, ids_file):
    text = ids_file(tmp_path / "rows.jsonl", [64] * 12, seed=1)
    source = f"{text}:input_ids"
    from svdq.calibration.data import load_tokens

    data = load_tokens(source, None, samples=100, seq_len=512, min_tokens=1, seed=0)
    pipeline.quantize(open_model(toy("llama")), tmp_path / "out", FAST, data=data, calibration=CalibrationConfig())
    assert str(tmp_path).encode() not in (tmp_path / "out").read_bytes()


def test_verify_refuses_the_store_of_another_model(toy, quantized, calibration_ids, read_ids, tmp_path):
    pipeline.calibrate(
        open_model(toy("llama", num_hidden_layers=3)), tmp_path / "s", read_ids(calibration_ids), CalibrationConfig()
    )
    directory, file = quantized("llama")
    with pytest.raises(ConfigError, match="another model"):
        verify(open_model(directory), open_quantized(file), store=Store.open(tmp_path / "s"))


def test_weights_too_small_for_a_float16_scale_are_counted(toy_copy, quantize, tmp_path):
    directory = toy_copy("llama")
    name = "model.layers.0.self_attn.o_proj"
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    tensors[f"{name}.weight"] *= 1e-9
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    summary = quantize(directory, tmp_path / "out")
    assert any(name in repair and "too small" in repair for repair in summary.repairs)


def test_a_packed_file_has_one_16_bit_type_and_still_verifies(toy, quantize, tmp_path):
    directory = toy("llama", dtype=torch.bfloat16)
    quantize(directory, tmp_path / "out")
    export_packed(open_quantized(tmp_path / "out"), tmp_path / "packed", dtype="float16")
    with safe_open(tmp_path / "packed", "pt") as file:
        types = {file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert types == {torch.float16, torch.int8}
    assert verify(open_model(directory), open_quantized(tmp_path / "packed")).failures == []


def test_generation_settings_of_the_directory_are_the_loaded_models(toy_copy, quantize, tmp_path):
    directory = toy_copy("llama")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    quantize(directory, tmp_path / "out")
    assert load_quantized(directory, tmp_path / "out").generation_config.eos_token_id == [5, 7]


def test_options_of_the_data_are_refused_beside_a_store(toy, refused, calibration_ids, read_ids, tmp_path):
    pipeline.calibrate(open_model(toy("llama")), tmp_path / "s", read_ids(calibration_ids), CalibrationConfig())
    line = refused("quantize", toy("llama"), tmp_path / "out", "--calib", tmp_path / "s", "--samples", 3)
    assert "--samples" in line


def test_a_report_that_cannot_be_written_is_refused_before_the_work(toy, refused, calibration_ids, tmp_path):
    missing = tmp_path / "missing" / "numbers.json"
    line = refused("quantize", toy("llama"), tmp_path / "out", "--data", calibration_ids, "--json", missing)
    assert "numbers.json" in line
    assert list(tmp_path.iterdir()) == []


def test_a_path_too_long_for_the_system_is_one_line(toy, refused, calibration_ids, tmp_path):
    line = refused("quantize", toy("llama"), tmp_path / ("x" * 300), "--data", calibration_ids)
    assert "too long" in line
