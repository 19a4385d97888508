"""A supervised server as a service: what systemd is told, and the exit codes; real processes, a real notify socket."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from hive.backends.command_line import Launch
from hive.backends.launch import launch
from hive.domain import BackendKind
from hive.host.process import ProcessTable, read_stat
from hive.settings.table import InferenceSection
from hive.worker.stream import Progress, answer
from tests import llama
from tests.waiting import until
from tests.worker.scripted import Folder

PROGRAM = """
import asyncio, os, pathlib, sys
from hive.backends.command_line import Launch
from hive.errors import HiveError
from hive.host.notify import Notifier
from hive.worker.profile import TimeoutProfile
from hive.worker.supervisor import supervise
notifier = Notifier(os.environ, pid=os.getpid())
launch = Launch(tuple(sys.argv[3:]), dict(os.environ), (), pathlib.Path(sys.argv[1]))
stall_s = float(sys.argv[2])
profile = TimeoutProfile(prefill_liveness_timeout_s=stall_s, liveness_probe_interval_s=0.1, load_timeout_s=20)
try:
    sys.exit(asyncio.run(supervise(launch, profile, notifier)))
except HiveError as error:
    sys.exit(f"refused: {error.message}")
"""
FAMILY = ("--ignore-term", "--child", "setsid", "--child", "double")


class Service:
    """One supervisor, and what it told systemd."""

    def __init__(self, process: subprocess.Popen[str], heard: socket.socket, place: Folder) -> None:
        self.process = process
        self.place = place
        self.told: list[str] = []
        self._heard = heard

    def listen(self) -> list[str]:
        while True:
            try:
                self.told += self._heard.recv(4096).decode().split("\n")
            except BlockingIOError:
                return self.told

    async def says(self, what: str) -> None:
        await until(lambda: any(what in line for line in self.listen()), what=lambda: (what, self.told))

    async def ready(self) -> int:
        """Returns the server's pid."""
        await self.says("READY=1")
        (status,) = [line for line in self.told if "serves, pid" in line]
        return int(status.rpartition(" ")[2])

    def end(self) -> tuple[int, str]:
        """Its exit code and all it wrote, with nothing left of it."""
        output, _ = self.process.communicate()
        return self.process.returncode, output


@contextmanager
def service(folder: Path, *flags: str, liveness_s: float = 600, watchdog_s: float | None = None) -> Iterator[Service]:
    place = Folder(folder)
    with serving(place, place.launch(*flags), liveness_s=liveness_s, watchdog_s=watchdog_s) as found:
        yield found


@contextmanager
def serving(
    place: Folder, how: Launch, *, liveness_s: float = 600, watchdog_s: float | None = None
) -> Iterator[Service]:
    notify = place.socket.with_name("notify")
    environment = {"PATH": os.environ["PATH"], "NOTIFY_SOCKET": str(notify)}
    if watchdog_s is not None:
        environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
    words = [sys.executable, "-P", "-c", PROGRAM, str(place.socket), str(liveness_s), *how.command]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(notify))
        heard.setblocking(False)
        with subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            try:
                yield Service(process, heard, place)
            finally:
                process.kill()


async def none_left(place: Folder) -> None:
    await until(lambda: not place.alive(), what=place.alive)


async def test_it_is_ready_once_the_server_answers_and_ends_all_of_it_on_sigterm(tmp_path: Path) -> None:
    with service(tmp_path, *FAMILY) as found:
        pid = await found.ready()
        assert pid in found.place.alive()
        found.process.send_signal(signal.SIGTERM)
        code, _ = found.end()
        assert code == 0
        assert not found.place.alive()
        assert not found.place.socket.exists()
        assert "STOPPING=1" in found.listen()


async def test_the_watchdog_is_fed_while_the_judge_lets_it_go_on(tmp_path: Path) -> None:
    with service(tmp_path, watchdog_s=0.3) as found:
        await found.ready()
        found.told.clear()
        await until(lambda: found.listen().count("WATCHDOG=1") >= 5, what=found.listen)
        found.process.send_signal(signal.SIGTERM)
        assert found.end()[0] == 0


@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, 137), (signal.SIGTERM, 143)])
async def test_it_ends_with_the_server_and_never_starts_it_again(tmp_path: Path, how: int, code: int) -> None:
    with service(tmp_path, "--child", "double") as found:
        os.kill(await found.ready(), how)
        ended, output = found.end()
        assert ended == code
        assert "server_ended reason=server_died" in output
        await found.says("STATUS=server_died")
        assert len(found.place.pids()) == 2
        assert not found.place.alive()


async def test_a_server_that_hangs_is_ended_with_a_code_of_its_own(tmp_path: Path) -> None:
    with service(tmp_path, *FAMILY, liveness_s=1.0) as found:
        os.kill(await found.ready(), signal.SIGSTOP)
        code, output = found.end()
        assert code == 75
        assert "server_ended reason=stall_timeout" in output
        assert not found.place.alive()


async def test_an_idle_server_is_left_alone(tmp_path: Path) -> None:
    """Probes that are answered are progress: it burns next to no CPU for several times the limit."""
    with service(tmp_path, liveness_s=1.5, watchdog_s=1.5) as found:
        await found.ready()
        found.told.clear()
        await until(lambda: found.listen().count("WATCHDOG=1") >= 10, what=found.listen)
        assert found.process.poll() is None
        found.process.send_signal(signal.SIGINT)
        assert found.end()[0] == 0


async def test_a_server_that_does_not_come_up_ends_it_with_its_last_words(tmp_path: Path) -> None:
    with service(tmp_path, "--crash-at-start", "3", "--child", "setsid") as found:
        code, output = found.end()
        assert code == 1
        assert "scripted end at start" in output
        assert "refused: the server ended with exit code 3" in output
        assert not any("READY" in line for line in found.listen())
        assert not found.place.alive()


async def test_where_the_supervisor_is_killed_nothing_is_left(tmp_path: Path) -> None:
    with service(tmp_path, *FAMILY) as found:
        await found.ready()
        found.process.kill()
        await none_left(found.place)


async def test_where_its_warden_is_killed_it_ends_and_nothing_is_left(tmp_path: Path) -> None:
    with service(tmp_path, *FAMILY) as found:
        stat = read_stat(await found.ready())
        assert stat is not None
        os.kill(stat.parent, signal.SIGKILL)
        assert found.end()[0] == 137
        await none_left(found.place)


async def test_a_socket_at_which_somebody_listens_is_not_taken(tmp_path: Path) -> None:
    with service(tmp_path) as found:
        await found.ready()
        words = found.process.args
        assert isinstance(words, list)
        other = await asyncio.to_thread(
            subprocess.run, words, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
        )
        assert other.returncode == 1
        assert "listens" in other.stderr
        assert len(found.place.alive()) == 1


@pytest.mark.llama
async def test_a_real_llama_server_with_a_stream_under_way_is_ended(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    with serving(place, llama_launch(tmp_path), watchdog_s=1.5) as found:
        pid = await found.ready()
        progress = Progress(time.monotonic)
        body = b'{"stream":true,"max_tokens":5000,"messages":[{"role":"user","content":"Hi"}]}'
        async with aclosing(answer(place.socket, body, progress)) as chunks:
            async for chunk in chunks:
                if chunk.choices and chunk.choices[0].delta is not None and chunk.choices[0].delta.text:
                    break
            found.process.send_signal(signal.SIGTERM)
            code, output = await asyncio.to_thread(found.end)
        assert code == 0
        assert "llama" in output or "slot" in output  # its log went through
        assert read_stat(pid) is None
        assert not place.socket.exists()


def llama_launch(folder: Path) -> Launch:
    """A real llama-server with a tiny model."""
    program, model = llama.program(), folder / "tiny.gguf"
    if program is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(model)], check=True, stdout=subprocess.DEVNULL)
    told = {"llama_program": str(program), "llama_model": str(model)}
    return launch(BackendKind.LLAMA, replace(InferenceSection(), **told), {}, runtime=folder, state=folder)


async def test_supervisor_and_warden_are_light(tmp_path: Path) -> None:
    """Bytes of their own: 14 and 10 MB on 2026-11-23. The bound finds a library that neither needs."""
    with service(tmp_path) as found:
        pid = await found.ready()
        warden = ProcessTable().processes[pid].parent
        own_mb = [_own_mb(found.process.pid), _own_mb(warden)]
        print(f"anonymous MB: supervisor {own_mb[0]:.1f}, warden {own_mb[1]:.1f}")
        assert own_mb[0] < 28
        assert own_mb[1] < 16


def _own_mb(pid: int) -> float:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) / 1024
