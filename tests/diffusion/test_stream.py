"""A diffusion transformer run block by block: the same values and sums as from the whole model."""

import pytest
import torch

from svdq.calibration.capture import record_block
from svdq.calibration.diffusion import DiffusionStream
from svdq.calibration.recorded import load_inputs, write_call
from svdq.config import CalibrationConfig
from svdq.errors import CheckpointError, DataError
from svdq.models import open_model

CPU = torch.device("cpu")
RAW = CalibrationConfig(smoothing=0.0, rotation="none", act_clip=1.0)  # x' = x
KINDS = ["flux", "sd3", "pixart", "sana", "qwen", "hunyuan"]
FLOAT32 = 1e-5  # sums of float32 products; where weights lie moves the last bits


def stream_of(directory, recorded):
    model = open_model(directory)
    calls = load_inputs(str(recorded), model.config, samples=99, seed=0).sequences
    return DiffusionStream(model, calls, CPU, torch.float32)


@pytest.fixture(scope="module")
def recorded_sums(transformer, inputs):
    """kind → block → its sums, on two calls."""
    made = {}

    def make(kind):
        if kind not in made:
            stream, made[kind] = stream_of(transformer(kind), inputs(kind, 2)), {}
            for visit in stream:
                members = [linear for linear in stream.model.linears if linear.block == visit.block]
                made[kind][visit.block] = record_block(stream, visit, members, RAW)
        return made[kind]

    return make


def watched(model, paths, arguments):
    """Module path → what it reads, one tensor a call, while diffusers runs the whole model."""
    seen = {path: [] for path in paths}

    def hook(path):
        return lambda _module, args: seen[path].append(args[0].detach().clone())

    handles = [model.get_submodule(path).register_forward_pre_hook(hook(path)) for path in paths]
    with torch.no_grad():
        for call in arguments:
            model(**call)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_whole_models(kind, transformer, inputs, calls, original, distance):
    stream, found = stream_of(transformer(kind), inputs(kind, 2)), []
    for visit in stream:
        stream.advance(visit.run())
    stream.finish(lambda number, recorded, output: found.append(output), [stream.hidden])
    whole = original(transformer(kind))
    with torch.no_grad():
        for output, call in zip(found, calls(kind, 2), strict=True):
            assert distance(output, whole(**call, return_dict=False)[0]) < FLOAT32


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("flux", "transformer_blocks.1.attn.to_add_out"),
        ("flux", "single_transformer_blocks.1.proj_out"),
        ("sd3", "transformer_blocks.1.ff.net.2"),
        ("pixart", "transformer_blocks.1.attn2.to_q"),
        ("sana", "transformer_blocks.1.attn2.to_out.0"),
    ],
)
def test_a_linears_sum_is_that_of_what_it_reads_in_the_whole_model(
    kind, path, recorded_sums, transformer, calls, original, distance
):
    rows = torch.cat([x.flatten(0, -2) for x in watched(original(transformer(kind)), [path], calls(kind, 2))[path]])
    sums = next(block.sums[path] for block in recorded_sums(kind).values() if path in block.sums)
    assert distance(sums.xx, rows.double().t() @ rows.double()) < FLOAT32


@pytest.mark.parametrize(
    ("kind", "path"), [("pixart", "transformer_blocks.0.attn2.to_k"), ("qwen", "transformer_blocks.1.txt_mlp.net.2")]
)
def test_padding_of_the_text_does_not_enter(kind, path, recorded_sums, transformer, calls, original, distance):
    """The toys' calls have 7 tokens of text, of which the last two are padding."""
    rows = torch.cat([x[0, :5] for x in watched(original(transformer(kind)), [path], calls(kind, 2))[path]])
    sums = next(block.sums[path] for block in recorded_sums(kind).values() if path in block.sums)
    assert sums.tokens == 2 * 5
    assert distance(sums.xx, rows.double().t() @ rows.double()) < FLOAT32


def test_the_two_streams_of_joint_attention_are_two_sites(recorded_sums):
    sites = recorded_sums("flux")[0].sites
    attention = "transformer_blocks.0.attn."
    assert sites[f"{attention}to_q"] == [f"{attention}to_{part}" for part in "qkv"]
    assert sites[f"{attention}add_q_proj"] == [f"{attention}add_{part}_proj" for part in "qkv"]


def test_a_single_block_s_attention_and_mlp_are_one_site(recorded_sums):
    where = "single_transformer_blocks.0"
    members = next(names for names in recorded_sums("flux")[2].sites.values() if f"{where}.proj_mlp" in names)
    assert set(members) == {f"{where}.{part}" for part in ("proj_mlp", "attn.to_q", "attn.to_k", "attn.to_v")}


def test_blocks_of_two_lists_follow_each_other(transformer):
    blocks = open_model(transformer("flux")).blocks
    assert blocks == [f"{kind}.{i}" for kind in ("transformer_blocks", "single_transformer_blocks") for i in range(2)]


def test_adaptive_norms_are_not_among_the_linears(transformer):
    model = open_model(transformer("qwen"))
    assert model.adaptive == [f"transformer_blocks.{i}.{side}_mod.1" for i in range(2) for side in ("img", "txt")]
    assert not set(model.adaptive) & {linear.name for linear in model.linears}


def test_no_weight_of_another_block_is_in_memory(transformer, inputs):
    stream = stream_of(transformer("flux"), inputs("flux", 2))
    for visit in stream:
        real = {name for name, tensor in stream.model.tree.named_parameters() if tensor.device.type != "meta"}
        assert real
        assert all(name.startswith(visit.path + ".") for name in real)


def test_a_value_lives_until_the_last_block_that_reads_it(transformer, inputs):
    """Of four blocks the third reads what the second returned, and the last what the first did."""
    stream, alive = stream_of(transformer("hunyuan"), inputs("hunyuan", 1)), []
    for visit in stream:
        stream.advance(visit.run())
        alive.append(sorted(block for block, _ in next(iter(stream._next)).tensors))
    assert alive == [[0], [0, 1], [0, 2], [3]]


def test_values_that_no_later_block_reads_are_dropped(transformer, inputs):
    stream = stream_of(transformer("sd3"), inputs("sd3", 2))
    for visit in stream:
        stream.advance(visit.run())
    (states, _) = stream.hidden
    assert [tensor.shape for tensor in states.tensors.values()] == [(1, 16, 128)]  # the last block returns no text


# ------------------------------------------------------------------------------------------------ refusals


def test_a_model_that_computes_between_its_blocks_is_refused(transformer, inputs):
    stream = stream_of(transformer("pixart"), inputs("pixart", 2))
    block = stream.model.tree.transformer_blocks[0]
    handle = block.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(CheckpointError, match=r"transformer_blocks\.1: what it reads is computed"):
        stream._skeleton_run()
    handle.remove()


def test_a_model_whose_tail_reads_an_early_block_is_refused(transformer, inputs):
    stream, seen = stream_of(transformer("pixart"), inputs("pixart", 1)), {}
    tree = stream.model.tree
    tree.transformer_blocks[0].register_forward_hook(lambda module, args, output: seen.update(early=output))
    tree.proj_out.register_forward_pre_hook(lambda module, args: (args[0] + seen["early"],))
    for visit in stream:
        stream.advance(visit.run())
    with pytest.raises(CheckpointError, match="its output depends on blocks before the last one"):
        stream.finish(lambda number, recorded, output: None, [stream.hidden])


def test_a_call_without_an_argument_is_refused_by_file(transformer, calls, tmp_path):
    (call,) = calls("flux", 1)
    del call["img_ids"]
    write_call(tmp_path / "call.safetensors", call)
    with pytest.raises(DataError, match=r"call\.safetensors: FluxTransformer2DModel does not run on it"):
        stream_of(transformer("flux"), tmp_path)


def test_padded_text_as_long_as_the_picture_is_refused(transformer, inputs):
    with pytest.raises(DataError, match="16 tokens of text, some of them padding, and as many of the picture"):
        stream_of(transformer("qwen"), inputs("qwen", 1, words=16))
