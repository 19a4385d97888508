"""The cloud guard, told inside a network namespace: `unshare -n python -m tests.journeys.cloud_story`.

The only way out is a device that counts what goes through, and nobody is at its other end. Prints one line of JSON:
what was answered, and the packets after each step.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.journeys.pool_stack import llama_models, llama_rows, pool_config
from tests.journeys.sdk import Door, door_of
from tests.journeys.stack import Stack, stack, until

OUT, NOBODY = "way-out", "nobody"
FAR = "http://192.0.2.1:8000/v1"
"""TEST-NET-1 (RFC 5737): nobody is there."""
QUIET_S = 6.0
"""Longer than any look that Hive makes by itself at a server."""


def make_network() -> None:
    """Makes loopback, and a device behind which everything else would be."""
    for command in (
        "ip link set lo up",
        "sysctl -qw net.ipv6.conf.all.disable_ipv6=1",  # the kernel's own words to its neighbours
        f"ip link add {OUT} type veth peer name {NOBODY}",
        f"ip addr add 198.51.100.2/24 dev {OUT}",
        f"ip link set {OUT} up",
        f"ip link set {NOBODY} up",
        f"ip route add default dev {OUT}",
    ):
        subprocess.run(command.split(), check=True)


def packets() -> int:
    """Packets that have left. A namespace of its own mounts no /sys: `ip` asks the kernel."""
    told = json.loads(subprocess.run(["ip", "-s", "-j", "link", "show", OUT], capture_output=True, check=True).stdout)
    return int(told[0]["stats64"]["tx"]["packets"])


def ask(door: Door, model: str, **headers: str) -> tuple[int, str]:
    answer = door.post(
        "/v1/chat/completions",
        {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        **headers,
    )
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


def kill_server(hive: Stack, name: str) -> int:
    """kill -9 of this Hive's llama-server of this model; how many that were.

    Processes are seen across the namespace of a network: it killed those of other tests that ran beside it.
    """
    killed = [pid for pid in hive.servers() if name in psutil.Process(pid).cmdline()]
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    return len(killed)


def tell(hive: Stack, models: dict[str, Path]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    door = door_of(hive, "alice")
    until(lambda: state_of(hive, "sonnet") == "ready", within_s=60, what="sonnet")
    time.sleep(QUIET_S)
    said["idle"] = packets()
    said["near"] = ask(door, "alpha")
    models["alpha"].rename(models["alpha"].with_suffix(".gone"))
    said["killed"] = kill_server(hive, "alpha")
    with ThreadPoolExecutor(8) as threads:
        said["down"] = sorted(set(threads.map(lambda _: ask(door, "plan"), range(16))))
    said["task"] = ask(door, "task:ladder")
    said["stand_in"] = ask(door, "best")
    said["local_only"] = ask(door, "sonnet", **{"X-Hive-Local-Only": "1"})
    local = {"X-Hive-Local-Only": "1"}
    background = door.post("/v1/responses", {"model": "sonnet", "input": "hi", "background": True}, **local)
    said["local_only_background"] = [background.status_code, background.json()["error"]["code"]]
    said["local_only_job"] = local_only_job(hive)
    said["asked_stays"] = packets()
    said["by_name"] = ask(door, "sonnet")
    said["left"] = packets()
    hive.put_config({"inference.cloud": "fallback"})
    said["fallback"] = until(lambda: steps_down(door), within_s=60, what="a step to the far one")
    hive.put_config({"inference.cloud": "never"})
    until(lambda: ask(door, "sonnet")[1] == "cloud_not_permitted", within_s=60, what="never")
    time.sleep(QUIET_S)  # what was asked before is not repeated any more
    before = packets()
    said["never"] = ask(door, "sonnet")
    time.sleep(QUIET_S)
    said["never_stays"] = packets() == before
    return said


def local_only_job(hive: Stack) -> str:
    """The reason for which a job of the far model ends that must not leave the box."""
    job = hive.post("/api/jobs", {"name": "stay", "model": "sonnet", "prompt": "hi", "local_only": True})["id"]
    until(lambda: hive.get(f"/api/jobs/{job}")["state"] != "running", within_s=60, what="the job's end")
    return str(hive.get(f"/api/jobs/{job}/result")["reason"])


def steps_down(door: Door) -> bool:
    """Whether the task goes on to its far rung: nobody answers there."""
    return ask(door, "task:ladder") == (504, "backend_timeout")


def state_of(hive: Stack, model: str) -> str:
    return next(str(slot["state"]) for slot in hive.get("/api/pool")["slots"] if slot["model"] == model)


def main() -> None:
    make_network()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        models = llama_models(Path(folder), ["alpha"])
        config = pool_config(300, more="aliases = plan = alpha | sonnet, best = gone | sonnet\n") + llama_rows(models)
        config += "[task ladder]\nmodels = alpha | sonnet\nbudget_s = 5\nhold_s = 0\n"
        config += f"[model sonnet]\nbackend = remote\nurl = {FAR}\n"
        with stack(config=config) as hive:
            hive.create("alice", "idler.py", tier="high")
            hive.put_config({"proxy.responses_kept_mb": 64})
            sys.stdout.write(json.dumps(tell(hive, models)) + "\n")


if __name__ == "__main__":
    main()
