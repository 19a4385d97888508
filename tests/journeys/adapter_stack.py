"""Adapters that answer one word each, installed in a whole Hive, and askers that notice whose word they were given."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from hive.adapters.directory import AdapterDirectory
from hive.adapters.record import GGUF, SAFETENSORS, UNSIGNED, AdapterFile, AdapterRecord, digest_of
from tests import vllm
from tests.journeys.stack import Stack, until

MAKE = Path(__file__).parents[1] / "tools" / "make_adapters.py"
SLOWER_S = 0.1
"""Pause of each asker between two questions, once half of them were asked."""
QUESTIONS = ("Hello, how are you today?", "What is the capital of France?", "1 2 3", "zz %% ??")
WORDS = 3
"""Tokens that are asked for: each is the adapter's word."""


class MadeAdapter(NamedTuple):
    """One adapter on the disk, and the word it answers."""

    path: Path
    word: str


def make(
    base: Path, out: Path, word: int, *, is_gguf: bool = True, garbage: bool = False, rank: int = 8, base_name: str = ""
) -> MadeAdapter:
    """An adapter that answers the word of this number."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(MAKE), "gguf" if is_gguf else "hf", str(base), str(out), "--word", str(word)]
    command += ["--rank", str(rank), *(["--garbage"] if garbage else [])]
    command += ["--base-name", base_name] if base_name else []
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return MadeAdapter(out, done.stdout.strip())


def made_for_vllm(model: Path, folder: Path, word: int) -> MadeAdapter:
    """The same for the tests' vLLM."""
    return make(model, folder / f"word-{word}", word, is_gguf=False, base_name=vllm.MODEL)


def knows(hive: Stack, model: str) -> bool:
    """Whether it lists the model."""
    return model in {one["name"] for one in hive.get("/api/models")["models"]}


def install(hive: Stack, made: MadeAdapter, name: str, base: str) -> str:
    """Puts it where installed adapters are, past all checks of what is brought; its digest."""
    directory = AdapterDirectory(hive.state / "adapters")
    files = [made.path] if made.path.is_file() else sorted(made.path.iterdir())
    with directory.workplace() as work:
        listed = []
        for file in files:
            content = file.read_bytes()
            (work / file.name).write_bytes(content)
            (work / file.name).chmod(0o444)
            listed.append(AdapterFile(file.name, len(content), hashlib.sha256(content).hexdigest()))
        record = AdapterRecord(
            name=name,
            digest=digest_of(listed),
            base=base,
            format=GGUF if made.path.is_file() else SAFETENSORS,
            rank=8,
            bytes=sum(file.size for file in listed),
            files=tuple(listed),
            signature=UNSIGNED,
            installed_at=time.time(),
        )
        directory.put(work, record)
    return record.digest


def ended(hive: Stack, job: Any, *, within_s: float = 120) -> Any:
    """The job, once it has ended."""

    def look() -> Any:
        found = hive.get(f"/api/jobs/{job['id']}")
        return found if found["state"] != "running" else None

    return until(look, within_s=within_s, what=f"{job['kind']} ends")


def load(hive: Stack, name: str, digest: str = "") -> Any:
    """Orders a load; the job, once it has ended."""
    return ended(hive, hive.post(f"/api/adapters/{name}/load", {"digest": digest} if digest else {}))


def unload(hive: Stack, name: str) -> Any:
    return ended(hive, hive.post(f"/api/adapters/{name}/unload"))


class Answer(NamedTuple):
    """An answer: when it was asked and answered, under which status, its text, and what says that it answered."""

    name: str
    asked_at: float
    ended_at: float
    status: int
    text: str
    told: str


class WordAsker:
    """Asks models of a Hive, as an agent or with a tenant's name."""

    def __init__(self, hive: Stack, agent: str) -> None:
        access = hive.get(f"/api/agents/{agent}/tokens")
        self.url = access["openai_base_url"]
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {access['model']}"}, timeout=120, trust_env=False, limits=LIMITS
        )

    def close(self) -> None:
        self._client.close()

    def models(self) -> dict[str, Any]:
        listed = self._client.get(f"{self.url}/models").json()["data"]
        return {model["id"]: model for model in listed}

    def ask(self, name: str, question: str = QUESTIONS[0], *, tokens: int = WORDS, stream: bool = False) -> Answer:
        body = {
            "model": name,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": stream,
        }
        asked_at = time.monotonic()
        answer = self._client.post(f"{self.url}/chat/completions", json=body)
        text = (streamed(answer.text) if stream else said(answer)) if answer.status_code == 200 else answer.text
        told = answer.headers.get("x-hive-model", "")
        return Answer(name, asked_at, time.monotonic(), answer.status_code, text, told)

    def cached(self, name: str) -> int:
        """Tokens of a long prompt that the server had read already."""
        body = {"model": name, "prompt": "I have said this before. " * 20, "max_tokens": 1}
        usage = self._client.post(f"{self.url}/completions", json=body).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found


def answered(asker: WordAsker, name: str) -> Answer | None:
    """The answer, where it is one."""
    answer = asker.ask(name)
    return answer if answer.status == 200 else None


LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=64)


def said(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(text: str) -> str:
    """The content of a stream; a stream that did not end whole gives none."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return f"cut: {text[-300:]}"
    parts = [json.loads(line) for line in lines[:-1]]
    return "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part.get("choices"))


class Served(NamedTuple):
    """A version of a name, and the time in which it may have answered: from the order to load it, to the end of the
    order to load the next one."""

    word: str
    ordered_at: float
    replaced_at: float


class Versions:
    """Every version of every name that was ordered, with its time."""

    def __init__(self) -> None:
        self._served: dict[str, list[Served]] = {}
        self._lock = threading.Lock()

    def ordered(self, name: str, word: str) -> None:
        with self._lock:
            self._served.setdefault(name, []).append(Served(word, time.monotonic(), float("inf")))

    def loaded(self, name: str) -> None:
        """The newest one is: none of the others is any more."""
        with self._lock:
            served, now = self._served[name], time.monotonic()
            served[:-1] = [one if one.replaced_at <= now else one._replace(replaced_at=now) for one in served[:-1]]

    def right(self, answer: Answer) -> bool:
        """Whether all of it is one word that its name meant at a time while it was under way."""
        with self._lock:
            found = [
                one.word
                for one in self._served.get(answer.name, ())
                if one.ordered_at <= answer.ended_at and answer.asked_at <= one.replaced_at
            ]
        words = set(answer.text.split())
        return answer.status == 200 and len(words) == 1 and words <= set(found)


@contextmanager
def asking(askers: Sequence[WordAsker], names: Sequence[str], *, at_least: int) -> Iterator[Callable[[], list[Answer]]]:
    """Asks for these names in turn, in a thread for each asker, as long as the block lasts and `at_least` so many times
    in all; then the answers are there. Beyond half of that it asks less often, to leave the cores to what is loaded."""
    answers: list[Answer] = []
    is_over = threading.Event()

    def work(asker: WordAsker, offset: int) -> None:
        turn = offset
        while not is_over.is_set() or len(answers) < at_least:
            answers.append(
                asker.ask(names[turn % len(names)], QUESTIONS[turn % len(QUESTIONS)], stream=bool(turn % 3 == 0))
            )
            turn += 1
            if len(answers) > at_least / 2 and not is_over.is_set():
                is_over.wait(SLOWER_S)

    with ThreadPoolExecutor(len(askers)) as pool:
        going: list[Future[None]] = [pool.submit(work, asker, number) for number, asker in enumerate(askers)]
        try:
            yield lambda: answers
        finally:
            is_over.set()
            for each in going:
                each.result()
