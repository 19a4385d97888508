"""A path that is not offered is told why, and what is: nothing of it reaches a backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.backends.kinds import spec_of
from hive.domain import BackendKind
from hive.endpoints.endpoints import ENDPOINTS, answered_by_hive, asked_as, find
from hive.endpoints.unknown_paths import KNOWN, TOLD_BYTES
from hive.errors import HiveError
from hive.queue.slot_gate import Switching
from tests.proxy.harness import CHAT, Client, get, post, proxied

OLLAMA, VLLM, LLAMA = BackendKind.OLLAMA, BackendKind.VLLM, BackendKind.LLAMA
OF_TEXT = [kind for kind in BackendKind if not spec_of(kind).category]
"""Kinds that can be the active backend; the others are slots of the pool alone."""
NAMES = {row.name: row for row in ENDPOINTS}


@pytest.mark.parametrize(
    ("target", "kind", "status", "why", "near"),
    [
        (b"/chat/completions", OLLAMA, 403, "on no list", "/v1/chat/completions"),
        (b"/v1/chat/completions/", VLLM, 403, "on no list", "/v1/chat/completions"),
        (b"/v1/v1/messages", VLLM, 403, "on no list", "/v1/messages"),
        (b"/V1/Embeddings?x=1", VLLM, 403, "on no list", "/v1/embeddings"),
        (b"/api/push", OLLAMA, 403, "for everybody", "/api/tags"),
        (b"/slots", LLAMA, 403, "everybody's requests", "/v1/models"),
        (b"/v1/files", VLLM, 403, "cloud service", "/v1/chat/completions"),
        (b"/completion", LLAMA, 403, "does not relay", "/v1/completions"),
        (b"/completion", OLLAMA, 501, "llama have it", "/v1/completions"),
        (b"/pooling", OLLAMA, 501, "vllm have it", "/v1/embeddings"),
        (b"/v1/messages/count_token", OLLAMA, 403, "on no list", "/v1/messages/count_tokens"),
    ],
)
async def test_an_unknown_path_is_told_why_and_what_is_nearest(
    tmp_path: Path, target: bytes, kind: BackendKind, status: int, why: str, near: str
) -> None:
    """The answer was "this path is not offered to agents" for all of them."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        client = await Client.unix(proxy.socket_path)
        found, _, body = await client.ask(post(target, CHAT))
        error = json.loads(body)["error"]
        text = error if isinstance(error, str) else error.get("message", "")
        assert found == status
        assert target.partition(b"?")[0].decode() in text
        assert why in text
        assert text.endswith(f"the nearest that is offered is {near}")
        assert backend.requests == []


async def test_behind_the_gate_of_a_switch_an_unknown_path_is_403(tmp_path: Path) -> None:
    """It is not known then which kind is active next."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, OLLAMA)
        proxy.path.slot.close(Switching(1e9, "vllm"))
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(get(b"/pooling")))[0] == 403


@given(target=st.binary(max_size=300).map(lambda text: b"/zz" + text), kind=st.sampled_from([None, *OF_TEXT]))
def test_whatever_is_asked_what_is_told_is_short_plain_and_offered(target: bytes, kind: BackendKind | None) -> None:
    with pytest.raises(HiveError) as refused:
        find(b"POST", target, kind)
    error = refused.value
    assert error.status == 403
    assert len(error.message) < TOLD_BYTES + 100
    assert all(letter.isascii() or letter == "…" for letter in error.message)
    near = error.hint.rpartition(" ")[2]
    row = NAMES[near]
    assert kind is None or answered_by_hive(row, kind) or asked_as(row, kind) is not None


def test_what_changes_the_server_or_tells_of_others_is_403_for_every_kind() -> None:
    for name, known in KNOWN.items():
        if name in NAMES:  # offered since
            continue
        for kind in BackendKind:
            with pytest.raises(HiveError) as refused:
                find(b"POST", name.encode(), kind)
            is_lacking = not known.is_built or (known.kinds and kind not in known.kinds)
            assert refused.value.status == (501 if is_lacking else 403), name


DEVELOPERS = (
    *("/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory", "/collective_rpc", "/reset_prefix_cache"),
    *("/reset_mm_cache", "/reset_encoder_cache", "/server_info", "/abort_requests", "/pause", "/resume", "/is_paused"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/start_draft_weight_update", "/finish_weight_update", "/update_weight_version", "/weight_checker"),
    *("/weight_info", "/get_world_size"),
)
"""The routes that vLLM 0.32.0 has with VLLM_SERVER_DEV_MODE=1 (serve/dev, rl): servers that may sleep have them all."""


def test_no_agent_reaches_the_routes_that_a_server_has_for_its_sleep() -> None:
    for path in DEVELOPERS:
        for asked in (
            path,
            f"{path}?level=1",
            f"{path}/",
            f"/v1{path}",
            f"//{path[1:]}",
            f"/v1/..{path}",
            f"/./{path[1:]}",
        ):
            for method in (b"GET", b"POST"):
                with pytest.raises(HiveError) as refused:
                    find(method, asked.encode(), BackendKind.VLLM)
                assert refused.value.status in (403, 405), asked
