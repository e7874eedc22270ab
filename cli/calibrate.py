"""svdq calibrate: read text or recorded calls, run the model block by block, keep the sums."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("calibrate")
@click.argument("model_dir")
@click.option("-o", "--out", required=True, metavar="CALIB_DIR", help="Where the store is written.")
@click.option(
    "--data", required=True, metavar="SRC", help="Text file, directory, hub name, input_ids or recorded calls."
)
@options.subfolder_option
@options.data_options
@options.format_option
@options.preset_option
@options.activation_options
@options.pattern_options
@options.remote_code
@click.option("--strict", is_flag=True, help="Exit 1 if there is a warning.")
@options.device_option
@options.timeout_option
@options.host_memory_option
@options.output_options
@click.pass_context
def command(context, model_dir, out, data, subfolder, samples, seq_len, min_tokens, seed, form, preset, smoothing,
            rotation, act_clip, ignore, only, trust_remote_code, strict, device, timeout, max_host_memory, json_file,
            quiet):  # fmt: skip
    """Take the activation sums of MODEL_DIR on SRC. Running it again resumes an unfinished store."""
    from dataclasses import asdict

    from svdq import pipeline, preflight
    from svdq.cli.inputs import note_if_shortened, open_inputs, read_data
    from svdq.config import LayerConfig, QuantConfig
    from svdq.models import resolve_device
    from svdq.ranks import join, local_device

    config = options.calibration_config(
        preset, form, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed,
        smoothing=smoothing, rotation=rotation, act_clip=act_clip,
    )  # fmt: skip
    where = resolve_device(local_device(device))
    ranks = join(where, timeout)
    console = options.Console(quiet, json_file)
    model = open_inputs(model_dir, [data], trust_remote_code, subfolder, diffusion=True)
    options.refuse_text_options(context, model)
    selection = QuantConfig(LayerConfig(rank=0), ignore, only)  # the rank is quantize's business
    linears = preflight.plan(model, selection).linears
    preflight.check_store(out, linears)
    note_if_shortened(console, model, seq_len)
    tokens = read_data(
        model, data, trust_remote_code, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed
    )
    console.say(tokens.summary())
    summary = pipeline.calibrate(
        model, out, tokens, config, linears=linears, device=where, progress=console.progress, ranks=ranks,
        max_host_memory=max_host_memory,
    )  # fmt: skip
    for warning in summary.warnings:
        console.warn(warning)
    console.say(f"{out}: {summary.sites} sites in {summary.blocks} blocks, {summary.seconds:.1f} s")
    options.write_report(json_file, asdict(summary))
    return 1 if strict and summary.warnings else 0
