"""`hive agent …` against a real daemon."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.agent_orders import orders_of
from hive.cli.agents import show, steer
from hive.client.client import Client
from hive.domain import AT_REST, AgentStatus

Hive = Any
"""conftest.Hive: test modules import no siblings."""


def test_the_list_is_aligned_and_says_why(hive: Hive) -> None:
    said = hive("agent", "list")
    lines = said.out.splitlines()
    assert said.code == 0
    assert lines[0].split("  ")[0] == "NAME"
    assert [line.split()[0] for line in lines[1:]] == ["alice", "busy-bob"]
    assert {line.index("running") for line in lines[1:]} == {lines[0].index("STATUS")}
    assert "90 MiB" in lines[1]
    assert lines[1].endswith("  1 request in flight")


@pytest.mark.parametrize("words", [("ps",), ("agent", "ls"), ("agent", "ps")])
def test_the_aliases_list_too(hive: Hive, words: tuple[str, ...]) -> None:
    assert hive(*words, "-q").out == "alice\nbusy-bob\n"


def test_show_says_what_the_runtime_is_good_for_and_why_not(hive: Hive) -> None:
    lines = [line.strip() for line in hive("agent", "show", "alice").out.splitlines()]
    assert "Can: pause, deep sleep, exec, restart, stop" in lines
    assert "Cannot: egress (it takes root)" in lines
    assert hive("agent", "show", "alice", "--json").json["capabilities"]["egress"] == "it takes root"


ABLE = dict.fromkeys(("start", "pause", "deep_sleep", "limits", "egress", "exec"), "")


@pytest.mark.parametrize(
    ("status", "depth", "lacks", "can"),
    [
        ("running", "awake", (), "pause, deep sleep, exec, restart, stop"),
        ("paused", "light", (), "deep sleep, resume, exec, restart, stop"),
        ("paused", "deep", (), "resume, exec, restart, stop"),
        ("created", "awake", (), "start"),
        ("stopped", "awake", (), "start"),
        ("error", "awake", (), "start"),
        ("starting", "awake", (), ""),
        ("pausing", "awake", (), ""),
        ("resuming", "light", (), ""),
        ("stopping", "awake", (), ""),
        ("running", "awake", ("deep_sleep", "egress"), "pause, exec, restart, stop"),
        ("running", "awake", tuple(ABLE), "stop"),
        ("stopped", "awake", ("start",), ""),
    ],
)
def test_what_it_can_would_change_something_in_its_state(
    status: str, depth: str, lacks: tuple[str, ...], can: str
) -> None:
    """`hive agent show` said of an agent that ran: `Can: start`."""
    view = {"status": status, "depth": depth, "capabilities": {**ABLE, **dict.fromkeys(lacks, "no engine")}}
    assert ", ".join(show.can(view)) == can
    assert show.can({**view, "capabilities": None}) == []


def test_every_state_of_an_agent_has_its_orders() -> None:
    on_its_way = {state for state in AgentStatus if not orders_of(state)}
    assert on_its_way == {*AgentStatus} - AT_REST - {AgentStatus.RUNNING, AgentStatus.PAUSED}
    assert {state for state in AgentStatus if orders_of(state) == ("start",)} == AT_REST


def test_show_is_one_screen_and_keeps_secrets_unless_asked(hive: Hive) -> None:
    said = hive("agent", "show", "alice")
    assert re.match(r"alice \([0-9a-f]{32}\)\n", said.out)
    assert len(said.out.splitlines()) < 24
    assert "hm_" not in said.out
    assert "http://127.0.0.1:1/a/hm_" in hive("agent", "show", "alice", "--tokens").out


def test_an_unknown_agent_is_exit_3_with_the_nearest_name(hive: Hive) -> None:
    said = hive("agent", "pause", "alicia")
    assert (said.code, said.out) == (3, "")
    assert said.err == "hive: there is no agent 'alicia'  [not_found]\nhint: did you mean `alice`?\n"
    assert hive("agent", "stop", "zzz").err.endswith("hint: hive agent list shows all\n")
    assert hive("agent", "logs", "../x").code == 3


def test_a_name_is_said_as_it_was_typed(hive: Hive) -> None:
    """It came back as 'x%20y'."""
    assert hive("agent", "show", "x y").err.startswith("hive: there is no agent 'x y'  [not_found]\n")


@pytest.mark.usefixtures("ends_at_once")
@pytest.mark.parametrize("verb", ["start", "restart", "create"])
def test_an_agent_that_fails_while_it_is_started_is_a_failure(hive: Hive, verb: str) -> None:
    """`hive agent create x -- /bin/false` said `x is error`, with exit code 0 and no way on."""
    if verb != "create":
        hive("agent", "create", "crasher", "--", "/bin/false")
    words = ("crasher", "--", "/bin/false") if verb == "create" else ("crasher",)
    said = hive("agent", verb, *words)
    assert (said.code, said.out) == (1, "")
    assert said.err == "hive: crasher ended at once: exited with 1  [agent_failed]\nhint: hive agent logs crasher\n"


def test_an_agent_that_fails_in_its_first_moment_is_a_failure_with_its_last_line(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hive agent create` said `late is running`, exit code 0, and nothing later named the log."""
    monkeypatch.setattr(steer, "MOMENT_S", 3.0)
    said = hive("agent", "create", "late", "--", "/bin/sh", "-c", "sleep 0.1; echo No module named x; exit 1")
    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("hive: late ended at once: exited with 1; its last line: No module named x  [agent_fail")
    assert "exited with 1: hive agent logs late" in hive("agent", "list").out
    assert "Look at: hive agent logs late\n" in hive("agent", "show", "late").out
    assert "agent late has ended with an error: exited with 1" in hive("status").out


def test_a_file_that_describes_nothing_startable_is_named_with_its_line(hive: Hive, tmp_path: Path) -> None:
    """Only mistakes of TOML itself said which file they were in; those in a value did not."""
    file = tmp_path / "bob.toml"
    file.write_text('name = "bob"\ncommand = ["/no/such/program"]\n')
    wrong = f"hive: {file}: line 2: command: no such program: '/no/such/program'  [bad_request]\n"
    assert hive("agent", "apply", str(file)).err == wrong
    file.write_text('command = ["/bin/true"]\ntenantId = "B ad"\nname = "bob"\n')
    assert hive("agent", "apply", "--dry-run", str(file)).err.startswith(
        f"hive: {file}: line 2: tenant: 'B ad' is no name"
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("pause", "alice"), 0, "alice is paused"),
        (("pause", "busy-bob", "--timeout", "0.1"), 7, "busy-bob could not be put to sleep within 0.1 s"),
        (("pause", "busy-bob", "--now"), 1, "busy-bob stays awake: 1 request in flight"),
        (("pause", "alice", "--timeout", "-1"), 2, "--timeout"),
        (("pause", "alice", "--timeout", "x"), 2, "--timeout"),
        (("stop", "alice"), 0, "alice is stopped"),
        (("start", "alice"), 0, "alice is running"),
        (("restart", "alice"), 0, "alice is running"),
        (("resume", "alice"), 0, "alice is running"),
    ],
)
def test_transitions_say_how_the_agent_is_now(hive: Hive, words: tuple[str, ...], code: int, said: str) -> None:
    result = hive("agent", *words)
    assert result.code == code
    assert said in (result.err if code else result.out)


def test_a_stopped_agent_is_not_put_to_sleep(hive: Hive) -> None:
    hive("agent", "stop", "alice")
    said = hive("agent", "pause", "alice", "--json")
    assert (said.code, said.error["code"], said.error["message"]) == (1, "wrong_state", "alice is stopped")


def test_logs_are_printed_as_they_are_to_a_pipe(hive: Hive) -> None:
    assert hive("agent", "logs", "alice").out == "one\ntwo\n\x1b]0;evil\x07three\n"
    assert hive("agent", "logs", "alice", "-n", "1").out == "\x1b]0;evil\x07three\n"
    lines = [json.loads(line) for line in hive("agent", "logs", "alice", "--json").out.splitlines()]
    assert [line["line"] for line in lines] == ["one", "two", "\x1b]0;evil\x07three"]


def test_logs_cannot_steer_the_terminal(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert hive("agent", "logs", "alice", "-n", "1").out == "\\x1b]0;evil\\x07three\n"


def test_an_agent_is_created_from_flags(hive: Hive) -> None:
    flags = ["--port", "9001", "--tier", "high", "--idle", "0", "-e", "A=1", "-e", "B==", "--restart", "on-failure"]
    flags += ["--cid", "5"]
    said = hive("agent", "create", "carol", *flags, "--json", "--", "sleep", "--json", "9")
    assert said.code == 0
    view = said.json
    assert view["command"] == ["/usr/bin/sleep", "--json", "9"]
    assert (view["port"], view["tier"], view["idle_s"], view["env"]) == (9001, "high", 0.0, {"A": "1", "B": "="})
    assert view["cid"] == 5
    assert "5 (AF_VSOCK)" in hive("agent", "show", "carol").out
    assert hive("agent", "create", "carol", "--", "sleep", "9").code == 1


def test_a_container_is_created_from_the_flags_a_docker_user_expects(hive: Hive) -> None:
    flags = ["--image", "python:3.12-slim", "--memory", "1.5g", "--cpus", "1.5", "--pids", "64", "--no-network"]
    flags += ["--mount", "/srv/data:/data:ro", "--autostart", "--restart", "unless-stopped"]
    view = hive("agent", "create", "carol", *flags, "--json").json
    assert (view["runtime"], view["command"], view["egress"], view["autostart"]) == ("docker", [], [], True)
    assert view["limits"] == {"memory_mb": 1536, "cpu": 1.5, "pids": 64, "files": None}
    assert (view["docker"]["image"], view["docker"]["mounts"]) == ("python:3.12-slim", ["/srv/data:/data:ro"])
    shown = hive("agent", "show", "carol").out
    assert "Runtime: docker, image python:3.12-slim" in shown
    said = "Limits: 1536 MiB, 1.5 cores, 64 processes, network: Hive (no memory controller)"
    assert said in shown


def test_an_agent_without_limits_on_a_host_that_enforces_none_says_none() -> None:
    """It said `Limits:  (no memory controller)`."""
    unlimited = {"memory_mb": None, "cpu": None, "pids": None, "files": None}
    view = {"limits": unlimited, "egress": None, "limits_not_enforced": "no memory controller"}
    assert show._limits(view) == "none (no memory controller)"
    assert show._limits({**view, "limits_not_enforced": ""}) == ""


@pytest.mark.usefixtures("host_memory")
def test_a_deep_pause_says_how_deep_it_is(hive: Hive) -> None:
    assert hive("agent", "pause", "alice").out == "alice is paused (light)\n"
    assert hive("agent", "pause", "alice", "--deep").out == "alice is paused (deep)\n"
    assert "RAM: 9.0 MiB, and 81 MiB in swap" in hive("agent", "show", "alice").out
    assert "paused (deep)" in hive("agent", "list").out


@pytest.mark.breadth(4)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("Carol", "--", "sleep"), "name: 'Carol' is no name"),
        (("carol",), "command: empty"),
        (("carol", "--image", "not an image"), "docker: image"),
        (("carol", "--image", "busybox", "--mount", "here:/there"), "docker: mounts"),
        (("carol", "--mount", "/a:/b", "--", "sleep"), "only a docker agent has mounts"),
        (("carol", "--image", "busybox", "--runtime", "process", "--", "sleep"), "docker: the runtime is process"),
        (("carol", "--runtime", "docker"), "docker: missing"),
        (("carol", "--runtime", "firecracker"), "is described in a file"),
        (("carol", "--memory", "512", "--", "sleep"), "like 512m"),
        (("carol", "--memory", "1m", "--", "sleep"), "limits: memory_mb: 1 is not from 4"),
        (("carol", "--cpus", "0", "--", "sleep"), "limits: cpu: 0 is not from 0.01"),
        (("carol", "--restart", "sometimes", "--", "sleep"), "'sometimes' is not one of"),
        (("carol", "--", "no-such-program"), "no such program"),
        (("carol", "--", "./agent.py"), "is relative"),
        (("carol", "--port", "70000", "--", "sleep"), "--port"),
        (("carol", "--cid", "2", "--", "sleep"), "--cid"),
        (("carol", "--tier", "best", "--", "sleep"), "'best' is not one of"),
        (("carol", "-e", "A", "--", "sleep"), "expected NAME=VALUE"),
        (("carol", "-e", "HIVE_AGENT=x", "--", "sleep"), "set by Hive"),
    ],
)
def test_a_bad_description_is_exit_2_and_creates_nothing(hive: Hive, words: tuple[str, ...], said: str) -> None:
    result = hive("agent", "create", *words)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert hive("ps", "-q").out == "alice\nbusy-bob\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("carol",), "hive agent create NAME -- /usr/bin/python3 /srv/agent.py"),
        (("carol", "--runtime", "docker", "--", "x"), "say --image"),
        (("carol", "--image", "busybox", "--runtime", "process", "--", "sleep"), "--image goes with --runtime docker"),
    ],
)
def test_who_writes_flags_is_told_of_flags(hive: Hive, words: tuple[str, ...], hint: str) -> None:
    """`hive agent create x` answered with a line of TOML."""
    assert hive("agent", "create", *words).err.endswith(f"hint: {hint}\n")


def test_who_writes_toml_is_told_of_toml(hive: Hive, tmp_path: Path) -> None:
    file = tmp_path / "carol.toml"
    file.write_text('name = "carol"\n')
    said = hive("agent", "apply", str(file))
    assert said.err.endswith("hint: say what to run: command = ['/usr/bin/python3', '/srv/agent.py']\n")
    file.write_text('name = "carol"\nruntime = "docker"\n')
    assert hive("agent", "apply", str(file)).err.endswith('hint: runtime = "docker" needs a table [docker]\n')


def test_a_limit_that_does_not_hold_here_is_said_when_the_agent_begins(hive: Hive) -> None:
    """`--memory 512m` was taken in silence on a host without control groups; only `agent show` told."""
    said = hive("agent", "create", "carol", "--memory", "512m", "--", "sleep", "9")
    assert (said.code, said.out) == (0, "carol is running\n")
    assert said.err == "carol runs without a limit: no memory controller\n"
    assert hive("agent", "restart", "carol").err == said.err
    assert hive("agent", "start", "alice").err == ""


def test_what_is_exported_changed_and_applied_is_changed(hive: Hive, tmp_path: Path) -> None:
    file = tmp_path / "alice.toml"
    exported = hive("agent", "export", "alice").out
    file.write_text(exported.replace("9000", "9002"))
    dry = hive("agent", "apply", "--dry-run", str(file))
    plan = "  port: 9000 → 9002 (from its next start)\n"
    assert dry.out == f"alice would be changed:\n{plan}a restart would be needed\n"
    assert hive("agent", "show", "alice", "--json").json["port"] == 9000
    assert hive("agent", "apply", str(file)).out == f"alice is changed:\n{plan}`hive agent restart alice` makes it so\n"
    assert hive("agent", "apply", str(file), "--json").json["changed"] == []
    assert hive("agent", "apply", str(file)).out == "alice is unchanged\n"


def test_a_plan_says_what_would_be_created_and_keeps_the_values_of_the_environment(hive: Hive, tmp_path: Path) -> None:
    file = tmp_path / "dora.toml"
    file.write_text('name = "dora"\ncommand = ["/bin/sleep", "9"]\n[env]\nKEY = "secret"\n[limits]\nmemory_mb = 64\n')
    dry = hive("agent", "apply", "-n", str(file))
    assert dry.out.splitlines() == [
        "dora would be created",
        "  name: dora",
        "  command: /bin/sleep 9",
        "  env: KEY",
        "  limits: memory_mb 64",
    ]
    assert hive("agent", "show", "dora").code == 3
    assert hive("agent", "apply", str(file)).out.endswith("`hive agent start dora` starts it\n")
    assert hive("agent", "apply", "-n", str(file)).out == "dora would be unchanged\n"
    file.write_text(file.read_text().replace("memory_mb = 64", "cpu = 0.5").replace("secret", "other"))
    changed = hive("agent", "apply", "-n", str(file), "--json").json
    assert [change["field"] for change in changed["changes"]] == ["env", "limits"]
    assert "other" not in json.dumps(changed["changes"])


def test_apply_reads_stdin_and_creates(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.TextIOWrapper(io.BytesIO(b'name = "dora"\ncommand = ["sleep", "9"]\ninferenceTier = "low"\n'))
    monkeypatch.setattr(sys, "stdin", text)
    said = hive("agent", "apply", "-", "--json")
    assert (said.json["created"], said.json["agent"]["tier"]) == (True, "low")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('name = "x"\ncommand = [', "no TOML"),
        ('name = "x"\ncomand = ["a"]\n', "line 2: comand: no such key; did you mean `command`?"),
        ("\udcff", "not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_is_named_with_its_line(hive: Hive, tmp_path: Path, content: str | None, said: str) -> None:
    file = tmp_path / "x.toml"
    if content is not None:
        file.write_bytes(content.encode(errors="surrogateescape"))
    result = hive("agent", "apply", str(file))
    assert result.code == 2
    assert str(file) in result.err
    assert said in result.err


def test_remove_wants_a_person_or_a_flag(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    refused = hive("agent", "remove", "alice")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert hive("agent", "rm", "zzz", "--yes").code == 3
    assert hive("agent", "rm", "alice", "--yes").out == "alice is removed\n"
    assert hive("ps", "-q").out == "busy-bob\n"


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("\n", 1), ("", 1)])
def test_a_person_is_asked_and_may_say_no(hive: Hive, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    """A no was `nothing was done  [internal]`, a code that is explained as a failure of Hive."""
    stdin = io.StringIO(answer)
    monkeypatch.setattr(stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", stdin)
    said = hive("agent", "remove", "alice")
    assert said.code == code
    assert said.err.endswith("hive: nothing was changed  [not_confirmed]\n") == (code != 0)
    assert hive("ps", "-q").out.startswith("alice") == (code != 0)


@pytest.fixture
def many(hive: Hive) -> Hive:
    """With `a000` to `a149` beside the two."""
    client = Client(hive.socket)
    for number in range(150):
        client.post("/api/agents", {"name": f"a{number:03}", "runtime": "external"})
    return hive


@pytest.mark.wide
def test_only_a_table_on_a_terminal_is_cut_and_it_says_so(many: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a thousand ran past everybody who typed `hive ps`; what a script reads must never be less than all."""
    whole = many("ps")
    assert len(whole.out.splitlines()) == 1 + 152
    assert whole.err == ""
    assert len(many("ps", "-q").out.splitlines()) == 152
    assert len(many("ps", "--json").json["agents"]) == 152
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cut = many("ps")
    assert [line.split()[0] for line in cut.out.splitlines()[1:]] == [f"a{number:03}" for number in range(100)]
    assert cut.err.endswith("… and 52 more of 152: --all shows each of them, -q the names\n")
    for words in (("ps", "--all"), ("ps", "-a")):
        assert len(many(*words).out.splitlines()) == 1 + 152
    assert len(many("ps", "-q").out.splitlines()) == 152
    assert len(many("ps", "--json").json["agents"]) == 152


def test_several_are_removed_by_one_command(many: Hive) -> None:
    """Each is tried, and the exit code is that of the first that failed."""
    said = many("agent", "remove", "a001", "zzz", "a002", "a001", "--yes")
    assert said.out == "a001 is removed\na002 is removed\n"
    assert (said.code, said.err.splitlines()[0]) == (3, "hive: there is no agent 'zzz'  [not_found]")
    told = many("agent", "rm", "a003", "yyy", "--yes", "--json")
    assert told.code == 3
    assert [one["name"] for one in told.json["removed"]] == ["a003"]
    assert [(one["agent"], one["code"]) for one in told.json["failed"]] == [("yyy", "not_found")]
    agent = many("agent", "show", "a004", "--json").json["id"]
    assert many("agent", "remove", "a004", "--yes", "--json").json["removed"] == agent
    assert len(many("ps", "-q").out.splitlines()) == 152 - 4


def test_all_are_removed_by_one_command(many: Hive) -> None:
    assert many("agent", "remove", "--all").code == 2  # nobody is there to be asked
    assert many("agent", "remove", "--all", "alice", "--yes").code == 2
    assert many("agent", "remove", "--yes").code == 2
    assert len(many("agent", "remove", "--all", "--yes", "--json").json["removed"]) == 152
    assert many("ps", "-q").out == "\n"
    assert many("agent", "remove", "-a", "-y").code == 0
