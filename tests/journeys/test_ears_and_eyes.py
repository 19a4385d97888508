"""Ears, eyes and words in one pool that holds two of the three: real engines, an unmodified client, mixed requests."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from tests import whisper
from tests.journeys.ears_stack import EAR, EYE, MODELS, WORD, beyond_bound, config, ended_servers, mixed
from tests.journeys.stack import stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
AGENTS, EACH = 4, 10


@pytest.mark.timeout(900)
def test_three_kinds_of_server_share_the_room_of_two_and_no_request_fails(tmp_path: Path) -> None:
    """No request fails, none waits beyond the bound that was printed for it, and no server is killed for memory."""
    clip = whisper.speech(tmp_path / "clip.wav")
    with stack(config=config(tmp_path), up_within_s=120) as hive:
        agents = [f"agent-{number}" for number in range(AGENTS)]
        for name in agents:
            hive.create(name, "idler.py")
        made = mixed(hive, agents, clip, each=EACH)
        assert [one for one in made if one.fault] == []
        counted = Counter(one.model for one in made)
        assert set(counted) == set(MODELS)
        assert beyond_bound(made) == []
        assert any(one.bound_s for one in made), "some model was not loaded when it was asked for"
        assert ended_servers(hive) == []
        pool = hive.get("/api/pool")
        (account,) = pool["accounts"]
        assert account["charged_bytes"] <= account["total_bytes"]
        assert sum(slot["state"] == "ready" for slot in pool["slots"]) <= 2

        # what it cost, in the unit of each
        def usage() -> dict[str, tuple[int, float, float]]:
            rows = hive.get("/api/usage", by="model")["models"]
            return {row["model"]: (row["requests"], row["audio_s"], row["images"]) for row in rows}

        until(lambda: sum(one[0] for one in usage().values()) == len(made), within_s=30, what="all is recorded")
        seen = usage()
        assert {model: seen[model][0] for model in MODELS} == dict(counted)
        assert seen[EAR][1] > 3.0 * counted[EAR]
        assert counted[EYE] <= seen[EYE][2] <= 2 * counted[EYE]
        assert seen[WORD][1:] == (0, 0)
        with sqlite3.connect(f"file:{hive.state / 'hive.db'}?mode=ro", uri=True) as database:
            rows = database.execute(
                "SELECT model, unit, min(amount), sum(estimated), min(work) FROM inference_usage GROUP BY model, unit"
            ).fetchall()
        database.close()
        units = {model: (unit, estimated) for model, unit, _, estimated, _ in rows}
        assert units == {EAR: ("audio_s", 0), EYE: ("images", 0), WORD: ("tokens", 0)}
        assert {model: work for model, _, _, _, work in rows}[EYE] >= 64 * 64 * 2

        # how they compare, as `hive queue` prints it
        queue = hive.get("/api/queue")
        measured = {one["model"]: one["unit"] for one in queue["work"] if one["is_measured"]}
        assert measured == {EAR: "audio_s", EYE: "pixel_steps", WORD: "tokens"}
        assert queue["tokens_per_gpu_s"] > 0
