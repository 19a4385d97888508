"""The version that Hive tells: the same for the same code wherever it runs from, another for any other code."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from hive import __version__, build
from hive.cli import version
from hive.host import program

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
SAID = [sys.executable, "-P", "-m", "hive"]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """As a wheel is unpacked: the package beside the others, what is no code in share/hive, no pyproject.toml."""
    shutil.copytree(REPOSITORY / "hive", tmp_path / "lib/hive", ignore=shutil.ignore_patterns("__pycache__"))
    for target, globs in PROJECT["tool"]["setuptools"]["data-files"].items():
        for path in [path for glob in globs for path in REPOSITORY.glob(glob)]:
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tmp_path / target)
    return tmp_path


def digest(environment: Path) -> str:
    return build.digest_of(environment / "lib/hive", build.in_environment(environment))


def test_it_is_the_number_and_a_build(environment: Path) -> None:
    """Two builds of 0.1.0 said the same of themselves, so nobody could tell which one ran."""
    assert re.fullmatch(re.escape(__version__) + r"\+[0-9a-f]{8}", build.version())
    assert build.number_of(build.version()) == __version__


def test_a_clone_and_an_unpacked_wheel_say_the_same(environment: Path) -> None:
    assert digest(environment) == build.digest_of(build.CODE, build.home())
    assert build.home() == REPOSITORY


@pytest.mark.parametrize(
    "changed", ["lib/hive/domain.py", "share/hive/systemd/hive.target", "share/hive/man/hive.1.scd"]
)
def test_another_build_says_something_else(environment: Path, changed: str) -> None:
    before = digest(environment)
    (environment / "lib/hive/__pycache__").mkdir()
    (environment / "lib/hive/__pycache__/domain.pyc").write_bytes(b"compiled")
    assert digest(environment) == before
    (environment / changed).write_text((environment / changed).read_text() + "\n")
    assert digest(environment) != before


def test_all_that_is_packaged_counts() -> None:
    packaged = {glob for globs in PROJECT["tool"]["setuptools"]["data-files"].values() for glob in globs}
    assert packaged == set(build.SHARED)


def test_where_its_files_cannot_be_read_it_is_the_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(code: Path, shared: Path) -> str:
        raise PermissionError(13, "no")

    monkeypatch.setattr(build, "digest_of", refused)
    build.version.cache_clear()
    assert build.version() == __version__
    build.version.cache_clear()


def test_every_way_to_ask_the_command_is_answered_the_same() -> None:
    first = subprocess.run([*SAID, "--version"], capture_output=True, text=True, check=True).stdout
    second = subprocess.run([*SAID, "version"], capture_output=True, text=True, check=True).stdout
    third = subprocess.run([*SAID, "version", "--json"], capture_output=True, text=True, check=True).stdout
    told = json.loads(third)
    commit = f" ({told['commit']})" if told["commit"] else ""
    assert first == second == f"hive {told['hive']}{commit} compiled={'yes' if told['compiled'] else 'no'}\n"


# --- compiled --------------------------------------------------------------------------------------------------------

ONE = "hive/queue/limits.py"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree in which one module is compiled, by setup.py."""
    if importlib.util.find_spec("mypyc") is None or shutil.which("gcc") is None:
        pytest.skip("mypy of the extra `dev`, or gcc, is not installed")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("the headers of this Python are not installed")
    tree = tmp_path_factory.mktemp("compiled")
    shutil.copytree(REPOSITORY / "hive", tree / "hive", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(REPOSITORY / "setup.py", tree)
    (tree / "README.md").touch()
    before, rest = (REPOSITORY / "pyproject.toml").read_text().split("\n[tool.hive]\n")
    after = rest.partition("\n]\n")[2]
    (tree / "pyproject.toml").write_text(f'{before}\n[tool.hive]\ncompiled = ["{ONE}"]\n{after}')
    env = {**os.environ, "HIVE_COMPILE": "1"}
    words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    ran = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return tree


def hive_of(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run([*SAID, *words], cwd=tree, env=env, capture_output=True, text=True)


def test_a_compiled_hive_says_so_and_runs_what_was_compiled(compiled: Path) -> None:
    said = hive_of(compiled, "--version")
    assert said.stdout.endswith(" compiled=yes\n"), said.stderr
    program = "import hive.queue.limits as it; print(it.__file__, it.SlidingWindow(1, 9).take(0.0))"
    env = {**os.environ, "PYTHONPATH": str(compiled)}
    ran = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=True)
    file, taken = ran.stdout.split()
    assert file.endswith(".so")
    assert taken == "None"


def test_a_compiled_hive_whose_source_has_another_byte_does_not_start(compiled: Path) -> None:
    """Python takes the compiled file before the source: the old code ran, and the new one was read."""
    source = compiled / ONE
    before = source.read_bytes()
    source.write_bytes(before + b"\n")
    try:
        refused = hive_of(compiled, "version")
    finally:
        source.write_bytes(before)
    assert refused.returncode == 5
    assert refused.stderr == (
        f"hive: this Hive is not as it was compiled: {ONE} is another than the one that was compiled"
        f"  [dependency_down]\n"
        f"hint: {build.COMPILE_AGAIN}\n"
    )
    assert hive_of(compiled, "version").returncode == 0


def test_a_compiled_hive_does_not_start_with_another_python(compiled: Path) -> None:
    """Another Python passes the compiled files over in silence."""
    written = compiled / "hive" / build.COMPILED.name
    before = written.read_text()
    written.write_text(before.replace('"abi": "cpython-3', '"abi": "cpython-4'))
    try:
        refused = hive_of(compiled, "version", "--json")
    finally:
        written.write_text(before)
    told = json.loads(refused.stderr)
    assert (refused.returncode, told["code"], told["hint"]) == (5, "dependency_down", build.COMPILE_AGAIN)
    assert "it was compiled for cpython-4" in told["message"]


def test_a_checkout_has_no_compiled_files() -> None:
    assert not build.COMPILED.exists()
    assert not [*build.CODE.rglob("*.so")]


# --- the commit ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of git with one commit, in which this Hive seems to lie."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (tmp_path / "hive").mkdir()
    (tmp_path / "hive" / "x.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one")
    monkeypatch.setattr(build, "CODE", tmp_path / "hive")
    return tmp_path


def git(where: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True).stdout.strip()


def test_a_clone_tells_its_commit_and_whether_it_was_modified(clone: Path) -> None:
    head = git(clone, "rev-parse", "HEAD")
    assert head.startswith(version.commit())
    assert len(version.commit()) >= 7
    (clone / "hive" / "x.py").write_text("another")
    assert version.commit() == f"{git(clone, 'rev-parse', '--short=7', 'HEAD')}, modified"


def test_a_release_tells_no_commit_and_what_follows_it_does(clone: Path) -> None:
    git(clone, "tag", f"v{__version__}")
    assert version.commit() == ""
    (clone / "hive" / "x.py").write_text("another")
    assert version.commit().endswith(", modified")
    git(clone, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "two")
    assert git(clone, "rev-parse", "HEAD").startswith(version.commit())
    assert version.commit()


def test_without_git_no_commit_is_told(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PLAIN", {"PATH": str(clone)})
    assert version.commit() == ""


def test_an_installed_hive_tells_what_install_sh_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "CODE", tmp_path / "lib" / "hive")
    monkeypatch.setattr(build, "home", lambda: tmp_path)
    assert version.commit() == ""
    (tmp_path / build.COMMIT).write_text("1a2b3c4-dirty\n")
    assert version.commit() == "1a2b3c4, modified"


def test_install_sh_asks_git_as_the_command_does() -> None:
    script = (REPOSITORY / "install.sh").read_text()
    assert " ".join(build.DESCRIBE).replace("--match=v[0-9]*", "'--match=v[0-9]*'") in script
    assert " ".join(build.CHANGED) in script


def test_asking_for_the_commit_writes_nothing_to_the_clone(clone: Path) -> None:
    """`describe --dirty` renews the index, also with GIT_OPTIONAL_LOCKS=0, in the way of a commit made meanwhile."""
    os.utime(clone / "hive" / "x.py")
    before = (clone / ".git" / "index").stat()
    assert version.commit()
    after = (clone / ".git" / "index").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
