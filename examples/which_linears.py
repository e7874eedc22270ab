"""Which linears, and how: patterns of names on a model of your own.

python examples/which_linears.py [--hidden 256] [--layers 4]

The first and last block's down projections stay in 16 bits, v gets a larger rank, o a larger group, everything else the
defaults. On the command line: --ignore, --only and --override, or a file of svdq plan.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from svdq import pipeline, preflight
from svdq.calibration.data import TokenData
from svdq.config import CalibrationConfig, LayerConfig, QuantConfig
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.report import table


def settings(layers):
    """A pattern matches whole parts of a dotted name, anywhere in it: 'layers.1' covers layers.1 and all inside it,
    never layers.10; '*' is any text within a part; 're:…' is a regular expression. Of overrides the later ones win."""
    return QuantConfig(
        layer=LayerConfig(rank=16),
        ignore=("layers.0.mlp.down_proj", f"layers.{layers - 1}.mlp.down_proj"),
        overrides=(
            ("v_proj", {"rank": 32}),
            ("self_attn.o_*", {"group_size": 128}),
            (r"re:layers\.1\..*v_proj", {"rank": 48}),
        ),
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=500, hidden_size=options.hidden, intermediate_size=2 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    sequences = list(torch.randint(500, (16, 128)))
    data = TokenData(sequences, "random ids", 16, 0, 16, 16 * 128, 16 * 128)
    config = settings(options.layers)
    with tempfile.TemporaryDirectory() as work:
        directory, out = Path(work) / "model", Path(work) / "w4a4.safetensors"
        LlamaForCausalLM(shape).save_pretrained(directory)
        model = open_model(directory)
        plan = preflight.plan(model, config)  # names every pattern that matches nothing, before a weight is read
        print(f"{len(plan.linears)} linears to quantize; in 16 bits: {', '.join(plan.left_16bit)}")
        pipeline.quantize(model, out, config, data=data, calibration=CalibrationConfig())
        layers = open_quantized(out).layers
    print(table(["linear", "N", "K", "rank", "group"], [[name, *sizes] for name, sizes in layers.items()]))
    return layers


if __name__ == "__main__":
    main()
