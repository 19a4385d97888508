#!/usr/bin/env python3
"""vLLM's sleep without a GPU: its routes and answers, and the memory a GPU would have, in a file.

    fake_sleeping_vllm.py serve MODEL --served-model-name NAME --uds PATH [--enable-sleep-mode] [vLLM's other flags]

Routes, statuses and bodies are those of vLLM 0.32.0, seen on a CPU on 2026-11-24 (`/sleep`, `/wake_up`, `/is_sleeping`,
`/collective_rpc`, `/reset_prefix_cache` with VLLM_SERVER_DEV_MODE=1, `engine_sleep_state` in its metrics; asleep
`/health` stays 200 and a completion hangs). What it does to memory is read in its source (cumem.py, gpu_worker.py):
level 1 moves the weights to the host, level 2 drops them, both drop the cache; a wake maps memory again, and only
`reload_weights` fills what level 2 dropped.

Beside PATH: `PATH.held` is `{"gpu": bytes, "host": bytes}` as they are now; `PATH.asked` has a line for each request
that changes something or generates; `PATH.fault` is read at each request and names what goes wrong (see FAULTS).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

MIB = 1 << 20
CONTEXT_BYTES = 8 * MIB
"""Of a GPU, whether it sleeps or not."""
PYTHON_BYTES = 4 * MIB
"""Of the host, awake."""
VERSION = "0.32.0"
FAULTS = ("frees_nothing", "hangs_in_sleep", "dies_in_sleep", "wakes_empty", "wakes_silent", "hangs_in_wake", "refuses")


class Engine:
    """The state of one model. `weights`: the place where they are: gpu, host, gone, or `garbage` (mapped, unfilled)."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self.flags = flags
        self.lock = threading.Lock()
        self.changed = threading.Condition()
        self.model_bytes = sum(file.stat().st_size for file in Path(flags.model).glob("*.safetensors"))
        self.weights, self.has_cache, self.level, self.is_empty = "gpu", True, 0, False
        self.is_scheduling = True
        self.told()

    def fault(self) -> str:
        try:
            return Path(f"{self.flags.uds}.fault").read_text().strip()
        except FileNotFoundError:
            return ""

    def told(self) -> None:
        """Writes what it holds now."""
        gpu = CONTEXT_BYTES
        if not self.is_empty:
            gpu += self.model_bytes if self.weights in ("gpu", "garbage") else 0
            gpu += self.flags.kv_cache_memory_bytes if self.has_cache else 0
        host = PYTHON_BYTES + (self.model_bytes if self.weights == "host" else 0)
        path = Path(f"{self.flags.uds}.held")
        path.with_suffix(".new").write_text(json.dumps({"gpu": gpu, "host": host}))
        path.with_suffix(".new").replace(path)
        with self.changed:
            self.changed.notify_all()

    def sleep(self, level: int) -> None:
        fault = self.fault()
        self.is_scheduling = False
        if fault == "hangs_in_sleep":
            threading.Event().wait()
        if fault == "dies_in_sleep":
            os._exit(1)
        self.level = level
        if level and self.flags.enable_sleep_mode and fault != "frees_nothing":
            if self.weights in ("gpu", "garbage"):
                self.weights = "host" if level == 1 else "gone"
            self.has_cache = False
        self.told()

    def wake(self, tags: list[str]) -> None:
        fault = self.fault()
        if fault == "hangs_in_wake":
            threading.Event().wait()
        self.is_empty = fault == "wakes_empty"
        if not tags or "weights" in tags:
            self.weights = {"host": "gpu", "gone": "garbage"}.get(self.weights, self.weights)
        if not tags or "kv_cache" in tags:
            self.has_cache = True
        if self.weights in ("gpu", "garbage") and self.has_cache:
            self.is_scheduling, self.level = True, 0
        self.told()

    def reload_weights(self) -> None:
        if self.weights == "garbage":
            self.weights = "gpu"
        self.told()

    def token(self) -> str:
        with self.changed:
            self.changed.wait_for(lambda: self.is_scheduling)
        return " eleven" if self.weights == "gpu" else "!"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a unix socket's peer has no address to tell."""

    def do_GET(self) -> None:
        name = self.engine.flags.served_model_name
        match urlsplit(self.path).path:
            case "/health":
                self._answer(200, b"", "text/plain")
            case "/version":
                self._json({"version": VERSION})
            case "/v1/models":
                model = {"id": name, "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096}
                self._json({"object": "list", "data": [model]})
            case "/metrics":
                state = ("awake", "weights_offloaded", "discard_all")[self.engine.level]
                labels = f'engine="0",model_name="{name}"'
                lines = [
                    f'vllm:engine_sleep_state{{{labels},sleep_state="{one}"}} {float(one == state)}'
                    for one in ("awake", "weights_offloaded", "discard_all")
                ]
                self._answer(200, "\n".join(lines).encode() + b"\n", "text/plain")
            case "/is_sleeping" if _is_dev():
                self._json({"is_sleeping": not self.engine.is_scheduling})
            case _:
                self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        url = urlsplit(self.path)
        with Path(f"{self.engine.flags.uds}.asked").open("a") as asked:
            asked.write(f"{self.path} {body.decode()}\n")
        if url.path == "/v1/completions":
            if self.engine.fault() == "wakes_silent" and any("/wake_up" in line for line in self._asked()):
                self._json({"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500)
                return
            choice = {"index": 0, "text": self.engine.token(), "finish_reason": "length"}
            usage = {"prompt_tokens": 2, "total_tokens": 3, "completion_tokens": 1}
            self._json({"object": "text_completion", "choices": [choice], "usage": usage})
        elif not _is_dev():
            self._json({"detail": "Not Found"}, 404)
        else:
            with self.engine.lock:
                self._develop(url.path, parse_qs(url.query), json.loads(body or b"{}"))

    def _develop(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> None:
        match path:
            case "/sleep":
                level = int(query.get("level", ["1"])[0])
                if self.engine.fault() == "refuses" or level > 2:
                    self._json({"error": {"message": "1 validation error", "type": "Bad Request", "code": 400}}, 400)
                    return
                self.engine.sleep(level)
                self._json({"status": "sleeping", "level": level})
            case "/wake_up":
                tags = query.get("tags", [])
                self.engine.wake(tags)
                self._json({"status": "awake" if self.engine.is_scheduling else "sleeping", "tags": tags or None})
            case "/collective_rpc" if body.get("method") == "reload_weights":
                self.engine.reload_weights()
                self._json({"results": [None]})
            case "/reset_prefix_cache":
                self._json({"success": True})
            case _:
                self._json({"detail": "Not Found"}, 404)

    def _asked(self) -> list[str]:
        return Path(f"{self.engine.flags.uds}.asked").read_text().splitlines()

    def _json(self, answer: dict[str, Any], status: int = 200) -> None:
        self._answer(status, json.dumps(answer).encode(), "application/json")

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingMixIn, UnixStreamServer):
    """A thread for each connection: one that hangs holds up no other."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves is no fault."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def _is_dev() -> bool:
    return os.environ.get("VLLM_SERVER_DEV_MODE") == "1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--served-model-name")
    parser.add_argument("--uds")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=0)
    flags, _ = parser.parse_known_args()
    Handler.engine = Engine(flags)
    Path(flags.uds).unlink(missing_ok=True)
    with Server(flags.uds, Handler) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
