"""svdq plan: which linears deserve which rank, or 16 bits, for a number of bytes."""

from __future__ import annotations

import click

from svdq.cli import options


class _Ranks(click.ParamType):
    name = "rank,…"

    def convert(self, value, parameter, context):
        if isinstance(value, tuple):
            return value
        try:
            ranks = tuple(int(part) for part in value.split(","))
        except ValueError:
            ranks = (-1,)
        if min(ranks) < 0:
            self.fail(f"{value!r}: wanted ranks like 0,16,32", parameter, context)
        return ranks


@click.command("plan")
@click.argument("model_dir")
@click.option("--calib", required=True, metavar="CALIB_DIR", help="A store of svdq calibrate.")
@click.option(
    "--budget",
    required=True,
    metavar="BUDGET",
    help="4.5bits (a weight of the linears), 130MB (the file's tensors) or 7% (mean layer error).",
)
@click.option(
    "-o", "--out", metavar="PLAN.json", callback=options.check_writable, help="Write it for svdq quantize --overrides."
)
@click.option("--ranks", type=_Ranks(), default="16,32,48,64", show_default=True, help="Ranks to choose from.")
@click.option("--no-16bit", is_flag=True, help="Leave no linear in 16 bits.")
@click.option(
    "--weigh",
    type=click.Choice(["gradient", "error"]),
    default="gradient",
    show_default=True,
    help="gradient: by how far each linear moves the model's output (needs the whole model in memory, in float32); "
    "error: the layers' relative errors alike, which can raise the perplexity.",
)
@click.option("--tokens", type=click.IntRange(1), default=4096, show_default=True, help="Read for the gradients.")
@click.option("--plot", "plot_file", metavar="FILE", callback=options.check_plot, help="Draw the front: .png or .svg.")
@options.preset_option
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave these linears in 16 bits.")
@click.option("--override", multiple=True, metavar="PATTERN:KNOB=VALUE,…", help="group_size, rounds, damping for some.")
@options.remote_code
@options.device_option
@options.output_options
@options.verbose_option
def command(model_dir, calib, budget, out, ranks, no_16bit, weigh, tokens, plot_file, preset, ignore, override,
            trust_remote_code, device, json_file, quiet, verbose):  # fmt: skip
    """Spend BUDGET on MODEL_DIR's linears where it lowers the model's error most. Takes about as long as quantize for
    each of the --ranks."""
    from pathlib import Path

    from svdq import budget as budgets
    from svdq import preflight, report
    from svdq.calibration.store import Store
    from svdq.cli.inputs import open_inputs
    from svdq.cli.quantize import check_preset
    from svdq.config import parse_override
    from svdq.errors import ConfigError
    from svdq.models import resolve_device
    from svdq.roofline import require_plot
    from svdq.sensitivity import output_distances

    wanted = budgets.parse_budget(budget)
    if plot_file:
        require_plot()
    console = options.Console(quiet, json_file)
    where = resolve_device(device)
    if any("rank" in values for _, values in map(parse_override, override)):
        raise ConfigError("--override with a rank: the plan chooses ranks; give --ranks, or change its file afterwards")
    config = options.quant_config(preset, ignore, (), override, False, rank=min(ranks))
    model = open_inputs(model_dir, [], trust_remote_code)
    run = preflight.plan(model, config)
    if weigh == "gradient":
        preflight.check_whole_model(
            model, run.linears, where, "--weigh gradient", "take --weigh error, or a device with more"
        )
    store = Store.open(calib)
    budgets.check_before(run, wanted, store)
    check_preset(store, preset, "w4a4", {"smoothing": None, "rotation": None, "act_clip": None})
    quantized: dict | None = {} if weigh == "gradient" else None
    measured = budgets.measure(
        model, store, config, ranks=ranks, in_16_bits=not no_16bit, quantized=quantized, device=where,
        progress=console.progress,
    )  # fmt: skip
    if quantized is not None:
        distances = output_distances(
            model, quantized, store.tokens(), tokens=tokens, device=where, progress=console.progress
        )
        measured = budgets.weigh(measured, distances, quantized)
    chosen = budgets.meet(measured, wanted, budgets.other_bytes(model, run.linears))
    facts = budgets.facts(model, measured, chosen, weigh)
    console.say(report.budget_text(facts, most=10**9 if verbose else 10))
    if out:
        Path(out).write_text(budgets.override_file(chosen, config, facts["predicted"]))
        console.say(f"{out}: for svdq quantize --overrides {out}")
    if plot_file:
        budgets.plot(facts, plot_file)
    options.write_report(json_file, facts)
    return 0
