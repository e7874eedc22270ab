"""The texts of benchmarks/quality.py: one to calibrate on and three to measure on, from Debian and Python packages.

calibration.txt  half technical prose, the Debian Administrator's Handbook (debian-handbook; GPL 2 or CC BY-SA 3.0) and
                 Python's documentation (python3.11-doc) in equal parts, and half news, 240 stories of the Lee corpus
                 (test data of gensim)
in_domain.txt    other documents of the same three sources: every sixth page, the remaining stories
kjv.txt          out of domain: every tenth chapter of the King James Bible (bible-kjv, bible-kjv-text)
novel.txt        out of domain: Jane Austen, Persuasion (r-cran-janeaustenr)

Neither of the last two is of a kind that calibration sees. Only paragraphs of plain prose are kept, as in
examples/fetch_texts.py. apt-get fetches the packages by name, so the mirror may serve another release of one; what
counts is that the texts come out as they were, and their SHA-256 are below.
"""

import hashlib
import struct
import subprocess
import sys
import tempfile
import zlib
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from fetch_smollm2 import check_sha256, download
from fetch_texts import GENSIM, GENSIM_SHA256, GENSIM_WHEEL, mixed, news_stories, prose

PACKAGES = ("debian-handbook", "python3.11-doc", "bible-kjv", "bible-kjv-text", "r-cran-janeaustenr")
HANDBOOK = "usr/share/doc/debian-handbook/html/en-US"
PYTHON_DOCS = "usr/share/doc/python3.11/html/_sources"
NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
NOVEL = "Persuasion"

TEXTS = {  # name -> SHA-256 of name.txt
    "calibration": "2b73a1c7c612971f59c479e6a08746bb3b6c94af826c30bbe09ff5022f8b6812",
    "in_domain": "1db3604c5622aa84d55d5fa4b2a9fb226d5b047c6f6711e0848f7170b2c9c624",
    "kjv": "a5508ae3fadcdb48b8583f75f67377c29954f4717ac4bf97bf67c9f50b7119d9",
    "novel": "430e8479c2b7f84e2f6f2645cebb549fd34f889196d6d773f0d7fff8aae9cd6a",
}
_BLOCKS = {"blockquote", "div", "dl", "img", "ol", "p", "pre", "table", "ul"}  # inside a paragraph, but not its words


def is_sentence(text):
    return text[-1:] in tuple(".:!?\"'")


def handbook_prose(page):
    """The paragraphs of one XHTML page of the handbook: its div.para, without the lists and listings inside them."""
    for element in ElementTree.fromstring(page).iter():
        if element.get("class") == "para":
            text = " ".join(_inline_text(element).split())
            if len(text.split()) >= 8 and is_sentence(text):
                yield text


def _inline_text(element):
    parts = [element.text or ""]
    for child in element:
        block = child.tag.rpartition("}")[2] in _BLOCKS
        parts += [" " if block else _inline_text(child), child.tail or ""]
    return "".join(parts)


def split_pages(pages):
    """(calibration, held-out) of a {name: paragraphs}: pages in the order of their names' hash, every sixth held out.

    The hash scatters the chapters, so that any first part of the pages is a sample of all. A paragraph that an earlier
    page has is left out, hence none is in both.
    """
    seen, parts = set(), ([], [])
    for number, name in enumerate(sorted(pages, key=lambda name: hashlib.sha256(name.encode()).digest())):
        page = [text for text in dict.fromkeys(pages[name]) if text not in seen]
        seen.update(page)
        if page:
            parts[number % 6 == 5].append(page)
    return parts


def alternated(first, second):
    """The paragraphs of two lists of pages, page by page, each next one from the list that has given less so far."""
    sources, lengths, texts = [iter(first), iter(second)], [0, 0], []
    while True:
        which = lengths[1] < lengths[0]
        page = next(sources[which], None)
        if page is None:
            return texts
        texts += page
        lengths[which] += sum(map(len, page))


def chapters(verses):
    """One paragraph a chapter, of lines like 'Ge1:1 In the beginning …'."""
    references = (line.split(" ", 1) for line in verses.splitlines() if line.strip())
    for _, chapter in groupby(references, key=lambda verse: verse[0].partition(":")[0]):
        yield " ".join(text.strip() for _, text in chapter)


def r_strings(stored):
    """The first object of each record of an R lazy-load file, as a list of its strings.

    A record is its length (4 bytes, big-endian) and a zlib stream of R's serialization, version 3: a header with the
    encoding's name, the type 16 (strings), their number; then for each its flags, its length (-1: missing) and bytes.
    """
    position = 0
    while position < len(stored):
        stream = zlib.decompressobj()
        data = stream.decompress(stored[position + 4 :])
        position = len(stored) - len(stream.unused_data)
        (name_length,) = struct.unpack_from(">i", data, 14)
        kind, count = struct.unpack_from(">ii", data, 18 + name_length)
        if data[:2] != b"X\n" or kind != 16:
            sys.exit(f"{Path(NOVELS).name}: holds R objects of type {kind}, wanted 16 (strings); another release?")
        at, strings = 26 + name_length, []
        for _ in range(count):
            (length,) = struct.unpack_from(">i", data, at + 4)
            strings.append(data[at + 8 : at + 8 + max(length, 0)].decode())
            at += 8 + max(length, 0)
        yield strings


def novel_prose(lines):
    """The paragraphs of a novel of wrapped lines, with a blank line between paragraphs; no headings."""
    for blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
        text = " ".join(" ".join(paragraph).replace("_", "").split())
        if not blank and is_sentence(text):
            yield text


def unpack(package, scratch):
    """Fetch one Debian package into scratch and unpack it into scratch/unpacked; nothing is installed."""
    _run("apt-get", "download", "-qq", package, cwd=scratch)
    (archive,) = scratch.glob(f"{package}_*.deb")
    _run("dpkg-deb", "-x", archive.name, "unpacked", cwd=scratch)


def _run(*command, cwd):
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit(f"{command[0]}: not on this machine; make the texts on Debian 12 with --texts-only and copy them")
    if done.returncode:
        hint = "; apt-get update first?" if command[0] == "apt-get" else ""
        sys.exit(f"{' '.join(map(str, command))}: ended with {done.returncode}{hint}\n{done.stderr.strip()}")
    return done.stdout


def verses_of(unpacked):
    """The whole King James Bible, a verse a line, as the package's own program prints it beside its data."""
    return _run(unpacked / "usr/bin/bible", "-f", "gen1:1-rev22:21", cwd=unpacked / "usr/lib")


def build(unpacked, stories):
    """name → text, from the unpacked packages and the (calibration, held-out) stories of the news."""
    handbook = {
        path.name: list(handbook_prose(path.read_text("utf-8"))) for path in (unpacked / HANDBOOK).glob("*.html")
    }
    documentation = {
        str(path.relative_to(unpacked / PYTHON_DOCS)): list(prose(path.read_text("utf-8")))
        for path in (unpacked / PYTHON_DOCS).rglob("*.rst.txt")
    }
    pages = list(zip(split_pages(handbook), split_pages(documentation), strict=True))
    novels = {lines[0].strip(): lines for lines in r_strings((unpacked / NOVELS).read_bytes())}
    return {
        "calibration": mixed(alternated(*pages[0]), stories[0]),
        "in_domain": mixed(alternated(*pages[1]), stories[1]),
        "kjv": "\n\n".join(list(chapters(verses_of(unpacked)))[::10]) + "\n",
        "novel": "\n\n".join(novel_prose(novels[NOVEL])) + "\n",
    }


def complaint(name, content):
    """Why this is not the text that the figures were measured on, or None."""
    found = hashlib.sha256(content).hexdigest()
    if found != TEXTS[name]:
        return f"{name}.txt: sha256 is {found}, expected {TEXTS[name]}; a package holds another text than it did"
    return None


def make_texts(directory):
    """The texts as {name: path}, fetched and built unless they are in the directory already."""
    paths = {name: directory / f"{name}.txt" for name in TEXTS}
    if all(path.is_file() and complaint(name, path.read_bytes()) is None for name, path in paths.items()):
        return paths
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        for package in PACKAGES:
            print(f"texts: fetching {package}", flush=True)
            unpack(package, scratch)
        print(f"texts: fetching {GENSIM} (28 MB) for the Lee corpus of news", flush=True)
        archive = download(GENSIM, scratch / "gensim", *GENSIM_WHEEL)
        check_sha256(archive, GENSIM_SHA256)
        texts = build(scratch / "unpacked", news_stories(archive))
    for name, text in texts.items():
        paths[name].write_bytes(text.encode())
        print(f"texts: {name}.txt, {len(text):,} characters, {len(text.split()):,} words")
    wrong = [line for line in (complaint(name, path.read_bytes()) for name, path in paths.items()) if line]
    if wrong:
        sys.exit("\n".join(wrong))
    return paths
