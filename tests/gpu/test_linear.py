"""The forward of the module against integers and float64 (oracle.py): each size with each other."""

from functools import lru_cache
from itertools import product

import pytest
import torch
from oracle import (
    DEVICE,
    HALVES,
    KINDS,
    ON_GPU,
    READY,
    check,
    forward,
    inputs,
    layer,
    linear,
    module,
    normal,
    normalized,
    rng,
    transform,
    with_specials,
)

from svdq.quantized import Layer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="a fact about the kernels")
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])

FEW, MANY = (1, 5, 8, 9, 15, 16), (17, 129)
COLUMNS = (96, 100, 130, 192, 256, 576, 2048, 3072, 4096)
CHANNELS = (64, 192, 576, 1024, 3072, 4096, 15360)
RANKS = (0, 16, 32, 48, 64, 128)
PARTS = ("", "smooth", "rotation", "clip", "smooth rotation clip")
LINEARS = [  # n, k, rank, bias, transform, normalized: each size with each other; the rest in turn, each with each
    (n, k, RANKS[i % 6], i % 11 < 6, PARTS[i % 5], i % 13 < 6)
    for i, (n, k) in enumerate(product(COLUMNS, CHANNELS))
    if ON_GPU or n * k <= 576 * 1024
]


@lru_cache(1)
def linear_of(n, k, rank, bias, parts):
    """(the layer, its module); the types of a case follow each other."""
    made = layer(n, k, rank, bias=bias, parts=parts)
    return made, module(made)


def norm_of(x):
    """(row factor, norm weight) on the device."""
    return torch.ops.svdq.inv_rms(x.to(DEVICE), 1e-6), (1 + 0.2 * normal(x.shape[1], seed=6)).to(DEVICE, x.dtype)


def check_linear(made, run, x, sizes=None, norm=False):
    """The first rows of x, in each of these numbers."""
    factor, weight = norm_of(x) if norm else (None, None)
    wanted = linear(normalized(x, factor.cpu(), weight.cpu()) if norm else x, made)
    allowed, x = wanted.allowed(x.dtype), x.to(DEVICE)
    for m in sizes or [len(x)]:
        y = forward(run, x[:m], factor[:m] if norm else None, weight)
        assert y.dtype == x.dtype
        check(y, wanted.y[:m], allowed[:m], f"y (row, column) of {m} rows")


@halves
@pytest.mark.parametrize(("n", "k", "rank", "bias", "parts", "norm"), LINEARS)
def test_a_linear_of_any_size_is_within_2_ulp_of_float64(n, k, rank, bias, parts, norm, dtype):
    made, run = linear_of(n, k, rank, bias, parts)
    for sizes in (FEW, MANY):
        check_linear(made, run, inputs("random", max(sizes), k, dtype), sizes, norm)


@pytest.mark.parametrize("kind", ["outlier", "zero", "zero rows", "tiny"])
@halves
@pytest.mark.parametrize("parts", ["", "smooth rotation clip"])
@pytest.mark.parametrize(
    ("m", "n", "k", "rank"), [(1, 100, 64, 16), (5, 300, 576, 48), (9, 192, 1024, 0), (16, 96, 3072, 128)]
)
def test_hard_inputs_are_within_2_ulp_of_float64(m, n, k, rank, parts, dtype, kind):
    made, run = linear_of(n, k, rank, kind != "tiny", parts)
    check_linear(made, run, inputs(kind, m, k, dtype))


@pytest.mark.parametrize("kind", ["outlier", "zero", "zero rows"])
@halves
def test_hard_inputs_of_a_fused_norm_are_within_2_ulp_of_float64(dtype, kind):
    made, run = linear_of(130, 576, 48, True, "rotation")
    check_linear(made, run, inputs(kind, 16, 576, dtype), (7, 16), norm=True)


# ---- codes and scales, seen from outside


def selection(n, k, parts):
    """(a layer whose output is one channel of the quantized input a column, those channels)."""
    channels = torch.randperm(k, generator=rng(40))[:n]
    codes = torch.zeros(n, k, dtype=torch.int8)
    codes[torch.arange(n), channels] = 1
    nothing = torch.zeros(k, 0).half(), torch.zeros(n, 0).half(), None
    return Layer("selection", codes, torch.ones(n, k // 64).half(), *nothing, transform(k, parts)), channels


@pytest.mark.parametrize("kind", KINDS)
@halves
@pytest.mark.parametrize(
    ("n", "k", "parts"),
    [
        (64, 64, "smooth"),
        (192, 192, "clip"),
        (576, 576, "smooth rotation clip"),
        (1024, 1024, "rotation"),
        (1000, 15360, "smooth rotation clip"),
    ],
)
def test_codes_and_scales_are_the_cpus_bit_for_bit(n, k, parts, dtype, kind):
    made, channels = selection(n, k, parts)
    run = module(made)
    for m in (1, 8, 9, 16):
        x = inputs(kind, m, k, dtype)
        codes, scales = made.transform.quantize(x)
        wanted = (codes.float() * scales.repeat_interleave(64, 1))[:, channels].to(dtype)
        wanted[~scales.isfinite().all(1)] = float("nan")  # 0 · Inf of one group is in every sum
        check(forward(run, x.to(DEVICE)).cpu(), wanted, what=f"code · scale (row, column) of {m} rows")


# ---- sizes beside the usual ones


@pytest.mark.parametrize(("n", "rank"), [(130, 144), (130, 432), (130, 512), (130, 640), (3072, 256), (3072, 384)])
def test_a_large_rank_is_within_2_ulp_of_float64(n, rank):
    """Of linears fused into one: the quantizer cuts the columns of t over blocks."""
    made, run = linear_of(n, 576, rank, True, "rotation")
    for sizes in (FEW, MANY):
        check_linear(made, run, inputs("random", max(sizes), 576, torch.float16), sizes)


@pytest.mark.parametrize("m", [3, 16, 40])
def test_fewer_columns_are_the_first_of_all(m):
    _, run = linear_of(576, 192, 16, True, "")
    x = normal(m, 192).half().to(DEVICE)
    whole = forward(run, x)
    for n in (1, 7, 129, 255, 257, 511):
        found = forward(run, x, n=n)
        if ON_GPU:  # a CPU's product of another width adds in another order
            check(found, whole[:, :n], what=f"{n} columns")
        assert found.shape == (m, n)


# ---- rows apart from each other


@gpu_only
@pytest.mark.parametrize("norm", [False, True])
@halves
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(dtype, norm):
    _, run = linear_of(300, 1024, 48, True, "rotation")
    x = inputs("random", 16, 1024, dtype).to(DEVICE)
    factor, weight = norm_of(x) if norm else (None, None)
    few = forward(run, x, factor, weight)
    for m in FEW:
        check(forward(run, x[:m], factor[:m] if norm else None, weight), few[:m], what=f"the first {m} rows of 16")
    order = torch.tensor([9, 3, 15, 0, 12, 7, 1, 14, 2, 8, 5, 11, 4, 10, 13, 6], device=DEVICE)
    check(forward(run, x[order], factor[order] if norm else None, weight), few[order], what="rows in another order")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("n", "k", "rank"), [(300, 192, 48), (96, 1024, 0)])
@pytest.mark.parametrize("m", [8, 9, 16, 17])
@halves
def test_rows_with_nan_and_infinity_leave_the_others_alone(dtype, m, n, k, rank, norm):
    _, run = linear_of(n, k, rank, True, "smooth rotation")
    x = with_specials(m, k, dtype)
    hurt = ~x.isfinite().all(1)
    clean = x.masked_fill(hurt[:, None], 0)
    y, wanted = (forward(run, part.to(DEVICE), *(norm_of(part) if norm else ())) for part in (x, clean))
    assert y[hurt].isnan().all()
    check(y[~hurt], wanted[~hurt], what="y of the finite rows")


@pytest.mark.parametrize("m", [1, 9, 16])
def test_a_row_factor_that_is_not_finite_hurts_its_row_alone(m):
    _, run = linear_of(130, 576, 16, True, "rotation")
    x = inputs("random", m, 576, torch.float16).to(DEVICE)
    factor, weight = norm_of(x)
    wanted = forward(run, x, factor, weight)
    for value in (float("nan"), float("inf")):
        broken = factor.clone()
        broken[m // 2] = value
        y = forward(run, x, broken, weight)
        assert y[m // 2].isnan().all()
        others = torch.arange(m, device=DEVICE) != m // 2
        check(y[others], wanted[others], what="y of the other rows")


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("m", [1, 8, 16])
@halves
def test_nothing_but_nan_or_infinity_gives_nan(dtype, m, value):
    _, run = linear_of(130, 576, 16, True, "rotation")
    y = forward(run, torch.full((m, 576), float(value), dtype=dtype, device=DEVICE))
    assert y.shape == (m, 130) and y.isnan().all()
