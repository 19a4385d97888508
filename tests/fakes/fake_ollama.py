#!/usr/bin/env python3
"""A stand-in for Ollama's store of models, no Ollama: it replays what was seen of Ollama 0.32.15 at `/api/tags`,
`/v1/models`, `/api/ps`, `/api/show`, `/api/pull` with its stream, `/api/delete`, `/api/version`, and where a model is
loaded or unloaded.

    fake_ollama.py [--port 0] [--layer-bytes N] [--pieces N] [--delay S] [--fail TEXT]
                   [--version V] [--stub NAME]… [--held NAME] [MODEL …]

A pull of the `--held` one stays at the half until its client leaves. A tag like `q4_0` is the model's quantization.
A stub is a model of its cloud, as Ollama 0.32.15 lists it: 196 bytes, and what it is asked is sent to another host.
`GET /fake/left` tells for which models something was, and `POST /fake/stub` makes a model a stub under its own name.

Prints `{"address": …}` when it listens. `GET /fake/pulls` tells what became of each pull: a pull whose client leaves is
`gone`, and leaves no model behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ollama_words
from ollama_words import tagged

STUB_BYTES = 196
HELD_S = 0.05


class Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", flags.port), Handler)
        self.flags = flags
        self.stubs = set(map(tagged, flags.stub))
        self.left: list[str] = []
        self.models: dict[str, int] = dict.fromkeys(map(tagged, flags.stub), STUB_BYTES)
        self.models |= dict.fromkeys(map(tagged, flags.model), 2 * flags.layer_bytes)
        self.loaded: set[str] = set()
        self.pulls: list[dict[str, Any]] = []
        self.listed = 0


class Handler(BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"

    def is_foreign(self) -> bool:
        """An Ollama on a loopback address answers to no name but its own."""
        if ollama_words.is_for_itself(self.headers["Host"] or ""):
            return False
        self.close_connection = True
        self.answer("", 403)
        return True

    def do_GET(self) -> None:
        store = self.server
        if self.is_foreign():
            return
        if self.path == "/":
            self.answer("Ollama is running")
        elif self.path == "/api/version":
            self.answer({"version": store.flags.version})
        elif self.path == "/api/tags":
            store.listed += 1
            self.answer({"models": [self.row(name) for name in store.models]})
        elif self.path == "/api/ps":
            loaded = [name for name in store.models if name in store.loaded]
            self.answer({"models": [ollama_words.running(self.row(name)) for name in loaded]})
        elif self.path == "/v1/models":
            self.answer(ollama_words.listed(list(store.models)))
        elif self.path == "/fake/left":
            self.answer({"left": store.left})
        elif self.path == "/fake/pulls":
            self.answer({"pulls": store.pulls, "listed": store.listed})
        else:
            self.answer({"error": "not found"}, 404)

    def row(self, name: str) -> dict[str, Any]:
        size, digest = self.server.models[name], hashlib.sha256(name.encode()).hexdigest()
        of_tag = name.partition(":")[2].upper()
        quantization = of_tag if of_tag.startswith("Q") else "Q4_K_M"
        details: dict[str, Any] = {"parameter_size": "3.2B", "quantization_level": quantization}
        if name not in self.server.stubs:
            row: dict[str, Any] = ollama_words.tag(name, size, digest, ["completion", "tools"], **details)
            return row
        details |= {"format": "", "families": None, "quantization_level": "MXFP4"}
        row = ollama_words.tag(name, size, digest[::-1], ["completion", "tools"], **details)
        return row | {"remote_model": "gpt-oss:120b", "remote_host": "https://cloud.invalid:443"}

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.is_foreign():
            return
        if self.path == "/fake/stub":
            name = tagged(body["model"])
            self.server.stubs.add(name)
            self.server.models[name] = STUB_BYTES
            self.answer({})
        elif self.path == "/api/pull":
            self.pull(tagged(body["model"]))
        elif "model" not in body:
            self.answer({"error": "not found"}, 404)
        elif tagged(body["model"]) not in self.server.models:
            self.answer({"error": ollama_words.unknown(self.path, body["model"])}, 404)
        elif said := ollama_words.lacking(body["model"], body, ["completion", "tools"]):
            self.answer({"error": said}, 400)
        elif said := ollama_words.misread(self.path, body):
            self.answer({"error": said}, 500)
        elif self.path in ("/api/generate", "/api/chat"):
            self.answer(self.said(body))
        elif self.path == "/api/show":
            row = self.row(tagged(body["model"]))
            self.answer({name: row[name] for name in ("details", "capabilities", "modified_at")} | {"model_info": {}})
        else:
            self.answer({"error": "not found"}, 404)

    def said(self, body: dict[str, Any]) -> dict[str, Any]:
        """One word; without a prompt the model is loaded, or unloaded, and no more."""
        store, name, is_chat = self.server, tagged(body["model"]), self.path == "/api/chat"
        is_empty = not body.get("messages" if is_chat else "prompt")
        is_unload = is_empty and body.get("keep_alive") == 0
        if name in store.stubs:
            store.left.append(name)
        elif is_unload:
            store.loaded.discard(name)
        else:
            store.loaded.add(name)
        word = "" if is_empty else "x"
        text = {"message": {"role": "assistant", "content": word}} if is_chat else {"response": word}
        reason = ("unload" if is_unload else "load") if is_empty else "length"
        counts = {} if is_empty else {"prompt_eval_count": 1, "eval_count": 1}
        at = {"model": body["model"], "created_at": ollama_words.MODIFIED_AT}
        return {**at, **text, "done": True, "done_reason": reason, **counts}

    def do_DELETE(self) -> None:
        if self.is_foreign():
            return
        name = tagged(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"])
        if name not in self.server.models:
            self.answer({"error": f"model '{name}' not found"}, 404)
            return
        del self.server.models[name]
        self.server.loaded.discard(name)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def pull(self, name: str) -> None:
        flags, pull = self.server.flags, {"model": name, "state": "running"}
        self.server.pulls.append(pull)
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self.line({"status": "pulling manifest"})
            if flags.fail:
                self.line({"error": flags.fail})
                pull["state"] = "failed"
            elif "nonexistent" in name:
                self.line({"error": "pull model manifest: file does not exist"})
                pull["state"] = "failed"
            else:
                for layer in ("model", "template"):
                    digest = hashlib.sha256(f"{name} {layer}".encode()).hexdigest()
                    self.layer(digest, held=name == tagged(flags.held))
                for status in ("verifying sha256 digest", "writing manifest", "success"):
                    self.line({"status": status})
                self.server.models[name] = 2 * flags.layer_bytes
                pull["state"] = "done"
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            pull["state"] = "gone"
            self.close_connection = True

    def layer(self, digest: str, *, held: bool) -> None:
        flags = self.server.flags
        line = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}", "total": flags.layer_bytes}
        self.line(line)
        for piece in range(1, flags.pieces + 1):
            time.sleep(flags.delay)
            while held and piece > flags.pieces // 2:
                self.line({**line, "completed": flags.layer_bytes * (piece - 1) // flags.pieces})
                time.sleep(HELD_S)
            self.line({**line, "completed": flags.layer_bytes * piece // flags.pieces})

    def line(self, found: dict[str, Any]) -> None:
        data = json.dumps(found).encode() + b"\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def answer(self, found: dict[str, Any] | str, status: int = 200) -> None:
        data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--layer-bytes", type=int, default=1000)
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--fail", default="")
    parser.add_argument("--version", default="0.13.3")
    parser.add_argument("--held", default="")
    parser.add_argument("--stub", action="append", default=[])
    parser.add_argument("model", nargs="*")
    store = Store(parser.parse_args())
    print(json.dumps({"address": f"127.0.0.1:{store.server_port}"}), flush=True)
    store.serve_forever(0.05)


if __name__ == "__main__":
    main()
