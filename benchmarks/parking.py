"""The gain of an agent whose slot was parked: `python benchmarks/parking.py [--rounds 5]`.

A real llama-server with one slot and a tiny model, behind a whole Hive. Every round an agent asks, sleeps, and another
agent takes its slot meanwhile; then it wakes and asks again with the same prompt. Ours: its slot was parked. Cold: the
same round, with what was parked flushed while it sleeps. Printed: tokens of the prompt that were reused, time to the
whole answer, their ratio, and the share of sleeps that found their slot. The model is tiny: the gain in time is a
floor, as what is saved grows with the model, what is read from the disk with its cache alone.

Needs llama-server (tests/tools/build_llama_server.sh) and redis-server. Ends by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

from build_line import build_line

from tests.journeys.sdk import door_of
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, serve

PROMPT = "I am agent {agent}, and this is round {round} of what I remember. " * 40


class Asked(NamedTuple):
    tokens: int
    reused: int
    took_s: float


def ask(hive: Stack, agent: str, round: int) -> Asked:
    begun = time.perf_counter()
    with door_of(hive, agent).openai() as client:
        prompt = PROMPT.format(agent=agent, round=round)
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
    took_s = time.perf_counter() - begun
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return Asked(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0, took_s)


def parking(hive: Stack) -> Any:
    return hive.get("/api/cache")["parking"]


def one_round(hive: Stack, round: int, *, is_cold: bool) -> Asked:
    ask(hive, "sleeper", round)
    saved = parking(hive)["saved"]
    hive.post("/api/agents/sleeper/pause")
    until(lambda: parking(hive)["saved"] > saved, within_s=60, what="the slot is parked")
    if is_cold:
        hive.post("/api/cache/flush", {"scope": "all"})
    ask(hive, "other", round)
    hive.post("/api/agents/sleeper/resume")
    return ask(hive, "sleeper", round)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(build_line())
    with tempfile.TemporaryDirectory(prefix="hive-parking-", dir="/var/tmp") as made:
        kept, llama = Path(made) / "kept", Path(made) / "llama"
        kept.mkdir(mode=0o700)
        (kept / "engine").mkdir(mode=0o700)
        llama.mkdir()
        more = ("--slots", "--slot-save-path", str(kept / "engine"), "--cache-ram", "0", "--parallel", "1")
        config = f"[inference]\nllama_slot_dir = {kept}\nllama_slots_at = light\n[daemon]\nbackend_check_s = 0.2\n"
        with serve(llama, more=more) as server, stack(url=server.url, config=config) as hive:
            for name in ("sleeper", "other"):
                hive.post("/api/agents", {"name": name, "command": ["/bin/sleep", "10000"]})
            until(lambda: ask(hive, "other", 0) and ask(hive, "other", 0).reused, within_s=60, what="slots are named")
            cold = [one_round(hive, 2 * round, is_cold=True) for round in range(1, rounds + 1)]
            before = parking(hive)["first_requests"]
            ours = [one_round(hive, 2 * round + 1, is_cold=False) for round in range(1, rounds + 1)]
            after = parking(hive)["first_requests"]
    sleeps = {found: after[found]["sleeps"] - before[found]["sleeps"] for found in after}
    share = (sleeps["own"] + sleeps["restored"]) / sum(sleeps.values())
    for name, asked in (("ours", ours), ("cold", cold)):
        reused = sum(one.reused for one in asked) / sum(one.tokens for one in asked)
        middle = statistics.median(one.took_s for one in asked) * 1000
        print(
            f"{name}: {reused:.1%} of {asked[0].tokens} tokens reused, answered in {middle:.1f} ms (median of {rounds})"
        )
    ratio = statistics.median(one.took_s for one in ours) / statistics.median(one.took_s for one in cold)
    print(f"ratio: {ratio:.2f} of the cold time; {share:.0%} of {sum(sleeps.values())} sleeps found their slot")
    is_kept = sum(one.reused for one in ours) >= 0.95 * sum(one.tokens for one in ours)
    return 0 if is_kept and share == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
