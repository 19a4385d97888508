"""The part that all agents of a density run have in common: a server socket, a history, the two steps of a turn.

Standard library of Python 3.9 or newer. `POST /turn` is one turn and answers `{"turn", "answer"}`; `GET /` answers at
once. An agent gives `serve` a function that takes the history and returns the answer's text, and one that makes its
client. Before `hive.ready()`, in a template that stops there, it takes turns against a stand-in in the process.
"""

from __future__ import annotations

import gc
import http.server
import json
import os
import random
import string
from typing import Any, Callable, Dict, List

try:
    from hive import ready
except ImportError:  # no template, and no Hive among its packages

    def ready() -> None:
        pass


Messages = List[Dict[str, Any]]

HISTORY_BYTES = 200_000
WARM_TURNS = int(os.environ.get("BENCH_WARM_TURNS", "0"))
"""Turns before `hive.ready()`; set in a template alone."""
INSTRUCTIONS = "You keep the books of an apiary. Look words up before you answer."
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up in the books.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def look_up(word: str) -> str:
    """Looks a word up in the books."""
    return f"frames of {word}: 2"


def history() -> Messages:
    """A conversation of 200 KB, another one in each agent."""
    letters = string.ascii_lowercase + "     "
    messages: Messages = []
    size = 0
    while size < HISTORY_BYTES:
        text = "".join(random.choices(letters, k=2000))
        messages.append({"role": "user" if len(messages) % 2 == 0 else "assistant", "content": text})
        size += len(text)
    return messages


def recent(messages: Messages) -> Messages:
    """Chooses what of the history is sent with a turn: a summary of all of it, and its last words."""
    words = sum(len(message["content"].split()) for message in messages)
    system = {"role": "system", "content": f"{INSTRUCTIONS} ({words} words so far)"}
    return [system, *messages[-3:]]


def completion(asked: Dict[str, Any]) -> bytes:
    """The stand-in's answer to a request for a chat completion, streamed: first the tool is called, then it answers."""
    has_result = any(message.get("role") == "tool" for message in asked.get("messages", ()))
    asking = {"name": "look_up", "arguments": '{"word": "honey"}'}
    call = {"index": 0, "id": "c", "type": "function", "function": asking}
    deltas: List[Dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": "frames "}, {"content": "2"}] if has_result else [{"tool_calls": [call]}]
    choices: List[Dict[str, Any]] = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop" if has_result else "tool_calls"})
    head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "stub"}
    lines = ["data: " + json.dumps({**head, "choices": [choice]}) + "\n\n" for choice in choices]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


def stand_in(package: Any) -> Any:
    """An HTTP client for `openai` that answers by itself: a template has no network. `package`: openai."""
    http: Any = getattr(package._base_client, "httpx2", None) or package._base_client.httpx

    def answer(request: Any) -> Any:
        headers = {"content-type": "text/event-stream"}
        return http.Response(200, headers=headers, content=completion(json.loads(request.content)))

    return http.Client(transport=http.MockTransport(answer))


def warm_up(turn: Callable[[Messages], str], connect: Callable[[Any], None], package: Any) -> None:
    """Takes turns against the stand-in, with a history that is dropped again: then packages have done what they do
    at their first uses."""
    with stand_in(package) as http:
        connect(http)
        messages = history()
        for _ in range(WARM_TURNS):
            turn(recent(messages))


def serve(turn: Callable[[Messages], str], connect: Callable[[Any], None] | None = None, package: Any = None) -> None:
    """Serves turns at HIVE_AGENT_PORT until the end; one at a time, as an agent does.

    `connect` makes its client, with a stand-in's HTTP client or, by None, its own. `package`: openai.
    """
    if connect is not None and WARM_TURNS:
        warm_up(turn, connect, package)
    ready()
    if connect is not None:
        connect(None)
    told: Dict[str, Any] = {"turn": 0, "messages": history()}

    class TurnHandler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"turn": told["turn"]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path == "/collect":
                gc.collect()
                self._answer({"turn": told["turn"]})
                return
            told["turn"] += 1
            question = {"role": "user", "content": f"Turn {told['turn']}: how much honey is there?"}
            messages = told["messages"] = [*told["messages"][2:], question]
            text = turn(recent(messages))
            messages.append({"role": "assistant", "content": text})
            self._answer({"turn": told["turn"], "answer": text})

        def _answer(self, found: Dict[str, Any]) -> None:
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, *words: object) -> None:
            pass

    class TurnServer(http.server.HTTPServer):
        request_queue_size = 64
        allow_reuse_address = True

    TurnServer(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), TurnHandler).serve_forever()
