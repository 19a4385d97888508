"""The registry over real llama-servers: orders on record, kill -9 of everything at every step, signed loads."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hive.errors import HiveError
from tests.journeys.pool_stack import SERVER_MB, llama_models, llama_rows, pool_config
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_pool import MESSAGES, client_of, slots

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
ME = f"uid:{os.getuid()}"
IS = {"loaded": {"ready"}, "loading": {"cold", "loading"}, "unloading": set[str]()}
GONE = {"cold", "failed"}
KILLS = int(os.environ.get("HIVE_CHAOS_KILLS", "12"))


@pytest.fixture
def one_of_two(tmp_path: Path) -> Iterator[Stack]:
    """Two models, room for one."""
    models = llama_models(tmp_path, ("alpha", "beta"))
    with stack(config=pool_config(SERVER_MB + 20) + llama_rows(models)) as hive:
        yield hive


def deployed(hive: Stack) -> dict[str, Any]:
    return {row["name"]: row for row in hive.get("/api/models/deployed")["deployed"]}


def states(hive: Stack) -> dict[str, str]:
    return {name: row["state"] for name, row in deployed(hive).items()}


def ended(hive: Stack, job: Any) -> Any:
    return until(
        lambda: (now := hive.get(f"/api/jobs/{job['id']}"))["state"] != "running" and now,
        within_s=60,
        what=f"{job['kind']} has ended",
    )


def load(hive: Stack, model: str) -> None:
    assert ended(hive, hive.post(f"/api/models/{model}/load"))["state"] == "done"


def test_what_was_ordered_is_on_record_over_evictions_and_the_end_of_hive(one_of_two: Stack) -> None:
    hive = one_of_two
    with pytest.raises(HiveError) as refused:
        hive.post("/api/models/nobody/load")
    assert refused.value.code == "model_not_found"
    assert deployed(hive) == {}
    assert [job for job in hive.get("/api/jobs")["jobs"] if job["kind"] == "model.load"] == []
    load(hive, "alpha")
    row = deployed(hive)["alpha"]
    assert (row["state"], row["deployed_by"], row["backend"], row["kind"]) == ("loaded", ME, "llama", "model")
    assert row["digest"]
    load(hive, "beta")
    until(lambda: states(hive) == {"alpha": "evicted", "beta": "loaded"}, within_s=20, what="alpha left for beta")
    hive.create("alice", "idler.py")
    with client_of(hive, "alice") as client:  # a request loads it again
        client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=3)
    until(lambda: states(hive) == {"alpha": "loaded", "beta": "evicted"}, within_s=20, what="beta left for alpha")
    hive.stop()
    hive.start()
    until(lambda: states(hive) == {"alpha": "absent", "beta": "evicted"}, within_s=20, what="alpha is told absent")
    assert "[registry] restore = false" in deployed(hive)["alpha"]["last_error"]
    assert deployed(hive)["alpha"]["deployed_by"] == ME
    hive.stop()
    hive._config.write_text(hive._config.read_text() + "[registry]\nrestore = true\n")
    hive.start()
    until(lambda: slots(hive)["alpha"]["state"] == "ready", within_s=60, what="alpha is loaded again")
    until(lambda: states(hive)["alpha"] == "loaded", within_s=20, what="and is told so")
    assert states(hive)["beta"] == "evicted"
    assert ended(hive, hive.post("/api/models/alpha/unload"))["state"] == "done"
    assert ended(hive, hive.post("/api/models/beta/unload"))["state"] == "done"
    assert deployed(hive) == {}
    acts = [(row["act"], row["actor"]) for row in hive.get("/api/audit")["rows"]]
    assert acts.count(("model.deployed", ME)) == 2
    assert acts.count(("model.undeployed", ME)) == 2


def on_disk(hive: Stack) -> tuple[dict[str, str], set[str]]:
    """(state of each row by name; states of the jobs), read past the daemon."""
    with contextlib.closing(sqlite3.connect(f"file:{hive.state / 'hive.db'}?mode=ro", uri=True)) as database:
        rows = dict(database.execute("SELECT name, state FROM deployments"))
        jobs = {row[0] for row in database.execute("SELECT state FROM jobs WHERE kind LIKE 'model.%load'")}
    return rows, jobs


def agree(hive: Stack) -> bool:
    """Whether disk and API say the same, and each row what its server is."""
    rows, now = on_disk(hive)[0], slots(hive)
    return states(hive) == rows and all(now[name]["state"] in IS.get(state, GONE) for name, state in rows.items())


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_kill_9_of_daemon_helper_and_server_at_every_step_leaves_nothing_half_recorded(one_of_two: Stack) -> None:
    hive, chance = one_of_two, random.Random(19)
    hive.post("/api/models/alpha/pin")
    hive.post("/api/models/alpha/unpin")
    for number in range(KILLS):
        model, order = ("alpha", "beta")[number % 2], ("load", "unload")[(number // 2) % 2]
        with contextlib.suppress(HiveError):
            hive.post(f"/api/models/{model}/{order}")
        time.sleep((number % 4) * chance.uniform(0.05, 0.25))
        victim = ("daemon", "sandbox", "server")[number % 3]
        if victim == "server":
            for pid in sorted(hive.servers()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            hive.restart(victim)
        until(lambda: "running" not in on_disk(hive)[1], within_s=60, what="no job is left running")
        until(lambda: agree(hive), within_s=60, what=f"rows say what is there after kill -9 of the {victim}")
    rows, jobs = on_disk(hive)
    assert set(rows) <= {"alpha", "beta"}
    assert jobs


def run_hive(hive: Stack, *words: str, code: int = 0) -> str:
    socket = (hive.state / "socket").read_text().strip()
    env = {**os.environ, "HIVE_SOCKET": socket}
    ran = subprocess.run([sys.executable, "-m", "hive", *words], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == code, (ran.returncode, ran.stdout, ran.stderr)
    return ran.stdout if code == 0 else ran.stderr


def test_under_a_rule_a_request_loads_only_what_two_have_signed(one_of_two: Stack, tmp_path: Path) -> None:
    hive = one_of_two
    hive.create("alice", "idler.py")
    with client_of(hive, "alice") as client:
        load(hive, "alpha")  # before there is a rule
        keys = {name: tmp_path / f"{name}.key" for name in ("ann", "ben")}
        lines = [run_hive(hive, "op", "keygen", name, "--out", str(key)) for name, key in keys.items()]
        rule = '[rules."model-load"]\nthreshold = 2\nof = ["ann", "ben"]\n'
        rules = hive._config.with_name("governance.toml")
        rules.write_text("[signers]\n" + "".join(lines) + rule)
        rules.chmod(0o600)
        run_hive(hive, "model", "load", "beta", code=4)
        client.chat.completions.create(model="alpha", messages=MESSAGES, max_tokens=3)  # it is loaded, and stays

        def refused(model: str) -> str:
            with pytest.raises(openai.PermissionDeniedError) as error:
                client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=3)
            body: Any = error.value.body
            assert body["code"] == "model_not_approved"
            return str(body["message"])

        assert "no signed load of it is on record" in refused("beta")
        assert "cannot be kept" in run_hive(hive, "model", "pin", "beta", code=4)
        signed = tmp_path / "beta.op"
        run_hive(hive, "op", "request", "model-load", "modelId=beta", "--out", str(signed))
        for key in keys.values():
            run_hive(hive, "op", "sign", str(signed), "--key", str(key), "--yes")
        run_hive(hive, "model", "load", "beta", "--op-token", str(signed))
        row = deployed(hive)["beta"]
        assert (row["state"], row["deployed_by"], row["signature"]) == ("loaded", ME, "ann, ben")
        assert "without a signature" in refused("alpha")  # it left for beta, and is loaded no second time
        hive.restart("daemon")
        for pid in hive.servers():
            os.kill(pid, signal.SIGKILL)
        until(lambda: slots(hive)["beta"]["state"] != "ready", within_s=30, what="its server is dead")
        client.chat.completions.create(model="beta", messages=MESSAGES, max_tokens=3)  # by the row of its order
        table = run_hive(hive, "model", "deployed")
        assert "ann, ben" in table
        assert [line.split()[0] for line in table.splitlines()[:3]] == ["MODEL", "alpha", "beta"]
        run_hive(hive, "model", "unload", "beta")
        assert "no signed load of it is on record" in refused("beta")
