"""Which inference servers there are to choose from, where Hive starts none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hive.control.choices import Running, service
from hive.domain import BackendKind
from hive.errors import DependencyDown, NotSupported, UsageError
from hive.inference.switch import Target

PROPS = {"/props": {"build_info": "b9"}}


@pytest.fixture
async def llama(short_path: Path) -> AsyncIterator[str]:
    """What answers as a llama-server does when it is asked who it is."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = json.dumps(PROPS.get(target, {})).encode()
        status = b"200 OK" if target in PROPS else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))
        writer.close()

    async with await asyncio.start_unix_server(answer, short_path / "l.sock"):
        yield str(short_path / "l.sock")


async def test_by_its_kind_it_is_found_where_hive_knows_to_look(llama: str) -> None:
    assert await Running([llama]).find("llama") == Target(BackendKind.LLAMA, llama)


async def test_an_address_once_named_is_known_from_then_on(llama: str) -> None:
    choices = Running(["127.0.0.1:1"])
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
        await Running(["127.0.0.1:1"]).find(asked)
    assert said in str(raised.value)
    assert raised.value.hint  # type: ignore[attr-defined]


async def test_one_in_use_that_is_silent_is_listed_all_the_same(llama: str) -> None:
    gone = Target(BackendKind.VLLM, "127.0.0.1:1")
    found = {choice.target: choice for choice in await Running([llama]).listed(gone)}
    assert (found[gone].state, found[gone].answers) == ("silent", False)
    here = found[Target(BackendKind.LLAMA, llama)]
    assert (here.state, here.answers, here.version) == ("running", True, "b9")


async def test_nothing_is_started_stopped_or_read_of_what_is_somebody_elses(llama: str) -> None:
    choices, target = Running([llama]), Target(BackendKind.LLAMA, llama)
    for verb in (choices.start(target), choices.stop(target), choices.log(BackendKind.LLAMA, 5)):
        with pytest.raises(NotSupported):
            await verb


def test_a_service_is_one_of_three() -> None:
    for asked in ("demo", "vlm", "../x", "hive-proxy"):
        with pytest.raises(UsageError):
            service(asked)
