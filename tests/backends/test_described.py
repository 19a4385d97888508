"""Salts, flushes and priority by what a server described of itself, and the sentence that says so."""

from __future__ import annotations

import json

import msgspec
import pytest

from hive.backends.backend import open_backend
from hive.backends.described import (
    cache_fields,
    flushed_by,
    prefix_cache,
    priority_fields,
    takes_priority,
    why_not_flushed,
)
from hive.backends.openapi import capabilities
from hive.domain import BackendInfo, BackendKind, Band, FoundCapabilities
from hive.lifecycle.flush_plan import CacheServer, plan_of
from hive.models.cache_epochs import FlushedBy, FlushKind, FlushScope
from hive.settings.table import Settings
from tests.vllm import VllmServer

PLAIN = Settings()
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


def with_(section: str, **values: object) -> Settings:
    struct = msgspec.structs.replace(getattr(PLAIN, section), **values)
    return msgspec.structs.replace(PLAIN, **{section: struct})


def described(**fields: tuple[str, ...]) -> FoundCapabilities:
    """The capabilities by a description in OpenAPI, as FastAPI writes it: each endpoint (`chat`, `completions`,
    `embeddings`) with these fields of its own, in one of two alternatives behind a reference."""
    paths = {"chat": CHAT, "completions": COMPLETIONS, "embeddings": EMBEDDINGS}
    told = {
        "paths": {
            paths[name]: {
                "post": {
                    "requestBody": {
                        "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
                    }
                }
            }
            for name in fields
        },
        "components": {
            "schemas": {
                name: {"anyOf": [{"properties": {"model": {}, **{key: {} for key in own}}}, {"properties": {"x": {}}}]}
                for name, own in fields.items()
            }
        },
    }
    found = capabilities(json.dumps(told).encode())
    assert found is not None
    return found


ALL = described(chat=("cache_salt", "priority"), completions=("cache_salt", "priority"))
SOME = described(chat=("cache_salt",), embeddings=("user",))
NONE = described(chat=("user",), completions=("suffix",))


def server(kind: BackendKind, told: FoundCapabilities = FoundCapabilities(), *, priority: bool = False) -> BackendInfo:  # noqa: B008
    return BackendInfo(kind=kind, address="h:1", capabilities=told, priority=priority)


def test_a_description_says_at_which_endpoints_a_salt_is_taken() -> None:
    assert (ALL.salted, ALL.ordered) == ((CHAT, COMPLETIONS), (CHAT, COMPLETIONS))
    assert (SOME.salted, SOME.ordered) == ((CHAT,), ())
    assert (NONE.salted, NONE.ordered) == ((), ())


@pytest.mark.parametrize(
    ("kind", "told", "salted"),
    [
        (BackendKind.VLLM, FoundCapabilities(), {CHAT, COMPLETIONS, EMBEDDINGS}),
        (BackendKind.VLLM, SOME, {CHAT}),
        (BackendKind.VLLM, NONE, set()),
        (BackendKind.REMOTE, FoundCapabilities(), set()),
        (BackendKind.REMOTE, ALL, {CHAT, COMPLETIONS}),
        (BackendKind.REMOTE, SOME, {CHAT}),
        (BackendKind.REMOTE, NONE, set()),
        (BackendKind.DEMO, ALL, set()),
    ],
)
def test_a_salt_goes_where_it_is_taken_and_nowhere_else(
    kind: BackendKind, told: FoundCapabilities, salted: set[str]
) -> None:
    backend = server(kind, told)
    sent = {path: cache_fields(backend, path, "tenant a", "", True, ()) for path in (CHAT, COMPLETIONS, EMBEDDINGS)}
    assert {path for path, fields in sent.items() if fields} == salted
    for path in salted:
        assert sent[path] != cache_fields(backend, path, "tenant b", "", True, ())
        assert sent[path] != cache_fields(backend, path, "tenant a", "", True, ("all 1",)), "a flush changes it"
        assert sent[path] == cache_fields(server(BackendKind.VLLM), path, "tenant a", "", False, ()), "as a vLLM's own"


def test_llama_server_is_told_what_it_knows_whatever_it_describes() -> None:
    assert cache_fields(server(BackendKind.LLAMA, ALL), CHAT, "tenant a", "", True, ()) == (("cache_prompt", b"false"),)


def test_priority_is_vllms_where_its_policy_is_on_and_a_described_one_where_a_setting_says_so() -> None:
    on, behind = with_("inference", vllm_scheduling_policy="priority"), with_("inference", backend_priority=True)
    assert [kind for kind in BackendKind if takes_priority(kind, on)] == [BackendKind.VLLM]
    assert not takes_priority(BackendKind.VLLM, PLAIN)
    assert not takes_priority(BackendKind.REMOTE, PLAIN, ALL)
    assert not takes_priority(BackendKind.REMOTE, behind)
    assert not takes_priority(BackendKind.REMOTE, behind, NONE)
    assert not takes_priority(BackendKind.LLAMA, behind, ALL)
    assert takes_priority(BackendKind.REMOTE, behind, ALL)
    assert takes_priority(BackendKind.VLLM, behind, ALL), "a vLLM Router looks like one of its vLLMs"


def test_a_priority_goes_to_who_orders_by_it_where_it_is_taken() -> None:
    assert priority_fields(server(BackendKind.REMOTE, ALL), CHAT, Band.LOW) == ()
    assert priority_fields(server(BackendKind.REMOTE, ALL, priority=True), CHAT, Band.LOW) == (("priority", b"20"),)
    assert priority_fields(server(BackendKind.REMOTE, ALL, priority=True), EMBEDDINGS, Band.LOW) == ()
    assert priority_fields(server(BackendKind.VLLM, priority=True), EMBEDDINGS, Band.HIGH) == (("priority", b"0"),)


def test_the_prefix_cache_is_described_as_it_is() -> None:
    off = with_("proxy", cache_isolation=False)
    assert prefix_cache(server(BackendKind.VLLM), PLAIN) == "separated by tenant (salt)"
    assert prefix_cache(server(BackendKind.VLLM, ALL), PLAIN) == "separated by tenant (salt)"
    assert prefix_cache(server(BackendKind.VLLM, SOME), PLAIN) == f"separated by tenant (salt); shared at {EMBEDDINGS}"
    assert prefix_cache(server(BackendKind.VLLM, NONE), PLAIN) == (
        "shared between all agents (this vLLM describes no cache_salt)"
    )
    assert prefix_cache(server(BackendKind.REMOTE, ALL), PLAIN) == (
        "separated by tenant (salt), as it describes itself"
    )
    unknown = "whoever runs the remote server decides; Hive shows it one key for all agents"
    for told in (FoundCapabilities(), NONE):
        assert prefix_cache(server(BackendKind.REMOTE, told), PLAIN) == unknown
        assert prefix_cache(server(BackendKind.REMOTE, told), off) == unknown
    for one in (server(BackendKind.VLLM), server(BackendKind.REMOTE, SOME)):
        assert prefix_cache(one, off) == "shared between all agents (cache_isolation = false)"
    assert prefix_cache(server(BackendKind.LLAMA), PLAIN) == "separated: cache_prompt off when tenants differ"
    assert prefix_cache(server(BackendKind.OLLAMA), off) == "shared between all agents (Ollama cannot separate it)"
    assert prefix_cache(server(BackendKind.DEMO), PLAIN) == "none"


def at(kind: BackendKind, told: FoundCapabilities) -> CacheServer:
    return CacheServer(name="", kind=kind, address="h:1", models=("m",), is_own=False, told=told)


def test_a_flush_reaches_a_remote_by_its_salt_and_says_where_it_does_not() -> None:
    everything = FlushScope(FlushKind.ALL)
    assert plan_of(everything, [at(BackendKind.REMOTE, ALL)]).salted == ("",)
    assert plan_of(everything, [at(BackendKind.REMOTE, ALL)]).left_out == ()
    partly = plan_of(everything, [at(BackendKind.REMOTE, SOME)])
    assert (partly.salted, partly.left_out, partly.is_in_vain) == (
        ("",),
        (f"m: it describes no cache_salt at {EMBEDDINGS}",),
        False,
    )
    for kind, why in (
        (BackendKind.REMOTE, "what a remote server keeps is for whoever runs it to flush"),
        (BackendKind.VLLM, "this vLLM describes no cache_salt"),
    ):
        assert flushed_by(kind, NONE) is FlushedBy.NONE
        assert why_not_flushed(kind, NONE) == why
        plan = plan_of(everything, [at(kind, NONE)])
        assert (plan.left_out, plan.is_in_vain) == ((f"m: {why}",), True)


@pytest.mark.vllm
async def test_a_real_vllm_describes_the_salt_at_every_endpoint_where_it_was_taken_for_granted(
    vllm_server: VllmServer,
) -> None:
    told = await open_backend(BackendKind.VLLM, vllm_server.address).capabilities()
    assert {CHAT, COMPLETIONS} <= {*(told.salted or ())}
    assert {CHAT, COMPLETIONS} <= {*(told.ordered or ())}
    assert "shared" not in prefix_cache(server(BackendKind.VLLM, told), PLAIN)
    asked_for = open_backend(BackendKind.REMOTE, vllm_server.address)
    assert await asked_for.capabilities() == told, "behind a proxy it describes the same"
    assert prefix_cache(server(BackendKind.REMOTE, told), PLAIN) == "separated by tenant (salt), as it describes itself"
