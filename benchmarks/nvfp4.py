"""NVFP4 on one GPU: correct first, then timed beside cuBLAS bfloat16 in the same run.

python benchmarks/nvfp4.py

Times are as in benchmarks/kernels.py: medians over replays of a CUDA graph of many calls, each with weights of its own
(together larger than the second-level cache), the candidates of a shape taken in turn; up to 64 tokens x is one buffer.
"linear" is all launches: nvfp4_quantize, then nvfp4_gemm. "floor" is the larger of two times, both by what this run
measures: bytes of weights, x and y over the bandwidth, and 2·M·N·K over the rate of torch's bfloat16 product.
"""

import torch

from kernels import CACHE_BYTES, CUDA, graph_of, medians
from svdq import nvfp4
from svdq.grid import pack_nibbles, unpack_nibbles
from svdq.kernels import nvfp4 as ops
from svdq.rounding import ActivationTransform

SHAPES = [
    (1, 4096, 4096),
    (8, 4096, 4096),
    (16, 4096, 4096),
    (32, 4096, 4096),
    (64, 4096, 4096),
    (128, 4096, 4096),
    (1, 8192, 8192),
    (700, 1024, 4096),
    (700, 3072, 1024),
    (4096, 3072, 3072),
    (4352, 3840, 3072),
    (4352, 3840, 15360),
    (4352, 15360, 3840),
    (4352, 10240, 3072),
]
RANK = 16
DTYPE = torch.bfloat16


def random_linear(n, k, seed=0):
    """The canonical tensors of a linear of random codes, with all that a real one has, and their packed operands."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=CUDA)

    codes = torch.randint(0, 16, (n, k), generator=generator, device=CUDA, dtype=torch.uint8)
    scales = (normal(n, k // nvfp4.GROUP).abs() * 60 + 30).to(torch.float8_e4m3fn)
    canonical = (
        pack_nibbles(codes),
        scales,
        torch.full((n,), 2.0**-13, device=CUDA),
        (normal(k, RANK) * 0.02).half(),
        (normal(n, RANK) * 0.02).half(),
        ActivationTransform(normal(k).exp(), True),
        normal(n),
    )
    return canonical, ops.pack(*canonical)


def check(m, k, n):
    """Largest relative Frobenius error of float32 outputs against float64; inputs with and without outliers."""
    (qweight, scales, wcscale, down, up, transform, bias), packed = random_linear(n, k)
    weight = nvfp4.decode(unpack_nibbles(qweight), scales, torch.float64) * wcscale[:, None]
    worst = 0.0
    for outlier in (1.0, 100.0):
        x = torch.randn(m, k, device=CUDA)
        x[:, k // 3] *= outlier
        x = x.to(DTYPE)
        wanted = nvfp4.fake_quantize_activation(transform.apply(x), torch.float64) @ weight.t()
        wanted += x.double() @ down.double() @ up.double().t() + bias
        y = ops.linear(x, packed, torch.float32)
        worst = max(worst, ((y - wanted).norm() / wanted.norm()).item())
        rounded = ((ops.linear(x, packed) - wanted).norm() / wanted.norm()).item()
        if rounded > 2.0**-9:  # half a unit in the last place of bfloat16, at most
            raise SystemExit(f"{m}, {k}, {n}: the {DTYPE} output is {rounded:.1e} away")
    if worst > 1e-6:  # float32 sums give 2e-7; one wrong code in a million gives more
        raise SystemExit(f"{m}, {k}, {n}: the float32 output is {worst:.1e} away")
    return worst


def time_shape(m, k, n):
    sets = max(2, min(24, int(CACHE_BYTES // (n * k / 2 + m * k * 2 + m * n * 2)) + 1))
    linears = [random_linear(n, k, seed)[1] for seed in range(sets)]
    inputs = [torch.randn(m, k, device=CUDA).to(DTYPE) for _ in range(sets if m > ops.FEW_TOKENS else 1)] * sets
    copies = min(sets, max(2, int(CACHE_BYTES // (n * k * 2)) + 1))
    weights = [torch.randn(n, k, device=CUDA).to(DTYPE) for _ in range(copies)]
    operands = [
        torch.ops.svdq.nvfp4_quantize(inputs[i], one.down, one.inv_smooth, one.rotation)
        for i, one in enumerate(linears)
    ]

    def product(i):
        one = linears[i % sets]
        packed = (one.qweight, one.wscales, one.wcscale, one.up, one.bias)
        return torch.ops.svdq.nvfp4_gemm(*operands[i % sets], *packed, m, n, DTYPE)

    candidates = {
        "cublas": lambda i: inputs[i % sets] @ weights[i % copies].t(),
        "linear": lambda i: ops.linear(inputs[i % sets], linears[i % sets]),
        "gemm": product,
    }
    calls = max(sets, 4)
    graphs = {name: graph_of([lambda f=f, i=i: f(i) for i in range(calls)]) for name, f in candidates.items()}
    return medians(graphs, calls)


def ceilings():
    """(bytes a second that an elementwise kernel reads and writes, operations a second of torch's bfloat16 product)."""
    source = torch.randint(0, 255, (2**29,), device=CUDA, dtype=torch.int32)
    target = torch.empty_like(source)
    copy = medians({"copy": graph_of([lambda: torch.bitwise_not(source, out=target)] * 4)}, 4)["copy"][0]
    a, b = (torch.randn(8192, 8192, device=CUDA).to(DTYPE) for _ in range(2))
    product = medians({"product": graph_of([lambda: a @ b.t()] * 4)}, 4)["product"][0]
    return 2 * source.numel() * 4 / copy * 1e6, 2 * 8192**3 / product * 1e6


def main():
    from cuda.bindings import driver

    version = driver.cuDriverGetVersion()[1]
    known = f"CUDA driver {version // 1000}.{version % 1000 // 10}, torch {torch.__version__}"
    print(f"{torch.cuda.get_device_name()}, {known}")
    bandwidth, rate = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, bfloat16 product {rate / 1e12:.0f} TFLOP/s; {DTYPE}, rank {RANK}")
    print("µs (spread)          cuBLAS bf16        linear  speed-up  of floor     GEMM  TFLOP/s     error")
    for m, k, n in SHAPES:
        error, times = check(m, k, n), time_shape(m, k, n)
        base, linear, product = times["cublas"], times["linear"], times["gemm"][0]
        moved = n * k / 2 + n * k / nvfp4.GROUP + 2 * RANK * (n + k) + 2 * m * (n + k)
        share = max(moved / bandwidth, 2 * m * n * k / rate) * 1e6 / linear[0]
        print(
            f"{f'{m} x {k} x {n}':20s} {base[0]:6.1f} ({base[1]:4.1f}) {linear[0]:6.1f} ({linear[1]:4.1f}) "
            f"{base[0] / linear[0]:8.2f}x {share:8.0%} {product:8.1f} "
            f"{2 * m * n * k / product / 1e6:8.0f} {error:9.1e}",
            flush=True,
        )
    print("M x K x N: tokens, inputs, outputs. GEMM: nvfp4_gemm alone. error: kernel error, float32 outputs.")


if __name__ == "__main__":
    main()
