"""Every kernel, compiled for every listed architecture: what it takes of a multiprocessor, and its instructions.

No GPU is needed. Instructions and parameters are what NVIDIA's disassembler reads in the cubins; threads and
arguments are what svdq.kernels.ops hands to a launch.
"""

import dataclasses
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import numpy as np
import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import ops, quantizer
from svdq.kernels.compile import ARCHITECTURES, all_kernels

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler there")

EVERY = [(kernel, arch) for kernel in all_kernels() for arch in ARCHITECTURES]
HALF = [(kernel, arch) for kernel, arch in EVERY if "f16" in dict(kernel.constants).values()]


@pytest.fixture(scope="session")
def compiled(kernel_cache):
    """(kernel, architecture) → Compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SVDQ_CACHE_DIR", str(kernel_cache))
        return {pair: kernels.cached(*pair) for pair in EVERY}


@dataclasses.dataclass(frozen=True)
class Disassembly:
    target: str
    threads: int  # that a block may have
    parameters: list[int]  # their sizes in bytes
    instructions: list[str]  # in their order


@pytest.fixture(scope="session")
def disassembled(compiled, tmp_path_factory):
    """(kernel, architecture) → Disassembly, by nvdisasm, of float16: other types differ in conversions alone."""
    program = next(str(f.locate()) for f in metadata.files("nvidia-cuda-nvdisasm") if f.name == "nvdisasm")
    directory = tmp_path_factory.mktemp("cubins")

    def read(pair):
        path = directory / f"{EVERY.index(pair)}.cubin"
        path.write_bytes(compiled[pair].cubin)
        text = subprocess.run([program, "-ndf", path], capture_output=True, text=True, check=True).stdout
        bound = re.search(
            r"EIATTR_MAX_THREADS.*?\.word\s+0x(\w+)", text, re.DOTALL
        )  # or as many as its registers allow
        parameters = {}
        for entry in text.split("EIATTR_KPARAM_INFO")[1:]:
            ordinal = int(re.search(r"\.short\s+0x(\w+)", entry)[1], 16)
            word = re.search(r"\.byte\s+0x(\w\w), 0x(\w\w), 0x(\w\w), 0x(\w\w)", entry)
            parameters[ordinal] = int("".join(reversed(word.groups())), 16) >> 18  # the size's place in the word
        return Disassembly(
            re.search(r"\.target\s+(\w+)", text)[1],
            int(bound[1], 16) if bound else 65536 // (-(-compiled[pair].resources.registers // 8) * 8) // 32 * 32,
            [parameters[i] for i in range(len(parameters))],
            re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE),
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(HALF, pool.map(read, HALF), strict=True))


@pytest.fixture(scope="module")
def recorded():
    """(launches, early_kernels): see the two fixtures."""
    seen, early_ones = {}, set()

    def record(kernel, device, grid, threads, arguments, *, early=False):
        if early:
            early_ones.add(kernel)
        sizes = [
            a.itemsize if isinstance(a, np.generic) else 4 if isinstance(a, (int, float)) else 8 for a in arguments
        ]
        seen.setdefault(kernel, []).append((threads, sizes))

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "launch", record)
        patch.setattr(quantizer, "launch", record)
        columns, group, rows = empty(64, 4096), empty(64), empty(4096)
        quantizer.walk(
            columns, empty(64, 64), group, group, group, 2.0**-24, -7, 7, columns.char(), rows, columns, rows
        )
        for dtype in ops.SCALAR:
            for m, k in ((1, 128), (16, 8192), (17, 8192), (4096, 8192)):
                x = empty(m, k, dtype=dtype)
                ops.inv_rms(x, 1e-6)
                for rank in kernels.RANKS:
                    ops.quantize_lora_down(x, empty(k, rank).half(), None, True, 0.85, None, None)
            for d in kernels.HEAD_DIMS:
                q, k, norm, table = (empty(*shape, dtype=dtype) for shape in ((5, 2, d), (5, 1, d), (d,), (5, d)))
                ops.qknorm_rope(q, k, norm, norm, table, table, 1e-6)
        for dtype in ops.OUT:
            for m in (1, 16, 17):
                for n in (128, 4096, 16384):
                    for rank in (*kernels.RANKS, 384, 512, 640):  # and of linears fused into one
                        rows = -(-m // 16) * 16
                        codes, scales = empty(rows, 128, dtype=torch.int8), empty(rows, 4)
                        weight = empty(n, 128, dtype=torch.int8), empty(4, n).half(), empty(n, rank).half(), None
                        ops.w4a4_gemm_lora(codes, scales, empty(2, rows, rank), *weight, m, n, dtype)
    return seen, early_ones


@pytest.fixture(scope="module")
def launches(recorded):
    """Kernel → [(threads, sizes of the arguments)]: what ops asks for, over ranks and sizes."""
    return recorded[0]


@pytest.fixture(scope="module")
def early_kernels(recorded):
    """Those that may start while the kernel before them still runs."""
    return recorded[1]


def test_every_kernel_compiles_for_every_listed_architecture(compiled):
    assert [pair for pair, result in compiled.items() if result is None] == []


def test_a_cubin_is_for_the_architecture_asked_for(disassembled):
    assert {pair: code.target for pair, code in disassembled.items()} == {pair: pair[1] for pair in HALF}


def test_the_listed_kernels_are_those_that_the_operators_launch(launches):
    assert set(launches) == set(all_kernels())


def test_no_kernel_spills_registers(compiled):
    assert [pair for pair, result in compiled.items() if result.resources.spill_bytes] == []


def test_no_kernel_has_local_memory(disassembled):
    local = {
        pair: {i for i in code.instructions if i.startswith(("STL", "LDL"))} for pair, code in disassembled.items()
    }
    assert {pair: found for pair, found in local.items() if found} == {}


def test_the_registers_of_every_block_fit_a_multiprocessor(compiled, launches):
    """65,536 on every architecture; a warp gets them in steps of 8 for each of its 32 threads."""
    for (kernel, arch), result in compiled.items():
        for threads, _ in launches[kernel]:
            registers = -(-result.resources.registers // 8) * 8 * threads
            assert registers <= 65536, f"{kernel} for {arch}: {registers}"


def test_no_block_needs_more_shared_memory_than_it_gets_without_asking(compiled):
    assert [pair for pair, result in compiled.items() if result.resources.shared_bytes > 48 * 1024] == []


def test_two_blocks_of_the_gemm_share_a_multiprocessor(compiled, launches):
    """Of sm_86 and sm_89 each has 100 KiB of shared memory, 1 KiB a block being the system's."""
    for (kernel, arch), result in compiled.items():
        if kernel.name == "w4a4_gemm_lora":
            assert {threads for threads, _ in launches[kernel]} == {256}
            assert result.resources.registers <= 65536 // (2 * 256), f"{kernel} for {arch}"
            assert 2 * (result.resources.shared_bytes + 1024) <= 100 * 1024, f"{kernel} for {arch}"


def test_no_kernel_is_launched_with_more_threads_than_it_is_compiled_for(disassembled, launches):
    for (kernel, arch), code in disassembled.items():
        assert max(threads for threads, _ in launches[kernel]) <= code.threads, f"{kernel} for {arch}"


def test_every_argument_has_the_size_of_its_parameter(disassembled, launches):
    for (kernel, arch), code in disassembled.items():
        for _, sizes in launches[kernel]:
            assert sizes == code.parameters, f"{kernel} for {arch}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["w4a4_gemm_lora", "w4a4_small_m"])
def test_integer_products_run_on_the_tensor_cores_that_the_architecture_has(disassembled, name, arch):
    native = arch in ("sm_80", "sm_86", "sm_89")  # Hopper and Blackwell have 8-bit ones only
    wanted = {"IMMA.16864.S4.S4"} if native else {"IMMA.16832.S8.S8"}
    for (kernel, target), code in disassembled.items():
        if (kernel.name, target) == (name, arch):
            assert {i for i in code.instructions if i.startswith("IMMA")} == wanted, kernel


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_down_projection_runs_on_tf32_tensor_cores(disassembled, arch):
    for (kernel, target), code in disassembled.items():
        if (kernel.name, target) == ("quantize_lora_down", arch):
            found = {i for i in code.instructions if re.match(r"[A-Z]*MMA", i)}
            assert found == ({"HMMA.1688.F32.TF32"} if dict(kernel.constants)["RANK"] else set()), kernel


WAIT = "ACQBULK"  # griddepcontrol.wait


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_an_early_kernel_waits_before_it_reads_or_writes_what_others_do(disassembled, early_kernels, arch):
    """Before the wait it may read weights, as constants; activations are never constants."""
    activations = {  # by the width of a vector: codes and t (of row scales half may be left out); x, a row factor; x
        "w4a4_small_m": {"LDG.E.64"},
        "quantize_lora_down": {"LDG.E.128", "LDG.E"},
        "inv_rms": {"LDG.E.128"},
    }
    codes = {pair[0]: code for pair, code in disassembled.items() if pair[1] == arch and pair[0] in early_kernels}
    assert {kernel.name for kernel in codes} == set(activations)
    for kernel, code in codes.items():
        assert code.instructions.count(WAIT) == 1, kernel
        place = code.instructions.index(WAIT)
        before, after = (
            [i for i in part if re.match(r"LDG\.|LD\.|STG?\.|ATOM|RED[.G]", i)]
            for part in (code.instructions[:place], code.instructions[place:])
        )
        weights = {i for i in before if i.startswith("LDG.") and i.endswith(".CONSTANT")}
        reads_weights = kernel.name == "w4a4_small_m" or dict(kernel.constants).get("HALVES") == 1
        assert set(before) == weights and bool(weights) == reads_weights, f"{kernel}: {set(before)}"
        assert activations[kernel.name] <= set(after), f"{kernel}: {set(after)}"


def test_only_early_kernels_wait(disassembled, early_kernels):
    """One that does not wait reads what it likes: it must not start early."""
    waiting = {kernel for (kernel, _), code in disassembled.items() if WAIT in code.instructions}
    assert waiting == {kernel for kernel, _ in HALF if kernel in early_kernels}
