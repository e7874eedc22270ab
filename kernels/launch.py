"""Compiled kernels on a GPU: loaded once a process, launched on torch's current stream.

Nothing here allocates: every pointer is a torch tensor's, so that torch's allocator and CUDA graphs see all memory.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from svdq.kernels.compile import OLDEST, Kernel, KernelError, architecture, compile_kernel, compiler_version, cuda_core

_WITHOUT_ASKING = 48 * 1024  # bytes of shared memory that every launch may have
_loading = threading.Lock()  # two threads would load a kernel twice


def launch(
    kernel: Kernel,
    device: torch.device,
    grid: tuple[int, ...],
    threads: int,
    arguments: list[Any],
    *,
    early: bool = False,
    shared_bytes: int = 0,
    cluster: tuple[int, ...] = (),
) -> None:
    """Start a kernel. Raises KernelError if it cannot be compiled or run here (see `require`).

    arguments  tensors and None are pointers, int and float go as 32 bits, numpy scalars as they are
    early      it may start while the kernel before it still runs, and waits for its results by itself (Hopper on)
    shared_bytes  of shared memory beside what the kernel declares; a kernel gets the same in every launch
    cluster    blocks of the grid that see each other's shared memory, along each axis; the grid is a multiple of it
    """
    core = cuda_core()
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        with _loading:
            function, may_overlap = _loaded(kernel, index, shared_bytes)
        options: dict[str, Any] = {"programmatic_stream_serialization": True} if early and may_overlap else {}
        if cluster:  # cuda-core counts the grid in clusters then
            grid = tuple(blocks // size for blocks, size in zip(grid, cluster, strict=True))
            options["cluster"] = cluster
        config = core.LaunchConfig(grid=grid, block=threads, shmem_size=shared_bytes, **options)
        stream = core.Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        core.launch(stream, config, function, *map(_argument, arguments))


def require(device: torch.device) -> None:
    """Raises KernelError, saying what to do, if this device cannot run the kernels."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise KernelError(f"device {device}: found {count} CUDA devices (torch {torch.__version__}); use device='cpu'")
    _architecture(device.index if device.index is not None else torch.cuda.current_device())


def device_architectures() -> list[str]:
    """Of the GPUs here that are new enough for the kernels."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    capabilities = {torch.cuda.get_device_capability(index) for index in range(count)}
    return [architecture(capability) for capability in sorted(capabilities) if capability >= OLDEST]


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if value is None:
        return 0
    if isinstance(value, int):
        return np.int32(value)
    return np.float32(value) if isinstance(value, float) else value


@cache
def _architecture(index: int) -> str:
    arch = architecture(torch.cuda.get_device_capability(index))
    major, minor = compiler_version()
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    if version // 1000 < major:
        raise KernelError(
            f"the driver knows CUDA {version // 1000}.{version % 1000 // 10}, the compiler is NVRTC {major}.{minor}; "
            "update the driver, or change the compiler: pip uninstall nvidia-cuda-nvrtc, "
            f"then pip install 'cuda-core[cu{version // 1000}]'"
        )
    return arch


@cache
def _loaded(kernel: Kernel, index: int, shared_bytes: int) -> tuple[Any, bool]:
    """(the function, whether it may start early) for the current device."""
    arch = _architecture(index)
    core = cuda_core()
    core.Device(index).set_current()
    compiled = compile_kernel(kernel, arch)
    try:
        function = core.ObjectCode.from_cubin(compiled.cubin).get_kernel(kernel.name)
    except Exception as error:  # cuda-core's errors have types of their own, by version
        raise KernelError(f"{kernel}: the driver does not load it for {arch}: {error}") from error
    if shared_bytes > _WITHOUT_ASKING:
        from cuda.bindings import driver

        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(most, shared_bytes, function.handle, driver.CUdevice(index))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise KernelError(f"{kernel}: the device does not give a block {shared_bytes} bytes of shared memory")
    able = hasattr(core.LaunchConfig, "programmatic_stream_serialization")  # cuda-core 1.2 or newer
    early = able and torch.cuda.get_device_capability(index) >= (9, 0)
    return function, early
