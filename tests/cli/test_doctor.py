"""--version, doctor, completion, python -m svdq: what a machine has, and that asking is fast."""

import ctypes
import json
import os

import pytest
import torch

from svdq import environment
from svdq.environment import ABSENT, FAILED, OK, Check, Driver, Gpu


def test_the_versions_are_those_of_the_packages(svdq):
    out = svdq("--version").out
    assert f"torch {torch.__version__}" in out
    assert (f"CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs") in out


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["completion", "zsh"], ["plan", "--help"]])
def test_asking_imports_no_torch(python, arguments):
    code = """if True:
        import sys
        from svdq.cli.main import main
        try:
            main(sys.argv[1:])
        except SystemExit as stop:
            assert not stop.code
        assert "torch" not in sys.modules and "transformers" not in sys.modules
    """
    done = python(code, *arguments)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command(python):
    done = python("import runpy, sys; sys.argv = ['svdq', '--help']; runpy.run_module('svdq', run_name='__main__')")
    assert done.returncode == 0 and done.stdout.startswith("Usage: svdq "), done.stderr


@pytest.mark.parametrize(("shell", "part"), [
    ("bash", "complete -o nosort -F _svdq_completion svdq"),
    ("zsh", "#compdef svdq"),
    ("fish", "complete --no-files --command svdq"),
])  # fmt: skip
def test_a_shell_gets_its_script(svdq, shell, part):
    result = svdq("completion", shell)
    assert result.code == 0 and part in result.out and "_SVDQ_COMPLETE" in result.out


def test_the_script_s_question_is_answered(python):
    environment = os.environ | {
        "_SVDQ_COMPLETE": "bash_complete",
        "COMP_WORDS": "svdq quantize --overr",
        "COMP_CWORD": "2",
    }
    done = python("import sys; sys.argv = ['svdq']; from svdq.cli.main import main; main()", env=environment)
    assert done.stdout.split() == ["plain,--override", "plain,--overrides"], done.stderr


# ---- doctor


def statuses(result):
    return {check["name"]: check["status"] for check in json.loads(result.out)["checks"]}


def test_a_machine_like_this_one_is_well(svdq, tmp_path, monkeypatch):
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "kernels"))
    result = svdq("doctor", "--json", "-")
    found = statuses(result)
    assert result.code == 0
    assert [found[name] for name in ("packages", "CPU", "cache", "matplotlib")] == [OK] * 4
    text = svdq("doctor").out
    assert "quantized a linear" in text and str(tmp_path) in text and text.endswith("nothing failed\n")


def test_a_cache_that_cannot_be_written_fails(svdq, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    result = svdq("doctor")
    assert result.code == 1
    assert "FAILED  cache" in result.out and "-> set SVDQ_CACHE_DIR" in result.out


def test_what_is_optional_and_absent_is_no_failure(monkeypatch):
    monkeypatch.setitem(environment.OPTIONAL, "nothing", ("no-such-package", "nothing at all", "pip install it"))
    assert environment._optional("nothing") == Check(
        "no-such-package", ABSENT, "not installed; for nothing at all", "pip install it"
    )


def test_a_missing_package_is_a_failure(monkeypatch):
    monkeypatch.setattr(environment, "REQUIRED", ("torch", "no-such-package"))
    found = environment._required()
    assert (found.status, found.do) == (FAILED, "pip install no-such-package")


@pytest.mark.parametrize(("driver", "built_for", "status", "words"), [
    (Driver(None, (), "libcuda.so.1 is not there"), "13.0", {"CUDA driver": ABSENT, "GPU": ABSENT}, "reference"),
    (Driver((13, 0), (), "no GPU"), "13.0", {"CUDA driver": OK, "GPU": ABSENT}, "none"),
    (Driver((13, 0), (), "cuInit gives error 803"), "13.0", {"CUDA driver": FAILED, "GPU": ABSENT}, "803"),
    (Driver((13, 0), (Gpu("L4", (8, 9), 24 * 10**9),), ""), None, {"GPU 0": FAILED}, "built for CPUs"),
    (Driver((12, 4), (Gpu("GTX 1080", (6, 1), 8 * 10**9),), ""), "12.4", {"GPU 0": FAILED}, "0 CUDA devices"),
])  # fmt: skip
def test_the_driver_and_its_gpus_are_judged(monkeypatch, driver, built_for, status, words):
    monkeypatch.setattr(environment, "torch_version", lambda: ("2.13.0", built_for))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = [environment._driver(driver), *environment._gpus(driver)]
    assert {check.name: check.status for check in found}.items() >= status.items()
    assert any(words in check.found for check in found)


class Library:
    """A driver's library with two GPUs."""

    names = (b"NVIDIA L4", b"NVIDIA H200")
    attributes = ({75: 8, 76: 9}, {75: 9, 76: 0})

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = 13010

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, pointer):
        pointer._obj.value = 2

    def cuDeviceGet(self, pointer, index):
        pointer._obj.value = index

    def cuDeviceGetName(self, buffer, length, device):
        buffer.value = self.names[device.value]

    def cuDeviceGetAttribute(self, pointer, attribute, device):
        pointer._obj.value = self.attributes[device.value][attribute]

    def cuDeviceTotalMem_v2(self, pointer, device):
        pointer._obj.value = (device.value + 1) * 24 * 10**9


def test_the_driver_s_library_is_asked_for_the_gpus(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    wanted = (Gpu("NVIDIA L4", (8, 9), 24 * 10**9), Gpu("NVIDIA H200", (9, 0), 48 * 10**9))
    assert environment.cuda_driver() == Driver((13, 1), wanted, "")
    assert "CUDA driver 13.1: NVIDIA L4 (8.9, 24 GB), NVIDIA H200 (9.0, 48 GB)" in environment.version_text()
