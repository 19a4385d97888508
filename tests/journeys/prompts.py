"""Questions of the tests of prompts that are read ahead: to a Hive, its agents, and the server behind it."""

from __future__ import annotations

from typing import Any

from tests.journeys.sdk import door_of
from tests.journeys.stack import Stack

PROMPT = "You are a helpful assistant. Answer the question as well as you can. The quick brown fox jumps. " * 12
QUESTION = "Hello, who are you?"


def wanted(model: str, prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """Of the spec of an agent that does nothing by itself."""
    spec = {"command": ["/bin/sleep", "1000"], "model": model, "system_prompt": prompt, "prewarm_on_start": True}
    return spec | more


def in_common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def messages(prompt: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": prompt}, {"role": "user", "content": question}]


def rows(hive: Stack) -> list[Any]:
    found: list[Any] = hive.get("/api/prompts")["prompts"]
    return found


def prewarmed(hive: Stack) -> int:
    """Requests Hive itself has made for it, as they are counted."""
    agents = hive.get("/api/usage")["agents"]
    return sum(row["requests"] for row in agents if row["agent_id"] == "prewarm")


def reused(hive: Stack, agent: str, model: str, prompt: str = PROMPT) -> int:
    """Tokens of an agent's request with this prompt that the backend had kept."""
    with door_of(hive, agent).openai() as client:
        asked: Any = messages(prompt, QUESTION)
        usage = client.chat.completions.create(model=model, messages=asked, max_tokens=4).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0
