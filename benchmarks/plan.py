"""svdq plan against one rank for all, at equal bytes: layer error, KL and perplexity on SmolLM2-135M-Instruct.

python benchmarks/plan.py [--model DIR] [--store DIR] [--rank 16,32] [--ranks 0,16,32,48,64] [--eval-samples 8]

Calibrates as benchmarks/quality.py does (32 sequences of 512 tokens), measures every linear with every rank once, and
for every --rank makes plans whose linears take at most the bytes of that rank everywhere: by gradient, of all --ranks
and of those from the first --rank on, and for the first --rank by the layers' own error. Each is quantized by `svdq
quantize --overrides` and checked by `svdq verify` on texts that calibration has not seen. First the bytes of every
file's linears are compared with those that were promised: a difference ends the script.

layer error      mean over all linears of verify's figure on in_domain.txt, those in 16 bits counted as 0
KL               of the original's next-token distributions to the quantized model's, nats a token, mean of the texts
in, out          perplexity over the original's; out is the geometric mean of two texts, of equal length
predicted        nats a token on the calibration's tokens, by gradient
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import torch
from quality import ROOT, SEQ_LEN, device_name, run_svdq, shown_command, versions
from quality_report import IN, MEASURED, OUT, ratio, record, rounded
from quality_texts import make_texts
from transformers import AutoModelForCausalLM

from svdq import budget as budgets
from svdq import load_quantized
from svdq.budget import Budget, Choice, Choices
from svdq.calibration.data import load_tokenizer, load_tokens
from svdq.calibration.store import Store
from svdq.config import LayerConfig, QuantConfig
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.report import percent, table
from svdq.sensitivity import output_distances


def say(stage, done, total):
    print(f"\r{stage}: {done} of {total}", end="\n" if done == total else "", flush=True)


def measured(options, model, config):
    """Every linear's choices, weighed by gradient; kept in WORK, as they take minutes."""
    file = options.work / f"choices-{'-'.join(map(str, options.ranks))}.json"
    if file.is_file():
        kept = json.loads(file.read_text())
        return [Choices(**one | {"choices": tuple(Choice(**choice) for choice in one["choices"])}) for one in kept]
    store = Store.open(options.store)
    quantized: dict = {}
    found = budgets.measure(model, store, config, ranks=options.ranks, quantized=quantized, progress=say)
    found = budgets.weigh(found, output_distances(model, quantized, store.tokens(), progress=say), quantized)
    file.write_text(json.dumps([asdict(one) for one in found]))
    return found


def plans(options, model, config):
    """{name: (allocation, its predicted distance)}, of every --rank first that rank for all."""
    found = measured(options, model, config)
    costs = {one.name: {choice.rank: choice.cost for choice in one.choices} for one in found}

    def only(choices, least):
        return [
            replace(one, choices=tuple(c for c in one.choices if c.rank is None or c.rank >= least)) for one in choices
        ]

    by_error = [replace(one, choices=tuple(replace(c, cost=c.error) for c in one.choices)) for one in found]
    made = {}
    for rank in options.rank:
        by_rank = budgets.uniform(found, rank)
        most = Budget("bytes", by_rank.linear_bytes, f"{by_rank.linear_bytes}B")
        made[f"rank {rank} for all"] = by_rank
        for least in (rank for rank in options.ranks if rank < options.rank[0]):
            made[f"plan, ranks from {least}, as rank {rank}"] = budgets.meet(only(found, least), most, 0)
        if rank == options.rank[0]:
            made[f"plan --weigh error, as rank {rank}"] = budgets.meet(by_error, most, 0)
        else:
            made[f"plan, ranks from {options.rank[0]}, as rank {rank}"] = budgets.meet(
                only(found, options.rank[0]), most, 0
            )
    return {
        name: (one, math.fsum(costs[linear][choice.rank] for linear, choice in one.chosen.items()))
        for name, one in made.items()
    }


def check_bytes(out, allocation):
    """The linears of the file, those in 16 bits too, take the bytes that were promised, each of them."""
    tensors = open_quantized(str(out)).file.tensors
    for name, choice in allocation.chosen.items():
        stored = sum(info.nbytes for key, info in tensors.items() if key.startswith(f"{name}."))
        if stored != choice.bytes:
            sys.exit(f"{out}: {name} takes {stored} bytes, promised were {choice.bytes}")
    return sum(choice.bytes for choice in allocation.chosen.values())


class Divergence:
    """KL of the original's next-token distributions to a quantized model's, nats a token, by text."""

    def __init__(self, options, texts):
        self.model, tokenizer = options.model, load_tokenizer(options.model)
        limits = {"samples": options.eval_samples, "seq_len": SEQ_LEN, "min_tokens": 2, "seed": 0}
        self.sequences = {text: load_tokens(str(texts[text]), tokenizer, **limits).sequences for text in MEASURED}
        self.logs: dict = {}

    @torch.no_grad()
    def __call__(self, file):
        if not self.logs:
            original = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
            self.logs = {text: [self._log(original, ids).half() for ids in self.sequences[text]] for text in MEASURED}
        quantized, found = load_quantized(self.model, file), {}
        for text, wanted in self.logs.items():
            terms = [
                (log.float().exp() * (log.float() - self._log(quantized, ids))).sum(-1)
                for ids, log in zip(self.sequences[text], wanted, strict=True)
            ]
            found[text] = torch.cat(terms).mean().item()
        return found

    @staticmethod
    def _log(model, ids):
        return model(input_ids=ids[None]).logits[0].log_softmax(-1)


def run(options, texts, divergence, name, allocation, predicted, config):
    """Quantize and verify one plan → its figures; what WORK has is not run again."""
    slug = "".join(c if c.isalnum() else "-" for c in name)
    kept = options.work / f"row-{slug}.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    machine = SimpleNamespace(device="cpu", jobs=1)
    overrides, out = options.work / f"{slug}.json", options.work / f"{slug}.safetensors"
    overrides.write_text(budgets.override_file(allocation, config, {}))
    made = [options.model, out, "--calib", options.store, "--overrides", overrides]
    quantized, quantize_seconds = run_svdq(machine, options.work, "quantize", *made)
    stored = check_bytes(out, allocation)
    data = [argument for text in MEASURED for argument in ("--data", texts[text])]
    checked = [out, "--model", options.model, *data, "--samples", options.eval_samples, "--seq-len", SEQ_LEN]
    verified, verify_seconds = run_svdq(machine, options.work, "verify", *checked, "--max-error", 10)
    figures = record(quantized, verified, {"quantize": quantize_seconds, "verify": verify_seconds})
    ranks = [choice.rank for choice in allocation.chosen.values()]
    row = {
        "linear_bytes": stored,
        "in_16_bits": ranks.count(None),
        "ranks": {str(rank): ranks.count(rank) for rank in sorted(set(ranks) - {None})},
        "predicted": predicted,
        "calibration_error": sum(choice.error for choice in allocation.chosen.values()) / len(ranks),
        "layer_error": figures["layer_error"] * (1 - ranks.count(None) / len(ranks)),
        "ratio": {domain: ratio(figures, [t for t in MEASURED if MEASURED[t] == domain]) for domain in (IN, OUT)},
        "perplexity": figures["perplexity"],
        "kl": divergence(out),
        "seconds": figures["seconds"],
    }
    kept.write_text(json.dumps(row))
    out.unlink()
    return row


def shown(rows):
    body = [
        [name, f"{row['linear_bytes']:,}", row["in_16_bits"], f"{row['predicted']:.4f}", percent(row["layer_error"]),
         f"{fmean(row['kl'].values()):.4f}", f"{row['ratio'][IN]:.3f}", f"{row['ratio'][OUT]:.3f}"]
        for name, row in rows.items()
    ]  # fmt: skip
    header = ["", "bytes of the linears", "in 16 bits", "predicted, nats", "layer error", "KL", IN, OUT]
    counts = [f"{name}: ranks {row['ranks']}" for name, row in rows.items()]
    return "\n".join([table(header, body), *counts])


def numbers(text):
    return [int(part) for part in text.split(",")]


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "build/demo/smollm2")
    parser.add_argument("--store", type=Path, help="a store of svdq calibrate; default: one made in WORK")
    parser.add_argument("--rank", type=numbers, default=[16, 32], help="whose bytes the plans may take")
    parser.add_argument("--ranks", type=numbers, default=[0, 16, 32, 48, 64])
    parser.add_argument("--eval-samples", type=int, default=8, help=f"sequences of {SEQ_LEN} tokens of each text")
    parser.add_argument("--work", type=Path, default=ROOT / "build/plan")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/plan.json")
    options = parser.parse_args(arguments)
    options.model, options.work = options.model.resolve(), options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    texts = make_texts(ROOT / "build/quality/texts")
    options.store = (options.store or options.work / "calibration").resolve()
    data = ["--data", texts["calibration"], "--samples", 32, "--seq-len", SEQ_LEN]
    calibrate = [options.model, "-o", options.store, *data]
    run_svdq(SimpleNamespace(device="cpu", jobs=1), options.work, "calibrate", *calibrate)
    model, config = open_model(options.model), QuantConfig(LayerConfig())
    rows, divergence = {}, Divergence(options, texts)
    for name, (allocation, predicted) in plans(options, model, config).items():
        rows[name] = run(options, texts, divergence, name, allocation, predicted, config)
        print(shown({name: rows[name]}), flush=True)
    print("\n" + shown(rows))
    facts = {"command": shown_command(arguments, "plan.py"), "device": device_name("cpu"), "versions": versions(),
             "tokens_of_each_text": options.eval_samples * SEQ_LEN, "rows": rows}  # fmt: skip
    options.out.write_text(json.dumps(rounded(facts), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
