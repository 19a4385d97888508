"""An agent with LangGraph and langchain-openai: `create_react_agent` with one tool, streamed."""

from __future__ import annotations

import os
import warnings
from typing import Any

warnings.simplefilter("ignore")  # its deprecation of itself

import openai
import serving
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

look_up = tool(serving.look_up.__name__, description="Looks a word up in the books.")(
    lambda word: serving.look_up(word)
)


http, http_async = openai.DefaultHttpxClient(), openai.DefaultAsyncHttpxClient()
"""With their TLS contexts, which agents of one ready state share; they have no connection yet."""
graph: Any = None


def connect(stand_in: Any) -> None:
    """Makes the model and the graph, with the environment of now."""
    global graph
    model = ChatOpenAI(
        model=os.environ.get("HIVE_MODEL") or "stub",
        base_url=os.environ.get("OPENAI_BASE_URL", "http://stub.invalid/v1"),
        api_key=os.environ.get("OPENAI_API_KEY", "none"),
        streaming=True,
        timeout=300,
        http_client=stand_in or http,
        http_async_client=http_async,
    )
    graph = create_react_agent(model, [look_up])


def turn(messages: serving.Messages) -> str:
    last: Any = None
    for state in graph.stream({"messages": messages}, stream_mode="values"):
        last = state["messages"][-1]
    return str(last.content)


if __name__ == "__main__":
    serving.serve(turn, connect, openai)
