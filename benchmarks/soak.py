"""Kill calibrate and quantize at random moments, again and again: what resumed runs write must be what one run writes.

python benchmarks/soak.py [--kills 200] [--blocks 12] [--seed 0]

Half of the kills (SIGKILL) hit `calibrate`, half `quantize`, each of a toy Llama. Every time a run comes to its end,
the store's files or the checkpoint are compared byte by byte with those of an uninterrupted run, and it starts anew.
Runs are forks of this process, which has loaded everything but computed nothing: a run is as long as its work.
Exit code: 1 if any byte differs or anything is left behind.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

from svdq import pipeline
from svdq.calibration.data import load_tokens
from svdq.calibration.store import Store
from svdq.config import CalibrationConfig, QuantConfig
from svdq.models import open_model

TOY = {"vocab_size": 200, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2,
       "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 256}  # fmt: skip


def forked(function):
    """Start function() in a process of its own; its number. Exit code 0 if it returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        function()
        code = 0
    finally:
        os._exit(code)


def finished(pid):
    """Wait for it; whether it came to its end. A run that fails by itself ends the soak."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise SystemExit(f"a run failed by itself, status {status}")
    return True


def contents(path):
    """{relative name: bytes} of a file or of a directory's files."""
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    return {one.name: one.read_bytes() for one in files}


def soak(run, out, kills, draw):
    """Kill `run`, which writes `out`, `kills` times; returns (completed runs, seconds of one run)."""
    started = time.monotonic()
    finished(forked(run))
    seconds, wanted = time.monotonic() - started, contents(out)
    strangers = sorted(one.name for one in out.parent.iterdir())
    remove(out)
    done = completed = 0
    while done < kills:
        pid = forked(run)
        time.sleep(draw.uniform(0, seconds))
        os.kill(pid, signal.SIGKILL)
        if finished(pid):
            completed += 1
            check(out, wanted, strangers)
        else:
            done += 1
    finished(forked(run))
    check(out, wanted, strangers)
    return completed + 1, seconds


def check(out, wanted, strangers):
    if contents(out) != wanted:
        raise SystemExit(f"{out.name}: not the bytes of an uninterrupted run")
    if sorted(one.name for one in out.parent.iterdir()) != strangers:
        raise SystemExit(f"left behind: {sorted(one.name for one in out.parent.iterdir())}")
    remove(out)


def remove(path):
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, rows = folder / "model", folder / "rows.jsonl"
        finished(forked(lambda: make_inputs(model, rows, options.blocks)))
        stored = folder / "calibration" / "store"
        stored.parent.mkdir()

        def calibrate():
            opened = open_model(model)
            data = load_tokens(str(rows), None, samples=16, seq_len=64, min_tokens=1, seed=0, vocab_size=200)
            pipeline.calibrate(opened, stored, data, CalibrationConfig())

        completed, seconds = soak(calibrate, stored, options.kills // 2, draw)
        print(f"calibrate: {options.kills // 2} kills, {completed} runs ended, all with the same bytes; "
              f"{seconds:.2f} s each")  # fmt: skip
        finished(forked(calibrate))
        out = folder / "quantize" / "out.safetensors"
        out.parent.mkdir()

        def quantize():
            pipeline.quantize(open_model(model), out, QuantConfig(), store=Store.open(stored))

        rest = options.kills - options.kills // 2
        completed, seconds = soak(quantize, out, rest, draw)
        print(f"quantize: {rest} kills, {completed} runs ended, all with the same bytes; {seconds:.2f} s each")
    return 0


def make_inputs(model, rows, blocks):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TOY, num_hidden_layers=blocks)
    transformers.LlamaForCausalLM(config).save_pretrained(model)
    draw = random.Random(1)
    rows.write_text("".join(f'{{"input_ids": {[draw.randrange(200) for _ in range(64)]}}}\n' for _ in range(16)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
