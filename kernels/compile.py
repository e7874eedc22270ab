"""CUDA sources → cubins, by NVRTC, at first use, cached on disk.

A kernel is one source file of kernels/cuda and the values of its compile-time constants; it becomes one cubin with one
symbol. The text that NVRTC gets is the constants, the strides of every layout (svdq.kernels.layout), common.cuh and
the file. No header of the CUDA toolkit is included, so libnvrtc is all that is needed, and no GPU.

The cache: one file a cubin, named by the hash of that text, the options, the architecture and the compiler's version;
written under a temporary name and renamed. There is no lock: two processes may compile the same kernel, neither can
hang. A damaged entry is a miss. SVDQ_CACHE_DIR or XDG_CACHE_HOME moves it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from svdq.errors import SvdqError
from svdq.kernels.layout import MMA
from svdq.kernels.tiles import HopperTile, MediumTile, WeightOnlyTile, hopper_tile, medium_tile, weight_only_tile

SOURCES = Path(__file__).parent / "cuda"
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")  # what the tests compile for
OLDEST = (8, 0)
INSTALL = "pip install 'svdq[cuda]'"
_ENTRY = b"svdq-cubin-1\n"
_importing = threading.Lock()


class KernelError(SvdqError):
    """The kernels cannot be compiled or run here: a missing library, an old GPU or driver."""


@dataclass(frozen=True)
class Kernel:
    """name: the source file and its symbol; constants: what is defined before its text, e.g. (("RANK", 16), …)."""

    name: str
    constants: tuple[tuple[str, str | int], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}<{', '.join(f'{name}={value}' for name, value in self.constants)}>"


@dataclass(frozen=True)
class Resources:
    """What a thread and a block of a compiled kernel take; spills in bytes."""

    registers: int
    shared_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    cubin: bytes
    resources: Resources
    from_cache: bool


SCALARS = ("f16", "bf16")
# 48 and 96 are three siblings of rank 16 or 32 as one linear, and what the quantizer cuts larger sums of ranks into.
RANKS = (0, 16, 32, 48, 64, 96, 128)
HEAD_DIMS = (64, 128)
HOPPER = "sm_90a"
FP4_CORES = "sm_120a"  # its tensor cores take 4-bit floating-point operands with their scales; elsewhere 16-bit ones do
FP4_RANKS = (0, 16)  # of t at a time
NF4_SIZES = ((1, 1), (1, 2), (2, 2), (4, 2))  # tiles of four rows of x, strips of sixteen rows of the weight


def quantize_kernel(scalar: str, rank: int, halves: int, store: int = 0) -> Kernel:
    return Kernel("quantize_lora_down", (("SCALAR", scalar), ("RANK", rank), ("HALVES", halves), ("STORE", store)))


def gemm_kernel(out: str) -> Kernel:
    return Kernel("w4a4_gemm_lora", (("OUT", out),))


def small_m_kernel(out: str, halves: int) -> Kernel:
    return Kernel("w4a4_small_m", (("OUT", out), ("HALVES", halves)))


def medium_m_kernel(out: str, tile: MediumTile) -> Kernel:
    sizes = {
        "PANELS": tile.panels, "CLUSTER": tile.cluster, "WARPS": tile.warps,
        "STAGES": tile.stages, "RING_BYTES": tile.ring_bytes,
    }  # fmt: skip
    return Kernel("w4a4_medium_m", (("OUT", out), *sizes.items()))


def expand_kernel() -> Kernel:
    return Kernel("expand_codes")


def wgmma_kernel(out: str, tile: HopperTile) -> Kernel:
    sizes = (("TOKENS", tile.tokens), ("BLOCK", tile.block), ("BLOCKS", tile.blocks), ("STAGES", tile.stages))
    return Kernel("w4_wgmma_lora", (("OUT", out), *sizes, ("TOKEN_SCALE", int(tile.token_scale))))


def inv_rms_kernel(scalar: str) -> Kernel:
    return Kernel("inv_rms", (("SCALAR", scalar),))


def walk_kernel() -> Kernel:
    return Kernel("gptq_block")


def rope_kernel(scalar: str, head_dim: int) -> Kernel:
    return Kernel("qknorm_rope", (("SCALAR", scalar), ("HEAD_DIM", head_dim)))


def weight_only_kernel(scalar: str, tile: WeightOnlyTile) -> Kernel:
    sizes = {
        "BITS": tile.bits, "STRIPS": tile.rows // 16, "TILES": tile.tokens // 8, "WARPS": tile.warps,
        "STAGES": tile.stages, "TURNED": int(tile.turned), "SHARED_BYTES": tile.shared_bytes,
    }  # fmt: skip
    return Kernel("weight_only", (("SCALAR", scalar), *sizes.items()))


def expand_weight_kernel(scalar: str, bits: int) -> Kernel:
    return Kernel("expand_weight", (("SCALAR", scalar), ("BITS", bits)))


def fp4_expand_kernel(weights: bool) -> Kernel:
    return Kernel("fp4_expand", (("ROWS", 16 if weights else 8),))


def nf4_dequantize_kernel(out: str) -> Kernel:
    return Kernel("nf4_dequantize", (("OUT", out),))


def nf4_few_rows_kernel(scalar: str, tiles: int, strips: int) -> Kernel:
    return Kernel("nf4_few_rows", (("SCALAR", scalar), ("TILES", tiles), ("STRIPS", strips)))


def all_kernels(arch: str) -> list[Kernel]:
    """Every kernel that linears of the listed ranks can ask for on this architecture; other ranks compile alike."""
    outs = (*SCALARS, "f32")
    return [
        *(_hopper_kernels(outs) if arch == HOPPER else ()),
        *(quantize_kernel(scalar, rank, halves) for scalar in SCALARS for rank in RANKS for halves in (1, 2)),
        *(gemm_kernel(out) for out in outs),
        *(small_m_kernel(out, halves) for out in outs for halves in (1, 2)),
        *(medium_m_kernel(out, medium_tile(m, 2 if arch == HOPPER else 1)) for out in outs for m in (32, 48, 64)),
        *(inv_rms_kernel(scalar) for scalar in SCALARS),
        walk_kernel(),
        *(rope_kernel(scalar, size) for scalar in SCALARS for size in HEAD_DIMS),
        *(weight_only_kernel(scalar, tile) for scalar in SCALARS for tile in _weight_only_tiles()),
        *(expand_weight_kernel(scalar, bits) for scalar in SCALARS for bits in (4, 8)),
        *(quantize_kernel(scalar, rank, 2, 3) for scalar in SCALARS for rank in FP4_RANKS),
        Kernel("fp4_small_m"),
        *(
            [Kernel("fp4_gemm_lora")]
            if arch == FP4_CORES
            else [*map(fp4_expand_kernel, (False, True)), Kernel("fp4_finish")]
        ),
        *(nf4_dequantize_kernel(out) for out in outs),
        *(nf4_few_rows_kernel(scalar, *sizes) for scalar in SCALARS for sizes in NF4_SIZES),
    ]


def _weight_only_tiles() -> list[WeightOnlyTile]:
    return [weight_only_tile(*work) for work in ((4, 1, 128), (4, 1, 32), (4, 9, 128), (8, 1, 0), (8, 9, 0))]


def _hopper_kernels(outs: tuple[str, ...]) -> list[Kernel]:
    tiles = [
        (out, hopper_tile(wide, scale, 4 if out == "f32" else 2))
        for out in outs
        for wide in (False, True)
        for scale in (False, True)
    ]
    quantizers = (quantize_kernel(scalar, rank, 2, store) for scalar in SCALARS for rank in RANKS for store in (1, 2))
    return [*quantizers, expand_kernel(), *(wgmma_kernel(*tile) for tile in tiles)]


def source(kernel: Kernel) -> str:
    """All that the compiler reads."""
    lines = ['#line 1 "constants"', *(f"#define {name} {value}" for name, value in kernel.constants)]
    for name, layout in MMA.items():  # a kernel uses some of them, and the compiler would name the others
        strides = layout.constants().items()
        lines += [f"[[maybe_unused]] constexpr int {name}_{digit} = {stride};" for digit, stride in strides]
    return "\n".join([*lines, _text(f"{kernel.name}.cu", set())])


def _text(name: str, included: set[str]) -> str:
    """A file with each of its includes once, in its place, and line numbers that name the files."""
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(_read_source(name).splitlines(), 1):
        found = re.fullmatch(r'#include "(\w+\.cuh)"', line)
        if not found:
            lines.append(line)
        elif found[1] in included:
            lines.append("")
        else:
            included.add(found[1])
            lines += [_text(found[1], included), f'#line {number + 1} "{name}"']
    return "\n".join(lines)


@cache
def _read_source(name: str) -> str:
    return (SOURCES / name).read_text(encoding="utf-8")


def architecture(capability: tuple[int, int]) -> str:
    """(9, 0) → 'sm_90a'. Raises KernelError for a GPU without 4-bit or asynchronous-copy instructions."""
    major, minor = capability
    if capability < OLDEST:
        raise KernelError(
            f"compute capability {major}.{minor}: the kernels need 8.0 (Ampere) or newer; "
            "load the model with kernels='reference'"
        )
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def check_architectures(names: Sequence[str]) -> None:
    """Raises KernelError unless the kernels can be compiled for all of these, which NVRTC itself is asked."""
    for name in names:
        found = re.fullmatch(r"sm_(\d{2,3})a?", name)
        if not found:
            raise KernelError(f"architecture {name!r}: wanted names such as sm_89 or sm_90a")
        if divmod(int(found[1]), 10) < OLDEST:
            raise KernelError(f"architecture {name}: the kernels need sm_80 (Ampere) or newer")
        _nvrtc('extern "C" __global__ void nothing() {}', "nothing.cu", name)


@cache
def cuda_core() -> Any:
    """The package cuda.core. Raises KernelError if it is missing or too old.

    One thread imports it: to another one it would look complete before it is.
    """
    try:
        with _importing:
            import cuda.core
            from cuda.core import Program  # noqa: F401  an older cuda-core has it elsewhere
    except ImportError as error:
        raise KernelError(f"the Python package cuda-core, 1.0 or newer, is missing ({error}); {INSTALL}") from None
    return cuda.core


@cache
def compiler_version() -> tuple[int, int]:
    """NVRTC's version. Raises KernelError if cuda-core or libnvrtc is missing."""
    cuda_core()
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader raises types of its own, by version
        raise KernelError(
            f"libnvrtc cannot be loaded ({str(error).partition(chr(10))[0]}); "
            "pip install nvidia-cuda-nvrtc, or install a CUDA toolkit"
        ) from error
    return major, minor


def cache_dir() -> Path:
    try:
        chosen = os.environ.get("SVDQ_CACHE_DIR")
        if chosen:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "svdq" / "kernels"
    except RuntimeError:  # a user without a home directory
        raise KernelError("no home directory to keep compiled kernels in; set SVDQ_CACHE_DIR") from None


def cached_file(kernel: Kernel, arch: str) -> Path:
    """Where this kernel's cubin is, or would be."""
    key = [source(kernel), arch, _options(arch), compiler_version()]
    return cache_dir() / f"{kernel.name}-{arch}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.cubin"


def compile_kernel(kernel: Kernel, arch: str) -> Compiled:
    """From the cache, or compiled and put there. A cache that cannot be written only costs time.

    Raises KernelError if the compiler is missing, does not know the architecture, or rejects the source.
    """
    path = cached_file(kernel, arch)
    found = _read(path)
    if found:
        return found
    built = _compile(kernel, arch)
    _write(path, built)
    return built


def cached(kernel: Kernel, arch: str) -> Compiled | None:
    """What the cache holds, without compiling."""
    return _read(cached_file(kernel, arch))


def build(arch: str, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[Kernel, Compiled]:
    """Every kernel for one architecture, into the cache; a compiler on every core.

    progress  is called with kernels done and kernels in all
    Raises    KernelError like `compile_kernel`, and if the cache cannot be written
    """
    kernels, built = all_kernels(arch), {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernel, result in zip(kernels, pool.map(lambda kernel: compile_kernel(kernel, arch), kernels), strict=True):
            if not result.from_cache and not cached_file(kernel, arch).is_file():
                raise KernelError(f"{cache_dir()}: cannot be written; set SVDQ_CACHE_DIR to another directory")
            built[kernel] = result
            progress(len(built), len(kernels))
    return built


def inventory(architectures: Sequence[str] = (), devices: Sequence[str] = ()) -> dict[str, Any]:
    """The cache as plain JSON values: for every architecture, every kernel's resources, or None if not compiled.

    architectures  default: the listed ones and those of the devices
    """

    def facts(found: Compiled | None) -> dict[str, int] | None:
        return asdict(found.resources) | {"cubin_bytes": len(found.cubin)} if found else None

    chosen = architectures or dict.fromkeys((*ARCHITECTURES, *devices))
    return {
        "cache": str(cache_dir()),
        "nvrtc": ".".join(map(str, compiler_version())),
        "devices": list(devices),
        "architectures": {
            arch: {str(kernel): facts(cached(kernel, arch)) for kernel in all_kernels(arch)} for arch in chosen
        },
    }


def _options(arch: str) -> dict[str, object]:
    # No contraction to fused operations: the quantizer's roundings are a contract. Where one is wanted it is written.
    return {"arch": arch, "std": "c++17", "fma": False, "ptxas_options": ["-v"]}


def _compile(kernel: Kernel, arch: str) -> Compiled:
    text, file, where = source(kernel), f"{kernel.name}.cu", f"{kernel}: "
    cubin, log = _nvrtc(text, file, arch, where)
    if not log:  # NVRTC has a cache of its own, which does not keep the log
        cubin, log = _nvrtc(text, file, arch, where, no_cache=True)
    return Compiled(cubin, _resources(log, kernel), False)


def _nvrtc(text: str, file: str, arch: str, where: str = "", **options: bool) -> tuple[bytes, str]:
    """(cubin, log)"""
    version = ".".join(map(str, compiler_version()))
    core, log = cuda_core(), io.StringIO()
    try:
        program = core.Program(text, "c++", core.ProgramOptions(name=file, **_options(arch), **options))
        return bytes(program.compile("cubin", logs=log).code), log.getvalue()
    except Exception as error:  # NVRTC's errors have types of their own, by version of cuda-core
        message = f"{error}\n{log.getvalue()}".replace("\0", "").strip()
        if "--gpu-architecture" in message or "--nv_arch" in message:
            raise KernelError(f"NVRTC {version} does not know the architecture {arch}; a newer one may") from error
        raise KernelError(f"{where}NVRTC {version} does not compile it for {arch}: {message}") from error


def _resources(log: str, kernel: Kernel) -> Resources:
    numbers = {
        "registers": re.search(r"Used (\d+) registers", log),
        "shared": re.search(r"(\d+) bytes smem", log),
        "stores": re.search(r"(\d+) bytes spill stores", log),
        "loads": re.search(r"(\d+) bytes spill loads", log),
    }
    if numbers["registers"] is None:
        raise KernelError(f"{kernel}: the compiler's log names no registers: {log!r}")
    value = {name: int(match.group(1)) if match else 0 for name, match in numbers.items()}
    return Resources(value["registers"], value["shared"], value["stores"] + value["loads"])


def _read(path: Path) -> Compiled | None:
    """An entry: a first line, the sha256 of the rest, a line of JSON, the cubin."""
    try:
        entry = path.read_bytes()
    except OSError:
        return None
    body = entry[len(_ENTRY) + 32 :]
    if not entry.startswith(_ENTRY) or hashlib.sha256(body).digest() != entry[len(_ENTRY) : len(_ENTRY) + 32]:
        return None
    line, _, cubin = body.partition(b"\n")
    return Compiled(cubin, Resources(**json.loads(line)), True)


def _write(path: Path, built: Compiled) -> None:
    body = json.dumps(asdict(built.resources)).encode() + b"\n" + built.cubin
    part = path.with_name(f".part-{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(_ENTRY + hashlib.sha256(body).digest() + body)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
