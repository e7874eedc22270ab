"""Other quantizers' own code on the same model and texts in the same W4A4 format: perplexity, or embeddings.

python benchmarks/peers.py PEER --model DIR --calibration TEXT --eval TEXT [--eval TEXT] --json OUT
python benchmarks/peers.py PEER --model build/encoder/model --calibration TEXT --samples 512 --seq-len 32 \
    --sentences build/encoder/in_domain.txt --sentences build/encoder/out_of_domain.txt --json OUT

The first is for a causal language model, the second for a BERT-type encoder: encoder.py leaves its model and sentences
and says what is measured. benchmarks/peers_table.py makes tables of the results.

One peer a call, in that peer's own environment (Python 3.11; torch, transformers and the peer are all that it imports):

modelopt-*       pip install torch==2.13.0
                 pip install torch==2.13.0 nvidia-modelopt==0.47.0 "transformers<5.15" accelerate requests
llmcompressor-*  pip install torch==2.13.0
                 pip install torch==2.13.0 llmcompressor==0.14.0.1
autoround        pip install torch==2.13.0
                 pip install torch==2.13.0 auto-round==0.16.1

The first line matters only where an index has a CPU build of torch. nvidia-modelopt imports requests without asking
for it; its extra `hf` would do as well, but brings much more.

The format: integers of 4 bits, symmetric, weights in groups of 64 along the input, activations in groups of 64 per
token with scales taken as the model runs. All linears of the blocks are quantized; embeddings, lm_head and an encoder's
pooler are not. A peer's result is its own fake-quantized model in float32, run as it is: nothing here quantizes. What
is here checks: every linear of the blocks must be given inputs and weights of at most 16 values a group, or the script
fails. What each peer cannot express is in NOTES below, printed and kept in the JSON file.

A TEXT is a .txt file, tokenized whole and cut into sequences, or a .jsonl file of rows {"input_ids": [...]}, taken as
they are. Calibration takes sequences drawn with --seed from the whole text, an evaluation the first ones. An encoder's
sequences stand between its cls and sep.
Perplexity is exp of the mean loss of all predicted tokens. svdq verify measures the same tokens from what --rows
leaves: svdq verify OUT.safetensors --model DIR --data DIR/in_domain.jsonl … --samples 32 --seq-len 512.
"""

import argparse
import hashlib
import json
import platform
import time
from importlib import metadata
from pathlib import Path

import torch
from embeddings import BATCH, compare_files, embed, hide_this_folder, read_sentences, tokenize
from torch.nn import functional
from torch.overrides import TorchFunctionMode

GROUP, RANK = 64, 16
BLOCKS = ("model.layers.", "encoder.layer.")  # of Llama and its kin, of BERT

MODELOPT = (
    "codes -8 to 7 with scale = absmax / 7",
    "activations are switched on after calibration: given in one config with awq_lite (svdquant runs it first), input "
    "quantizers of integers in dynamic groups keep the axis of its search, and have a scale for each place in the "
    "group, over all tokens and groups at once, instead of one for each group",
    "the search for the smoothing sees quantized weights only, by this or by one config; activations have no clipping",
)
COMPRESSED = (
    "codes -8 to 7 with scale = absmax / 7.5; no clipping of activations",
    "no low-rank correction: compressed-tensors has no place for one",
)
NOTES = {
    "modelopt-max": (*MODELOPT[:1], "rounding to nearest: what the other two of ModelOpt start from"),
    "modelopt-awq_lite": MODELOPT,
    "modelopt-svdquant": (*MODELOPT, f"rank {RANK}; the low-rank factors stay in the model's type, here float32"),
    "llmcompressor-smoothquant": (*COMPRESSED, "smooths the inputs of q, k, v, gate and up; not of o and down"),
    "llmcompressor-smoothquant-token": (*COMPRESSED, "one activation scale a token, as in its preset W4A4"),
    "llmcompressor-gptq": (*COMPRESSED, "no smoothing"),
    "llmcompressor-spinquant": (*COMPRESSED, "R1, R2 and R4 are random Hadamard matrices: learning them is not there"),
    "autoround": (
        "codes -8 to 7 with scale = ±absmax / 8 as float16, for activations too",
        "no low-rank correction: its SVDQuant refuses integers (wants MXFP4 in groups of 32)",
        "activations have no clipping and no smoothing in this algorithm",
    ),
}


def block_linears(model):
    """(names of the linears in the blocks, names of the others)."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [one for one in names if one.startswith(BLOCKS)], [one for one in names if not one.startswith(BLOCKS)]


def read_rows(tokenizer, path, length, encoder=False):
    """int64 [sequences, length]: the text's tokens in whole sequences; no padding, the rest is left out."""
    text = Path(path).read_text(encoding="utf-8")
    if Path(path).suffix == ".jsonl":
        rows = [json.loads(line)["input_ids"][:length] for line in text.splitlines()]
        return torch.tensor([row for row in rows if len(row) == length])
    if not encoder:
        ids = tokenizer(text, verbose=False)["input_ids"]
        return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    ids = tokenizer(text, add_special_tokens=False, padding=False, truncation=False, verbose=False)["input_ids"]
    size = length - 2
    pieces = torch.tensor(ids[: len(ids) // size * size]).view(-1, size)
    cls, sep = (torch.full((len(pieces), 1), one) for one in (tokenizer.cls_token_id, tokenizer.sep_token_id))
    return torch.cat([cls, pieces, sep], dim=1)


def take(rows, count, path):
    if len(rows) < count:
        raise SystemExit(f"{path}: {len(rows)} whole sequences, wanted {count}")
    return rows[:count]


@torch.no_grad()
def perplexity(model, rows):
    losses = []
    for row in rows:  # ModelOpt's quantizers want one shape for all
        logits = model(input_ids=row[None]).logits[0, :-1].float()
        losses.append(functional.cross_entropy(logits, row[1:], reduction="none").double())
    return torch.cat(losses).mean().exp().item()


class Levels(TorchFunctionMode):
    """Looks at the operands of every matrix product of a linear: the most different values in a group of each."""

    def __init__(self):
        super().__init__()
        self.calls = []  # ((out, in), levels of the input, levels of the weight)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is functional.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.calls.append((tuple(weight.shape), self.levels(args[0]), self.levels(weight)))
        return func(*args, **kwargs)

    @staticmethod
    def levels(values):
        if values.shape[-1] % GROUP:
            return GROUP
        ordered = values.detach().reshape(-1, GROUP)[: 1 << 14].sort(dim=1).values
        return ordered.diff(dim=1).ne(0).sum(dim=1).max().item() + 1


@torch.no_grad()
def count_w4a4(model, inputs):
    """(linears with 4-bit input and weight, shapes of the other products) of one run of the model."""
    with Levels() as seen:
        model(**inputs)
    quantized = [max(levels) <= 16 for _, *levels in seen.calls]
    others = sorted({shape for (shape, *_), good in zip(seen.calls, quantized, strict=True) if not good})
    return sum(quantized), others


# ---- the peers: model, rows and options → quantized model


def modelopt(algorithm):
    def quantize(model, rows, options):
        import modelopt.torch.quantization as mtq

        int4 = {"num_bits": 4, "block_sizes": {-1: GROUP}}
        names, _ = block_linears(model)
        weights = [{"quantizer_name": f"{name}.weight_quantizer", "cfg": int4} for name in names]
        config = {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *weights], "algorithm": algorithm}
        more = {} if options.sentences else {"logits_to_keep": 1}

        @torch.no_grad()
        def calibrate(model):
            for batch in rows.split(options.batch):
                model(input_ids=batch, **more)

        mtq.quantize(model, config, calibrate)
        dynamic = {**int4, "type": "dynamic"}
        mtq.set_quantizer_by_cfg(
            model, [{"quantizer_name": f"{name}.input_quantizer", "cfg": dynamic} for name in names]
        )
        return model

    return quantize


def llmcompressor(transform, activations):
    def quantize(model, rows, options):
        from datasets import Dataset
        from llmcompressor import oneshot
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
        from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier

        int4 = {"num_bits": 4, "type": "int", "symmetric": True}
        group = {**int4, "strategy": "group", "group_size": GROUP}
        inputs = group if activations == "group" else {**int4, "strategy": "token"}
        scheme = {"targets": ["Linear"], "weights": group, "input_activations": {**inputs, "dynamic": True}}
        first = []
        if transform == "smoothquant":
            first = [SmoothQuantModifier(smoothing_strength=options.smoothing)]
        elif transform == "spinquant":
            first = [SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_type="random-hadamard")]
        return oneshot(
            model=model,
            recipe=[*first, GPTQModifier(config_groups={"w4a4": scheme}, ignore=block_linears(model)[1])],
            dataset=Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}),
            num_calibration_samples=len(rows),
            shuffle_calibration_samples=False,
            max_seq_length=rows.shape[1],
            batch_size=options.batch,
        )

    return quantize


def autoround(model, rows, options):
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    int4 = {"bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"}
    scheme = {**int4, **{f"act_{key}": value for key, value in int4.items()}, "act_dynamic": True}
    rounding = AutoRound(
        model,
        AutoTokenizer.from_pretrained(options.model),
        scheme=scheme,
        dataset=[{"input_ids": batch} for batch in rows.split(1)],
        nsamples=len(rows),
        seqlen=rows.shape[1],
        batch_size=options.batch,
        iters=options.iters,
        seed=options.seed,
        amp=False,  # it would make the model bfloat16
        device_map="cpu",
        enable_torch_compile=False,
    )
    return rounding.quantize()[0]


PEERS = {
    "modelopt-max": (modelopt("max"), "nvidia-modelopt"),
    "modelopt-awq_lite": (modelopt({"method": "awq_lite"}), "nvidia-modelopt"),
    "modelopt-svdquant": (modelopt({"method": "svdquant", "lowrank": RANK}), "nvidia-modelopt"),
    "llmcompressor-smoothquant": (llmcompressor("smoothquant", "group"), "llmcompressor"),
    "llmcompressor-smoothquant-token": (llmcompressor("smoothquant", "token"), "llmcompressor"),
    "llmcompressor-gptq": (llmcompressor(None, "group"), "llmcompressor"),
    "llmcompressor-spinquant": (llmcompressor("spinquant", "group"), "llmcompressor"),
    "autoround": (autoround, "auto-round"),
}


def versions(package):
    found = {"python": platform.python_version()}
    for name in (package, "compressed-tensors", "torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory with its tokenizer")
    parser.add_argument("--calibration", type=Path, required=True, metavar="TEXT")
    measured = parser.add_mutually_exclusive_group(required=True)
    measured.add_argument("--eval", type=Path, metavar="TEXT", action="append", default=[])
    measured.add_argument("--sentences", type=Path, metavar="TEXT", action="append", default=[],
                          help="one a line, for an encoder")  # fmt: skip
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--rows", type=Path, metavar="DIR", help="write the sequences of each --eval there, as .jsonl")
    parser.add_argument("--samples", type=int, default=32, help="calibration sequences (%(default)s)")
    parser.add_argument("--eval-samples", type=int, default=16, help="sequences of each --eval (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a sequence (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=4, help="calibration sequences a step (%(default)s)")
    parser.add_argument("--smoothing", type=float, default=0.8, help="SmoothQuant's strength (%(default)s)")
    parser.add_argument("--iters", type=int, default=200, help="AutoRound's steps a block (%(default)s)")
    options = parser.parse_args()
    if options.sentences and any(name in options.peer for name in ("smoothquant", "spinquant")):
        parser.error(
            f"{options.peer}: it changes the norm before a linear, and in a BERT-type encoder the residual takes that "
            "norm's output too; llmcompressor-gptq is the method without it"
        )
    return options


def main():
    options = parse()
    hide_this_folder()
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    quantize, package = PEERS[options.peer]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = read_rows(tokenizer, options.calibration, options.seq_len, encoder=bool(options.sentences))
    draw = torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed))[: options.samples]
    rows = take(rows[draw.sort().values], options.samples, options.calibration)
    texts = {path.stem: read_rows(tokenizer, path, options.seq_len) for path in options.eval}
    texts = {name: take(text, options.eval_samples, name) for name, text in texts.items()}
    for name, text in texts.items() if options.rows else ():
        lines = [json.dumps({"input_ids": row}) + "\n" for row in text.tolist()]
        (options.rows / f"{name}.jsonl").write_text("".join(lines))
    torch.manual_seed(options.seed)
    kind = AutoModel if options.sentences else AutoModelForCausalLM
    model = kind.from_pretrained(options.model, dtype=torch.float32).eval()
    linears = len(block_linears(model)[0])
    used = {
        "smoothing": "smoothquant" in options.peer,
        "iters": options.peer == "autoround",
        "eval_samples": not options.sentences,
    }
    numbers = {key: value for key, value in vars(options).items() if isinstance(value, int | float)}
    result = {
        "peer": options.peer,
        "versions": versions(package),
        "model": options.model.name,
        "options": {key: value for key, value in numbers.items() if used.get(key, True)},
        "calibration": {"text": options.calibration.stem, "sha256": digest(rows)},
        "notes": NOTES[options.peer],
    }
    if options.sentences:
        sentences, sha256 = read_sentences(options.sentences)
        ids, mask = tokenize(tokenizer, sentences)
        probe = {"input_ids": ids[:BATCH], "attention_mask": mask[:BATCH]}  # of the shape that is measured
        original = embed(model, ids, mask, one_shape=True)
    else:
        probe = {"input_ids": rows[:1]}
        original = {name: perplexity(model, text) for name, text in texts.items()}
        print(f"{options.peer}: original {original}", flush=True)
    started = time.perf_counter()
    model = quantize(model, rows, options).eval()
    result["seconds"] = round(time.perf_counter() - started, 1)
    count, others = count_w4a4(model, probe)
    result["linears"] = {"of_blocks": linears, "w4a4": count, "other_shapes": others}
    if count != linears:
        raise SystemExit(f"{options.peer}: {count} linears of {linears} run in W4A4; the others' shapes: {others}")
    if options.sentences:
        found = compare_files(sentences, original, embed(model, ids, mask, one_shape=True))
        result["embeddings"] = {}
        for name, figures in found.items():
            result["embeddings"][name] = {"sentences": len(sentences[name]), "sha256": sha256[name], **figures}
            print(f"{options.peer}: {name} " + ", ".join(f"{key} {value:.4f}" for key, value in figures.items()))
    else:
        result["perplexity"] = {}
        for name, text in texts.items():
            value = perplexity(model, text)
            ratio = value / original[name]
            found = {"original": original[name], "quantized": value, "ratio": ratio}
            result["perplexity"][name] = {"tokens": text.numel(), "sha256": digest(text), **found}
            print(f"{options.peer}: {name} {original[name]:.3f} → {value:.3f} ({ratio:.3f} x)", flush=True)
    for note in NOTES[options.peer]:
        print(f"  note: {note}")
    options.json.write_text(json.dumps(result, indent=1) + "\n")


def digest(rows):
    return hashlib.sha256(rows.numpy().astype("<i8").tobytes()).hexdigest()


if __name__ == "__main__":
    main()
