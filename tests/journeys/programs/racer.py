"""An agent for the races: announces when it will send next, sends by its own timer, prints what came of it.

Arguments: unix|tcp, keep|new, period in seconds. Standard library only. Times are CLOCK_MONOTONIC, which all
processes of the host share.
"""

import json
import os
import random
import socket
import sys
import time

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {}\r\nContent-Type: application/json\r\n"


def connect(kind: str) -> socket.socket:
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(os.environ["HIVE_PROXY_SOCKET"])
    else:
        port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def ask(sock: socket.socket, size: int) -> tuple[int, bytes]:
    """(status, whole answer) of one chat with a body of about `size` bytes."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x" * size}]}).encode()
    head = HEAD.format(os.environ["OPENAI_API_KEY"]) + f"Content-Length: {len(body)}\r\n\r\n"
    sock.sendall(head.encode() + body)
    data = b""
    while b"\r\n\r\n" not in data:
        data += receive(sock)
    came, _, rest = data.partition(b"\r\n\r\n")
    length = int(came.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    while len(rest) < length:
        rest += receive(sock)
    return int(came.split(b" ")[1]), rest


def receive(sock: socket.socket) -> bytes:
    data = sock.recv(65536)
    if not data:
        raise ConnectionError("closed")
    return data


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    kind, keep, period_s = sys.argv[1], sys.argv[2] == "keep", float(sys.argv[3])
    chance = random.Random(kind + sys.argv[2])
    sock, number = None, 0
    while True:
        number += 1
        at = time.monotonic() + period_s
        say(announced=number, at=at)
        time.sleep(max(0.0, at - time.monotonic()))
        size = chance.choice((100, 1_000_000))
        begun = time.monotonic()
        try:
            sock = sock or connect(kind)
            status, answer = ask(sock, size)
            error = None if status == 200 else answer.decode("latin-1")[:300]
        except (OSError, ValueError, IndexError) as failure:
            status, error, keep_now = 0, repr(failure), False
        else:
            keep_now = keep
        if not keep_now and sock is not None:
            sock.close()
            sock = None
        say(number=number, begun=begun, ended=time.monotonic(), status=status, error=error, size=size)


if __name__ == "__main__":
    main()
