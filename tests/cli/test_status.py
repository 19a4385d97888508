"""The commands about the whole Hive, and about which Hive is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hive.cli import status
from hive.domain import Cluster, ClusterNode
from tests.cli.conftest import show_backend, show_cluster, spend

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_status_names_the_hive_and_what_is_down(hive: Hive) -> None:
    said = hive("status")
    todo = f"hive logs redis --socket {hive.socket}\n"
    assert f"Socket: {hive.socket}" in said.out
    assert f"Redis: {hive.box.paths.redis_socket}, DOWN: " in said.out
    assert "(requests flow and are counted)\n" in said.out
    assert "   Status: degraded\n" in said.out
    assert said.out.partition("\n\n")[2].startswith(f"Redis at {hive.box.paths.redis_socket} is down ")
    assert said.out.endswith(f"\n    {todo}")
    assert "Agents: 2 running" in said.out
    assert "   Limits: " in said.out


def test_usage_has_a_line_for_each_agent_and_a_total(hive: Hive) -> None:
    hive.daemon.do(spend(hive.box, "alice", tokens_in=1200, tokens_out=34))
    hive.daemon.do(spend(hive.box, "busy-bob", 2, tokens_in=1, tokens_out=1))
    lines = hive("usage", "--since", "7d").out.splitlines()
    assert [line.split()[0] for line in lines] == ["AGENT", "alice", "busy-bob", "all"]
    assert lines[3].startswith("all in 7d  3")
    assert hive("usage", "--since", "yesterday").code == 2
    assert "1,200 tokens in, 34 out" in hive("agent", "usage", "alice").out
    assert hive("agent", "usage", "alice", "--since", "2h").code == 0
    assert hive("agent", "usage", "alice", "--period", "2h").code == 0  # its older name
    assert hive("agent", "usage", "alice", "--since", "2 weeks").code == 2


def test_the_backend_is_shown_with_its_models(hive: Hive) -> None:
    hive.daemon.call(show_backend, hive.box, "demo")
    said = hive("backend", "status").out
    assert said.startswith("demo backend (canned text) at /r/demo.sock, version 1, up\n")
    assert "    Requests: 4 at once (/props total_slots)\n" in said
    assert "  Priorities: kept in Hive's queue\n" in said
    assert "     Warning: the backend queues 3 requests itself\n" in said
    assert "demo   1.9 GiB  hive" in said


CLUSTER = Cluster(
    engine="ray",
    wanted=2,
    running=1,
    slots_each=4,
    nodes=(ClusterNode("10.245.0.1", True, 1), ClusterNode("10.245.0.2", False, 0)),
    asked_at=1.0,
    notes=("no_token", "one_ingress"),
    waiting=3,
    waited_s=1.25,
)


def test_a_cluster_is_shown_with_its_replicas_nodes_and_age_in_80_columns(hive: Hive) -> None:
    hive.daemon.call(show_cluster, hive.box, CLUSTER)
    said = hive("backend", "status").out
    assert "     Cluster: Ray Serve, 1 of 2 replicas run, 4 at once each\n" in said
    assert " ago: it does not answer\n" in said
    assert "   Inside it: 3 requests wait in its own queue, of late for 1.2 s\n" in said
    assert "      Set up: `hive doctor cluster`: no_token, one_ingress\n" in said
    assert "NODE        STATE  REPLICAS\n10.245.0.1  up     1\n10.245.0.2  DOWN   0\n" in said
    assert max(map(len, said.splitlines())) <= 80
    cluster = hive("backend", "status", "--json").json["cluster"]
    assert (cluster["label"], cluster["nodes"][1]) == ("Ray Serve", {"name": "10.245.0.2", "up": False, "replicas": 0})
    status = hive("status").out
    assert "  Cluster: Ray Serve, 1 of 2 replicas run, 4 at once each\n" in status
    told = (
        "1 of 2 replicas of Ray Serve at /r/demo.sock run, down: 10.245.0.2: requests\nwait longer  [cluster_short]\n"
    )
    assert told in status


def test_a_plain_box_says_nothing_of_clusters(hive: Hive) -> None:
    hive.daemon.call(show_backend, hive.box, "demo")
    assert not any(word in hive("backend", "status").out for word in ("Cluster", "NODE", "Told"))
    assert "Cluster" not in hive("status").out


def test_events_say_what_changed_and_why(hive: Hive) -> None:
    hive("agent", "pause", "alice")
    assert "agent.paused  alice pausing → paused: operator" in hive("events").out
    event = json.loads(hive("events", "--json").out.splitlines()[-1])
    assert (event["schema"], event["kind"], event["name"]) == ("event", "agent.paused", "alice")


def test_events_of_an_agent_are_its_own(hive: Hive) -> None:
    """`hive events alice` was a usage error, where `journalctl -u alice` and `docker events --filter` are a habit."""
    hive("agent", "pause", "alice")
    found = [json.loads(line) for line in hive("events", "busy-bob", "--json").out.splitlines()]
    assert {event["name"] for event in found} == {"busy-bob"}
    assert "alice" not in hive("events", "busy-bob").out
    assert hive("events", "alice", "-n", "1").out.count("\n") == 1
    agent = hive("agent", "show", "alice", "--json").json["id"]
    hive("agent", "remove", "alice", "--yes")
    assert "agent.paused" in hive("events", agent).out
    unknown = hive("events", "busy-bop")
    assert (unknown.code, unknown.out) == (3, "")
    assert unknown.err == "hive: there is no agent 'busy-bop'  [not_found]\nhint: did you mean `busy-bob`?\n"


def test_what_others_chose_does_not_steer_the_terminal() -> None:
    """A backend's version and an event's reason were printed as they came, escape sequences and all."""
    event = {"at": 0.0, "kind": "agent.error", "name": "bob", "reason": "no such command: \x1b]0;x\x07"}
    backend = {"backend": "ollama", "label": "", "address": "h:1", "backend_version": "1\x1b[2J", "running": True}
    unknown: dict[str, Any] = {
        "slots": None,
        "slots_from": "no limit",
        "priority": False,
        "prefix_cache": "none",
        "warning": "",
    }
    unknown["capabilities"] = {"endpoints": None, "fields": ["\x1b[2J"], "found": ""}
    for shown in (status._event(event), status._backend({**backend, **unknown, "models": [], "switch": None})):
        assert "\x1b" not in shown
        assert "\\x1b" in shown


def test_no_daemon_is_exit_5_with_the_socket_and_the_next_command(no_daemon: Hive) -> None:
    said = no_daemon("agent", "list")
    assert said.code == 5
    assert said.out == ""
    assert said.err.splitlines() == [
        f"hive: no Hive answers at {no_daemon.socket}  [dependency_down]",
        "hint: start one with `hive up`, or name its socket with --socket",
    ]


def test_the_socket_on_the_command_line_goes_before_the_environment(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVE_SOCKET", "/nonexistent/hive.sock")
    assert hive("ps", "-q").code == 5
    assert hive("ps", "-q", "--socket", str(hive.socket)).code == 0


def test_a_state_directory_leads_to_its_socket(hive: Hive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIVE_SOCKET")
    state = tmp_path / "state"
    state.mkdir()
    (state / "socket").write_text(f"{hive.socket}\n")
    assert hive("ps", "-q", "--state-dir", str(state)).out == "alice\nbusy-bob\n"


def test_the_runtime_directory_of_hive_up_is_tried_before_the_appliance(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hive import paths

    monkeypatch.delenv("HIVE_SOCKET")
    monkeypatch.setattr(paths, "APPLIANCE_RUNTIME", hive.socket.parent)
    monkeypatch.setattr(paths, "_runtime_dirs", lambda *_: [Path("/nonexistent")])
    assert hive("status", "--json").json["socket"] == str(hive.socket)


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("words", "schema"),
    [
        ("status", "status"),
        ("usage", "usage"),
        ("events -n 1", "event"),
        ("ps", "agent.list"),
        ("backend status", "backend.status"),
        ("agent list", "agent.list"),
        ("agent show alice", "agent.show"),
        ("agent show alice --tokens", "agent.show"),
        ("agent export alice", "agent.export"),
        ("agent usage alice", "agent.usage"),
        ("agent logs alice -n 1", "agent.log"),
        ("agent start alice", "agent.start"),
        ("agent pause alice", "agent.pause"),
        ("agent resume alice", "agent.resume"),
        ("agent restart alice", "agent.restart"),
        ("agent stop alice", "agent.stop"),
        ("agent create eve -- sleep 1", "agent.create"),
        ("agent remove alice --yes", "agent.remove"),
    ],
)
def test_json_has_its_schema_and_version(hive: Hive, words: str, schema: str) -> None:
    first, *rest = words.split(" -- ")
    said = hive(*first.split(), "--json", *(["--", *rest[0].split()] if rest else []))
    assert (said.code, said.err) == (0, "")
    assert (said.json["schema"], said.json["version"]) == (schema, 1)


@pytest.mark.parametrize("words", [("agent", "logs", "alice"), ("backend", "logs"), ("logs",)])
def test_lines_from_the_end_have_one_name_and_the_other_is_the_same(hive: Hive, words: tuple[str, ...]) -> None:
    """It was --lines of one command and --tail of the next."""
    answers = [hive(*words, option, "1") for option in ("--tail", "--lines", "-n")]
    assert len({(answer.code, answer.out) for answer in answers}) == 1
    assert all(answer.code != 2 for answer in answers)
