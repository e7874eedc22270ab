"""svdq verify: check a quantized file against its model."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("verify")
@click.argument("file", metavar="OUT")
@click.option("--model", "model_dir", required=True, metavar="MODEL_DIR", help="The original model.")
@click.option("--data", multiple=True, metavar="SRC", help="Held-out data; may be given several times.")
@options.subfolder_option
@click.option("--calib", metavar="CALIB_DIR", help="A store: errors on its sums as well.")
@click.option(
    "--what-if",
    multiple=True,
    metavar="KNOB=VALUE,…",
    help="What another rank, group_size, rounds, sweeps or damping would give on the sums of --calib. Writes nothing; "
    "may be given several times.",
)
@click.option(
    "--tasks",
    metavar="FILE",
    help="Also lm-eval's tasks on both models: a JSON or YAML list of task names, or an object of tasks and options. "
    "Needs pip install 'svdq[tasks]'.",
)
@click.option("--samples", type=int, default=16, show_default=True, help="Sequences to read of each text.")
@click.option("--seq-len", type=int, default=512, show_default=True, help="Tokens in a sequence.")
@click.option("--min-tokens", type=int, default=512, show_default=True, help="Fewer are an error.")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Which sequences are drawn.")
@click.option("--max-error", type=float, default=0.5, show_default=True, help="Largest quantization error of a layer.")
@click.option("--max-kernel-error", type=float, default=1e-5, show_default=True, help="Largest kernel error.")
@click.option("--max-perplexity-ratio", type=float, show_default="unchecked", help="Quantized over original.")
@click.option(
    "--kernels",
    type=click.Choice(["reference", "cuda"]),
    default="reference",
    show_default=True,
    help="Whose kernel error, and which quantized model: plain torch's or the CUDA kernels'.",
)
@click.option(
    "--activations",
    type=click.Choice(["int4", "fp8"]),
    default="int4",
    show_default=True,
    help="fp8: what the file gives with 8-bit activations (W4A8), as load_quantized has them on Hopper.",
)
@options.page_option
@options.remote_code
@options.device_option
@options.output_options
@options.verbose_option
@click.pass_context
def command(context, file, model_dir, data, subfolder, calib, what_if, tasks, samples, seq_len, min_tokens, seed,
            max_error, max_kernel_error, max_perplexity_ratio, kernels, activations, page_file, trust_remote_code,
            device, json_file, quiet, verbose):  # fmt: skip
    """Check structure, layers and perplexity of a canonical or packed file. Exit 1 if a check fails."""
    from svdq import report, store_checks, verify
    from svdq.calibration.store import Store
    from svdq.cli.inputs import note_if_shortened, open_inputs, read_data
    from svdq.details import Details
    from svdq.html_report import verification_page
    from svdq.layer_checks import require_kernels
    from svdq.models import resolve_device
    from svdq.quantized import open_quantized
    from svdq.tasks import prepare_tasks, run_tasks, scores_text

    changes = store_checks.parse_changes(what_if, calib)
    console = options.Console(quiet, json_file)
    where = resolve_device(device)
    if kernels == "cuda":
        require_kernels(where)
    verify.check_activations(activations, bool(calib), kernels)
    quantized = open_quantized(file, activations)
    model = open_inputs(model_dir, list(data), trust_remote_code, subfolder, diffusion=True)
    options.refuse_text_options(context, model)
    wanted = prepare_tasks(tasks, model) if tasks else None
    store = Store.open(calib) if calib else None
    if data:
        note_if_shortened(console, model, seq_len)
    texts = [
        read_data(model, source, trust_remote_code, samples=samples, seq_len=seq_len, min_tokens=min_tokens, seed=seed)
        for source in data
    ]
    for text in texts:
        console.say(text.summary())
    thresholds = verify.Thresholds(max_kernel_error, max_error, max_perplexity_ratio)
    details = Details(wanted=page_file is not None)
    result = verify.verify(
        model,
        quantized,
        data=texts,
        store=store,
        changes=changes,
        thresholds=thresholds,
        device=where,
        kernels=kernels,
        details=details,
        progress=console.progress,
    )
    console.say(report.verification_text(result, most=10**9 if verbose else 15))
    for answer in result.what_if:
        console.say(report.what_if_text(answer, most=10**9 if verbose else 10))
    numbers = result.to_dict()
    if wanted:
        scores = run_tasks(
            model, quantized, wanted, device=where, kernels=kernels, trust_remote_code=trust_remote_code,
            progress=console.progress,
        )  # fmt: skip
        console.say(scores_text(scores))
        numbers["tasks"] = [vars(score) for score in scores]
    options.write_report(json_file, numbers)
    if page_file:
        options.write_page(page_file, verification_page(result, details, model, quantized))
        console.say(f"report: {page_file}")
    return 1 if result.failures else 0
