"""svdq inspect: what a file's header says."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("inspect")
@click.argument("file", metavar="FILE")
@options.output_options
@click.option("-v", "--verbose", is_flag=True, help="Print every tensor.")
def command(file, json_file, quiet, verbose):
    """Tensors, sizes, bits per weight, configuration and repairs of a quantized file; reads the header only."""
    from svdq import report
    from svdq.quantized import open_quantized

    facts = report.inspection(open_quantized(file))
    if not quiet and json_file != "-":
        click.echo(report.inspection_text(facts, all_tensors=verbose))
    options.write_report(json_file, facts)
    return 0
