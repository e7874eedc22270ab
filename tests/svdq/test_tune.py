"""Tuning by gradient: the student computes what the runtime does, its gradients are right, and nothing gets worse."""

import dataclasses
import json

import pytest
import safetensors.torch
import torch

from svdq.config import TuneConfig
from svdq.errors import ConfigError, DataError, NumericsError
from svdq.kernels.reference import w4a4_linear
from svdq.linear import load_quantized
from svdq.models import materialize, open_model
from svdq.quantized import open_quantized
from svdq.rounding import ActivationTransform, fake_quantize_activation
from svdq.tune import TuneReport, _Inputs, _StraightThrough, _Student, _TunedLinear, tune, write_tuned
from svdq.verify import verify

CPU = torch.device("cpu")
QUICK = TuneConfig(steps=20, rate=1e-3, tokens_per_step=512)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def opened(quantized):
    """opened(kind) → (model, quantized file)."""

    def build(kind="llama"):
        directory, file = quantized(kind)
        return open_model(directory), open_quantized(file)

    return build


@pytest.fixture(scope="module")
def linears(quantized):
    file = open_quantized(quantized("llama")[1])
    return {name: file.layer(name) for name in file.layers}


# ---- one linear


def test_an_untouched_linear_computes_the_reference(linears):
    for name, layer in linears.items():
        x = normal(9, layer.codes.shape[1], seed=1)
        wanted = w4a4_linear(
            x, layer.weight_hat(), layer.proj_down, layer.proj_up, layer.bias, transform=layer.transform
        )
        found = _TunedLinear(layer, _Inputs()).forward(x)
        assert (found - wanted).norm() <= 1e-5 * wanted.norm(), name  # float32 sums in another order


def test_an_untouched_linear_is_stored_as_it_was(linears):
    for layer in linears.values():
        found = _TunedLinear(layer, _Inputs()).finish()
        for wanted, again in ((layer.scales, found.scales), (layer.proj_up, found.proj_up)):
            assert torch.equal(wanted, again) and again.dtype == torch.float16
        assert torch.equal(layer.proj_down, found.proj_down)


def test_gradients_of_scales_and_factors_are_those_of_finite_differences(linears):
    layer = linears["model.layers.1.mlp.up_proj"]
    linear, x, seen = _TunedLinear(layer, _Inputs()), normal(5, layer.codes.shape[1], seed=1), normal(5, 192, seed=2)
    (linear.forward(x) * seen).sum().backward()
    for step in linear.steps:
        direction = normal(*step.shape, seed=3)
        slope = (step.grad.double() * direction.double()).sum().item()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                step += sign * 0.01 * direction  # linear in each: the difference is exact but for float32
                values.append((linear.forward(x) * seen).double().sum().item())
                step -= sign * 0.01 * direction
        assert (values[0] - values[1]) / 0.02 == pytest.approx(slope, rel=1e-3)


@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_the_gradient_passes_straight_through_the_rounding(rotation, smoothed):
    transform = ActivationTransform(normal(128).abs() + 0.5 if smoothed else None, rotation, 0.85)
    x, seen = normal(3, 128, seed=1).requires_grad_(), normal(3, 128, seed=2)
    out = _StraightThrough.apply(x, transform)
    assert torch.equal(out, fake_quantize_activation(transform.apply(x.detach()), 0.85))
    out.backward(seen)
    basis = transform.apply(torch.eye(128)).double()  # row k: what a 1 in channel k becomes
    assert (x.grad.double() - seen.double() @ basis.t()).abs().max() <= 1e-5


def test_siblings_share_one_quantization_others_do_not():
    inputs, x, y = _Inputs(), normal(4, 64), normal(4, 64)
    first = inputs(x, ActivationTransform(None, True, 0.85))
    assert inputs(x, ActivationTransform(None, True, 0.85)) is first
    assert inputs(x, ActivationTransform(None, True, 0.8)) is not first
    assert inputs(y, ActivationTransform(None, True, 0.8)) is not inputs(x, ActivationTransform(None, True, 0.8))


def test_a_value_beyond_float16_is_named(linears):
    linear = _TunedLinear(linears["model.layers.1.mlp.up_proj"], _Inputs())
    with torch.no_grad():
        linear.steps[0] += 1e9
    with pytest.raises(NumericsError, match=r"model\.layers\.1\.mlp\.up_proj: .*--rate"):
        linear.finish()


# ---- the whole model


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_the_distance_is_that_of_the_loaded_quantized_model(opened, quantized, read_ids, heldout_ids, kind):
    import transformers

    model, file = opened(kind)
    rows = torch.stack([row for row in read_ids(heldout_ids).sequences if len(row) == 64][:2])
    materialize(model, "", CPU, torch.float32)
    found = _Student(model, file, CPU).distance([rows])
    directory, path = quantized(kind)
    cls = transformers.AutoModelForCausalLM if model.is_causal_lm else transformers.AutoModel
    with torch.no_grad():
        wanted = cls.from_pretrained(directory, dtype=torch.float32).eval()(input_ids=rows)[0].double()
        student = load_quantized(directory, path)(input_ids=rows)[0].double()
    if model.is_causal_lm:
        p, q = wanted.log_softmax(-1), student.log_softmax(-1)
        distance = (p.exp() * (p - q)).sum(-1).mean()
    else:
        distance = ((student - wanted).square().sum(-1) / wanted.square().sum(-1)).mean()
    assert found == pytest.approx(distance.item(), rel=1e-3)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_tuning_brings_held_out_outputs_closer_and_the_written_file_says_so(
    opened, quantized, read_ids, ids_file, tmp_path, kind
):
    model, file = opened(kind)
    # toys amplify every code at a tie, more than tuning them gains: scales a tenth too large are gain enough
    tensors = {key: file.file.read(key) * (1.1 if key.endswith("w_scales") else 1) for key in file.file.tensors}
    safetensors.torch.save_file(tensors, tmp_path / "off.safetensors", file.file.metadata)
    file = open_quantized(tmp_path / "off.safetensors")
    data = read_ids(ids_file(tmp_path / "more.jsonl", [64] * 64, seed=5))
    config = dataclasses.replace(QUICK, rate=1e-2)
    layers, report = tune(model, file, data, config)
    assert report.kept and report.after < 0.8 * report.before
    out = tmp_path / "tuned.safetensors"
    write_tuned(file, layers, out, config, {"source": "ids"}, report)
    tuned = open_quantized(out)
    assert json.loads(tuned.file.metadata["svdq.tuned"])["after"] == report.after
    for name, layer in layers.items():
        before, after = file.layer(name), tuned.layer(name)
        assert torch.equal(before.codes, after.codes) and torch.equal(after.scales, layer.scales)
        assert not torch.equal(before.proj_up, after.proj_up)
    checked = verify(open_model(quantized(kind)[0]), tuned)
    assert checked.failures == []


def test_two_runs_give_the_same_bytes_and_another_seed_others(opened, read_ids, calibration_ids, tmp_path):
    files = []
    for number, seed in enumerate((0, 0, 1)):
        model, file = opened()
        config = TuneConfig(steps=2, rate=3e-3, tokens_per_step=128, seed=seed)
        layers, report = tune(model, file, read_ids(calibration_ids), config)
        write_tuned(file, layers, tmp_path / f"{number}.safetensors", config, {}, report)
        files.append((tmp_path / f"{number}.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_a_tuning_that_does_not_help_is_undone(opened, read_ids, calibration_ids):
    model, file = opened()
    layers, report = tune(model, file, read_ids(calibration_ids), TuneConfig(steps=4, rate=0.5, tokens_per_step=128))
    assert not report.kept and report.after >= report.before
    assert all(torch.equal(layer.scales, file.layer(name).scales) for name, layer in layers.items())


def test_the_model_holds_no_weights_afterwards(opened, read_ids, calibration_ids):
    model, file = opened()
    tune(model, file, read_ids(calibration_ids), TuneConfig(steps=1, tokens_per_step=64))
    assert all(parameter.is_meta for parameter in model.tree.parameters())


def test_one_sequence_is_refused(opened, read_ids, calibration_ids):
    model, file = opened()
    data = read_ids(calibration_ids)
    data.sequences[:] = data.sequences[:1]
    with pytest.raises(DataError, match="at least two"):
        tune(model, file, data, QUICK)


def test_not_a_number_is_not_better():
    assert not TuneReport(1, 1, 1, "nats a token", 0.1, float("nan")).kept


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("rate", -1.0), ("tokens_per_step", 0), ("seed", "1")])
def test_a_wrong_value_is_named(field, value):
    with pytest.raises(ConfigError, match=field):
        TuneConfig(**{field: value})
