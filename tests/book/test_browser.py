"""The book is opened in Debian's Chromium where there is no way out, and asks nobody but the server it came from."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.book import browsing
from tests.book.test_book import PAGES, needs_mkdocs, site
from tests.examples import stride

__all__ = ["site"]

pytestmark = [pytest.mark.root, pytest.mark.book, needs_mkdocs, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
EACH = 7
"""Every so many pages of the book is opened, more of them with `HIVE_EXAMPLES`."""


def why_not() -> str:
    """The reason why no browser can be let loose in a network of its own here, empty where one can."""
    if shutil.which(browsing.BROWSER) is None:
        return "there is no chromium: apt-get install chromium"
    missing = [program for program in ("unshare", "ip") if shutil.which(program) is None]
    if missing:
        return f"there is no {missing[0]}"
    ran = subprocess.run(["unshare", "--net", "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    return f"no network of its own can be made: {ran.stderr.strip()}" if ran.returncode else ""


@pytest.fixture(scope="module")
def told(site: Path) -> dict[str, Any]:
    if reason := why_not():
        pytest.skip(reason)
    pages = [page.removesuffix(".md") + ".html" for page in ["index.md", *PAGES[:: stride(EACH)]]]
    command = ["unshare", "--net", sys.executable, "-m", "tests.book.browsing", str(site), *dict.fromkeys(pages)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["routes"] == "", "there was a way out"
    return found


def outside(requests: list[list[str]]) -> list[str]:
    """URLs of anybody but loopback, without what Chromium asks its makers for its own sake: no page asked for that."""
    return [url for url, initiator in requests if not is_near(url) and not is_own(url, initiator)]


def is_near(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme not in ("http", "https", "ws", "wss") or parts.hostname == "127.0.0.1"


def is_own(url: str, initiator: str) -> bool:
    """Whether Chromium asked by itself: for the time, for news of its parts, for the forms that it would fill in."""
    return initiator == "not an origin" and (urlsplit(url).hostname or "").endswith((".google.com", ".googleapis.com"))


def test_no_request_of_the_book_leaves_loopback(told: dict[str, Any]) -> None:
    asked = {url for url, _ in told["requests"]}
    assert {f"{told['book']}/{page}" for page in told["titles"]} <= asked, "the log has not all that was opened"
    assert any(url.endswith(".js") for url in asked)
    assert any(url.endswith(".css") for url in asked)
    assert outside(told["requests"]) == []


def test_a_page_that_does_ask_elsewhere_would_be_seen(told: dict[str, Any]) -> None:
    """The canary: without it, a log that has nothing would pass for a book that asks nothing."""
    assert outside(told["canary"]) == [browsing.OUTSIDE]


def test_every_page_shows_its_title_and_no_script_fails(told: dict[str, Any]) -> None:
    assert all(told["titles"].values())
    assert told["thrown"] == []


def test_its_search_finds_a_word_without_asking_anybody(told: dict[str, Any]) -> None:
    assert any("sleep" in link or "glossary" in link or "memory" in link for link in told["found"]), told["found"]
    assert any(url.endswith("search_index.json") for url, _ in told["requests"])
