"""Pages of one file: markup whose text is escaped by construction, tables that sort, charts that fit any width.

Escaping   `element` escapes every child that is not `Html`, and every attribute. A forgotten call cannot let a layer's
           name through; and were one to pass, the page's own policy runs no script but the one it was written with.
Charts     SVG whose x is in per cent and whose y is in pixels, so that a phone gets the same type size as a desktop.
           Their y labels stand on the grid lines, inside. Rejected: a viewBox around everything, which shrinks the
           text with the picture; a plotting library, which would be most of the file.
No inline style anywhere: the policy allows the style sheet alone.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from svdq.report import printable

COLOURS = 8  # of the style sheet; further series take them again with another mark
LEFT, RIGHT = 9.0, 98.0  # per cent of a chart's width between which points lie; left of it stand the y labels
TOP, BOTTOM = 18.0, 34.0  # pixels above the highest and below the lowest value


class Html(str):
    """Text that is markup already; `str` is text that is not."""


def element(name: str, *children: Any, **attributes: Any) -> Html:
    """<name …>children</name>. None and False are left out, lists are spliced; class_ is class, data_v is data-v."""
    pieces = [f"<{name}"]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        pieces.append(f" {label}" if value is True else f' {label}="{_escaped(value)}"')
    pieces.append(">")
    pieces += map(_escaped, _flat(children))
    return Html("".join([*pieces, f"</{name}>"]))


def _flat(children: Iterable[Any]) -> Iterable[Any]:
    for child in children:
        if isinstance(child, (list, tuple)):
            yield from _flat(child)
        elif child is not None and child is not False:
            yield child


def _escaped(value: Any) -> str:
    if isinstance(value, Html):
        return str(value)
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return html.escape(printable(text))


@cache
def _asset(name: str) -> str:
    return (files("svdq") / "page" / name).read_text(encoding="utf-8")


def page(title: str, *body: Any) -> str:
    """A whole document. It loads nothing, and its policy lets nothing be loaded."""
    style, script = _asset("page.css"), _asset("page.js")
    allowed = {kind: f"'sha256-{_digest(text)}'" for kind, text in (("style", style), ("script", script))}
    policy = f"default-src 'none'; img-src data:; style-src {allowed['style']}; script-src {allowed['script']}"
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        element("title", title),
        element("style", Html(style)),
    ]
    content = [element("main", *body), element("script", Html(script))]
    return "<!doctype html>\n" + element("html", element("head", *head), element("body", *content), lang="en") + "\n"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def section(title: str, *body: Any, note: str | None = None, wide: bool = False) -> Html:
    return element(
        "section",
        element("h2", title),
        note and element("p", note, class_="note"),
        *body,
        class_="wide" if wide else None,
    )


def tiles(facts: Sequence[tuple[str, str, str | None]]) -> Html:
    """(what, value, small print) of each."""
    return element(
        "dl",
        [
            element("div", element("dt", label), element("dd", value), small and element("dd", small, class_="small"))
            for label, value, small in facts
        ],
        class_="tiles",
    )


# ---------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Cell:
    """What stands there, and the number it is sorted by; None: by its text, and after all numbers."""

    text: Any
    value: float | None = None
    class_: str | None = None


def table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], *, search: str | None = None, sort: bool = True
) -> Html:
    """In a box of its own that scrolls. Numbers stand right; the first column is a row's name.

    search  what a field over the table asks for, or None for no field
    sort    whether a click on a column's name sorts by it
    """
    numeric = [any(isinstance(row[i], Cell) and row[i].value is not None for row in rows) for i in range(len(header))]
    heads = [
        element(
            "th",
            element("button", name, type="button") if sort else name,
            scope="col",
            class_="number" if right else None,
        )
        for name, right in zip(header, numeric, strict=True)
    ]
    body = []
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            cell = cell if isinstance(cell, Cell) else Cell(cell)
            classes = " ".join(filter(None, ["number" if numeric[i] else None, cell.class_])) or None
            value = None if cell.value is None else f"{cell.value!r}" if math.isfinite(cell.value) else "Infinity"
            cells.append(
                element(
                    "th" if i == 0 else "td", cell.text, class_=classes, data_v=value, scope="row" if i == 0 else None
                )
            )
        body.append(element("tr", cells))
    field = None
    if search:
        field = element(
            "label",
            element("input", type="search", placeholder=search, aria_label=search),
            element("output", f"{len(rows)} of {len(rows)}"),
            class_="search",
        )
    grid = element(
        "table", element("thead", element("tr", heads)), element("tbody", body), class_="sorts" if sort else None
    )
    return element("div", field, element("div", grid, class_="scroll", tabindex="0"), class_="table")


# ---------------------------------------------------------------------------------------------- axes


def ticks(lo: float, hi: float, about: int = 5) -> list[float]:
    """Round numbers from lo to hi, some `about` of them."""
    if not hi > lo:
        return [lo]
    raw = (hi - lo) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw * 0.999), 10 * power)
    first = math.ceil(lo / step - 1e-9)
    return [i * step for i in range(first, math.floor(hi / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Axis:
    """A range of values along an edge. marks: (value, text); label says what, with the unit."""

    label: str
    lo: float
    hi: float
    marks: Sequence[tuple[float, str]]
    log: bool = False

    def share(self, value: float) -> float:
        """0 at lo, 1 at hi; values beyond are cut off."""
        lo, hi = (math.log10(self.lo), math.log10(self.hi)) if self.log else (self.lo, self.hi)
        at = (math.log10(value) if value > 0 else lo) if self.log else value
        return min(max((at - lo) / (hi - lo), 0.0), 1.0) if hi > lo else 0.5


def axis(label: str, values: Iterable[float], *, zero: bool = True, about: int = 5) -> Axis:
    """From 0 (or, zero=False, a round number below the smallest) to a round one above the largest."""
    finite = [value for value in values if math.isfinite(value)]
    lo, hi = (min(finite), max(finite)) if finite else (0.0, 1.0)
    lo, hi = (min(0.0, lo), max(hi, 0.0)) if zero else (lo, hi)
    if hi <= lo:
        lo, hi = (0.0, 1.0) if hi == 0 else (lo - abs(lo) / 2, hi + abs(hi) / 2)
    inner = ticks(lo, hi, about)
    step = inner[1] - inner[0] if len(inner) > 1 else hi - lo
    lo, hi = math.floor(lo / step + 1e-9) * step, math.ceil(hi / step - 1e-9) * step
    return Axis(label, lo, hi, [(value, f"{value:.6g}") for value in ticks(lo, hi, about)])


def log_axis(label: str, values: Iterable[float]) -> Axis:
    """Whole decades around the finite positive values."""
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    lo, hi = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    hi = max(hi, lo + 1)
    step = -(-(hi - lo) // 6)
    marks = [(10.0**power, f"{10.0**power:g}") for power in range(lo, hi + 1, step)]
    return Axis(label, 10.0**lo, 10.0**hi, marks, log=True)


def whole_axis(label: str, lo: int, hi: int) -> Axis:
    """Of whole numbers, some of which are marked."""
    step = max(1, next(s * 10**p for p in range(9) for s in (1, 2, 5) if (hi - lo) / (s * 10**p) <= 8))
    return Axis(label, lo, hi, [(value, f"{value:,}") for value in range(lo, hi + 1) if value % step == 0])


# ---------------------------------------------------------------------------------------------- charts


@dataclass(frozen=True)
class Series:
    """points: (x, y, what a pointer that rests on it is told)."""

    label: str
    points: Sequence[tuple[float, float, str]]
    number: int  # its colour and mark
    dashed: bool = False


def plot(x: Axis, y: Axis, series: Sequence[Series], *, height: int = 260, lines: bool = True) -> Html:
    """Points, joined or not, with a legend that points out a series."""
    inner = height - TOP - BOTTOM
    drawn = []
    for entry in series:
        places = [(x.share(a), y.share(b), title) for a, b, title in entry.points if math.isfinite(b)]
        joined = None
        if lines and len(places) > 1:
            path = " ".join(f"{100 * a:.2f},{100 - 100 * b:.2f}" for a, b, _ in places)
            joined = element(
                "svg",
                element("polyline", points=path, vector_effect="non-scaling-stroke"),
                viewBox="0 0 100 100",
                preserveAspectRatio="none",
                x=f"{LEFT}%",
                y=TOP,
                width=f"{RIGHT - LEFT}%",
                height=inner,
            )
        dots = [_mark(entry.number, _across(a), TOP + inner * (1 - b), title) for a, b, title in places]
        classes = f"series c{entry.number % COLOURS}{' dashed' if entry.dashed else ''}"
        drawn.append(element("g", joined, dots, class_=classes, data_series=entry.label))
    keys = legend([(entry.label, entry.number) for entry in series]) if len(series) > 1 else None
    return figure(x, y, drawn, height=height, keys=keys)


def legend(entries: Sequence[tuple[str, int]]) -> Html:
    """(label, number of its colour and mark) of each."""
    keys = []
    for label, number in entries:
        mark = element("svg", _mark(number, "50%", 6.0, None), class_=f"key c{number % COLOURS}")
        keys.append(element("li", mark, label, data_series=label))
    return element("ul", keys, class_="legend")


def _mark(number: int, x: str, y: float, title: str | None) -> Html:
    tip = title and element("title", title)
    if number < COLOURS:
        return element("circle", tip, cx=x, cy=round(y, 1), r=3.2)
    return element(
        "svg",
        element("rect", tip, x=-3, y=-3, width=6, height=6),
        x=x,
        y=round(y, 1),
        overflow="visible",
        width=1,
        height=1,
    )


def _across(share: float) -> str:
    return f"{LEFT + share * (RIGHT - LEFT):.2f}%"


def figure(x: Axis, y: Axis, drawn: Sequence[Html], *, height: int, keys: Html | None = None) -> Html:
    """Grid, marks of both axes, and what is drawn over them."""
    inner, parts = height - TOP - BOTTOM, []
    for value, text in y.marks:
        at = round(TOP + inner * (1 - y.share(value)), 1)
        parts.append(element("line", x1="0", x2="100%", y1=at, y2=at, class_="grid"))
        parts.append(element("text", text, x="0", y=at - 4, class_="tick"))
    for value, text in x.marks:
        parts.append(element("text", text, x=_across(x.share(value)), y=height - 18, class_="tick middle"))
    picture = element(
        "svg", parts, drawn, height=height, class_="chart", role="img", aria_label=f"{y.label} by {x.label}"
    )
    return element(
        "figure",
        keys,
        element("p", y.label, class_="axis"),
        picture,
        element("figcaption", x.label, class_="axis x"),
    )


def columns(x: Axis, y: Axis, bars: Sequence[tuple[float, float, str]], *, height: int = 220, number: int = 0) -> Html:
    """Upright bars at whole x, (x, y, title)."""
    inner = height - TOP - BOTTOM
    width = 0.8 * (RIGHT - LEFT) / max(x.hi - x.lo, 1)
    drawn = []
    for at, value, title in bars:
        tall = inner * y.share(value)
        left = LEFT + x.share(at) * (RIGHT - LEFT) - width / 2
        drawn.append(
            element(
                "rect",
                element("title", title),
                x=f"{left:.2f}%",
                width=f"{width:.2f}%",
                y=round(TOP + inner - tall, 1),
                height=round(tall, 1),
            )
        )
    return figure(x, y, [element("g", drawn, class_=f"c{number % COLOURS}")], height=height)


def profile(x: Axis, y: Axis, curves: Sequence[tuple[Sequence[float], int]], *, height: int = 170) -> Html:
    """A filled outline of each curve, (values, colour), over as many places along x as it has values."""
    inner, drawn = height - TOP - BOTTOM, []
    for values, number in curves:
        tops = [100 - 100 * y.share(value) for value in values]
        steps = "".join(f"L{i},{top:.1f}L{i + 1},{top:.1f}" for i, top in enumerate(tops))
        drawn.append(
            element(
                "svg",
                element("path", d=f"M0,100{steps}L{len(tops)},100Z", class_=f"area c{number}"),
                viewBox=f"0 0 {len(tops)} 100",
                preserveAspectRatio="none",
                x=f"{LEFT}%",
                y=TOP,
                width=f"{RIGHT - LEFT}%",
                height=inner,
            )
        )
    return figure(x, y, drawn, height=height)


@dataclass(frozen=True)
class Bar:
    """A row: a bar of parts one after the other, (value, colour, title), and what is written beside it."""

    label: str
    parts: Sequence[tuple[float, int, str]]
    text: str


def bars(rows: Sequence[Bar], keys: Sequence[tuple[str, int]] = ()) -> Html:
    """Lying bars on one scale from 0. keys: (label, colour) of their parts, for a legend."""
    longest = max((sum(value for value, _, _ in row.parts) for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        start, drawn = 0.0, []
        for value, number, title in row.parts:
            wide = 100 * value / longest
            drawn.append(
                element(
                    "rect",
                    element("title", title),
                    x=f"{start:.3f}%",
                    width=f"{wide:.3f}%",
                    height="100%",
                    class_=f"c{number % COLOURS}",
                )
            )
            start += wide
        picture = element("svg", drawn, class_="bar", role="img", aria_label=f"{row.label}: {row.text}")
        lines.append(element("li", element("span", row.label, class_="what"), picture, element("span", row.text)))
    return element("figure", keys and legend(keys), element("ul", lines, class_="bars"))


def strips(x: Axis, rows: Sequence[tuple[str, int, Sequence[tuple[float, str]]]]) -> Html:
    """A row of dots each, (label, colour, (value, title) of the dots), a line at their mean; the axis below all."""
    lines = [element("li", element("span"), element("svg"), element("span", "mean"), class_="over")]
    for label, number, dots in rows:
        finite = [value for value, _ in dots if math.isfinite(value)]
        mean = sum(finite) / len(finite) if finite else math.nan
        drawn = [element("line", x1="0", x2="100%", y1=11, y2=11, class_="grid")]
        drawn += [
            element("circle", element("title", title), cx=f"{100 * x.share(value):.2f}%", cy=11, r=3.2)
            for value, title in dots
            if math.isfinite(value)
        ]
        if finite:
            at = f"{100 * x.share(mean):.2f}%"
            drawn.append(
                element("line", element("title", f"mean {mean:.4g}"), x1=at, x2=at, y1=2, y2=20, class_="mean")
            )
        picture = element(
            "svg", drawn, class_=f"strip c{number % COLOURS}", role="img", aria_label=f"{x.label} of {label}"
        )
        lines.append(
            element(
                "li", element("span", label, class_="what"), picture, element("span", f"{mean:.2f}" if finite else "-")
            )
        )
    marks = [
        element("text", text, x=f"{100 * x.share(value):.2f}%", y=12, class_="tick middle") for value, text in x.marks
    ]
    lines.append(element("li", element("span"), element("svg", marks, class_="strip ticks"), element("span")))
    return element("figure", element("ul", lines, class_="bars"), element("figcaption", x.label, class_="axis x"))
