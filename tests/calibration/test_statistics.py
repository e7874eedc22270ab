"""Calibration sums against float64 loops over tokens, and the smoothing against its formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.calibration.capture import token_rows
from svdq.calibration.statistics import CHUNK_TOKENS, ChannelStatistics, SumAccumulator
from svdq.config import CalibrationConfig
from svdq.rounding import ActivationTransform, fake_quantize_activation

CPU = torch.device("cpu")
BF16_STEP = 2.0**-8  # smoothing values are rounded to 8 bits of mantissa: 2⁻⁹ relative at most
BARE = CalibrationConfig(smoothing=0.0, rotation="none", act_clip=1.0)


def tokens(count, k=128, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, k, generator=g) * torch.exp(torch.randn(k, generator=g))
    x[:, 5::41] *= 30
    return x


def first_pass(*batches):
    statistics = ChannelStatistics(batches[0].shape[1], CPU)
    for batch in batches:
        statistics.add(batch)
    return statistics


def accumulator_of(statistics, config):
    transform = ActivationTransform(statistics.smoothing(config.smoothing), config.rotation != "none", config.act_clip)
    return SumAccumulator(statistics.absmax, transform)


def both_passes(x, config, parts=1):
    accumulator = accumulator_of(first_pass(x), config)
    for part in x.chunk(parts):
        accumulator.add(part)
    return accumulator.finish(torch.float64)


def loop_sum(a, b):
    """Σ over tokens of the outer product, one token after another, float64."""
    total = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64)
    for row_a, row_b in zip(a.double(), b.double(), strict=True):
        total += torch.outer(row_a, row_b)
    return total


def relative_error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


# ------------------------------------------------------------------------------------------------ first pass


def test_energy_absmax_and_tokens_equal_a_python_loop():
    x = tokens(50, 64)
    statistics = first_pass(x[:20], x[20:])
    columns = x.t().tolist()
    # squares are taken in float32: 6e-8 each
    assert statistics.energy.tolist() == pytest.approx([math.fsum(v * v for v in c) for c in columns], rel=1e-6)
    assert statistics.absmax.tolist() == [max(abs(v) for v in c) for c in columns]
    assert statistics.tokens == 50


def test_an_empty_batch_counts_nothing():
    x = tokens(7, 64)
    with_empty, without = first_pass(x, x[:0]), first_pass(x)
    assert torch.equal(with_empty.energy, without.energy)
    assert torch.equal(with_empty.absmax, without.absmax)
    assert with_empty.tokens == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_reported(value):
    x = tokens(9, 64)
    assert ChannelStatistics(64, CPU).add(x) is True
    x[4, 7] = value
    assert ChannelStatistics(64, CPU).add(x) is False


# ------------------------------------------------------------------------------------------------ smoothing


@pytest.mark.parametrize("exponent", [0.25, 0.75, 1.0])
def test_smoothing_is_a_power_of_the_rms_over_its_geometric_mean(exponent):
    x = tokens(200)
    powers = [math.sqrt(math.fsum(v * v for v in c) / 200) ** exponent for c in x.t().tolist()]
    mean = math.exp(math.fsum(math.log(p) for p in powers) / len(powers))
    assert first_pass(x).smoothing(exponent).tolist() == pytest.approx([p / mean for p in powers], rel=BF16_STEP)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3))
def test_the_geometric_mean_is_1_whatever_the_inputs_size(seed, size):
    smooth = first_pass(tokens(40, 64, seed) * size).smoothing(0.75)
    assert math.exp(math.fsum(math.log(s) for s in smooth.tolist()) / 64) == pytest.approx(1.0, rel=BF16_STEP)


def test_exponent_0_is_no_smoothing():
    assert first_pass(tokens(5)).smoothing(0.0) is None


def test_a_channel_that_never_fired_keeps_1_and_does_not_move_the_others():
    x = tokens(60)
    dead = torch.cat((x, torch.zeros(60, 64)), 1)
    smooth = first_pass(dead).smoothing(0.75)
    assert torch.equal(smooth[128:], torch.ones(64))
    assert torch.equal(smooth[:128], first_pass(x).smoothing(0.75))


def test_inputs_that_are_all_zero_are_not_smoothed():
    assert torch.equal(first_pass(torch.zeros(10, 64)).smoothing(0.75), torch.ones(64))


def test_no_token_at_all_gives_ones():
    assert torch.equal(ChannelStatistics(64, CPU).smoothing(0.75), torch.ones(64))


def test_smoothing_stays_between_a_hundredth_and_a_hundred():
    x = tokens(60)
    x[:, 0] *= 1e6
    x[:, 1] *= 1e-8
    smooth = first_pass(x).smoothing(1.0)
    assert smooth[0].item() == 100.0
    assert smooth[1].item() == pytest.approx(0.01, rel=BF16_STEP)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_file_holds_the_smoothing_exactly(dtype):
    x = tokens(60)
    x[:, 1] *= 1e-8
    smooth = first_pass(x).smoothing(0.75)
    assert smooth.dtype == torch.float32
    assert torch.equal(smooth.to(dtype).float(), smooth)


# ------------------------------------------------------------------------------------------------ the three sums


def test_without_a_transform_the_sums_are_those_of_a_loop_over_tokens():
    x = tokens(70)
    x_hat = fake_quantize_activation(x)
    sums = both_passes(x, BARE)
    for found, wanted in ((sums.xx, loop_sum(x, x)), (sums.xq, loop_sum(x, x_hat)), (sums.qq, loop_sum(x_hat, x_hat))):
        assert relative_error(found, wanted) <= 1e-6  # float32 products of 70 tokens
    assert sums.tokens == 70
    assert sums.transform == ActivationTransform(None, False, 1.0)


def test_xq_has_the_input_in_its_rows_and_the_quantized_input_in_its_columns():
    x = tokens(70)
    sums = both_passes(x, BARE)
    wanted = loop_sum(x, fake_quantize_activation(x))
    assert relative_error(sums.xq, wanted) <= 1e-6 < 1e-3 < relative_error(sums.xq.t(), wanted)


@pytest.mark.parametrize("config", [CalibrationConfig(), CalibrationConfig(rotation="none", act_clip=1.0)])
def test_the_sums_are_of_smoothed_and_rotated_inputs(config):
    x = tokens(70)
    sums = both_passes(x, config)
    smooth = first_pass(x).smoothing(0.75)
    transformed = x.double() / smooth.double()
    if config.rotation == "hadamard64":
        signs = [[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]
        matrix = torch.tensor(signs, dtype=torch.float64) / 8
        transformed = (transformed.reshape(-1, 64) @ matrix).reshape(x.shape)
    assert relative_error(sums.xx, loop_sum(transformed, transformed)) <= 1e-5  # float32 smoothing, rotation, products
    assert torch.equal(sums.transform.smooth, smooth)
    assert (sums.transform.rotation, sums.transform.clip) == (config.rotation == "hadamard64", config.act_clip)


def test_absmax_is_of_the_raw_inputs():
    x = tokens(70)
    assert torch.equal(both_passes(x, CalibrationConfig()).absmax, x.abs().amax(0))


def test_the_sums_do_not_depend_on_the_batches():
    x = tokens(70)
    whole, parts = both_passes(x, CalibrationConfig()), both_passes(x, CalibrationConfig(), parts=9)
    for name in ("xx", "xq", "qq"):
        assert relative_error(getattr(parts, name), getattr(whole, name)) <= 1e-6  # float32 products, other order
    assert parts.tokens == whole.tokens == 70


def test_a_batch_longer_than_a_chunk_is_summed_whole():
    x = tokens(CHUNK_TOKENS + 3, 64)
    sums = both_passes(x, BARE)
    wanted = x.double().t() @ x.double()
    assert relative_error(sums.xx, wanted) <= 1e-5  # float32 products of 4096 tokens
    assert sums.tokens == CHUNK_TOKENS + 3


def test_symmetric_sums_are_positive_semidefinite_to_float32():
    sums = both_passes(tokens(30), CalibrationConfig())
    for matrix in (sums.xx, sums.qq):
        values = torch.linalg.eigvalsh((matrix + matrix.t()) / 2)
        assert values[0] >= -1e-6 * values[-1]  # 30 tokens, 128 channels: the true smallest one is 0


def test_a_channel_that_never_fires_has_zero_sums_without_rotation():
    x = tokens(30)
    x[:, 17] = 0
    sums = both_passes(x, CalibrationConfig(rotation="none"))
    for matrix in (sums.xx, sums.xq, sums.qq):
        assert not matrix[17].any()
        assert not matrix[:, 17].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_summed_as_their_float32_values(dtype):
    x = tokens(30).to(dtype)
    half, single = both_passes(x, CalibrationConfig()), both_passes(x.float(), CalibrationConfig())
    for name in ("xx", "xq", "qq", "absmax"):
        assert torch.equal(getattr(half, name), getattr(single, name))


def test_finish_stores_the_type_that_is_asked_for():
    accumulator = accumulator_of(first_pass(tokens(5)), BARE)
    assert accumulator.finish().xx.dtype == torch.float32
    assert accumulator.finish(torch.float64).qq.dtype == torch.float64


@pytest.mark.parametrize("config", [BARE, CalibrationConfig()], ids=["bare", "full"])
@pytest.mark.parametrize("shape", [(1, 64), (9, 128)])
def test_the_inputs_are_not_changed(shape, config):
    x = tokens(*shape)
    kept = x.clone()
    both_passes(x, config)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("shape", [(1, 1, 128), (1, 128), (128,)])
def test_one_token_counts_once_in_whatever_shape_it_comes(shape):
    x = tokens(1).reshape(shape)
    sums = both_passes(token_rows(x, 128), BARE)
    assert sums.tokens == 1
    assert relative_error(sums.xx, torch.outer(x.flatten().double(), x.flatten().double())) <= 1e-6  # float32 products


def test_a_batch_of_sequences_is_the_sequence_of_its_tokens():
    x = tokens(12).reshape(3, 4, 128)
    assert torch.equal(token_rows(x, 128), torch.cat((x[0], x[1], x[2])))
