"""The work of test_units_booted.py in its machine, as root: `python3 machine_inside.py`. Standard library only.

What was seen goes to /out/seen.json.

The programs of both environments are made here: their packages are brought, their Python is the machine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
CONF = REPOSITORY / "conf" / "cluster"
ETC = Path("/etc/cluster")
TOKEN = "0123456789abcdef0123456789abcdef"
ENV = """ADDRESS=127.0.0.1
HEAD=127.0.0.1
RAY_MORE=--num-cpus=2 --object-store-memory=80000000
WORKERS=http://127.0.0.1:8001 http://127.0.0.1:8002
"""
SERVE = """
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: llm
    route_prefix: /
    import_path: serve_app:app
    deployments: [{name: Chat, num_replicas: 1, max_ongoing_requests: 4}]
"""
PROGRAMS = {
    "/opt/vllm-router": {"vllm-router": "from vllm_router.launch_router import main"},
    "/opt/ray": {
        "ray": "from ray.scripts.scripts import main",
        "serve": "from ray.serve.scripts import cli as main",
    },
}
ROUTER, DASHBOARD, INGRESS = "http://127.0.0.1:45701", "http://127.0.0.1:8265", "http://127.0.0.1:8000"


def make_programs() -> None:
    for place, programs in PROGRAMS.items():
        there = Path(place)
        (there / "bin").mkdir()
        (there / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.11.2\n")
        (there / "bin/python3").symlink_to("/usr/bin/python3")
        for name, start in programs.items():
            (there / "bin" / name).write_text(
                f"#!{place}/bin/python3\n{start}\nif __name__ == '__main__':\n    main()\n"
            )
            (there / "bin" / name).chmod(0o755)


def install() -> None:
    make_programs()
    ETC.mkdir()
    (ETC / "cluster.env").write_text(ENV)
    (ETC / "serve.yaml").write_text(SERVE)
    (ETC / "ray-token").write_text(TOKEN)
    (ETC / "ray-token").chmod(0o600)
    for name in ("ray-head.service", "vllm-router.service"):
        shutil.copy(CONF / name, "/etc/systemd/system")
    Path("/opt/app").mkdir()
    shutil.copy(REPOSITORY / "tests/fakes/serve_app.py", "/opt/app")
    more = Path("/etc/systemd/system/ray-head.service.d")
    more.mkdir()
    (more / "app.conf").write_text("[Service]\nEnvironment=PYTHONPATH=/opt/app\n")
    systemctl("daemon-reload")


def systemctl(*words: str) -> str:
    ran = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    print(f"$ systemctl {' '.join(words)} → {ran.returncode} {ran.stderr}", flush=True)
    return ran.stdout.strip()


def shown(unit: str, *names: str) -> dict[str, str]:
    found = systemctl("show", unit, *(f"--property={name}" for name in names)).splitlines()
    return dict(line.split("=", 1) for line in found)


def status_of(url: str, token: str = "") -> tuple[int, bytes]:
    """Status and body of a GET; 0 where nobody listens."""
    asked = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(asked, timeout=5) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def until(holds: Callable[[], Any], within_s: float) -> float:
    """Seconds until it held; a negative number where it did not."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() > began + within_s:
            return -1.0
        time.sleep(0.1)
    return round(time.monotonic() - began, 2)


def owner_of(pid: str) -> int:
    return os.stat(f"/proc/{pid}").st_uid


def pid_of(program: str) -> int:
    """The process whose program's path ends so; 0 for none."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (directory / "cmdline").read_bytes().split(b"\0")[0].decode().endswith(program):
                return int(directory.name)
    return 0


def router() -> dict[str, Any]:
    fake = [sys.executable, str(REPOSITORY / "tests/fakes/fake_backend.py"), "--kind", "vllm", "--host", "127.0.0.1"]
    workers = [subprocess.Popen([*fake, "--port", port]) for port in ("8001", "8002")]

    def healthy(count: int) -> bool:
        status, body = status_of(f"{ROUTER}/readiness")
        return status == 200 and json.loads(body).get("healthy_workers") == count

    try:
        systemctl("start", "vllm-router")
        seen: dict[str, Any] = {"up_s": until(lambda: healthy(2), 60)}
        main = shown("vllm-router", "MainPID")["MainPID"]
        seen["owner"] = owner_of(main)
        workers[1].kill()
        seen["one_lost_s"] = until(lambda: healthy(1), 30)
        os.kill(int(main), 9)
        seen["again_s"] = until(lambda: healthy(1) and shown("vllm-router", "MainPID")["MainPID"] != main, 30)
        seen["unit"] = shown("vllm-router", "ActiveState", "NRestarts")
        systemctl("stop", "vllm-router")
        return seen
    finally:
        for worker in workers:
            worker.kill()


def ray() -> dict[str, Any]:
    def answers() -> bool:
        return status_of(f"{INGRESS}/v1/models")[0] == 200

    systemctl("start", "ray-head")
    seen: dict[str, Any] = {"up_s": until(answers, 240)}
    main = shown("ray-head", "MainPID")["MainPID"]
    seen["owner"] = owner_of(main)
    applications = f"{DASHBOARD}/api/serve/applications/"
    seen["without_token"], seen["with_token"] = status_of(applications)[0], status_of(applications, TOKEN)[0]
    os.kill(pid_of("gcs/gcs_server"), 9)
    seen["again_s"] = until(lambda: shown("ray-head", "MainPID")["MainPID"] not in ("0", main) and answers(), 180)
    seen["unit"] = shown("ray-head", "ActiveState", "NRestarts")
    systemctl("stop", "ray-head")
    seen["stopped"] = shown("ray-head", "ActiveState")["ActiveState"]
    seen["left"] = [name for name in ("gcs/gcs_server", "raylet/raylet") if pid_of(name)]
    return seen


if __name__ == "__main__":
    install()
    found = {"router": router(), "ray": ray()}
    print(found, flush=True)
    subprocess.run(["journalctl", "--no-pager", "-n", "80", "-u", "ray-head", "-u", "vllm-router"], check=False)
    Path("/out/seen.json").write_text(json.dumps(found))
