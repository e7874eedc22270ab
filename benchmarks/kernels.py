"""The CUDA kernels on one GPU: correct first, then timed beside cuBLAS bfloat16 in the same run.

python benchmarks/kernels.py [--profile M,K,N]     (kernels_gpu.sh runs it with all the rest that needs a GPU)

Every time is the median over replays of a CUDA graph of many calls, each with weights of its own (together larger than
the second-level cache), the candidates of a shape taken in turn. Up to 64 tokens x is one buffer: in the cache, as the
output of the layer before would be; else x too is another in every call. "floor" is the larger of two times: the bytes
of weights, x and y over the bandwidth, and 2·M·N·K over the rate of the 8-bit tensor cores; both are measured in this
run, the rate with torch's 8-bit product. "linear" is all launches of W4A4Linear: quantize_lora_down, then the GEMM.
"""

import argparse
import statistics
from functools import cache

import torch

from svdq.kernels import hopper, launch, layout, ops
from svdq.linear import W4A4Linear
from svdq.quantized import Layer
from svdq.rounding import ActivationTransform

SHAPES = [
    (1, 4096, 4096),
    (16, 4096, 4096),
    (64, 4096, 4096),
    (700, 1024, 4096),
    (700, 2048, 1024),
    (700, 1024, 6144),
    (700, 3072, 1024),
    (4096, 3072, 3072),
    (4352, 3840, 3072),
    (4352, 3840, 15360),
    (4352, 15360, 3840),
    (4352, 10240, 3072),
]
BLOCK = SHAPES[3:7]  # q, k, v; o; gate, up; down of one decoder block of Qwen3-0.6B's sizes
RANK = 16
DTYPE = torch.bfloat16
CACHE_BYTES = 150e6  # of buffers in turn: more than twice the second-level cache
CUDA = torch.device("cuda")
NAMES = {"int4": "W4A4", "fp8": "W4A8"}


@cache
def paths():
    """What this GPU runs."""
    return ("int4", "fp8") if hopper.runs_on(CUDA) else ("int4",)


def random_linear(n, k, rank, seed=0):
    """A linear of random codes, with everything that a real one has: smoothing, rotation, clip, low rank, bias."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=CUDA)

    layer = Layer(
        "random",
        torch.randint(-7, 8, (n, k), generator=generator, device=CUDA, dtype=torch.int8),
        (normal(n, k // 64).abs() * 0.002 + 0.001).half(),
        (normal(k, rank) * 0.02).half(),
        (normal(n, rank) * 0.02).half(),
        normal(n),
        ActivationTransform(normal(k).exp(), True, 0.85),
    )
    return layer, *(W4A4Linear(layer, activations=kind) for kind in paths())


def dequantized(linear, layer, operands, x):
    """float64 (m, k): the activation that the GEMM sees."""
    if linear.activations == "int4":
        codes, scales = layer.transform.quantize(x)
        return codes.double() * scales.double().repeat_interleave(64, 1)
    codes, scales, _ = operands
    numbers = layout.unpack_matrix("fp8", codes, tuple(codes.shape))[: len(x), : x.shape[1]]
    return numbers.view(torch.float8_e4m3fn).double() * scales[: len(x), None].double()


def check(m, k, n):
    """Path → largest relative Frobenius error of float32 outputs against float64; inputs with and without outliers."""
    layer, *linears = random_linear(n, k, RANK)
    weight = layer.weight_hat(torch.float64)
    worst = dict.fromkeys(paths(), 0.0)
    for outlier in (1.0, 1000.0):
        x = torch.randn(m, k, device=CUDA)
        x[:, k // 3] *= outlier
        x = x.to(DTYPE)
        low_rank = x.double() @ layer.proj_down.double() @ layer.proj_up.double().t() + layer.bias
        for path, linear in zip(paths(), linears, strict=True):
            operands = linear.quantize(x)
            wanted = dequantized(linear, layer, operands, x) @ weight.t() + low_rank
            y = linear.product(operands, m, n, torch.float32)
            worst[path] = max(worst[path], ((y - wanted).norm() / wanted.norm()).item())
            rounded = ((linear(x) - wanted).norm() / wanted.norm()).item()
            if rounded > 2.0**-9:  # half a unit in the last place of bfloat16, at most
                raise SystemExit(f"{m}, {k}, {n}, {path}: the {DTYPE} output is {rounded:.1e} away")
    return worst


def graph_of(functions):
    """One CUDA graph that calls each function once; their results stay alive in it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for function in functions:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for function in functions:
            results.append(function())
    return graph, results


def medians(candidates, calls, rounds=15):
    """Microseconds a call of every graph, taken in turn; (median, largest − smallest) each."""
    times = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, (graph, _) in candidates.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / calls)
    return {name: (statistics.median(t[2:]), max(t[2:]) - min(t[2:])) for name, t in times.items()}


def time_shape(m, k, n):
    weight_bytes = n * k / 2
    sets = max(2, min(24, int(CACHE_BYTES // (weight_bytes + m * k * 2 + m * n * 2)) + 1))
    made = [random_linear(n, k, RANK, seed)[1:] for seed in range(sets)]
    linears = {path: [one[i] for one in made] for i, path in enumerate(paths())}
    inputs = [torch.randn(m, k, device=CUDA).to(DTYPE) for _ in range(sets if m > ops.FEW_TOKENS else 1)] * sets
    weights = [
        torch.randn(n, k, device=CUDA).to(DTYPE) for _ in range(min(sets, max(2, int(CACHE_BYTES // (n * k * 2)) + 1)))
    ]
    calls = max(sets, 4)
    candidates = {"cublas": lambda i: inputs[i % sets] @ weights[i % len(weights)].t()}
    for path, ones in linears.items():
        operands = [ones[i].quantize(inputs[i]) for i in range(sets)]
        candidates |= {
            f"{path} linear": lambda i, ones=ones: ones[i % sets](inputs[i % sets]),
            f"{path} quantize": lambda i, ones=ones: ones[i % sets].quantize(inputs[i % sets]),
            f"{path} gemm": lambda i, ones=ones, operands=operands: ones[i % sets].product(
                operands[i % sets], m, n, DTYPE
            ),
        }
    graphs = {
        name: graph_of([lambda f=function, i=i: f(i) for i in range(calls)]) for name, function in candidates.items()
    }
    return medians(graphs, calls)


def ceilings():
    """(bytes a second that an elementwise kernel reads and writes, operations a second of torch's 8-bit product)."""
    source = torch.randint(0, 255, (2**29,), device=CUDA, dtype=torch.int32)
    target = torch.empty_like(source)
    copy = medians({"copy": graph_of([lambda: torch.bitwise_not(source, out=target)] * 4)}, 4)["copy"][0]
    a, b = (torch.randint(-128, 127, (8192, 8192), device=CUDA, dtype=torch.int8) for _ in range(2))
    product = medians({"product": graph_of([lambda: torch._int_mm(a, b.t())] * 4)}, 4)["product"][0]
    return 2 * source.numel() * 4 / copy * 1e6, 2 * 8192**3 / product * 1e6


def floor(m, k, n, bandwidth, rate):
    moved = n * k / 2 + n * k / 64 * 2 + 2 * RANK * (n + k) + 2 * m * (n + k)
    return max(moved / bandwidth, 2 * m * n * k / rate) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", metavar="M,K,N", help="run the linear of one shape three times, for a profiler")
    chosen = parser.parse_args().profile
    if chosen:
        m, k, n = map(int, chosen.split(","))
        linears = random_linear(n, k, RANK)[1:]
        x = torch.randn(m, k, device=CUDA).to(DTYPE)
        for _ in range(3):
            for linear in linears:
                linear(x)
        torch.cuda.synchronize()
        return
    from cuda.bindings import driver

    launch.require(CUDA)
    version = driver.cuDriverGetVersion()[1]
    known = f"CUDA driver {version // 1000}.{version % 1000 // 10}, torch {torch.__version__}"
    print(f"{torch.cuda.get_device_name()}, {known}")
    bandwidth, rate = ceilings()
    print(f"copy {bandwidth / 1e12:.2f} TB/s, 8-bit product {rate / 1e12:.0f} TOPS; {DTYPE}, rank {RANK}")
    print(
        "µs (spread)           path  cuBLAS bf16        linear  speed-up  of floor  quantize     GEMM    TOPS     error"
    )
    sums = dict.fromkeys(("cublas", *paths()), 0.0)
    for m, k, n in SHAPES:
        errors, times = check(m, k, n), time_shape(m, k, n)
        for path, error in errors.items():
            base, linear = times["cublas"], times[f"{path} linear"]
            share = floor(m, k, n, bandwidth, rate) / linear[0]
            product = times[f"{path} gemm"][0]
            print(
                f"{f'{m} x {k} x {n}':20s}  {NAMES[path]} {base[0]:7.1f} ({base[1]:4.1f}) "
                f"{linear[0]:7.1f} ({linear[1]:4.1f}) "
                f"{base[0] / linear[0]:8.2f}x {share:8.0%} {times[f'{path} quantize'][0]:9.1f} {product:8.1f} "
                f"{2 * m * n * k / product / 1e6:7.0f} {error:9.1e}",
                flush=True,
            )
        if (m, k, n) in BLOCK:
            for name in sums:
                sums[name] += times["cublas" if name == "cublas" else f"{name} linear"][0]
    block = ", ".join(f"{NAMES[path]} {sums[path]:.1f} ({sums['cublas'] / sums[path]:.2f}x)" for path in paths())
    print(f"the four of 700 tokens, a decoder block of 1024 channels: cuBLAS {sums['cublas']:.1f} µs, {block}")
    print("M x K x N, tokens by inputs by outputs. TOPS: of the GEMM alone. error: kernel error, float32 outputs.")


if __name__ == "__main__":
    main()
