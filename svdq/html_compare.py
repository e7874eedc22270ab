"""svdq compare as a page, in the manner of svdq.html_report."""

from __future__ import annotations

import math
from pathlib import Path

from svdq import __version__
from svdq.compare import MEASURES, Compared, Comparison, depths, differing_layers, facts_of
from svdq.html import Bar, Cell, Html, Series, axis, bars, element, page, plot, section, strips, table, whole_axis
from svdq.html_report import finite_bars, kind_of_linear, stacked
from svdq.report import percent


def comparison_page(comparison: Comparison) -> str:
    """The whole document."""
    ones = comparison.checkpoints
    labels = [one.label for one in ones]
    facts = [[what, *values] for what, values in facts_of(comparison)]
    failed = [f"{one.label}: {failure}" for one in ones for failure in one.failures]
    return page(
        f"{' · '.join(labels)}: svdq compare",
        element(
            "header",
            element("p", "svdq compare", class_="eyebrow"),
            element("h1", f"{len(ones)} checkpoints of one model"),
            element("p", "; ".join(f"{one.label}: {one.file}" for one in ones), class_="lead"),
            failed and element("p", f"{len(failed)} checks failed", class_="verdict failed"),
        ),
        section(
            "Side by side", table(["", *labels], facts, sort=False), note=f"Error: {MEASURES[comparison.measure]}."
        ),
        failed
        and section("Failed checks", element("ul", [element("li", text) for text in failed], class_="lines failed")),
        comparison.notes
        and section("Notes", element("ul", [element("li", note) for note in comparison.notes], class_="lines")),
        _depth(comparison),
        _layers(comparison),
        _perplexity(ones),
        section("Bytes", stacked({one.label: one.bytes_by_kind for one in ones})),
        _speed(ones),
        element("footer", f"Report by svdq {__version__}. One file; it loads nothing."),
    )


def _depth(comparison: Comparison) -> Html | None:
    """Each block's mean error, and each type's."""
    if not comparison.shared:
        return None
    place, series, strips_ = depths(comparison.shared), [], []
    for number, one in enumerate(comparison.checkpoints):
        blocks: dict[int, list[float]] = {}
        for name in comparison.shared:
            if name in place:
                blocks.setdefault(place[name], []).append(one.errors[name])
        means = {block: sum(errors) / len(errors) for block, errors in sorted(blocks.items())}
        points = [(block, 100 * mean, f"{one.label}, block {block}: {percent(mean)}") for block, mean in means.items()]
        series.append(Series(one.label, points, number))
        dots = [(100 * one.errors[name], f"{name}: {percent(one.errors[name])}") for name in comparison.shared]
        strips_.append((one.label, number, dots))
    last = max(place.values(), default=0)
    y = axis("mean error of a block's linears, %", (b for s in series for _, b, _ in s.points), zero=False)
    x = axis("error of a linear, %", (value for _, _, dots in strips_ for value, _ in dots))
    return section(
        "Error",
        bool(place) and plot(whole_axis("block", 0, last), y, series),
        element("h3", "All linears"),
        strips(x, strips_),
    )


def _layers(comparison: Comparison) -> Html | None:
    ones, body = comparison.checkpoints, []
    if not comparison.shared:
        return None
    forms = {
        name: [f"{one.layers[name]['format']}, {one.layers[name]['rank']}" for one in ones]
        for name in comparison.shared
    }
    alike = all(len(set(texts)) == 1 for texts in forms.values())
    for name in differing_layers(comparison):
        errors = [one.errors[name] for one in ones]
        best = min((error for error in errors if not math.isnan(error)), default=None)
        cells: list[Cell] = [Cell(name)]
        for error in errors:
            smallest = best is not None and error == best < max(errors)
            cells.append(Cell(percent(error), error, "best" if smallest else None))
        spread = comparison.spread(name)
        cells += [Cell(f"{100 * spread:.2f}", spread), Cell(kind_of_linear(name))]
        body.append(cells + [Cell(text) for text in forms[name][: 1 if alike else None]])
    labels = [one.label for one in ones]
    formats = ["format, rank"] if alike else [f"format, rank: {label}" for label in labels]
    header = ["layer", *labels, "apart, points", "type", *formats]
    return section("Linears", table(header, body, search="Filter linears"), note="The smallest error of each is bold.")


def _perplexity(ones: list[Compared]) -> Html | None:
    rows: list[Bar] = []
    for source in dict.fromkeys(output["source"] for one in ones for output in one.outputs):
        name, original = Path(source).name, None
        for number, one in enumerate(ones):
            output = next((output for output in one.outputs if output["source"] == source), {})
            before, ours = output.get("original"), output.get("quantized")
            if before and original is None:
                original = before
                rows.append(Bar(f"{name}, original", [(before, 7, f"{before:.4f}")], f"{before:.2f}"))
            if before and ours is not None:
                rows.append(
                    Bar(f"{name}, {one.label}", [(ours, number, f"{ours:.4f}")], f"{ours:.2f} ({ours / before:.3f} x)")
                )
    return section("Perplexity", bars(finite_bars(rows)), note="Lower is better.") if rows else None


def _speed(ones: list[Compared]) -> Html | None:
    rows = []
    for number, one in enumerate(ones):
        if one.speed:
            ms = one.speed["ms_per_step"]
            rows.append(
                Bar(
                    f"{one.label}, {one.speed['tokens']} tokens, {one.speed['device']}",
                    [(ms, number, f"{ms:.3f} ms")],
                    f"{ms:.2f} ms",
                )
            )
    return section("Time of a step", bars(rows), note="By svdq profile. Lower is better.") if rows else None
