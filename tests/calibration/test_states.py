"""Hidden states between blocks: bounded in memory, on disk beyond that, and the same numbers wherever they lie."""

import json
import shutil
import signal
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from svdq import pipeline, preflight
from svdq.calibration import capture
from svdq.calibration import store as stores
from svdq.calibration.states import Room, States
from svdq.calibration.statistics import SumAccumulator
from svdq.calibration.store import Store
from svdq.cli.options import _Size
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.errors import CheckpointError
from svdq.models import open_model

CPU = torch.device("cpu")
FAST = QuantConfig(layer=LayerConfig(rank=8, rounds=1))
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def files(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def open_in(directory):
    """Open files of this process under a directory, as the system names them: one without a name is '… (deleted)'."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link for link in links if link.startswith(str(directory))]


@pytest.fixture
def small_batches(monkeypatch):
    """Twelve sequences of 64 tokens are six batches; states of one batch of 128 channels are 64 KiB."""
    monkeypatch.setattr(pipeline, "TOKENS_PER_BATCH", 128)


@pytest.mark.parametrize("limit", [None, 0, 2500])
def test_states_come_back_as_they_were_from_memory_and_from_disk(tmp_path, limit):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 8, 64), (2, 3, 64), (1, 1, 64), (4, 64)]
    given = [torch.randn(shape, generator=generator).to(t) for t in (torch.float32, torch.bfloat16) for shape in shapes]
    given.append(torch.randn(64, 7, generator=generator).t())
    states = States(Room(CPU, limit, tmp_path))
    for one in given:
        states.append(one)
    assert len(states) == 9 and states.nbytes == sum(one.nbytes for one in given)
    assert states.tokens == 2 * (8 + 6 + 1 + 4) + 7
    for order in (range(9), (8, 3, 0, 5)):
        for index in order:
            assert states[index].dtype == given[index].dtype and torch.equal(states[index], given[index])
    assert all(torch.equal(a, b) for a, b in zip(states, given, strict=True))
    assert list(tmp_path.iterdir()) == []  # what is on disk has no name


@linux_only
def test_what_fits_stays_in_memory_and_comes_back_when_the_states_are_gone(tmp_path):
    room = Room(CPU, 1000, tmp_path)
    first, second = States(room), States(room)
    first.append(torch.zeros(200))
    first.append(torch.zeros(100))  # 400 bytes where 200 are left
    first.append(torch.zeros(50))
    assert room.spare(0) == 0
    second.append(torch.zeros(1))
    assert len(open_in(tmp_path)) == 2
    del first
    assert room.spare(300) == 700 and len(open_in(tmp_path)) == 1
    second.append(torch.zeros(250))
    assert room.spare(0) == 0


@pytest.mark.parametrize("kind", ["llama", "albert"])  # the second visits one block three times
def test_the_store_has_the_same_bytes_with_and_without_a_limit(
    toy, calibration_ids, read_ids, tmp_path, small_batches, kind
):
    stores = {}
    for limit in (None, 0, 150_000):
        out = tmp_path / str(limit)
        pipeline.calibrate(
            open_model(toy(kind)), out, read_ids(calibration_ids), CalibrationConfig(), max_host_memory=limit
        )
        stores[limit] = files(out)
    assert stores[0] == stores[None] and stores[150_000] == stores[None]


def test_the_file_has_the_same_bytes_with_and_without_a_limit(
    toy, calibration_ids, read_ids, tmp_path, small_batches, monkeypatch
):
    written, original = [], States._write
    monkeypatch.setattr(
        States, "_write", lambda self, states: (written.append(states.nbytes), original(self, states))[1]
    )
    found = {}
    for limit in (None, 100_000):
        out = tmp_path / str(limit)
        pipeline.quantize(
            open_model(toy("llama")), out, FAST, data=read_ids(calibration_ids), calibration=CalibrationConfig(),
            max_host_memory=limit,
        )  # fmt: skip
        found[limit] = out.read_bytes()
    assert found[100_000] == found[None]
    # Six batches three times: what the first block reads, what it makes, what the second makes. One batch finds room,
    # and finds it again once the first six are gone.
    assert written == [65536] * (5 + 6 + 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100000", "None"]


_KILLED = """
import os, signal, sys
from svdq import pipeline
from svdq.calibration.data import load_tokens
from svdq.config import CalibrationConfig
from svdq.models import open_model

directory, ids, out = sys.argv[1:]
def progress(stage, done, total):
    if done == 2:
        links = [os.readlink(e.path) for e in os.scandir("/proc/self/fd") if os.path.islink(e.path)]
        print([link for link in links if link.startswith(out)], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
tokens = load_tokens(ids, None, samples=10_000, seq_len=4096, min_tokens=1, seed=0)
pipeline.calibrate(open_model(directory), out, tokens, CalibrationConfig(), progress=progress, max_host_memory=0)
"""


@linux_only
def test_a_killed_run_leaves_no_states_and_the_next_ends_with_the_same_bytes(
    toy, python, calibration_ids, read_ids, tmp_path
):
    directory = toy("llama", num_hidden_layers=4)
    killed = python(_KILLED, directory, calibration_ids, tmp_path / "store")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert "(deleted)" in killed.stdout  # the states were there, in files without a name
    kept = {"manifest.json", "tokens.safetensors", "block-00000.safetensors", "block-00001.safetensors"}
    assert set(files(tmp_path / "store")) == kept
    for name in ("store", "whole"):
        pipeline.calibrate(
            open_model(directory), tmp_path / name, read_ids(calibration_ids), CalibrationConfig(),
            max_host_memory=0 if name == "store" else None,
        )  # fmt: skip
    assert files(tmp_path / "store") == files(tmp_path / "whole")


@linux_only
@pytest.mark.parametrize("stop", [KeyboardInterrupt, CheckpointError], ids=["Ctrl-C", "an error"])
def test_an_interrupted_run_leaves_no_states(toy, calibration_ids, read_ids, tmp_path, stop):
    store, seen = tmp_path / "store", []

    def progress(stage, done, total):
        if done == 1:
            seen.extend(open_in(store))
            raise stop

    def interrupted():
        with pytest.raises(stop):
            pipeline.calibrate(
                open_model(toy("llama")), store, read_ids(calibration_ids), CalibrationConfig(), progress=progress,
                max_host_memory=0,
            )  # fmt: skip

    interrupted()
    assert len(seen) == 2  # the first block's inputs and outputs
    assert open_in(store) == []
    assert set(files(store)) == {"manifest.json", "tokens.safetensors", "block-00000.safetensors"}


def test_a_disk_too_small_for_the_states_is_found_before_any_work(toy, refused, calibration_ids, tmp_path, monkeypatch):
    needed = 2 * 768 * 128 * 4  # inputs and outputs of a block, 768 tokens of 128 channels, float32
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - 1))
    data = ["--data", calibration_ids, "--min-tokens", "1", "--max-host-memory", "0", "--only", "layers.0.self_attn"]
    for command in (["calibrate", toy("llama"), "-o", tmp_path / "out"], ["quantize", toy("llama"), tmp_path / "out"]):
        assert f"{needed / 2**20:,.0f} MiB" in refused(
            *command, *data, *(["--linears-only"] * (command[0] == "quantize"))
        )
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_on_the_way_is_one_line(toy, calibration_ids, read_ids, tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"store: cannot hold the hidden states: .*--max-host-memory"):
            pipeline.calibrate(
                open_model(toy("llama")), tmp_path / "store", read_ids(calibration_ids), CalibrationConfig(),
                max_host_memory=0,
            )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_PEAK = """
import json, sys, torch
from svdq import pipeline, preflight
from svdq.profiling import peak_bytes
from svdq.calibration.data import TokenData
from svdq.config import CalibrationConfig
from svdq.models import open_model

directory, out, limit = sys.argv[1:]
limit = json.loads(limit)
model = open_model(directory)
rows = list(torch.randint(200, (6000, 64), generator=torch.Generator().manual_seed(0)))
total = 64 * len(rows)
data = TokenData(rows, "random", len(rows), 0, len(rows), total, total)
linears = [linear for linear in model.linears if linear.name.endswith("q_proj")]
pipeline.calibrate(model, out, data, CalibrationConfig(), linears=linears, max_host_memory=limit)
estimated = preflight.calibration_bytes(model, linears, total, torch.device("cpu"), limit)
print(json.dumps([peak_bytes("cpu"), estimated]))
"""


@linux_only
def test_the_peak_is_bounded_by_the_limit_and_is_what_was_estimated(toy, python, tmp_path):
    directory = toy("llama", hidden_size=64, intermediate_size=64, num_attention_heads=1, num_hidden_layers=1)
    found = {}
    for limit in (None, 10_000_000):
        ran = python(_PEAK, directory, tmp_path / str(limit), json.dumps(limit))
        assert ran.returncode == 0, ran.stderr
        found[limit] = json.loads(ran.stdout.splitlines()[-1])
    (free, free_estimate), (bounded, bounded_estimate) = found.values()
    assert free == pytest.approx(free_estimate, rel=0.2)
    assert bounded == pytest.approx(bounded_estimate, rel=0.2)
    # Without Python and its libraries, the same in both: states of 98 MB twice, and as much kept of what q_proj read.
    assert free - bounded == pytest.approx(free_estimate - bounded_estimate, rel=0.2)
    assert free_estimate - bounded_estimate == pytest.approx(3 * 384_000 * 64 * 4 - 10e6, rel=0.01)
    assert files(tmp_path / "None") == files(tmp_path / "10000000")


def test_a_dry_run_says_where_the_states_will_lie(toy, svdq, tmp_path):
    report = tmp_path / "report.json"
    command = ["quantize", toy("llama"), tmp_path / "out", "--dry-run", "--device", "cpu", "--json", report]
    result = svdq(*command, "--samples", 1000, "--seq-len", 100, "--max-host-memory", "0.06 GB")
    assert "activations between blocks, about: 60.0 MB in host memory, 42.4 MB on disk" in result.out
    numbers = json.loads(report.read_text())
    assert numbers["hidden_bytes"] == {"device": 0, "host": 60_000_000, "disk": 2 * 100_000 * 512 - 60_000_000}
    svdq(*command, "--samples", 1000, "--seq-len", 100)
    free = json.loads(report.read_text())
    assert free["hidden_bytes"] == {"device": 0, "host": 2 * 100_000 * 512, "disk": 0}
    # what is kept for the second pass goes as well: inputs of attention, of gate and up, and of down
    fewer = free["memory_bytes"]["calibrate"] - numbers["memory_bytes"]["calibrate"]
    kept = 100_000 * 4 * (2 * 128 + 192)
    assert fewer == pytest.approx(42_400_000 + kept, rel=0.02)


def test_on_a_gpu_states_go_to_the_host_once_they_are_many(toy):
    model = open_model(toy("llama", dtype=torch.bfloat16))
    both = 2 * 10**7 * 128 * 2  # bytes of 10⁷ tokens in bfloat16, before and after a block
    found = preflight.hidden_bytes(model, model.linears, 10**7, torch.device("cuda"), 10**9)
    assert found == (2 << 30, 10**9, both - (2 << 30) - 10**9)
    assert preflight.hidden_bytes(model, model.linears, 10**5, torch.device("cuda"), 0) == (both // 100, 0, 0)


@pytest.mark.parametrize(("text", "wanted"), [
    ("0", 0), ("1500", 1500), ("2k", 2000), ("8G", 8 * 10**9), ("1.5GB", 15 * 10**8), ("8GiB", 8 << 30),
    ("16 gi", 16 << 30), ("1T", 10**12),
])  # fmt: skip
def test_a_size_is_read_with_its_unit(text, wanted):
    assert _Size().convert(text, None, None) == wanted


@pytest.mark.parametrize("text", ["", "-1", "8X", "8iB", "G", "1e9", "8 G G"])
def test_what_is_no_size_is_refused(toy, refused, calibration_ids, tmp_path, text):
    line = refused(
        "calibrate", toy("llama"), "-o", tmp_path / "s", "--data", calibration_ids, "--max-host-memory", text
    )
    assert "is no size" in line


def test_a_limit_beside_a_store_is_refused(toy, refused, tmp_path):
    line = refused("quantize", toy("llama"), tmp_path / "out", "--calib", tmp_path / "s", "--max-host-memory", "1G")
    assert "--max-host-memory" in line


def test_float64_sums_are_those_of_one_site_at_a_time(toy, calibration_ids, read_ids, tmp_path, monkeypatch):
    alive, most = set(), []

    class Counted(SumAccumulator):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            alive.add(id(self))
            most.append(len(alive))

        def finish(self, *arguments):
            sums = super().finish(*arguments)
            assert self.xx.dtype == self.xq.dtype == self.qq.dtype == torch.float32
            alive.remove(id(self))
            return sums

    monkeypatch.setattr(capture, "SumAccumulator", Counted)
    pipeline.calibrate(open_model(toy("llama")), tmp_path / "s", read_ids(calibration_ids), CalibrationConfig())
    assert most == [1] * 8  # two blocks of four sites


def test_sums_go_when_their_site_is_quantized(toy, calibration_ids, read_ids, tmp_path, monkeypatch):
    left, original = [], pipeline.write_block

    def write_block(the_plan, block, sums, *rest):
        left.append(dict(sums.sums))
        return original(the_plan, block, sums, *rest)

    monkeypatch.setattr(pipeline, "write_block", write_block)
    pipeline.quantize(
        open_model(toy("llama")), tmp_path / "out", FAST, data=read_ids(calibration_ids),
        calibration=CalibrationConfig(),
    )  # fmt: skip
    assert left == [{}, {}]


def test_a_block_is_written_while_the_next_is_recorded_and_counts_when_it_is_there(
    toy, calibration_ids, read_ids, tmp_path, monkeypatch
):
    begun, recorded, original, write = threading.Event(), [], pipeline.record_block, Store.write

    def record_block(*arguments):
        if recorded:
            assert begun.wait(30) and not store.joinpath("block-00000.safetensors").exists()
        recorded.append(original(*arguments))
        allowed.release()
        return recorded[-1]

    def slow_write(self, *arguments):
        begun.set()
        assert allowed.acquire(timeout=30) and allowed.acquire(timeout=30)  # both blocks are recorded
        allowed.release(2)
        write(self, *arguments)

    def progress(stage, done, total):
        assert len(list(store.glob("block-*"))) >= done

    allowed, store = threading.Semaphore(0), tmp_path / "store"
    monkeypatch.setattr(pipeline, "record_block", record_block)
    monkeypatch.setattr(Store, "write", slow_write)
    pipeline.calibrate(
        open_model(toy("llama")), store, read_ids(calibration_ids), CalibrationConfig(), progress=progress
    )
    assert len(recorded) == 2 and Store.open(store).has(1)


def test_large_sums_are_gone_before_the_next_are_taken(toy, calibration_ids, read_ids, tmp_path, monkeypatch):
    before, original = [], pipeline.record_block

    def record_block(*arguments):
        assert not [reference for reference in before if reference() is not None]
        result = original(*arguments)
        before.extend(weakref.ref(sums) for sums in result.sums.values())
        return result

    monkeypatch.setattr(pipeline, "record_block", record_block)
    monkeypatch.setattr(stores, "BEHIND_BYTES", 0)
    pipeline.calibrate(open_model(toy("llama")), tmp_path / "s", read_ids(calibration_ids), CalibrationConfig())
    assert len(before) == 8
