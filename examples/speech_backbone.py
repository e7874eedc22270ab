"""A Qwen3-style speech backbone end to end: no tokenizer, no head, requests of many lengths.

python examples/speech_backbone.py [--hidden 512] [--layers 4] [--sequences 32]

The weights are random, so the figures say nothing about a trained model; what it shows is every step: calibrate from
rows of ids, quantize, verify on other rows, and run packed requests.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3Model

from svdq import PackedRunner, load_quantized, pipeline, report
from svdq.calibration.data import load_tokens
from svdq.config import CalibrationConfig, QuantConfig
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import verify

CODES = 1024  # speech tokens in the codebook


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequences", type=int, default=32, help="of 256 tokens, to calibrate on")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        return run(Path(work), options)


def run(work, options):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=CODES, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128, head_dim=64, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen3Model(config).eval().save_pretrained(work / "backbone")
    for name, count in (("calibration", options.sequences), ("held_out", 4)):
        rows = torch.randint(CODES, (count, 256)).tolist()
        (work / f"{name}.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))

    model = open_model(work / "backbone")
    calibration, held_out = (
        load_tokens(str(work / f"{name}.jsonl"), None, samples=options.sequences, seq_len=256, min_tokens=256, seed=0)
        for name in ("calibration", "held_out")
    )
    out = work / "w4a4.safetensors"
    summary = pipeline.quantize(model, out, QuantConfig(), data=calibration, calibration=CalibrationConfig())
    print(report.quantization_text(summary))
    checked = verify(model, open_quantized(out), data=[held_out])
    print(report.verification_text(checked, most=4))

    quantized = load_quantized(work / "backbone", out, fuse=True)  # on a GPU: device="cuda"
    runner = PackedRunner(quantized, max_sequences=8)
    requests = [torch.randint(CODES, (length,)) for length in (17, 100, 42)]
    packed = runner(torch.cat(requests), [len(one) for one in requests])
    with torch.no_grad():
        alone = torch.cat([quantized(input_ids=one[None])[0][0] for one in requests])
    difference = ((packed - alone).norm() / alone.norm()).item()
    print(f"3 requests packed: {tuple(packed.shape)}, from the same one by one: {difference:.1e}")
    return {"cosine": checked.outputs[0].state_cosine, "failures": checked.failures, "packed": difference}


if __name__ == "__main__":
    main()
