"""Adapters the whole way, by command line and by REST, on a real llama-server: what is refused, who is trusted, and
what is there after a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from hive.cli.op_options import token_in
from hive.errors import HiveError
from tests.adapters.lora_files import gguf_base
from tests.journeys.adapter_stack import MadeAdapter, WordAsker, ended, make
from tests.journeys.pool_stack import llama_models
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_adapters import BASE, config
from tests.journeys.test_governed import Came, Signers
from tests.journeys.test_runner_api import client_of

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(600)]
TEAM, STRANGER = "team", "stranger"
RULES = '[rules.adapter-load]\nthreshold = 1\nof = ["ann"]\n[rules.adapter-pull]\nthreshold = 1\nof = ["ann"]\n'


class AdapterUser(Signers):
    """An operator at the command line, with keys of two teams, of which one is trusted."""

    def __init__(self, hive: Stack, directory: Path, base: Path) -> None:
        super().__init__(hive, directory)
        self.source = directory / "source"
        self.source.mkdir()
        self.base = base
        for name in (TEAM, STRANGER):
            key = ec.generate_private_key(ec.SECP256R1())
            secret, public = directory / f"{name}.key", directory / f"{name}.pub"
            secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            secret.chmod(0o600)
            pem = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            public.write_bytes(pem)
        self.key_id = str(self.ok("adapter", "trust", f"{TEAM}.pub", "--json").answer["key_id"])

    def made(self, name: str, word: int, *, by: str = TEAM, **how: Any) -> MadeAdapter:
        """A file in the directory that adapters are brought from, signed with a key; by nobody where `by` is empty."""
        made = make(self.base, self.source / f"{name}.gguf", word, **how)
        if by:
            self.ok("adapter", "sign", str(made.path), "--key", f"{by}.key", online=False)
        return made

    def pull(self, name: str, *words: str) -> Came:
        return self.run("adapter", "pull", f"{name}.gguf", "--base", BASE, *words, "--json")

    def refused(self, *words: str) -> tuple[int, str]:
        """(exit code, code of the error)."""
        came = self.run(*words, "--json")
        assert came.code, came
        return came.code, str(json.loads(came.err.splitlines()[-1])["code"])

    def acts(self) -> list[dict[str, Any]]:
        rows = self.hive.get("/api/audit", limit=1000)["rows"]
        return [row for row in rows if row["act"].startswith("adapter.")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_models(tmp_path_factory.mktemp("base"), [BASE])[BASE]


@pytest.fixture
def user(tmp_path: Path, base: Path) -> Iterator[AdapterUser]:
    folder = tmp_path / "work"
    folder.mkdir()
    gguf_base(folder / "other.gguf")
    other = f"max_rank = 8\n[model other]\nfile = {folder / 'other.gguf'}\nvram_mb = 10\n"
    text = config(folder / "source", base, more=other).replace("signatures = off", "signatures = required")
    with stack(config=text) as hive:
        hive.create("alice", "idler.py")
        yield AdapterUser(hive, folder, base)


@pytest.fixture
def alice(user: AdapterUser) -> Iterator[WordAsker]:
    with closing(WordAsker(user.hive, "alice")) as asker:
        yield asker


def test_what_is_not_signed_by_who_is_trusted_or_is_for_no_such_model_does_not_come(user: AdapterUser) -> None:
    hive = user.hive
    user.made("unsigned", 1, by="")
    user.made("unknown", 2, by=STRANGER)
    tampered = user.made("tampered", 3)
    with tampered.path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    forged = user.made("forged", 4)
    shutil.copy(user.source / "unknown.gguf.sig", f"{forged.path}.sig")
    user.made("garbage", 5, garbage=True)
    user.made("large", 6, rank=16)
    user.made("good", 7)
    (user.source / "link.gguf").symlink_to(user.directory / "team.key")
    for name, model, code, exit_code in (
        ("unsigned", BASE, "signature_unverifiable", 4),
        ("unknown", BASE, "signature_unverifiable", 4),
        ("tampered", BASE, "signature_mismatch", 4),
        ("forged", BASE, "signature_unverifiable", 4),
        ("good", "other", "adapter_mismatch", 2),
        ("large", BASE, "adapter_mismatch", 2),
        ("garbage", BASE, "adapter_unsafe", 2),
        ("link", BASE, "adapter_unsafe", 2),
        ("nothing", BASE, "not_found", 3),
    ):
        command = ("adapter", "pull", f"{name}.gguf", "--base", model)
        assert user.refused(*command) == (exit_code, code), name
        job = ended(hive, hive.post("/api/adapters", {"path": f"{name}.gguf", "base": model}))
        assert (job["state"], job["error"]["code"]) == ("failed", code), name
    with pytest.raises(HiveError) as unknown:
        hive.post("/api/adapters", {"path": "unsigned.gguf", "base": "no-model"})
    assert unknown.value.code == "model_not_found"
    assert hive.get("/api/adapters")["adapters"] == []
    assert not [path for path in (hive.state / "adapters").rglob("*") if path.is_file()]
    refused = [row for row in user.acts() if row["act"] == "adapter.refused"]
    assert len(refused) == 2 * 8
    assert {row["detail"]["code"] for row in refused} == {
        *("signature_unverifiable", "signature_mismatch", "adapter_mismatch", "adapter_unsafe")
    }


def test_an_adapter_from_the_signers_desk_to_the_revoked_key(user: AdapterUser, alice: WordAsker) -> None:
    hive, red = user.hive, user.made("red", 1)
    assert alice.ask("red").status == 404
    pulled = user.pull("red")
    assert pulled.code == 0, pulled
    digest = pulled.answer["result"]["digest"]
    assert pulled.answer["result"]["key_id"] == user.key_id
    with pytest.raises(HiveError) as never:
        hive.get("/api/adapters/nobody/load-status")
    assert never.value.code == "adapter_not_found"
    assert hive.get("/api/adapters/red/load-status")["state"] == "none"
    loaded = user.ok("adapter", "load", "red", "--json").answer
    assert (loaded["state"], loaded["result"]["changed"]) == ("done", True)
    assert alice.ask("red").text.split() == [red.word] * 3
    told = [model["id"] for model in hive.get("/v1/capabilities")["models"]["loaded"]]
    assert [name for name in told if "red" in name] == ["red"], "by the name that it is asked for"
    assert hive.get("/health")["modelsLoaded"] == len(told)
    again = user.ok("adapter", "load", "red", "--json").answer
    assert (again["state"], again["result"]["changed"]) == ("done", False)
    assert user.refused("adapter", "remove", "red", "--yes") == (1, "wrong_state")
    with pytest.raises(HiveError) as kept:
        hive.client().delete("/api/adapters/red")
    assert (kept.value.status, kept.value.code) == (409, "wrong_state")
    status = hive.get("/api/adapters/red/load-status")
    hive.restart("daemon")
    until(lambda: alice.ask("red").text.split() == [red.word] * 3, within_s=60, what="red answers as before")
    assert hive.get("/api/adapters/red/load-status") == status | {"job": again["id"], "took_s": None}
    (row,) = hive.get("/api/models/deployed")["deployed"]
    assert (row["kind"], row["name"], row["digest"], row["state"]) == ("adapter", "red", digest, "loaded")
    assert "hive_adapters_loaded" in b"".join(hive.client().lines("/metrics")).decode()

    revoked = user.ok("adapter", "revoke", user.key_id, "--json").answer
    assert revoked["unloaded"] == ["red"]
    gone = alice.ask("red")
    assert (gone.status, "adapter_not_loaded" in gone.text) == (404, True)
    assert alice.ask(BASE).status == 200
    assert user.refused("adapter", "load", "red") == (4, "signature_unverifiable")
    assert user.refused("adapter", "pull", "red.gguf", "--base", BASE) == (4, "signature_unverifiable")
    view = user.ok("adapter", "show", "red", "--json").answer
    assert (view["state"], view["served"], user.key_id in view["last_error"]) == ("absent", None, True)
    hive.stop()
    hive.start()
    until(lambda: hive.get("/api/adapters")["adapters"], within_s=30, what="the adapters are listed")
    assert hive.get("/api/adapters/red")["served"] is None, "what was revoked is not loaded at a start either"
    user.ok("adapter", "remove", "red", "--yes")
    assert hive.get("/api/adapters")["adapters"] == []
    told = [row["act"] for row in reversed(user.acts())]
    assert told[:2] == ["adapter.installed", "adapter.loaded"]
    assert {"adapter.revoked", "adapter.refused", "adapter.removed"} <= set(told)


def test_a_key_that_is_revoked_while_hive_is_away_has_nothing_loaded_at_the_next_start(user: AdapterUser) -> None:
    hive = user.hive
    user.made("red", 1)
    user.pull("red")
    user.ok("adapter", "load", "red")
    hive.stop()
    answer = user.run("adapter", "revoke", user.key_id, "--json")
    assert (answer.code, answer.answer["told"]) == (0, False)
    hive.start()
    view = until(
        lambda: (seen := hive.get("/api/adapters/red"))["state"] == "absent" and seen, within_s=30, what="it is absent"
    )
    assert (view["served"], user.key_id[:12] in view["last_error"]) == (None, True)
    with closing(WordAsker(hive, "alice")) as alice:
        assert alice.ask("red").status == 404


def test_files_that_were_changed_since_they_were_installed_are_not_loaded(user: AdapterUser, alice: WordAsker) -> None:
    hive = user.hive
    user.made("red", 1)
    user.pull("red")
    path = Path(hive.get("/api/adapters/red")["path"])
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert user.refused("adapter", "load", "red") == (4, "signature_mismatch")
    assert hive.get("/api/adapters/red/load-status")["error"]["code"] == "signature_mismatch"
    assert alice.ask("red").status == 404
    path.write_bytes(content)
    user.ok("adapter", "load", "red")
    assert alice.ask("red").status == 200


def test_a_governed_load_needs_the_word_of_its_signers_whichever_way_it_is_asked_for(
    user: AdapterUser, alice: WordAsker
) -> None:
    hive = user.hive
    red = user.made("red", 1)
    user.govern("[signers]\n" + user.ok("op", "keygen", "ann", online=False).out + RULES)
    assert user.refused("adapter", "pull", "red.gguf", "--base", BASE) == (4, "op_token_required")
    user.signed("pull.op", "adapter-pull", "path=red.gguf", f"base={BASE}", by=("ann",))
    user.ok("op", "submit", "pull.op")
    assert user.refused("adapter", "load", "red") == (4, "op_token_required")
    with pytest.raises(HiveError) as refused:
        hive.post("/api/adapters/red/load")
    assert (refused.value.status, refused.value.code) == (403, "op_token_required")
    with client_of(hive) as client:
        asked = client.http.post("/llm/adapters/red/load")
        assert (asked.status_code, asked.json()["error"]["code"]) == (403, "op_token_required")
        assert client.http.get("/llm/adapters/red/load-status").status_code == 404
        user.signed("load.op", "adapter-load", "name=red", by=("ann",))
        token = token_in(user.directory / "load.op")
        begun = client.http.post("/llm/adapters/red/load", json={"verifiedOpToken": token})
        assert begun.status_code == 202, begun.text
        assert begun.json()["jobId"]
        done = until(
            lambda: (told := client.http.get("/llm/adapters/red/load-status").json())["status"] != "loading" and told,
            within_s=60,
            what="it is loaded",
        )
        assert (done["status"], done["jobId"]) == ("completed", begun.json()["jobId"])
        replayed = client.http.post("/llm/adapters/red/load", json={"verifiedOpToken": token})
        assert (replayed.status_code, replayed.json()["error"]["code"]) == (409, "op_token_replayed")
    assert alice.ask("red").text.split() == [red.word] * 3
    assert hive.get("/api/adapters/red")["approved_by"] == "ann"
    assert user.ok("adapter", "unload", "red", "--json").answer["state"] == "done", "that has no rule"


def test_what_was_loaded_before_a_rule_stays_and_is_not_loaded_again(user: AdapterUser, alice: WordAsker) -> None:
    hive = user.hive
    red = user.made("red", 1)
    user.pull("red")
    user.ok("adapter", "load", "red")
    user.govern("[signers]\n" + user.ok("op", "keygen", "ann", online=False).out + RULES)
    hive.restart("daemon")
    until(lambda: alice.ask("red").text.split() == [red.word] * 3, within_s=60, what="it serves on")
    server = next(pid for pid in hive.servers() if b"--lora" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(server, signal.SIGKILL)
    until(lambda: "without a signature" in hive.get("/api/adapters/red")["last_error"], within_s=60, what="it is told")
    assert alice.ask("red").status in (403, 404, 503)
    user.signed("load.op", "adapter-load", "name=red", by=("ann",))
    user.ok("op", "submit", "load.op")
    assert alice.ask("red").text.split() == [red.word] * 3
