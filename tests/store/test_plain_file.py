"""Files beside the database: what is read of them, and with how much memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hive.store import plain_file, second_copy

MIB = 1 << 20


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    assert plain_file.read(path, 4) == b"0123"
    assert plain_file.read(path, 1 << 40) == b"0123456789"


def test_a_small_file_is_read_where_its_limit_is_more_than_the_memory_there_is(tmp_path: Path) -> None:
    """The daemon came back no more after a kill -9 on a machine of 600 MiB: its limit of 4 GiB was reserved at once."""
    path = tmp_path / "hive.db.second"
    path.write_bytes(b"not a copy\n")
    assert second_copy.FILE_MAX_BYTES > 1024 * MIB, "else this says nothing"

    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (512 * MIB, 512 * MIB))

    program = (
        "import sys; from pathlib import Path; from hive.store.second_copy import read; print(read(Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], preexec_fn=little_memory, capture_output=True, text=True
    )
    assert "its first line is not as it was written" in done.stdout, done.stderr


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="is no file"):
        plain_file.read(tmp_path, 10)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"symbolic links"):
        plain_file.read(link, 10)
