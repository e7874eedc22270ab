"""NF4: the published levels, known answers, and the tensors of bitsandbytes bit for bit, both ways."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from svdq import nf4
from svdq.errors import CheckpointError, NumericsError

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("bitsandbytes_nf4_*"))
PUBLISHED = [  # QLoRA, arXiv:2305.14314, appendix E
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
SHAPES = [(96, 192), (7, 31), (1, 1), (2, 32), (300, 1000), (70, 4096)]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight(n, k, dtype=F32):
    """Rows of different sizes, a block of zeros, an outlier."""
    w = normal(n, k) * 10 ** normal(n, 1, seed=1)
    w[0, : k // 2] = 0
    w[-1, -1] *= 100
    return w.to(dtype)


def same(found, wanted):
    """Suffixes whose tensors differ; of the states, what they say."""

    def differs(suffix):
        if suffix == nf4.STATE:
            return said(found[suffix]) != said(wanted[suffix])
        return found[suffix].dtype != wanted[suffix].dtype or not torch.equal(found[suffix], wanted[suffix])

    assert set(found) == set(wanted)
    return [suffix for suffix in wanted if differs(suffix)]


def said(tensor):
    return json.loads(bytes(tensor.tolist()))


# ---- tables and known answers


def test_the_levels_are_the_published_ones():
    assert nf4.levels().tolist() == PUBLISHED


def test_the_map_of_scales_is_dynamic():
    """2^i values in the decade below 10^(i − 6), their middles at equal steps."""
    values = nf4.scale_map().tolist()
    assert values == sorted(values) and len(set(values)) == 256
    for i in range(7):
        decade = [v for v in values if 10.0 ** (i - 7) < v < 10.0 ** (i - 6)]
        wanted = [10.0 ** (i - 6) * (0.1 + 0.9 * (j + 0.5) / 2**i) for j in range(2**i)]
        assert decade == pytest.approx(wanted, rel=1e-6)
        assert [-v for v in reversed(decade)] == [v for v in values if -(10.0 ** (i - 6)) < v < -(10.0 ** (i - 7))]
    assert {0.0, 1.0} <= set(values)


def test_two_codes_a_byte_the_first_in_the_high_nibble():
    """One block: its scale less the mean is 0, so that values come back times the scale, 2."""
    tensors = nf4.encode(torch.tensor([[2.0, -2.0, 0.0, 0.17, 0.15, 0.33]]))
    # in units of the scale 1, −1, 0, 0.085, 0.075 (levels 0 and 0.0796: half way is 0.0398), 0.165 (0.161)
    assert tensors["weight"].flatten().tolist() == [0xF0, 0x78, 0x89]
    assert nf4.decode(tensors, 1, 6)[0].tolist() == [2 * PUBLISHED[i] for i in (15, 0, 7, 8, 8, 9)]


def test_scales_are_codes_of_the_distance_from_their_mean():
    """Scales 1 and 3: mean 2, distances −1 and 1, whose largest is 1; −1 is nearest to the smallest of the map."""
    tensors = nf4.encode(torch.cat((torch.full((1, 64), 1.0), torch.full((1, 64), 3.0))))
    assert said(tensors[nf4.STATE])["nested_offset"] == 2.0
    assert tensors["weight.nested_absmax"].tolist() == [1.0]
    assert tensors["weight.absmax"].tolist() == [0, 255]
    smallest = nf4.scale_map()[0].item()
    assert nf4.decode(tensors, 2, 64)[:, 0].tolist() == pytest.approx([2 + smallest, 3.0])


def test_the_last_blocks_may_be_short():
    """4097 weights in 65 blocks, 257 · 64 − 1 in 257, of which the last has a scale of its own."""
    for count, blocks, nested in ((4097, 65, 1), (257 * 64 - 1, 257, 2)):
        w = torch.full((1, count), 0.25)
        w[0, -1] = -8.0
        tensors = nf4.encode(w)
        assert tensors["weight.absmax"].shape == (blocks,) and tensors["weight.nested_absmax"].shape == (nested,)
        assert tensors["weight"].shape == ((count + 1) // 2, 1)
        assert nf4.decode(tensors, 1, count)[0, -1].item() == pytest.approx(-8.0, rel=0.01)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_sizes_are_known_from_shape_and_type_alone(n, k, dtype):
    found = nf4.encode(weight(n, k, dtype))
    assert {suffix: (x.dtype, tuple(x.shape)) for suffix, x in found.items()} == nf4.tensor_sizes(n, k, dtype)


@pytest.mark.parametrize("scale", [1e-38, 3e-5, 1.0, 1e30])
def test_the_states_length_does_not_depend_on_the_scales(scale):
    lengths = {len(nf4.encode(weight(3, 70) / 1e4 * scale)[nf4.STATE])}
    assert lengths == {nf4.tensor_sizes(3, 70, F32)[nf4.STATE][1][0]}


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 9), st.integers(1, 200), st.integers(0, 1000))
def test_a_value_comes_back_within_half_a_step_of_the_levels_and_of_the_scales(n, k, seed):
    """Levels are at most 0.304 apart, the map's values 0.0141 of the largest distance of a scale from their mean."""
    w = normal(n, k, seed=seed)
    decoded, values = nf4.decode(nf4.encode(w), n, k).flatten(), w.flatten()
    for start in range(0, n * k, 64):
        block, found = values[start : start + 64], decoded[start : start + 64]
        assert (block - found).abs().max() <= 0.152 * block.abs().max() + 0.0072 * values.abs().max()


def test_large_weights_are_worked_on_in_pieces(monkeypatch):
    w = weight(70, 1000)
    whole = nf4.encode(w)
    monkeypatch.setattr(nf4, "_CHUNK", 4096)
    assert same(nf4.encode(w), whole) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_refused(value):
    w = weight(4, 64)
    w[2, 3] = value
    with pytest.raises(NumericsError, match="not finite"):
        nf4.encode(w)


# ---- bitsandbytes


@pytest.fixture(params=GOLDEN, ids=lambda path: path.stem)
def golden(request):
    with safe_open(request.param, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict


def of_file(golden, prefix):
    return {name.removeprefix(prefix): x for name, x in golden.items() if name.startswith(prefix)}


def test_a_kept_weight_becomes_the_tensors_that_bitsandbytes_made(golden):
    assert same(nf4.encode(golden["source"]), of_file(golden, "stored.")) == []


def test_kept_tensors_of_bitsandbytes_decode_to_its_bits(golden):
    for name, wanted in of_file(golden, "decoded.").items():
        found = nf4.decode(of_file(golden, "stored."), *golden["source"].shape, nf4.DTYPES[name])
        assert torch.equal(found, wanted)


@pytest.fixture(scope="module")
def bitsandbytes():
    return pytest.importorskip("bitsandbytes")


def their_tensors(functional, w):
    packed, state = functional.quantize_4bit(w, compress_statistics=True, quant_type="nf4")
    return {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_codes_and_scales_are_those_of_bitsandbytes(bitsandbytes, n, k, dtype):
    w = weight(n, k, dtype).clamp(-6e4, 6e4)
    assert same(nf4.encode(w), their_tensors(bitsandbytes.functional, w)) == []


def test_a_matrix_of_zeros_is_stored_as_bitsandbytes_does(bitsandbytes):
    for shape in ((2, 64), (3, 50)):
        assert same(nf4.encode(torch.zeros(shape)), their_tensors(bitsandbytes.functional, torch.zeros(shape))) == []


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(("n", "k"), [shape for shape in SHAPES if shape[1] % 2 == 0])  # else it calls torch.compile
def test_its_loader_reads_our_tensors_and_ours_its(bitsandbytes, n, k, dtype):
    w = weight(n, k, dtype).clamp(-6e4, 6e4)
    tensors, theirs = nf4.encode(w), their_tensors(bitsandbytes.functional, w)
    stats = {f"layer.{suffix}": x for suffix, x in tensors.items() if suffix != "weight"}
    loaded = bitsandbytes.nn.Params4bit.from_prequantized(tensors["weight"], stats, device="cpu")
    decoded = bitsandbytes.functional.dequantize_4bit(loaded, loaded.quant_state)
    assert decoded.dtype == dtype and decoded.shape == (n, k)
    assert torch.equal(decoded, nf4.decode(tensors, n, k, dtype))
    assert torch.equal(decoded, nf4.decode(theirs, n, k, dtype))


def test_transformers_loads_a_model_of_our_tensors_and_keeps_them(bitsandbytes, tmp_path, original, toy):
    """Its linears are then bitsandbytes' own, and their weights what `decode` gives."""
    pytest.importorskip("accelerate")
    model, linears = original(toy("llama")), {}
    tensors = {name: x.clone() for name, x in model.state_dict().items() if name != "lm_head.weight"}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        linears[name] = encoded = nf4.encode(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + suffix: x for suffix, x in encoded.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model.config.quantization_config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )
    model.config.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=F32, device_map="cpu")
    for name, encoded in linears.items():
        module = loaded.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, bitsandbytes.nn.Linear4bit)
        decoded = bitsandbytes.functional.dequantize_4bit(module.weight, module.weight.quant_state)
        assert torch.equal(decoded, nf4.decode(encoded, module.out_features, module.in_features))
        stored = {suffix: x for suffix, x in module.state_dict().items() if suffix != "bias"}
        assert same(stored, encoded) == []  # what it would save


# ---- hostile tensors


def state_bytes(**changes):
    state = said(nf4.encode(weight(4, 64))[nf4.STATE])
    state = {key: value for key, value in (state | changes).items() if value is not ...}
    return json.dumps(state).encode()


@pytest.mark.parametrize(("raw", "message"), [
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 4000, "not JSON"),
    (b"[1]", "not an object"),
    (b" " * 5000, "wanted up to 4096 bytes"),
    (b"", "wanted up to 4096 bytes"),
    (state_bytes(quant_type="fp4"), "quant_type 'fp4'; wanted 'nf4'"),
    (state_bytes(blocksize=128), "blocksize 128; wanted 64"),
    (state_bytes(nested_blocksize=...), "nested_blocksize None; wanted 256; quantize with bnb_4bit_use_double_quant"),
    (state_bytes(nested_dtype="float16"), "nested_dtype"),
    (state_bytes(dtype="float64"), "dtype 'float64'; wanted one of float16"),
    (state_bytes(dtype=["float32"]), "dtype"),
    (state_bytes(shape=[4, 65]), r"shape \[4, 65\]; the model's is \[4, 64\]"),
    (state_bytes(shape=[4.0, 64]), "wanted two sizes"),
    (state_bytes(shape=[True, 64]), "wanted two sizes"),
    (state_bytes(shape=256), "wanted two sizes"),
    (state_bytes(shape=["x" * 3000, 1]), r"shape \['x+\.\.\.; wanted"),
    (state_bytes(nested_offset=float("nan")), "nested_offset nan; wanted a finite number"),
    (state_bytes(nested_offset="0.1"), "nested_offset"),
    (state_bytes(nested_offset=...), "nested_offset None"),
])  # fmt: skip
def test_a_state_that_says_something_else_is_refused_in_one_line(raw, message):
    tensors = nf4.encode(weight(4, 64)) | {nf4.STATE: torch.tensor(list(raw), dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=f"^layer.weight.quant_state[^\n]*{message}[^\n]*$"):
        nf4.decode(tensors, 4, 64, name="layer")


@pytest.mark.parametrize("suffix", list(nf4.tensor_sizes(4, 64, F32)))
def test_a_missing_tensor_is_named(suffix):
    tensors = nf4.encode(weight(4, 64))
    del tensors[suffix]
    with pytest.raises(CheckpointError, match=f"^layer: {suffix} is missing"):
        nf4.decode(tensors, 4, 64, name="layer")


@pytest.mark.parametrize(("suffix", "value"), [
    ("weight", torch.zeros(128, dtype=torch.uint8)),
    ("weight", torch.zeros(128, 1, dtype=torch.int8)),
    ("weight.absmax", torch.zeros(3, dtype=torch.uint8)),
    ("weight.absmax", torch.zeros(4)),
    ("weight.nested_absmax", torch.zeros(2)),
    ("weight.quant_map", nf4.levels().double()),
])  # fmt: skip
def test_a_tensor_of_another_shape_or_type_is_named(suffix, value):
    with pytest.raises(CheckpointError, match=rf"^layer.{suffix}: found \w+ \[.*\]; wanted \w+ \[.*\]$"):
        nf4.check(nf4.encode(weight(4, 64)) | {suffix: value}, 4, 64, "layer")


def test_other_levels_and_scales_that_are_not_finite_are_refused():
    tensors = nf4.encode(weight(4, 64))
    for suffix, value, message in (
        ("weight.quant_map", nf4.levels().flip(0), "other levels"),
        ("weight.nested_absmax", torch.tensor([float("inf")]), "not finite"),
        ("weight.nested_quant_map", torch.full((256,), float("nan")), "not finite"),
    ):
        with pytest.raises(CheckpointError, match=f"^layer.{suffix}: .*{message}"):
            nf4.check(tensors | {suffix: value}, 4, 64, "layer")


def test_a_type_that_bitsandbytes_does_not_know_is_refused():
    with pytest.raises(ValueError, match=r"float64; wanted one of float16, bfloat16, float32"):
        nf4.encode(weight(4, 64).double())
