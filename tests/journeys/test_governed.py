"""Governed operations of a whole Hive, by its command line: two signers, one box, a daemon that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.cli.op_options import token_in
from hive.client.gpu_boss import GPUBoss
from hive.errors import HiveError, OpTokenMismatch, OpTokenReplayed, OpTokenRequired
from tests.fakes.programs import fake_ollama
from tests.journeys.stack import Stack, stack, until


class Came(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        return json.loads(self.out)


class Signers:
    """`hive op` in a directory of its own, as its signers and an operator call it."""

    def __init__(self, hive: Stack, directory: Path) -> None:
        self.hive = hive
        self.directory = directory

    def run(self, *words: str, online: bool = True, stdin: str = "") -> Came:
        """`online` False: no Hive can be found from there."""
        environment = {name: text for name, text in os.environ.items() if not name.startswith("HIVE_")}
        where = ["--state-dir", str(self.hive.state)] if online else []
        if not online:
            environment |= {"XDG_RUNTIME_DIR": str(self.directory / "no"), "HIVE_SOCKET": str(self.directory / "none")}
        command = [sys.executable, "-m", "hive", *words[:2], *where, *words[2:]]
        done = subprocess.run(
            command, cwd=self.directory, env=environment, capture_output=True, text=True, input=stdin, timeout=60
        )
        return Came(done.returncode, done.stdout, done.stderr)

    def ok(self, *words: str, online: bool = True) -> Came:
        came = self.run(*words, online=online)
        assert came.code == 0, f"{words}: {came}"
        return came

    @property
    def rules(self) -> Path:
        return self.hive.state.parent / "governance.toml"

    def govern(self, text: str) -> None:
        self.rules.write_text(text)
        self.rules.chmod(0o644)

    @property
    def box(self) -> str:
        return str(self.ok("op", "show", "--json").answer["box"])

    def signed(self, file: str, *words: str, by: tuple[str, ...] = ("ann", "ben")) -> str:
        self.ok("op", "request", *words, "--audience", self.box, "--out", file)
        for name in by:
            self.ok("op", "sign", file, "--key", f"{name}.key", "--yes", online=False)
        return file


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signers]:
    with fake_ollama("tiny", "small") as ollama, stack(url=ollama.address) as hive:
        made = Signers(hive, tmp_path_factory.mktemp("signers"))
        lines = [made.ok("op", "keygen", name, online=False).out for name in ("ann", "ben", "cy")]
        rule = '[rules.default]\nthreshold = 2\nof = ["ann", "ben"]\n[rules.cache-flush]\nthreshold = 1\nof = ["cy"]\n'
        made.govern("[signers]\n" + "".join(lines) + rule)
        until(lambda: hive.get("/api/system/inference")["running"], within_s=20, what="a backend")
        yield made


def loaded(hive: Stack) -> dict[str, bool]:
    return {model["name"].removesuffix(":latest"): model["loaded"] for model in hive.get("/api/models")["models"]}


def test_a_secret_key_is_in_a_file_of_its_own_and_nowhere_else(signers: Signers) -> None:
    came = signers.ok("op", "keygen", "dee", "--json", online=False)
    path = signers.directory / "dee.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = path.read_text().splitlines()[1]
    assert secret not in came.out + came.err
    again = signers.run("op", "keygen", "dee", online=False)
    assert (again.code, "stays as it is" in again.err) == (2, True)
    assert path.read_text().splitlines()[1] == secret
    path.chmod(0o640)
    signers.signed("dee.op", "model-load", "modelId=tiny", by=())
    came = signers.run("op", "sign", "dee.op", "--key", "dee.key", "--yes", online=False)
    assert (came.code, "others can get at it" in came.err, secret in came.err) == (4, True, False)


def test_an_operation_is_asked_for_signed_shown_verified_and_sent(signers: Signers) -> None:
    hive, rules = signers.hive, ("--rules", str(signers.rules))
    asked = signers.ok("op", "request", "model-load", "modelId=tiny", "--out", "load.op", "--json").answer
    assert (asked["params"], asked["expires_at"] - asked["issued_at"]) == ({"modelId": "tiny"}, 300)
    assert asked["audience"] == signers.box, "the Hive that answers is meant"
    refused = signers.run("op", "verify", "load.op", *rules, online=False)
    assert (refused.code, "0 of 2 signatures that count; others who may sign: ann, ben" in refused.err) == (4, True)
    assert signers.run("op", "submit", "load.op").code == 4
    unsigned = (signers.directory / "load.op").read_bytes()
    asking = signers.run("op", "sign", "load.op", "--key", "ann.key", online=False)
    assert (asking.code, "modelId" in asking.err, "--yes" in asking.err) == (2, True, True)
    assert (signers.directory / "load.op").read_bytes() == unsigned
    for name in ("ann", "ann", "cy"):
        signers.ok("op", "sign", "load.op", "--key", f"{name}.key", "--yes", online=False)
    refused = signers.run("op", "verify", "load.op", *rules, online=False)
    assert "1 of 2 signatures that count (ann)" in refused.err
    sent = signers.run("op", "submit", "load.op", "--json")
    assert (sent.code, json.loads(sent.err)["code"]) == (4, "op_token_threshold")
    signers.ok("op", "sign", "load.op", "--key", "ben.key", "--yes", online=False)
    shown = signers.ok("op", "show", "load.op", "--json", online=False).answer
    assert (shown["operation"], len(shown["signed_by"])) == ("model-load", 3)
    verified = signers.ok("op", "verify", "load.op", *rules, "--audience", signers.box, "--json", online=False).answer
    assert verified["signers"] == ["ann", "ben"]
    other = signers.run("op", "verify", "load.op", *rules, "--audience", "box-other", online=False)
    assert (other.code, "this box is box-other" in other.err) == (4, True)
    assert not loaded(hive)["tiny"]
    done = signers.ok("op", "submit", "load.op", "--json").answer
    assert (done["kind"], done["state"]) == ("model.load", "done")
    assert loaded(hive)["tiny"]
    replayed = signers.run("op", "submit", "load.op", "--json")
    assert json.loads(replayed.err)["code"] == "op_token_replayed"


@pytest.mark.wide
def test_what_the_runner_api_alone_has_is_sent_there(signers: Signers) -> None:
    hive = signers.hive
    until(lambda: loaded(hive)["tiny"], within_s=10, what="tiny loaded")
    done = signers.ok(
        "op", "submit", signers.signed("evict.op", "model-load", "modelId=small", "evictModel=tiny"), "--json"
    )
    assert (done.answer["status"], done.answer["modelId"]) == ("completed", "small")
    assert loaded(hive) == {"tiny": False, "small": True}
    signers.ok("op", "submit", signers.signed("back.op", "model-load", "modelId=tiny", "evictModel=small"))
    assert loaded(hive) == {"tiny": True, "small": False}
    flush = signers.signed("flush.op", "cache-flush", "scope=tenant", "tenantId=acme", by=("ann", "ben"))
    assert signers.run("op", "submit", flush).code == 4, "the rule of this one names cy"
    flushed = signers.ok(
        "op", "submit", signers.signed("f.op", "cache-flush", "scope=all", by=("cy",)), "--json"
    ).answer
    assert flushed["flushed"] is True


def test_a_token_that_was_used_is_not_good_again_after_kill_9(signers: Signers) -> None:
    hive = signers.hive
    file = signers.signed("killed.op", "model-unload", "modelId=tiny")
    unused = signers.signed("unused.op", "model-load", "modelId=tiny")
    signers.ok("op", "submit", file)
    hive.restart("daemon")
    until(lambda: hive.get("/api/system/inference")["running"], within_s=20, what="a backend")
    came = signers.run("op", "submit", file, "--json")
    assert json.loads(came.err)["code"] == "op_token_replayed"
    signers.ok("op", "submit", unused)


@pytest.mark.wide
def test_killed_in_the_middle_of_orders_no_token_is_used_without_its_job(signers: Signers) -> None:
    """Each token is either good still, or its job is in the table: never one without the other."""
    hive = signers.hive
    signers.ok("op", "submit", signers.signed("m.op", "model-load", "modelId=small"))  # what is loaded is quickly said
    files = [signers.signed(f"m{number}.op", "model-load", "modelId=small") for number in range(6)]
    jobs = {job["id"] for job in hive.get("/api/jobs")["jobs"]}
    tokens = [{"X-Hive-Op-Token": token_in(signers.directory / file)} for file in files]
    one_is_begun, client = threading.Event(), hive.client()

    def send(headers: dict[str, str]) -> None:
        with contextlib.suppress(HiveError):  # the daemon may be gone by then
            client.post("/api/models/small/load", headers=headers)
        one_is_begun.set()

    senders = [threading.Thread(target=send, args=(headers,)) for headers in tokens]
    for sender in senders:
        sender.start()
    one_is_begun.wait(60)
    killed = hive.kill("daemon")
    for sender in senders:
        sender.join()
    hive.wait_for_next("daemon", killed)
    until(lambda: hive.get("/api/system/inference")["running"], within_s=20, what="a backend")
    begun = len([job for job in hive.get("/api/jobs")["jobs"] if job["id"] not in jobs])
    used = 0
    for file in files:
        came = signers.run("op", "submit", file, "--json")
        used += came.code != 0 and json.loads(came.err)["code"] == "op_token_replayed"
    assert used == begun > 0


def test_every_order_takes_the_token_or_the_reason_of_root(signers: Signers) -> None:
    """A token as a file of the order itself, as for leases; the glass, which only root can break."""
    hive = signers.hive
    refused = signers.run("model", "load", "small")
    assert (refused.code, "needs 2 signatures of ann, ben" in refused.err) == (4, True)
    signers.ok("model", "load", "small", "--op-token", signers.signed("own.op", "model-load", "modelId=small"))
    assert loaded(hive)["small"]
    both = signers.run("model", "unload", "small", "--op-token", "own.op", "--break-glass", "fire")
    assert both.code == 2
    glass = signers.run("model", "unload", "small", "--break-glass", "ann is ill")
    if os.geteuid():
        assert (glass.code, "only root" in glass.err) == (4, True)
        return
    assert glass.code == 0, glass
    events = signers.ok("audit", "list", "--json", "--act", "governance.break_glass").answer["rows"]
    assert [row["detail"]["reason"] for row in events] == ["ann is ill"]


@pytest.mark.wide
def test_a_load_that_says_what_leaves_is_signed_with_that(signers: Signers) -> None:
    words = ("model", "load", "tiny", "--evict", "small", "--json")
    signers.ok("op", "submit", signers.signed("there.op", "model-load", "modelId=small"))
    if loaded(signers.hive)["tiny"]:  # one that is there already is answered at once, and nothing leaves for it
        signers.ok("op", "submit", signers.signed("gone.op", "model-unload", "modelId=tiny"))
    refused = signers.run(*words)
    assert (refused.code, json.loads(refused.err)["code"]) == (4, "op_token_required")
    other = signers.run(*words, "--op-token", signers.signed("less.op", "model-load", "modelId=tiny"))
    assert (other.code, json.loads(other.err)["code"]) == (4, "op_token_mismatch")
    file = signers.signed("swap.op", "model-load", "modelId=tiny", "evictModel=small")
    assert signers.ok(*words, "--op-token", file).answer["state"] == "done"
    assert (loaded(signers.hive)["tiny"], loaded(signers.hive)["small"]) == (True, False)


def test_the_client_in_python_brings_the_word_of_the_signers(signers: Signers) -> None:
    client = signers.hive.client()
    file = signers.directory / signers.signed("python.op", "model-load", "modelId=small")
    with pytest.raises(OpTokenRequired):
        client.post("/api/models/small/load")
    client.post("/api/models/small/load", op_token=token_in(file))
    with pytest.raises(OpTokenReplayed):
        client.post("/api/models/small/load", op_token=token_in(file))
    boss = GPUBoss(client.path)
    with pytest.raises(OpTokenRequired, match="lease-take needs 2 signatures"), boss.acquire(1):
        pass
    params = ("vramMB=1", "gpus=1", "band=normal", "preemptible=false", "all=false", "maxS=null")
    file = signers.directory / signers.signed("take.op", "lease-take", *params)
    with pytest.raises(OpTokenMismatch), boss.acquire(2, op_token=token_in(file)):
        pass
    with boss.acquire(1, op_token=token_in(file)) as lease:
        assert lease.is_held
    with pytest.raises(OpTokenReplayed), boss.acquire(1, op_token=token_in(file)):
        pass


def test_a_token_is_for_one_box(signers: Signers) -> None:
    signers.ok("op", "request", "model-load", "modelId=tiny", "--audience", "box-elsewhere", "-o", "e.op", online=False)
    for name in ("ann", "ben"):
        signers.ok("op", "sign", "e.op", "--key", f"{name}.key", "--yes", online=False)
    came = signers.run("op", "submit", "e.op", "--json")
    assert (came.code, json.loads(came.err)["code"]) == (4, "op_token_mismatch")


@pytest.mark.parametrize(("at", "code"), [(-301, "op_token_expired"), (-100, "not_found"), (60, "op_token_expired")])
def test_an_operation_holds_from_its_time_on(signers: Signers, at: int, code: str) -> None:
    since = str(int(time.time()) + at)
    file = f"at{at}.op"
    signers.ok("op", "request", "lease-end", "id=l-4711", "--at", since, "--audience", signers.box, "-o", file)
    for name in ("ann", "ben"):
        signers.ok("op", "sign", file, "--key", f"{name}.key", "--yes", online=False)
    came = signers.run("op", "submit", file, "--json")
    assert json.loads(came.err)["code"] == code


@pytest.mark.wide
def test_what_no_signer_may_be_asked_is_refused_before_it_is_written(signers: Signers) -> None:
    for words, said in (
        (("model-lod", "modelId=x"), "did you mean `model-load`?"),
        (("model-load", "modelid=x"), "did you mean `modelId`?"),
        (("model-load",), "model-load needs modelId="),
        (("model-load", "modelId"), "expected NAME=VALUE"),
        (("model-load", "modelId=x", "modelId=y"), "each name once"),
        (("model-load", "modelId=x", "--for", "6m"), "at most 300 s"),
        (("model-load", "modelId=x", "--at", "tomorrow"), "--at: expected a time"),
    ):
        came = signers.run("op", "request", *words, "--audience", "box-1", "--out", "never.op", online=False)
        assert (came.code, said in came.err) == (2, True), came
    assert not (signers.directory / "never.op").exists()
    refused = signers.run("op", "submit", signers.signed("lease.op", "lease-run", "vramMB=100"))
    assert (refused.code, "hive lease run … --op-token lease.op" in refused.err) == (2, True)
    (signers.directory / "bad.op").write_text("{}")
    assert signers.run("op", "show", "bad.op", online=False).code == 4
    assert signers.run("op", "show", "none.op", online=False).code == 3


@pytest.mark.wide
def test_rules_that_are_broken_are_told_with_their_line_and_open_nothing(signers: Signers) -> None:
    good = signers.rules.read_text()
    try:
        signers.govern(good.replace("threshold = 2", "treshold = 2"))
        file = signers.signed("broken.op", "model-load", "modelId=tiny")
        came = signers.run("op", "submit", file, "--json")
        assert (came.code, json.loads(came.err)["code"]) == (5, "governance_broken")
        assert "line 6: rules.default.treshold: no such key" in signers.ok("op", "show").out
        came = signers.run("op", "verify", file, "--rules", str(signers.rules), online=False)
        assert (came.code, "line 6" in came.err) == (2, True)
    finally:
        signers.govern(good)
    assert "2 of 2" in signers.ok("op", "show").out
