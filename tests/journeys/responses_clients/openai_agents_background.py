"""OpenAI's agents SDK with a response that is made in the background: one to its end, and one that is killed.

It prints a line once the second one has begun to speak, for whoever kills it.
"""

import asyncio
import json
import os

from agents import Agent, ModelSettings, Runner, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI

MODEL = os.environ["MODEL"]


async def read(max_tokens: int, *, tells: bool = False) -> dict[str, object]:
    settings = ModelSettings(max_tokens=max_tokens, temperature=0, extra_args={"background": True})
    agent = Agent(name="plain", instructions="Be short.", model=MODEL, model_settings=settings)
    stream = Runner.run_streamed(agent, "Hello, how are you?")
    kinds: list[str] = []
    told: dict[str, object] = {"pieces": 0, "error": ""}
    try:
        async for event in stream.stream_events():
            if event.type != "raw_response_event":
                continue
            kinds.append(event.data.type)
            if kinds[-1] == "response.created":
                told["id"] = event.data.response.id
            if tells and kinds.count("response.output_text.delta") == 1 and kinds[-1] == "response.output_text.delta":
                print(json.dumps({"speaks": told["id"]}), flush=True)
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return {**told, "pieces": kinds.count("response.output_text.delta"), "first": kinds[:3], "last": kinds[-1]}


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["TOKEN"], max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)
    whole = await read(24)
    killed = await read(3000, tells=True)
    print(json.dumps({"whole": whole, "killed": killed}), flush=True)


asyncio.run(main())
