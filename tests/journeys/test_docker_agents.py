"""Agents that are containers, on a whole Hive with a real Docker engine: what they reach, and what reaches them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hive.runtimes.container_group import ContainerGroup
from tests import docker_engine
from tests.docker_engine import PrivateEngine
from tests.fakes.programs import fake_backend
from tests.journeys.stack import PYTHON, Stack, stack, until
from tests.journeys.test_exec import at_terminal, gone, line, ran, running, shown, status_of

pytestmark = [
    pytest.mark.docker,
    pytest.mark.root,
    pytest.mark.redis,
    pytest.mark.skipif(os.geteuid() != 0, reason="hive up runs containers as other users only as root"),
]

PACKAGES = f"{Path(openai.__file__).parents[1]}:/packages:ro"
"""The installed `openai` and `ollama`, untouched."""
GUEST = f"{Path(__file__).parents[2] / 'conf' / 'guest'}:/guest:ro"
PORT = 8000
FORWARDED = 11500


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with docker_engine.private() as engine:
        yield engine


POLICY = """\
programs = ["/"]
images = ["*"]
[mounts]
"/" = "ro"
[networks]
host = true
bridge = true
"""
"""Root's leave to mount where this repository and its packages lie; without it a few places may be."""


@pytest.fixture(scope="module")
def hive(engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With one agent on a network, called web."""
    policy = tmp_path_factory.mktemp("policy") / "sandbox.toml"
    policy.write_text(POLICY)
    policy.chmod(0o644)
    config = f"[sandbox]\ndocker_socket = {engine.socket}\npolicy = {policy}\n"
    with (
        fake_backend("ollama", "--models", "tiny,m") as backend,
        stack(url=backend.url, auto_sleep=True, config=config) as hive,
    ):
        create_called(hive, "web")
        yield hive
        engine.clear(hive.state)


def create(hive: Stack, name: str, command: list[str], *mounts: str, **spec: Any) -> None:
    """A container of the host's programs and `programs/`, started."""
    docker = {
        "image": docker_engine.IMAGE,
        "mounts": [docker_engine.HOST_PROGRAMS, f"{hive.programs}:/programs:ro", *mounts],
    }
    hive.post("/api/agents", {"name": name, "runtime": "docker", "command": command, "docker": docker, **spec})
    hive.post(f"/api/agents/{name}/start")


def create_called(hive: Stack, name: str, idle_s: float = 0.0) -> None:
    """One on a network, that listens; 0 never goes to sleep by itself."""
    create(hive, name, [PYTHON, "/programs/called.py"], port=PORT, idle_s=idle_s)
    until(lambda: hive.agent_lines(name), within_s=20, what=f"{name} listens")


def said(hive: Stack, *words: str) -> str:
    """The output of a command. Raises where its exit code is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", "hive", *words, "--state-dir", str(hive.state)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(hive: Stack, name: str) -> httpx.Response:
    """`GET /` of an agent through ingress."""
    return httpx.get(hive.get(f"/api/agents/{name}/tokens")["ingress_url"], trust_env=False, timeout=30)


def status(hive: Stack, name: str) -> str:
    return str(hive.get(f"/api/agents/{name}")["status"])


def container(hive: Stack, engine: PrivateEngine, name: str) -> dict[str, Any]:
    """As the engine tells of it."""
    agent = hive.get(f"/api/agents/{name}")["id"]
    (found,) = [one for one in engine.containers(hive.state) if one["Labels"]["hive.agent"] == agent]
    return engine.inspect(found["Id"])


def truths(hive: Stack, engine: PrivateEngine, name: str) -> tuple[str, bool, bool]:
    """(what Hive says, whether the engine says paused, whether the kernel says frozen)."""
    told = container(hive, engine, name)
    group = ContainerGroup.of(told["State"]["Pid"], told["Id"])
    assert group is not None
    return status(hive, name), told["State"]["Paused"], group.is_frozen()


ASLEEP, AWAKE = ("paused", True, True), ("running", False, False)


# --- the way to the model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("egress", "interfaces"), [([], ["lo"]), (None, ["eth0", "lo"])], ids=["no network", "a bridge"]
)
def test_unmodified_sdks_in_a_container_reach_the_model_and_are_metered(
    hive: Stack, egress: list[str] | None, interfaces: list[str]
) -> None:
    """By the socket Hive has inside its network, and by the guest's forwarder at another port."""
    script = f"HIVE_FORWARD_PORT={FORWARDED} /guest/hive-forward & exec {PYTHON} /programs/caller.py {FORWARDED}"
    create(
        hive, "alone", ["sh", "-c", script], PACKAGES, GUEST, egress=egress, env={"PYTHONPATH": "/packages"}, idle_s=0.0
    )
    until(lambda: {"done": True} in hive.agent_lines("alone"), within_s=30, what=hive.agent_log("alone"))
    first, *came = hive.agent_lines("alone")
    assert first == {"interfaces": interfaces, "uid": hive.get("/api/agents/alone")["uid"]}
    assert {line["way"]: line["tokens"] for line in came[:-1]} == {
        f"{what} by {way}": tokens
        for way in ("environment", FORWARDED)
        for what, tokens in (("openai", 5), ("openai stream", 7), ("ollama", 3))
    }
    until(lambda: status(hive, "alone") == "stopped", within_s=10, what="its end is known")

    def used() -> bool:
        view = hive.get("/api/agents/alone")
        return (view["requests"], view["tokens_out"]) == (6, 30)

    until(used, within_s=10, what="six requests of alone's, and their tokens")
    said(hive, "agent", "remove", "alone", "--yes")


# --- the way to the agent -----------------------------------------------------------------------------------------


def test_a_container_without_a_network_is_called_awake_and_asleep(hive: Stack, engine: PrivateEngine) -> None:
    """Nobody but the helper gets to it; the proxy is handed its connections."""
    create(hive, "lone", [PYTHON, "/programs/called.py"], port=PORT, egress=[], idle_s=0.0)
    until(lambda: hive.agent_lines("lone"), within_s=20, what="lone listens")
    networks = container(hive, engine, "lone")["NetworkSettings"]["Networks"]
    assert set(networks) == {"none"}
    assert call(hive, "lone").text == "1"
    assert hive.post("/api/agents/lone/pause")["status"] == "paused"
    assert call(hive, "lone").text == "2"
    assert truths(hive, engine, "lone") == AWAKE
    said(hive, "agent", "remove", "lone", "--yes")


def test_a_sleeping_container_is_woken_by_its_caller_and_answers(hive: Stack, engine: PrivateEngine) -> None:
    hive.post("/api/agents/web/pause")
    assert truths(hive, engine, "web") == ASLEEP
    assert call(hive, "web").text == "1"
    assert truths(hive, engine, "web") == AWAKE
    assert hive.get("/api/agents/web")["last_wake_cause"] == "ingress"


def test_a_message_reaches_the_inbox_of_a_sleeping_container(hive: Stack, engine: PrivateEngine) -> None:
    hive.post("/api/agents/web/pause")
    assert "has accepted message" in said(hive, "agent", "send", "web", "good morning", "--wait", "--timeout", "20")
    messages = [json.loads(line["message"])["text"] for line in hive.agent_lines("web") if "message" in line]
    assert messages == ["good morning"]
    assert truths(hive, engine, "web") == AWAKE


def test_a_container_that_is_idle_goes_to_sleep_by_itself_and_is_woken_by_its_caller(
    hive: Stack, engine: PrivateEngine
) -> None:
    create_called(hive, "napper", idle_s=1.0)
    until(lambda: truths(hive, engine, "napper") == ASLEEP, within_s=20, what="it sleeps")
    assert call(hive, "napper").text == "1"
    said(hive, "agent", "remove", "napper", "--yes")


def test_the_commands_do_to_a_container_what_they_do_to_every_agent(hive: Stack, engine: PrivateEngine) -> None:
    create_called(hive, "bob")
    assert said(hive, "agent", "pause", "bob") == "bob is paused (light)\n"
    assert truths(hive, engine, "bob") == ASLEEP
    assert said(hive, "agent", "resume", "bob") == "bob is running\n"
    assert truths(hive, engine, "bob") == AWAKE
    assert said(hive, "agent", "logs", "bob") == '{"ready": true}\n'
    told = said(hive, "agent", "show", "bob", "--tokens")
    assert f"docker, image {docker_engine.IMAGE}" in told
    assert said(hive, "agent", "pause", "bob") == "bob is paused (light)\n"
    assert said(hive, "agent", "stop", "bob") == "bob is stopped\n"
    assert [one["Labels"]["hive.name"] for one in engine.containers(hive.state)] == ["web"]
    assert said(hive, "agent", "start", "bob") == "bob is running\n"
    until(lambda: call(hive, "bob").text == "1", within_s=20, what="it is another one")
    assert said(hive, "agent", "remove", "bob", "--yes") == "bob is removed\n"
    assert [one["Labels"]["hive.name"] for one in engine.containers(hive.state)] == ["web"]
    assert [one["Labels"]["hive.name"] for one in engine.networks(hive.state)] == ["web"]


# --- who dies, and what is said then -------------------------------------------------------------------------------


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "awake"])
@pytest.mark.parametrize("process", ["sandbox", "daemon", "proxy"])
def test_after_kill_9_of_a_process_of_hive_all_say_the_same_of_a_container_and_it_answers(
    hive: Stack, engine: PrivateEngine, process: str, asleep: bool
) -> None:
    hive.post(f"/api/agents/web/{'pause' if asleep else 'resume'}")
    told = container(hive, engine, "web")
    hive.restart(process)
    until(lambda: truths(hive, engine, "web") in (ASLEEP, AWAKE), within_s=10, what="all say the same")
    assert asleep or truths(hive, engine, "web") == AWAKE
    assert call(hive, "web").status_code == 200
    assert container(hive, engine, "web")["Id"] == told["Id"]
    assert truths(hive, engine, "web") == AWAKE


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_a_container_finds_the_model_again_whoever_was_killed(hive: Stack, way: str) -> None:
    """In its network and at its mounted socket, both of which every helper makes anew."""
    create(hive, "steady", [PYTHON, "/programs/worker.py", way, "20"], egress=[], idle_s=0.0)

    def answers() -> int:
        return sum("id" in line for line in hive.agent_lines("steady"))

    def is_answered_again(killed: str) -> None:
        before = answers()
        until(lambda: answers() > before + 3, within_s=20, what=f"answers after the end of {killed}")

    until(answers, within_s=20, what="it is answered")
    for process in ("sandbox", "proxy", "daemon", "sandbox"):
        hive.restart(process)
        is_answered_again(process)
    said(hive, "agent", "remove", "steady", "--yes")


def test_a_container_removed_by_hand_in_its_sleep_has_ended_and_its_caller_is_told(
    hive: Stack, engine: PrivateEngine
) -> None:
    """The engine kills it first: how it ended may still be asked, or not any more."""
    create_called(hive, "lost")
    hive.post("/api/agents/lost/pause")
    answered, _ = engine.call("DELETE", f"/containers/{container(hive, engine, 'lost')['Id']}?force=1")
    assert answered == 204
    until(lambda: status(hive, "lost") == "error", within_s=10, what="its end")
    assert hive.get("/api/agents/lost")["reason"].endswith(": its container was removed by hand")
    assert "container_removed_by_hand agent=lost" in hive.log
    answer = call(hive, "lost")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"].startswith("the agent has ended with an error")
    said(hive, "agent", "start", "lost")
    until(lambda: call(hive, "lost").text == "1", within_s=20, what="it is started anew")
    said(hive, "agent", "remove", "lost", "--yes")


def test_while_the_engine_is_away_a_sleeper_is_woken_and_whatever_needs_the_engine_says_so(
    hive: Stack, engine: PrivateEngine
) -> None:
    why = f"no Docker engine listens at {engine.socket}"
    hive.post("/api/agents/web/pause")
    engine.stop()
    try:
        assert call(hive, "web").status_code == 200
        assert status(hive, "web") == "running"
        assert why in refused(hive, "agent", "pause", "web", "--timeout", "0")
        told = refused(hive, "agent", "create", "late", "--image", docker_engine.IMAGE)
        assert why in told
        assert "hint: start it (systemctl start docker)" in told
        assert [agent["name"] for agent in hive.get("/api/agents")["agents"]] == ["web"]
    finally:
        engine.start()
    until(lambda: truths(hive, engine, "web") == AWAKE, within_s=10, what="all say the same again")
    hive.post("/api/agents/web/pause")
    assert truths(hive, engine, "web") == ASLEEP
    assert call(hive, "web").status_code == 200


def test_an_image_that_is_not_there_is_named_and_leaves_nothing(hive: Stack, engine: PrivateEngine) -> None:
    told = refused(hive, "agent", "create", "late", "--image", "no-such:1")
    assert "no image no-such:1 on this host" in told
    assert "docker pull no-such:1" in told
    assert [agent["name"] for agent in hive.get("/api/agents")["agents"]] == ["web"]
    assert len(engine.containers(hive.state)) == len(engine.networks(hive.state)) == 1


def refused(hive: Stack, *words: str) -> str:
    """The words of a command that fails."""
    done = subprocess.run(
        [sys.executable, "-m", "hive", *words, "--state-dir", str(hive.state)], capture_output=True, text=True
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


# --- programs inside --------------------------------------------------------------------------------------------------


def test_a_program_inside_a_container_is_whom_the_container_is(hive: Stack, engine: PrivateEngine) -> None:
    """It is in its namespaces and group, has none of the rights the engine took away, and its end comes through."""
    main = container(hive, engine, "web")["State"]["Pid"]
    with running(hive, "web", "sh", "-c", "echo $$; cat /proc/1/comm; exec sleep 54323") as process:
        line(process)
        line(process)
        (pid,) = until(lambda: pids_of("sleep\x0054323"), within_s=20, what="the program")
        wanted = {**status_of(main), "NoNewPrivs": "1"}
        assert status_of(pid) == wanted
        assert int(status_of(pid)["CapEff"], 16) == 0
        for namespace in ("net", "mnt", "pid", "ipc", "uts"):
            assert os.readlink(f"/proc/{pid}/ns/{namespace}") == os.readlink(f"/proc/{main}/ns/{namespace}")
    gone(pid)
    assert ran(hive, "web", "sh", "-c", "exit 7").returncode == 7
    assert ran(hive, "web", "sh", "-c", "kill -9 $$").returncode == 137
    missing = ran(hive, "web", "no-such-program")
    assert missing.returncode in (125, 126, 127), missing.stderr


def test_megabytes_go_into_a_container_and_back(hive: Stack) -> None:
    data = os.urandom(4 * 1024 * 1024 + 3)
    done = ran(hive, "web", "cat", options=("-i",), given=data)
    assert (done.returncode, hashlib.sha256(done.stdout).digest()) == (0, hashlib.sha256(data).digest())
    both = ran(hive, "web", "sh", "-c", "echo out; echo err >&2")
    assert (both.stdout, both.stderr) == (b"out\n", b"err\n")


@pytest.mark.parametrize("killed", ["caller", "daemon", "sandbox"])
def test_a_program_inside_a_container_ends_with_whoever_runs_it(hive: Stack, killed: str) -> None:
    """The engine lets it go on when its connection is gone, and has no way to end it: Hive does."""
    with running(hive, "web", "sh", "-c", "sleep 54331 & echo up; exec sleep 54332") as process:
        assert line(process) == ["up"]
        pids = [
            *until(lambda: pids_of("sleep\x0054331"), within_s=20, what="its child"),
            *until(lambda: pids_of("sleep\x0054332"), within_s=20, what="the program"),
        ]
        if killed == "caller":
            process.kill()
        else:
            pid = hive.kill(killed)
        gone(*pids)
        process.wait(60)
    if killed != "caller":
        hive.wait_for_next(killed, pid)
    until(lambda: ran(hive, "web", "true").returncode == 0, within_s=60, what="another one")


def test_a_sleeping_container_is_woken_for_a_program(hive: Stack, engine: PrivateEngine) -> None:
    hive.post("/api/agents/web/pause", {})
    assert truths(hive, engine, "web") == ASLEEP
    assert ran(hive, "web", "echo", "awake").stdout == b"awake\n"
    assert truths(hive, engine, "web") == AWAKE


def test_a_terminal_in_a_container_has_the_size_of_the_persons(hive: Stack) -> None:
    """As with `docker exec`, the engine says it a moment after the program has begun."""
    waits = 'while [ "$(stty size)" != "33 101" ]; do sleep 0.05; done; echo si""zed; read x; exit 6'
    process, master = at_terminal(hive, "sh", "-c", waits, agent="web")
    shown(master, b"sized")
    os.write(master, b"\r")
    assert process.wait(60) == 6
    os.close(master)


def pids_of(words: str) -> list[int]:
    """Processes of this host with this command line, its words apart by NUL."""
    wanted = f"{words}\0".encode()
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _content(path) == wanted]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
