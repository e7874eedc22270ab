"""Run a kernel's own text on the CPU: emulate.hpp gives CUDA's words and, for each instruction, the same in C++.

The blocks of a cluster run at once if what they share is memory that the launch asks for, else one block is all.
Hopper's product is not run: of hopper.cuh, which is instructions alone, nothing is left.

What this shows without a GPU: fragment and memory orders, edges, barriers that all threads reach, and arithmetic, but
for the order of sums inside one tensor-core product; under ThreadSanitizer also a barrier that is missing (races.py).
What it cannot: asynchronous copies that have not arrived.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from svdq.kernels.compile import Kernel, source

COMPILER = None if sys.platform == "darwin" else shutil.which("g++") or shutil.which("clang++")  # no contexts there
HEADER = Path(__file__).with_name("emulate.hpp")

# Functions of common.cuh that hold instructions: signature → body.
INSTRUCTIONS = {
    "float2 widen(f16, u32 pair)": "return host_widen(pair);",
    "u32 narrow(f16, float a, float b)": "return host_narrow_half(a, b);",
    "u32 narrow(bf16, float a, float b)": "return host_narrow_bfloat(a, b);",
    "float max_nan(float a, float b)": "return host_max_nan(a, b);",
    "void mma_tf32(float (&d)[4], float a0, float a1, float a2, float a3, float b0, float b1)": (
        "host_mma_tf32(d, a0, a1, a2, a3, b0, b1);"
    ),
    "void mma_integer(u32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 c0, u32 c1, u32 c2, u32 c3)": (
        "host_mma_integer(d, a, b, c0, c1, c2, c3);"
    ),
    "void mma_half(f16, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)": (
        "host_mma_half(float_of_half, d, a0, a1, a2, a3, b0, b1);"
    ),
    "void mma_half(bf16, float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1)": (
        "host_mma_half(float_of_bfloat, d, a0, a1, a2, a3, b0, b1);"
    ),
    "u32 shared_address(const void* p)": "return 0;",
    "void copy_async(void* to, const void* from)": "host_copy_async(to, from);",
    "void copy_commit()": "",
    "void copy_wait()": "",
    "uint4 load_once(const uint4* p)": "return *p;",
    "void prefetch(const void* p)": "",
    "void let_next_kernel_start()": "",
    "void wait_for_previous_kernel()": "",
}

# Of single kernels: functions, and statements.
INSTRUCTIONS_OF_SOME = {
    "void barrier_init(u64* barrier, int arrivals)": "host_barrier_init(*barrier, arrivals);",
    "void barrier_init_done()": "",
    "void barrier_arrive(u64* barrier)": "host_barrier_change(*barrier, 1, 0);",
    "void barrier_expect(u64* barrier, int bytes)": "host_barrier_change(*barrier, 1, bytes);",
    "void barrier_wait(u64* barrier, u32 parity)": "host_barrier_wait(*barrier, parity);",
    "void bulk_copy(u32 to, const void* from, int bytes, u64* barrier)": "",
    "void bulk_copy(void* to, const void* from, int bytes, u64* barrier)": "host_bulk_copy(to, from, bytes, *barrier);",
    "void cluster_arrive()": "host_cluster_arrive();",
    "void cluster_wait()": "host_cluster_wait();",
    "u32 address_in_block(const void* p, u32 block)": "return 0;",
    "float load_of_block(const float* p, u32 block)": "return *p;",
    "void store_to_block(float2* p, u32 block, float2 value)": "*host_of_block(p, block) = value;",
    "u32 fma_pair(f16, u32 a, u32 b, u32 c)": "return host_fma_pair(float_of_half, half_of_float, a, b, c);",
    "u32 fma_pair(bf16, u32 a, u32 b, u32 c)": "return host_fma_pair(float_of_bfloat, bfloat_of_float, a, b, c);",
    "u32 look_up(const unsigned char* table, u32 at)": "return *reinterpret_cast<const u32*>(table + at);",
    "u32 multiply_halves(u32 a, u32 b)": "return host_multiply_halves(a, b);",
    "void mma_scaled(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 a_scales, u32 b_scales)": (
        "host_mma_scaled(d, a, b0, b1, a_scales, b_scales, THREAD);"
    ),
}
STATEMENTS = {
    'asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));': "pair = host_narrow_e4m3(a, b);",
    'asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(mask) : "r"(signs));': "mask = host_byte_signs(signs);",
}


def host_text(kernel: Kernel) -> str:
    """C++ with a function `run`: the grid and threads, then the kernel's own parameters."""
    parts = re.split(r"^#line (\d+) (.*)$", source(kernel), flags=re.MULTILINE)  # …, line, file, text, …
    places = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    text = "".join(part for line, file, part in places if file != '"hopper.cuh"' or line == "1")
    for statement, host in STATEMENTS.items():
        text = text.replace(statement, host)
    for signature, body in (INSTRUCTIONS | INSTRUCTIONS_OF_SOME).items():
        start = text.find(f"__device__ __forceinline__ {signature} {{")
        if start < 0:
            assert signature in INSTRUCTIONS_OF_SOME, f"common.cuh has no function {signature}"
            continue
        line = text.index("\n", start)
        end = line if text[line - 1] == "}" else text.index("\n}", start) + 2
        text = f"{text[:start]}inline {signature} {{ {body} }}{text[end:]}"
    text = text.replace(
        "extern __shared__ __align__(16) unsigned char shared[];", "unsigned char* const shared = own_block().memory;"
    )
    text = text.replace("__shared__ __align__(16)", "alignas(16) static")
    assert "asm" not in text, "an instruction without a body in emulate.py"
    name, parameters = re.search(r'extern "C" __global__ void [^;{]*?(\w+)\(([^()]*)\) \{', text).groups()
    names = ", ".join(re.search(r"(\w+)$", part.strip())[1] for part in parameters.split(","))
    run = (
        f'extern "C" bool run(int grid_x_, int grid_y_, int grid_z_, int threads_, int cluster_, {parameters}) {{\n'
        f"  return launch_on_host({{grid_x_, grid_y_, grid_z_}}, threads_, cluster_, [&] {{ {name}({names}); }});\n}}\n"
    )
    return f"{text}\n{run}"


class Emulator:
    """launch(...) with the signature of svdq.kernels.launch.launch; libraries are kept in a folder, one a kernel."""

    def __init__(self, folder: Path, architecture: int, flags: tuple[str, ...] = ()):
        self.folder, self.architecture, self.flags = folder, architecture, flags
        self.libraries: dict[Kernel, ctypes.CDLL] = {}
        self.header = folder / f"{architecture}.hpp"
        self._compile("-x", "c++-header", HEADER, "-o", f"{self.header}.gch")  # once for all kernels

    def launch(self, kernel, device, grid, threads, arguments, *, early=False, shared_bytes=0, cluster=()):
        assert not any(blocks > 1 for blocks in cluster[1:])
        if kernel not in self.libraries:
            self.libraries[kernel] = self._build(kernel)
        sizes = [*grid, 1, 1][:3]
        ended = self.libraries[kernel].run(
            *map(ctypes.c_int, [*sizes, threads, (cluster or (1,))[0]]), *map(_argument, arguments)
        )
        assert ended, f"{kernel}: some threads wait at a barrier that others do not reach"

    def _build(self, kernel: Kernel) -> ctypes.CDLL:
        stem = self.folder / f"{self.architecture}_{len(self.libraries)}"
        stem.with_suffix(".cpp").write_text(host_text(kernel))
        self._compile("-shared", "-include", self.header, stem.with_suffix(".cpp"), "-o", stem.with_suffix(".so"))
        library = ctypes.CDLL(str(stem.with_suffix(".so")))
        library.run.restype = ctypes.c_bool
        return library

    def _compile(self, *arguments):
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-w", "-fPIC", f"-DARCHITECTURE={self.architecture}"]
        built = subprocess.run([COMPILER, *flags, *self.flags, *arguments], capture_output=True, text=True)
        assert built.returncode == 0, built.stderr[:4000]


def _argument(value):
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(0)
    if isinstance(value, np.int64):
        return ctypes.c_longlong(int(value))
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int(value)
