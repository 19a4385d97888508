#!/usr/bin/env python3
"""hive-ready SOCKET TARGET: exit code 0 if the HTTP server at this unix socket answers 200. For health checks."""

import socket
import sys

WITHIN_S = 5


def main(path: str, target: str) -> int:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WITHIN_S)
        try:
            sock.connect(path)
            sock.sendall(f"GET {target} HTTP/1.1\r\nHost: hive\r\nConnection: close\r\n\r\n".encode())
            status = sock.recv(4096).split(b"\r\n")[0].decode("ascii", "replace")
        except OSError as error:
            status = f"no answer: {error}"
    sys.stdout.write(f"{status}\n")
    return 0 if " 200" in status else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
