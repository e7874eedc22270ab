"""inv_rms, and the norm and rotary embedding of heads, against float64."""

import pytest
import torch
from oracle import DEVICE, HALVES, READY, D, check, inputs, normal, ulp

from svdq.kernels import ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason="no CUDA device")]
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])
EPSILON = 1e-6


# ---- inv_rms


def check_factor(x, epsilon=EPSILON):
    wanted = 1 / (x.to(D).square().mean(1) + epsilon).sqrt()
    # a sum of squares in float32, by 128 threads of k / 128 terms each: rounding, a division, two roots
    check(torch.ops.svdq.inv_rms(x, epsilon), wanted, 1e-6 * wanted, "factor (row)")


@pytest.mark.parametrize("kind", ["random", "outlier", "zero rows"])
@pytest.mark.parametrize(
    ("m", "k"), [(1, 64), (5, 72), (300, 192), (129, 576), (17, 1000), (16, 100), (700, 3072), (33, 15360)]
)
@halves
def test_the_factor_is_within_a_millionth_of_float64(m, k, kind, dtype):
    check_factor(inputs(kind, m, k, dtype).to(DEVICE))


@halves
def test_the_factor_of_a_row_reads_that_row_alone(dtype):
    wide = torch.full((40, 600), float("nan"), dtype=dtype, device=DEVICE)
    for start in (8, 3):
        x = wide[5:30, start : start + 576]
        x.copy_(inputs("random", 25, 576, dtype))
        check_factor(x)
        x.fill_(float("nan"))
    assert torch.ops.svdq.inv_rms(torch.empty(0, 64, dtype=dtype, device=DEVICE), EPSILON).shape == (0,)


@halves
def test_a_large_epsilon_counts(dtype):
    check_factor(inputs("random", 3, 128, dtype).to(DEVICE), 0.5)


# ---- qknorm_rope


def expected(x, norm, cosine, sine):
    """x (tokens, heads, d) → float64 result, and the error that float32 and roundings near a tie may make.

    The norm is x·factor and its product with the weight, each rounded to 16 bits; a factor off by 2^-21 decides which
    way a near tie goes, and both ways are taken. The product of two 16-bit numbers is exact in float32.
    """
    tokens, _, d = x.shape
    kind, x = x.dtype, x.to(D)
    slack = torch.zeros_like(x)
    if norm is not None:
        scaled = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()
        low, high = ((norm.to(D) * (scaled * (1 + side * 2.0**-21)).to(kind).to(D)).to(kind).to(D) for side in (-1, 1))
        x, slack = low, (high - low).abs()
    rows = [token % len(cosine) for token in range(tokens)]
    cos, sin = (table.to(D)[rows][:, None] for table in (cosine, sine))
    half = d // 2
    y, error = torch.empty_like(x), torch.empty_like(x)
    for i, partner, sign in ((slice(0, half), slice(half, d), -1), (slice(half, d), slice(0, half), 1)):
        straight, crossed = x[..., i] * cos[..., i], x[..., partner] * sin[..., i]
        y[..., i] = straight + sign * crossed
        error[..., i] = slack[..., i] * cos[..., i].abs() + slack[..., partner] * sin[..., i].abs()
        error[..., i] += 2.0**-23 * (straight.abs() + crossed.abs())
    return y, error + 2 * ulp(y, kind)


def check_rope(q, k, norms, tables, what=""):
    found = torch.ops.svdq.qknorm_rope(q, k, *norms, *tables, EPSILON)
    for name, y, x, norm in zip("qk", found, (q, k), norms, strict=True):
        assert y.dtype == x.dtype
        check(y, *expected(x, norm, *tables), f"{what} {name} (token, head, channel)")


def weights(d, dtype, normed=True):
    return [(1 + 0.2 * normal(d, seed=seed)).to(DEVICE, dtype) if normed else None for seed in (1, 2)]


def tables_of(positions, d, dtype):
    """Angles of their own in both halves, which rotary tables do not have: every channel must meet its own."""
    angles = normal(positions, d, seed=3) * 3
    return [table.to(DEVICE, dtype) for table in (angles.cos(), angles.sin())]


def heads_of(tokens, heads, k_heads, d, dtype):
    q, k = normal(tokens, heads, d, seed=4), 3 * normal(tokens, k_heads, d, seed=5)
    q[..., 7] *= 20  # a channel that leads the norm
    return q.to(DEVICE, dtype), k.to(DEVICE, dtype)


ROPE = [  # tokens, heads, k_heads, d, positions
    (1, 16, 8, 128, 1),
    (5, 9, 3, 64, 5),
    (700, 16, 8, 64, 350),
    (700, 9, 3, 128, 100),
    (5, 1, 1, 128, 1),
    (1, 1, 1, 64, 1),
    (700, 1, 1, 64, 700),
    (6, 9, 3, 128, 2),
    (10, 4, 2, 32, 5),
]


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize(("tokens", "heads", "k_heads", "d", "positions"), ROPE)
@halves
def test_heads_are_normalized_and_rotated_as_in_float64(tokens, heads, k_heads, d, positions, normed, dtype):
    q, k = heads_of(tokens, heads, k_heads, d, dtype)
    check_rope(q, k, weights(d, dtype, normed), tables_of(positions, d, dtype))


@pytest.mark.parametrize("d", [64, 128])
@halves
def test_it_is_the_rotation_of_transformers(d, dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = heads_of(24, 8, 2, d, dtype)
    angles = torch.arange(12)[:, None] / 10000.0 ** (torch.arange(0, d, 2) / d)
    angles = torch.cat([angles, angles], 1)
    tables = [table.to(DEVICE, dtype) for table in (angles.cos(), angles.sin())]
    found = torch.ops.svdq.qknorm_rope(q, k, None, None, *tables, EPSILON)
    batched = [x.view(2, 12, -1, d).transpose(1, 2).to(D) for x in (q, k)]
    theirs = apply_rotary_pos_emb(*batched, *(table.to(D)[None] for table in tables))
    for name, y, wanted in zip("qk", found, theirs, strict=True):
        wanted = wanted.transpose(1, 2).reshape(y.shape)
        largest = wanted.abs().amax(-1, keepdim=True)  # of two products that may cancel
        check(y, wanted, ulp(wanted, dtype) + 2.0**-22 * largest, f"{name} (token, head, channel)")


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("spare", [0, 2, 8])
@halves
def test_heads_are_read_out_of_one_fused_tensor(d, spare, normed, dtype):
    check_rope(*fused_heads(d, spare, dtype), weights(d, dtype, normed), tables_of(5, d, dtype))


def fused_heads(d, spare, dtype, tokens=10, heads=9, k_heads=3):
    """q, k and v side by side in rows with `spare` more elements, v and those NaN → the views of q and k."""
    q, k = heads_of(tokens, heads, k_heads, d, dtype)
    fused = torch.full((tokens, (heads + 2 * k_heads) * d + spare), float("nan"), dtype=dtype, device=DEVICE)
    parts = ((0, heads), (heads * d, k_heads))
    views = [fused[:, start : start + count * d].unflatten(1, (count, d)) for start, count in parts]
    for view, x in zip(views, (q, k), strict=True):
        view.copy_(x)
    return views


@halves
def test_heads_in_another_order_of_axes_are_read_right(dtype):
    q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in heads_of(6, 4, 2, 64, dtype))
    assert not q.is_contiguous()
    check_rope(q, k, weights(64, dtype), tables_of(3, 64, dtype))


def test_outputs_are_contiguous_whatever_the_strides_of_the_inputs():
    q, k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in heads_of(6, 4, 2, 64, torch.float16))
    found = torch.ops.svdq.qknorm_rope(q, k, None, None, *tables_of(3, 64, torch.float16), EPSILON)
    assert [y.is_contiguous() for y in found] == [True, True]


@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
@halves
def test_heads_of_zeros_stay_zeros(dtype, normed):
    q, k = (torch.zeros_like(x) for x in heads_of(5, 4, 2, 64, dtype))
    check_rope(q, k, weights(64, dtype, normed), tables_of(5, 64, dtype))


def test_no_tokens_give_empty_heads():
    q, k = heads_of(0, 4, 2, 64, torch.float16)
    found = torch.ops.svdq.qknorm_rope(q, k, None, None, *tables_of(1, 64, torch.float16), EPSILON)
    assert [tuple(y.shape) for y in found] == [(0, 4, 64), (0, 2, 64)]


@halves
def test_a_head_with_nan_leaves_the_others_alone(dtype):
    q, k = heads_of(6, 4, 2, 128, dtype)
    norms, tables = weights(128, dtype), tables_of(6, 128, dtype)
    wanted = torch.ops.svdq.qknorm_rope(q, k, *norms, *tables, EPSILON)
    q[2, 1, 5] = float("nan")
    found = torch.ops.svdq.qknorm_rope(q, k, *norms, *tables, EPSILON)
    assert found[0][2, 1].isnan().all()
    found[0][2, 1] = wanted[0][2, 1]
    for name, a, b in zip("qk", found, wanted, strict=True):
        check(a, b, what=name)


@pytest.mark.parametrize("d", [64, 128])
@halves
def test_rows_of_an_odd_width_are_read_right(monkeypatch, d, dtype):
    """Heads of 128 are read four bytes at a time; a misaligned read ends the process's CUDA context, so look first."""
    heads, rest = fused_heads(d, 1, dtype), (*weights(d, dtype), *tables_of(5, d, dtype))
    started = []
    with monkeypatch.context() as patch:
        patch.setattr(ops, "launch", lambda *given, **_: started.append(given[-1]))
        ops.qknorm_rope(*heads, *rest, EPSILON)
    q, q_stride, k, k_stride = started[0][:4]
    for x, stride in ((q, q_stride), (k, k_stride)):
        assert d == 64 or (x.data_ptr() % 4 == 0 and stride % 2 == 0), f"rows {stride} elements apart at {x.data_ptr()}"
    check_rope(*heads, rest[:2], rest[2:])
