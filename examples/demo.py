"""The main job on a real language model: calibrate, quantize, verify, export; ends with one table.

Run by `make demo` after examples/fetch_smollm2.py and examples/fetch_texts.py. Every stage is a command that you could
type; each is printed before it runs.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from svdq.report import percent, size, table

DEMO = Path("build/demo")
MODEL, TEXTS, OUT = DEMO / "smollm2", DEMO / "texts", DEMO / "out"
STORE, CHECKPOINT, PACKED = OUT / "calibration", OUT / "w4a4.safetensors", OUT / "packed.safetensors"


def run(name, *arguments):
    """Run one svdq command; returns (its JSON numbers, seconds)."""
    print(f"\n$ svdq {name} {' '.join(map(str, arguments))}", flush=True)
    numbers = OUT / f"{name}.json"
    started = time.perf_counter()
    command = [Path(sys.executable).with_name("svdq"), name, *arguments, "--json", numbers]
    code = subprocess.run(list(map(str, command)), check=False).returncode
    if code:
        sys.exit(code)
    return json.loads(numbers.read_text()), time.perf_counter() - started


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    seconds = {}
    _, seconds["calibrate"] = run("calibrate", MODEL, "-o", STORE, "--data", TEXTS / "calibration.txt", "--samples", 32)
    quantized, seconds["quantize"] = run("quantize", MODEL, CHECKPOINT, "--calib", STORE)
    texts = [TEXTS / "held_out.txt", TEXTS / "other_domain.txt"]
    data = [argument for text in texts for argument in ("--data", text)]
    verified, seconds["verify"] = run("verify", CHECKPOINT, "--model", MODEL, *data, "--samples", 8)
    packed, seconds["export-packed"] = run("export-packed", CHECKPOINT, PACKED)

    errors = [layer["quantization_error"] for layer in verified["layers"]]
    rows = [
        [
            "linears quantized",
            f"{len(quantized['layers'])} of {len(quantized['layers']) + len(quantized['left_16bit'])}",
        ],
        ["model file", f"{size(quantized['source_bytes'])} -> {size(quantized['output_bytes'])}"],
        ["packed file", size(packed["bytes"])],
        ["mean layer error, held-out text", percent(sum(errors) / len(errors))],
        ["largest kernel error", f"{max(layer['kernel_error'] for layer in verified['layers']):.1e}"],
    ]
    for label, output in zip(("same domain", "other domain"), verified["outputs"], strict=True):
        original, ours = output["original"], output["quantized"]
        rows.append([f"perplexity, {label}", f"{original:.2f} -> {ours:.2f} ({ours / original:.3f} x)"])
    rows += [[f"seconds, {stage}", f"{spent:.0f}"] for stage, spent in seconds.items()]
    rows.append(["seconds, in all", f"{sum(seconds.values()):.0f}"])
    print("\n" + table(["SmolLM2-135M-Instruct", "W4A4, rank 16"], rows))


if __name__ == "__main__":
    main()
