"""A real program that allocates takes a lease by `hive lease run` while real llama-servers serve agents."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.client.gpu_boss import GPUBoss
from hive.errors import LeaseTooLarge, LeaseWaited
from tests.journeys.pool_stack import LLAMAS, SERVER_MB, llama_models, llama_rows, pool_config
from tests.journeys.stack import PYTHON, Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
HOARDER = Path(__file__).with_name("programs") / "hoarder.py"
AGENTS = 20
ROOM_MB = 3 * SERVER_MB + 20
JOB_MB = 120
"""So much that two of three models have to leave for it, and not more than the share of leases."""


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Three models, room for three, twenty agents that ask for all of them."""
    folder = tmp_path_factory.mktemp("models")
    with stack(config=pool_config(ROOM_MB) + llama_rows(llama_models(folder))) as made:
        for number in range(AGENTS):
            made.create(f"chooser-{number}", "chooser.py", "0.3", *LLAMAS)
        until(lambda: states(made) == ["ready"] * 3, within_s=120, what="all models are loaded")
        yield made


def states(hive: Stack) -> list[str]:
    return sorted(slot["state"] for slot in hive.get("/api/pool")["slots"])


def answers(hive: Stack) -> tuple[int, list[dict[str, Any]]]:
    """(how many answers the agents received, those that were none)."""
    lines = [line for number in range(AGENTS) for line in hive.agent_lines(f"chooser-{number}") if "asked" in line]
    return len(lines), [line for line in lines if "tokens_out" not in line]


@contextmanager
def job(hive: Stack, *options: str, mb: int = JOB_MB, takes_mb: int = 90, seconds: float = 4.0) -> Iterator[Any]:
    """A program that takes memory, under a lease; ended with the block."""
    words = [PYTHON, "-S", str(HOARDER), str(takes_mb), str(seconds)]
    command = [sys.executable, "-m", "hive", "lease", "run", "--state-dir", str(hive.state), "--vram", f"{mb}M"]
    with subprocess.Popen(
        [*command, "--grace", "5s", *options, "--", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    return json.loads(line)  # type: ignore[no-any-return]


def leases(hive: Stack, **query: Any) -> list[dict[str, Any]]:
    return hive.get("/api/leases", **query)["leases"]  # type: ignore[no-any-return]


class BooksWatched:
    """Looks at the books as long as the block lasts: never more is charged than there is."""

    def __init__(self, hive: Stack) -> None:
        self._hive = hive
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.looks = 0
        self.wrong: list[Any] = []
        self.bounds: dict[str, float] = {}
        """Of each lease in line: the first bound that was printed, and when it has to be held then."""
        self.granted_at: dict[str, float] = {}

    def __enter__(self) -> BooksWatched:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._leave.wait(0.05):
            try:
                (account,) = self._hive.get("/api/pool")["accounts"]
                found = leases(self._hive)
            except Exception:  # the daemon that was just killed
                continue
            self.looks += 1
            if account["charged_bytes"] + account["leased_bytes"] > account["total_bytes"]:
                self.wrong.append(account)
            now = time.time()
            for lease in found:
                if lease["place"] is not None and lease["bound_s"] is not None:
                    self.bounds.setdefault(lease["id"], now + lease["bound_s"])
                if lease["granted_at"] is not None:
                    self.granted_at.setdefault(lease["id"], lease["granted_at"])


def check_books(hive: Stack) -> None:
    """Fails unless what is booked is what is measured: nothing of what is not there, and never less than is held."""

    def is_so() -> bool:
        view = hive.get("/api/pool")
        grants = [grant for part in ("slots", "leases") for row in view[part] for grant in row["grants"]]
        known = all(grant["measured_bytes"] is not None for grant in grants)
        return known and all(grant["charged_bytes"] >= grant["measured_bytes"] for grant in grants)

    until(is_so, within_s=30, what=f"books as measured: {hive.get('/api/pool')}")


def test_room_is_made_for_a_program_inside_the_printed_bound_and_given_back_and_no_request_fails(hive: Stack) -> None:
    before, _ = answers(hive)
    with BooksWatched(hive) as books, job(hive) as process:
        assert said(process) == {"holds_mb": 90}
        (lease,) = leases(hive)
        until(lambda: (leases(hive)[0]["used_mb"] or 0) >= 90, within_s=20, what="its memory is seen")
        assert (lease["state"], lease["gpus"], lease["mb"]) == ("running", ["cpu"], JOB_MB)
        (account,) = hive.get("/api/pool")["accounts"]
        assert account["leased_bytes"] == JOB_MB << 20
        assert process.wait(timeout=60) == 0
        until(lambda: not leases(hive), within_s=20, what="it is over")
    assert books.looks > 20
    assert books.wrong == []
    assert books.granted_at[lease["id"]] <= books.bounds.get(lease["id"], lease["since"] + 5.0)
    until(lambda: answers(hive)[0] > before + AGENTS, within_s=120, what="all agents were answered again")
    until(lambda: states(hive) == ["ready"] * 3, within_s=120, what="all models are back")
    assert answers(hive)[1] == []
    check_books(hive)
    (ended,) = leases(hive, ended=1)
    assert (ended["state"], ended["why"], ended["code"]) == ("ended", "its program has ended", "")


def test_the_line_is_kept_and_no_lease_lost_while_daemon_helper_and_proxy_are_killed(hive: Stack) -> None:
    with ExitStack() as entered:
        books = entered.enter_context(BooksWatched(hive))
        first = entered.enter_context(job(hive, "--wait", "5m", seconds=25.0))
        assert said(first) == {"holds_mb": 90}
        second = entered.enter_context(job(hive, "--wait", "5m", seconds=1.0))
        until(lambda: [lease for lease in leases(hive) if lease["place"] == 1], within_s=20, what="one waits")
        assert " waits for " in second.stderr.readline()  # it knows its lease
        pids = [lease["id"] for lease in leases(hive)]
        for victim in ("daemon", "sandbox", "proxy", "daemon"):
            hive.restart(victim)
            until(
                lambda: sorted(lease["id"] for lease in leases(hive)) == sorted(pids),
                within_s=20,
                what="both are known",
            )
            (account,) = hive.get("/api/pool")["accounts"]
            assert account["leased_bytes"] == JOB_MB << 20, victim
            assert first.poll() is None
        assert said(first) == {"lets_go": True}
        assert first.wait(timeout=60) == 0
        assert said(second) == {"holds_mb": 90}
        assert second.wait(timeout=60) == 0
        until(lambda: not leases(hive), within_s=30, what="both are over")
    assert books.wrong == []
    until(lambda: states(hive) == ["ready"] * 3, within_s=120, what="all models are back")
    check_books(hive)


def test_a_killed_program_and_a_preempted_one_give_their_memory_back(hive: Stack) -> None:
    with job(hive, seconds=600.0) as process:
        said(process)
        process.kill()
        until(lambda: not leases(hive), within_s=20, what="it is over")
    with job(hive, "--preemptible", mb=ROOM_MB, seconds=600.0) as process:
        assert process.wait(timeout=120) in (-15, 1)  # models are late: SIGTERM, or it was over before it began
        until(lambda: not leases(hive), within_s=20, what="it is over")
    (ended,) = leases(hive, ended=1)
    assert ended["code"] == "lease_preempted"
    assert ended["why"].startswith("its memory is wanted: room for ")
    until(lambda: states(hive) == ["ready"] * 3, within_s=120, what="all models are back")
    check_books(hive)


def test_what_never_fits_and_what_does_not_fit_now_are_said_at_once(hive: Stack) -> None:
    with job(hive, mb=ROOM_MB + 1) as process:
        assert process.wait(timeout=60) == 2
        assert f"it asks for {ROOM_MB + 1} MiB of the host's memory" in process.stderr.read()
    with job(hive, "--no-wait") as process:
        assert process.wait(timeout=60) == 7


def test_the_seed_s_way_in_renews_by_itself_and_gives_back(hive: Stack) -> None:
    boss = GPUBoss(hive.client().path)
    with boss.acquire(JOB_MB, label="in Python", ttl_s=1.5) as lease:
        assert lease.environment["HIVE_LEASE"] == lease.id
        time.sleep(3.0)
        (view,) = leases(hive)
        assert (view["state"], view["kind"], view["label"]) == ("running", "held", "in Python")
        lease.check()
    until(lambda: not leases(hive), within_s=20, what="it is over")
    with pytest.raises(LeaseTooLarge), boss.acquire(ROOM_MB + 1):
        pass
    until(lambda: states(hive) == ["ready"] * 3, within_s=120, what="all models are back")
    with pytest.raises(LeaseWaited), boss.acquire(JOB_MB, wait_s=0.0):
        pass

    async def in_a_loop() -> str:
        async with boss.acquire(JOB_MB, ttl_s=30.0) as lease:
            return lease.id

    id = asyncio.run(in_a_loop())
    until(lambda: not leases(hive), within_s=20, what="it is over")
    assert leases(hive, ended=1)[0]["id"] == id


def test_a_taken_lease_is_renewed_and_released_by_its_token_and_is_overdue_without(hive: Stack) -> None:
    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hive", "lease", *words, "--state-dir", str(hive.state)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ))

    taken = json.loads(ran("take", "--vram", f"{JOB_MB}M", "--ttl", "1s", "--label", "a container", "--json").stdout)
    until(lambda: leases(hive)[0]["state"] == "overdue", within_s=20, what="it is overdue")
    (account,) = hive.get("/api/pool")["accounts"]
    assert account["leased_bytes"] == JOB_MB << 20
    wrong = ran("renew", taken["id"], "--token", str(taken["token"] + 1), "--json")
    assert (wrong.returncode, json.loads(wrong.stderr)["code"]) == (1, "stale_token")
    again = ran("renew", taken["id"], "--token", str(taken["token"]), "--ttl", "60s", "--json")
    assert json.loads(again.stdout)["state"] == "running"
    assert "a container" in ran("list").stdout
    assert "its word alone" in ran("show", taken["id"]).stdout
    assert ran("release", taken["id"], "--token", str(taken["token"])).returncode == 0
    until(lambda: not leases(hive), within_s=20, what="it is over")
    assert (
        json.loads(ran("renew", taken["id"], "--token", str(taken["token"]), "--json").stderr)["code"] == "stale_token"
    )
