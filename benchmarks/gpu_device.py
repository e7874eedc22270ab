"""The commands on one GPU: a Qwen3-0.6B-shaped backbone of random bfloat16 weights, calibrated, quantized, verified.

python benchmarks/gpu_device.py [FOLDER]    (results/gpu_device_h200.txt holds its output beside the gpu tests')
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3Model

VOCABULARY, SEQUENCES, LENGTH = 4096, 64, 512


def build(folder):
    """FOLDER/qwen: 28 blocks, hidden 1024, 16 heads of 128, 8 KV heads, MLP 3072; FOLDER/ids.jsonl: 32,768 tokens."""
    shape = dict(num_hidden_layers=28, hidden_size=1024, intermediate_size=3072, vocab_size=VOCABULARY)
    heads = dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    torch.manual_seed(0)
    Qwen3Model(Qwen3Config(**shape, **heads)).to(torch.bfloat16).save_pretrained(folder / "qwen")
    generator = torch.Generator().manual_seed(1)
    with (folder / "ids.jsonl").open("w") as rows:
        for _ in range(SEQUENCES):
            ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator).tolist()
            rows.write(json.dumps({"input_ids": ids}) + "\n")


def main():
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    build(folder)
    for command in (
        f"quantize qwen q.safetensors --data ids.jsonl --samples {SEQUENCES} --device cuda",
        "verify q.safetensors --model qwen --data ids.jsonl --device cuda",
    ):
        print(f"$ svdq {command}", flush=True)
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "svdq.cli.main", *command.split()], cwd=folder, check=True)
        print(f"seconds, start of the process included: {time.perf_counter() - started:.1f}", flush=True)


if __name__ == "__main__":
    main()
