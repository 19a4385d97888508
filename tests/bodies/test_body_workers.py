"""Large bodies in worker processes: real ones, which are killed, stopped and outlived here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hive.bodies.body import Asked, BodyChoice, NamedBody, Opening, Want
from hive.bodies.body_workers import BodyReading, DeepReaders
from hive.bodies.fields import FieldTable
from hive.domain import Tier
from hive.errors import BadRequest, HiveError, Saturated
from hive.settings.field_rules import FieldRules
from hive.settings.table import Settings
from tests.bodies.reading import read_body
from tests.descriptors import open_descriptors
from tests.waiting import until

CHAT = "/v1/chat/completions"
OPENING, WANT = Opening("m"), Want(ask_usage=True)
LARGEST = 16 * 1024 * 1024
Scenario = Callable[[DeepReaders], Coroutine[Any, Any, None]]
Runner = Callable[[Coroutine[Any, Any, None]], object]


def chat(size: int = 300_000, **fields: Any) -> bytes:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    small = json.dumps({"messages": [{"role": "user", "content": [picture]}], **fields}).encode()
    return small.replace(b"base64,", b"base64," + b"A" * (size - len(small)))


def pieces(text: bytes, size: int = 65_536) -> list[bytes]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def rules_of(tier: Tier, **fields: str) -> FieldRules:
    """Of a chat; `fields` are an operator's own rows."""
    return FieldTable(Settings(fields={CHAT: fields})).rules(CHAT, tier)


def here(text: bytes, tier: Tier = Tier.LOW) -> Asked | HiveError:
    """The result of both steps in this process."""
    try:
        return read_body(text, rules_of(tier), WANT, OPENING)
    except HiveError as error:
        return error


def chosen(named: NamedBody) -> BodyChoice:
    return BodyChoice(WANT, named.model)


class Results:
    """The results of readings, in the order in which they ended."""

    def __init__(self, readers: DeepReaders) -> None:
        self.readers = readers
        self.all: list[Asked | HiveError] = []

    def read(self, text: bytes, tier: Tier = Tier.LOW, **fields: str) -> BodyReading:
        return self.readers.read(pieces(text), rules_of(tier, **fields), OPENING, chosen, self.all.append)

    async def wait_for(self, count: int) -> list[Asked | HiveError]:
        await until(lambda: len(self.all) >= count)
        assert len(self.all) == count
        return self.all


def free(readers: DeepReaders) -> int:
    return int(repr(readers).split("/")[0].rpartition(" ")[2])


def run(scenario: Scenario, *, runner: Runner = uvloop.run, **limits: float) -> None:
    """Runs a scenario with two workers that are ready, on uvloop as the proxy does."""

    async def main() -> None:
        readers = DeepReaders(**limits)
        readers.start()
        try:
            await until(lambda: free(readers) == 2)
            await scenario(readers)
        finally:
            pids = readers.pids
            readers.close()
            await until(lambda: not any(alive(pid) for pid in pids))

    runner(main())


def alive(pid: int) -> bool:
    """Whether there is such a process, also a zombie: a worker has to be waited for too."""
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_worker_says_what_this_process_would_say(runner: Runner) -> None:
    bodies = [
        chat(),
        chat(stream=True, max_tokens=10**6, brand_new=1, keep_alive=-1),
        chat().replace(b"data:image", b"http:image"),
        chat(stop="x" * 5000),
        b"{" * 300_000,
        b"",
        b"\xff" * 300_000,
    ]

    async def scenario(readers: DeepReaders) -> None:
        for text in bodies:
            for tier in Tier:
                results = Results(readers)
                results.read(text, tier)
                (found,) = await results.wait_for(1)
                expected = here(text, tier)
                if isinstance(found, Asked):
                    assert isinstance(expected, Asked)
                    assert b"".join(found.upstream) == b"".join(expected.upstream)
                    assert (found.dropped, found.clamped, found.max_tokens) == (
                        expected.dropped,
                        expected.clamped,
                        expected.max_tokens,
                    )
                    assert (found.model, found.stream, found.usage_added) == (
                        expected.model,
                        expected.stream,
                        expected.usage_added,
                    )
                    assert found.size == expected.size == sum(map(len, found.upstream))
                else:
                    assert isinstance(expected, HiveError)
                    assert (type(found), found.message) == (type(expected), expected.message)

    run(scenario, runner=runner)


def test_the_largest_body_comes_back_in_pieces() -> None:
    text = chat(LARGEST)

    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        results.read(text)
        (found,) = await results.wait_for(1)
        expected = here(text)
        assert isinstance(found, Asked)
        assert isinstance(expected, Asked)
        assert len(found.upstream) > 10
        assert max(map(len, found.upstream)) <= 256 * 1024
        assert b"".join(found.upstream) == expected.upstream[0]

    run(scenario)


@pytest.mark.parametrize("size", [1, 7, 1000, 10**9])
def test_however_it_came_it_is_the_same_body(size: int) -> None:
    text = chat(300_000)

    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        readers.read([b"", *pieces(text, size), b""], rules_of(Tier.LOW), OPENING, chosen, results.all.append)
        (found,) = await results.wait_for(1)
        assert isinstance(found, Asked)
        assert b"".join(found.upstream) == here(text).upstream[0]  # type: ignore[union-attr]

    run(scenario)


@pytest.mark.wide
def test_forty_at_once_each_get_their_own() -> None:
    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        for number in range(40):
            results.read(chat(2_000_000 if number % 4 else LARGEST, seed=number))
        assert len(readers.waiting) == 38
        found = await results.wait_for(40)
        seeds = [json.loads(b"".join(asked.upstream))["seed"] for asked in found if isinstance(asked, Asked)]
        assert sorted(seeds) == list(range(40))

    run(scenario)


def test_the_server_is_chosen_by_the_model_that_the_body_names() -> None:
    asked_for: list[str] = []

    def by_model(named: NamedBody) -> BodyChoice:
        asked_for.append(named.model)
        return BodyChoice(Want(inject=(("n", b"1"),) if named.model == "a" else ()), f"{named.model}:q4")

    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        for model in ("a", "b"):
            readers.read(pieces(chat(model=model)), rules_of(Tier.LOW), OPENING, by_model, results.all.append)
        found = {asked.model: asked for asked in await results.wait_for(2) if isinstance(asked, Asked)}
        sent = {model: json.loads(b"".join(asked.upstream)) for model, asked in found.items()}
        assert {model: (said["model"], said.get("n")) for model, said in sent.items()} == {
            "a": ("a:q4", 1),
            "b": ("b:q4", None),
        }
        assert {asked.served for asked in found.values()} == {"a:q4", "b:q4"}
        assert sorted(asked_for) == ["a", "b"]

    run(scenario)


def test_a_body_without_a_server_is_given_up_and_its_worker_reads_the_next() -> None:
    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        pids = readers.pids
        given_up = [
            readers.read(pieces(chat()), rules_of(Tier.LOW), OPENING, lambda _: None, results.all.append)
            for _ in range(6)
        ]
        await until(lambda: all(reading.is_over for reading in given_up) and free(readers) == 2)
        results.read(chat())
        assert isinstance((await results.wait_for(1))[0], Asked)
        assert readers.pids == pids

    run(scenario)


def test_a_client_that_left_while_its_body_was_opened_is_not_asked_about() -> None:
    asked_for: list[str] = []

    def by_model(named: NamedBody) -> BodyChoice:
        asked_for.append(named.model)
        return chosen(named)

    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        reading = readers.read(pieces(chat(LARGEST)), rules_of(Tier.LOW), OPENING, by_model, results.all.append)
        reading.cancel()
        await until(lambda: free(readers) == 2)
        assert (asked_for, results.all) == ([], [])

    run(scenario)


def test_a_killed_worker_s_body_goes_to_another_one() -> None:
    async def scenario(readers: DeepReaders) -> None:
        first, second = readers.pids
        os.kill(first, signal.SIGSTOP)  # so that it is surely in the middle of it
        results = Results(readers)
        results.read(chat(LARGEST))
        await asyncio.sleep(0.05)
        os.kill(first, signal.SIGKILL)
        (found,) = await results.wait_for(1)
        assert isinstance(found, Asked)
        await until(lambda: free(readers) == 2)
        assert second in readers.pids
        assert first not in readers.pids
        assert not alive(first)

    run(scenario)


def test_a_body_that_ends_two_workers_is_refused_and_the_next_is_read() -> None:
    async def scenario(readers: DeepReaders) -> None:
        pids = readers.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        results = Results(readers)
        results.read(chat())
        os.kill(pids[0], signal.SIGKILL)
        await until(lambda: pids[0] not in readers.pids)  # the other one has it now
        os.kill(pids[1], signal.SIGKILL)
        (found,) = await results.wait_for(1)
        assert isinstance(found, BadRequest)
        results.read(chat())
        assert isinstance((await results.wait_for(2))[1], Asked)
        assert not set(pids) & set(readers.pids)

    run(scenario)


def test_a_worker_that_hangs_is_killed() -> None:
    async def scenario(readers: DeepReaders) -> None:
        pids = readers.pids
        os.kill(pids[0], signal.SIGSTOP)
        results = Results(readers)
        results.read(chat())
        assert isinstance((await results.wait_for(1))[0], Asked)
        await until(lambda: not alive(pids[0]))

    run(scenario, hang_s=0.5)


def test_without_a_worker_in_time_it_is_not_the_client_s_fault() -> None:
    async def scenario(readers: DeepReaders) -> None:
        for pid in readers.pids:
            os.kill(pid, signal.SIGSTOP)
        results = Results(readers)
        for _ in range(3):
            results.read(chat())
        (found,) = await results.wait_for(1)
        assert isinstance(found, Saturated)
        assert found.retry_after_s
        for pid in readers.pids:
            os.kill(pid, signal.SIGCONT)
        assert all(isinstance(each, Asked) for each in (await results.wait_for(3))[1:])

    run(scenario, wait_s=0.2)


def test_a_cancelled_reading_is_never_told_and_in_nobody_s_way() -> None:
    async def scenario(readers: DeepReaders) -> None:
        pids = readers.pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        results, cancelled = Results(readers), Results(readers)
        under_way = [cancelled.read(chat(LARGEST)) for _ in range(2)]
        waiting = [cancelled.read(chat()) for _ in range(3)]
        results.read(chat())
        assert len(readers.waiting) == 4
        await asyncio.sleep(0.05)
        for reading in under_way + waiting:
            reading.cancel()
            reading.cancel()
        assert len(readers.waiting) == 1
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await results.wait_for(1)
        await until(lambda: free(readers) == 2)
        assert cancelled.all == []
        assert readers.pids == pids

    run(scenario)


def test_a_cancelled_reading_costs_no_second_worker() -> None:
    async def scenario(readers: DeepReaders) -> None:
        first, second = readers.pids
        os.kill(first, signal.SIGSTOP)
        results = Results(readers)
        results.read(chat(LARGEST)).cancel()
        os.kill(first, signal.SIGKILL)
        await until(lambda: free(readers) == 2 and first not in readers.pids)
        assert results.all == []
        assert second in readers.pids

    run(scenario)


def test_workers_come_back_however_often_they_are_killed_and_nothing_is_left_open() -> None:
    async def scenario(readers: DeepReaders) -> None:
        before = open_descriptors()
        for _ in range(3):
            for pid in readers.pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: free(readers) < 2)
            await until(lambda: free(readers) == 2)
        assert open_descriptors() == before
        results = Results(readers)
        results.read(chat())
        await results.wait_for(1)

    run(scenario)


def test_without_descriptors_workers_come_back_once_there_are_some() -> None:
    async def scenario(readers: DeepReaders) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, hard))
            for pid in readers.pids:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: not readers.pids)
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(taken[0]))
            results = Results(readers)
            results.read(chat())
            await asyncio.sleep(0.3)
            assert readers.pids == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        (found,) = await results.wait_for(1)
        assert isinstance(found, Asked)

    run(scenario)


def test_rules_that_change_hold_for_the_next_body() -> None:
    async def scenario(readers: DeepReaders) -> None:
        results = Results(readers)
        results.read(chat(seed=1))
        await results.wait_for(1)
        results.read(chat(seed=1), seed="drop")
        before, after = await results.wait_for(2)
        assert isinstance(before, Asked)
        assert isinstance(after, Asked)
        assert (before.dropped, after.dropped) == ((), ("seed",))

    run(scenario)


def test_closing_refuses_what_is_under_way() -> None:
    async def main() -> None:
        readers = DeepReaders()
        readers.start()
        pids = readers.pids
        results = Results(readers)
        for _ in range(3):
            results.read(chat())
        readers.close()
        assert [type(found) for found in results.all] == [Saturated] * 3
        assert not any(alive(pid) for pid in pids)

    uvloop.run(main())


PROXY = """
import asyncio, sys
from hive.bodies.body_workers import DeepReaders
async def main():
    readers = DeepReaders()
    readers.start()
    print(*readers.pids, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_workers_leave_with_the_proxy_also_when_it_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PROXY], stdout=subprocess.PIPE) as proxy:
        assert proxy.stdout is not None
        pids = [int(word) for word in proxy.stdout.readline().split()]
        assert len(pids) == 2
        assert all(alive(pid) for pid in pids)
        proxy.kill()
    asyncio.run(until(lambda: not any(running(pid) for pid in pids)))


def running(pid: int) -> bool:
    """Alive and no zombie: the process that inherits it here may not wait for it at once."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("sent", [b"", b"\x00\x00"], ids=["between bodies", "within one"])
def test_a_worker_ignores_the_signals_that_end_the_proxy_and_leaves_at_its_end(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "hive.bodies.body_worker", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker:
        theirs.close()
        assert ours.recv(1) == b"\x01"
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            worker.send_signal(signum)
        ours.sendall(sent)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.2)
        ours.close()
        assert worker.wait(60) == 0


def test_a_worker_imports_next_to_nothing() -> None:
    """The bodies it reads are untrusted."""
    code = "import sys, hive.bodies.body_worker; print(*sys.modules)"
    modules = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not modules & {
        "asyncio",
        "uvloop",
        "httptools",
        "redis",
        "httpx",
        "sqlite3",
        "subprocess",
        "hive.settings.table",
    }
