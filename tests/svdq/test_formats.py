"""The formats beside W4A4: known answers by hand, storing and its inverse, whole runs of each by the commands."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from svdq import nvfp4
from svdq.config import FORMATS as DEFAULTS
from svdq.config import CalibrationConfig, LayerConfig
from svdq.errors import ConfigError
from svdq.format_linears import StoredLinear
from svdq.formats import FORMATS, Decoded, pack_words, unpack_words
from svdq.gptq import gptq, inverse_factor, upper_cholesky
from svdq.grid import E2M1, INT4_WHOLE, INT8, UINT4, weight_grid, zero_points
from svdq.layer import prepare_site, quantize_linears, round_linear
from svdq.linear import load_quantized
from svdq.objective import ActivationSums
from svdq.quantized import open_quantized
from svdq.rounding import ActivationTransform, round_to_nearest
from svdq.sites import raw_sums

E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config(form, **values):
    return LayerConfig(**{"format": form, **DEFAULTS[form], **values})


def stored(weight, layer):
    result = round_linear(weight, layer)
    form = FORMATS[layer.format]
    return form.store(Decoded(result.codes, result.scales, result.unit), layer.symmetric)


# ------------------------------------------------------------------------------------------ grids, by hand


def test_asymmetric_codes_are_those_of_the_formula():
    # s = (11 − (−4)) / 15 = 1, z = round(4 / 1) = 4, q = round(w) + 4
    row = torch.tensor([[-4.0, -2.6, -0.5, 0.0, 0.5, 1.5, 7.4, 11.0] * 4])
    tensors = stored(row, config("w4a16", group_size=32))
    assert tensors["w_scales"].tolist() == [[1.0]]
    assert tensors["w_zeros"].tolist() == [[4]]
    assert unpack_words(tensors["qweight"])[0, :8].tolist() == [0, 1, 4, 4, 4, 6, 11, 15]  # ties to even: −0.5 → 0


@given(st.integers(0, 2**31), st.sampled_from([32, 48, 96]))
@settings(max_examples=20, deadline=None)
def test_zero_points_read_off_the_codes_are_those_of_the_range(seed, group):
    weight = normal(3, 96, seed=seed)
    codes, scales = round_to_nearest(weight, UINT4.with_group(group))
    low = weight.unflatten(1, (-1, group)).amin(2).clamp_max(0)
    assert torch.equal(zero_points(codes, group), (-low / scales.float()).round().to(torch.uint8))


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-9])
def test_a_constant_group_gets_a_safe_scale(value):
    weight = torch.full((2, 64), value)
    for form in ("w4a16", "w8a16"):
        layer = config(form, **({"group_size": 32} if form == "w4a16" else {}))
        result = round_linear(weight, layer)
        assert (result.scales > 0).all() and result.scales.isfinite().all()
        hat = weight_grid(layer, 64).decode(result.codes, result.scales)
        assert (hat - weight).abs().max() <= abs(value) * 1e-3 + 1e-7


def test_eight_bit_scales_are_of_the_whole_row():
    weight = torch.tensor([[127.0, -63.5, 0.5, 1.5], [-254.0, 2.0, 5.0, 0.0]])
    tensors = stored(weight, config("w8a16"))
    assert tensors["w_scales"].tolist() == [[1.0], [2.0]]
    assert tensors["qweight"].tolist() == [[127, -64, 0, 2], [-127, 1, 2, 0]]  # 63.5, 0.5, 1.5, 2.5: ties to even


def test_e2m1_rounds_half_to_even():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    ratio = torch.tensor([*ties, *(-tie for tie in ties)]) * 2
    assert (E2M1.round(ratio) / 2).tolist() == [*wanted, *(-value for value in wanted)]


def test_e2m1_rounds_to_the_nearest_of_its_values():
    values = torch.tensor(E2M1_VALUES)
    numbers = torch.rand(4000, generator=torch.Generator().manual_seed(0)) * 7
    nearest = values[(numbers[:, None] - values).abs().argmin(1)]
    assert torch.equal(E2M1.round(numbers * 2) / 2, nearest)


def test_e2m1_nibbles_are_sign_and_index_of_the_magnitude():
    row = torch.tensor(E2M1_VALUES + [-value for value in E2M1_VALUES])[None]
    codes = (row * 2).to(torch.int8)
    scales, unit = torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(1)
    tensors = FORMATS["nvfp4"].store(Decoded(codes, scales, unit), False)
    # 0 has no sign: it comes back as 0x0
    assert tensors["qweight"].tolist() == [[0x10, 0x32, 0x54, 0x76, 0x90, 0xBA, 0xDC, 0xFE]]


def test_activation_scales_of_nvfp4_are_e4m3_numbers():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, 2.5, -0.3
    nibbles, scales = nvfp4.quantize_activation(x)
    assert scales.float().tolist() == [[1.0, 2.0**-9]]
    assert nibbles[0, :3].tolist() == [7, 4, 9]  # 6, 2 (a tie), −0.5
    assert not nibbles[0, 3:].any()


def test_an_activation_beyond_the_largest_scale_is_cut_off():
    nibbles, scales = nvfp4.quantize_activation(torch.full((1, 16), 1e6))
    assert scales.float().item() == 448 and nibbles[0, 0] == 7


# ------------------------------------------------------------------------------------------ storing


@given(st.lists(st.integers(0, 15), min_size=16, max_size=16))
def test_words_hold_the_lowest_k_in_the_lowest_nibble(codes):
    words = pack_words(torch.tensor([codes], dtype=torch.int8))
    wanted = [sum(code << (4 * i) for i, code in enumerate(codes[start : start + 8])) for start in (0, 8)]
    assert [word & 0xFFFFFFFF for word in words[0].tolist()] == wanted
    assert unpack_words(words).tolist() == [codes]


CASES = [
    config("w4a16", group_size=64),
    config("w4a16", group_size=32),
    config("w4a16", group_size=0),
    config("w4a16", group_size=64, symmetric=True),
    config("w8a16"),
]


@pytest.mark.parametrize("layer", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_stored_decodes_to_the_nearest_of_the_grid(layer, dtype):
    weight = normal(96, 192).to(dtype)
    form, grid = FORMATS[layer.format], weight_grid(layer, 192)
    decoded = form.load(stored(weight, layer))
    hat = grid.decode(decoded.codes, decoded.scales)
    step = decoded.scales.float().repeat_interleave(grid.group, 1)
    assert ((hat - weight.float()).abs() <= 0.508 * step).all()  # 2^-11 of the scale, times at most 15 codes


def test_stored_bytes_are_counted_exactly(quantized_format):
    for form in FORMATS:
        _, file, layer = quantized_format(form)
        tensors = load_file(file)
        opened = open_quantized(file)
        for name, (n, k, *_) in opened.layers.items():
            own = {key: t for key, t in tensors.items() if key.startswith(f"{name}.") and not key.endswith(".bias")}
            counted = FORMATS[form].stored_bytes(n, k, layer)
            assert sum(t.nbytes for key, t in own.items()) == counted, name


# ------------------------------------------------------------------------------------------ GPTQ and the low rank


def sums_of(x, transform=None):
    transform = transform or ActivationTransform()
    inner = transform.apply(x)
    hat = transform.fake_quantize(inner).double()
    inner = inner.double()
    absmax = x.abs().amax(0)
    return ActivationSums(inner.t() @ inner, inner.t() @ hat, hat.t() @ hat, absmax, len(x), transform)


@pytest.mark.parametrize("grid", [UINT4.with_group(32), INT4_WHOLE.with_group(96), INT8.with_group(96)], ids=str)
def test_gptq_with_a_diagonal_hessian_is_rounding_to_nearest(grid):
    weight = normal(8, 96)
    factor = inverse_factor(upper_cholesky(torch.eye(96, dtype=torch.float64))[0])
    codes, scales, _ = gptq(weight, factor, grid, search=False)
    wanted = round_to_nearest(weight, grid)
    assert torch.equal(codes, wanted[0]) and torch.equal(scales, wanted[1])


@pytest.mark.parametrize("form", ["w4a16", "nvfp4"])
def test_gptq_beats_rounding_and_the_low_rank_beats_gptq(form):
    mixing = normal(128, 128, seed=1) + 2 * torch.eye(128)
    x, weight = normal(2048, 128, seed=2) @ mixing, normal(64, 128, seed=3)
    transform = ActivationTransform(dtype=FORMATS[form].activation)
    sums = sums_of(x, transform) if form == "nvfp4" else raw_sums(sums_of(x))
    errors = []
    for layer in (config(form, rank=0), config(form, rank=16)):
        result = quantize_linears([weight], prepare_site(sums, layer), layer)[0]
        hat = weight_grid(layer, 128).decode(result.codes, result.scales, unit=result.unit)
        y = transform.approximate(x) @ hat.t() + x @ result.proj_down.float() @ result.proj_up.float().t()
        wanted = x @ weight.t()
        errors.append(((y - wanted).norm() / wanted.norm()).item())
        assert math.isclose(result.report["error"], errors[-1], rel_tol=1e-3)  # the closed form is the measured one
    if form == "w4a16":
        codes, scales = round_to_nearest(weight, UINT4)
        nearest = ((x @ (UINT4.decode(codes, scales) - weight).t()).norm() / (x @ weight.t()).norm()).item()
        assert errors[0] < nearest
    assert errors[1] < errors[0]


@pytest.mark.parametrize("rotation", [False, True])
def test_sums_taken_through_a_transform_give_back_those_of_the_raw_inputs(rotation):
    x = normal(300, 128) * (1 + normal(128, seed=1).abs())
    smooth = (normal(128, seed=2).abs() + 0.5).bfloat16().float()
    raw = raw_sums(sums_of(x, ActivationTransform(smooth, rotation, 0.85)))
    wanted = x.double().t() @ x.double()
    assert (raw.xx - wanted).norm() / wanted.norm() < 1e-6  # x' itself is float32
    assert raw.transform.dtype is None


def test_scales_of_nvfp4_lie_on_the_grid_of_e4m3():
    layer = config("nvfp4", rank=0)
    x, weight = normal(512, 64), normal(32, 64, seed=1) * 1e-3
    sums = sums_of(x, ActivationTransform(dtype="nvfp4"))
    result = quantize_linears([weight], prepare_site(sums, layer), layer)[0]
    assert result.scales.dtype == torch.float8_e4m3fn and (result.scales.float() > 0).all()
    assert result.unit.unique().item() == 2.0**-19 and 2.0**-20 < weight.abs().max() / (6 * 448) <= 2.0**-19
    assert result.report["error"] < 0.2


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "values, message",
    [
        ({"format": "w4a16", "group_size": 48}, "w4a16 knows 0 .the whole row. or 32"),
        ({"format": "w8a16", "group_size": 64}, "w8a16 knows 0"),
        ({"format": "nvfp4", "group_size": 64}, "nvfp4 knows 16"),
        ({"format": "w4a4", "symmetric": True}, "a choice of w4a16 alone"),
        ({"format": "w4a4", "objective": "nearest", "rank": 0}, "for w4a16, w8a16, nf4"),
        (
            {"format": "w4a16", "group_size": 64, "objective": "nearest", "rank": 8},
            "rank 8, sweeps 0: w4a16 rounds to nearest",
        ),
        ({"format": "w4a16", "group_size": 64, "sweeps": 1}, "for symmetric codes"),
        ({"format": "nf4", "objective": "output"}, "rounded to nearest"),
        ({"format": "int3"}, "wanted one of w4a4"),
    ],
)
def test_a_configuration_that_a_format_has_not_is_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        LayerConfig(**values)


def test_a_clip_is_not_for_nvfp4():
    with pytest.raises(ConfigError, match="nvfp4 knows none"):
        CalibrationConfig(activation="nvfp4")


# ------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def quantized_format(toy, calibration_ids, tmp_path_factory):
    """quantized_format(form) → (model directory, file, its layers' configuration), by the command line."""
    from svdq.cli.main import main

    built = {}

    def build(form):
        if form not in built:
            model, out = toy("qwen2"), tmp_path_factory.mktemp(form) / "out.safetensors"
            options = ["--group-size", "64"] if form == "w4a16" else []
            nearest = DEFAULTS[form].get("objective") == "nearest"
            options += [] if nearest else ["--data", str(calibration_ids), "--min-tokens", "1", "--rank", "8"]
            with pytest.raises(SystemExit) as stop:
                main(["quantize", str(model), str(out), "--format", form, "-q", *options])
            assert stop.value.code == 0
            extra = {"group_size": 64} if form == "w4a16" else {}
            built[form] = model, out, config(form, **extra, **({} if nearest else {"rank": 8}))
        return built[form]

    return build


# on average: 4-bit activations cost some 10 %, 4-bit weights alone less, 8-bit weights a twentieth of it
BOUNDS = {"w4a4": (0.04, 0.2), "w4a16": (0.02, 0.12), "w8a16": (0.002, 0.02), "nf4": (0.04, 0.15), "nvfp4": (0.04, 0.2)}


@pytest.mark.parametrize("form", list(FORMATS))
def test_a_run_is_verified_on_held_out_text(quantized_format, heldout_ids, svdq, tmp_path, form):
    model, file, _ = quantized_format(form)
    report = tmp_path / "report.json"
    options = ["--model", model, "--data", heldout_ids, "--min-tokens", "1", "--json", report]
    result = svdq("verify", file, *options)
    assert result.code == 0, result.out + result.err
    numbers = json.loads(report.read_text())
    assert numbers["format"] == form and form.upper() in result.out
    errors = [layer["quantization_error"] for layer in numbers["layers"]]
    low, high = BOUNDS[form]
    assert low < sum(errors) / len(errors) < high
    assert all(layer["kernel_error"] < 1e-6 and layer["roundtrip"] for layer in numbers["layers"])


@pytest.mark.parametrize("form", list(FORMATS))
def test_inspect_names_the_format(quantized_format, svdq, form):
    _, file, _ = quantized_format(form)
    result = svdq("inspect", file)
    assert result.code == 0 and f"canonical {form.upper()} checkpoint" in result.out


@pytest.mark.parametrize("form", list(FORMATS))
def test_the_header_says_what_the_numbers_are(quantized_format, form):
    _, file, layer = quantized_format(form)
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["quantization_config"])
    dtypes = {"w4a4": "int4", "w4a16": "uint4", "w8a16": "int8", "nf4": "nf4", "nvfp4": "float4_e2m1"}
    assert header["format"] == form and header["weight"]["dtype"] == dtypes[form]
    assert (header["activation"] is None) == (form in ("w4a16", "w8a16", "nf4"))
    assert header["rank"] == layer.rank


def test_a_layer_of_the_file_computes_what_its_tensors_say(quantized_format):
    """A loop over rows and groups, from the stored tensors alone."""
    _, file, _ = quantized_format("w4a16")
    tensors, opened = load_file(file), open_quantized(file)
    name = next(iter(opened.layers))
    words, scales, zeros = (tensors[f"{name}.{suffix}"] for suffix in ("qweight", "w_scales", "w_zeros"))
    for row in (0, 5):
        for k in (0, 7, 64, 127):
            code = (words[row, k // 8].item() >> (4 * (k % 8))) & 0xF
            value = (code - zeros[row, k // 64].item()) * scales[row, k // 64].item()
            assert opened.layer(name).weight_hat()[row, k].item() == pytest.approx(value, rel=1e-6)


ORDERS = [("w4a4", "mma"), ("w4a16", "rows"), ("w8a16", "rows"), ("nf4", "rows"), ("nvfp4", "mma"), ("nvfp4", "rows")]


@pytest.mark.parametrize("form, order", ORDERS)
def test_a_packed_file_holds_the_same_layers(quantized_format, heldout_ids, svdq, tmp_path, form, order):
    model, file, _ = quantized_format(form)
    out = tmp_path / "packed.safetensors"
    result = svdq("export-packed", file, out, "--layout", order)
    assert result.code == 0 and f"packed for {order}" in result.out, result.err
    one, other = open_quantized(file), open_quantized(out)
    for name in one.layers:
        a, b = one.layer(name), other.layer(name)
        assert torch.equal(a.weight_hat(), b.weight_hat()) and torch.equal(a.proj_up, b.proj_up)
        assert torch.equal(a.proj_down, b.proj_down) and (a.bias is None) == (b.bias is None)
        assert a.transform.same(b.transform)
    result = svdq("verify", out, "--model", model, "--data", heldout_ids, "--min-tokens", "1")
    assert result.code == 0, result.out + result.err
    refused = svdq("export-packed", out, tmp_path / "again.safetensors")
    assert refused.code == 2 and "already packed" in refused.err


@pytest.mark.parametrize("form, order", [("w4a4", "rows"), ("w8a16", "mma")])
def test_an_order_that_a_format_has_not_is_refused(quantized_format, svdq, tmp_path, form, order):
    _, file, _ = quantized_format(form)
    refused = svdq("export-packed", file, tmp_path / "packed.safetensors", "--layout", order)
    assert refused.code == 2 and f"--layout {order}" in refused.err


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "w4a4"])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_loaded_model_computes_what_its_layers_say(quantized_format, form, kernels):
    model, file, _ = quantized_format(form)
    loaded, opened = load_quantized(model, file, kernels=kernels), open_quantized(file)
    assert loaded.svdq_path.startswith(form.upper())
    x = normal(5, 128, seed=9)
    for name in [name for name in opened.layers if opened.layers[name][1] == 128][:3]:
        layer, module = opened.layer(name), loaded.get_submodule(name)
        x_hat = layer.transform.approximate(x, torch.float64)
        wanted = x_hat @ layer.weight_hat(torch.float64).t()
        wanted += (x.double() @ layer.proj_down.double()) @ layer.proj_up.double().t()
        wanted += 0 if layer.bias is None else layer.bias.double()
        assert (module(x).double() - wanted).norm() / wanted.norm() < 1e-6
        assert torch.equal(module(x[:, None]), module(x)[:, None])


def test_a_loaded_model_keeps_its_types_when_it_is_cast(quantized_format):
    model, file, _ = quantized_format("w4a16")
    loaded = load_quantized(model, file).half()
    module = next(one for one in loaded.modules() if isinstance(one, StoredLinear))
    assert module.qweight.dtype == torch.int32 and module.w_scales.dtype == torch.float16


def test_layers_of_other_formats_are_not_fused(quantized_format):
    model, file, _ = quantized_format("w8a16")
    with pytest.raises(ConfigError, match="fuse: knows w4a4 alone"):
        load_quantized(model, file, fuse=True)


def test_formats_of_16_bit_activations_read_any_store(toy, calibration_ids, svdq, tmp_path):
    model, store = toy("qwen2"), tmp_path / "store"
    assert svdq("calibrate", model, "-o", store, "--data", calibration_ids, "--min-tokens", "1").code == 0
    for name, source in (("a", ["--calib", store]), ("b", ["--data", calibration_ids, "--min-tokens", "1"])):
        out = tmp_path / f"{name}.safetensors"
        result = svdq("quantize", model, out, *source, "--format", "w4a16", "--group-size", "64")
        assert result.code == 0, result.err
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    refused = svdq("quantize", model, tmp_path / "c.safetensors", "--calib", store, "--format", "nvfp4")
    assert refused.code == 2 and "calibrate with --format nvfp4" in refused.err


def test_rounding_to_nearest_wants_no_data(toy, calibration_ids, svdq, tmp_path):
    model = toy("qwen2")
    out = tmp_path / "out.safetensors"
    refused = svdq("quantize", model, out, "--format", "w8a16", "--data", calibration_ids)
    assert refused.code == 2 and "looks at no data" in refused.err
    refused = svdq("quantize", model, out, "--format", "w4a16", "--group-size", "64")
    assert refused.code == 2 and "wanted --calib CALIB_DIR" in refused.err
    result = svdq("quantize", model, out, "--format", "w4a16", "--group-size", "64", "--objective", "nearest")
    assert result.code == 0 and "of the weights, rounded to nearest" in result.out


def test_a_width_that_the_group_does_not_divide_names_one_that_does(toy, svdq, tmp_path):
    refused = svdq("quantize", toy("qwen2"), tmp_path / "out.safetensors", "--format", "w4a16", "--dry-run")
    assert refused.code == 2 and "take --group-size 64" in refused.err


def test_a_file_whose_format_is_unknown_is_refused(quantized_format, svdq, tmp_path):
    _, file, _ = quantized_format("w8a16")
    raw = file.read_bytes().replace(rb"\"format\": \"w8a16\"", rb"\"format\": \"w7a16\"")
    (tmp_path / "bad.safetensors").write_bytes(raw)
    result = svdq("inspect", tmp_path / "bad.safetensors")
    assert result.code == 2 and "its format is 'w7a16'" in result.err
