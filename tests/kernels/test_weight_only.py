"""Weight-only linears without a GPU: known answers, what is refused and launched, and the kernels' text emulated."""

import emulate
import pytest
import torch

from svdq.formats import pack_words, unpack_words
from svdq.kernels import compile as kernels
from svdq.kernels import weight_only
from svdq.kernels.weight_only import Weight

HALF, D = torch.float16, torch.float64


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def numbers(low, high, *shape, seed=0, dtype=torch.int64):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# ---- known answers


def test_the_lowest_k_is_the_lowest_nibble_of_a_word():
    words = torch.tensor([[0x87654321 - 2**32, 0x0FEDCBA9, -1, 0]], dtype=torch.int32)
    zeros, scales = torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1, 1).half()
    assert Weight(4, words, scales, zeros, 32).dequantized().tolist() == [[*range(1, 16), 0, *[15] * 8, *[0] * 8]]


def w4_by_hand(zeros):
    """k = 64 in two groups of 32, all codes 3 but the first of each group; scales 1/2 and 2."""
    codes = torch.full((1, 64), 3, dtype=torch.int8)
    codes[0, 0], codes[0, 32] = 15, 0
    return pack_words(codes), torch.tensor([[0.5, 2.0]]).half(), zeros, 32


def test_a_4_bit_weight_is_code_less_zero_times_scale():
    weight = Weight(4, *w4_by_hand(torch.tensor([[1, 5]], dtype=torch.uint8))).dequantized()
    assert weight.tolist() == [[7.0] + [1.0] * 31 + [-10.0] + [-4.0] * 31]


def test_without_zero_points_the_zero_is_8():
    weight = Weight(4, *w4_by_hand(None)).dequantized()
    assert weight.tolist() == [[3.5] + [-2.5] * 31 + [-16.0] + [-10.0] * 31]


def test_a_4_bit_linear_of_ones_and_twos():
    x = torch.tensor([[1.0] * 64, [0.0] * 32 + [2.0] * 32]).half()
    zeros, down, up = torch.tensor([[1, 5]], dtype=torch.uint8), torch.full((64, 1), 0.25), torch.tensor([[3.0]])
    low_rank_and_bias = down.half(), up.half(), torch.tensor([100.0]).half()
    y = torch.ops.svdq.w4a16_linear(x, *w4_by_hand(zeros), *low_rank_and_bias)
    first, second = 7 + 31 - 10 - 4 * 31, 2 * (-10 - 4 * 31)
    assert y.tolist() == [[first + 3 * 16 + 100], [second + 3 * 16 + 100]]
    assert y.dtype == HALF


def test_an_8_bit_linear_of_two_rows():
    codes = torch.zeros(2, 32, dtype=torch.int8)
    codes[0, :3], codes[1, 31] = torch.tensor([127, -127, 5], dtype=torch.int8), -100
    x = torch.arange(32.0)[None].bfloat16()
    scales = torch.tensor([[0.5], [0.25]]).half()
    y = torch.ops.svdq.w8a16_linear(x, codes, scales, None, None, None, torch.float32)
    assert y.tolist() == [[0.5 * (-127 + 10), -25.0 * 31]]


# ---- how the operators are declared, and what they refuse


def w4(n=96, k=192, group=64, rank=16, dtype=HALF):
    return {
        "x": normal(3, k).to(dtype),
        "qweight": pack_words(numbers(0, 16, n, k, dtype=torch.int8)),
        "w_scales": (normal(n, k // group).abs() * 0.01 + 0.001).half(),
        "w_zeros": numbers(0, 16, n, k // group, seed=1, dtype=torch.uint8),
        "group": group,
        "proj_down": normal(k, rank).half(),
        "proj_up": normal(n, rank).half(),
        "bias": normal(n).to(dtype),
        "dtype": None,
    }


def w8(n=96, k=192, rank=16, dtype=HALF):
    given = w4(n, k, k, rank, dtype)
    del given["group"], given["w_zeros"]
    return given | {"qweight": numbers(-127, 128, n, k, dtype=torch.int8)}


GIVEN = {"w4a16_linear": w4, "w8a16_linear": w8}


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, torch.float32], ids=["f16", "bf16", "f32"])
@pytest.mark.parametrize("other", [
    {}, {"bias": None, "proj_down": None, "proj_up": None, "dtype": torch.float32},
    {"x": normal(2, 5, 192)}, {"x": normal(192)}, {"x": normal(0, 192)},
])  # fmt: skip
@pytest.mark.parametrize("name", GIVEN)
def test_an_operator_is_declared_as_it_behaves(name, other, dtype):
    given = GIVEN[name](dtype=dtype) | other
    given["x"] = given["x"].to(dtype)
    run = getattr(torch.ops.svdq, name).default
    torch.library.opcheck(run, tuple(given.values()), test_utils=("test_schema", "test_faketensor"))
    assert run(*given.values()).shape == (*given["x"].shape[:-1], 96)


WRONG = [
    ("x", normal(3, 160).half()),
    ("x", torch.tensor(1.0).half()),
    ("qweight", torch.zeros(96, 24, dtype=torch.int64)),
    ("qweight", torch.zeros(96, 24, 1, dtype=torch.int32)),
    ("qweight", torch.zeros(192, 24, dtype=torch.int32)[::2]),
    ("w_scales", torch.ones(96, 2, dtype=HALF)),
    ("w_scales", torch.ones(96, 3)),
    ("w_zeros", torch.ones(96, 2, dtype=torch.uint8)),
    ("w_zeros", torch.ones(96, 3, dtype=torch.int8)),
    ("group", 16),
    ("group", 96),
    ("group", 128),
    ("group", 0),
    ("proj_down", normal(160, 16).half()),
    ("proj_down", normal(192, 16)),
    ("proj_down", None),
    ("proj_up", normal(96, 8).half()),
    ("bias", normal(95).half()),
    ("dtype", torch.bfloat16),
]


@pytest.fixture
def launched(monkeypatch):
    found = []
    monkeypatch.setattr(weight_only, "launch", lambda *arguments, **options: found.append(arguments))
    return found


@pytest.mark.parametrize("implementation", ["kernels", "reference"])
@pytest.mark.parametrize(("operand", "value"), WRONG)
def test_an_operand_that_does_not_fit_is_refused_before_a_launch(launched, implementation, operand, value):
    for name, make in GIVEN.items():
        if operand not in make() or (name == "w8a16_linear" and operand == "qweight"):
            continue
        run = getattr(weight_only if implementation == "kernels" else torch.ops.svdq, name)
        with pytest.raises(ValueError, match=rf"^{name}: .*(found .*; wanted |together)"):
            run(*(make() | {operand: value}).values())
    assert launched == []


@pytest.mark.parametrize("k", [0, 16, 48, 200])
def test_an_odd_number_of_inputs_is_refused(k):
    given = {"x": normal(3, k).half(), "qweight": torch.zeros(4, k, dtype=torch.int8)}
    with pytest.raises(ValueError, match=f"found k {k}; wanted a multiple of 32"):
        torch.ops.svdq.w8a16_linear(*given.values(), torch.ones(4, 1).half(), None, None, None)


def test_every_number_of_rows_is_one_complete_launch_or_a_product_in_parts(launched):
    """Blocks cover all rows of x and of the weight."""
    for m in (1, 8, 9, 32, 33, 64):
        for name, make in GIVEN.items():
            given = make() | {"x": normal(m, 192).half()}
            getattr(weight_only, name)(*given.values())
            kernel, _, (rows, tokens), threads, _ = launched.pop()
            size = dict(kernel.constants)
            assert (rows - 1) * 16 * size["STRIPS"] < 96 <= rows * 16 * size["STRIPS"]
            assert (tokens - 1) * 8 * size["TILES"] < m <= tokens * 8 * size["TILES"]
            assert threads == 32 * size["WARPS"] and launched == []


@pytest.mark.parametrize("group", [32, 64, 128, 192])
@pytest.mark.parametrize("m", [1, 8, 9, 64, 65, 1000])
def test_every_kernel_is_built_ahead_of_time(launched, m, group):
    for dtype in (HALF, torch.bfloat16):
        k = 3 * group if group < 192 else 192
        four = w4(k=k, group=group, dtype=dtype) | {"x": normal(m, k).to(dtype)}
        weight_only.w4a16_linear(*four.values())
        eight = w8(dtype=dtype) | {"x": normal(m, 192).to(dtype)}
        weight_only.w8a16_linear(*eight.values())
    assert len(launched) == 4
    assert {call[0] for call in launched} <= set(kernels.all_kernels("sm_80"))


# ---- the kernels' own text, thread by thread


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return emulate.Emulator(tmp_path_factory.mktemp("weight_only"), 900)


CASES = [  # m, k, group (0: 8 bits), rank, type: each kernel, each way through it
    (1, 1152, 128, 8, HALF),
    (3, 192, 192, 0, HALF),
    (8, 2144, 32, 3, torch.bfloat16),
    (35, 1088, 64, 0, torch.bfloat16),
    (2, 1056, 0, 0, torch.bfloat16),
    (9, 96, 0, 16, HALF),
]


@pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize(("m", "k", "group", "rank", "dtype"), CASES)
def test_the_kernels_text_gives_the_product_of_the_dequantized_weight(monkeypatch, emulator, m, k, group, rank, dtype):
    monkeypatch.setattr(weight_only, "launch", emulator.launch)
    n = 33
    made = w4(n, k, group, rank, dtype) if group else w8(n, k, rank, dtype)
    made |= {"x": normal(m, k + 8).to(dtype)[:, :k], "dtype": torch.float32}
    if group == 192:
        made |= {"w_zeros": None, "bias": None}
    run = weight_only.w4a16_linear if group else weight_only.w8a16_linear
    codes = unpack_words(made["qweight"]) if group else made["qweight"]
    zeros = 0 if not group else 8 if made["w_zeros"] is None else made["w_zeros"].to(D).repeat_interleave(group, 1)
    scales = made["w_scales"].to(D).repeat_interleave(group or k, 1)
    x = made["x"].to(D)
    wanted = x @ ((codes.to(D) - zeros) * scales).t() + x @ made["proj_down"].to(D) @ made["proj_up"].to(D).t()
    wanted += 0 if made["bias"] is None else made["bias"].to(D)
    assert ((run(*made.values()) - wanted).norm() / wanted.norm()).item() < 1e-6  # sums in float32


@pytest.mark.skipif(emulate.COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("bits", [4, 8])
def test_expanded_weights_are_the_dequantized_ones_rounded(monkeypatch, emulator, bits):
    monkeypatch.setattr(weight_only, "launch", emulator.launch)
    made = w4(9, 2080, 32) if bits == 4 else w8(9, 2080)
    group = 32 if bits == 4 else 2080
    weight = Weight(bits, made["qweight"], made["w_scales"], made.get("w_zeros"), group)
    found = torch.full((5, 2096), -1.0).half()
    weight_only._expand(weight, slice(2, 7), found)
    assert torch.equal(found[:, :2080], weight.dequantized()[2:7].half()) and (found[:, 2080:] == -1).all()
