"""`LlamaWorker` on a real llama-server with a tiny random model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hive.backends.command_line import Launch
from hive.backends.launch import launch
from hive.domain import BackendKind
from hive.errors import DependencyDown
from hive.host.process import ProcessTable, words_of
from hive.settings.table import InferenceSection
from hive.worker.profile import TimeoutProfile
from hive.worker.records import RequestState
from hive.worker.worker import LlamaWorker
from tests import llama
from tests.waiting import until
from tests.worker.scripted import ask, has_data, outcome, ready_again, status_when

pytestmark = pytest.mark.llama
LONG = 5000
"""Tokens of an answer that nobody waits for."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if llama.program() is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(path)], check=True, stdout=subprocess.DEVNULL)
    return path


def launched(model: Path, folder: Path, **settings: object) -> Launch:
    told = {"llama_program": str(llama.program()), "llama_model": str(model), "llama_parallel": 2} | settings
    environment = {"PATH": os.environ["PATH"]}
    found = launch(BackendKind.LLAMA, replace(InferenceSection(), **told), environment, runtime=folder, state=folder)
    return replace(found, command=(*found.command, "--threads", "1"))


@asynccontextmanager
async def worker(model: Path, folder: Path, **more: Any) -> AsyncIterator[LlamaWorker]:
    found = LlamaWorker(launched(model, folder), **({"slots": 2} | more))
    try:
        await found.start()
        yield found
    finally:
        await found.stop()
    assert not servers(folder)


def servers(folder: Path) -> list[int]:
    """Living processes of this folder's server, wardens among them."""
    socket = str(folder / "llama.sock")
    return [pid for pid, stat in ProcessTable().processes.items() if stat.alive and socket in words_of(pid)]


async def test_a_chat_is_answered_and_counted(model: Path, tmp_path: Path) -> None:
    async with worker(model, tmp_path, max_tokens=12) as found:
        ended = await outcome(found, await ask(found, "Tell me something.", temperature=0))
        assert (ended.state, ended.answer.finish_reason) == (RequestState.COMPLETED, "length")
        assert ended.answer.text
        assert ended.answer.completion_tokens == 12
        assert (ended.answer.prompt_tokens or 0) > 12
        again = await outcome(found, await ask(found, "Tell me something.", temperature=0, max_tokens=4))
        assert ended.answer.text.startswith(again.answer.text)
        assert (await found.get_debug_info()).log


async def test_what_the_server_refuses_is_told_in_its_words(model: Path, tmp_path: Path) -> None:
    async with worker(model, tmp_path) as found:
        ended = await outcome(found, await ask(found, "Hi", temperature="hot"))
        assert (ended.state, ended.reason) == (RequestState.FAILED, "backend_error")
        assert re.match(r"[45]\d\d: .+", ended.detail)
        assert (await found.get_worker_status()).restart_count == 0


async def test_a_cancel_frees_the_place_at_the_server(model: Path, tmp_path: Path) -> None:
    async with worker(model, tmp_path, slots=1) as found:
        request = await ask(found, "Hi", max_tokens=LONG)
        await has_data(found, request)
        assert await found.cancel(request)
        assert (await outcome(found, request)).answer.text
        assert (await outcome(found, await ask(found, "Hi", max_tokens=3))).state is RequestState.COMPLETED


async def test_a_killed_server_is_back_and_nothing_is_left_of_the_first(model: Path, tmp_path: Path) -> None:
    profile = TimeoutProfile(backoff_first_s=0.05, backoff_longest_s=0.05)
    async with worker(model, tmp_path, profile=profile) as found:
        request = await ask(found, "Hi", max_tokens=LONG)
        await has_data(found, request)
        pid = (await found.get_worker_status()).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        ended = await outcome(found, request)
        assert (ended.reason, ended.detail) == ("server_died", "the server ended with exit code 137")
        assert ended.answer.text
        after = await ready_again(found)
        assert len(servers(tmp_path)) == 2  # a server and its warden
        assert after.pid in servers(tmp_path)
        assert (await outcome(found, await ask(found, "Hi", max_tokens=3))).state is RequestState.COMPLETED


async def test_a_stopped_server_is_found_and_replaced(model: Path, tmp_path: Path) -> None:
    """SIGSTOP: it takes connections, is silent, and burns nothing."""
    profile = TimeoutProfile(prefill_liveness_timeout_s=2, backoff_first_s=0.05, backoff_longest_s=0.05)
    async with worker(model, tmp_path, profile=profile) as found:
        pid = (await found.get_worker_status()).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        assert (await outcome(found, await ask(found, "Hi", max_tokens=3))).reason == "stall_timeout"
        assert (await ready_again(found)).pid != pid


async def test_stop_during_a_stream_and_during_a_restart_leaves_nothing(model: Path, tmp_path: Path) -> None:
    found = LlamaWorker(launched(model, tmp_path), slots=2)
    await found.start()
    request = await ask(found, "Hi", max_tokens=LONG)
    await has_data(found, request)
    restarting = asyncio.create_task(found.restart("test"))
    await status_when(found, lambda now: now.restarting)
    await found.stop()
    with pytest.raises(DependencyDown):
        await restarting
    assert not servers(tmp_path)
    assert (await outcome(found, request)).reason == "worker_restarted"


HOST = """
import asyncio, os, pathlib, sys
from hive.backends.command_line import Launch
from hive.worker.worker import LlamaWorker
async def main():
    launch = Launch(tuple(sys.argv[2:]), dict(os.environ), (), pathlib.Path(sys.argv[1]))
    worker = LlamaWorker(launch, slots=2)
    await worker.start()
    await worker.submit("test", "", "Hi", params={"max_tokens": 5000})
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_killed_host_leaves_no_server(model: Path, tmp_path: Path) -> None:
    told = launched(model, tmp_path)
    words = [sys.executable, "-P", "-c", HOST, str(told.socket), *told.command]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as host:  # noqa: ASYNC220 - it is killed
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"
        assert len(servers(tmp_path)) == 3  # itself, a warden, a server
        host.kill()
        host.wait()
        await until(lambda: not servers(tmp_path), what=lambda: servers(tmp_path))


async def test_a_model_that_is_missing_is_named_with_what_to_do(model: Path, tmp_path: Path) -> None:
    found = LlamaWorker(launched(model, tmp_path, llama_model="/nonexistent.gguf"), slots=1)
    with pytest.raises(DependencyDown, match="llama_model"):
        await found.start()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    found = LlamaWorker(launched(model, tmp_path, llama_model=str(broken)), slots=1)
    with pytest.raises(DependencyDown, match="exit code"):
        await found.start()
    assert not servers(tmp_path)


def test_the_example_of_the_documentation_runs(model: Path, tmp_path: Path) -> None:
    document = Path(__file__).parents[2] / "docs/worker.md"
    (example,) = re.findall(r"^```python\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    for path, real in (("/opt/llama.cpp/llama-server", llama.program()), ("/srv/models/qwen3-8b.gguf", model)):
        assert path in example
        example = example.replace(path, str(real))
    ended = subprocess.run(
        [sys.executable, "-P", "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^completed None .*\S", ended.stdout, re.MULTILINE)
