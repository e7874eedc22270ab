"""Weight-only linears on one GPU: correct first, then timed beside torch in the same run.

python benchmarks/weight_only.py

Every time is the median over replays of a CUDA graph of many calls, each with weights of its own (together larger than
the second-level cache), the candidates of a shape taken in turn; x is one buffer, in the cache as the output of the
layer before would be. "torch" is the linear of float16, "int4pack" torch._weight_int4pack_mm in bfloat16 and groups of
128. W4A16 has groups of 128 and zero points. "floor" is svdq.roofline's time for the same bytes and operations with the
bandwidth and the rate measured in this run: the best that a float16 linear of one token reads, and a 16-bit product.
"""

import statistics
from dataclasses import replace

import torch

from svdq import roofline
from svdq.kernels import launch, weight_only

CUDA = torch.device("cuda")
DTYPE = torch.float16
GROUP = 128
CACHE_BYTES = 200e6  # of weights in turn: four times the second-level cache
SIZES = (4096, 8192, 16384)
TOKENS = (1, 4, 8, 16, 32, 64, 128, 512)
BITS = {"W4A16": 4, "W8A16": 8}


def random_weight(n, k, bits, generator):
    """The operands of a linear after x, codes of every value."""
    scales = torch.rand(n, k // GROUP if bits == 4 else 1, generator=generator, device=CUDA).half() * 0.01 + 0.001
    if bits == 8:
        return torch.randint(-127, 128, (n, k), generator=generator, device=CUDA, dtype=torch.int8), scales
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator, device=CUDA, dtype=torch.int32)
    zeros = torch.randint(0, 16, scales.shape, generator=generator, device=CUDA, dtype=torch.uint8)
    return words, scales, zeros, GROUP


def linear(x, weight, dtype=None):
    operator = torch.ops.svdq.w4a16_linear if len(weight) == 4 else torch.ops.svdq.w8a16_linear
    return operator(x, *weight, None, None, None, dtype)


def weight_hat(weight):
    """float64, by other means than the operators'."""
    codes, scales = weight[0], weight[1].double()
    if len(weight) == 2:
        return codes.double() * scales
    nibbles = torch.stack([codes >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)
    return (nibbles.double() - weight[2].double().repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)


def distance(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def check(m, n, k, bits):
    """(error of float32 outputs, of rounded ones), relative Frobenius, against float64 on the same weights."""
    generator = torch.Generator("cuda").manual_seed(m)
    weight, x = random_weight(n, k, bits, generator), torch.randn(m, k, generator=generator, device=CUDA).to(DTYPE)
    x[:, k // 3] *= 100
    wanted = x.double() @ weight_hat(weight).t()
    errors = distance(linear(x, weight, torch.float32), wanted), distance(linear(x, weight), wanted)
    if not (errors[0] < (1e-6 if m <= weight_only.FEW_TOKENS else 5e-4) and errors[1] < 5e-4):
        raise SystemExit(f"{m} x {k} x {n}, {bits} bits: errors {errors}")
    return errors


def quantization_error(bits, n=4096, k=4096):
    """Relative Frobenius error of y from rounding a normal weight to the nearest code, nothing else."""
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(n, k, generator=generator, device=CUDA)
    x = torch.randn(64, k, generator=generator, device=CUDA).double()
    grouped = weight.unflatten(1, (-1, GROUP if bits == 4 else k))
    if bits == 8:
        scales = (grouped.abs().amax(-1, keepdim=True) / 127).half().float()
        found = (grouped / scales).round().clamp(-127, 127) * scales
    else:
        low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
        scales = ((high - low) / 15).half().float()
        zeros = (-low / scales).round()
        found = ((grouped / scales).round() + zeros).clamp(0, 15).sub(zeros) * scales
    return distance(x @ found.flatten(1).double().t(), x @ weight.double().t())


def graph_of(functions):
    """One CUDA graph that calls each function once; their results stay alive in it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for function in functions[:2]:
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for function in functions:
            results.append(function())
    return graph, results


def medians(candidates, calls, rounds=11):
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


def buffers(n, k, bits):
    return max(2, min(24, int(CACHE_BYTES // (n * k * bits / 8)) + 1))


def candidates_of(n, k):
    """Name → a function (m, i) of the i-th call."""
    generator = torch.Generator("cuda").manual_seed(1)
    weights = {
        name: [random_weight(n, k, bits, generator) for _ in range(buffers(n, k, bits))] for name, bits in BITS.items()
    }
    wide = [torch.randn(n, k, generator=generator, device=CUDA).to(DTYPE) for _ in range(buffers(n, k, 16))]
    packed = [
        torch._convert_weight_to_int4pack(torch.randint(0, 256, (n, k // 2), device=CUDA, dtype=torch.uint8), 8)
        for _ in range(buffers(n, k, 4))
    ]
    pairs = torch.randn(k // GROUP, n, 2, device=CUDA, dtype=torch.bfloat16)
    return {
        "torch": lambda x, i: torch.nn.functional.linear(x, wide[i % len(wide)]),
        "int4pack": lambda x, i: torch._weight_int4pack_mm(x.bfloat16(), packed[i % len(packed)], GROUP, pairs),
        **{
            name: lambda x, i, ones=ones: linear(x, ones[i % len(ones)])
            for name, ones in weights.items()
        },
    }  # fmt: skip


def timed(candidates, m, k, calls=96):
    inputs = {
        name: torch.randn(m, k, device=CUDA).to(torch.bfloat16 if name == "int4pack" else DTYPE) for name in candidates
    }
    graphs = {
        name: graph_of([lambda f=function, x=inputs[name], i=i: f(x, i) for i in range(calls)])
        for name, function in candidates.items()
    }
    return medians(graphs, calls)


def measured_gpu():
    """The GPU here with the best read bandwidth of a float16 linear of one token, and the rate of a 16-bit product."""
    wide = [torch.randn(16384, 16384, device=CUDA).to(DTYPE) for _ in range(2)]
    x, a = torch.randn(1, 16384, device=CUDA).to(DTYPE), wide[0][:8192, :8192].contiguous()
    runs = {
        "read": graph_of([lambda w=w: torch.nn.functional.linear(x, w) for w in wide * 2]),
        "product": graph_of([lambda: a @ a] * 4),
    }
    times = medians(runs, 4)
    bandwidth, rate = 2 * 16384**2 / times["read"][0] * 1e6, 2 * 8192**3 / times["product"][0] * 1e6
    known = roofline.find_gpu("auto")
    return replace(known, bandwidth=bandwidth, rates={"fp16": rate})


def floor(m, n, k, bits, gpu):
    """Microseconds by svdq.roofline: the operations of a 16-bit product, the bytes of the format."""
    sixteen = roofline.linear_work(m, n, k, "FP16", gpu)
    scales = {16: 0, 8: 2 * n, 4: 3 * n * k / GROUP}[bits]
    work = roofline.Work(sixteen.operations, sixteen.bytes - n * k * (2 - bits / 8) + scales)
    return work.seconds(gpu)[0] * 1e6


def main():
    from cuda.bindings import driver

    launch.require(CUDA)
    version = driver.cuDriverGetVersion()[1]
    known = f"CUDA driver {version // 1000}.{version % 1000 // 10}, torch {torch.__version__}"
    print(f"{torch.cuda.get_device_name()}, {known}; x {DTYPE}, groups of {GROUP} with zero points")
    print(
        "\nrelative error of y:  quantization (nearest, normal weights)    kernel, float32 outputs   rounded to float16"
    )
    for name, bits in BITS.items():
        worst = [max(pair) for pair in zip(*(check(m, 4096, 4096, bits) for m in (1, 4, 32, 64)), strict=True)]
        many = check(128, 4096, 4096, bits)
        print(f"  {name}, up to 64 tokens   {quantization_error(bits):20.1e} {worst[0]:35.1e} {worst[1]:21.1e}")
        print(f"  {name}, 128 tokens        {'':20s} {many[0]:35.1e} {many[1]:21.1e}", flush=True)
    gpu = measured_gpu()
    print(f"\nread {gpu.bandwidth / 1e12:.2f} TB/s, 16-bit product {gpu.rates['fp16'] / 1e12:.0f} TFLOP/s")
    print(
        "tokens x k x n         torch µs         int4pack µs     format            µs   over torch (floors')  "
        "over int4pack  of floor   TB/s"
    )
    for size in SIZES:
        candidates = candidates_of(size, size)
        for m in TOKENS if size == 4096 else (1,):
            times = timed({name: f for name, f in candidates.items() if name != "int4pack" or m <= 32}, m, size)
            base, other = times["torch"], times.get("int4pack")
            for name, bits in BITS.items():
                found, least = times[name], floor(m, size, size, bits, gpu)
                moved = size * size * bits / 8 + (3 * size * size / GROUP if bits == 4 else 2 * size)
                beside = f"{other[0]:8.2f} ({other[1]:4.2f})" if other else f"{'-':>15s}"
                print(
                    f"{f'{m} x {size} x {size}':20s} {base[0]:7.2f} ({base[1]:4.2f}) {beside}    {name} "
                    f"{found[0]:8.2f} ({found[1]:4.2f}) {base[0] / found[0]:7.2f}x "
                    f"({floor(m, size, size, 16, gpu) / least:4.2f}x) "
                    f"{f'{other[0] / found[0]:.2f}x' if other else '-':>12s} {least / found[0]:12.0%} "
                    f"{moved / found[0] / 1e6:8.2f}",
                    flush=True,
                )
        del candidates
    print("µs: median (largest − smallest). TB/s: codes, scales and zero points over the time.")


if __name__ == "__main__":
    main()
