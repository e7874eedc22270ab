"""The demo's checkpoint through the CUDA kernels: kernel error of every linear, perplexity beside the reference's.

python benchmarks/smollm2_kernels.py MODEL_DIR OUT.safetensors IDS.jsonl [--device cuda|cpu]

MODEL_DIR needs config.json only; IDS.jsonl holds rows of input_ids (--write-ids TEXT makes it from a text, with
MODEL_DIR's tokenizer). Kernel errors are taken on the inputs that each linear sees in the first 512 tokens.
Perplexities are of the quantized model: the kernels with float16 activations, the reference with the same, and the
reference in float32; on a CPU the last two.
"""

import argparse
import json
from pathlib import Path

import torch

from svdq import load_quantized
from svdq.layer_checks import KernelLinear, kernel_errors
from svdq.linear import W4A4Linear
from svdq.quantized import open_quantized

LENGTH, SEQUENCES, BATCH = 512, 800, 8
LAYER_TOKENS = 512


def write_ids(model_dir, text, out):
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model_dir)(Path(text).read_text())["input_ids"]
    rows = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH + 1, LENGTH)][:SEQUENCES]
    Path(out).write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))


@torch.no_grad()
def perplexity(model, rows, device):
    losses = []
    for start in range(0, len(rows), BATCH):
        ids = torch.tensor(rows[start : start + BATCH], device=device)
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1).float()
        losses.append(torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none").double())
    return torch.cat(losses).mean().exp().item()


@torch.no_grad()
def errors(model, file, rows, device):
    """name → kernel_errors of the layer on its inputs in the first tokens of the first row."""
    quantized, inputs = open_quantized(file), {}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, W4A4Linear)}

    def keep(name):
        return lambda module, arguments: inputs.setdefault(name, arguments[0].flatten(0, -2)[:LAYER_TOKENS])

    handles = [module.register_forward_pre_hook(keep(name)) for name, module in linears.items()]
    model(input_ids=torch.tensor([rows[0]], device=device))
    for handle in handles:
        handle.remove()
    return {
        name: kernel_errors(KernelLinear(quantized.layer(name).to(device), torch.float16), x)
        for name, x in inputs.items()
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model_dir")
    parser.add_argument("file")
    parser.add_argument("ids")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--write-ids", metavar="TEXT")
    arguments = parser.parse_args()
    if arguments.write_ids:
        return write_ids(arguments.model_dir, arguments.write_ids, arguments.ids)
    rows = [json.loads(line)["input_ids"] for line in Path(arguments.ids).read_text().splitlines()]
    device = torch.device(arguments.device)
    runs = [("reference, float16", torch.float16, "reference"), ("reference, float32", torch.float32, "reference")]
    if device.type == "cuda":
        runs.insert(0, ("kernels, float16", torch.float16, "auto"))
    for label, dtype, kernels in runs:
        model = load_quantized(arguments.model_dir, arguments.file, device=device, dtype=dtype, kernels=kernels)
        print(f"perplexity, {device.type}, {label}: {perplexity(model, rows, device):.4f}", flush=True)
        if kernels == "auto":
            found = errors(model, arguments.file, rows, device)
            worst = sorted(found, key=lambda name: -found[name]["kernel_error"])
            print(f"{len(found)} linears, {sum(row['codes_differ'] for row in found.values())} codes or scales differ")
            for name in worst:
                print(f"  {found[name]['kernel_error']:.2e}  {name}")


if __name__ == "__main__":
    main()
