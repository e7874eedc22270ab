"""The file for nunchaku's loaders: every key, shape and type that they ask for, and what their arithmetic gives."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from svdq import nunchaku
from svdq.errors import ConfigError
from svdq.kernels import layout
from svdq.quantized import open_quantized

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("nunchaku_int4_*.safetensors"))
D, RANK = 128, 48  # of the toys: channels; three parts of rank 16 side by side


@pytest.fixture(scope="module")
def exported(quantized_transformer, tmp_path_factory):
    """kind → (canonical file, its tensors for nunchaku, that file's metadata)."""
    made = {}

    def make(kind):
        if kind not in made:
            _, file = quantized_transformer(kind)
            out = tmp_path_factory.mktemp("nunchaku") / "out.safetensors"
            nunchaku.export(open_quantized(file), out, dtype="bfloat16")
            with safe_open(out, "pt") as opened:
                made[kind] = (file, load_file(out), opened.metadata())
        return made[kind]

    return make


def w4a4(n, k):
    """What `SVDQW4A4Linear(k, n, rank)` and the C++ GEMM_W4A4 hold, by the C++ names."""
    return {
        "qweight": ((n, k // 2), torch.int8),
        "wscales": ((k // 64, n), torch.bfloat16),
        "bias": ((n,), torch.bfloat16),
        "smooth": ((k,), torch.bfloat16),
        "smooth_orig": ((k,), torch.bfloat16),
        "lora_down": ((k, RANK), torch.bfloat16),
        "lora_up": ((n, RANK), torch.bfloat16),
    }


def w4a16(n, k):
    """What `AWQW4A16Linear(k, n)` holds."""
    return {
        "qweight": ((n // 4, k // 2), torch.int32),
        "wscales": ((k // 64, n), torch.bfloat16),
        "wzeros": ((k // 64, n), torch.bfloat16),
        "bias": ((n,), torch.bfloat16),
    }


def under(name, tensors):
    return {f"{name}.{suffix}": entry for suffix, entry in tensors.items()}


def expected_flux():
    """The keys of FluxModel.cpp's modules, for two joint and two single blocks; the rest as diffusers has it."""
    wanted = {}
    for block in range(2):
        where = f"transformer_blocks.{block}"
        for side in ("", "_context"):
            wanted |= under(f"{where}.norm1{side}.linear", w4a16(6 * D, D))
            wanted |= under(f"{where}.qkv_proj{side}", w4a4(3 * D, D))
            wanted |= under(f"{where}.out_proj{side}", w4a4(D, D))
            wanted |= under(f"{where}.mlp{side}_fc1", w4a4(4 * D, D))
            wanted |= under(f"{where}.mlp{side}_fc2", w4a4(D, 4 * D))
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            wanted[f"{where}.{norm}.weight"] = ((32,), torch.bfloat16)
        where = f"single_transformer_blocks.{block}"
        wanted |= under(f"{where}.norm.linear", w4a16(3 * D, D))
        wanted |= under(f"{where}.qkv_proj", w4a4(3 * D, D))
        wanted |= under(f"{where}.out_proj", w4a4(D, D))
        wanted |= under(f"{where}.mlp_fc1", w4a4(4 * D, D))
        wanted |= under(f"{where}.mlp_fc2", w4a4(D, 4 * D))
        for norm in ("norm_q", "norm_k"):
            wanted[f"{where}.{norm}.weight"] = ((32,), torch.bfloat16)
    return wanted


def expected_qwen():
    """The keys that NunchakuQwenImageTransformer2DModel's patched blocks give its state dict."""
    renamed = {"lora_down": "proj_down", "lora_up": "proj_up", "smooth": "smooth_factor"}
    renamed["smooth_orig"] = "smooth_factor_orig"
    wanted = {}

    def linear(name, n, k):
        wanted.update({f"{name}.{renamed.get(key, key)}": entry for key, entry in w4a4(n, k).items()})

    for block in range(2):
        where = f"transformer_blocks.{block}"
        linear(f"{where}.attn.to_qkv", 3 * D, D)
        linear(f"{where}.attn.add_qkv_proj", 3 * D, D)
        linear(f"{where}.attn.to_out.0", D, D)
        linear(f"{where}.attn.to_add_out", D, D)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            wanted[f"{where}.attn.{norm}.weight"] = ((32,), torch.bfloat16)
        for side in ("img", "txt"):
            wanted |= under(f"{where}.{side}_mod.1", w4a16(6 * D, D))
            linear(f"{where}.{side}_mlp.net.0.proj", 4 * D, D)
            linear(f"{where}.{side}_mlp.net.2", D, 4 * D)
    return wanted


@pytest.mark.parametrize(("kind", "expected"), [("flux", expected_flux), ("qwen", expected_qwen)])
def test_every_key_shape_and_type_is_what_the_loader_asks_for(kind, expected, exported, transformer, original):
    _, tensors, _ = exported(kind)
    wanted = expected()
    outside = original(transformer(kind)).state_dict()
    wanted |= {k: (tuple(t.shape), torch.bfloat16) for k, t in outside.items() if "transformer_blocks." not in k}
    assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()} == wanted


@pytest.mark.parametrize(
    ("kind", "model_class"),
    [("flux", "NunchakuFluxTransformer2dModel"), ("qwen", "NunchakuQwenImageTransformer2DModel")],
)
def test_the_header_names_class_configuration_and_rank(kind, model_class, exported, transformer):
    _, _, metadata = exported(kind)
    assert metadata["model_class"] == model_class
    assert json.loads(metadata["config"]) == json.loads((transformer(kind) / "config.json").read_text())
    config = json.loads(metadata["quantization_config"])
    assert config["method"] == "svdquant"
    assert config["rank"] == RANK
    assert (config["weight"]["dtype"], config["weight"]["group_size"]) == ("int4", 64)


# ------------------------------------------------------------------------------------------------ arithmetic


def weights(tensors, name):
    """(Ŵ, smooth, down, up, bias) in float64, unpacked."""
    codes = layout.unpack_codes(tensors[f"{name}.qweight"]).double()
    n, k = codes.shape

    def matrix(suffix, shape):
        return layout.unpack_matrix(suffix, tensors[f"{name}.{suffix}"], shape).double()

    scales = layout.unpack_matrix("wscales", tensors[f"{name}.wscales"], (n, k // 64)).double()
    smooth, bias = (
        layout.unpack_matrix("channel", tensors[f"{name}.{key}"], (m,)) for key, m in (("smooth", k), ("bias", n))
    )
    return (
        codes * scales.repeat_interleave(64, 1),
        smooth.double(),
        matrix("lora_down", (k, RANK)),
        matrix("lora_up", (n, RANK)),
        bias.double(),
    )


def as_that_runtime(tensors, name, x, shift=0.0):
    """y without the rounding of activations: Ŵ·((x + shift) / smooth) + up·(downᵀ·x) + bias."""
    weight_hat, smooth, down, up, bias = weights(tensors, name)
    return ((x + shift) / smooth) @ weight_hat.t() + (x @ down) @ up.t() + bias


def as_stored(file, name, x):
    """The same of a linear in the canonical file."""
    layer = open_quantized(file).layer(name)
    smooth = 1.0 if layer.transform.smooth is None else layer.transform.smooth.double()
    y = (x / smooth) @ layer.weight_hat(torch.float64).t() + (x @ layer.proj_down.double()) @ layer.proj_up.double().t()
    return y if layer.bias is None else y + layer.bias.double()


BFLOAT16 = 4e-3  # scales and factors are rounded to 8 bits on the way


def drawn(channels, seed=5):
    return torch.randn(9, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_fused_q_k_v_give_what_the_three_give(exported, distance):
    file, tensors, _ = exported("flux")
    x = drawn(D)
    where = "transformer_blocks.1.attn"
    wanted = torch.cat(
        [as_stored(file, f"{where}.{part}", x) for part in ("add_q_proj", "add_k_proj", "add_v_proj")], 1
    )
    assert distance(as_that_runtime(tensors, "transformer_blocks.1.qkv_proj_context", x), wanted) < BFLOAT16


def test_the_bias_behind_a_gelu_undoes_the_shift(exported, distance):
    file, tensors, _ = exported("flux")
    x = torch.nn.functional.gelu(drawn(4 * D), approximate="tanh")
    found = as_that_runtime(tensors, "transformer_blocks.0.mlp_fc2", x, shift=0.171875)
    assert distance(found, as_stored(file, "transformer_blocks.0.ff.net.2", x)) < BFLOAT16


def test_a_single_blocks_last_linear_is_the_sum_of_its_two_shares(exported, distance):
    file, tensors, _ = exported("flux")
    attention, mlp = drawn(D), torch.nn.functional.gelu(drawn(4 * D, seed=6), approximate="tanh")
    where = "single_transformer_blocks.1"
    found = as_that_runtime(tensors, f"{where}.out_proj", attention)
    found = found + as_that_runtime(tensors, f"{where}.mlp_fc2", mlp, shift=0.171875)
    assert distance(found, as_stored(file, f"{where}.proj_out", torch.cat([attention, mlp], 1))) < BFLOAT16


def test_the_attentions_share_has_a_bias_of_zeros(exported):
    _, tensors, _ = exported("flux")
    assert not tensors["single_transformer_blocks.0.out_proj.bias"].any()


@pytest.mark.parametrize("name", GOLDEN, ids=lambda path: path.stem)
def test_a_linear_alone_is_the_golden_files_bytes(name):
    from svdq.export import pack_layers
    from svdq.quantized import Layer
    from svdq.rounding import ActivationTransform

    file = load_file(name)
    smooth = file["smooth"].float() if "smooth" in file else None
    source = Layer(
        "one",
        file["codes"],
        file["w_scales"],
        file["proj_down"],
        file["proj_up"],
        file.get("bias"),
        ActivationTransform(smooth),
    )
    whole = nunchaku._cut(source, slice(0, source.codes.shape[1]))
    for key, tensor in pack_layers([whole], file["w_scales"].dtype).items():
        assert torch.equal(tensor, file[f"packed_{key.removesuffix('_orig')}"])


# ------------------------------------------------------------------------------------------------ adaptive norms


@pytest.mark.parametrize(
    ("splits", "hashes"),
    [
        (
            3,
            {
                "qweight": "615f5234fb03a7e5e6934134f63afc10f43dc58d4fe1f7d4d0d60130bde21246",
                "wscales": "e946419d02f5cf3935bbe9658719b66eaac1734c0dee36b2924221b7cc179c60",
                "wzeros": "83c884513a32ea173f9a044040b971871443c2a6ed2f5bda83016645befa92fa",
                "bias": "3327fe77502139f6f9169f331587fdcc1c5286b1058472d6595325f19eca02b4",
            },
        ),
        (
            6,
            {
                "qweight": "313bbd934935aa9a5e555455293e71c25bb1edd8f4c06038a61c930fd04004cf",
                "wscales": "7d2b98f262f9ec596f7bb41f4e140f616a4d7b212f9c65b1ccfcc83cc80fbbb2",
                "wzeros": "f236afd430b46be100b9d830ccbe997258a0c88a36ee78148b0a253531d4b00d",
                "bias": "5cfcc675cceaaaca4ef0233ebd354750cd173c9ee63f5477945c46c7965dcf91",
            },
        ),
    ],
)
def test_an_adaptive_norm_is_packed_as_deepcompressor_packs_it(splits, hashes):
    """The hashes are of DeepCompressor's output (commit 0abaaf0) on this input, as AutoRound's tests state them."""
    rows, columns = torch.arange(12).reshape(12, 1), torch.arange(1024).reshape(1, 1024)
    codes = (rows * 5 + columns * 3 + rows // 2 + columns // 7) % 15
    scales = torch.exp2((((rows + torch.arange(16).reshape(1, 16) * 2) % 7) - 8).float()).bfloat16()
    bias = ((torch.arange(12) - 4) / 16).bfloat16()
    packed = nunchaku.pack_adaptive(codes.to(torch.uint8), scales, -7 * scales, bias, splits)
    for name, wanted in hashes.items():
        assert hashlib.sha256(packed[name].view(torch.uint8).numpy().tobytes()).hexdigest() == wanted


def test_an_adaptive_norms_weight_is_off_by_half_a_step_at_most():
    weight = torch.randn(12, 128, generator=torch.Generator().manual_seed(3))
    codes, scales, zeros = nunchaku.round_adaptive(weight, torch.float16)
    found = codes.float() * scales.float().repeat_interleave(64, 1) + zeros.float().repeat_interleave(64, 1)
    steps = (found - weight).abs() / scales.float().repeat_interleave(64, 1)
    assert steps.max() < 0.51  # the rounding of scale and zero to float16 moves the last code


def test_a_group_of_one_value_is_exact():
    weight = torch.full((12, 64), 0.375)
    codes, scales, zeros = nunchaku.round_adaptive(weight, torch.bfloat16)
    assert torch.equal(codes * scales.float() + zeros.float(), weight)


# ------------------------------------------------------------------------------------------------ refusals


def test_a_rotation_is_refused(quantized_transformer, tmp_path):
    _, file = quantized_transformer("flux", preset="quality", only=("transformer_blocks.0.attn.to_out.0",))
    with pytest.raises(ConfigError, match="rotation"):
        nunchaku.export(open_quantized(file), tmp_path / "out.safetensors")


def test_a_linear_left_in_16_bits_is_refused_by_name(quantized_transformer, tmp_path):
    _, file = quantized_transformer("flux", only=("transformer_blocks.0.attn.to_[qkv]",))
    with pytest.raises(ConfigError, match=r"single_transformer_blocks\.0\.attn\.to_q: left in 16 bits"):
        nunchaku.export(open_quantized(file), tmp_path / "out.safetensors")


def test_a_class_without_a_loader_is_refused(quantized_transformer, svdq, tmp_path):
    _, file = quantized_transformer("sd3", only=("transformer_blocks.0.ff.*",))
    result = svdq("export-packed", file, tmp_path / "out.safetensors", "--for", "nunchaku")
    assert result.code == 2
    assert "SD3Transformer2DModel" in result.err
