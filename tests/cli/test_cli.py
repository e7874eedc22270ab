"""The command: help that shows defaults, one line and exit code 2 for every mistake, reports that parse."""

import json
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import click
import pytest
import safetensors.torch
import torch

from svdq.cli.main import svdq as group

COMMANDS = sorted(group.commands)
REPOSITORY = Path(__file__).resolve().parents[2]


def strict_json(text):
    """JSON as the standard has it: NaN and Infinity are no part of it, though Python writes them."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


# ---- help


def test_the_commands_are_those_of_the_design():
    assert {"calibrate", "quantize", "verify", "export-packed", "inspect"} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_the_default_of_every_option_that_has_one(svdq, command):
    result = svdq(command, "--help")
    assert (result.code, result.err) == (0, "")
    text = " ".join(result.out.split())
    for option in group.commands[command].params:
        if isinstance(option, click.Option) and not option.is_flag:
            assert option.opts[-1] in text
            if isinstance(option.default, (int, float, str)) and option.default != "":
                assert f"[default: {option.default}" in text


@pytest.mark.parametrize(("command", "shown"), [
    ("calibrate", ["128", "512", "1024", "quality", "0.75", "hadamard64", "0.85", "auto"]),
    ("quantize", ["128", "512", "quality", "16", "64", "3", "K / tokens, 0.01 to 0.5", "output", "auto"]),
    ("verify", ["16", "512", "0.5", "1e-05", "unchecked", "reference", "int4", "auto"]),
    ("export-packed", ["mma", "float16", "svdq"]),
])  # fmt: skip
def test_help_shows_the_defaults_of_the_method(svdq, command, shown):
    text = " ".join(svdq(command, "--help").out.replace("(", " ").replace(")", " ").split())
    assert [value for value in shown if f"[default: {value}" not in text] == []


def test_help_and_version_of_the_whole(svdq):
    assert "Usage: svdq" in svdq("--help").out
    assert svdq("--version").out.startswith("svdq, version 0.")


def test_no_arguments_print_the_help(svdq):
    result = svdq()
    assert result.code == 2 and "Usage: svdq" in result.out + result.err


# ---- mistakes: one line, exit code 2


@pytest.fixture
def model(toy):
    return toy("llama")


@pytest.mark.parametrize(("arguments", "words"), [
    (["quantise"], ["quantise"]),
    (["quantize"], ["MODEL_DIR"]),
    (["quantize", "MODEL", "OUT", "--fast"], ["--fast"]),
    (["quantize", "MODEL", "OUT", "--rank", "many", "--data", "IDS"], ["--rank", "many"]),
    (["quantize", "MODEL", "OUT", "--rank", "-1", "--data", "IDS"], ["rank", "-1"]),
    (["quantize", "MODEL", "OUT", "--group-size", "96", "--data", "IDS"], ["group_size", "96", "64"]),
    (["quantize", "MODEL", "OUT", "--damping", "nan", "--data", "IDS"], ["damping", "nan"]),
    (["quantize", "MODEL", "OUT", "--objective", "speed", "--data", "IDS"], ["objective", "speed", "output, weight"]),
    (["quantize", "MODEL", "OUT", "--svd", "fast", "--data", "IDS"], ["svd", "fast", "exact"]),
    (["quantize", "MODEL", "OUT", "--preset", "fast", "--data", "IDS"], ["fast", "quality, best, nunchaku, svdquant"]),
    (["quantize", "MODEL", "OUT", "--rotation", "dct", "--data", "IDS"], ["rotation", "dct", "hadamard64"]),
    (["quantize", "MODEL", "OUT", "--act-clip", "2", "--data", "IDS"], ["act_clip", "2.0"]),
    (["quantize", "MODEL", "OUT", "--override", "down_proj", "--data", "IDS"], ["--override", "down_proj"]),
    (["quantize", "MODEL", "OUT", "--override", "down_proj:depth=2", "--data", "IDS"], ["depth", "rank"]),
    (["quantize", "MODEL", "OUT", "--ignore", "re:(", "--data", "IDS"], ["re:(", "regular expression"]),
    (["quantize", "MODEL", "OUT", "--ignore", "qproj", "--data", "IDS"], ["--ignore 'qproj'", "matches none"]),
    (["quantize", "MODEL", "OUT"], ["--calib", "--data"]),
    (["quantize", "MODEL", "OUT", "--calib", "X", "--data", "IDS"], ["--calib and --data", "both"]),
    (["quantize", "MODEL", "OUT", "--calib", "nowhere"], ["nowhere", "svdq calibrate"]),
    (["quantize", "MODEL", "OUT", "--data", "nowhere.txt"], ["nowhere.txt", "no such file"]),
    (["quantize", "MODEL", "nowhere/OUT", "--data", "IDS"], ["nowhere", "no such directory"]),
    (["quantize", "MODEL", ".", "--data", "IDS"], ["a directory"]),
    (["quantize", "nowhere", "OUT", "--data", "IDS"], ["nowhere"]),
    (["quantize", "MODEL", "OUT", "--data", "IDS", "--device", "tpu"], ["--device", "tpu", "auto, cpu, cuda"]),
    (["quantize", "MODEL", "OUT", "--data", "IDS", "--samples", "0"], ["samples", "0"]),
    (["quantize", "MODEL", "OUT", "--data", "IDS", "--seed", "-3"], ["seed", "-3"]),
    (["quantize", "MODEL", "OUT", "--data", "IDS", "--min-tokens", "9999"], ["768 tokens", "9,999", "--min-tokens"]),
    (["quantize", "MODEL", "OUT", "--data", "IDS", "--smoothing", "much"], ["--smoothing", "'much'", "'search'"]),
    (["quantize", "MODEL", "OUT", "--data", "IDS", "--smoothing", "2"], ["smoothing", "2.0", "'search'"]),
    (["calibrate", "MODEL", "--data", "IDS"], ["--out"]),
    (["calibrate", "MODEL", "-o", "S", "--data", "IDS", "--preset", "fastest"], ["--preset", "fastest"]),
    (["calibrate", "MODEL", "-o", "S", "--data", "IDS", "--only", "qproj"], ["--only 'qproj'", "matches none"]),
    (["verify", "OUT"], ["--model"]),
    (["verify", "nowhere", "--model", "MODEL"], ["nowhere"]),
    (["verify", "FILE", "--model", "MODEL", "--kernels", "fast"], ["--kernels", "fast", "reference", "cuda"]),
    (["verify", "FILE", "--model", "MODEL", "--calib", "X", "--activations", "fp8"], ["--activations fp8", "--calib"]),
    (["verify", "FILE", "--model", "MODEL", "--what-if", "rank=32"], ["--what-if 'rank=32'", "--calib CALIB_DIR"]),
    (["verify", "FILE", "--model", "MODEL", "--calib", "X", "--what-if", "clip=1"], ["'clip'", "rank, group_size"]),
    (["verify", "FILE", "--model", "MODEL", "--calib", "absent", "--what-if", "rank=8"], ["absent", "svdq calibrate"]),
    (["verify", "MODEL/model.safetensors", "--model", "MODEL"], ["quantization_config", "svdq quantize"]),
    (["tune", "MODEL", "FILE", "OUT"], ["--data"]),
    (["tune", "MODEL", "FILE", "OUT", "--data", "IDS", "--steps", "0"], ["steps", "0"]),
    (["tune", "MODEL", "FILE", "OUT", "--data", "IDS", "--rate", "nan"], ["rate", "nan"]),
    (["tune", "MODEL", "FILE", "nowhere/OUT", "--data", "IDS"], ["nowhere", "no such directory"]),
    (["tune", "MODEL", "MODEL/model.safetensors", "OUT", "--data", "IDS"], ["quantization_config", "svdq quantize"]),
    (["inspect", "nowhere"], ["nowhere"]),
    (["export-packed", "nowhere", "OUT"], ["nowhere"]),
    (["export-packed", "MODEL/model.safetensors", "OUT"], ["quantization_config", "svdq quantize"]),
    (["export-packed", "FILE", "OUT", "--dtype", "float8"], ["--dtype", "float16"]),
    (["export-packed", "FILE", "OUT", "--fuse", "qkv"], ["--fuse", "NAME=PART"]),
    (["export-packed", "FILE", "OUT", "--fuse", "qkv=query,key"], ["--fuse qkv", "query, key"]),
    (["export-packed", "FILE", "nowhere/OUT"], ["nowhere", "no such directory"]),
], ids=lambda value: " ".join(value)[:60])  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(
    refused, model, quantized, calibration_ids, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": model, "IDS": calibration_ids, "FILE": quantized("llama")[1] if "FILE" in arguments else ""}
    filled = [str(names.get(item, item)).replace("MODEL/", f"{model}/") for item in arguments]
    message = refused(*filled)
    assert [word for word in words if word not in message] == [], message
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_line(svdq, quantized, tmp_path):
    result = svdq("inspect", quantized("llama")[1], "--json", tmp_path / "nowhere" / "report.json")
    assert result.code == 2 and "--json" in result.err and result.err.count("\n") == 1


def test_an_unknown_device_is_found_before_the_model_is_opened(refused):
    assert "--device" in refused("quantize", "nowhere", "out", "--data", "x.txt", "--device", "tpu")


def test_case_20_a_card_that_is_not_there_is_one_line(refused, model, calibration_ids, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "out"
    message = refused("quantize", model, out, "--data", calibration_ids, "--device", "cuda:1")
    assert "cuda:1" in message and "found 1" in message


def test_sizes_off_the_group_are_listed_before_the_data_is_read(svdq, toy, tmp_path):
    directory = toy("llama", hidden_size=160, num_attention_heads=2, head_dim=64)
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"input_ids": [1, 2]}\n')  # too little: what follows would be an error of its own
    result = svdq("quantize", directory, tmp_path / "out", "--data", ids)
    assert result.code == 2
    assert "model.layers.1.mlp.gate_proj" in result.err and "--ignore" in result.err and "min-tokens" not in result.err


@pytest.mark.parametrize("command", ["quantize", "calibrate"])
def test_a_quantized_file_is_no_model(refused, quantized, calibration_ids, tmp_path, command):
    out = [tmp_path / "out"] if command == "quantize" else ["-o", tmp_path / "out"]
    message = refused(command, quantized("llama")[1], *out, "--data", calibration_ids)
    assert "already quantized" in message and "canonical" in message


# ---- files of other kinds


@pytest.fixture
def packed(svdq, quantized, tmp_path):
    out = tmp_path / "packed.safetensors"
    assert svdq("export-packed", quantized("llama")[1], out).code == 0
    return out


def test_inspect_states_kind_counts_and_bits(svdq, quantized):
    _, file = quantized("llama")
    result = svdq("inspect", file)
    assert result.code == 0
    assert f"{file}: canonical W4A4 checkpoint" in result.out
    assert "14 quantized linears" in result.out
    assert "rank 16" in result.out and "hadamard64" in result.out
    assert "lm_head.weight = model.embed_tokens.weight" in result.out


def test_inspect_counts_the_bits_of_a_weight(svdq, quantized):
    _, file = quantized("llama", "plain")
    facts = json.loads(svdq("inspect", file, "--json", "-").out)
    # 4 bits a code, 16 bits a group of 64, 16 bits each for rank 16 of n and k; per block q, k, v, o, gate, up, down
    shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (192, 128), (192, 128), (128, 192)]
    bits = sum(4 * n * k + 16 * n * k // 64 + 16 * 16 * (n + k) for n, k in shapes)
    assert facts["bits_per_weight"] == pytest.approx(bits / sum(n * k for n, k in shapes))


def test_inspect_knows_a_packed_file(svdq, packed):
    result = svdq("inspect", packed)
    assert result.code == 0 and "packed W4A4 checkpoint" in result.out and "packing mma" in result.out


def test_inspect_reads_the_header_alone(svdq, quantized, tmp_path):
    raw = quantized("llama")[1].read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    hollow = tmp_path / "hollow.safetensors"
    with hollow.open("wb") as file:  # the tensors are a hole
        file.write(raw[:header])
        file.truncate(len(raw))
    assert svdq("inspect", hollow).code == 0


def test_inspect_refuses_another_safetensors_file(refused, model):
    assert "svdq quantize" in refused("inspect", model / "model.safetensors")


def test_inspect_refuses_a_truncated_file(refused, quantized, tmp_path):
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(quantized("llama")[1].read_bytes()[:-100])
    assert "truncated" in refused("inspect", cut)


def test_inspect_refuses_a_header_of_2_to_the_63_bytes(refused, tmp_path):
    hostile = tmp_path / "hostile.safetensors"
    hostile.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert str(2**63) in refused("inspect", hostile)


def test_export_of_a_packed_file_says_that_it_is_packed(refused, packed, tmp_path):
    assert "already packed" in refused("export-packed", packed, tmp_path / "again.safetensors")


def test_export_for_nunchaku_of_a_rotated_file_names_the_preset(refused, quantized, tmp_path):
    message = refused("export-packed", quantized("llama")[1], tmp_path / "out", "--for", "nunchaku")
    assert "rotation" in message and "--preset nunchaku" in message


def test_export_for_nunchaku_of_its_preset_passes(svdq, quantized, tmp_path):
    _, file = quantized("llama", "nunchaku")
    assert svdq("export-packed", file, tmp_path / "out.safetensors", "--for", "nunchaku").code == 0


def test_export_onto_its_own_source_is_refused(refused, quantized, tmp_path):
    file = shutil.copy(quantized("llama")[1], tmp_path / "only.safetensors")
    before = Path(file).read_bytes()
    refused("export-packed", file, file)
    assert Path(file).read_bytes() == before


# ---- reports


def test_every_json_report_parses(svdq, model, calibration_ids, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    for arguments in (
        ["calibrate", model, "-o", "store", *data],
        ["quantize", model, "out.safetensors", "--calib", "store", "--rounds", "1"],
        ["tune", model, "out.safetensors", "tuned.safetensors", *data, "--steps", "2"],
        ["verify", "tuned.safetensors", "--model", model, *data],
        ["export-packed", "out.safetensors", "packed.safetensors"],
        ["inspect", "packed.safetensors"],
    ):
        result = svdq(*arguments, "--json", "report.json")
        assert result.code == 0, result
        assert strict_json((tmp_path / "report.json").read_text())
        (tmp_path / "report.json").unlink()


@pytest.mark.parametrize("command", ["verify", "export-packed", "inspect", "quantize"])
def test_json_on_standard_output_is_alone_there(svdq, quantized, model, calibration_ids, tmp_path, command):
    directory, file = quantized("llama")
    arguments = {
        "verify": [file, "--model", directory],
        "export-packed": [file, tmp_path / "packed.safetensors"],
        "inspect": [file],
        "quantize": [model, tmp_path / "out", "--data", calibration_ids, "--min-tokens", "1", "--rounds", "1"],
    }
    result = svdq(command, *arguments[command], "--json", "-")
    assert result.code == 0
    assert strict_json(result.out)


def test_the_report_of_a_file_with_a_nan_is_still_json(svdq, quantized, tmp_path):
    from safetensors import safe_open

    directory, file = quantized("llama")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    tensors = safetensors.torch.load_file(file)
    tensors["model.layers.0.mlp.up_proj.w_scales"][0, 0] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "nan.safetensors", metadata=metadata)
    result = svdq("verify", tmp_path / "nan.safetensors", "--model", directory, "--json", tmp_path / "report.json")
    assert result.code == 1
    strict_json((tmp_path / "report.json").read_text())


def test_quiet_prints_nothing_on_standard_output(svdq, model, calibration_ids, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    for arguments in (
        ["calibrate", model, "-o", "store", *data],
        ["quantize", model, "out.safetensors", "--calib", "store", "--rounds", "1"],
        ["verify", "out.safetensors", "--model", model],
        ["export-packed", "out.safetensors", "packed.safetensors"],
        ["inspect", "packed.safetensors"],
    ):
        result = svdq(*arguments, "--quiet")
        assert (result.code, result.out, result.err) == (0, "", "")


def test_verbose_prints_every_layer(svdq, quantized):
    directory, file = quantized("llama", num_hidden_layers=3)
    names = [f"model.layers.{b}.mlp.down_proj" for b in range(3)]
    assert all(name in svdq("verify", file, "--model", directory, "-v").out for name in names)
    assert all(name in svdq("inspect", file, "-v").out for name in names)


def test_strict_turns_a_warning_into_exit_code_1(svdq, model, ids_file, tmp_path):
    few = ids_file(tmp_path / "few.jsonl", [40, 40], seed=0)  # 80 tokens for 192 channels
    arguments = ["quantize", model, tmp_path / "out", "--data", few, "--min-tokens", "1", "--rounds", "1"]
    assert svdq(*arguments).code == 0
    result = svdq(*arguments, "--strict")
    assert result.code == 1
    assert "80 calibration tokens for 192 input channels" in result.out + result.err


def test_a_tuning_that_is_undone_is_said_and_strict_makes_it_exit_code_1(svdq, quantized, calibration_ids, tmp_path):
    directory, file = quantized("llama")
    out = tmp_path / "tuned.safetensors"
    arguments = ["tune", directory, file, out, "--data", calibration_ids, "--min-tokens", "1", "--rate", "0.5"]
    result = svdq(*arguments, "--steps", "4", "--strict")
    assert result.code == 1 and "the layers are as they were" in result.err
    tensors = (safetensors.torch.load_file(path) for path in (file, out))
    before, after = ({name: tensor.tolist() for name, tensor in found.items()} for found in tensors)
    assert before == after


def test_quantize_tune_is_quantize_and_then_tune_byte_for_byte(svdq, model, calibration_ids, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    assert svdq("calibrate", model, "-o", "store", *data).code == 0
    result = svdq("quantize", model, "once", "--calib", "store", "--tune", "3", "--json", "report.json")
    assert result.code == 0, result
    assert "3 steps" in result.out
    assert svdq("quantize", model, "first", "--calib", "store").code == 0
    assert svdq("tune", model, "first", "then", *data, "--steps", "3").code == 0
    assert (tmp_path / "once").read_bytes() == (tmp_path / "then").read_bytes()
    report = strict_json((tmp_path / "report.json").read_text())
    assert report["tuned"]["steps"] == 3 and report["path"] == "once"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "once", "report.json", "store", "then"]


def test_the_output_of_a_tuned_run_is_not_the_model_either(refused, toy_copy, calibration_ids):
    directory = toy_copy("llama")
    weights = directory / "model.safetensors"
    before = weights.read_bytes()
    message = refused("quantize", directory, weights, "--data", calibration_ids, "--min-tokens", "1", "--tune", "2")
    assert "is what this run reads" in message and weights.read_bytes() == before


def test_an_interrupted_tuning_says_what_is_left(svdq, model, calibration_ids, tmp_path, monkeypatch):
    from svdq import tune

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune, "tune", interrupt)
    out = tmp_path / "out"
    result = svdq("quantize", model, out, "--data", calibration_ids, "--min-tokens", "1", "--tune", "2")
    assert result.code == 130
    assert f"svdq: interrupted; {out}.untuned is whole, but not tuned" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["out.untuned"]


def test_a_store_without_tokens_cannot_be_tuned_on_and_is_refused_before_any_work(
    svdq, refused, model, calibration_ids, tmp_path
):
    store = tmp_path / "store"
    assert svdq("calibrate", model, "-o", store, "--data", calibration_ids, "--min-tokens", "1").code == 0
    (store / "tokens.safetensors").unlink()
    message = refused("quantize", model, tmp_path / "out", "--calib", store, "--preset", "best")
    assert "tokens.safetensors" in message and not (tmp_path / "out.untuned.work").exists()


def test_a_store_of_another_preset_is_refused_by_name(svdq, refused, model, calibration_ids, tmp_path):
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    assert svdq("calibrate", model, "-o", tmp_path / "store", *data).code == 0
    message = refused("quantize", model, tmp_path / "out", "--calib", tmp_path / "store", "--preset", "nunchaku")
    assert "rotation" in message or "act_clip" in message


def test_ctrl_c_is_one_line_and_exit_code_130(svdq, quantized, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("svdq.quantized.open_quantized", interrupt)
    result = svdq("inspect", quantized("llama")[1])
    assert result.code == 130
    assert len(result.err.split("\n")) <= 3 and "interrupted" in result.err


# ---- the installed package


def test_the_wheel_holds_the_package_and_no_top_level_kernels_or_cli(tmp_path):
    sources = tmp_path / "sources"
    sources.mkdir()
    for folder in ("svdq", "cli", "calibration", "kernels"):
        shutil.copytree(REPOSITORY / folder, sources / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in REPOSITORY.iterdir():
        if file.suffix in (".toml", ".md", ".cfg", ".in") or file.name.startswith("LICENSE"):
            shutil.copy(file, sources / file.name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    built = subprocess.run(build, cwd=sources, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr + built.stdout
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
        archive.extractall(tmp_path / "site")
    assert {"svdq/cli/main.py", "svdq/kernels/layout.py", "svdq/calibration/capture.py", "svdq/py.typed"} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"svdq"}
    assert "svdq = svdq.cli.main:main" in entry_points
    for folder in ("cli", "calibration", "kernels"):
        of_package = {Path(name).name for name in names if Path(name).parent == Path("svdq", folder)}
        assert {path.name for path in (REPOSITORY / folder).glob("*.py")} <= of_package
    (tmp_path / "elsewhere").mkdir()
    code = "import svdq.cli.main as main, svdq, sys; print(svdq.__file__); main.main(['--version'])"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "elsewhere", env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == str(tmp_path / "site" / "svdq" / "__init__.py")
    assert ran.stdout.splitlines()[1].startswith("svdq, version 0.")


def test_the_command_is_installed(tmp_path):
    command = Path(sys.executable).parent / "svdq"
    ran = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "") and ran.stdout.startswith("svdq, version 0.")
