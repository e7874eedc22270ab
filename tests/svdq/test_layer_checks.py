"""The kernel error: that of the operators on packed operands alone, and a named failure for every wrong operand.

On a CPU the operators run their reference implementation, so all but the kernels themselves is tested here.
"""

from dataclasses import replace

import pytest
import torch

from svdq import layer_checks, report
from svdq.errors import CheckpointError, ConfigError
from svdq.kernels.ops import FEW_TOKENS, SMALL_M
from svdq.layer_checks import KernelLinear, kernel_dtype, kernel_errors
from svdq.linear import W4A4Linear
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import verify

UP = "model.layers.1.mlp.up_proj"
HALVES = [torch.float16, torch.bfloat16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=["f16", "bf16"])


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def up(quantized):
    """up(dtype) → the linear UP of a llama as the kernels run it."""
    layer = open_quantized(quantized("llama")[1]).layer(UP)
    return lambda dtype=torch.float16: KernelLinear(layer, dtype)


@pytest.fixture
def gemm(monkeypatch):
    """gemm(change) → a list of the (m, output type) of every later call, whose outputs go through change(y)."""
    operator = torch.ops.svdq.w4a4_gemm_lora

    def replace_by(change=lambda y: y):
        calls = []

        def run(*arguments):
            calls.append((arguments[7], arguments[9]))
            return change(operator(*arguments))

        monkeypatch.setattr(torch.ops.svdq, "w4a4_gemm_lora", run)
        return calls

    return replace_by


@pytest.fixture
def check(read_ids, monkeypatch):
    """check(directory, file, *ids) → the report of a run whose kernels are the operators on a CPU."""
    monkeypatch.setattr("svdq.verify.require_kernels", lambda device: None)

    def run(directory, file, *ids, kernels="cuda"):
        data = [read_ids(path) for path in ids]
        return verify(open_model(directory), open_quantized(file), data=data, kernels=kernels)

    return run


@pytest.fixture
def with_operands(monkeypatch):
    """with_operands(name, change): change(packed) is applied to the packed operands of this layer from now on."""

    def install(name, change):
        def build(layer):
            packed = W4A4Linear(layer)
            if layer.name == name:
                change(packed)
            return packed

        monkeypatch.setattr(layer_checks, "linear_of", build)

    return install


# ---- one layer


@halves
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_right_operands_have_float32_noise_as_kernel_error(quantized, kind, dtype):
    file = open_quantized(quantized(kind)[1])
    for name, (_, k, _, _) in file.layers.items():
        found = kernel_errors(KernelLinear(file.layer(name), dtype), normal(40, k))
        assert found["kernel_error"] < 1e-6  # sums of 192 float32 products, each good to 6e-8; no 16-bit rounding
        assert found["codes_differ"] == 0
        assert found["kernel_dtype"] == str(dtype).removeprefix("torch.")


@halves
def test_the_kernel_error_is_the_distance_from_the_stored_numbers(quantized, stored_layer, distance, gemm, up, dtype):
    gemm(lambda y: y + 0.01)
    x = normal(70, 128)
    wanted = stored_layer(quantized("llama")[1], UP)(x.to(dtype))
    # the first of them alone have other norms
    most = max(distance(part + 0.01, part) for part in (wanted, wanted[:FEW_TOKENS], wanted[:SMALL_M]))
    assert kernel_errors(up(dtype), x)["kernel_error"] == pytest.approx(most, rel=1e-4)


def test_all_tokens_and_the_first_few_are_run_with_float32_outputs(gemm, up):
    calls = gemm()
    kernel_errors(up(), normal(70, 128))
    assert calls == [(70, torch.float32), (64, torch.float32), (16, torch.float32)]


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 64, 65])
def test_few_held_out_tokens_still_reach_every_launch(gemm, up, tokens):
    calls = gemm()
    found = kernel_errors(up(), normal(tokens, 128))
    assert calls[0][0] > 64 and [call[0] for call in calls[1:]] == [64, 16]
    assert found["kernel_error"] < 1e-6 and found["codes_differ"] == 0


@pytest.mark.parametrize("wrong", [40, 64, 16])
@pytest.mark.parametrize("value", [0.1, float("nan")])
def test_an_error_of_one_launch_is_not_hidden_by_the_others(gemm, up, wrong, value):
    gemm(lambda y: y + value if len(y) == (80 if wrong == 40 else wrong) else y)
    assert not kernel_errors(up(), normal(40, 128))["kernel_error"] < 1e-2


WRONG = {
    "a doubled weight scale": lambda packed: packed.wscales.view(-1)[5].mul_(2),
    "a flipped code": lambda packed: packed.qweight.view(-1)[9].bitwise_xor_(0x04),
    "a lost column of proj_up": lambda packed: packed.up.view(-1)[:16].zero_(),
    "a lost column of proj_down": lambda packed: packed.down.view(-1)[:16].zero_(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_operand_is_a_kernel_error(up, what):
    linear = up()
    WRONG[what](linear.packed)
    found = kernel_errors(linear, normal(40, 128))
    assert found["kernel_error"] > 1e-4 and found["codes_differ"] == 0


def test_a_wrong_bias_is_a_kernel_error(quantized):
    name = "transformer.h.1.mlp.c_fc"
    linear = KernelLinear(open_quantized(quantized("gpt2")[1]).layer(name), torch.float16)
    linear.packed.packed_bias.view(-1)[3] += 1
    assert kernel_errors(linear, normal(40, 128))["kernel_error"] > 1e-3


def test_a_smoothing_that_is_not_the_layers_changes_codes(up):
    linear = up()
    linear.packed.inv_smooth[3] *= 1.5
    found = kernel_errors(linear, normal(40, 128))
    assert found["codes_differ"] > 40 and found["kernel_error"] > 1e-3


def test_a_code_or_scale_that_is_one_step_off_is_counted(up, monkeypatch):
    operator = torch.ops.svdq.quantize_lora_down

    def off(*arguments):
        codes, scales, t = operator(*arguments)
        codes[0, 0] ^= 1
        scales[0, 0] = scales[0, 0].nextafter(scales.new_tensor(9.0))
        return codes, scales, t

    monkeypatch.setattr(torch.ops.svdq, "quantize_lora_down", off)
    assert kernel_errors(up(), normal(40, 128))["codes_differ"] == 6  # a code and a scale, in three launches


def test_inputs_beyond_float16_are_taken_in_bfloat16(up):
    linear, x = up(), normal(40, 128)
    x[2, 7] = 1e6
    found = kernel_errors(linear, x)
    assert found["kernel_dtype"] == "bfloat16"
    assert found["kernel_error"] < 1e-6 and found["codes_differ"] == 0
    assert linear(x).isfinite().all() and linear.dtype == torch.bfloat16


def test_outputs_beyond_float16_are_computed_in_bfloat16(up, distance):
    layer = up().layer
    linear = KernelLinear(replace(layer, bias=torch.full((192,), 1e5)), torch.float16)
    x = normal(40, 128)
    y = linear(x)
    assert linear.dtype == torch.bfloat16 and y.dtype == torch.float32
    assert distance(y, torch.full((40, 192), 1e5)) < 1e-2  # a bfloat16 is good to 4e-3


def test_inputs_that_are_not_finite_stay_in_float16(up):
    linear, x = up(), normal(40, 128)
    x[2, 7] = float("inf")
    assert linear(x)[2].isnan().all() and linear.dtype == torch.float16


# ---- the 16-bit type


def test_the_type_is_bfloat16_where_config_json_or_the_packed_file_says_so(toy, quantized, svdq, tmp_path):
    directory, file = quantized("llama")
    packed = tmp_path / "packed.safetensors"
    assert svdq("export-packed", file, packed, "--dtype", "bfloat16").code == 0
    plain, wide = open_model(directory), open_model(toy("llama", dtype=torch.bfloat16))
    half = open_model(toy("llama", dtype=torch.float16))
    found = [kernel_dtype(model, open_quantized(path)) for model in (plain, half, wide) for path in (file, packed)]
    f16, bf16 = HALVES
    assert found == [f16, bf16, f16, bf16, bf16, bf16]


def test_the_type_is_that_of_the_weights_where_config_json_names_none(toy_copy, quantized):
    model, file = open_model(toy_copy("llama", dtype=torch.bfloat16)), open_quantized(quantized("llama")[1])
    for key in ("dtype", "torch_dtype"):
        model.config.pop(key, None)
    assert kernel_dtype(model, file) == torch.bfloat16
    model.config["torch_dtype"] = "float16"  # as older versions of transformers spell it
    assert kernel_dtype(model, file) == torch.float16


# ---- whole files


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "bert", "albert"])
def test_a_sound_file_passes_through_the_operators(quantized, ids_file, check, tmp_path, kind):
    # 16-bit inputs flip codes near a tie: over this many tokens, and logits of about 1, that moves either number by
    # 0.4 % at most in five draws. Linears that put out nothing move the encoders' tenfold.
    untied = {"tie_word_embeddings": False} if kind in ("llama", "gpt2") else {}
    directory, file = quantized(kind, **untied)
    ids = ids_file(tmp_path / "ids.jsonl", [64] * 64, seed=3)
    found, plain = (check(directory, file, ids, kernels=kernels) for kernels in ("cuda", "reference"))
    assert (found.failures, found.notes) == ([], [])
    assert (found.kernels, plain.kernels) == ("cuda", "reference")
    for row, other in zip(found.layers, plain.layers, strict=True):
        assert row.kernel_error < 1e-6
        assert (row.codes_differ, row.kernel_dtype) == (0, "float16")
        assert (other.codes_differ, other.kernel_dtype) == (None, "float32")
        assert (row.quantization_error, row.token_error) == (other.quantization_error, other.token_error)
    output, wanted = found.outputs[0], plain.outputs[0]
    assert output.original == wanted.original
    number = "state_error" if wanted.quantized is None else "quantized"
    assert getattr(output, number) == pytest.approx(getattr(wanted, number), rel=1e-2)


def test_a_packed_bfloat16_file_passes_through_the_operators(quantized, heldout_ids, check, svdq, tmp_path):
    directory, file = quantized("qwen2")
    packed = tmp_path / "packed.safetensors"
    assert svdq("export-packed", file, packed, "--dtype", "bfloat16").code == 0
    found = check(directory, packed, heldout_ids)
    assert found.failures == [] and {row.kernel_dtype for row in found.layers} == {"bfloat16"}


def test_a_sound_file_passes_through_the_operators_without_data(quantized, check):
    found = check(*quantized("qwen2"))
    assert found.failures == [] and [row.codes_differ for row in found.layers] == [0] * 14
    assert max(row.kernel_error for row in found.layers) < 1e-6


def test_the_perplexity_is_that_of_the_operators(quantized, heldout_ids, check, with_operands):
    sound = check(*quantized("llama"), heldout_ids).outputs[0]
    with_operands(UP, lambda packed: packed.wscales.zero_())
    broken = check(*quantized("llama"), heldout_ids).outputs[0]
    assert broken.original == sound.original
    assert broken.quantized != pytest.approx(sound.quantized, rel=1e-3)


@pytest.mark.parametrize("with_data", [False, True], ids=["without data", "with data"])
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_operand_fails_naming_its_layer_alone(quantized, heldout_ids, check, with_operands, what, with_data):
    with_operands(UP, WRONG[what])
    found = check(*quantized("llama"), *([heldout_ids] if with_data else []))
    assert len(found.failures) == 1 and found.failures[0].startswith(f"{UP}: kernel error")


def test_codes_that_differ_fail_naming_the_layer(quantized, heldout_ids, check, with_operands):
    with_operands(UP, lambda packed: packed.inv_smooth[3].mul_(1.5))
    found = check(*quantized("llama"), heldout_ids)
    row = next(row for row in found.layers if row.name == UP)
    assert (
        row.codes_differ > 0 and row.codes_differ == found.to_dict()["layers"][found.layers.index(row)]["codes_differ"]
    )
    assert f"{UP}: {row.codes_differ} activation codes or scales of its kernel are not the CPU's" in found.failures


def test_an_overflow_of_float16_is_noted(quantized, heldout_ids, check, monkeypatch):
    last = "model.layers.1.mlp.down_proj"

    class Loud(KernelLinear):
        def __call__(self, x):
            return super().__call__(x * (1e6 if self.layer.name == last else 1))

    monkeypatch.setattr("svdq.verify.KernelLinear", Loud)
    found = check(*quantized("llama"), heldout_ids)
    assert found.notes == [f"{last}: float16 overflows on this data, its kernels ran in bfloat16"]


def test_the_text_says_which_path_ran(quantized, check):
    for kernels, words in (("cuda", "(CUDA kernels, float16)"), ("reference", "(reference, float32)")):
        (line,) = [
            line
            for line in report.verification_text(check(*quantized("llama"), kernels=kernels)).splitlines()
            if line.startswith("14 linears")
        ]
        assert line.endswith(words) and "largest kernel error" in line


def test_numbers_that_the_kernels_cannot_hold_are_refused_by_name(quantized):
    layer = open_quantized(quantized("llama")[1]).layer(UP)
    layer.scales[0, 0] = float("inf")
    with pytest.raises(CheckpointError, match=UP):
        KernelLinear(layer, torch.float16)


# ---- without a GPU


def test_kernels_without_a_gpu_are_refused(quantized, monkeypatch):
    directory, file = quantized("llama")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="found no CUDA device"):
        verify(open_model(directory), open_quantized(file), kernels="cuda")
    with pytest.raises(ConfigError, match="wanted reference or cuda"):
        verify(open_model(directory), open_quantized(file), kernels="fast")


@pytest.mark.parametrize(("gpu", "device", "words"), [
    (False, "auto", ["--kernels cuda", "no CUDA device", "--kernels reference"]),
    (False, "cpu", ["--kernels cuda", "no CUDA device", "--kernels reference"]),
    (False, "cuda", ["--device cuda", "0 CUDA devices"]),
    (True, "cpu", ["--kernels cuda", "device is cpu", "--device cuda"]),
])  # fmt: skip
def test_the_command_without_a_gpu_is_one_line_before_any_file_is_read(refused, monkeypatch, gpu, device, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpu))
    message = refused("verify", "nowhere", "--model", "nowhere", "--kernels", "cuda", "--device", device)
    assert [word for word in words if word not in message] == [], message


def test_a_gpu_or_library_that_is_not_enough_is_one_line(refused, monkeypatch):
    from svdq.kernels.compile import KernelError

    def lacking(device):
        raise KernelError(f"the Python package cuda-core is missing, wanted for {device}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(layer_checks, "require", lacking)
    assert "cuda-core" in refused("verify", "nowhere", "--model", "nowhere", "--kernels", "cuda")
