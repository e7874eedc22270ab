"""NF4's operators on the CPU: the kernels' own text, run thread by thread (see emulate.py), and what they refuse."""

import emulate
import numpy as np
import pytest
import torch

from svdq import nf4
from svdq.kernels import nf4 as operators

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LIFT = 1.3662109375
by_host = pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(n, k):
    """The five operands and the offset of a weight whose rows differ in size."""
    weight = normal(n, k) * 10 ** normal(n, 1, seed=1)
    tensors = nf4.encode(weight)
    offset = nf4.check(tensors, n, k).offset
    return [tensors[suffix] for suffix in list(tensors)[:5]] + [offset]


def float64_weight(operands, n, k):
    """By a loop over the bytes, each product in float32 as numpy rounds it."""
    packed, absmax, quant_map, nested_absmax, nested_map = (x.numpy() for x in operands[:5])
    values = np.empty(n * k, np.float32)
    for i in range(n * k):
        code = packed[i // 2, 0] >> 4 if i % 2 == 0 else packed[i // 2, 0] & 15
        scale = nested_map[absmax[i // 64]] * nested_absmax[i // 16384] + np.float32(operands[5])
        values[i] = quant_map[code] * scale
    return torch.from_numpy(values).view(n, k)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return emulate.Emulator(tmp_path_factory.mktemp("nf4"), 900)


@pytest.fixture
def emulated(monkeypatch, emulator):
    monkeypatch.setattr(operators, "launch", emulator.launch)
    monkeypatch.setattr(operators, "_processors", lambda index: 3)


@by_host
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (96, 192), (1, 1), (7, 31), (259, 130)])
def test_the_dequantization_is_the_loops_in_every_type(n, k, dtype):
    """Whole blocks of threads, ends of all kinds, an odd number of weights."""
    operands = encoded(n, k)
    found = operators.nf4_dequantize(*operands, n, k, dtype)
    assert torch.equal(found, float64_weight(operands, n, k).to(dtype))


@by_host
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 192), (2, 5, 1088), (8, 50, 2048), (3, 4, 4160)])
def test_the_product_of_few_rows_is_the_sum_over_all_columns(m, n, k, dtype):
    """Of one, two and four warps an output, steps that are not full, outputs that do not fill a block."""
    operands, bias, x = encoded(n, k), normal(n, seed=2), normal(m, k, seed=3).to(dtype)
    y = operators.nf4_linear(x, *operands, n, bias)
    operands[2] = (operands[2] * LIFT).half().double() / LIFT  # as the kernel's table has the levels
    weight = nf4.dequantize(*operands, n, k, torch.float64)
    wanted = x.double() @ weight.T + bias.to(dtype).double()
    unit = 2.0 ** (-11 if dtype == F16 else -8)
    size = x.double().abs() @ weight.abs().T
    assert ((y.double() - wanted).abs() <= unit * wanted.abs() + 2.0**-20 * size).all()
