"""Before the first launch: the driver fits the compiler, and importing does nothing. Launches are in tests/gpu."""

import sys

import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import launch
from svdq.kernels.compile import KernelError

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler there")


@pytest.fixture
def card(monkeypatch):
    """card(capability, driver, compiler): a GPU as torch, the driver and NVRTC would tell of it."""
    from cuda.bindings import driver as bindings

    def pretend(capability, driver=13000, compiler=(13, 5)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(bindings, "cuDriverGetVersion", lambda: (0, driver))
        monkeypatch.setattr(launch, "compiler_version", lambda: compiler)
        return torch.device("cuda", 0)

    launch._architecture.cache_clear()
    yield pretend
    launch._architecture.cache_clear()


def test_a_driver_older_than_the_compiler_is_refused_with_both_ways_out(card):
    ways = r"update the driver, or .*pip uninstall nvidia-cuda-nvrtc, then pip install 'cuda-core\[cu12\]'"
    with pytest.raises(KernelError, match=rf"CUDA 12\.8, the compiler is NVRTC 13\.5; {ways}"):
        launch.require(card((8, 9), driver=12080))


@pytest.mark.parametrize("driver", [13000, 13050, 14010])
def test_a_driver_of_the_compilers_generation_or_newer_is_taken(card, driver):
    """Within a generation a driver loads cubins of newer minor versions."""
    launch.require(card((8, 9), driver=driver))


def test_an_old_gpu_is_refused(card):
    with pytest.raises(KernelError, match=r"7\.5"):
        launch.require(card((7, 5)))


def test_a_missing_cuda_core_is_found_before_the_first_launch(card, monkeypatch):
    device = card((8, 9))
    monkeypatch.setattr(launch, "compiler_version", kernels.compiler_version.__wrapped__)
    monkeypatch.setattr(kernels, "cuda_core", kernels.cuda_core.__wrapped__)
    for name in [name for name in sys.modules if name.startswith("cuda.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(KernelError, match=r"pip install 'svdq\[cuda\]'"):
        launch.require(device)


def test_the_architectures_here_are_those_of_the_gpus_new_enough(card):
    card((9, 0))
    assert launch.device_architectures() == ["sm_90a"]
    card((7, 5))
    assert launch.device_architectures() == []


def test_importing_compiles_nothing_and_touches_no_gpu(python):
    result = python("""if True:
        import sys
        import svdq, svdq.kernels.ops, svdq.linear
        import torch
        print("cuda.core" in sys.modules, torch.cuda.is_initialized())
    """)
    assert result.stdout == "False False\n", result.stderr
