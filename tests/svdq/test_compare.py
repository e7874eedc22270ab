"""svdq compare: one measure in all columns, only checkpoints of one model, only numbers that were measured on them."""

import json
from types import SimpleNamespace

import pytest

from svdq.compare import compare, comparison_text, depths
from svdq.errors import CheckpointError, ConfigError
from svdq.html_report import kind_of_linear
from svdq.quantized import open_quantized


@pytest.fixture(scope="module")
def two(quantized):
    """Two checkpoints of one tiny model, the second of a cruder method."""
    directory, a = quantized("llama")
    return SimpleNamespace(directory=directory, a=a, b=quantized("llama", "plain")[1])


@pytest.fixture(scope="module")
def numbers(two, heldout_ids, tmp_path_factory):
    """What verify --json wrote of both, as text."""
    from svdq.cli.main import main

    out, found = tmp_path_factory.mktemp("verified") / "numbers.json", []
    for file in (two.a, two.b):
        options = ["--model", two.directory, "--data", heldout_ids, "--min-tokens", 64, "--json", out, "--quiet"]
        with pytest.raises(SystemExit) as stop:
            main(["verify", *map(str, (file, *options))])
        assert stop.value.code == 0
        found.append(out.read_text())
    return found


@pytest.fixture
def verified(numbers, tmp_path):
    """The same as files of the test's own."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, text in zip(files, numbers, strict=True):
        file.write_text(text)
    return files


def test_headers_alone_give_the_quantizers_own_error(two):
    comparison = compare([open_quantized(two.a), open_quantized(two.b)])
    assert comparison.measure == "calibration"
    for one, mean in zip(comparison.checkpoints, comparison.means(), strict=True):
        layers = json.loads(open_quantized(one.file).file.metadata["svdq.report"])["layers"]
        assert one.errors == {name: layer["error"] for name, layer in layers.items()}
        assert mean == pytest.approx(sum(layer["error"] for layer in layers.values()) / len(layers))
        assert one.bytes == sum(one.bytes_by_kind.values())


def test_checkpoints_of_different_models_are_refused_by_name(refused, two, quantized):
    other = quantized("qwen2")[1]
    line = refused("compare", two.a, two.b, other)
    assert all(word in line for word in (str(other), str(two.a), "another model", "one model"))


def test_what_verify_wrote_is_the_measure_if_it_is_given(two, verified, svdq):
    options = [option for file in verified for option in ("--verified", file)]
    result = json.loads(svdq("compare", two.a, two.b, *options, "--json", "-").out)
    assert result["measure"] == "token_error"
    for one, file in zip(result["checkpoints"], verified, strict=True):
        numbers = json.loads(file.read_text())
        assert {name: layer["error"] for name, layer in one["layers"].items()} == {
            row["name"]: row["token_error"] for row in numbers["layers"]
        }
        assert one["outputs"] == numbers["outputs"]


def test_with_a_model_and_data_each_is_verified_now(two, verified, svdq, heldout_ids, tmp_path):
    options = ["--model", two.directory, "--data", heldout_ids, "--min-tokens", 64, "--json", tmp_path / "c.json"]
    run = svdq("compare", two.a, two.b, *options)
    assert run.code == 0 and "perplexity, heldout.jsonl" in run.out
    for one, file in zip(json.loads((tmp_path / "c.json").read_text())["checkpoints"], verified, strict=True):
        assert one["outputs"] == json.loads(file.read_text())["outputs"]


def test_the_layers_that_differ_most_come_first(two, verified, svdq):
    reports = [json.loads(file.read_text()) for file in verified]
    text = comparison_text(compare([open_quantized(two.a), open_quantized(two.b)], verified=reports), most=3)
    errors = [{row["name"]: row["token_error"] for row in report["layers"]} for report in reports]
    wanted = sorted(errors[0], key=lambda name: -abs(errors[0][name] - errors[1][name]))[:3]
    lines = [line for line in text.splitlines() if line.startswith("model.")]
    assert [line.split()[0] for line in lines] == wanted
    assert lines[0].split()[-1] == f"{100 * abs(errors[0][wanted[0]] - errors[1][wanted[0]]):.2f}"


def test_a_speed_is_that_of_svdq_profile_on_the_file(two, svdq, tmp_path):
    out = tmp_path / "speed.json"
    assert svdq("profile", two.directory, "--quantized", two.b, "--tokens", 8, "--steps", 1, "--json", out).code == 0
    run = svdq("compare", two.a, two.b, "--profiled", out, "--json", "-")
    first, second = json.loads(run.out)["checkpoints"]
    assert first["speed"] is None
    assert second["speed"] == {"ms_per_step": json.loads(out.read_text())["us"] / 1e3, "tokens": 8, "device": "cpu"}


def test_a_failed_check_of_the_verifier_exits_with_1(two, verified, svdq):
    numbers = json.loads(verified[1].read_text())
    verified[1].write_text(json.dumps({**numbers, "failures": ["some.layer: it failed"]}))
    run = svdq("compare", two.a, two.b, "--verified", verified[0], "--verified", verified[1])
    assert run.code == 1 and "some.layer: it failed" in run.out


def test_different_calibration_tokens_are_noted(two, quantized, monkeypatch):
    a, b = open_quantized(two.a), open_quantized(two.b)
    assert compare([a, b]).notes == []
    b.file.metadata["svdq.calibration"] = json.dumps({"sha256": "0"})
    assert any("calibrated on different tokens" in note for note in compare([a, b]).notes)


def test_numbers_that_are_not_of_the_files_are_refused(two, verified, refused, tmp_path):
    broken = tmp_path / "broken.json"
    numbers = json.loads(verified[0].read_text())
    for change, words in (
        ({"file": str(tmp_path / "elsewhere.safetensors")}, "not compared here"),
        ({"file": None}, "name no file"),
        ({"layers": numbers["layers"][1:]}, "other linears"),
        ({"layers": [{"name": "x"}]}, "not what verify --json writes"),
        ({"outputs": None}, "not what verify --json writes"),
    ):
        broken.write_text(json.dumps({**numbers, **change}))
        assert words in refused("compare", two.a, two.b, "--verified", broken, "--verified", verified[1])
    broken.write_text("[1]")
    assert "not a JSON object" in refused("compare", two.a, two.b, "--verified", broken)
    assert "not verified, others are" in refused("compare", two.a, two.b, "--verified", verified[0])
    assert "no time of a step" in refused("compare", two.a, two.b, "--profiled", verified[0])


def test_one_checkpoint_or_the_same_twice_is_refused(two):
    with pytest.raises(ConfigError, match="two or more"):
        compare([open_quantized(two.a)])
    with pytest.raises(ConfigError, match="given twice"):
        compare([open_quantized(two.a), open_quantized(two.a)])


def test_a_file_whose_source_is_not_an_object_is_refused(two):
    a, b = open_quantized(two.a), open_quantized(two.b)
    b.file.metadata["svdq.source"] = "[]"
    with pytest.raises(CheckpointError, match=r"svdq\.source"):
        compare([a, b])


def test_means_are_over_the_linears_that_all_have(two, quantized, tmp_path):
    a, b = open_quantized(two.a), open_quantized(two.b)
    lost = next(iter(b.layers))
    del b.layers[lost]
    comparison = compare([a, b])
    assert lost not in comparison.shared and len(comparison.shared) == len(a.layers) - 1
    assert any(f"over the {len(a.layers) - 1} linears" in note for note in comparison.notes)


def test_a_block_is_the_first_number_in_a_name():
    names = ["m.layers.10.mlp.up", "m.layers.9.mlp.up", "m.layers.9.experts.3.up", "head"]
    assert depths(names) == {names[0]: 1, names[1]: 0, names[2]: 0}
    assert [kind_of_linear(name) for name in names] == ["mlp.up", "mlp.up", "experts.3.up", "head"]
