"""A whole Hive whose pool is a real GPU: large random models on real llama-servers with CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil

from tests import llama
from tests.gpu.card import MIB, SERVER, Card
from tests.journeys.stack import Stack, stack, until

MAKE = Path(__file__).parents[1] / "tools" / "make_large_gguf.py"
WITHIN_S = 60.0


class Large(NamedTuple):
    """A model: what make_large_gguf.py is asked for, and the context it is served with."""

    shape: str
    type: str
    seed: int
    context: int


MODELS = {
    "alpha": Large("7b", "q4_0", 1, 8192),
    "beta": Large("7b", "q8_0", 2, 8192),
    "gamma": Large("1b", "f16", 3, 16384),
    "delta": Large("1b", "q8_0", 4, 65536),
    "omega": Large("7b", "q4_0", 5, 8192),
}
TINY = "tiny"
WORDS = "One two three four five six seven eight nine ten eleven twelve. The quick brown fox jumps over the lazy dog."


def make_models(folder: Path) -> dict[str, Path]:
    """All models in this directory; what is there already is taken."""
    folder.chmod(0o755)
    made = {name: folder / f"{name}.gguf" for name in (*MODELS, TINY)}
    running = []
    for name, path in made.items():
        if path.exists():
            continue
        if name == TINY:
            command = [sys.executable, str(llama.MAKE_MODEL), str(path), "--seed", "9"]
        else:
            model = MODELS[name]
            command = [sys.executable, str(MAKE), "model", str(path), "--shape", model.shape, "--type", model.type]
            command += ["--seed", str(model.seed)]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    assert not any(process.wait() for process in running)
    return made


def config(models: dict[str, Path], *, pool: str = "", more: str = "") -> str:
    """hive.conf with these models on the GPU."""
    text = f"[inference]\nllama_program = {os.environ[SERVER]}\n[pool]\nforeign_margin_percent = 0\n"
    text += f"patience_normal_s = 1\naudience_s = 1\n{pool}\n"
    for name, path in models.items():
        context = MODELS[name].context if name in MODELS else 4096
        text += f"[model {name}]\nfile = {path}\ncontext = {context}\nparallel = 4\n"
    return text + more


class Reached(NamedTuple):
    """An answer that was streamed: its status, seconds to the first token and to the end, the tokens of prompt and
    answer; `text` of an answer that is none."""

    status: int
    first_s: float
    all_s: float
    prompt: int
    tokens: int
    text: str
    is_whole: bool


class Asker:
    """Asks models as an agent, or a server at its own socket."""

    def __init__(self, url: str, headers: dict[str, str], uds: str | None = None) -> None:
        self._url = url
        self.client = httpx.Client(
            headers=headers, timeout=180, trust_env=False, transport=httpx.HTTPTransport(uds=uds) if uds else None
        )

    def ask(self, model: str, prompt: str = "Hello", tokens: int = 8) -> Reached:
        """One streamed answer of so many tokens."""
        body = {"model": model, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": prompt}], "stream_options": {"include_usage": True}}
        began, first, usage, is_whole = time.perf_counter(), 0.0, {"prompt_tokens": 0, "completion_tokens": 0}, False
        with self.client.stream("POST", f"{self._url}/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                answer.read()
                return Reached(answer.status_code, 0, time.perf_counter() - began, 0, 0, answer.text, False)
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if '"error"' in line:
                        return Reached(200, first, time.perf_counter() - began, 0, 0, line, False)
                    first = first or time.perf_counter() - began
                    if '"usage":{' in line:
                        usage = httpx.Response(200, text=line[6:]).json()["usage"]
                is_whole = is_whole or line == "data: [DONE]"
        took = time.perf_counter() - began
        return Reached(200, first, took, usage["prompt_tokens"], usage["completion_tokens"], "", is_whole)

    def once(self, model: str) -> float:
        """Seconds of an answer of one token, in one piece."""
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        began = time.perf_counter()
        answer = self.client.post(f"{self._url}/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return time.perf_counter() - began


class GpuBox:
    """A running Hive with a pool on a GPU."""

    def __init__(self, hive: Stack, card: Card) -> None:
        self.hive = hive
        self.card = card
        self._askers: list[Asker] = []

    def asker(self, name: str) -> Asker:
        self.hive.create(name, "idler.py")
        told = self.hive.get(f"/api/agents/{name}/tokens")
        return self._kept(Asker(told["openai_base_url"], {"Authorization": f"Bearer {told['model']}"}))

    def direct(self, model: str) -> Asker:
        """At the server of a model, past Hive."""
        words = psutil.Process(self.pid(model)).cmdline()
        return self._kept(Asker("http://server/v1", {}, uds=words[words.index("--host") + 1]))

    def _kept(self, asker: Asker) -> Asker:
        self._askers.append(asker)
        return asker

    def close(self) -> None:
        """Ends the connections of all askers."""
        for asker in self._askers:
            asker.client.close()

    def pid(self, model: str) -> int:
        """Of a model's server."""
        for pid in self.hive.servers():
            words = psutil.Process(pid).cmdline()
            if "--alias" in words and words[words.index("--alias") + 1] == model:
                return pid
        raise LookupError(f"no server of {model}")

    def slot(self, model: str) -> dict[str, Any]:
        slots: list[dict[str, Any]] = self.hive.get("/api/pool")["slots"]
        return next(slot for slot in slots if slot["model"] == model)

    def account(self) -> dict[str, Any]:
        account: dict[str, Any] = self.hive.get("/api/pool")["accounts"][0]
        return account

    def until_state(self, model: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            slot = self.slot(model)
            return slot if slot["state"] == state else None

        found: dict[str, Any] = until(look, within_s=WITHIN_S, what=f"{model} is {state}: {self.slot(model)}")
        return found

    def load(self, model: str) -> dict[str, Any]:
        """As an operator orders it; its slot then."""
        self.hive.post(f"/api/models/{model}/load")
        return self.until_state(model, "ready")

    def unload(self, model: str) -> None:
        self.hive.post(f"/api/models/{model}/unload")
        self.until_state(model, "cold")

    def empty(self) -> None:
        """Unloads all models."""
        for slot in self.hive.get("/api/pool")["slots"]:
            if slot["state"] in ("ready", "loading"):
                self.unload(slot["model"])

    def books_hold(self) -> bool:
        """Whether the books and the driver say the same of every server, and of all memory that is used."""
        pool, now = self.hive.get("/api/pool"), self.card.now()
        on_gpu = {one.pid: one.used_bytes for one in now.processes or ()}
        booked = {slot["model"]: slot["grants"][0]["measured_bytes"] for slot in pool["slots"] if slot["grants"]}
        servers = {pid for pid in self.hive.servers() if pid in on_gpu}
        seen = {model: on_gpu.get(self.pid(model)) for model in booked}
        used = pool["accounts"][0]["used_bytes"]
        return booked == seen and len(servers) == len(booked) and abs(used - (now.used_bytes or 0)) < 64 * MIB

    def until_books_hold(self) -> None:
        until(self.books_hold, within_s=WITHIN_S, what="the books say what the driver says")


@contextmanager
def gpu_box(text: str, card: Card) -> Iterator[GpuBox]:
    with stack(config=text) as hive:
        until(lambda: hive.get("/api/pool")["accounts"], within_s=WITHIN_S, what="the pool sees the GPU")
        box = GpuBox(hive, card)
        try:
            yield box
        finally:
            box.close()
