"""The other formats on a card: their kernels compute what the file says, layer by layer and as a model."""

import pytest
import torch

from svdq import pipeline
from svdq.config import FORMATS as DEFAULTS
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.linear import load_quantized
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
FORMS = ["w4a16", "w4a16, rank 8", "w8a16", "nf4", "nvfp4"]


@pytest.fixture(scope="module")
def quantized_format(toy, calibration_ids, read_ids, tmp_path_factory):
    """quantized_format(form) → (model directory, file); made on the card."""

    def build(form):
        form, _, rank = form.partition(", rank ")
        model, out = toy("qwen2"), tmp_path_factory.mktemp(form) / "out.safetensors"
        values = {"format": form, **DEFAULTS[form], **({"group_size": 64} if form == "w4a16" else {})}
        layer = LayerConfig(**values | ({"rank": int(rank)} if rank else {}))
        options = {}
        if layer.objective != "nearest":
            nvfp4 = {"activation": "nvfp4", "act_clip": 1.0} if form == "nvfp4" else {}
            options = {"data": read_ids(calibration_ids), "calibration": CalibrationConfig(**nvfp4)}
        pipeline.quantize(open_model(model), out, QuantConfig(layer), device="cuda", **options)
        return model, out

    return build


@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_compute_what_the_file_says(quantized_format, heldout_ids, read_ids, form):
    model, file = quantized_format(form)
    data = [read_ids(heldout_ids)]
    report = verify(open_model(model), open_quantized(file), data=data, device="cuda", kernels="cuda")
    assert report.failures == [] and report.notes == []
    most = 2e-4 if form == "nf4" else 1e-6  # NF4's kernel for few tokens holds its 16 levels in float16
    assert all(row.kernel_error < most for row in report.layers)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [3, 60])
def test_a_loaded_model_gives_the_logits_of_the_reference(quantized_format, heldout_ids, read_ids, form, length):
    model, file = quantized_format(form)
    ids = read_ids(heldout_ids).sequences[0][:length].cuda()[None]
    with torch.no_grad():
        ours, wanted = (
            load_quantized(model, file, device="cuda", dtype=torch.bfloat16, kernels=kernels)(ids).logits.float()
            for kernels in ("auto", "reference")
        )
    # of bfloat16: eight bits in every product's inputs and outputs; NVFP4's codes flip near ties
    assert (ours - wanted).norm() / wanted.norm() < (0.1 if form == "nvfp4" else 0.03)
