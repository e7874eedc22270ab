"""A fused model is the unfused one: the same numbers, caches, masks and records, in fewer operators.

Both run the same arithmetic, so they agree to float32 rounding; few tokens, because of ties (see test_linear.py).
"""

from collections import Counter

import pytest
import safetensors.torch
import torch
import transformers
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from svdq import pipeline
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.decoder import LINEARS, W4A4DecoderBlock, decoder_block
from svdq.errors import ConfigError
from svdq.linear import W4A4Linear, load_quantized
from svdq.models import linear_sizes, open_model
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform

IDS = torch.tensor([[5, 17, 101, 3, 44, 199, 0, 62, 62, 130, 8, 71]])
PADDED = torch.tensor([[5, 17, 101, 3, 44, 199], [0, 0, 62, 130, 8, 71]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
KINDS = ["llama", "qwen2", "qwen3", "qwen3_base"]  # tied embeddings; biases; head norms; no language model
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}  # the second of two layers


def run(model, **inputs):
    with torch.no_grad():
        return model(**{"input_ids": IDS, **inputs})


@pytest.fixture
def both(quantized):
    """both(kind, **config) → (fused, unfused) of one file."""

    def load(kind, **config):
        file = quantized(kind, **config)
        return load_quantized(*file, fuse=True), load_quantized(*file)

    return load


@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_model_computes_what_the_unfused_does(both, distance, kind):
    fused, unfused = both(kind)
    assert distance(run(fused)[0], run(unfused)[0]) < 1e-4


@pytest.mark.parametrize("preset", ["nunchaku", "plain"])
def test_files_of_every_preset_can_be_fused(both, distance, preset):
    fused, unfused = both("qwen3", preset=preset)
    assert distance(run(fused)[0], run(unfused)[0]) < 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_second_layer_may_look_through_a_window(both, distance, attention):
    models = both("qwen2", **WINDOW)
    for model in models:
        model.set_attn_implementation(attention)
    fused, unfused = (run(model)[0] for model in models)
    assert distance(fused, unfused) < 1e-4
    assert distance(run(load_unwindowed(models[0]))[0], fused) > 1e-3


def load_unwindowed(model):
    model.config.layer_types = ["full_attention", "full_attention"]
    model.model.has_sliding_layers = False
    for layer in model.model.layers:
        layer.attention_type = "full_attention"  # read by older transformers
    return model


def test_a_configured_bias_of_every_linear_is_kept(both, distance):
    fused, unfused = both("llama", attention_bias=True, mlp_bias=True)
    assert distance(run(fused)[0], run(unfused)[0]) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_gives_the_same_tokens(both, kind, cache):
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    fused, unfused = (model.generate(IDS, **options) for model in both(kind))
    assert torch.equal(fused, unfused)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_cached_step_equals_the_last_row_of_the_whole(both, distance, kind):
    fused, _ = both(kind)
    first = run(fused, input_ids=IDS[:, :-1], use_cache=True)
    step = run(fused, input_ids=IDS[:, -1:], use_cache=True, past_key_values=first.past_key_values)
    assert distance(step.logits[:, -1], run(fused).logits[:, -1]) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_left_padded_batch_computes_the_same(both, distance, kind):
    positions = (MASK.cumsum(-1) - 1).clamp_min(0)  # a row of rotary tables for each token of each sequence
    fused, unfused = (
        run(model, input_ids=PADDED, attention_mask=MASK, position_ids=positions).logits[MASK.bool()]
        for model in both(kind)
    )
    assert distance(fused, unfused) < 1e-4


def test_a_left_padded_batch_generates_the_same(both):
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    fused, unfused = (model.generate(PADDED, attention_mask=MASK, **options) for model in both("qwen3"))
    assert torch.equal(fused, unfused)


def test_the_head_norms_and_positions_matter(both, distance):
    fused, _ = both("qwen3")
    before = run(fused).logits
    assert distance(run(fused, position_ids=3 * torch.arange(12)[None]).logits, before) > 1e-3
    with torch.no_grad():
        fused.model.layers[0].self_attn.k_norm.weight.mul_(2)
    assert distance(run(fused).logits, before) > 1e-3


# ---- what transformers reads off a layer


def test_hidden_states_are_recorded(both, distance):
    fused, unfused = (run(model, output_hidden_states=True).hidden_states for model in both("qwen3"))
    assert len(fused) == len(unfused) == 3
    for found, wanted in zip(fused, unfused, strict=True):
        assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_attentions_are_recorded(both, distance, kind):
    models = both(kind)
    for model in models:
        model.set_attn_implementation("eager")
    fused, unfused = (run(model, output_attentions=True).attentions for model in models)
    assert len(fused) == len(unfused) == 2
    for found, wanted in zip(fused, unfused, strict=True):
        assert distance(found, wanted) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_the_attention_function_is_called_as_by_transformers(both, distance, kind):
    calls = []

    def recording(module, query, key, value, attention_mask, **options):
        calls.append((module, query, key, value, options))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)

    transformers.AttentionInterface.register("recording", recording)
    transformers.AttentionMaskInterface.register("recording", sdpa_mask)
    for model in both(kind, **(WINDOW if kind != "llama" else {})):
        model.set_attn_implementation("recording")
        run(model, use_cache=True, a_word="of the caller")
    assert len(calls) == 4
    for (module, *found, options), (wanted_module, *wanted, wanted_options) in zip(calls[:2], calls[2:], strict=True):
        assert isinstance(module, type(wanted_module))
        assert options.keys() == wanted_options.keys() and options["a_word"] == "of the caller"
        for name in options.keys() & {"dropout", "scaling", "sliding_window", "use_cache"}:
            assert options[name] == wanted_options[name]
        assert options["position_ids"].equal(wanted_options["position_ids"])
        for a, b in zip(found, wanted, strict=True):
            assert a.shape == b.shape and distance(a, b) < 1e-4


def test_a_hook_on_a_norm_inside_a_kernel_is_refused(both):
    block = both("qwen3")[0].model.layers[0]
    for norm in (block.input_layernorm, block.self_attn.q_norm):
        with pytest.raises(ConfigError, match="fuse=False"):
            norm.register_forward_hook(print)
        with pytest.raises(ConfigError, match="fuse=False"):
            norm.register_forward_pre_hook(print)


def test_rotary_tables_of_another_length_are_refused(both):
    model, _ = both("llama")
    tables = [torch.ones(1, 4, 64)] * 2
    with pytest.raises(ConfigError, match=r"position_embeddings: found \[1, 4, 64\]; wanted \[1 or 2, 8, 64\]"):
        model.model.layers[0](torch.zeros(2, 8, 128), position_embeddings=tables)


# ---- what runs


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()
        self.types = {}  # operator → the types of those arguments that a kernel reads as one type

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "svdq":
            name = function._schema.name.removeprefix("svdq::")
            self.names[name] += 1
            alike = {"quantize_lora_down": (0, 6), "qknorm_rope": (0, 1, 2, 3)}.get(name, ())
            self.types.setdefault(name, set()).update(args[i].dtype for i in alike if args[i] is not None)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_block_is_eleven_operators(both, kind):
    model, _ = both(kind)
    with Calls() as calls:
        run(model)
    blocks = 2
    assert calls.names == {
        "inv_rms": 2 * blocks,
        "quantize_lora_down": 4 * blocks,
        "w4a4_gemm_lora": 4 * blocks,
        "qknorm_rope": 1 * blocks,
    }


def test_the_reference_runs_no_operator(quantized, distance):
    file = quantized("qwen3")
    model = load_quantized(*file, kernels="reference", fuse=True)
    with Calls() as calls:
        found = run(model)[0]
    assert not calls.names
    assert distance(found, run(load_quantized(*file))[0]) < 1e-4


def test_nothing_is_held_beside_the_groups(both):
    fused, unfused = both("llama")
    held, single = ({n for n, m in model.named_modules() if isinstance(m, W4A4Linear)} for model in (fused, unfused))
    assert held == {f"model.layers.{i}.{leaf}" for i in (0, 1) for leaf in ("self_attn.o_proj", "mlp.down_proj")}
    assert len(single) == 14
    assert not any(isinstance(module, torch.nn.Linear) for module in fused.model.modules())
    weights = [sum(b.numel() for n, b in m.named_buffers() if n.endswith("qweight")) for m in (fused, unfused)]
    assert weights[0] == weights[1]


def test_bfloat16_on_a_cpu_is_near_the_unfused(quantized, distance):
    file = quantized("qwen3")
    fused, unfused = (run(load_quantized(*file, dtype=torch.bfloat16, fuse=fuse))[0] for fuse in (True, False))
    assert fused.dtype == torch.bfloat16
    # q and k are rounded once, not four times, and inputs near a tie get other codes
    assert distance(fused, unfused) < 0.3


def test_autocast_runs_the_block_in_its_type(both, distance):
    fused, _ = both("qwen3")
    expected = run(fused).logits
    with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        assert distance(run(fused).logits, expected) < 0.3
    assert calls.types["quantize_lora_down"] == calls.types["qknorm_rope"] == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_block_compiles_as_one_graph(both, distance, kind):
    model = both(kind)[0]
    block, x = model.model.layers[1], torch.randn(2, 6, 128, generator=torch.Generator().manual_seed(0))
    tables = model.model.rotary_emb(x, torch.arange(6)[None])
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert distance(compiled(x, position_embeddings=tables), block(x, position_embeddings=tables)) < 1e-6


# ---- blocks without a file


def random_layers(hf_layer, rank=16, clip=0.9):
    generator = torch.Generator().manual_seed(3)
    layers = {}
    for suffix in LINEARS:
        n, k = linear_sizes(hf_layer.get_submodule(suffix))
        layers[suffix] = Layer(
            suffix,
            torch.randint(-7, 8, (n, k), generator=generator, dtype=torch.int8),
            torch.full((n, k // 64), 0.25 * k**-0.5, dtype=torch.float16),
            (torch.randn(k, rank, generator=generator) * k**-0.5).half(),
            (torch.randn(n, rank, generator=generator) * rank**-0.5).half(),
            None,
            ActivationTransform(rotation=True, clip=clip),
        )
    return layers


@pytest.fixture
def hf_layer():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    config = transformers.Qwen3Config(
        hidden_size=128, intermediate_size=192, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
        num_hidden_layers=1, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        return Qwen3DecoderLayer(config, 0).eval()


def test_a_block_is_made_of_a_layer_and_seven_linears(hf_layer, distance):
    layers = random_layers(hf_layer)
    block = decoder_block(hf_layer, layers)
    assert isinstance(block, W4A4DecoderBlock) and isinstance(block, type(hf_layer))
    x = torch.randn(1, 12, 128, generator=torch.Generator().manual_seed(0))
    angles = torch.arange(12)[:, None] * 10000.0 ** -(torch.arange(64) % 32 / 32)
    tables = (angles.cos()[None], angles.sin()[None])
    with torch.no_grad():
        found = block(x, position_embeddings=tables)
        for suffix in LINEARS:  # the layer itself was left alone, and is the expected value with its linears replaced
            parent, _, leaf = suffix.rpartition(".")
            setattr(hf_layer.get_submodule(parent), leaf, W4A4Linear(layers[suffix]))
        assert distance(found, hf_layer(x, position_embeddings=tables)) < 1e-4


def test_a_block_without_one_of_its_linears_is_refused(hf_layer):
    layers = random_layers(hf_layer)
    del layers["mlp.up_proj"]
    with pytest.raises(ConfigError, match=r"wanted .*mlp\.up_proj"):
        decoder_block(hf_layer, layers)


def test_a_linear_of_another_size_is_refused(hf_layer):
    layers = random_layers(hf_layer)
    layers["mlp.up_proj"] = layers["self_attn.q_proj"]
    with pytest.raises(ConfigError, match=r"128 x 128, the layer's mlp\.up_proj is 192 x 128"):
        decoder_block(hf_layer, layers)


def test_siblings_of_two_clips_are_refused(hf_layer):
    layers = random_layers(hf_layer)
    layers["self_attn.v_proj"] = random_layers(hf_layer, clip=0.8)["self_attn.v_proj"]
    with pytest.raises(ConfigError, match="do not share an input"):
        decoder_block(hf_layer, layers)


def test_another_class_is_refused(hf_layer):
    with pytest.raises(ConfigError, match="found a Qwen3MLP; wanted a decoder layer of llama, qwen2, qwen3"):
        decoder_block(hf_layer.mlp, {})


# ---- layers that cannot be fused


def with_other_smoothing(file, out, names):
    """A copy of the file in which these linears are smoothed by values of their own."""
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  not a mapping
    for name in names:
        tensors[f"{name}.smooth"] = tensors[f"{name}.smooth"] * 1.5
    safetensors.torch.save_file(tensors, out, metadata)
    return out


def test_all_layers_are_counted_where_all_are_replaced(both):
    fused, unfused = both("llama")
    assert fused.svdq_fusion.replaced == ["model.layers.0", "model.layers.1"]
    assert fused.svdq_fusion.left == {}
    assert not hasattr(unfused, "svdq_fusion")


def test_a_layer_whose_siblings_are_smoothed_apart_is_left_and_named(quantized, tmp_path, distance):
    directory, file = quantized("llama", preset="nunchaku")
    file = with_other_smoothing(file, tmp_path / "out.safetensors", ["model.layers.0.self_attn.k_proj"])
    with pytest.warns(UserWarning, match=r"left 1 of 2 decoder layers: model\.layers\.0: .*k_proj.*q_proj") as warned:
        model = load_quantized(directory, file, fuse=True)
    assert warned[0].filename == __file__
    assert model.svdq_fusion.replaced == ["model.layers.1"]
    assert list(model.svdq_fusion.left) == ["model.layers.0"]
    assert isinstance(model.model.layers[0].self_attn.k_proj, W4A4Linear)
    assert distance(run(model)[0], run(load_quantized(directory, file))[0]) < 1e-4


def test_where_no_layer_can_be_fused_the_reason_is_given(quantized, tmp_path):
    directory, file = quantized("llama", preset="nunchaku")
    names = [f"model.layers.{i}.mlp.up_proj" for i in (0, 1)]
    file = with_other_smoothing(file, tmp_path / "out.safetensors", names)
    with pytest.raises(ConfigError, match=r"model\.layers\.0: .*up_proj.*gate_proj do not share.*fuse=False"):
        load_quantized(directory, file, fuse=True)


def test_a_layer_with_a_linear_in_16_bits_is_left_and_named(toy, calibration_ids, read_ids, tmp_path, distance):
    directory, out = toy("llama"), tmp_path / "out.safetensors"
    pipeline.quantize(
        open_model(directory),
        out,
        QuantConfig(layer=LayerConfig(rank=8, rounds=1), ignore=("model.layers.1.mlp.down_proj",)),
        data=read_ids(calibration_ids),
        calibration=CalibrationConfig(),
    )
    with pytest.warns(UserWarning, match=r"model\.layers\.1: mlp\.down_proj not quantized"):
        model = load_quantized(directory, out, fuse=True)
    assert model.svdq_fusion.replaced == ["model.layers.0"]
    assert distance(run(model)[0], run(load_quantized(directory, out))[0]) < 1e-4


def test_a_model_of_another_family_is_refused(quantized):
    with pytest.raises(ConfigError, match=r"found no decoder layer in GPT2LMHeadModel; .*fuse=False"):
        load_quantized(*quantized("gpt2"), fuse=True)
