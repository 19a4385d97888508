"""conf/guest/hive-forward as it runs inside a sandbox: a real socat, real sockets, unmodified SDKs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ollama
import openai
import pytest

from tests.fakes.programs import fake_backend
from tests.ports import free_port

GUEST = Path(__file__).parents[2] / "conf" / "guest"
FORWARD = GUEST / "hive-forward"

with_socat = pytest.mark.skipif(shutil.which("socat") is None, reason="socat is not installed")


@contextmanager
def forwarder(*arguments: str, port: int, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """`hive-forward`, listening."""
    process = subprocess.Popen(
        [FORWARD, *arguments], env={"PATH": os.environ["PATH"], "HIVE_FORWARD_PORT": str(port), **env}
    )
    try:
        until = time.monotonic() + 10
        while True:
            assert process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except ConnectionRefusedError:
                assert time.monotonic() < until, "it does not listen"
                time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


@with_socat
@pytest.mark.parametrize("told_by", ["argument", "HIVE_FORWARD", "HIVE_PROXY_SOCKET"])
def test_unmodified_sdks_reach_the_mounted_socket(short_path: Path, told_by: str) -> None:
    port, path = free_port(), short_path / "agent.sock"
    arguments = (str(path),) if told_by == "argument" else ()
    env = {told_by: str(path)} if told_by != "argument" else {}
    with fake_backend("ollama", socket=path), forwarder(*arguments, port=port, **env):
        message: Any = {"role": "user", "content": "hello"}
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client:
            pieces = list(client.chat.completions.create(model="tiny", messages=[message], stream=True))
            assert pieces[-1].choices[0].finish_reason == "stop"
        with ollama.Client(host=f"http://127.0.0.1:{port}") as client_of_ollama:
            answer = client_of_ollama.chat(model="tiny", messages=[message])
        assert answer.done
        assert answer.message.content


@with_socat
def test_a_hive_that_was_restarted_is_found_again(short_path: Path) -> None:
    """Each connection is dialled anew: the old socket's name now belongs to another server."""
    port, path = free_port(), short_path / "agent.sock"

    def names() -> list[str | None]:
        with ollama.Client(host=f"http://127.0.0.1:{port}") as client:
            return [model.model for model in client.list().models]

    with fake_backend("ollama", socket=path), forwarder(str(path), port=port) as running:
        assert names() == ["tiny"]
        shutil.move(path, short_path / "old")
        with fake_backend("ollama", "--models", "another", socket=path):
            assert names() == ["another"]
        assert running.poll() is None


@pytest.mark.parametrize("target", ["tcp", "run/agent.sock"])
def test_a_target_it_does_not_know_is_refused(target: str) -> None:
    done = subprocess.run([FORWARD, target], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"found '{target}'" in done.stderr


def test_without_socat_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = subprocess.run([FORWARD, "vsock"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "apt-get install socat" in done.stderr


@pytest.mark.parametrize("name", ["hive-forward", "hive-forward.openrc"])
def test_the_scripts_are_shell(name: str) -> None:
    subprocess.run(["sh", "-n", GUEST / name], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_the_unit_is_one_systemd_understands(tmp_path: Path) -> None:
    unit = tmp_path / "hive-forward.service"
    unit.write_text((GUEST / "hive-forward.service").read_text().replace("/usr/local/bin/hive-forward", str(FORWARD)))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
