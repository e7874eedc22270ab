"""svdq verify's report as a page: every number is the run's own or the file's; what was not measured is not shown."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from svdq import __version__, schema
from svdq.details import ORDER, Details, LayerDetails, bytes_by_kind, layer_format, source_bytes_by_kind
from svdq.html import (
    Axis,
    Bar,
    Cell,
    Html,
    Series,
    axis,
    bars,
    columns,
    element,
    legend,
    log_axis,
    page,
    plot,
    profile,
    section,
    strips,
    table,
    tiles,
    whole_axis,
)
from svdq.models import Model
from svdq.quantized import QuantizedFile
from svdq.report import percent, size
from svdq.store_checks import change_text
from svdq.verify import LayerReport, Report

MEASURES = {  # attribute of LayerReport: (name, what it is)
    "token_error": ("error per token", "root mean over held-out tokens of each one's squared relative error"),
    "store_error": ("error on the store", "relative error of the outputs on the calibration tokens"),
    "quantization_error": ("error of the weights", "relative error of the weights; the run had no data"),
}
WORST = 6  # layers whose channels are drawn
PLACES = 320  # along x in a drawing of channels


def measure_of(rows: Sequence[LayerReport]) -> str:
    """The most telling error that the run has: see MEASURES."""
    return next((key for key in MEASURES if any(getattr(row, key) is not None for row in rows)), "quantization_error")


def kind_of_linear(name: str) -> str:
    """Its path inside its block: model.layers.3.mlp.up_proj → mlp.up_proj."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[-1]


def falling(value: float | None) -> float:
    """Sort key: NaN first, then the largest; what is missing last."""
    return math.inf if value is None else -math.inf if math.isnan(value) else -value


def verification_page(report: Report, details: Details, model: Model, quantized: QuantizedFile) -> str:
    """The whole document. details: as the run filled it."""
    rows, key = report.layers, measure_of(report.layers)
    depth = {linear.name: linear.block for linear in model.linears}
    parts = [
        _head(report, model, quantized),
        _tiles(report, model, quantized, key),
        _remarks(report),
        rows and _errors(rows, key, depth),
        rows and _layers(report, quantized, key),
        _outputs(report, quantized),
        _channels(rows, key, details),
        element("div", _codes(details, quantized), _rounds(rows), class_="pair"),
        element("div", _bytes(model, quantized), _seconds(details), class_="pair"),
        _what_if(report),
        _foot(quantized),
    ]
    return page(f"{Path(report.file).name}: svdq verify", *parts)


def _head(report: Report, model: Model, quantized: QuantizedFile) -> Html:
    config = quantized.config
    formats = sorted({layer_format(quantized, name) for name in quantized.layers})
    facts = [
        f"{report.file}: {report.kind} {', '.join(formats)} checkpoint of {model.directory}",
        f"rank {config.get('rank')}",
        f"rotation {config.get('rotation')}",
        f"{'with' if config.get('smooth') else 'without'} smoothing",
        f"checked with {'the CUDA kernels' if report.kernels == 'cuda' else 'the reference'}",
    ]
    count = len(report.failures)
    verdict = f"{count} {'check' if count == 1 else 'checks'} failed" if count else "all checks passed"
    return element(
        "header",
        element("p", "svdq verify", class_="eyebrow"),
        element("h1", Path(report.file).name),
        element("p", ", ".join(facts), class_="lead"),
        element("p", verdict, class_="verdict failed" if count else "verdict"),
    )


def _tiles(report: Report, model: Model, quantized: QuantizedFile, key: str) -> Html:
    rows, name = report.layers, MEASURES[key][0]
    kinds, before = bytes_by_kind(quantized), sum(source_bytes_by_kind(model, quantized).values())
    facts: list[tuple[str, str, str | None]] = []
    whole = not quantized.config.get("linears_only") and bool(quantized.other_tensors)
    facts.append(("file", size(sum(kinds.values())), f"original {size(before)}" if whole else None))
    weights = sum(n * k for n, k, _, _ in quantized.layers.values())
    others = set(quantized.other_tensors)
    stored = sum(info.nbytes for tensor, info in quantized.file.tensors.items() if tensor not in others)
    if weights:
        facts.append(("bits per weight", f"{8 * stored / weights:.2f}", f"{len(quantized.layers)} linears"))
    if rows:
        values = [getattr(row, key) for row in rows if getattr(row, key) is not None]
        worst = min(rows, key=lambda row: falling(getattr(row, key)))
        facts.append(("mean error", percent(sum(values) / len(values)), name.removeprefix("error ")))
        facts.append(("largest error", percent(getattr(worst, key)), worst.name))
        kernel = max((row.kernel_error for row in rows), key=lambda value: -falling(value))
        types = ", ".join(sorted({row.kernel_dtype for row in rows}))
        facts.append(("kernel error", f"{kernel:.1e}", f"at most, {types}"))
    for output in report.outputs:
        source = Path(output.source).name
        if output.original is not None and output.quantized is not None:
            facts.append(("perplexity", f"{output.quantized / output.original:.3f} x", source))
        elif output.state_cosine is not None:
            facts.append(("mean cosine", f"{output.state_cosine:.4f}", source))
        elif output.output_error is not None:
            facts.append(("output error", percent(output.output_error), source))
    return tiles(facts)


def _remarks(report: Report) -> list[Html]:
    lists = [("Failed checks", report.failures), ("Repairs", report.repairs), ("Notes", report.notes)]
    return [
        section(
            f"{title} ({len(items)})",
            element(
                "ul",
                [element("li", item) for item in items],
                class_="lines failed" if items is report.failures else "lines",
            ),
        )
        for title, items in lists
        if items
    ]


# ---------------------------------------------------------------------------------------------- layers


def _colours(rows: Sequence[LayerReport]) -> dict[str, int]:
    """Type of linear → its number, the same in all charts of a page."""
    return {kind: i for i, kind in enumerate(sorted({kind_of_linear(row.name) for row in rows}))}


def _errors(rows: Sequence[LayerReport], key: str, depth: dict[str, int]) -> Html:
    """Every linear's error over its block, a line a type; and a strip of dots a type."""
    name, meaning = MEASURES[key]
    kinds: dict[str, list[tuple[float, float, str]]] = {kind: [] for kind in _colours(rows)}
    dots: dict[str, list[tuple[float, str]]] = {kind: [] for kind in kinds}
    for row in rows:
        error = getattr(row, key)
        if error is not None:
            told, kind = f"{row.name}: {percent(error)}", kind_of_linear(row.name)
            dots[kind].append((100 * error, told))
            if row.name in depth:
                kinds[kind].append((depth[row.name], 100 * error, told))
    label, values = f"{name}, %", [value for found in dots.values() for value, _ in found]
    series = [Series(kind, sorted(kinds[kind]), number) for kind, number in _colours(rows).items()]
    x = whole_axis("block", 0, max((depth[row.name] for row in rows if row.name in depth), default=0))
    return section(
        "Error of every linear",
        plot(x, axis(label, values), series, height=300),
        element("h3", "By type of linear"),
        strips(axis(label, values), [(kind, number, dots[kind]) for kind, number in _colours(rows).items()]),
        note=f"{name}: {meaning}.",
    )


def _layers(report: Report, quantized: QuantizedFile, key: str) -> Html:
    rows = sorted(report.layers, key=lambda row: falling(getattr(row, key)))
    optional = [
        ("per token", "token_error"),
        ("on store", "store_error"),
        ("codes differ", "codes_differ"),
    ]
    shown = [(label, name) for label, name in optional if any(getattr(row, name) is not None for row in rows)]
    told = any(row.quantizer for row in rows)
    header = ["layer", "format", "N", "K", "rank", "group", "quant. error", *(label for label, _ in shown)]
    header += ["kernel error", "repack", *(["round kept", "damping"] if told else [])]
    failed = {failure.partition(":")[0] for failure in report.failures}
    body = []
    for row in rows:
        cells = [
            Cell(row.name, class_="bad" if row.name in failed else None),
            layer_format(quantized, row.name),
            *(Cell(f"{count:,}", count) for count in (row.n, row.k, row.rank, row.group_size)),
            Cell(percent(row.quantization_error), row.quantization_error),
        ]
        for _, name in shown:
            value = getattr(row, name)
            cells.append(Cell(f"{value}" if isinstance(value, int) else percent(value), value))
        cells.append(Cell(f"{row.kernel_error:.1e}", row.kernel_error))
        cells.append("same" if row.roundtrip else Cell("differs", class_="bad"))
        if told:
            of = len(row.quantizer["rounds"]) if row.quantizer else 0
            kept = row.quantizer["kept_round"] if row.quantizer and of else None
            cells.append(Cell("-" if kept is None else f"{kept} of {of}", kept))
            damping = row.quantizer["damping"] if row.quantizer else None
            cells.append(Cell("-" if damping is None else f"{damping:.3g}", damping))
        body.append(cells)
    text = "Quantization error: what the format costs. Kernel error: what the path that computes it adds."
    return section("Linears", table(header, body, search="Filter linears"), note=text)


def _channels(rows: Sequence[LayerReport], key: str, details: Details) -> Html | None:
    """The inputs of the worst linears, channel by channel."""
    named = sorted((row for row in rows if row.name in details.layers), key=lambda row: falling(getattr(row, key)))
    drawn: list[tuple[LayerReport, LayerDetails]] = []
    tokens, binned = 0, 1
    for row in named:
        seen = details.layers[row.name]
        if seen.absmax is None or len(drawn) == WORST:
            continue
        if any(other.absmax is not None and seen.absmax.equal(other.absmax) for _, other in drawn):
            continue  # siblings read one input
        drawn.append((row, seen))
        tokens, binned = max(tokens, seen.tokens), max(binned, -(-len(seen.absmax) // PLACES))
    if not drawn:
        return None
    charts = []
    for row, seen in drawn:
        channels = [(values.tolist(), number) for values, number in ((seen.absmax, 7), (seen.absmax_read, 0))
                    if values is not None]  # fmt: skip
        curves = [(peaks(values), number) for values, number in channels]
        x = whole_axis(f"channel of {row.k:,}", 0, row.k)
        y = log_axis("largest absolute value", (value for values, _ in curves for value in values))
        told = " → ".join(f"{_over_median(values):.1f}" for values, _ in channels)
        facts = f"{percent(getattr(row, key))}; largest channel over the median one: {told}"
        charts.append(
            element("div", element("h3", row.name), element("p", facts, class_="note"), profile(x, y, curves))
        )
    text = f"Inputs of the linears with the largest error, the largest |x| of each channel over {tokens:,} tokens."
    if binned > 1:
        text += f" Drawn is the largest of up to {binned} neighbouring channels."
    keys = [("as it arrives", 7)]
    if any(seen.absmax_read is not None for _, seen in drawn):
        keys.append(("smoothed and rotated, as it is quantized", 0))
    return section(
        "Outlying channels", element("figure", legend(keys)), element("div", charts, class_="grid"), note=text
    )


def peaks(values: Sequence[float]) -> list[float]:
    """At most PLACES values, each the largest of as many neighbours."""
    step = -(-len(values) // PLACES)
    return [max(values[i : i + step]) for i in range(0, len(values), step)]


def _over_median(values: Sequence[float]) -> float:
    middle = sorted(values)[len(values) // 2]
    return max(values) / middle if middle > 0 else math.inf


def _codes(details: Details, quantized: QuantizedFile) -> list[Html]:
    """A histogram for each format in the file. Codes are integers in all of them: see svdq.grid."""
    formats: dict[str, Counter[int]] = {}
    grid = quantized.format.grid
    meaning = ", twice its E2M1 number" if grid.e2m1 else ", counted from the zero point" if grid.asymmetric else ""
    for name, layer in details.layers.items():
        formats.setdefault(layer_format(quantized, name), Counter()).update(layer.codes)
    sections = []
    for kind, counts in sorted(formats.items()):
        total = sum(counts.values())
        shares = {code: count / total for code, count in counts.items()}
        entropy = sum(-share * math.log2(share) for share in shares.values())
        x = whole_axis(f"code{meaning}", min(counts), max(counts))
        x = Axis(x.label, x.lo - 0.5, x.hi + 0.5, x.marks)
        y = axis("weights, %", (100 * share for share in shares.values()), about=4)
        drawn = [
            (code, 100 * share, f"{code}: {percent(share)}, {counts[code]:,} weights")
            for code, share in sorted(shares.items())
        ]
        text = f"{total:,} weights of {kind}; their distribution carries {entropy:.2f} bits a weight."
        sections.append(section("Weight codes", columns(x, y, drawn), note=text))
    return sections


def _rounds(rows: Sequence[LayerReport]) -> Html | None:
    """The quantizer's objective from round to round, by type: of the linears with the most usual number of rounds."""
    counts = Counter(len(row.quantizer["rounds"]) for row in rows if row.quantizer)
    usual = counts.most_common(1)[0][0] if counts else 0
    if usual < 2:
        return None
    kinds: dict[str, list[list[float]]] = {}
    for row in rows:
        if row.quantizer and len(row.quantizer["rounds"]) == usual:
            errors = [entry["error"] for entry in row.quantizer["rounds"]]
            kinds.setdefault(kind_of_linear(row.name), []).append(errors)
    series = []
    for kind, runs in sorted(kinds.items()):
        means = [sum(errors) / len(runs) for errors in zip(*runs, strict=True)]
        points = [
            (i + 1, 100 * mean / means[0], f"{kind}, round {i + 1}: {percent(mean)}")
            for i, mean in enumerate(means)
            if means[0] > 0
        ]
        series.append(Series(kind, points, _colours(rows)[kind]))
    y = axis("mean error, % of the first round's", (b for s in series for _, b, _ in s.points), zero=False)
    text = f"√(J/‖X'W'ᵀ‖²) on the calibration tokens, as the quantizer reported it: {counts[usual]} linears."
    return section("Objective by round", plot(whole_axis("round", 1, usual), y, series, height=240), note=text)


# ---------------------------------------------------------------------------------------------- the whole


def _outputs(report: Report, quantized: QuantizedFile) -> Html | None:
    """Perplexities as bars; of a model without them, how far its states are, or a diffusion transformer's output."""
    if not report.outputs:
        return None
    name, rows = "W4A8" if report.activations == "fp8" else report.format.upper(), []
    if all(output.original is not None and output.quantized is not None for output in report.outputs):
        for output in report.outputs:
            original, ours = output.original or 0.0, output.quantized or 0.0
            source = Path(output.source).name
            rows.append(Bar(f"{source}, original", [(original, 7, f"{original:.4f}")], f"{original:.2f}"))
            told = f"{ours:.2f}  ({ours / original:.3f} x)"
            rows.append(Bar(f"{source}, {name}", [(ours, 0, f"{ours:.4f}")], told))
        counts = ", ".join(f"{output.tokens:,} of {output.source}" for output in report.outputs)
        return section("Perplexity", bars(finite_bars(rows)), note=f"Tokens: {counts}. Lower is better.")
    if all(output.output_error is not None for output in report.outputs):
        body = [
            [output.source, Cell(f"{output.tokens:,}", output.tokens), Cell(percent(error), error)]
            for output in report.outputs
            if (error := output.output_error) is not None
        ]
        return section("The transformer's output", table(["calls", "tokens", "relative error"], body, sort=False))
    body = [
        [
            output.source,
            Cell(f"{output.tokens:,}", output.tokens),
            Cell(percent(output.state_error), output.state_error),
            Cell(f"{output.state_cosine:.4f}", output.state_cosine),
        ]
        for output in report.outputs
        if output.state_cosine is not None
    ]
    return section("Final states", table(["text", "tokens", "relative error", "mean cosine"], body, sort=False))


def finite_bars(rows: Iterable[Bar]) -> list[Bar]:
    """A bar has no length that is not finite: its text stays."""
    return [Bar(row.label, [part for part in row.parts if math.isfinite(part[0])], row.text) for row in rows]


def _bytes(model: Model, quantized: QuantizedFile) -> Html:
    now, before = bytes_by_kind(quantized), source_bytes_by_kind(model, quantized)
    return section(
        "Bytes",
        stacked({"original, tensors": before, "file": now}),
        table(
            ["kind", "bytes", "of the file"],
            [
                [kind, Cell(size(count), count), Cell(percent(count / sum(now.values())), count)]
                for kind, count in now.items()
            ],
            sort=False,
        ),
    )


def stacked(names: dict[str, dict[str, int]]) -> Html:
    """A bar of kinds of bytes for each name."""
    present = {kind for counts in names.values() for kind in counts}
    number = {kind: i for i, kind in enumerate(kind for kind in ORDER if kind in present)}
    rows = [
        Bar(
            name,
            [
                (count, number[kind], f"{kind}: {size(count)}")
                for kind, count in sorted(counts.items(), key=lambda x: number[x[0]])
            ],
            size(sum(counts.values())),
        )
        for name, counts in names.items()
    ]
    return bars(rows, [(kind, i) for kind, i in number.items()])


def _seconds(details: Details) -> Html | None:
    if not details.seconds:
        return None
    rows = [Bar(phase, [(spent, 0, f"{spent:.2f} s")], f"{spent:.1f} s") for phase, spent in details.seconds.items()]
    return section("Time of this check", bars(rows), note=f"{sum(details.seconds.values()):.1f} s in all.")


def _what_if(report: Report) -> list[Html]:
    parts = []
    for answer in report.what_if:
        body = [
            [row.name, Cell(percent(row.error_now), row.error_now), Cell(percent(row.error_then), row.error_then),
             Cell(f"{100 * row.gain:.2f}", row.gain), Cell(size(row.bytes_more), row.bytes_more)]
            for row in sorted(answer.layers, key=lambda row: falling(row.gain))
        ]  # fmt: skip
        text = (
            f"Mean error on the calibration tokens {percent(answer.mean_now)} → {percent(answer.mean_then)}, "
            f"{size(answer.bytes_more)} more in the file."
        )
        header = ["layer", "now", "then", "gain, points", "bytes more"]
        parts.append(section(f"What if {change_text(answer.change)}", table(header, body), note=text))
    return parts


def _foot(quantized: QuantizedFile) -> Html:
    calibrated = quantized.meta(schema.CALIBRATION, dict)
    producer = quantized.config.get("producer", {})
    facts = [f"Quantized by {producer.get('name')} {producer.get('version')}"]
    if calibrated.get("source"):
        facts[0] += f" on {calibrated.get('tokens')} tokens of {calibrated.get('source')}"
    facts.append(f"Report by svdq {__version__}. One file; it loads nothing.")
    return element("footer", ". ".join(facts))
