"""pydantic-ai's models of OpenAI's Responses."""

import asyncio
import json
import os
from typing import Literal

import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

called: list[str] = []


class City(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]


async def main() -> None:
    provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key=os.environ["TOKEN"])
    model = OpenAIResponsesModel(os.environ["MODEL"], provider=provider)
    plain = Agent(model, instructions="Be short.", model_settings={"max_tokens": 24, "temperature": 0})
    answer = (await plain.run("Hello, how are you?")).output
    pieces = []
    async with plain.run_stream("Hello, how are you?") as stream:
        async for piece in stream.stream_text(delta=True, debounce_by=None):
            pieces.append(piece)
    by_schema = Agent(model, output_type=NativeOutput(City), model_settings={"max_tokens": 400, "temperature": 0})
    city = (await by_schema.run("Which city?")).output.city
    tools = Agent(model, instructions="Use your tool.", model_settings={"max_tokens": 24, "temperature": 0})

    @tools.tool_plain  # type: ignore[untyped-decorator]
    def look_up(city: Literal["Paris", "Rome"]) -> str:
        """Looks a city up."""
        called.append(city)
        return "The capital of France."

    after = (await tools.run("Please look up Paris.")).output
    told = {"answer": answer, "streamed": len(pieces), "city": city, "called": called, "after": after}
    print(json.dumps(told))


asyncio.run(main())
