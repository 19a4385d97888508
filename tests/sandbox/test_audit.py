"""Notes of the helper on what it was asked."""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hive.errors import HiveError
from hive.link.helper import AskStat, ProxyStats, Start, Thaw
from hive.link.message import LinkMessage
from hive.link.messages import Done, Failed
from hive.sandbox import audit
from hive.sandbox.audit import Audit, LinkPeer
from hive.settings.table import Paths
from tests.sandbox.harness import SLEEP, A, Daemon, HelperProcess, OpenHelper, running, spec
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
LINE = re.compile(
    r"audit verb=(\w+) agent=(\S+) name=(\S+) by=(\w+) pid=(\d+) uid=(\d+) outcome=(\w+) took_ms=(\d+\.\d\d)$"
)


def lines_of(text: str) -> list[tuple[str, ...]]:
    return [found.groups() for line in text.splitlines() if (found := LINE.search(line))]


async def test_every_verb_that_acts_is_one_line_that_says_who_asked_and_what_came_of_it(
    paths: Paths, open_helper: OpenHelper, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hive")
    await open_helper()
    daemon = await connect()
    await running(daemon, paths, SLEEP)
    await daemon.client.freeze(A, 1)
    await daemon.client.confirm(A, 1)
    await daemon.client.thaw(A)
    await daemon.client.reconcile({})
    await daemon.client.stat()
    await daemon.client.stop(A, grace_s=1)
    await daemon.client.remove(A)
    wanted = ["define", "start", "freeze", "confirm", "thaw", "reconcile", "stop", "remove"]
    await until(lambda: len(lines_of(caplog.text)) == len(wanted))
    lines = lines_of(caplog.text)
    assert [line[0] for line in lines] == wanted
    assert {line[1:3] for line in lines} == {(A, "a"), ("-", "-")}
    assert {line[3:7] for line in lines} == {("daemon", str(os.getpid()), str(os.geteuid()), "ok")}


async def test_what_was_refused_is_written_down_with_its_code(
    paths: Paths, open_helper: OpenHelper, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hive")
    await open_helper()
    daemon, proxy = await connect(), await connect(role="proxy")
    for verb in (
        daemon.client.start(A),
        daemon.client.define("x\naudit verb=fake", spec(paths, A, SLEEP, name="y\nz")),
        proxy.client.freeze(A, 1),
    ):
        with pytest.raises(HiveError):
            await verb
    await until(lambda: len(lines_of(caplog.text)) == 3)
    assert [(line[0], line[1], line[2], line[3], line[6]) for line in lines_of(caplog.text)] == [
        ("start", A, "-", "daemon", "not_found"),
        ("define", "?", "?", "daemon", "bad_request"),
        ("freeze", A, "-", "proxy", "not_permitted"),
    ]


async def test_under_hive_up_it_goes_to_a_file_only_hive_may_read_and_not_to_the_terminal(
    paths: Paths, helper_process: Callable[..., HelperProcess], connect: Connect, capfd: pytest.CaptureFixture[str]
) -> None:
    reads, writes = os.pipe()
    helper = helper_process(watch_fd=reads)
    os.close(reads)
    daemon = await connect()
    await running(daemon, paths, SLEEP)
    path = paths.log("sandbox-audit")
    await until(lambda: len(lines_of(path.read_text())) == 2)
    assert [line[0] for line in lines_of(path.read_text())] == ["define", "start"]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} audit ", path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.close(writes)
    await until(lambda: helper.process.poll() is not None)
    assert "audit verb" not in capfd.readouterr().err


PEER = LinkPeer("daemon", 1, 0)


def say(to: Audit, message: LinkMessage, outcome: LinkMessage, *, name: str = "a") -> list[LinkMessage]:
    answered: list[LinkMessage] = []
    to.noted(message, name, PEER, lambda answer, descriptors=(): answered.append(answer))(outcome)
    return answered


def test_the_file_is_cut_back_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MAX_BYTES", 4096)
    log = Audit(tmp_path / "audit.log")
    for number in range(100):
        say(log, Start(agent=f"a{number}"), Done())
    assert (tmp_path / "audit.log").stat().st_size > 4096
    log.trim()
    assert (tmp_path / "audit.log").stat().st_size <= 4096
    say(log, Start(agent="last"), Failed(code="wrong_state", message="m"))
    log.close()
    agents = [line[1] for line in lines_of((tmp_path / "audit.log").read_text())]
    assert agents[-2:] == ["a99", "last"]
    assert len(agents) < 50


def test_the_answer_is_given_first_and_a_question_is_not_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hive")
    order: list[str] = []
    log = Audit()
    caplog.handler.addFilter(lambda record: order.append("line") is None)  # type: ignore[func-returns-value]
    log.noted(Thaw(agent=A), "a", PEER, lambda *_: order.append("answer"))(Done())
    assert order == ["answer", "line"]
    assert say(log, AskStat(), ProxyStats(agents={})) == [ProxyStats(agents={})]
    assert len(lines_of(caplog.text)) == 1


def test_a_full_disk_is_told_once(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = Audit(small_disk / "audit.log")
    (small_disk / "filler").write_bytes(b"x" * ((1 << 20) - 8192))
    for _ in range(200):
        say(log, Start(agent=A), Done())
    log.close()
    assert caplog.text.count("audit_not_written error=[Errno 28]") == 1
