"""Questions of the tour's callers: to a model as an agent's program asks it, and to an agent through ingress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from hive.client.calls import Answer
from hive.demo.canned import MODEL
from hive.errors import AgentDown
from hive.http_client import httpx

ANSWER_S = 60.0


class ModelDoor(NamedTuple):
    """The way of one agent to the model: the base URL of OpenAI's API, and its token."""

    url: str
    token: str


class HeardAnswer(NamedTuple):
    """One answer of the model, as its caller saw it.

    `first_ms`: until its first word, None where none came; `words`: those that came. `tokens_in`, `tokens_out`: as the
    model told them at its end. `status` 0: there was no answer at all. `code`, `message`: of an error, empty where the
    answer is whole.
    """

    first_ms: float | None = None
    words: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    status: int = 0
    code: str = ""
    message: str = ""

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and not self.message


def callers() -> httpx.AsyncClient:
    """A client with as many connections as are asked for, each to this machine."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    transport = httpx.AsyncHTTPTransport(verify=False, trust_env=False, limits=limits)
    return httpx.AsyncClient(transport=transport, trust_env=False, timeout=ANSWER_S)


async def ask_model(
    client: httpx.AsyncClient,
    door: ModelDoor,
    prompt: str,
    *,
    most_tokens: int,
    on_word: Callable[[], None] = lambda: None,
) -> HeardAnswer:
    """One streamed question in OpenAI's dialect; `on_word` is called at each word. Never raises for what went wrong."""
    question = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": most_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    fields = {"Authorization": f"Bearer {door.token}"}
    begun, seen, is_ended = time.perf_counter(), HeardAnswer(), False
    try:
        async with client.stream("POST", f"{door.url}/chat/completions", json=question, headers=fields) as response:
            seen = seen._replace(status=response.status_code)
            if response.status_code != 200:
                return _with_error(seen, decoded(await response.aread()))
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_ended = True
                event = decoded(line.removeprefix("data: ").encode()) if line.startswith("data: {") else {}
                if "error" in event:
                    return _with_error(seen, event)
                if has_word(event):
                    if seen.first_ms is None:
                        seen = seen._replace(first_ms=since_ms(begun))
                    seen = seen._replace(words=seen.words + 1)
                    on_word()
                if usage := event.get("usage"):
                    seen = seen._replace(tokens_in=usage["prompt_tokens"], tokens_out=usage["completion_tokens"])
    except (httpx.HTTPError, OSError) as error:
        return seen._replace(code="", message=f"the connection broke: {error}")
    return seen if is_ended else seen._replace(message="the answer ended without its end")


def has_word(event: Answer) -> bool:
    """Whether an event of a stream has text.

    >>> has_word({"choices": [{"delta": {"content": " bees"}}]}), has_word({"choices": [{"delta": {}}]}), has_word({})
    (True, False, False)
    """
    return any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ())


def _with_error(seen: HeardAnswer, told: Answer) -> HeardAnswer:
    error = told.get("error")
    error = error if isinstance(error, dict) else {"message": str(error or "no reason was given")}
    return seen._replace(code=str(error.get("code") or ""), message=str(error.get("message") or "no reason was given"))


def decoded(body: bytes) -> Answer:
    """A JSON object; empty where it is none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


async def ask_agent(
    client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None = None
) -> tuple[float, Answer]:
    """Milliseconds until the answer of an agent, on a connection of its own, and the answer. Raises AgentDown."""
    begun = time.perf_counter()
    try:
        response = await client.request(method, url, json=body)
        took_ms = since_ms(begun)
        response.raise_for_status()
    except httpx.HTTPStatusError as error:
        raise AgentDown(f"{method} to the agent: {error.response.status_code} {error.response.text[:300]}") from None
    except httpx.HTTPError as error:
        raise AgentDown(f"{method} to the agent: {type(error).__name__}: {error}") from None
    return took_ms, decoded(response.content)


def since_ms(begun: float) -> float:
    """Milliseconds from `begun`, a time of `perf_counter`, to now."""
    return round((time.perf_counter() - begun) * 1e3, 1)
