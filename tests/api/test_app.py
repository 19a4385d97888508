"""The REST API: the real application on a real unix socket, over the services of a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from asyncio import to_thread
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hive.agents.lifecycle import AgentLifecycle
from hive.api.server import serve
from hive.client.client import Client, path_of
from hive.control.counters import Counters
from hive.errors import BadRequest, HiveError, MethodNotAllowed, NotFound, TimedOut, TooLarge, WrongState
from hive.host.accounts import Accounts
from tests.control.box import PAUSE_TIMEOUT_S, Box, HeldStops
from tests.waiting import until

SPEC: dict[str, Any] = {"name": "alice", "command": ["/bin/sleep", "9"]}


def raw(path: Path, request: bytes) -> bytes:
    """The server's answer to these bytes until it closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(65536), b""))


async def test_an_agent_is_created_shown_and_removed(client: Client, live: Box) -> None:
    view = await to_thread(client.post, "/api/agents", SPEC)
    assert (view["name"], view["status"], view["command"]) == ("alice", "running", ["/bin/sleep", "9"])
    shown = await to_thread(client.get, path_of(view["id"]))
    listed = (await to_thread(client.get, "/api/agents"))["agents"]
    assert [(one["id"], one["pid"]) for one in (shown, *listed)] == [(view["id"], view["pid"])] * 2
    assert await to_thread(client.delete, path_of("alice")) == {"removed": view["id"], "name": "alice"}
    assert await to_thread(client.get, "/api/agents") == {"agents": []}
    assert {row.actor for row in await live.orders()} == {f"uid:{os.geteuid()}"}


async def test_a_created_agent_is_answered_with_201(live: Box) -> None:
    body = json.dumps(SPEC).encode()
    head = b"POST /api/agents HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await to_thread(raw, live.paths.api_socket, head + body)
    assert answer.startswith(b"HTTP/1.1 201 Created\r\n")
    assert b"content-type: application/json\r\n" in answer


@pytest.mark.parametrize("verb", ["start", "stop", "restart", "resume"])
async def test_each_transition_answers_with_the_agent(client: Client, verb: str) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    view = await to_thread(client.post, path_of("alice", verb))
    assert view["status"] == ("stopped" if verb == "stop" else "running")


async def test_a_shutdown_stops_the_agents_and_names_them(client: Client) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    assert await to_thread(client.post, "/api/system/shutdown") == {"stopped": ["alice"], "failed": []}
    assert (await to_thread(client.get, path_of("alice")))["status"] == "stopped"


async def test_pause_takes_its_time_from_the_body_or_from_the_setting(
    client: Client, live: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    pause, asked = AgentLifecycle.pause, []

    async def noted(life: AgentLifecycle, **given: Any) -> None:
        asked.append((given["timeout_s"], given["now"]))
        await pause(life, **given)

    monkeypatch.setattr(AgentLifecycle, "pause", noted)
    assert (await to_thread(client.post, path_of("alice", "pause")))["status"] == "paused"
    await to_thread(client.post, path_of("alice", "pause"), {"timeout_s": 1.5})
    await to_thread(client.post, path_of("alice", "pause"), {"now": True})
    assert asked == [(PAUSE_TIMEOUT_S, False), (1.5, False), (PAUSE_TIMEOUT_S, True)]


async def test_a_message_is_taken_with_202_read_and_dropped(client: Client, live: Box) -> None:
    await to_thread(client.post, "/api/agents", {**SPEC, "port": 9000})
    body = b'{"text": "later"}'
    head = b"POST /api/agents/alice/messages HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    answer = await to_thread(raw, live.paths.api_socket, head % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 202 Accepted\r\n")
    sent = json.loads(answer.partition(b"\r\n\r\n")[2])
    listed = await to_thread(client.get, path_of("alice", "messages"))
    assert [message["id"] for message in listed["messages"]] == [sent["id"]]
    one = f"{path_of('alice', 'messages')}/{sent['id']}"
    assert (await to_thread(client.get, one, wait_s=0))["state"] == "waiting"
    assert (await to_thread(client.delete, one))["dropped"] == sent["id"]
    with pytest.raises(NotFound):
        await to_thread(client.get, one)


async def test_a_schedule_is_made_with_201_listed_and_cancelled(client: Client) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    path = path_of("alice", "schedules")
    made = await to_thread(client.post, path, {"when": "07:30", "every": "1d", "note": "n"})
    assert (made["every_s"], made["clock"], made["note"]) == (86400.0, "07:30:00", "n")
    assert [found["id"] for found in (await to_thread(client.get, path))["schedules"]] == [made["id"]]
    assert (await to_thread(client.delete, f"{path}/{made['id']}"))["cancelled"] == made["id"]
    with pytest.raises(NotFound):
        await to_thread(client.delete, f"{path}/{made['id']}")


@pytest.mark.parametrize(
    ("verb", "order", "said"),
    [
        ("keep-awake", {}, "for_s"),
        ("keep-awake", {"for_s": -1}, "for: -1 is not from 0"),
        ("keep-awake", {"for_s": 1e12}, "is not from 0"),
        ("keep-awake", {"for_s": "a while"}, "for: expected numbers with s, m, h or d"),
        ("messages", {}, "text"),
        ("messages", {"text": 5}, "text"),
        ("messages", {"text": "x", "to": "y"}, "to"),
        ("schedules", {"every": "1d"}, "when"),
        ("schedules", {"when": "+1h", "every": 5}, "every"),
        ("pause", {"deep": "yes"}, "deep"),
    ],
)
async def test_a_bad_order_is_refused(client: Client, verb: str, order: dict[str, Any], said: str) -> None:
    await to_thread(client.post, "/api/agents", {**SPEC, "port": 9000})
    with pytest.raises(BadRequest, match=said):
        await to_thread(client.post, path_of("alice", verb), order)


@pytest.mark.parametrize(
    ("method", "verb"), [("get", "messages/m1"), ("delete", "schedules/x"), ("delete", "schedules/9")]
)
async def test_what_is_not_there_is_not_found_or_refused(client: Client, method: str, verb: str) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    with pytest.raises((NotFound, BadRequest)):
        await to_thread(getattr(client, method), f"{path_of('alice')}/{verb}")


async def test_keep_awake_takes_seconds_or_a_length_and_ends_with_0(client: Client) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    for for_s in (600, "10m"):
        view = await to_thread(client.post, path_of("alice", "keep-awake"), {"for_s": for_s})
        assert 590 < view["kept_awake_until"] - time.time() <= 600
    view = await to_thread(client.post, path_of("alice", "keep-awake"), {"for_s": 0})
    assert view["kept_awake_until"] is None


async def test_a_dry_run_changes_nothing(client: Client) -> None:
    def plan() -> Any:
        return client.put(path_of("alice"), {**SPEC, "port": 9000}, dry_run=1)

    found = await to_thread(plan)
    assert (found["created"], found["agent"], found["dry_run"]) == (True, None, True)
    assert await to_thread(client.get, "/api/agents") == {"agents": []}
    await to_thread(client.post, "/api/agents", SPEC)
    change = {"field": "port", "from": None, "to": 9000, "at_restart": True}
    assert (await to_thread(plan))["changes"] == [change]
    assert (await to_thread(client.get, path_of("alice")))["port"] is None


async def test_refusals_come_back_as_the_errors_they_were(client: Client, live: Box) -> None:
    agent = (await to_thread(client.post, "/api/agents", SPEC))["id"]
    with pytest.raises(NotFound, match="there is no agent 'bob'"):
        await to_thread(client.post, path_of("bob", "start"))
    with pytest.raises(WrongState) as taken:
        await to_thread(client.post, "/api/agents", SPEC)
    assert taken.value.hint.startswith("hive agent remove alice, then again; or hive agent export alice > alice.toml, ")
    live.proxy.busy[agent] = "1 request is in flight"
    with pytest.raises(TimedOut, match="it is awake"):
        await to_thread(client.post, path_of("alice", "pause"), {"timeout_s": 0.1})
    with pytest.raises(HiveError) as busy:
        await to_thread(client.post, path_of("alice", "pause"), {"now": True})
    assert (busy.value.code, busy.value.status, busy.value.exit_code) == ("busy", 409, 1)


async def test_apply_takes_the_name_from_the_path(client: Client) -> None:
    first = await to_thread(client.put, path_of("alice"), SPEC)
    assert first["created"] is True
    await to_thread(client.post, path_of("alice", "start"))
    second = await to_thread(client.put, path_of("alice"), {**SPEC, "port": 9000})
    assert (second["created"], second["changed"], second["restart_needed"]) == (False, ["port"], True)
    with pytest.raises(BadRequest, match="the path says 'bob', the body 'alice'"):
        await to_thread(client.put, path_of("bob"), SPEC)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"name": "a",', "truncated"),
        (b'{"name": "a" "b"}', "byte 13"),
        (b"", "truncated"),
        (b"[" * 100000, "expected `object`"),
        (b'{"name": 1, "command": []}', "$.name"),
        (b'{"name": "a", "command": ["/bin/sleep"], "prot": 1}', "prot"),
        (b'{"name": "a\xff", "command": ["/bin/sleep"]}', "utf-8"),
        (b'{"name": "A", "command": ["/bin/sleep"]}', "name: 'A' is no name"),
        (b'{"name": "a", "command": ["/no/such/program"]}', "no such program"),
    ],
)
async def test_a_bad_body_is_400_and_says_where(live: Box, body: bytes, said: str) -> None:
    head = b"POST /api/agents HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = await to_thread(raw, live.paths.api_socket, head + body)
    problem = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"content-type: application/problem+json\r\n" in answer
    assert problem["code"] == "bad_request"
    assert problem["status"] == 400
    assert said.lower() in problem["detail"].lower()


async def test_a_body_beyond_the_limit_is_413(client: Client) -> None:
    with pytest.raises(TooLarge):
        await to_thread(client.post, "/api/agents", {**SPEC, "env": {"A": "x" * 1_048_576}})


async def test_unknown_paths_and_methods_say_so(client: Client, live: Box) -> None:
    with pytest.raises(NotFound, match="there is no /api/nonsense"):
        await to_thread(client.get, "/api/nonsense")
    with pytest.raises(MethodNotAllowed):
        await to_thread(client.post, "/api/health")
    answer = await to_thread(
        raw, live.paths.api_socket, b"PUT /api/agents HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"allow: GET, HEAD, POST\r\n" in answer


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/api/agents/alice/logs", {"tail": "x"}),
        ("/api/agents/alice/logs", {"tail": "-1"}),
        ("/api/agents/alice/logs", {"follow": "yes"}),
        ("/api/agents/alice/usage", {"period": "2 h"}),
        ("/api/agents/alice/usage", {"limit": "1000000"}),
        ("/api/usage", {"since": "yesterday"}),
        ("/api/usage", {"by": "day"}),
        ("/api/events", {"tail": "1e3"}),
    ],
)
async def test_a_bad_query_is_refused(client: Client, path: str, query: dict[str, Any]) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    with pytest.raises(BadRequest, match="expected"):
        await to_thread(client.get, path, **query)


@pytest.mark.parametrize("timeout_s", [-1, 1e9])
async def test_a_pause_that_would_wait_for_ever_is_refused(client: Client, timeout_s: float) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    with pytest.raises(BadRequest, match="timeout_s"):
        await to_thread(client.post, path_of("alice", "pause"), {"timeout_s": timeout_s})


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/api/health", "isolation"),
        ("/api/system/inference", "models"),
        ("/api/system/inference/stats", "concurrentRequests"),
        ("/api/system/access", "token"),
        ("/api/system/memory", "zram"),
        ("/api/agents/alice/messages", "messages"),
        ("/api/agents/alice/schedules", "schedules"),
        ("/api/usage", "totals"),
        ("/api/agents/alice/usage", "byModel"),
        ("/api/agents/alice/tokens", "ollama_host"),
        ("/api/agents/alice", "why"),
    ],
)
async def test_each_reading_path_answers(client: Client, path: str, key: str) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    assert key in await to_thread(client.get, path)


async def test_metrics_are_text_as_prometheus_wants_it(live: Box) -> None:
    request = b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head, _, body = (await to_thread(raw, live.paths.api_socket, request)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-type: text/plain; version=0.0.4; charset=utf-8" in head
    assert b"\nhive_agents{" in body


async def test_a_fault_of_hive_is_500_without_its_inside(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counters, "answer", lambda _, agents: 1 / agents)
    with pytest.raises(HiveError, match="its log says where") as caught:
        await to_thread(client.get, "/api/stats")
    assert caught.value.code == "internal"
    assert "ZeroDivisionError" in caplog.text


async def test_a_client_that_leaves_does_not_stop_what_it_began(
    client: Client, live: Box, held_stops: HeldStops
) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(live.paths.api_socket))
        sock.sendall(b"POST /api/agents/alice/stop HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await until(lambda: held_stops.begun == 1)
    await asyncio.sleep(0.1)
    assert live.life("alice").status == "running"
    held_stops.go.set()
    await until(lambda: live.life("alice").status == "stopped")


async def test_a_server_that_ends_finishes_the_transition_under_way(live: Box, held_stops: HeldStops) -> None:
    server = await serve(live.services, live.paths.runtime / "again.sock")
    client = Client(live.paths.runtime / "again.sock")
    await to_thread(client.post, "/api/agents", SPEC)
    stopping = asyncio.ensure_future(to_thread(client.post, path_of("alice", "stop")))
    await until(lambda: held_stops.begun == 1)
    await server.close()
    held_stops.go.set()
    with pytest.raises(HiveError):
        await stopping
    await until(lambda: live.life("alice").status == "stopped")


def remember(live: Box, monkeypatch: pytest.MonkeyPatch, *past: dict[str, Any]) -> None:
    """As if these were in the audit table, and nothing else."""

    async def told(limit: int, agent: str = "") -> list[dict[str, Any]]:
        return [*past][-limit:] if limit else []

    monkeypatch.setattr(live.services.audit_log, "past", told)


def event(number: int) -> dict[str, Any]:
    return {"at": float(number), "kind": "agent.paused", "agent": "a", "name": "alice", "reason": str(number)}


async def test_past_events_come_then_those_to_come_each_once(
    client: Client, live: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(live, monkeypatch, event(1), event(2))
    assert await to_thread(lambda: list(client.events(tail=1))) == [event(2)]
    stream = client.events(tail=5, follow=True)
    assert [await to_thread(next, stream), await to_thread(next, stream)] == [event(1), event(2)]
    live.feed.publish(event(2))  # reached the live readers too, while the past was read
    live.feed.publish(event(3))
    assert await to_thread(next, stream) == event(3)
    await to_thread(stream.close)


async def test_streams_end_when_the_server_does(live: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    path = live.paths.runtime / "again.sock"
    server = await serve(live.services, path)
    client = Client(path)
    await to_thread(client.post, "/api/agents", SPEC)
    live.output("alice").path.write_text("one\n")
    remember(live, monkeypatch, event(1))
    events = client.events(follow=True)
    logs = client.lines(path_of("alice", "logs"), follow=1)
    assert await to_thread(next, events) == event(1)
    assert await to_thread(next, logs) == b"one\n"
    await server.close()
    assert await to_thread(list, events) == []
    assert await to_thread(list, logs) == []
    assert not path.exists()


async def test_a_follower_that_left_is_forgotten(client: Client, live: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(live, monkeypatch, event(1))
    stream = client.events(follow=True)
    await to_thread(next, stream)
    assert live.followers == 1
    await to_thread(stream.close)
    live.feed.publish(event(2))
    await until(lambda: not live.followers)


async def test_logs_show_the_end_and_follow_a_file_that_is_cut_back(client: Client, live: Box) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    log = live.output("alice").path
    assert await to_thread(lambda: list(client.lines(path_of("alice", "logs")))) == []
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(50_000)))
    tail = await to_thread(lambda: list(client.lines(path_of("alice", "logs"), tail=2)))
    assert tail == [b"line 49998\n", b"line 49999\n"]
    assert await to_thread(lambda: list(client.lines(path_of("alice", "logs"), tail=0))) == []
    stream = client.lines(path_of("alice", "logs"), tail=1, follow=1)
    assert await to_thread(next, stream) == b"line 49999\n"
    with log.open("ab") as file:
        file.write(b"more\n")
    assert await to_thread(next, stream) == b"more\n"
    log.write_bytes(b"cut back\n")
    assert await to_thread(next, stream) == b"cut back\n"
    other = log.with_name("other")
    other.write_bytes(b"replaced by something longer than before\n")
    other.rename(log)
    assert await to_thread(next, stream) == b"replaced by something longer than before\n"
    await to_thread(stream.close)


async def test_a_log_that_is_a_link_is_not_followed(client: Client, live: Box, tmp_path: Path) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    (tmp_path / "secret").write_text("secret\n")
    live.output("alice").path.unlink(missing_ok=True)
    live.output("alice").path.symlink_to(tmp_path / "secret")
    with pytest.raises(HiveError):
        await to_thread(lambda: list(client.lines(path_of("alice", "logs"))))


def test_it_serves_on_uvloop_as_in_the_daemon(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers and streams go through uvloop's own transports there."""

    async def story() -> None:
        box, path = Box(short_path), short_path / "again.sock"
        box.paths.state.mkdir()
        box.paths.runtime.mkdir()
        await box.everything()
        server = await serve(box.services, path)
        client = Client(path)
        view = await to_thread(client.post, "/api/agents", SPEC)
        remember(box, monkeypatch, event(1))
        events = client.events(follow=True)
        assert await to_thread(next, events) == event(1)
        await server.close()
        assert await to_thread(list, events) == []
        assert view["name"] == "alice"
        assert {row.actor for row in await box.orders()} == {f"uid:{os.geteuid()}"}
        await box.end()

    uvloop.run(story())


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A directory any user may enter, which pytest's own are not."""
    path = Path(tempfile.mkdtemp(prefix="hive-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def ask_as(path: Path, request: str, *, user: int, groups: list[int]) -> subprocess.CompletedProcess[str]:
    """The answer that this user gets there; stderr says why it could not ask."""
    program = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(sys.argv[2].encode() + b' HTTP/1.0\\r\\n\\r\\n');"
        "print(b''.join(iter(lambda: s.recv(65536), b'')).decode())"
    )
    # The system's Python: this one may be in a home no other user may enter.
    command = ["/usr/bin/python3", "-c", program, str(path), request]
    return subprocess.run(
        command, user=user, group=user, extra_groups=groups, capture_output=True, text=True, check=False
    )


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_another_user_is_refused_even_where_the_socket_is_open(live: Box, public_dir: Path) -> None:
    server = await serve(live.services, public_dir / "hive.sock")

    async def asked() -> subprocess.CompletedProcess[str]:
        return await to_thread(ask_as, public_dir / "hive.sock", "GET /api/health", user=65534, groups=[])

    assert "PermissionError" in (await asked()).stderr
    (public_dir / "hive.sock").chmod(0o666)
    answer = (await asked()).stdout
    assert answer.startswith("HTTP/1.1 403 ")
    assert "uid 65534 may not steer this Hive" in answer
    await server.close()


INSTALLED = Accounts(daemon=61001, proxy=61002, services=61002, operators=61001, admins=61003)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize(
    ("user", "groups", "look", "act"),
    [
        (61010, [61001], 200, 403),
        (61010, [61001, 61003], 200, 200),
        (61002, [61001], 403, 403),  # the proxy is in the group of Redis' socket
        (61010, [61003], None, None),
        (61010, [], None, None),
    ],
    ids=["operator", "admin", "the proxy", "admin who is no operator", "nobody"],
)
async def test_people_may_what_their_groups_may(
    live: Box, public_dir: Path, user: int, groups: list[int], look: int | None, act: int | None
) -> None:
    server = await serve(live.services, public_dir / "hive.sock", INSTALLED)
    requests = {
        "GET /api/health": look,
        "POST /api/system/shutdown": act,
        "POST /api/system/inference": 400 if act == 200 else act,  # an order without a body
        "DELETE /api/jobs/none": 404 if look == 200 else act,  # a model's job is an operator's to end
    }
    for request, status in requests.items():
        ran = await to_thread(ask_as, public_dir / "hive.sock", request, user=user, groups=groups)
        if status is None:
            assert "PermissionError" in ran.stderr
        else:
            assert ran.stdout.startswith(f"HTTP/1.1 {status} ")
        if (look, status) == (200, 403):  # it named a path of the API to whoever had typed a command
            assert f"uid:{user} is operator, and this is for admins" in ran.stdout
    told = [(row.actor, row.act, row.outcome) for row in await live.orders()]
    acts = ("shutdown", "switch", "cancel_job")
    if (look, act) == (200, 403):
        outcomes = ("not_permitted", "not_permitted", "not_found")
        assert told == [(f"uid:{user}", f"order.{name}", how) for name, how in zip(acts, outcomes, strict=True)]
    else:
        assert len(told) == (3 if act == 200 else 0)
    await server.close()
