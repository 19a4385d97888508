"""A Ray Serve application without a model: chat as OpenAI's, whose answers take time and say which replica gave them.

Runs in Ray's own environment (tests/tools/setup_ray.sh); `app` is what serve.yaml imports. The answer's `id` is the
replica's, the first word of its text what came as `cache_salt`; `max_tokens` words come, one every `TOKEN_S` seconds.
"""

# mypy: disable-error-code="attr-defined,untyped-decorator"
# No `from __future__ import annotations`: FastAPI would not find the body of a method of a class.
import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from ray import serve

MODEL = "tiny"
TOKEN_S = 0.05
api = FastAPI()


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatCompletionRequest(BaseModel):
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = 20
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: str | None = None
    priority: int = 0


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Chat:
    @api.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "fake"}]}

    @api.post("/v1/chat/completions")
    async def chat(self, asked: ChatCompletionRequest) -> Response:
        replica = f"{serve.get_replica_context().replica_id.unique_id}-{os.getpid()}"
        words = [f"salt={asked.cache_salt or 'none'}", *(f" {n}" for n in range(1, asked.max_tokens))]
        usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
        says = {"id": replica, "created": int(time.time()), "model": MODEL}
        if asked.stream:
            events = self._events(says, words, usage if asked.stream_options.include_usage else None)
            return StreamingResponse(events, media_type="text/event-stream")
        await asyncio.sleep(TOKEN_S * len(words))
        message = {"index": 0, "message": {"role": "assistant", "content": "".join(words)}, "finish_reason": "stop"}
        return JSONResponse({**says, "object": "chat.completion", "choices": [message], "usage": usage})

    async def _events(self, says: dict[str, Any], words: list[str], usage: dict[str, int] | None) -> AsyncIterator[str]:
        says = {**says, "object": "chat.completion.chunk"}
        for word in words:
            yield self._event({**says, "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
            await asyncio.sleep(TOKEN_S)
        yield self._event({**says, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if usage:
            yield self._event({**says, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _event(self, said: dict[str, Any]) -> str:
        return f"data: {json.dumps(said)}\n\n"


app = Chat.bind()
