"""Coming in at the helper's `lease.sock`: this process becomes the holder of a lease that it was granted.

Standard library only. Nothing stays open: what this process becomes next inherits no descriptor of it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from hive.errors import DependencyDown, HiveError, NotPermitted, by_code

ANSWER_S = 30.0
"""A systemd that is busy moves a process late."""
AGAIN_S = 0.1
HELPER_WITHIN_S = 20.0
"""A helper that was killed is started again, and takes the same process in once more."""
LINE_MAX_BYTES = 65536


def enter(path: Path, nonce: str) -> dict[str, Any]:
    """The answer: `id`, `enforced`, `held_by`, and `environment`, which belongs to the holder's.

    Raises what the helper refused with, DependencyDown where none answers.
    """
    until = time.monotonic() + HELPER_WITHIN_S
    while True:
        try:
            return _entered(path, nonce)
        except PermissionError:
            raise NotPermitted(f"this user may not use {path}") from None
        except OSError as error:
            if time.monotonic() > until:
                raise DependencyDown(f"nobody answers at {path}: {error.strerror or error}") from None
        time.sleep(AGAIN_S)


def _entered(path: Path, nonce: str) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(ANSWER_S)
        sock.connect(os.fspath(path))
        first = _line(sock)
        if "challenge" in first:
            said = json.dumps({"nonce": nonce, "challenge": first["challenge"]}).encode() + b"\n"
            sock.sendall(said)
            first = _line(sock)
    if not first.get("ok"):
        raise _refusal(first)
    return first


def _line(sock: socket.socket) -> dict[str, Any]:
    """One line of JSON. Raises ConnectionError where the other end hung up before it was whole."""
    data = b""
    while not data.endswith(b"\n"):
        piece = sock.recv(4096)
        if not piece or len(data) > LINE_MAX_BYTES:
            raise ConnectionResetError("it hung up")
        data += piece
    found = json.loads(data)
    if not isinstance(found, dict):
        raise ConnectionResetError("it said no object")
    return found


def _refusal(told: dict[str, Any]) -> HiveError:
    code = str(told.get("code", ""))
    kind = NotPermitted if code == "other_namespace" else by_code(code)
    error = kind(str(told.get("message", "")), hint=str(told.get("hint", "")))
    error.code = code or error.code
    return error
