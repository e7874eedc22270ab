"""NF4's operators on the CPU: the kernels' own text, run thread by thread (see emulate.py), and what they refuse."""

import emulate
import numpy as np
import pytest
import torch

from svdq import nf4
from svdq.kernels import nf4 as operators

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LIFT = 1.3662109375
NAMES = ("packed", "absmax", "quant_map", "nested_absmax", "nested_quant_map")
by_host = pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encoded(n, k):
    """The five operands and the offset of a weight whose rows differ in size."""
    weight = normal(n, k) * 10 ** normal(n, 1, seed=1)
    tensors = nf4.encode(weight)
    offset = nf4.check(tensors, n, k).offset
    return [tensors[suffix] for suffix in nf4.OPERANDS] + [offset]


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


@by_host
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (7, 31), (259, 130)])
def test_the_dequantization_is_the_loops_in_every_type(n, k, dtype):
    """Whole blocks of threads, ends of all kinds, an odd number of weights."""
    operands = encoded(n, k)
    found = operators.nf4_dequantize(*operands, n, k, dtype)
    assert torch.equal(found, float64_weight(operands, n, k).to(dtype))


@by_host
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("at_once", [0, operators.AT_ONCE])  # two strips a block; of up to four rows of x one
@pytest.mark.parametrize(("m", "n", "k", "dtype"), [
    (1, 50, 8256, BF16),
    (2, 33, 4096, F16),
    (3, 6, 1088, BF16),
    (4, 32, 64, F16),
    (7, 40, 2112, BF16),
    (8, 20, 1024, F16),
    (9, 17, 3136, F16),
    (32, 34, 192, BF16),
])  # fmt: skip
def test_the_product_of_few_rows_is_the_sum_over_all_columns(m, n, k, dtype, at_once, monkeypatch):
    """Rows of x for all tiles and turns, columns for less and more than all warps, odd blocks, odd rows."""
    monkeypatch.setattr(operators, "AT_ONCE", at_once)
    operands, bias, x = encoded(n, k), normal(n, seed=2), normal(m, k, seed=3).to(dtype)
    y = operators.nf4_linear(x, *operands, n, bias)
    operands[2] = (operands[2] * LIFT).half().double() / LIFT  # as the kernel's table has the levels
    weight = nf4.dequantize(*operands, n, k, torch.float64)
    wanted = x.double() @ weight.T + bias.to(dtype).double()
    unit = 2.0 ** (-11 if dtype == F16 else -8)
    size = x.double().abs() @ weight.abs().T
    assert ((y.double() - wanted).abs() <= unit * wanted.abs() + 2.0**-20 * size).all()


@by_host
@pytest.mark.usefixtures("emulated")
def test_bfloat16_of_any_size_is_multiplied_as_it_is():
    """Large rows, small rows, a large value that meets zeros among values 2^-32 of its size; zeros, infinity, NaN."""
    n, k = 20, 192
    weight = normal(n, k)
    weight[:, 70] = 0
    tensors = nf4.encode(weight)
    operands = [tensors[suffix] for suffix in nf4.OPERANDS] + [nf4.check(tensors, n, k).offset]
    x = normal(7, k, seed=3)
    x[0] *= 2.0**100
    x[1] *= 2.0**-100
    x[2] = x[2].sign() * (1 + x[2].abs() % 1) * 2.0**-12
    x[2, 70] = 2.0**20
    x[3] = 0
    x[5, 7], x[6, 130] = float("inf"), float("nan")
    x = x.to(BF16)
    y = operators.nf4_linear(x, *operands, n, None)
    operands[2] = (operands[2] * LIFT).half().double() / LIFT
    weight = nf4.dequantize(*operands, n, k, torch.float64)
    wanted, size = x[:5].double() @ weight.T, x[:5].double().abs() @ weight.abs().T
    assert ((y[:5].double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 2.0**-20 * size).all()
    assert not y[5:].isfinite().any()


# ---- the operators


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_an_operator_is_declared_as_it_behaves(dtype):
    operands = encoded(6, 64)
    torch.library.opcheck(torch.ops.svdq.nf4_dequantize.default, (*operands, 6, 64, dtype))
    for bias in (None, normal(6).to(dtype)):
        torch.library.opcheck(torch.ops.svdq.nf4_linear.default, (normal(2, 64).to(dtype), *operands, 6, bias))


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_the_reference_rounds_once(dtype):
    operands, x, bias = encoded(33, 70), normal(5, 70, seed=3).to(dtype), normal(33, seed=4).to(dtype)
    wanted = x.float() @ float64_weight(operands, 33, 70).T + bias.float()
    found = torch.ops.svdq.nf4_linear(x, *operands, 33, bias)
    torch.testing.assert_close(found, wanted.to(dtype), rtol=2e-6 if dtype == F32 else 2**-7, atol=1e-4)


@pytest.fixture
def launched(monkeypatch):
    """What would have been launched on a GPU."""
    found = []
    monkeypatch.setattr(operators, "launch", lambda kernel, *arguments, **options: found.append((kernel, arguments)))
    return found


@pytest.mark.parametrize(("m", "k", "dtype", "name"), [
    (1, 128, F16, "nf4_few_rows"),
    (operators.FEW_ROWS, 128, BF16, "nf4_few_rows"),
    (operators.FEW_ROWS + 1, 128, BF16, "nf4_dequantize"),
    (1, 96, BF16, "nf4_dequantize"),
    (1, 128, F32, "nf4_dequantize"),
])  # fmt: skip
def test_few_rows_of_whole_blocks_in_16_bits_are_one_launch_others_dequantize(launched, m, k, dtype, name):
    y = operators.nf4_linear(torch.zeros(m, k, dtype=dtype), *encoded(5, k), 5, None)
    assert [kernel.name for kernel, _ in launched] == [name] and y.shape == (m, 5)


def test_no_rows_are_no_launch(launched):
    assert operators.nf4_linear(torch.zeros(0, 128, dtype=F16), *encoded(5, 128), 5, None).shape == (0, 5)
    assert launched == []


@pytest.mark.parametrize("implementation", ["kernels", "reference"])
@pytest.mark.parametrize(("place", "value"), [
    (0, torch.zeros(192, dtype=torch.uint8)),
    (1, torch.zeros(7, dtype=torch.uint8)),
    (1, torch.zeros(6)),
    (2, torch.zeros(15)),
    (3, torch.zeros(2)),
    (4, torch.zeros(256, dtype=torch.float64)),
    (4, torch.zeros(512)[::2]),
])  # fmt: skip
def test_an_operand_that_does_not_fit_is_refused_before_a_launch(launched, implementation, place, value):
    run = operators if implementation == "kernels" else torch.ops.svdq
    operands = encoded(6, 64)
    operands[place] = value
    x, words = torch.zeros(1, 64, dtype=F16), f"{NAMES[place]}: found .*; wanted "
    with pytest.raises(ValueError, match=f"^nf4_linear: {words}"):
        run.nf4_linear(x, *operands, 6, None)
    with pytest.raises(ValueError, match=f"^nf4_dequantize: {words}"):
        run.nf4_dequantize(*operands, 6, 64, F16)
    assert launched == []


def test_other_inputs_that_do_not_fit_are_refused(launched):
    operands = encoded(6, 64)
    for x, bias, words in (
        (torch.zeros(64, dtype=F16), None, "x: found .*; wanted a matrix"),
        (torch.zeros(1, 64, dtype=torch.float64), None, "x: found .*; wanted a matrix"),
        (torch.zeros(1, 65, dtype=F16), None, "packed: found"),
        (torch.zeros(1, 64, dtype=F16), torch.zeros(5), "bias: found"),
    ):
        with pytest.raises(ValueError, match=f"^nf4_linear: {words}"):
            operators.nf4_linear(x, *operands, 6, bias)
    with pytest.raises(ValueError, match="found n 0, k 64; wanted at least 1"):
        operators.nf4_dequantize(*operands, 0, 64, F16)
    with pytest.raises(ValueError, match="wanted float16, bfloat16 or float32"):
        operators.nf4_dequantize(*operands, 6, 64, torch.float64)
    assert launched == []
