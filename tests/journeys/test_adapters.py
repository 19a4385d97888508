"""Adapters on a real llama-server: each is a server of its base with it, and its name means another one in one step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from hive.errors import HiveError
from tests.journeys.adapter_stack import (
    MadeAdapter,
    Versions,
    WordAsker,
    answered,
    asking,
    ended,
    install,
    load,
    make,
    unload,
)
from tests.journeys.pool_stack import llama_models, pool_config
from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(600)]
BASE = "base"
CONTEXT, SERVER_MB, ROOM_MB = 8192, 60, 1200
ADAPTERS, REQUESTS = 20, 1000
NAMES = ("red", "green", "blue", "grey")


def config(folder: Path, base: Path, *, more: str = "") -> str:
    row = f"[model {BASE}]\nfile = {base}\ncontext = {CONTEXT}\nparallel = 4\nvram_mb = {SERVER_MB}\n"
    return pool_config(ROOM_MB) + row + f"[adapters]\ndir = {folder}\nsignatures = off\n{more}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_models(tmp_path_factory.mktemp("base"), [BASE])[BASE]


@pytest.fixture
def hive(tmp_path: Path, base: Path) -> Iterator[Stack]:
    with stack(config=config(tmp_path, base)) as hive:
        hive.create("alice", "idler.py")
        yield hive


@pytest.fixture
def alice(hive: Stack) -> Iterator[WordAsker]:
    with closing(WordAsker(hive, "alice")) as asker:
        yield asker


def adapter(base: Path, folder: Path, word: int, **how: Any) -> MadeAdapter:
    return make(base, folder / f"{word}.gguf", word, **how)


def slots(hive: Stack) -> dict[str, Any]:
    return {slot["model"]: slot for slot in hive.get("/api/pool")["slots"]}


def served(hive: Stack, name: str) -> Any:
    found = {one["name"]: one for one in hive.get("/api/adapters")["adapters"]}
    return found[name]["served"] if name in found else None


def test_an_adapter_is_asked_for_by_its_name_and_listed_on_its_base(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    made = adapter(base, tmp_path, 1)
    pulled = ended(hive, hive.post("/api/adapters", {"path": made.path.name, "base": BASE, "name": "red"}))
    assert pulled["state"] == "done", pulled
    assert alice.ask("red").status == 404
    assert load(hive, "red")["state"] == "done"
    answer = alice.ask("red")
    assert answer.text.split() == [made.word] * 3
    digest = served(hive, "red")["digest"]
    assert answer.told == f"red@{digest[:12]}"
    models = alice.models()
    assert models["red"]["parent"] == BASE
    assert not any("@" in name for name in models)
    assert set(alice.ask(BASE).text.split()) != {made.word}
    slot = slots(hive)[f"red@{digest[:12]}"]
    assert slot["state"] == "ready"
    assert sum(grant["charged_bytes"] for grant in slot["grants"]), "the second copy of the base is in the books"
    assert served(hive, "red")["charged_bytes"]
    assert unload(hive, "red")["state"] == "done"
    gone = alice.ask("red")
    assert (gone.status, "adapter_not_loaded" in gone.text) == (404, True)
    assert "red" not in alice.models()
    assert [name for name in slots(hive) if "@" in name] == []


def test_twenty_adapters_come_and_go_under_a_thousand_requests_and_none_fails(
    hive: Stack, base: Path, tmp_path: Path
) -> None:
    versions, askers = Versions(), []
    for number in range(6):
        hive.create(f"agent-{number}", "idler.py")
        askers.append(WordAsker(hive, f"agent-{number}"))
    made = [adapter(base, tmp_path, number) for number in range(len(NAMES) + ADAPTERS)]
    for name, first in zip(NAMES, made, strict=False):
        versions.ordered(name, first.word)
        assert load(hive, name, install(hive, first, name, BASE))["state"] == "done"
    with asking(askers, NAMES, at_least=REQUESTS) as answers:
        for number, next_one in enumerate(made[len(NAMES) :]):
            name = NAMES[number % len(NAMES)]
            digest = install(hive, next_one, name, BASE)
            versions.ordered(name, next_one.word)
            done = load(hive, name, digest)
            assert done["state"] == "done", done
            versions.loaded(name)
    for asker in askers:
        asker.close()
    wrong = [answer for answer in answers() if not versions.right(answer)]
    assert wrong == []
    assert len(answers()) >= REQUESTS
    until(
        lambda: (
            sorted(name for name in slots(hive) if "@" in name)
            == sorted(f"{name}@{served(hive, name)['digest'][:12]}" for name in NAMES)
        ),
        within_s=120,
        what="only those are left that names lead to",
    )


def test_garbage_weights_fail_alone_and_the_name_means_what_it_meant(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    made, garbage = adapter(base, tmp_path, 1), adapter(base, tmp_path, 2, garbage=True)
    load(hive, "red", install(hive, made, "red", BASE))
    before = slots(hive)
    job = load(hive, "red", install(hive, garbage, "red", BASE))
    assert job["state"] == "failed", job
    assert alice.ask("red").text.split() == [made.word] * 3
    assert alice.ask(BASE).status == 200
    assert slots(hive).keys() == before.keys()
    fresh = load(hive, "blue", install(hive, garbage, "blue", BASE))
    assert fresh["state"] == "failed"
    assert served(hive, "blue") is None
    assert alice.ask("blue").status == 404


@pytest.mark.parametrize("who", ["daemon", "sandbox", "proxy"])
@pytest.mark.parametrize("after_s", [0.0, 0.15, 0.5])
def test_whoever_is_killed_while_it_is_loaded_the_name_means_one_of_both(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path, who: str, after_s: float
) -> None:
    old, new = adapter(base, tmp_path, 1), adapter(base, tmp_path, 2)
    load(hive, "red", install(hive, old, "red", BASE))
    digest = install(hive, new, "red", BASE)
    with suppress(HiveError, OSError):
        hive.post("/api/adapters/red/load", {"digest": digest})
    time.sleep(after_s)
    hive.restart(who)
    with closing(WordAsker(hive, "alice")) as again:
        assert until(lambda: again.ask(BASE).status == 200, within_s=60, what="the base serves")
        answer = until(lambda: answered(again, "red"), within_s=60, what="red answers")
        assert answer.text.split() in ([old.word] * 3, [new.word] * 3)
        until(
            lambda: not [job for job in hive.get("/api/jobs")["jobs"] if job["state"] == "running"],
            within_s=60,
            what="no job is under way",
        )
        meant = served(hive, "red")["digest"]
        assert again.ask("red").text.split() == [new.word if meant == digest else old.word] * 3
        until(
            lambda: (
                [name for name in slots(hive) if "@" in name] == [f"red@{meant[:12]}"]
                and len(hive.servers()) == sum(slot["state"] == "ready" for slot in slots(hive).values())
            ),
            within_s=60,
            what="nothing is left of the other one",
        )
        assert load(hive, "red", digest)["state"] == "done"
        assert again.ask("red").text.split() == [new.word] * 3


def test_a_killed_server_of_an_adapter_is_started_again_for_the_next_request(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    made = adapter(base, tmp_path, 1)
    load(hive, "red", install(hive, made, "red", BASE))
    assert alice.ask(BASE).status == 200
    before = hive.servers()
    red = next(pid for pid in before if b"--lora" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(red, signal.SIGKILL)
    assert alice.ask(BASE).status == 200
    answer = until(lambda: answered(alice, "red"), within_s=60, what="red answers")
    assert answer.text.split() == [made.word] * 3


def test_a_flush_of_an_adapter_is_of_what_its_server_keeps(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    load(hive, "red", install(hive, adapter(base, tmp_path, 1), "red", BASE))
    for name in ("red", BASE):
        alice.cached(name)
        assert alice.cached(name) > 50
    told = hive.post("/api/cache/flush", {"scope": "model", "model": "red"})
    assert told["flushed"]
    assert told["entries_removed"] >= 1
    assert alice.cached("red") == 0
    assert alice.cached(BASE) > 50, "its base is another server's"


def test_a_server_is_not_started_again_with_files_that_were_changed_meanwhile(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    made = adapter(base, tmp_path, 1)
    load(hive, "red", install(hive, made, "red", BASE))
    path = Path(hive.get("/api/adapters/red")["path"])
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    red = next(pid for pid in hive.servers() if b"--lora" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(red, signal.SIGKILL)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(alice.ask, "red")
        until(
            lambda: "was changed since it was installed" in hive.get("/api/adapters/red")["last_error"],
            within_s=60,
            what="it has failed",
        )
        assert alice.ask(BASE).status == 200
        path.write_bytes(content)
        assert load(hive, "red")["state"] == "done"
        assert waiting.result().status in (200, 404, 503), "it waits for a while, or is told"
    assert alice.ask("red").text.split() == [made.word] * 3


def test_a_server_killed_while_it_loads_leaves_the_old_one(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    old, new = adapter(base, tmp_path, 1), adapter(base, tmp_path, 2)
    load(hive, "red", install(hive, old, "red", BASE))
    digest = install(hive, new, "red", BASE)
    before, is_over = hive.servers(), threading.Event()

    def kill() -> None:
        while not is_over.is_set():
            for pid in hive.servers() - before:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        assert load(hive, "red", digest)["state"] == "failed"
    finally:
        is_over.set()
        killer.join()
    assert alice.ask("red").text.split() == [old.word] * 3
    assert load(hive, "red", digest)["state"] == "done"
    assert alice.ask("red").text.split() == [new.word] * 3


def test_what_is_loaded_serves_on_while_daemon_and_helper_are_killed(
    hive: Stack, alice: WordAsker, base: Path, tmp_path: Path
) -> None:
    made = adapter(base, tmp_path, 1)
    load(hive, "red", install(hive, made, "red", BASE))
    alice.ask(BASE)
    versions, before = Versions(), hive.servers()
    versions.ordered("red", made.word)
    with asking([alice], ["red"], at_least=50) as answers:
        hive.restart("daemon")
        hive.restart("sandbox")
    assert [answer for answer in answers() if not versions.right(answer)] == []
    assert hive.servers() == before, "no server was started anew"


@pytest.mark.parametrize("fallback", ["refuse", "base"])
def test_what_answers_for_an_adapter_that_is_not_loaded_is_as_the_settings_say(
    tmp_path: Path, base: Path, fallback: str
) -> None:
    made = adapter(base, tmp_path, 1)
    with stack(config=config(tmp_path, base, more=f"fallback = {fallback}\n")) as hive:
        hive.create("alice", "idler.py")
        install(hive, made, "red", BASE)
        load(hive, "red")
        unload(hive, "red")
        with closing(WordAsker(hive, "alice")) as alice:
            answer = alice.ask("red")
            if fallback == "refuse":
                assert (answer.status, answer.told) == (404, "")
                assert "hive adapter load" in answer.text
            else:
                assert (answer.status, answer.told) == (200, BASE)
                assert answer.text == alice.ask(BASE).text
            hive.restart("daemon")
            assert alice.ask("red").status == answer.status


def test_an_agent_that_may_use_only_the_adapter_is_not_given_its_base(tmp_path: Path, base: Path) -> None:
    made = adapter(base, tmp_path, 1)
    more = "fallback = base\n[tenant acme]\nmodels = red\n"
    with stack(config=config(tmp_path, base, more=more)) as hive:
        hive.create("alice", "idler.py", tenant="acme")
        load(hive, "red", install(hive, made, "red", BASE))
        with closing(WordAsker(hive, "alice")) as alice:
            assert alice.ask("red").text.split() == [made.word] * 3
            assert alice.ask(BASE).status == 403
            assert list(alice.models()) == ["red"]
            unload(hive, "red")
            assert alice.ask("red").status in (403, 404)
