"""What there is on this machine: versions for `svdq --version`, checks for `svdq doctor`.

Versions and GPUs are read without importing torch, whose import takes seconds: torch's version.py as text, the driver
by ctypes. The doctor's checks do what the commands do, in small.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from svdq import __version__
from svdq.errors import SvdqError

OK, ABSENT, FAILED = "ok", "absent", "FAILED"
OPTIONAL = {  # module: (distribution, what needs it, how to get it)
    "cuda.core": ("cuda-core", "the CUDA kernels", "pip install 'svdq[cuda]'"),
    "matplotlib": ("matplotlib", "--plot", "pip install 'svdq[plot]'"),
    "gguf": ("gguf", "make demo's model", "pip install gguf"),
    "lm_eval": ("lm_eval", "task accuracy", "pip install lm-eval"),
    "diffusers": ("diffusers", "diffusion transformers", "pip install diffusers"),
    "bitsandbytes": ("bitsandbytes", "other quantizers to compare with", "pip install bitsandbytes"),
}
REQUIRED = ("torch", "safetensors", "transformers", "datasets", "click", "tqdm", "numpy")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class Check:
    """status OK; ABSENT, where something optional is not there; FAILED. do: how to get or mend it, '' if ok."""

    name: str
    status: str
    found: str
    do: str = ""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    bytes: int


@dataclass(frozen=True)
class Driver:
    """cuda: the newest CUDA that the driver knows, (13, 0); why_not: what keeps it from working, '' if nothing."""

    cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    why_not: str = ""


def version_text() -> str:
    """One line each for svdq, Python, torch, and the GPUs; imports nothing."""
    found, cuda = torch_version()
    lines = [
        f"svdq, version {__version__}",
        f"Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"torch {found or 'is not installed'}" + (f", built for {'CUDA ' + cuda if cuda else 'CPUs'}" if found else ""),
    ]
    driver = cuda_driver()
    known = f"CUDA driver {'.'.join(map(str, driver.cuda))}" if driver.cuda else "CUDA driver"
    lines.append(f"{known}: {driver.why_not or ', '.join(map(gpu_text, driver.gpus))}")
    return "\n".join(lines)


def gpu_text(gpu: Gpu) -> str:
    return f"{gpu.name} ({'.'.join(map(str, gpu.capability))}, {gpu.bytes / 1e9:.0f} GB)"


def torch_version() -> tuple[str | None, str | None]:
    """(its version, the CUDA that it was built for); (None, None) where it is not installed."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return _distribution("torch"), None
    version = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*= ['\"](.+)['\"]", text, re.MULTILINE)
    return version[1] if version else _distribution("torch"), cuda[1] if cuda else None


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def cuda_driver() -> Driver:
    """Asked through its own library, which comes with the driver and not with torch."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError:
        return Driver(None, (), f"{name} is not there")
    number = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = (number.value // 1000, number.value % 1000 // 10)
    if status := library.cuInit(0):
        return Driver(cuda, (), f"cuInit gives error {status}")
    library.cuDeviceGetCount(ctypes.byref(number))
    gpus = tuple(_gpu(library, index) for index in range(number.value))
    return Driver(cuda, gpus, "" if gpus else "no GPU")


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value), size.value)


# ---------------------------------------------------------------------------------------------- the doctor


def checks() -> list[Check]:
    """Everything, in the order in which one needs the other."""
    driver = cuda_driver()
    found = [_required(), _checked("CPU", _cpu, "pip install --force-reinstall torch")]
    found += [_driver(driver), *_gpus(driver)]
    found += [_checked("NVRTC", _nvrtc, "pip install 'svdq[cuda]'", absent=not driver.gpus), _cache()]
    return found + [_optional(module) for module in OPTIONAL]


def _checked(name: str, check: Callable[[], str], do: str, *, absent: bool = False) -> Check:
    """What check() finds; whatever it raises is a failure, or an absence where nothing here needs it."""
    try:
        return Check(name, OK, check())
    except Exception as error:  # a broken installation raises anything
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        known = isinstance(error, SvdqError)  # these say what to do
        return Check(name, ABSENT if absent else FAILED, reason, "" if known else do)


def _required() -> Check:
    versions = {name: _distribution(name) for name in REQUIRED}
    if lacking := [name for name, version in versions.items() if version is None]:
        return Check("packages", FAILED, f"{', '.join(lacking)} not installed", f"pip install {' '.join(lacking)}")
    return Check("packages", OK, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _cpu() -> str:
    """Quantize one small linear for real."""
    import torch

    from svdq.calibration.statistics import SumAccumulator
    from svdq.config import LayerConfig
    from svdq.layer import prepare_site, quantize_linears
    from svdq.rounding import ActivationTransform

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 128, generator=generator) for rows in (512, 96))
    sums, config = SumAccumulator(x.abs().amax(0), ActivationTransform(None, True, 0.85)), LayerConfig()
    sums.add(x)
    (result,) = quantize_linears([weight], prepare_site(sums.finish(), config), config)
    return f"quantized a linear of 128 -> 96, error {100 * result.report['error']:.1f} %, {os.cpu_count()} cores"


def _driver(driver: Driver) -> Check:
    if driver.cuda is None:
        return Check(
            "CUDA driver", ABSENT, driver.why_not, "for a GPU: install NVIDIA's driver; in a container: --gpus all"
        )
    version = ".".join(map(str, driver.cuda))
    if driver.why_not and driver.why_not != "no GPU":
        return Check("CUDA driver", FAILED, f"{version}: {driver.why_not}", "see nvidia-smi; a reboot after an update")
    return Check("CUDA driver", OK, f"knows CUDA {version}")


def _gpus(driver: Driver) -> list[Check]:
    """Each GPU, whether torch sees it and whether the kernels run on it."""
    if not driver.gpus:
        return [Check("GPU", ABSENT, "none; everything runs on the CPU, load_quantized in reference arithmetic")]
    _, built_for = torch_version()
    found = []
    for index, gpu in enumerate(driver.gpus):

        def kernels(index: int = index, gpu: Gpu = gpu) -> str:
            import torch

            from svdq.kernels.launch import require

            require(torch.device("cuda", index))
            return f"{gpu_text(gpu)}: the kernels run"

        if built_for is None:
            do = "install a build of torch for CUDA (pytorch.org); TORCH='torch==…' make setup picks one"
            found.append(Check(f"GPU {index}", FAILED, f"{gpu_text(gpu)}: torch here is built for CPUs", do))
        else:
            found.append(_checked(f"GPU {index}", kernels, "see svdq --version and nvidia-smi"))
    return found


def _nvrtc() -> str:
    from svdq.kernels.compile import check_architectures, compiler_version

    check_architectures(["sm_80"])  # compiles an empty kernel
    return f"{'.'.join(map(str, compiler_version()))} compiles"


def _cache() -> Check:
    from svdq.kernels.compile import cache_dir

    def writable() -> str:
        directory = cache_dir()
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return f"{directory}, {len(list(directory.glob('*.cubin')))} kernels"

    return _checked("cache", writable, "set SVDQ_CACHE_DIR to a directory that can be written")


def _optional(module: str) -> Check:
    name, purpose, do = OPTIONAL[module]
    version = _distribution(name)
    if version is None:
        return Check(name, ABSENT, f"not installed; for {purpose}", do)
    return Check(name, OK, f"{version}, for {purpose}")
