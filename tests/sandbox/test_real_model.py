"""`hive sandbox` and `hive run-model` as they are: a model of hive.conf in a real llama-server."""

# ruff: noqa: ASYNC240 - a test's loop may wait for its disk

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hive.errors import ConfigError, NotFound
from hive.link.slots import ProcessState
from hive.settings.pool import slot_id
from hive.settings.table import Paths
from tests import llama
from tests.sandbox.harness import alive
from tests.sandbox.model_servers import GRANT, PoolDaemon, connected

TINY = slot_id("tiny")
LOADED_S = 60


@pytest.fixture
def conf(paths: Paths) -> Path:
    program = llama.program()
    if program is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    top = paths.state.parent
    model = top / "tiny.gguf"
    subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(model)], check=True, stdout=subprocess.DEVNULL)
    file = top / "hive.conf"
    file.write_text(
        f"[inference]\nllama_program = {program}\n\n[model tiny]\nfile = {model}\nparallel = 1\ncontext = 2048\n"
    )
    return file


@contextmanager
def hive_sandbox(paths: Paths, conf: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The helper as `hive up` starts it, killed in the end; its models go on."""
    hold, watched = subprocess.PIPE, ["--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime)]
    words = [sys.executable, "-P", "-m", "hive", "sandbox", *watched, "--config", str(conf), "--watch-fd", "0"]
    with subprocess.Popen(words, stdin=hold) as process:
        try:
            yield process
        finally:
            process.kill()


async def asked(paths: Paths) -> int:
    """The status of a real answer."""
    reader, writer = await asyncio.open_unix_connection(paths.slot_socket(TINY))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    try:
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def serving(daemon: PoolDaemon) -> None:
    await daemon.client.slot_start(TINY, GRANT)
    while True:
        for process in daemon.moved:
            assert process.state is not ProcessState.ENDED, process
            if process.state is ProcessState.SERVING:
                return
        await asyncio.sleep(0.02)


async def test_a_model_of_hive_conf_serves_over_a_kill_of_the_helper_and_is_stopped(paths: Paths, conf: Path) -> None:
    with hive_sandbox(paths, conf):
        async with connected(paths) as daemon:
            await serving(daemon)
            assert await asked(paths) == 200
            before = (await daemon.client.slots())[TINY]
            assert before.bytes is not None
    assert await asked(paths) == 200, "it serves while no helper is there"
    with hive_sandbox(paths, conf):
        async with connected(paths) as daemon:
            after = (await daemon.client.slots())[TINY]
            assert (after.run, after.pid, after.state) == (before.run, before.pid, ProcessState.SERVING)
            assert await asked(paths) == 200
            await daemon.client.slot_stop(TINY, grace_s=20)
            assert not [pid for pid in before.pids if alive(pid)]
            assert not paths.slot_socket(TINY).exists()


async def test_what_root_takes_out_of_hive_conf_is_not_started_any_more(paths: Paths, conf: Path) -> None:
    with hive_sandbox(paths, conf):
        async with connected(paths) as daemon:
            conf.write_text("[model other]\nfile = /nowhere.gguf\n")
            with pytest.raises(NotFound, match="describes no model"):
                await daemon.client.slot_start(TINY, GRANT)
            conf.write_text("[model tiny\n")
            with pytest.raises(ConfigError):
                await daemon.client.slot_start(TINY, GRANT)


async def test_a_model_whose_file_is_missing_ends_with_the_reason(paths: Paths, conf: Path) -> None:
    (conf.parent / "tiny.gguf").unlink()
    with hive_sandbox(paths, conf):
        async with connected(paths) as daemon:
            await daemon.client.slot_start(TINY, GRANT)
            ended = await daemon.told(ProcessState.ENDED, TINY)
            assert ended.exit_code not in (0, None)
            assert "tiny.gguf" in ended.why
