"""Jobs as their users meet them: a whole Hive on a real llama-server, by its command line and over its socket."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.journeys.sdk import TEMPLATE
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
SHORT = ("--model", MODEL, "--param", "max_tokens=12", "--param", "temperature=0", "--param", "ignore_eos=true")
LONG = ("--model", MODEL, "--param", "max_tokens=60000", "--param", "ignore_eos=true")
"""Three seconds: long enough to be met."""
CONFIG = f"""
[tenant acme]
models = {MODEL}
[tenant poor]
tokens_per_day = 1
[tenant narrow]
models = other
"""


class Ran(NamedTuple):
    """One call of the command line."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        return json.loads(self.err)


class JobUser:
    """Somebody at a shell, in a directory of their own."""

    def __init__(self, hive: Stack, directory: Path, server: LlamaServer) -> None:
        self.hive = hive
        self.server = server
        self.directory = directory

    def _command(self, words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "hive", "job", words[0], "--state-dir", str(self.hive.state), *words[1:]]

    def __call__(self, *words: str, stdin: str | None = None) -> Ran:
        given: Mapping[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run(
            self._command(words), cwd=self.directory, capture_output=True, text=True, timeout=120, **given
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str, stdin: str | None = None) -> Ran:
        ran = self(*words, stdin=stdin)
        assert ran.code == 0, f"{words}: {ran}"
        return ran

    @contextmanager
    def begun(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """A command that goes on; killed with the block."""
        pipe = subprocess.PIPE
        command = self._command(words)
        with subprocess.Popen(
            command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def begin(self, *words: str) -> str:
        """The id of a job that is begun and not waited for."""
        return str(self.ok("run", *words, "--json").answer["id"])

    def job(self, job: str) -> Any:
        return self.hive.get(f"/api/jobs/{job}")

    def ended(self, job: str) -> Any:
        return until(lambda: (found := self.job(job))["state"] != "running" and found, within_s=60, what=f"{job} ended")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with serve(tmp_path_factory.mktemp("llama-jobs"), template=TEMPLATE, more=("-c", "262144")) as server:
        yield server


@pytest.fixture(scope="module")
def hive(llama: LlamaServer) -> Iterator[Stack]:
    with stack(url=llama.url, config=CONFIG) as hive:
        hive.create("alice", "idler.py", tier="high", tenant="acme")
        hive.create("bob", "idler.py", tier="high")
        yield hive


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobUser]:
    """A user of a model that is held to JSON: grammars make it write real calls of tools. One job runs at a time."""
    folder = tmp_path_factory.mktemp("llama-calls")
    more = ("--no-jinja", "--chat-template", "chatml", "-c", "262144")
    with serve(folder, more=more) as server, stack(url=server.url, config="[jobs]\nat_once = 1\n") as hive:
        hive.create("guide", "guide.py", port=9000)
        yield JobUser(hive, folder, server)


@pytest.fixture
def user(hive: Stack, llama: LlamaServer, tmp_path: Path) -> JobUser:
    return JobUser(hive, tmp_path, llama)


@contextmanager
def frozen(server: LlamaServer) -> Iterator[None]:
    """An answer that is under way ends only after this: its context is full within 3 s."""
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@contextmanager
def talking(user: JobUser, **order: Any) -> Iterator[str]:
    """A job that has said something and has not ended."""
    params = {"max_tokens": 60000, "ignore_eos": True}
    client = user.hive.client()
    job = client.post("/api/jobs", {"name": "long", "model": MODEL, "prompt": "Hello", "params": params, **order})["id"]
    until(lambda: said(list(client.job_output(job))), within_s=30, what="a word")
    with frozen(user.server):
        yield job


def kept(user: JobUser, job: str) -> list[Any]:
    return user.ok("logs", job, "--json").lines


def said(events: list[Any]) -> str:
    return "".join(event["data"]["text"] for event in events if event["event"] == "delta")


def test_a_job_is_run_waited_for_shown_and_released(user: JobUser) -> None:
    ran = user.ok("run", "tidy", *SHORT, "--wait", "--json", "Hello,", "who are you?").answer
    job, usage = ran["id"], ran["usage"]
    assert (ran["schema"], ran["status"], ran["signals"], len(ran["turns"])) == ("job.run", "incomplete", [], 1)
    assert usage["tokens_out"] == 12
    assert usage["tokens_in"] > 0
    listed = user.ok("list", "--kind", "task", "--json").answer["jobs"][0]
    assert (listed["id"], listed["kind"], listed["task"]["name"], listed["task"]["model"]) == (
        job,
        "task",
        "tidy",
        MODEL,
    )
    shown = user.ok("show", job).out
    assert re.search(r"Name: tidy\n", shown)
    assert re.search(r"\n1 +[\d,]+ +\S+ +12 +length", shown)
    assert user.ok("result", job, "--json").answer["answer"] == ran["answer"]
    events = kept(user, job)
    assert [event["n"] for event in events] == [*range(1, len(events) + 1)]
    assert (said(events), events[-1]["event"]) == (ran["answer"], "ended")
    assert job in user.ok("list").out
    user.ok("release", job)
    for words in (("result", job), ("logs", job), ("release", job)):
        again = user(*words, "--json")
        assert (again.code, again.error["code"]) == (3, "not_found"), again
    assert (user.job(job)["status"], user.job(job)["task"]["released"]) == ("incomplete", True), "it stays in the list"
    assert user.ok("show", job).out


def test_what_comes_is_printed_as_it_comes(user: JobUser) -> None:
    ran = user.ok("run", "tidy", *SHORT, "--follow", "Hello")
    job = re.search(r"^job (\w+)$", ran.err, re.MULTILINE)
    assert job is not None, ran.err
    assert ran.out.rstrip("\n") == user.ok("result", job[1]).out.rstrip("\n")
    lines = user.ok("run", "tidy", *SHORT, "-f", "--json", "Hello").lines
    assert {line["schema"] for line in lines} == {"job.output"}
    assert lines[-1]["event"] == "ended"


def test_the_prompt_may_come_from_stdin(user: JobUser) -> None:
    counted = [
        user.ok("run", "n", *SHORT, "--wait", "--json", *words, stdin=stdin).answer["usage"]["tokens_in"]
        for words, stdin in ((["Hello"], None), ([], "Hello"), (["again"], "Hello " * 20))
    ]
    assert counted[0] == counted[1] < counted[2]
    refused = user("run", "n", *SHORT, stdin="")
    assert (refused.code, "there is no prompt" in refused.err) == (2, True)


def test_ctrl_c_ends_the_looking_and_the_job_goes_on(user: JobUser) -> None:
    for how in ("--follow", "--wait"):
        with user.begun("run", "long", *LONG, how, "Hello") as process:
            job = until(
                lambda: next(one["id"] for one in user.hive.get("/api/jobs", kind="task")["jobs"] if is_running(one)),
                within_s=30,
                what="a job that runs",
            )
            said_first = process.stdout if how == "--follow" else process.stderr
            assert said_first is not None
            assert said_first.read(1)
            with frozen(user.server):
                process.send_signal(signal.SIGINT)
                _, err = process.communicate(timeout=60)
                assert process.returncode == 130
                assert f"hive job logs -f {job}" in err
                assert "Traceback" not in err
                assert user.job(job)["state"] == "running"
                cancelled = user.ok("cancel", job, "--json").answer
        assert (cancelled["state"], cancelled["status"]) == ("cancelled", "cancelled")


def is_running(job: Any) -> bool:
    return bool(job["state"] == "running")


def test_a_cancelled_job_keeps_what_it_had_said(user: JobUser) -> None:
    with talking(user) as job:
        refused = user("result", job, "--json")
        assert (refused.code, refused.error["code"]) == (1, "not_ready")
        assert user("release", job).code == 1
        user.ok("cancel", job)
    events = kept(user, job)
    assert (events[-1]["event"], events[-1]["data"]["status"]) == ("ended", "cancelled")
    result = user("result", job)
    assert (result.code, result.out.rstrip("\n")) == (4, said(events).rstrip("\n"))
    assert user.ok("cancel", job).out == f"job {job} is cancelled\n", "once is enough"


LOOK = {
    "type": "function",
    "agent": "guide",
    "function": {
        "name": "look",
        "description": "Look around.",
        "parameters": {
            "type": "object",
            "properties": {"where": {"type": "string", "enum": ["north", "south"]}},
            "required": ["where"],
        },
    },
}
HOT = {"temperature": 30.0, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 300}
"""Else its weights, random as they are, want one thing only."""
DONE = {"type": "function", "function": {"name": "GO_HOME", "description": "Say that it is late."}}


def test_a_model_calls_a_tool_of_an_agent_and_its_user_sees_it(caller: JobUser) -> None:
    """Goes on until one job has called, and one has given a signal of its user's own: what it calls is chance."""
    (caller.directory / "tools.json").write_text(json.dumps([LOOK]))
    (caller.directory / "exits.json").write_text(json.dumps([DONE]))
    words = [word for name, value in HOT.items() for word in ("--param", f"{name}={value}")]
    seen = set()
    for seed in range(60):
        params = [*words, "--param", f"seed={seed}"]
        files = ["--tools", "tools.json", "--exit-tools", "exits.json", "--tool-form", "schema"]
        ran = caller("run", "bees", "--model", MODEL, *files, *params, "--follow", "Where are the bees?")
        job = re.search(r"^job (\w+)$", ran.err, re.MULTILINE)
        assert job is not None, ran
        if re.search(r'^-> look \{"where": ?"(north|south)"\}$', ran.err, re.MULTILINE):
            assert "<- look: the bees are over the meadow\n" in ran.err
            assert "look" in caller.ok("show", job[1]).out
            calls = [line for line in caller.hive.agent_lines("guide") if line.get("job") == job[1]]
            assert calls
            assert {call["path"] for call in calls} == {"/tools/look"}
            assert all(json.loads(call["called"])["where"] in ("north", "south") for call in calls)
            assert "-> look" in caller.ok("logs", job[1]).out
            seen.add("call")
        if "!! GO_HOME {}" in ran.err:
            shown = caller("result", job[1])
            assert "!! GO_HOME {}" in shown.err
            assert caller.job(job[1])["state"] in ("done", "failed")
            seen.add("signal")
        if seen == {"call", "signal"}:
            return
    raise AssertionError(f"only {seen} in 60 jobs")


def stream(user: JobUser, job: str, *, last: int | None = None, most: int | None = None) -> list[tuple[int, Any]]:
    """Events of a stream with the ids they had: all until the end, or the first few, after which the client leaves."""
    transport = httpx.HTTPTransport(uds=str(user.hive.client().path))
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    found: list[tuple[int, Any]] = []
    with (
        httpx.Client(transport=transport, base_url="http://hive", timeout=60) as client,
        client.stream("GET", f"/api/jobs/{job}/output", params={"follow": 1}, headers=headers) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                found.append((number, json.loads(line[6:])))
            if most is not None and len(found) == most:
                break
    return found


def test_a_reader_that_loses_its_connection_goes_on_behind_the_last_event_it_has(user: JobUser) -> None:
    job = user.begin("long", "--model", MODEL, "--param", "max_tokens=800", "--param", "ignore_eos=true", "Hello")
    found: list[tuple[int, Any]] = []
    for most in (1, 2, 3):
        found += stream(user, job, last=found[-1][0] if found else None, most=most)
    found += stream(user, job, last=found[-1][0])
    assert [event["n"] for _, event in found] == [number for number, _ in found] == [*range(1, len(found) + 1)]
    assert [event for _, event in found] == [
        {k: v for k, v in one.items() if k in found[0][1]} for one in kept(user, job)
    ]
    assert found[-1][1]["event"] == "ended"
    assert stream(user, job, last=found[-1][0]) == []
    assert len(user.ok("logs", job, "--after", str(len(found) - 1), "--json").lines) == 1


def test_a_proxy_that_stands_still_keeps_no_job_waiting_for_ever(caller: JobUser) -> None:
    """The proxy is told of each end: where it did not answer that within 2 s, the next job was never begun."""
    (caller.directory / "none.json").write_text("[]")
    short = (*SHORT, "--exit-tools", "none.json")
    with talking(caller, exit_tools=[]) as first:
        second = caller.begin("two", *short, "Hello")
        assert caller.job(second)["status"] == "queued"
        proxy = caller.hive.pid_of("proxy")
        os.kill(proxy, signal.SIGSTOP)
        try:
            caller.ok("cancel", first)
            until(lambda: "job_grants_not_heard" in caller.hive.log, within_s=10, what="a proxy that does not answer")
        finally:
            os.kill(proxy, signal.SIGCONT)
    assert caller.ended(second)["status"] in ("incomplete", "failed")
    caller.ok("run", "three", *short, "--wait", "Hello")


def test_a_reader_that_reads_nothing_holds_up_nobody(user: JobUser) -> None:
    """Neither the job nor the daemon; and it finds all of it when it reads at last."""
    job = user.begin("long", "--model", MODEL, "--param", "max_tokens=30000", "--param", "ignore_eos=true", "Hello")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(user.hive.client().path))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(f"GET /api/jobs/{job}/output?follow=1 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert user.ended(job)["status"] == "incomplete"
        told = b"".join(iter(lambda: sock.recv(65536), b""))
    numbers = [int(found) for found in re.findall(rb"^id: ([0-9]+)$", told, re.MULTILINE)]
    assert numbers == [event["n"] for event in kept(user, job)]


def test_a_job_is_its_tenants(user: JobUser) -> None:
    """Counted for it, refused where its budget is used up or the model is not permitted."""

    def requests(tenant: str) -> int:
        rows = user.hive.get("/api/usage", by="tenant")["tenants"]
        return sum(row["requests"] for row in rows if row["tenant"] == tenant)

    def used_of(tenant: str) -> int:
        budgets = user.hive.get("/api/budgets")["budgets"]
        return next(int(budget["used"]) for budget in budgets if budget["name"] == tenant)

    before = {tenant: requests(tenant) for tenant in ("acme", "default")}
    for words in (("--tenant", "acme"), ("--as", "alice"), ("--as", "bob")):
        user.ok("run", "n", *SHORT, "--wait", *words, "Hello")
    wanted = {"acme": before["acme"] + 2, "default": before["default"] + 1}
    until(lambda: {name: requests(name) for name in wanted} == wanted, within_s=10, what=f"usage: {wanted}")
    tenants = [job["task"]["tenant"] for job in user.hive.get("/api/jobs", kind="task", limit=3)["jobs"]]
    assert tenants == ["default", "acme", "acme"]
    ran = user("run", "n", *SHORT, "--wait", "--json", "--tenant", "narrow", "Hello")
    assert (ran.code, "narrow" in ran.error["message"]) == (4, True), ran
    user("run", "n", *SHORT, "--wait", "--tenant", "poor", "Hello")
    until(lambda: used_of("poor"), within_s=10, what="its budget to be used up")
    ran = user("run", "n", *SHORT, "--wait", "--json", "--tenant", "poor", "Hello")
    assert (ran.code, ran.error["code"]) == (4, "budget_exceeded"), ran
    ran = user("run", "n", *SHORT, "--as", "alice", "--tenant", "default", "Hello")
    assert (ran.code, "agent and tenant" in ran.err) == (2, True), ran


WRONG: list[tuple[str, int, str]] = [
    ("", 2, "no JSON"),
    ("[{]", 2, "line 1, column 3"),
    ('{"type": "function"}', 2, "expected a JSON list of tools, found an object"),
    ("[1]", 2, "entry 1 is a number, not an object"),
    ("\udcff", 2, "it is not UTF-8"),
    ("[" * 100_000, 2, "nested too deeply"),
    ('[{"type": "function", "function": {"name": "look"}}]', 2, 'tools[0]: "agent" names the agent'),
    ('[{"type": "shell", "agent": "alice", "command": ["id"]}]', 2, "tools[0]: a tool is"),
    ('[{"type": "mcp", "agent": "alice", "command": ["x"], "url": "http://e"}]', 2, 'there is no "url"'),
    ('[{"type": "function", "function": {"name": "a b"}, "agent": "alice"}]', 2, "tool name 'a b'"),
    ('[{"type": "function", "function": {"name": "look"}, "agent": "nobody"}]', 3, "nobody"),
    ('[{"type": "function", "function": {"name": "look"}, "agent": "bob"}]', 4, "bob"),
]


@pytest.mark.parametrize(("text", "code", "why"), WRONG, ids=[why for _, _, why in WRONG])
def test_tools_that_are_none_are_refused_before_anything_begins(user: JobUser, text: str, code: int, why: str) -> None:
    (user.directory / "tools.json").write_bytes(text.encode(errors="surrogateescape"))
    before = user.hive.get("/api/jobs", kind="task", limit=1000)["jobs"]
    ran = user("run", "n", *SHORT, "--tools", "tools.json", "--as", "alice", "Hello")
    assert (ran.code, why in ran.err) == (code, True), ran
    assert ran.out == ""
    assert len(user.hive.get("/api/jobs", kind="task", limit=1000)["jobs"]) == len(before)


def test_what_is_not_there_is_told_with_what_is_near(user: JobUser) -> None:
    ran = user("run", "n", *SHORT, "--as", "alise", "Hello")
    assert (ran.code, "did you mean `alice`?" in ran.err) == (3, True), ran
    ran = user("run", "n", "--model", "tiny-70b", "--wait", "Hello")
    assert (ran.code, "tiny-70b" in ran.err) == (3, True), ran
    ran = user("run", "n", *SHORT, "--system-file", "none.txt", "Hello")
    assert (ran.code, "there is no file none.txt" in ran.err) == (3, True), ran
    for words in (["show"], ["logs"], ["logs", "-f"], ["result"], ["cancel"], ["release"]):
        ran = user(*words, "0123456789ab")
        assert (ran.code, "there is no job 0123456789ab" in ran.err) == (3, True), ran


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["Hello"], "--model"),
        ([*SHORT, "--follow", "--wait", "Hello"], "either --follow or --wait"),
        ([*SHORT, "--param", "x", "Hello"], "--param x: expected NAME=VALUE"),
        ([*SHORT, "--param", "temperature=1", "Hello"], "--param temperature: given more than once"),
        ([*SHORT, "--param", "stream=false", "Hello"], "stream"),
        ([*SHORT, "--priority", "urgent", "Hello"], "--priority urgent: expected one of"),
        ([*SHORT, "--tool-form", "words", "Hello"], "--tool-form words: expected one of"),
        ([*SHORT, "--iterations", "0", "Hello"], "--iterations"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_order_that_means_nothing_is_a_usage_error(user: JobUser, words: list[str], why: str) -> None:
    ran = user("run", "n", *words)
    assert (ran.code, why in ran.err, ran.out) == (2, True, ""), ran


def test_a_job_is_followed_over_the_end_of_the_daemon_and_fails_once(user: JobUser) -> None:
    """kill -9 of the daemon: what had come is kept, nothing of it comes twice, and the error says what happened."""
    with user.begun("run", "long", *LONG, "--follow", "--json", "Hello") as process:
        assert process.stdout is not None
        first = [json.loads(process.stdout.readline()) for _ in range(3)]
        user.hive.restart("daemon")
        rest, err = process.communicate(timeout=60)
    events = [*first, *map(json.loads, rest.splitlines())]
    assert [event["n"] for event in events] == [*range(1, len(events) + 1)]
    assert (events[-1]["event"], events[-1]["data"]["reason"]) == ("ended", "worker_restarted")
    assert (process.returncode, json.loads(err)["code"]) == (1, "worker_restarted")
    job = user.hive.get("/api/jobs", kind="task", limit=1)["jobs"][0]
    assert (job["status"], job["error"]["code"]) == ("failed", "worker_restarted")
    result = user("result", job["id"])
    assert (result.code, result.out.rstrip("\n")) == (1, said(events).rstrip("\n"))
    assert user.ok("run", "n", *SHORT, "--wait", "Hello").out
