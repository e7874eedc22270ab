"""Markup is escaped by construction; axes carry round numbers."""

import math

import pytest

from svdq import html


def test_text_is_escaped_and_markup_is_not_twice():
    inner = html.element("b", "<&>\"'")
    assert html.element("p", inner, "<i>", title='"<') == (
        '<p title="&quot;&lt;"><b>&lt;&amp;&gt;&quot;&#x27;</b>&lt;i&gt;</p>'
    )


def test_control_and_direction_characters_are_written_out():
    assert html.element("p", "a\u202eb\x07\ud800") == r"<p>a\u202eb\x07\ud800</p>"


def test_none_and_false_are_left_out_and_lists_are_spliced():
    assert html.element("p", None, False, ["a", ["b"]], class_=None, hidden=True) == "<p hidden>ab</p>"


def test_a_page_names_no_address():
    text = html.page("title", html.table(["a"], [["b"]]))
    assert "http:" not in text and "https:" not in text and "url(" not in text


@pytest.mark.parametrize(
    ("lo", "hi", "wanted"),
    [(0, 13.1, [0, 5, 10]), (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (97, 99, [97, 97.5, 98, 98.5, 99]), (3, 3, [3])],
)
def test_ticks_are_round(lo, hi, wanted):
    assert html.ticks(lo, hi) == pytest.approx(wanted)


@pytest.mark.parametrize("values", [[], [0.0], [5.0], [1.0, math.nan, 2.0], [-1.0, 1.0], [1e-12, 1e12]])
@pytest.mark.parametrize("build", [html.axis, html.log_axis])
def test_an_axis_spans_its_values(build, values):
    found = build("label", values)
    assert found.lo < found.hi and found.marks
    for value in values:
        if math.isfinite(value) and (value > 0 or build is html.axis):
            assert found.lo <= value <= found.hi
            assert 0 <= found.share(value) <= 1


def test_a_log_axis_gives_each_decade_the_same_length():
    found = html.log_axis("label", [1, 1000])
    assert [found.share(value) for value in (1, 10, 100, 1000)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
