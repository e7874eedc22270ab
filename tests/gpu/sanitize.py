"""Every operator once on odd shapes, for compute-sanitizer; nothing is compared here.

    compute-sanitizer --tool memcheck  python tests/gpu/sanitize.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py
    compute-sanitizer --tool initcheck python tests/gpu/sanitize.py

Operands are made on the CPU, so that few kernels besides the project's own run under the tool.
SVDQ_TEST_DEVICE=cpu runs the same calls without a GPU.
"""

import sys
from collections.abc import Iterator

import torch
from oracle import DEVICE, HALVES, ON_GPU, READY, inputs, layer, normal, nvfp4_tensors
from torch import Tensor

from svdq.kernels import hopper, nvfp4, weight_only  # noqa: F401  its operators
from svdq.linear import W4A4Linear, W4A4LinearGroup

HOPPER = not ON_GPU or (READY and hopper.runs_on(DEVICE))

SIZES = [  # m, n, k, rank, transform
    (1, 96, 64, 0, ""),
    (5, 130, 192, 16, "smooth"),
    (9, 4100, 192, 16, "rotation"),
    (16, 96, 576, 48, "smooth rotation clip"),
    (17, 130, 64, 48, "clip"),
    (129, 96, 192, 16, "smooth rotation"),
    (200, 130, 576, 48, "smooth rotation clip"),
    (33, 97, 2048, 32, "rotation"),
    (64, 4100, 4160, 16, "rotation"),
    (65, 97, 2048, 32, "rotation"),
    (3, 96, 2048, 64, "smooth rotation"),
]
SIZES += [  # few tokens, each with each
    (m, n, k, (0, 16, 48)[(i + j + c) % 3], ("", "smooth", "rotation", "smooth rotation clip")[(i + 2 * j + c) % 4])
    for i, m in enumerate((1, 9, 16))
    for j, n in enumerate((96, 130, 300))
    for c, k in enumerate((64, 192, 576))
]
HEADS = [(1, 3, 1, 64, 1), (5, 9, 3, 128, 5), (66, 2, 2, 64, 33)]  # tokens, heads of q, of k, their size, positions


def linears(dtype: torch.dtype) -> Iterator[str]:
    for m, n, k, rank, parts in SIZES:
        made = W4A4Linear(layer(n, k, rank, parts=parts)).to(DEVICE)
        wide = torch.empty(m, k + 8, dtype=dtype)
        wide[:, :k] = inputs("random", m, k, dtype)
        x = wide.to(DEVICE)[:, :k]  # the last row ends before the memory does
        weight = (1 + 0.2 * normal(k)).to(dtype).to(DEVICE)
        factor = torch.ops.svdq.inv_rms(x, 1e-6)
        activation = (made.down, made.inv_smooth, made.rotation, made.clip)
        made.run(x, factor, weight, n)
        packed = torch.ops.svdq.quantize_lora_down(x, *activation, None, None)
        for out in (dtype, torch.float32):
            for bias in (made.packed_bias, None):
                torch.ops.svdq.w4a4_gemm_lora(*packed, made.qweight, made.wscales, made.up, bias, m, n, out)
        for values in (False, True) if HOPPER else ():
            packed = torch.ops.svdq.quantize_lora_down_e4m3(x, *activation, factor, weight, values)
            for out in (dtype, torch.float32):
                weights = (made.qweight, made.wscales, made.up, made.packed_bias)
                torch.ops.svdq.w4_gemm_lora_e4m3(*packed, *weights, m, n, out)
        yield f"linear {m} x {n} x {k}, rank {rank}, {dtype}"


def siblings(dtype: torch.dtype) -> Iterator[str]:
    """Linears of one input, each with its own columns of t."""
    parts = [layer(n, 192, 16, parts="smooth rotation", seed=seed) for seed, n in ((10, 130), (20, 96), (30, 64))]
    for activations in ("int4", "fp8") if HOPPER else ("int4",):
        group = W4A4LinearGroup(parts, activations=activations).to(DEVICE)
        for m in (1, 16, 40):
            group(inputs("random", m, 192, dtype).to(DEVICE))
            yield f"siblings of {m} rows, {activations}, {dtype}"


def weights_alone(dtype: torch.dtype) -> Iterator[str]:
    """W4A16 and W8A16: k no multiple of a tile, more groups than are staged at once, rows no multiple of a block."""
    for m in (1, 3, 8, 9, 40, 65):
        for n, k, group in ((33, 192, 64), (40, 4224, 32), (97, 1152, 128), (17, 96, 96)):
            wide = torch.empty(m, k + 8, dtype=dtype)
            wide[:, :k] = inputs("random", m, k, dtype)
            x = wide.to(DEVICE)[:, :k]
            words, codes = (
                torch.randint(0, 127, (n, size), dtype=kind) for size, kind in ((k // 8, torch.int32), (k, torch.int8))
            )
            scales, rank = (
                torch.rand(n, k // group).half().to(DEVICE),
                [normal(size, 16).half().to(DEVICE) for size in (k, n)],
            )
            zeros, bias = torch.ones(n, k // group, dtype=torch.uint8).to(DEVICE), normal(n).to(dtype).to(DEVICE)
            torch.ops.svdq.w4a16_linear(x, words.to(DEVICE), scales, zeros, group, *rank, bias)
            torch.ops.svdq.w4a16_linear(x, words.to(DEVICE), scales, None, group, None, None, None, torch.float32)
            torch.ops.svdq.w8a16_linear(x, codes.to(DEVICE), scales[:, :1].contiguous(), *rank, bias)
            yield f"weights alone {m} x {n} x {k}, groups of {group}, {dtype}"


def heads(dtype: torch.dtype) -> Iterator[str]:
    for tokens, q_heads, k_heads, d, positions in HEADS:
        fused = normal(tokens, (q_heads + 2 * k_heads) * d).to(dtype).to(DEVICE)
        q = fused[:, : q_heads * d].unflatten(1, (q_heads, d))
        k = fused[:, q_heads * d : (q_heads + k_heads) * d].unflatten(1, (k_heads, d))
        norms: list[Tensor] = [normal(d, seed=seed).to(dtype).to(DEVICE) for seed in (1, 2)]
        tables = [normal(positions, d, seed=seed).to(dtype).to(DEVICE) for seed in (3, 4)]
        torch.ops.svdq.qknorm_rope(q, k, *norms, *tables, 1e-6)
        torch.ops.svdq.qknorm_rope(q, k, None, None, *tables, 1e-6)
        yield f"heads {tokens} x ({q_heads} + {k_heads}) x {d}, {dtype}"


def floats(dtype: torch.dtype) -> Iterator[str]:
    for m, n, k, rank, parts in (
        (1, 96, 64, 0, ""),
        (20, 130, 192, 48, "smooth"),
        (70, 97, 576, 16, "smooth rotation"),
        (200, 300, 192, 0, "rotation"),
    ):
        *tensors, transform, bias = nvfp4_tensors(n, k, rank, parts)
        one = nvfp4.pack(*(tensor.to(DEVICE) for tensor in tensors), transform.to(DEVICE), bias.to(DEVICE))
        x = inputs("random", m, k, dtype).to(DEVICE)
        for out in (dtype, torch.float32):
            nvfp4.linear(x, one, out)
        yield f"NVFP4 {m} x {n} x {k}, rank {rank}, {dtype}"


def main() -> int:
    if not READY:
        print("no CUDA device", file=sys.stderr)
        return 2
    for dtype in HALVES:
        for done in (*linears(dtype), *siblings(dtype), *weights_alone(dtype), *heads(dtype), *floats(dtype)):
            print(done, flush=True)
    if ON_GPU:
        torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
