"""Around a launch: the driver fits the compiler, a kernel is loaded once. Else see tests/gpu."""

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import hopper, launch
from svdq.kernels.compile import Compiled, KernelError, Resources
from svdq.linear import load_quantized

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

    for remembering in (launch._architecture, hopper.require):
        remembering.cache_clear()
    yield pretend
    for remembering in (launch._architecture, hopper.require):
        remembering.cache_clear()


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


@pytest.mark.parametrize("capability", [(8, 9), (10, 0), (12, 0)])
def test_hoppers_operators_refuse_another_gpu_and_say_what_runs_there(card, capability):
    device = card(capability)
    words = r"Hopper GPU \(compute capability 9\.0\), cuda:0 has {}\.{}; .*activations='int4', or kernels='reference'"
    assert not hopper.runs_on(device)
    with pytest.raises(KernelError, match=words.format(*capability)):
        hopper.require(device)


def test_hoppers_operators_take_a_hopper_gpu(card):
    device = card((9, 0))
    assert hopper.runs_on(device) and not hopper.runs_on(torch.device("cpu"))
    hopper.require(device)


def test_a_missing_cuda_core_is_found_before_the_first_launch(card, monkeypatch):
    device = card((8, 9))
    monkeypatch.setattr(launch, "compiler_version", kernels.compiler_version.__wrapped__)
    monkeypatch.setattr(kernels, "cuda_core", kernels.cuda_core.__wrapped__)
    for name in [name for name in sys.modules if name.startswith("cuda.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(KernelError, match=r"pip install 'svdq\[cuda\]'"):
        launch.require(device)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_that_is_not_there_is_named(card, monkeypatch, name, count):
    card((8, 9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    with pytest.raises(KernelError, match=rf"device {name}: found {count} CUDA devices .*device='cpu'"):
        launch.require(torch.device(name))


def test_a_model_for_a_gpu_that_is_not_there_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="found 0 CUDA devices"):
        load_quantized("nowhere", "nowhere", device="cuda")


def test_threads_that_launch_a_kernel_first_load_it_once(card, monkeypatch):
    loaded, launched, together = [], [], Barrier(8)

    def load(cubin):
        loaded.append(cubin)
        time.sleep(0.02)  # another thread has the time to do the same
        return SimpleNamespace(get_kernel=lambda name: name)

    core = SimpleNamespace(
        Device=lambda index: SimpleNamespace(set_current=lambda: None),
        ObjectCode=SimpleNamespace(from_cubin=load),
        LaunchConfig=lambda **options: None,
        Stream=SimpleNamespace(from_handle=lambda handle: None),
        launch=lambda stream, config, function: launched.append(function),
    )
    card((8, 9))
    monkeypatch.setattr(launch, "cuda_core", lambda: core)
    monkeypatch.setattr(launch, "compile_kernel", lambda kernel, arch: Compiled(b"", Resources(1, 0, 0), True))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))

    def first(_):
        together.wait()
        launch.launch(kernels.small_m_kernel("f16", 1), torch.device("cuda", 0), (1,), 512, [])

    launch._loaded.cache_clear()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(first, range(8)))
    finally:
        launch._loaded.cache_clear()
    assert len(loaded) == 1 and launched == ["w4a4_small_m"] * 8


@pytest.fixture
def launched(card, monkeypatch):
    """The options of every launch, and what a driver's function for shared memory was asked; its answer can be set."""
    from cuda.bindings import driver

    found = SimpleNamespace(options=[], shared=[], answer=driver.CUresult.CUDA_SUCCESS)

    class Config:
        programmatic_stream_serialization = None

        def __init__(self, **options):
            found.options.append(options)

    core = SimpleNamespace(
        Device=lambda index: SimpleNamespace(set_current=lambda: None),
        ObjectCode=SimpleNamespace(
            from_cubin=lambda cubin: SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=name))
        ),
        LaunchConfig=Config,
        Stream=SimpleNamespace(from_handle=lambda handle: None),
        launch=lambda stream, config, function: None,
    )

    def allow(attribute, size, kernel, device):
        assert attribute == driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        found.shared.append((kernel, size, int(device)))
        return (found.answer,)

    monkeypatch.setattr(driver, "cuKernelSetAttribute", allow)
    monkeypatch.setattr(launch, "cuda_core", lambda: core)
    monkeypatch.setattr(launch, "compile_kernel", lambda kernel, arch: Compiled(b"", Resources(1, 0, 0), True))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    card((9, 0))
    launch._loaded.cache_clear()
    yield found
    launch._loaded.cache_clear()


GPU = torch.device("cuda", 0)


def test_more_shared_memory_than_every_launch_has_is_asked_for_once(launched):
    for _ in range(2):
        launch.launch(kernels.expand_kernel(), GPU, (1,), 256, [], shared_bytes=200_000)
    assert launched.shared == [("expand_codes", 200_000, 0)]
    assert [options["shmem_size"] for options in launched.options] == [200_000] * 2


def test_shared_memory_that_every_launch_has_is_not_asked_for(launched):
    launch.launch(kernels.expand_kernel(), GPU, (1,), 256, [], shared_bytes=48 * 1024)
    launch.launch(kernels.walk_kernel(), GPU, (1,), 256, [])
    assert launched.shared == []
    assert [options["shmem_size"] for options in launched.options] == [48 * 1024, 0]


def test_a_device_without_so_much_shared_memory_is_an_error(launched):
    from cuda.bindings import driver

    launched.answer = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(KernelError, match="expand_codes<>: the device does not give a block 300000 bytes of shared"):
        launch.launch(kernels.expand_kernel(), GPU, (1,), 256, [], shared_bytes=300_000)
    assert launched.options == []


def test_a_grid_of_clusters_is_counted_in_clusters(launched):
    launch.launch(kernels.expand_kernel(), GPU, (5, 4, 1), 256, [], cluster=(1, 4, 1))
    launch.launch(kernels.expand_kernel(), GPU, (5, 4, 1), 256, [])
    assert [(options["grid"], options.get("cluster")) for options in launched.options] == [
        ((5, 1, 1), (1, 4, 1)),
        ((5, 4, 1), None),
    ]


@pytest.mark.parametrize(("capability", "early"), [((9, 0), True), ((8, 9), False)])
def test_a_kernel_may_start_early_from_hopper_on(launched, card, capability, early):
    card(capability)
    launch.launch(kernels.expand_kernel(), GPU, (1,), 256, [], early=True)
    assert launched.options[0].get("programmatic_stream_serialization", False) == early


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
