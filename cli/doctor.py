"""svdq doctor: what works on this machine, what is missing, how to get it."""

from __future__ import annotations

import click

from svdq.cli import options


@click.command("doctor")
@options.output_options
def command(json_file, quiet):
    """Try what svdq needs on this machine: packages, CPU, CUDA driver, GPUs, NVRTC, cache.

    Exit 1 if something fails that should work here; what is only absent (a GPU, an optional package) is no failure."""
    from dataclasses import asdict

    from svdq import environment, report

    console = options.Console(quiet, json_file)
    found = environment.checks()
    console.say(report.doctor_text(found))
    failed = [check.name for check in found if check.status == environment.FAILED]
    options.write_report(json_file, {"checks": [asdict(check) for check in found], "failed": failed})
    return 1 if failed else 0
