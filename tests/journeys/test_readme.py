"""The agents that the documents tell a newcomer to make, on a Hive of theirs; tests/install has the installed one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.journeys.stack import Stack, stack, until
from tests.ports import free_port

pytestmark = [pytest.mark.redis]
ROOT = Path(__file__).parents[2]
LISTENS = "0A"
"""A state in /proc/net/tcp."""


def example() -> list[str]:
    """The words of the README's `hive agent create`."""
    (line,) = re.findall(r"^\$ hive (agent create .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with stack(url=None, auto_sleep=False) as hive:
        yield hive


def listening_at(port: int) -> set[str]:
    """Local addresses at which somebody listens there, in the kernel's notation."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_ = row.split()
            address, _, number = local.rpartition(":")
            if state == LISTENS and int(number, 16) == port:
                found.add(address)
    return found


def answers_callers_alone(hive: Stack, view: dict[str, Any], port: int) -> None:
    """Through ingress with its token, not without, and nobody from elsewhere reaches its port around it."""
    url = hive.get(f"/api/agents/{view['name']}/tokens")["ingress_url"]

    def called() -> bool:
        return httpx.get(url, trust_env=False, timeout=30).status_code == 200

    until(called, within_s=60, what="an answer")
    without = url.partition("/t/")[0] + "/"
    assert httpx.get(without, trust_env=False, timeout=30).status_code == 401
    assert listening_at(port) == {"0100007F"}


def test_the_readmes_agent_answers_its_callers_and_nobody_else(hive: Stack) -> None:
    """It listened at 0.0.0.0: whoever reached the host reached the agent, without its token."""
    port = free_port()
    words = [word.replace("9000", str(port)) for word in example()]
    at = words.index("--")
    told = [sys.executable, "-m", "hive", *words[:at], "--state-dir", str(hive.state), *words[at:]]
    ran = subprocess.run(told, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    answers_callers_alone(hive, hive.get("/api/agents/echo"), port)


def test_the_described_process_agent_answers_its_callers_and_nobody_else(hive: Stack) -> None:
    described, port = (ROOT / "conf/agents/process.toml").read_text(), free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(described.replace("9100", str(port)))
        file.flush()
        for words in (("apply", file.name), ("start", tomllib.loads(described)["name"])):
            told = [sys.executable, "-m", "hive", "agent", *words, "--state-dir", str(hive.state)]
            ran = subprocess.run(told, capture_output=True, text=True)
            assert ran.returncode == 0, ran.stderr
    answers_callers_alone(hive, hive.get("/api/agents/reporter"), port)


PLAIN_USER = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
READS_ALL = [f"--{kind}-caps=-all,+dac_read_search" for kind in ("inh", "ambient")]
"""The tests' Python may be in a home that no other user may enter."""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_readmes_agent_is_made_by_a_plain_user_too() -> None:
    """A network of its own takes root there, so the example must not ask for one."""
    port, state = free_port(), Path(tempfile.mkdtemp(prefix="hive-plain-", dir="/var/tmp"))
    os.chown(state, 65534, 65534)
    words = [word.replace("9000", str(port)) for word in example()]
    own = [*PLAIN_USER, *READS_ALL, sys.executable, "-m", "hive"]
    env = {**os.environ, "HOME": str(state), "HIVE_STATE_DIR": str(state / "s")}
    env.pop("XDG_RUNTIME_DIR", None)
    log = state / "up.log"
    with log.open("wb") as file:
        up = subprocess.Popen([*own, "up", "--backend", "demo"], env=env, stdout=file, stderr=file)
    try:
        until(lambda: b" is up; Ctrl-C ends it" in log.read_bytes(), within_s=60, what=log.read_text())
        ran = subprocess.run([*own, *words], env=env, capture_output=True, text=True)
        assert (ran.returncode, ran.stdout) == (0, "echo is running\n"), ran.stderr
        until(lambda: listening_at(port) == {"0100007F"}, within_s=30, what="its port")
        refused = subprocess.run(
            [*own, "agent", "create", "alone", "--no-network", "--", "/bin/sleep", "9"], env=env, capture_output=True
        )
        assert b"a network of its own for an agent takes root" in refused.stderr
    finally:
        up.terminate()
        up.wait(60)
        shutil.rmtree(state)
