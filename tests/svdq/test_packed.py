"""Packed sequences: each gets what it would get alone, whatever lies beside it."""

import copy
import warnings

import pytest
import torch
from torch import nn

from svdq.bench import backbone, quantize_layers
from svdq.errors import ConfigError
from svdq.packed import BUCKETS, PackedRunner

CPU = torch.device("cpu")


def model_of(activations=None, **config):
    model = backbone("tiny", CPU, torch.float32)
    for name, value in config.items():
        setattr(model.config, name, value)
    if activations:
        quantize_layers(model, activations)
    return model


def embeddings(tokens, seed=0):
    return torch.randn(tokens, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("lengths", [[1], [37], [10, 20, 7], [1, 1, 1, 90], [64, 64]])
def test_packed_sequences_get_what_transformers_gives_each(lengths):
    model = model_of()
    x = embeddings(sum(lengths))
    found = PackedRunner(model, embeddings=True)(x, lengths)
    alone = [model(inputs_embeds=part[None]).last_hidden_state[0] for part in x.split(lengths)]
    assert torch.allclose(found, torch.cat(alone), atol=1e-5)
    assert model.config._attn_implementation == "sdpa"  # as it was


@pytest.mark.parametrize("activations", ["int4", "fp8"])
def test_quantized_layers_get_what_they_get_alone(activations):
    model = model_of(activations)
    x = embeddings(40)
    runner = PackedRunner(model, embeddings=True, buckets=(64,))
    together = runner(x, [25, 15])
    assert torch.allclose(together[:25], runner(x[:25], [25]), atol=1e-4)
    assert torch.allclose(together[25:], runner(x[25:], [15]), atol=1e-4)


def test_a_causal_language_model_takes_token_ids():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                         intermediate_size=128, vocab_size=90)  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    ids = torch.randint(0, 90, (21,), generator=torch.Generator().manual_seed(0))
    found = PackedRunner(model)(ids, [13, 8])
    alone = [model.model(input_ids=part[None]).last_hidden_state[0] for part in ids.split([13, 8])]
    assert torch.allclose(found, torch.cat(alone), atol=1e-5)


def test_a_sliding_window_hides_what_is_further_back():
    model = model_of()
    for layer in model.layers:
        layer.self_attn.sliding_window = 4
    x = embeddings(30)
    changed = x.clone()
    changed[5] += 1
    runner = PackedRunner(model, embeddings=True)
    moved = (runner(x, [30]) - runner(changed, [30])).abs().amax(1) > 1e-6
    assert moved[5] and moved[11] and not moved[12:].any() and not moved[:5].any()  # two layers of 4


def test_nan_of_the_batch_before_is_not_in_the_padding():
    runner = PackedRunner(model_of("int4"), embeddings=True, buckets=(64,))
    x = embeddings(20)
    wanted = runner(x, [20])
    assert runner(torch.full((50, 128), float("nan")), [50]).isnan().all()
    assert torch.equal(runner(x, [20]), wanted)


def test_tokens_are_padded_to_the_next_bucket():
    seen = []
    model = model_of()
    model.layers[0].register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    runner = PackedRunner(model, embeddings=True)
    for tokens in (1, 128, 129, 700, 2048):
        runner(embeddings(tokens), [tokens])
    assert seen == [128, 128, 192, 768, 2048]
    assert BUCKETS == (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def test_what_is_longer_than_the_last_bucket_is_not_padded_and_said_once():
    runner = PackedRunner(model_of(), embeddings=True, buckets=(16,))
    runner(embeddings(10), [10])
    with pytest.warns(UserWarning, match="20 tokens: longer than the last bucket, 16"):
        assert len(runner(embeddings(20), [20])) == 20
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(runner(embeddings(21), [21])) == 21
    assert (runner.eager_runs, runner.captures) == (3, 0)


@pytest.mark.parametrize("tokens", [10, 20])
def test_embeddings_become_of_the_models_type(tokens):
    runner = PackedRunner(model_of().to(torch.bfloat16), embeddings=True, buckets=(16,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert runner(embeddings(tokens), [tokens]).dtype == torch.bfloat16


@pytest.mark.parametrize(("inputs", "words"), [
    (torch.zeros(10, 1), "wanted embeddings [10, 128]"),
    (torch.zeros(10), "wanted embeddings [10, 128]"),
    (torch.zeros(10, 128, dtype=torch.long), "found torch.int64 [10, 128]"),
])  # fmt: skip
def test_inputs_of_another_kind_are_refused(inputs, words):
    with pytest.raises(ConfigError) as caught:
        PackedRunner(model_of(), embeddings=True)(inputs, [10])
    assert words in str(caught.value)


def test_layers_with_a_configuration_of_their_own_are_refused():
    model = model_of()
    model.config = copy.deepcopy(model.config)
    with pytest.raises(ConfigError, match="configuration is not the model's own"):
        PackedRunner(model)


@pytest.mark.parametrize(("options", "words"), [
    ({"buckets": (64, 32)}, "buckets=(64, 32)"),
    ({"buckets": (0,)}, "buckets=(0,)"),
    ({"max_sequences": 0}, "max_sequences=0"),
    ({"graphs": True}, "graphs=True: the model is on cpu"),
])  # fmt: skip
def test_wrong_options_are_named(options, words):
    with pytest.raises(ConfigError) as caught:
        PackedRunner(model_of(), **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("lengths", [[10], [20, -1, 1], [], [19, 0, 1], [1] * 20])
def test_wrong_lengths_are_named(lengths):
    runner = PackedRunner(model_of(), embeddings=True, max_sequences=8)
    with pytest.raises(ConfigError, match=r"lengths=|max_sequences=8"):
        runner(embeddings(20), lengths)


def test_another_kind_of_model_is_refused():
    with pytest.raises(ConfigError, match=r"found Linear; wanted a model of decoder layers"):
        PackedRunner(nn.Linear(4, 4))
