"""The start of the three inference servers; one of them is started for real, and answers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from hive.backends.command_line import Launch, served_name
from hive.backends.launch import RUNTIME, SERVICES, STARTED, launch, socket_of, unit_of
from hive.cli.run_backend import StartedKind
from hive.domain import BackendKind
from hive.errors import WrongState
from hive.settings.table import InferenceSection
from hive.worker.place import free
from tests import llama

HIVE = [sys.executable, "-P", "-m", "hive"]
UP_WITHIN_S = 30.0


def started(kind: BackendKind, environment: dict[str, str] | None = None, **settings: object) -> Launch:
    return launch(kind, replace(InferenceSection(), **settings), environment or {})


def value_of(found: Launch, flag: str) -> str:
    return found.command[found.command.index(flag) + 1]


# --- the decider -------------------------------------------------------------------------------------------------


def test_the_command_knows_exactly_the_kinds_that_are_started_as_services() -> None:
    assert [str(kind) for kind in StartedKind] == [str(kind) for kind in STARTED]


def test_the_demo_backend_is_hives_own_program_and_is_not_described_by_settings() -> None:
    with pytest.raises(ValueError, match="demo"):
        started(BackendKind.DEMO)
    assert set(SERVICES) - set(STARTED) == {BackendKind.DEMO}


def test_vllm_has_the_flags_of_the_original_specification() -> None:
    found = started(BackendKind.VLLM)
    assert found.command[:3] == ("/opt/vllm/bin/vllm", "serve", "/var/lib/hive/models/default")
    assert {"--enable-prefix-caching", "--enable-chunked-prefill"} <= set(found.command)
    assert (value_of(found, "--max-num-seqs"), value_of(found, "--gpu-memory-utilization")) == ("64", "0.9")
    assert value_of(found, "--uds") == "/run/hive-inference/vllm.sock"
    assert "--host" not in found.command
    assert "--speculative-config" not in found.command


def test_a_llama_server_keeps_prompts_where_a_flush_reaches_them_or_cannot_be_flushed() -> None:
    usual, kept = started(BackendKind.LLAMA), started(BackendKind.LLAMA, llama_cache_ram_mb=512)
    assert value_of(usual, "--slot-save-path") == "/var/lib/hive/inference"
    assert usual.environment["LLAMA_ARG_CACHE_RAM"] == "0"
    assert "--slot-save-path" not in kept.command
    assert kept.environment["LLAMA_ARG_CACHE_RAM"] == "512"


@pytest.mark.parametrize(
    ("setting", "flags"),
    [
        ({"vllm_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"vllm_max_sequences": 7}, ["--max-num-seqs", "7"]),
        ({"vllm_gpu_memory_util": 0.35}, ["--gpu-memory-utilization", "0.35"]),
        ({"vllm_scheduling_policy": "priority"}, ["--scheduling-policy", "priority"]),
        ({"vllm_model": "/srv/m"}, ["serve", "/srv/m"]),
        ({"default_model": "llama3.2"}, ["--served-model-name", "llama3.2"]),
    ],
)
def test_each_setting_of_vllm_is_in_its_command(setting: dict[str, Any], flags: list[str]) -> None:
    command = list(started(BackendKind.VLLM, **setting).command)
    assert [flag for flag in flags if flag not in command] == []
    assert command[command.index(flags[0]) :][: len(flags)] == flags
    assert list(started(BackendKind.VLLM).command) != command


def test_a_draft_model_is_given_to_vllm_and_must_exist() -> None:
    found = started(BackendKind.VLLM, speculative="draft", vllm_speculative_model="/srv/draft")
    config = {"method": "draft_model", "model": "/srv/draft", "num_speculative_tokens": 4}
    assert json.loads(value_of(found, "--speculative-config")) == config
    assert Path("/srv/draft") in [needed.path for needed in found.needed]
    assert "--speculative-config" not in started(BackendKind.VLLM, vllm_speculative_model="/srv/draft").command


def test_a_draft_model_is_given_to_llama_server_and_must_exist() -> None:
    found = started(
        BackendKind.LLAMA, speculative="draft", llama_speculative_model="/d.gguf", speculative_draft_tokens=6
    )
    assert [value_of(found, flag) for flag in ("--spec-type", "-md", "--spec-draft-n-max")] == [
        *("draft-simple", "/d.gguf", "6")
    ]
    assert Path("/d.gguf") in [needed.path for needed in found.needed]
    assert not [word for word in found.command if word.startswith("--draft")], "they are removed, and end it"


def test_without_speculation_neither_is_told_anything_of_it() -> None:
    for kind in (BackendKind.VLLM, BackendKind.LLAMA):
        plain = started(kind)
        assert not [word for word in plain.command if "spec" in word]
        assert "ngram" in " ".join(started(kind, speculative="ngram").command)
        assert started(kind, speculative="draft").command == plain.command, "no model is named"


def test_llama_server_listens_on_its_socket_and_pings_every_second() -> None:
    found = started(BackendKind.LLAMA, llama_parallel=3, llama_context=999)
    assert value_of(found, "--host") == str(found.socket) == "/run/hive-inference/llama.sock"
    assert [value_of(found, flag) for flag in ("--sse-ping-interval", "--parallel", "-c")] == ["1", "3", "999"]
    assert {"--slots", "--metrics"} <= set(found.command)


def test_a_directory_of_models_makes_llama_server_a_router() -> None:
    found = started(BackendKind.LLAMA, llama_model="/srv/models/", default_model="tiny")
    assert value_of(found, "--models-dir") == "/srv/models/"
    assert not {"-m", "--alias"} & set(found.command)
    assert Path("/srv/models") in [needed.path for needed in found.needed]


def test_ollama_listens_in_its_own_network_and_keeps_every_model() -> None:
    found = started(BackendKind.OLLAMA, ollama_models="/srv/store")
    assert found.command == ("/usr/local/bin/ollama", "serve")
    assert found.socket is None
    wanted = {"OLLAMA_HOST": "127.0.0.1:11434", "OLLAMA_MODELS": "/srv/store", "OLLAMA_NOPRUNE": "1"}
    wanted["OLLAMA_NO_CLOUD"] = "1"
    assert wanted.items() <= found.environment.items()


@pytest.mark.parametrize("kind", STARTED)
def test_no_secret_of_hive_is_passed_on_and_what_an_administrator_sets_is(kind: BackendKind) -> None:
    given = {"HIVE_INTERNAL_TOKEN": "s", "REDIS_URL": "s", "CREDENTIALS_DIRECTORY": "/s", "CUDA_VISIBLE_DEVICES": "1"}
    found = started(kind, given)
    assert "s" not in found.environment.values()
    assert "CREDENTIALS_DIRECTORY" not in found.environment
    assert found.environment["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize("kind", STARTED)
def test_program_and_model_are_asked_for_by_the_setting_they_come_from(kind: BackendKind) -> None:
    found = started(kind)
    values = {getattr(InferenceSection(), needed.key) for needed in found.needed}
    assert values == {str(needed.path) for needed in found.needed}
    assert [needed.is_program for needed in found.needed] == [True, False]
    assert found.command[0] == str(found.needed[0].path)


def test_each_kind_has_a_socket_and_a_unit_of_its_own() -> None:
    assert len({socket_of(kind) for kind in SERVICES} | {unit_of(kind) for kind in SERVICES}) == 2 * len(SERVICES)
    assert {socket_of(kind).parent for kind in SERVICES} == {RUNTIME}


def test_a_model_is_called_after_its_file() -> None:
    assert served_name("", "/m/Qwen3.Q4_0.gguf") == "Qwen3.Q4_0"


# --- the command -------------------------------------------------------------------------------------------------


def conf(folder: Path, **settings: object) -> Path:
    path = folder / "hive.conf"
    path.write_text("[inference]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
    return path


def run_backend(folder: Path, kind: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = [*HIVE, "run-backend", kind, "--config", str(conf(folder, **settings)), "--runtime-dir", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A server that says how it was started."""
    path = tmp_path / "server"
    path.write_text('#!/bin/sh\necho "$HOME"\nprintf "%s\\n" "$0" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("kind", ["ollama", "vllm", "llama"])
def test_a_missing_program_is_exit_5_and_says_what_to_do(tmp_path: Path, kind: str) -> None:
    ended = run_backend(tmp_path, kind, **{f"{kind}_program": tmp_path / "none"})
    assert ended.returncode == 5
    assert f"inference.{kind}_program: there is no {tmp_path}/none" in ended.stderr
    assert "hint: install it there" in ended.stderr


@pytest.mark.parametrize("kind", ["vllm", "llama"])
def test_a_missing_model_is_exit_5_and_says_what_to_do(tmp_path: Path, program: Path, kind: str) -> None:
    ended = run_backend(tmp_path, kind, **{f"{kind}_program": program, f"{kind}_model": tmp_path / "no-model"})
    assert (ended.returncode, ended.stdout) == (5, "")
    assert f"inference.{kind}_model: there is no {tmp_path}/no-model" in ended.stderr
    assert "hint: put a model there" in ended.stderr


def test_what_is_no_program_is_exit_5(tmp_path: Path, program: Path) -> None:
    program.chmod(0o644)
    ended = run_backend(tmp_path, "llama", llama_program=program, llama_model=program)
    assert ended.returncode == 5
    assert "is no program this user may execute" in ended.stderr


def test_a_program_that_cannot_be_executed_is_exit_5(tmp_path: Path, program: Path) -> None:
    program.write_text("no program at all")
    ended = run_backend(tmp_path, "llama", llama_program=program, llama_model=program)
    assert ended.returncode == 5
    assert "Exec format error" in ended.stderr


def test_it_becomes_the_server(tmp_path: Path, program: Path) -> None:
    model = tmp_path / "m.gguf"
    model.touch()
    ended = run_backend(tmp_path, "llama", llama_program=program, llama_model=model, llama_parallel=2)
    assert ended.returncode == 0, ended.stderr
    home, *command = ended.stdout.splitlines()
    assert home == "/var/lib/hive/inference"
    assert command[:3] == [str(program), "-m", str(model)]
    assert f"{tmp_path}/llama.sock" in command


# --- the socket --------------------------------------------------------------------------------------------------


def test_the_socket_of_a_killed_server_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    free(path)
    assert not path.exists()
    free(path)


def test_the_socket_of_a_living_server_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        with pytest.raises(WrongState, match="listens at"):
            free(path)
    assert path.exists()


# --- a real server -----------------------------------------------------------------------------------------------


@contextmanager
def serving(folder: Path, kind: str, **settings: object) -> Iterator[httpx.Client]:
    """A client of the server that `hive run-backend` became, with a socket that a killed one had left there."""
    path, log = folder / f"{kind}.sock", folder / "server.log"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    command = [*HIVE, "run-backend", kind, "--config", str(conf(folder, **settings))]
    command += ["--runtime-dir", str(folder), "--state-dir", str(folder)]
    with (
        log.open("wb") as out,
        subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT) as process,
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://backend") as client,
    ):
        try:
            until = time.monotonic() + UP_WITHIN_S
            while not _is_up(client, path):
                assert process.poll() is None, log.read_text(errors="replace")
                assert time.monotonic() < until, log.read_text(errors="replace")
                time.sleep(0.02)
            yield client
        finally:
            process.kill()


def _is_up(client: httpx.Client, path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) != 0:
            return False
    return client.get("/health").status_code == 200


@pytest.mark.llama
def test_a_real_llama_server_answers_on_its_socket(tmp_path: Path) -> None:
    program = llama.program()
    if program is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    model = tmp_path / "tiny.gguf"
    subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(model)], check=True, stdout=subprocess.DEVNULL)
    with serving(tmp_path, "llama", llama_program=program, llama_model=model, llama_parallel=2) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        assert client.get("/props").json()["total_slots"] == 2
        assert "llamacpp:" in client.get("/metrics").text
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        answer = client.post("/v1/chat/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == 3
        assert os.stat(tmp_path / "llama.sock").st_mode & 0o170000 == 0o140000
