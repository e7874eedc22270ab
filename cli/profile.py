"""svdq profile: where the time of a model's forward goes, quantized or not."""

from __future__ import annotations

import click

from svdq.cli import options


def _check_trace(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value == "-":
        raise click.BadParameter("wanted the path of a file", context, parameter)
    return options.check_writable(context, parameter, value)


@click.command("profile")
@click.argument("model_dir")
@click.option("--quantized", metavar="FILE", help="Profile this file of svdq quantize or export-packed.")
@click.option("--tokens", type=click.IntRange(1), show_default="700, or all that the model takes",
              help="Random tokens in a step.")  # fmt: skip
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Profiled after one to warm up.")
@click.option("--fuse", is_flag=True, help="With --quantized: decoder layers on the kernels, see load_quantized.")
@click.option("--trace", metavar="FILE.json", callback=_check_trace, help="Write a Chrome/Perfetto trace.")
@options.remote_code
@options.device_option
@options.output_options
def command(model_dir, quantized, tokens, steps, fuse, trace, trust_remote_code, device, json_file, quiet):
    """Time by category, kernel count and launch gaps of MODEL_DIR's forward; on a CPU, by torch's operators."""
    import os

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines; read when torch is imported
    import torch

    from svdq import report
    from svdq.cli.inputs import longest_sequence, open_inputs
    from svdq.errors import ConfigError
    from svdq.linear import load_quantized
    from svdq.models import compute_dtype, materialize, resolve_device
    from svdq.profiling import profile

    if fuse and not quantized:
        raise ConfigError("--fuse: belongs to --quantized FILE")
    where = resolve_device(device)
    console = options.Console(quiet, json_file)
    model = open_inputs(model_dir, [], trust_remote_code)
    longest = longest_sequence(model)
    tokens = min(700, longest) if tokens is None else tokens
    if tokens > longest:
        raise ConfigError(f"--tokens {tokens}: the model takes {longest} at most")
    if quantized:
        tree = load_quantized(model_dir, quantized, device=where, fuse=fuse, trust_remote_code=trust_remote_code)
    else:
        materialize(model, "", where, compute_dtype(model, where))
        tree = model.tree.eval()
    drawn = torch.randint(model.vocab_size or 2, (1, tokens), generator=torch.Generator().manual_seed(0)).to(where)
    facts = profile(lambda: tree(input_ids=drawn), where, steps, trace)
    facts |= {"tokens": tokens, "device": where.type, "quantized": bool(quantized), "file": quantized or None}
    console.say(report.profile_text(facts))
    options.write_report(json_file, facts)
    return 0
