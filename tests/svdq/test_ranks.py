"""Several processes on one job, over gloo: the same bytes, the same sums, and an end for all when one of them ends."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from svdq.config import CalibrationConfig, QuantConfig
from svdq.errors import ConfigError
from svdq.models import open_model
from svdq.pipeline import calibrate, quantize
from svdq.ranks import Ranks, RanksError

BLOCKS = 7


@pytest.fixture(scope="module")
def model(toy):
    return toy("llama", num_hidden_layers=BLOCKS)


@pytest.fixture(scope="module")
def store(model, calibration_ids, tmp_path_factory):
    out = tmp_path_factory.mktemp("store") / "calibration"
    assert alone("calibrate", model, "-o", out, "--data", calibration_ids, "--min-tokens", "1") == 0
    return out


@pytest.fixture(scope="module")
def by_one(model, store, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "out.safetensors"
    assert alone("quantize", model, out, "--calib", store) == 0
    return out.read_bytes()


def command(*arguments):
    return [sys.executable, "-m", "svdq.cli.main", *map(str, arguments), "--device", "cpu"]


def alone(*arguments):
    return subprocess.run(command(*arguments, "-q"), cwd="/", check=False).returncode


class Job:
    """The same command in `count` processes, started as a launcher does; `errors` is what all of them printed."""

    def __init__(self, folder, count, *arguments, wrapped=None):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        common = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        self.printed = [folder / f"rank-{rank}.txt" for rank in range(count)]
        self.processes = []
        for rank, printed in enumerate(self.printed):
            environment = {**os.environ, **{name: str(value) for name, value in common.items()}, "RANK": str(rank)}
            line = command(*arguments) if wrapped is None else [sys.executable, wrapped, *command(*arguments)[3:]]
            with printed.open("w") as file:
                self.processes.append(
                    subprocess.Popen(line, cwd="/", env=environment, stdout=file, stderr=subprocess.STDOUT)
                )

    def wait(self, seconds=120):
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()

    def messages(self):
        """Lines that svdq wrote as errors, of all ranks; torch's own warnings are not svdq's."""
        lines = [line for printed in self.printed for line in printed.read_text().splitlines()]
        assert not [line for line in lines if "Traceback" in line], lines
        return [line for line in lines if line.startswith("svdq:")]


@pytest.mark.parametrize("count", [2, 3])
def test_several_ranks_write_the_bytes_of_one(model, store, by_one, tmp_path, count):
    out, report = tmp_path / "out.safetensors", tmp_path / "report.json"
    job = Job(tmp_path, count, "quantize", model, out, "--calib", store, "--json", report)
    assert job.wait() == [0] * count, job.messages()
    assert out.read_bytes() == by_one
    assert len(json.loads(report.read_text())["layers"]) == 7 * BLOCKS
    assert not (tmp_path / "out.safetensors.work").exists()
    told = [printed.read_text() for printed in job.printed]
    assert "49 linears" in told[0] and not any("linears" in text for text in told[1:])  # rank 0 alone speaks


def test_the_sums_of_several_ranks_are_those_of_one(model, store, calibration_ids, tmp_path):
    out = tmp_path / "calibration"
    job = Job(tmp_path, 3, "calibrate", model, "-o", out, "--data", calibration_ids, "--min-tokens", "1")
    assert job.wait() == [0] * 3, job.messages()
    for name in sorted(path.name for path in store.iterdir() if path.name.startswith("block")):
        wanted, found = load_file(store / name), load_file(out / name)
        assert wanted.keys() == found.keys()
        for key, tensor in wanted.items():
            if key.endswith((".tokens", ".absmax")):
                assert torch.equal(found[key], tensor)
            else:
                assert (found[key] - tensor).norm() <= 1e-5 * tensor.norm(), key
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (store, out)]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("count", [2, 3])
def test_several_ranks_calibrate_on_the_way_with_the_bytes_of_their_store(model, calibration_ids, tmp_path, count):
    out, again, data = (
        tmp_path / "out.safetensors",
        tmp_path / "again",
        ["--data", calibration_ids, "--min-tokens", "1"],
    )
    job = Job(tmp_path, count, "calibrate", model, "-o", tmp_path / "store", *data)
    assert job.wait() == [0] * count, job.messages()
    assert alone("quantize", model, out, "--calib", tmp_path / "store") == 0
    wanted = out.read_bytes()
    if count == 3:  # one of them is killed first
        wrapper = tmp_path / "wrapper.py"
        wrapper.write_text(WRAPPER.replace("SIGSTOP", "SIGKILL"))
        job = Job(tmp_path, count, "quantize", model, again, *data, wrapped=wrapper)
        assert job.processes[1].wait(60) == -signal.SIGKILL
        assert [job.processes[rank].wait(60) for rank in (0, 2)] == [2, 2]
        assert len(job.messages()) == 1 and not again.exists()
        assert len(list((tmp_path / "again.work").glob("block-*.safetensors"))) >= 1
    job = Job(tmp_path, count, "quantize", model, again, *data)
    assert job.wait() == [0] * count, job.messages()
    assert again.read_bytes() == wanted


def test_torchrun_starts_it(model, store, by_one, tmp_path):
    out = tmp_path / "out.safetensors"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line = [*launcher, *command("quantize", model, out, "--calib", store)[1:]]
    done = subprocess.run(line, cwd="/", capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert out.read_bytes() == by_one


WRAPPER = """
import os, signal, sys
from svdq import pipeline
from svdq.cli.main import main
original = pipeline.write_block
written = []
def write_block(*arguments):
    original(*arguments)
    written.append(arguments)
    if os.environ["RANK"] == "1" and len(written) == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
pipeline.write_block = write_block
main(sys.argv[1:])
"""


def test_a_rank_that_hangs_ends_the_job_and_one_process_goes_on_to_the_same_bytes(model, store, by_one, tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    out = tmp_path / "out.safetensors"
    job = Job(tmp_path, 3, "quantize", model, out, "--calib", store, "--timeout", "4", wrapped=wrapper)
    codes = []
    for rank in (0, 2):
        codes.append(job.processes[rank].wait(60))
    assert codes[0] == 2 and not out.exists()
    assert len(job.messages()) == 1
    assert re.search(r"of 7 blocks are quantized, and nothing new for 4 seconds", job.messages()[0])
    job.processes[1].kill()
    kept = list((tmp_path / "out.safetensors.work").glob("block-*.safetensors"))
    assert 0 < len(kept) < BLOCKS
    assert alone("quantize", model, out, "--calib", store) == 0
    assert out.read_bytes() == by_one


def test_a_rank_that_dies_while_sums_are_taken_ends_the_job_and_the_store_is_resumed(
    model, store, calibration_ids, tmp_path
):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, signal, sys\nfrom svdq import pipeline\nfrom svdq.cli.main import main\n"
        "original = pipeline.record_block\nseen = []\n"
        "def record_block(*arguments):\n    seen.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(seen) == 3:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return original(*arguments)\n"
        "pipeline.record_block = record_block\nmain(sys.argv[1:])\n"
    )
    out = tmp_path / "calibration"
    data = ["--data", calibration_ids, "--min-tokens", "1"]
    job = Job(tmp_path, 2, "calibrate", model, "-o", out, *data, "--timeout", "20", wrapped=wrapper)
    codes = job.wait()
    assert codes[0] == 2 and codes[1] == -signal.SIGKILL
    assert len(job.messages()) == 1 and "another rank ended" in job.messages()[0]
    kept = {path.name for path in out.glob("block-*.safetensors")}  # the dead rank may still have been writing block 1
    assert "block-00000.safetensors" in kept and kept <= {f"block-0000{block}.safetensors" for block in (0, 1)}
    assert alone("calibrate", model, "-o", out, *data) == 0
    assert json.loads((out / "manifest.json").read_text())["finished"]


def test_a_rank_that_fails_ends_the_wait_of_the_first_at_once_and_its_message_is_the_only_one(model, store, tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, sys\nfrom svdq import sites\nfrom svdq.cli.main import main\n"
        "from svdq.errors import NumericsError\n"
        "def fail(*arguments):\n    raise NumericsError('of no use')\n"
        "if os.environ['RANK'] == '1':\n    sites.quantize_linears = fail\n"
        "main(sys.argv[1:])\n"
    )
    job = Job(tmp_path, 2, "quantize", model, tmp_path / "out", "--calib", store, "--timeout", "300", wrapped=wrapper)
    assert job.wait(60) == [2, 2]
    assert len(job.messages()) == 1 and "of no use" in job.messages()[0] and "model.layers.1." in job.messages()[0]


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [({"WORLD_SIZE": "2"}, "torchrun"), ({"WORLD_SIZE": "many"}, "WORLD_SIZE='many'")],
)
def test_half_an_environment_is_one_line(model, store, tmp_path, environment, wanted):
    line = command("quantize", model, tmp_path / "out", "--calib", store)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    done = subprocess.run(line, cwd="/", env={**clean, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and wanted in done.stderr
    assert len([part for part in done.stderr.splitlines() if part.startswith("svdq:")]) == 1
    assert "Traceback" not in done.stderr


def test_commands_that_do_not_join_speak_whatever_the_environment_says(model, by_one, tmp_path, svdq, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "out.safetensors").write_bytes(by_one)
    result = svdq("verify", tmp_path / "out.safetensors", "--model", model, "--json", tmp_path / "report.json")
    assert result.code == 0 and "49 linears" in result.out
    assert (tmp_path / "report.json").exists()
    assert svdq("verify", tmp_path / "nowhere", "--model", model).err.startswith("svdq: ")


def test_a_mistake_is_told_once(model, store, tmp_path):
    job = Job(tmp_path, 2, "quantize", model, tmp_path / "nowhere" / "out", "--calib", store)
    assert 2 in job.wait()
    assert len(job.messages()) == 1 and "no such directory" in job.messages()[0]


def test_several_ranks_want_a_sequence_each_and_no_search(model, calibration_ids, read_ids, tmp_path):
    data, config, search = read_ids(calibration_ids), CalibrationConfig(), CalibrationConfig(smoothing="search")
    for count, chosen, message in ((1000, config, r"sequences for 1000 ranks"), (2, search, "search")):
        ranks = Ranks(0, count)
        with pytest.raises(ConfigError, match=message):
            calibrate(open_model(model), tmp_path / "store", data, chosen, ranks=ranks)
        with pytest.raises(ConfigError, match=message):
            quantize(open_model(model), tmp_path / "out", QuantConfig(), data=data, calibration=chosen, ranks=ranks)


def test_waiting_ends_only_when_nothing_new_comes():
    counts = iter(range(6))

    def slowly():
        time.sleep(0.2)
        return next(counts)

    Ranks(0, 2, timeout=0.5).wait_until(slowly, 5, "blocks")  # 0.25 s each, more than 1 s in all
    with pytest.raises(RanksError, match="3 of 5 blocks"):
        Ranks(0, 2, timeout=0.3).wait_until(lambda: 3, 5, "blocks")
