"""svdq inspect: what a file's header says, or what a job has left so far."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("inspect")
@click.argument("file", metavar="FILE")
@options.output_options
@click.option("-v", "--verbose", is_flag=True, help="Print every tensor, or every layer that is done.")
def command(file, json_file, quiet, verbose):
    """Tensors, sizes, bits per weight, configuration and repairs of a quantized file or directory; reads headers only.

    Of a directory that a running or killed job left (OUT.safetensors.work, or a calibration store): what is done.
    """
    from pathlib import Path

    from svdq import jobs, report
    from svdq.quantized import open_quantized

    if Path(file).is_dir() and not (Path(file) / "config.json").exists():
        facts = jobs.state(file)
        text = report.job_text(facts, every_layer=verbose)
    else:
        facts = report.inspection(open_quantized(file))
        text = report.inspection_text(facts, all_tensors=verbose)
    if not quiet and json_file != "-":
        click.echo(text)
    options.write_report(json_file, facts)
    return 0
