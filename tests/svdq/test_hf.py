"""The directory through transformers' own calls: from_pretrained, generate, pipeline, save_pretrained."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from svdq import SvdqConfig, hf, hook
from svdq.directory import open_shards
from svdq.errors import CheckpointError, ConfigError
from svdq.linear import W4A4Linear, load_quantized
from svdq.quantized import open_quantized

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "transformers.md"
IDS = torch.tensor([[5, 17, 101, 3, 44, 199, 0, 62, 62, 130, 8, 71]])
KINDS = ["llama", "qwen3", "bert", "gpt2"]  # tied embeddings; head norms; an encoder; transposed weights, ties, biases


def load(path, kind="", **options):
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, **options)


def states(model):
    with torch.no_grad():
        return model(input_ids=IDS)[0]


def raw(directory):
    shards = open_shards(directory)
    return {name: b"".join(shards.chunks(name)) for name in shards.tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_from_pretrained_gives_the_model_of_load_quantized(as_directory, kind):
    source, file, out = as_directory(kind)
    model = load(out, kind)
    assert torch.equal(states(model), states(load_quantized(source, file)))
    linears = [module for module in model.modules() if isinstance(module, W4A4Linear)]
    assert len(linears) == len(open_quantized(file).layers)
    assert model.svdq_path == "W4A4, in plain torch on cpu"


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_has_the_bytes_that_were_loaded(as_directory, tmp_path, kind):
    _, _, out = as_directory(kind)
    model = load(out, kind)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert raw(tmp_path) == raw(out)
    assert open_shards(tmp_path).metadata == open_shards(out).metadata
    configs = [json.loads((path / "config.json").read_text()) for path in (tmp_path, out)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    assert torch.equal(states(load(tmp_path, kind)), states(model))


@pytest.mark.parametrize("preset", ["plain", "nunchaku"])  # neither smoothing nor rotation; no rotation, no clip
def test_other_presets_are_saved_as_they_were(as_directory, tmp_path, preset):
    _, _, out = as_directory("llama", preset=preset)
    load(out).save_pretrained(tmp_path)
    assert raw(tmp_path) == raw(out)


def test_sizes_of_each_layer_survive(svdq, toy, calibration_ids, tmp_path):
    """Groups of 128, no low rank, a rank that is no multiple of 16, side by side."""
    out = tmp_path / "out"
    options = ["--rounds", "1", "--min-tokens", "1", "--data", calibration_ids, "--override", "q_proj:group_size=128"]
    options += ["--override", "k_proj:rank=0", "--override", "v_proj:rank=5", "--override", "o_proj:rank=0"]
    assert svdq("quantize", toy("qwen2"), f"{out}/", *options).code == 0
    model = load(out)
    model.save_pretrained(tmp_path / "saved")
    assert raw(tmp_path / "saved") == raw(out)
    assert torch.equal(states(load(tmp_path / "saved")), states(model))


def test_a_bfloat16_model_keeps_its_type(toy, svdq, calibration_ids, tmp_path):
    source = toy("qwen2", dtype=torch.bfloat16)  # with biases
    told = svdq("quantize", source, f"{tmp_path}/out/", "--rounds", "1", "--min-tokens", "1", "--data", calibration_ids)
    assert told.code == 0
    model = load(tmp_path / "out")
    assert model.dtype == states(model).dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "saved")
    assert raw(tmp_path / "saved") == raw(tmp_path / "out")


def test_a_base_model_of_a_language_model_and_back(as_directory, tmp_path):
    _, file, out = as_directory("llama")
    base = transformers.AutoModel.from_pretrained(out)
    base.save_pretrained(tmp_path / "base")
    opened = open_quantized(tmp_path / "base")
    assert sorted(f"model.{name}" for name in opened.layers) == sorted(open_quantized(file).layers)
    assert f"model.{min(opened.report['layers'])}" == min(open_quantized(file).report["layers"])
    again = load(tmp_path / "base")
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(states(again), states(load(out)))
    assert open_quantized(tmp_path / "again").layers == open_quantized(file).layers


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generate_writes_what_load_quantized_writes(as_directory, kind):
    source, file, out = as_directory(kind)
    ours, theirs = (
        model.generate(IDS, max_new_tokens=5, do_sample=False, pad_token_id=0)
        for model in (load(out), load_quantized(source, file))
    )
    assert torch.equal(ours, theirs) and ours.shape[1] > IDS.shape[1]


def test_a_pipeline_takes_the_directory(as_directory, add_tokenizer, tmp_path):
    _, _, out = as_directory("qwen3")
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    add_tokenizer(tmp_path, eos=True)
    pipe = transformers.pipeline("text-generation", model=str(tmp_path))
    told = pipe("w5 w17 w101", max_new_tokens=3, do_sample=False, return_full_text=False)[0]["generated_text"]
    ids = pipe.tokenizer("w5 w17 w101", return_tensors="pt")["input_ids"]
    written = load(out).generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert told == pipe.tokenizer.decode(written) and len(written) == 3


def test_the_code_of_the_documentation_runs(as_directory, add_tokenizer, tmp_path, monkeypatch, capsys):
    _, _, out = as_directory("llama")
    shutil.copytree(out, tmp_path / "OUT_DIR")
    add_tokenizer(tmp_path / "OUT_DIR", eos=True)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL):
        exec(block, names)
    assert capsys.readouterr().out.endswith("W4A4, in plain torch on cpu\n")
    assert raw(tmp_path / "COPY_DIR") == raw(out)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_a_device_map_is_followed(as_directory, device_map):
    pytest.importorskip("accelerate")
    _, _, out = as_directory("llama")
    assert torch.equal(states(load(out, device_map=device_map)), states(load(out)))


def test_of_an_offloaded_layer_the_quantized_linears_stay(as_directory, tmp_path):
    pytest.importorskip("accelerate")
    _, _, out = as_directory("llama")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    device_map = {**dict.fromkeys(parts, "cpu"), "model.layers.1": "disk"}
    model = load(out, device_map=device_map, offload_folder=tmp_path / "a")
    layer = model.model.layers[1]
    assert (layer.input_layernorm.weight.device.type, layer.mlp.up_proj.qweight.device.type) == ("meta", "cpu")
    assert torch.equal(states(model), states(load(out)))
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\..*leave offload_buffers out"):
        load(out, device_map=device_map, offload_folder=tmp_path / "b", offload_buffers=True)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_options_of_the_runtime_are_taken_and_not_stored(as_directory, tmp_path):
    source, file, out = as_directory("llama")
    model = load(out, quantization_config=SvdqConfig(kernels="reference", activations="fp8"))
    assert torch.equal(states(model), states(load_quantized(source, file, activations="fp8", kernels="reference")))
    assert model.model.layers[0].mlp.down_proj.kernels == "reference"
    model.save_pretrained(tmp_path)
    assert not torch.equal(states(load(tmp_path)), states(model))
    assert torch.equal(states(load(tmp_path)), states(load(out)))


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="kernels='fast'"):
        SvdqConfig(kernels="fast")


def test_a_model_that_is_not_quantized_is_refused(toy):
    with pytest.raises(ValueError, match="require the model to be pre-quantized"):
        load(toy("llama"), quantization_config=SvdqConfig())


def test_a_tensor_that_transformers_did_not_load_is_named(as_directory, monkeypatch):
    """It warns, and leaves in its place what was in memory."""
    from transformers import core_model_loading

    _, _, out = as_directory("llama")
    load_one = core_model_loading.set_param_for_module

    def loses_one(model, name, *rest):
        if name != "model.layers.1.mlp.up_proj.w_scales":
            load_one(model, name, *rest)

    monkeypatch.setattr(core_model_loading, "set_param_for_module", loses_one)
    with pytest.raises(CheckpointError, match=r"did not load model\.layers\.1\.mlp\.up_proj\.w_scales"):
        load(out)


def test_a_directory_of_another_model_is_refused(as_directory, tmp_path):
    _, _, out = as_directory("llama")
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))
    with pytest.raises(CheckpointError, match=r"192 x 128, config\.json asks for 256 x 128"):
        load(tmp_path)


def test_shards_without_svdqs_header_are_refused(as_directory, tmp_path):
    _, _, out = as_directory("llama", size=10**9)
    shutil.copytree(out, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="no svdq quantization_config"):
        load(tmp_path)


@pytest.mark.parametrize("form", ["w4a16", "w8a16", "nvfp4"])
def test_other_formats_run_and_are_saved_as_they_were(svdq, toy, calibration_ids, tmp_path, form):
    source, out = toy("llama"), tmp_path / "out"
    options = {"w4a16": ["--group-size", "64", "--objective", "nearest"], "w8a16": []}
    options = options.get(form, ["--data", calibration_ids, "--min-tokens", "1", "--rounds", "1"])
    assert svdq("quantize", source, f"{out}/", "--format", form, *options).code == 0
    model = load(out)
    assert torch.equal(states(model), states(load_quantized(source, out))) and model.svdq_path.startswith(form.upper())
    model.save_pretrained(tmp_path / "again")
    assert raw(tmp_path / "again") == raw(out)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_bitsandbytes_runs_a_directory_of_nf4(svdq, toy, tmp_path, kind):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    source, out = toy(kind), tmp_path / "out"
    assert svdq("quantize", source, f"{out}/", "--format", "nf4").code == 0
    model = load(out, kind, dtype=torch.float32)
    linears = [module for module in model.modules() if type(module).__name__ == "Linear4bit"]
    opened = open_quantized(out)
    assert len(linears) == len(opened.layers)
    name = min(opened.layers)
    weight = model.get_submodule(name).weight
    theirs = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    assert torch.equal(theirs, opened.layer(name).weight_hat())
    wanted = states(load_quantized(source, out))
    assert (states(model) - wanted).norm() / wanted.norm() < 0.02  # its own product on a CPU is not float32's


def test_remote_code_is_copied_and_runs_only_when_trusted(svdq, refused, toy_copy, calibration_ids, tmp_path):
    source = toy_copy("llama")
    code = "from transformers import LlamaForCausalLM\nclass OwnForCausalLM(LlamaForCausalLM):\n    pass\n"
    (source / "modeling_own.py").write_text(code)
    config = json.loads((source / "config.json").read_text())
    own = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (source / "config.json").write_text(json.dumps({**config, **own}))
    command = ["quantize", source, f"{tmp_path}/out/", "--data", calibration_ids, "--min-tokens", "1", "--rounds", "1"]
    message = refused(*command)
    assert "auto_map in config.json" in message and "--trust-remote-code" in message
    assert svdq(*command, "--trust-remote-code").code == 0
    model = load(tmp_path / "out", trust_remote_code=True)
    assert type(model).__name__ == "OwnForCausalLM"
    assert sum(isinstance(module, W4A4Linear) for module in model.modules()) == 14


def test_importing_svdq_loads_neither_torch_nor_transformers_and_still_registers(python, as_directory):
    _, _, out = as_directory("llama")
    code = """
import sys, svdq
assert not {"torch", "transformers"} & sys.modules.keys()
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained(sys.argv[1]).svdq_path)
"""
    result = python(code, out)
    assert result.stdout == "W4A4, in plain torch on cpu\n", result.stderr


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A module that takes transformers' registry's place; what svdq registers is noted in the list returned."""
    (tmp_path / "a_registry.py").write_text("ready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hook, "REGISTRY", "a_registry")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen = []
    monkeypatch.setattr(hook, "_register", lambda: seen.append(sys.modules["a_registry"].ready))
    yield seen
    sys.modules.pop("a_registry", None)


def test_it_registers_when_the_registry_has_been_imported(registry):
    before = len(sys.meta_path)
    hook.install()
    assert registry == []
    import a_registry

    assert registry == [True] and a_registry.__spec__.origin.endswith("a_registry.py")
    assert len(sys.meta_path) == before


def test_it_registers_at_once_where_the_registry_is_there(registry):
    import a_registry  # noqa: F401

    hook.install()
    assert registry == [True]


def test_it_waits_on_where_the_registrys_import_fails(registry, tmp_path):
    (tmp_path / "a_registry.py").write_text("raise ValueError\n")
    hook.install()
    with pytest.raises(ValueError):
        import a_registry
    (tmp_path / "a_registry.py").write_text("ready = True  # longer, so that no cached code is taken for it\n")
    import a_registry  # noqa: F401

    assert registry == [True]


def test_registering_twice_is_once():
    kinds = transformers.quantizers.auto.LOADING_ATTRIBUTES_CONFIG_TYPES
    hf.register()
    assert kinds.count(SvdqConfig) == 1 and transformers.quantizers.auto.LOADING_ATTRIBUTES_CONFIG_TYPES is kinds
