"""Streaming a model block by block: the same hidden states and the same sums as from the whole model."""

import json
import resource

import numpy as np
import pytest
import torch

from svdq.calibration import capture
from svdq.calibration.capture import BlockStream, record_block, token_rows, watch_inputs
from svdq.calibration.data import batches
from svdq.calibration.statistics import ChannelStatistics, SumAccumulator
from svdq.config import CalibrationConfig
from svdq.errors import CheckpointError, DataError
from svdq.models import Linear, open_model
from svdq.rounding import ActivationTransform

CPU = torch.device("cpu")
RAW = CalibrationConfig(smoothing=0.0, rotation="none", act_clip=1.0)  # x' = x
FLOAT32 = 1e-5  # sums of float32 products, each good to 6e-8; another batching changes the order of additions


@pytest.fixture(scope="module")
def token_batches(calibration_ids, heldout_ids, read_ids):
    """Batches of lengths 64, 64 and 40, with more than one row in each."""
    rows = read_ids(calibration_ids).sequences[:3] + read_ids(heldout_ids).sequences
    return batches(rows, 4 * 64)


def stream_of(directory, token_batches):
    return BlockStream(open_model(directory), token_batches, CPU, torch.float32)


def record_all(directory, token_batches, config=RAW):
    """Block → its sums."""
    stream = stream_of(directory, token_batches)
    recorded = {}
    for visit in stream:
        members = [linear for linear in stream.model.linears if linear.block == visit.block]
        if (result := record_block(stream, visit, members, config)) is not None:
            recorded[visit.block] = result
    return recorded


def watched(model, paths, token_batches):
    """Module path → its inputs, one tensor a call, while transformers runs the whole model."""
    seen = {path: [] for path in paths}

    def hook(path):
        def see(_module, args, kwargs):
            seen[path].append((args[0] if args else kwargs["hidden_states"]).detach().clone())

        return see

    handles = [model.get_submodule(path).register_forward_pre_hook(hook(path), with_kwargs=True) for path in set(paths)]
    with torch.no_grad():
        for batch in token_batches:
            model(input_ids=batch)
    for handle in handles:
        handle.remove()
    return seen


# ---- hidden states


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "bert", "albert", "mistral", "phi3"])
def test_streamed_states_are_those_of_the_whole_model(toy, original, token_batches, distance, kind):
    model = original(toy(kind))
    stream = stream_of(toy(kind), token_batches)
    wanted = watched(model, stream.model.blocks, token_batches)
    for number, visit in enumerate(stream):
        for batch, states in enumerate(visit.inputs):
            # transformers runs batch by batch; Albert's only block is called once for each of its visits
            call = batch * stream.visits + number if kind == "albert" else batch
            assert distance(states, wanted[visit.path][call]) < 1e-5  # the same float32 operations, perhaps reordered


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "bert", "albert"])
def test_final_states_go_through_the_models_own_tail(toy, original, token_batches, distance, kind):
    stream = stream_of(toy(kind), token_batches)
    for _ in stream:
        pass
    found = []
    stream.finish(lambda number, batch, output: found.append(output), [stream.hidden])
    model = original(toy(kind))
    with torch.no_grad():
        for output, batch in zip(found, token_batches, strict=True):
            assert distance(output, model(input_ids=batch)[0]) < 1e-5  # float32


def test_layers_with_different_masks_get_their_own(toy, original, token_batches):
    # The guard of the test above: with a window of 8 in both layers, the final states are others.
    both_full = original(toy("gemma3", layer_types=["full_attention", "full_attention"]))
    one_sliding = original(toy("gemma3"))
    with torch.no_grad():
        a, b = (m(input_ids=token_batches[0])[0] for m in (both_full, one_sliding))
    assert (a - b).norm() > 1e-2 * b.norm()


def test_a_block_holds_weights_only_while_it_is_visited(toy, token_batches):
    stream = stream_of(toy("llama"), token_batches)
    for visit in stream:
        real = [
            path
            for path in stream.model.blocks
            if any(p.device.type != "meta" for p in stream.model.tree.get_submodule(path).parameters())
        ]
        assert real == [visit.path]
    assert {p.device.type for p in stream.model.tree.parameters()} == {"meta"}


def test_blocks_between_which_the_model_changes_the_states_are_refused(toy, token_batches):
    model = open_model(toy("bert"))

    def forward(input_ids):
        hidden = model.tree.embeddings(input_ids)
        for block in model.tree.encoder.layer:
            hidden = block(hidden)
            hidden = (hidden[0] if isinstance(hidden, tuple) else hidden) * 0.5
        return hidden

    model.tree.forward = forward
    with pytest.raises(CheckpointError, match=r"encoder\.layer\.1: the model changes the hidden states"):
        BlockStream(model, token_batches, CPU, torch.float32)


def test_states_changed_in_place_between_blocks_are_refused(toy, token_batches):
    model = open_model(toy("bert"))

    def forward(input_ids):
        hidden = model.tree.embeddings(input_ids)
        for block in model.tree.encoder.layer:
            hidden = block(hidden)
            hidden = hidden[0] if isinstance(hidden, tuple) else hidden
            hidden.mul_(0.5)
        return hidden

    model.tree.forward = forward
    with pytest.raises(CheckpointError, match="changes the hidden states"):
        BlockStream(model, token_batches, CPU, torch.float32)


# ---- sites


SITES = {  # kind: leaves of one block that read one input, worked out from the architecture
    "llama": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "gemma3": [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)],
    "phi": [("q_proj", "k_proj", "v_proj", "fc1"), ("dense",), ("fc2",)],  # attention and MLP are parallel
    "gpt2": [("c_attn",), ("attn.c_proj",), ("c_fc",), ("mlp.c_proj",)],
    "bert": [("query", "key", "value"), ("attention.output.dense",), ("intermediate.dense",), ("0.output.dense",)],
    "albert": [("query", "key", "value"), ("attention.dense",), ("ffn",), ("ffn_output",)],
}


@pytest.mark.parametrize("kind", SITES)
def test_linears_that_read_one_tensor_share_a_site(toy, token_batches, kind):
    found = record_all(toy(kind), token_batches)[0]
    assert found.never_ran == []
    assert len(found.sites) == len(SITES[kind])
    for leader, names in found.sites.items():
        assert leader == names[0]
        leaves = next(leaves for leaves in SITES[kind] if leader.endswith(f".{leaves[0]}"))
        assert len(names) == len(leaves)
        assert all(any(name.endswith(f".{leaf}") for name in names) for leaf in leaves)


def test_a_site_is_led_by_a_selected_linear(toy, token_batches):
    stream = stream_of(toy("llama"), token_batches)
    visit = next(iter(stream))
    first = [linear for linear in stream.model.linears if linear.block == 0]
    members = [linear for linear in first if linear.name.endswith(("v_proj", "up_proj"))]
    assert list(record_block(stream, visit, members, RAW).sites) == [linear.name for linear in members]


def test_a_linear_that_does_not_run_is_reported(toy, token_batches):
    stream = stream_of(toy("llama"), token_batches)
    visit = next(iter(stream))
    members = [linear for linear in stream.model.linears if linear.name.endswith("o_proj")]  # of both blocks
    found = record_block(stream, visit, members, RAW)
    assert (list(found.sites), found.never_ran) == ([members[0].name], [members[1].name])


# ---- sums


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "bert"])
def test_sums_are_those_of_the_whole_models_inputs(toy, original, token_batches, distance, kind):
    model, opened = original(toy(kind)), open_model(toy(kind))
    modules = {linear.name: linear.module for linear in opened.linears}
    inputs = watched(model, modules.values(), token_batches)
    for sums in record_all(toy(kind), token_batches).values():
        for site, found in sums.sums.items():
            x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs[modules[site]]]).double()
            assert found.tokens == len(x) == sum(batch.numel() for batch in token_batches)
            assert distance(found.xx, x.t() @ x) < FLOAT32
            assert distance(found.absmax, x.abs().amax(0)) < FLOAT32


def test_case_22_the_sums_hold_every_visit_of_a_shared_block(toy, original, token_batches, distance):
    model, opened = original(toy("albert")), open_model(toy("albert"))
    inputs = watched(model, [linear.module for linear in opened.linears], token_batches)
    tokens = sum(batch.numel() for batch in token_batches)
    (sums,) = record_all(toy("albert"), token_batches).values()
    for site, found in sums.sums.items():
        x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs[site]]).double()
        assert found.tokens == len(x) == 3 * tokens
        assert distance(found.xx, x.t() @ x) < FLOAT32


def test_transformed_sums_are_those_of_smoothed_and_rotated_inputs(toy, original, token_batches, distance):
    model, opened = original(toy("llama")), open_model(toy("llama"))
    inputs = watched(model, [linear.module for linear in opened.linears], token_batches)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) / 2**0.5
    for sums in record_all(toy("llama"), token_batches, CalibrationConfig()).values():
        for site, found in sums.sums.items():
            x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs[site]]).double()
            x = x / found.transform.smooth.double()
            x = (x.reshape(len(x), -1, 64) @ hadamard).reshape(len(x), -1)
            assert distance(found.xx, x.t() @ x) < FLOAT32


def test_smoothing_is_the_rms_to_the_power_075_with_geometric_mean_1(toy, original, token_batches):
    model, opened = original(toy("llama")), open_model(toy("llama"))
    inputs = watched(model, [linear.module for linear in opened.linears], token_batches)
    for sums in record_all(toy("llama"), token_batches, CalibrationConfig()).values():
        for site, found in sums.sums.items():
            x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs[site]]).double().numpy()
            wanted = np.sqrt((x**2).mean(0)) ** 0.75
            wanted = np.clip(wanted / np.exp(np.log(wanted).mean()), 1e-2, 1e2)
            # half a step of the 8-bit mantissa that it is rounded to, and float32 noise
            np.testing.assert_allclose(found.transform.smooth.numpy(), wanted, rtol=2**-8)


def test_quantized_sums_are_those_of_a_slow_quantizer(toy, original, token_batches, distance):
    model, opened = original(toy("llama")), open_model(toy("llama"))
    inputs = watched(model, [linear.module for linear in opened.linears], token_batches)
    for sums in record_all(toy("llama"), token_batches).values():
        for site, found in sums.sums.items():
            x = torch.cat([part.reshape(-1, part.shape[-1]) for part in inputs[site]]).double().numpy()
            groups = x.reshape(len(x), -1, 64)
            scale = np.abs(groups).max(-1, keepdims=True) / 7
            hat = torch.from_numpy((np.clip(np.round(groups / scale), -8, 7) * scale).reshape(x.shape))
            # a value within float32 noise of a tie may round the other way: 1 of 10^5 codes off by one step
            assert distance(found.qq, hat.t() @ hat) < 1e-3
            assert distance(found.xq, torch.from_numpy(x).t() @ hat) < 1e-3


@pytest.mark.parametrize("kind", ["llama", "albert"])
def test_sums_do_not_depend_on_whether_the_inputs_fit_in_memory(toy, token_batches, monkeypatch, kind):
    kept = record_all(toy(kind), token_batches, CalibrationConfig())
    monkeypatch.setattr(capture, "REPLAY_BYTES", 0)
    run_again = record_all(toy(kind), token_batches, CalibrationConfig())
    assert kept.keys() == run_again.keys()
    for block in kept:
        assert kept[block].sites == run_again[block].sites
        for site, sums in kept[block].sums.items():
            other = run_again[block].sums[site]
            assert sums.tokens == other.tokens
            assert all(torch.equal(getattr(sums, name), getattr(other, name)) for name in ("xx", "xq", "qq", "absmax"))


def test_case_17_batch_size_and_row_length_do_not_change_the_sums(toy, ids_file, read_ids, tmp_path, distance):
    rows = read_ids(ids_file(tmp_path / "rows.jsonl", [10, 10, 100, 100], seed=3)).sequences
    one_by_one = record_all(toy("llama"), [row[None] for row in rows])
    in_pairs = record_all(toy("llama"), [torch.stack(rows[:2]), torch.stack(rows[2:])])
    as_loaded = batches(rows, 4096)
    assert [tuple(batch.shape) for batch in as_loaded] == [(2, 10), (2, 100)]
    for block, sums in one_by_one.items():
        for site, found in sums.sums.items():
            assert found.tokens == in_pairs[block].sums[site].tokens == 220
            assert distance(in_pairs[block].sums[site].xx, found.xx) < FLOAT32


@pytest.mark.parametrize("shape", [(1, 1, 128), (1, 128)])
def test_case_3_one_token_is_one_token_in_two_dimensions_or_three(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    linear = Linear("one", "one", 0, 32, 128, False, False)
    tree = torch.nn.ModuleDict({"one": torch.nn.Linear(128, 32, bias=False)})
    first = ChannelStatistics(128, CPU)
    with torch.no_grad(), watch_inputs(tree, [linear], lambda seen, rows: first.add(token_rows(rows, seen.k))):
        tree["one"](x)
    sums = SumAccumulator(first.absmax, ActivationTransform())
    sums.add(token_rows(x, 128))
    found = sums.finish()
    assert (first.tokens, found.tokens) == (1, 1)
    assert torch.equal(found.xx, torch.outer(x.flatten(), x.flatten()))  # one product each: exact


# ---- inputs that are not finite (case 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sequence", [1, 5])
def test_case_2_a_non_finite_input_names_the_linear_and_the_sequence(toy_copy, tmp_path, value, sequence):
    import safetensors.torch

    directory = toy_copy("llama", tie_word_embeddings=False)
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["model.embed_tokens.weight"][199] = value
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 199, (length,), generator=generator) for length in (20, 20, 20, 9, 9, 9, 9)]
    rows[sequence][4] = 199
    with pytest.raises(DataError) as caught:
        record_all(directory, batches(rows, 4096), CalibrationConfig())
    message = str(caught.value)
    assert message.startswith("model.layers.0.self_attn.q_proj: ")
    assert f"sequence {sequence};" in message
    assert "damping" not in message


def test_a_non_finite_weight_in_a_later_block_names_that_block(toy_copy, token_batches):
    import safetensors.torch

    directory = toy_copy("gpt2")
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["transformer.h.1.mlp.c_fc.bias"][3] = float("inf")
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(DataError, match=r"transformer\.h\.1\.mlp\.c_proj: .*sequence 0"):
        record_all(directory, token_batches)


# ---- memory

_MEASURE = """
import json, resource, sys
import torch
from svdq import pipeline
from svdq.calibration.data import load_tokens
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.models import open_model

directory, ids, out = sys.argv[1:]
model = open_model(directory)
tokens = load_tokens(ids, None, samples=2, seq_len=64, min_tokens=1, seed=0)
peaks = {"calibrate": {}, "quantize": {}}
def progress(stage, done, total):
    peaks[stage][done] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
linears = [linear for linear in model.linears if linear.name.endswith("q_proj")]
pipeline.calibrate(model, out, tokens, CalibrationConfig(), linears=linears, progress=progress)
config = QuantConfig(LayerConfig(rounds=1), only=("q_proj",))
pipeline.quantize(model, out + ".file", config, data=tokens, calibration=CalibrationConfig(), progress=progress)
print(json.dumps(peaks))
"""


def test_peak_memory_does_not_grow_with_the_number_of_blocks(toy, toy_copy, python, tmp_path, ids_file):
    from svdq.checkpoint import Entry, write_file

    hidden, wide, blocks = 512, 2048, 24
    directory = toy_copy("llama")
    config = json.loads((directory / "config.json").read_text())
    config.update(hidden_size=hidden, intermediate_size=wide, num_hidden_layers=blocks, num_attention_heads=8)
    config.update(num_key_value_heads=8)
    (directory / "config.json").write_text(json.dumps(config))
    square, flat, norm = torch.randn(hidden, hidden) * 0.04, torch.randn(wide, hidden) * 0.04, torch.ones(hidden)
    tensors = {"model.embed_tokens.weight": torch.randn(200, hidden), "model.norm.weight": norm}
    for block in range(blocks):
        name = f"model.layers.{block}"
        tensors |= {f"{name}.self_attn.{leaf}_proj.weight": square for leaf in "qkvo"}
        tensors |= {f"{name}.mlp.{leaf}_proj.weight": flat for leaf in ("gate", "up")}
        tensors |= {f"{name}.mlp.down_proj.weight": flat.t().contiguous()}
        tensors |= {f"{name}.{leaf}_layernorm.weight": norm for leaf in ("input", "post_attention")}
    entries = [Entry(name, t.dtype, tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]
    write_file(directory / "model.safetensors", entries, {"format": "pt"})
    ids = ids_file(tmp_path / "ids.jsonl", [64, 64], seed=0)
    result = python(_MEASURE, directory, ids, tmp_path / "store", env=None)  # with as many threads as users have
    assert result.returncode == 0, result.stderr
    one_block = 4 * (4 * hidden * hidden + 3 * hidden * wide)  # 16.8 MB
    # The 20 blocks between the two marks weigh 336 MB; two blocks' worth is left to the allocator.
    for peaks in json.loads(result.stdout.splitlines()[-1]).values():
        assert peaks[str(blocks)] - peaks["4"] < 2 * one_block


def test_the_measure_of_peak_memory_is_in_kilobytes():
    # ru_maxrss is in bytes on macOS: the bound above would then be met by anything.
    assert 50e6 < resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 500e9
