"""Every kernel with a barrier, emulated under ThreadSanitizer: python races.py FOLDER [FILE TEXT]

test_races.py starts it with the sanitizer's runtime preloaded. With FILE and TEXT, that text of that source is left out
first: a barrier, to see that its absence is found.
"""

import sys
from pathlib import Path

import emulate
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import ops
from svdq.linear import W4A4Linear
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform

SHAPES = {  # (m, n, k, rank) that reach every barrier of a source
    "quantize_lora_down.cu": [(17, 24, 192, 64)],
    "w4a4_gemm_lora.cu": [(20, 40, 320, 16)],
    "w4a4_small_m.cu": [(16, 16, 576, 64)],
}


def leave_out(file, text):
    read = kernels._read_source

    def without(name):
        found = read(name)
        if name != file:
            return found
        assert text in found
        return found.replace(text, "//")

    kernels._read_source = without


def main(folder, *left_out):
    if left_out:
        leave_out(*left_out)
    ops.launch = emulate.Emulator(Path(folder), 900, ("-fsanitize=thread", "-g")).launch
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    shapes = SHAPES[left_out[0]] if left_out else [shape for shapes in SHAPES.values() for shape in shapes]
    for m, n, k, rank in shapes:
        codes = torch.randint(-7, 8, (n, k), generator=generator, dtype=torch.int8)
        scales = (uniform(n, k // 64) * 0.01 + 0.001).half()
        projections = uniform(k, rank).half(), uniform(n, rank).half()
        transform = ActivationTransform(uniform(k) + 0.5, True, 0.85)
        linear = W4A4Linear(Layer("layer", codes, scales, *projections, None, transform))
        x = uniform(m, k).half()
        factor = ops.inv_rms(x, 1e-6)
        packed = (linear.down, linear.inv_smooth, True, 0.85)
        operands = ops.quantize_lora_down(x, *packed, factor, torch.ones(k, dtype=torch.float16))
        ops.w4a4_gemm_lora(*operands, linear.qweight, linear.wscales, linear.up, None, m, n, torch.float32)
    print("ran to the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
