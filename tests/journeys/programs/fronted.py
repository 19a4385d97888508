"""An agent behind a reverse proxy: `GET /head` tells the fields it got, `GET /stream` sends a piece at each `GET /go`,
`POST /` tells how many bytes came, a WebSocket echoes. Standard library only.
"""

import asyncio
import base64
import hashlib
import json
import os

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
go = asyncio.Semaphore(0)


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nset-cookie: a=b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
        len(body),
        body,
    )


async def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    _, path, _ = lines[0].split(" ")
    fields = [tuple(line.split(": ", 1)) for line in lines[1:] if line]
    found = {name.lower(): value for name, value in fields}
    if path == "/stream":
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for number in range(3):
            writer.write(b"data: %d\n\n" % number)
            await writer.drain()
            await go.acquire()
    elif path == "/go":
        go.release()
        writer.write(answer(b"gone on"))
    elif "sec-websocket-key" in found:
        proof = base64.b64encode(hashlib.sha1((found["sec-websocket-key"] + GUID).encode()).digest())
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n")
        writer.write(b"sec-websocket-accept: %b\r\n\r\n" % proof)
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    elif "content-length" in found:
        body = await reader.readexactly(int(found["content-length"]))
        writer.write(answer(b"%d" % len(body)))
    else:
        writer.write(answer(json.dumps(found).encode()))
    await writer.drain()
    writer.close()


async def main() -> None:
    server = await asyncio.start_server(called, "127.0.0.1", int(os.environ["HIVE_AGENT_PORT"]))
    print(json.dumps({"ready": True}), flush=True)
    await server.serve_forever()


asyncio.run(main())
