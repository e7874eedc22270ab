"""Tiny models, token files and finished runs that several test files share, each built once a session.

The models are random, yet not the near-zero ones that transformers initialises: every norm and bias is set too, so
that attention looks somewhere, logits differ and a forgotten bias shows.
"""

import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)  # on matrices this small, threads wait for each other longer than they compute

VOCABULARY = 200
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}
_GROUPED = {"num_key_value_heads": 1, "head_dim": 64}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 128, "n_inner": 192, "n_layer": 2, "n_head": 2, "n_positions": 256}
KINDS = {  # kind: (architecture, configuration, its values)
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_COMMON, **_GROUPED, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_COMMON, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_COMMON, **_GROUPED}),
    "qwen3_base": ("Qwen3Model", "Qwen3Config", {**_COMMON, **_GROUPED}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_COMMON, **_GROUPED, "sliding_window": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_COMMON,
            **_GROUPED,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 64,
        },
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", _COMMON),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_COMMON, "num_key_value_heads": 1, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "bos_token_id": 0, "eos_token_id": 0}),
    "bert": ("BertModel", "BertConfig", _COMMON),
    "albert": (
        "AlbertModel",
        "AlbertConfig",
        {**_COMMON, "embedding_size": 64, "num_hidden_layers": 3, "num_hidden_groups": 1},
    ),
}


def build_model(kind, **config):
    """A transformers model of random weights, equal for equal arguments. Torch's own random state is left alone."""
    architecture, configuration, values = KINDS[kind]
    parsed = getattr(transformers, configuration)(**{**values, **config})
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, architecture)(parsed)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                wide = "embed" in name or "wte" in name or "wpe" in name
                parameter.copy_(noise * (0.5 if wide else parameter.shape[-1] ** -0.5))
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            else:  # a norm's weight
                parameter.copy_(1 + 0.2 * noise)
    return model.eval()


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """toy(kind, *, shard=None, dtype=None, **config) → a model directory. Shared: copy it before changing it."""
    built = {}

    def build(kind, *, shard=None, dtype=None, **config):
        key = json.dumps([kind, shard, str(dtype), config], sort_keys=True)
        if key not in built:
            directory = tmp_path_factory.mktemp(kind)
            model = build_model(kind, **config)
            if dtype is not None:
                model = model.to(dtype)
            model.save_pretrained(directory, **({"max_shard_size": shard} if shard else {}))
            built[key] = directory
        return built[key]

    return build


@pytest.fixture
def toy_copy(toy, tmp_path):
    """The same, as a directory of the test's own."""

    def build(kind, name="model", **options):
        return shutil.copytree(toy(kind, **options), tmp_path / name)

    return build


def save_tokenizer(directory, *, eos=False):
    """One id a word, w0 … w199; beside a model it makes text readable. Neither pad nor eos token unless asked for."""
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"eos_token": "w1"} if eos else {}
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="w0", **names).save_pretrained(directory)


@pytest.fixture(scope="session")
def add_tokenizer():
    return save_tokenizer


def write_ids(path, lengths, seed, below=VOCABULARY):
    """Pre-tokenised rows of these lengths. Each token follows from the last by one of four rules, as in a language."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = [int(torch.randint(below, (), generator=generator))]
        for step in torch.randint(4, (length - 1,), generator=generator).tolist():
            ids.append((3 * ids[-1] + 7 * step + 1) % below)
        rows.append(ids)
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def ids_file():
    return write_ids


@pytest.fixture(scope="session")
def calibration_ids(tmp_path_factory):
    """12 rows of 64: four tokens for each channel of the widest toy linear."""
    return write_ids(tmp_path_factory.mktemp("ids") / "calibration.jsonl", [64] * 12, seed=1)


@pytest.fixture(scope="session")
def heldout_ids(tmp_path_factory):
    """Rows of two lengths, so that there are several batches."""
    return write_ids(tmp_path_factory.mktemp("ids") / "heldout.jsonl", [64] * 5 + [40] * 2, seed=2)


@pytest.fixture(scope="session")
def read_ids():
    """read_ids(file) → TokenData with every row of it, one sequence each."""
    from svdq.calibration.data import load_tokens

    return lambda path: load_tokens(str(path), None, samples=10_000, seq_len=4096, min_tokens=1, seed=0)


@pytest.fixture(scope="session")
def quantized(toy, calibration_ids, read_ids, tmp_path_factory):
    """quantized(kind, preset='quality', linears_only=False, **config) → (model directory, file); shared."""
    from svdq import config as configs
    from svdq import pipeline
    from svdq.models import open_model

    built = {}

    def build(kind, preset="quality", linears_only=False, **config):
        key = json.dumps([kind, preset, linears_only, config], sort_keys=True)
        if key not in built:
            directory = toy(kind, **config)
            out = tmp_path_factory.mktemp(f"{kind}-{preset}") / "out.safetensors"
            activation, weight = configs.preset(preset)
            pipeline.quantize(
                open_model(directory),
                out,
                configs.QuantConfig(layer=configs.LayerConfig(**weight), linears_only=linears_only),
                data=read_ids(calibration_ids),
                calibration=configs.CalibrationConfig(**activation),
            )
            built[key] = (directory, out)
        return built[key]

    return build


@pytest.fixture(scope="session")
def as_directory(quantized, tmp_path_factory):
    """as_directory(kind, size=100_000, **options of quantized) → (model directory, file, the same as a directory)."""
    from functools import partial

    from svdq.checkpoint import Entry, open_file
    from svdq.directory import write_directory

    built = {}

    def build(kind, size=100_000, **options):
        key = json.dumps([kind, size, options], sort_keys=True)
        if key not in built:
            source, path = quantized(kind, **options)
            file = open_file(path)
            entries = [
                Entry(name, info.dtype, info.shape, partial(file.chunks, name)) for name, info in file.tensors.items()
            ]
            out = tmp_path_factory.mktemp(kind) / "quantized"
            write_directory(out, entries, file.metadata, source, size)
            built[key] = (source, path, out)
        return built[key]

    return build


@pytest.fixture
def svdq(capsys):
    """svdq(*arguments) → the command run in this process: code, out, err."""
    from svdq.cli.main import main

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=stop.value.code, out=out, err=err)

    return run


@pytest.fixture
def refused(svdq):
    """refused(*arguments) → the one line that the command prints before it exits with 2."""

    def run(*arguments):
        result = svdq(*arguments)
        assert result.code == 2, result
        assert result.err.endswith("\n") and result.err.count("\n") == 1, result.err
        assert "Traceback" not in result.err
        return result.err

    return run


@pytest.fixture
def python(tmp_path):
    """python(code, *arguments) → a finished interpreter, started in a directory without the sources."""

    def run(code, *arguments, **options):
        command = [sys.executable, "-c", code, *map(str, arguments)]
        options.setdefault("env", os.environ | {"OMP_NUM_THREADS": "1"})
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, **options)

    return run


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory):
    """A directory with every kernel compiled for every listed architecture. Shared: only read it."""
    from svdq.kernels import compile as kernels

    directory = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # one for all test processes
        directory = directory.parent
    directory = directory / "kernels"
    # in two processes: two threads of one compile 1.3 to 1.5 times as fast as one
    build = "import sys; from svdq.kernels import compile; [compile.build(arch) for arch in sys.argv[1:]]"
    env = {**os.environ, "SVDQ_CACHE_DIR": str(directory)}
    halves = kernels.ARCHITECTURES[0::2], kernels.ARCHITECTURES[1::2]
    with FileLock(f"{directory}.lock"):
        directory.mkdir(exist_ok=True)
        both = [subprocess.Popen([sys.executable, "-c", build, *half], cwd=directory, env=env) for half in halves]
        assert [process.wait() for process in both] == [0, 0]
    return directory


class StoredLayer:
    """One linear of a canonical file in float64, read and computed from the words of the format alone.

    Reads with the safetensors library, decodes nibbles in numpy; activation codes are float32 in the order that the
    format fixes, everything else is float64.
    """

    def __init__(self, path, name):
        with safe_open(path, "np") as file:
            keys = set(file.keys())
            config = json.loads(file.metadata()["quantization_config"])

            def get(suffix, absent=None):
                key = f"{name}.{suffix}"
                return file.get_tensor(key) if key in keys else absent

            packed = get("qweight").astype(np.int64)
            scales = get("w_scales").astype(np.float64)
            self.down, self.up = get("proj_down").astype(np.float64), get("proj_up").astype(np.float64)
            self.smooth, self.bias = get("smooth"), get("bias")
            self.clip = np.float32(get("act_clip", np.float32(1)))
        nibbles = np.stack([packed % 16, packed // 16], -1).reshape(len(packed), -1)
        self.codes = np.where(nibbles > 7, nibbles - 16, nibbles)
        self.weight_hat = self.codes * scales.repeat(self.codes.shape[1] // scales.shape[1], 1)
        self.rotation = config["rotation"] == "hadamard64"

    def quantized_input(self, x):
        x = np.asarray(x, dtype=np.float32)
        if self.smooth is not None:
            x = x * (np.float32(1) / self.smooth)
        groups = x.reshape(len(x), -1, 64)
        if self.rotation:
            for stage in range(6):
                pairs = groups.reshape(*groups.shape[:2], -1, 2, 1 << stage)
                first, second = pairs[..., 0, :], pairs[..., 1, :]
                groups = np.stack([first + second, first - second], -2).reshape(groups.shape)
            groups = groups * np.float32(0.125)
        absmax = np.abs(groups).max(-1, keepdims=True)
        scale = (absmax * self.clip if self.clip != 1 else absmax) / np.float32(7)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        codes = np.clip(np.round(groups * inverse), -8, 7)
        return (codes.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)

    def __call__(self, x):
        """x (..., k) tensor → (..., n) float64."""
        rows = x.reshape(-1, x.shape[-1]).double().numpy()
        y = self.quantized_input(rows) @ self.weight_hat.T + (rows @ self.down) @ self.up.T
        if self.bias is not None:
            y = y + self.bias.astype(np.float64)
        return torch.from_numpy(y).reshape(*x.shape[:-1], -1)


@pytest.fixture(scope="session")
def stored_layer():
    return StoredLayer


@pytest.fixture(scope="session")
def reference_model():
    """reference_model(directory, file) → the original model, its quantized linears replaced by `StoredLayer`."""
    from svdq.models import open_model

    def build(directory, file):
        model = load_original(directory)
        with safe_open(file, "np") as opened:
            names = set(json.loads(opened.metadata()["svdq.layers"]))
        for linear in open_model(directory).linears:
            if linear.name in names:
                layer = StoredLayer(file, linear.name)
                module = model.get_submodule(linear.module)
                module.forward = lambda x, layer=layer: layer(x).to(x.dtype)
        return model

    return build


def load_original(directory):
    """The directory's model, loaded by transformers itself, in float32."""
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def original():
    return load_original


@pytest.fixture(scope="session")
def distance():
    """distance(a, b) → ‖a − b‖ / ‖b‖, b being the expected one."""

    def relative(found, expected):
        found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
        return ((found - expected).norm() / expected.norm()).item()

    return relative
