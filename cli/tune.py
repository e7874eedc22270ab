"""svdq tune: a finished checkpoint's scales and low-rank factors, by gradient on the model's outputs."""

from __future__ import annotations

import click

from svdq.cli import options
from svdq.config import TuneConfig

_DEFAULTS = TuneConfig()


@click.command("tune")
@click.argument("model_dir")
@click.argument("file", metavar="OUT")
@click.argument("out", metavar="TUNED.safetensors|TUNED_DIR/")
@click.option("--data", required=True, metavar="SRC", help="Text of the kinds that the model will meet.")
@click.option("--steps", type=int, default=_DEFAULTS.steps, show_default=True, help="Gradient steps.")
@click.option("--rate", type=float, default=_DEFAULTS.rate, show_default=True, help="Of Adam, in units of a value.")
@click.option(
    "--tokens-per-step", type=int, default=_DEFAULTS.tokens_per_step, show_default=True, help="Fewer need less memory."
)
@options.data_options
@options.remote_code
@options.max_shard_size
@click.option("--strict", is_flag=True, help="Exit 1 if tuning did not help and was undone.")
@options.device_option
@options.output_options
@click.pass_context
def command(context, model_dir, file, out, data, steps, rate, tokens_per_step, samples, seq_len, min_tokens, seed,
            trust_remote_code, max_shard_size, strict, device, json_file, quiet):  # fmt: skip
    """Tune OUT of MODEL_DIR into TUNED, each a file or a directory. The whole model must fit in memory, in float32.

    One sequence in eight is held out: if its outputs do not come closer to the original's, nothing is changed.
    """
    from svdq.cli.inputs import note_if_shortened, open_inputs, read_tokens
    from svdq.models import resolve_device
    from svdq.pipeline import data_identity
    from svdq.preflight import check_output
    from svdq.quantized import open_quantized
    from svdq.tune import check_tunable

    config = TuneConfig(steps=steps, rate=rate, tokens_per_step=tokens_per_step, seed=seed)
    console = options.Console(quiet, json_file)
    where = resolve_device(device)
    shard_bytes = options.shard_bytes(context, out, max_shard_size)
    model = open_inputs(model_dir, [data], trust_remote_code)
    quantized = open_quantized(file)
    check_tunable(quantized)
    check_output(out, quantized.file.size, [quantized.file.path], directory=bool(shard_bytes))
    note_if_shortened(console, model, seq_len)
    tokens = read_tokens(
        model, data, trust_remote_code, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed
    )
    console.say(tokens.summary())
    numbers = tune_file(console, model, file, out, tokens, data_identity(tokens), config, where, shard_bytes)
    options.write_report(json_file, numbers)
    return 1 if strict and not numbers["kept"] else 0


def tune_file(
    console, model, file, out, tokens, identity: dict, config: TuneConfig, device, shard_bytes: int | None = None
) -> dict:
    """Tune one file into another, say what came of it, return the numbers. identity: what the file says of the data.

    shard_bytes  of the output's shards, if it is to be a directory
    """
    from dataclasses import asdict

    from svdq.quantized import open_quantized
    from svdq.tune import tune, write_tuned

    def progress(stage: str, done: int, total: int) -> None:
        console.progress(stage, done, total, "step")

    quantized = open_quantized(file)
    layers, report = tune(model, quantized, tokens, config, device=device, progress=progress)
    source = (model.directory, shard_bytes) if shard_bytes else None
    write_tuned(quantized, layers, out, config, identity, report, source)
    console.say(
        f"{out}: {len(layers)} linears, {report.steps} steps; on {report.held_out_tokens:,} held-out tokens "
        f"{report.before:.4f} -> {report.after:.4f} {report.unit} from the original"
    )
    if not report.kept:
        console.warn("tuning did not help on held-out tokens: the layers are as they were; try a lower --rate")
    return {**asdict(report), "kept": report.kept}
