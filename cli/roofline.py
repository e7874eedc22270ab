"""svdq roofline: the least time that a model's linears and attention can take on a GPU, format by format."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("roofline")
@click.argument("model_dir")
@click.option("--tokens", type=click.IntRange(1), default=700, show_default=True, help="Tokens in one step.")
@click.option("--gpu", default="auto", show_default=True, help="l4, a100, h200, rtx4090, …, or the one here.")
@click.option("--rank", type=click.IntRange(0), default=16, show_default=True, help="Of the low-rank part.")
@click.option("--full-attention", is_flag=True, help="Every token sees all: an encoder. Default: those before it.")
@click.option("--measure", is_flag=True, help="Measure the GPU here, and how near torch's 16-bit linears come.")
@click.option("--plot", "plot_file", metavar="FILE", callback=options.check_plot, help="Draw it: .png or .svg.")
@options.remote_code
@options.output_options
def command(model_dir, tokens, gpu, rank, full_attention, measure, plot_file, trust_remote_code, json_file, quiet):
    """FLOP, bytes, bounds and floors of MODEL_DIR's blocks in FP16, W8A8, W4A8 and W4A4; reads no weight."""
    import torch

    from svdq import report, roofline
    from svdq.cli.inputs import open_inputs
    from svdq.errors import ConfigError

    card, timed = roofline.find_gpu(gpu), None
    if plot_file:
        roofline.require_plot()
    if measure:
        if not torch.cuda.is_available():
            raise ConfigError("--measure: found no CUDA device; leave it out for the datasheet's rates")
        where = torch.device("cuda")
        card = roofline.measured(card, where, torch.float16)
        timed = roofline.timer(where, torch.float16)
    console = options.Console(quiet, json_file)
    model = open_inputs(model_dir, [], trust_remote_code)
    found = roofline.rows(model, tokens, card, rank=rank, causal=not full_attention, timed=timed)
    facts = report.roofline_facts(found, card, tokens)
    console.say(report.roofline_text(facts))
    if plot_file:
        roofline.plot(found, card, plot_file)
    options.write_report(json_file, facts)
    return 0
