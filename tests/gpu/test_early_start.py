"""Kernels that start before the last one has ended: each must wait for what it reads, and before what it overwrites.

A chain of kernels, and a captured one, must give the bits of one that waits for the GPU after every kernel.
"""

from functools import cache
from itertools import pairwise

import pytest
import torch
from oracle import DEVICE, HALVES, ON_GPU, READY, check, inputs, layer, module, normal

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="a fact about the kernels")
NAN = float("nan")
REPEATS = 8 if ON_GPU else 1


def no_pause():
    pass


wait = torch.cuda.synchronize if ON_GPU else no_pause


def check_chain(chain, batches):
    """chain(pause) → a function of the input; without pauses it must give the bits of the one that waits."""
    waiting, run = chain(wait), chain(no_pause)
    wanted = [waiting(x).clone() for x in batches]
    assert all(y.isfinite().all() and y.any() for y in wanted)
    for repeat in range(REPEATS):
        found = [run(x) for x in batches]
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            check(a, b, what=f"repeat {repeat}, input {number}")


def check_captured_chain(chain, batches):
    """The same of a CUDA graph, which is replayed a hundred times on each input."""
    waiting, run = chain(wait), chain(no_pause)
    x, stream = batches[0].clone(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x)
    for number, batch in enumerate(batches):
        x.copy_(batch)
        wanted = waiting(x)
        wrong = torch.zeros((), dtype=torch.long, device=DEVICE)
        for _ in range(100):
            y.zero_()
            graph.replay()
            wrong += (y != wanted).any()
        assert wrong.item() == 0, f"input {number}: {wrong.item()} of 100 replays differ"
        check(y, wanted, what=f"last replay of input {number}")


def batches_of(m, k, dtype, count):
    return [inputs("random", m, k, dtype, seed=seed).to(DEVICE) for seed in range(count if ON_GPU else 1)]


# ---- chains

WIDTHS = [576, 3072, 64, 1024, 192, 4096] * (4 if ON_GPU else 1) + [576]  # long kernels before short ones, and after


def _halved(x, i):
    if i:  # the chain's input is its caller's
        x.mul_(0.5)


BETWEEN = {  # what else runs before a linear: x and its number → a row factor or None
    "nothing": lambda x, i: None,
    "a norm": lambda x, i: torch.ops.svdq.inv_rms(x, 1e-6),
    "a norm sometimes": lambda x, i: torch.ops.svdq.inv_rms(x, 1e-6) if i % 3 == 1 else None,
    "a kernel of torch": _halved,  # neither starts early nor lets the next one
}


# With nothing between them the outputs of 24 linears grow beyond float16.
CASES = [(between, dtype) for between in BETWEEN for dtype in HALVES if (between, dtype) != ("nothing", torch.float16)]


@cache
def linears():
    """Each linear's output has the width of the next one's input."""
    return [
        module(layer(n, k, rank, bias=i % 2 == 0, parts=parts, seed=100 + 10 * i))
        for i, (k, n) in enumerate(pairwise(WIDTHS))
        for rank, parts in [((0, 16, 48, 128)[i % 4], ("", "smooth", "rotation", "clip", "rotation")[i % 5])]
    ]


def chain_of(dtype, between):
    """The output of each linear is the input of the next.

    An output's memory is free again after the next linear, so the one after that writes where the last one reads.
    """
    weights = [(1 + 0.2 * normal(k, seed=5)).to(DEVICE, dtype) for k in WIDTHS]

    def chain(pause):
        def run(x):
            for i, part in enumerate(linears()):
                factor = BETWEEN[between](x, i)
                pause()
                norm = (factor, None if factor is None else weights[i])
                packed = torch.ops.svdq.quantize_lora_down(
                    x, part.down, part.inv_smooth, part.rotation, part.clip, *norm
                )
                pause()
                weight = (part.qweight, part.wscales, part.up, part.packed_bias)
                x = torch.ops.svdq.w4a4_gemm_lora(*packed, *weight, len(x), part.out_features, dtype)
                pause()
            return x

        return run

    return chain


@pytest.mark.parametrize("m", [1, 5, 9, 16, 40, 700])
@pytest.mark.parametrize(("between", "dtype"), CASES)
def test_a_chain_of_linears_gives_the_bits_of_one_that_waits(dtype, between, m):
    check_chain(chain_of(dtype, between), [0.1 * x for x in batches_of(m, 576, dtype, 5)])


@gpu_only
@pytest.mark.parametrize("m", [1, 5, 9, 16, 40])
@pytest.mark.parametrize(("between", "dtype"), CASES)
def test_a_captured_chain_of_linears_gives_the_bits_of_one_that_waits(between, dtype, m):
    check_captured_chain(chain_of(dtype, between), [0.1 * x for x in batches_of(m, 576, dtype, 5)])


# ---- streams


@gpu_only
@pytest.mark.parametrize("m", [5, 129])
def test_another_stream_reads_and_writes_in_its_own_order(m):
    run, stream = module(layer(640, 1024, 32, parts="rotation")), torch.cuda.Stream()
    late = inputs("random", m, 1024, torch.float16).to(DEVICE)
    wanted, x = run(late), torch.full_like(late, NAN)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the input arrives late: whoever does not wait for this stream reads NaN
        x.copy_(late)
        found = run(x)
    stream.synchronize()
    check(found, wanted, what="y")
