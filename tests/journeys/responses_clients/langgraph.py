"""A LangGraph agent on one name of a task: it plans until its first model answers, and tells each answer's headers."""

import json
import os
import time
from typing import TypedDict

from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

FIRST = os.environ["FIRST_MODEL"]
WITHIN_S = 120.0


class Plan(TypedDict):
    answers: list[tuple[str, str, str]]
    since: float


model = ChatOpenAI(
    model=os.environ["MODEL"],
    base_url=os.environ["BASE_URL"],
    api_key=os.environ["TOKEN"],
    max_tokens=8,
    max_retries=0,
    include_response_headers=True,
)


def plan(state: Plan) -> Plan:
    answer = model.invoke("Make a plan.")
    assert isinstance(answer, AIMessage)
    headers = answer.response_metadata["headers"]
    told = (headers["x-hive-model"], headers["x-hive-rung"], headers["x-hive-why"])
    time.sleep(0.2)
    return {"answers": [*state["answers"], told], "since": state["since"]}


def again(state: Plan) -> str:
    is_over = state["answers"][-1][0] == FIRST or time.monotonic() > state["since"] + WITHIN_S
    return END if is_over else "plan"


graph = StateGraph(Plan)
graph.add_node("plan", plan)
graph.add_edge(START, "plan")
graph.add_conditional_edges("plan", again)
ended = graph.compile().invoke({"answers": [], "since": time.monotonic()}, {"recursion_limit": 1000})
print(json.dumps({"answers": ended["answers"]}))
