"""A sample agent: it listens for callers, asks a model through Hive, and checks its memory on every turn.

    HIVE_AGENT_PORT=9000 HIVE_DIALECT=ollama OLLAMA_HOST=http://… python3 sample_agent.py scribe

`POST /turn {"say": text}` is one turn: it asks the model and answers `{"turn", "state_ok", "state", "answer",
"tokens_in", "tokens_out", "model"}`; `GET /` answers the state. `POST /inbox {"id", "text"}`, as `hive agent send`
posts it, is accepted at once; the turn follows, and its answer goes to the log. What it knows lives only in this
process, so a wrong `state_ok` after a sleep means that the sleep did harm. Standard library of Python 3.9 or newer, on
purpose.
"""

from __future__ import annotations

import gc
import hashlib
import http.client
import importlib
import json
import os
import sys
import threading
import urllib.parse
from collections import deque
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL_TIMEOUT_S = 330.0  # longer than Hive's own limit to the first byte
BODY_MAX_BYTES = 1024 * 1024
TURNS_KEPT = 200
DEMO_MODEL = "hive-demo"
OFFERED = "there are GET /, POST /turn and POST /inbox"


class ModelError(Exception):
    """The model did not give a whole answer; the text says why."""


class ModelClient:
    """The model behind Hive, over one kept connection, in the dialect that `HIVE_DIALECT` names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.speaks_ollama = environment.get("HIVE_DIALECT", "ollama") == "ollama"
        default = "http://127.0.0.1:11434" if self.speaks_ollama else "http://127.0.0.1:11434/v1"
        url = urllib.parse.urlsplit(
            environment.get("OLLAMA_HOST" if self.speaks_ollama else "OPENAI_BASE_URL", default)
        )
        self._host, self._port, self._prefix = url.hostname or "127.0.0.1", url.port or 80, url.path.rstrip("/")
        self._key = "" if self.speaks_ollama else environment.get("OPENAI_API_KEY", "")
        self._name = environment.get("HIVE_MODEL", "")
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, prompt: str) -> dict[str, Any]:
        """The whole streamed answer: `{"answer", "tokens_in", "tokens_out", "model"}`, counts None where not told.

        Raises `ModelError` where it is refused, cut or says an error.
        """
        name = self._name or self._first_of_list()
        try:
            if self.speaks_ollama:
                return self._chat_ollama(name, prompt)
            return self._chat_openai(name, prompt)
        except (OSError, http.client.HTTPException, ValueError, LookupError, AttributeError, TypeError) as error:
            self._hang_up()
            raise ModelError(f"{type(error).__name__}: {error}") from error
        except ModelError:
            self._hang_up()
            raise

    def _first_of_list(self) -> str:
        path, key, name = ("/api/tags", "models", "name") if self.speaks_ollama else ("/models", "data", "id")
        try:
            return str(json.loads(self._request("GET", path, None).read())[key][0][name])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            self._hang_up()
            raise ModelError(f"no list of models: {error}") from error

    def _chat_ollama(self, name: str, prompt: str) -> dict[str, Any]:
        question = {"model": name, "messages": [{"role": "user", "content": prompt}], "stream": True}
        words: list[str] = []
        response = self._request("POST", "/api/chat", question)
        for line in response:
            event = json.loads(line)
            if "error" in event:
                raise ModelError(str(event["error"]))
            words.append(event["message"].get("content") or "")
            if event.get("done"):
                response.read()  # its end, or the connection could not be kept
                found = {"tokens_in": event.get("prompt_eval_count"), "tokens_out": event.get("eval_count")}
                return {"answer": "".join(words), "model": event.get("model"), **found}
        raise ModelError("the answer ended without its end")

    def _chat_openai(self, name: str, prompt: str) -> dict[str, Any]:
        question = {"model": name, "messages": [{"role": "user", "content": prompt}], "stream": True}
        question["stream_options"] = {"include_usage": True}
        words: list[str] = []
        found: dict[str, Any] = {"tokens_in": None, "tokens_out": None, "model": None}
        for event in _events(self._request("POST", "/chat/completions", question)):
            if "error" in event:
                raise ModelError(str(event["error"]))
            found["model"] = event.get("model", found["model"])
            for choice in event.get("choices", ()):
                words.append(choice["delta"].get("content") or "")
            if usage := event.get("usage"):
                found["tokens_in"], found["tokens_out"] = usage.get("prompt_tokens"), usage.get("completion_tokens")
        return {"answer": "".join(words), **found}

    def _request(self, method: str, path: str, question: Any) -> http.client.HTTPResponse:
        """The response to one request; a kept connection that turns out to be dead is opened once again."""
        body = None if question is None else json.dumps(question).encode()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        kept = self._connection is not None
        try:
            response = self._send(method, self._prefix + path, body, headers)
        except (http.client.RemoteDisconnected, ConnectionError):
            self._hang_up()
            if not kept:
                raise
            response = self._send(method, self._prefix + path, body, headers)
        if response.status != 200:
            raise ModelError(f"status {response.status}: {response.read(2000).decode('utf-8', 'replace')}")
        return response

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=MODEL_TIMEOUT_S)
        self._connection.request(method, path, body, headers)
        return self._connection.getresponse()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _events(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The data of server-sent events up to `[DONE]`; the rest is read so that the connection can be kept."""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                response.read()
                return
            yield json.loads(data)
    raise ModelError("the answer ended without [DONE]")


class ConversationMemory:
    """The words said, kept twice: as texts, and as a running SHA-256 that must fit them at any time."""

    def __init__(self) -> None:
        self.turns = 0
        self._running = hashlib.sha256()
        self._forgotten = hashlib.sha256()
        self._forgotten_turns = 0
        self._texts: list[str] = []

    @property
    def state(self) -> str:
        return self._running.hexdigest()

    def keep(self, said: str, answer: str) -> None:
        text = json.dumps([said, answer])
        self.turns += 1
        self._running.update(text.encode())
        self._texts.append(text)
        if len(self._texts) > TURNS_KEPT:
            self._forgotten.update(self._texts.pop(0).encode())
            self._forgotten_turns += 1

    def is_whole(self) -> bool:
        """Whether texts, count and running hash still agree."""
        again = self._forgotten.copy()
        for text in self._texts:
            again.update(text.encode())
        return again.hexdigest() == self.state and self._forgotten_turns + len(self._texts) == self.turns


class SampleAgent:
    """One character with its memory and its model; turns are taken one at a time."""

    def __init__(self, character: Any, environment: Mapping[str, str]) -> None:
        self.character = character
        self._model = ModelClient(environment)
        self._memory = ConversationMemory()
        self._one_at_a_time = threading.Lock()
        self._in_memory = threading.Lock()
        self._messages: deque[str] = deque(maxlen=TURNS_KEPT)

    def is_new(self, message: str) -> bool:
        """Whether the message of this id was not seen before: Hive brings one again where it does not know."""
        with self._in_memory:
            if message and message in self._messages:
                return False
            self._messages.append(message)
            return True

    def turn(self, say: str) -> dict[str, Any]:
        """Asks the model about `say` and remembers; raises `ModelError` and remembers nothing where that fails."""
        with self._one_at_a_time:
            was_whole = self.state()["state_ok"]
            prompt = self.character.prompt(say)
            found = self._model.ask(prompt)
            with self._in_memory:
                self._memory.keep(say, found["answer"])
                self.character.learn(say)
            now = self.state()
            whole = was_whole and now["state_ok"] and _answers(prompt, found)
            return {"turn": now["turn"], "state_ok": whole, "state": now["state"], **found}

    def state(self) -> dict[str, Any]:
        """The state of the agent, and the soundness of its memory; answered while a turn waits for the model, too."""
        with self._in_memory:
            return {
                "name": self.character.name,
                "turn": self._memory.turns,
                "state_ok": self._memory.is_whole() and self.character.spot_check(self._memory.turns),
                "state": self._memory.state,
                "objects": self.character.size(),
            }


def _answers(prompt: str, found: dict[str, Any]) -> bool:
    """Whether this answer belongs to this prompt: the demo backend puts a mark of the prompt into its text."""
    return found["model"] != DEMO_MODEL or hashlib.sha256(prompt.encode()).hexdigest()[:8] in found["answer"]


class Callers(BaseHTTPRequestHandler):
    """HTTP for the agent's callers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes, the second would wait 40 ms for an ACK
    agent: SampleAgent

    def do_GET(self) -> None:
        if urllib.parse.urlsplit(self.path).path == "/":
            self._answer(200, self.agent.state())
        else:
            self._answer(404, {"error": OFFERED})

    def do_POST(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        field = {"/turn": "say", "/inbox": "text"}.get(path)
        said, problem = self._said(field or "say")
        if problem:
            self._answer(400, {"error": problem})
        elif field is None:
            self._answer(404, {"error": OFFERED})
        elif path == "/inbox":
            is_new = self.agent.is_new(self.headers.get("Idempotency-Key", ""))
            self._answer(202, {"accepted": is_new})
            if is_new:
                self._turn_for_the_log(said)
        else:
            try:
                self._answer(200, self.agent.turn(said))
            except ModelError as error:
                self._answer(502, {"error": f"the model did not answer: {error}"})

    def _turn_for_the_log(self, said: str) -> None:
        try:
            print(json.dumps({"message": said[:200], "answer": self.agent.turn(said)["answer"]}), flush=True)
        except ModelError as error:
            print(json.dumps({"message": said[:200], "error": f"the model did not answer: {error}"}), flush=True)

    def _said(self, field: str) -> tuple[str, str]:
        """The caller's words, or the fault in them."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > BODY_MAX_BYTES:
            self.close_connection = True  # where the body ends is not known
            return "", f"a Content-Length up to {BODY_MAX_BYTES} is needed"
        try:
            said = json.loads(self.rfile.read(int(length)))[field]
        except (ValueError, LookupError, TypeError):
            return "", f'the body must be {{"{field}": text}}'
        return (said, "") if isinstance(said, str) else ("", f"`{field}` must be a text")

    def _answer(self, status: int, found: dict[str, Any]) -> None:
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: a line per request would fill the agent's log."""


class CallerListener(ThreadingHTTPServer):
    """The listener for callers; one that leaves in the middle is no fault of the agent."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    name = sys.argv[1]
    character = getattr(importlib.import_module(name), name.capitalize())()
    # The big heap never becomes garbage: without this each full collection would walk all of it.
    gc.collect()
    gc.freeze()
    Callers.agent = SampleAgent(character, os.environ)
    listener = CallerListener(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), Callers)
    print(json.dumps({"ready": name, "port": listener.server_port, "objects": character.size()}), flush=True)
    # Only shutdown() polls, and nobody calls it: without a long interval an idle agent would wake twice a second.
    listener.serve_forever(poll_interval=3600)


if __name__ == "__main__":
    main()
