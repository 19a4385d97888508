"""A server that went away and came back is recognised anew, and a Hive is refused with the reason, at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from hive.backends.recognise import NAME_WHAT_IS_BEHIND, look, recognise, why_no_hive, why_unknown
from hive.control.backend_candidates import at_address
from hive.control.backends import BackendWatch
from hive.control.views import inference_view
from hive.domain import BackendKind
from hive.errors import DependencyDown, NotSupported
from hive.host.access import NO_ACCESS, RemoteAccess
from hive.settings.table import DaemonSection, InferenceSection, Settings
from hive.up.up import choose_backend

Answers = dict[str, tuple[int, dict[str, str], bytes]]


def list_of(owner: str) -> bytes:
    return json.dumps({"object": "list", "data": [{"id": "m", "owned_by": owner}]}).encode()


OK: dict[str, str] = {}
VLLM: Answers = {
    "/v1/models": (200, OK, list_of("vllm")),
    "/version": (200, OK, b'{"version":"0.32.0"}'),
    "/health": (200, OK, b""),
}
RAY: Answers = {
    "/v1/models": (200, OK, list_of("somebody")),
    "/-/routes": (200, OK, b'{"/":"llm"}'),
    "/-/healthz": (200, OK, b"success"),
}
LLAMA: Answers = {
    "/props": (200, OK, b'{"total_slots":4,"build_info":"b1"}'),
    "/v1/models": (200, OK, list_of("llamacpp")),
    "/health": (200, OK, b'{"status":"ok"}'),
}
HIVE: Answers = {name: (200, {"X-Queue-Wait-Ms": "0"}, body) for name, (_, _, body) in VLLM.items()}
"""A Hive passes on what the vLLM behind it says."""
CLOSED_HIVE: Answers = dict.fromkeys(
    ("/v1/models", "/version", "/health", "/props", "/"),
    (401, OK, b'{"error":{"message":"no valid token","code":"unauthorized","src":"hive"}}'),
)


class Address:
    """One port of loopback at which different servers answer, one after the other. `answers` None: nothing listens."""

    def __init__(self) -> None:
        self.port = 0
        self.answers: Answers = {}
        self.asked: list[str] = []
        self._server: asyncio.Server | None = None

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def becomes(self, answers: Answers | None) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        if answers is not None:
            self.answers = answers
            self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        self.asked.append(target)
        status, fields, body = self.answers.get(target, (404, OK, b'{"detail":"Not Found"}'))
        more = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        head = f"HTTP/1.1 {status} X\r\n{more}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        writer.close()


@asynccontextmanager
async def address(answers: Answers) -> AsyncIterator[Address]:
    place = Address()
    await place.becomes(answers)
    try:
        yield place
    finally:
        await place.becomes(None)


def watching(
    place: Address, kind: BackendKind | None, *, settings: Settings | None = None, is_named: bool = True
) -> BackendWatch:
    settings = settings or Settings()
    return BackendWatch(
        kind, place.name, settings=lambda: settings, on_checked=lambda _: None, may_change=True, is_named=is_named
    )


def seen(watch: BackendWatch) -> tuple[str, bool, str]:
    assert watch.info is not None
    return watch.info.kind, watch.info.up, watch.info.version


async def test_a_remote_that_comes_back_as_vllm_is_one_and_the_other_way_round() -> None:
    """Ray Serve with direct streaming is its vLLM; a Hive that knew the address before kept calling it remote."""
    async with address(RAY) as place:
        watch = watching(place, BackendKind.REMOTE)
        await watch.check()
        assert seen(watch) == (BackendKind.REMOTE, True, "Ray Serve")
        await place.becomes(None)
        await watch.check()
        assert seen(watch)[:2] == (BackendKind.REMOTE, False)
        await place.becomes(VLLM)
        await watch.check()
        assert seen(watch) == (BackendKind.VLLM, True, "0.32.0")
        assert watch.control is not None
        assert watch.control.kind == BackendKind.VLLM
        await place.becomes(None)
        await watch.check()
        await place.becomes(RAY)
        await watch.check()
        assert seen(watch) == (BackendKind.REMOTE, True, "Ray Serve")
        await place.becomes(None)
        await watch.check()
        await place.becomes(LLAMA)
        await watch.check()
        assert seen(watch) == (BackendKind.LLAMA, True, "b1")
        assert watch.info is not None
        assert (watch.info.label, watch.info.places) == (f"llama-server at {place.name}", 4)


async def test_of_an_unnamed_address_only_the_known_kinds_are_taken_when_it_comes_back() -> None:
    async with address(VLLM) as place:
        watch = watching(place, BackendKind.VLLM, is_named=False)
        await watch.check()
        await place.becomes(None)
        await watch.check()
        await place.becomes(RAY)
        await watch.check()
        assert seen(watch)[:2] == (BackendKind.VLLM, False)


async def test_an_address_of_the_configuration_is_recognised_anew_as_well() -> None:
    async with address(RAY) as place:
        settings = Settings(inference=InferenceSection(backend_url=f"http://{place.name}/v1"))
        watch = watching(place, None, settings=settings, is_named=False)
        await watch.check()
        assert seen(watch) == (BackendKind.REMOTE, True, "Ray Serve")
        await place.becomes(None)
        await watch.check()
        await place.becomes(VLLM)
        await watch.check()
        assert seen(watch) == (BackendKind.VLLM, True, "0.32.0")


async def test_one_that_was_replaced_between_two_looks_is_recognised_when_it_is_read_again() -> None:
    async with address(RAY) as place:
        often = Settings(daemon=DaemonSection(models_refresh_s=0.001))
        watch = watching(place, BackendKind.REMOTE, settings=often)
        await watch.check()
        await place.becomes(VLLM)
        await watch.check()
        assert seen(watch) == (BackendKind.VLLM, True, "0.32.0")


async def test_while_it_is_up_and_known_it_is_asked_no_more_than_before() -> None:
    async with address(RAY) as place:
        alone = Settings(inference=InferenceSection(backend_cluster="none"))
        watch = watching(place, BackendKind.REMOTE, settings=alone)
        await watch.check()
        place.asked.clear()
        await watch.check()
        assert place.asked == ["/v1/models"]


async def test_a_far_server_that_is_away_is_asked_one_thing_and_the_rest_once_it_is_back() -> None:
    """Many hold it to a rate: eight questions every 30 s would keep it away."""
    async with address({"/v1/models": (429, OK, b"slow down")}) as place:
        far = f"0.0.0.0:{place.port}"  # to Hive an address like any other, to the kernel this machine
        alone = Settings(inference=InferenceSection(backend_cluster="none"))
        watch = BackendWatch(
            BackendKind.REMOTE, far, settings=lambda: alone, on_checked=lambda _: None, may_change=True, is_named=True
        )
        await watch.check()
        assert {*place.asked} == {"/v1/models"}
        await place.becomes(VLLM)
        await watch.check()
        assert seen(watch) == (BackendKind.VLLM, True, "0.32.0")


async def test_a_service_of_hives_own_stays_what_it_is() -> None:
    async with address(VLLM) as place:
        watch = BackendWatch(BackendKind.LLAMA, place.name, settings=Settings, on_checked=lambda _: None)
        await watch.check()
        assert seen(watch)[0] == BackendKind.LLAMA
        assert "/version" not in place.asked


async def test_a_server_that_loads_keeps_its_kind() -> None:
    async with address(LLAMA) as place:
        watch = watching(place, BackendKind.LLAMA)
        await watch.check()
        busy = (503, OK, b'{"error":{"message":"Loading model","code":503}}')
        await place.becomes(dict.fromkeys(LLAMA, busy))
        for _ in range(2):
            await watch.check()
        assert seen(watch)[:2] == (BackendKind.LLAMA, False)


# --- a Hive ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [HIVE, CLOSED_HIVE], ids=["with its models", "that wants a token"])
async def test_a_hive_is_refused_with_what_it_is_why_and_what_to_do(answers: Answers) -> None:
    async with address(answers) as place:
        for access in (None, NO_ACCESS, RemoteAccess("sk-1")):
            assert await look(place.name, access) == (None, True)
            assert await recognise(place.name, access) is None
        sentence = why_no_hive(place.name)
        assert sentence.startswith(f"{place.name} is another Hive, and a Hive is no backend of a Hive: ")
        assert await why_unknown(place.name, RemoteAccess("sk-1")) == sentence
        for asking in (
            at_address(f"http://{place.name}/v1", RemoteAccess("sk-1")),
            choose_backend(f"http://{place.name}", configured=None),
        ):
            with pytest.raises(NotSupported) as refused:
                await asking
            assert (refused.value.message, refused.value.hint) == (sentence, NAME_WHAT_IS_BEHIND)


@pytest.mark.parametrize("kind", [BackendKind.VLLM, BackendKind.REMOTE, None])
async def test_a_hive_that_takes_a_servers_place_is_down_with_the_reason(
    kind: BackendKind | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with address(HIVE if kind is None else VLLM) as place:
        watch = watching(place, kind)
        if kind is not None:
            await watch.check()
            await place.becomes(None)
            await watch.check()
            await place.becomes(HIVE)
        for _ in range(2):
            await watch.check()
        assert watch.info is not None
        assert not watch.up
        shown = inference_view(watch.info, watch.models, Settings(), None)
        assert shown["warning"] == f"{why_no_hive(place.name)}; {NAME_WHAT_IS_BEHIND}"
        assert sum(one.startswith("backend_is_hive ") for one in caplog.messages) == 1
        await place.becomes(VLLM)
        await watch.check()
        assert seen(watch) == (BackendKind.VLLM, True, "0.32.0")
        assert msgspec.structs.replace(watch.info, warning="") == watch.info


# --- Ray Serve's routes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("routes", "said"),
    [
        (b'{"/llm":"a","/other":"b"}', "is Ray Serve with applications at /llm, /other: name one of them, as http://"),
        (b"{}", "is Ray Serve, and no application of it answers GET /v1/models"),
    ],
)
async def test_where_the_applications_of_a_ray_serve_are_is_said(routes: bytes, said: str) -> None:
    async with address({"/-/routes": (200, OK, routes)}) as place:
        with pytest.raises(DependencyDown) as refused:
            await at_address(f"http://{place.name}/v1", NO_ACCESS)
        assert said in refused.value.message
