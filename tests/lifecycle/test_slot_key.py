"""Facts of a server by which a saved slot is good there, from a real process that listens and its files."""

# ruff: noqa: ASYNC240 - a test looks at a small file

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.errors import NotSupported
from hive.host.process import read_stat
from hive.lifecycle import slot_key
from hive.lifecycle.slot_key import SlotKeys
from hive.link.slots import ServerProgramIs

LISTEN = """
import socket, sys
sock = socket.socket(socket.AF_UNIX if sys.argv[1] else socket.AF_INET)
sock.bind(sys.argv[1] or ("127.0.0.1", 0))
sock.listen()
print(sys.argv[1] or "127.0.0.1:%d" % sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    return file


@pytest.fixture(params=["path", "port"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a server that began once its model was there."""
    path = str(tmp_path / "s") if request.param == "path" else ""
    subprocess.run(["/bin/sleep", "0.1"], check=True)  # a tick of the clock that counts starts
    command = [sys.executable, "-c", LISTEN, path, "-ctk", "q8_0", "--slot-save-path", str(tmp_path / "engine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


async def test_the_same_server_and_files_are_the_same(server: str, model: Path) -> None:
    facts = await SlotKeys().facts_of(server, [str(model)])
    assert facts == await SlotKeys().facts_of(server, [str(model)])
    assert ["-ctk", "q8_0"] in facts


def written_anew(model: Path) -> None:
    model.write_bytes(b"others!")


def put_in_its_place(model: Path) -> None:
    shutil.copy(model, model.with_name("other"))
    model.with_name("other").replace(model)


def touched(model: Path) -> None:
    os.utime(model, ns=(1, 1))


def a_link_to_an_older_one(model: Path) -> None:
    model.rename(model.with_name("older"))
    model.symlink_to("older")


@pytest.mark.parametrize("change", [written_anew, put_in_its_place, touched, a_link_to_an_older_one])
async def test_a_file_that_changed_after_the_server_began_is_not_what_it_read(
    server: str, model: Path, change: object
) -> None:
    assert callable(change)
    change(model)
    with pytest.raises(NotSupported, match="changed"):
        await SlotKeys().facts_of(server, [str(model)])


async def test_what_is_not_to_be_seen_is_not_good_for_anything(server: str, model: Path, tmp_path: Path) -> None:
    for address, file in ((server, "model.gguf"), (server, str(tmp_path / "none")), (str(tmp_path / "x"), str(model))):
        with pytest.raises(NotSupported):
            await SlotKeys().facts_of(address, [file])


@pytest.mark.parametrize("files", [["/none"] * 1025, ["/m/a-00001-of-99999.gguf"]])
async def test_a_server_that_names_more_files_than_any_has_is_asked_for_nothing(
    server: str, monkeypatch: pytest.MonkeyPatch, files: list[str]
) -> None:
    def stat(path: str, started: object) -> list[int]:
        raise AssertionError((path, started))

    monkeypatch.setattr(slot_key, "_facts", stat)
    with pytest.raises(NotSupported, match="more than 1024 files"):
        await SlotKeys().facts_of(server, files)


async def test_of_another_users_server_the_helper_tells_the_program_and_this_user_the_files(
    server: str, model: Path, tmp_path: Path
) -> None:
    asked = list[tuple[int, int]]()

    async def ask(pid: int, start_ticks: int) -> ServerProgramIs:
        asked.append((pid, start_ticks))
        return ServerProgramIs(size=1, mtime_ns=2, inode=3, options=["-ctk", "q4_0"])

    keys = SlotKeys(ask, tmp_path / "engine")
    facts = await keys.facts_of(server, [str(model)])
    found = model.stat()
    assert facts == [1, 2, 3, ["-ctk", "q4_0"], [[found.st_size, found.st_mtime_ns, found.st_ino, found.st_dev]]]
    [(pid, start_ticks)] = asked
    stat = read_stat(pid)
    assert stat is not None
    assert stat.start_ticks == start_ticks


async def test_another_users_server_that_writes_elsewhere_is_asked_for_nothing(
    server: str, model: Path, tmp_path: Path
) -> None:
    async def ask(pid: int, start_ticks: int) -> ServerProgramIs:
        raise AssertionError((pid, start_ticks))

    with pytest.raises(NotSupported, match="was not started to write into"):
        await SlotKeys(ask, tmp_path / "another").facts_of(server, [str(model)])
