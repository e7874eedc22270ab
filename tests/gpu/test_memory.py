"""Memory and time around the operators: what lies beside their operands, before and after, and on other streams."""

import math
from functools import cache
from typing import ClassVar

import pytest
import torch
from oracle import DEVICE, HALVES, ON_GPU, READY, check, forward, inputs, layer, module, normal, quantize

from svdq.kernels import hopper, ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="a fact about the kernels")
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])
NAN = float("nan")
REPEATS = 1000 if ON_GPU else 3


def rope_inputs(tokens, dtype, heads=4, k_heads=2, d=64):
    """q, k, both norms, cosine, sine, epsilon."""
    q, k = (normal(tokens, h, d, seed=h).to(DEVICE, dtype) for h in (heads, k_heads))
    norms = [(1 + 0.2 * normal(d, seed=seed)).to(DEVICE, dtype) for seed in (10, 11)]
    tables = [normal(tokens, d, seed=seed).to(DEVICE, dtype) for seed in (12, 13)]
    return q, k, *norms, *tables, 1e-6


@cache
def odd_linear():
    return module(layer(130, 576, 48, parts="smooth rotation clip"))


def all_operators(x):
    """x (m, 576) → every output of the operators that read activations."""
    run, weight = odd_linear(), (1 + 0.2 * normal(576, seed=8)).to(DEVICE, x.dtype)
    factor = torch.ops.svdq.inv_rms(x, 1e-6)
    return [*quantize(run, x), run(x), forward(run, x, factor, weight), factor]


# ---- what lies beside an operand


def inside(x, rows_before, columns_before, columns_after):
    """The same matrix as a window of a larger one that is NaN everywhere else."""
    m, k = x.shape
    larger = torch.full((m + rows_before + 3, columns_before + k + columns_after), NAN, dtype=x.dtype, device=x.device)
    window = larger[rows_before : rows_before + m, columns_before : columns_before + k]
    window.copy_(x)
    return window


VIEWS = {
    "wide rows": lambda x: inside(x, 2, 8, 16),
    "rows of a misaligned start": lambda x: inside(x, 1, 3, 13),
    "rows of a misaligned stride": lambda x: inside(x, 0, 0, 1),
    "columns beside each other": lambda x: x.t().contiguous().t() if ON_GPU else pytest.skip("a CPU sums these apart"),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("m", [1, 5, 16, 129])
@halves
def test_a_view_gives_the_bits_of_its_contiguous_copy(m, view, dtype):
    x = inputs("random", m, 576, dtype).to(DEVICE)
    seen = VIEWS[view](x)
    check(seen, x)
    assert m == 1 or not seen.is_contiguous()
    for number, (found, wanted) in enumerate(zip(all_operators(seen), all_operators(x), strict=True)):
        check(found, wanted, what=f"output {number}")


@pytest.mark.parametrize("m", [1, 9, 17, 65])
def test_one_row_repeated_without_memory_is_read_as_rows(m):
    row = inputs("random", 1, 576, torch.float16).to(DEVICE)
    for number, (found, wanted) in enumerate(
        zip(all_operators(row.expand(m, -1)), all_operators(row.repeat(m, 1)), strict=True)
    ):
        check(found, wanted, what=f"output {number}")


def surrounded(tensor):
    """The same tensor between NaN bytes, 256 bytes aligned."""
    size = tensor.numel() * tensor.element_size()
    buffer = torch.full((size + 2048,), 255, dtype=torch.uint8, device=tensor.device)
    copy = buffer[1024 : 1024 + size].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


@pytest.mark.parametrize(
    ("m", "n", "k", "rank"),
    [
        (1, 300, 64, 0),
        (5, 130, 192, 16),
        (3, 4100, 576, 32),
        (9, 96, 192, 48),
        (16, 576, 1024, 128),
        (129, 100, 192, 48),
    ],
)
def test_what_surrounds_the_packed_operands_is_not_read_into_the_output(m, n, k, rank):
    run = module(layer(n, k, rank, parts="smooth"))
    x = inputs("random", m, k, torch.float16).to(DEVICE)
    wanted = run(x)
    for name, buffer in list(run._buffers.items()):
        run._buffers[name] = surrounded(buffer) if buffer is not None and buffer.numel() else buffer
    check(run(surrounded(x)), wanted, what="y")
    factor, weight = torch.ops.svdq.inv_rms(x, 1e-6), (1 + 0.2 * normal(k, seed=8)).to(DEVICE, x.dtype)
    wanted = forward(run, x, factor, weight)
    check(forward(run, *map(surrounded, (x, factor, weight))), wanted, what="y of a fused norm")


def fill_free_memory(outputs):
    """NaN bytes where the allocator will put the next outputs of these sizes."""
    filled = [torch.full_like(out, 0).view(torch.uint8).fill_(255) for out in outputs if out.numel()]
    del filled


@pytest.mark.parametrize("m", [1, 5, 9, 16, 17, 64, 200])
@halves
def test_outputs_are_written_whole(m, dtype):
    x = inputs("random", m, 576, dtype).to(DEVICE)
    first = [out.clone() for out in all_operators(x)]
    fill_free_memory([*first, x, x])
    for number, (found, wanted) in enumerate(zip(all_operators(x), first, strict=True)):
        check(found, wanted, what=f"output {number}")
        assert found.dtype == torch.int8 or not found.isnan().any()


class Guarded(torch.Tensor):
    """Its new_empty gives memory with guards around: 0xA5 bytes, which nobody may change."""

    GUARD = 4096
    given: ClassVar[list] = []  # (buffer, bytes between the guards); the test starts a new one

    def new_empty(self, size, *, dtype=None):
        shape = (size,) if isinstance(size, int) else tuple(size)
        dtype = dtype or self.dtype
        length = math.prod(shape) * dtype.itemsize
        buffer = torch.full((length + 2 * self.GUARD,), 0xA5, dtype=torch.uint8, device=self.device)
        self.given.append((buffer, length))
        return buffer[self.GUARD : self.GUARD + length].view(dtype).view(shape).as_subclass(Guarded)


def guarded(tensor):
    return tensor.as_subclass(Guarded)


@gpu_only
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize(
    ("m", "n"), [(1, 97), (5, 130), (9, 256), (16, 4100), (17, 97), (63, 130), (129, 130), (200, 259)]
)
def test_nothing_is_written_beside_an_output(m, n, dtype):
    """`dtype` is the GEMM's output type. The operators' own functions are called, which allocate by new_empty."""
    run, Guarded.given = module(layer(n, 576, 48, parts="rotation")), []
    x = inputs("random", m, 576, HALVES[dtype == torch.bfloat16]).to(DEVICE)
    activation = (run.down, run.inv_smooth, run.rotation, run.clip, None, None)
    weight = (run.qweight, run.wscales, run.up, run.packed_bias, m, n, dtype)
    rope = rope_inputs(m, x.dtype)
    packed = torch.ops.svdq.quantize_lora_down(x, *activation)
    wanted = [
        *packed,
        torch.ops.svdq.w4a4_gemm_lora(*packed, *weight),
        torch.ops.svdq.inv_rms(x, 1e-6),
        *torch.ops.svdq.qknorm_rope(*rope),
    ]
    found = [
        *ops.quantize_lora_down(guarded(x), *activation),
        ops.w4a4_gemm_lora(guarded(packed[0]), *packed[1:], *weight),
        ops.inv_rms(guarded(x), 1e-6),
        *ops.qknorm_rope(guarded(rope[0]), guarded(rope[1]), *rope[2:]),
    ]
    assert len(Guarded.given) == len(found), "an output was not allocated by new_empty: this test sees nothing"
    for number, (buffer, length) in enumerate(Guarded.given):
        before, after = buffer[: Guarded.GUARD], buffer[Guarded.GUARD + length :]
        check(before, torch.full_like(before, 0xA5), what=f"bytes before output {number}")
        check(after, torch.full_like(after, 0xA5), what=f"bytes after output {number}")
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        check(a.as_subclass(torch.Tensor), b, what=f"output {number}")


@gpu_only
@pytest.mark.parametrize("values", [False, True], ids=["codes", "values"])
@pytest.mark.parametrize(("m", "n"), [(17, 97), (129, 130), (200, 259), (1100, 130)])
def test_nothing_is_written_beside_an_output_of_hoppers_kernels(m, n, values):
    if not hopper.runs_on(DEVICE):
        pytest.skip("not a Hopper GPU")
    run, Guarded.given = module(layer(n, 576, 48, parts="rotation")), []
    x = inputs("random", m, 576, torch.bfloat16).to(DEVICE)
    activation = (run.down, run.inv_smooth, run.rotation, run.clip, None, None, values)
    weight = (run.qweight, run.wscales, run.up, run.packed_bias, m, n, torch.bfloat16)
    packed = torch.ops.svdq.quantize_lora_down_e4m3(x, *activation)
    wanted = torch.ops.svdq.w4_gemm_lora_e4m3(*packed, *weight)
    hopper.quantize_lora_down_e4m3(guarded(x), *activation)
    y = hopper.w4_gemm_lora_e4m3(guarded(packed[0]), *packed[1:], *weight)
    assert len(Guarded.given) == 5, "codes, scales, t; y, the expanded weights"
    for number, (buffer, length) in enumerate(Guarded.given):
        before, after = buffer[: Guarded.GUARD], buffer[Guarded.GUARD + length :]
        check(before, torch.full_like(before, 0xA5), what=f"bytes before output {number}")
        check(after, torch.full_like(after, 0xA5), what=f"bytes after output {number}")
    check(y.as_subclass(torch.Tensor), wanted, what="y")


# ---- the same bits every time


def busy_stream():
    """A function that puts work on a second stream."""
    if not ON_GPU:
        return lambda: None
    stream = torch.cuda.Stream()
    a, out = torch.randn(2048, 2048, device=DEVICE), torch.empty(2048, 2048, device=DEVICE)
    stream.wait_stream(torch.cuda.current_stream())

    def work():
        with torch.cuda.stream(stream):
            torch.mm(a, a, out=out)

    return work


def check_repeats(run):
    first, work = run(), busy_stream()
    differing = torch.zeros(len(first), dtype=torch.long, device=DEVICE)
    runs = torch.zeros_like(differing)
    for step in range(REPEATS):
        if step % 8 == 0:
            work()
        wrong = torch.stack([(a != b).sum() for a, b in zip(run(), first, strict=True)])
        differing += wrong
        runs += wrong > 0
    if ON_GPU:
        torch.cuda.synchronize()
    assert not differing.any(), f"wrong elements per output {differing.tolist()}, in {runs.tolist()} of {REPEATS} runs"


@pytest.mark.parametrize(
    ("m", "n", "k", "rank"),
    [(300, 640, 1024, 64), (7, 640, 3072, 128), (16, 4224, 576, 64), (1, 96, 192, 16), (9, 300, 15360, 0)],
)
def test_a_thousand_linears_give_the_same_bits(m, n, k, rank):
    run, x = module(layer(n, k, rank, parts="smooth rotation clip")), inputs("random", m, k, torch.float16).to(DEVICE)
    factor, weight = torch.ops.svdq.inv_rms(x, 1e-6), (1 + 0.2 * normal(k, seed=8)).to(DEVICE, x.dtype)
    check_repeats(lambda: [run(x), forward(run, x, factor, weight)])


@pytest.mark.parametrize(("m", "k"), [(16, 15360), (333, 4096)])
@halves
def test_a_thousand_quantizations_give_the_same_bits(m, k, dtype):
    run, x = module(layer(64, k, 128, parts="smooth rotation clip")), inputs("random", m, k, dtype).to(DEVICE)
    check_repeats(lambda: quantize(run, x))


@pytest.mark.parametrize("m", [1, 300])
@halves
def test_a_thousand_norms_and_rotations_give_the_same_bits(m, dtype):
    arguments, x = rope_inputs(m, dtype), inputs("random", m, 4096, dtype).to(DEVICE)
    check_repeats(lambda: [*torch.ops.svdq.qknorm_rope(*arguments), torch.ops.svdq.inv_rms(x, 1e-6)])


# ---- inputs stay as they are


def test_operators_do_not_change_their_inputs():
    x = inputs("random", 17, 576, torch.float16).to(DEVICE)
    kept, arguments = x.clone(), rope_inputs(17, torch.float16)
    copies = [value.clone() for value in arguments[:-1]]
    all_operators(x)
    torch.ops.svdq.qknorm_rope(*arguments)
    check(x, kept)
    for number, (value, copy) in enumerate(zip(arguments[:-1], copies, strict=True)):
        check(value, copy, what=f"argument {number}")
