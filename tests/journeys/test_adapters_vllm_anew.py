"""A vLLM (CPU, tiny random model) that is started anew: none is asked before it has its adapters again."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psutil
import pytest

from tests import vllm
from tests.journeys.adapter_stack import WordAsker, answered, install, knows, load, made_for_vllm
from tests.journeys.pool_stack import ON_VLLM, vllm_row
from tests.journeys.stack import Stack, stack, until
from tests.ports import free_port
from tests.vllm import MODEL

pytestmark = [pytest.mark.redis, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model() -> Path:
    venv = vllm.environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    return vllm.model_for(venv, Path())


def servers_of(hive: Stack) -> list[int]:
    """Pids of the vLLM of its pool."""
    runtime, found = hive.health()["runtime_dir"], list[int]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if "--uds" in words and any(word.startswith(runtime) for word in words):
                found.append(process.pid)
    assert found
    return found


def test_a_vllm_of_the_pool_has_its_adapters_again_before_its_gate_opens(model: Path, tmp_path: Path) -> None:
    inference, row = vllm_row(tmp_path)
    config = f"[inference]\n{inference}[pool]\nreserve_mb = 0\ncpu_mb = 4000\n{row}adapters = 2\n"
    config += f"[adapters]\ndir = {tmp_path}\nsignatures = off\nmax_rank = 8\n"
    made = {name: made_for_vllm(model, tmp_path, number) for number, name in enumerate(("red", "blue"), 1)}
    with stack(config=config) as hive:
        hive.create("alice", "idler.py")
        with closing(WordAsker(hive, "alice")) as alice:
            for name, one in made.items():
                done = load(hive, name, install(hive, one, name, ON_VLLM))
                assert done["state"] == "done", done
            assert {name: alice.ask(name).text.split() for name in made} == {
                name: [one.word] * 3 for name, one in made.items()
            }
            for pid in servers_of(hive):
                os.kill(pid, signal.SIGKILL)
            for name, one in made.items():
                answer = until(
                    lambda name=name: answered(alice, name),  # type: ignore[misc]
                    within_s=120,
                    what=f"{name} answers again",
                )
                assert answer.text.split() == [one.word] * 3
            assert alice.ask(ON_VLLM).status == 200


def test_a_vllm_in_use_that_is_started_anew_is_never_asked_before_it_has_its_adapters(
    model: Path, tmp_path: Path
) -> None:
    made, port = made_for_vllm(model, tmp_path, 1), free_port()
    config = f"[daemon]\nbackend_check_s = 0.5\n[adapters]\ndir = {tmp_path}\nsignatures = off\n"
    with ExitStack() as first, ExitStack() as second:
        server = first.enter_context(vllm.served(*vllm.TAKES_ADAPTERS, port=port))
        hive = second.enter_context(stack(url=server.url, config=config))
        hive.create("alice", "idler.py")
        alice = second.enter_context(closing(WordAsker(hive, "alice")))
        until(lambda: knows(hive, MODEL), within_s=60, what="it is known")
        assert load(hive, "red", install(hive, made, "red", MODEL))["state"] == "done"
        assert alice.ask("red").text.split() == [made.word] * 3
        first.close()
        statuses, is_over = set(), threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                answer = alice.ask("red")
                statuses.add(answer.status if answer.status != 200 else answer.text)
                is_over.wait(0.02)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            second.enter_context(vllm.served(*vllm.TAKES_ADAPTERS, port=port))
            until(lambda: " ".join([made.word] * 3) in {str(one).strip() for one in statuses}, within_s=60, what="red")
        finally:
            is_over.set()
            asking.join()
        assert {one for one in statuses if isinstance(one, int)} <= {502, 503}
        assert [one for one in statuses if isinstance(one, str) and one.split() != [made.word] * 3] == []
