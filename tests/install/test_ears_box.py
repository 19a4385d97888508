"""Runners on a whole box: Whisper, diffusers and a ComfyUI's stand-in, each in its unit, locked up by systemd.

See test_box.py for the machine. The engines are real; their packages are those of the tests' environments, as
`pip install '.[whisper]'` puts them into one.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import diffusers_runner, vllm, whisper
from tests.host import systemd_machine
from tests.install.box import LIBRARIES, Box, Seen, box_of

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(900)]

PNG = b"\x89PNG\r\n"
BROUGHT = ("libgomp.so.1", "libnuma.so.1", "libstdc++.so.6", "libgcc_s.so.1")
PROGRAM = """#!/usr/bin/python3
import glob, sys
sys.path[:0] = [{packages}, *glob.glob("/opt/hive/current/lib/python3*/site-packages")]
from hive.runner.entry import run
run()
"""


def packages_of(venv: Path) -> Path:
    return next(venv.glob("lib/python3*/site-packages"))


def bring(box: Box) -> list[str]:
    """Makes the programs and the speech, and returns what systemd-nspawn is told so that the rest is there."""
    engines, torch = diffusers_runner.environment(), vllm.environment()
    assert engines is not None
    assert torch is not None
    programs = {"whisper": ["/opt/hive-whisper/packages"], "diffusers": ["/opt/hive-diffusers/packages", "/opt/torch"]}
    for kind, packages in programs.items():
        path = box.root / f"opt/hive-{kind}/bin/hive-runner"
        path.parent.mkdir(parents=True)
        path.write_text(PROGRAM.format(packages=", ".join(map(repr, packages))))
        path.chmod(0o755)
    whisper.speech(box.root / "srv/speech.wav")
    pipeline = box.root / "srv/models/eye"
    shutil.copytree(diffusers_runner.pipeline("sd"), pipeline)
    for path in pipeline.rglob("*"):  # weights are written for their owner alone
        path.chmod(0o755 if path.is_dir() else 0o644)
    binds = {
        packages_of(whisper.cache() / "venv"): "/opt/hive-whisper/packages",
        packages_of(engines): "/opt/hive-diffusers/packages",
        packages_of(torch): "/opt/torch",
        whisper.model().resolve(): "/srv/models/ear",
        **{LIBRARIES / name: str(LIBRARIES / name) for name in BROUGHT if (LIBRARIES / name).exists()},
    }
    return [f"--bind-ro={here}:{there}" for here, there in binds.items()]


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    whisper.model()
    diffusers_runner.pipeline("sd")
    if vllm.environment() is None:
        pytest.skip("no torch: run tests/tools/setup_vllm_cpu.sh")
    with box_of("ears_box_inside.py") as box:
        yield box.boot("work", *bring(box))


def test_its_settings_are_right(seen: Seen) -> None:
    assert seen["checked"][0] == 0, seen["checked"][1]
    assert seen["restarted"] == 0


def test_a_restart_of_all_of_hive_resets_no_connection(seen: Seen) -> None:
    answered, failed = seen["calls"]
    assert answered > 0
    assert failed == []


def test_speech_is_heard(seen: Seen) -> None:
    status, answer = seen["ear"]
    assert status == 200, (answer, seen["explained"])
    assert whisper.word_error_rate(whisper.SPOKEN, answer["text"]) <= 0.25, answer


@pytest.mark.parametrize("model", ["eye", "comfy"])
def test_an_image_is_made(seen: Seen, model: str) -> None:
    status, answer = seen[model]
    assert status == 200, (answer, seen["explained"])
    assert base64.b64decode(answer["data"][0]["b64_json"]).startswith(PNG)


@pytest.mark.parametrize("model", ["ear", "eye", "comfyui"])
def test_a_runner_is_a_unit_of_the_pool(seen: Seen, model: str) -> None:
    unit = seen["units"][model]
    assert (unit["ActiveState"], unit["User"], unit["Slice"]) == ("active", "hive-inference", "hive-model.slice")


def test_only_the_runner_of_comfyui_is_in_the_hosts_network(seen: Seen) -> None:
    assert seen["has_own_network"] == {"ear": True, "eye": True, "comfyui": False}


def test_doctor_finds_nothing_wrong_with_them(seen: Seen) -> None:
    about = [check for check in seen["doctor"] if check["name"].startswith(("runners", "comfyui", "pool"))]
    assert {check["name"].partition(".")[0] for check in about} == {"runners", "comfyui", "pool"}
    assert [check for check in about if check["status"] == "fail"] == []
