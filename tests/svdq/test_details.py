"""What a page shows beside the errors: counts, channels, bytes and seconds are those of the file and of the run."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors import safe_open

from svdq.details import Details, bytes_by_kind, source_bytes_by_kind
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import verify

UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def seen(quantized, heldout_ids, read_ids):
    """(details, report) of a llama verified on data."""
    directory, file = quantized("llama")
    details = Details(wanted=True)
    report = verify(open_model(directory), open_quantized(file), data=[read_ids(heldout_ids)], details=details)
    return details, report


@pytest.fixture(scope="module")
def inputs(quantized, original, heldout_ids, read_ids):
    """The original's own inputs of UP, (tokens, k)."""
    model, found = original(quantized("llama")[0]), []
    model.get_submodule(UP).register_forward_hook(lambda _, args, out: found.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for row in read_ids(heldout_ids).sequences:
            model(input_ids=row[None])
    return torch.cat(found).double().numpy()


def test_codes_are_counted_as_they_are_stored(seen, quantized, stored_layer):
    details, _ = seen
    values, counts = np.unique(stored_layer(quantized("llama")[1], UP).codes, return_counts=True)
    assert details.layers[UP].codes == dict(zip(values.tolist(), counts.tolist(), strict=True))


def test_absmax_is_that_of_the_originals_inputs(seen, inputs):
    details, _ = seen
    assert details.layers[UP].tokens == len(inputs)
    np.testing.assert_allclose(details.layers[UP].absmax, np.abs(inputs).max(0), rtol=1e-4)


def test_what_the_quantizer_reads_is_smoothed_and_rotated(seen, inputs, quantized, stored_layer):
    details, _ = seen
    hadamard = np.ones((1, 1))
    while len(hadamard) < 64:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    smooth = stored_layer(quantized("llama")[1], UP).smooth
    rotated = (inputs / smooth).reshape(len(inputs), -1, 64) @ hadamard / 8
    wanted = np.abs(rotated).max(0).reshape(-1)
    np.testing.assert_allclose(details.layers[UP].absmax_read, wanted, rtol=1e-3)


def test_nothing_is_kept_of_layers_unless_it_is_wanted(quantized):
    directory, file = quantized("llama")
    details = Details()
    verify(open_model(directory), open_quantized(file), details=details)
    assert details.layers == {} and details.seconds


def test_without_data_there_are_codes_and_no_channels(quantized):
    directory, file = quantized("llama")
    details = Details(wanted=True)
    report = verify(open_model(directory), open_quantized(file), details=details)
    assert set(details.layers) == {row.name for row in report.layers}
    assert all(layer.absmax is None and sum(layer.codes.values()) for layer in details.layers.values())


def test_the_phases_are_named_in_the_report(seen):
    details, report = seen
    assert list(report.seconds) == ["structure", "original model", "layer errors", "quantized model", "outputs"]
    assert report.seconds == details.seconds and all(spent > 0 for spent in report.seconds.values())


def test_seconds_of_a_phase_add_up_over_its_parts(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("svdq.details.time.perf_counter", lambda: next(clock))
    details = Details()
    for phase in ("a", "b", "a", None):
        details.enter(phase)
    assert details.seconds == {"a": 1.0 + 4.0, "b": 2.0}


@pytest.mark.parametrize("packed", [False, True])
def test_the_kinds_of_bytes_add_up_to_the_file(quantized, svdq, tmp_path, packed):
    _, file = quantized("qwen2")
    if packed:
        assert svdq("export-packed", file, tmp_path / "packed.safetensors").code == 0
        file = tmp_path / "packed.safetensors"
    kinds = bytes_by_kind(open_quantized(file))
    assert sum(kinds.values()) == file.stat().st_size
    with safe_open(file, "pt") as opened:
        codes = sum(opened.get_tensor(key).nbytes for key in opened.keys() if key.endswith(".qweight"))  # noqa: SIM118
    assert kinds["weight codes"] == codes and "other of the linears" not in kinds


def test_the_originals_bytes_are_those_of_its_tensors(quantized):
    directory, file = quantized("llama")
    kinds = source_bytes_by_kind(open_model(directory), open_quantized(file))
    with (directory / "model.safetensors").open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    assert sum(kinds.values()) == max(end for _, end in spans)
    sizes = [n * k for n, k, _, _ in open_quantized(file).layers.values()]
    assert kinds["weights of the linears"] == 4 * sum(sizes)


@pytest.mark.parametrize(("form", "lowest"), [("w4a16", -15), ("w8a16", -127), ("nvfp4", -12)])
def test_a_page_takes_any_format(toy, calibration_ids, svdq, tmp_path, form, lowest):
    directory, file, page = toy("llama"), tmp_path / "out.safetensors", tmp_path / "report.html"
    groups = ["--group-size", 64] if form == "w4a16" else []
    data = ["--data", calibration_ids, "--samples", 2, "--min-tokens", 64] if form != "w8a16" else []
    assert svdq("quantize", directory, file, "--format", form, *groups, *data).code == 0
    assert svdq("verify", file, "--model", directory, "--report", page).code == 0
    opened, text = open_quantized(file), page.read_text()
    weights = sum(n * k for n, k, _, _ in opened.layers.values())
    assert f"{weights:,} weights of {form.upper()}" in text
    assert min(int(code) for code in re.findall(r"<title>(-?\d+): [\d.]+ %, [\d,]+ weights", text)) >= lowest
    kinds = bytes_by_kind(opened)
    assert sum(kinds.values()) == file.stat().st_size and "other of the linears" not in kinds
