"""NF4's kernels on one GPU: bitsandbytes' bits, and the product of few rows beside float64."""

import pytest
import torch

from svdq import nf4
from svdq.kernels import nf4 as operators

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LIFT = 1.3662109375


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(n, k):
    tensors = nf4.encode(normal(n, k) * 2 ** normal(n, 1, seed=1))
    offset = nf4.check(tensors, n, k).offset
    return [tensors[suffix] for suffix in nf4.OPERANDS] + [offset]


def on_gpu(operands):
    return [x.cuda() if isinstance(x, torch.Tensor) else x for x in operands]


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), [(96, 192), (1, 1), (7, 31), (1024, 1024), (300, 1000), (33, 4160)])
def test_a_card_dequantizes_to_the_cpus_bits(n, k, dtype):
    operands = encoded(n, k)
    found = torch.ops.svdq.nf4_dequantize(*on_gpu(operands), n, k, dtype)
    assert torch.equal(found.cpu(), nf4.dequantize(*operands, n, k, dtype))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), [(96, 192), (7, 30), (512, 4096)])
def test_a_card_dequantizes_to_the_bits_of_bitsandbytes(n, k, dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(normal(n, k).to(dtype).cuda(), compress_statistics=True, quant_type="nf4")
    tensors = {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    operands = [tensors[suffix] for suffix in nf4.OPERANDS]
    offset = nf4.check(tensors, n, k).offset
    found = torch.ops.svdq.nf4_dequantize(*operands, offset, n, k, dtype)
    assert torch.equal(found, functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 13, 32])
@pytest.mark.parametrize(("n", "k"), [(96, 192), (5, 64), (1000, 1088), (4096, 4096), (130, 20480)])
def test_the_product_of_few_rows_is_the_sum_over_all_columns(n, k, m, dtype):
    operands, bias, x = encoded(n, k), normal(n, seed=2), normal(m, k, seed=3).to(dtype)
    y = torch.ops.svdq.nf4_linear(x.cuda(), *on_gpu(operands), n, bias.cuda()).cpu().double()
    operands[2] = (operands[2] * LIFT).half().double() / LIFT  # as the kernel's table has the levels
    weight = nf4.dequantize(*operands, n, k, torch.float64)
    wanted = x.double() @ weight.T + bias.to(dtype).double()
    unit = 2.0 ** (-11 if dtype == F16 else -8)
    assert ((y - wanted).abs() <= unit * wanted.abs() + 2.0**-20 * (x.double().abs() @ weight.abs().T)).all()


@pytest.mark.parametrize("m", [operators.FEW_ROWS + 1, 64])
def test_more_rows_are_the_product_with_the_dequantized_weight(m):
    operands, x = on_gpu(encoded(256, 320)), normal(m, 320).to(BF16).cuda()
    y = torch.ops.svdq.nf4_linear(x, *operands, 256, None)
    weight = torch.ops.svdq.nf4_dequantize(*operands, 256, 320, BF16)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))


def test_rows_of_a_wider_matrix_and_replays_of_a_graph_give_the_same_bits():
    operands, wide = on_gpu(encoded(384, 2048)), normal(4, 4096).to(BF16).cuda()
    x = wide[:, 1024:3072]
    once = torch.ops.svdq.nf4_linear(x, *operands, 384, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.ops.svdq.nf4_linear(x, *operands, 384, None)
    captured.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, once)
    assert torch.equal(once, torch.ops.svdq.nf4_linear(x.contiguous(), *operands, 384, None))
