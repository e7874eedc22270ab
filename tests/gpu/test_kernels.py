"""The quantizer and the GEMMs against integers and float64 (oracle.py), over shapes, ranks, types and hard inputs."""

import pytest
import torch
from oracle import (
    DEVICE,
    FLOOR,
    HALVES,
    KINDS,
    ON_GPU,
    READY,
    D,
    chain,
    check,
    compute,
    inputs,
    layer,
    linear,
    module,
    noise_of_t,
    normal,
    normalized,
    pack_activation,
    pack_weight,
    quantize,
    rng,
    transform,
    with_specials,
)

from svdq.kernels import layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
gpu_only = pytest.mark.skipif(not ON_GPU, reason="a fact about the kernels")
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])

QUANTIZER = [  # m, k, rank, transform: every size that the kernel treats apart
    (1, 64, 0, ""),
    (5, 192, 16, "smooth"),
    (16, 576, 32, "rotation"),
    (17, 1024, 48, "smooth rotation clip"),
    (127, 3072, 64, "clip"),
    (128, 15360, 128, "rotation clip"),
    (129, 576, 128, "smooth rotation"),
    (700, 3072, 16, "smooth rotation"),
    (16, 15360, 0, "smooth clip"),
    (5, 1024, 64, "rotation"),
    (700, 64, 32, "smooth rotation clip"),
    (1, 15360, 96, "smooth rotation clip"),
]
quantizer = pytest.mark.parametrize(("m", "k", "rank", "parts"), QUANTIZER)


def on_device(tensor):
    return None if tensor is None else tensor.to(DEVICE)


def run_quantizer(x, down, how, row_factor=None, norm_weight=None):
    """x and down logical → codes (M', K'), scales (M', G), t (shares, M', r) logical, as the operator left them."""
    k, rank = down.shape
    padded = layout.pad(down, layout.round_up(k, layout.PAD_K), rank)
    packed = (layout.pack_matrix("down", padded) if rank else padded).to(DEVICE)
    inv_smooth = None if how.smooth is None else on_device(1.0 / how.smooth)
    rest = (on_device(row_factor), on_device(norm_weight))
    codes, scales, t = torch.ops.svdq.quantize_lora_down(
        x.to(DEVICE), packed, inv_smooth, how.rotation, how.clip, *rest
    )
    scales = layout.unpack_matrix("scales", scales, tuple(scales.shape))
    return layout.unpack_codes(codes, "codes"), scales, t


def check_codes(found_codes, found_scales, x, how):
    """Against svdq.rounding in float32 on the CPU, with zeros where rows and groups are padded."""
    m, k = x.shape
    codes, scales = how.quantize(x)
    rows, padded = layout.round_up(m, 16), layout.round_up(k, 128)
    check(found_scales.cpu(), layout.pad(scales, rows, padded // 64), what="scales (row, group)")
    check(found_codes.cpu(), layout.pad(codes, rows, padded), what="codes (row, channel)")


def check_t(t, x, down):
    (m, k), (shares, *shape) = x.shape, t.shape
    assert shape == [layout.round_up(m, 16), down.shape[1]]
    assert not t[:, m:].any(), "t: rows from m on are not zeros"
    x, down = x.to(DEVICE, D), down.to(DEVICE, D)
    allowed = noise_of_t(x, down, chain(k // 64, shares)) + FLOOR
    check(t.to(D).sum(0)[:m], x @ down, allowed, f"t (row, rank) of {shares} shares")


# ---- quantize_lora_down


@pytest.mark.parametrize("kind", KINDS)
@halves
@quantizer
def test_codes_and_scales_are_the_cpus_bit_for_bit(m, k, rank, parts, dtype, kind):
    x, how = inputs(kind, m, k, dtype), transform(k, parts)
    codes, scales, _ = run_quantizer(x, normal(k, rank).half(), how)
    check_codes(codes, scales, x, how)


@pytest.mark.parametrize("kind", ["random", "outlier", "zero", "zero rows", "tiny"])
@halves
@quantizer
def test_the_shares_of_t_add_up_to_x_times_proj_down(m, k, rank, parts, dtype, kind):
    x, down = inputs(kind, m, k, dtype), normal(k, rank, seed=3).half()
    check_t(run_quantizer(x, down, transform(k, parts))[2], x, down)


@pytest.mark.parametrize("parts", ["", "clip", "smooth rotation"])
@halves
def test_nan_and_infinity_become_the_documented_codes_and_scales(dtype, parts):
    x, how = with_specials(19, 192, dtype), transform(192, parts)
    codes, scales, _ = run_quantizer(x, normal(192, 16).half(), how)
    check_codes(codes, scales, x, how)
    assert scales[0, 0].isnan() and not codes[0, :64].any()
    assert scales[17, 2] == float("inf") and not codes[17, 128:192].any()
    assert scales[4, :3].isnan().all() and not codes[4].any()


@pytest.mark.parametrize("m", [16, 40, 70])
@halves
def test_rows_with_nan_leave_the_outputs_of_other_rows_alone(dtype, m):
    made = layer(130, 192, 16, parts="smooth rotation")
    x = with_specials(m, 192, dtype)
    hurt = ~x.isfinite().all(1)
    clean = x.masked_fill(hurt[:, None], 0)
    run = module(made)
    y, wanted = run(x.to(DEVICE)), run(clean.to(DEVICE))
    assert y[hurt].isnan().all()
    check(y[~hurt], wanted[~hurt], what="y of the finite rows")


@pytest.mark.parametrize(
    ("m", "k", "parts"), [(5, 192, ""), (17, 576, "smooth rotation clip"), (129, 3072, "rotation")]
)
@halves
def test_a_fused_norm_quantizes_the_rounded_products(m, k, parts, dtype):
    x, weight = inputs("outlier", m, k, dtype), (1 + 0.2 * normal(k, seed=6)).to(dtype)
    factor = torch.ops.svdq.inv_rms(x.to(DEVICE), 1e-6).cpu()
    rounded = normalized(x, factor, weight)
    down, how = normal(k, 32, seed=7).half(), transform(k, parts)
    codes, scales, t = run_quantizer(x, down, how, factor, weight)
    check_codes(codes, scales, rounded, how)
    check_t(t, rounded, down)


@gpu_only
@halves
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(dtype):
    run, x = module(layer(192, 576, 32, parts="rotation")), inputs("random", 700, 576, dtype).to(DEVICE)
    many = run(x)
    for m in (65, 128, 129):
        check(run(x[:m]), many[:m], what=f"y of the first {m} rows")
    for most, fewer in ((64, (17, 32, 49)), (48, (33,))):  # three panels have half of the warps
        some = run(x[:most])
        for m in fewer:
            check(run(x[:m]), some[:m], what=f"y of the first {m} rows of {most}")
    few = run(x[:16])
    for m in (1, 5, 8, 9):
        check(run(x[:m]), few[:m], what=f"y of the first {m} rows of 16")


# ---- w4a4_gemm_lora, all three kernels

SHAPES = [  # m, n, k; up to 16 rows and up to 64 take kernels of their own
    (1, 96, 64),
    (5, 130, 192),
    (8, 97, 576),
    (9, 100, 1024),
    (16, 4100, 192),
    (3, 4128, 1024),
    (17, 130, 192),
    (40, 4100, 64),
    (64, 259, 1024),
    (129, 96, 576),
    (200, 259, 64),
]


def full_range(rows, k, lowest, seed):
    """Codes of the whole range; rows 0 and 1 hold the extremes alone."""
    codes = torch.randint(lowest, 8, (rows, k), dtype=torch.int8, generator=rng(seed))
    codes[0] = lowest
    codes[1 % rows] = 7
    return codes


def multiply(codes, scales, weight_codes, weight_scales, dtype=torch.float32):
    packed = pack_activation(codes, scales)
    qweight, wscales = pack_weight(weight_codes, weight_scales)
    t = torch.zeros(1, packed[0].shape[0], 0, device=DEVICE)
    up = torch.zeros(qweight.shape[0], 0, dtype=torch.float16, device=DEVICE)
    n = len(weight_codes)
    return torch.ops.svdq.w4a4_gemm_lora(*packed, t, qweight, wscales, up, None, len(codes), n, dtype).cpu()


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_the_product_of_each_group_is_the_integer(m, n, k):
    codes, weight_codes = full_range(m, k, -8, 20), full_range(n, k, -7, 21)
    ones = torch.ones(n, k // 64, dtype=torch.float16)
    for group in range(k // 64):
        scales, part = torch.zeros(m, k // 64), slice(64 * group, 64 * (group + 1))
        scales[:, group] = 1
        wanted = codes[:, part].long() @ weight_codes[:, part].long().t()
        check(multiply(codes, scales, weight_codes, ones), wanted, what=f"group {group} (row, column)")


@pytest.mark.parametrize(
    ("m", "n", "k"), [*SHAPES, (16, 130, 15360), (2, 4100, 3072), (61, 130, 15360), (130, 130, 15360)]
)
def test_every_group_meets_its_own_scales(m, n, k):
    # scales 1 or 2 and 1 or ½: all partial sums are multiples of ½ below 2^23, exact in float32 in any order
    codes, weight_codes = full_range(m, k, -8, 22), full_range(n, k, -7, 23)
    scales = torch.randint(1, 3, (m, k // 64), generator=rng(24))
    doubled = torch.randint(1, 3, (n, k // 64), generator=rng(25))
    wanted = (codes.long() * scales.repeat_interleave(64, 1)).to(D) @ (
        weight_codes.long() * doubled.repeat_interleave(64, 1)
    ).to(D).t()
    found = multiply(codes, scales.float(), weight_codes, (doubled / 2).half())
    check(found, wanted / 2, what="y (row, column)")


LINEARS = [  # m, n, k, rank, bias, transform
    (1, 96, 64, 0, False, ""),
    (5, 192, 192, 16, True, "smooth"),
    (16, 100, 576, 32, True, "rotation"),
    (17, 130, 192, 64, False, "smooth rotation clip"),
    (33, 4224, 3072, 128, True, "smooth rotation clip"),
    (48, 100, 15360, 16, True, "rotation"),
    (64, 2048, 1024, 32, True, "smooth"),
    (127, 576, 576, 32, True, "clip"),
    (128, 2048, 1024, 128, False, "rotation"),
    (129, 97, 3072, 16, True, "smooth rotation"),
    (700, 3072, 576, 64, True, "smooth rotation clip"),
    (4352, 192, 64, 128, True, ""),
    (4352, 3072, 3072, 32, True, "smooth rotation clip"),
    (5, 3072, 15360, 128, True, "rotation clip"),
    (1, 4100, 1024, 64, True, "rotation"),
    (16, 4224, 192, 48, False, ""),
    (12, 6144, 3072, 128, True, "smooth rotation clip"),
    (129, 130, 15360, 16, False, "smooth rotation clip"),
    (700, 100, 1024, 0, True, "rotation"),
    (1, 2048, 15360, 64, False, "smooth rotation clip"),
    (127, 2048, 192, 0, False, "smooth"),
    (15, 576, 1024, 96, True, "clip"),
]
WORK = float("inf") if ON_GPU else 4e8  # multiplications of a case


def check_linear(made, x, dtypes):
    wanted, run = linear(x, made), module(made)
    for dtype in dtypes:
        y = compute(run, x.to(DEVICE), dtype)
        assert y.dtype == dtype
        check(y, wanted.y, wanted.allowed(dtype), f"y in {dtype} (row, column)")


@halves
@pytest.mark.parametrize(
    ("m", "n", "k", "rank", "bias", "parts"), [case for case in LINEARS if case[0] * case[1] * case[2] <= WORK]
)
def test_a_linear_is_within_2_ulp_of_float64(m, n, k, rank, bias, parts, dtype):
    check_linear(layer(n, k, rank, bias=bias, parts=parts), inputs("random", m, k, dtype), (dtype, torch.float32))


@pytest.mark.parametrize("kind", ["outlier", "zero", "zero rows", "tiny"])
@pytest.mark.parametrize("parts", ["", "smooth rotation clip"])
@pytest.mark.parametrize(("m", "n", "k", "rank"), [(5, 100, 576, 32), (129, 130, 1024, 64), (40, 96, 3072, 128)])
@halves
def test_hard_inputs_are_within_2_ulp_of_float64(m, n, k, rank, parts, kind, dtype):
    made = layer(n, k, rank, bias=kind != "tiny", parts=parts)
    check_linear(made, inputs(kind, m, k, dtype), (dtype, torch.float32))


@pytest.mark.parametrize("m", [7, 33])
def test_a_weight_scale_of_192_channels_serves_three_groups(m):
    check_linear(
        layer(130, 576, 16, group=192), inputs("random", m, 576, torch.float16), (torch.float16, torch.float32)
    )


@pytest.mark.parametrize("m", [7, 33])
def test_outputs_beyond_float16_are_infinite_with_the_right_sign(m):
    made = layer(96, 64, 0, bias=False)
    made.scales.fill_(30.0)
    x = (inputs("random", m, 64, torch.float32) * 1000).half()
    y, wanted = module(made)(x.to(DEVICE)).double(), linear(x, made).y
    beyond = wanted.abs() > 65600  # below 65520 it would round to a number
    assert beyond.any() and not beyond.all()
    check(y[beyond], wanted[beyond].sign() * float("inf"), what="y beyond the range")


@pytest.mark.parametrize("parts", [1, 3, 19])  # fewer and more than a block has warps
@pytest.mark.parametrize("m", [5, 40, 64, 70])
def test_the_low_rank_sum_takes_all_shares(m, parts):
    """t spread over shares by hand: small integers, so that every order of adding is exact."""
    n, k, rank = 130, 576, 48
    codes, scales = pack_activation(torch.zeros(m, k, dtype=torch.int8), torch.zeros(m, k // 64))
    qweight, wscales = pack_weight(torch.zeros(n, k, dtype=torch.int8), torch.ones(n, k // 64).half())
    t = torch.randint(-8, 9, (parts, layout.round_up(m, 16), rank), generator=rng(30)).float()
    up = torch.randint(-4, 5, (n, rank), generator=rng(31)).half()
    packed_up = layout.pack_matrix("lora_up", layout.pad(up, 256, rank)).to(DEVICE)
    y = torch.ops.svdq.w4a4_gemm_lora(
        codes, scales, t.to(DEVICE), qweight, wscales, packed_up, None, m, n, torch.float32
    )
    check(y.cpu(), t.sum(0)[:m].to(D) @ up.to(D).t(), what="y (row, column)")


@halves
def test_the_forward_of_the_module_is_these_two_operators(dtype):
    run = module(layer(130, 576, 32, parts="smooth rotation clip"))
    for m in (5, 40) if run.on_hopper else (5, 40, 129):  # Hopper's others: test_linear.py
        x = inputs("random", m, 576, dtype).to(DEVICE)
        assert quantize(run, x)[0].shape == (layout.round_up(m, 16), 320)
        check(run(x), compute(run, x, dtype), what="y")
