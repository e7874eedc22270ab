"""The searched smoothing of the preset svdquant: no candidate is better than the one it returns."""

import pytest
import torch

from svdq.calibration import search
from svdq.calibration.search import search_smoothing
from svdq.grid import INT4_WEIGHT
from svdq.lowrank import low_rank
from svdq.rounding import ActivationTransform, fake_quantize_activation, round_to_nearest


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def site(k=128, tokens=64):
    x = normal(tokens, k)
    x[:, 5::31] *= 30  # channels that ruin their groups unless they are smoothed
    return x, [normal(96, k, seed=1) * 0.1, normal(40, k, seed=2) * 0.1]


def plain_error(smooth, x, weights):
    """The candidate's error computed with float64 sums."""
    transform, total = ActivationTransform(smooth, False, 1.0), 0.0
    for weight in weights:
        transformed = transform.weight(weight)
        up, down = low_rank(transformed, 16)
        codes, scales = round_to_nearest(transformed - up @ down.t(), INT4_WEIGHT)
        x_hat = fake_quantize_activation(transform.apply(x))
        y = x_hat.double() @ INT4_WEIGHT.decode(codes, scales).double().t()
        y += transform.apply(x).double() @ down.double() @ up.double().t()
        total += (y - x.double() @ weight.double().t()).square().sum().item()
    return total


def test_it_is_the_best_of_ones_and_all_ratios_of_largest_values():
    x, weights = site()
    found = search_smoothing(x.abs().amax(0), x, weights, rotation=False, clip=1.0)
    largest = torch.cat(weights).abs().amax(0).double()
    candidates = [torch.ones(128)]
    for a in [step / 10 for step in range(1, 11)]:
        for b in (0.0, 1.0 - a):
            ratio = x.abs().amax(0).double() ** a / largest**b
            candidates.append((ratio / ratio.log().mean().exp()).clamp(0.01, 100).bfloat16().float())
    errors = [plain_error(smooth, x, weights) for smooth in candidates]
    assert torch.equal(found, candidates[errors.index(min(errors))])
    assert min(errors) < 0.5 * errors[0]


@pytest.mark.parametrize("dead", [0, 64])
def test_a_channel_that_never_fired_or_has_no_weight_keeps_1(dead):
    x, weights = site()
    x[:, dead] = 0
    weights = [weight.index_fill(1, torch.tensor([dead + 1]), 0.0) for weight in weights]
    found = search_smoothing(x.abs().amax(0), x, weights, rotation=False, clip=1.0)
    assert found[dead] == found[dead + 1] == 1 and torch.isfinite(found).all() and (found > 0).all()


def test_inputs_of_zeros_give_no_smoothing():
    _, weights = site()
    found = search_smoothing(torch.zeros(128), torch.zeros(8, 128), weights, rotation=False, clip=1.0)
    assert torch.equal(found, torch.ones(128))


def test_a_block_is_sampled_over_all_its_batches(toy, read_ids, calibration_ids, monkeypatch):
    from svdq.calibration.capture import BlockStream, record_block
    from svdq.calibration.data import batches
    from svdq.config import CalibrationConfig
    from svdq.models import open_model

    model, seen = open_model(toy("llama")), []

    def keep(absmax, rows, weights, **transform):
        seen.append((absmax, rows, [tuple(weight.shape) for weight in weights], transform))
        return torch.ones(len(absmax))

    monkeypatch.setattr("svdq.calibration.capture.search_smoothing", keep)
    data = read_ids(calibration_ids)
    stream = BlockStream(model, batches(data.sequences, 128), torch.device("cpu"), torch.float32)
    config = CalibrationConfig(smoothing="search", rotation="none", act_clip=1.0)
    record_block(stream, next(iter(stream)), [linear for linear in model.linears if linear.block == 0], config)
    assert next(shapes for _, _, shapes, _ in seen) == [(128, 128), (64, 128), (64, 128)]  # q, k, v share one
    for absmax, rows, _, transform in seen:
        assert search.SAMPLE_TOKENS <= len(rows) <= data.tokens and transform == {"rotation": False, "clip": 1.0}
        assert (rows.abs().amax(0) <= absmax).all()
