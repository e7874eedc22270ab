"""Weight-only linears against float64 on the dequantized weights, over formats, shapes, types and numbers of rows.

With SVDQ_TEST_DEVICE=cpu the same of the operators' CPU implementation, in fewer shapes.

Which error is allowed: up to 64 rows code − zero is exact and sums are float32, so outputs in float32 are as near as in
oracle.py; more rows multiply weights rounded to 16 bits, each wrong by half a unit in the last place at most.
"""

import pytest
import torch
from oracle import DEVICE, HALVES, ON_GPU, READY, D, check, normal, rng

from svdq.formats import pack_words
from svdq.kernels import weight_only

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="a fact about the kernels")
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])

TOKENS = (1, 2, 3, 4, 5, 8, 9, 33, 64, 65, 200)
_ALL = [  # n, k, group (0: 8 bits), symmetric, rank, bias
    (96, 192, 64, False, 16, True),
    (96, 192, 192, False, 0, False),
    (96, 192, 0, False, 16, True),
    (130, 4096, 128, False, 0, True),
    (33, 4064, 32, True, 0, False),
    (257, 2048, 32, False, 32, True),
    (64, 1088, 64, True, 7, False),
    (1, 32, 32, False, 0, True),
    (1, 32, 0, False, 0, False),
    (4096, 4096, 128, False, 16, True),
    (4096, 4096, 0, False, 0, False),
    (31, 20480, 128, False, 0, False),
    (40, 20480, 32, True, 16, False),
    (31, 20512, 0, False, 48, True),
    (100, 9216, 9216, True, 0, True),
]
SHAPES = _ALL if ON_GPU else _ALL[:3]
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # half a unit in the last place


def arguments(n, k, group, symmetric, rank, bias, dtype, seed=0):
    """Name of the operator and its operands after x, on the device; weight_hat float64."""
    generator = rng(seed)
    groups = 1 if not group else k // group
    scales = (torch.rand(n, groups, generator=generator) * 0.02 + 1e-4).half().to(DEVICE)
    low_rank = [normal(size, rank, seed=seed + 1).half().to(DEVICE) if rank else None for size in (k, n)]
    offset = normal(n, seed=seed + 2).to(DEVICE, dtype) if bias else None
    if not group:
        codes = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(DEVICE)
        return "w8a16_linear", (codes, scales, *low_rank, offset), codes.to(D) * scales.to(D)
    codes = torch.randint(0, 16, (n, k), generator=generator).to(DEVICE)
    zeros = None if symmetric else torch.randint(0, 16, (n, groups), generator=generator, dtype=torch.uint8).to(DEVICE)
    weight_hat = codes.to(D) - (8 if symmetric else zeros.to(D).repeat_interleave(group, 1))
    weight_hat *= scales.to(D).repeat_interleave(group, 1)
    return "w4a16_linear", (pack_words(codes.to(torch.int8)), scales, zeros, group, *low_rank, offset), weight_hat


def wanted(x, operands, weight_hat):
    """(y, the sum of absolute values of its terms), float64."""
    down, up, bias = operands[-3:]
    parts = [(x.to(D), weight_hat)]
    if up is not None:
        parts.append((x.to(D) @ down.to(D), up.to(D)))
    y, sizes = (sum(f(a) @ f(b).t() for a, b in parts) for f in (lambda v: v, torch.abs))
    if up is not None:  # t is a rounded sum itself
        sizes = sizes + x.to(D).abs() @ down.to(D).abs() @ up.to(D).abs().t()
    return (y, sizes) if bias is None else (y + bias.to(D), sizes + bias.to(D).abs())


def inputs(m, k, dtype):
    x = normal(m, k, seed=9)
    x[:, k // 3] *= 100
    if m > 2:
        x[m // 2] = 0
    return x.to(DEVICE, dtype)


@pytest.mark.parametrize("m", TOKENS if ON_GPU else (1, 9, 65))
@halves
@pytest.mark.parametrize(("n", "k", "group", "symmetric", "rank", "bias"), SHAPES)
def test_outputs_are_those_of_the_dequantized_weight(n, k, group, symmetric, rank, bias, dtype, m):
    name, operands, weight_hat = arguments(n, k, group, symmetric, rank, bias, dtype)
    x = inputs(m, k, dtype)
    y, sizes = wanted(x, operands, weight_hat)
    run = getattr(torch.ops.svdq, name)
    rounding = 0 if m <= weight_only.FEW_TOKENS or not ON_GPU else UNIT[dtype]
    allowed = sizes * (2.0**-24 * (k / 16 + rank + 16) ** 0.5 * 8 + rounding) + 1e-30
    found = run(x, *operands, torch.float32)
    assert found.dtype == torch.float32
    check(found.to(D), y, allowed, "y (row, output)")
    check(run(x, *operands).to(D), y, allowed + UNIT[dtype] * (y.abs() + allowed), "y (row, output) rounded")


@halves
@pytest.mark.parametrize("m", [1, 9, 70])
def test_rows_of_a_wider_matrix_and_of_more_dimensions_are_taken(m, dtype):
    name, operands, _ = arguments(96, 192, 64, False, 0, False, dtype)
    wide = inputs(m, 200, dtype)
    run = getattr(torch.ops.svdq, name)
    check(run(wide[:, :192], *operands), run(wide[:, :192].contiguous(), *operands), what="wider")
    check(run(wide[:, 1:193], *operands), run(wide[:, 1:193].contiguous(), *operands), what="not aligned")
    deep = run(wide[:, :192].reshape(1, m, 1, 192), *operands)
    assert deep.shape == (1, m, 1, 96)
    check(deep.view(m, 96), run(wide[:, :192].contiguous(), *operands), what="deep")


@gpu_only
@pytest.mark.parametrize("m", [1, 3, 8, 9, 40, 70])
@pytest.mark.parametrize("group", [128, 32, 0])
def test_nothing_but_the_output_is_written_and_all_of_it(group, m):
    """Of an output in the middle of NaN, whose neighbours belong to others."""
    name, operands, _ = arguments(97, 256, group, False, 16, True, torch.float16)
    x = inputs(m, 256, torch.float16)
    run = getattr(torch.ops.svdq, name)
    want, size = run(x, *operands), m * 97
    fill = torch.full((3 * size,), float("nan"), device=DEVICE, dtype=torch.float16)
    torch.cuda.synchronize()
    del fill  # the allocator gives its memory to what comes next
    found = run(x, *operands)
    assert found.isfinite().all() and torch.equal(found, want)


@gpu_only
@pytest.mark.parametrize("m", [1, 5, 9])
def test_no_row_of_x_reaches_another(m):
    name, operands, _ = arguments(96, 1024, 128, False, 16, True, torch.float16)
    x = inputs(m, 1024, torch.float16)
    run = getattr(torch.ops.svdq, name)
    want = run(x, *operands)
    x[m - 1, 700], x[0, 5] = float("nan"), float("inf")
    found = run(x, *operands)
    assert torch.equal(found[1 : m - 1], want[1 : m - 1]) and not found[0].isfinite().any()
    assert found[m - 1].isnan().all()


@gpu_only
@halves
@pytest.mark.parametrize("m", [1, 3, 8, 20])
def test_a_captured_chain_gives_the_bits_of_one_that_waits(m, dtype):
    """The kernels start early: each must wait for the x that the one before it makes."""
    layers = [
        arguments(512, 512, group, False, 0, True, dtype, seed) for seed, group in enumerate((128, 32, 0, 64) * 6)
    ]

    def run(x, pause):
        for name, operands, _ in layers:
            x = getattr(torch.ops.svdq, name)(x, *operands)
            x = x / x.abs().amax() if name == "w8a16_linear" else x
            if pause:
                torch.cuda.synchronize()
        return x

    x = inputs(m, 512, dtype)
    wanted_bits = run(x, True)
    assert wanted_bits.isfinite().all()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(x, False)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, False)
    for _ in range(50):
        y.zero_()
        graph.replay()
        assert torch.equal(y, wanted_bits)


@gpu_only
def test_large_weights_are_expanded_in_parts(monkeypatch):
    name, operands, weight_hat = arguments(300, 1024, 128, False, 16, True, torch.float16)
    x = inputs(100, 1024, torch.float16)
    run = getattr(torch.ops.svdq, name)
    whole = run(x, *operands)
    monkeypatch.setattr(weight_only, "EXPANDED_BYTES", 64 * 1024)
    y, sizes = wanted(x, operands, weight_hat)
    for dtype in (torch.float16, torch.float32):
        check(run(x, *operands, dtype).to(D), y, 2 * UNIT[torch.float16] * (sizes + 1e-30), "y in parts")
    assert ((run(x, *operands) - whole).norm() / whole.norm()).item() < 1e-3


@gpu_only
@pytest.mark.parametrize("m", [1, 70])
def test_a_compiled_function_calls_the_operator(m):
    name, operands, _ = arguments(96, 256, 128, False, 16, True, torch.bfloat16)
    x = inputs(m, 256, torch.bfloat16)

    def function(x):
        return getattr(torch.ops.svdq, name)(x + 1, *operands) * 2

    check(torch.compile(function, fullgraph=True, backend="aot_eager")(x), function(x), what="y")
