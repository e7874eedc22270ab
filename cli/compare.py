"""svdq compare: several checkpoints of one model side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from svdq.cli import options


@click.command("compare")
@click.argument("checkpoints", nargs=-1, required=True, metavar="A B [C…]")
@click.option("--model", "model_dir", metavar="MODEL_DIR", help="The original: verify each against it first.")
@click.option("--data", multiple=True, metavar="SRC", help="With --model: held-out text; may be given several times.")
@click.option("--samples", type=int, default=16, show_default=True, help="Sequences to read of each text.")
@click.option("--seq-len", type=int, default=512, show_default=True, help="Tokens in a sequence.")
@click.option("--min-tokens", type=int, default=512, show_default=True, help="Fewer are an error.")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Which sequences are drawn.")
@click.option("--verified", multiple=True, metavar="FILE.json", help="What svdq verify --json wrote, one for each.")
@click.option("--profiled", multiple=True, metavar="FILE.json", help="What svdq profile --quantized … --json wrote.")
@options.page_option
@options.remote_code
@options.device_option
@options.output_options
@options.verbose_option
def command(checkpoints, model_dir, data, samples, seq_len, min_tokens, seed, verified, profiled, page_file,
            trust_remote_code, device, json_file, quiet, verbose):  # fmt: skip
    """Error of every linear, size, and where measured perplexity and speed, of checkpoints of one model.

    From headers alone the error is the quantizer's own. Exit 1 if a check of the verifier failed.
    """
    from svdq import verify
    from svdq.cli.inputs import note_if_shortened, open_inputs, read_tokens
    from svdq.compare import compare, comparison_text
    from svdq.errors import ConfigError
    from svdq.html_compare import comparison_page
    from svdq.models import resolve_device
    from svdq.quantized import open_quantized

    if data and not model_dir:
        raise ConfigError("--data: is read by the original model; wanted --model MODEL_DIR too")
    if model_dir and verified:
        raise ConfigError("--verified: --model verifies anew; leave one out")
    console = options.Console(quiet, json_file)
    files = [open_quantized(file) for file in checkpoints]
    reports, profiles = _read("--verified", verified), _read("--profiled", profiled)
    compare(files, verified=reports, profiled=profiles)  # what is refused, before the long part
    if model_dir:
        model = open_inputs(model_dir, list(data), trust_remote_code)
        drawn = {"samples": samples, "seq_len": seq_len, "min_tokens": min_tokens, "seed": seed}
        if data:
            note_if_shortened(console, model, seq_len)
        texts = [read_tokens(model, source, trust_remote_code, **drawn) for source in data]
        for text in texts:
            console.say(text.summary())
        for file in files:
            report = verify.verify(model, file, data=texts, device=resolve_device(device), progress=console.progress)
            reports.append(report.to_dict())
    result = compare(files, verified=reports, profiled=profiles)
    console.say(comparison_text(result, most=10**9 if verbose else 15))
    options.write_report(json_file, result.to_dict())
    if page_file:
        options.write_page(page_file, comparison_page(result))
        console.say(f"report: {page_file}")
    return 1 if any(one.failures for one in result.checkpoints) else 0


def _read(option: str, names: tuple[str, ...]) -> list[dict[str, Any]]:
    from svdq.errors import ConfigError

    found = []
    for name in names:
        try:
            numbers = json.loads(Path(name).read_bytes())
        except OSError as error:
            raise ConfigError(f"{option} {name}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError):
            numbers = None
        if not isinstance(numbers, dict):
            raise ConfigError(f"{option} {name}: is not a JSON object; wanted a file that --json wrote")
        found.append(numbers)
    return found
