"""What another knob would give: the numbers that a run with that knob gives, and nothing is written."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from svdq import pipeline, store_checks
from svdq.calibration.store import Store
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig, preset
from svdq.errors import CheckpointError, ConfigError, NumericsError
from svdq.models import open_model, read_weight
from svdq.quantized import open_quantized
from svdq.report import verification_text, what_if_text
from svdq.store_checks import check_on_store, parse_change, parse_changes
from svdq.verify import verify

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def case(toy, calibration_ids, read_ids, tmp_path_factory):
    """case(kind, preset, ignore=(), overrides=(), **knobs) → directory, file, store, of one calibration."""
    built = {}

    def build(kind="llama", name="quality", ignore=(), overrides=(), **knobs):
        key = repr((kind, name, ignore, overrides, knobs))
        if key not in built:
            model, (activation, weight) = open_model(toy(kind)), preset(name)
            if (kind, name) not in built:
                built[kind, name] = tmp_path_factory.mktemp("calibrated") / "store"
                config = CalibrationConfig(**activation)
                pipeline.calibrate(model, built[kind, name], read_ids(calibration_ids), config)
            store, out = built[kind, name], tmp_path_factory.mktemp(kind) / "out.safetensors"
            config = QuantConfig(LayerConfig(**{**weight, **knobs}), ignore=ignore, overrides=overrides)
            pipeline.quantize(model, out, config, store=Store.open(store))
            built[key] = SimpleNamespace(directory=toy(kind), file=out, store=store)
        return built[key]

    return build


def ask(case, *texts):
    """(name → error now, answers) of the file in `case`."""
    changes = [parse_change(text) for text in texts]
    return check_on_store(open_model(case.directory), open_quantized(case.file), Store.open(case.store), changes)


def stored_report(file, name):
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()["svdq.report"])["layers"][name]


def edited(file, key, change, out):
    """A copy whose header metadata `key` went through `change`."""
    with safe_open(file, "pt") as opened:
        metadata = dict(opened.metadata())
    value = json.loads(metadata[key])
    change(value)
    safetensors.torch.save_file(safetensors.torch.load_file(file), out, metadata | {key: json.dumps(value)})
    return out


# ---- the numbers


@pytest.mark.parametrize(("kind", "name"), [("llama", "quality"), ("gpt2", "quality"), ("qwen2", "plain")])
@pytest.mark.parametrize("text", ["rank=16", "group_size=64,rounds=3", "sweeps=0"])
def test_a_knob_that_keeps_its_value_gives_the_error_of_the_report(case, kind, name, text):
    made = case(kind, name)
    report = verify(open_model(made.directory), open_quantized(made.file), store=Store.open(made.store))
    errors = {row.name: row.store_error for row in report.layers}
    now, (answer,) = ask(made, text)
    assert now == errors and answer.left_out == {} and answer.bytes_more == 0
    assert {row.name: row.error_then for row in answer.layers} == errors  # equal to the last bit
    assert {row.name: row.error_now for row in answer.layers} == errors
    assert {row.gain for row in answer.layers} == {0.0}


@pytest.mark.parametrize(("text", "knobs"), [
    ("rank=32", {"rank": 32}),
    ("rank=0", {"rank": 0}),
    ("rounds=1", {"rounds": 1}),
    ("sweeps=2", {"sweeps": 2}),
    ("damping=0.05", {"damping": 0.05}),
    ("rank=8, group_size=128", {"rank": 8, "group_size": 128}),
])  # fmt: skip
def test_the_answer_is_what_a_run_with_that_knob_gives(case, text, knobs):
    ignore = ("down_proj",) if "group_size" in knobs else ()  # 192 inputs are no multiple of 128
    made, other = case("llama"), case("llama", ignore=ignore, **knobs)
    now, (answer,) = ask(made, text)
    wanted, _ = ask(other)
    assert {row.name: row.error_then for row in answer.layers} == wanted
    assert wanted != {name: now[name] for name in wanted}
    stored = [safetensors.torch.load_file(file) for file in (made.file, other.file)]
    for row in answer.layers:
        before, after = (sum(t.nbytes for key, t in s.items() if key.startswith(f"{row.name}.")) for s in stored)
        assert row.bytes_more == after - before, row.name
        assert row.quantizer["rounds"] == stored_report(other.file, row.name)["rounds"]
    assert answer.bytes_more == sum(row.bytes_more for row in answer.layers)
    assert answer.mean_now == pytest.approx(sum(now[name] for name in wanted) / len(wanted))
    assert answer.mean_then == pytest.approx(sum(wanted.values()) / len(wanted))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_larger_rank_never_has_a_larger_damped_objective(case, kind):
    _, answers = ask(case(kind), "rank=16", "rank=24", "rank=32", "rank=64")
    for rows in zip(*(answer.layers for answer in answers), strict=True):
        assert len({row.name for row in rows}) == 1
        damped = [min(r["damped_after_lowrank"] for r in row.quantizer["rounds"]) for row in rows]
        assert damped == sorted(damped, reverse=True), rows[0].name
        assert damped[0] == min(
            r["damped_after_lowrank"] for r in stored_report(case(kind).file, rows[0].name)["rounds"]
        )


def test_a_layers_own_configuration_is_read_from_the_header(case):
    made = case("llama", overrides=(("down_proj", {"rank": 8, "damping": 0.3}), ("layers.1", {"rounds": 1})))
    now, (same, more) = ask(made, "sweeps=0", "rank=32")
    assert {row.name: row.error_then for row in same.layers} == now
    down = next(row for row in more.layers if row.name == DOWN)
    assert down.bytes_more == 2 * (32 - 8) * (128 + 192)
    assert down.quantizer["damping"] == 0.3 and len(down.quantizer["rounds"]) == 1


def test_several_changes_are_answered_as_each_alone(case):
    _, together = ask(case(), "damping=0.01", "rank=32", "damping=0.3")
    for text, answer in zip(("damping=0.01", "rank=32", "damping=0.3"), together, strict=True):
        assert ask(case(), text)[1] == [answer]


def test_more_threads_give_the_same_answer(case):
    alone = ask(case(), "rank=32")
    torch.set_num_threads(2)
    try:
        assert ask(case(), "rank=32") == alone
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# ---- layers without an answer


def test_layers_that_cannot_take_the_value_are_left_out_by_name(case):
    _, (answer,) = ask(case(), "rank=100")
    small = [f"model.layers.{b}.self_attn.{leaf}" for b in range(2) for leaf in ("k_proj", "v_proj")]
    assert answer.left_out == dict.fromkeys(small, "rank 100 exceeds its size 64 x 128")
    assert len(answer.layers) == 10
    assert f"left out (4):\n  {small[0]}: rank 100 exceeds" in what_if_text(answer)


@pytest.mark.parametrize("text", ["rank=129", "group_size=256"])
def test_a_value_that_no_layer_can_take_is_refused(case, text):
    with pytest.raises(ConfigError, match=rf"--what-if '{text}'.*no linear of .* can take it; model\.layers\.0"):
        ask(case(), text)


def test_layers_that_the_store_does_not_know_are_left_out_by_name(case, calibration_ids, read_ids, tmp_path):
    model = open_model(case().directory)
    some = [linear for linear in model.linears if linear.name != DOWN]
    pipeline.calibrate(model, tmp_path / "store", read_ids(calibration_ids), CalibrationConfig(), linears=some)
    made = SimpleNamespace(directory=case().directory, file=case().file, store=tmp_path / "store")
    now, (answer,) = ask(made, "rank=32")
    assert answer.left_out == {DOWN: "the store has no sums of its input"} and DOWN not in now
    assert {row.name for row in answer.layers} == {linear.name for linear in some}


def test_a_layer_whose_numbers_fail_is_left_out_with_the_reason(case, monkeypatch):
    def quantize(weights, site, config):
        if any(torch.equal(weight, bad) for weight in weights):
            raise NumericsError("too large for float16")
        return real(weights, site, config)

    real, made = store_checks.quantize_linears, case()
    model = open_model(made.directory)
    name = "model.layers.1.mlp.up_proj"  # in one stack with gate_proj, which is answered for all the same
    bad = read_weight(model, next(linear for linear in model.linears if linear.name == name))
    monkeypatch.setattr(store_checks, "quantize_linears", quantize)
    _, (answer,) = ask(made, "rank=32")
    assert answer.left_out == {name: "too large for float16"}


def test_repairs_on_the_way_are_told(case):
    _, (answer,) = ask(case(), "damping=0")
    for row in answer.layers:
        row.quantizer["repairs"] = ["damping raised 1x to 1.0e-06"] * (row.name == DOWN)
    text = what_if_text(answer)
    assert f"repairs with damping 0.0 (1):\n  {DOWN}: damping raised 1x" in text
    assert "compare on held-out text" in text  # less damping always fits the calibration tokens better


# ---- refusals; the command's own are in tests/cli


@pytest.mark.parametrize(("text", "words"), [
    ("depth=3", ["depth", "rank, group_size, rounds, sweeps, damping"]),
    ("rank", ["rank", "KNOB=VALUE"]),
    ("", ["KNOB=VALUE"]),
    ("rank=32,", ["KNOB=VALUE"]),
    ("rank=many", ["rank='many'", "an integer"]),
    ("rank=1.5", ["rank='1.5'", "an integer"]),
    ("damping=low", ["damping='low'", "a number"]),
    ("rank=-1", ["rank: -1", "at least 0"]),
    ("rounds=0", ["rounds: 0", "at least 1"]),
    ("group_size=96", ["group_size: 96", "64"]),
    ("damping=nan", ["damping: nan", "0.0 to 10.0"]),
    ("rank=16,rank=32", ["rank stands twice"]),
])  # fmt: skip
def test_a_wrong_change_says_what_was_wanted(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_change(text)
    assert [word for word in ["--what-if", *words] if word not in str(caught.value)] == []


def test_the_options_are_changes_one_each(case):
    assert parse_changes(["rank=32,sweeps=2", "damping=1e-2"], "store") == [
        {"rank": 32, "sweeps": 2},
        {"damping": 0.01},
    ]
    assert parse_changes([], None) == []


def test_a_store_of_other_tokens_is_refused(case, heldout_ids, read_ids, tmp_path):
    model = open_model(case().directory)
    pipeline.calibrate(model, tmp_path / "store", read_ids(heldout_ids), CalibrationConfig())
    made = SimpleNamespace(directory=case().directory, file=case().file, store=tmp_path / "store")
    with pytest.raises(
        ConfigError, match=r"sums of other tokens .* wanted the store of 'calibration\.jsonl', 768 tokens"
    ):
        ask(made, "rank=32")


def test_changes_without_a_store_are_refused_before_any_work(case, monkeypatch):
    monkeypatch.setattr("svdq.verify.check_structure", None)  # not reached
    with pytest.raises(ConfigError, match="calibration store"):
        verify(open_model(case().directory), open_quantized(case().file), changes=[{"rank": 32}])


def test_a_packed_file_is_refused(case, svdq, tmp_path):
    assert svdq("export-packed", case().file, tmp_path / "packed.safetensors").code == 0
    made = SimpleNamespace(directory=case().directory, file=tmp_path / "packed.safetensors", store=case().store)
    with pytest.raises(ConfigError, match="is packed; wanted the canonical file"):
        ask(made, "rank=32")


@pytest.mark.parametrize("change", [
    lambda c: c.pop("quantize"),
    lambda c: c.update(quantize=[]),
    lambda c: c["quantize"].update(layer={"rank": 16, "depth": 3}),
    lambda c: c["quantize"]["layer"].update(damping="low"),
    lambda c: c["quantize"].update(overrides=[["down_proj"]]),
    lambda c: c["quantize"].update(overrides=[[5, {"rank": 8}]]),
    lambda c: c["quantize"].update(overrides=[["re:(", {"rank": 8}]]),
    lambda c: c["quantize"].update(overrides=[["down_proj", {"rank": True}]]),
], ids=["none", "a list", "a knob", "a value", "an override", "a pattern", "a regex", "a rank"])  # fmt: skip
def test_a_header_without_the_runs_configuration_is_refused(case, tmp_path, change):
    file = edited(case().file, "svdq.config", change, tmp_path / "edited.safetensors")
    made = SimpleNamespace(directory=case().directory, file=file, store=case().store)
    with pytest.raises(CheckpointError, match=r"svdq\.config") as caught:
        ask(made, "rank=32")
    assert "\n" not in str(caught.value)
    assert len(ask(made)[0]) == 14  # without a change it is not needed


# ---- the command


def run_command(svdq, case, *options):
    return svdq("verify", case.file, "--model", case.directory, "--calib", case.store, *options)


def test_the_json_report_has_every_layer_and_nothing_is_written(case, svdq):
    made = case()
    folders = (made.file.parent, made.store, Path(made.directory))
    before = {path: path.read_bytes() for folder in folders for path in folder.iterdir()}
    result = run_command(svdq, made, "--what-if", "rank=32,sweeps=1", "--what-if", "damping=0.1", "--json", "-")
    assert result.code == 0, result
    report = json.loads(result.out)
    first, second = report["what_if"]
    assert (first["change"], second["change"]) == ({"rank": 32, "sweeps": 1}, {"damping": 0.1})
    assert [row["name"] for row in first["layers"]] == [row["name"] for row in report["layers"]]
    for row, layer in zip(first["layers"], report["layers"], strict=True):
        assert row.keys() == {"name", "error_now", "error_then", "gain", "bytes_more", "quantizer"}
        assert row["error_now"] == layer["store_error"]
        assert row["gain"] == row["error_now"] - row["error_then"]
        assert row["bytes_more"] == 2 * 16 * (layer["n"] + layer["k"])
        assert {"rounds", "kept_round", "damping", "repairs"} <= row["quantizer"].keys()
    assert first.keys() == {"change", "layers", "left_out", "mean_now", "mean_then", "bytes_more"}
    assert before == {path: path.read_bytes() for folder in folders for path in folder.iterdir()}


def test_without_the_option_the_report_has_no_answers(case, svdq):
    assert json.loads(run_command(svdq, case(), "--json", "-").out)["what_if"] == []


def test_the_table_is_sorted_by_gain_and_has_ten_rows_unless_verbose(case, svdq):
    _, (answer,) = ask(case(), "rank=32")
    by_gain = [row.name for row in sorted(answer.layers, key=lambda row: -row.gain)]
    for options, shown in ([], 10), (["-v"], 14):
        text = run_command(svdq, case(), "--what-if", "rank=32", *options).out
        lines = text.split("what if rank 32:")[1].splitlines()[2:]
        assert [line.split()[0] for line in lines[:shown]] == by_gain[:shown]
        assert ("… and 4 that gain less" in lines) == (shown == 10)
        assert lines[-1].startswith("14 linears with rank 32: mean error ") and lines[-1].endswith(" kB in the file")
    row = next(row for row in answer.layers if row.name == by_gain[0])
    numbers = [f"{100 * value:.2f}" for value in (row.error_now, row.error_then, row.gain)]
    assert lines[0].split() == [
        row.name,
        numbers[0],
        "%",
        numbers[1],
        "%",
        numbers[2],
        f"+{row.bytes_more / 1e3:.1f}",
        "kB",
    ]


def test_fewer_bytes_have_their_sign(case):
    _, (answer,) = ask(case(), "rank=0")
    assert what_if_text(answer).endswith(f", -{-answer.bytes_more / 1e3:.1f} kB in the file")


# ---- what the quantizer reported, and the layers that hurt most


def test_the_report_has_the_quantizers_rounds(case, svdq):
    made = case()
    for layer in json.loads(svdq("verify", made.file, "--model", made.directory, "--json", "-").out)["layers"]:
        stored = stored_report(made.file, layer["name"])
        assert layer["quantizer"] == {key: stored[key] for key in ("rounds", "kept_round", "damping")}
        kept = layer["quantizer"]["rounds"][layer["quantizer"]["kept_round"] - 1]
        assert kept["error"] == stored["error"] and len(kept) == 3


@pytest.mark.parametrize("change", [
    lambda r: r.pop("layers"),
    lambda r: r.update(layers=[]),
    lambda r: r["layers"].pop(DOWN),
    lambda r: r["layers"].update({DOWN: "good"}),
    lambda r: r["layers"][DOWN].update(rounds=7),
    lambda r: r["layers"][DOWN].update(rounds=[7]),
    lambda r: r["layers"][DOWN]["rounds"][0].update(error=[[[]]]),
    lambda r: r["layers"][DOWN].update(kept_round=1e999),
    lambda r: r["layers"][DOWN].update(damping=10**400),
])  # fmt: skip
def test_a_report_of_another_form_is_null_and_brings_no_check_down(case, svdq, tmp_path, change):
    file = edited(case().file, "svdq.report", change, tmp_path / "edited.safetensors")
    result = svdq("verify", file, "--model", case().directory, "--json", tmp_path / "report.json")
    assert result.code == 0 and "the layers that hurt most" in result.out
    layers = {layer["name"]: layer for layer in json.loads((tmp_path / "report.json").read_text())["layers"]}
    assert layers[DOWN]["quantizer"] is None


def hurting(text):
    """(how they were chosen, the names listed)"""
    title, *lines = text.split("the layers that hurt most, by error ")[1].splitlines()
    return title.split(" (")[0], [line.split()[2] for line in lines[:5]]


def test_the_layers_that_hurt_most_are_those_with_the_largest_error_per_token(case, heldout_ids, read_ids):
    made = case()
    report = verify(open_model(made.directory), open_quantized(made.file), data=[read_ids(heldout_ids)])
    worst = sorted(report.layers, key=lambda row: -row.token_error)[:5]
    text = verification_text(report)
    assert hurting(text) == ("per token on the data", [row.name for row in worst])
    rounds = ", ".join(f"{100 * entry['error']:.2f}" for entry in stored_report(made.file, worst[0].name)["rounds"])
    assert f"  {100 * worst[0].token_error:.2f} %  {worst[0].name}  ({rounds} %)" in text


@pytest.mark.parametrize(("with_store", "field", "label"), [
    (False, "quantization_error", "of weights"),
    (True, "store_error", "on the store"),
])  # fmt: skip
def test_without_data_they_are_those_of_the_store_or_of_the_weights(case, with_store, field, label):
    made = case()
    store = Store.open(made.store) if with_store else None
    report = verify(open_model(made.directory), open_quantized(made.file), store=store)
    worst = sorted(report.layers, key=lambda row: -getattr(row, field))[:5]
    assert hurting(verification_text(report)) == (label, [row.name for row in worst])


def test_a_layer_whose_error_is_not_a_number_hurts_most(case):
    report = verify(open_model(case().directory), open_quantized(case().file))
    report.layers[3].quantization_error = float("nan")
    assert hurting(verification_text(report))[1][0] == report.layers[3].name
