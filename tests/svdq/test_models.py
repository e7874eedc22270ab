"""Model directories: opened by their headers alone, named as their files name them, refused in one line."""

import json
import time

import pytest
import safetensors.torch
import torch

from svdq.config import QuantConfig
from svdq.errors import CheckpointError, ConfigError
from svdq.models import materialize, open_model, read_weight, release, resolve_device
from svdq.preflight import plan

LINEARS = {  # kind: linears in one block, counted by hand from the architecture
    "llama": 7,
    "qwen2": 7,
    "qwen3": 7,
    "qwen3_base": 7,
    "mistral": 7,
    "gemma3": 7,
    "phi": 6,
    "phi3": 4,
    "gpt2": 4,
    "bert": 6,
}


def refusal(path, **options):
    with pytest.raises(CheckpointError) as caught:
        open_model(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit_config(directory, **values):
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(values)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(directory, change):
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(change(tensors) or tensors, path, metadata={"format": "pt"})


# ---- what is found


@pytest.mark.parametrize("kind", LINEARS)
def test_every_linear_of_every_block_is_found(toy, kind):
    model = open_model(toy(kind))
    assert len(model.blocks) == 2
    assert [linear.block for linear in model.linears] == [0] * LINEARS[kind] + [1] * LINEARS[kind]


@pytest.mark.parametrize("kind", LINEARS)
def test_names_are_spelled_as_the_files_spell_them(toy, kind):
    directory = toy(kind)
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    for linear in open_model(directory).linears:
        weight = stored[f"{linear.name}.weight"]
        assert (linear.n, linear.k) == tuple(weight.t().shape if kind == "gpt2" else weight.shape)
        assert linear.bias == (f"{linear.name}.bias" in stored)


@pytest.mark.parametrize("kind", [*LINEARS, "albert"])
def test_opening_leaves_every_parameter_on_the_meta_device(toy, kind):
    assert {p.device.type for p in open_model(toy(kind)).tree.parameters()} == {"meta"}


def test_opening_reads_no_weight(toy_copy):
    directory = toy_copy("llama")
    path = directory / "model.safetensors"
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    with path.open("r+b") as file:  # a hole where the weights were: still the right size
        file.truncate(header)
        file.truncate(len(raw))
    assert len(open_model(directory).linears) == 14


def test_a_block_shared_by_all_layers_is_one_block(toy):
    model = open_model(toy("albert"))
    assert (len(model.blocks), len(model.linears)) == (1, 6)


def test_the_embedding_and_the_head_are_no_linears_to_quantize(toy):
    names = [linear.name for linear in open_model(toy("llama", tie_word_embeddings=False)).linears]
    assert not [name for name in names if "lm_head" in name or "embed" in name]


def test_rotary_tables_are_computed_although_no_file_holds_them(toy, original):
    directory = toy("llama")
    found = open_model(directory).tree.model.rotary_emb.inv_freq
    assert torch.equal(found, original(directory).model.rotary_emb.inv_freq)


def test_opening_leaves_the_random_state_alone(toy):
    directory = toy("llama")
    before = torch.get_rng_state()
    open_model(directory)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_materialized_blocks_equal_those_of_transformers(toy, original, kind):
    model = open_model(toy(kind))
    materialize(model, model.blocks[1], torch.device("cpu"), torch.float32)
    wanted = original(toy(kind)).get_submodule(model.blocks[1]).state_dict()
    found = model.tree.get_submodule(model.blocks[1]).state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_released_block_holds_nothing(toy):
    model = open_model(toy("llama"))
    materialize(model, model.blocks[0], torch.device("cpu"), torch.float32)
    release(model, model.blocks[0])
    assert {p.device.type for p in model.tree.get_submodule(model.blocks[0]).parameters()} == {"meta"}


def test_a_conv1d_weight_is_read_as_rows_of_outputs(toy, original):
    model = open_model(toy("gpt2"))
    linear = next(item for item in model.linears if item.name.endswith("h.1.mlp.c_fc"))
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    module = original(toy("gpt2")).get_submodule(linear.module)
    with torch.no_grad():
        torch.testing.assert_close(x @ read_weight(model, linear).t() + module.bias, module(x))


# ---- other spellings


def test_a_gpt2_directory_without_the_transformer_prefix_opens(toy_copy):
    directory = toy_copy("gpt2")
    edit_tensors(directory, lambda old: {key.removeprefix("transformer."): value for key, value in old.items()})
    model = open_model(directory)
    assert model.linears[0].name == "h.0.attn.c_attn"
    assert model.linears[0].module == "transformer.h.0.attn.c_attn"


def test_a_bare_directory_of_a_headed_checkpoint_opens(toy_copy):
    directory = toy_copy("qwen3_base")
    edit_tensors(directory, lambda old: {f"model.{key}": value for key, value in old.items()})
    assert open_model(directory).linears[0].name == "model.layers.0.self_attn.q_proj"


def test_a_bert_with_gamma_and_beta_opens(toy_copy):
    directory = toy_copy("bert")

    def old_names(tensors):
        return {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in tensors.items()
        }

    edit_tensors(directory, old_names)
    model = open_model(directory)
    assert model.keys["encoder.layer.1.output.LayerNorm.bias"] == "encoder.layer.1.output.LayerNorm.beta"


def test_gamma_and_beta_give_the_same_norm(toy_copy, original):
    wanted = original(toy_copy("bert", "new")).encoder.layer[0].output.LayerNorm.weight
    directory = toy_copy("bert", "old")
    edit_tensors(directory, lambda old: {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in old.items()})
    model = open_model(directory)
    materialize(model, model.blocks[0], torch.device("cpu"), torch.float32)
    assert torch.equal(model.tree.encoder.layer[0].output.LayerNorm.weight, wanted)


def test_a_stored_buffer_replaces_the_computed_one(toy_copy):
    directory = toy_copy("bert")
    ids = torch.arange(256).flip(0).reshape(1, -1)
    edit_tensors(directory, lambda old: {**old, "embeddings.position_ids": ids})
    model = open_model(directory)
    materialize(model, "embeddings", torch.device("cpu"), torch.float32)
    assert torch.equal(model.tree.embeddings.position_ids, ids)


# ---- shards (case 14)


def shards(directory):
    return sorted(directory.glob("model-*.safetensors"))


def test_a_sharded_directory_opens_as_the_single_file_does(toy):
    single, sharded = open_model(toy("llama")), open_model(toy("llama", shard="300KB"))
    assert len(sharded.files.files) > 1
    assert single.linears == sharded.linears


def test_case_14_a_missing_shard_names_the_file_and_its_tensors(toy_copy):
    directory = toy_copy("llama", shard="300KB")
    gone = shards(directory)[1]
    tensors = list(safetensors.torch.load_file(gone))
    gone.unlink()
    message = refusal(directory)
    assert gone.name in message
    assert any(tensor in message for tensor in tensors)


def test_a_renamed_shard_names_both_names(toy_copy):
    directory = toy_copy("llama", shard="300KB")
    gone = shards(directory)[1]
    gone.rename(directory / "weights_two.safetensors")
    message = refusal(directory)
    assert gone.name in message and "weights_two.safetensors" in message


def test_missing_tensors_are_named(toy_copy):
    directory = toy_copy("llama")
    lost = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(directory, lambda old: {key: value for key, value in old.items() if key != lost})
    assert lost in refusal(directory)


def test_an_index_that_leaves_the_directory_is_refused(toy_copy, tmp_path):
    directory = toy_copy("llama", shard="300KB")
    moved = shards(directory)[0]
    moved.rename(tmp_path / "outside.safetensors")
    index = directory / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(moved.name, "../outside.safetensors"))
    assert "../outside.safetensors" in refusal(directory)


def test_a_shape_that_the_configuration_does_not_ask_for_is_named(toy_copy):
    directory = toy_copy("llama")
    edit_config(directory, intermediate_size=256)
    message = refusal(directory)
    assert "mlp" in message and "192" in message and "256" in message


# ---- ties (case 15)


def test_case_15_a_tied_head_is_recorded_and_no_tensor_of_its_own(toy):
    model = open_model(toy("llama"))
    assert model.ties == {"lm_head.weight": "model.embed_tokens.weight"}


def test_an_untied_configuration_without_a_head_states_both_facts(toy_copy):
    directory = toy_copy("llama")
    edit_config(directory, tie_word_embeddings=False)
    message = refusal(directory)
    assert "lm_head.weight" in message and "tie_word_embeddings" in message


def test_an_untied_head_is_no_tie(toy):
    assert open_model(toy("llama", tie_word_embeddings=False)).ties == {}


def test_a_tied_configuration_with_another_head_in_the_files_is_not_silently_tied(toy_copy):
    directory = toy_copy("llama")
    head = torch.ones(200, 128)
    edit_tensors(directory, lambda old: {**old, "lm_head.weight": head})
    try:
        model = open_model(directory)
    except CheckpointError as error:
        assert "lm_head.weight" in str(error)
    else:
        assert "lm_head.weight" not in model.ties


# ---- refusals


def test_a_directory_of_pickles_is_refused_and_nothing_is_unpickled(toy_copy):
    directory = toy_copy("llama")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    message = refusal(directory)
    assert "pytorch_model.bin" in message and "safetensors" in message


def test_a_missing_directory_is_named(tmp_path):
    assert "nowhere" in refusal(tmp_path / "nowhere")


def test_a_directory_without_a_configuration_is_named(toy_copy):
    directory = toy_copy("llama")
    (directory / "config.json").unlink()
    assert "config.json" in refusal(directory)


@pytest.mark.parametrize("content", ["[]", "17", "{", "null"])
def test_a_configuration_that_is_no_object_is_named(toy_copy, content):
    directory = toy_copy("llama")
    (directory / "config.json").write_text(content)
    assert "config.json" in refusal(directory)


def test_remote_code_is_not_run_unless_trusted(toy_copy, tmp_path):
    directory = toy_copy("llama")
    (directory / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    edit_config(directory, architectures=["Own"], auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert "--trust-remote-code" in refusal(directory)
    assert not (tmp_path / "ran").exists()


def test_code_beside_a_model_that_transformers_knows_is_not_needed_and_not_run(toy_copy, tmp_path):
    directory = toy_copy("llama")
    (directory / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    edit_config(directory, auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    assert type(open_model(directory).tree).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "ran").exists()


def test_an_unknown_architecture_is_named(toy_copy):
    directory = toy_copy("llama")
    edit_config(directory, architectures=["NovelForCausalLM"], model_type="novel")
    assert "NovelForCausalLM" in refusal(directory)


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", [5], [["x"]], {"a": 1}, ["AutoConfig"], ["logging"]])
def test_an_architecture_entry_that_names_no_model_is_one_line(toy_copy, architectures):
    directory = toy_copy("llama")
    edit_config(directory, architectures=architectures)
    assert str(directory) in refusal(directory)


def test_a_configuration_without_architectures_opens_the_bare_model(toy_copy):
    directory = toy_copy("qwen3_base")
    edit_config(directory, architectures=...)
    assert len(open_model(directory).linears) == 14


def test_a_model_quantized_by_another_tool_is_refused_by_its_name(toy_copy):
    directory = toy_copy("llama")
    edit_config(directory, quantization_config={"quant_method": "gptq", "bits": 4})
    message = refusal(directory)
    assert "already quantized" in message and "gptq" in message


def test_case_9_a_quantized_file_is_refused_as_canonical(quantized):
    _, file = quantized("llama")
    message = refusal(file)
    assert "already quantized" in message and "canonical" in message


def test_a_packed_file_is_refused_as_packed(quantized, svdq, tmp_path):
    _, file = quantized("llama")
    assert svdq("export-packed", file, tmp_path / "packed.safetensors").code == 0
    message = refusal(tmp_path / "packed.safetensors")
    assert "already quantized" in message and "packed" in message


def test_a_directory_that_holds_a_quantized_file_is_refused(quantized, toy_copy):
    directory = toy_copy("llama")
    (directory / "model.safetensors").write_bytes(quantized("llama")[1].read_bytes())
    assert "already quantized" in refusal(directory)


# ---- sizes that do not divide (case 6)


def test_case_6_sizes_off_the_group_list_every_full_name_and_the_flag_in_a_second(toy):
    directory = toy("llama", hidden_size=1000, intermediate_size=4304, num_attention_heads=8, head_dim=64)
    plan_of = lambda: plan(open_model(directory), QuantConfig())  # noqa: E731
    started = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        plan_of()
    assert time.perf_counter() - started < 1  # preflight in under a second
    lines = str(caught.value).splitlines()
    sizes = {"q_proj": 1000, "k_proj": 1000, "v_proj": 1000, "gate_proj": 1000, "up_proj": 1000, "down_proj": 4304}
    for block in range(2):
        for leaf, k in sizes.items():
            part = "self_attn" if leaf in ("q_proj", "k_proj", "v_proj") else "mlp"
            name = f"model.layers.{block}.{part}.{leaf}"
            line = next(line for line in lines if line.startswith(f"{name}:"))
            assert f" {k} " in line and " 64;" in line and f"--ignore '{name}'" in line
    assert len(lines) == 12  # o_proj reads 8 heads of 64 channels: 512 divides


def test_the_flag_that_the_message_names_lets_the_rest_through(toy):
    directory = toy("llama", hidden_size=1000, intermediate_size=4304, num_attention_heads=8, head_dim=64)
    chosen = plan(open_model(directory), QuantConfig(ignore=("q_proj", "k_proj", "v_proj", "mlp"))).linears
    assert [linear.name for linear in chosen] == [f"model.layers.{b}.self_attn.o_proj" for b in range(2)]


# ---- devices (case 20, the half without a card; the other is tests/gpu/test_device.py)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "meta", "mps", "cpu:two"])
def test_a_device_that_is_none_lists_those_that_are(name):
    with pytest.raises(ConfigError, match="wanted auto, cpu, cuda"):
        resolve_device(name)


def test_a_card_that_is_not_there_states_how_many_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match="cuda:1: found 1 CUDA devices"):
        resolve_device("cuda:1")


@pytest.mark.parametrize(("there", "wanted"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_the_card_if_there_is_one(monkeypatch, there, wanted):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert resolve_device("auto").type == wanted
