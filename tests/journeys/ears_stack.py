"""A whole Hive with real ears, real eyes and a real language model, in the room of two of them, and who asks for all.

faster-whisper with real weights, diffusers with a random tiny pipeline, llama-server with a tiny model whose context
makes it large. What is asked, and what must come of it, is the same for the journey and for benchmarks/ears.py.
"""

from __future__ import annotations

import base64
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai

from tests import diffusers_runner, whisper
from tests.journeys.pool_stack import llama_models
from tests.journeys.stack import Stack
from tests.llama import program as llama_program

EAR, EYE, WORD = "ear", "eye", "word"
MODELS = (EAR, EYE, WORD)
NEED_MB = {EAR: 340, EYE: 350, WORD: 330}
"""Charged for a first load; later ones are by what was measured."""
CONTEXT = 524288
"""Makes the tiny language model's server as large as the others, some 300 MiB."""
PNG = b"\x89PNG\r\n\x1a\n"
SIZE = "64x64"


class Wanted(NamedTuple):
    """One request that was made: for what, and what came of it. `bound_s`: printed for it as it came first to a model
    that was not loaded; None for all others. `wait_s`: in line, as its head tells."""

    model: str
    bound_s: float | None
    wait_s: float
    took_s: float
    fault: str = ""


def room_mb(needs: dict[str, int]) -> int:
    """Memory in which any two of them fit, and not all three."""
    largest = sum(sorted(needs.values())[1:])
    return largest + min(needs.values()) // 3


def config(folder: Path, *, room: int | None = None, more: str = "") -> str:
    """hive.conf with the three; skips where one of them is not here."""
    (llama_file,) = llama_models(folder, (WORD,)).values()
    for name in ("whisper", "diffusers"):
        (folder / name).mkdir()
        (folder / name).chmod(0o755)
    rows = {
        EAR: f"backend = whisper\nfile = {whisper.model()}\n",
        EYE: f"backend = diffusers\nfile = {diffusers_runner.pipeline('sd')}\n",
        WORD: f"file = {llama_file}\ncontext = {CONTEXT}\nparallel = 2\n",
    }
    return (
        # Two cores are slow ears: eight in line for the one place have to wait longer than the default.
        f"[proxy]\nqueue_wait_s = 600\n[inference]\nllama_program = {llama_program()}\n"
        f"whisper_program = {whisper.program(folder / 'whisper')}\n"
        f"diffusers_program = {diffusers_runner.runner_program(folder / 'diffusers')}\n"
        f"[pool]\nreserve_mb = 0\ncpu_mb = {room or room_mb(NEED_MB)}\npatience_normal_s = 0.5\naudience_s = 1\n{more}"
        + "".join(f"[model {name}]\n{row}vram_mb = {NEED_MB[name]}\n" for name, row in rows.items())
    )


class Asker:
    """One client of an unmodified `openai`, in a thread of its own, with requests of three kinds in a random order."""

    def __init__(self, hive: Stack, agent: str, clip: Path, count: int, seed: int) -> None:
        access = hive.get(f"/api/agents/{agent}/tokens")
        self._client = openai.OpenAI(
            base_url=access["openai_base_url"], api_key=access["model"], max_retries=0, timeout=300
        )
        self._hive, self._clip, self._count, self._chance = hive, clip, count, random.Random(seed)
        self.wanted: list[Wanted] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        for number in range(self._count):
            model = MODELS[number] if number < len(MODELS) else self._chance.choice(MODELS)
            self.wanted.append(self._one(model))

    def _one(self, model: str) -> Wanted:
        told = self._hive.get(f"/api/pool/models/{model}/explain")
        bound_s = told["bound_s"] if told["state"] not in ("ready", "loading") else None
        began = time.perf_counter()
        try:
            fields, fault = {EAR: self._hear, EYE: self._draw, WORD: self._say}[model]()
        except openai.OpenAIError as error:
            return Wanted(model, None, 0.0, time.perf_counter() - began, f"{type(error).__name__}: {error}")
        wait_s = int(fields["x-queue-wait-ms"]) / 1000
        took_s = time.perf_counter() - began
        return Wanted(model, bound_s, wait_s, took_s, fault)

    def _hear(self) -> tuple[Any, str]:
        with self._clip.open("rb") as file:
            answer = self._client.audio.transcriptions.with_raw_response.create(model=EAR, file=file)
        heard = answer.parse().text
        errors = whisper.word_error_rate(whisper.SPOKEN, heard)
        return answer.headers, f"heard {heard!r}" if errors > 0.3 else ""

    def _draw(self) -> tuple[Any, str]:
        number = self._chance.choice((1, 2))
        answer = self._client.images.with_raw_response.generate(
            model=EYE,
            prompt="a bee",
            n=number,
            size=SIZE,
            extra_body={"steps": 2, "seed": 7},
        )
        images = [base64.b64decode(image.b64_json or "") for image in answer.parse().data or []]
        is_right = len(images) == number and all(image.startswith(PNG) for image in images)
        return answer.headers, "" if is_right else f"{len(images)} images of {number}"

    def _say(self) -> tuple[Any, str]:
        answer = self._client.chat.completions.with_raw_response.create(
            model=WORD, messages=[{"role": "user", "content": "Hello there"}], max_tokens=8
        )
        told = answer.parse()
        is_right = told.model == WORD and told.usage is not None and told.usage.completion_tokens > 0
        return answer.headers, "" if is_right else f"said {told!r}"


def mixed(hive: Stack, agents: Sequence[str], clip: Path, *, each: int) -> list[Wanted]:
    """All of them ask at once, `each` so often; returns what was made of every request."""
    askers = [Asker(hive, agent, clip, each, seed) for seed, agent in enumerate(agents)]
    for asker in askers:
        asker.begin()
    for asker in askers:
        asker.end()
    return [one for asker in askers for one in asker.wanted]


def beyond_bound(made: Sequence[Wanted]) -> list[Wanted]:
    """Those that waited longer than was printed for them; those behind others, or for a place alone, longer than was
    printed for anybody."""
    printed = [one.bound_s for one in made if one.bound_s is not None]
    most = max(printed, default=0.0)
    return [one for one in made if one.wait_s > (one.bound_s if one.bound_s is not None else most)]


def ended_servers(hive: Stack) -> list[str]:
    """The servers that did not end by an order: killed for memory, crashed, not loaded."""
    acts = ("model.crashed", "model.load_failed")
    return [f"{row['act']} {row['target']}" for act in acts for row in hive.get("/api/audit", act=act)["rows"]]
