"""The work of test_template_box.py in its machine, one stage a boot: `python3 template_box_inside.py STAGE`. Standard
library only; what was seen goes to /out/STAGE.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.install.box_inside import agents, hive, main_pid, restart_hive, run, statuses, until

TEMPLATES = Path("/etc/hive/templates.d")
DESCRIBED = """
[template.lib]
python = "/usr/bin/python3"
imports = ["json", "decimal", "http.client", "asyncio"]
memory_mb = 200

[template.broken]
python = "/usr/bin/python3"
imports = ["no_such_module"]
"""
AGENT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("began", "decimal" in sys.modules, os.environ.get("PLAIN"), sys.argv[1:], flush=True)
while True:
    time.sleep(0.05)
"""
GREEDY = """
import time
held = []
while True:
    held.append(bytearray(2**20))
    time.sleep(0.001)
"""
SHOWN = ("MainPID", "ActiveState", "Slice", "Type", "Result", "ExecMainStatus")


def show(unit: str) -> dict[str, str]:
    lines = run("systemctl", "show", unit, *(f"--property={name}" for name in SHOWN)).stdout.splitlines()
    return dict(line.split("=", 1) for line in lines)


def unit_of(name: str) -> str:
    return f"hive-agent@{agents()[name]['id']}.service"


def logs_of(name: str) -> str:
    run("journalctl", "--sync")
    return run("hive", "agent", "logs", name, "--lines", "50").stdout


def create(name: str, *words: str, template: str = "lib") -> None:
    """Creates it, and starts it."""
    hive("agent", "create", name, "--template", template, *words)


def create_failing(name: str, *words: str) -> str:
    """Creates one that ends with a failure; what `create` said of that, empty where it lived longer than that looks."""
    return run("hive", "agent", "create", name, "--template", "lib", *words).stderr


def pid_of(name: str) -> int:
    return int(agents()[name]["pid"])


def template_pid() -> int:
    return int(show("hive-template@lib.service")["MainPID"])


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def work() -> dict[str, Any]:
    until("hive answers", lambda: run("hive", "status").returncode in (0, 1, 5))
    TEMPLATES.mkdir(mode=0o755, exist_ok=True)
    (TEMPLATES / "lib.toml").write_text(DESCRIBED)
    place = Path("/srv/agents")
    place.mkdir(mode=0o755, exist_ok=True)
    for name, text in (("agent.py", AGENT), ("greedy.py", GREEDY)):
        (place / name).write_text(text)
        (place / name).chmod(0o644)
    checked = run("hive", "config", "check")
    restart_hive()
    found: dict[str, Any] = {"checked": [checked.returncode, checked.stdout + checked.stderr]}
    create("one", "--env", "PLAIN=1", "--autostart", "--restart", "always", "--", "/srv/agents/agent.py", "a")
    until("one runs", lambda: statuses()["one"] == "running")
    until("one has said so", lambda: "began" in logs_of("one"))
    found["one"] = {"shown": show(unit_of("one")), "pid": pid_of("one"), "logs": logs_of("one")}
    found["status of one"] = Path(f"/proc/{pid_of('one')}/status").read_text()
    found["template"] = {"shown": show("hive-template@lib.service"), "listed": hive("template", "list")}
    found["helper's log"] = run("journalctl", "-u", "hive-sandbox", "-o", "cat", "--no-pager").stdout
    found["template's log"] = run("journalctl", "-u", "hive-template@lib", "-o", "cat", "--no-pager").stdout
    found["slept"] = slept("one")
    found["ended"] = ended()
    found["broken"] = broken()
    found["killed"] = killed()
    found["doctor"] = json.loads(run("hive", "doctor", "--json").stdout)["checks"]
    return found


def slept(name: str) -> list[str]:
    hive("agent", "pause", name)
    frozen = statuses()[name]
    hive("agent", "resume", name)
    return [frozen, statuses()[name]]


def ended() -> dict[str, Any]:
    """The exit code of one that is stopped by itself, and the end of one that takes more memory than it may."""
    said = create_failing("codes", "--", "-c", "raise SystemExit(7)")
    until("codes has ended", lambda: statuses()["codes"] not in ("running", "starting"))
    found = {"codes": hive("agent", "show", "codes"), "said of codes": said}
    create_failing("greedy", "--memory", "64M", "--", "/srv/agents/greedy.py")
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    found["has memory"] = "memory" in controllers
    if found["has memory"]:
        until("greedy has ended", lambda: statuses()["greedy"] not in ("running", "starting"))
        found["greedy"] = hive("agent", "show", "greedy")
    else:
        run("hive", "agent", "stop", "greedy")
    return found


def broken() -> dict[str, Any]:
    create("fallen", "--", "/srv/agents/agent.py", template="broken")
    until("fallen runs", lambda: statuses()["fallen"] == "running")
    until("fallen has said so", lambda: "began" in logs_of("fallen"))
    found = {"logs": logs_of("fallen"), "shown": show(unit_of("fallen"))}
    run("hive", "agent", "stop", "fallen")
    return found


def killed() -> dict[str, Any]:
    """`one` lives through the end of its template, of the helper and of the daemon, each by SIGKILL."""
    pid = pid_of("one")
    found: dict[str, Any] = {}
    os.kill(template_pid(), signal.SIGKILL)
    until("the template is gone", lambda: template_pid() == 0)
    found["after template"] = [is_alive(pid), statuses()["one"]]
    create("two", "--", "/srv/agents/agent.py")
    until("two runs", lambda: statuses()["two"] == "running")
    found["template anew"] = template_pid() != 0
    for service in ("hive-sandbox", "hive-daemon"):
        old = main_pid(service)
        os.kill(int(old), signal.SIGKILL)
        until(f"another {service}", lambda service=service, old=old: main_pid(service) not in ("0", old))  # type: ignore[misc]
        until("hive answers", lambda: run("hive", "agent", "list").returncode == 0)
        until("one is known", lambda: statuses()["one"] == "running" and pid_of("one") == pid)
        found[f"after {service}"] = [is_alive(pid), show(unit_of("one"))["MainPID"] == str(pid)]
    for verb in ("daemon-reload", "daemon-reexec"):
        run("systemctl", verb)
        found[f"after {verb}"] = [is_alive(pid), show(unit_of("one"))["MainPID"] == str(pid)]
    unit = unit_of("two")
    hive("agent", "stop", "two")
    found["helper's log"] = run("journalctl", "-u", "hive-sandbox", "-o", "cat", "--no-pager").stdout
    found["two"] = run("journalctl", "-u", unit, "-o", "cat", "--no-pager").stdout
    return found


def second_boot() -> dict[str, Any]:
    until("one is up again", lambda: statuses().get("one") == "running")
    until("one has said so", lambda: "began" in logs_of("one"))
    return {"shown": show(unit_of("one")), "logs": logs_of("one"), "template": show("hive-template@lib.service")}


if __name__ == "__main__":
    stage = sys.argv[1]
    found = {"work": work, "second_boot": second_boot}[stage]()
    Path(f"/out/{stage}.json").write_text(json.dumps(found))
