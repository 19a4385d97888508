"""An agent whose script its user may not read ends at once: what is told of that end says so."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.runtimes.closed_paths import why_unread
from hive.runtimes.runtime import SaysWhy
from hive.runtimes.template import has_ended
from hive.sandbox.server import make_directories
from hive.settings.table import Paths
from tests.nobody import NOBODY
from tests.runtimes.benches import MARKS
from tests.sandbox.harness import PYTHON, A, runtime, spec
from tests.waiting import until


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o755)
        (place / "closed").mkdir(mode=0o700)
        for file in (place / "open.py", place / "closed" / "agent.py"):
            file.write_text("raise SystemExit(1)\n")
            file.chmod(0o644)
        yield place


def test_a_script_below_a_closed_directory_is_named_with_the_uid(place: Path) -> None:
    script = str(place / "closed" / "agent.py")
    told = why_unread([PYTHON, "-u", script, "--fast"], 2, NOBODY, None)
    if os.geteuid() == NOBODY:
        pytest.skip("this user is the one who may")
    assert told == (
        f"it runs as uid {NOBODY}, which may not read {script}: put it where every user may read, as below /srv/agents"
    )


def test_nothing_is_said_of_what_it_may_read_nor_of_an_end_that_is_no_fault_of_a_file(place: Path) -> None:
    closed, uid = [PYTHON, str(place / "closed" / "agent.py")], NOBODY
    assert not why_unread([PYTHON, str(place / "open.py"), "/nowhere", "relative.py", "/dev/null"], 2, uid, None)
    assert [why_unread(closed, code, uid, None) for code in (0, None, 137)] == ["", "", ""]
    assert not why_unread(closed, 2, None, None), "as this user it may read what this user may"
    assert not why_unread(closed, 2, os.geteuid(), None)


def test_a_script_in_a_home_that_the_sandbox_hides_is_named() -> None:
    """A unit hides `/home` from its agent. What every user may read there was taken for open, and nothing was said."""
    script = "/home/ann/agents/poet.py"
    assert why_unread([PYTHON, script], 2, NOBODY, None, hides_homes=True) == (
        f"it runs as uid {NOBODY}, which does not see {script} (its sandbox hides homes): "
        "put it where every user may read, as below /srv/agents"
    )
    assert not why_unread([PYTHON, script], 137, NOBODY, None, hides_homes=True)
    assert not why_unread([PYTHON, "/srv/agents/x.py"], 2, NOBODY, None, hides_homes=True)
    assert not why_unread([PYTHON, "/home"], 2, NOBODY, None, hides_homes=True)


def test_an_access_list_is_not_judged(place: Path) -> None:
    script = place / "closed" / "agent.py"
    entries = b"".join(
        tag.to_bytes(2, "little") + right.to_bytes(2, "little") + who.to_bytes(4, "little")
        for tag, right, who in (
            (1, 7, 2**32 - 1),
            (2, 5, NOBODY),
            (4, 0, 2**32 - 1),
            (16, 5, 2**32 - 1),
            (32, 0, 2**32 - 1),
        )
    )
    try:
        os.setxattr(script.parent, "system.posix_acl_access", (2).to_bytes(4, "little") + entries)
    except OSError as error:
        pytest.skip(f"no access lists here: {error.strerror}")
    assert not why_unread([PYTHON, str(script)], 2, NOBODY, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: as a user its agents are that user")
async def test_the_end_of_a_real_agent_says_that_its_user_may_not_read_the_script(
    paths: Paths, freezer: str, place: Path
) -> None:
    make_directories(paths)
    processes = runtime(paths, freezer)
    script = str(place / "closed" / "agent.py")
    agent = spec(paths, A, [PYTHON, script])
    await processes.prepare(A, agent)
    running = await processes.start(A, agent, mark=MARKS[A])
    await until(lambda: has_ended(running.ended_fd))
    assert await running.reap() == 2
    assert isinstance(running, SaysWhy)
    assert running.why_ended.startswith(f"it runs as uid {agent.uid}, which may not read {script}: put it where")
    running.close()
