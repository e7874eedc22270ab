"""The pages of docs/ say what works: every `$ svdq …` line of a ```console block is typed in turn on a toy model.

```console gpu, download, slow: of such blocks the options are checked. Lines of other programs (torchrun) are not run.
"""

import re
import shlex
from pathlib import Path

import click
import pytest

from svdq.cli.main import svdq as group

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
SKIPPED = {"gpu", "download", "slow"}
PLACES = {"MODEL_DIR": "my-model", "TEXT": "texts/calibration.txt"}  # what a page may say instead


def commands(page):
    """(marker or '', arguments) of every svdq line of its console blocks; a line that ends in \\ goes on."""
    found = []
    for marker, block in re.findall(r"^```console ?(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        assert marker in {"", *SKIPPED}, f"{page.name}: ```console {marker}: wanted one of {sorted(SKIPPED)}"
        lines = block.replace("\\\n", " ").splitlines()
        found += [(marker, shlex.split(line[2:])[1:]) for line in lines if line.startswith("$ svdq ")]
    return found


@pytest.fixture
def desk(toy_copy, add_tokenizer, ids_file, tmp_path, monkeypatch):
    """The directory that the pages assume: my-model, texts/, ids.jsonl."""
    add_tokenizer(toy_copy("llama", "my-model"))
    (tmp_path / "texts").mkdir()
    for number, name in enumerate(("calibration", "held_out")):
        ids_file(tmp_path / "rows.jsonl", [64] * 40, seed=number)
        rows = re.findall(r"\[(.*)\]", (tmp_path / "rows.jsonl").read_text())
        text = "\n".join(" ".join(f"w{token}" for token in row.split(", ")) for row in rows)
        (tmp_path / f"texts/{name}.txt").write_text(text)
    ids_file(tmp_path / "ids.jsonl", [64] * 8, seed=3)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SVDQ_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(desk, svdq, page):
    for marker, arguments in commands(page):
        if not marker:
            result = svdq(*(PLACES.get(argument, argument) for argument in arguments))
            assert result.code == 0, f"svdq {shlex.join(arguments)}\n{result.out}\n{result.err}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(m for m, _ in commands(page))], ids=lambda page: page.stem
)
def test_commands_that_are_not_typed_here_have_known_options(page):
    for marker, (name, *rest) in commands(page):
        if marker:
            command = group.commands[name]
            assert isinstance(command, click.Command)
            known = {option for parameter in command.params for option in parameter.opts}
            assert {part for part in rest if part.startswith("-")} <= known, (name, rest)


def test_every_page_is_listed_and_every_link_leads_somewhere():
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        assert page.name == "README.md" or f"({page.name})" in index, page.name
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page.name, link)


def test_the_messages_of_the_troubleshooting_page_are_in_the_sources():
    sources = "".join(path.read_text() for folder in ("svdq", "calibration", "kernels", "cli")
                      for path in (ROOT / folder).glob("*.py"))  # fmt: skip
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 8
    for row in rows:
        for message in re.findall(r"`([^`]+)`", row):
            words = re.split(r"\d[\d.]*|…|\(|\)|'|, | rank", message)  # what a message fills in
            part = max((word.strip(" :") for word in words), key=len)
            assert part in sources, (message, part)
