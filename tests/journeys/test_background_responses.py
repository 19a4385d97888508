"""Responses that are made in the background: the real `openai` package through a whole Hive, before a real
llama-server, with everything killed that has a part in it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import psutil
import pytest

from tests.fakes.programs import demo_backend
from tests.journeys.clients import MISSING, PROGRAMS, folder
from tests.journeys.matrix import turn_to
from tests.journeys.sdk import TEMPLATE, Door, door_of, totals
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(600)]
SECRET = "the-word-nobody-else-says"
LONG: Any = {"model": MODEL, "input": f"Go on: {SECRET}.", "max_output_tokens": 3000, "temperature": 0}
SHORT: Any = {"model": MODEL, "input": "Hello, who are you?", "max_output_tokens": 12, "temperature": 0}
ENDED = ("completed", "failed", "cancelled", "incomplete")


class Site(NamedTuple):
    hive: Stack
    server: LlamaServer

    @property
    def door(self) -> Door:
        return door_of(self.hive, "alice")

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The server stands still in the middle of whatever it does."""
        os.kill(self.server.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.server.process.pid, signal.SIGCONT)

    def jobs_pid(self) -> int:
        """Pid of the process of model jobs."""
        for child in psutil.Process(self.hive.pid_of("daemon")).children():
            words = child.cmdline()
            if "hive" in words and words[words.index("hive") + 1] == "jobs":
                return int(child.pid)
        raise LookupError("there is no process of jobs now")

    def outputs(self) -> bytes:
        """All that is on the disk of jobs and of kept responses."""
        files = [path for path in self.hive.state.rglob("*") if path.is_file() and "logs" not in path.parts]
        return b"".join(path.read_bytes() for path in files)


@contextlib.contextmanager
def site_in(folder: Path) -> Iterator[Site]:
    with serve(folder, template=TEMPLATE) as server, stack(url=server.url) as hive:
        for name in ("alice", "bob"):
            hive.create(name, "idler.py", tier="high")
        site = Site(hive, server)
        keep(site, 4)
        yield site


def keep(site: Site, mb: int) -> None:
    """Returns when the proxy has heard of it."""
    site.hive.put_config({"proxy.responses_kept_mb": mb})
    door = site.door

    def is_on() -> bool:
        head = {"authorization": f"Bearer {door.token}"}
        told = httpx.get(f"{door.root}/v1/responses/resp_none", headers=head, trust_env=False).text
        return "proxy.responses_kept_mb" not in told

    until(lambda: is_on() is bool(mb), within_s=20, what="the proxy has heard")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site_in(tmp_path_factory.mktemp("llama-background")) as site:
        yield site


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with site.door.openai() as client:
        yield client


def ended(client: openai.OpenAI, name: str) -> Any:
    """The response, once it has ended; as the package's documentation polls."""
    patient = client.with_options(max_retries=8)
    return until(
        lambda: (got := patient.responses.retrieve(name)).status in ENDED and got, within_s=60, what="it has ended"
    )


def begun(client: openai.OpenAI, **more: Any) -> tuple[Any, list[Any]]:
    """A stream of a long one that speaks already, and its events so far."""
    stream = client.responses.create(**{**LONG, **more}, background=True, stream=True)
    events = []
    for event in stream:
        events.append(event)
        if event.type == "response.output_text.delta":
            return stream, events
    raise AssertionError(f"it said nothing: {[event.type for event in events]}")


def test_it_is_answered_at_once_and_polled_to_its_end(site: Site, client: openai.OpenAI) -> None:
    site.hive.create("counted", "idler.py", tier="high")
    door = door_of(site.hive, "counted")
    with door.openai() as client:
        with site.held():
            first: Any = client.responses.create(**SHORT, background=True, metadata={"a": "b"})
            assert (first.status, first.background, first.output) == ("queued", True, [])
            until(lambda: client.responses.retrieve(first.id).status == "in_progress", within_s=20, what="it is asked")
        last = ended(client, first.id)
        assert last.status in ("completed", "incomplete")
        assert last.output_text
        assert (last.id, last.created_at, last.metadata) == (first.id, first.created_at, {"a": "b"})
        assert (last.background, last.store, last.model) == (True, True, MODEL)
        whole = client.responses.create(**SHORT)
        assert (whole.output_text, whole.usage.output_tokens) == (last.output_text, last.usage.output_tokens)
        counted = (2 * last.usage.input_tokens, 2 * last.usage.output_tokens)
        until(lambda: totals(site.hive, "counted") == counted, within_s=20, what="each is counted once")
        items = client.responses.input_items.list(first.id).data
        assert [item.content[0].text for item in items] == [SHORT["input"]]  # type: ignore[union-attr,index]


def test_a_conversation_goes_on_from_one(client: openai.OpenAI) -> None:
    first = ended(client, client.responses.create(**SHORT, background=True).id)
    second: Any = client.responses.create(**{**SHORT, "input": "And?"}, previous_response_id=first.id, background=True)
    assert second.previous_response_id == first.id
    second = ended(client, second.id)
    said: Any = [{"role": "user", "content": SHORT["input"]}, *(item.to_dict() for item in first.output)]
    said.append({"role": "user", "content": "And?"})
    whole: Any = client.responses.create(**{**SHORT, "input": said})
    assert second.usage.input_tokens == whole.usage.input_tokens
    third: Any = client.responses.create(**{**SHORT, "input": "So?"}, previous_response_id=second.id)
    assert third.usage.input_tokens > second.usage.input_tokens


def test_a_stream_goes_on_where_its_client_left_it(client: openai.OpenAI) -> None:
    stream, seen = begun(client)
    name = seen[0].response.id
    assert [event.type for event in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
    stream.close()
    rest: Any = list(client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number))
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    again: Any = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in [*seen, *rest]]
    last = again[-1]
    assert last.type == f"response.{last.response.status}"
    text = "".join(event.delta for event in again if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    assert last.response == client.responses.retrieve(name)
    assert list(client.responses.retrieve(name, stream=True, starting_after=last.sequence_number)) == []
    with client.responses.stream(response_id=name, starting_after=5) as resumed:
        numbers = [event.sequence_number for event in resumed]
    assert (numbers[0], numbers[-1]) == (6, last.sequence_number)


def test_many_at_once_are_left_and_gone_on_with(site: Site) -> None:
    """Four at a time are made, and each client leaves in the middle, again and again."""

    def one(number: int) -> tuple[list[int], str, str]:
        with site.door.openai() as client:
            asked: Any = {**LONG, "input": f"Number {number}.", "max_output_tokens": 200}
            stream: Any = client.responses.create(**asked, background=True, stream=True)
            seen: list[Any] = []
            while True:
                for count, event in enumerate(stream):
                    seen.append(event)
                    if count == 5 + number:
                        stream.close()
                        break
                if seen[-1].type in ("response.completed", "response.incomplete"):
                    break
                name, last = seen[0].response.id, seen[-1].sequence_number
                stream = client.responses.retrieve(name, stream=True, starting_after=last)
            text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
            return [event.sequence_number for event in seen], text, client.responses.retrieve(name).output_text

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, range(12)))
    for numbers, text, whole in found:
        assert numbers == list(range(len(numbers)))
        assert text == whole
        assert text


def test_one_is_cancelled_and_stays_so(site: Site, client: openai.OpenAI) -> None:
    stream, seen = begun(client)
    with site.held():
        name = seen[0].response.id
        cancelled = client.responses.cancel(name)
        assert cancelled.status == "cancelled"
        assert cancelled.output_text
    rest = list(stream)
    assert rest[-1].response.status == "cancelled"
    assert client.responses.cancel(name) == cancelled == client.responses.retrieve(name)
    done = ended(client, client.responses.create(**SHORT, background=True).id)
    assert client.responses.cancel(done.id).status == done.status
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(client.responses.create(**SHORT).id)
    with pytest.raises(openai.BadRequestError, match="Previous response"):
        client.responses.create(**SHORT, previous_response_id=name)


def test_a_deleted_one_is_nowhere(site: Site, client: openai.OpenAI) -> None:
    secret = "a-word-that-is-deleted"
    stream, seen = begun(client, input=secret)
    name = seen[0].response.id
    with site.held():
        assert secret.encode() in site.outputs()
        client.responses.delete(name)
        assert secret.encode() not in site.outputs()
    stream.close()
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            gone(name)
    done = ended(client, client.responses.create(**{**SHORT, "input": secret}, background=True).id)
    client.responses.delete(done.id)
    assert secret.encode() not in site.outputs()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id, stream=True)


def test_another_agents_is_404(site: Site, client: openai.OpenAI) -> None:
    name = client.responses.create(**SHORT, background=True).id
    with door_of(site.hive, "bob").openai() as bob:
        for gone in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
            with pytest.raises(openai.NotFoundError, match=f"Response with id '{name}' not found"):
                gone(name)
    assert ended(client, name).status in ("completed", "incomplete")


def test_what_can_come_to_nothing_is_refused_at_once(client: openai.OpenAI) -> None:
    for wrong, match in (
        ({"store": False}, "has to be stored"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"previous_response_id": "resp_0"}, "Previous response"),
    ):
        with pytest.raises(openai.BadRequestError, match=match):
            client.responses.create(**{**SHORT, **wrong}, background=True)
    with pytest.raises(openai.NotFoundError, match="nosuch"):
        client.responses.create(**{**SHORT, "model": "nosuch"}, background=True)


def test_what_the_server_refuses_has_failed(client: openai.OpenAI) -> None:
    """Its context is shorter than this."""
    failed = ended(client, client.responses.create(**{**SHORT, "input": "word " * 9000}, background=True).id)
    assert (failed.status, failed.error.code) == ("failed", "invalid_prompt")
    assert failed.error.message


def test_exit_tools_are_items_of_the_output_and_signals_of_the_job(site: Site, client: openai.OpenAI) -> None:
    """A client that names one has its schema from Hive. A random model calls nothing: the demo backend does."""
    tool: Any = {"type": "function", "name": "POLICY_RISK", "parameters": None}
    with demo_backend() as demo:
        turn_to(site.hive, demo.url)
        try:
            wanted: Any = {"model": "hive-demo", "tools": [tool], "tool_choice": "required"}
            made = client.responses.create(input="Is that a risk?", **wanted, background=True)
            last = ended(client, made.id)
        finally:
            turn_to(site.hive, site.server.url)
    [call] = [item for item in last.output if item.type == "function_call"]
    assert call.name == "POLICY_RISK"
    arguments = json.loads(call.arguments)
    assert arguments.keys() == {"risk"}
    job = last.id.removeprefix("resp_")
    found = [json.loads(line) for line in (site.hive.state / "jobs" / f"{job}.out").read_text().splitlines()]
    [signal] = [one["data"] for one in found if one["event"] == "signal"]
    assert (signal["name"], signal["arguments"], signal["has_ended"]) == ("POLICY_RISK", arguments, True)


def test_a_killed_process_of_jobs_has_failed_it(site: Site, client: openai.OpenAI) -> None:
    stream, seen = begun(client)
    with site.held():
        os.kill(site.jobs_pid(), signal.SIGKILL)
        failed = ended(client, seen[0].response.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert "worker_restarted" in failed.error.message
    assert failed.output_text
    rest = [*seen, *stream]
    assert [event.sequence_number for event in rest] == list(range(len(rest)))
    assert (rest[-1].type, rest[-1].response) == ("response.failed", failed)
    assert ended(client, client.responses.create(**SHORT, background=True).id).output_text


def test_a_stream_outlives_a_killed_daemon(site: Site, client: openai.OpenAI) -> None:
    """The job does not, and that is what the stream says in the end."""
    stream, seen = begun(client)
    with site.held():
        site.hive.restart("daemon")
    rest = [*seen, *stream]
    assert [event.sequence_number for event in rest] == list(range(len(rest)))
    failed = rest[-1].response
    assert (rest[-1].type, failed.status, failed.error.code) == ("response.failed", "failed", "server_error")
    assert "worker_restarted" in failed.error.message
    assert failed == ended(client, failed.id)
    assert ended(client, client.responses.create(**SHORT, background=True).id).output_text


def test_a_killed_proxy_has_failed_it(site: Site) -> None:
    with site.door.openai() as client:
        stream, seen = begun(client)
        with site.held():
            site.hive.restart("proxy")
        with pytest.raises(openai.APIConnectionError):
            list(stream)
    with site.door.openai() as again:
        failed = ended(again, seen[0].response.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert failed.output_text
        assert ended(again, again.responses.create(**SHORT, background=True).id).output_text


def test_a_killed_server_has_failed_it(tmp_path: Path) -> None:
    with site_in(tmp_path) as site, site.door.openai() as client:
        stream, seen = begun(client)
        with contextlib.suppress(ProcessLookupError), site.held():
            site.server.process.kill()
        failed = ended(client, seen[0].response.id)
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert failed.output_text
        rest = [*seen, *stream]
        assert [event.sequence_number for event in rest] == list(range(len(rest)))
        assert (rest[-1].type, rest[-1].response) == ("response.failed", failed)


def test_the_agents_sdk_reads_one_to_its_end_and_hears_of_one_that_is_killed(site: Site) -> None:
    python = folder() / "venv" / "bin" / "python"
    if not os.access(python, os.X_OK):
        pytest.skip(MISSING.format("openai-agents"))
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "MODEL": MODEL}
    env |= {"BASE_URL": f"{site.door.root}/v1", "TOKEN": site.door.token}
    program = [str(python), "-P", str(PROGRAMS / "openai_agents_background.py")]
    with subprocess.Popen(program, env=env, stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        name = json.loads(ran.stdout.readline())["speaks"]
        with site.held():
            os.kill(site.jobs_pid(), signal.SIGKILL)
        told = json.loads(ran.stdout.readline())
        assert ran.wait(60) == 0
    begin = ["response.created", "response.queued", "response.in_progress"]
    assert told["whole"]["first"] == told["killed"]["first"] == begin
    assert told["whole"]["last"] in ("response.completed", "response.incomplete")
    assert told["whole"]["pieces"] > 0
    assert told["killed"]["last"] == "response.failed"
    assert "worker_restarted" in told["killed"]["error"]
    with site.door.openai() as client:
        assert client.responses.retrieve(name).status == "failed"


def test_with_nothing_kept_it_is_refused_and_what_is_under_way_goes(site: Site) -> None:
    with site.door.openai() as client:
        _, seen = begun(client, input="a-word-of-the-last-one")
        with site.held():
            keep(site, 0)
            until(lambda: b"a-word-of-the-last-one" not in site.outputs(), within_s=20, what="it is gone")
        try:
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(seen[0].response.id)
            with pytest.raises(openai.APIStatusError, match=r"proxy\.responses_kept_mb"):
                client.responses.create(**SHORT, background=True)
        finally:
            keep(site, 4)


def test_a_removed_agents_goes_with_it(site: Site) -> None:
    hive = site.hive
    hive.create("carl", "idler.py", tier="high")
    with door_of(hive, "carl").openai() as client:
        begun(client, input="a-word-of-carls")
        with site.held():
            assert b"a-word-of-carls" in site.outputs()
            hive.client().delete("/api/agents/carl")
            until(lambda: b"a-word-of-carls" not in site.outputs(), within_s=20, what="it is gone")
