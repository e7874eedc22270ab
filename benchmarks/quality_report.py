"""The figures of benchmarks/quality.py: from the commands' JSON to a record, from records to tables and bars."""

import math
from statistics import fmean

from svdq.report import table

IN, OUT = "in domain", "out of domain"
MEASURED = {"in_domain": IN, "kjv": OUT, "novel": OUT}  # text -> domain; layer errors are taken on the first
TYPES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # shown first, in this order
COMMANDS = ("calibrate", "quantize", "verify")

DEFAULT_BARS = {IN: 1.12, OUT: 1.20}  # the default's perplexity, over the original's, at most
NUNCHAKU_BARS = {IN: 1.24, OUT: 1.38}
EXCESS_BAR = 0.60  # the default's perplexity above the original's is smaller than svdquant's by this share at least


def layer_type(name):
    """model.layers.3.mlp.down_proj → down_proj"""
    return name.rpartition(".")[2]


def record(quantized, verified, seconds):
    """One run as plain numbers, from the JSON of quantize and of verify, and the seconds of each command."""
    by_type = {}
    for layer in verified["layers"]:
        by_type.setdefault(layer_type(layer["name"]), []).append(layer["quantization_error"])
    return {
        "layer_error": fmean(layer["quantization_error"] for layer in verified["layers"]),
        "token_error": fmean(layer["token_error"] for layer in verified["layers"]),
        "calibration_error": quantized["mean_error"],
        "by_type": {kind: fmean(errors) for kind, errors in by_type.items()},
        "perplexity": {
            text: {"original": output["original"], "quantized": output["quantized"]}
            for text, output in zip(MEASURED, verified["outputs"], strict=True)
        },
        "seconds": seconds,
        "repairs": len(quantized["repairs"]),
        "warnings": len(quantized["warnings"]),
    }


def ratio(run, texts):
    """Perplexity over these texts together, quantized over original: the geometric mean (they are of equal length)."""
    perplexities = [run["perplexity"][text] for text in texts]
    return math.exp(fmean(math.log(one["quantized"] / one["original"]) for one in perplexities))


def spread(values):
    """{"mean", "spread"}: spread is half the range."""
    values = list(values)
    return {"mean": fmean(values), "spread": (max(values) - min(values)) / 2}


def summarize(runs):
    """The runs of one row, one a seed, as means and spreads."""
    groups = {domain: [text for text in MEASURED if MEASURED[text] == domain] for domain in (IN, OUT)}
    groups |= {text: [text] for text in MEASURED}
    return {
        "layer_error": spread(run["layer_error"] for run in runs),
        "token_error": spread(run["token_error"] for run in runs),
        "by_type": {kind: fmean(run["by_type"][kind] for run in runs) for kind in runs[0]["by_type"]},
        "ratio": {name: spread(ratio(run, texts) for run in runs) for name, texts in groups.items()},
        "perplexity": {
            text: {which: fmean(run["perplexity"][text][which] for run in runs) for which in ("original", "quantized")}
            for text in MEASURED
        },
        "seconds": {command: fmean(run["seconds"][command] for run in runs) for command in COMMANDS},
        "seeds": len(runs),
    }


def tables(summaries):
    """{label: summary} as text: errors and ratios with spreads, perplexities, layer errors by linear type."""

    def cell(value, seeds, form):
        return form(value["mean"]) + (f" ±{form(value['spread'])}" if seeds > 1 else "")

    def share(value):
        return f"{100 * value:.2f}"

    def times(value):
        return f"{value:.3f}"

    main = [
        [
            label,
            *(cell(one[kind], one["seeds"], share) for kind in ("layer_error", "token_error")),
            *(cell(one["ratio"][name], one["seeds"], times) for name in (IN, OUT, "kjv", "novel")),
            *(f"{one['seconds'][command]:.0f}" for command in COMMANDS),
        ]
        for label, one in summaries.items()
    ]
    header = ["method", "layer error %", "per token %", IN, OUT, "kjv", "novel", *(f"{name} s" for name in COMMANDS)]
    first = next(iter(summaries.values()))
    original = ["original", *(f"{first['perplexity'][text]['original']:.2f}" for text in MEASURED)]
    perplexities = [
        [label, *(f"{one['perplexity'][text]['quantized']:.2f}" for text in MEASURED)]
        for label, one in summaries.items()
    ]
    kinds = sorted(first["by_type"], key=lambda kind: TYPES.index(kind) if kind in TYPES else len(TYPES))
    errors = [[label, *(share(one["by_type"][kind]) for kind in kinds)] for label, one in summaries.items()]
    return "\n\n".join(
        [
            table(header, main),
            table(["perplexity", *MEASURED], [original, *perplexities]),
            table(["layer error %", *kinds], errors),
        ]
    )


def check_bars(summaries):
    """{key: summary} → the bars in order: what is measured, the figure (None: its rows are not there), the bar, met."""

    def at_most(key, name, bars):
        for domain, bar in bars.items():
            found = summaries[key]["ratio"][domain]["mean"] if key in summaries else None
            met = None if found is None else found <= bar
            yield {"what": f"{name}, {domain}", "found": found, "wanted": f"<= {bar:.2f}", "met": met}

    def smaller_excess():
        for domain in (IN, OUT):
            found = met = None
            if "quality" in summaries and "svdquant" in summaries:
                ours, theirs = (summaries[key]["ratio"][domain]["mean"] - 1 for key in ("quality", "svdquant"))
                found = 1 - ours / theirs if theirs > 0 else -math.inf
                met = found >= EXCESS_BAR
            what = f"default's excess perplexity, share below svdquant's, {domain}"
            yield {"what": what, "found": found, "wanted": f">= {EXCESS_BAR:.2f}", "met": met}

    bars = [*at_most("quality", "default", DEFAULT_BARS), *at_most("nunchaku", "nunchaku", NUNCHAKU_BARS)]
    return [*bars, *smaller_excess()]


def bars_text(bars):
    words = {True: "met", False: "not met", None: "not measured"}
    rows = [[bar["what"], "-" if bar["found"] is None else f"{bar['found']:.3f}", bar["wanted"], words[bar["met"]]]
            for bar in bars]  # fmt: skip
    return table(["bar", "found", "wanted", ""], rows)


def rounded(value):
    """Every float of nested numbers to 6 digits; infinities as None, which JSON has."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
