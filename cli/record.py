"""svdq record: run a pipeline of diffusers on prompts, keep what its transformer is called with."""

from __future__ import annotations

import re

import click

from svdq.cli import options


class _Size(click.ParamType):
    name = "HEIGHTxWIDTH"

    def convert(self, value, parameter, context):
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+)x(\d+)", value)
        if not found or not int(found[1]) or not int(found[2]):
            self.fail(f"{value!r}: wanted pixels, as in 1024x768", parameter, context)
        return int(found[1]), int(found[2])


@click.command("record")
@click.argument("pipeline_dir")
@click.option("-o", "--out", required=True, metavar="INPUTS_DIR", help="A new directory, for one file a call.")
@click.option("--prompts", required=True, metavar="FILE", help="Text, one prompt a line.")
@click.option("--steps", type=click.IntRange(1), required=True, help="Denoising steps for each.")
@click.option("--subfolder", default="transformer", show_default=True, metavar="NAME", help="What to record.")
@click.option("--size", type=_Size(), metavar="HEIGHTxWIDTH", show_default="the pipeline's", help="In pixels.")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Of the first prompt's noise.")
@options.device_option
@options.output_options
def command(pipeline_dir, out, prompts, steps, subfolder, size, seed, device, json_file, quiet):
    """Run the diffusers pipeline PIPELINE_DIR and record its transformer's calls, for --data of other commands.

    Unlike they, this has the whole pipeline in memory.
    """
    from svdq.cli.inputs import quiet_libraries
    from svdq.diffusion import read_prompts, record_prompts
    from svdq.models import resolve_device

    quiet_libraries()
    where, texts = resolve_device(device), read_prompts(prompts)
    console = options.Console(quiet, json_file)

    def progress(stage: str, done: int, total: int) -> None:
        console.progress(stage, done, total, "prompt")

    calls = record_prompts(
        pipeline_dir, out, texts, steps=steps, subfolder=subfolder, size=size, device=where, seed=seed,
        progress=progress,
    )  # fmt: skip
    console.say(f"{out}: {calls} calls of {subfolder}, {len(texts)} prompts of {steps} steps")
    options.write_report(json_file, {"calls": calls, "prompts": len(texts), "steps": steps})
    return 0
