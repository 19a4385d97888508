"""Slots of real llama-servers, kept while agents sleep: what the first request after it reuses, and what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.pool_stack import CONTEXT, SERVER_MB, llama_models, pool_config
from tests.journeys.sdk import door_of
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(300)]
OURS = "alpha"
"""A model of the pool, with one slot: whoever asks after an agent has taken it."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the slots."""
    made = tmp_path_factory.mktemp("kept")
    (made / "engine").mkdir(mode=0o700)
    return made


@pytest.fixture(scope="module")
def llama(kept: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """The server in use, which Hive did not start; all of its slots are soon taken."""
    more = ("--slots", "--slot-save-path", str(kept / "engine"), "--cache-ram", "0", "--parallel", "1")
    with serve(tmp_path_factory.mktemp("llama"), more=more) as server:
        yield server


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_models(tmp_path_factory.mktemp("models"), [OURS])[OURS]


@pytest.fixture(scope="module")
def hive(kept: Path, llama: LlamaServer, model_file: Path) -> Iterator[Stack]:
    model = model_file
    config = pool_config(400, more=f"llama_slot_dir = {kept}\nllama_slots_at = light\nllama_slots_max_mb = 64\n")
    config += f"[model {OURS}]\nfile = {model}\ncontext = {CONTEXT}\nparallel = 1\nvram_mb = {SERVER_MB}\n"
    with stack(url=llama.url, config=config + "[daemon]\nbackend_check_s = 0.2\n") as hive:
        for name in ("one", "two"):
            hive.post("/api/agents", {"name": name, "command": ["/bin/sleep", "1000"]})
        yield hive


def prompt_of(agent: str) -> str:
    return f"I am agent {agent}, and this is what I remember. " * 12


def asked(hive: Stack, agent: str, model: str, *, stream: bool = False) -> tuple[int, int]:
    """Tokens of the agent's prompt, and those of them that were reused."""
    body: dict[str, Any] = {"model": model, "prompt": prompt_of(agent), "max_tokens": 2}
    with door_of(hive, agent).openai() as client:
        if stream:
            options: Any = {"include_usage": True}
            *_, last = client.completions.create(**body, stream=True, stream_options=options)
            usage = last.usage
        else:
            usage = client.completions.create(**body).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0


def parking(hive: Stack) -> Any:
    return hive.get("/api/cache")["parking"]


def files(kept: Path) -> list[Path]:
    return sorted(kept.glob("g-*/*"))


def asleep(hive: Stack, agent: str) -> None:
    """The agent sleeps, and its slot is on the disk."""
    saved = parking(hive)["saved"]
    hive.post(f"/api/agents/{agent}/pause")
    until(lambda: parking(hive)["saved"] > saved, within_s=60, what="its slot is on the disk")


def found(hive: Stack, what: str) -> int:
    count: int = parking(hive)["first_requests"][what]["sleeps"]
    return count


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("model", [OURS, MODEL])
def test_the_first_request_after_a_sleep_reuses_what_another_agent_has_displaced(
    hive: Stack, kept: Path, model: str, stream: bool
) -> None:
    tokens, _ = asked(hive, "one", model)
    restored = found(hive, "restored")
    asleep(hive, "one")
    [file] = files(kept)
    assert [oct(path.stat().st_mode & 0o777) for path in (file, file.parent, kept)] == ["0o600", "0o700", "0o700"]
    assert asked(hive, "two", model)[1] < tokens / 2, "the slot is another's"
    told = asked(hive, "one", model, stream=stream)
    assert told[0] == tokens
    assert told[1] >= 0.95 * tokens
    assert found(hive, "restored") == restored + 1
    until(lambda: not files(kept), within_s=60, what="it is used once")
    assert list((kept / "engine").iterdir()) == []


def test_an_agent_whose_slot_nobody_took_goes_on_there_and_the_file_goes(hive: Stack, kept: Path) -> None:
    asked(hive, "one", OURS)
    own = found(hive, "own")
    asleep(hive, "one")
    tokens, reused = asked(hive, "one", OURS)
    assert reused >= 0.95 * tokens
    assert found(hive, "own") == own + 1
    until(lambda: not files(kept), within_s=60, what="the file is gone")


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def tampered(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def replaced_by_a_link(file: Path) -> None:
    other = file.with_name("other")
    file.rename(other)
    file.symlink_to(other)


def gone(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("spoil", [cut, tampered, replaced_by_a_link, gone])
def test_a_file_that_is_not_as_it_was_written_is_never_given_to_the_server(hive: Stack, kept: Path, spoil: Any) -> None:
    asked(hive, "one", OURS)
    refused = found(hive, "refused")
    asleep(hive, "one")
    [file] = files(kept)
    spoil(file)
    asked(hive, "two", OURS)
    tokens, reused = asked(hive, "one", OURS)
    assert reused < tokens / 2, "it is read anew"
    assert found(hive, "refused") == refused + 1
    until(lambda: not file.is_symlink() and not file.exists(), within_s=60, what="it is deleted")
    for left in files(kept):
        left.unlink()


def test_a_flush_of_another_model_leaves_what_an_agent_left(hive: Stack, kept: Path) -> None:
    asked(hive, "one", OURS)
    asleep(hive, "one")
    [file] = files(kept)
    assert hive.post("/api/cache/flush", {"scope": "model", "model": MODEL})["flushed"]
    assert files(kept) == [file]
    asked(hive, "two", OURS)
    tokens, reused = asked(hive, "one", OURS)
    assert reused >= 0.95 * tokens


def test_a_second_sleep_leaves_one_file(hive: Stack, kept: Path) -> None:
    asked(hive, "one", OURS)
    asleep(hive, "one")
    [first] = files(kept)
    hive.post("/api/agents/one/resume")
    asleep(hive, "one")
    [second] = files(kept)
    assert first != second
    asked(hive, "one", OURS)


def test_a_flush_of_its_tenant_deletes_what_an_agent_left(hive: Stack, kept: Path) -> None:
    asked(hive, "one", OURS)
    cold = found(hive, "cold")
    asleep(hive, "one")
    assert files(kept)
    told = hive.post("/api/cache/flush", {"scope": "tenant", "tenant": "default"})
    assert told["flushed"]
    assert files(kept) == []
    assert asked(hive, "one", OURS)[1] == 0
    assert found(hive, "cold") == cold + 1


def test_it_outlives_the_daemon_and_goes_with_the_agent(hive: Stack, kept: Path) -> None:
    hive.post("/api/agents", {"name": "three", "command": ["/bin/sleep", "1000"]})
    asked(hive, "three", OURS)
    asleep(hive, "three")
    left = kept / "engine" / "hive-parked-left-by-a-kill"
    left.write_text("half of it")
    hive.restart("daemon")
    until(lambda: parking(hive)["files"] == 1, within_s=60, what="it is known again")
    assert not left.exists()
    asked(hive, "two", OURS)
    tokens, reused = asked(hive, "three", OURS)
    assert reused >= 0.95 * tokens
    asleep(hive, "three")
    hive.client().delete("/api/agents/three")
    until(lambda: not files(kept), within_s=60, what="nothing of it is left")


def test_the_counts_are_told_by_the_command(hive: Stack) -> None:
    asked(hive, "one", OURS)
    asleep(hive, "one")
    asked(hive, "two", OURS)
    asked(hive, "one", OURS)
    until(lambda: parking(hive)["first_requests"]["restored"]["hit_rate"], within_s=60, what="its usage is counted")
    told = parking(hive)
    assert told["found_share"] is not None
    assert told["first_requests"]["restored"]["hit_rate"] >= 0.95
    command = [sys.executable, "-m", "hive", "cache", "show", "--state-dir", str(hive.state)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "AFTER A SLEEP" in shown
    assert f"{told['saved']} of {told['sleeps']} sleeps" in shown
    metrics = hive.get("/api/cache")["parking"]
    assert metrics["sleeps"] >= metrics["saved"] > 0


def test_a_server_of_the_pool_that_is_killed_in_the_middle_of_a_save_leaves_nothing(hive: Stack, kept: Path) -> None:
    asked(hive, "one", OURS)
    saved, [server] = parking(hive)["saved"], hive.servers()
    os.kill(server, signal.SIGSTOP)
    hive.post("/api/agents/one/pause")
    assert hive.get("/api/agents/one")["status"] == "paused", "it waits for no server"
    os.kill(server, signal.SIGKILL)
    until(lambda: hive.servers() != {server}, within_s=60, what="the pool has seen it")
    tokens, reused = until(lambda: asked(hive, "one", OURS), within_s=60, what="another server answers")
    assert reused < tokens / 2
    assert (parking(hive)["saved"], files(kept), list((kept / "engine").iterdir())) == (saved, [], [])


def test_what_was_read_by_another_model_is_never_restored(hive: Stack, model_file: Path, kept: Path) -> None:
    asked(hive, "one", OURS)
    refused = found(hive, "refused")
    asleep(hive, "one")
    assert files(kept)
    os.utime(model_file, ns=(1, 1))
    asked(hive, "two", OURS)
    tokens, reused = asked(hive, "one", OURS)
    assert (reused < tokens / 2, found(hive, "refused")) == (True, refused + 1)
    until(lambda: not files(kept), within_s=60, what="it is deleted")
