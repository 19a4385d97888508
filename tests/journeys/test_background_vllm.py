"""Responses that are made in the background before a real vLLM: polled, streamed on, and cut with its server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.journeys.sdk import door_of
from tests.journeys.stack import stack, until
from tests.llama import MODEL
from tests.vllm import VllmServer

pytestmark = [pytest.mark.redis, pytest.mark.vllm, pytest.mark.timeout(600)]
SHORT: Any = {"model": MODEL, "input": "Hello, who are you?", "max_output_tokens": 24, "temperature": 0}


def test_it_is_what_the_same_request_makes_and_goes_on_from_any_event(vllm_server: VllmServer) -> None:
    with stack(url=vllm_server.url) as hive:
        hive.create("alice", "idler.py", tier="high")
        hive.put_config({"proxy.responses_kept_mb": 4})
        with door_of(hive, "alice").openai() as client:
            begun: Any = until(
                lambda: client.responses.create(**SHORT, background=True), within_s=20, what="the proxy has heard"
            )
            last: Any = until(
                lambda: (got := client.responses.retrieve(begun.id)).status not in ("queued", "in_progress") and got,
                within_s=60,
                what="it has ended",
            )
            whole: Any = client.responses.create(**SHORT)
            assert (last.status, last.output_text) == (whole.status, whole.output_text)
            assert last.usage.output_tokens == whole.usage.output_tokens
            stream: Any = client.responses.create(**SHORT, background=True, stream=True)
            seen = [next(stream) for _ in range(6)]
            stream.close()
            seen += client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
            assert [event.sequence_number for event in seen] == list(range(len(seen)))
            assert seen[-1].response.output_text == whole.output_text
