"""A quantized file as a running model: the format's own arithmetic, in transformers' own module tree."""

import shutil

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from svdq.errors import CheckpointError, ConfigError, SvdqError
from svdq.grid import pack_nibbles
from svdq.kernels import layout
from svdq.linear import W4A4Linear, load_quantized

SUFFIXES = ("qweight", "w_scales", "proj_down", "proj_up", "smooth")
# 12 tokens: a value within float32 noise of a rounding tie gets another code and moves its token by a percent, and
# the fewer values there are, the less likely is one. Without such a value the two paths agree to float32.
IDS = torch.tensor([[5, 17, 101, 3, 44, 199, 0, 62, 62, 130, 8, 71]])
KINDS = ["llama", "qwen2", "gpt2", "bert"]  # tied embeddings; biases; transposed weights; no language model


def states(model):
    with torch.no_grad():
        return model(input_ids=IDS)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_computes_what_the_format_says(quantized, reference_model, distance, kind):
    directory, file = quantized(kind)
    assert distance(states(load_quantized(directory, file)), states(reference_model(directory, file))) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_model_is_near_the_original_but_not_it(quantized, original, distance, kind):
    directory, file = quantized(kind)
    # W4A4 costs these random models 5 to 40 %; a forgotten correction or rotation over 100 %
    assert 1e-3 < distance(states(load_quantized(directory, file)), states(original(directory))) < 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_8_bits_are_nearer_to_the_original(quantized, original, distance, kind):
    directory, file = quantized(kind)
    plain = states(original(directory))
    w4a4, w4a8 = (load_quantized(directory, file, activations=name) for name in ("int4", "fp8"))
    assert distance(states(w4a8), plain) < distance(states(w4a4), plain)
    assert (w4a4.svdq_path, w4a8.svdq_path) == (
        "W4A4, in plain torch on cpu",
        "W4A8: activations in e4m3, in plain torch on cpu",
    )


def test_the_operators_and_the_reference_agree_on_w4a8(quantized, distance):
    directory, file = quantized("llama")
    one, other = (load_quantized(directory, file, activations="fp8", kernels=name) for name in ("auto", "reference"))
    assert distance(states(one), states(other)) < 1e-6


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("wrong", [{"activations": "int8"}, {"kernels": "cuda"}])
def test_an_unknown_path_is_refused(quantized, wrong, fuse):
    directory, file = quantized("llama")
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name}='{value}'; wanted "):
        load_quantized(directory, file, fuse=fuse, **wrong)


@pytest.mark.parametrize("preset", ["nunchaku", "plain"])
def test_files_of_every_preset_compute_what_the_format_says(quantized, reference_model, distance, preset):
    directory, file = quantized("llama", preset)
    reference, seen = reference_model(directory, file), {}
    for name, module in reference.named_modules():
        if name.endswith("_proj"):
            module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: (x[0], y)}))
    states(reference)
    loaded = load_quantized(directory, file)
    assert len(seen) == 14
    for name, (x, y) in seen.items():  # each on the same inputs: one code at a tie would make all after it another
        assert distance(loaded.get_submodule(name)(x), y) < 1e-6


def test_a_packed_file_computes_the_same(quantized, svdq, tmp_path, distance):
    directory, file = quantized("llama")
    packed = tmp_path / "packed.safetensors"
    assert svdq("export-packed", file, packed, "--fuse", "qkv_proj=q_proj,k_proj,v_proj").code == 0
    assert torch.equal(states(load_quantized(directory, packed)), states(load_quantized(directory, file)))


def test_every_quantized_linear_is_replaced_and_no_other(quantized):
    directory, file = quantized("qwen2")
    model = load_quantized(directory, file)
    replaced = {name for name, module in model.named_modules() if isinstance(module, W4A4Linear)}
    linears = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert len(replaced) == 14
    assert linears == {"lm_head"}


def test_generation_takes_the_likeliest_tokens_of_the_forward(quantized):
    directory, file = quantized("llama")
    model = load_quantized(directory, file)
    found = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    wanted = IDS
    with torch.no_grad():
        for _ in range(4):
            wanted = torch.cat([wanted, model(input_ids=wanted, use_cache=False)[0][:, -1:].argmax(-1)], 1)
    assert torch.equal(found, wanted)


def test_the_file_and_the_configuration_are_the_model(quantized, tmp_path):
    directory, file = quantized("qwen2")
    shutil.copy(directory / "config.json", tmp_path / "config.json")
    shutil.copy(file, tmp_path / "out.safetensors")
    alone = load_quantized(tmp_path, tmp_path / "out.safetensors")
    assert torch.equal(states(alone), states(load_quantized(directory, file)))


def test_a_tied_head_is_the_embedding_itself(quantized):
    model = load_quantized(*quantized("llama"))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_biases_reload_as_they_were_written(quantized):
    directory, file = quantized("gpt2")
    model = load_quantized(directory, file)
    source = safetensors.torch.load_file(directory / "model.safetensors")
    for leaf in ("attn.c_attn", "mlp.c_proj"):
        packed = model.get_submodule(f"transformer.h.1.{leaf}").packed_bias
        wanted = source[f"transformer.h.1.{leaf}.bias"]
        assert torch.equal(layout.MMA["channel"].unpack(packed, (len(packed),))[: len(wanted)], wanted)


def test_stored_tensors_reload_bit_for_bit(quantized):
    directory, file = quantized("llama")
    module = load_quantized(directory, file).model.layers[1].mlp.down_proj
    with safe_open(file, "pt") as opened:
        stored = {s: opened.get_tensor(f"model.layers.1.mlp.down_proj.{s}") for s in SUFFIXES}
    n, k = stored["proj_up"].shape[0], stored["proj_down"].shape[0]
    padded_n, padded_k = module.up.shape[0], module.down.shape[0]
    assert torch.equal(pack_nibbles(layout.unpack_codes(module.qweight)[:n, :k].contiguous()), stored["qweight"])
    scales = layout.unpack_matrix("wscales", module.wscales, (padded_n, padded_k // 64))
    assert torch.equal(scales[:n, : k // 64], stored["w_scales"])
    assert torch.equal(layout.unpack_matrix("down", module.down, (padded_k, 16))[:k], stored["proj_down"])
    assert torch.equal(layout.unpack_matrix("lora_up", module.up, (padded_n, 16))[:n], stored["proj_up"])
    assert torch.equal(module.inv_smooth, 1 / stored["smooth"])


def test_tables_that_no_file_holds_are_computed(quantized, original):
    directory, file = quantized("llama")
    wanted = original(directory).model.rotary_emb.inv_freq
    assert torch.equal(load_quantized(directory, file).model.rotary_emb.inv_freq, wanted)


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)])
def test_casting_the_model_leaves_the_stored_types_alone(quantized, cast):
    module = cast(load_quantized(*quantized("llama"))).model.layers[0].mlp.up_proj
    assert module.qweight.dtype == torch.int8
    assert {module.wscales.dtype, module.down.dtype, module.up.dtype} == {torch.float16}
    assert module.inv_smooth.dtype == torch.float32


def test_a_model_in_bfloat16_runs(quantized, distance):
    directory, file = quantized("llama")
    model = load_quantized(directory, file, dtype=torch.bfloat16)
    assert states(model).dtype == torch.bfloat16
    # bfloat16 keeps 8 bits, and inputs near a tie get other codes: the size of the quantization error, not more
    assert distance(states(model), states(load_quantized(directory, file))) < 0.3


def test_the_leading_dimensions_of_the_input_are_kept(quantized):
    module = load_quantized(*quantized("llama")).model.layers[0].mlp.up_proj
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0))
    assert torch.equal(module(x).flatten(0, 1), module(x.flatten(0, 1)))


@pytest.mark.parametrize("shape", [(3, 64), (2, 64), (192,), (1, 256)])  # 2 x 64 are as many numbers as one row
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_an_input_of_another_width_is_refused_with_both_widths(quantized, kernels, shape):
    module = load_quantized(*quantized("llama"), kernels=kernels).model.layers[0].mlp.up_proj
    with pytest.raises(ValueError, match=rf"W4A4Linear: x has {shape[-1]} channels; wanted 128"):
        module(torch.ones(shape))


def test_loading_leaves_the_random_state_alone(quantized):
    before = torch.get_rng_state()
    load_quantized(*quantized("llama"))
    assert torch.equal(torch.get_rng_state(), before)


# ---- refusals


def refusal(directory, file):
    with pytest.raises(SvdqError) as caught:
        load_quantized(directory, file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_of_linears_alone_is_told_of_the_option(quantized):
    assert "--linears-only" in refusal(*quantized("qwen2", linears_only=True))


def test_a_file_of_another_architecture_is_refused(quantized):
    refusal(quantized("bert")[0], quantized("llama")[1])


def test_a_file_of_more_blocks_is_refused(toy, quantized):
    refusal(toy("llama"), quantized("llama", num_hidden_layers=3)[1])


def test_a_file_of_other_sizes_is_refused(toy, quantized):
    message = refusal(toy("llama", intermediate_size=256), quantized("llama")[1])
    assert "mlp" in message


def test_a_file_of_another_vocabulary_is_refused(toy, quantized):
    assert "embed_tokens" in refusal(toy("llama", vocab_size=64), quantized("llama")[1])


def test_a_directory_without_a_configuration_is_refused(quantized, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_quantized(tmp_path, quantized("llama")[1])


def test_a_file_that_is_not_quantized_is_refused(toy):
    assert "svdq" in refusal(toy("llama"), toy("llama") / "model.safetensors")
