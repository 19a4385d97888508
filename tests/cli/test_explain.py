"""`hive explain`, and the codes in what commands print when they fail."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.cli import main as program
from hive.conditions import TABLE
from hive.explain.book import BOOK, every_code
from hive.explain.page import text_of

Hive = Any
"""conftest.Hive: test modules import no siblings."""

SAID = re.compile(r"^(?:hive: )?.*  \[([a-z0-9_]+)\]$", re.MULTILINE)
"""A line with a code behind it."""


def code_of(text: str) -> str:
    """The one code in what a command printed."""
    [code] = SAID.findall(text)
    return str(code)


def typed(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A command as a shell runs it."""
    command = [sys.executable, "-P", "-m", "hive", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **env})


# --- one code, and all ---------------------------------------------------------------------------------------------


def test_a_code_is_explained_with_causes_and_cures_without_a_daemon(no_daemon: Hive) -> None:
    said = no_daemon("explain", "not_found")
    assert (said.code, said.err) == (0, "")
    assert said.out == f"not_found\n\n{text_of('not_found')}\n"
    assert "hive agent list" in said.out
    assert "HTTP status 404; exit code 3. Try again: no" in said.out


@pytest.mark.parametrize("code", ["not_found", "lease_ended", "redis_down"])
def test_lines_end_at_words_on_a_narrow_terminal(code: str) -> None:
    """They were as long as those of the page, 100 columns, and a terminal of 80 broke them within words."""
    wide, narrow = text_of(code), text_of(code, 60)
    assert max(map(len, wide.splitlines())) > 60
    of_words = [line for line in narrow.splitlines() if not line.startswith("    ") and "`" not in line]
    assert max(map(len, of_words)) <= 60
    assert re.sub(r"[\s>]+", " ", narrow) == re.sub(r"[\s>]+", " ", wide)


def test_brackets_capitals_and_dashes_are_no_matter(no_daemon: Hive) -> None:
    assert no_daemon("explain", "[Not-Found]").out == no_daemon("explain", "not_found").out


def test_all_are_listed_with_a_sentence_each(no_daemon: Hive) -> None:
    said = no_daemon("explain")
    assert said.code == 0
    listed = [line.split("  ", 1) for line in said.out.splitlines()[1:]]
    assert [code for code, _ in listed] == every_code()
    assert all(sentence.strip() for _, sentence in listed)


def test_a_status_lists_its_codes_and_an_exit_code_says_what_it_means(no_daemon: Hive) -> None:
    listed = no_daemon("explain", "503").out
    assert {"saturated", "queue_full"} <= {line.split()[0] for line in listed.splitlines()[1:]}
    assert no_daemon("explain", "7").out.startswith("Exit code 7: it did not happen in time\n\nCODE")
    assert no_daemon("explain", "130").out == "Exit code 130: it was interrupted, as by Ctrl-C\n"


def test_json_has_the_parts_of_each(no_daemon: Hive) -> None:
    answer = no_daemon("explain", "not_ready", "--json").json
    assert (answer["schema"], answer["version"]) == ("explain", 1)
    [one] = answer["codes"]
    assert (one["code"], one["statuses"], one["exit_codes"]) == ("not_ready", [409, 503], [1, 5])
    assert one["text"] == text_of("not_ready")
    assert one["causes"]
    assert one["remedies"]
    [condition] = no_daemon("explain", "redis_down", "--json").json["codes"]
    assert (condition["severity"], condition["statuses"]) == ("error", [])
    assert len(no_daemon("explain", "--json").json["codes"]) == len(BOOK.keys() | TABLE.keys())


def test_an_unknown_code_is_exit_3_with_the_nearest(no_daemon: Hive) -> None:
    said = no_daemon("explain", "que_full")
    assert (said.code, said.out) == (3, "")
    assert "`queue_full`" in said.err
    assert no_daemon("explain", "nonsense-of-theirs", "--json").error["code"] == "not_found"


def test_a_code_is_completed() -> None:
    done = typed(_HIVE_COMPLETE="complete_bash", COMP_WORDS="hive explain lease_", COMP_CWORD="2")
    assert {"lease_waited", "lease_over"} <= set(done.stdout.split())


# --- errors that commands print ------------------------------------------------------------------------------------


def a_file(directory: Path, name: str, text: str, mode: int = 0o600) -> str:
    path = directory / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


FAILURES: dict[str, tuple[int, str, list[str]]] = {
    "usage": (2, "usage", ["agnt"]),
    "option": (2, "usage", ["agent", "list", "--no-such-option"]),
    "value": (2, "usage", ["agent", "pause"]),
    "no daemon": (5, "dependency_down", ["agent", "list", "--socket", "{root}/none.sock"]),
    "no state": (5, "dependency_down", ["agent", "list", "--state-dir", "{root}/none"]),
    "wrong file": (2, "config", ["config", "check", "{conf}"]),
    "no file": (3, "not_found", ["backup", "{root}/x.tar", "--state-dir", "{root}"]),
    "no such code": (3, "not_found", ["explain", "nothing"]),
    "open secret": (4, "not_permitted", ["adapter", "sign", "{root}", "--key", "{key}"]),
    "refused": (4, "op_token_invalid", ["op", "sign", "{key}", "--key", "{key}", "--yes"]),
}
"""Exit code, code and words of commands that fail."""


@pytest.mark.breadth(3)
@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_prints_a_code_that_is_explained(what: str, tmp_path: Path) -> None:
    exit_code, code, words = FAILURES[what]
    given = {
        "root": tmp_path,
        "conf": a_file(tmp_path, "hive.conf", "[proxy]\nprot = 1\n"),
        "key": a_file(tmp_path, "ann.key", "x", 0o644),
    }
    done = typed(*(word.format(**given) for word in words))
    assert (done.returncode, code_of(done.stderr)) == (exit_code, code), done.stderr
    explained = typed("explain", code_of(done.stderr))
    assert (explained.returncode, explained.stdout.splitlines()[0]) == (0, code)
    if done.returncode:
        same = typed(*(word.format(**given) for word in words), "--json")
        assert f'"code": "{code}"' in same.stderr


def test_an_unknown_agent_is_told_with_its_code(hive: Hive) -> None:
    said = hive("agent", "show", "alicia")
    assert said.err == "hive: there is no agent 'alicia'  [not_found]\nhint: did you mean `alice`?\n"
    assert hive("explain", code_of(said.err)).code == 0


def test_what_an_agent_may_not_is_told_with_its_code(hive: Hive) -> None:
    said = hive("agent", "pause", "busy-bob", "--timeout", "0.1")
    assert hive("explain", code_of(said.err)).code == 0


def test_each_failure_of_several_has_its_code(hive: Hive) -> None:
    said = hive("agent", "stop", "alicia", "zoe")
    assert SAID.findall(said.err) == ["not_found", "not_found"]


def test_a_fault_in_hive_has_one_too(no_daemon: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(program, "root", broken)
    said = no_daemon("status")
    assert code_of(said.err) == "internal"


def test_a_service_that_does_not_start_says_its_code_in_its_log(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        conf = a_file(tmp_path, "hive.conf", f"[proxy]\nport = {port}\ningress_port = 0\n")
        done = typed("proxy", "--state-dir", str(tmp_path), "--runtime-dir", str(tmp_path), "--config", conf)
    assert (done.returncode, code_of(done.stderr)) == (5, "dependency_down"), done.stderr
    wrong = a_file(tmp_path, "wrong.conf", "[proxy]\nprot = 1\n")
    done = typed("daemon", "--state-dir", str(tmp_path), "--runtime-dir", str(tmp_path), "--config", wrong)
    assert (done.returncode, code_of(done.stderr)) == (2, "config"), done.stderr


def test_conditions_of_a_hive_that_does_not_run_have_their_codes(no_daemon: Hive, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    said = no_daemon("status", "--state-dir", str(tmp_path / "state"))
    found = SAID.findall(said.out)
    assert found
    assert set(found) <= TABLE.keys()
    for code in found:
        assert no_daemon("explain", code).out.startswith(f"{code}\n")


def test_a_check_that_fails_has_its_code(no_daemon: Hive, tmp_path: Path) -> None:
    conf = a_file(tmp_path, "hive.conf", "[proxy]\nport = many\n")
    assert "[config_wrong]" in no_daemon("doctor", "hive.config", "--config", conf).out
