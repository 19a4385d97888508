"""The work of test_parking_box.py in its machine, one stage a boot: `python3 parking_box_inside.py STAGE`. Standard
library only; what was seen goes to /out/STAGE.json.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.install.box_inside import SOURCES, answers, hive, machine, main_pid, run, until

CONF = Path("/etc/hive/hive.conf")
SLOTS = Path("/var/lib/hive/slots")
KEPT, ENGINE = SLOTS / "kept", SLOTS / "engine"
IN_USE = "default"
LOAD_S = 120.0
STILL = ("/usr/bin/python3", "-c", "import time; time.sleep(100000)")
DESCRIBED = """
[model alpha]
file = /var/lib/hive/models/alpha.gguf
context = 16384
parallel = 1
vram_mb = 80
pin = true
"""
SET = {
    "inference.llama_slot_dir": str(SLOTS),
    "inference.llama_slots_at": "light",
    "inference.llama_context": "16384",
    "inference.llama_parallel": "1",
    "pool.reserve_mb": "0",
    "pool.cpu_mb": "400",
    "daemon.backend_check_s": "0.2",
}


def restarted() -> None:
    """Stopped, then started."""
    run("systemctl", "stop", "hive.target")
    until("it has stopped", lambda: not active())
    run("systemctl", "start", "hive.target")
    until_up()


def until_up() -> None:
    until("Hive answers", lambda: run("hive", "ps").returncode == 0)
    until("alpha is loaded", lambda: states().get("alpha") == "ready", LOAD_S)
    until("the proxy is there", lambda: hive("status")["proxy"]["port"] is not None, LOAD_S)


def active() -> list[str]:
    """Hive's services that have not stopped."""
    shown = run("systemctl", "list-units", "--plain", "--no-legend", "hive-*.service", "hive-*.socket").stdout
    names = [line.split()[0] for line in shown.splitlines() if "exited" not in line]
    return [name for name in names if not name.startswith(("hive-test", "hive-agent@"))]


def states() -> dict[str, str]:
    ran = run("hive", "pool", "--json")
    return {slot["model"]: slot["state"] for slot in json.loads(ran.stdout)["slots"]} if ran.returncode == 0 else {}


def alpha_unit() -> str:
    (slot,) = [slot["id"] for slot in hive("pool")["slots"] if slot["model"] == "alpha"]
    return f"hive-model@{slot}"


def asked(agent: str, model: str) -> tuple[int, int]:
    """Tokens of the agent's prompt, and those of them that were reused."""
    token = hive("agent", "show", agent, "--tokens")["access"]["model"]
    prompt = f"I am agent {agent}, and {agent} is what {agent} remembers. " * 12
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    status, answer = answers("11435/v1/completions", token, json.dumps(body).encode(), limit_s=LOAD_S)
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def parking() -> dict[str, Any]:
    told: dict[str, Any] = hive("cache", "show")["parking"]
    return told


def found(what: str) -> int:
    count: int = parking()["first_requests"][what]["sleeps"]
    return count


def asleep(agent: str) -> None:
    saved = parking()["saved"]
    hive("agent", "pause", agent)
    until(f"the slot of {agent} is on the disk", lambda: parking()["saved"] > saved, 60)


def there() -> list[list[str]]:
    """Everything in both directories: path, owner, group, mode."""
    return [
        [str(path.relative_to(SLOTS)), path.owner(), path.group(), oct(stat.S_IMODE(path.lstat().st_mode))]
        for path in (KEPT, ENGINE, *sorted(SLOTS.glob("*/*")), *sorted(SLOTS.glob("*/*/*")))
    ]


def kept() -> list[Path]:
    return sorted(KEPT.glob("g-*/*"))


def displaced(model: str) -> dict[str, Any]:
    """An agent's sleep, in which another one takes its slot."""
    first = asked("one", model)
    restored = found("restored")
    asleep("one")
    on_disk = there()
    other = asked("two", model)
    again = asked("one", model)
    until("it is used once", lambda: not kept(), 60)
    return {
        "first": first,
        "there": on_disk,
        "other": other,
        "again": again,
        "restored": found("restored") - restored,
        "left": [str(path) for path in (*kept(), *ENGINE.iterdir())],
    }


def tampered(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def anothers(file: Path) -> None:
    """The file of another agent, in the place of this one's."""
    asked("two", "alpha")
    asleep("two")
    (theirs,) = [path for path in kept() if path != file]
    owner = file.stat()
    shutil.copy(theirs, file)
    os.chown(file, owner.st_uid, owner.st_gid)


def spoiled(spoil: Callable[[Path], None]) -> dict[str, Any]:
    asked("one", "alpha")
    refused = found("refused")
    asleep("one")
    (file,) = kept()
    spoil(file)
    asked("two", "alpha")
    again = asked("one", "alpha")
    until("it is deleted", lambda: not kept(), 60)
    return {"again": again, "refused": found("refused") - refused}


def killed() -> dict[str, Any]:
    """kill -9 of the server while the agent sleeps, and of the daemon."""
    asked("one", "alpha")
    asleep("one")
    unit = alpha_unit()
    old = main_pid(unit)
    run("systemctl", "kill", "--signal=KILL", f"{unit}.service")
    until("another server is there", lambda: main_pid(unit) not in (old, "0"), LOAD_S)
    until("alpha is loaded again", lambda: states().get("alpha") == "ready", LOAD_S)
    after_server = asked("one", "alpha")
    asleep("one")
    (ENGINE / "hive-parked-left-by-a-kill").write_text("half of it")
    (ENGINE / "of-nobody").write_text("half of it")
    old = main_pid("hive-daemon")
    os.kill(int(old), 9)
    until("the daemon is back", lambda: main_pid("hive-daemon") not in (old, "0"))
    until_up()
    swept = [path.name for path in ENGINE.iterdir()]
    asked("two", "alpha")
    after_daemon = asked("one", "alpha")
    return {"server": after_server, "daemon": after_daemon, "swept": swept}


TRIES = """
import json, os, sys
place = sys.argv[1]
mine, theirs = place + "/mine", place + "/theirs"
def ask(what):
    try:
        what()
    except OSError as error:
        return type(error).__name__
    return "done"
print(json.dumps({
    "read": ask(lambda: open(theirs).read()),
    "write": ask(lambda: open(theirs, "a")),
    "make": ask(lambda: open(mine, "w")),
    "replace": ask(lambda: os.rename(mine, theirs)),
    "delete": ask(lambda: os.unlink(theirs)),
    "move": ask(lambda: os.rename(theirs, place + "/moved")),
    "list": ask(lambda: os.listdir(place)),
    "own": ask(lambda: os.unlink(mine)),
    "kept": ask(lambda: os.listdir(place + "/../kept")),
}))
"""


def tried(user: str) -> dict[str, str]:
    """The things that this user may do with a file that the daemon handed out, and around it."""
    theirs = ENGINE / "theirs"
    theirs.write_text("checked")
    shutil.chown(theirs, "hive", "hive-inference")
    theirs.chmod(0o640)
    ran = run("setpriv", "--reuid", user, "--regid", user, "--init-groups", "python3", "-c", TRIES, str(ENGINE))
    for path in ENGINE.iterdir():
        path.unlink()
    told: dict[str, str] = json.loads(ran.stdout)
    return told


def park() -> dict[str, Any]:
    shutil.copy("/var/lib/hive/models/alpha.gguf", "/var/lib/hive/models/default.gguf")
    CONF.write_text(CONF.read_text() + DESCRIBED)
    for name, value in SET.items():
        hive("config", "set", name, value)
    seen: dict[str, Any] = {"checked": run("hive", "config", "check").stdout}
    restarted()
    switch = run("hive", "backend", "switch", "llama")
    seen["switched"] = [switch.returncode, switch.stdout + switch.stderr]
    seen["doctor"] = hive("doctor", "parking")
    for name in ("one", "two"):
        hive("agent", "create", name, "--no-network", "--idle", "600", "--", *STILL)
    seen["alpha"] = displaced("alpha")
    seen[IN_USE] = displaced(IN_USE)
    seen["tampered"] = spoiled(tampered)
    seen["another's"] = spoiled(anothers)
    seen["killed"] = killed()
    seen["tried"] = {user: tried(user) for user in ("hive-inference", "hive-proxy")}
    seen["log"] = run("journalctl", "-b", "-u", "hive*", "-o", "cat", "--no-pager", "-g", "park|slot").stdout[-6000:]
    asked("one", "alpha")
    asleep("one")
    seen["slept"] = [str(path) for path in kept()]
    return seen


def off() -> dict[str, Any]:
    """After a boot what was kept is good still; then the setting is taken away."""
    until_up()
    seen: dict[str, Any] = {"kept": [str(path) for path in kept()]}
    asked("two", "alpha")
    seen["again"] = asked("one", "alpha")
    asleep("one")
    hive("config", "set", "inference.llama_slot_dir", "/srv/slots")
    seen["elsewhere"] = run("hive", "config", "check").stdout
    hive("config", "set", "inference.llama_slot_dir", "")
    (ENGINE / "hive-parked-late").write_text("half of it")
    restarted()
    seen["off"] = [str(path) for path in (*kept(), *ENGINE.iterdir())]
    hive("config", "set", "inference.llama_slot_dir", str(SLOTS))
    restarted()
    asked("one", "alpha")
    asleep("one")
    seen["on again"] = len(kept())
    return seen


def leave() -> dict[str, Any]:
    until_up()
    seen: dict[str, Any] = {"kept": len(kept())}
    told = run(f"{SOURCES}/install.sh", "--uninstall", "--dry-run")
    away = run(f"{SOURCES}/install.sh", "--uninstall", "--yes")
    seen["told"] = told.stdout
    seen["uninstalled"] = [away.returncode, [str(path) for path in SLOTS.glob("*/*")]]
    seen["back"] = [run(f"{SOURCES}/install.sh").returncode, there()]
    gone = run(f"{SOURCES}/install.sh", "--uninstall", "--purge", "--yes")
    return seen | {"purged": [gone.returncode, gone.stdout + gone.stderr], "after": machine()}


STAGES = {"park": park, "off": off, "leave": leave}

if __name__ == "__main__":
    stage = sys.argv[1]
    seen = STAGES[stage]()
    Path("/out", f"{stage}.json").write_text(json.dumps(seen))
