"""Sentence embeddings of a BERT-type encoder, and how close a quantized encoder's are to the original's.

The embedding is the mean of the last states over a sentence's tokens, scaled to length 1. benchmarks/encoder.py and
benchmarks/peers.py both measure with this file, the latter without svdq: it needs torch alone.

cosine_mean, cosine_p5  of original and quantized embedding of a sentence: mean and 5th percentile over the sentences
spearman                rank correlation of the similarities of all pairs of sentences, original against quantized: what
                        a search by similarity keeps of its order
"""

import hashlib
import sys
from pathlib import Path

import torch
from torch.nn import functional

BATCH = 10


def hide_this_folder():
    """Take benchmarks/ off the path: transformers would take kernels.py for the package of that name."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != here]


def read_sentences(paths):
    """{name of the file: its sentences, one a line} and {name: SHA-256}."""
    contents = {Path(path).stem: Path(path).read_bytes() for path in paths}
    sentences = {name: content.decode("utf-8").splitlines() for name, content in contents.items()}
    return sentences, {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def tokenize(tokenizer, sentences):
    """(ids, mask) of all files' sentences, both int64 [sentences, tokens of the longest]; the mask is 0 at padding."""
    together = [sentence for some in sentences.values() for sentence in some]
    rows = tokenizer(together, padding="longest", truncation=False, return_tensors="pt")
    return rows["input_ids"], rows["attention_mask"]


def pool(states, mask):
    """States [b, t, k] and mask [b, t] → embeddings [b, k] of length 1; what stands at padding has no influence."""
    padding = mask[..., None] == 0
    mean = states.masked_fill(padding, 0).sum(dim=1) / mask.sum(dim=1, keepdim=True)
    return functional.normalize(mean, dim=1)


@torch.no_grad()
def embed(model, ids, mask, one_shape=False):
    """Embeddings float32 [n, k], in batches of sentences of like length.

    one_shape  keep all padding, and fill the last batch: ModelOpt's quantizers want inputs of one shape
    """
    order = mask.sum(dim=1).sort(stable=True).indices
    found = []
    for start in range(0, len(ids), BATCH):
        rows = order[torch.arange(start, start + BATCH).clamp(max=len(ids) - 1)]
        tokens = ids.shape[1] if one_shape else mask[rows].sum(dim=1).max()
        states = model(input_ids=ids[rows, :tokens], attention_mask=mask[rows, :tokens]).last_hidden_state
        found.append(pool(states.float(), mask[rows, :tokens]))
    return torch.cat(found)[: len(ids)][order.argsort()]


def ranks(values):
    """float64 ranks from 1; equal values share the mean of theirs."""
    _, group, count = values.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[group]


def spearman(first, second):
    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()


def compare(original, quantized):
    """Embeddings [n, k] of the same n sentences → {"cosine_mean", "cosine_p5", "spearman"}."""
    original, quantized = original.double(), quantized.double()
    cosines = functional.cosine_similarity(original, quantized, dim=1)
    pairs = torch.triu_indices(len(original), len(original), offset=1)
    similarities = [(one @ one.T)[pairs[0], pairs[1]] for one in (original, quantized)]
    return {
        "cosine_mean": cosines.mean().item(),
        "cosine_p5": cosines.quantile(0.05).item(),
        "spearman": spearman(*similarities),
    }


def compare_files(sentences, original, quantized):
    """Embeddings of all files' sentences → {name: what compare says of that file's}."""
    parts = [one.split([len(some) for some in sentences.values()]) for one in (original, quantized)]
    return {name: compare(*pair) for name, *pair in zip(sentences, *parts, strict=True)}
