"""svdq quantize: a model directory into one checkpoint, a file or a Hugging Face directory."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("quantize")
@click.argument("model_dir")
@click.argument("out", metavar="OUT.safetensors|OUT_DIR/")
@click.option("--calib", metavar="CALIB_DIR", help="A store of svdq calibrate.")
@click.option("--data", metavar="SRC", help="Calibrate on this on the way, and keep nothing.")
@options.subfolder_option
@options.data_options
@options.preset_option
@options.activation_options
@options.weight_options
@click.option("--tune", type=click.IntRange(0), metavar="STEPS", show_default="0; 120 with --preset best",
              help="Then tune as svdq tune does, on the calibration's own tokens.")  # fmt: skip
@options.pattern_options
@click.option("--linears-only", is_flag=True, help="Leave the unquantized tensors out of the file.")
@options.max_shard_size
@click.option("--dry-run", is_flag=True, help="Check everything, print sizes, write nothing.")
@click.option("--strict", is_flag=True, help="Exit 1 if anything was repaired, left in 16 bits unasked, or warned of.")
@options.remote_code
@options.device_option
@options.timeout_option
@options.host_memory_option
@options.output_options
@options.verbose_option
@click.pass_context
def command(context, model_dir, out, calib, data, subfolder, samples, seq_len, min_tokens, seed, preset, smoothing,
            rotation, act_clip, form, symmetric, rank, group_size, rounds, damping, objective, sweeps, svd, override,
            overrides, tune, ignore, only, linears_only, max_shard_size, dry_run, strict, trust_remote_code, device,
            timeout, max_host_memory, json_file, quiet, verbose):  # fmt: skip
    """Quantize MODEL_DIR into OUT.safetensors, or into OUT_DIR/ for transformers' from_pretrained.

    A name with a slash at its end, or of an empty directory, becomes a Hugging Face directory: shards, config.json with
    quantization_config, the tokenizer and the other small files. Any other name is one file.

    A killed run resumes when the same command is given again.
    """
    from pathlib import Path

    from svdq import pipeline, preflight, report
    from svdq.calibration.recorded import load_inputs
    from svdq.calibration.store import Store
    from svdq.cli.inputs import longest_sequence, note_if_shortened, open_inputs, read_data
    from svdq.cli.tune import tune_file
    from svdq.config import WEIGHT_ONLY
    from svdq.errors import ConfigError
    from svdq.models import resolve_device
    from svdq.ranks import join, local_device

    config = options.quant_config(
        preset, ignore, only, override, linears_only, form, overrides, symmetric=symmetric, rank=rank,
        group_size=group_size, rounds=rounds, damping=damping, objective=objective, sweeps=sweeps, svd=svd,
    )  # fmt: skip
    calibration = options.calibration_config(
        preset, form, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed,
        smoothing=smoothing, rotation=rotation, act_clip=act_clip,
    )  # fmt: skip
    tuning = options.tune_config(preset, tune, seed)
    if calib and data:
        raise ConfigError("--calib and --data: both given; wanted a store or a text to calibrate on, not both")
    alone = config.layer.objective == "nearest"
    _check_format(context, form, preset, config, bool(tuning), bool(calib or data))
    if not calib and not data and not dry_run and not alone:
        raise ConfigError("wanted --calib CALIB_DIR (from svdq calibrate) or --data SRC to calibrate on")
    if calib:
        options.refuse_given(
            context, ("samples", "seq_len", "min_tokens", "seed"), "belongs to --data; the store has its own"
        )
        options.refuse_given(context, ("max_host_memory",), "is for --data; a store holds sums and no activations")
    where = resolve_device(local_device(device))
    ranks = join(where, timeout)
    console = options.Console(quiet, json_file)
    shard_bytes = options.shard_bytes(context, out, max_shard_size)
    if shard_bytes and linears_only:
        raise ConfigError(f"--linears-only: {out} is to be a whole model's directory; wanted the path of a file")
    model = open_inputs(model_dir, [data] if data else [], trust_remote_code, subfolder, diffusion=True)
    options.refuse_text_options(context, model)
    if tuning and model.is_diffusion:
        raise ConfigError("--tune and --preset best: tuning wants a language model or an encoder; leave them out")
    if shard_bytes and model.is_diffusion:
        raise ConfigError(f"{out}: a directory for transformers; of a diffusion transformer wanted the path of a file")
    the_plan = preflight.plan(model, config)
    untuned = f"{Path(out)}.untuned" if tuning else out
    for path in dict.fromkeys((out, untuned)):
        preflight.check_run_output(path, the_plan, model, directory=bool(shard_bytes) and path is out)
    store = Store.open(calib) if calib else None
    if store is not None:
        store.check_model(model.files.source_fingerprint())
        if form not in WEIGHT_ONLY:
            check_preset(store, preset, form, {"smoothing": smoothing, "rotation": rotation, "act_clip": act_clip})
    if dry_run:
        linears, memory, hidden = the_plan.linears, {}, None
        if not calib and not alone:
            count = samples * min(seq_len, longest_sequence(model))
            if model.is_diffusion and data:
                count = load_inputs(data, model.config, samples=samples, seed=seed).tokens
            streamed = model, linears, count, where, max_host_memory
            memory["calibrate"] = preflight.calibration_bytes(*streamed)
            hidden = preflight.hidden_bytes(*streamed)
        memory["quantize"] = preflight.quantization_bytes(linears, where)
        console.say(report.plan_text(the_plan, memory, where.type, hidden))
        estimates = {"memory_bytes": memory, "hidden_bytes": hidden._asdict() if hidden else None}
        options.write_report(json_file, vars(the_plan) | {"linears": [one.name for one in linears]} | estimates)
        return 0
    tokens = None
    if data:
        note_if_shortened(console, model, seq_len)
        tokens = read_data(
            model, data, trust_remote_code, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed
        )
        console.say(tokens.summary())
    learned = store.tokens() if store and tuning else tokens  # before any work: an older store has none
    summary = pipeline.quantize(
        model, untuned, config, store=store, data=tokens,
        calibration=None if store or alone else calibration, device=where, progress=console.progress, ranks=ranks,
        max_host_memory=max_host_memory, shard_bytes=None if tuning else shard_bytes,
    )  # fmt: skip
    if summary is None:
        return 0  # rank 0 does the rest
    numbers = vars(summary) | {"mean_error": summary.mean_error}
    if tuning:
        assert learned is not None
        identity = store.manifest["data"] if store else pipeline.data_identity(learned)
        try:
            tuned = tune_file(console, model, untuned, out, learned, identity, tuning, where, shard_bytes)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"{untuned} is whole, but not tuned; svdq tune goes on from it") from None
        summary.path, numbers["tuned"] = Path(out), tuned
        numbers["path"] = summary.path
        Path(untuned).unlink()
    console.say(report.quantization_text(summary))
    if verbose:
        rows = [
            [name, layer["n"], layer["k"], report.percent(layer["error"])] for name, layer in summary.layers.items()
        ]
        console.say(report.table(["layer", "N", "K", "error"], rows))
    options.write_report(json_file, numbers)
    undone = bool(tuning) and not numbers["tuned"]["kept"]
    return 1 if strict and (summary.repairs or summary.warnings or undone) else 0


def _check_format(context, form: str, preset: str, config, tuned: bool, given: bool) -> None:
    """Options that the format would leave without a meaning are errors."""
    from svdq.config import PRESETS, TUNED_PRESETS, WEIGHT_ONLY
    from svdq.errors import ConfigError

    if tuned and form != "w4a4":
        raise ConfigError(f"--tune and --preset best: know w4a4 alone, not {form}")
    if form in WEIGHT_ONLY:
        why = f"is of 4-bit activations, {form} has none"
        options.refuse_given(context, ("smoothing", "rotation", "act_clip"), why)
        if preset not in ("quality", *TUNED_PRESETS) and not PRESETS[preset][1]:
            raise ConfigError(f"--preset {preset}: {why}")
    if config.layer.objective != "nearest":
        return
    other = "" if form == "nf4" else ", or take --objective output"
    if given:
        raise ConfigError(f"{form} rounds to nearest and looks at no data; leave out --calib and --data{other}")
    names = ("samples", "seq_len", "min_tokens", "seed", "rounds", "damping", "svd", "max_host_memory")
    options.refuse_given(context, names, f"{form} rounds to nearest and looks at no data")
    for pattern, values in config.overrides:
        if lost := {"rounds", "damping"} & values.keys():
            raise ConfigError(f"--override {pattern}: {min(lost)} has no meaning where weights are rounded to nearest")


def check_preset(store, preset: str, form: str, given: dict) -> None:
    """The activation side was decided when the store was made: an option that says otherwise is an error."""
    from svdq.config import to_dict
    from svdq.errors import ConfigError

    wanted = {key: value for key, value in given.items() if value is not None}
    if preset != "quality":
        wanted = {k: v for k, v in to_dict(options.calibration_config(preset, form)).items() if k in given} | wanted
    for key, value in wanted.items():
        found = store.manifest["config"][key]
        if found != value:
            raise ConfigError(
                f"{store.directory}: calibrated with {key} {found!r}, this run wants {value!r}; "
                "calibrate with the same --preset and activation options"
            )
