"""The allowlist: a changed target is either one of the table's or nothing goes upstream."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import BackendKind
from hive.endpoints.endpoints import ENDPOINTS, MODEL_PREFIX, ONE_MODEL, find
from hive.errors import Refusal
from tests.proxy.harness import CHAT, Client, post, proxied

TARGETS = sorted({row.target for row in ENDPOINTS} | {b"/api/delete", b"/api/push", b"/v1/load_lora_adapter"})
METHODS = [b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"get", b"POST "]
PIECES = [
    *(
        b"/",
        b"//",
        b"/.",
        b"/..",
        b"/./",
        b"/../api/delete",
        b"%2f",
        b"%2F",
        b"%2e%2e",
        b"%00",
        b"%64",
        b"\\",
        b";",
        b"#",
    ),
    *(b"?", b"?beta=true", b"?x=/api/delete", b"&", b"@", b" ", b"\t", b"\xff", b"\0", b"A", b"api", b"http://h", b"*"),
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """An allowed or a forbidden target with a few bytes put in, taken out, changed in case, escaped or doubled."""
    target = draw(st.sampled_from(TARGETS))
    for _ in range(draw(st.integers(0, 3))):
        at, to = sorted((draw(st.integers(0, len(target))), draw(st.integers(0, len(target)))))
        part = target[at:to]
        into = draw(
            st.one_of(
                st.sampled_from(PIECES),
                st.binary(max_size=3),
                st.sampled_from([part.upper(), part * 2, b"".join(b"%%%02x" % byte for byte in part), b""]),
            )
        )
        target = target[:at] + into + target[to:]
    return target


@given(method=st.sampled_from(METHODS), target=mutated())
def test_a_path_is_one_of_the_table_byte_for_byte_or_refused(method: bytes, target: bytes) -> None:
    """A query is not of the path: it is ignored, or chooses the row with `?beta=true`."""
    path, _, query = target.partition(b"?")
    try:
        row = find(method, target)
    except Refusal:
        assert (method, path) not in {(known.method, known.target) for known in ENDPOINTS}
        return
    if row is ONE_MODEL:
        assert method == b"GET"
        assert path.startswith(MODEL_PREFIX)
        assert row.listing, "it is answered from Hive's own list and never asked upstream"
    else:
        assert row.method == method
        assert row.target in (path, path + b"?beta=true")
        assert row.target == path or b"beta=true" in query.split(b"&")
        assert row in ENDPOINTS


@pytest.mark.parametrize("kind", [BackendKind.OLLAMA, BackendKind.VLLM])
async def test_of_mutated_targets_only_the_tables_own_bytes_reach_a_backend(tmp_path: Path, kind: BackendKind) -> None:
    chance = random.Random(7)
    known = {row.request_line for row in ENDPOINTS if row.is_offered_by(kind)}
    async with proxied(tmp_path, window_requests=100_000) as (proxy, backend):
        proxy.use(backend, kind)
        for _ in range(400):
            target = chance.choice(TARGETS)
            for _ in range(chance.randrange(3)):
                at = chance.randrange(len(target) + 1)
                target = target[:at] + chance.choice(PIECES) + target[at + chance.randrange(3) :]
            client = await Client.unix(proxy.socket_path)
            client.writer.write(post(target, CHAT, fields=b"connection: close\r\n"))
            await client.reader.read()
            client.close()
        lines = {head.split(b"\r\n")[0] + b"\r\n" for head, _ in backend.requests}
        assert lines
        assert lines <= known
