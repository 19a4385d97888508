"""The work of test_job_box.py in its machine, one stage a boot: `python3 job_box_inside.py STAGE`. Standard library
only; what was seen goes to /out/STAGE.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.install.box_inside import SOURCES, hive, main_pid, run, until

SHOWN = ("ActiveState", "User", "MainPID", "NRestarts", "Result")


def show(unit: str) -> dict[str, str]:
    lines = run("systemctl", "show", unit, *(f"--property={name}" for name in SHOWN)).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def model() -> str:
    return str(hive("model", "list")["models"][0]["name"])


def job(*words: str) -> dict[str, Any]:
    """The result of a job that is waited for."""
    ran = run("hive", "job", "run", "n", "--model", model(), "--wait", "--json", *words)
    assert ran.stdout, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def work() -> dict[str, Any]:
    until("hive answers", lambda: run("hive", "status").returncode in (0, 1, 5) and bool(hive("status")))
    switched = run("hive", "backend", "switch", "demo")
    before = show("hive-jobs.service")
    first = job("Say hello.")
    running = show("hive-jobs.service")
    pid = int(running["MainPID"])
    seen = {
        "switched": [switched.returncode, switched.stderr],
        "before": before,
        "first": first,
        "running": running,
        "status": Path(f"/proc/{pid}/status").read_text(),
        "network": os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/1/ns/net"),
        "sockets": {path: stat_of(path) for path in ("/run/hive/proxy/jobs.sock", "/run/hive-jobs/link.sock")},
        "pss_kb": pss_kb(pid),
    }
    os.kill(pid, signal.SIGKILL)
    seen["second"] = job("Say hello again.")
    seen["after kill"] = show("hive-jobs.service")
    other = int(main_pid("hive-daemon"))
    os.kill(other, signal.SIGKILL)
    until("another daemon", lambda: main_pid("hive-daemon") not in ("0", str(other)))
    until("it answers", lambda: run("hive", "job", "list", "--json").returncode == 0)
    until("the proxy is there", lambda: bool(hive("status")["proxy"]["connected"]))
    seen["third"] = job("And again.")
    seen["doctor"] = hive_doctor()
    seen["logs"] = run("journalctl", "-u", "hive-jobs", "-o", "cat", "--no-pager").stdout
    stopped = run("systemctl", "stop", "hive.target")
    seen["stopped"] = [stopped.returncode, show("hive-jobs.service")["ActiveState"]]
    return seen


def hive_doctor() -> dict[str, Any]:
    ran = run("hive", "doctor", "--json")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def stat_of(path: str) -> str:
    return run("stat", "-c", "%U %G %a", path).stdout.strip()


def pss_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def leave() -> dict[str, Any]:
    ran = run(f"{SOURCES}/install.sh", "--uninstall", "--purge", "--yes")
    left = [path for path in ("/run/hive-jobs", "/etc/systemd/system/hive-jobs.socket") if os.path.lexists(path)]
    users = [line.split(":")[0] for line in Path("/etc/passwd").read_text().splitlines()]
    return {"ran": [ran.returncode, ran.stdout + ran.stderr], "left": left, "users": users}


if __name__ == "__main__":
    stage = sys.argv[1]
    found = {"work": work, "leave": leave}[stage]()
    Path(f"/out/{stage}.json").write_text(json.dumps(found))
