"""Every kernel with a barrier, emulated under ThreadSanitizer: python races.py FOLDER [FILE TEXT BARRIER]

Not w4_wgmma_lora, which is not emulated. test_races.py starts it with the sanitizer's runtime preloaded. With FILE,
TEXT and BARRIER, the barrier in that text of that source is left out first, to see that its absence is found.
"""

import sys
from pathlib import Path

import emulate
import torch

from svdq import nf4
from svdq.kernels import compile as kernels
from svdq.kernels import hopper, ops
from svdq.kernels import nf4 as nf4_operators
from svdq.linear import W4A4Linear
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform

SHAPES = {  # (m, n, k, rank) that reach every barrier of a source
    "quantize_lora_down.cu": (17, 24, 192, 64),
    "w4a4_gemm_lora.cu": (70, 40, 320, 16),
    "w4a4_small_m.cu": (16, 16, 576, 64),
    "nf4_few_rows.cu": (4, 20, 2112, 0),
    "w4a4_medium_m.cu": (20, 16, 4160, 16),
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


def main(folder, *left_out):
    if left_out:
        leave_out(*left_out)
    ops.launch = hopper.launch = nf4_operators.launch = emulate.Emulator(
        Path(folder), 900, ("-fsanitize=thread", "-g")
    ).launch
    hopper.require, hopper._shares = lambda device: None, lambda *sizes: 1
    ops.cluster_blocks = lambda device: 2
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    for file in left_out[:1] or SHAPES:
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
        factor = ops.inv_rms(x, 1e-6)
        packed = (linear.down, linear.inv_smooth, True, 0.85)
        norm = factor, torch.ones(k, dtype=torch.float16)
        operands = ops.quantize_lora_down(x, *packed, *norm)
        if file == "quantize_lora_down.cu":
            for values in (False, True):
                hopper.quantize_lora_down_e4m3(x, *packed, *norm, values)
        ops.w4a4_gemm_lora(*operands, linear.qweight, linear.wscales, linear.up, None, m, n, torch.float32)
    print("ran to the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
