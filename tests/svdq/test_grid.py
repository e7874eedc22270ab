"""Codes and bytes: the nibble order by hand-made bytes, encoding and decoding by hand-made values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from svdq.grid import INT4_ACTIVATION, INT4_WEIGHT, pack_nibbles, unpack_nibbles

# Codes -7..7 and a last 0: (−7, −6) is nibbles 9 and a, the even (first) one low, so byte 0xa9, and so on.
ALL_WEIGHT_CODES = [*range(-7, 8), 0]
HAND_MADE_BYTES = b"\xa9\xcb\xed\x0f\x21\x43\x65\x07"

code_rows = st.integers(1, 5).flatmap(
    lambda pairs: st.lists(st.lists(st.integers(-8, 7), min_size=2 * pairs, max_size=2 * pairs), min_size=1, max_size=4)
)


def test_case_11_a_row_of_all_weight_codes_packs_to_the_hand_made_bytes():
    packed = pack_nibbles(torch.tensor([ALL_WEIGHT_CODES], dtype=torch.int8))
    assert packed.dtype == torch.uint8
    assert packed.numpy().tobytes() == HAND_MADE_BYTES


def test_the_hand_made_bytes_unpack_to_a_row_of_all_weight_codes():
    packed = torch.frombuffer(bytearray(HAND_MADE_BYTES), dtype=torch.uint8)[None]
    assert torch.equal(unpack_nibbles(packed), torch.tensor([ALL_WEIGHT_CODES], dtype=torch.int8))


def test_code_minus_8_is_nibble_8():
    assert pack_nibbles(torch.tensor([[-8, 1, 1, -8]], dtype=torch.int8)).tolist() == [[0x18, 0x81]]


@settings(deadline=None, max_examples=30)
@given(code_rows)
def test_unpacking_undoes_packing(rows):
    codes = torch.tensor(rows, dtype=torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


def test_packing_undoes_unpacking_for_every_byte():
    packed = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)


def test_packing_a_transposed_matrix_packs_what_it_shows():
    codes = torch.tensor([[-7, 3], [5, -1]], dtype=torch.int8)  # shown transposed: rows (−7, 5) and (3, −1)
    assert pack_nibbles(codes.t()).tolist() == [[0x59], [0xF3]]


def test_encode_rounds_ties_to_even():
    values = torch.zeros(1, 64)
    values[0, :8] = torch.tensor([0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -3.5])
    codes = INT4_WEIGHT.encode(values, torch.ones(1, 1))
    assert codes[0, :8].tolist() == [0, 2, 2, 4, 0, -2, -2, -4]


@pytest.mark.parametrize(("grid", "lowest"), [(INT4_WEIGHT, -7), (INT4_ACTIVATION, -8)])
def test_encode_clamps_to_the_grid(grid, lowest):
    values = torch.zeros(1, 64)
    values[0, :2] = torch.tensor([1e6, -1e6])
    assert grid.encode(values, torch.full((1, 1), 0.5))[0, :2].tolist() == [7, lowest]


def test_each_group_of_a_row_has_its_own_scale():
    codes = torch.tensor([[3] * 64 + [-2] * 64, [1] * 64 + [7] * 64], dtype=torch.int8)
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]], dtype=torch.float16)
    wanted = torch.tensor([[1.5] * 64 + [-4.0] * 64, [4.0] * 64 + [1.75] * 64])
    assert torch.equal(INT4_WEIGHT.decode(codes, scales), wanted)


def test_a_wider_group_covers_its_columns_and_no_others():
    grid = INT4_WEIGHT.with_group(128)
    values = torch.cat((torch.full((1, 128), 6.0), torch.full((1, 128), -6.0)), 1)
    codes = grid.encode(values, torch.tensor([[1.0, 2.0]]))
    assert torch.equal(codes, torch.tensor([[6] * 128 + [-3] * 128], dtype=torch.int8))


def test_with_group_leaves_the_original_alone():
    assert INT4_WEIGHT.with_group(192).group == 192
    assert INT4_WEIGHT.group == 64


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(-7, 7), min_size=64, max_size=64), st.floats(2.0**-20, 6e4, width=16))
def test_decoding_in_float32_is_exact_for_float16_scales(row, scale):
    codes, scales = torch.tensor([row], dtype=torch.int8), torch.tensor([[scale]], dtype=torch.float16)
    wanted = [code * scales.item() for code in row]  # Python floats: 4 bits times 11 bits are exact in both
    assert INT4_WEIGHT.decode(codes, scales)[0].tolist() == wanted


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(-7, 7), min_size=64, max_size=64), st.floats(2.0**-20, 6e4, width=16))
def test_encoding_gives_the_codes_back_after_decoding(row, scale):
    codes, scales = torch.tensor([row], dtype=torch.int8), torch.tensor([[scale]], dtype=torch.float16)
    assert torch.equal(INT4_WEIGHT.encode(INT4_WEIGHT.decode(codes, scales), scales), codes)


def test_encode_does_not_change_its_input():
    values = torch.linspace(-3, 3, 128).reshape(2, 64)
    before = values.clone()
    INT4_WEIGHT.encode(values, torch.ones(2, 1))
    assert torch.equal(values, before)
