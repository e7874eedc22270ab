"""NF4 on one GPU beside bitsandbytes: bits first, then times in the same run.

python benchmarks/nf4.py     (pip install 'svdq[cuda]' bitsandbytes)

Every time is the median over replays of a CUDA graph of many calls, each with weights and results of its own (together
larger than the second-level cache), the candidates of a shape taken in turn; x of a product is one buffer, in the cache
as the output of the layer before would be. "floor" is the bytes that must move, each
once, over the bandwidth of an elementwise kernel measured in this run. bitsandbytes dequantizes in three launches: the
scales' codes, their mean added, the weights; "scales ready" is its last launch alone, with float32 scales given.
"""

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, quantize_4bit

from kernels import CACHE_BYTES, CUDA, ceilings, graph_of, medians
from svdq import nf4
from svdq.kernels import launch
from svdq.kernels.nf4 import nf4_dequantize, nf4_linear

DEQUANTIZED = [(4096, 4096), (1024, 3072), (4096, 14336), (8192, 8192), (16384, 16384)]
LINEAR = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192)]
ROWS = (1, 2, 4, 8, 16, 32, 33, 128)
TYPES = (torch.bfloat16, torch.float16, torch.float32)


def weights_of(n, k, seed, dtype=torch.bfloat16):
    """(bitsandbytes' tensor and state, the operands of svdq's operators), one weight quantized by bitsandbytes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weight = torch.randn(n, k, generator=generator, device=CUDA, dtype=torch.float32).mul_(0.02).to(dtype)
    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    parts = state.as_dict(packed=True)
    tensors = {"weight": packed, **{f"weight.{name}": part for name, part in parts.items()}}
    offset = nf4.check(tensors, n, k).offset
    return (packed, state), [tensors[suffix] for suffix in nf4.OPERANDS] + [offset]


def check(n, k):
    """Shares of dequantized values and codes with bitsandbytes' bits, and the error of one row against float64."""
    theirs, operands = weights_of(n, k, 99)
    equal = {}
    for dtype in TYPES:
        theirs[1].dtype = dtype
        found = nf4_dequantize(*operands, n, k, dtype)
        equal[dtype] = (found == dequantize_4bit(*theirs)).double().mean().item()
    weight = nf4_dequantize(*operands, n, k, torch.float32).double()
    x = torch.randn(1, k, device=CUDA).to(torch.bfloat16)
    theirs[1].dtype = torch.bfloat16
    wanted = x.double() @ weight.t()
    results = nf4_linear(x, *operands, n, None), bitsandbytes.matmul_4bit(x, theirs[0], theirs[1])
    return equal, [((y - wanted).norm() / wanted.norm()).item() for y in results]


def check_quantizer(n, k):
    """Shares of the codes and of the scales' codes that equal what bitsandbytes makes on this GPU."""
    weight = torch.randn(n, k, device=CUDA).mul_(0.02).to(torch.bfloat16)
    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    found = nf4.encode(weight)
    same = ((found["weight"] == packed), (found["weight.absmax"] == state.absmax))
    return [part.double().mean().item() for part in same]


def sets_for(size):
    return max(3, min(24, int(CACHE_BYTES // size) + 1))


def time_dequantization(n, k):
    made = [weights_of(n, k, seed) for seed in range(sets_for(n * k * 2.5))]
    ready = []
    for (_, state), _ in made:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset
        ready.append(scales)
    alone = torch.ops.bitsandbytes.dequantize_4bit.default
    candidates = {
        "svdq": lambda i: nf4_dequantize(*made[i][1], n, k, torch.bfloat16),
        "bitsandbytes": lambda i: dequantize_4bit(*made[i][0]),
        "scales ready": lambda i: alone(made[i][0][0], ready[i], 64, "nf4", (n, k), torch.bfloat16),
    }
    return timed(candidates, len(made))


def time_linear(m, n, k):
    made = [weights_of(n, k, seed) for seed in range(sets_for(n * k * 0.5 + 2 * m * (n + k)))]
    x = torch.randn(m, k, device=CUDA).to(torch.bfloat16)
    candidates = {
        "svdq": lambda i: nf4_linear(x, *made[i][1], n, None),
        "bitsandbytes": lambda i: bitsandbytes.matmul_4bit(x, *made[i][0]),
    }
    return timed(candidates, len(made))


def timed(candidates, calls):
    graphs = {name: graph_of([lambda f=f, i=i: f(i) for i in range(calls)]) for name, f in candidates.items()}
    return medians(graphs, calls)


def scale_bytes(n, k):
    return n * k / 64 + n * k / 16384 * 4


def main():
    launch.require(CUDA)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bitsandbytes {bitsandbytes.__version__}")
    bandwidth, _ = ceilings()
    print(f"an elementwise kernel reads and writes {bandwidth / 1e12:.2f} TB/s")
    print("\nequal to bitsandbytes' dequantized values, and relative error of one row's product against float64")
    for n, k in [(96, 192), (7, 30), *LINEAR[:1], (4096, 14336)]:
        equal, errors = check(n, k)
        shares = ", ".join(f"{str(dtype).removeprefix('torch.')} {share:.4%}" for dtype, share in equal.items())
        print(f"{n:5d} x {k:5d}  {shares}; svdq {errors[0]:.1e}, bitsandbytes {errors[1]:.1e}")
    same = check_quantizer(4096, 4096)
    print(f"4096 x 4096 quantized on this GPU: {same[0]:.4%} of codes equal, {same[1]:.4%} of the scales' codes")
    print("\ndequantization to bfloat16, µs (spread)")
    print("     N x K               svdq   bitsandbytes    speed-up   scales ready    speed-up    TB/s  of floor")
    for n, k in DEQUANTIZED:
        times = time_dequantization(n, k)
        (own, _), moved = times["svdq"], n * k * 2.5 + scale_bytes(n, k)
        print(
            f"{n:6d} x {k:5d} {times['svdq'][0]:8.1f} ({times['svdq'][1]:4.1f}) "
            f"{times['bitsandbytes'][0]:8.1f} ({times['bitsandbytes'][1]:4.1f}) {times['bitsandbytes'][0] / own:8.2f}x "
            f"{times['scales ready'][0]:8.1f} ({times['scales ready'][1]:4.1f}) {times['scales ready'][0] / own:8.2f}x "
            f"{moved / own / 1e6:8.2f} {moved / bandwidth * 1e6 / own:8.0%}",
            flush=True,
        )
    print("\nlinear in bfloat16, µs (spread)")
    print("      M x N x K              svdq   bitsandbytes    speed-up  of floor")
    for n, k in LINEAR:
        for m in ROWS:
            times = time_linear(m, n, k)
            own, moved = times["svdq"][0], n * k * 0.5 + scale_bytes(n, k) + 2 * m * (n + k)
            print(
                f"{m:4d} x {n:5d} x {k:5d} {own:8.1f} ({times['svdq'][1]:4.1f}) "
                f"{times['bitsandbytes'][0]:8.1f} ({times['bitsandbytes'][1]:4.1f}) "
                f"{times['bitsandbytes'][0] / own:8.2f}x {moved / bandwidth * 1e6 / own:8.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
