"""Every kernel, compiled for every listed architecture: what it takes of a multiprocessor, and its instructions.

No GPU is needed. Instructions and parameters are what NVIDIA's disassembler reads in the cubins; threads and
arguments are what the operators hand to a launch.
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
from svdq.kernels import hopper, nf4, nvfp4, ops, quantizer, weight_only
from svdq.kernels.compile import ARCHITECTURES, FP4_CORES, HOPPER, all_kernels

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="no CUDA compiler there")

EVERY = [(kernel, arch) for arch in ARCHITECTURES for kernel in all_kernels(arch)]


def differs_in_conversions_alone(kernel):
    """From the kernel for float16. Of two kernels a type changes more: the pipeline, and how x is staged."""
    return kernel.name not in ("w4_wgmma_lora", "nf4_few_rows") and {"bf16", "f32"} & set(
        dict(kernel.constants).values()
    )


def is_near_sm_80s(kernel, arch):
    """Of these two architectures only the integer products are read: the rest is what sm_80 has."""
    return arch in ("sm_86", "sm_89") and not kernel.name.startswith("w4a4")


READ = [pair for pair in EVERY if not differs_in_conversions_alone(pair[0]) and not is_near_sm_80s(*pair)]
READ_WHOLE = [arch for arch in ARCHITECTURES if arch not in ("sm_86", "sm_89")]


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
    registers: list[int]  # that threads ask for on the way, in falling order


@pytest.fixture(scope="session")
def disassembled(compiled, tmp_path_factory):
    """(kernel, architecture) of READ → Disassembly, by nvdisasm."""
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
            re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)", text, re.MULTILINE),
            sorted((int(n, 16) for n in re.findall(r"USETMAXREG\S+ (?:UP\d, )?0x(\w+)", text)), reverse=True),
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(READ, pool.map(read, READ), strict=True))


@dataclasses.dataclass(frozen=True)
class Launch:
    module: str  # whose operator it was
    threads: int
    sizes: list[int]  # of the arguments, in bytes
    early: bool
    shared_bytes: int
    grid: tuple[int, ...]
    cluster: tuple[int, ...]


@pytest.fixture(scope="module")
def launches():
    """Kernel → what the operators ask for, over ranks and sizes."""
    seen = {}

    def recorder(module):
        def record(kernel, device, grid, threads, arguments, *, early=False, shared_bytes=0, cluster=()):
            sizes = [
                a.itemsize if isinstance(a, np.generic) else 4 if isinstance(a, (int, float)) else 8 for a in arguments
            ]
            seen.setdefault(kernel, []).append(
                Launch(module.__name__, threads, sizes, early, shared_bytes, grid, cluster)
            )

        return record

    def empty(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    def weight(n, k, rank):
        return empty(n, k // 2, dtype=torch.int8), empty(k // 64, n).half(), empty(n, rank).half(), None

    with pytest.MonkeyPatch.context() as patch:
        for module in (ops, hopper, nf4, nvfp4, quantizer, weight_only):
            patch.setattr(module, "launch", recorder(module))
        patch.setattr(hopper, "require", lambda device: None)
        patch.setattr(nvfp4, "_product", lambda x, weights: empty(len(x), len(weights)))
        patch.setattr(hopper, "_processors", lambda index: 132)
        columns, group, rows = empty(64, 4096), empty(64), empty(4096)
        quantizer.walk(
            columns, empty(64, 64), group, group, group, 2.0**-24, -7, 7, columns.char(), rows, columns, rows
        )
        maps, blocks = (empty(16), empty(3), empty(256)), 100 * 384 // 64
        of_nf4 = empty(blocks * 32, 1, dtype=torch.uint8), empty(blocks, dtype=torch.uint8), *maps, 0.1, 100
        for dtype in ops.SCALAR:
            for m, k in ((1, 128), (16, 8192), (64, 8192), (65, 8192), (4096, 8192)):
                x = empty(m, k, dtype=dtype)
                ops.inv_rms(x, 1e-6)
                for rank in kernels.RANKS:
                    activation = (x, empty(k, rank).half(), None, True, 0.85, None, None)
                    ops.quantize_lora_down(*activation)
                    for values in (False, True):
                        hopper.quantize_lora_down_e4m3(*activation, values)
                    nvfp4.nvfp4_quantize(x, activation[1], None, True)
            for m in (1, 8, 9, 64, 65):
                x, codes = empty(m, 256, dtype=dtype), empty(96, 256, dtype=torch.int8)
                for group in (32, 128):
                    words, scales = empty(96, 32, dtype=torch.int32), empty(96, 256 // group).half()
                    weight_only.w4a16_linear(x, words, scales, None, group, None, None, None)
                weight_only.w8a16_linear(x, codes, empty(96, 1).half(), None, None, None)
            for m, at_once in ((3, 0), (3, 256), (8, 0), (9, 0), (32, 0)):
                patch.setattr(nf4, "AT_ONCE", at_once)
                nf4.nf4_linear(empty(m, 384, dtype=dtype), *of_nf4, None)
            for d in kernels.HEAD_DIMS:
                q, k, norm, table = (empty(*shape, dtype=dtype) for shape in ((5, 2, d), (5, 1, d), (d,), (5, d)))
                ops.qknorm_rope(q, k, norm, norm, table, table, 1e-6)
        for dtype in ops.OUT:
            nf4.nf4_dequantize(*of_nf4, 384, dtype)
            for m in (1, 16, 17, 48, 64, 65):
                for n in (128, 4096, 16384):
                    for rank in (*kernels.RANKS, 384, 512, 640):  # and of linears fused into one
                        rows = -(-m // 16) * 16
                        operands = empty(rows, 128, dtype=torch.int8), empty(rows, 4), empty(2, rows, rank)
                        for cluster in (1, 2):
                            patch.setattr(ops, "cluster_blocks", lambda device, cluster=cluster: cluster)
                            ops.w4a4_gemm_lora(*operands, *weight(n, 256, rank), m, n, dtype)
            for m in (1, 17, 1024, 1025, 5000):
                for rank in (0, 16, 640):
                    for values in (False, True):
                        packed = empty(256, rank).half(), None, True, 0.85, None, None, values
                        operands = hopper.quantize_lora_down_e4m3(empty(m, 256).half(), *packed)
                        hopper.w4_gemm_lora_e4m3(*operands, *weight(4096, 256, rank), m, 4000, dtype)
                    for cores in (False, True):
                        patch.setattr(nvfp4, "has_fp4_cores", lambda device, cores=cores: cores)
                        operands = nvfp4.nvfp4_quantize(empty(m, 256).half(), empty(256, rank).half(), None, True)
                        codes, scales = empty(4096, 128, dtype=torch.uint8), empty(16, 4096, dtype=torch.uint8)
                        floats = codes, scales, empty(4096), empty(4096, rank).half(), None
                        nvfp4.nvfp4_gemm(*operands, *floats, m, 4000, dtype)
    return seen


@pytest.fixture(scope="module")
def early_kernels(launches):
    """Those that may start while the kernel before them still runs."""
    early = {kernel: {launch.early for launch in found} for kernel, found in launches.items()}
    assert all(len(answers) == 1 for answers in early.values())
    return {kernel for kernel, answers in early.items() if answers == {True}}


def test_every_kernel_compiles_for_every_listed_architecture(compiled):
    assert [pair for pair, result in compiled.items() if result is None] == []


def test_a_cubin_is_for_the_architecture_asked_for(disassembled):
    assert {pair: code.target for pair, code in disassembled.items()} == {pair: pair[1] for pair in READ}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_listed_kernels_are_those_that_the_operators_launch(launches, arch):
    elsewhere = {kernel for kernel, found in launches.items() if {one.module for one in found} != {hopper.__name__}}
    wanted = set(launches) if arch == HOPPER else elsewhere
    others = {"fp4_expand", "fp4_finish"} if arch == FP4_CORES else {"fp4_gemm_lora"}
    clusters = ("CLUSTER", 1 if arch == HOPPER else 2)
    listed = all_kernels(arch)
    assert set(listed) == {
        kernel for kernel in wanted if kernel.name not in others and clusters not in kernel.constants
    }
    assert len(set(listed)) == len(listed)


def test_hopper_has_kernels_that_no_other_operator_launches(launches):
    modules = {one.module for found in launches.values() for one in found}
    assert modules == {one.__name__ for one in (ops, hopper, nf4, nvfp4, quantizer, weight_only)}
    names = {kernel.name for kernel in set(all_kernels(HOPPER)) - set(all_kernels("sm_100a"))}
    assert names == {"quantize_lora_down", "expand_codes", "w4_wgmma_lora", "w4a4_medium_m"}


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
        for launch in launches[kernel]:
            registers = -(-result.resources.registers // 8) * 8 * launch.threads
            assert registers <= 65536, f"{kernel} for {arch}: {registers}"


def test_warps_that_change_their_registers_have_as_many_in_all_as_the_block_began_with(
    disassembled, compiled, launches
):
    """Those that compute take from the warpgroup that copies; what is lacking would be waited for, forever."""
    changing = {pair: code for pair, code in disassembled.items() if code.registers}
    assert {kernel.name for kernel, _ in changing} == {"w4_wgmma_lora"}
    for pair, code in changing.items():
        more, fewer = code.registers
        (threads,) = {launch.threads for launch in launches[pair[0]]}
        began, computing = compiled[pair].resources.registers, threads // 128 - 1
        assert fewer < began < more, pair
        assert 128 * (computing * more + fewer) <= threads * began, pair


def test_no_kernel_declares_more_shared_memory_than_it_gets_without_asking(compiled):
    assert [pair for pair, result in compiled.items() if result.resources.shared_bytes > 48 * 1024] == []


def test_a_block_that_asks_for_shared_memory_fits_its_gpus(compiled, launches):
    """227 KiB on Hopper, 99 on sm_86, sm_89, sm_120: declared and asked for; and a kernel asks the same every time."""
    asking = {kernel: {one.shared_bytes for one in found} for kernel, found in launches.items()}
    assert {kernel.name for kernel, asked in asking.items() if asked != {0}} == {
        "w4_wgmma_lora",
        "w4a4_medium_m",
        "weight_only",
        "nf4_few_rows",
    }
    for (kernel, arch), result in compiled.items():
        (asked,) = asking[kernel]
        everywhere = kernel.name in ("weight_only", "nf4_few_rows") or ("CLUSTER", 1) in kernel.constants
        most = 101376 if everywhere else 232448 if arch == HOPPER else 0
        assert not asked or asked + result.resources.shared_bytes <= most, kernel


def test_kernels_that_wait_for_a_cluster_are_those_launched_in_clusters(disassembled, launches):
    waiting = {kernel for (kernel, _), code in disassembled.items() if "UCGABAR_WAIT" in code.instructions}
    assert waiting and waiting == {kernel for kernel, _ in READ if any(one.cluster for one in launches[kernel])}
    for launch in (one for kernel in waiting for one in launches[kernel]):
        blocks = [size // of for size, of in zip(launch.grid, launch.cluster, strict=True)]
        assert np.prod(launch.cluster) <= 8  # what every GPU with clusters has
        assert [n * of for n, of in zip(blocks, launch.cluster, strict=True)] == list(launch.grid)
    for kernel in waiting:  # a panel's blocks, which one scale joins; or the constant's
        for launch in launches[kernel]:
            wanted = (2,) if kernel.name == "w4a4_medium_m" else (1, launch.grid[1], 1)
            assert launch.cluster == wanted


def test_two_blocks_of_the_gemm_share_a_multiprocessor(compiled, launches):
    """Of sm_86 and sm_89 each has 100 KiB of shared memory, of which 1 KiB a block is the system's."""
    for (kernel, arch), result in compiled.items():
        if kernel.name == "w4a4_gemm_lora":
            assert {launch.threads for launch in launches[kernel]} == {256}
            assert result.resources.registers <= 65536 // (2 * 256), f"{kernel} for {arch}"
            assert 2 * (result.resources.shared_bytes + 1024) <= 100 * 1024, f"{kernel} for {arch}"


def test_no_kernel_is_launched_with_more_threads_than_it_is_compiled_for(disassembled, launches):
    for (kernel, arch), code in disassembled.items():
        assert max(launch.threads for launch in launches[kernel]) <= code.threads, f"{kernel} for {arch}"


def test_every_argument_has_the_size_of_its_parameter(disassembled, launches):
    for (kernel, arch), code in disassembled.items():
        for launch in launches[kernel]:
            assert launch.sizes == code.parameters, f"{kernel} for {arch}"


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["w4a4_gemm_lora", "w4a4_small_m", "w4a4_medium_m"])
def test_integer_products_run_on_the_tensor_cores_that_the_architecture_has(disassembled, name, arch):
    native = arch in ("sm_80", "sm_86", "sm_89")  # Hopper and Blackwell have 8-bit ones only
    wanted = {"IMMA.16864.S4.S4"} if native else {"IMMA.16832.S8.S8"}
    for (kernel, target), code in disassembled.items():
        if (kernel.name, target) == (name, arch):
            assert {i for i in code.instructions if i.startswith("IMMA")} == wanted, kernel


@pytest.mark.parametrize("arch", READ_WHOLE)
def test_the_down_projection_runs_on_tf32_tensor_cores(disassembled, arch):
    for (kernel, target), code in disassembled.items():
        if (kernel.name, target) == ("quantize_lora_down", arch):
            found = {i for i in code.instructions if re.match(r"[A-Z]*MMA", i)}
            assert found == ({"HMMA.1688.F32.TF32"} if dict(kernel.constants)["RANK"] else set()), kernel


@pytest.mark.parametrize("arch", READ_WHOLE)
def test_weights_alone_in_few_bits_run_on_16_bit_tensor_cores(disassembled, arch):
    for (kernel, target), code in disassembled.items():
        if kernel.name in ("weight_only", "nf4_few_rows") and target == arch:
            assert {i for i in code.instructions if re.match(r"[A-Z]*MMA", i)} == {"HMMA.16816.F32"}, kernel


@pytest.fixture(scope="module")
def wgmma(disassembled):
    """Constants → Disassembly of each w4_wgmma_lora."""
    found = [(dict(kernel.constants), code) for (kernel, _), code in disassembled.items()
             if kernel.name == "w4_wgmma_lora"]  # fmt: skip
    assert len(found) == 12  # types x tiles x kinds of scales
    return found


def test_hoppers_products_of_many_tokens_run_on_e4m3_tensor_cores(wgmma):
    for constants, code in wgmma:
        found = [i for i in code.instructions if i.startswith("QGMMA")]
        shape = f"64x{constants['BLOCK']}x32"
        assert set(found) == {f"QGMMA.{shape}.F32.E4M3.E4M3"}, constants
        assert len(found) == 4 * constants["BLOCKS"] * constants["STAGES"], (
            constants
        )  # the loop over the stages is unrolled


def test_hoppers_low_rank_runs_on_tf32_tensor_cores(wgmma):
    for constants, code in wgmma:
        assert {i for i in code.instructions if i.startswith("HMMA")} == {"HMMA.1688.F32.TF32"}, constants


def test_hoppers_operands_are_copied_in_bulk_by_warps_with_few_registers(wgmma):
    for constants, code in wgmma:
        kinds = {i.partition(".")[0] for i in code.instructions}
        assert {"UBLKCP", "USETMAXREG"} <= kinds and not {"LDGSTS", "UTMALDG"} & kinds, constants


@pytest.mark.parametrize(("store", "conversions"), [(0, False), (1, True), (2, True), (3, False)])
def test_activations_become_e4m3_where_bytes_are_stored(disassembled, store, conversions):
    codes = [code for (kernel, _), code in disassembled.items() if dict(kernel.constants).get("STORE") == store]
    assert codes
    for code in codes:
        found = [i for i in code.instructions if i.startswith("F2FP") and "E4M3" in i]
        assert set(found) == ({"F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"} if conversions else set())


def test_codes_of_weights_become_bytes_without_a_conversion(disassembled):
    """Selects and subtractions of four at a time."""
    (code,) = (code for (kernel, _), code in disassembled.items() if kernel.name == "expand_codes")
    assert [i for i in code.instructions if i.startswith(("I2F", "F2F"))] == []


def products_of(disassembled, name, arch):
    """The tensor-core instructions of a kernel without constants."""
    (code,) = (code for (kernel, target), code in disassembled.items() if (kernel.name, target) == (name, arch))
    return {i for i in code.instructions if re.match(r"[A-Z]*MMA", i)}


def test_4_bit_floating_point_is_multiplied_with_its_scales_where_tensor_cores_can(disassembled):
    wanted = {"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X", "HMMA.1688.F32.TF32"}  # and the low rank
    assert products_of(disassembled, "fp4_gemm_lora", FP4_CORES) == wanted


@pytest.mark.parametrize("arch", READ_WHOLE)
def test_4_bit_floating_point_of_few_tokens_is_multiplied_as_float16(disassembled, arch):
    assert products_of(disassembled, "fp4_small_m", arch) == {"HMMA.16816.F32"}


@pytest.mark.parametrize("arch", READ_WHOLE)
def test_nf4_is_read_and_written_by_16_bytes_and_looked_up_in_shared_memory(disassembled, arch):
    codes = {k.name: c.instructions for (k, target), c in disassembled.items() if target == arch}
    for name in ("nf4_dequantize", "nf4_few_rows"):
        assert [i for i in codes[name] if re.match(r"LDG\.E\.(NA\.)?128\.CONSTANT", i)], name
        assert "BRX" not in codes[name], name  # a jump by the code
        assert codes[name].count("LDS") >= 64, name
    assert codes["nf4_dequantize"].count("STG.E.128") == 8


WAIT = "ACQBULK"  # griddepcontrol.wait


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_an_early_kernel_waits_before_it_reads_or_writes_what_others_do(disassembled, early_kernels, arch):
    """Before the wait it may read weights, as constants; activations are never constants."""
    activations = {  # by the width of a vector: codes and t (of row scales half may be left out); x, a row factor; x
        "w4a4_small_m": {"LDG.E.64"},
        "w4a4_medium_m": {"LDG.E.64", "UBLKCP.S.G"},
        "fp4_small_m": {"LDG.E.64", "LDG.E"},
        "quantize_lora_down": {"LDG.E.128", "LDG.E"},
        "inv_rms": {"LDG.E.128"},
        "weight_only": {"LDG.E.128"},
        "expand_weight": {"STG.E.128"},  # what may still be read by the product before
        "nf4_dequantize": {"STG.E.128"},  # what the kernel before may still read
        "nf4_few_rows": {"LDG.E.128"},
    }
    if arch == HOPPER:  # what may still be read by the kernel before; all operands
        activations |= {"expand_codes": {"STG.E"}, "w4_wgmma_lora": {"UBLKCP.S.G"}}
    codes = {pair[0]: code for pair, code in disassembled.items() if pair[1] == arch and pair[0] in early_kernels}
    assert {kernel.name for kernel in codes} == set(activations)
    for kernel, code in codes.items():
        assert code.instructions.count(WAIT) == 1, kernel
        place = code.instructions.index(WAIT)
        before, after = (
            [i for i in part if re.match(r"LDG\.|LD\.|STG?\.|ATOM|RED[.G]|UBLKCP", i)]
            for part in (code.instructions[:place], code.instructions[place:])
        )
        weights = {i for i in before if i.startswith("LDG.") and i.endswith(".CONSTANT")}
        if kernel.name == "w4a4_medium_m":  # codes and scales, in bulk
            assert before.count("UBLKCP.S.G") == 2
            weights.add("UBLKCP.S.G")
        assert set(before) == weights, f"{kernel}: {set(before)}"
        if kernel.name != "expand_codes":  # the assembler may move its one read behind the wait
            constants = dict(kernel.constants)  # (of weight_only the copies of codes are not counted here)
            reads_scales = kernel.name == "weight_only" and constants["BITS"] == 4
            few = (
                kernel.name in ("w4a4_small_m", "w4a4_medium_m", "fp4_small_m", "nf4_dequantize", "nf4_few_rows")
                or constants.get("HALVES") == 1
            )
            reads_weights = few or reads_scales
            assert bool(weights) == reads_weights, f"{kernel}: {set(before)}"
        assert activations[kernel.name] <= set(after), f"{kernel}: {set(after)}"


def test_only_early_kernels_wait(disassembled, early_kernels):
    """One that does not wait reads what it likes: it must not start early."""
    waiting = {kernel for (kernel, _), code in disassembled.items() if WAIT in code.instructions}
    assert waiting == {kernel for kernel, _ in READ if kernel in early_kernels}
