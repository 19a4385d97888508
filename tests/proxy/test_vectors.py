"""218 requests with the right answer to each, over real sockets, on every kind of listener.

The vectors are data (tests/wire/vectors.jsonl): `policy` is the answer, `level` its source. MUST and SHOULD are RFC
9110/9112's words for the class (OUGHT: its security advice, MAY: its permission); HIVE is stricter than the RFC,
because of two readings the stricter one is the safe one. All levels are held to alike here.

Policies: `ok` the wire takes it, answers and stays in step (what the body policy then says of `{}` is another
matter); `ok-strip` the same, and nothing of the field reaches the backend; `two` two answers in order; `400c` and the
like that status and a closed connection; `405` that status; `400c|one` refused, or taken as one request;
`ok-then-400c` the first is taken, what follows it is refused. Nothing of a refused request reaches the backend.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import BackendKind
from tests.proxy.harness import INGRESS_TOKEN, MODEL_TOKEN, Backend, Client, Proxy, get, proxied

VECTORS = [
    json.loads(line) for line in (Path(__file__).parent.parent / "wire" / "vectors.jsonl").read_text().splitlines()
]
CLASSES = sorted({vector["cls"] for vector in VECTORS})
LISTENERS = ["unix", "tcp", "ingress"]
PREFIX = b"/agents/alice/t/" + INGRESS_TOKEN

CONFLICTS = {
    ("ingress", "up-ws"): "a WebSocket passes ingress: whatever does not answer it with a 101 is 502",
    ("ingress", "ce-gzip"): "what content codings an agent takes is the agent's own matter",
}
"""Vectors for which the design decides otherwise than their policy."""
NOT_FOR_INGRESS = frozenset({"allowlist bypass"})
"""Ingress has no allowlist: what paths an agent offers is the agent's own matter."""
SPOKEN_ANYWAY = frozenset({"x-original-url"})
"""…but the fields of this class are stripped there as well."""
STRIPPED = (b"x-http-method", b"x-original", b"x-rewrite", b"upgrade", b"http2-", b"x-tenant", b"trailer", b"x-t:")
CLOSES_ITSELF = frozenset({"base-conn-close", "conn-strip"})
"""These ask for the connection to be closed after the answer."""


def raw_of(vector: dict[str, object]) -> bytes:
    parts = vector.get("raw_parts") or [[vector["raw"], 1]]
    assert isinstance(parts, list)
    return b"".join(text.encode("latin-1") * times for text, times in parts)


def for_listener(raw: bytes, listener: str) -> bytes:
    """The same bytes where the listener wants a token in the head (TCP) or a prefix in the target (ingress)."""
    if listener == "tcp":
        token = b"Authorization: Bearer " + MODEL_TOKEN + b"\r\n"
        if b"Host: hive\r\n" in raw:
            return raw.replace(b"Host: hive\r\n", b"Host: hive\r\n" + token)
        line, end, rest = raw.partition(b"\r\n")
        return line + end + token + rest
    if listener == "ingress":
        return raw.replace(b" /", b" " + PREFIX + b"/")
    return raw


async def connect(proxy: Proxy, listener: str) -> Client:
    if listener == "unix":
        return await Client.unix(proxy.socket_path)
    return await Client.tcp(proxy.port if listener == "tcp" else proxy.ingress_port)


UNDERSTOOD = (200, 400, 404)
"""Statuses of a request with accepted framing: most name no model, or an empty body has none to load."""


async def first_answer(client: Client) -> tuple[int, dict[bytes, bytes]]:
    """(status, fields) of the next answer that is not an interim one."""
    while True:
        status, fields, _ = await client.answer()
        if status >= 200:
            return status, fields


async def in_step(client: Client, listener: str) -> bool:
    """Whether a plain request on the same connection gets its own answer."""
    plain = get(b"/api/tags", token=MODEL_TOKEN if listener == "tcp" else None)
    client.writer.write(for_listener(plain, listener) if listener == "ingress" else plain)
    return (await first_answer(client))[0] == 200


async def closed(client: Client, fields: dict[bytes, bytes]) -> bool:
    try:
        return fields.get(b"connection") == b"close" and await client.at_end()
    except ConnectionError:
        return True


async def taken(client: Client, vector: dict[str, Any], listener: str) -> str:
    status, fields = await first_answer(client)
    if vector["id"] in CLOSES_ITSELF:
        return "" if status == 200 and await closed(client, fields) else f"{status}, open"
    if status not in UNDERSTOOD or fields.get(b"connection") == b"close":
        return f"refused with {status}"
    return "" if await in_step(client, listener) else "out of step"


async def refused(client: Client, backend: Backend, policy: str) -> str:
    status, fields = await first_answer(client)
    wanted = [word.removesuffix("c") for word in policy.split("|")[0].split("/")]
    if str(status) not in wanted:
        return f"{status} instead of {policy}"
    if policy.split("|")[0].endswith("c") and not await closed(client, fields):
        return f"{status}, but the connection is open"
    return "the backend saw it" if backend.requests or backend.connections else ""


async def judged(proxy: Proxy, backend: Backend, vector: dict[str, Any], listener: str) -> str:
    """The fault in the answers to a vector; empty if there is none."""
    backend.requests.clear()
    backend.connections = 0
    client = await connect(proxy, listener)
    policy = vector["policy"]
    client.writer.write(for_listener(raw_of(vector), listener))
    try:
        if policy == "two":
            both = [(await first_answer(client))[0] for _ in range(2)]
            return "" if both == [200, 200] else f"{both}"
        if policy == "ok-then-400c":
            begun = "" if (await first_answer(client))[0] in UNDERSTOOD else "refused"
            seen = len(backend.requests)
            status, fields = await first_answer(client)
            ended = status == 400 and await closed(client, fields) and len(backend.requests) == seen
            return begun or ("" if ended else f"then {status}")
        if policy in ("ok", "ok-strip"):
            wrong = await taken(client, vector, listener)
            leaked = [head for head, _ in backend.requests for word in STRIPPED if b"\r\n" + word in head.lower()]
            return wrong or (f"leaked in {leaked}" if leaked else "")
        return await refused(client, backend, policy)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        return repr(error)
    finally:
        client.close()


def test_there_are_218_vectors_and_few_conflicts() -> None:
    assert len(VECTORS) == len({vector["id"] for vector in VECTORS}) == 218
    assert {vector for _, vector in CONFLICTS} <= {vector["id"] for vector in VECTORS}
    assert len(CONFLICTS) <= 3


@pytest.mark.parametrize("listener", LISTENERS)
@pytest.mark.parametrize("cls", CLASSES)
async def test_every_vector_is_answered_as_its_policy_says(tmp_path: Path, cls: str, listener: str) -> None:
    wrong: dict[str, list[str]] = defaultdict(list)
    async with proxied(tmp_path, window_requests=1_000_000) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.registry.learn(msgspec.structs.replace(proxy.row, address=backend.address))
        for vector in VECTORS:
            if vector["cls"] != cls or (listener, vector["id"]) in CONFLICTS:
                continue
            if listener == "ingress" and cls in NOT_FOR_INGRESS and vector["id"] not in SPOKEN_ANYWAY:
                continue
            if answer := await judged(proxy, backend, vector, listener):
                wrong[vector["id"]].append(answer)
        assert repr(proxy.half_open) == "<HalfOpen 0 heads of 0 owners>"
    assert wrong == {}
