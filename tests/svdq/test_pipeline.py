"""Whole runs: the same bytes every way, resumed after any death, refused before any work, nothing left behind."""

import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from svdq import pipeline, preflight
from svdq.calibration.store import Store
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.errors import CheckpointError, ConfigError
from svdq.models import Linear, open_model

FAST = QuantConfig(layer=LayerConfig(rank=8, rounds=1))


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def metadata(path, key):
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()[key])


def visible(directory):
    return sorted(item.name for item in directory.iterdir())


@pytest.fixture
def quantize(calibration_ids, read_ids):
    def run(directory, out, config=FAST, **options):
        if "store" not in options:
            options |= {"data": read_ids(calibration_ids), "calibration": CalibrationConfig()}
        return pipeline.quantize(open_model(directory), out, config, **options)

    return run


@pytest.fixture
def calibrated(calibration_ids, read_ids, tmp_path):
    def run(directory, name="store", **options):
        pipeline.calibrate(
            open_model(directory), tmp_path / name, read_ids(calibration_ids), CalibrationConfig(), **options
        )
        return Store.open(tmp_path / name)

    return run


# ---- the same bytes


@pytest.mark.parametrize("kind", ["llama", "albert"])
def test_a_store_and_the_data_themselves_give_the_same_bytes(toy, quantize, calibrated, tmp_path, kind):
    quantize(toy(kind), tmp_path / "from_data.safetensors")
    quantize(toy(kind), tmp_path / "from_store.safetensors", store=calibrated(toy(kind)))
    assert sha256(tmp_path / "from_data.safetensors") == sha256(tmp_path / "from_store.safetensors")


def test_case_21_two_runs_give_equal_bytes_and_leave_the_random_state_alone(toy, quantize, tmp_path):
    seed, state = torch.initial_seed(), torch.get_rng_state()
    quantize(toy("llama"), tmp_path / "first.safetensors")
    assert torch.initial_seed() == seed
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)  # another caller's draws change nothing
    quantize(toy("llama"), tmp_path / "second.safetensors")
    assert sha256(tmp_path / "first.safetensors") == sha256(tmp_path / "second.safetensors")


def test_the_number_of_threads_changes_no_byte_and_is_left_as_it_was(toy, quantize, calibrated, tmp_path):
    store = calibrated(toy("llama"))
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            quantize(toy("llama"), tmp_path / f"{count}.safetensors", store=store)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert sha256(tmp_path / "1.safetensors") == sha256(tmp_path / "2.safetensors")


def test_shards_change_no_tensor(toy, quantize, tmp_path):
    quantize(toy("llama"), tmp_path / "single.safetensors")
    quantize(toy("llama", shard="300KB"), tmp_path / "shards.safetensors")
    a, b = (safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in ("single", "shards"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_header_holds_no_time_and_no_path_of_the_model_or_the_output(toy_copy, quantize, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        quantize(toy_copy("llama", f"{name}/model"), tmp_path / name / "out.safetensors")
        time.sleep(0.01)
    assert sha256(tmp_path / "one/out.safetensors") == sha256(tmp_path / "two/out.safetensors")


# ---- what is in the file


def test_the_file_holds_the_tensors_of_the_format(toy, quantized):
    directory, file = quantized("qwen2")  # biases on q, k, v
    stored = safetensors.torch.load_file(file)
    source = safetensors.torch.load_file(directory / "model.safetensors")
    names = [linear.name for linear in open_model(directory).linears]
    wanted = {}
    for name in names:
        n, k = source[f"{name}.weight"].shape
        wanted |= {
            f"{name}.qweight": (torch.uint8, (n, k // 2)),
            f"{name}.w_scales": (torch.float16, (n, k // 64)),
            f"{name}.proj_down": (torch.float16, (k, 16)),
            f"{name}.proj_up": (torch.float16, (n, 16)),
            f"{name}.smooth": (torch.float32, (k,)),
            f"{name}.act_clip": (torch.float32, ()),
        }
    replaced = {f"{name}.weight" for name in names}
    wanted |= {key: (value.dtype, tuple(value.shape)) for key, value in source.items() if key not in replaced}
    assert {key: (value.dtype, tuple(value.shape)) for key, value in stored.items()} == wanted


def test_case_10_every_other_source_tensor_and_every_bias_is_stored_unchanged(quantized):
    directory, file = quantized("gpt2")
    stored = safetensors.torch.load_file(file)
    source = safetensors.torch.load_file(directory / "model.safetensors")
    kept = [key for key in source if key in stored]
    assert {f"transformer.h.1.mlp.{leaf}.bias" for leaf in ("c_fc", "c_proj")} < set(kept)
    assert len(source) - len(kept) == 8  # the weights of the eight linears, nothing else
    assert all(torch.equal(source[key], stored[key]) and source[key].dtype == stored[key].dtype for key in kept)


def test_bfloat16_tensors_stay_bfloat16(toy, quantize, tmp_path):
    directory = toy("qwen2", dtype=torch.bfloat16)
    quantize(directory, tmp_path / "out.safetensors")
    source = safetensors.torch.load_file(directory / "model.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "out.safetensors")
    for key in ("model.norm.weight", "model.layers.0.self_attn.q_proj.bias", "model.embed_tokens.weight"):
        assert stored[key].dtype == torch.bfloat16 and torch.equal(stored[key], source[key])
    assert stored["model.layers.0.self_attn.q_proj.w_scales"].dtype == torch.float16


def test_the_stored_layers_reproduce_the_original_weights_output(quantized, original, stored_layer, distance):
    directory, file = quantized("llama")
    model = original(directory)
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    for name in ("model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        with torch.no_grad():
            wanted = model.get_submodule(name)(x)
        # 4-bit activations alone cost about 11 % on normal inputs; a wrong rotation or nibble order costs over 100 %
        assert distance(stored_layer(file, name)(x), wanted) < 0.25


def test_the_header_names_method_rank_groups_and_packing(quantized):
    config = metadata(quantized("llama")[1], "quantization_config")
    assert (config["quant_method"], config["method"], config["rank"]) == ("svdquant", "svdquant", 16)
    assert config["weight"] == {"dtype": "int4", "group_size": 64, "scale_dtype": "float16", "symmetric": True}
    assert config["activation"] == {"dtype": "int4", "group_size": 64, "dynamic": True, "symmetric": True}
    assert (config["smooth"], config["rotation"], config["ignore"]) == (True, "hadamard64", [])
    assert config["packing"] == {"layout": "canonical", "version": 1}


def test_the_header_holds_the_models_own_configuration(quantized):
    directory, file = quantized("llama")
    assert metadata(file, "config") == json.loads((directory / "config.json").read_text())


def test_the_header_counts_the_calibration_tokens(quantized):
    found = metadata(quantized("llama")[1], "svdq.calibration")
    assert (found["rows"], found["tokens"]) == (12, 12 * 64)


def test_tied_embeddings_are_stored_once_and_the_tie_is_recorded(quantized):
    _, file = quantized("llama")
    with safe_open(file, "pt") as opened:
        assert "lm_head.weight" not in opened.keys()  # noqa: SIM118
    assert metadata(file, "svdq.ties") == {"lm_head.weight": "model.embed_tokens.weight"}


def test_a_head_that_only_a_tied_configuration_hides_is_not_lost(toy_copy, quantize, tmp_path):
    directory = toy_copy("llama")
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    head = torch.ones(200, 128)
    safetensors.torch.save_file({**tensors, "lm_head.weight": head}, path, metadata={"format": "pt"})
    try:
        quantize(directory, tmp_path / "out.safetensors")
    except CheckpointError as error:
        assert "lm_head.weight" in str(error)
    else:
        assert torch.equal(safetensors.torch.load_file(tmp_path / "out.safetensors")["lm_head.weight"], head)


def test_linears_only_leaves_everything_else_out(quantized):
    _, file = quantized("qwen2", linears_only=True)
    leaves = {key.rpartition(".")[2] for key in safetensors.torch.load_file(file)}
    assert leaves == {"qweight", "w_scales", "proj_down", "proj_up", "smooth", "act_clip", "bias"}


def test_a_plain_preset_stores_neither_smoothing_nor_clip(quantized):
    leaves = {key.rpartition(".")[2] for key in safetensors.torch.load_file(quantized("llama", "plain")[1])}
    assert not leaves & {"smooth", "act_clip"}
    assert metadata(quantized("llama", "plain")[1], "quantization_config")["rotation"] == "none"


def test_an_override_lands_in_the_file_of_its_layers_alone(toy, quantize, tmp_path):
    config = QuantConfig(layer=LayerConfig(rounds=1), overrides=(("down_proj", {"rank": 32}),))
    quantize(toy("llama"), tmp_path / "out.safetensors", config)
    stored = safetensors.torch.load_file(tmp_path / "out.safetensors")
    ranks = {key.split(".")[-2]: value.shape[1] for key, value in stored.items() if key.endswith("proj_up")}
    others = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 16)
    assert ranks == {**others, "down_proj": 32}
    assert metadata(tmp_path / "out.safetensors", "svdq.layers")["model.layers.1.mlp.down_proj"]["rank"] == 32


def test_rank_0_stores_empty_factors(toy, quantize, tmp_path):
    quantize(toy("llama"), tmp_path / "out.safetensors", QuantConfig(layer=LayerConfig(rank=0)))
    stored = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert stored["model.layers.0.mlp.down_proj.proj_down"].shape == (192, 0)


def test_computed_tables_are_not_stored(quantized):
    assert not [key for key in safetensors.torch.load_file(quantized("llama")[1]) if "inv_freq" in key]


def test_ignored_linears_are_kept_and_listed(toy, quantize, tmp_path):
    directory = toy("llama")
    quantize(directory, tmp_path / "out.safetensors", QuantConfig(layer=FAST.layer, ignore=("o_proj",)))
    source = safetensors.torch.load_file(directory / "model.safetensors")
    stored = safetensors.torch.load_file(tmp_path / "out.safetensors")
    names = [f"model.layers.{b}.self_attn.o_proj" for b in range(2)]
    assert all(torch.equal(stored[f"{name}.weight"], source[f"{name}.weight"]) for name in names)
    assert metadata(tmp_path / "out.safetensors", "quantization_config")["ignore"] == names


def test_case_19_ignoring_layers_1_does_not_touch_layers_10(toy):
    model = open_model(toy("llama", num_hidden_layers=12))
    plan = preflight.plan(model, QuantConfig(ignore=("layers.1",)))
    assert {name.split(".")[2] for name in plan.left_16bit} == {"1"}
    assert {linear.block for linear in plan.linears} == set(range(12)) - {1}


# ---- the plan


def test_the_plan_knows_the_output_size(toy, quantize, tmp_path):
    model = open_model(toy("qwen2"))
    quantize(toy("qwen2"), tmp_path / "out.safetensors")
    plan = preflight.plan(model, FAST)
    size = (tmp_path / "out.safetensors").stat().st_size
    assert 0 < size - plan.output_bytes < 40_000  # the header: about 110 tensors and the report


SHAPES = {  # measured with benchmarks/scale.py on an H200: (hidden, q, kv, MLP), bytes
    "qwen3-0.6b": ((1024, 2048, 1024, 3072), 1.39e9),
    "llama-8b": ((4096, 4096, 1024, 14336), 14.01e9),
}


@pytest.mark.parametrize(("sizes", "measured"), SHAPES.values(), ids=SHAPES)
def test_memory_is_estimated_within_a_fifth_of_what_was_measured(monkeypatch, sizes, measured):
    hidden, q, kv, wide = sizes
    linears = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
               "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
               "mlp.down_proj": (hidden, wide)}  # fmt: skip
    block = [Linear(name, name, 0, n, k, False, False) for name, (n, k) in linears.items()]
    monkeypatch.setattr(preflight, "compute_dtype", lambda model, device: torch.bfloat16)
    cuda, model = torch.device("cuda"), SimpleNamespace(linears=block)
    needed = preflight.calibration_bytes(model, block, 64 * 512, cuda), preflight.quantization_bytes(block, cuda)
    assert max(needed) == pytest.approx(measured, rel=0.2)


def test_a_run_reports_its_peak(toy, quantize, tmp_path):
    summary = quantize(toy("llama"), tmp_path / "out.safetensors")
    assert 1e8 < summary.peak_bytes < 1e11  # of this whole process


@pytest.mark.parametrize(("option", "config"), [
    ("--ignore 'layers.7'", QuantConfig(ignore=("layers.7",))),
    ("--only 'qproj'", QuantConfig(only=("o_proj", "qproj"))),
    ("--override 'wo'", QuantConfig(overrides=(("wo", {"rank": 4}),))),
    ("--ignore 're:x{3}y'", QuantConfig(ignore=("re:x{3}y",))),
    ("--ignore ''", QuantConfig(ignore=("",))),
])  # fmt: skip
def test_a_pattern_that_matches_nothing_is_named(toy, option, config):
    with pytest.raises(ConfigError, match="matches none of the 14 linears") as caught:
        preflight.plan(open_model(toy("llama")), config)
    assert str(caught.value).startswith(option)


def test_patterns_that_leave_nothing_are_refused(toy):
    with pytest.raises(ConfigError, match="leave no linear"):
        preflight.plan(open_model(toy("llama")), QuantConfig(only=("q_proj",), ignore=("self_attn",)))


def test_a_rank_beyond_a_linears_size_is_named(toy):
    with pytest.raises(ConfigError, match=r"self_attn\.k_proj: rank 100 exceeds its size 64 x 128"):
        preflight.plan(open_model(toy("llama")), QuantConfig(layer=LayerConfig(rank=100)))


@pytest.mark.parametrize(("make", "words"), [
    (lambda at: at.mkdir(), "a directory"),
    (lambda at: None, "no such directory"),
    (lambda at: at.parent.write_text(""), "no such directory"),
])  # fmt: skip
def test_an_output_path_that_cannot_be_one_is_refused(tmp_path, make, words):
    out = tmp_path / "out" if words == "a directory" else tmp_path / "missing" / "out"
    make(out)
    with pytest.raises(CheckpointError, match=words):
        preflight.check_output(out, 1)


def test_too_small_a_disk_states_free_and_needed(tmp_path):
    with pytest.raises(CheckpointError, match=r"MiB free, .*1,099,511,627,776 MiB"):
        preflight.check_output(tmp_path / "out", 2**60)


def test_the_source_file_is_not_overwritten(toy_copy, quantize):
    directory = toy_copy("llama")
    source = directory / "model.safetensors"
    before = sha256(source)
    with pytest.raises((CheckpointError, ConfigError), match=r"model\.safetensors"):
        quantize(directory, source)
    assert sha256(source) == before


# ---- stores


def test_the_store_of_another_model_is_refused(toy, quantize, calibrated, tmp_path):
    store = calibrated(toy("llama"))
    with pytest.raises(ConfigError, match="another model"):
        quantize(toy("llama", num_hidden_layers=12), tmp_path / "out.safetensors", store=store)


def test_the_store_of_other_weights_of_the_same_shapes_is_refused(toy, toy_copy, quantize, calibrated, tmp_path):
    store = calibrated(toy("llama"))
    other = toy_copy("llama", "finetuned")
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.5
    safetensors.torch.save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="another model"):
        quantize(other, tmp_path / "out.safetensors", store=store)


def test_a_store_without_a_selected_linear_names_it(toy, quantize, calibrated, tmp_path):
    linears = [linear for linear in open_model(toy("llama")).linears if not linear.name.endswith("o_proj")]
    store = calibrated(toy("llama"), linears=linears)
    with pytest.raises(ConfigError, match=r"without model\.layers\.0\.self_attn\.o_proj"):
        quantize(toy("llama"), tmp_path / "out.safetensors", store=store)


def test_a_store_of_another_configuration_is_not_mixed(toy, calibrated, calibration_ids, read_ids, tmp_path):
    calibrated(toy("llama"))
    with pytest.raises(ConfigError, match=r"config\.smoothing: wanted 0\.5, found 0\.75"):
        pipeline.calibrate(
            open_model(toy("llama")), tmp_path / "store", read_ids(calibration_ids), CalibrationConfig(smoothing=0.5)
        )


def test_a_finished_store_is_not_computed_again(toy, calibrated, tmp_path):
    calibrated(toy("llama"))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    calibrated(toy("llama"))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == before


def test_a_directory_with_other_content_is_no_place_for_a_store(toy, calibrated, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("dear")
    with pytest.raises(CheckpointError, match="not empty"):
        calibrated(toy("llama"))


# ---- the work directory


def test_nothing_but_the_output_is_left(toy, quantize, tmp_path):
    quantize(toy("llama"), tmp_path / "out.safetensors")
    assert visible(tmp_path) == ["out.safetensors"]


def test_a_directory_of_the_users_in_the_works_place_is_not_deleted(toy, quantize, tmp_path):
    theirs = tmp_path / "out.safetensors.work"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("dear")
    with pytest.raises((CheckpointError, ConfigError), match="work"):
        quantize(toy("llama"), tmp_path / "out.safetensors")
    assert (theirs / "thesis.tex").read_text() == "dear"


class Stopped(Exception):
    pass


def stop_after(blocks):
    def progress(stage, done, total):
        if stage == "quantize" and done == blocks:
            raise Stopped

    return progress


@pytest.mark.parametrize(("field", "config"), [
    ("config.layer.rank", QuantConfig(layer=LayerConfig(rank=4, rounds=1))),
    ("config.ignore", QuantConfig(layer=FAST.layer, ignore=("o_proj",))),
    ("config.linears_only", QuantConfig(layer=FAST.layer, linears_only=True)),
])  # fmt: skip
def test_resuming_with_another_configuration_names_the_field(toy, quantize, tmp_path, field, config):
    out = tmp_path / "out.safetensors"
    with pytest.raises(Stopped):
        quantize(toy("llama"), out, progress=stop_after(1))
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        quantize(toy("llama"), out, config)
    assert visible(tmp_path) == ["out.safetensors.work"]


def test_a_failure_in_mid_run_leaves_finished_blocks_and_resumes_to_the_same_bytes(toy, quantize, tmp_path):
    directory = toy("llama", num_hidden_layers=4)
    quantize(directory, tmp_path / "whole.safetensors")
    out = tmp_path / "out.safetensors"
    with pytest.raises(Stopped):
        quantize(directory, out, progress=stop_after(2))
    assert not out.exists()
    summary = quantize(directory, out)
    assert summary.resumed_blocks == 2
    assert sha256(out) == sha256(tmp_path / "whole.safetensors")


def test_an_older_output_stays_until_the_new_one_is_whole(toy, quantize, tmp_path):
    out = tmp_path / "out.safetensors"
    out.write_bytes(b"older")
    with pytest.raises(Stopped):
        quantize(toy("llama"), out, progress=stop_after(2))
    assert out.read_bytes() == b"older"


# ---- killed, interrupted, out of disk: in processes of their own

_KILLED = """
import os, signal, sys
from svdq import pipeline, preflight
from svdq.calibration.data import load_tokens
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.models import Linear, open_model

what, directory, ids, out = sys.argv[1:]
def progress(stage, done, total):
    if stage == what and done == 2:
        os.kill(os.getpid(), signal.SIGKILL)
model, tokens = open_model(directory), load_tokens(ids, None, samples=10_000, seq_len=4096, min_tokens=1, seed=0)
if what == "calibrate":
    pipeline.calibrate(model, out, tokens, CalibrationConfig(), progress=progress)
else:
    config = QuantConfig(layer=LayerConfig(rank=8, rounds=1))
    pipeline.quantize(model, out, config, data=tokens, calibration=CalibrationConfig(), progress=progress)
"""


def test_case_12_a_killed_run_resumes_to_the_bytes_of_an_uninterrupted_one(
    toy, quantize, python, calibration_ids, tmp_path
):
    directory = toy("llama", num_hidden_layers=4)
    quantize(directory, tmp_path / "whole.safetensors")
    out = tmp_path / "out.safetensors"
    assert python(_KILLED, "quantize", directory, calibration_ids, out).returncode == -signal.SIGKILL
    assert not out.exists()
    work = visible(tmp_path / "out.safetensors.work")
    assert [name for name in work if name.startswith("block")] == [f"block-0000{b}.safetensors" for b in (0, 1)]
    assert quantize(directory, out).resumed_blocks == 2
    assert sha256(out) == sha256(tmp_path / "whole.safetensors")
    assert visible(tmp_path) == ["out.safetensors", "whole.safetensors"]


def test_a_killed_calibration_resumes_to_the_bytes_of_an_uninterrupted_one(
    toy, calibrated, python, calibration_ids, tmp_path
):
    directory = toy("llama", num_hidden_layers=4)
    calibrated(directory, "whole")
    assert python(_KILLED, "calibrate", directory, calibration_ids, tmp_path / "store").returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match="unfinished"):
        Store.open(tmp_path / "store")
    calibrated(directory, "store")
    wanted = {path.name: sha256(path) for path in (tmp_path / "whole").iterdir()}
    assert {path.name: sha256(path) for path in (tmp_path / "store").iterdir()} == wanted


_CLI = "import sys; from svdq.cli.main import main; main(sys.argv[1:])"


def test_ctrl_c_exits_130_with_one_line_and_leaves_the_work_directory_alone(toy, calibration_ids, tmp_path):
    out = tmp_path / "out.safetensors"
    slow = ["--svd", "exact", "--sweeps", "20"]  # so that there is time left after the first block
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    arguments = ["quantize", toy("llama", num_hidden_layers=24), out, *data, *slow]
    process = subprocess.Popen(
        [sys.executable, "-c", _CLI, *map(str, arguments)],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    first = tmp_path / "out.safetensors.work" / "block-00000.safetensors"
    deadline = time.monotonic() + 60
    while not first.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (line,) = err.split("\n")[-2:-1]
    assert "interrupted" in line and not err.removesuffix(line + "\n").strip()
    assert visible(tmp_path) == ["out.safetensors.work"]
    assert not [name for name in visible(first.parent) if name.endswith(".tmp")]


@contextmanager
def small_disk(limit):
    """No file of this process grows beyond `limit` bytes, as `ulimit -f` has it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_case_13_a_full_disk_is_one_line_leaves_no_half_file_and_is_resumed(
    toy, quantize, svdq, refused, calibration_ids, tmp_path
):
    out = tmp_path / "out.safetensors"
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    arguments = ["quantize", toy("llama"), out, *data, "--rank", "8", "--rounds", "1"]
    with small_disk(200_000):  # more than a block of 120 kB, less than the output of 390 kB
        assert str(out) in refused(*arguments)
    assert visible(tmp_path) == ["out.safetensors.work"]
    resumed = svdq(*arguments)
    assert resumed.code == 0, resumed.err
    assert "resumed: 2 blocks" in resumed.out
    quantize(toy("llama"), tmp_path / "whole.safetensors")
    a, b = (safetensors.torch.load_file(path) for path in (out, tmp_path / "whole.safetensors"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def test_a_disk_that_fills_within_a_block_leaves_no_half_block(toy, refused, calibration_ids, tmp_path):
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    with small_disk(30_000):
        message = refused("calibrate", toy("llama"), "-o", tmp_path / "store", *data)
    assert "block-00000.safetensors" in message
    assert visible(tmp_path / "store") == ["manifest.json", "tokens.safetensors"]


class _TooLarge:
    """Asks torch for 2⁵⁵ bytes, so that the error is the real one."""

    def __call__(self, *_arguments, **_options):
        torch.empty(1 << 55, dtype=torch.uint8)


@pytest.mark.parametrize("fails", [_TooLarge(), lambda *a, **o: bytearray(1 << 62)], ids=["torch", "python"])
def test_too_little_memory_is_one_line(toy, refused, calibration_ids, tmp_path, monkeypatch, fails):
    monkeypatch.setattr(pipeline, "quantize", fails)
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    assert "out of memory" in refused("quantize", toy("llama"), tmp_path / "out.safetensors", *data)


def test_a_dry_run_estimates_disk_and_memory_and_writes_nothing(toy, svdq, tmp_path):
    result = svdq("quantize", toy("qwen2"), tmp_path / "out.safetensors", "--dry-run")
    assert result.code == 0
    assert "14 linears to quantize, 0 left in 16 bits" in result.out
    for word in ("output", "work directory", "memory"):
        assert word in result.out
    assert visible(tmp_path) == []


def test_a_wide_model_is_taken_one_site_at_a_time_with_the_callers_threads(toy, quantize, tmp_path, monkeypatch):
    before, used = torch.get_num_threads(), []
    original = pipeline.quantize_site

    def seen(*arguments):
        used.append(arguments[-1])
        return original(*arguments)

    monkeypatch.setattr(pipeline, "quantize_site", seen)
    quantize(toy("llama"), tmp_path / "narrow")
    torch.set_num_threads(2)
    try:
        monkeypatch.setattr(pipeline, "WIDE", 64)
        quantize(toy("llama"), tmp_path / "wide")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(used[: len(used) // 2]) == {1} and set(used[len(used) // 2 :]) == {2}
    narrow, wide = (safetensors.torch.load_file(tmp_path / name) for name in ("narrow", "wide"))
    assert narrow.keys() == wide.keys()
