"""Packing of whole linears: golden files, identity in both directions, fusing, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from svdq import schema
from svdq.config import LayerConfig
from svdq.errors import CheckpointError, ConfigError
from svdq.export import (
    PackedSizes,
    export_packed,
    fusion_groups,
    pack_layers,
    packed_sizes,
    parse_fuse,
    unpack_layers,
)
from svdq.formats import FORMATS
from svdq.grid import pack_nibbles
from svdq.kernels import layout
from svdq.kernels.reference import w4a4_linear
from svdq.quantized import Layer, open_quantized
from svdq.rounding import ActivationTransform

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(path.name for path in GOLDEN.glob("nunchaku_int4_*.safetensors"))
D = torch.float64


def rng(seed):
    return torch.Generator().manual_seed(seed)


def layer(name="a.q_proj", n=96, k=192, rank=16, group=64, bias=False, smooth=None, clip=1.0, rotation=False, seed=0):
    g = rng(seed)
    scales = (torch.rand(n, k // group, generator=g) * 0.05 + 1e-4).half()
    return Layer(
        name,
        torch.randint(-7, 8, (n, k), generator=g, dtype=torch.int8),
        scales,
        torch.randn(k, rank, generator=g).half(),
        torch.randn(n, rank, generator=g).half(),
        torch.randn(n, generator=g).half() if bias else None,
        ActivationTransform(smooth, rotation, clip),
    )


def smoothing(k, seed=3):
    return (torch.rand(k, generator=rng(seed)) + 0.5).bfloat16().float()


def assert_same_layer(part, source):
    assert torch.equal(part["codes"], source.codes)
    assert torch.equal(part["scales"], source.scales)
    assert torch.equal(part["proj_down"], source.proj_down)
    assert torch.equal(part["proj_up"], source.proj_up)
    if source.bias is None:
        assert part["bias"] is None
    else:
        assert torch.equal(part["bias"], source.bias)


# ------------------------------------------------------------------------------------------------ golden files


def packed_golden(name):
    file = load_file(GOLDEN / name)
    smooth = file["smooth"].float() if "smooth" in file else None
    source = Layer(
        "golden",
        file["codes"],
        file["w_scales"],
        file["proj_down"],
        file["proj_up"],
        file.get("bias"),
        ActivationTransform(smooth),
    )
    return pack_layers([source], file["w_scales"].dtype), file


def assert_same_bytes(found, wanted):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    kind = torch.int8 if found.element_size() == 1 else torch.int16
    assert torch.equal(found.contiguous().view(kind), wanted.contiguous().view(kind))


@pytest.mark.parametrize("key", ["qweight", "wscales", "lora_down", "lora_up", "smooth", "bias"])
@pytest.mark.parametrize("name", FILES)
def test_a_packed_linear_equals_the_golden_file_byte_for_byte(name, key):
    packed, file = packed_golden(name)
    assert_same_bytes(packed[key], file[f"packed_{key}"])


@pytest.mark.parametrize("name", FILES)
def test_smooth_orig_is_smooth_again_in_memory_of_its_own(name):
    packed, file = packed_golden(name)
    assert_same_bytes(packed["smooth_orig"], file["packed_smooth"])
    assert packed["smooth_orig"].data_ptr() != packed["smooth"].data_ptr()


# ------------------------------------------------------------------------------------------------ identity


@settings(deadline=None, max_examples=15)
@given(
    st.integers(1, 140),
    st.integers(1, 4),
    st.sampled_from([0, 3, 16, 40]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_unpacking_undoes_packing(n, groups, rank, bias, smoothed, seed):
    k = 64 * groups
    source = layer(n=n, k=k, rank=rank, bias=bias, smooth=smoothing(k) if smoothed else None, seed=seed)
    (part,) = unpack_layers(pack_layers([source], torch.float16), packed_sizes([source]))
    assert_same_layer(part, source)
    assert torch.equal(part["smooth"].float(), smoothing(k) if smoothed else torch.ones(k))


@pytest.mark.parametrize(("k", "group"), [(256, 128), (128, 128), (384, 192), (192, 192), (640, 320)])
def test_wide_groups_repeat_their_scale_and_come_back(k, group):
    source = layer(k=k, group=group)
    (part,) = unpack_layers(pack_layers([source], torch.float16), packed_sizes([source]))
    assert_same_layer(part, source)


def test_each_64_columns_of_a_wide_group_are_stored_with_its_scale():
    source = layer(n=96, k=256, group=128)
    packed = pack_layers([source], torch.float16)
    # formats.md §3: idx = ((n//128)·(K/64) + kgroup)·128 + C(n), C(n) = n for n 0 and 1
    flat = packed["wscales"].flatten()
    assert flat[[0, 128, 256, 384]].tolist() == source.scales[0].repeat_interleave(2).tolist()


def test_case_25_k_192_n_96_rank_0_packs_with_padding():
    source = layer(n=96, k=192, rank=0)
    packed = pack_layers([source], torch.float16)
    shapes = {name: tuple(tensor.shape) for name, tensor in packed.items()}
    assert shapes == {
        "qweight": (128, 128),
        "wscales": (4, 128),
        "lora_down": (256, 0),
        "lora_up": (128, 0),
        "smooth": (256,),
        "smooth_orig": (256,),
        "bias": (128,),
    }
    (part,) = unpack_layers(packed, packed_sizes([source]))
    assert_same_layer(part, source)


def test_padding_has_codes_0_scales_1_and_smoothing_1():
    source = layer(n=96, k=192, smooth=torch.full((192,), 2.0))
    packed = pack_layers([source], torch.float16)
    codes = layout.unpack_codes(packed["qweight"])
    scales = layout.unpack_matrix("wscales", packed["wscales"], (128, 4))
    smooth = layout.unpack_matrix("channel", packed["smooth"], (256,))
    assert not codes[96:].any() and not codes[:, 192:].any()
    assert (scales[96:] == 1).all() and (scales[:, 3] == 1).all()
    assert smooth.tolist() == [2.0] * 192 + [1.0] * 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 16])
def test_all_16_bit_tensors_have_the_type_that_was_asked_for(rank, dtype):
    packed = pack_layers([layer(rank=rank, bias=True, smooth=smoothing(192))], dtype)
    assert packed.pop("qweight").dtype == torch.int8
    assert {tensor.dtype for tensor in packed.values()} == {dtype}


def test_packing_does_not_change_the_layer():
    source, kept = (layer(n=128, k=128, bias=True, smooth=smoothing(128)) for _ in range(2))
    packed = pack_layers([source], torch.float16)
    for tensor in packed.values():
        tensor.zero_()
    assert_same_layer(vars(source), kept)
    assert torch.equal(source.transform.smooth, kept.transform.smooth)


# ------------------------------------------------------------------------------------------------ fusing


def qkv(n=2240, k=128, **options):
    return [layer(f"a.{p}_proj", n=n, k=k, seed=i, **options) for i, p in enumerate("qkv")]


def test_case_7_three_parts_of_2240_rows_are_padded_each_to_2304():
    parts = qkv(rank=16)
    sizes = packed_sizes(parts)
    packed = pack_layers(parts, torch.float16)
    assert packed["qweight"].shape[0] == 6912
    assert packed["bias"].shape == (6912,)
    assert [(part["name"], part["n"]) for part in asdict(sizes)["parts"]] == [
        ("a.q_proj", 2240),
        ("a.k_proj", 2240),
        ("a.v_proj", 2240),
    ]
    codes = layout.unpack_codes(packed["qweight"])
    for i, part in enumerate(parts):
        assert torch.equal(codes[2304 * i : 2304 * i + 2240], part.codes)
        assert not codes[2304 * i + 2240 : 2304 * (i + 1)].any()


def test_three_parts_of_2240_rows_come_back_one_by_one():
    parts = qkv(rank=16)
    for part, source in zip(unpack_layers(pack_layers(parts, torch.float16), packed_sizes(parts)), parts, strict=True):
        assert_same_layer(part, source)


def mixed_parts(k=192):
    """Different row counts, ranks and biases, one input."""
    shared = {"k": k, "smooth": smoothing(k), "clip": 0.85}
    return [
        layer("q", n=96, rank=16, bias=True, seed=1, **shared),
        layer("k", n=130, rank=0, bias=False, seed=2, **shared),
        layer("v", n=33, rank=20, bias=True, seed=3, **shared),
    ]


def test_parts_of_different_sizes_ranks_and_biases_come_back():
    parts = mixed_parts()
    for part, source in zip(unpack_layers(pack_layers(parts, torch.float16), packed_sizes(parts)), parts, strict=True):
        assert_same_layer(part, source)
        assert torch.equal(part["smooth"].float(), source.transform.smooth)


def test_the_up_factors_of_a_fused_linear_are_block_diagonal():
    parts = mixed_parts()
    padded = packed_sizes(parts).padded()
    assert padded == {"n": 128 + 256 + 128, "k": 256, "r": 16 + 0 + 32}
    up = layout.unpack_matrix("lora_up", pack_layers(parts, torch.float16)["lora_up"], (512, 48))
    wanted = torch.zeros(512, 48, dtype=torch.float16)
    wanted[:96, :16] = parts[0].proj_up
    wanted[384 : 384 + 33, 16:36] = parts[2].proj_up
    assert torch.equal(up, wanted)


def test_a_fused_linear_puts_out_what_its_parts_put_out():
    parts = mixed_parts()
    packed, padded = pack_layers(parts, torch.float16), packed_sizes(parts).padded()
    n, k, r = padded["n"], padded["k"], padded["r"]
    scales = layout.unpack_matrix("wscales", packed["wscales"], (n, k // 64)).double().repeat_interleave(64, 1)
    weight_hat = layout.unpack_codes(packed["qweight"]).double() * scales
    down = layout.unpack_matrix("lora_down", packed["lora_down"], (k, r))
    up = layout.unpack_matrix("lora_up", packed["lora_up"], (n, r))
    bias = layout.unpack_matrix("channel", packed["bias"], (n,))
    smooth = layout.unpack_matrix("channel", packed["smooth"], (k,)).float()
    x = torch.randn(9, 192, generator=rng(8))
    padded_x = torch.cat((x, torch.zeros(9, 64)), 1)
    fused = w4a4_linear(padded_x, weight_hat, down, up, bias, ActivationTransform(smooth, False, 0.85))
    row = 0
    for part in parts:
        rows = part.codes.shape[0]
        alone = w4a4_linear(x, part.weight_hat(D), part.proj_down, part.proj_up, part.bias, part.transform)
        difference = (fused[:, row : row + rows] - alone).norm()
        assert difference <= 1e-13 * alone.norm()  # float64 sums in another order
        row += -(-rows // 128) * 128


@pytest.mark.parametrize(
    "change",
    [{"k": 256}, {"clip": 0.9}, {"smooth": smoothing(192, seed=4)}, {"smooth": None}, {"group": 192}],
    ids=["K", "clip", "smoothing", "no smoothing", "group"],
)
def test_parts_that_do_not_share_an_input_are_refused_by_name(change):
    first = layer("a.q_proj", smooth=smoothing(192), clip=0.85)
    options = {"smooth": smoothing(192), "clip": 0.85, **change}
    if "k" in change:
        options["smooth"] = smoothing(256)
    with pytest.raises(ConfigError, match=r"a\.k_proj and a\.q_proj"):
        packed_sizes([first, layer("a.k_proj", **options)])


# ------------------------------------------------------------------------------------------------ --fuse


def test_a_fuse_option_is_read():
    assert parse_fuse("qkv_proj=q_proj,k_proj, v_proj") == ("qkv_proj", ["q_proj", "k_proj", "v_proj"])


@pytest.mark.parametrize("text", ["", "qkv", "qkv=", "=q,k", "qkv=q", "qkv=q,", "qkv=,k", "qkv=q,,v", "qkv=q,q"])
def test_a_wrong_fuse_option_is_a_config_error_that_shows_it(text):
    with pytest.raises(ConfigError) as caught:
        parse_fuse(text)
    assert repr(text) in str(caught.value)


NAMES = [f"m.{i}.{leaf}" for i in range(2) for leaf in ("q", "k", "v", "o")]


def test_siblings_are_fused_in_every_parent_and_the_rest_stays_alone():
    groups = fusion_groups([*NAMES, "q"], [("qkv", ["q", "k", "v"])])
    assert groups == {
        "m.0.qkv": ["m.0.q", "m.0.k", "m.0.v"],
        "m.1.qkv": ["m.1.q", "m.1.k", "m.1.v"],
        "m.0.o": ["m.0.o"],
        "m.1.o": ["m.1.o"],
        "q": ["q"],
    }


def test_names_without_a_parent_are_fused_too():
    assert fusion_groups(["q", "k"], [("qk", ["q", "k"])]) == {"qk": ["q", "k"]}


def test_members_stand_in_the_order_of_the_option():
    assert fusion_groups(["a.q", "a.k"], [("kq", ["k", "q"])]) == {"a.kq": ["a.k", "a.q"]}


def test_a_leaf_name_is_matched_whole():
    with pytest.raises(ConfigError, match="qk"):
        fusion_groups(["a.xq", "a.xk"], [("qk", ["q", "k"])])


@pytest.mark.parametrize("parts", [["x", "y"], ["q", "x"], ["Q", "K"]])
def test_a_fuse_that_finds_nothing_is_a_config_error(parts):
    with pytest.raises(ConfigError, match="no quantized siblings"):
        fusion_groups(NAMES, [("f", parts)])


def test_a_layer_cannot_be_fused_twice():
    with pytest.raises(ConfigError, match="already fused"):
        fusion_groups(NAMES, [("qk", ["q", "k"]), ("kv", ["k", "v"])])


@pytest.mark.parametrize(
    "fuses",
    [[("o", ["q", "k"])], [("f", ["q", "k"]), ("f", ["v", "o"])]],
    ids=["the name of a layer that stays", "the name of another fuse"],
)
def test_a_fused_name_that_is_taken_is_a_config_error_and_loses_no_layer(fuses):
    with pytest.raises(ConfigError):
        fusion_groups(NAMES, fuses)


# ------------------------------------------------------------------------------------------------ header entries

GOOD = {
    "k": 192,
    "group_size": 64,
    "act_clip": 0.85,
    "smooth": True,
    "parts": [{"name": "a.q", "n": 96, "rank": 16, "bias": False}, {"name": "a.k", "n": 40, "rank": 0, "bias": True}],
}


def with_part(**changes):
    return {**GOOD, "parts": [{**GOOD["parts"][0], **changes}]}


def test_sizes_come_back_from_the_header():
    sizes = packed_sizes(mixed_parts())
    assert PackedSizes.from_dict(json.loads(json.dumps(asdict(sizes))), "qkv") == sizes


def test_true_sizes_give_the_padded_ones():
    assert PackedSizes.from_dict(GOOD, "a.qk").padded() == {"n": 256, "k": 256, "r": 16}


NONSENSE = {
    "nothing": None,
    "a list": [],
    "a string": "parts",
    "an empty object": {},
    "no parts": {**GOOD, "parts": []},
    "parts is no list": {**GOOD, "parts": 3},
    "parts of strings": {**GOOD, "parts": ["a.q"]},
    "a part without n": {**GOOD, "parts": [{"name": "a.q", "rank": 16, "bias": False}]},
    "k is a string": {**GOOD, "k": "192"},
    "k is zero": {**GOOD, "k": 0},
    "k does not divide": {**GOOD, "k": 200},
    "group of 32": {**GOOD, "group_size": 32},
    "n is negative": with_part(n=-1),
    "n is a fraction": with_part(n=96.5),
    "n is true": with_part(n=True),
    "rank is negative": with_part(rank=-16),
    "rank is missing": with_part(rank=None),
    "clip is no number": {**GOOD, "act_clip": "much"},
    "clip is missing": {key: GOOD[key] for key in GOOD if key != "act_clip"},
    "clip is a list": {**GOOD, "act_clip": [1.0]},
    "clip is nan": {**GOOD, "act_clip": float("nan")},
    "clip is infinite": {**GOOD, "act_clip": float("inf")},
    "clip is zero": {**GOOD, "act_clip": 0.0},
    "clip is negative": {**GOOD, "act_clip": -0.85},
    "clip is too large for a float": {**GOOD, "act_clip": 10**400},
    "smooth is a string": {**GOOD, "smooth": "false"},
    "bias is a string": with_part(bias="false"),
    "name is a number": with_part(name=3),
    "name is a list": with_part(name=["a.q"]),
    "a name twice": {**GOOD, "parts": [GOOD["parts"][0], GOOD["parts"][0]]},
}


@pytest.mark.parametrize("entry", NONSENSE.values(), ids=NONSENSE.keys())
def test_a_nonsense_header_entry_is_a_checkpoint_error(entry):
    with pytest.raises(CheckpointError):
        PackedSizes.from_dict(entry, "a.qk")


# ------------------------------------------------------------------------------------------------ whole files


def canonical_file(path, layers, rotation="none", others=None):
    """A canonical file as formats.md §1 describes it, written by the safetensors library."""
    tensors = dict(others or {})
    entries = {}
    for source in layers:
        n, k = source.codes.shape
        tensors[f"{source.name}.qweight"] = pack_nibbles(source.codes)
        tensors[f"{source.name}.w_scales"] = source.scales
        tensors[f"{source.name}.proj_down"] = source.proj_down
        tensors[f"{source.name}.proj_up"] = source.proj_up
        if source.transform.smooth is not None:
            tensors[f"{source.name}.smooth"] = source.transform.smooth.clone()
        if source.transform.clip != 1.0:
            tensors[f"{source.name}.act_clip"] = torch.tensor(source.transform.clip)
        if source.bias is not None:
            tensors[f"{source.name}.bias"] = source.bias
        entries[source.name] = {"n": n, "k": k, "rank": source.proj_up.shape[1], "group_size": source.group_size}
    config = schema.quantization_config(
        format="w4a4",
        numbers=FORMATS["w4a4"].config(LayerConfig()),
        rank=16,
        smooth=True,
        rotation=rotation,
        ignore=[],
        packing=schema.CANONICAL_PACKING,
    )
    metadata = {
        schema.QUANTIZATION_CONFIG: json.dumps(config),
        schema.LAYERS: json.dumps(entries),
        schema.TIES: "{}",
        schema.REPORT: "{}",
        schema.RUN_CONFIG: json.dumps({"activation": {"act_clip": layers[0].transform.clip}}),
    }
    save_file(tensors, path, metadata)
    return open_quantized(path)


def test_an_exported_file_gives_every_layer_back(tmp_path):
    parts = mixed_parts()
    norm = torch.randn(7, generator=rng(5))
    source = canonical_file(tmp_path / "a.safetensors", [*parts, layer("o", rank=0)], others={"norm.weight": norm})
    summary = export_packed(source, tmp_path / "b.safetensors", fuses=[("qkv", ["q", "k", "v"])])
    assert (summary["layers"], summary["fused"], summary["dtype"]) == (4, 1, "float16")
    packed = open_quantized(tmp_path / "b.safetensors")
    assert packed.kind == "packed"
    for original in [*parts, layer("o", rank=0)]:
        found = packed.layer(original.name)
        assert_same_layer(vars(found), original)
        assert found.transform.clip == pytest.approx(original.transform.clip, rel=1e-7)  # float32 in the file
        assert (found.transform.smooth is None) == (original.transform.smooth is None)
    assert torch.equal(load_file(tmp_path / "b.safetensors")["norm.weight"], norm)


def test_the_header_of_an_exported_file_says_layout_type_and_true_sizes(tmp_path):
    source = canonical_file(tmp_path / "a.safetensors", mixed_parts())
    export_packed(source, tmp_path / "b.safetensors", dtype="bfloat16", fuses=[("qkv", ["q", "k", "v"])])
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        metadata = file.metadata()
        assert file.get_tensor("qkv.wscales").dtype == torch.bfloat16
    packing = json.loads(metadata["quantization_config"])["packing"]
    assert packing == {"layout": "mma", "version": 1, "tile_n": 128, "tile_k": 64, "dtype": "bfloat16"}
    entry = json.loads(metadata["svdq.layers"])["qkv"]
    assert entry["k"] == 192
    assert [(p["name"], p["n"], p["rank"]) for p in entry["parts"]] == [("q", 96, 16), ("k", 130, 0), ("v", 33, 20)]


def test_a_packed_file_is_refused(tmp_path):
    source = canonical_file(tmp_path / "a.safetensors", [layer()])
    export_packed(source, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="already packed"):
        export_packed(open_quantized(tmp_path / "b.safetensors"), tmp_path / "c.safetensors")
    assert not (tmp_path / "c.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "rotation", "word"), [({}, "hadamard64", "rotation"), ({"clip": 0.85}, "none", "clip")]
)
def test_nunchaku_is_refused_what_it_cannot_read(tmp_path, options, rotation, word):
    source = canonical_file(tmp_path / "a.safetensors", [layer(**options)], rotation)
    with pytest.raises(ConfigError, match=rf"{word}.*--preset nunchaku"):
        export_packed(source, tmp_path / "b.safetensors", runtime="nunchaku")
    export_packed(source, tmp_path / "b.safetensors")  # for svdq's own kernels it packs


def test_a_bias_beyond_float16_is_a_config_error_that_names_it_and_bfloat16_holds_it(tmp_path):
    wide = layer(bias=True)
    wide.bias = torch.full((96,), 1e5)
    source = canonical_file(tmp_path / "a.safetensors", [wide])
    with pytest.raises(ConfigError, match=r"a\.q_proj\.bias.*bfloat16"):
        export_packed(source, tmp_path / "b.safetensors")
    assert not (tmp_path / "b.safetensors").exists()
    export_packed(source, tmp_path / "b.safetensors", dtype="bfloat16")


@pytest.mark.parametrize("entry", [with_part(name=["a.q"]), {**GOOD, "act_clip": 10**400}], ids=["name", "clip"])
def test_opening_a_packed_file_with_a_nonsense_entry_is_a_checkpoint_error(tmp_path, entry):
    source = canonical_file(tmp_path / "a.safetensors", [layer("a.q")])
    export_packed(source, tmp_path / "b.safetensors")
    tensors = load_file(tmp_path / "b.safetensors")
    with safe_open(tmp_path / "b.safetensors", "pt") as file:
        metadata = file.metadata()
    save_file(tensors, tmp_path / "c.safetensors", {**metadata, "svdq.layers": json.dumps({"a.q": entry})})
    with pytest.raises(CheckpointError):
        open_quantized(tmp_path / "c.safetensors")
