"""Facts of a server by which a saved slot is good there, from a real process that listens and its files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.errors import NotSupported
from hive.lifecycle.slot_key import facts_of

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
    command = [sys.executable, "-c", LISTEN, path, "-ctk", "q8_0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


def test_the_same_server_and_files_are_the_same(server: str, model: Path) -> None:
    facts = facts_of(server, [str(model)])
    assert facts == facts_of(server, [str(model)])
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
def test_a_file_that_changed_after_the_server_began_is_not_what_it_read(
    server: str, model: Path, change: object
) -> None:
    assert callable(change)
    change(model)
    with pytest.raises(NotSupported, match="changed"):
        facts_of(server, [str(model)])


def test_what_is_not_to_be_seen_is_not_good_for_anything(server: str, model: Path, tmp_path: Path) -> None:
    for address, file in ((server, "model.gguf"), (server, str(tmp_path / "none")), (str(tmp_path / "x"), str(model))):
        with pytest.raises(NotSupported):
            facts_of(address, [file])
