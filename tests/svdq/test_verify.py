"""The verifier: right numbers on a sound file, a named failure on every kind of broken one."""

import json
import math

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from svdq.calibration.store import Store
from svdq.config import CalibrationConfig
from svdq.errors import CheckpointError, SvdqError
from svdq.linear import load_quantized
from svdq.models import open_model
from svdq.pipeline import calibrate
from svdq.quantized import open_quantized
from svdq.verify import Thresholds, verify

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture
def check(read_ids):
    def run(directory, file, *ids, **options):
        data = [read_ids(path) for path in ids]
        return verify(open_model(directory), open_quantized(file), data=data, **options)

    return run


@pytest.fixture
def tampered(tmp_path):
    """tampered(file, change) → a copy whose tensors went through `change`, metadata and all else kept."""

    def build(file, change, metadata=lambda values: values):
        with safe_open(file, "pt") as opened:
            values = dict(opened.metadata())
        tensors = safetensors.torch.load_file(file)
        change(tensors)
        safetensors.torch.save_file(tensors, tmp_path / "tampered.safetensors", metadata=metadata(values))
        return tmp_path / "tampered.safetensors"

    return build


def perplexity(model, rows):
    """exp of the mean loss of every token but each row's first, as transformers' own loss has it."""
    loss = tokens = 0
    with torch.no_grad():
        for row in rows:
            loss += model(input_ids=row[None], labels=row[None]).loss.double().item() * (len(row) - 1)
            tokens += len(row) - 1
    return math.exp(loss / tokens)


# ---- sound files


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "bert", "albert", "gemma3"])
def test_a_sound_file_passes(quantized, heldout_ids, check, kind):
    report = check(*quantized(kind), heldout_ids)
    assert report.failures == [] and report.structure == []
    assert len(report.layers) == len(open_model(quantized(kind)[0]).linears)


@pytest.mark.parametrize("preset", ["quality", "nunchaku", "plain"])
def test_a_sound_file_of_every_preset_passes_without_data(quantized, check, preset):
    assert check(*quantized("llama", preset)).failures == []


def test_the_kernel_error_is_float32_noise(quantized, heldout_ids, check):
    for report in (check(*quantized("qwen2")), check(*quantized("qwen2"), heldout_ids)):
        for row in report.layers:
            assert 0 < row.kernel_error < 1e-6  # sums of 192 float32 products, each good to 6e-8
            assert row.roundtrip


def test_a_packed_file_passes_with_the_same_numbers(quantized, heldout_ids, check, svdq, tmp_path):
    directory, file = quantized("qwen2")
    packed = tmp_path / "packed.safetensors"
    assert svdq("export-packed", file, packed, "--fuse", "qkv_proj=q_proj,k_proj,v_proj").code == 0
    plain, report = check(directory, file, heldout_ids), check(directory, packed, heldout_ids)
    assert (report.kind, report.failures) == ("packed", [])
    rows, others = ({row.name: row for row in layers} for layers in (report.layers, plain.layers))
    assert rows.keys() == others.keys()
    for name, row in rows.items():
        # equal but for the float32 biases, which a packed file holds in 16 bits: 5e-4 of a tenth of the output
        assert row.quantization_error == pytest.approx(others[name].quantization_error, rel=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_activations_of_8_bits_lower_the_mean_error(quantized, heldout_ids, read_ids, svdq, tmp_path, packed):
    directory, file = quantized("llama")
    if packed:
        assert svdq("export-packed", file, tmp_path / "packed.safetensors").code == 0
        file = tmp_path / "packed.safetensors"
    model, found = open_model(directory), {}
    for activations in ("int4", "fp8"):
        report = verify(model, open_quantized(file, activations), data=[read_ids(heldout_ids)])
        assert (report.failures, report.activations) == ([], activations)
        found[activations] = sum(row.quantization_error for row in report.layers)
    assert found["fp8"] < 0.9 * found["int4"]


def test_a_file_of_linears_alone_passes(quantized, heldout_ids, check):
    assert check(*quantized("qwen2", linears_only=True), heldout_ids).failures == []


def test_layer_errors_are_those_of_the_format_on_the_originals_inputs(
    quantized, original, stored_layer, heldout_ids, read_ids, check, distance
):
    directory, file = quantized("qwen2")
    rows = read_ids(heldout_ids).sequences
    model, seen = original(directory), []
    module = model.get_submodule(UP)
    module.register_forward_hook(lambda _, args, out: seen.append((args[0].flatten(0, 1), out.flatten(0, 1))))
    with torch.no_grad():
        for row in rows:
            model(input_ids=row[None])
    inputs, wanted = (torch.cat(part) for part in zip(*seen, strict=True))
    found = stored_layer(file, UP)(inputs)
    report = next(row for row in check(directory, file, heldout_ids).layers if row.name == UP)
    # 1e-3: single activations within float32 noise of a tie may round the other way
    assert report.quantization_error == pytest.approx(distance(found, wanted), rel=1e-3)
    per_token = ((found - wanted).norm(dim=1) / wanted.double().norm(dim=1)).square().mean().sqrt().item()
    assert report.token_error == pytest.approx(per_token, rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma3"])
def test_the_originals_perplexity_is_that_of_transformers(quantized, original, heldout_ids, read_ids, check, kind):
    directory, file = quantized(kind)
    (output,) = check(directory, file, heldout_ids).outputs
    wanted = perplexity(original(directory), read_ids(heldout_ids).sequences)
    assert output.original == pytest.approx(wanted, rel=1e-4)  # float32 logits, summed in another order
    assert output.tokens == 5 * 64 + 2 * 40


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_the_quantized_perplexity_is_that_of_the_loaded_model(quantized, heldout_ids, read_ids, check, kind):
    directory, file = quantized(kind)
    (output,) = check(directory, file, heldout_ids).outputs
    wanted = perplexity(load_quantized(directory, file), read_ids(heldout_ids).sequences)
    assert output.quantized == pytest.approx(wanted, rel=1e-2)  # other batches: codes near a tie flip, either way
    assert output.quantized != pytest.approx(output.original, rel=1e-6)


def test_every_text_gets_its_own_perplexity(quantized, original, heldout_ids, calibration_ids, read_ids, check):
    directory, file = quantized("llama")
    outputs = check(directory, file, heldout_ids, calibration_ids).outputs
    for output, ids in zip(outputs, (heldout_ids, calibration_ids), strict=True):
        assert output.source == str(ids)
        assert output.original == pytest.approx(perplexity(original(directory), read_ids(ids).sequences), rel=1e-4)


def test_an_encoder_reports_how_far_its_states_are(quantized, original, heldout_ids, read_ids, check, distance):
    directory, file = quantized("bert")
    (output,) = check(directory, file, heldout_ids).outputs
    states = []
    for model in (load_quantized(directory, file), original(directory)):
        with torch.no_grad():
            rows = read_ids(heldout_ids).sequences
            states.append(torch.cat([model(input_ids=row[None])[0][0] for row in rows]).double())
    assert output.original is None and output.quantized is None
    assert output.state_error == pytest.approx(distance(*states), rel=2e-2)  # codes near a tie flip, either way
    cosine = torch.nn.functional.cosine_similarity(*states, dim=1).mean().item()
    assert output.state_cosine == pytest.approx(cosine, abs=1e-3)


def test_without_data_the_error_is_that_of_the_weights(quantized, original, stored_layer, check, distance):
    directory, file = quantized("llama", "plain")  # neither smoothing nor rotation: the factors read the raw input
    layer = stored_layer(file, UP)
    report = next(row for row in check(directory, file).layers if row.name == UP)
    found = torch.from_numpy(layer.weight_hat + layer.up @ layer.down.T)
    assert report.quantization_error == pytest.approx(distance(found, original(directory).get_submodule(UP).weight))


def test_a_store_adds_the_error_on_its_sums(toy, quantized, calibration_ids, read_ids, check, tmp_path):
    directory, file = quantized("llama")
    calibrate(open_model(directory), tmp_path / "store", read_ids(calibration_ids), CalibrationConfig())
    report = check(directory, file, store=Store.open(tmp_path / "store"))
    with safe_open(file, "pt") as opened:
        at_the_time = json.loads(opened.metadata()["svdq.report"])["layers"]
    for row in report.layers:
        # the same J, then in float32 by completed squares, now in float64 by traces
        assert row.store_error == pytest.approx(at_the_time[row.name]["error"], rel=1e-3)


def test_a_store_of_another_transform_is_refused(toy, quantized, calibration_ids, read_ids, check, tmp_path):
    directory, file = quantized("llama")
    config = CalibrationConfig(rotation="none")
    calibrate(open_model(directory), tmp_path / "store", read_ids(calibration_ids), config)
    with pytest.raises(CheckpointError, match="another smoothing, rotation or clip"):
        check(directory, file, store=Store.open(tmp_path / "store"))


def test_the_calibration_tokens_are_said_not_to_be_held_out(quantized, calibration_ids, heldout_ids, check):
    assert any("calibration tokens" in note for note in check(*quantized("llama"), calibration_ids).notes)
    assert check(*quantized("llama"), heldout_ids).notes == []


# ---- thresholds


def test_an_error_above_its_threshold_names_layer_value_and_limit(quantized, check):
    report = check(*quantized("llama"), thresholds=Thresholds(quantization_error=0.001))
    assert len(report.failures) == 14
    assert any(line.startswith(f"{UP}: quantization error 0.") and "0.001" in line for line in report.failures)


def test_a_kernel_error_above_its_threshold_fails(quantized, check):
    report = check(*quantized("llama"), thresholds=Thresholds(kernel_error=0.0))
    assert any("kernel error" in line for line in report.failures)


def test_a_perplexity_ratio_above_its_threshold_fails(quantized, heldout_ids, check):
    report = check(*quantized("llama"), heldout_ids, thresholds=Thresholds(perplexity_ratio=0.5))
    assert [line for line in report.failures if "perplexity ratio" in line and str(heldout_ids) in line]


# ---- broken files


def set_value(key, value):
    def change(tensors):
        tensors[key].view(-1)[3] = value

    return change


def zero_layer(tensors):
    for suffix in ("qweight", "proj_up", "proj_down"):
        tensors[f"{UP}.{suffix}"].zero_()


def code_minus_8(tensors):
    tensors[f"{UP}.qweight"][0, 0] = 0x08


BROKEN = {  # what is changed: (the change, what the failure names)
    "a scale of 0": (set_value(f"{UP}.w_scales", 0.0), UP),
    "an infinite scale": (set_value(f"{UP}.w_scales", math.inf), UP),
    "a negative scale": (set_value(f"{UP}.w_scales", -0.01), UP),
    "a NaN in proj_up": (set_value(f"{UP}.proj_up", math.nan), f"{UP}.proj_up"),
    "an Inf in proj_down": (set_value(f"{UP}.proj_down", math.inf), f"{UP}.proj_down"),
    "a smoothing of 0": (set_value(f"{UP}.smooth", 0.0), f"{UP}.smooth"),
    "a code of -8": (code_minus_8, UP),
    "a layer of zeros": (zero_layer, UP),
    "another embedding": (set_value("model.embed_tokens.weight", 9.0), "model.embed_tokens.weight"),
    "another norm": (set_value("model.norm.weight", 9.0), "model.norm.weight"),
    "a lost norm": (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
    "a strange tensor": (lambda t: t.update(strange=torch.ones(2)), "strange"),
    "a clip of 0": (lambda t: t[f"{UP}.act_clip"].zero_(), f"{UP}.act_clip"),
    "another layer's codes": (
        lambda t: t[f"{UP}.qweight"].copy_(t["model.layers.0.mlp.up_proj.qweight"]),
        f"{UP}: quantization error",
    ),
}


@pytest.mark.parametrize("with_data", [False, True], ids=["without data", "with data"])
@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_fails_naming_the_tensor(quantized, tampered, heldout_ids, check, what, with_data):
    directory, file = quantized("llama")
    change, named = BROKEN[what]
    report = check(directory, tampered(file, change), *([heldout_ids] if with_data else []))
    assert any(named in line for line in report.failures), report.failures


def test_a_bias_that_differs_fails(quantized, tampered, check):
    directory, file = quantized("qwen2")
    name = "model.layers.0.self_attn.q_proj"
    report = check(directory, tampered(file, set_value(f"{name}.bias", 9.0)))
    assert any(name in line and "bias" in line for line in report.failures)


def test_an_all_zero_bias_where_the_source_has_none_of_zeros_fails(quantized, tampered, check):
    directory, file = quantized("gpt2")
    name = "transformer.h.1.mlp.c_fc"
    report = check(directory, tampered(file, lambda tensors: tensors[f"{name}.bias"].zero_()))
    assert any(name in line and "bias" in line for line in report.failures)


@pytest.mark.parametrize("suffix", ["qweight", "w_scales", "proj_down", "proj_up"])
def test_a_lost_tensor_of_a_layer_is_named(quantized, tampered, check, suffix):
    directory, file = quantized("llama")
    with pytest.raises(CheckpointError, match=rf"up_proj\.{suffix}"):
        check(directory, tampered(file, lambda tensors: tensors.pop(f"{UP}.{suffix}")))


@pytest.mark.parametrize("suffix", ["smooth", "act_clip"])
def test_a_lost_part_of_the_activation_transform_fails(quantized, tampered, check, suffix):
    # The format calls it optional, so the file is still well formed; but the header says that the run had it.
    directory, file = quantized("llama")
    report = check(directory, tampered(file, lambda tensors: tensors.pop(f"{UP}.{suffix}")))
    assert any(UP in line for line in report.failures)


def test_the_command_exits_with_1_on_a_failed_check(quantized, tampered, svdq):
    directory, file = quantized("llama")
    result = svdq("verify", tampered(file, zero_layer), "--model", directory)
    assert result.code == 1
    assert f"{UP}: all zero, the source's weight is not" in result.out


def test_the_command_exits_with_2_on_a_file_that_cannot_be_checked(quantized, tampered, refused):
    directory, file = quantized("llama")
    lost = tampered(file, lambda tensors: tensors.pop(f"{UP}.qweight"))
    assert f"{UP}.qweight" in refused("verify", lost, "--model", directory)


@pytest.mark.parametrize("with_data", [False, True], ids=["without data", "with data"])
def test_a_model_of_other_sizes_is_refused_or_fails_by_name(toy, quantized, heldout_ids, check, with_data):
    _, file = quantized("llama")
    try:
        report = check(toy("llama", intermediate_size=256), file, *([heldout_ids] if with_data else []))
    except SvdqError as error:
        assert "mlp" in str(error)
    else:
        assert any("mlp" in line for line in report.failures)


def test_a_file_of_another_model_names_its_strange_linear(toy, quantized, check):
    with pytest.raises(CheckpointError, match=r"transformer\.h\.0\.attn\.c_attn is not one of"):
        check(toy("llama"), quantized("gpt2")[1])


def test_a_file_that_lost_a_quantized_linear_altogether_fails(quantized, tampered, check):
    directory, file = quantized("llama")

    def lose(tensors):
        for key in [key for key in tensors if key.startswith(f"{UP}.")]:
            del tensors[key]

    def forget(metadata):
        layers = json.loads(metadata["svdq.layers"])
        del layers[UP]
        return metadata | {"svdq.layers": json.dumps(layers)}

    report = check(directory, tampered(file, lose, forget))
    assert any(f"{UP}.weight" in line for line in report.failures)


# ---- headers


def edited(key, change):
    def edit(metadata):
        value = json.loads(metadata[key])
        change(value)
        return metadata | {key: json.dumps(value)}

    return edit


@pytest.mark.parametrize(("key", "change"), [
    ("quantization_config", lambda c: c.update(rotation="hadamard128")),
    ("quantization_config", lambda c: c["packing"].update(layout="sm90")),
    ("quantization_config", lambda c: c["packing"].update(version=2)),
    ("quantization_config", lambda c: c["weight"].update(dtype="nf4")),
], ids=["rotation", "layout", "version", "weight type"])  # fmt: skip
def test_a_file_in_a_form_of_the_future_is_refused_not_misread(quantized, tampered, key, change):
    with pytest.raises(CheckpointError):
        open_quantized(tampered(quantized("llama")[1], lambda tensors: None, edited(key, change)))


@pytest.mark.parametrize(("key", "value"), [
    ("svdq.layers", "[]"),
    ("svdq.layers", "{"),
    ("svdq.layers", '{"model.layers.0.mlp.up_proj": 5}'),
    ("svdq.layers", '{"model.layers.0.mlp.up_proj": {"n": -1, "k": 128, "rank": 16, "group_size": 64}}'),
    ("svdq.layers", '{"model.layers.0.mlp.up_proj": {"n": 192, "k": 128, "rank": 16, "group_size": 0}}'),
    ("svdq.layers", '{"model.layers.0.mlp.up_proj": {"n": 192, "k": 128, "rank": true, "group_size": 64}}'),
    ("quantization_config", '{"packing": {"layout": ["canonical"]}}'),
    ("svdq.ties", "7"),
])  # fmt: skip
def test_hostile_metadata_is_one_line(quantized, tampered, key, value):
    file = tampered(quantized("llama")[1], lambda tensors: None, lambda metadata: metadata | {key: value})
    with pytest.raises(CheckpointError) as caught:
        open_quantized(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("key", "change"), [
    ("quantization_config", lambda c: c.update(producer="me")),
    ("quantization_config", lambda c: c.update(ignore=5)),
    ("svdq.report", lambda r: r.update(repairs=5)),
    ("svdq.report", lambda r: r.update(repairs=[{}])),
    ("svdq.ties", lambda t: t.update(a=[])),
], ids=["producer", "ignore", "repairs", "repair", "tie"])  # fmt: skip
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_metadata_of_the_wrong_type_brings_no_command_down(quantized, tampered, svdq, command, key, change):
    directory, file = quantized("llama")
    file = tampered(file, lambda tensors: None, edited(key, change))
    result = svdq(command, file, *(["--model", directory] if command == "verify" else []))
    assert result.code in (0, 1, 2)
