"""conf/compose.yaml on a Docker engine of the tests' own, with images made on the spot: no registry is asked.

The base image is a Debian with Python, Redis and the wheels Hive needs; from it conf/Containerfile is built as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import openai
import pytest

from tests.docker_engine import PrivateEngine, private
from tests.host.systemd_machine import ALL_CACHES, SOURCES
from tests.journeys.stack import until

ROOT = Path(__file__).parents[2]
CACHE = ALL_CACHES / "containers"
BASE, IMAGE = "hive-test-base:1", "hive-test-built:1"
PACKAGES = "python3-venv,redis-server"
OFFLINE = "ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels"
SDK = f"{Path(openai.__file__).parents[1]}:/packages:ro"
"""The installed `openai`, untouched."""
BUILD_S = 300.0


def why_not() -> str:
    """The reason why this cannot be done here, empty where it can."""
    if missing := [tool for tool in ("docker-compose", "mmdebstrap", "dockerd") if shutil.which(tool) is None]:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root"
    if sys.version_info[:2] != (3, 11):
        return "the wheels of this Python do not fit the image's"
    return "" if SOURCES.exists() else f"needs {SOURCES}"


def base_archive() -> Path:
    """The base image's root as a tar archive, made once for each state of the dependencies: 30 s, 250 MB."""
    made_of = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
    archive = CACHE / f"base-{hashlib.sha256(made_of).hexdigest()[:12]}.tar"
    if archive.exists():
        return archive
    shutil.rmtree(CACHE, ignore_errors=True)
    CACHE.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        wheels, root = Path(made, "wheels"), Path(made, "root.tar")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
        pip = [sys.executable, "-m", "pip", "download", "-q", "-d", str(wheels), "-c", "constraints.txt"]
        got = subprocess.run([*pip, *needed], cwd=ROOT, capture_output=True, text=True, check=False)
        if got.returncode:
            pytest.skip(f"the wheels cannot be fetched: {got.stderr.strip().splitlines()[-1]}")
        debian = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
        subprocess.run([*debian, f"--customize-hook=copy-in {wheels} /", "bookworm", root, SOURCES], check=True)
        root.rename(archive)
    return archive


class Site:
    """A directory beside which the containers of conf/compose.yaml run; `password` is Redis's."""

    def __init__(self, engine: PrivateEngine, directory: Path, password: str) -> None:
        self.engine = engine
        self._directory = directory
        secret = directory / "redis-password"
        secret.write_text(password)
        os.chown(secret, 0, 10001)
        secret.chmod(0o440)
        self.env = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "DOCKER_HOST": f"unix://{engine.socket}",
            "COMPOSE_PROJECT_NAME": "hivetest",
            "HIVE_BASE": BASE,
            "HIVE_IMAGE": IMAGE,
            "REDIS_IMAGE": BASE,
            "REDIS_PASSWORD_FILE": str(secret),
        }

    def compose(self, *words: str, within_s: float = 120, stdin: str = "", **env: str) -> str:
        """The output of `docker-compose …`. Fails where it does."""
        command = ["docker-compose", "-f", "conf/compose.yaml", "-f", "conf/compose.demo.yaml", *words]
        ran = subprocess.run(
            command,
            cwd=ROOT,
            env={**self.env, **env},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert ran.returncode == 0, f"{' '.join(words)}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}"
        return ran.stdout

    def hive(self, *words: str) -> Any:
        """`hive … --json` in the daemon's container, as an operator types it."""
        return json.loads(self.compose("exec", "-T", "daemon", "hive", *words, "--json"))

    def up(self, **env: Any) -> None:
        """Returns when every container is healthy and the proxy knows the daemon."""
        self.compose("up", "--detach", **env)
        self.until_well()

    def until_well(self) -> None:
        for service in ("redis", "daemon", "proxy"):
            until(lambda service=service: self.is_healthy(service), within_s=60, what=f"{service} is healthy")  # type: ignore[misc]
        until(lambda: self.hive("status")["proxy"]["connected"], within_s=20, what="daemon and proxy")

    def is_healthy(self, service: str) -> bool:
        state = self.engine.state(self.name(service))
        return state is not None and state["Running"] and state["Health"]["Status"] == "healthy"

    @staticmethod
    def name(service: str) -> str:
        return f"hivetest_{service}_1"

    def addresses(self, service: str) -> list[str]:
        """Of its container, one on each of its networks."""
        networks = self.engine.inspect(self.name(service))["NetworkSettings"]["Networks"]
        return [network["IPAddress"] for network in networks.values()]

    def kill(self, service: str) -> None:
        """kill -9 of its first process, and with it of the container. Returns when the engine has started it again."""
        before = self.engine.inspect(self.name(service))["RestartCount"]
        state = self.engine.state(self.name(service))
        assert state is not None
        os.kill(state["Pid"], signal.SIGKILL)
        until(lambda: self.engine.inspect(self.name(service))["RestartCount"] > before, within_s=20, what="a restart")

    def log(self, service: str) -> str:
        return self.compose("logs", "--no-color", service)

    def visit(self, program: str, token: str) -> Any:
        """The JSON that `program` (Python) prints, in a container of the base image on the network of the agents."""
        body = {
            "Image": BASE,
            "Cmd": ["python3", "-c", program],
            "Env": ["PYTHONPATH=/packages", "OPENAI_BASE_URL=http://proxy:11435/v1", f"OPENAI_API_KEY={token}"],
            "HostConfig": {"NetworkMode": "hive-agents", "Binds": [SDK]},
            "Tty": True,
        }
        status, made = self.engine.call("POST", "/containers/create", body)
        assert status == 201, made
        try:
            assert self.engine.do(made["Id"], "start") == 204
            ended = self.engine.call("POST", f"/containers/{made['Id']}/wait", timeout_s=90)[1]["StatusCode"]
            said = self.engine.call("GET", f"/containers/{made['Id']}/logs?stdout=1&stderr=1")[1]
            said = said.decode() if isinstance(said, bytes) else json.dumps(said)
            assert ended == 0, said
            return json.loads(said)
        finally:
            self.engine.call("DELETE", f"/containers/{made['Id']}?force=1")


@contextlib.contextmanager
def site(directory: Path, password: str) -> Iterator[Site]:
    """Built and running; nothing is left of it."""
    if reason := why_not():
        pytest.skip(reason)
    archive = base_archive()
    with private(own_network=True) as engine:
        name, _, tag = BASE.partition(":")
        query = urlencode({"fromSrc": "-", "repo": name, "tag": tag, "changes": OFFLINE})
        status, told = engine.call("POST", f"/images/create?{query}", archive.read_bytes(), timeout_s=BUILD_S)
        assert status == 200, told
        hive = Site(engine, directory, password)
        hive.compose("build", "proxy", within_s=BUILD_S)
        try:
            hive.up()
            yield hive
        except BaseException:
            print(hive.compose("logs", "--no-color", "--tail", "100"))
            raise
        finally:
            hive.compose("down", "--volumes", "--timeout", "5")
