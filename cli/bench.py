"""svdq bench: how fast a model runs in 16 bits and quantized, on this machine."""

from __future__ import annotations

import click

from svdq.cli import options


@click.group("bench")
def command():
    """Time models in 16 bits and quantized, in one run."""


@command.command("model")
@click.option("--shape", default="qwen3-0.6b", show_default=True, help="A decoder: qwen3-0.6b, llama-8b or tiny.")
@click.option("--tokens", type=click.IntRange(1), default=700, show_default=True, help="In a packed batch.")
@click.option("--sequences", type=click.IntRange(1), default=4, show_default=True, help="That they are of.")
@click.option(
    "--steps", type=click.IntRange(1), default=32, show_default=True, help="Forwards that are timed together."
)
@click.option("--no-compile", is_flag=True, help="Leave torch.compile out: it takes its time to compile.")
@options.device_option
@options.output_options
def model(shape, tokens, sequences, steps, no_compile, device, json_file, quiet):
    """A decoder on packed sequences: eager, by CUDA graph and torch.compile; 16 bits, W4A4 and on Hopper W4A8."""
    from dataclasses import asdict

    import torch

    from svdq import report
    from svdq.bench import bench
    from svdq.models import resolve_device

    where = resolve_device(device)
    console = options.Console(quiet, json_file)
    dtype = torch.float16 if where.type == "cuda" else torch.float32
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    rows = bench(
        shape,
        where,
        dtype=dtype,
        tokens=tokens,
        sequences=sequences,
        steps=steps,
        compile_too=not no_compile,
        progress=lambda variant: console.say(f"timing {variant}"),
    )
    facts = {"shape": shape, "tokens": tokens, "sequences": sequences, "steps": steps, "device": name}
    facts |= {"torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    console.say(f"{shape}, {tokens} tokens in {sequences} sequences, {steps} steps; {name}, torch {torch.__version__}")
    console.say(report.bench_text(facts))
    options.write_report(json_file, facts)
    return 0
