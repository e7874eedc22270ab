"""Every kernel with a barrier, emulated under ThreadSanitizer: python races.py FOLDER [LEFT_OUT]

Not w4_wgmma_lora, which is not emulated. test_races.py starts it with the sanitizer's runtime preloaded. LEFT_OUT is
JSON, a list of [file, text, barrier]: the barrier in that text of that source is left out, to see that its absence is
found. Prints a JSON list: the exit status of a process for each of them, at last of one for all kernels as they are.
"""

import json
import os
import sys
import traceback
from pathlib import Path

import emulate
import torch

from svdq import nf4
from svdq.kernels import compile as kernels
from svdq.kernels import hopper, ops, reference
from svdq.kernels import nf4 as nf4_operators
from svdq.linear import W4A4Linear
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform

SHAPES = {  # (m, n, k, rank) that reach every barrier of a source
    "quantize_lora_down.cu": (17, 24, 192, 64),
    "w4a4_gemm_lora.cu": (70, 40, 320, 16),
    "w4a4_small_m.cu": (16, 16, 576, 64),
    "nf4_few_rows.cu": (4, 20, 2112, 0),
    "w4a4_medium_m.cu": (40, 16, 4736, 16),  # 37 groups a block: 10 stages for a ring of 8
}


def leave_out(file, text, barrier):
    read = kernels._read_source

    def without(name):
        found = read(name)
        if name != file:
            return found
        assert found.count(text) == 1 and text.count(barrier) == 1
        return found.replace(text, text.replace(barrier, ";"))

    kernels._read_source = without


def main(folder, left_out="[]"):
    torch.set_num_threads(1)  # so that processes can fork
    hopper.require, hopper._shares = lambda device: None, lambda *sizes: 1
    ops.cluster_blocks = lambda device: 2
    emulator = emulate.Emulator(Path(folder), 900, ("-fsanitize=thread", "-g"))
    ops.launch = hopper.launch = nf4_operators.launch = emulator.launch
    print(json.dumps([in_a_process(job) for job in [*json.loads(left_out), None]]))


def in_a_process(job):
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    try:
        if job:
            leave_out(*job)
        run(job[:1] if job else SHAPES)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run(files):
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    for file in files:
        m, n, k, rank = SHAPES[file]
        if file == "nf4_few_rows.cu":
            tensors = nf4.encode(uniform(n, k) - 0.5)
            operands = [tensors[suffix] for suffix in nf4.OPERANDS]
            nf4_operators.nf4_linear(uniform(m, k).half(), *operands, nf4.check(tensors, n, k).offset, n, None)
            continue
        codes = torch.randint(-7, 8, (n, k), generator=generator, dtype=torch.int8)
        scales = (uniform(n, k // 64) * 0.01 + 0.001).half()
        projections = uniform(k, rank).half(), uniform(n, rank).half()
        transform = ActivationTransform(uniform(k) + 0.5, True, 0.85)
        linear = W4A4Linear(Layer("layer", codes, scales, *projections, None, transform))
        x = uniform(m, k).half()
        packed = (linear.down, linear.inv_smooth, True, 0.85)
        if file == "quantize_lora_down.cu":
            norm = ops.inv_rms(x, 1e-6), torch.ones(k, dtype=torch.float16)
            ops.quantize_lora_down(x, *packed, *norm)
            for values in (False, True):
                hopper.quantize_lora_down_e4m3(x, *packed, *norm, values)
            continue
        operands = reference.quantize_lora_down(x, *packed, None, None, 2)
        ops.w4a4_gemm_lora(*operands, linear.qweight, linear.wscales, linear.up, None, m, n, torch.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
