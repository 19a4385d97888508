"""The choice of inference servers where Hive starts none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from hive.backends.launch import SERVICES
from hive.backends.switch import Target
from hive.control.backend_candidates import RunningCandidates, ServiceCandidates, service
from hive.domain import BackendKind
from hive.errors import ConfigError, DependencyDown, NotSupported, UsageError
from hive.host.access import RemoteAccess
from hive.link.helper import BackendIs
from hive.sandbox.client import SandboxClient
from tests.listening import listening

PROPS = {"/props": {"build_info": "b9"}}


@pytest.fixture
async def llama(short_path: Path) -> AsyncIterator[str]:
    """A server that answers as a llama-server does to the questions about its kind."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = json.dumps(PROPS.get(target, {})).encode()
        status = b"200 OK" if target in PROPS else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    async with listening(answer, short_path / "l.sock") as address:
        yield address


async def test_by_its_kind_it_is_found_where_hive_knows_to_look(llama: str) -> None:
    assert await RunningCandidates([llama]).find("llama") == Target(BackendKind.LLAMA, llama)


async def test_an_address_once_named_is_known_from_then_on(llama: str) -> None:
    choices = RunningCandidates(["127.0.0.1:1"])
    assert await choices.find(f"unix://{llama}") == Target(BackendKind.LLAMA, llama)
    assert await choices.find("llama") == Target(BackendKind.LLAMA, llama)


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ("lama", UsageError, "'lama' is no inference server"),
        ("ftp://127.0.0.1:9", UsageError, "is no backend address"),
        ("https://127.0.0.1:9", DependencyDown, "no inference server that Hive knows answers at https://127.0.0.1:9: "),
        ("127.0.0.1:1", DependencyDown, "no inference server that Hive knows answers at 127.0.0.1:1"),
        ("vllm", DependencyDown, "no vllm answers at 127.0.0.1:1, "),
    ],
)
async def test_what_is_not_there_is_said_with_what_to_do(asked: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        await RunningCandidates(["127.0.0.1:1"]).find(asked)
    assert said in str(raised.value)
    assert raised.value.hint  # type: ignore[attr-defined]


async def test_one_in_use_that_is_silent_is_listed_all_the_same(llama: str) -> None:
    gone = Target(BackendKind.VLLM, "127.0.0.1:1")
    found = {choice.target: choice for choice in await RunningCandidates([llama]).listed(gone)}
    assert (found[gone].state, found[gone].answers) == ("silent", False)
    here = found[Target(BackendKind.LLAMA, llama)]
    assert (here.state, here.answers, here.version) == ("running", True, "b9")


async def test_nothing_is_started_stopped_or_read_of_what_is_somebody_elses(llama: str) -> None:
    choices, target = RunningCandidates([llama]), Target(BackendKind.LLAMA, llama)
    for verb in (choices.start(target), choices.stop(target), choices.log(BackendKind.LLAMA, 5)):
        with pytest.raises(NotSupported):
            await verb


def test_a_service_is_one_of_hives_own() -> None:
    assert service("demo").unit == "hive-inference-demo.service"
    for asked in ("remote", "vlm", "../x", "hive-proxy"):
        with pytest.raises(UsageError):
            service(asked)


class Helper:
    """Knows the three services, none of which runs."""

    async def look_at_backend(self, kind: BackendKind) -> BackendIs:
        return BackendIs(unit=f"hive-{kind}.service", state="inactive")


async def test_an_installed_hive_may_also_ask_somebody_elses(llama: str) -> None:
    choices = ServiceCandidates(cast("SandboxClient", Helper()))
    target = await choices.find(f"unix://{llama}")
    assert target == Target(BackendKind.LLAMA, llama)
    assert await choices.why_dead(target) == "", "it is nobody's here to say"
    first, *services = await choices.listed(target)
    assert (first.target, first.state, first.answers, first.version) == (target, "running", True, "b9")
    assert [choice.target.kind for choice in services] == list(SERVICES)
    assert len(await choices.listed(service("vllm"))) == len(SERVICES)
    assert await choices.find("vllm") == service("vllm")


@pytest.fixture
async def listing(short_path: Path) -> AsyncIterator[str]:
    """A server of OpenAI's dialect that nobody knows, and that wants a key."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        status = b"200 OK" if b"Bearer sk-1" in head and b" /v1/models " in head else b"401 Unauthorized"
        body = b'{"object":"list","data":[{"id":"m"}]}'
        writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))

    async with listening(answer, short_path / "r.sock") as address:
        yield address


async def test_a_remote_is_known_once_it_was_named_and_only_with_its_key(listing: str) -> None:
    choices = RunningCandidates([], access=lambda: RemoteAccess("sk-1"))
    with pytest.raises(DependencyDown, match="no remote answers at"):
        await choices.find("remote")
    remote = Target(BackendKind.REMOTE, listing)
    assert await choices.find(f"unix://{listing}") == remote
    assert await choices.find("remote") == remote
    assert remote in [choice.target for choice in await choices.listed(None)]
    assert await RunningCandidates([], named=[listing], access=lambda: RemoteAccess("sk-1")).find("remote") == remote
    with pytest.raises(DependencyDown, match=r"asks for a key \(401\)"):
        await RunningCandidates([]).find(listing)


async def test_a_key_that_cannot_be_read_hides_no_other_server(llama: str) -> None:
    def broken() -> RemoteAccess:
        raise ConfigError("cannot read the backend's key")

    choices = RunningCandidates([llama], access=broken)
    assert await choices.find("llama") == Target(BackendKind.LLAMA, llama)
    assert [choice.target.kind for choice in await choices.listed(None) if choice.target.address == llama]
    with pytest.raises(ConfigError):
        await choices.find("https://localhost:1")
