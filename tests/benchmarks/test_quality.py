"""benchmarks/quality.py: paragraphs of the texts, figures from the commands' JSON, tables, bars, kept runs."""

import hashlib
import importlib
import struct
import sys
import zlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TYPES = ("mlp.down_proj", "self_attn.q_proj")


@pytest.fixture(scope="module")
def modules():
    before = list(sys.path)
    sys.path.append(str(BENCHMARKS))
    try:
        yield [importlib.import_module(name) for name in ("quality", "quality_report", "quality_texts")]
    finally:
        sys.path[:] = before


@pytest.fixture
def quality(modules):
    return modules[0]


@pytest.fixture
def report(modules):
    return modules[1]


@pytest.fixture
def texts(modules):
    return modules[2]


# ---- texts


def test_a_page_of_the_handbook_gives_its_sentences_without_lists_and_listings(texts):
    page = """<html xmlns="http://www.w3.org/1999/xhtml"><body><p id="title">Not a paragraph of the book at all.</p>
    <div class="para">The <code>apt</code>
        command\tinstalls packages, <a class="indexterm"></a>and removes them too:
        <ul><li><div class="para">an item that is itself a sentence of eight words.</div></li></ul></div>
    <div class="para">Type this as root: <pre>apt install nothing</pre> and wait until it has ended.</div>
    <div class="para">Too short.</div><div class="para">a heading of many words that has no full stop</div>
    </body></html>"""
    assert list(texts.handbook_prose(page)) == [
        "The apt command installs packages, and removes them too:",
        "an item that is itself a sentence of eight words.",
        "Type this as root: and wait until it has ended.",
    ]


def test_verses_become_one_paragraph_a_chapter(texts):
    verses = "Ge1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus the heavens.\n1Jn1:1 That which was.\n"
    assert list(texts.chapters(verses)) == ["In the beginning. And the earth.", "Thus the heavens.", "That which was."]


def test_a_novels_wrapped_lines_become_paragraphs_and_headings_are_left_out(texts):
    lines = ["CHAPTER I", "", "", "Emma was _very_", "handsome, and clever.", "", '"Yes," said he, "', "", "FINIS"]
    assert list(texts.novel_prose(lines)) == ["Emma was very handsome, and clever.", '"Yes," said he, "']


def r_record(strings):
    data = b"X\n" + struct.pack(">iiii", 3, 262658, 197888, 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    for text in strings:
        data += struct.pack(">ii", 262153, -1 if text is None else len(text.encode())) + (text or "").encode()
    packed = zlib.compress(data)
    return struct.pack(">i", len(data)) + packed


def test_strings_of_an_r_file_are_read_record_by_record(texts):
    stored = r_record(["EMMA", "", "naïve"]) + r_record(["Persuasion", None])
    assert list(texts.r_strings(stored)) == [["EMMA", "", "naïve"], ["Persuasion", ""]]


def test_no_paragraph_is_both_calibrated_on_and_measured(texts):
    pages = {f"page{i}": [f"own {i}", f"shared {i % 4}", f"own {i}"] for i in range(24)}
    calibration, held_out = texts.split_pages(pages)
    assert len(held_out) == 4 and len(calibration) == 20
    first, second = ({text for page in part for text in page} for part in (calibration, held_out))
    assert not first & second
    assert first | second == {text for page in pages.values() for text in page}
    assert texts.split_pages(dict(reversed(pages.items()))) == (calibration, held_out)  # no matter how they were listed


def test_two_sources_are_taken_in_equal_parts_until_one_is_used_up(texts):
    first, second = [["a" * 10, "a" * 10], ["a" * 10]], [["b" * 8], ["b" * 8], ["b" * 8], ["b" * 8], ["b" * 8]]
    mixed = texts.alternated(first, second)
    assert [text[0] for text in mixed] == list("aabbbab")


def test_texts_that_are_there_are_not_fetched_and_others_are_named(texts, tmp_path, monkeypatch, capsys):
    contents = {name: f"{name}\n" for name in texts.TEXTS}
    monkeypatch.setattr(texts, "TEXTS", {n: hashlib.sha256(c.encode()).hexdigest() for n, c in contents.items()})
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_text(content)

    def fetch(*_):
        raise AssertionError("fetched")

    monkeypatch.setattr(texts, "unpack", fetch)
    assert texts.make_texts(tmp_path) == {name: tmp_path / f"{name}.txt" for name in contents}

    monkeypatch.setattr(texts, "unpack", lambda *_: None)
    monkeypatch.setattr(texts, "download", lambda *_: None)
    monkeypatch.setattr(texts, "check_sha256", lambda *_: None)
    monkeypatch.setattr(texts, "news_stories", lambda *_: None)
    monkeypatch.setattr(texts, "build", lambda *_: {**contents, "kjv": "another release\n"})
    (tmp_path / "novel.txt").unlink()
    with pytest.raises(SystemExit) as stop:
        texts.make_texts(tmp_path)
    message = str(stop.value)
    found = hashlib.sha256(b"another release\n").hexdigest()
    assert message.startswith("kjv.txt: ") and found in message and texts.TEXTS["kjv"] in message
    assert message.count("\n") == 0


# ---- figures


def verified(errors, quantized):
    """The JSON of verify: two blocks whose linears of one type have the same error."""
    layers = [
        {"name": f"model.layers.{block}.{kind}", "quantization_error": error, "token_error": 2 * error}
        for block in range(2)
        for kind, error in zip(TYPES, errors, strict=True)
    ]
    outputs = [{"original": 10.0, "quantized": value, "tokens": 1024} for value in quantized]
    return {"layers": layers, "outputs": outputs}


def a_run(report, errors=(0.1, 0.2), quantized=(11.0, 12.0, 15.0)):
    summary = {"mean_error": 0.14, "repairs": ["one"], "warnings": []}
    seconds = {"calibrate": 1.0, "quantize": 2.0, "verify": 3.0}
    return report.record(summary, verified(errors, quantized), seconds)


def test_a_record_has_means_over_linears_and_by_type(report):
    run = a_run(report)
    assert run["layer_error"] == pytest.approx(0.15) and run["token_error"] == pytest.approx(0.30)
    assert run["by_type"] == pytest.approx({"down_proj": 0.1, "q_proj": 0.2})
    assert run["calibration_error"] == 0.14 and run["repairs"] == 1
    assert run["perplexity"]["novel"] == {"original": 10.0, "quantized": 15.0}


def test_out_of_domain_is_the_geometric_mean_of_its_texts(report):
    run = a_run(report)
    assert report.ratio(run, ["kjv", "novel"]) == pytest.approx((1.2 * 1.5) ** 0.5)
    assert report.summarize([run])["ratio"]["in domain"]["mean"] == pytest.approx(1.1)


def test_seeds_become_a_mean_and_half_the_range(report):
    runs = [a_run(report, quantized=(value, 12.0, 12.0)) for value in (11.0, 11.2, 11.6)]
    found = report.summarize(runs)
    assert found["seeds"] == 3
    assert found["ratio"]["in_domain"] == pytest.approx({"mean": 3.38 / 3, "spread": 0.03})
    assert found["ratio"]["kjv"] == pytest.approx({"mean": 1.2, "spread": 0.0})


def test_the_tables_show_spreads_only_where_there_are_seeds(report):
    two = [a_run(report), a_run(report, errors=(0.12, 0.2))]
    shown = report.tables({"twice": report.summarize(two), "once": report.summarize(two[:1])})
    main, perplexities, errors = shown.split("\n\n")
    twice, once = main.splitlines()[1:]
    assert twice.split()[:5] == ["twice", "15.50", "±0.50", "31.00", "±1.00"]
    assert once.split() == ["once", "15.00", "30.00", "1.100", "1.342", "1.200", "1.500", "1", "2", "3"]
    assert perplexities.splitlines()[1].split() == ["original", "10.00", "10.00", "10.00"]
    assert errors.splitlines()[0].split()[-2:] == ["q_proj", "down_proj"]
    assert errors.splitlines()[1].split() == ["twice", "20.00", "11.00"]


def summary_of(inside, outside):
    return {"ratio": {"in domain": {"mean": inside}, "out of domain": {"mean": outside}}}


def test_bars_are_met_not_met_or_not_measured(report):
    rows = {"quality": summary_of(1.11, 1.21), "svdquant": summary_of(1.31, 1.50)}
    bars = report.check_bars(rows)
    assert [bar["met"] for bar in bars] == [True, False, None, None, True, False]
    assert bars[4]["found"] == pytest.approx(0.645, abs=1e-3)  # 1 - 0.11 / 0.31
    assert bars[5]["found"] == pytest.approx(0.58)  # 1 - 0.21 / 0.50
    lines = report.bars_text(bars).splitlines()
    assert lines[2].split()[-5:] == ["1.210", "<=", "1.20", "not", "met"]
    assert lines[3].endswith("not measured")


def test_a_method_that_loses_nothing_cannot_be_beaten_by_a_share(report):
    bars = report.check_bars({"quality": summary_of(1.1, 1.1), "svdquant": summary_of(1.0, 1.0)})
    assert bars[4]["met"] is False
    assert report.rounded(bars)[4]["found"] is None  # JSON has no infinity


# ---- running


def test_rows_that_share_a_store_are_calibrated_once_and_kept(quality, report, tmp_path, monkeypatch, capsys):
    seen = []

    def run_svdq(settings, scratch, name, *arguments):
        seen.append(name)
        if name == "quantize":
            arguments[1].touch()
            if "--rank" in arguments:
                raise quality.CommandFailed(name, "svdq quantize ended with 2:\n    no such rank")
            return {"mean_error": 0.1, "repairs": [], "warnings": []}, 2.0
        return (verified((0.1, 0.2), (11.0, 12.0, 15.0)) if name == "verify" else {}), 1.0

    monkeypatch.setattr(quality, "run_svdq", run_svdq)
    places = {name: tmp_path / f"{name}.txt" for name in ("calibration", "in_domain", "kjv", "novel")}
    settings = quality.Settings(tmp_path, tmp_path, places, "cpu", 4, 2, 1, [], {"sources": "a"})
    rows = [row for row in quality.ROWS if row.key in ("rank0", "quality", "plain")]
    runs, failures = quality.run_all(settings, rows, [0])
    assert seen.count("calibrate") == 2  # plain's, and that of the other two
    assert failures == [{"row": "rank0", "seed": 0, "command": "quantize"}]
    assert "    no such rank" in capsys.readouterr().out
    assert runs["quality"][0]["layer_error"] == pytest.approx(0.15) and not runs["rank0"]

    seen.clear()
    again, _ = quality.run_all(settings, [rows[0], rows[2]], [0])
    assert not seen and again["quality"] == runs["quality"]
    other = quality.Settings(tmp_path, tmp_path, places, "cpu", 4, 2, 1, [], {"sources": "b"})
    quality.run_all(other, rows[2:], [0])
    assert seen == ["calibrate", "quantize", "verify"]  # another svdq: not the kept one


def test_the_kept_command_line_names_no_place_of_this_machine(quality):
    arguments = ["--model", "/home/someone/models/m", f"--work={quality.ROOT}/build/quality", "--rows", "quality"]
    shown = quality.shown_command(arguments)
    assert shown == "python benchmarks/quality.py --model m --work=build/quality --rows quality"


def test_an_unknown_row_is_named_before_any_work(quality, capsys):
    with pytest.raises(SystemExit) as stop:
        quality.parse(["--rows", "quality,fastest"])
    assert stop.value.code == 2
    assert "'fastest': wanted some of plain,output,svdquant" in capsys.readouterr().err


def test_every_row_has_options_that_the_commands_take(quality):
    from svdq.cli import calibrate, quantize
    from svdq.config import preset

    for row in quality.ROWS:
        for command, options, needed in (
            (calibrate.command, row.calibrate, ["MODEL", "-o", "OUT", "--data", "TEXT"]),
            (quantize.command, row.quantize, ["MODEL", "OUT.safetensors", "--calib", "STORE"]),
        ):
            context = command.make_context(row.key, [*needed, *options.split()])  # UsageError: an unknown option
            preset(context.params["preset"])  # ConfigError: an unknown preset
