"""The numerics contract across devices: a card computes the codes and scales of the CPU, bit for bit."""

import pytest
import torch

from svdq.rounding import ActivationTransform

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def inputs(dtype):
    x = torch.randn(333, 576, generator=torch.Generator().manual_seed(3))
    x[:, 5] *= 1000
    x[7] = 0
    x[9, 64:128] = 0
    x[11] *= 1e-30 if dtype == torch.float32 else 1e-4
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("clip", [1.0, 0.85])
@pytest.mark.parametrize("rotation", [False, True])
@pytest.mark.parametrize("smoothed", [False, True])
def test_codes_and_scales_of_a_card_equal_the_cpus(dtype, clip, rotation, smoothed):
    smooth = torch.rand(576, generator=torch.Generator().manual_seed(4)) + 0.3 if smoothed else None
    transform = ActivationTransform(smooth, rotation, clip)
    codes, scales = transform.quantize(inputs(dtype))
    on_card = transform.to(torch.device("cuda")).quantize(inputs(dtype).cuda())
    assert torch.equal(on_card[0].cpu(), codes)
    assert torch.equal(on_card[1].cpu(), scales)
