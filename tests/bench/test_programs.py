"""The agent programs of a density run, each as a real process against the model's stand-in: a turn is two calls."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.bench import stub
from hive.bench.agent_programs import HERE, ITS_NODE_MODULES, PROGRAMS
from hive.bench.agent_programs import choose as choose_program
from hive.cli.templates import check
from hive.errors import NotSupported
from hive.settings.templates import TemplateRow
from tests.journeys.stack import until
from tests.ports import free_port

CLIENTS = Path(os.environ.get("HIVE_CI_CACHE", "/nowhere"), "clients")
"""Other projects' clients, as .ci/run's cache has them."""


@pytest.fixture
def stub_port(tmp_path: Path) -> Iterator[int]:
    port_file = tmp_path / "port"
    process = subprocess.Popen([sys.executable, stub.__file__, str(port_file), "0.02"])
    try:
        until(port_file.exists, within_s=20, what="the stub listens")
        yield int(port_file.read_text())
    finally:
        process.kill()
        process.wait()


def command_of(kind: str) -> list[str]:
    """Its command line with an interpreter that has its packages; skipped where none is here."""
    program = HERE / PROGRAMS[kind].file
    if kind == "node":
        if not (CLIENTS / "node_modules/openai").is_dir():
            pytest.skip("no package openai for Node in the cache")
        return ["node", str(program)]
    pythons = [sys.executable, str(CLIENTS / "venv/bin/python")]
    tried = "import " + ", ".join(PROGRAMS[kind].imports)
    for python in pythons:
        if Path(python).exists() and subprocess.run([python, "-c", tried], capture_output=True).returncode == 0:
            return [python, str(program)]
    pytest.skip(f"no Python here has {', '.join(PROGRAMS[kind].packages)}")


def asked(port: int, method: str, path: str) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path)
    response = connection.getresponse()
    body: dict[str, object] = json.loads(response.read())
    assert response.status == 200, body
    return body


@pytest.mark.wide
@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_turn_is_a_tool_call_its_result_and_an_answer(kind: str, stub_port: int, tmp_path: Path) -> None:
    port = free_port()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HIVE_AGENT_PORT": str(port),
        "OPENAI_BASE_URL": f"http://127.0.0.1:{stub_port}/v1",
        "OPENAI_API_KEY": "none",
        "BENCH_OWN_MIB": "2",
        ITS_NODE_MODULES: str(CLIENTS / "node_modules"),
    }
    agent = subprocess.Popen(command_of(kind), env=env)
    try:
        until(lambda: asked(port, "GET", "/")["turn"] == 0, within_s=60, what="it listens")
        for number in (1, 2):
            found = asked(port, "POST", "/turn")
            assert found["turn"] == number
            assert str(found["answer"]).strip() == " ".join(stub.WORDS)
    finally:
        agent.kill()
        agent.wait()


def test_the_first_call_of_a_turn_is_answered_with_a_tool_call_and_the_second_with_words() -> None:
    first = b"".join(stub.answer({"tools": [{}], "messages": [{"role": "user"}]}))
    second = b"".join(stub.answer({"tools": [{}], "messages": [{"role": "tool"}]}))
    assert b"look_up" in first
    assert b"look_up" not in second
    assert all(answer.endswith(b"data: [DONE]\n\n") for answer in (first, second))


@pytest.mark.root
def test_a_python_without_the_package_is_refused_with_the_line_that_installs_it() -> None:
    with pytest.raises(NotSupported) as refused:
        choose_program("langgraph", Path("/usr/bin/python3"))
    assert "langgraph" in str(refused.value)
    assert "pip install langgraph langchain-openai" in refused.value.hint


@pytest.mark.root
def test_a_python_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(NotSupported, match="cannot be started as another user than root"):
        choose_program("own", Path("/nowhere/python3"))


@pytest.mark.wide
@pytest.mark.parametrize("kind", [kind for kind, program in PROGRAMS.items() if program.stops])
def test_a_program_that_stops_is_ready_after_turns_against_its_own_stand_in(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a template as a run describes it, without any of an agent's variables: there is no model, and no port."""
    python, script = command_of(kind)
    monkeypatch.setattr("hive.cli.templates.check.NOBODY", None)  # packages of this test are this user's alone
    row = TemplateRow(python=python, script=script, env="LANGSMITH_TRACING=false BENCH_WARM_TURNS=2")
    told = check._tried(kind, row)
    assert (told["ok"], told["why"], told["stage"]) == (True, "", "ready")
