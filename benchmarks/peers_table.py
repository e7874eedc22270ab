"""Tables of what benchmarks/peers.py left in a folder: python benchmarks/peers_table.py DIR

Language models: perplexity over the original's, in domain and out of it (the geometric mean of the two texts of
benchmarks/quality.py); other texts by their names. Encoders: the figures of benchmarks/embeddings.py. Seconds are those
of the quantization alone. Only files of one model and of the same measured texts stand in one table.
"""

import json
import sys
from pathlib import Path
from statistics import geometric_mean

from svdq.report import table

FIGURES = {"cosine_mean": "cosine", "cosine_p5": "5th percentile", "spearman": "Spearman"}
OUT = ("kjv", "novel")


def ratios(perplexity):
    """{column: perplexity over the original's}"""
    found = {name.replace("_", " "): one["ratio"] for name, one in perplexity.items()}
    if all(name in found for name in OUT):
        found["out of domain"] = geometric_mean(found[name] for name in OUT)
    return found


def tables(results):
    """{name: a result of peers.py} as text, one table for each model and set of measured texts, best first."""
    groups = {}
    for name, result in results.items():
        if "embeddings" in result:
            kind, texts = "cosine", result["embeddings"]
            columns = {
                f"{name.replace('_', ' ')}, {title}": figures[key]
                for name, figures in texts.items()
                for key, title in FIGURES.items()
            }
        else:
            kind, texts = "perplexity", result["perplexity"]
            columns = ratios(texts)
        measured = (result["model"], kind, *(text["sha256"] for text in texts.values()))
        groups.setdefault(measured, []).append((name, columns, result["seconds"]))
    shown = []
    for (model, kind, *_), rows in groups.items():
        rows.sort(key=lambda row: next(iter(row[1].values())), reverse=kind == "cosine")
        places = 4 if kind == "cosine" else 3
        body = [
            [name, *(f"{value:.{places}f}" for value in columns.values()), f"{seconds:.0f}"]
            for name, columns, seconds in rows
        ]
        shown.append(table([model, *rows[0][1], "seconds"], body))
    return "\n\n".join(shown)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/peers_table.py DIR")
    print(tables({file.stem: json.loads(file.read_text()) for file in sorted(Path(sys.argv[1]).glob("*.json"))}))
