"""The book as a whole: which pages it has, where their links lead, and that its Markdown is read alike by everybody.

`python tests/book/test_book.py` writes the list of decisions in mkdocs.yml anew.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SETTINGS = ROOT / "mkdocs.yml"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
LINK = re.compile(r"!?\[[^\]\n]*\]\(([^)\s]+)\)")
ITEM = re.compile(r"( *)(?:[-*+]|\d+\.) ")
MOST_PICTURE_BYTES = 1_000_000

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None,
    reason="MkDocs is not installed: .venv/bin/pip install -c constraints.txt -e '.[docs]'",
)


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def plain(page: str) -> str:
    """A page without its code, line by line as before."""
    blank = re.sub(r"^ *```.*?^ *```", lambda found: "\n" * found[0].count("\n"), text_of(page), flags=re.M | re.S)
    return re.sub(r"(`+)[^\n]+?\1", lambda found: " " * len(found[0]), blank)


# --- which pages ---------------------------------------------------------------------------------------------------


def nav() -> list[str]:
    """Every page that mkdocs.yml names, in its order."""

    def pages(found: Any) -> Iterator[str]:
        if isinstance(found, str):
            yield found
        else:
            for one in found.values() if isinstance(found, dict) else found:
                yield from pages(one)

    return list(pages(yaml.safe_load(SETTINGS.read_text())["nav"]))


def decisions() -> str:
    """The lines of mkdocs.yml that name them."""
    return "".join(f"      - {page}\n" for page in PAGES if page.startswith("decisions/"))


def test_every_page_is_in_the_contents_once() -> None:
    assert sorted(nav()) == PAGES


def test_the_decisions_are_in_the_contents_in_their_order() -> None:
    found = re.search(r"  - Decisions:\n(.*?)  # end of decisions\n", SETTINGS.read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == decisions(), "type: python tests/book/test_book.py"


def test_the_book_asks_for_nothing_from_elsewhere_by_its_settings() -> None:
    """No fonts of others, no plugin but search, no address of a repository, whose stars would be counted."""
    told = yaml.safe_load(SETTINGS.read_text())
    assert told["theme"]["font"] is False
    assert told["plugins"] == ["search"]
    assert not {"repo_url", "site_url", "extra_css", "extra_javascript", "extra"} & told.keys()


# --- what is in them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_pages_and_pictures_of_the_book(page: str) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(plain(page)) if "://" not in link]
    there = (DOCS / page).parent
    broken = [link for link in links if link and not (there / link).is_file()]
    outside = [link for link in links if not (there / link).resolve().is_relative_to(DOCS)]
    assert not broken
    assert not outside, "what is outside of docs/ is named as code, not linked"


@pytest.mark.parametrize("page", PAGES)
def test_lists_are_read_alike_by_a_forge_and_by_the_book(page: str) -> None:
    """Python-Markdown wants an empty line before a list, and four spaces before what belongs to an item."""
    before, wrong = "", []
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if re.match(r" {1,3}```", line):
            wrong.append(f"{number}: a block of code is indented by 4 spaces or none")
    for number, line in enumerate(plain(page).splitlines(), 1):
        item = ITEM.match(line)
        if item and 1 <= len(item[1]) <= 3:
            wrong.append(f"{number}: a list within a list is indented by 4 spaces")
        elif item and not item[1] and before.strip() and not ITEM.match(before) and not before.startswith(" "):
            wrong.append(f"{number}: an empty line before a list")
        elif re.match(r" {1,3}\S", line) and not before.strip():
            wrong.append(f"{number}: what belongs to an item is indented by 4 spaces")
        before = line
    assert not wrong, f"docs/{page}: {wrong}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_begins_with_its_title(page: str) -> None:
    assert re.match(r"# \S", text_of(page))
    assert len(re.findall(r"^# ", plain(page), re.MULTILINE)) == 1


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_plain_markdown(page: str) -> None:
    """No words of one program: admonitions, tabs, attributes, diagrams that a script of others draws."""
    assert not re.search(r"^(!!!|\?\?\?|===) |\{: |^ *```mermaid|:material-", plain(page), re.MULTILINE)
    assert "```mermaid" not in text_of(page)


@pytest.mark.parametrize("picture", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_picture_is_small_and_asks_for_nothing(picture: Path) -> None:
    text = picture.read_text()
    assert len(text) < MOST_PICTURE_BYTES
    assert not re.search(r"<script|<image|<foreignObject|@import|url\((?!#)|(?:href|src)=\"(?!#)", text)


# --- built ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The book, built as .ci/run does; a warning is a failure."""
    site = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1"})
    assert ran.returncode == 0, ran.stderr[-4000:]
    return site


class Asked(HTMLParser):
    """Collects the addresses that a browser fetches for a page, without scripts."""

    FETCHED = ("stylesheet", "icon", "preconnect", "dns-prefetch", "preload", "prefetch", "modulepreload", "manifest")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attributes}
        if tag == "link" and set(given.get("rel", "").split()) & set(self.FETCHED):
            self.found.append(given.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "video", "audio", "embed", "object", "input"):
            self.found += [given[name] for name in ("src", "srcset", "data", "poster") if given.get(name)]


@needs_mkdocs
def test_no_built_page_names_anything_elsewhere_that_a_browser_fetches(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        asked = Asked()
        asked.feed(page.read_text())
        assert asked.found
        assert not [one for one in asked.found if re.match(r"[a-z]+:|//", one) and not one.startswith("data:")], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(https?:)?//", sheet.read_text()), sheet


if __name__ == "__main__":
    text = re.sub(
        r"(  - Decisions:\n).*?(?=  # end of decisions\n)",
        lambda found: found[1] + decisions(),
        SETTINGS.read_text(),
        flags=re.DOTALL,
    )
    SETTINGS.write_text(text)
