"""CUDA graphs by buckets: what a stream of requests gets is what the eager path gives, and nothing is captured late."""

import random

import pytest
import torch
from oracle import HALVES, ON_GPU, READY

from svdq.bench import backbone, quantize_layers
from svdq.kernels import hopper
from svdq.packed import BUCKETS, PackedRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (ON_GPU and READY), reason="no CUDA device"),
]
CUDA = torch.device("cuda")


def model_of(activations, dtype=torch.bfloat16, shape="tiny"):
    if activations == "fp8" and not hopper.runs_on(CUDA):
        pytest.skip("not a Hopper GPU")
    model = backbone(shape, CUDA, dtype)
    if activations:
        quantize_layers(model, activations)
    return model


def request(generator, most=2048):
    """(embeddings, lengths) of a few sequences."""
    lengths = [generator.randint(1, most // 8) for _ in range(generator.randint(1, 7))]
    x = torch.randn(sum(lengths), 128, generator=torch.Generator().manual_seed(generator.randrange(2**31)))
    return x, lengths


@pytest.mark.parametrize("activations", [None, "int4", "fp8"])
def test_a_stream_of_500_requests_captures_nothing_after_the_warm_up(activations):
    model = model_of(activations)
    replayed = PackedRunner(model, embeddings=True)
    eager = PackedRunner(model, embeddings=True, graphs=False)
    replayed.warm_up()
    assert replayed.captures == len(BUCKETS)
    generator = random.Random(0)
    for _ in range(500):
        x, lengths = request(generator)
        found, wanted = (runner(x.to(CUDA, torch.bfloat16), lengths) for runner in (replayed, eager))
        assert torch.equal(found, wanted), lengths
    assert (replayed.captures, replayed.eager_runs) == (len(BUCKETS), 0)


@pytest.mark.parametrize("activations", [None, "int4", "fp8"])
@pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])
def test_padding_and_neighbours_change_no_bit_of_a_sequence(activations, dtype):
    """Whatever lies beside it: other sequences, NaN in them, padding left over from the batch before."""
    runner = PackedRunner(model_of(activations, dtype), embeddings=True, buckets=(128, 512))
    x = torch.randn(60, 128, device=CUDA, dtype=dtype)
    alone = runner(x, [60])
    assert alone.isfinite().all()
    other = torch.randn(60, 128, device=CUDA, dtype=dtype)
    assert torch.equal(runner(torch.cat((x, other)), [60, 60])[:60], alone)
    broken = torch.full_like(other, float("nan"))
    assert torch.equal(runner(torch.cat((x, broken)), [60, 60])[:60], alone)
    assert torch.equal(runner(x, [60]), alone)


def test_more_than_the_last_bucket_runs_without_a_graph_and_says_so():
    runner = PackedRunner(model_of("int4"), embeddings=True, buckets=(128,))
    x = torch.randn(200, 128, device=CUDA, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="200 tokens: longer than the last bucket, 128"):
        found = runner(x, [150, 50])
    assert (runner.captures, runner.eager_runs, len(found)) == (0, 1, 200)


def test_the_graphs_share_their_memory():
    model = model_of("int4")
    alone, together = (PackedRunner(model, embeddings=True, buckets=sizes) for sizes in ((2048,), BUCKETS))
    taken = []
    for runner in (alone, together):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        runner.warm_up()
        torch.cuda.empty_cache()
        taken.append(torch.cuda.memory_reserved() - before)
    assert taken[1] < 2 * taken[0]
