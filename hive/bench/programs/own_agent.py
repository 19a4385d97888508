"""The control: an agent whose memory is its own random data, 40 MiB that no other one has and nothing compresses.

Standard library only. A turn reads and writes a fifth of it, as others do, and asks the model twice.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.parse
from typing import Tuple

import serving

PIECE_BYTES = 65_536
MIB = int(os.environ.get("BENCH_OWN_MIB", "40"))
heap = [bytearray(os.urandom(PIECE_BYTES)) for _ in range(MIB * 16)]
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
begun = [0]


def touch() -> None:
    """The same fifth is in use for a while, as a working set is."""
    for piece in heap[: len(heap) // 5]:
        piece[begun[0] % PIECE_BYTES :: 4096] = os.urandom(len(range(begun[0] % PIECE_BYTES, PIECE_BYTES, 4096)))
    begun[0] += 1


def ask(messages: serving.Messages) -> Tuple[str, bool]:
    """(text, whether it called the tool) of one streamed answer."""
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=300)
    body = {
        "model": os.environ.get("HIVE_MODEL") or "stub",
        "messages": messages,
        "stream": True,
        "tools": [serving.TOOL],
    }
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "none"),
    }
    connection.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {response.read(300)!r}")
    text, called = [], False
    for line in response:
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            for choice in json.loads(line[5:])["choices"]:
                text.append(choice["delta"].get("content") or "")
                called = called or bool(choice["delta"].get("tool_calls"))
    connection.close()
    return "".join(text), called


def turn(messages: serving.Messages) -> str:
    touch()
    _, called = ask(messages)
    if not called:
        raise RuntimeError("the model called no tool")
    call = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"word": "honey"}'}}
    messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [call]}]
    return ask([*messages, {"role": "tool", "tool_call_id": "call_1", "content": serving.look_up("honey")}])[0]


if __name__ == "__main__":
    serving.serve(turn)
