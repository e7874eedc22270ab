"""Without a GPU: operators are declared as they behave, and refuse by name what a kernel would read past its end.

The checks are those of the kernels too: both implementations of an operator begin with them.
"""

import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import layout, ops

HALF, F32 = torch.float16, torch.float32
TYPES = pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, F32], ids=["f16", "bf16", "f32"])
M, K, N, RANK = 20, 192, 130, 16
PADDED_K, PADDED_N, ROWS, GROUPS = 256, 256, 32, 4


def normal(*shape, dtype=HALF):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def operands(name, dtype=HALF):
    """The arguments of one sound call, by name."""
    if name == "inv_rms":
        return {"x": normal(M, K, dtype=dtype), "epsilon": 1e-6}
    if name == "quantize_lora_down":
        return {
            "x": normal(M, K, dtype=dtype),
            "down": normal(PADDED_K, RANK),
            "inv_smooth": torch.ones(K),
            "rotation": True,
            "clip": 0.85,
            "row_factor": torch.ones(M),
            "norm_weight": normal(K, dtype=dtype),
        }
    if name == "w4a4_gemm_lora":
        return {
            "codes": torch.ones(ROWS, PADDED_K // 2, dtype=torch.int8),
            "scales": torch.ones(ROWS, GROUPS),
            "t": torch.ones(2, ROWS, RANK),
            "qweight": torch.ones(PADDED_N, PADDED_K // 2, dtype=torch.int8),
            "wscales": torch.ones(GROUPS, PADDED_N, dtype=HALF),
            "up": normal(PADDED_N, RANK),
            "bias": torch.ones(PADDED_N),
            "m": M,
            "n": N,
            "dtype": dtype,
        }
    return {
        "q": normal(M, 3, 64, dtype=dtype),
        "k": normal(M, 1, 64, dtype=dtype),
        "q_norm": normal(64, dtype=dtype),
        "k_norm": normal(64, dtype=dtype),
        "cosine": normal(5, 64, dtype=dtype),
        "sine": normal(5, 64, dtype=dtype),
        "epsilon": 1e-6,
    }


OPERATORS = ["quantize_lora_down", "w4a4_gemm_lora", "inv_rms", "qknorm_rope"]


@TYPES
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_declared_as_it_behaves(name, dtype):
    torch.library.opcheck(getattr(torch.ops.svdq, name).default, tuple(operands(name, dtype).values()))


@pytest.mark.parametrize("name", ["quantize_lora_down", "qknorm_rope"])
def test_a_norm_of_another_type_counts_as_rounded_to_the_activations(name):
    """As the kernels read it."""
    given = operands(name)
    wide = {key: value.float() * 1.0001 if "norm" in key else value for key, value in given.items()}
    rounded = {key: value.to(HALF) if "norm" in key else value for key, value in wide.items()}
    run = getattr(torch.ops.svdq, name)
    for found, wanted in zip(run(*wide.values()), run(*rounded.values()), strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


WRONG = [  # operator, operand, what it is instead
    ("quantize_lora_down", "x", normal(2, 10, K)),
    ("quantize_lora_down", "x", normal(M, 320)),
    ("quantize_lora_down", "x", normal(M, 100)),
    ("quantize_lora_down", "x", normal(M, 0)),
    ("quantize_lora_down", "down", normal(PADDED_K, 24)),
    ("quantize_lora_down", "down", normal(K, RANK)),
    ("quantize_lora_down", "down", normal(PADDED_K, RANK, dtype=torch.bfloat16)),
    ("quantize_lora_down", "down", normal(RANK, PADDED_K).t()),
    ("quantize_lora_down", "inv_smooth", torch.ones(K - 64)),
    ("quantize_lora_down", "inv_smooth", torch.ones(K, dtype=HALF)),
    ("quantize_lora_down", "inv_smooth", torch.ones(2 * K)[::2]),
    ("quantize_lora_down", "row_factor", torch.ones(M - 1)),
    ("quantize_lora_down", "row_factor", torch.ones(M, dtype=torch.float64)),
    ("quantize_lora_down", "row_factor", None),
    ("quantize_lora_down", "norm_weight", normal(K + 64)),
    ("quantize_lora_down", "norm_weight", None),
    ("w4a4_gemm_lora", "codes", torch.ones(ROWS - 16, PADDED_K // 2, dtype=torch.int8)),
    ("w4a4_gemm_lora", "codes", torch.ones(ROWS, PADDED_K // 2, dtype=torch.uint8)),
    ("w4a4_gemm_lora", "scales", torch.ones(ROWS, GROUPS - 1)),
    ("w4a4_gemm_lora", "scales", torch.ones(ROWS, GROUPS, dtype=HALF)),
    ("w4a4_gemm_lora", "t", torch.ones(2, ROWS, 2 * RANK)),
    ("w4a4_gemm_lora", "t", torch.ones(ROWS, RANK)),
    ("w4a4_gemm_lora", "qweight", torch.ones(PADDED_N, PADDED_K // 4, dtype=torch.int8)),
    ("w4a4_gemm_lora", "wscales", torch.ones(GROUPS, PADDED_N - 128, dtype=HALF)),
    ("w4a4_gemm_lora", "wscales", torch.ones(GROUPS, PADDED_N, dtype=torch.bfloat16)),
    ("w4a4_gemm_lora", "up", normal(PADDED_N - 128, RANK)),
    ("w4a4_gemm_lora", "bias", torch.ones(N)),
    ("w4a4_gemm_lora", "bias", torch.ones(PADDED_N, dtype=HALF)),
    ("w4a4_gemm_lora", "m", ROWS + 1),
    ("w4a4_gemm_lora", "n", PADDED_N + 1),
    ("w4a4_gemm_lora", "n", -1),
    ("inv_rms", "x", normal(2, M, K)),
    ("qknorm_rope", "q", normal(M, 192)),
    ("qknorm_rope", "k", normal(M - 1, 1, 64)),
    ("qknorm_rope", "k", normal(M, 1, 64, dtype=F32)),
    ("qknorm_rope", "k", normal(M, 1, 128)),
    ("qknorm_rope", "q_norm", normal(128)),
    ("qknorm_rope", "q_norm", None),
    ("qknorm_rope", "cosine", normal(3, 64)),
    ("qknorm_rope", "cosine", normal(0, 64)),
    ("qknorm_rope", "sine", normal(4, 64)),
    ("qknorm_rope", "sine", normal(5, 32)),
]


@pytest.mark.parametrize("implementation", ["kernels", "reference"])
@pytest.mark.parametrize(("name", "operand", "value"), WRONG)
def test_an_operand_that_does_not_fit_is_refused_before_a_launch(monkeypatch, implementation, name, operand, value):
    launched = []
    monkeypatch.setattr(ops, "launch", lambda *arguments, **options: launched.append(arguments))
    run = getattr(ops, name) if implementation == "kernels" else getattr(torch.ops.svdq, name)
    arguments = operands(name)
    assert len(run(*arguments.values())) and len(launched) == (implementation == "kernels")
    launched.clear()
    with pytest.raises(ValueError, match=rf"^{name}: .*(found .*; wanted |together|channels)"):
        run(*(arguments | {operand: value}).values())
    assert launched == []


@pytest.mark.parametrize(("name", "operand"), [
    *[("quantize_lora_down", operand) for operand in ("down", "inv_smooth", "row_factor", "norm_weight")],
    *[("w4a4_gemm_lora", operand) for operand in ("scales", "t", "qweight", "wscales", "up", "bias")],
    *[("qknorm_rope", operand) for operand in ("k", "q_norm", "k_norm", "cosine", "sine")],
])  # fmt: skip
def test_an_operand_on_another_device_is_refused(monkeypatch, name, operand):
    monkeypatch.setattr(ops, "launch", lambda *arguments, **options: pytest.fail("was launched"))
    arguments = operands(name)
    arguments[operand] = arguments[operand].to("meta")
    with pytest.raises(ValueError, match=rf"^{name}: {operand}: found .* on meta, .*; wanted .* on cpu"):
        getattr(ops, name)(*arguments.values())


def test_the_message_names_the_operand_and_both_sizes():
    arguments = operands("w4a4_gemm_lora") | {"bias": torch.ones(N)}
    words = r"bias: found torch\.float32 \[130\] on cpu, .*; wanted torch\.float32 \[256\] on cpu, contiguous"
    with pytest.raises(ValueError, match=words):
        torch.ops.svdq.w4a4_gemm_lora(*arguments.values())


def test_rows_that_a_kernel_cannot_count_are_refused():
    """t of 2^31 numbers: 8 GiB, here of one number repeated in an operator that would not copy it."""
    m = 2**27
    arguments = operands("w4a4_gemm_lora") | {
        "codes": torch.empty(m, PADDED_K // 2, dtype=torch.int8, device="meta"),
        "m": m,
    }
    rest = ("scales", "t", "qweight", "wscales", "up", "bias")
    meta = {name: torch.empty_like(arguments[name], device="meta") for name in rest}
    meta |= {"scales": torch.empty(m, GROUPS, device="meta"), "t": torch.empty(1, m, RANK, device="meta")}
    with pytest.raises(ValueError, match=r"134217728 rows are too many at once for rank 16"):
        ops.w4a4_gemm_lora(*(arguments | meta).values())


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 16, 32, 64, 128])
def test_siblings_as_one_linear_run_kernels_that_are_built_ahead_of_time(rank, siblings):
    total = rank * siblings
    for halves in (1, 2):
        assert kernels.quantize_kernel("f16", total // ops.rank_parts(total), halves) in kernels.all_kernels()


def test_a_width_is_cut_into_equal_parts_of_whole_tiles():
    for rank in range(layout.RANK_TILE, 1025, layout.RANK_TILE):
        parts = ops.rank_parts(rank)
        assert rank % parts == 0 and rank // parts % layout.RANK_TILE == 0 and rank // parts <= 128
