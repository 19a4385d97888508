"""The model's stand-in of a density run: `python stub.py PORT_FILE DELAY_S`. Standard library only.

It speaks streamed `chat.completions` as vLLM does. The first call of a turn (its last message is the user's) is
answered with a tool call, the second (the last one is the tool's) with text; each takes DELAY_S. It runs outside the
box and writes its port to PORT_FILE once it listens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

MODEL = "stub"
WORDS = ["The", "hive", "of", "the", "north", "slope", "has", "two", "frames", "of", "honey"]
LISTED = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm"}]}


def event(delta: dict[str, object], *, finish: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage() -> bytes:
    counts = {"prompt_tokens": 50, "completion_tokens": len(WORDS), "total_tokens": 50 + len(WORDS)}
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": MODEL,
        "choices": [],
        "usage": counts,
    }
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def answer(asked: dict[str, object]) -> list[bytes]:
    """The events of the answer to one call."""
    messages = asked.get("messages")
    last = messages[-1].get("role") if isinstance(messages, list) and messages else ""
    if last == "tool" or not asked.get("tools"):
        events = [event({"role": "assistant", "content": ""})]
        events += [event({"content": word + " "}) for word in WORDS] + [event({}, finish="stop")]
    else:
        call = {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "look_up", "arguments": '{"word": "honey"}'},
        }
        events = [event({"role": "assistant", "content": None, "tool_calls": [call]}), event({}, finish="tool_calls")]
    options = asked.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage"):
        events.append(usage())
    return [*events, b"data: [DONE]\n\n"]


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    """One connection, request after request."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *fields = head.split("\r\n")
            named = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
            body = await _body(reader, named)
            _, path, *_ = first.split(" ")
            if path.startswith("/v1/chat/completions"):
                await _stream(writer, answer(json.loads(body)), delay_s)
            else:
                _plain(writer, path)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.LimitOverrunError):
        pass
    finally:
        writer.close()


async def _body(reader: asyncio.StreamReader, named: dict[str, str]) -> bytes:
    if "chunked" not in named.get("transfer-encoding", ""):
        return await reader.readexactly(int(named.get("content-length", "0")))
    pieces = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readline()
    return b"".join(pieces)


async def _stream(writer: asyncio.StreamWriter, events: list[bytes], delay_s: float) -> None:
    """Half of the delay before the first event, the rest before the last ones."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    await asyncio.sleep(delay_s / 2)
    middle = len(events) // 2
    for number, piece in enumerate(events):
        if number == middle:
            await asyncio.sleep(delay_s / 2)
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
    writer.write(b"0\r\n\r\n")


def _plain(writer: asyncio.StreamWriter, path: str) -> None:
    found: object | None = {"/v1/models": LISTED, "/version": {"version": "0.32.0"}, "/health": {}}.get(path)
    body = json.dumps({} if found is None else found).encode()
    status = b"404 Not Found" if found is None else b"200 OK"
    head = b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    writer.write(head + body)


async def main(port_file: Path, delay_s: float) -> None:
    server = await asyncio.start_server(
        lambda reader, writer: serve(reader, writer, delay_s), "127.0.0.1", 0, limit=1 << 22, backlog=1024
    )
    written = port_file.with_suffix(".new")
    written.write_text(str(server.sockets[0].getsockname()[1]))
    os.replace(written, port_file)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2])))
