"""Without a GPU: operators are declared as they behave, and refuse by name what a kernel would read past its end.

The checks are those of the kernels too: both implementations of an operator begin with them.
"""

import pytest
import torch

from svdq.kernels import compile as kernels
from svdq.kernels import hopper, layout, ops, tiles

HALF, F32 = torch.float16, torch.float32
TYPES = pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, F32], ids=["f16", "bf16", "f32"])
M, K, N, RANK = 20, 192, 130, 16
PADDED_K, PADDED_N, ROWS, GROUPS = 256, 256, 32, 4
HOPPER_ROWS = 384


def normal(*shape, dtype=HALF):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def operands(name, dtype=HALF):
    """The arguments of one sound call, by name."""
    if name == "inv_rms":
        return {"x": normal(M, K, dtype=dtype), "epsilon": 1e-6}
    if name == "quantize_lora_down_e4m3":
        return operands("quantize_lora_down", dtype) | {"values": True}
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
    if name == "w4_gemm_lora_e4m3":
        return operands("w4a4_gemm_lora", dtype) | {
            "codes": torch.ones(HOPPER_ROWS, PADDED_K, dtype=torch.uint8),
            "scales": torch.ones(HOPPER_ROWS, GROUPS),
            "t": torch.ones(1, 2 * RANK, HOPPER_ROWS),
        }
    if name == "w4a4_gemm_lora":
        return {
            "codes": torch.ones(ROWS, PADDED_K // 2, dtype=torch.int8),
            "scales": torch.ones(ROWS, GROUPS),
            "t": torch.ones(2, ROWS, 2 * RANK),
            "qweight": torch.ones(PADDED_N, PADDED_K // 2, dtype=torch.int8),
            "wscales": torch.ones(GROUPS, PADDED_N, dtype=HALF),
            "up": normal(PADDED_N, RANK),
            "bias": torch.ones(PADDED_N),
            "m": M,
            "n": N,
            "dtype": dtype,
            "first_rank": torch.tensor([0, RANK], dtype=torch.int32),
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


OPERATORS = [
    "quantize_lora_down",
    "w4a4_gemm_lora",
    "inv_rms",
    "qknorm_rope",
    "quantize_lora_down_e4m3",
    "w4_gemm_lora_e4m3",
]
HOPPERS = {  # of its operators, what makes the other kind of call
    "quantize_lora_down_e4m3": {"values": False},
    "w4_gemm_lora_e4m3": {"scales": torch.ones(HOPPER_ROWS)},
}
# Without columns of t that a tile of the weights has for itself
WHOLE_T = {
    "w4a4_gemm_lora": {"t": torch.ones(2, ROWS, RANK), "first_rank": None},
    "w4_gemm_lora_e4m3": {"t": torch.ones(1, RANK, HOPPER_ROWS), "first_rank": None},
}


def implementation_on_gpus(name):
    return getattr(hopper if name in HOPPERS else ops, name)


@pytest.fixture
def launched(monkeypatch):
    """What would have been launched on a GPU."""
    found = []
    for module in (ops, hopper):
        monkeypatch.setattr(module, "launch", lambda *arguments, **options: found.append(arguments))
    monkeypatch.setattr(hopper, "require", lambda device: None)
    monkeypatch.setattr(hopper, "_processors", lambda index: 132)
    monkeypatch.setattr(ops, "cluster_blocks", lambda device: 2)
    return found


@TYPES
@pytest.mark.parametrize(("name", "other"), [
    *[(name, {}) for name in OPERATORS], *HOPPERS.items(), *WHOLE_T.items()
])  # fmt: skip
def test_an_operator_is_declared_as_it_behaves(name, other, dtype):
    arguments = operands(name, dtype) | other
    torch.library.opcheck(getattr(torch.ops.svdq, name).default, tuple(arguments.values()))


@pytest.mark.parametrize("rank", [0, 48])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("m", [0, 1, 16, 17, 384, 385, 1024, 1025])
def test_hoppers_operands_have_the_declared_sizes_for_any_number_of_tokens(m, values, rank):
    """Fake tensors and the reference; and the product takes what the quantizer gives."""
    activation = (normal(m, K), normal(PADDED_K, rank), None, True, 1.0, None, None)
    on = {"cpu": [], "meta": []}
    for device, sizes in on.items():
        moved = [part.to(device) if isinstance(part, torch.Tensor) else part for part in activation]
        quantized = torch.ops.svdq.quantize_lora_down_e4m3(*moved, values)
        weight = [
            torch.ones(PADDED_N, PADDED_K // 2, dtype=torch.int8, device=device),
            torch.ones(GROUPS, PADDED_N, dtype=HALF, device=device),
            torch.ones(PADDED_N, rank, dtype=HALF, device=device),
        ]
        y = torch.ops.svdq.w4_gemm_lora_e4m3(*quantized, *weight, None, m, N, HALF)
        sizes += [(part.dtype, part.shape) for part in (*quantized, y)]
    assert on["cpu"] == on["meta"]
    rows = -(-m // HOPPER_ROWS) * HOPPER_ROWS
    wanted = [(rows, PADDED_K), (rows,) if values else (rows, GROUPS), (1, rank, rows), (m, N)]
    assert [tuple(shape) for _, shape in on["cpu"]] == wanted


@pytest.mark.parametrize("name", ["quantize_lora_down", "quantize_lora_down_e4m3", "qknorm_rope"])
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
    *[
        ("quantize_lora_down_e4m3", operand, value)
        for operand, value in [
            ("x", normal(2, 10, K)),
            ("x", normal(M, 320)),
            ("x", normal(M, 100)),
            ("x", normal(M, 0)),
            ("down", normal(PADDED_K, 24)),
            ("down", normal(K, RANK)),
            ("down", normal(PADDED_K, RANK, dtype=torch.bfloat16)),
            ("inv_smooth", torch.ones(K - 64)),
            ("row_factor", torch.ones(M - 1)),
            ("norm_weight", None),
        ]
    ],
    *[
        ("w4_gemm_lora_e4m3", operand, value)
        for operand, value in [
            ("codes", torch.ones(2 * HOPPER_ROWS, PADDED_K, dtype=torch.uint8)),
            ("codes", torch.ones(ROWS, PADDED_K, dtype=torch.uint8)),
            ("codes", torch.ones(HOPPER_ROWS, PADDED_K, dtype=torch.int8)),
            ("codes", torch.ones(HOPPER_ROWS, PADDED_K // 2, dtype=torch.uint8)),
            ("scales", torch.ones(HOPPER_ROWS - 1)),
            ("scales", torch.ones(HOPPER_ROWS, GROUPS - 1)),
            ("scales", torch.ones(HOPPER_ROWS, dtype=HALF)),
            ("scales", torch.ones(1, HOPPER_ROWS, GROUPS)),
            ("t", torch.ones(2, 2 * RANK, HOPPER_ROWS)),
            ("t", torch.ones(1, RANK - 16, HOPPER_ROWS)),
            ("t", torch.ones(1, RANK + 8, HOPPER_ROWS)),
            ("t", torch.ones(1, HOPPER_ROWS, 2 * RANK)),
            ("t", torch.ones(2 * RANK, HOPPER_ROWS)),
            ("qweight", torch.ones(PADDED_N, PADDED_K, dtype=torch.int8)),
            ("wscales", torch.ones(GROUPS, PADDED_N - 128, dtype=HALF)),
            ("wscales", torch.ones(GROUPS * PADDED_N, dtype=HALF)),
            ("up", normal(PADDED_N - 128, RANK)),
            ("bias", torch.ones(N)),
            ("first_rank", torch.zeros(1, dtype=torch.int32)),
            ("first_rank", torch.zeros(2, dtype=torch.int64)),
            ("first_rank", None),
            ("m", HOPPER_ROWS + 1),
            ("m", -1),
            ("n", PADDED_N + 1),
            ("n", -1),
        ]
    ],
    ("w4a4_gemm_lora", "first_rank", torch.zeros(1, dtype=torch.int32)),
    ("w4a4_gemm_lora", "first_rank", torch.zeros(2)),
    ("w4a4_gemm_lora", "first_rank", None),
    ("w4a4_gemm_lora", "t", torch.ones(2, ROWS, RANK + 8)),
    ("w4a4_gemm_lora", "t", torch.ones(2, ROWS, 0)),
    ("w4a4_gemm_lora", "codes", torch.ones(ROWS - 16, PADDED_K // 2, dtype=torch.int8)),
    ("w4a4_gemm_lora", "codes", torch.ones(ROWS, PADDED_K // 2, dtype=torch.uint8)),
    ("w4a4_gemm_lora", "scales", torch.ones(ROWS, GROUPS - 1)),
    ("w4a4_gemm_lora", "scales", torch.ones(ROWS, GROUPS, dtype=HALF)),
    ("w4a4_gemm_lora", "t", torch.ones(2, ROWS - 16, 2 * RANK)),
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
def test_an_operand_that_does_not_fit_is_refused_before_a_launch(launched, implementation, name, operand, value):
    run = implementation_on_gpus(name) if implementation == "kernels" else getattr(torch.ops.svdq, name)
    arguments = operands(name)
    launches = (2 if name == "w4_gemm_lora_e4m3" else 1) if implementation == "kernels" else 0
    assert len(run(*arguments.values())) and len(launched) == launches
    launched.clear()
    with pytest.raises(ValueError, match=rf"^{name}: .*(found .*; wanted |together|channels)"):
        run(*(arguments | {operand: value}).values())
    assert launched == []


@pytest.mark.parametrize(("name", "operand"), [
    *[("quantize_lora_down", operand) for operand in ("down", "inv_smooth", "row_factor", "norm_weight")],
    *[("quantize_lora_down_e4m3", operand) for operand in ("down", "inv_smooth", "row_factor", "norm_weight")],
    *[(name, operand) for name in ("w4a4_gemm_lora", "w4_gemm_lora_e4m3")
      for operand in ("scales", "t", "qweight", "wscales", "up", "bias", "first_rank")],
    *[("qknorm_rope", operand) for operand in ("k", "q_norm", "k_norm", "cosine", "sine")],
])  # fmt: skip
def test_an_operand_on_another_device_is_refused(launched, name, operand):
    arguments = operands(name)
    arguments[operand] = arguments[operand].to("meta")
    with pytest.raises(ValueError, match=rf"^{name}: {operand}: found .* on meta, .*; wanted .* on cpu"):
        implementation_on_gpus(name)(*arguments.values())
    assert launched == []


def test_the_message_names_the_operand_and_both_sizes():
    arguments = operands("w4a4_gemm_lora") | {"bias": torch.ones(N)}
    words = r"bias: found torch\.float32 \[130\] on cpu, .*; wanted torch\.float32 \[256\] on cpu, contiguous"
    with pytest.raises(ValueError, match=words):
        torch.ops.svdq.w4a4_gemm_lora(*arguments.values())


def on_meta(arguments, **others):
    """The same call of tensors without memory."""
    moved = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    return (moved | others).values()


def test_rows_that_a_kernel_cannot_count_are_refused():
    """t of 2^31 numbers: 8 GiB, here without memory."""
    m = 2**27
    given = {
        "codes": torch.empty(m, PADDED_K // 2, dtype=torch.int8, device="meta"),
        "scales": torch.empty(m, GROUPS, device="meta"),
        "t": torch.empty(1, m, RANK, device="meta"),
        "m": m,
    }
    with pytest.raises(ValueError, match=r"134217728 rows are too many at once for rank 16"):
        ops.w4a4_gemm_lora(*on_meta(operands("w4a4_gemm_lora"), **given))


@pytest.mark.parametrize("m", [hopper.MOST_ROWS, 2**24])
def test_tokens_that_hoppers_kernels_cannot_count_are_refused(launched, m):
    x, factor = torch.empty(m, K, dtype=HALF, device="meta"), torch.empty(m, device="meta")
    with pytest.raises(ValueError, match=f"^quantize_lora_down_e4m3: {m} rows are too many"):
        hopper.quantize_lora_down_e4m3(*on_meta(operands("quantize_lora_down_e4m3"), x=x, row_factor=factor))
    with pytest.raises(ValueError, match=rf"^w4_gemm_lora_e4m3: .* m {m}; wanted .*m below {hopper.MOST_ROWS}"):
        hopper.w4_gemm_lora_e4m3(*on_meta(operands("w4_gemm_lora_e4m3"), m=m))
    assert launched == []


def test_the_most_tokens_that_hoppers_kernels_can_count_are_taken(launched):
    m = hopper.MOST_ROWS - 1
    x, factor = torch.empty(m, K, dtype=HALF, device="meta"), torch.empty(m, device="meta")
    quantized = hopper.quantize_lora_down_e4m3(*on_meta(operands("quantize_lora_down_e4m3"), x=x, row_factor=factor))
    rows = len(quantized[0])
    assert rows % HOPPER_ROWS == 0 and rows * 128 < 2**31
    given = dict(zip(("codes", "scales", "t"), quantized, strict=True), m=m, first_rank=None)
    assert hopper.w4_gemm_lora_e4m3(*on_meta(operands("w4_gemm_lora_e4m3"), **given)).shape == (m, N)


def test_a_weight_of_an_odd_number_of_groups_is_refused_by_hoppers_product(launched):
    """A stage of its pipeline is two; packed weights always have an even number."""
    odd = {
        "codes": torch.ones(HOPPER_ROWS, 192, dtype=torch.uint8),
        "scales": torch.ones(HOPPER_ROWS, 3),
        "qweight": torch.ones(PADDED_N, 96, dtype=torch.int8),
        "wscales": torch.ones(3, PADDED_N, dtype=HALF),
    }
    for run in (hopper.w4_gemm_lora_e4m3, torch.ops.svdq.w4_gemm_lora_e4m3):
        with pytest.raises(ValueError, match=r"^w4_gemm_lora_e4m3: found 3 groups.*; wanted an even number"):
            run(*(operands("w4_gemm_lora_e4m3") | odd).values())
    assert launched == []


@pytest.mark.parametrize("siblings", [1, 2, 3])
@pytest.mark.parametrize("rank", [0, 16, 32, 64, 128])
def test_siblings_as_one_linear_run_kernels_that_are_built_ahead_of_time(rank, siblings):
    total = rank * siblings
    columns = total // ops.rank_parts(total)
    for arch in kernels.ARCHITECTURES:
        built = kernels.all_kernels(arch)
        assert all(kernels.quantize_kernel("f16", columns, halves) in built for halves in (1, 2))
        on_hopper = {kernels.quantize_kernel("f16", columns, 2, store) in built for store in (1, 2)}
        assert on_hopper == {arch == kernels.HOPPER}


@pytest.mark.parametrize("token_scale", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_hoppers_products_are_built_ahead_of_time(wide, token_scale):
    built = kernels.all_kernels(kernels.HOPPER)
    for dtype, out in ops.OUT.items():
        assert kernels.wgmma_kernel(out, tiles.hopper_tile(wide, token_scale, dtype.itemsize)) in built


def test_a_width_is_cut_into_equal_parts_of_whole_tiles():
    for rank in range(layout.RANK_TILE, 1025, layout.RANK_TILE):
        parts = ops.rank_parts(rank)
        assert rank % parts == 0 and rank // parts % layout.RANK_TILE == 0 and rank // parts <= 128


def test_hoppers_quantizer_gives_each_warp_a_group_as_far_as_two_blocks_a_multiprocessor_go():
    """Sizes at which fewer and more were timed on an H200; blocks of values wait for each other."""
    found = {(m, groups): (hopper._shares(m, groups, False), hopper._shares(m, groups, True))
             for m, groups in ((1, 2), (64, 64), (256, 64), (700, 16), (700, 32), (700, 48), (4096, 48))}  # fmt: skip
    assert found == {(1, 2): (1, 1), (64, 64): (8, 8), (256, 64): (8, 8), (700, 16): (2, 2), (700, 32): (4, 4),
                     (700, 48): (6, 4), (4096, 48): (2, 2)}  # fmt: skip
