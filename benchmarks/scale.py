"""Time and memory of calibrate + quantize on a model of a known shape with random weights, on one GPU or several.

python benchmarks/scale.py [--shape qwen3-0.6b,llama-8b] [--blocks N,M] [--gpus 1,2] [--store] [--device cuda]

Calibration reads 64 sequences of 512 random tokens, or --sequences of them. Several --blocks, with --only some linears
so that a CPU comes to an end, show whether memory grows with the model. The command is `svdq quantize --data`; with
--store, `svdq calibrate` and then `svdq quantize --calib`; on several --gpus, under torchrun. Seconds are the wall time
of the commands, starts included, and in brackets what svdq says of itself, without Python's start and imports. The peak
is torch's allocations on one GPU, or resident memory on a CPU; beside it, what `--dry-run` says. Weights are read from
files that were written just before. --verify adds `svdq verify`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, Qwen3Config

VOCABULARY, LENGTH = 4096, 512
SHAPES = {  # blocks, then what config.json says
    "toy": (2, Qwen3Config, dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
                                 head_dim=64)),
    "qwen3-0.6b": (28, Qwen3Config, dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
                                         num_key_value_heads=8, head_dim=128)),
    "llama-8b": (32, LlamaConfig, dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
                                       num_key_value_heads=8, head_dim=128)),
}  # fmt: skip


def build(folder, name, blocks, device, sequences):
    """FOLDER/model, one shard a block, and FOLDER/ids.jsonl."""
    _, kind, sizes = SHAPES[name]
    config = kind(vocab_size=VOCABULARY, num_hidden_layers=blocks, dtype="bfloat16", **sizes)
    config.architectures = [kind.__name__.replace("Config", "Model")]
    model = folder / "model"
    config.save_pretrained(model)
    hidden, wide, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    linears = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
               "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
               "mlp.down_proj": (hidden, wide)}  # fmt: skip
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if kind is Qwen3Config:
        norms |= {"self_attn.q_norm": head, "self_attn.k_norm": head}
    generator = torch.Generator(device).manual_seed(0)

    def draw(n, k):
        return (torch.randn(n, k, generator=generator, device=device) * 0.02).bfloat16().cpu()

    places = {}

    def shard(file, tensors):
        save_file(tensors, model / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))

    shard(
        "embeddings.safetensors", {"embed_tokens.weight": draw(VOCABULARY, hidden), "norm.weight": torch.ones(hidden)}
    )
    for block in range(blocks):
        tensors = {f"layers.{block}.{one}.weight": draw(*size) for one, size in linears.items()}
        tensors |= {f"layers.{block}.{one}.weight": torch.ones(size) for one, size in norms.items()}
        shard(f"block-{block}.safetensors", tensors)
    index = {"metadata": {}, "weight_map": places}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = torch.randint(0, VOCABULARY, (sequences, LENGTH), generator=torch.Generator().manual_seed(1)).tolist()
    (folder / "ids.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids))


def svdq(folder, command, gpus=1):
    """(the command's JSON, wall seconds)."""
    launcher = [sys.executable, "-m"]
    if gpus > 1:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", "-m"]
    started = time.perf_counter()
    subprocess.run([*launcher, "svdq.cli.main", *command.split(), "--json", "out.json", "-q"], cwd=folder, check=True)
    return json.loads((folder / "out.json").read_text()), time.perf_counter() - started


def measure(folder, options, gpus):
    device = f"--device {options.device}"
    read = f"--data ids.jsonl --samples {options.sequences} --seq-len {LENGTH} --min-tokens 1"
    only = " ".join(f"--only {pattern}" for pattern in options.only)
    read, stored = f"{read} {only}", only
    estimated, _ = svdq(folder, f"quantize model q.safetensors {read} --dry-run {device}")
    if not options.store:
        parts = {"quantize --data": svdq(folder, f"quantize model q.safetensors {read} {device}", gpus)}
    else:
        store = f"calibration-{gpus}"
        parts = {
            "calibrate": svdq(folder, f"calibrate model -o {store} {read} {device}", gpus),
            "quantize": svdq(folder, f"quantize model q.safetensors --calib {store} {stored} {device}", gpus),
        }
    if options.verify:
        parts["verify"] = svdq(folder, f"verify q.safetensors --model model --data ids.jsonl {device}")
    (folder / "q.safetensors").unlink()
    return {
        "seconds": {name: wall for name, (_, wall) in parts.items()},
        "own_seconds": {name: numbers.get("seconds") for name, (numbers, _) in parts.items()},
        "peak_bytes": {name: numbers.get("peak_bytes") for name, (numbers, _) in parts.items()},
        "estimated_bytes": estimated["memory_bytes"],
    }


def text(found):
    for name, wall in found["seconds"].items():
        own, peak, expected = found["own_seconds"][name], found["peak_bytes"][name], found["estimated_bytes"]
        expected = expected.get(name, max(expected.values()))
        yield (
            f"  {name:16} {wall:6.1f} s"
            + (f" ({own:.1f} s)" if own else "")
            + (f", peak {peak / 1e9:.2f} GB, estimated {expected / 1e9:.2f} GB" if peak else "")
        )
    yield f"  together         {sum(found['seconds'].values()):6.1f} s"


def numbers(text):
    return [int(one) for one in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b,llama-8b")
    parser.add_argument("--blocks", type=numbers, default=[0], help="in place of the shape's own number")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="quantize only these linears")
    parser.add_argument("--gpus", type=numbers, default=[1])
    parser.add_argument("--store", action="store_true", help="two commands, with a store between them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {card}", flush=True)
    results = {}
    for name, asked in product(options.shape.split(","), options.blocks):
        blocks = asked or SHAPES[name][0]
        with tempfile.TemporaryDirectory() as folder:
            build(Path(folder), name, blocks, options.device, options.sequences)
            size = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
            for gpus in options.gpus:
                what = f"{name}, {blocks} blocks, {size / 1e9:.1f} GB"
                print(f"\n{what}: {gpus} x {options.device}", flush=True)
                results[f"{what}, {gpus}"] = found = measure(Path(folder), options, gpus)
                print(*text(found), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
