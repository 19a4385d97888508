"""Budgets and ladders of sound and images before the real faster-whisper and the real diffusers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import diffusers_runner, whisper
from tests.journeys.stack import Stack, stack, until
from tests.whisper import SPOKEN, word_error_rate

pytestmark = [pytest.mark.redis, pytest.mark.diffusers, pytest.mark.timeout(600)]
LIMIT = 1000
PER_AUDIO_S, PER_MEGAPIXEL_STEP = 20, 30000
"""Prices at which a day's budget is a few requests."""
STEPS, SIDE = 2, 64
AN_IMAGE = SIDE * SIDE * STEPS * PER_MEGAPIXEL_STEP / 1e6
"""In tokens."""


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Ears of two sizes and eyes, with room for all; `poor` has a budget, and others none."""
    folder = tmp_path_factory.mktemp("ears")
    for path in (folder.parent, folder):
        path.chmod(0o755)
    for name in ("w", "d"):
        (folder / name).mkdir(mode=0o755)
    config = (
        f"whisper_program = {whisper.program(folder / 'w')}\n"
        f"diffusers_program = {diffusers_runner.runner_program(folder / 'd')}\n"
        f"[budget]\ntokens_per_audio_s = {PER_AUDIO_S}\ntokens_per_megapixel_step = {PER_MEGAPIXEL_STEP}\n"
        f"[tenant poor]\ntokens_per_day = {LIMIT}\n[tenant thrifty]\ntokens_per_day = {LIMIT}\n"
        "[pool]\nreserve_mb = 0\ncpu_mb = 3000\n"
        f"[model big]\nbackend = whisper\nfile = {whisper.model('base')}\nvram_mb = 900\n"
        f"[model small]\nbackend = whisper\nfile = {whisper.model()}\nvram_mb = 500\n"
        f"[model eye]\nbackend = diffusers\nfile = {diffusers_runner.pipeline('sd')}\nvram_mb = 500\nsteps = {STEPS}\n"
        "[task hear]\nmodels = big | small\n"
    )
    with stack(config=config, up_within_s=120) as made:
        for name, tenant in (("ann", "poor"), ("bob", "thrifty"), ("carl", "default")):
            made.create(name, "idler.py", tenant=tenant)
        yield made


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper.speech(tmp_path_factory.mktemp("speech") / "spoken.wav")


def client_of(hive: Stack, agent: str) -> openai.OpenAI:
    access: Any = hive.get(f"/api/agents/{agent}/tokens")
    return openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0, timeout=300)


def used(hive: Stack, tenant: str) -> int:
    return next(int(one["used"]) for one in hive.get("/api/budgets")["budgets"] if one["name"] == tenant)


def refusal_after(ask: Any, most: int) -> tuple[int, openai.RateLimitError]:
    """Asks until the budget is spent. Returns how often it was answered, and the refusal."""
    for number in range(most):
        try:
            ask()
        except openai.RateLimitError as error:
            return number, error
    raise AssertionError(f"{most} requests were not refused")


def test_a_budget_that_images_have_spent_is_refused_in_words_for_sound_too(hive: Stack, spoken: Path) -> None:
    with client_of(hive, "ann") as client:
        number, refusal = refusal_after(lambda: client.images.generate(model="eye", prompt="a bee", size="64x64"), 8)
        assert refusal.code == "budget_exceeded"
        assert f"{LIMIT} tokens" in refusal.message
        until(lambda: used(hive, "poor") == pytest.approx(number * AN_IMAGE, abs=1), within_s=30, what="it is told")
        assert (number - 1) * AN_IMAGE < LIMIT <= number * AN_IMAGE
        with pytest.raises(openai.RateLimitError, match=f"{LIMIT} tokens"):
            client.audio.transcriptions.create(model="small", file=spoken)


def test_a_budget_is_spent_by_the_seconds_that_were_heard(hive: Stack, spoken: Path) -> None:
    """A clip of some 9 s counts as some 180 tokens: as long as it was heard to be, not as long as its bytes looked."""
    with client_of(hive, "bob") as client:
        number, refusal = refusal_after(lambda: client.audio.transcriptions.create(model="small", file=spoken), 9)
    assert refusal.code == "budget_exceeded"

    def seconds() -> float:
        rows = hive.get("/api/usage", since="1h", by="tenant")["tenants"]
        return sum(float(row["audio_s"]) for row in rows if row["tenant"] == "thrifty")

    until(lambda: seconds() >= 8 * number, within_s=30, what="all are counted")
    until(
        lambda: used(hive, "thrifty") == pytest.approx(seconds() * PER_AUDIO_S, abs=number),
        within_s=30,
        what="the budget says the same",
    )


def test_a_ladder_of_ears_goes_down_to_the_smaller_one_and_comes_back(hive: Stack, spoken: Path) -> None:
    """The large one is not loaded and the small one is: nobody waits, and the answer says why. The wish has the large
    one loaded meanwhile."""

    def rung() -> tuple[str, str]:
        with client_of(hive, "carl") as client, spoken.open("rb") as file:
            told = client.audio.transcriptions.with_raw_response.create(model="task:hear", file=file)
            assert word_error_rate(SPOKEN, told.parse().text) <= 0.35
            return told.headers["x-hive-model"], told.headers["x-hive-rung"]

    with client_of(hive, "carl") as client:
        client.audio.transcriptions.create(model="small", file=spoken)
    assert rung() == ("small", "1")
    slots = {slot["model"]: slot for slot in hive.get("/api/pool")["slots"]}
    assert slots["big"]["state"] in ("loading", "ready", "cold")
    hive.post("/api/models/small/unload", {"force": True})
    until(lambda: rung() == ("big", "0"), within_s=200, what="the large one hears again")
