"""Streams asked through Hive while parts of a cluster are lost, and how each of them ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx

WHOLE, BROKEN, REFUSED, LYING = "whole", "broken", "refused", "lying"
"""All of it came; it broke, and the client is told; nothing of it came, and the client is told; it ended as if it were
whole, and is not."""


class Caller:
    """An operator of a Hive, for a tenant. `more`: fields of each request."""

    def __init__(self, hive: Any, tenant: str = "default", **more: Any) -> None:
        self._more = more
        access = hive.get("/api/system/access")
        self.url = f"{access['openai_base_url']}/chat/completions"
        self.headers = {"authorization": f"Bearer {access['token']}", "x-tenant-id": tenant}

    def body(self, words: int, prompt: str = "hello", *, stream: bool = True) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        return {"model": "tiny", "messages": messages, "max_tokens": words, "stream": stream, **self._more}

    def ask(self, words: int = 3, **more: Any) -> httpx.Response:
        """One whole answer."""
        body = {**self.body(words, stream=False), **more}
        return httpx.post(self.url, json=body, headers=self.headers, trust_env=False, timeout=120)

    def works(self) -> bool:
        return self.ask().status_code == 200

    async def stream(
        self, client: httpx.AsyncClient, words: int, prompt: str, on_word: Callable[[], None] = lambda: None
    ) -> str:
        """Asks for a stream of so many words; its end."""
        came, is_told, is_done = 0, False, False
        try:
            async with client.stream("POST", self.url, json=self.body(words, prompt), headers=self.headers) as answer:
                if answer.status_code != 200:
                    return REFUSED
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        is_done = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        is_told = is_told or "error" in event
                        came += sum(bool(choice["delta"].get("content")) for choice in event.get("choices", ()))
                        on_word()
        except httpx.TransportError:
            return BROKEN if came else REFUSED
        if is_told:
            return BROKEN if came else REFUSED
        return WHOLE if is_done and came == words else LYING


async def ended(
    caller: Caller,
    *,
    streams: int,
    at_once: int,
    words: int,
    losses: Callable[[], Awaitable[None]],
    speaking: asyncio.Event | None = None,
) -> Counter[str]:
    """Counts the ends of so many streams, of which `at_once` run at a time; of more, for as long as `losses()` goes
    on. Sets `speaking` once `at_once` of them have a word."""
    ends: Counter[str] = Counter()
    begun = set[int]()
    losing = asyncio.ensure_future(losses())
    numbers = iter(range(10**9))

    def note(number: int) -> None:
        begun.add(number)
        if speaking is not None and len(begun) == at_once:
            speaking.set()

    async def one_after_another(client: httpx.AsyncClient) -> None:
        while sum(ends.values()) < streams or not losing.done():
            number = next(numbers)
            end = await caller.stream(client, words, f"prompt {number}", partial(note, number))
            ends[end] += 1
            if end == REFUSED:
                await asyncio.sleep(0.2)

    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(trust_env=False, timeout=120, limits=limits) as client:
        await asyncio.gather(*(one_after_another(client) for _ in range(at_once)))
    await losing
    return ends
