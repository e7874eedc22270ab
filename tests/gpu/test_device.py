"""Whole runs on a card: everything lands on the chosen device, and the numbers are those of the CPU.

The half of case 20 that needs no card is in tests/svdq/test_models.py and tests/cli/test_cli.py.
"""

import pytest
import safetensors.torch
import torch

from svdq import budget as budgets
from svdq import pipeline
from svdq.calibration.capture import BlockStream
from svdq.calibration.data import batches
from svdq.calibration.store import Store
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.linear import load_quantized
from svdq.models import open_model, resolve_device
from svdq.quantized import open_quantized
from svdq.sensitivity import output_distances
from svdq.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def last():
    """The last card there is: with two, not the one that a forgotten device argument would take."""
    return f"cuda:{torch.cuda.device_count() - 1}"


def devices(module):
    return {str(t.device) for t in (*module.parameters(), *module.buffers()) if t.device.type != "meta"}


def test_an_index_beyond_the_cards_is_refused():
    from svdq.errors import ConfigError

    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"found {count} CUDA devices"):
        resolve_device(f"cuda:{count}")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2", "bert"])
def test_states_and_tables_are_streamed_on_the_chosen_card(toy, heldout_ids, read_ids, last, kind):
    model = open_model(toy(kind))
    stream = BlockStream(model, batches(read_ids(heldout_ids).sequences, 256), torch.device(last), torch.float32)
    for visit in stream:
        assert devices(visit.module) <= {last}
        assert {str(states.device) for states in visit.inputs} == {last}
    assert {str(states.device) for states in stream.hidden} == {last}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_with_computed_tables_loads_onto_the_chosen_card(quantized, last, kind):
    model = load_quantized(*quantized(kind), device=last)
    assert devices(model) == {last}
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[1, 2, 3]], device=last))[0]
    assert str(logits.device) == last and torch.isfinite(logits).all()


def test_a_card_quantizes_as_well_as_the_cpu(toy, calibration_ids, heldout_ids, read_ids, tmp_path, last):
    errors = {}
    for device in ("cpu", last):
        model, out = open_model(toy("llama")), tmp_path / f"{device.replace(':', '')}.safetensors"
        summary = pipeline.quantize(
            model,
            out,
            QuantConfig(layer=LayerConfig(rank=8)),
            data=read_ids(calibration_ids),
            calibration=CalibrationConfig(),
            device=device,
        )
        report = verify(model, open_quantized(out), data=[read_ids(heldout_ids)], device=device)
        assert report.failures == []
        errors[device] = summary.mean_error
    assert errors[last] == pytest.approx(errors["cpu"], rel=0.02)  # other roundings of near ties, no other method


def test_a_plan_on_a_card_weighs_linears_as_on_the_cpu(toy, calibration_ids, read_ids, tmp_path, last):
    model = open_model(toy("llama"))
    pipeline.calibrate(model, tmp_path / "store", read_ids(calibration_ids), CalibrationConfig())
    store, quantized = Store.open(tmp_path / "store"), {}
    budgets.measure(model, store, QuantConfig(), ranks=(16,), quantized=quantized)
    on_cpu, on_card = (output_distances(model, quantized, store.tokens(), device=device) for device in ("cpu", last))
    assert on_card == pytest.approx(on_cpu, rel=0.02)


def test_two_runs_on_one_card_give_the_same_bytes(toy, calibration_ids, read_ids, tmp_path, last):
    for name in ("first", "second"):
        pipeline.quantize(
            open_model(toy("llama")),
            tmp_path / name,
            QuantConfig(layer=LayerConfig(rank=8, rounds=1)),
            data=read_ids(calibration_ids),
            calibration=CalibrationConfig(),
            device=last,
        )
    a, b = (safetensors.torch.load_file(tmp_path / name) for name in ("first", "second"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_the_cpus_file_verifies_on_a_card(quantized, heldout_ids, read_ids, last):
    directory, file = quantized("qwen2")
    report = verify(open_model(directory), open_quantized(file), data=[read_ids(heldout_ids)], device=last)
    assert report.failures == []


def test_the_cpus_file_verifies_on_a_card_without_data(quantized, last):
    directory, file = quantized("llama")
    assert verify(open_model(directory), open_quantized(file), device=last).failures == []
