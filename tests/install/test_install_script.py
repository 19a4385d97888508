"""install.sh before there is a Python: what it refuses, and what it does where Hive itself no longer can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hive.files.layout import Layout
from hive.host import systemd
from hive.install.install import install, steps_of
from hive.install.step_list import STEPS
from hive.install.steps import Box
from tests.install.installation import box_of, make_root, make_version, tree

SCRIPT = Path(__file__).parents[2] / "install.sh"


def type_script(*words: str, as_nobody: bool = False) -> subprocess.CompletedProcess[str]:
    user = {"user": 65534, "group": 65534, "extra_groups": []} if as_nobody else {}
    return subprocess.run(["bash", SCRIPT, *words], capture_output=True, text=True, check=False, cwd="/", **user)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    "words",
    [["--purge"], ["--no-such"], ["down"], ["--uninstall", "box"], ["--prefix", "/no/such/directory"], ["--help"]],
)
def test_what_it_does_not_know_it_does_not_do(words: list[str]) -> None:
    said = type_script(*words)
    assert said.returncode == 2
    assert "usage" in said.stderr or "--prefix" in said.stderr


def test_without_root_it_says_what_to_type() -> None:
    if os.geteuid() == 0 and not os.access(SCRIPT.parent, os.X_OK):
        pytest.skip("nobody else can come here")
    for words in ([], ["--uninstall"]):
        said = type_script(*words, as_nobody=os.geteuid() == 0)
        if said.returncode == 126:
            pytest.skip("nobody else may read this checkout")
        assert said.returncode == 4, said.stderr
        assert "sudo ./install.sh" in said.stderr


@pytest.mark.root
def test_without_systemd_it_says_what_works_instead() -> None:
    if os.geteuid() != 0 or systemd.is_booted():
        pytest.skip("needs root, and a machine without systemd: this one would be installed on")
    said = type_script()
    assert said.returncode == 5
    assert "./install.sh up" in said.stderr
    assert not Path("/opt/hive").exists()


@pytest.mark.root
def test_what_nothing_can_remove_any_more_the_script_removes(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    for name in ("opt/hive/versions/0.1.0-1/bin", "etc/hive", "var/lib/hive", "usr/local/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "usr/local/bin/hive").symlink_to("/opt/hive/current/bin/hive")
    refused = type_script("--uninstall", "--prefix", str(tmp_path))
    assert (refused.returncode, (tmp_path / "opt/hive").exists()) == (3, True)
    assert type_script("--uninstall", "--yes", "--prefix", str(tmp_path)).returncode == 0
    assert not (tmp_path / "opt/hive").exists()
    assert not (tmp_path / "usr/local/bin/hive").is_symlink()
    assert (tmp_path / "etc/hive").exists()
    assert (tmp_path / "var/lib/hive").exists()
    assert type_script("--uninstall", "--purge", "--yes", "--prefix", str(tmp_path)).returncode == 0
    assert not (tmp_path / "etc/hive").exists()
    assert not (tmp_path / "var/lib/hive").exists()


@pytest.mark.root
def test_what_the_installer_noted_goes_also_where_hive_cannot_run_any_more(root_of_an_image: Path) -> None:
    """After an upgrade of Debian no environment had its Python any more: units, man pages and links were left."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    root = root_of_an_image
    before = tree(root)
    make_version(root, "0.1.0-1")
    box = box_of(root, "0.1.0-1")
    install(box, steps=[step for step in steps_of(box) if step.name != "self-check"])
    told = type_script("--uninstall", "--purge", "--dry-run", "--prefix", str(root))
    assert told.returncode == 0, told.stderr
    removed = type_script("--uninstall", "--purge", "--yes", "--prefix", str(root))
    assert removed.returncode == 0, removed.stderr
    assert lines_said(removed.stderr) == lines_told(told.stdout)
    left = {name for name in tree(root) if name not in before}
    assert {name for name in left if not (root / name).is_dir()} == set()


@pytest.mark.root
@pytest.mark.parametrize("words", [[], ["--yes"], ["--purge", "--yes"], ["--dry-run"]])
def test_where_nothing_is_installed_it_says_so_and_asks_nothing(words: list[str], root_of_an_image: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    before = tree(root_of_an_image)
    said = type_script("--uninstall", *words, "--prefix", str(root_of_an_image))
    assert (said.returncode, "there is nothing to remove" in said.stderr) == (3, True)
    assert tree(root_of_an_image) == before


def test_a_pip_that_fails_says_what_to_do_next() -> None:
    """It said "pip install failed", and nothing else of its own."""
    script = SCRIPT.read_text()
    functions = script[script.index("say() {") : script.index("# How well a Python suits")]
    said = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{functions}\ndie_of_pip"], capture_output=True, text=True
    )
    assert said.returncode == 5
    assert said.stderr.startswith("install.sh: pip could not reach a package index, or failed")
    assert "[dependency_down]" in said.stderr.splitlines()[0]
    assert "then type the same command again" in said.stderr


PYTHONS = [
    # A directory of PATH each: the name of its Python, and how well that suits; "" where it is too old.
    ([("python3", "3"), ("python3", "3")], "a/python3"),  # the first of the best
    ([("python3", "2"), ("python3", "3")], "b/python3"),  # a version manager's before the system's
    ([("python3", "2"), ("python3.12", "3")], "b/python3.12"),
    ([("python3", ""), ("python3.13", "2")], "b/python3.13"),
    ([("python3", "1"), ("python3.11", "2")], "b/python3.11"),  # the first can make no environment
    ([("python3.11", "1"), ("python", "3")], "a/python3.11"),  # better than none: Debian's python3-venv comes to it
    ([("python3", "")], ""),
]


@pytest.mark.parametrize(("pythons", "expected"), PYTHONS)
def test_of_all_pythons_on_path_the_first_that_was_built_with_a_profile_is_taken(
    pythons: list[tuple[str, str]], expected: str, tmp_path: Path
) -> None:
    """The shim of a version manager hid Debian's own, and a request cost a sixth more CPU."""
    for folder, (name, fitness) in zip("ab", pythons, strict=False):
        (tmp_path / folder).mkdir()
        fake = tmp_path / folder / name
        fake.write_text(f"#!/bin/sh\n{f'echo {fitness}' if fitness else 'exit 1'}\n")
        fake.chmod(0o755)
    said = find_python("find_python", PATH=f"{tmp_path}/a:{tmp_path}/b")
    assert said.stdout == f"{tmp_path / expected if expected else ''}\n"


def test_a_python_that_was_chosen_comes_first() -> None:
    assert find_python("check_choice; find_python", HIVE_PYTHON=sys.executable).stdout == f"{sys.executable}\n"
    for none in ("/bin/true", "/no/such/python3"):
        refused = find_python("check_choice; find_python", HIVE_PYTHON=none)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"HIVE_PYTHON={none} is no Python 3.11 or newer  [usage]" in refused.stderr


def find_python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.read_text()
    functions = script[script.index("say() {") : script.index("# Debian ships ensurepip")]
    line = f"root={SCRIPT.parent}\n{functions}\n{program}"
    return subprocess.run(["/bin/bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, env=env)


def test_the_script_tells_the_steps_that_hive_takes() -> None:
    """A dry run told one line where no Python could say more. It tells the list now that the run goes by."""
    script = SCRIPT.read_text()
    functions = script[script.index("# --- steps:") : script.index("# Which packages came with Hive")]
    steps = script[script.index("hive_steps() {") : script.index("# Why this box cannot")]
    program = f"root={SCRIPT.parent}\njson=\nsay() {{ :; }}\n{functions}\n{steps}\ntell hive_steps"
    said = subprocess.run(["bash", "-euo", "pipefail", "-c", program], capture_output=True, text=True, check=True)
    assert lines_told(said.stdout) == [(name, words) for name, words in STEPS.items() if words]
    box = Box(Layout(Path("/")), version="1-1", share=Path("/"), say=print)
    assert [step.name for step in steps_of(box)] == list(STEPS)


def lines_told(text: str) -> list[tuple[str, str]]:
    """Step and what it does, of a dry run."""
    found, step = [], ""
    for line in text.splitlines():
        if line.startswith("    "):
            found.append((step, line.strip()))
        else:
            step = line
    return found


def lines_said(text: str) -> list[tuple[str, str]]:
    """The same of a run."""
    lines = [line.removeprefix("install.sh: ").partition(": ") for line in text.splitlines()]
    return [(step, words) for step, _, words in lines]


@pytest.fixture
def root_of_an_image(tmp_path: Path) -> Path:
    return make_root(tmp_path / "image")
