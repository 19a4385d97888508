"""OpenAI's agents SDK, which speaks Responses by default."""

import asyncio
import json
import os
from typing import Literal

import pydantic
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

MODEL = os.environ["MODEL"]
IS_RANDOM = bool(os.environ["RANDOM_MODEL"])
called: list[str] = []


class City(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


@function_tool  # type: ignore[untyped-decorator]
def look_up(city: Literal["Paris", "Rome"]) -> str:
    """Looks a city up.

    Args:
        city: Its name.
    """
    called.append(city)
    return "The capital of France."


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key=os.environ["TOKEN"], max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)
    short = ModelSettings(max_tokens=24 if IS_RANDOM else 400, temperature=0)
    plain = Agent(name="plain", instructions="Be short.", model=MODEL, model_settings=short)
    answer = "" if IS_RANDOM else (await Runner.run(plain, "Hello, how are you?")).final_output
    stream = Runner.run_streamed(plain, "Hello, how are you?")
    pieces = []
    try:
        async for event in stream.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                pieces.append(event.data.delta)
    except ModelBehaviorError as error:
        if not IS_RANDOM or "max_output_tokens" not in str(error):
            raise
    long = ModelSettings(max_tokens=400, temperature=0)
    by_schema = Agent(name="schema", model=MODEL, output_type=City, model_settings=long)
    city = (await Runner.run(by_schema, "Which city?")).final_output.city
    tools = Agent(name="tools", instructions="Use your tool.", model=MODEL, tools=[look_up], model_settings=short)
    after = "" if IS_RANDOM else (await Runner.run(tools, "Please look up Paris.", max_turns=4)).final_output
    told = {"answer": answer, "streamed": len(pieces), "city": city, "called": called, "after": after}
    print(json.dumps(told))


asyncio.run(main())
