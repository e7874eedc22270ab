"""Recorded calls: written, read, drawn and counted; and a pipeline that is recorded while it runs."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import svdq as package
from svdq.calibration.recorded import data_identity, load_inputs, write_call
from svdq.errors import ConfigError, DataError

CPU = torch.device("cpu")


def read(path, config=None):
    (call,) = load_inputs(str(path), config or {}, samples=9, seed=0).sequences
    return call.read(CPU, torch.float32)


def test_what_was_written_is_read(calls, tmp_path):
    (call,) = calls("qwen", 1)
    write_call(tmp_path / "call.safetensors", call)
    found = read(tmp_path)
    assert found.keys() == call.keys()
    assert found["img_shapes"] == [[(1, 4, 4)]]
    assert all(torch.equal(found[key], call[key]) for key in call if isinstance(call[key], torch.Tensor))


def test_a_dictionary_of_tensors_is_read_as_one(tmp_path):
    size = torch.tensor([[512.0, 512.0]])
    call = {"hidden_states": torch.ones(1, 4, 8, 8), "added_cond_kwargs": {"resolution": size, "aspect_ratio": None}}
    write_call(tmp_path / "call.safetensors", call)
    found = read(tmp_path)["added_cond_kwargs"]
    assert torch.equal(found["resolution"], size)
    assert found["aspect_ratio"] is None


def test_a_file_of_tensors_alone_is_a_call(tmp_path):
    save_file({"hidden_states": torch.ones(1, 16, 8), "timestep": torch.ones(1)}, tmp_path / "call.safetensors")
    assert read(tmp_path).keys() == {"hidden_states", "timestep"}


def test_vectors_keep_their_type(tmp_path):
    half = {"hidden_states": torch.ones(1, 16, 8).half(), "timestep": torch.tensor([0.9995]).half()}
    write_call(tmp_path / "call.safetensors", {**half, "mask": torch.ones(1, 4, dtype=torch.bool)})
    found = read(tmp_path)
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        "hidden_states": torch.float32,
        "timestep": torch.float16,
        "mask": torch.bool,
    }


@pytest.mark.parametrize(
    ("shape", "patch", "tokens"),
    [((2, 16, 64), 1, 32), ((1, 4, 8, 16), 2, 32), ((1, 16, 3, 8, 8), [1, 2, 2], 48), ((2, 4, 8, 8), 1, 128)],
)
def test_tokens_are_those_of_the_pictures(shape, patch, tokens, tmp_path):
    write_call(tmp_path / "call.safetensors", {"hidden_states": torch.ones(shape)})
    assert load_inputs(str(tmp_path), {"patch_size": patch}, samples=1, seed=0).tokens == tokens


def test_a_draw_keeps_the_order_and_follows_the_seed(inputs):
    directory = str(inputs("flux"))

    def drawn(seed):
        return [call.file.path.name for call in load_inputs(directory, {}, samples=5, seed=seed).sequences]

    assert drawn(1) == drawn(1) == sorted(drawn(1))
    assert len({*drawn(1)}) == 5
    assert drawn(1) != drawn(2)


def test_the_identity_names_no_directory_and_changes_with_a_value(tmp_path):
    identities = []
    for value in (0.0, 1.0):
        folder = tmp_path / str(value) / "calls"
        folder.mkdir(parents=True)
        write_call(folder / "call.safetensors", {"hidden_states": torch.full((1, 4, 8), value)})
        identities.append(data_identity(load_inputs(str(folder), {}, samples=1, seed=0)))
    assert [identity["source"] for identity in identities] == ["calls", "calls"]
    assert identities[0]["sha256"] != identities[1]["sha256"]


def test_recording_keeps_what_a_transformer_is_called_with(transformer, original, calls, tmp_path):
    model, made = original(transformer("pixart")), calls("pixart", 2)
    with package.recording(model, tmp_path / "calls"), torch.no_grad():
        for call in made:
            hidden, rest = call["hidden_states"], {k: v for k, v in call.items() if k != "hidden_states"}
            model(hidden, **rest, return_dict=False)
    model(**made[0])  # outside, nothing is written
    found = load_inputs(str(tmp_path / "calls"), {}, samples=9, seed=0).sequences
    assert len(found) == 2
    for call, wanted in zip(found, made, strict=True):
        assert torch.equal(call.read(CPU, torch.float32)["hidden_states"], wanted["hidden_states"])


# ------------------------------------------------------------------------------------------------ refusals


def test_recording_into_a_directory_with_files_is_refused(transformer, original, tmp_path):
    (tmp_path / "call-00000.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="not empty"), package.recording(original(transformer("flux")), tmp_path):
        pass


def test_an_argument_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(DataError, match="callback is neither a tensor nor JSON"):
        write_call(tmp_path / "call.safetensors", {"hidden_states": torch.ones(1, 4, 8), "callback": object()})


@pytest.mark.parametrize("text", ["[1]", "{", "3"])
def test_metadata_that_is_no_set_of_arguments_is_refused(text, tmp_path):
    save_file({"hidden_states": torch.ones(1, 4, 8)}, tmp_path / "call.safetensors", {"arguments": text})
    with pytest.raises(DataError, match="'arguments' is not a JSON object"):
        load_inputs(str(tmp_path), {}, samples=1, seed=0)


@pytest.mark.parametrize(("name", "text"), [("hidden_states.a", "{}"), ("timestep", '{"timestep": 3}')])
def test_two_arguments_of_one_name_are_refused(name, text, tmp_path):
    tensors = {"hidden_states": torch.ones(1, 4, 8), name: torch.ones(1)}
    save_file(tensors, tmp_path / "call.safetensors", {"arguments": text})
    with pytest.raises(DataError, match="exclude each other"):
        load_inputs(str(tmp_path), {}, samples=1, seed=0)


def test_a_file_without_hidden_states_is_refused(tmp_path):
    save_file({"weight": torch.ones(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="holds no hidden_states"):
        load_inputs(str(tmp_path), {}, samples=1, seed=0)


# ------------------------------------------------------------------------------------------------ pipelines


def test_record_keeps_every_step_of_every_prompt(flux_pipeline, svdq, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w3 w4 w5\n\nw6 w7\n")
    out = tmp_path / "calls"
    result = svdq("record", flux_pipeline, "-o", out, "--prompts", prompts, "--steps", 3, "--size", "64x96")
    assert result.code == 0, result
    files = sorted(out.glob("*.safetensors"))
    assert len(files) == 2 * 3
    first, second, *_, last = (load_file(file) for file in files)
    assert first["hidden_states"].shape == (1, 4 * 6, 16)
    assert first["timestep"] > second["timestep"]
    assert torch.equal(first["encoder_hidden_states"], second["encoder_hidden_states"])
    assert not torch.equal(first["encoder_hidden_states"], last["encoder_hidden_states"])
    data = load_inputs(str(out), {"patch_size": 1}, samples=99, seed=0)
    assert data.tokens == 6 * 24


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--subfolder", "unet"], "no folder 'unet'"),
        (["--subfolder", "scheduler"], "no *.safetensors file"),
        (["--size", "1024"], "wanted pixels"),
        (["--prompts", "nowhere.txt"], "cannot be read"),
    ],
)
def test_record_names_what_is_wrong(options, found, flux_pipeline, refused, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w3\n")
    given = ["record", flux_pipeline, "-o", tmp_path / "calls", "--prompts", prompts, "--steps", 1, *options]
    assert found in refused(*given)
