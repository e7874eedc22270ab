"""The svdq command. Each subcommand: parse, call one library function, print.

Exit codes: 0 done, 1 a check failed, 2 the input was wrong (one line: where, what, what to do), 130 interrupted.
A traceback is a bug in svdq.
"""

from __future__ import annotations

import sys

import click

from svdq.cli import (
    bench,
    calibrate,
    compare,
    completion,
    doctor,
    export_packed,
    inspect,
    kernels,
    plan,
    profile,
    quantize,
    record,
    roofline,
    tune,
    verify,
)
from svdq.errors import SvdqError
from svdq.ranks import is_first_to_fail, leave
from svdq.report import printable


def _versions(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from svdq.environment import version_text

        click.echo(version_text())
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_versions,
              help="Versions of svdq, Python, torch and the CUDA driver, and the GPUs.")  # fmt: skip
def svdq() -> None:
    """Offline quantization of transformers to W4A4 and other low-bit formats.

    record, calibrate, plan, quantize, tune, verify, export-packed; compare, inspect, kernels, roofline, profile, bench,
    doctor tell what is.
    """


WORK = (record, calibrate, plan, quantize, tune, verify, export_packed)
LOOK = (compare, inspect, kernels, roofline, profile, bench, doctor)
for module in (*WORK, *LOOK, completion):
    svdq.add_command(module.command)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run, and turn every expected failure into one line and an exit code."""
    try:
        code = svdq.main(arguments, prog_name="svdq", standalone_mode=False)
        leave()
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else str(error))
        code = 2
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "svdq"
        code = _fail(f"{where}: {' '.join(error.format_message().split())} (see {where} --help)")
    except (click.Abort, KeyboardInterrupt) as stop:
        told = stop.__cause__ if isinstance(stop, click.Abort) else stop
        resumable = any(name in (arguments or sys.argv[1:2]) for name in ("calibrate", "quantize"))
        kept = "; finished blocks are kept, the same command goes on from there" if resumable else ""
        _say(f"svdq: interrupted{f'; {told}' if str(told or '') else kept}")
        code = 130
    except SvdqError as error:
        code = _fail(f"svdq: {error}")
    except OSError as error:
        code = _fail(f"svdq: {error.filename or 'a file'}: {error.strerror or error}")
    except MemoryError:
        code = _fail("svdq: out of memory; fewer --samples need less, and finished blocks are kept")
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        code = _fail("svdq: out of memory; fewer --samples need less, and finished blocks are kept")
    sys.exit(code or 0)


def _fail(message: str) -> int:
    _say(printable(message))
    return 2


def _say(message: str) -> None:
    """Under torchrun the first rank that fails speaks for all."""
    if is_first_to_fail():
        click.echo(message, err=True)


if __name__ == "__main__":
    main()
