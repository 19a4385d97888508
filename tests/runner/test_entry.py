"""The program around an engine: its words, its load, and its end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.whisper import ROOT

SERVE = """
import sys, threading, argparse
from pathlib import Path
from hive.runner import entry
from hive.runner.http_server import CallRoute

class Engine:
    def load(self): {load}
    def version(self): return "1"
    def routes(self): return {{}}
    def facts(self): return {{}}
    def counts(self): return {{}}

entry.end(entry.serve("whisper", "m", Engine(), Path(sys.argv[1])))
"""


def served(folder: Path, load: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SERVE.format(load=load), str(folder / "s")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert not (folder / "s").exists()
    return done.returncode, done.stderr


def test_a_load_that_fails_ends_it_and_says_why(tmp_path: Path) -> None:
    assert served(tmp_path, 'raise ValueError("no such tensor")') == (
        1,
        "m cannot be loaded: ValueError: no such tensor\n",
    )


def test_a_load_without_memory_ends_it_with_77(tmp_path: Path) -> None:
    assert served(tmp_path, 'raise RuntimeError("CUDA failed with error out of memory")')[0] == 77


def test_a_signal_ends_it_while_it_loads(tmp_path: Path) -> None:
    program = SERVE.format(load="threading.Event().wait()")
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "s")], cwd=ROOT) as process:
        while not (tmp_path / "s").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait(60) == 0
    assert not (tmp_path / "s").exists()


def test_wrong_words_are_usage(tmp_path: Path) -> None:
    for words in ([], ["ear"], ["whisper", "--nonsense"]):
        code = "from hive.runner.entry import run; run()"
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2
        assert "hive-runner" in done.stderr


@pytest.mark.parametrize("kind", ["whisper", "diffusers"])
def test_an_environment_without_the_engine_says_what_to_install(tmp_path: Path, kind: str) -> None:
    """diffusers was a traceback: its module cannot even be imported without its engine. And `pip install hive[…]`
    would have asked a registry, where Hive is not."""
    for name in ("model.bin", "config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    words = (kind, "--socket", str(tmp_path / "s"), "--name", "m", "--model", str(tmp_path))
    code = "from hive.runner.entry import run; run()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"hive-runner {kind} lacks ")
    assert f"pip install '.[{kind}]' in a clone of Hive" in line
