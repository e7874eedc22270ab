"""Compiling without a GPU: strides come from the layouts, the cache's rules, and what every failure says."""

import ctypes
import dataclasses
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import hopper, tiles
from svdq.kernels.compile import ARCHITECTURES, HOPPER, Kernel, KernelError, all_kernels, cached_file, compile_kernel
from svdq.kernels.layout import MMA

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler there")

SMALL = kernels.inv_rms_kernel("f16")  # the quickest to compile
WGMMA = [kernel for kernel in all_kernels(HOPPER) if kernel.name == "w4_wgmma_lora"]
EVERY = [(kernel, arch) for arch in ARCHITECTURES for kernel in all_kernels(arch)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test sees the user's cache, or another test's."""
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- the text that is compiled


def test_an_include_is_replaced_by_its_file_once(monkeypatch):
    files = {
        "inv_rms.cu": '#include "a.cuh"\n#include "b.cuh"\nlast',
        "a.cuh": '#include "b.cuh"\nof a',
        "b.cuh": "of b",
    }
    monkeypatch.setattr(kernels, "_read_source", files.__getitem__)
    lines = [line for line in kernels.source(SMALL).splitlines() if line in ("of a", "of b", "last") or "#i" in line]
    assert lines == ["of b", "of a", "last"]


# ---- layouts have one definition


def test_the_compiler_gets_every_stride_of_every_layout():
    text = kernels.source(SMALL)
    for name, layout in MMA.items():
        for digit, stride in layout.constants().items():
            assert re.findall(rf"\b{name}_{digit} = (\d+);", text) == [str(stride)]


def test_no_cuda_file_defines_a_stride():
    digits = [f"{name}_{digit}" for name, layout in MMA.items() for digit in layout.stored.split()]
    for file in kernels.SOURCES.iterdir():
        assert re.findall(rf"\b(?:{'|'.join(digits)})\s*=[^=]", file.read_text()) == [], file


def place_values(digits, extent):
    """'nt np:8 nl:4' → {'nl': 1, 'np': 4, 'nt': 32}, the first digit taking what is left of the extent."""
    values, place = {}, 1
    for digit in reversed(digits.split()):
        name, _, size = digit.partition(":")
        values[name] = place
        place *= int(size) if size else extent // place
    return values


@pytest.mark.parametrize("tiles", [(2, 3), (4, 2)])
@pytest.mark.parametrize("name", MMA)
def test_a_stride_is_how_far_apart_neighbours_in_a_digit_are_packed(name, tiles):
    layout = MMA[name]
    indices = [index for index in (layout.rows, layout.columns) if index]
    shape = [
        count * math.prod(int(size) for size in re.findall(r":(\d+)", index))
        for count, index in zip(tiles, indices, strict=False)
    ]
    packed = layout.pack(torch.arange(math.prod(shape)).reshape(shape))
    steps = {}  # digit → how far apart neighbours are in the logical matrix
    for axis, (index, extent) in enumerate(zip(indices, shape, strict=True)):
        columns = math.prod(shape[axis + 1 :])
        steps |= {digit: place * columns for digit, place in place_values(index, extent).items()}
    assert packed[0] == 0
    for digit, stride in layout.constants().items():
        assert packed[stride] == steps[digit], digit
    assert layout.constants().items() <= layout.strides(tuple(shape)).items()


@pytest.mark.parametrize(("name", "stored", "message"), [
    ("qweight", "nt kt np nl kl ks ns kr", "order of the weight codes"),
    ("codes", "mb kt ml ms kl ks kr", "order of the activation codes"),
    ("scales", "mb kt ms ml", "order of the activation scales"),
    ("wscales", "nt g na nb nc nd", "order of the weight scales"),
    ("channel", "nt na nc nd nb", "order of the bias"),
    ("down", "kt jb kl jl ks kp kd", "order of the down projection"),
    ("lora_up", "nt jt nl jc jb nb jd", "order of the up projection"),
    ("fp8", "kt mg kp ks ml kl kb", "order of the 8-bit activations"),
    ("fp8", "kt mg ks kp kl ml kb", "order of the 8-bit activations"),
    ("token_scales", "kt ma kg mb mc md", "order of the scales"),
    ("token_scales", "kt kg ma mc mb md", "order of the scales"),
    ("token_t", "jt mp ml jh jc je", "order of t"),
    ("token_t", "mp jt jh ml jc je", "order of t"),
])  # fmt: skip
def test_a_changed_order_does_not_compile(monkeypatch, name, stored, message):
    assert sorted(stored.split()) == sorted(MMA[name].stored.split()) and stored != MMA[name].stored
    monkeypatch.setitem(MMA, name, dataclasses.replace(MMA[name], stored=stored))
    of_hopper = name in ("fp8", "token_scales", "token_t")
    with pytest.raises(KernelError, match=message):
        compile_kernel(*((WGMMA[0], HOPPER) if of_hopper else (SMALL, "sm_80")))


# ---- how hopper's product is cut up


def constants_of(kernel, statements):
    """Compiles the constants of a kernel with more after them, without the kernel."""
    head = kernels.source(kernel).partition("extern __shared__")[0]
    kernels._nvrtc(f'{head}\n{statements}\nextern "C" __global__ void nothing() {{}}', "constants.cu", HOPPER)


SIZES = [(wide, token_scale, size) for wide in (False, True) for token_scale in (False, True) for size in (2, 4)]


@pytest.mark.parametrize(("wide", "token_scale", "size"), SIZES)
def test_threads_and_shared_memory_of_a_launch_are_what_the_kernel_counts(wide, token_scale, size):
    tile = tiles.hopper_tile(wide, token_scale, size)
    kernel = kernels.wgmma_kernel("f32" if size == 4 else "f16", tile)
    assert kernel in WGMMA
    bytes_ = "STAGES * STAGE_BYTES + COMPUTING * ROWS_BYTES"
    constants_of(kernel, f'static_assert({bytes_} == {tile.shared_bytes}, "shared memory");')
    constants_of(kernel, f'static_assert(THREADS == {tile.threads}, "threads");')
    with pytest.raises(KernelError, match="shared memory"):
        constants_of(kernel, f'static_assert({bytes_} == {tile.shared_bytes - 16}, "shared memory");')


@pytest.mark.parametrize(("wide", "token_scale", "size"), SIZES)
def test_a_pipeline_has_at_least_three_stages_and_no_room_for_more(wide, token_scale, size):
    tile = tiles.hopper_tile(wide, token_scale, size)
    constants_of(
        kernels.wgmma_kernel("f32" if size == 4 else "f16", tile),
        f'static_assert(STAGES == 5 || {tile.shared_bytes} + STAGE_BYTES > {tiles.HOPPER_SHARED_BYTES}, "room");',
    )
    assert 3 <= tile.stages <= 5 and tile.shared_bytes <= tiles.HOPPER_SHARED_BYTES


def test_padded_rows_are_whole_tiles():
    for m in (1, 64, 129, 385, 1024, 1025, 5000):
        for wide, token_scale, size in SIZES:
            rows, tokens = hopper._rows(m), tiles.hopper_tile(wide, token_scale, size).tokens
            assert m <= rows < m + hopper.PAD_ROWS and rows % tokens == 0


def test_tiles_are_wide_where_that_takes_fewer_rounds_of_all_multiprocessors():
    """Sizes at which both were timed on an H200, which has 132."""
    faster = {(4096, 3072): True, (4352, 15360): True, (700, 4096): True, (700, 6144): False, (700, 1024): False,
              (256, 4096): False, (17, 128): False}  # fmt: skip
    assert {size: hopper._wide_tiles(*size, 132) for size in faster} == faster


def test_hoppers_products_are_not_serialized():
    """The assembler says so in its log if it could not leave them in flight, to no other effect than time."""
    for kernel in WGMMA[:4]:
        _, log = kernels._nvrtc(kernels.source(kernel), "w4_wgmma_lora.cu", HOPPER, no_cache=True)
        assert re.search(r"Used (96|128) registers", log) and "serialized" not in log, kernel


# ---- the cache


def test_the_second_call_reads_what_the_first_one_compiled():
    first, second = compile_kernel(SMALL, "sm_80"), compile_kernel(SMALL, "sm_80")
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (second.cubin, second.resources) == (first.cubin, first.resources)
    assert first.cubin.startswith(b"\x7fELF")


def changed_text(patch):
    read = kernels._read_source
    patch.setattr(kernels, "_read_source", lambda name: read(name).replace("// Shared", "// shared"))


@pytest.mark.parametrize("change", [
    changed_text,
    lambda patch: patch.setitem(MMA, "down", dataclasses.replace(MMA["down"], stored="kt jb jl kl kp ks kd")),
    lambda patch: patch.setattr(kernels, "_options", lambda arch: {"arch": arch, "fma": True}),
    lambda patch: patch.setattr(kernels, "compiler_version", lambda: (13, 99)),
], ids=["a source text", "a layout", "an option", "the compiler"])  # fmt: skip
def test_an_entry_is_another_one_after_a_change_of(monkeypatch, change):
    before = cached_file(SMALL, "sm_80")
    assert cached_file(SMALL, "sm_80") == before
    change(monkeypatch)
    assert cached_file(SMALL, "sm_80") != before


def test_every_kernel_and_architecture_has_its_own_entry():
    assert len({cached_file(*pair) for pair in EVERY}) == len(EVERY)


def flipped(position):
    return lambda entry: entry[:position] + bytes([entry[position] ^ 1]) + entry[position:][1:]


@pytest.mark.parametrize("damage", [
    lambda entry: b"",
    lambda entry: entry[: len(entry) // 2],
    lambda entry: entry[:-1],
    lambda entry: entry[:10],
    lambda entry: entry + b"\0",
    lambda entry: os.urandom(1000),
    lambda entry: entry[entry.index(b"\x7fELF") :],
    flipped(0), flipped(20), flipped(50), flipped(-1),
], ids=["empty", "half", "a byte short", "ten bytes", "a byte more", "garbage", "the bare cubin",
        "flip in the name", "flip in the hash", "flip in the numbers", "flip in the cubin"])  # fmt: skip
def test_a_damaged_entry_is_a_miss_and_is_replaced(damage):
    good = compile_kernel(SMALL, "sm_80")
    path = cached_file(SMALL, "sm_80")
    path.write_bytes(damage(path.read_bytes()))
    assert kernels.cached(SMALL, "sm_80") is None
    assert compile_kernel(SMALL, "sm_80") == good
    assert kernels.cached(SMALL, "sm_80") == dataclasses.replace(good, from_cache=True)


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert not compile_kernel(SMALL, "sm_80").from_cache
    assert not compile_kernel(SMALL, "sm_80").from_cache


def test_a_full_disk_leaves_no_part_of_an_entry(own_cache, monkeypatch):
    def full(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert compile_kernel(SMALL, "sm_80").cubin
    assert list(own_cache.iterdir()) == []


def test_other_users_may_read_an_entry(own_cache):
    """An image is built by one user and run by another."""
    before = os.umask(0o022)
    try:
        compile_kernel(SMALL, "sm_80")
    finally:
        os.umask(before)
    assert cached_file(SMALL, "sm_80").stat().st_mode & 0o777 == 0o644


def test_two_processes_may_compile_one_kernel_at_once(own_cache, tmp_path):
    code = """if True:
        from svdq.kernels import compile as kernels
        kernels.cuda_core()
        print("ready", flush=True)
        input()
        print(kernels.compile_kernel(kernels.all_kernels("sm_80")[0], "sm_80").from_cache)
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n"] * 2
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=60)[0] for process in both] == ["False\n"] * 2
    assert [process.returncode for process in both] == [0, 0]
    assert list(own_cache.iterdir()) == [cached_file(all_kernels("sm_80")[0], "sm_80")]
    assert kernels.cached(all_kernels("sm_80")[0], "sm_80")


def test_threads_may_be_the_first_to_compile_at_once(python, own_cache):
    """cuda-core looks imported to a second thread before it is."""
    result = python("""if True:
        from concurrent.futures import ThreadPoolExecutor
        from svdq.kernels.compile import compile_kernel, inv_rms_kernel
        with ThreadPoolExecutor(8) as pool:
            print(len(list(pool.map(lambda _: compile_kernel(inv_rms_kernel("f16"), "sm_80").cubin, range(8)))))
    """)
    assert (result.stdout, result.returncode) == ("8\n", 0), result.stderr


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("SVDQ_CACHE_DIR", "~/chosen")
    assert kernels.cache_dir() == tmp_path / "chosen"
    monkeypatch.delenv("SVDQ_CACHE_DIR")
    assert kernels.cache_dir() == tmp_path / "xdg" / "svdq" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert kernels.cache_dir() == tmp_path / ".cache" / "svdq" / "kernels"


def test_nothing_is_written_into_the_package(monkeypatch, tmp_path):
    monkeypatch.delenv("SVDQ_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    package = Path(kernels.__file__).resolve().parent
    before = sorted(package.rglob("*"))
    compile_kernel(SMALL, "sm_80")
    assert sorted(package.rglob("*")) == before
    assert list(tmp_path.rglob("*.cubin")) == [cached_file(SMALL, "sm_80")]


# ---- messages


@pytest.fixture
def fresh():
    """What the process has found out about its compiler is forgotten, before and after."""

    def forget():
        kernels.cuda_core.cache_clear()
        kernels.compiler_version.cache_clear()

    forget()
    yield
    forget()


def test_an_architecture_is_named_after_the_capability():
    found = [kernels.architecture(pair) for pair in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
    assert found == ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


def test_other_architectures_have_the_kernels_that_hopper_has_besides_its_own():
    lists = {arch: set(all_kernels(arch)) for arch in (*ARCHITECTURES, "sm_87", "sm_103a")}
    portable, own = lists["sm_80"], lists.pop(kernels.FP4_CORES)
    assert all(found == portable for arch, found in lists.items() if arch != HOPPER)
    in_clusters = {kernel for kernel in portable if "CLUSTER" in dict(kernel.constants)}
    assert {kernel.name for kernel in in_clusters} == {"w4a4_medium_m"}  # Hopper has them as clusters of two
    assert portable - in_clusters < lists[HOPPER]
    assert {kernel.name for kernel in own ^ portable} == {"fp4_gemm_lora", "fp4_expand", "fp4_finish"}
    assert kernels.architecture(hopper.CAPABILITY) == HOPPER


def test_an_old_gpu_is_refused_with_what_to_do():
    with pytest.raises(KernelError, match=r"7\.5.*8\.0 \(Ampere\).*kernels='reference'"):
        kernels.architecture((7, 5))


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings"])
def test_a_missing_cuda_core_says_what_to_install(fresh, monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith("cuda.core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(KernelError, match=r"cuda-core.* is missing .*pip install 'svdq\[cuda\]'"):
        compile_kernel(SMALL, "sm_80")


def test_a_missing_libnvrtc_says_what_to_install(fresh, monkeypatch):
    from cuda.bindings import nvrtc

    def absent():
        raise RuntimeError('Failure finding "libnvrtc.so.13"\nlistdir("/somewhere"):')

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    with pytest.raises(
        KernelError, match=r'^libnvrtc .*Failure finding "libnvrtc.so.13"\); pip install nvidia-cuda-nvrtc'
    ):
        compile_kernel(SMALL, "sm_80")


@pytest.mark.parametrize("arch", ["sm_77", "sm_999a", "sm_89a"])
def test_an_architecture_unknown_to_nvrtc_is_named(arch):
    with pytest.raises(KernelError, match=rf"^NVRTC \d+\.\d+ does not know the architecture {arch};[^\n]*$"):
        compile_kernel(SMALL, arch)


@pytest.mark.parametrize(("name", "line"), [("common.cuh", 7), ("inv_rms.cu", 8)])
def test_an_error_in_a_source_is_reported_at_its_file_and_line(monkeypatch, name, line):
    read = kernels._read_source

    def broken(wanted):
        lines = read(wanted).split("\n")
        return "\n".join([*lines[: line - 1], "flaot architecture;", *lines[line - 1 :]] if wanted == name else lines)

    monkeypatch.setattr(kernels, "_read_source", broken)
    with pytest.raises(KernelError, match=rf'{re.escape(name)}\({line}\): error: identifier "flaot" is undefined'):
        compile_kernel(SMALL, "sm_80")


def test_an_unknown_constant_is_reported_with_the_kernel():
    kernel = Kernel("inv_rms", (("SCALAR", "f17"),))
    with pytest.raises(KernelError, match=r"^inv_rms<SCALAR=f17>: NVRTC .* for sm_80: [^$]*\"f17\" is undefined"):
        compile_kernel(kernel, "sm_80")


def test_a_user_without_a_home_directory_is_told_of_the_variable(monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(KernelError, match="SVDQ_CACHE_DIR"):
        kernels.cache_dir()


def test_a_log_that_is_missing_is_asked_for_once_more(monkeypatch):
    """NVRTC answers from a cache of its own, without the log, what was compiled before."""
    calls = []

    def forgetful(*arguments, **options):
        calls.append((arguments, options))
        return b"\x7fELF", "ptxas info: Used 30 registers, 16 bytes smem" if options else ""

    monkeypatch.setattr(kernels, "_nvrtc", forgetful)
    built = compile_kernel(SMALL, "sm_80")
    assert (built.resources.registers, built.resources.shared_bytes) == (30, 16)
    assert [options for _, options in calls] == [{}, {"no_cache": True}]
    assert calls[0][0] == calls[1][0]


def test_a_log_that_is_there_is_taken(monkeypatch):
    calls, nvrtc = [], kernels._nvrtc

    def counted(*arguments, **options):
        calls.append(options)
        cubin, log = nvrtc(*arguments, no_cache=True)
        return cubin, log

    monkeypatch.setattr(kernels, "_nvrtc", counted)
    assert compile_kernel(SMALL, "sm_80").resources.registers > 0
    assert calls == [{}]


def test_a_log_without_registers_is_an_error(monkeypatch):
    monkeypatch.setattr(kernels, "_nvrtc", lambda *arguments, **options: (b"\x7fELF", ""))
    with pytest.raises(KernelError, match=r"^inv_rms<SCALAR=f16>: the compiler's log names no registers: ''"):
        compile_kernel(SMALL, "sm_80")


def test_the_oldest_compiler_accepts_every_kernel():
    """CUDA 12.6's: that of the oldest torch that svdq takes. It knows fewer forms of C++ than the newest.

    Not optimized, as only errors are asked for.
    """
    found = (f.locate() for f in metadata.files("nvidia-cuda-nvrtc-cu12") if f.name.startswith("libnvrtc.so"))
    nvrtc = ctypes.CDLL(str(next(found)))
    options = (ctypes.c_char_p * 3)(b"--gpu-architecture=compute_90a", b"--std=c++17", b"--device-debug")

    def log(kernel):
        program, text = ctypes.c_void_p(), ctypes.create_string_buffer(100_000)
        source = kernels.source(kernel).encode()
        assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None) == 0
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)
        nvrtc.nvrtcGetProgramLog(program, text)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return status and f"{kernel}: {text.value.decode()}"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [text for text in pool.map(log, all_kernels(HOPPER)) if text] == []
