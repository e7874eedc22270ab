"""Diffusion transformers from the command line to a running model: calibrate, quantize, resume, verify, load."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open

import svdq as package
from svdq import pipeline, verify
from svdq.calibration.recorded import load_inputs
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.linear import W4A4Linear
from svdq.models import open_model
from svdq.quantized import open_quantized

ONE_ROUND = QuantConfig(LayerConfig(rounds=1))


@pytest.fixture(scope="module")
def emulated(original, stored_layer):
    """emulated(directory, file) → diffusers' own model, its quantized linears computed from the words of the format."""

    def build(directory, file):
        model = original(directory)
        with safe_open(file, "np") as opened:
            names = json.loads(opened.metadata()["svdq.layers"])
        for name in names:
            layer = stored_layer(file, name)
            model.get_submodule(name).forward = lambda x, layer=layer: layer(x).to(x.dtype)
        return model

    return build


def run(model, call):
    with torch.no_grad():
        return model(**call, return_dict=False)[0]


@pytest.mark.parametrize(("kind", "only"), [("flux", ()), ("qwen", ()), ("sd3", ("transformer_blocks.0.ff.*",))])
def test_the_loaded_model_computes_what_the_file_says(kind, only, quantized_transformer, emulated, calls, distance):
    directory, file = quantized_transformer(kind, only=only)
    model, wanted = package.load_quantized(directory, file), emulated(directory, file)
    for call in calls(kind, 2, seed=3):
        assert distance(run(model, call), run(wanted, call)) < 1e-3  # a code may fall the other way


def test_the_loaded_model_is_diffusers_class_with_adaptive_norms_as_they_were(
    quantized_transformer, transformer, original
):
    directory, file = quantized_transformer("flux")
    model, source = package.load_quantized(directory, file), original(transformer("flux"))
    assert type(model) is type(source)
    for path, module in source.named_modules():
        if isinstance(module, torch.nn.Linear):
            quantized = "transformer_blocks." in path and "norm" not in path
            assert isinstance(model.get_submodule(path), W4A4Linear) == quantized, path
            if not quantized:
                assert torch.equal(model.get_submodule(path).weight, module.weight)


def test_verify_gives_the_relative_error_of_the_output(quantized_transformer, inputs, calls, original, emulated):
    directory, file = quantized_transformer("flux")
    model = open_model(directory)
    held_out = load_inputs(str(inputs("flux", 2, seed=3)), model.config, samples=9, seed=0)
    report = verify.verify(model, open_quantized(file), data=[held_out])
    source, quantized = original(directory), emulated(directory, file)
    off = total = 0.0
    for call in calls("flux", 2, seed=3):
        wanted = run(source, call).double()
        off += (run(quantized, call).double() - wanted).square().sum().item()
        total += wanted.square().sum().item()
    (output,) = report.outputs
    assert output.output_error == pytest.approx((off / total) ** 0.5, rel=1e-3)
    assert (output.original, output.quantized, output.state_error) == (None, None, None)
    assert report.failures == []


def test_verify_notes_that_nothing_is_held_out(quantized_transformer, inputs):
    directory, file = quantized_transformer("flux")
    model = open_model(directory)
    seen = load_inputs(str(inputs("flux")), model.config, samples=99, seed=0)
    report = verify.verify(model, open_quantized(file), data=[seen])
    assert any("these are the calibration calls" in note for note in report.notes)


class Killed(Exception):
    pass


def test_a_killed_run_resumes_to_the_same_bytes(transformer, inputs, tmp_path):
    model = open_model(transformer("flux", shard="300KB"))
    data = load_inputs(str(inputs("flux", 4)), model.config, samples=99, seed=0)
    config = QuantConfig(LayerConfig(rounds=1), only=("attn.to_q", "proj_out"))

    def quantize(name, progress=lambda stage, done, total: None):
        calibration = CalibrationConfig()
        return pipeline.quantize(model, tmp_path / name, config, data=data, calibration=calibration, progress=progress)

    def kill(stage, done, total):
        if done == 2:
            raise Killed

    quantize("whole")
    with pytest.raises(Killed):
        quantize("resumed", kill)
    assert not (tmp_path / "resumed").exists()
    assert quantize("resumed").resumed_blocks == 2
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()


def test_values_on_disk_give_the_same_bytes(transformer, inputs, tmp_path):
    model = open_model(transformer("flux"))
    data = load_inputs(str(inputs("flux", 4)), model.config, samples=99, seed=0)
    linears = [linear for linear in model.linears if linear.name.endswith("attn.to_q")]
    for name, limit in (("memory", None), ("disk", 0)):
        config = CalibrationConfig()
        pipeline.calibrate(model, tmp_path / name, data, config, linears=linears, max_host_memory=limit)
    in_memory, on_disk = ([f.read_bytes() for f in sorted((tmp_path / n).iterdir())] for n in ("memory", "disk"))
    assert len(in_memory) == len(model.blocks) + 1
    assert in_memory == on_disk


def test_a_store_gives_the_bytes_of_data(transformer, inputs, tmp_path, svdq):
    pipeline_dir = tmp_path / "pipeline"
    pipeline_dir.mkdir()
    (pipeline_dir / "model_index.json").write_text("{}")
    shutil.copytree(transformer("sd3"), pipeline_dir / "transformer")
    common = ["--subfolder", "transformer", "--only", "ff.net.0.proj", "-q"]
    direct, stored, store = tmp_path / "direct.safetensors", tmp_path / "stored.safetensors", tmp_path / "store"
    data = ["--data", inputs("sd3", 4)]
    assert svdq("calibrate", pipeline_dir, "-o", store, *common, *data).code == 0
    assert svdq("quantize", pipeline_dir, stored, *common, "--rounds", 1, "--calib", store).code == 0
    assert svdq("quantize", pipeline_dir, direct, *common, "--rounds", 1, *data).code == 0
    assert direct.read_bytes() == stored.read_bytes()
    where = ["--model", pipeline_dir, "--subfolder", "transformer", "--data", inputs("sd3", 2, 3)]
    checked = svdq("verify", direct, *where, "--report", tmp_path / "page.html")
    assert checked.code == 0, checked
    assert "the transformer's output on" in checked.out
    assert "perplexity" not in checked.out
    page = (tmp_path / "page.html").read_text()
    assert "The transformer&#x27;s output" in page or "The transformer's output" in page


def test_the_header_lists_adaptive_norms_as_left_out(quantized_transformer):
    _, file = quantized_transformer("flux")
    ignored = open_quantized(file).config["ignore"]
    norms = ["transformer_blocks.{}.norm1.linear", "transformer_blocks.{}.norm1_context.linear"]
    wanted = [name.format(i) for name in [*norms, "single_transformer_blocks.{}.norm.linear"] for i in range(2)]
    assert ignored == sorted(wanted)


# ------------------------------------------------------------------------------------------------ refusals


def test_a_pipelines_directory_asks_for_the_subfolder(tmp_path, refused, inputs):
    (tmp_path / "model_index.json").write_text("{}")
    line = refused("calibrate", tmp_path, "-o", tmp_path / "store", "--data", inputs("flux"))
    assert "--subfolder transformer" in line


def test_text_is_refused_as_data(transformer, tmp_path, refused):
    text = tmp_path / "text.txt"
    text.write_text("a picture of a cat")
    line = refused("calibrate", transformer("flux"), "-o", tmp_path / "store", "--data", text)
    assert "wanted a directory of recorded calls" in line


@pytest.mark.parametrize("option", ["--seq-len", "--min-tokens"])
def test_options_of_text_are_refused(option, transformer, inputs, tmp_path, refused):
    data = inputs("flux")
    line = refused("calibrate", transformer("flux"), "-o", tmp_path / "store", "--data", data, option, 64)
    assert option in line


def test_tuning_is_refused(transformer, inputs, tmp_path, refused):
    out, data = tmp_path / "out.safetensors", inputs("flux")
    assert "tuning wants" in refused("quantize", transformer("flux"), out, "--data", data, "--tune", 3)


@pytest.mark.parametrize("command", [["roofline", "--gpu", "h200"], ["profile"]], ids=["roofline", "profile"])
def test_commands_for_text_models_refuse_a_diffusion_transformer(command, transformer, refused):
    assert "a diffusion transformer" in refused(*command, transformer("flux"))


def test_an_unknown_class_is_named(transformer, tmp_path, inputs, refused):
    directory = shutil.copytree(transformer("flux"), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "_class_name": "NoTransformer2DModel"}))
    line = refused("calibrate", directory, "-o", tmp_path / "store", "--data", inputs("flux"))
    assert "'NoTransformer2DModel' is no model of diffusers" in line
