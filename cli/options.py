"""Options that several commands share, and how they become configurations."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from svdq.config import (
    FORMATS,
    SEARCH,
    TUNED_PRESETS,
    CalibrationConfig,
    LayerConfig,
    QuantConfig,
    TuneConfig,
    parse_override,
    preset,
    read_overrides,
)
from svdq.errors import ConfigError
from svdq.ranks import TIMEOUT, rank

if TYPE_CHECKING:
    from svdq.models import Model


def check_writable(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Before any work: the file can be written."""
    if value not in (None, "-"):
        path = Path(str(value))
        if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise click.BadParameter(f"{value}: cannot be written", context, parameter)
    return value


def check_page(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The same of a page, which is a file and named as one."""
    if value is not None and not value.endswith((".html", ".htm")):
        raise click.BadParameter(f"{value}: wanted the path of an .html file", context, parameter)
    return check_writable(context, parameter, value)


def check_plot(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not value.endswith((".png", ".svg")):
        raise click.BadParameter(f"{value}: wanted a name that ends in .png or .svg", context, parameter)
    return check_writable(context, parameter, value)


class _Smoothing(click.ParamType):
    name = "float|search"

    def convert(self, value, parameter, context):
        try:
            return value if value == SEARCH else float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor {SEARCH!r}", parameter, context)


class _Size(click.ParamType):
    name = "size"

    def convert(self, value, parameter, context):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B?", str(value), re.IGNORECASE)
        if found is None or (found[3] and not found[2]):
            self.fail(f"{value!r} is no size; wanted bytes, or a number with k, M, G, T or Ki, Mi, Gi, Ti, as in 16G")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** ["", "k", "m", "g", "t"].index(found[2].lower()))


SEED = click.IntRange(0, 2**63 - 1)
SMOOTHING = _Smoothing()
_DEFAULTS = CalibrationConfig()
_LAYER = LayerConfig()


def _stack(*options: Callable) -> Callable:
    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


device_option = click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:i.")
output_options = _stack(
    click.option(
        "--json",
        "json_file",
        metavar="FILE",
        callback=check_writable,
        help="Write the numbers as JSON; - for standard output.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Print errors only."),
)
timeout_option = click.option(
    "--timeout", type=click.FloatRange(1), default=TIMEOUT, show_default=True, help="Under torchrun: seconds to wait."
)
page_option = click.option(
    "--report",
    "page_file",
    metavar="FILE.html",
    callback=check_page,
    help="Write a page with plots and tables that sort: one file, which loads nothing.",
)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Print every layer.")
subfolder_option = click.option("--subfolder", metavar="NAME", help="Of a pipeline of diffusers: transformer.")
remote_code = click.option("--trust-remote-code", is_flag=True, help="Run code that the model directory brings.")
data_options = _stack(
    click.option("--samples", type=int, default=_DEFAULTS.samples, show_default=True, help="Sequences to read."),
    click.option("--seq-len", type=int, default=_DEFAULTS.seq_len, show_default=True, help="Tokens in a sequence."),
    click.option("--min-tokens", type=int, default=_DEFAULTS.min_tokens, show_default=True, help="Fewer are an error."),
    click.option("--seed", type=SEED, default=_DEFAULTS.seed, show_default=True, help="Which sequences are drawn."),
)
host_memory_option = click.option(
    "--max-host-memory", type=_Size(), metavar="SIZE", show_default="no limit",
    help="For activations between blocks, as in 16G; what exceeds it lies on disk, beside the output.",
)  # fmt: skip
max_shard_size = click.option(
    "--max-shard-size", type=_Size(), metavar="SIZE", default="50GB", show_default=True,
    help="Of an output directory: the largest file of weights, as in 5GB or 500MB.",
)  # fmt: skip
preset_option = click.option(
    "--preset",
    default="quality",
    show_default=True,
    help="quality, best (quality, then tuned), nunchaku (what that runtime reads), svdquant (as published) or plain.",
)
activation_options = _stack(
    click.option(
        "--smoothing",
        type=SMOOTHING,
        show_default="0.75",
        help="Exponent of the channels' rms; 0 = none; search = as SVDQuant does.",
    ),
    click.option("--rotation", show_default="hadamard64", help="hadamard64 or none."),
    click.option("--act-clip", type=float, show_default="0.85", help="Activation scale = clip * absmax / 7."),
)
format_option = click.option(
    "--format",
    "form",
    type=click.Choice(list(FORMATS)),
    default="w4a4",
    show_default=True,
    help="Of the weights and activations; w4a16, w8a16 and nf4 leave activations in 16 bits.",
)
pattern_options = _stack(
    click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave these linears in 16 bits."),
    click.option("--only", multiple=True, metavar="PATTERN", help="Quantize only these."),
)
weight_options = _stack(
    format_option,
    click.option("--symmetric", is_flag=True, default=None, help="Of w4a16: no zero points."),
    click.option(
        "--rank", type=int, show_default="16; 0 with w4a16, w8a16, nf4", help="Rank of the 16-bit correction; 0 = none."
    ),
    click.option(
        "--group-size",
        type=int,
        show_default="64; w4a16 128, nvfp4 16, w8a16 the row",
        help="Weights that share a scale; 0 = a whole row (w4a16).",
    ),
    click.option("--rounds", type=int, show_default=str(_LAYER.rounds), help="GPTQ / SVD alternations."),
    click.option("--damping", type=float, show_default="K / tokens, 0.01 to 0.5", help="Share of the mean diagonal."),
    click.option(
        "--objective",
        show_default="output; nearest with w8a16, nf4",
        help="output (activation error seen), weight, svd or nearest.",
    ),
    click.option("--sweeps", type=int, show_default="0", help="Coordinate-descent sweeps over the codes."),
    click.option("--svd", show_default=_LAYER.svd, help="auto, krylov or exact."),
    click.option(
        "--override", multiple=True, metavar="PATTERN:KNOB=VALUE,…", help="rank, group_size, rounds, damping for some."
    ),
    click.option("--overrides", metavar="FILE", help="Overrides and what stays in 16 bits, of svdq plan."),
)


def calibration_config(preset_name: str, form: str = "w4a4", **values: Any) -> CalibrationConfig:
    """Preset, then what the format asks for, then whatever was given explicitly."""
    of_format = {"activation": "nvfp4", "act_clip": 1.0} if form == "nvfp4" else {}
    return CalibrationConfig(**{**preset(preset_name)[0], **of_format, **_given(values)})


def quant_config(
    preset_name: str,
    ignore: tuple,
    only: tuple,
    override: tuple,
    linears_only: bool,
    form: str = "w4a4",
    overrides: str | None = None,
    **values: Any,
) -> QuantConfig:
    """Of a file of overrides and --override the latter wins."""
    layer = LayerConfig(**{"format": form, **FORMATS[form], **preset(preset_name)[1], **_given(values)})
    planned, kept = read_overrides(overrides, layer) if overrides else ((), ())
    given = tuple(parse_override(text, layer) for text in override)
    return QuantConfig(layer, (*kept, *ignore), only, (*planned, *given), linears_only)


def tune_config(preset_name: str, steps: int | None, seed: int) -> TuneConfig | None:
    """None where nothing is tuned: no --tune and no preset that has it."""
    if steps is None:
        return TuneConfig(seed=seed) if preset_name in TUNED_PRESETS else None
    return TuneConfig(steps=steps, seed=seed) if steps else None


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def shard_bytes(context: click.Context, out: str, max_shard_size: int) -> int | None:
    """Of an output directory the largest shard; None where OUT means one file, which has none."""
    from svdq.directory import is_directory

    if max_shard_size < 1:
        raise ConfigError(f"--max-shard-size {max_shard_size}: wanted a size such as 5GB")
    if is_directory(out):
        return max_shard_size
    refuse_given(context, ("max_shard_size",), f"{out} is one file; a slash at its end makes it a directory")
    return None


def refuse_given(context: click.Context, names: tuple[str, ...], why: str) -> None:
    """Options that would be ignored are an error if they stand on the command line."""
    for name in names:
        if context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')}: {why}")


def refuse_text_options(context: click.Context, model: Model) -> None:
    """Recorded calls of a diffusion transformer are run as they are: what cuts text would be ignored."""
    if model.is_diffusion:
        refuse_given(context, ("seq_len", "min_tokens"), "belongs to text; recorded calls are run as they are")


def write_report(json_file: str | None, numbers: dict[str, Any]) -> None:
    if json_file is None or rank() > 0:
        return
    text = json.dumps(_plain(numbers), indent=1, sort_keys=True, allow_nan=False)
    if json_file == "-":
        click.echo(text)
        return
    _write("--json", json_file, text + "\n")


def write_page(page_file: str, text: str) -> None:
    if rank() == 0:
        _write("--report", page_file, text)


def _write(option: str, file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file}: cannot be written: {error.strerror}") from None


def _plain(value: Any) -> Any:
    """JSON has no NaN and no Inf: they become null. Paths become strings."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


class Console:
    """Progress on a terminal's stderr; results on stdout, unless --quiet or JSON is to stand there alone."""

    def __init__(self, quiet: bool, json_file: str | None):
        self.quiet = quiet or json_file == "-" or rank() > 0
        self._bar: Any = None

    def say(self, text: str) -> None:
        if not self.quiet:
            click.echo(text)

    def warn(self, text: str) -> None:
        if rank() == 0:
            click.echo(f"warning: {text}", err=True)

    def progress(self, stage: str, done: int, total: int, unit: str = "block") -> None:
        if self.quiet or not sys.stderr.isatty():
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=done, desc=stage, unit=unit, leave=False, file=sys.stderr)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
            self._bar = None
