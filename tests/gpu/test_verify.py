"""svdq verify --kernels cuda on a card: the kernels compute what the file says, layer by layer and as a model."""

import json

import pytest
import torch

from svdq.layer_checks import KernelLinear, kernel_errors
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def numbers(quantized, ids_file, svdq, tmp_path):
    """numbers(kind, *options) → (the finished command, its JSON report) on 4,096 tokens."""

    def run(kind, *options):
        untied = {"tie_word_embeddings": False} if kind in ("llama", "gpt2") else {}  # logits of about 1
        directory, file = quantized(kind, **untied)
        ids, out = ids_file(tmp_path / "ids.jsonl", [64] * 64, seed=3), tmp_path / "report.json"
        data = ("--data", ids, "--samples", 64, "--seq-len", 64)
        result = svdq("verify", file, "--model", directory, *data, "--json", out, *options)
        return result, json.loads(out.read_text())

    return run


# without biases, with biases, transposed weights; an encoder, whose error would be tenfold without its linears
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "bert"])
def test_a_sound_file_passes_and_its_outputs_are_the_references(numbers, kind):
    result, found = numbers(kind, "--kernels", "cuda")
    assert result.code == 0, result.out
    assert "(CUDA kernels, float16)" in result.out and "all checks passed" in result.out
    assert found["kernels"] == "cuda" and found["notes"] == []
    assert all(row["kernel_error"] < 1e-6 and row["codes_differ"] == 0 for row in found["layers"])
    plain = numbers(kind, "--kernels", "reference", "--device", "cuda")[1]
    (output,), (wanted,) = found["outputs"], plain["outputs"]
    assert output["tokens"] == 4096
    number = "state_error" if wanted["quantized"] is None else "quantized"
    # codes near a tie flip, which moves either number by 0.4 % at most in five draws on a CPU
    assert output[number] == pytest.approx(wanted[number], rel=1e-2)
    if number == "quantized":
        assert output["original"] == pytest.approx(wanted["original"], rel=1e-6)


def test_a_packed_bfloat16_file_passes(quantized, heldout_ids, read_ids, svdq, tmp_path):
    directory, file = quantized("qwen2")
    packed = tmp_path / "packed.safetensors"
    assert svdq("export-packed", file, packed, "--dtype", "bfloat16").code == 0
    data = [read_ids(heldout_ids)]
    report = verify(open_model(directory), open_quantized(packed), data=data, device="cuda", kernels="cuda")
    assert report.failures == [] and {row.kernel_dtype for row in report.layers} == {"bfloat16"}


def test_a_sound_file_passes_without_data_on_the_last_card(quantized):
    directory, file = quantized("llama")
    device = f"cuda:{torch.cuda.device_count() - 1}"
    report = verify(open_model(directory), open_quantized(file), device=device, kernels="cuda")
    assert report.failures == [] and len(report.layers) == 14


@pytest.mark.parametrize("change", [
    lambda packed: packed.wscales.view(-1)[5].mul_(2),
    lambda packed: packed.qweight.view(-1)[9].bitwise_xor_(0x04),
], ids=["scale", "code"])  # fmt: skip
def test_a_wrong_operand_of_the_kernels_is_a_kernel_error(quantized, change):
    layer = open_quantized(quantized("llama")[1]).layer("model.layers.1.mlp.up_proj").to(torch.device("cuda"))
    linear, x = KernelLinear(layer, torch.float16), torch.randn(40, 128, generator=torch.Generator().manual_seed(3))
    assert kernel_errors(linear, x)["kernel_error"] < 1e-6
    change(linear.packed)
    found = kernel_errors(linear, x)
    assert found["kernel_error"] > 1e-4 and found["codes_differ"] == 0
