"""Governed operations at a real daemon: every way in asks, a token is good once, and a broken file opens nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.audit.approval import Approval
from hive.client.client import Client
from hive.control.governance import GovernedAct, Governor
from hive.errors import (
    ClockWentBack,
    GovernanceBroken,
    HiveError,
    NotFound,
    NotPermitted,
    OpTokenExpired,
    OpTokenInvalid,
    OpTokenMismatch,
    OpTokenRefused,
    OpTokenReplayed,
    OpTokenRequired,
    OpTokenThreshold,
)
from hive.governance.operation import OPERATIONS, Operation
from hive.governance.verdict import KEPT_S
from hive.settings.table import GovernanceSection
from hive.store import jobs, op_nonces
from hive.store.audit import Filter
from tests.api.described import ROWS
from tests.control.box import AWAKE, Box
from tests.control.conftest import box as box  # the fixture
from tests.fakes.programs import fake_ollama
from tests.governance.signing import HMAC_KEY, KEYS, hmac_token, signed
from tests.waiting import until

TINY = {"modelId": "tiny"}
SIGNERS = "[signers]\n" + "".join(f'{name} = "{key.public.text}"\n' for name, key in KEYS.items())
TWO_OF_THREE = SIGNERS + '[rules.default]\nthreshold = 2\nof = ["ann", "ben", "cy"]\n'
TOKEN, GLASS = "X-Hive-Op-Token", "X-Hive-Break-Glass"


def put(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


@pytest.fixture
def rules(box: Box) -> Path:
    return box.paths.state.parent / "governance.toml"


def token(box_id: str, *names: str, operation: str = "model-load", params: dict[str, Any] = TINY, **times: int) -> str:
    since = times.get("issued_at", int(time.time()))
    until_s = times.get("expires_at", since + 300)
    asked = Operation(operation, box_id, params, since, until_s, secrets.token_hex(16))
    return signed(asked.as_json(), *names).as_token()


def governor(box: Box) -> Governor:
    return box.services.governance


async def asked(box: Box, method: str, path: str, body: object = None, **headers: str) -> Any:
    """Asks at the unix socket, in a thread: this process is root there, and the daemon's own user."""
    client = Client(box.paths.api_socket, timeout_s=20)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    call: Callable[[], Any] = lambda: client._ask(method, path, body, {}, 20, sent)  # noqa: E731
    return await asyncio.to_thread(call)


async def load(box: Box, model: str = "tiny", **headers: str) -> Any:
    return await asked(box, "POST", f"/api/models/{model}/load", None, **headers)


async def number_of(box: Box, table: str) -> int:
    assert box.daemon is not None
    query = f"SELECT count(*) FROM {table}"
    count: int = await box.daemon._database.read(lambda conn: conn.execute(query).fetchone()[0])
    return count


class Governed:
    """A daemon with rules and an Ollama stand-in that has `tiny`."""

    def __init__(self, box: Box, rules: Path) -> None:
        self.box = box
        self.rules = rules

    @property
    def id(self) -> str:
        return governor(self.box).box


@pytest.fixture
async def with_ollama(box: Box, rules: Path) -> Any:
    with fake_ollama("tiny") as ollama:
        await box.everything(AWAKE_WITH_MODELS, backend=("ollama", ollama.address), rules=rules)
        await until(lambda: box.inference()["running"])
        yield Governed(box, rules)


AWAKE_WITH_MODELS = msgspec.structs.replace(AWAKE, inference=msgspec.structs.replace(AWAKE.inference, enabled="auto"))

# every way in ---------------------------------------------------------------------------------------------------------

BODIES: dict[str, Any] = {
    "switch": {"backend": "demo"},
    "ask_lease": {"mb": 1},
    "unload_model": {"force": True},
    "flush_cache": {"scope": "all"},
    "runner_load": {"modelId": "nothing"},
    "runner_unload": {"modelId": "nothing"},
    "runner_flush": {"scope": "all"},
    "pull_adapter": {"path": "x", "base": "nothing"},
    "trust_key": {"keyId": "00", "pem": "x"},
}
BY_BODY = ("runner_load", "runner_unload", "runner_flush", "runner_load_adapter")
"""Rows of the runner API, which bring the token in the body."""
GOVERNED = [row for row in ROWS if row.is_governed or row.name in BY_BODY]


async def test_every_governed_row_wants_a_token_where_there_is_a_rule(box: Box, rules: Path) -> None:
    put(rules, TWO_OF_THREE)
    await box.everything(rules=rules)
    assert {row.name for row in GOVERNED} >= {
        *("pull_adapter", "load_adapter", "unload_adapter", "remove_adapter", "trust_key"),
        *("load_model", "unload_model", "pin_model", "unpin_model", "switch", "ask_lease", "end_lease", "flush_cache"),
        *BY_BODY,
    }
    for row in GOVERNED:
        path = row.path.replace("{model}", "nothing").replace("{adapter}", "nothing").replace("{id}", "l-1")
        path += "" if row.name != "end_lease" else "?end=1"
        with pytest.raises(OpTokenRequired, match="needs 2 signatures of ann, ben, cy"):
            await asked_raw(box, row.method, path, BODIES.get(row.name))
    assert await number_of(box, "jobs") == await number_of(box, "op_nonces") == 0


async def asked_raw(box: Box, method: str, target: str, body: object) -> Any:
    path, _, query = target.partition("?")
    client = Client(box.paths.api_socket, timeout_s=20)
    given: dict[str, Any] = dict([query.split("=")]) if query else {}
    return await asyncio.to_thread(lambda: client._ask(method, path, body, given, 20))


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_every_operation_is_approved_by_its_signers_alone(box: Box, rules: Path, operation: str) -> None:
    put(rules, TWO_OF_THREE)
    await box.everything(rules=rules)
    act = GovernedAct(operation, TINY)
    assert governor(box).has_rule(operation)
    with pytest.raises(OpTokenRequired):
        await governor(box).approve(act, "uid:0")
    text = token(governor(box).box, "ann", "cy", operation=operation)
    approval = await governor(box).approve(GovernedAct(operation, TINY, token=text), "uid:1000")
    assert (approval.operation, approval.by) == (operation, "ann, cy")


async def test_without_a_file_roles_alone_decide_and_no_token_is_looked_at(with_ollama: Governed) -> None:
    box = with_ollama.box
    assert not governor(box).has_rule("model-load")
    for headers in ({}, {"X_Hive_Op_Token": "eyJ..."}):
        job = await load(box, **headers)
        assert (await box.job(job["id"], wait_s=20))["state"] == "done"
    assert await number_of(box, "op_nonces") == 0
    view = await asked(box, "GET", "/api/governance")
    assert (view["governed"], view["broken"], view["box"]) == (False, "", with_ollama.id)


# one token, one act ---------------------------------------------------------------------------------------------------


async def test_a_token_is_good_once_and_its_word_is_in_the_audit_table(with_ollama: Governed) -> None:
    box = with_ollama.box
    put(with_ollama.rules, TWO_OF_THREE)
    text = token(with_ollama.id, "ann", "ben")
    job = await load(box, X_Hive_Op_Token=text)
    assert (await box.job(job["id"], wait_s=20))["state"] == "done"
    with pytest.raises(OpTokenReplayed):
        await load(box, X_Hive_Op_Token=text)
    assert (await number_of(box, "jobs"), await number_of(box, "op_nonces")) == (1, 1)
    rows = await box.audit(Filter(act="order.load_model"))
    assert [(row["outcome"], row["detail"].get("approved_by")) for row in rows] == [
        ("op_token_replayed", None),
        ("ok", "ann, ben"),
    ]
    (approved,) = await box.audit(Filter(act="governance.judged"))
    assert (approved["detail"]["by"], approved["detail"]["params"]) == ("ann, ben", TINY)


async def test_the_runner_api_brings_the_token_in_its_body(with_ollama: Governed) -> None:
    """All of the body but the token is what was signed, and there is no breaking of glass."""
    box = with_ollama.box
    put(with_ollama.rules, TWO_OF_THREE)
    text = token(with_ollama.id, "ann", "ben")

    async def ask(**body: Any) -> Any:
        return await asked(box, "POST", "/v1/models/load", body, X_Hive_Break_Glass="not here")

    with pytest.raises(OpTokenRequired):
        await ask(modelId="tiny")
    with pytest.raises(OpTokenMismatch, match="evictModel"):
        await ask(modelId="tiny", evictModel="tiny", verifiedOpToken=text)
    with pytest.raises(OpTokenInvalid):
        await ask(modelId="tiny", verifiedOpToken=text[:-1])
    assert await number_of(box, "op_nonces") == 0
    task = await ask(modelId="tiny", verifiedOpToken=text)
    assert task["taskId"].startswith("load-")
    with pytest.raises(OpTokenReplayed):
        await ask(modelId="tiny", verifiedOpToken=text)
    assert await box.audit(Filter(act="governance.break_glass")) == []


async def test_of_submits_at_once_one_wins(with_ollama: Governed) -> None:
    box = with_ollama.box
    put(with_ollama.rules, TWO_OF_THREE)
    text = token(with_ollama.id, "ann", "ben")
    came = await asyncio.gather(*(load(box, X_Hive_Op_Token=text) for _ in range(4)), return_exceptions=True)
    won = [each for each in came if not isinstance(each, BaseException)]
    assert len(won) == 1, came
    codes = {each.code for each in came if isinstance(each, HiveError)}
    assert codes <= {"op_token_replayed", "model_busy"}, codes
    assert (await number_of(box, "jobs"), await number_of(box, "op_nonces")) == (1, 1)


async def test_two_approvals_of_one_token_burn_once(with_ollama: Governed) -> None:
    """Both were asked for before either was written down: the transaction of the job decides."""
    box = with_ollama.box
    put(with_ollama.rules, TWO_OF_THREE)
    act = GovernedAct("model-load", TINY, token=token(with_ollama.id, "ann", "ben"))
    first, second = await governor(box).approve(act, "uid:0"), await governor(box).approve(act, "uid:0")
    jobs_ = box.services.jobs
    await jobs_.begin("model.load", plan={"model": "tiny"}, progress="", actor="uid:0", also=first.burn)
    with pytest.raises(OpTokenReplayed):
        await jobs_.begin("model.load", plan={"model": "tiny"}, progress="", actor="uid:0", also=second.burn)
    assert (await number_of(box, "jobs"), await number_of(box, "op_nonces")) == (1, 1)


async def test_a_refused_order_burns_nothing(with_ollama: Governed) -> None:
    box = with_ollama.box
    put(with_ollama.rules, TWO_OF_THREE)
    unknown = token(with_ollama.id, "ann", "ben", params={"modelId": "gpt-9"})
    for _ in range(2):
        with pytest.raises(NotFound):
            await load(box, "gpt-9", X_Hive_Op_Token=unknown)
    assert await number_of(box, "op_nonces") == 0


@pytest.mark.parametrize(
    ("error", "made"),
    [
        (OpTokenInvalid, lambda id: "eyJ..."),
        (OpTokenInvalid, lambda id: "eyJ" + "h" * 16_300),
        (OpTokenMismatch, lambda id: token("box-other", "ann", "ben")),
        (OpTokenMismatch, lambda id: token(id, "ann", "ben", params={"modelId": "other"})),
        (OpTokenMismatch, lambda id: token(id, "ann", "ben", operation="model-unload")),
        (OpTokenExpired, lambda id: token(id, "ann", "ben", issued_at=int(time.time()) + 30)),
        (OpTokenExpired, lambda id: token(id, "ann", "ben", issued_at=int(time.time()) - 301)),
        (OpTokenThreshold, lambda id: token(id, "ann")),
        (OpTokenThreshold, lambda id: token(id, "ann", "dee")),
        (OpTokenInvalid, lambda id: hmac_token(modelId="tiny", issuedAt=int(time.time()))),
    ],
)
async def test_a_bad_token_does_nothing_and_burns_nothing(
    with_ollama: Governed, error: type[OpTokenRefused], made: Callable[[str], str]
) -> None:
    put(with_ollama.rules, TWO_OF_THREE)
    with pytest.raises(error):
        await load(with_ollama.box, X_Hive_Op_Token=made(with_ollama.id))
    assert await number_of(with_ollama.box, "op_nonces") == await number_of(with_ollama.box, "jobs") == 0


async def test_a_token_twice_in_one_request_is_refused(with_ollama: Governed) -> None:
    """Nobody can say which of them is meant."""
    put(with_ollama.rules, TWO_OF_THREE)
    text = token(with_ollama.id, "ann", "ben").encode()
    raw = b"POST /api/models/tiny/load HTTP/1.1\r\nHost: hive\r\nConnection: close\r\nContent-Length: 0\r\n"
    raw += b"X-Hive-Op-Token: " + text + b"\r\nX-Hive-Op-Token: " + text + b"\r\n\r\n"
    reader, writer = await asyncio.open_unix_connection(with_ollama.box.paths.api_socket)
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"given 2 times" in answer


async def test_what_a_rule_says_holds_as_soon_as_it_is_written(with_ollama: Governed) -> None:
    box, rules = with_ollama.box, with_ollama.rules
    job = await load(box)
    await box.job(job["id"], wait_s=20)
    put(rules, TWO_OF_THREE)
    assert governor(box).has_rule("model-load")
    with pytest.raises(OpTokenRequired):
        await load(box)
    put(rules, SIGNERS + '[rules.model-unload]\nthreshold = 1\nof = ["ann"]\n')
    assert (governor(box).has_rule("model-load"), governor(box).has_rule("model-unload")) == (False, True)
    await load(box)
    rules.unlink()
    assert not governor(box).has_rule("model-unload")


# the file -------------------------------------------------------------------------------------------------------------


def _is_written_by_all(path: Path) -> None:
    path.chmod(0o666)


def _is_a_strangers(path: Path) -> None:
    os.chown(path, 4711, -1)


def _is_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _leads_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nothing")


def _is_in_a_directory_of_all(path: Path) -> None:
    path.parent.chmod(0o777)


def _has_a_typo(path: Path) -> None:
    path.write_text(TWO_OF_THREE.replace("threshold", "treshold"))


def _is_no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize(
    "spoil",
    [
        _is_written_by_all,
        pytest.param(_is_a_strangers, marks=pytest.mark.root),
        _is_a_directory,
        _leads_nowhere,
        _is_in_a_directory_of_all,
        _has_a_typo,
        _is_no_text,
    ],
)
async def test_a_broken_file_opens_nothing(with_ollama: Governed, spoil: Callable[[Path], None]) -> None:
    box, rules = with_ollama.box, put(with_ollama.rules, TWO_OF_THREE)
    text = token(with_ollama.id, "ann", "ben")
    spoil(rules)
    try:
        for headers in ({}, {"X_Hive_Op_Token": text}):
            with pytest.raises(GovernanceBroken, match=str(rules.parent)):
                await load(box, **headers)
        assert governor(box).has_rule("lease-run"), "what it says is not known, so it may say anything"
        view = await asked(box, "GET", "/api/governance")
        assert (view["governed"], bool(view["broken"])) == (True, True)
        assert await number_of(box, "jobs") == 0
    finally:
        rules.parent.chmod(0o700)


async def test_an_installed_hive_takes_the_rules_of_root_alone(box: Box, rules: Path) -> None:
    """The daemon's own user must not be able to write what the daemon obeys."""
    await box.everything(rules=rules)
    assert box.daemon is not None
    put(rules, TWO_OF_THREE)
    given: Any = {"database": box.daemon._database, "audit_log": box.services.audit_log, "hmac_key_file": str}
    installed = Governor(rules, installed=True, **given)
    assert installed._owners == {0}
    assert governor(box)._owners == {0, os.geteuid()}


# root's own way -------------------------------------------------------------------------------------------------------


@pytest.mark.root
async def test_root_breaks_the_glass_and_that_is_in_the_audit_table_first(with_ollama: Governed) -> None:
    box = with_ollama.box
    put(with_ollama.rules, TWO_OF_THREE)
    job = await load(box, X_Hive_Break_Glass="ann and ben are on a plane")
    assert (await box.job(job["id"], wait_s=20))["state"] == "done"
    (row,) = await box.audit(Filter(act="governance.break_glass"))
    assert (row["actor"], row["detail"]["name"], row["detail"]["reason"]) == (
        "uid:0",
        "model-load",
        "ann and ben are on a plane",
    )
    (order,) = await box.audit(Filter(act="order.load_model"))
    assert order["detail"]["approved_by"] == "break-glass: ann and ben are on a plane"
    assert order["id"] > row["id"]


@pytest.mark.root
async def test_the_glass_may_be_broken_where_the_file_is_broken(with_ollama: Governed) -> None:
    box = with_ollama.box
    put(with_ollama.rules, "nonsense")
    with pytest.raises(GovernanceBroken):
        await load(box)
    await load(box, X_Hive_Break_Glass="the file is broken")
    (row,) = await box.audit(Filter(act="governance.break_glass"))
    assert "no TOML" in row["detail"]["broken"]


async def test_nobody_else_breaks_the_glass(box: Box, rules: Path) -> None:
    put(rules, TWO_OF_THREE)
    await box.everything(rules=rules)
    for actor in ("uid:1000", "token:ci", "internal", "api-token", "proxy", "uid:00"):
        with pytest.raises(NotPermitted, match="only root on the unix socket"):
            await governor(box).approve(GovernedAct("model-load", TINY, break_glass="me too"), actor)
    for reason in (" ", "a\nb", "x" * 201, "\x1b[31m"):
        with pytest.raises(HiveError, match="wants a reason"):
            await governor(box).approve(GovernedAct("model-load", TINY, break_glass=reason), "uid:0")
    with pytest.raises(HiveError, match="either"):
        await governor(box).approve(GovernedAct("model-load", TINY, token="x", break_glass="y"), "uid:0")
    assert await box.audit(Filter(act="governance.break_glass")) == []


# clocks ---------------------------------------------------------------------------------------------------------------


async def test_a_clock_that_went_back_is_noticed(with_ollama: Governed) -> None:
    box = with_ollama.box
    assert box.daemon is not None
    put(with_ollama.rules, TWO_OF_THREE)
    text = token(with_ollama.id, "ann", "ben")
    seen = time.time() + 50
    await box.daemon._database.write(lambda conn: op_nonces.see(conn, seen))
    job = await load(box, X_Hive_Op_Token=text)  # a minute is nothing
    await box.job(job["id"], wait_s=20)
    await box.daemon._database.write(lambda conn: op_nonces.see(conn, seen + 600))
    with pytest.raises(ClockWentBack, match="behind a time it has seen"):
        await load(box, X_Hive_Op_Token=token(with_ollama.id, "ann", "ben"))


async def mark(box: Box) -> float:
    assert box.daemon is not None
    row = await box.daemon._database.read(op_nonces.box)
    assert row is not None
    return row.clock


async def test_the_mark_of_the_clock_moves_without_a_token_that_is_used(
    with_ollama: Governed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moved only with such a token: in a quiet box the clock could be set back to where another one still held."""
    box = with_ollama.box
    assert box.daemon is not None
    put(with_ollama.rules, TWO_OF_THREE)

    async def forget() -> None:
        assert box.daemon is not None
        await box.daemon._database.write(lambda conn: conn.execute("UPDATE op_box SET clock = 1").rowcount)

    await forget()
    with pytest.raises(OpTokenExpired):
        await load(box, X_Hive_Op_Token=token(with_ollama.id, "ann", "ben", issued_at=int(time.time()) - 301))
    assert await mark(box) > 1
    await forget()
    monkeypatch.setattr("hive.control.governance.SEEN_EVERY_S", 0.01)
    running = asyncio.create_task(governor(box).run())
    for _ in range(2000):
        if await mark(box) > 1:
            break
        await asyncio.sleep(0.01)
    assert await mark(box) > 1
    running.cancel()
    await forget()
    await governor(box).begin()
    assert await mark(box) > 1


async def test_a_used_nonce_outlives_its_token_by_ten_minutes_and_the_mark_covers_the_rest(box: Box) -> None:
    """A nonce is forgotten only at a time from which the mark refuses every clock at which its token would hold."""
    await box.everything()
    assert box.daemon is not None
    write = box.daemon._database.write

    def use(nonce: str, now: float) -> Callable[[Any], bool]:
        def work(conn: Any) -> bool:
            op_nonces.see(conn, now)
            return op_nonces.use(conn, nonce, "model-load", "ann", now=now, keep_until=now + 300 + KEPT_S)

        return work

    start = time.time() + 10_000
    assert await write(use("a", start))
    assert not await write(use("a", start + 300 + KEPT_S)), "still known"
    assert await write(use("b", start + 301 + KEPT_S))
    assert not await write(lambda conn: op_nonces.is_used(conn, "a")), "forgotten"
    row = await write(op_nonces.box)
    assert row is not None
    assert row.clock - 60 > start + 300, "at which the token has expired"


async def test_the_id_of_a_box_stays(box: Box, rules: Path) -> None:
    await box.everything(rules=rules)
    id = governor(box).box
    assert id.startswith("box-")
    await box.stop_daemon()
    await box.start_daemon(rules=rules)
    assert governor(box).box == id


# the original specification's form ------------------------------------------------------------------------------------


@pytest.fixture
async def with_hmac(box: Box, rules: Path) -> Any:
    key = box.paths.state.parent / "model-api.key"
    key.write_bytes(HMAC_KEY)
    key.chmod(0o600)
    wanted = msgspec.structs.replace(AWAKE_WITH_MODELS, governance=GovernanceSection(hmac_key_file=str(key)))
    with fake_ollama("tiny") as ollama:
        await box.everything(wanted, backend=("ollama", ollama.address), rules=rules)
        await until(lambda: box.inference()["running"])
        yield Governed(box, rules)


def own_hmac() -> str:
    return hmac_token(modelId="tiny", issuedAt=int(time.time()))


async def test_with_a_key_file_alone_the_original_operations_need_its_token(with_hmac: Governed) -> None:
    box = with_hmac.box
    with pytest.raises(OpTokenRequired, match="needs an HMAC"):
        await load(box)
    text = own_hmac()
    job = await load(box, X_Hive_Op_Token=text)
    assert (await box.job(job["id"], wait_s=20))["state"] == "done"
    with pytest.raises(OpTokenReplayed):
        await load(box, X_Hive_Op_Token=text)
    (row,) = [row for row in await box.audit(Filter(act="order.load_model")) if row["outcome"] == "ok"]
    assert row["detail"]["approved_by"] == "hmac"
    assert not governor(box).has_rule("lease-run")


async def test_the_original_token_is_taken_as_an_object_too(with_hmac: Governed) -> None:
    """Signed are its bytes as they stand in the body: `json.dumps` here, `JSON.stringify` there."""
    text = hmac_token(modelId="tiny", issuedAt=int(time.time()), spaced=True)
    body = f'{{"modelId": "tiny", "verifiedOpToken": {text}}}'.encode()
    raw = b"POST /v1/models/load HTTP/1.1\r\nHost: hive\r\nConnection: close\r\nContent-Type: application/json\r\n"
    raw += b"Content-Length: %d\r\n\r\n" % len(body) + body
    reader, writer = await asyncio.open_unix_connection(with_hmac.box.paths.api_socket)
    writer.write(raw)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 202 "), answer


def swap_by_hmac() -> GovernedAct:
    return GovernedAct("model-load", {**TINY, "evictModel": "small"}, token=own_hmac())


async def test_one_that_is_enough_for_an_unload_too_is_enough_for_the_model_that_leaves(with_hmac: Governed) -> None:
    """The original specification's own body, a load with `evictModel`, was refused where there is a key alone."""
    box, only_loads = with_hmac.box, "[rules.model-load]\nthreshold = 0\nhmac = true\n"
    assert (await governor(box).approve(swap_by_hmac(), "uid:1000")).may_evict
    put(with_hmac.rules, only_loads + "[rules.model-unload]\nthreshold = 0\nhmac = true\n")
    assert (await governor(box).approve(swap_by_hmac(), "uid:1000")).may_evict
    put(with_hmac.rules, SIGNERS + only_loads + '[rules.model-unload]\nthreshold = 1\nof = ["ann"]\n')
    with pytest.raises(OpTokenThreshold, match="small would leave"):
        await governor(box).approve(swap_by_hmac(), "uid:1000")
    assert await number_of(box, "op_nonces") == 0


async def test_rules_say_where_the_hmac_is_enough(with_hmac: Governed) -> None:
    box = with_hmac.box
    put(with_hmac.rules, TWO_OF_THREE)
    with pytest.raises(OpTokenInvalid, match="are not taken here"):
        await load(box, X_Hive_Op_Token=own_hmac())
    put(with_hmac.rules, TWO_OF_THREE + '[rules.model-load]\nthreshold = 1\nof = ["ann"]\nhmac = true\n')
    job = await load(box, X_Hive_Op_Token=own_hmac())
    await box.job(job["id"], wait_s=20)
    with pytest.raises(OpTokenRequired, match="1 signature of ann, or an HMAC"):
        await load(box)


def _is_short(path: Path) -> None:
    path.write_bytes(b"short")


def _is_readable_by_all(path: Path) -> None:
    path.chmod(0o644)


@pytest.mark.parametrize("spoil", [_is_short, _is_readable_by_all, Path.unlink])
async def test_a_key_that_is_none_opens_nothing(with_hmac: Governed, spoil: Callable[[Path], None]) -> None:
    spoil(Path(with_hmac.box.services.settings.governance.hmac_key_file))
    with pytest.raises(GovernanceBroken, match=r"model-api\.key"):
        await load(with_hmac.box, X_Hive_Op_Token=own_hmac())


# approvals ------------------------------------------------------------------------------------------------------------


async def test_an_approval_is_for_its_operation_alone(box: Box) -> None:
    """A handler that asked for something else opens nothing."""
    await box.everything()
    services, wrong = box.services, Approval("cache-flush")
    given: Any = None
    orders: list[Callable[[], Awaitable[object]]] = [
        lambda: services.pool.load("a", "uid:0", approval=wrong),
        lambda: services.pool.unload("a", "uid:0", approval=wrong),
        lambda: services.pool.pin("a", "uid:0", approval=wrong),
        lambda: services.pool.unpin("a", "uid:0", approval=wrong),
        lambda: services.models.load("a", "uid:0", approval=wrong),
        lambda: services.models.unload("a", "uid:0", approval=wrong),
        lambda: services.switcher.begin("demo", "uid:0", approval=wrong),
        lambda: services.leases.end("l-1", given, approval=wrong),
    ]
    for order in orders:
        with pytest.raises(GovernanceBroken, match="an approval of cache-flush was taken for"):
            await order()
    assert await box.daemon._database.read(lambda conn: jobs.recent(conn, 10)) == []  # type: ignore[union-attr]
