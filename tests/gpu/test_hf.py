"""A directory through transformers on a card: packed there, run by the kernels, saved with the bytes it was loaded."""

import pytest
import torch
import transformers

from svdq import SvdqConfig
from svdq.directory import open_shards
from svdq.linear import W4A4Linear, load_quantized

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
IDS = torch.tensor([[5, 17, 101, 3, 44, 199, 0, 62, 62, 130, 8, 71]])


def load(path, kind, **options):
    auto = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=torch.float16, **options)


def states(model, device="cuda:0"):
    with torch.no_grad():
        return model(input_ids=IDS.to(device))[0]


def devices(model):
    return {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize("device_map", ["auto", "cuda:0", {"": 0}])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_it_runs_the_kernels_as_load_quantized_does(as_directory, kind, device_map):
    if device_map == "auto":
        pytest.importorskip("accelerate")
    source, file, out = as_directory(kind)
    model = load(out, kind, device_map=device_map)
    assert devices(model) == {"cuda:0"} and "tensor cores" in model.svdq_path
    wanted = load_quantized(source, file, device="cuda:0", dtype=torch.float16)
    assert torch.equal(states(model), states(wanted))


def test_a_model_moved_to_the_card_is_the_one_loaded_there(as_directory):
    _, _, out = as_directory("qwen3")
    moved = load(out, "qwen3").to("cuda:0")
    assert torch.equal(states(moved), states(load(out, "qwen3", device_map="cuda:0")))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_what_was_packed_on_the_card_is_saved_with_the_same_bytes(as_directory, tmp_path, kind):
    _, _, out = as_directory(kind)
    model = load(out, kind, device_map="cuda:0")
    model.save_pretrained(tmp_path)
    saved, read = open_shards(tmp_path), open_shards(out)
    quantized = [
        name for name in read.tensors if name.endswith(("qweight", "scales", "proj_down", "proj_up", "smooth"))
    ]
    assert quantized and all(torch.equal(saved.read(name), read.read(name)) for name in quantized)
    again = load(tmp_path, kind, device_map="cuda:0")
    assert torch.equal(states(again), states(model))


def test_generate_on_the_card(as_directory):
    _, _, out = as_directory("llama")
    model = load(out, "llama", device_map="cuda:0")
    written = model.generate(IDS.to("cuda:0"), max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert written.shape == (1, IDS.shape[1] + 5) and written.device.type == "cuda"


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_the_reference_on_the_card_needs_no_kernels(as_directory, distance):
    _, _, out = as_directory("llama")
    model = load(out, "llama", device_map="cuda:0", quantization_config=SvdqConfig(kernels="reference"))
    assert model.svdq_path == "W4A4, in plain torch on cuda:0"
    kernels = load(out, "llama", device_map="cuda:0")
    assert distance(states(model).cpu(), states(kernels).cpu()) < 0.05  # float16 between layers; a code may flip


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_layers_on_two_cards_are_packed_each_on_its_own(as_directory):
    pytest.importorskip("accelerate")
    _, _, out = as_directory("llama")
    parts = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    model = load(out, "llama", device_map={**dict.fromkeys(parts, 0), "model.layers.1": 1})
    places = [str(m.qweight.device) for m in model.model.layers[1].modules() if isinstance(m, W4A4Linear)]
    assert places == ["cuda:1"] * 7
    assert torch.equal(states(model), states(load(out, "llama", device_map="cuda:0")))
