"""The pages in a real browser: they open, sort, fit a phone, are legible in both schemes, run no foreign script."""

import json
from types import SimpleNamespace

import pytest

from svdq import html
from svdq.details import Details
from svdq.html_report import verification_page
from svdq.models import open_model
from svdq.quantized import open_quantized
from svdq.verify import LayerReport, Report

LAYERS = "[...document.querySelectorAll('.search')].pop().closest('.table')"


@pytest.fixture(scope="module")
def pages(quantized, heldout_ids, tmp_path_factory):
    """The commands' own pages of a tiny model, and the numbers that verify wrote beside its page."""
    from svdq.cli.main import main

    directory, file = quantized("llama")
    _, other = quantized("llama", "plain")
    encoder, encoded = quantized("bert")
    out = tmp_path_factory.mktemp("pages")
    runs = [["verify", file, "--model", directory, "--data", heldout_ids, "--min-tokens", 64, "--json", out / "a.json"]]
    runs.append(["verify", other, "--model", directory, "--data", heldout_ids, "--min-tokens", 64])
    runs[1] += ["--json", out / "b.json"]
    runs.append(["compare", file, other, "--verified", out / "a.json", "--verified", out / "b.json"])
    runs.append(["verify", encoded, "--model", encoder, "--data", heldout_ids, "--min-tokens", 64])
    for run, page in zip(runs, ("verify.html", "other.html", "compare.html", "encoder.html"), strict=True):
        with pytest.raises(SystemExit) as stop:
            main([*map(str, run), "--report", str(out / page), "--quiet"])
        assert stop.value.code == 0
    numbers = json.loads((out / "a.json").read_text())
    return SimpleNamespace(
        verify=out / "verify.html", compare=out / "compare.html", encoder=out / "encoder.html", numbers=numbers
    )


@pytest.fixture(params=["verify", "compare", "encoder"])
def page(request, pages):
    return getattr(pages, request.param)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_a_page_opens_without_an_error_and_is_no_wider_than_the_window(browser, page, width, scheme):
    browser.open(page, width, scheme)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("document.querySelectorAll('section').length") >= 4


def test_a_page_asks_for_nothing_but_itself(browser, page):
    browser.open(page)
    assert browser.run("document.readyState") == "complete"
    assert [url for url in browser.requests if not url.startswith("data:")] == [page.as_uri()]


@pytest.mark.parametrize(("clicks", "reverse"), [(1, True), (2, False)])
def test_a_click_on_a_number_sorts_by_it_and_a_second_turns_it_round(browser, pages, clicks, reverse):
    browser.open(pages.verify)
    head = f"[...{LAYERS}.querySelectorAll('th button')].find(b => b.textContent === 'quant. error')"
    for _ in range(clicks):
        browser.click(head)
    shown = browser.run(f"[...{LAYERS}.querySelectorAll('tbody th')].map(cell => cell.textContent)")
    rows = sorted(pages.numbers["layers"], key=lambda row: row["quantization_error"], reverse=reverse)
    assert shown == [row["name"] for row in rows]
    assert browser.run(f"{head}.parentNode.ariaSort") == ("descending" if reverse else "ascending")


def test_a_click_on_the_names_counts_numbers_in_them(browser, tmp_path):
    rows = [[f"layers.{number}.up"] for number in (10, 9, 2)]
    (tmp_path / "page.html").write_text(html.page("names", html.table(["layer"], rows)))
    browser.open(tmp_path / "page.html")
    browser.click("document.querySelector('th button')")
    found = browser.run("[...document.querySelectorAll('tbody th')].map(cell => cell.textContent)")
    assert found == ["layers.2.up", "layers.9.up", "layers.10.up"]


def test_what_is_not_finite_sorts_as_the_largest_and_what_is_missing_last(browser, tmp_path):
    cells = {"missing": html.Cell("-"), "one": html.Cell("1", 1.0), "nan": html.Cell("nan", float("nan"))}
    rows = [[name, cell] for name, cell in cells.items()]
    (tmp_path / "page.html").write_text(html.page("numbers", html.table(["name", "error"], rows)))
    browser.open(tmp_path / "page.html")
    for wanted in (["nan", "one", "missing"], ["one", "nan", "missing"]):
        browser.click("document.querySelectorAll('th button')[1]")
        assert browser.run("[...document.querySelectorAll('tbody th')].map(cell => cell.textContent)") == wanted


def test_the_field_leaves_the_rows_that_hold_its_text(browser, pages):
    browser.open(pages.verify)
    browser.run(f"{LAYERS}.querySelector('input').focus()")
    browser.call("Input.insertText", text="DOWN_proj")
    shown = browser.run(f"[...{LAYERS}.querySelectorAll('tbody tr:not([hidden]) th')].map(cell => cell.textContent)")
    names = [row["name"] for row in pages.numbers["layers"]]
    assert sorted(shown) == sorted(name for name in names if "down_proj" in name)
    assert browser.run(f"{LAYERS}.querySelector('output').textContent") == f"2 of {len(names)}"


def test_a_pointer_on_a_type_of_linear_points_its_points_out(browser, pages):
    browser.open(pages.verify)
    browser.point("document.querySelector('.legend [data-series=\"mlp.up_proj\"]')")
    faint = browser.run(
        "[...document.querySelector('figure').querySelectorAll('.series')]"
        ".filter(series => !series.classList.contains('pointed')).map(series => series.dataset.series)"
    )
    kinds = {row["name"].split(".", 3)[3] for row in pages.numbers["layers"]}
    assert browser.run("document.querySelector('figure').className") == "pointing"
    assert sorted(faint) == sorted(kinds - {"mlp.up_proj"})


def luminance(colour):
    """WCAG 2.2's relative luminance of 'rgb(r, g, b)'."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_text_stands_out_from_its_ground_in_both_schemes(browser, pages, scheme, dark):
    browser.open(pages.verify, scheme=scheme)
    ground = luminance(browser.run("getComputedStyle(document.querySelector('section')).backgroundColor"))
    assert (ground < 0.2) == dark
    for text in ("h2", ".note", "tbody td", ".tick"):
        style = f"getComputedStyle(document.querySelector({text!r}))"
        ink = luminance(browser.run(f"{style}.{'fill' if text == '.tick' else 'color'}"))
        high, low = max(ink, ground), min(ink, ground)
        assert (high + 0.05) / (low + 0.05) >= 4.5, text  # WCAG 2.2, 1.4.3, for text of this size


HOSTILE = [
    "model.layers.0.<img src=x onerror=window.hacked=1>",
    "model.layers.0.</script><script>window.hacked=1</script>",
    'model.layers.1."><svg onload="window.hacked=1">',
    "model.layers.1.</title></style><style>*{display:none}</style>",
    "model.layers.1.'onmouseover='window.hacked=1",
]


def test_names_that_are_markup_are_shown_as_they_are(browser, quantized, tmp_path):
    directory, file = quantized("llama")
    model, opened = open_model(directory), open_quantized(file)
    sizes = (128, 128, 16, 64, 0.1, 1e-7, "float32", True)
    report = Report(HOSTILE[1], "canonical", layers=[LayerReport(name, *sizes) for name in HOSTILE])
    report.failures, report.notes = [f"{name}: failed" for name in HOSTILE], HOSTILE
    (tmp_path / "page.html").write_text(verification_page(report, Details(), model, opened))
    browser.open(tmp_path / "page.html")
    assert browser.errors == []  # the policy would have blocked, and told of, what had slipped through
    assert browser.run("window.hacked") is None
    assert browser.run("[document.images.length, document.scripts.length, document.styleSheets.length]") == [0, 1, 1]
    shown = browser.run(f"[...{LAYERS}.querySelectorAll('tbody th')].map(cell => cell.textContent)")
    assert sorted(shown) == sorted(HOSTILE)


def test_a_script_that_is_not_the_pages_own_does_not_run(browser, tmp_path):
    foreign = html.Html("<script>window.hacked = 1</script><p onclick='window.hacked = 1' id=p>text</p>")
    (tmp_path / "page.html").write_text(html.page("policy", foreign))
    browser.open(tmp_path / "page.html")
    browser.click("document.getElementById('p')")
    assert browser.run("window.hacked") is None
    assert len(browser.errors) >= 2


@pytest.mark.parametrize("name", ["-", "report.json", "nowhere/report.html"])
def test_a_page_that_cannot_be_written_is_told_before_the_work(refused, name):
    assert name in refused("verify", "no such file", "--model", "no such model", "--report", name)
