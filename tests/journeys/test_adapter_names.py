"""Names of adapters that mean something else too, or that nothing answers to any more, on a real llama-server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx
import pytest

from hive.adapters.keys import EcPublicKey, EcSecretKey
from tests.adapters.lora_files import secret_pem
from tests.journeys.adapter_stack import WordAsker, ended, install, load, unload
from tests.journeys.pool_stack import llama_models, pool_config
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_adapters import BASE, CONTEXT, ROOM_MB, SERVER_MB, adapter, served

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(600)]
OTHER = "other"


def row(name: str, path: Path, *, more: str = "") -> str:
    return f"[model {name}]\nfile = {path}\ncontext = {CONTEXT}\nparallel = 4\nvram_mb = {SERVER_MB}\n{more}"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return llama_models(tmp_path_factory.mktemp("bases"), [BASE, OTHER])


def config(folder: Path, bases: dict[str, Path], *, room_mb: int = ROOM_MB, inference: str = "", more: str = "") -> str:
    rows = "".join(row(name, path) for name, path in bases.items())
    adapters = f"[adapters]\ndir = {folder}\n" + (more or "signatures = off\n")
    return pool_config(room_mb, more=inference) + rows + adapters


def signed_with_new_key(path: Path) -> EcPublicKey:
    """Signs a file as a maker does; the key that is to be trusted."""
    pem = secret_pem()
    secret = path.with_suffix(".pem")
    secret.touch(mode=0o600)
    secret.write_bytes(pem)
    subprocess.run([sys.executable, "-m", "hive", "adapter", "sign", str(path), "--key", str(secret)], check=True)
    return EcSecretKey(pem).public


@contextmanager
def long_stream(hive: Stack, model: str) -> Iterator[None]:
    """A request that keeps its model busy; it has begun to answer."""
    access = hive.get("/api/agents/alice/tokens")
    body = {"model": model, "prompt": "1 2 3", "max_tokens": CONTEXT - 64, "stream": True, "ignore_eos": True}
    with httpx.stream(
        "POST",
        f"{access['openai_base_url']}/completions",
        json=body,
        headers={"authorization": f"Bearer {access['model']}"},
        timeout=60,
        trust_env=False,
    ) as answer:
        next(answer.iter_lines())
        yield


@pytest.fixture
def hive(tmp_path: Path, bases: dict[str, Path]) -> Iterator[Stack]:
    with stack(config=config(tmp_path, bases)) as hive:
        hive.create("alice", "idler.py")
        yield hive


def test_a_model_that_comes_later_has_its_name_to_itself(hive: Stack, bases: dict[str, Path], tmp_path: Path) -> None:
    """An adapter that was installed alone hid a model and an alias of its name, and answers of a model said that they
    were an adapter's."""
    for name, word in (("red", 1), ("fast", 2), ("slow", 3)):
        install(hive, adapter(bases[BASE], tmp_path, word), name, BASE)
    load(hive, "red")
    conf = hive.state.parent / "hive.conf"
    text = conf.read_text().replace("[pool]", f"aliases = slow = {OTHER}\n[pool]", 1)
    conf.write_text(text + row("red", bases[OTHER]) + row("fast", bases[OTHER]))
    hive.restart("daemon", "sandbox", "proxy")
    with closing(WordAsker(hive, "alice")) as alice:
        plain = until(lambda: (got := alice.ask(OTHER)).status == 200 and got, within_s=60, what="other serves")
        for name in ("red", "fast", "slow"):
            answer = alice.ask(name)
            assert (answer.status, answer.text, answer.told) == (200, plain.text, "")
        assert "parent" not in alice.models()["red"]
        told = {one["name"]: one for one in hive.get("/api/adapters")["adapters"]}["red"]
        assert (told["served"]["state"], told["last_error"]) == ("failed", "red is the name of a model now")
        assert unload(hive, "red")["state"] == "done"


def test_a_load_again_that_fails_leaves_the_name_to_later_requests(
    hive: Stack, bases: dict[str, Path], tmp_path: Path
) -> None:
    """Its slot was gone then while its name was loaded still: no request found it any more."""
    made = adapter(bases[BASE], tmp_path, 1)
    load(hive, "red", install(hive, made, "red", BASE))
    away = bases[BASE].with_suffix(".away")
    bases[BASE].rename(away)
    try:
        for pid in hive.servers():
            os.kill(pid, signal.SIGKILL)
        until(lambda: served(hive, "red")["state"] != "ready", within_s=60, what="it is not in memory")
        assert load(hive, "red")["state"] == "failed"
    finally:
        away.rename(bases[BASE])
    with closing(WordAsker(hive, "alice")) as alice:
        answer = until(lambda: (got := alice.ask("red")).status == 200 and got, within_s=60, what="it is loaded again")
        assert answer.text.split() == [made.word] * 3


def test_what_stands_in_for_an_adapter_stands_in_for_its_alias_too(tmp_path: Path, bases: dict[str, Path]) -> None:
    """An alias of an adapter that was not loaded led nowhere, whatever `fallback` said."""
    more = "signatures = off\nfallback = base\n"
    with stack(config=config(tmp_path, bases, inference="aliases = law = red\n", more=more)) as hive:
        hive.create("alice", "idler.py")
        made = adapter(bases[BASE], tmp_path, 1)
        load(hive, "red", digest := install(hive, made, "red", BASE))
        with closing(WordAsker(hive, "alice")) as alice:
            loaded = alice.ask("law")
            assert (loaded.text.split(), loaded.told) == ([made.word] * 3, f"red@{digest[:12]}")
            unload(hive, "red")
            instead = alice.ask("law")
            assert (instead.status, instead.text, instead.told) == (200, alice.ask(BASE).text, BASE)


def test_a_revoked_key_ends_what_answers_while_another_build_waits_for_room(
    tmp_path: Path, bases: dict[str, Path]
) -> None:
    """The revocation waited until the other build was loaded, and the revoked one answered as long."""
    keys = tmp_path / "keys"
    made = [adapter(bases[BASE], tmp_path, number) for number in (1, 2)]
    both = [signed_with_new_key(one.path) for one in made]
    room = config(tmp_path, bases, room_mb=3 * SERVER_MB, more=f"keys_dir = {keys}\n")
    with stack(config=room) as hive:
        hive.create("alice", "idler.py")
        for key in both:
            hive.post("/api/adapters/keys", {"keyId": key.id, "pem": key.pem.decode()})
        for one in made:
            pulled = ended(hive, hive.post("/api/adapters", {"path": one.path.name, "base": BASE, "name": "red"}))
            assert pulled["state"] == "done", pulled
        newer, older = hive.get("/api/adapters/red")["installed"]
        with closing(WordAsker(hive, "alice")) as alice:
            assert load(hive, "red", older["digest"])["state"] == "done"
            with ExitStack() as streams:
                for name in bases:
                    streams.enter_context(long_stream(hive, name))
                job = hive.post("/api/adapters/red/load", {"digest": newer["digest"]})
                revoked = hive.post(f"/api/adapters/keys/{both[0].id}/revoke")
                assert revoked["unloaded"] == ["red"]
                assert alice.ask("red").text.split() != [made[0].word] * 3
            done = ended(hive, job)
            assert done["state"] == "done", done
            assert alice.ask("red").text.split() == [made[1].word] * 3
            view = hive.get("/api/adapters/red")
            assert (view["served"]["digest"], view["last_error"]) == (newer["digest"], "")


def test_one_that_cannot_be_loaded_any_more_gives_way_to_the_one_before(tmp_path: Path, bases: dict[str, Path]) -> None:
    """The pool tried it again for twenty minutes first, and its requests failed as long."""
    with stack(config=config(tmp_path, bases, more="signatures = off\nfallback = previous\n")) as hive:
        hive.create("alice", "idler.py")
        older, newer = (adapter(bases[BASE], tmp_path, number) for number in (1, 2))
        before = install(hive, older, "red", BASE)
        load(hive, "red", before)
        digest = install(hive, newer, "red", BASE)
        load(hive, "red", digest)
        (spoilt,) = (hive.state / "adapters" / "red" / digest).glob("*.gguf")
        spoilt.chmod(0o644)
        spoilt.write_bytes(b"X" * spoilt.stat().st_size)
        for pid in hive.servers():
            os.kill(pid, signal.SIGKILL)
        with closing(WordAsker(hive, "alice")) as alice:
            until(lambda: alice.ask("red").told == f"red@{before[:12]}", within_s=120, what="the one before answers")
            assert alice.ask("red").text.split() == [older.word] * 3
        assert served(hive, "red")["digest"] == before
