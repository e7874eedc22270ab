"""Where the time of calibrate, quantize --calib and quantize --data goes, in one process and in several.

python benchmarks/phases.py [--processes 1,2] [--blocks 8] [--sequences 32]
python benchmarks/phases.py --device cuda --shape qwen3-0.6b --sequences 64 --commands "quantize --data"

By default a Qwen3-shaped toy of 512 channels with random weights, sequences of 256 random tokens, on CPUs, one thread a
process; --shape is one of benchmarks/scale.py, with its sequences of 512. Of every rank the wall seconds of each phase,
a phase inside another counted once, for the inner one; in brackets the process's own seconds where they are fewer by a
tenth: it then waited for a disk, for another rank, for a core or for its GPU. On a GPU a phase ends when the GPU is
done.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTH, VOCABULARY = 256, 512
_open: list = []
spent: dict = {}


def timed(owner, name, phase):
    """Count the calls of owner.name under `phase`, and what they call and is counted too under its own."""
    original = getattr(owner, name)

    def call(*arguments, **options):
        began, own = time.perf_counter(), time.thread_time()
        _open.append([0.0, 0.0])
        try:
            return original(*arguments, **options)
        finally:
            if os.environ["ON_GPU"] == "1":
                torch.cuda.synchronize()
            wall, own = time.perf_counter() - began, time.thread_time() - own
            inner = _open.pop()
            total = spent.setdefault(phase, [0.0, 0.0])
            total[0] += wall - inner[0]
            total[1] += own - inner[1]
            if _open:
                _open[-1][0] += wall
                _open[-1][1] += own

    setattr(owner, name, call)


def rank(command):
    """One process of the job: the command, then its phases as JSON beside it."""
    global torch
    import torch

    from svdq import pipeline, ranks
    from svdq.calibration import capture, statistics, store
    from svdq.cli import inputs, main
    from svdq.ranks import Ranks

    for name in ("agree", "check_same", "_reduce", "wait", "wait_until"):
        timed(Ranks, name, "other ranks")
    timed(ranks, "join", "joining")
    timed(inputs, "open_inputs", "model and text")
    timed(inputs, "read_tokens", "model and text")
    timed(capture.BlockStream, "_skeleton_run", "skeleton")
    timed(capture, "materialize", "weights")
    timed(capture._FirstPass, "run", "blocks' forward")
    timed(statistics.SumAccumulator, "add", "sums")
    timed(statistics.SumAccumulator, "finish", "sums")
    timed(store.Store, "write", "store")
    timed(store.Store, "read", "store")
    timed(pipeline, "_quantize_blocks", "blocks quantized")
    timed(pipeline, "write_block", "work files")
    timed(pipeline, "assemble", "output")
    timed(main, "main", "rest")
    spent["start"] = [time.time() - float(os.environ["STARTED"]), time.process_time()]
    try:
        main.main(command)
    finally:
        Path(f"phases-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(spent))


def job(folder, processes, command, on_gpu):
    """(wall seconds, phases of each rank)."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {"WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ON_GPU": int(on_gpu)}
    if not on_gpu:
        common["OMP_NUM_THREADS"] = 1
    started, line = time.time(), [sys.executable, __file__, "--as-rank", *command.split()]
    running = []
    for number in range(processes):
        values = {**common, "RANK": number, "LOCAL_RANK": number, "STARTED": started}
        environment = os.environ | {name: str(value) for name, value in values.items()}
        running.append(subprocess.Popen(line, cwd=folder, env=environment))
    assert [process.wait() for process in running] == [0] * processes
    wall = time.time() - started
    return wall, [json.loads((folder / f"phases-{number}.json").read_text()) for number in range(processes)]


def cell(phases, name):
    wall, own = phases.get(name, (0.0, 0.0))
    return f"{wall:6.2f} ({own:5.2f})" if own < 0.9 * wall and wall > 0.05 else f"{wall:6.2f}        "


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", help="of benchmarks/scale.py, in place of the toy")
    parser.add_argument("--commands", default="calibrate,quantize --calib,quantize --data")
    options = parser.parse_args()
    import torch
    from transformers import Qwen3Config, Qwen3Model

    with tempfile.TemporaryDirectory() as name:
        folder, length = Path(name), LENGTH
        if options.shape:
            import scale

            scale.build(folder, options.shape, scale.SHAPES[options.shape][0], options.device, options.sequences)
            length = scale.LENGTH
        else:
            sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
            config = Qwen3Config(**sizes, head_dim=64, vocab_size=VOCABULARY, num_hidden_layers=options.blocks)
            Qwen3Model(config).save_pretrained(folder / "model")
            ids = torch.randint(VOCABULARY, (options.sequences, LENGTH), generator=torch.Generator().manual_seed(0))
            lines = (json.dumps({"input_ids": row}) + "\n" for row in ids.tolist())
            (folder / "ids.jsonl").write_text("".join(lines))
        read = f"--data ids.jsonl --samples {options.sequences} --seq-len {length} --min-tokens 1"
        for processes in map(int, options.processes.split(",")):
            arguments = {
                "calibrate": f"model -o store-{processes} {read}",
                "quantize --calib": f"model stored-{processes} --calib store-{processes}",
                "quantize --data": f"model streamed-{processes} {read}",
            }
            for command in options.commands.split(","):
                line = f"{command.split()[0]} {arguments[command]} --device {options.device} -q"
                wall, ranks = job(folder, processes, line, options.device == "cuda")
                print(f"\n{command}, {processes} process{'es' * (processes > 1)}: {wall:.1f} s", flush=True)
                for phase in dict.fromkeys(phase for phases in ranks for phase in phases):
                    print(f"  {phase:18}", *(cell(phases, phase) for phases in ranks), flush=True)


if __name__ == "__main__":
    if "--as-rank" in sys.argv[1:2]:
        rank(sys.argv[2:])
    else:
        main()
