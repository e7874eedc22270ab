"""NVFP4: levels, scales, factors, against tables written by hand and searches over every number of a type."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from svdq import nvfp4
from svdq.errors import NumericsError
from svdq.grid import E2M1, pack_nibbles
from svdq.rounding import fit_group, round_to_nearest

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
D = torch.float64
E4M3 = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double()  # all that are finite and not negative
numbers = st.floats(-(2.0**12), 2.0**12, width=32)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nearest(values, candidates):
    """Index of the nearest of rising candidates, of two at the same distance the even one; in float64."""
    distance = (values.double()[..., None] - candidates.double()).abs()
    index = distance.argmin(-1)  # the lower of two
    after = (index + 1).clamp(max=len(candidates) - 1)
    tied = distance.gather(-1, after[..., None])[..., 0] == distance.gather(-1, index[..., None])[..., 0]
    return torch.where(tied & (index % 2 == 1), after, index)


def nibbles(values, scales):
    """values (n, k) to the nearest levels of scales (n, k/16)."""
    return nvfp4.to_nibbles(E2M1.round(values.unflatten(-1, (-1, 16)) / (scales[..., None] / 2))).flatten(-2)


# ---- levels and codes


@pytest.mark.parametrize(
    ("value", "level"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4), (0.26, 0.5), (0.74, 0.5), (1.3, 1.5),
     (2.6, 3), (3.4, 3), (3.6, 4), (5.1, 6), (6, 6), (7.5, 6), (1e30, 6), (0, 0)],
)  # fmt: skip
def test_ties_go_to_the_even_level_and_what_is_beyond_the_largest_becomes_it(value, level):
    assert (E2M1.round(torch.tensor([2.0 * value, -2.0 * value])) / 2).tolist() == [level, -level]


def test_a_code_is_a_sign_and_the_index_of_a_level():
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    assert nvfp4.to_nibbles(2 * values).tolist() == list(range(16))
    assert nvfp4.to_nibbles((2 * values).to(torch.int8)).tolist() == [*range(8), 0, *range(9, 16)]
    assert torch.equal(nvfp4.decode(torch.arange(16)[None], torch.ones(1, 1)), values[None])


def test_of_two_codes_a_byte_the_even_one_is_low():
    assert pack_nibbles(nvfp4.to_nibbles(torch.tensor([[1.0, -12, -0.0, 12]]))).tolist() == [[0xF1, 0x78]]


@settings(max_examples=60, deadline=None)
@given(st.lists(numbers, min_size=16, max_size=16), st.integers(1, 0x7E), st.integers(-20, 4))
def test_every_code_is_that_of_the_nearest_level(values, scale, exponent):
    scale = E4M3[scale].float() * 2.0**exponent
    values = torch.tensor([values])
    codes = nibbles(values, scale.view(1, 1))
    assert torch.equal((codes & 7).long(), nearest(values.double().abs() / scale.double(), torch.tensor(LEVELS)))
    assert torch.equal((codes >> 3).bool(), values.signbit())


def test_a_quotient_is_never_rounded_onto_a_tie():
    """The floats beside tie · scale, for every scale: division by it says what comparison with the product says."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    tie = ties[:, None] * E4M3[1:].float()  # exact: six bits
    above, below = (torch.nextafter(tie, torch.tensor(to)) for to in (torch.inf, 0.0))
    scale = E4M3[1:].float()
    assert torch.equal(E2M1.round(below / (scale / 2)) / 2, torch.tensor(LEVELS)[:7, None].expand(tie.shape))
    assert torch.equal(E2M1.round(above / (scale / 2)) / 2, torch.tensor(LEVELS)[1:, None].expand(tie.shape))


def test_every_level_times_every_scale_is_a_bfloat16_and_a_float16():
    product = torch.tensor(LEVELS, dtype=D)[:, None] * E4M3
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(product.to(dtype).double(), product)
        levels = torch.arange(8)[:, None, None].expand(-1, len(E4M3), 16)
        decoded = nvfp4.decode(levels.flatten(1), E4M3.to(torch.float8_e4m3fn).expand(8, -1), dtype)
        assert torch.equal(decoded.view(8, -1, 16)[..., 0].double(), product)


# ---- scales


def test_scales_are_rounded_to_the_nearest_e4m3_number_at_least_the_smallest():
    """Those of weights, for which a code's is half, and of activations where six of them are a float32."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    values = torch.cat((E4M3, middles, middles * (1 + 2**-20), middles * (1 - 2**-20), torch.tensor([1e-9, 460.0])))
    wanted = E4M3[nearest(values, E4M3).clamp(min=1)]
    assert torch.equal(E2M1.store_scales(values.float() / 2).double(), wanted)
    six = (6 * values).float()[:, None].expand(-1, 16)
    exact = six[:, 0].double() == 6 * values
    assert torch.equal(nvfp4.quantize_activation(six)[1][exact, 0].double(), wanted[exact]) and exact.sum() > 250


@pytest.mark.parametrize(
    ("absmax", "factor"),
    [(2688.0, 1.0), (2689.0, 2.0), (1344.0, 0.5), (1.0, 2.0**-11), (0.0, 1.0), (1e-30, 2.0**-24), (8e7, 2.0**15)],
)
def test_the_factor_is_the_power_of_two_that_brings_the_largest_scale_to_at_most_448(absmax, factor):
    weight = torch.zeros(2, 16)
    weight[1, 3] = -absmax
    assert nvfp4.tensor_factor(weight).tolist() == [factor, factor]


def test_weights_that_no_factor_of_16_bits_brings_into_range_are_refused():
    with pytest.raises(NumericsError, match=r"the factor .* is inf in torch.float16; leave it in 16 bits"):
        nvfp4.tensor_factor(torch.full((2, 16), 1e9))


@pytest.mark.parametrize("factor", [1e-9, 1e5, 0.0, -1.0, float("nan")])
def test_a_factor_that_some_16_bit_type_does_not_hold_is_refused(factor):
    nvfp4.check_wcscale(torch.tensor([2.0**-24, 1.0, 2.0**15]))
    with pytest.raises(NumericsError, match="the factor"):
        nvfp4.check_wcscale(torch.tensor([1.0, factor]))


def test_a_group_by_hand():
    """absmax 12 of a factor of 1: 12 / 6 = 2, and the values are twice the levels, or half-way between two."""
    weight = torch.tensor([[12.0, -8, 6, 4, 3, 2, 1, 0, 10, -7, 5, 3.5, 2.5, 1.5, 0.5, -0.5]])
    assert (2 * fit_group(weight, E2M1, search=False)[0]).tolist() == [2.0]
    assert nibbles(weight, torch.tensor([[2.0]])).tolist() == [[7, 14, 5, 4, 3, 2, 1, 0, 6, 14, 4, 4, 2, 2, 0, 8]]


def test_the_search_maps_the_largest_to_4_where_that_is_exact():
    weight = torch.tensor([[4.0, -3, 2, 1, 1.5, 0.5, 0, 0, 4, 4, 3, 3, 2, 2, 1, 1]]) / 1024
    assert (2 * fit_group(weight, E2M1, unit=torch.tensor([2.0**-12]))[0]).tolist() == [2.0**-10]


def test_a_group_of_zeros_has_the_smallest_scale_and_codes_0():
    wcscale = nvfp4.tensor_factor(torch.zeros(3, 32))
    codes, scales = round_to_nearest(torch.zeros(3, 32), E2M1, search=True, unit=wcscale)
    assert not codes.any() and scales.double().unique().tolist() == [2.0**-9] and wcscale.tolist() == [1.0] * 3


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.sampled_from([2.0**-9, 0.02, 1.0, 300.0]), st.booleans())
def test_the_search_is_never_worse_than_the_nearest_scale_and_stays_on_the_grid(seed, size, weighted):
    weight = normal(96, 16, seed=seed) * size
    importance = normal(16, seed=seed + 1).square() if weighted else None
    factor = nvfp4.tensor_factor(weight)

    def error(search):
        scales = 2 * fit_group(weight, E2M1, search=search, importance=importance, unit=factor)[0]
        assert torch.isin(scales.double() / factor, E4M3[1:]).all()
        missed = nvfp4.decode(nibbles(weight, scales[:, None]), scales[:, None], D) - weight
        return (missed.square() * (1 if importance is None else importance)).sum(1)

    assert (error(True) <= error(False) * (1 + 1e-5)).all()
    assert error(True).sum() < 0.95 * error(False).sum()


@pytest.mark.parametrize(("n", "k"), [(96, 192), (5, 16), (1, 4304)])
def test_a_matrix_keeps_its_largest_scale_in_the_upper_half_of_the_range(n, k):
    weight = normal(n, k) * 0.03
    wcscale = nvfp4.tensor_factor(weight)
    codes, scales = round_to_nearest(weight, E2M1, unit=wcscale)
    assert (codes.shape, scales.shape, wcscale.shape) == ((n, k), (n, k // 16), (n,))
    assert (scales.dtype, wcscale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert 224 <= scales.double().max() <= 448
    hat = nvfp4.decode(nvfp4.to_nibbles(codes), scales) * wcscale[:, None]
    assert torch.equal(hat, E2M1.decode(codes, scales, unit=wcscale))
    assert torch.equal(hat.bfloat16().float(), hat)
    assert (hat - weight).norm() < 0.1 * weight.norm()
    group = weight.abs().unflatten(1, (-1, 16)).amax(-1, keepdim=True)  # half a step of 2/6, a scale's 1/16 of 1
    assert ((hat - weight).unflatten(1, (-1, 16)).abs() <= group * (1 / 6 + 1 / 16)).all()


# ---- activations


def test_activations_have_the_scale_nearest_to_a_sixth_of_the_largest():
    x = normal(30, 96) * torch.logspace(-3, 3, 30)[:, None]
    codes, scales = nvfp4.quantize_activation(x)
    sixth = (x.double().unflatten(-1, (-1, 16)).abs().amax(-1) / 6).clamp(max=448)
    wanted = E4M3[nearest(sixth, E4M3).clamp(min=1)]
    assert torch.equal(scales.double(), wanted)
    ratio = (x.double().unflatten(-1, (-1, 16)) / wanted[..., None]).abs()
    assert torch.equal((codes.unflatten(-1, (-1, 16)) & 7).long(), nearest(ratio, torch.tensor(LEVELS)))


def test_activations_beyond_2688_are_cut_off_and_tiny_ones_become_zeros():
    x = torch.zeros(2, 16)
    x[0, :2] = torch.tensor([-5000.0, 1344.0])
    x[1, 0] = 1e-4
    assert nvfp4.fake_quantize_activation(x)[:, :2].tolist() == [[-2688.0, 1344.0], [0.0, 0.0]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_group_alone(value):
    x = normal(1, 48)
    x[0, 20] = value
    codes, scales = nvfp4.quantize_activation(x)
    assert scales.view(torch.uint8)[0].eq(0x7F).tolist() == [False, True, False] and not codes[0, 16:32].any()
    assert nvfp4.fake_quantize_activation(x).isnan()[0].unflatten(0, (3, 16)).all(1).tolist() == [False, True, False]
