"""Places in which a Hive is looked for, and directories that are not what they should be."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from hive.errors import ConfigError, NotPermitted
from hive.paths import api_sockets, check_length, default_state_dir, make_private, runtime_dir
from hive.settings.table import Paths

ME = os.geteuid()
OTHER = ME + 1


@pytest.mark.parametrize(
    ("uid", "env", "state", "runtime"),
    [
        (0, {}, "/var/lib/hive-up", "/run/hive-up"),
        (0, {"XDG_RUNTIME_DIR": "/run/user/0", "XDG_STATE_HOME": "/x"}, "/var/lib/hive-up", "/run/hive-up"),
        (7, {"HOME": "/h"}, "/h/.local/state/hive", "/tmp/hive-7"),
        (7, {"HOME": "/h", "TMPDIR": "/v"}, "/h/.local/state/hive", "/v/hive-7"),
        (7, {"XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/run/user/7"}, "/s/hive", "/run/user/7/hive"),
        (7, {"HOME": "/h", "XDG_STATE_HOME": "rel", "XDG_RUNTIME_DIR": "rel"}, "/h/.local/state/hive", "/tmp/hive-7"),
    ],
)
def test_the_directories_of_a_user(uid: int, env: dict[str, str], state: str, runtime: str) -> None:
    assert default_state_dir(uid, env) == Path(state)
    assert runtime_dir(None, uid, env) == Path(runtime)
    assert runtime_dir(Path(state), uid, env) == Path(runtime)


def test_another_state_directory_has_sockets_of_its_own_however_it_is_spelled(tmp_path: Path) -> None:
    tail = hashlib.sha256(os.fsencode(tmp_path.resolve())).hexdigest()[:8]
    assert runtime_dir(tmp_path, 0, {}) == Path(f"/run/hive-up-{tail}")
    assert runtime_dir(tmp_path / "x" / "..", 7, {"XDG_RUNTIME_DIR": "/r"}) == Path(f"/r/hive-{tail}")


def test_the_socket_that_is_named_goes_before_the_environment_before_the_rest() -> None:
    env = {"HIVE_SOCKET": "/e.sock", "XDG_RUNTIME_DIR": "/nonexistent/7"}
    assert api_sockets(socket=Path("/s.sock"), uid=7, env=env) == [Path("/s.sock")]
    assert api_sockets(uid=7, env=env) == [Path("/e.sock")]
    del env["HIVE_SOCKET"]
    assert api_sockets(uid=7, env={**env, "TMPDIR": "/nonexistent"}) == [
        Path("/nonexistent/7/hive/hive.sock"),
        Path("/nonexistent/hive-7/hive.sock"),
        Path("/run/hive/hive.sock"),
    ]


def test_a_state_directory_says_where_its_socket_is(tmp_path: Path) -> None:
    guessed = api_sockets(state_dir=tmp_path, uid=ME, env={"HIVE_SOCKET": "/e.sock", "XDG_RUNTIME_DIR": "/nonexistent"})
    assert Path("/run/hive/hive.sock") not in guessed
    (tmp_path / "socket").write_text("/somewhere/hive.sock\n")
    assert api_sockets(state_dir=tmp_path, uid=ME, env={}) == [Path("/somewhere/hive.sock")]
    (tmp_path / "socket").write_text("not a path")
    assert len(api_sockets(state_dir=tmp_path, uid=ME, env={})) >= 1


def test_a_runtime_directory_of_someone_else_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / f"hive-{OTHER}").mkdir()  # it is ours, not theirs
    with pytest.raises(NotPermitted, match=f"belongs to uid {ME}"):
        api_sockets(uid=OTHER, env={"TMPDIR": str(tmp_path)})


def test_a_directory_is_made_private_with_its_parents(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    make_private(directory, uid=ME)
    assert directory.stat().st_mode & 0o777 == 0o700
    make_private(directory, uid=ME, mode=0o711)
    assert directory.stat().st_mode & 0o777 == 0o711


def test_parents_that_are_made_may_be_passed_by_who_may_pass_the_directory(tmp_path: Path) -> None:
    """Under umask 077 root's own new parents were 0700, and `hive up` refused them as unreachable for agents."""
    before = os.umask(0o077)
    try:
        make_private(tmp_path / "a" / "b" / "c", uid=ME, mode=0o711)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o711] * 3


def test_a_link_or_a_file_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(NotPermitted, match="is not a directory"):
            make_private(tmp_path / name, uid=ME)
    with pytest.raises(NotPermitted, match="belongs to uid"):
        make_private(tmp_path / "real", uid=OTHER)


def test_a_runtime_directory_in_which_sockets_would_not_fit_is_refused() -> None:
    longest = Path("/" + "x" * 81)
    check_length(longest)
    assert len(str(Paths(Path("/s"), longest).agent_socket("12345678-9abc"))) < 107
    with pytest.raises(ConfigError, match="108 bytes"):
        check_length(Path("/" + "x" * 82))
