"""A sentence encoder: quantize a BERT-type model and compare the embeddings of sentences.

python examples/encoder.py [--hidden 384] [--layers 6] [--sentences 256]

The weights are random; with a model of your own, and its sentences, the last line is the figure to look at. Calibrate
on sequences about as long as the sentences: here 32 tokens.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch.nn import functional
from transformers import BertConfig, BertModel

from svdq import load_quantized, pipeline, report
from svdq.calibration.data import TokenData
from svdq.config import CalibrationConfig, QuantConfig
from svdq.models import open_model

WORDS, LENGTH = 1000, 32


def embed(model, sentences):
    """Mean of the final states, of unit length. sentences int64 (count, tokens)."""
    with torch.no_grad():
        return functional.normalize(model(input_ids=sentences)[0].float().mean(1), dim=-1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sentences", type=int, default=256, help="to calibrate on")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=options.hidden, intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, initializer_range=0.05,
    )  # fmt: skip
    original = BertModel(config).eval()
    sequences = list(torch.randint(WORDS, (options.sentences, LENGTH)))
    count = len(sequences)
    data = TokenData(sequences, "random words", count, 0, count, count * LENGTH, count * LENGTH)
    with tempfile.TemporaryDirectory() as work:
        directory, out = Path(work) / "encoder", Path(work) / "w4a4.safetensors"
        original.save_pretrained(directory)
        summary = pipeline.quantize(
            open_model(directory), out, QuantConfig(), data=data, calibration=CalibrationConfig()
        )
        print(report.quantization_text(summary))
        quantized = load_quantized(directory, out)  # on a GPU: device="cuda"
    sentences = torch.randint(WORDS, (64, LENGTH))
    cosine = functional.cosine_similarity(embed(original, sentences), embed(quantized, sentences)).mean().item()
    print(f"mean cosine of 64 new sentences' embeddings with the original's: {cosine:.4f}")
    return {"cosine": cosine}


if __name__ == "__main__":
    main()
