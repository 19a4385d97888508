"""The built book in Chromium, in a network that is loopback alone.

`unshare --net python -m tests.book.browsing SITE PAGE...` serves the book to the browser, opens each page, searches,
and prints one line of JSON: what was seen, and every request that the browser made, by its own log of the network. A
page of another kind, with a picture from elsewhere, is opened in a browser of its own: there the log has to have that.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSER = "chromium"
QUIET = [
    "--headless=new",
    "--no-sandbox",  # it is root here
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-extensions",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-features=OptimizationHints,MediaRouter,Translate,AutofillServerCommunication",
    "--no-pings",
    "--remote-debugging-port=0",
]
"""Without what Chromium asks for its own sake, as far as it can be told to leave that."""
OUTSIDE = "http://192.0.2.1/outside.png"
"""TEST-NET-1 (RFC 5737)."""
CANARY = f'<!doctype html><title>canary</title><img src="{OUTSIDE}">'
WITHIN_S = 60.0
LOOKS_BACK = 5
"""Pages on which it waits until they ask for nothing more; the others have the same scripts."""


def raise_loopback() -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def routes() -> str:
    """The routes of this network to anywhere but itself."""
    ran = subprocess.run(["ip", "route", "show"], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


class Pages(SimpleHTTPRequestHandler):
    """The book, and the canary."""

    def do_GET(self) -> None:
        if self.path != "/canary.html":
            with suppress(ConnectionError):  # the browser has gone on to the next page
                super().do_GET()
            return
        body = CANARY.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: Any) -> None:
        """Says nothing."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Yields the book's address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Pages, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Tab:
    """One tab, steered over Chromium's own protocol."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.thrown: list[str] = []
        """Exceptions of the pages' scripts."""
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime"):
            self.tell(f"{domain}.enable")
        self.tell("Page.setLifecycleEventsEnabled", enabled=True)

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends one order and returns its result."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            said = self._next()
            if said.get("id") == number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result

    def open(self, url: str, *, until: str) -> None:
        """Opens a page and waits for this event of it: `load`, or `networkIdle`, half a second without a request."""
        self._events.clear()
        loader = self.tell("Page.navigate", url=url)["loaderId"]

        def has_come() -> bool:
            return any(one.get("name") == until and one.get("loaderId") == loader for one in self._events)

        while not has_come():
            self._next()

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.tell("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _next(self) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(self._connection.recv(timeout=WITHIN_S))
        if said.get("method") == "Page.lifecycleEvent":
            self._events.append(said["params"])
        if said.get("method") == "Runtime.exceptionThrown":
            self.thrown.append(json.dumps(said["params"]["exceptionDetails"])[:400])
        return said


@contextmanager
def browser(log: Path) -> Iterator[Tab]:
    """A Chromium with a profile of its own that writes what it does in the network to `log`; ended afterwards."""
    profile = Path(tempfile.mkdtemp(prefix="hive-book-", dir="/var/tmp"))
    command = [BROWSER, *QUIET, f"--user-data-dir={profile}", f"--log-net-log={log}", "about:blank"]
    with (profile / "said").open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
    try:
        port = _port_of(profile, process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=WITHIN_S) as answer:
            [page] = [one for one in json.load(answer) if one["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None, proxy=None) as connection:
            tab = Tab(connection)
            yield tab
            connection.send(json.dumps({"id": 0, "method": "Browser.close"}))
        process.wait(WITHIN_S)
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _port_of(profile: Path, process: subprocess.Popen[bytes]) -> int:
    file = profile / "DevToolsActivePort"
    until = time.monotonic() + WITHIN_S
    while not (file.exists() and file.read_text().strip()):
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{BROWSER} does not begin: {(profile / 'said').read_text(errors='replace')[-2000:]}")
        time.sleep(0.05)
    return int(file.read_text().split()[0])


def requests_in(log: Path) -> list[tuple[str, str]]:
    """URL and initiator of every request of a log of the network; the initiator of what no page asked is no origin."""
    told = json.loads(log.read_text())
    kind = told["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    found = [event["params"] for event in told["events"] if event["type"] == kind and "url" in event.get("params", {})]
    return sorted({(str(one["url"]), str(one.get("initiator", ""))) for one in found})


def look_at(book: str, pages: list[str], log: Path) -> dict[str, Any]:
    """Opens the pages and searches for a word."""
    titles: dict[str, str] = {}
    with browser(log) as tab:
        for number, page in enumerate(pages):
            tab.open(f"{book}/{page}", until="networkIdle" if number < LOOKS_BACK else "load")
            titles[page] = tab.value("document.querySelector('article h1').innerText.replace('¶', '').trim()")
        tab.open(f"{book}/index.html?q=freezer", until="networkIdle")
        results = "[...document.querySelectorAll('.md-search-result__link')].map(one => one.getAttribute('href'))"
        until = time.monotonic() + WITHIN_S
        while not (found := tab.value(results)) and time.monotonic() < until:
            time.sleep(0.1)
        return {"titles": titles, "found": found, "thrown": tab.thrown}


def main(site: Path, pages: list[str]) -> None:
    raise_loopback()
    with tempfile.TemporaryDirectory(prefix="hive-book-", dir="/var/tmp") as directory, served(site) as book:
        log, canary_log = Path(directory) / "log.json", Path(directory) / "canary.json"
        seen = look_at(book, pages, log)
        with browser(canary_log) as tab:
            tab.open(f"{book}/canary.html", until="load")
        told = {
            **seen,
            "book": book,
            "routes": routes(),
            "requests": requests_in(log),
            "canary": requests_in(canary_log),
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
