"""A table of methods on one model, each through svdq's own commands: layer errors, perplexity in and out of domain.

python benchmarks/quality.py [--rows quality,svdquant] [--seeds 0,1,2] [--device cuda] [--jobs 4]

Every row is `svdq calibrate`, `svdq quantize` and `svdq verify` with the row's options, on texts that
benchmarks/quality_texts.py makes (--texts-only stops after them, so that WORK/texts can be carried to a machine without
network). Calibration has 32 sequences of 512 tokens, each of the three measuring texts too; --seeds draws other
calibration sequences, the measured ones stay. Rows with equal options of calibrate share its store. Rows of formats
with 16-bit activations have groups of 64, not 128: the model's 576 channels are no multiple of that.

layer error, per token  mean over the linears of verify's figures, on 512 tokens of in_domain.txt
in, out of domain       perplexity, quantized over original; out is the geometric mean over its two texts of one length
±                       half the range over the seeds; what other measured tokens would change comes on top
seconds                 of each command with its start; of calibrate, those of the store that rows share. With --jobs
                        above 1 the commands compete with each other

A row's run is kept in WORK/runs and not repeated while svdq's sources, model, texts, options and device are the same.
Exit code: 1 if a command of a row failed (its last lines are shown, the other rows go on). A bar that is not met is
printed and kept in the JSON file, no more.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from quality_report import COMMANDS, MEASURED, bars_text, check_bars, ratio, record, rounded, summarize, tables
from quality_texts import TEXTS, make_texts

from svdq.report import percent

ROOT = Path(__file__).resolve().parent.parent
SEQ_LEN = 512
SHORTEST = 0.95  # of the tokens asked for: a chapter of fewer than SEQ_LEN tokens is a sequence of its own


@dataclass(frozen=True)
class Row:
    """One method: what --rows calls it, what the table calls it, its options of calibrate and of quantize.

    Options come after the common ones and win; {calibration}, {novel} … are the texts' files.
    """

    key: str
    label: str
    calibrate: str = ""
    quantize: str = ""
    alone: bool = False  # quantize takes no store


ROWS = (
    Row("plain", "plain", "--preset plain", "--preset plain"),
    Row("output", "output, no transform", "--smoothing 0 --rotation none --act-clip 0.8"),
    Row("svdquant", "svdquant", "--preset svdquant", "--preset svdquant"),
    Row("no-rotation", "smoothing + clip, no rotation", "--rotation none --act-clip 0.85"),
    Row("rotation", "rotation alone", "--smoothing 0 --act-clip 1"),
    Row("rank0", "rank 0", "", "--rank 0"),
    Row("nunchaku", "nunchaku", "--preset nunchaku", "--preset nunchaku"),
    Row("quality", "quality (default)"),
    Row("rounds8", "quality, rounds 8", "", "--rounds 8"),
    Row("sweeps2", "quality, sweeps 2", "", "--sweeps 2"),
    Row("tokens2k", "quality, 2k tokens", "--samples 4"),
    Row("tokens8k", "quality, 8k tokens", "--samples 16"),
    Row("tokens64k", "quality, 64k tokens", "--samples 128"),
    Row("other-text", "quality, calibrated on the novel", "--data {novel}"),
    Row("best", "best, 128k tokens", "--samples 256", "--preset best"),
    Row("w8a16", "W8A16, nearest", "", "--format w8a16", alone=True),
    Row("w4a16-rtn", "W4A16, nearest", "", "--format w4a16 --group-size 64 --objective nearest", alone=True),
    Row("w4a16", "W4A16, GPTQ", "", "--format w4a16 --group-size 64"),
    Row("w4a16-rank16", "W4A16, GPTQ, rank 16", "", "--format w4a16 --group-size 64 --rank 16"),
    Row("nf4", "NF4", "", "--format nf4", alone=True),
    Row("nvfp4", "NVFP4 (W4A4)", "--format nvfp4", "--format nvfp4"),
    Row("nvfp4-rank0", "NVFP4, rank 0", "--format nvfp4", "--format nvfp4 --rank 0"),
    Row("nvfp4-no-rotation", "NVFP4, no rotation", "--format nvfp4 --rotation none", "--format nvfp4 --rotation none"),
)


@dataclass(frozen=True)
class Settings:
    """What all rows have in common. samples, eval_samples: sequences of SEQ_LEN tokens, of each text."""

    model: Path
    work: Path
    texts: dict[str, Path]
    device: str
    samples: int
    eval_samples: int
    jobs: int
    only: list[str]  # patterns of the linears that are quantized; none: all
    fingerprint: dict[str, str]  # what a kept run must have been made with


class CommandFailed(Exception):
    """A command of a row ended with an error; the message is its last lines."""

    def __init__(self, command, message):
        super().__init__(message)
        self.command = command


# ---- running the commands


def svdq_program():
    """The console script beside this interpreter, or on PATH, or the module."""
    beside = Path(sys.executable).with_name("svdq")
    found = str(beside) if beside.is_file() else shutil.which("svdq")
    return [found] if found else [sys.executable, "-m", "svdq.cli.main"]


def run_svdq(settings, scratch, name, *arguments):
    """Run one command; returns (its JSON numbers, seconds). Raises CommandFailed."""
    numbers = scratch / f"{name}.json"
    command = [*svdq_program(), name, *arguments, "--device", settings.device, "--json", numbers]
    environment = dict(os.environ)
    if settings.jobs > 1:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // settings.jobs))
    started = time.perf_counter()
    # from the scratch folder: with the repository's, python -m would find its folder svdq, which is not the package
    done = subprocess.run(
        list(map(str, command)), cwd=scratch, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        last = "\n".join(f"    {line}" for line in done.stdout.rstrip().splitlines()[-15:])
        raise CommandFailed(name, f"svdq {name} ended with {done.returncode}:\n{last}")
    return json.loads(numbers.read_text()), time.perf_counter() - started


def only_options(settings):
    return [argument for pattern in settings.only for argument in ("--only", pattern)]


def row_options(settings, text):
    return text.format(**settings.texts).split()


def measure(settings, scratch, row, store):
    """quantize and verify of one row → (numbers of both, seconds of both)."""
    out = scratch / f"{row.key}.safetensors"
    source = [] if row.alone else ["--calib", store]
    quantize = [settings.model, out, *source, *row_options(settings, row.quantize), *only_options(settings)]
    quantized, quantize_seconds = run_svdq(settings, scratch, "quantize", *quantize)
    data = [argument for text in MEASURED for argument in ("--data", settings.texts[text])]
    # a bad method is a result here: verify's own bound on layer errors is out of the way, its other checks are not
    verify = [out, "--model", settings.model, *data, "--samples", settings.eval_samples, "--seq-len", SEQ_LEN]
    verified, verify_seconds = run_svdq(settings, scratch, "verify", *verify, "--max-error", 10)
    out.unlink()
    for text, output in zip(MEASURED, verified["outputs"], strict=True):
        if output["quantized"] is None:  # JSON has no infinity
            raise CommandFailed("verify", f"{text}.txt: the quantized model's perplexity is not finite")
    return quantized, verified, {"quantize": quantize_seconds, "verify": verify_seconds}


def run_group(settings, rows, seed, keep):
    """One calibration store and the rows that share it; calls keep(row, seed, record or CommandFailed)."""
    with tempfile.TemporaryDirectory(dir=settings.work) as scratch:
        scratch = Path(scratch)
        store = scratch / "calibration"
        data = ["--data", settings.texts["calibration"], "--samples", settings.samples, "--seq-len", SEQ_LEN]
        calibrate = [settings.model, "-o", store, *data, "--seed", seed, *row_options(settings, rows[0].calibrate)]
        calibrate += only_options(settings)
        calibrate_seconds = 0.0
        try:
            if not rows[0].alone:
                _, calibrate_seconds = run_svdq(settings, scratch, "calibrate", *calibrate)
        except CommandFailed as failure:
            for row in rows:
                keep(row, seed, failure)
            return
        for row in rows:
            try:
                quantized, verified, seconds = measure(settings, scratch, row, store)
                keep(row, seed, record(quantized, verified, {"calibrate": calibrate_seconds, **seconds}))
            except CommandFailed as failure:
                keep(row, seed, failure)


def check_texts(settings):
    """Before any run: each measured text has the tokens that are asked for."""
    from svdq.cli.inputs import open_inputs, read_tokens

    model = open_inputs(str(settings.model), [], False)
    for text in MEASURED:
        options = {"samples": settings.eval_samples, "seq_len": SEQ_LEN, "min_tokens": 1, "seed": 0}
        found = read_tokens(model, str(settings.texts[text]), False, **options).tokens
        if found < SHORTEST * settings.eval_samples * SEQ_LEN:
            sys.exit(f"{text}.txt: {found:,} tokens in --eval-samples {settings.eval_samples}; ask for fewer")


def run_key(settings, row, seed):
    """What a kept run must agree in."""
    return {
        "calibrate": row.calibrate,
        "quantize": row.quantize,
        "seed": seed,
        "samples": settings.samples,
        "eval_samples": settings.eval_samples,
        "only": settings.only,
        **settings.fingerprint,
    }


def run_all(settings, rows, seeds):
    """(runs, failures) as {row key: {seed: record}} and [{row, seed, command}]; what WORK/runs has is not run again."""
    runs, failures, groups = {row.key: {} for row in rows}, [], {}
    kept = settings.work / "runs"
    kept.mkdir(parents=True, exist_ok=True)
    for row in rows:
        for seed in seeds:
            file = kept / f"{row.key}-{seed}.json"
            found = json.loads(file.read_text()) if file.is_file() else {}
            if found.get("key") == run_key(settings, row, seed):
                runs[row.key][seed] = found["run"]
                print(f"{row.label}, seed {seed}: kept from an earlier run", flush=True)
            else:
                groups.setdefault((row.calibrate, row.key if row.alone else "", seed), []).append(row)

    def keep(row, seed, outcome):
        if isinstance(outcome, CommandFailed):
            failures.append({"row": row.key, "seed": seed, "command": outcome.command})
            print(f"{row.label}, seed {seed}: FAILED\n  {outcome}", flush=True)
            return
        runs[row.key][seed] = outcome
        text = json.dumps({"key": run_key(settings, row, seed), "run": outcome}, indent=1)
        (kept / f"{row.key}-{seed}.json").write_text(text + "\n")
        ratios = ", ".join(f"{text} {ratio(outcome, [text]):.3f}" for text in MEASURED)
        spent = ", ".join(f"{command} {outcome['seconds'][command]:.0f} s" for command in COMMANDS)
        print(f"{row.label}, seed {seed}: {percent(outcome['layer_error'])}, {ratios}; {spent}", flush=True)

    with ThreadPoolExecutor(settings.jobs) as pool:
        started = [pool.submit(run_group, settings, group, seed, keep) for (*_, seed), group in groups.items()]
        for one in started:
            one.result()
    return runs, failures


# ---- what the figures belong to


def digest(directory, *patterns):
    """SHA-256 of the names and bytes of the files of these patterns, its first 16 digits."""
    total = hashlib.sha256()
    for path in sorted({path for pattern in patterns for path in directory.rglob(pattern)}):
        total.update(str(path.relative_to(directory)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:16]


def device_name(device):
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"--device {device}: torch {torch.__version__} finds no CUDA GPU on this machine")
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    return f"CPU, {found[1] if found else platform.machine()}"


def versions():
    import torch
    import transformers

    import svdq

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "svdq": svdq.__version__,
    }


def shown_command(arguments, script="quality.py"):
    """The script's command line without the paths of a machine: of an absolute path, the part inside the repository
    or the last name."""

    def short(argument):
        option, equals, value = argument.rpartition("=")
        path = Path(value)
        if not path.is_absolute():
            return argument
        return option + equals + str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)

    return shlex.join(["python", f"benchmarks/{script}", *map(short, arguments)])


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {row.key: row for row in ROWS}

    def some_rows(text):
        keys = [key.strip() for key in text.split(",")]
        if unknown := [key for key in keys if key not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: wanted some of {','.join(known)}")
        return [row for row in ROWS if row.key in keys]

    def some_seeds(text):
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))

    parser.add_argument("--rows", type=some_rows, default=list(ROWS), help=f"of {','.join(known)}; default: all")
    parser.add_argument("--seeds", type=some_seeds, default=[0], help="draws of calibration sequences; default: 0")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:i, for every command; default: %(default)s")
    parser.add_argument("--model", type=Path, default=ROOT / "build/demo/smollm2", help="default: build/demo/smollm2")
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences; default: %(default)s")
    parser.add_argument("--eval-samples", type=int, default=32, help="sequences of each text; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="calibration stores at a time; default: %(default)s")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="quantize only these linears")
    parser.add_argument("--work", type=Path, default=ROOT / "build/quality", help="default: build/quality")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/quality.json", metavar="FILE",
                        help="default: benchmarks/results/quality.json")  # fmt: skip
    parser.add_argument("--texts-only", action="store_true", help="make WORK/texts and stop")
    options = parser.parse_args(arguments)
    if min(options.samples, options.eval_samples, options.jobs) < 1:
        parser.error("--samples, --eval-samples and --jobs: wanted at least 1")
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: no such folder")
    if not options.texts_only and not (options.model / "config.json").is_file():
        parser.error(f"{options.model}: no model directory; `make model` fetches the default one")
    return options


def main(arguments):
    options = parse(arguments)
    texts = make_texts(options.work.resolve() / "texts")
    if options.texts_only:
        return 0
    import svdq

    fingerprint = {
        "device": device_name(options.device),
        "model": digest(options.model, "config.json", "tokenizer*.json", "*.safetensors"),
        "sources": digest(Path(svdq.__file__).parent, "*.py"),
        "texts": hashlib.sha256("".join(TEXTS.values()).encode()).hexdigest()[:16],
    }
    settings = Settings(options.model.resolve(), options.work.resolve(), texts, options.device, options.samples,
                        options.eval_samples, options.jobs, options.only, fingerprint)  # fmt: skip
    check_texts(settings)
    runs, failures = run_all(settings, options.rows, options.seeds)
    summaries = {row.key: summarize(list(runs[row.key].values())) for row in options.rows if runs[row.key]}
    bars = check_bars(summaries)
    if summaries:
        print("\n" + tables({row.label: summaries[row.key] for row in options.rows if row.key in summaries}))
    print("\n" + bars_text(bars))
    written = {
        "command": shown_command(arguments),
        **fingerprint,
        "model_name": settings.model.name,
        "versions": versions(),
        "calibration_tokens": options.samples * SEQ_LEN,
        "tokens_of_each_text": options.eval_samples * SEQ_LEN,
        "jobs": options.jobs,
        "only": options.only,
        "texts": TEXTS,
        "rows": {
            row.key: {
                "calibrate": row.calibrate,
                "quantize": row.quantize,
                "summary": summaries.get(row.key),
                "seeds": {str(seed): runs[row.key][seed] for seed in sorted(runs[row.key])},
            }
            for row in options.rows
        },
        "bars": bars,
        "failures": failures,
    }
    options.out.write_text(json.dumps(rounded(written), indent=1, allow_nan=False) + "\n")
    for failure in failures:
        print(f"failed: {failure['row']}, seed {failure['seed']}, in svdq {failure['command']}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
