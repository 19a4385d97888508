"""The work of test_ears_box.py in its machine, one stage a boot: `python3 ears_box_inside.py STAGE`. Standard library
only; what was seen goes to /out/STAGE.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.install.box_inside import SOURCES, answers, hive, restart_hive, run, until
from tests.install.pool_box_inside import LOAD_S, units
from tests.runner.comfy_workflows import workflow

CONF = Path("/etc/hive/hive.conf")
WORKFLOWS = Path("/etc/hive/comfyui")
DESCRIBED = """
[model ear]
backend = whisper
file = /srv/models/ear

[model eye]
backend = diffusers
file = /srv/models/eye

[comfyui]
url = http://127.0.0.1:8188
workflows_dir = /etc/hive/comfyui
vram_mb = 100
"""


def token() -> str:
    return Path("/etc/hive/secrets/internal-token").read_text().strip()


def hear() -> tuple[int, Any]:
    """Status and answer for the speech that the test has made."""
    speech = Path("/srv/speech.wav").read_bytes()
    form = (
        b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\near\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="speech.wav"\r\n\r\n' + speech + b"\r\n--B--\r\n"
    )
    fields = {"authorization": f"Bearer {token()}", "content-type": "multipart/form-data; boundary=B"}
    asked = urllib.request.Request("http://127.0.0.1:11435/v1/audio/transcriptions", form, fields)
    try:
        with urllib.request.urlopen(asked, timeout=LOAD_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def see(model: str) -> tuple[int, Any]:
    """Status and answer for one small image of this model."""
    body = {"model": model, "prompt": "a bee", "size": "64x64", "seed": 7, "steps": 2}
    status, answer = answers("11435/v1/images/generations", token(), json.dumps(body).encode(), limit_s=LOAD_S)
    return status, json.loads(answer)


def lists_ear() -> bool:
    return b'"ear"' in answers("11435/v1/models", token())[1]


class CallsAllTheTime:
    """Asks the proxy for its models again and again, each time over a connection of its own, as long as it is open."""

    def __init__(self) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._call)

    def __enter__(self) -> CallsAllTheTime:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _call(self) -> None:
        while not self._is_over.wait(0.01):
            try:
                answers("11435/v1/models", token())
                self.answered += 1
            except OSError as error:
                self.failed.append(repr(error))


def network_of(pid: str) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def work() -> dict[str, Any]:
    WORKFLOWS.mkdir(mode=0o755)
    (WORKFLOWS / "plain.json").write_text(workflow())
    (WORKFLOWS / "plain.json").chmod(0o644)
    stand_in = [sys.executable, f"{SOURCES}/tests/fakes/fake_comfyui.py", "--port", "8188", "--port-file", "/run/comfy"]
    with subprocess.Popen(stand_in) as comfy:
        try:
            return ask_all()
        finally:
            comfy.kill()


def ask_all() -> dict[str, Any]:
    """Each model once, and how it was done."""
    CONF.write_text(CONF.read_text() + DESCRIBED)
    hive("config", "set", "pool.cpu_mb", "6000")
    checked = run("hive", "config", "check")
    with CallsAllTheTime() as calls:
        restarted = restart_hive()
    until("the proxy knows the models", lists_ear)
    seen: dict[str, Any] = {
        "checked": [checked.returncode, checked.stdout + checked.stderr],
        "restarted": restarted,
        "calls": [calls.answered, calls.failed],
        "ear": hear(),
        "eye": see("eye"),
        "comfy": see("comfy/plain"),
        "units": units(),
        "doctor": json.loads(run("hive", "doctor", "--json").stdout)["checks"],
        "explained": {model: hive("pool", "explain", model)["lines"] for model in ("ear", "eye", "comfyui")},
    }
    own = network_of("1")
    seen["has_own_network"] = {
        model: network_of(unit["MainPID"]) != own for model, unit in seen["units"].items() if unit["MainPID"] != "0"
    }
    return seen


if __name__ == "__main__":
    stage = sys.argv[1]
    found = {"work": work}[stage]()
    Path(f"/out/{stage}.json").write_text(json.dumps(found))
