"""The packed order: golden files of the reference packer byte for byte, and the index formulas element by element."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from svdq.kernels import layout
from svdq.kernels.layout import MMA, Layout, pack_codes, pack_matrix, pad, round_up, unpack_codes, unpack_matrix

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("nunchaku_int4_*.safetensors"))


def rng(seed):
    return torch.Generator().manual_seed(seed)


def bits(tensor):
    """The bytes as integers: −0 and +0 differ, and no NaN compares unequal to itself."""
    return tensor.contiguous().view(torch.int8 if tensor.element_size() == 1 else torch.int16)


def padded_inputs(name):
    """The canonical tensors of a golden file, padded as formats.md §3 says, and the packed ones."""
    file = load_file(GOLDEN / name)
    n, k, r = *file["codes"].shape, file["proj_up"].shape[1]
    big_n, big_k, big_r = -(-n // 128) * 128, -(-k // 128) * 128, -(-r // 16) * 16
    kind = file["w_scales"].dtype
    file["bias"] = file.get("bias", torch.zeros(n, dtype=kind))
    file["smooth"] = file.get("smooth", torch.ones(k, dtype=kind))
    inputs = {
        "qweight": pad(file["codes"], big_n, big_k),
        "wscales": pad(file["w_scales"], big_n, big_k // 64, value=1),
        "lora_down": pad(file["proj_down"], big_k, big_r),
        "lora_up": pad(file["proj_up"], big_n, big_r),
        "smooth": pad(file["smooth"], big_k, value=1),
        "bias": pad(file["bias"], big_n, value=1),  # the reference packer pads a bias as it pads scales
    }
    return inputs, {key: file[f"packed_{key}"] for key in inputs}


LAYOUT_OF = {name: name for name in ("wscales", "lora_down", "lora_up")} | {"smooth": "channel", "bias": "channel"}


def test_three_golden_files_are_there():
    assert len(FILES) == 3


@pytest.mark.parametrize("name", FILES)
def test_packed_codes_equal_the_golden_bytes(name):
    inputs, wanted = padded_inputs(name)
    assert torch.equal(pack_codes(inputs["qweight"]), wanted["qweight"])


@pytest.mark.parametrize("name", FILES)
def test_golden_codes_unpack_to_their_source(name):
    inputs, packed = padded_inputs(name)
    assert torch.equal(unpack_codes(packed["qweight"]), inputs["qweight"])


@pytest.mark.parametrize("key", list(LAYOUT_OF))
@pytest.mark.parametrize("name", FILES)
def test_a_packed_tensor_equals_the_golden_bytes(name, key):
    inputs, wanted = padded_inputs(name)
    packed = pack_matrix(LAYOUT_OF[key], inputs[key], tuple(wanted[key].shape))
    assert packed.dtype == wanted[key].dtype
    assert torch.equal(bits(packed), bits(wanted[key]))


@pytest.mark.parametrize("key", list(LAYOUT_OF))
@pytest.mark.parametrize("name", FILES)
def test_a_golden_tensor_unpacks_to_its_source(name, key):
    inputs, packed = padded_inputs(name)
    found = unpack_matrix(LAYOUT_OF[key], packed[key], tuple(inputs[key].shape))
    assert torch.equal(bits(found), bits(inputs[key]))


# ------------------------------------------------------------------------------------------------ formats.md §3


def code_place(n, k, big_k):
    """(byte, whether the high nibble) of a code in the stored buffer."""
    nt, np, ns, nl = n // 128, n % 128 // 16, n % 16 // 8, n % 8
    kt, ks, kl, kr = k // 64, k % 64 // 32, k % 32 // 8, k % 8
    word = (((((nt * (big_k // 64) + kt) * 8 + np) * 8 + nl) * 4 + kl) * 2 + ns) * 2 + ks
    return 4 * word + kr // 2, kr % 2 == 1


def channel_in_tile(n):
    return ((n % 128) // 16) * 16 + ((n % 8) // 2) * 4 + ((n % 16) // 8) * 2 + n % 2


FORMULAS = {
    "wscales": lambda n, g, shape: ((n // 128) * shape[1] + g) * 128 + channel_in_tile(n),
    "channel": lambda n, _, shape: (n // 128) * 128 + channel_in_tile(n),
    "lora_down": lambda k, j, shape: (
        ((((k // 16) * (shape[1] // 16) + j // 16) * 8 + j % 8) * 4 + (k % 8) // 2) * 8
        + ((j % 16) // 8) * 4
        + ((k % 16) // 8) * 2
        + k % 2
    ),
    "lora_up": lambda n, j, shape: (
        ((((n // 16) * (shape[1] // 16) + j // 16) * 8 + n % 8) * 4 + (j % 8) // 2) * 8
        + ((n % 16) // 8) * 4
        + ((j % 16) // 8) * 2
        + j % 2
    ),
    # In no file: what Hopper's operators hand each other
    "fp8": lambda m, k, shape: (
        ((k // 128) * shape[0] + (m // 8) * 8) * 128
        + ((k % 128) // 32) * 256
        + (k % 2) * 128
        + (m % 8) * 16
        + ((k % 32) // 8) * 4
        + (k % 8) // 2
    ),
    "token_scales": lambda m, g, shape: (
        (g // 2) * 2 * shape[0] + (m // 16) * 32 + (g % 2) * 16 + ((m % 8) // 2) * 4 + ((m % 16) // 8) * 2 + m % 2
    ),
    "token_t": lambda m, j, shape: (
        (j // 16) * shape[0] * 16 + (m // 8) * 128 + ((j % 16) // 8) * 64 + (m % 8) * 8 + j % 8
    ),
}
SHAPES = {
    "wscales": [(128, 1), (384, 5), (256, 6)],
    "channel": [(128,), (384,)],
    "lora_down": [(16, 16), (192, 48), (640, 16)],
    "lora_up": [(16, 16), (48, 80), (384, 32)],
    "fp8": [(8, 128), (24, 256), (384, 128)],
    "token_scales": [(16, 2), (48, 6), (384, 4)],
    "token_t": [(8, 16), (24, 48), (384, 32)],
}
CASES = [(name, shape) for name, shapes in SHAPES.items() for shape in shapes]


def places(name, shape):
    """Logical (row, column) → stored index, by the formula, in row-major order of the logical matrix."""
    columns = shape[1] if len(shape) == 2 else 1
    return [FORMULAS[name](i, j, shape) for i in range(shape[0]) for j in range(columns)]


@pytest.mark.parametrize("shape", [(128, 64), (384, 192), (128, 320)])
def test_each_code_lies_where_the_formula_says(shape):
    codes = torch.randint(-8, 8, shape, generator=rng(0), dtype=torch.int8)
    wanted = bytearray(codes.numel() // 2)
    for n, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            byte, high = code_place(n, k, shape[1])
            wanted[byte] |= (code & 0xF) << (4 if high else 0)
    assert pack_codes(codes).numpy().tobytes() == bytes(wanted)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_each_element_lies_where_the_formula_says(name, shape):
    logical = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.int32).reshape(shape)
    wanted = torch.empty(logical.numel(), dtype=torch.int32)
    for value, place in enumerate(places(name, shape)):
        wanted[place] = value
    assert torch.equal(MMA[name].pack(logical), wanted)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_strides_are_the_steps_of_the_formula(name, shape):
    """A digit's stride is what the formula's index grows by when that digit alone grows by one."""
    strides = MMA[name].strides(shape)
    columns = shape[1] if len(shape) == 2 else 1
    by_formula = dict(zip([(i, j) for i in range(shape[0]) for j in range(columns)], places(name, shape), strict=True))
    rows, columns = {
        "channel": ({"nt": 128, "na": 16, "nb": 8, "nc": 2, "nd": 1}, {}),
        "wscales": ({"nt": 128, "na": 16, "nb": 8, "nc": 2, "nd": 1}, {"g": 1}),
        "lora_down": ({"kt": 16, "kb": 8, "kc": 2, "kd": 1}, {"jt": 16, "jb": 8, "jl": 1}),
        "lora_up": ({"nt": 16, "nb": 8, "nl": 1}, {"jt": 16, "jb": 8, "jc": 2, "jd": 1}),
        "fp8": ({"mg": 8, "ml": 1}, {"kt": 128, "ks": 32, "kl": 8, "kb": 2, "kp": 1}),
        "token_scales": ({"ma": 16, "mb": 8, "mc": 2, "md": 1}, {"kt": 2, "kg": 1}),
        "token_t": ({"mp": 8, "ml": 1}, {"jt": 16, "jh": 8, "jc": 2, "je": 1}),
    }[name]
    steps = {d: (step, 0) for d, step in rows.items()} | {d: (0, step) for d, step in columns.items()}
    assert strides.keys() == steps.keys()
    for digit, coordinate in steps.items():
        if coordinate in by_formula:  # a shape of one tile has no second one to measure the distance to
            assert strides[digit] == by_formula[coordinate]


def test_strides_of_the_codes_count_nibbles_of_the_formula():
    strides = MMA["qweight"].strides((384, 192))
    steps = {"nt": (128, 0), "np": (16, 0), "ns": (8, 0), "nl": (1, 0), "kt": (0, 64), "ks": (0, 32), "kl": (0, 8)}
    for digit, (n, k) in steps.items():
        byte, high = code_place(n, k, 192)
        assert strides[digit] == 2 * byte + high
    assert strides["kr"] == 1


def test_a_lane_reads_its_16_bytes_as_the_format_says():
    """Lane nl·4+kl: .x = (n 0–7, k 0–31), .y = (n 0–7, k 32–63), .z = (n 8–15, k 0–31), .w = (n 8–15, k 32–63)."""
    codes = torch.zeros(128, 64, dtype=torch.int8)
    lane = 3 * 4 + 2  # nl = 3, kl = 2
    for word, (n, k) in enumerate([(3, 16), (3, 48), (11, 16), (11, 48)]):
        codes[n, k : k + 8] = word + 1
    vector = pack_codes(codes).numpy().tobytes()[16 * lane : 16 * lane + 16]
    assert vector == b"\x11\x11\x11\x11\x22\x22\x22\x22\x33\x33\x33\x33\x44\x44\x44\x44"


def test_a_core_matrix_of_hopper_is_8_rows_by_16_channels_of_one_parity():
    """16 bytes a row, all in a row's place one after the other; first the even channels of 32, then the odd ones."""
    channels = torch.arange(128).repeat(16, 1)
    rows = torch.arange(16)[:, None].expand(16, 128)
    for matrix, at in enumerate(range(0, 16 * 128, 128)):  # of 8 rows: 4 x 32 channels x 2 parities
        first_row, block = matrix // 8 * 8, matrix % 8
        assert MMA["fp8"].pack(rows)[at : at + 128].tolist() == [first_row + i // 16 for i in range(128)]
        wanted = list(range(block // 2 * 32 + block % 2, block // 2 * 32 + 32, 2))
        assert MMA["fp8"].pack(channels)[at : at + 128].tolist() == wanted * 8


def test_a_lane_reads_the_scales_of_its_four_tokens_of_sixteen_as_one_vector():
    tokens = MMA["token_scales"].pack(torch.arange(32)[:, None].expand(32, 2)).reshape(2, 2, 4, 4)
    for half in range(2):
        for group in range(2):
            wanted = [[16 * half + 2 * c + i for i in (0, 1, 8, 9)] for c in range(4)]
            assert tokens[half, group].tolist() == wanted


# ------------------------------------------------------------------------------------------------ properties


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 10**6))
def test_unpacking_undoes_packing_of_codes(tiles_n, tiles_k, seed):
    codes = torch.randint(-8, 8, (128 * tiles_n, 64 * tiles_k), generator=rng(seed), dtype=torch.int8)
    assert torch.equal(unpack_codes(pack_codes(codes)), codes)


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 10**6))
def test_packing_undoes_unpacking_of_any_bytes(tiles_n, tiles_k, seed):
    packed = torch.randint(-128, 128, (128 * tiles_n, 32 * tiles_k), generator=rng(seed), dtype=torch.int8)
    assert torch.equal(pack_codes(unpack_codes(packed)), packed)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(list(SHAPES)), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(0, 10**6))
def test_packing_and_unpacking_matrices_undo_each_other(name, a, b, half, seed):
    shapes = {"wscales": (128 * a, b), "channel": (128 * a,), "fp8": (8 * a, 128 * b), "token_scales": (16 * a, 2 * b)}
    shape = shapes.get(name, (16 * a, 16 * b))
    raw = torch.randint(-(2**15), 2**15, shape, generator=rng(seed), dtype=torch.int16)
    matrix = raw.view(torch.float16 if half else torch.bfloat16)  # every bit pattern, NaNs among them
    packed = pack_matrix(name, matrix)
    assert torch.equal(bits(unpack_matrix(name, packed, shape)), bits(matrix))
    assert torch.equal(bits(pack_matrix(name, unpack_matrix(name, matrix, shape))), bits(matrix))


@pytest.mark.parametrize(("name", "shape"), [
    ("qweight", (64, 64)), ("qweight", (128, 96)), ("lora_up", (16, 8)),
    ("fp8", (8, 64)), ("fp8", (4, 128)), ("token_scales", (16, 1)), ("token_t", (8, 8)),
])  # fmt: skip
def test_a_shape_that_is_no_multiple_of_the_tile_is_refused(name, shape):
    with pytest.raises(ValueError, match="multiple"):
        MMA[name].pack(torch.zeros(shape))


def test_a_transposed_matrix_is_packed_as_what_it_shows():
    matrix = torch.arange(32 * 48, dtype=torch.int32).reshape(48, 32).t()
    assert torch.equal(MMA["lora_up"].pack(matrix), MMA["lora_up"].pack(matrix.contiguous()))


def test_a_small_layout_by_hand():
    # i = 2·a + b, stored b before a: elements 0 1 2 3 4 5 become 0 2 4 1 3 5
    assert Layout("a b:2", "", "b a").pack(torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]
    assert Layout("a b:2", "", "b a").strides((6,)) == {"a": 1, "b": 3}


def test_padding_grows_at_the_end_of_each_axis_and_leaves_the_source_alone():
    source = torch.tensor([[1, 2], [3, 4]])
    assert pad(source, 3, 4, value=9).tolist() == [[1, 2, 9, 9], [3, 4, 9, 9], [9, 9, 9, 9]]
    assert source.tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("size", "wanted"), [(0, 0), (1, 128), (128, 128), (129, 256), (2240, 2304)])
def test_rounding_up(size, wanted):
    assert round_up(size, layout.TILE_N) == wanted
