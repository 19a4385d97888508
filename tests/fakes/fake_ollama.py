#!/usr/bin/env python3
"""A stand-in for Ollama's store of models, no Ollama: it replays what was seen of Ollama 0.32.15 at `/api/tags`,
`/v1/models`, `/api/ps`, `/api/show`, `/api/pull` with its stream, `/api/delete`, `/api/version`, and where a model is
loaded or unloaded.

    fake_ollama.py [--port 0] [--layer-bytes N] [--pieces N] [--delay S] [--fail TEXT]
                   [--version V] [--stub NAME]… [--held NAME] [--copy NAME=OF]… [--embeds NAME]…
                   [--memory N] [--most N] [--load-s S] [--keep-s S] [--on-gpu] [--words N] [--word-s S] [MODEL …]

A pull of the `--held` one stays at the half until its client leaves. A tag like `q4_0` is the model's quantization.
A stub is a model of its cloud, as Ollama 0.32.15 lists it: 196 bytes, and what it is asked is sent to another host.
`--memory` bytes are all that models may take together, `--most` is OLLAMA_MAX_LOADED_MODELS, `--keep-s` its
OLLAMA_KEEP_ALIVE (ollama_runners.py).

`GET /fake/asked` tells what asked for models (path, model, keep_alive), `GET /fake/loads` each load; `POST /fake/drop`
has one unloaded as if Ollama wanted its memory. `GET /fake/left` tells for which models something was, and
`POST /fake/stub` makes a model a stub under its own name.

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
from ollama_runners import Runner, Runners, rfc3339, seconds
from ollama_words import tagged

STUB_BYTES = 196
HELD_S = 0.05
WITHOUT = {"/api/generate": "generate", "/api/chat": "chat"}
"""The ability that a model without text lacks, by path."""


class Store(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, flags: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", flags.port), Handler)
        self.flags = flags
        self.stubs = set(map(tagged, flags.stub))
        self.left: list[str] = []
        self.models: dict[str, int] = dict.fromkeys(map(tagged, flags.stub), STUB_BYTES)
        self.models |= dict.fromkeys(map(tagged, flags.model), 2 * flags.layer_bytes)
        self.copies = {tagged(name): tagged(of) for name, _, of in (pair.partition("=") for pair in flags.copy)}
        self.models |= {name: self.models[of] for name, of in self.copies.items()}
        self.runners = Runners(memory=flags.memory, most=flags.most, load_s=flags.load_s, keep_s=flags.keep_s)
        self.asked: list[dict[str, Any]] = []
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
            self.answer({"models": [self.running(runner) for runner in store.runners.listed()]})
        elif self.path == "/v1/models":
            self.answer(ollama_words.listed(list(store.models)))
        elif self.path == "/fake/left":
            self.answer({"left": store.left})
        elif self.path == "/fake/asked":
            self.answer({"asked": store.asked})
        elif self.path == "/fake/loads":
            self.answer({"loads": store.runners.loads})
        elif self.path == "/fake/pulls":
            self.answer({"pulls": store.pulls, "listed": store.listed})
        else:
            self.answer({"error": "not found"}, 404)

    def running(self, runner: Runner) -> dict[str, Any]:
        row: dict[str, Any] = ollama_words.running(self.row(runner.name))
        vram = runner.size if self.server.flags.on_gpu else 0
        return row | {"size": runner.size, "size_vram": vram, "expires_at": rfc3339(runner.expires_at)}

    def row(self, name: str) -> dict[str, Any]:
        store = self.server
        size, digest = store.models[name], hashlib.sha256(store.copies.get(name, name).encode()).hexdigest()
        of_tag = name.partition(":")[2].upper()
        quantization = of_tag if of_tag.startswith("Q") else "Q4_K_M"
        details: dict[str, Any] = {"parameter_size": "3.2B", "quantization_level": quantization}
        if store.flags.context:
            details["context_length"] = store.flags.context
        if name not in store.stubs:
            able = ["embedding"] if name in map(tagged, store.flags.embeds) else ["completion", "tools"]
            row: dict[str, Any] = ollama_words.tag(name, size, digest, able, **details)
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
        elif self.path == "/fake/drop":
            self.server.runners.expire(tagged(body["model"]))
            self.answer({})
        elif self.path == "/api/pull":
            self.pull(tagged(body["model"]))
        elif "model" not in body:
            self.answer({"error": "not found"}, 404)
        elif tagged(body["model"]) not in self.server.models:
            self.answer({"error": ollama_words.unknown(self.path, body["model"])}, 404)
        elif self.path in WITHOUT and tagged(body["model"]) in map(tagged, self.server.flags.embeds):
            if self.path == "/api/generate" and not body.get("prompt") and body.get("keep_alive") == 0:
                self.said(body)
            else:
                self.answer({"error": f'"{body["model"]}" does not support {WITHOUT[self.path]}'}, 400)
        elif said := ollama_words.lacking(body["model"], body, ["completion", "tools"]):
            self.answer({"error": said}, 400)
        elif said := ollama_words.misread(self.path, body):
            self.answer({"error": said}, 500)
        elif self.path in ("/api/generate", "/api/chat", "/api/embed", "/v1/chat/completions"):
            self.said(body)
        elif self.path == "/api/show":
            row = self.row(tagged(body["model"]))
            self.answer({name: row[name] for name in ("details", "capabilities", "modified_at")} | {"model_info": {}})
        else:
            self.answer({"error": "not found"}, 404)

    def said(self, body: dict[str, Any]) -> None:
        """A few words; without a prompt the model is loaded, or unloaded, and no more."""
        store, name, path = self.server, tagged(body["model"]), self.path
        keep_alive = None if path.startswith("/v1") else body.get("keep_alive")
        store.asked.append({"path": path, "model": body["model"], "keep_alive": keep_alive})
        is_empty = not body.get({"/api/generate": "prompt", "/api/embed": "input"}.get(path, "messages"))
        if name in store.stubs:
            store.left.append(name)
            self.tell(body, "load" if is_empty else "length", is_empty=is_empty)
            return
        if is_empty and path != "/api/embed" and keep_alive is not None and seconds(keep_alive, 1.0) == 0:
            store.runners.expire(store.copies.get(name, name))
            self.tell(body, "unload", is_empty=True)
            return
        runner, num_ctx = store.copies.get(name, name), (body.get("options") or {}).get("num_ctx", 0)
        if error := store.runners.begin(runner, store.models[name], keep_alive, num_ctx):
            self.answer({"error": error}, 500)
            return
        try:
            self.tell(body, "load" if is_empty else "length", is_empty=is_empty)
        except OSError:
            self.close_connection = True
        finally:
            store.runners.end(runner)

    def tell(self, body: dict[str, Any], reason: str, *, is_empty: bool) -> None:
        flags, path = self.server.flags, self.path
        at = {"model": body["model"], "created_at": ollama_words.MODIFIED_AT}
        if path == "/api/embed":
            inputs = body.get("input") or []
            vectors = [[0.5, 0.5] for _ in ([inputs] if isinstance(inputs, str) else inputs)]
            self.answer({"model": body["model"], "embeddings": vectors, "prompt_eval_count": len(vectors)})
            return
        words = [] if is_empty else [f"{body['model']} "] * min(flags.words, body.get("max_tokens") or flags.words)
        counts = {} if is_empty else {"prompt_eval_count": 1, "eval_count": len(words)}
        if path.startswith("/v1"):
            self.as_openai(body, words)
            return
        if is_empty or body.get("stream") is False:
            for _ in words:
                time.sleep(flags.word_s)
            self.answer({**at, **self.worded("".join(words)), "done": True, "done_reason": reason, **counts})
            return
        self.lines_begin()
        for word in words:
            time.sleep(flags.word_s)
            self.line({**at, **self.worded(word), "done": False})
        self.line({**at, **self.worded(""), "done": True, "done_reason": reason, **counts})
        self.wfile.write(b"0\r\n\r\n")

    def worded(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self.path == "/api/chat" else {"response": text}

    def as_openai(self, body: dict[str, Any], words: list[str]) -> None:
        """The whole answer; nobody here asks for a stream of it."""
        for _ in words:
            time.sleep(self.server.flags.word_s)
        message = {"role": "assistant", "content": "".join(words)}
        usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        about = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
        self.answer({**about, "system_fingerprint": ollama_words.FINGERPRINT, "choices": [choice], "usage": usage})

    def do_DELETE(self) -> None:
        if self.is_foreign():
            return
        name = tagged(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["model"])
        if name not in self.server.models:
            self.answer({"error": f"model '{name}' not found"}, 404)
            return
        del self.server.models[name]
        self.server.runners.expire(name)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def pull(self, name: str) -> None:
        flags, pull = self.server.flags, {"model": name, "state": "running"}
        self.server.pulls.append(pull)
        self.lines_begin()
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

    def lines_begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

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
    parser.add_argument("--copy", action="append", default=[])
    parser.add_argument("--embeds", action="append", default=[])
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--most", type=int, default=0)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--keep-s", type=float, default=300.0)
    parser.add_argument("--on-gpu", action="store_true")
    parser.add_argument("--words", type=int, default=1)
    parser.add_argument("--context", type=int, default=0)
    parser.add_argument("--word-s", type=float, default=0.0)
    parser.add_argument("model", nargs="*")
    store = Store(parser.parse_args())
    print(json.dumps({"address": f"127.0.0.1:{store.server_port}"}), flush=True)
    store.serve_forever(0.05)


if __name__ == "__main__":
    main()
