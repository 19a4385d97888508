"""Run as root on a machine with little memory and unified control groups: a whole Hive whose agents' heaps together
are larger than the memory. Argument: the file for what it saw, JSON.

It looks past Hive: at the kernel's files, at processes by their ids, at what the agents answer.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import mmap
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hive.host import zram
from hive.host.memory import read_memory, read_swaps, read_zram
from tests.journeys.stack import PROCESSES, Stack, stack, until

MIB = 1 << 20
AGENTS, HEAP_MIB = 20, 30
AGENTS_ON_ZRAM, ZRAM_MIB = 8, 512
TAKEN_BYTES = 64 * MIB
FIRST_PORT = 18000
UP_WITHIN_S = 420
ANSWERS_WITHIN_S = 300
PYTHON = "/usr/bin/python3"
SLEEPER = """
import os, socket, sys, zlib

def checked():
    found = 0
    for part in heap:
        found = zlib.crc32(part, found)
    return found

heap = [os.urandom(2048) + bytes(2048) for _ in range(int(sys.argv[1]) * 256)]
made = checked()
server = socket.create_server(("127.0.0.1", int(os.environ["HIVE_AGENT_PORT"])), backlog=64)
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    said = b"whole" if checked() == made else b"broken"
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: %d\\r\\nConnection: close\\r\\n\\r\\n" % len(said) + said)
    connection.close()
"""
"""Each answer touches all of its heap. Half of it is noise."""
HOG = """
held = []
while True:
    held.append(bytearray(b"x") * (1 << 20))
"""
BOMB = """
import os, time
made = 1
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError:
    print(made, flush=True)
time.sleep(1000)
"""
SPIN = "while True: pass"
SHARED_MIB, OWN_MIB = 24, 4
SHARED_HEAP = f"import os\nheap = os.urandom({SHARED_MIB} << 20)\n"
"""The package that a template imports."""
TEMPLATE = """
[template heap]
python = /usr/bin/python3
imports = shared_heap
"""
OF_TEMPLATE = f"""
import os, time, zlib, shared_heap
own = os.urandom({OWN_MIB} << 20)
print("ready", zlib.crc32(shared_heap.heap), flush=True)
time.sleep(100000)
"""
CPU_SHARE, CPU_WATCHED_S = 0.2, 5.0
PR_CAPBSET_DROP, CAP_SYS_NICE = 24, 23
begun = time.monotonic()


def note(what: str) -> None:
    print(f"{time.monotonic() - begun:6.1f} s  {what}", file=sys.stderr, flush=True)


class Machine:
    """The Hive under test, and what the kernel says of it."""

    def __init__(self, hive: Stack, agents: int) -> None:
        """With so many agents, all deep asleep."""
        self.hive = hive
        self.names = [f"a{number:02}" for number in range(agents)]
        self.ids: dict[str, str] = {}
        self._ingress = hive.health()["proxy"]["ingress_port"]
        self._tokens: dict[str, str] = {}
        for number, name in enumerate(self.names):
            self._settle(name, FIRST_PORT + number)
            note(f"{name} sleeps: {self.state_of(name)}, {read_memory()}")

    def _settle(self, name: str, port: int) -> None:
        hive, command = self.hive, [PYTHON, "-S", "-c", SLEEPER, str(HEAP_MIB)]
        hive.post("/api/agents", {"name": name, "command": command, "port": port})
        hive.post(f"/api/agents/{name}/start")
        until(lambda: "ready" in hive.agent_log(name), within_s=180, what=f"{name} has its heap")
        self.ids[name] = hive.get(f"/api/agents/{name}")["id"]
        self._tokens[name] = hive.get(f"/api/agents/{name}/tokens")["ingress"]
        hive.post(f"/api/agents/{name}/pause", {"deep": True})

    def group(self, name: str) -> Path:
        (found,) = Path("/sys/fs/cgroup").glob(f"hive-up-*/{self.ids[name]}")
        return found

    def processes(self) -> dict[str, list[str]]:
        """Of each agent: the same, whatever happens to Hive or to the agent's memory."""
        return {name: sorted((self.group(name) / "cgroup.procs").read_text().split()) for name in self.ids}

    def state_of(self, name: str) -> dict[str, Any]:
        """The state as Hive tells it, and as the kernel does."""
        view, group = self.hive.get(f"/api/agents/{name}"), self.group(name)
        return {
            "status": view["status"],
            "depth": view["depth"],
            "frozen": "frozen 1" in (group / "cgroup.events").read_text(),
            "swap_bytes": int((group / "memory.swap.current").read_text()),
            "ram_bytes": int((group / "memory.current").read_text()),
        }

    def true_state(self, name: str) -> dict[str, Any]:
        """The same as soon as it is no longer on the way from one to the other. Fails where that does not come."""

        def agree() -> dict[str, Any] | None:
            state = self.state_of(name)
            return state if {"paused": True, "running": False}.get(state["status"]) is state["frozen"] else None

        found: dict[str, Any] = until(agree, within_s=60, what=f"{name} is what Hive says")
        return found

    def call(self, name: str) -> dict[str, Any]:
        asked = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._ingress, timeout=ANSWERS_WITHIN_S)
            connection.request("GET", f"/agents/{name}/", headers={"X-Hive-Token": self._tokens[name]})
            answer = connection.getresponse()
            body, after = answer.read().decode(errors="replace"), answer.headers.get("Retry-After")
            connection.close()
            told = {"status": answer.status, "body": body, "retry_after": after}
        except OSError as error:
            told = {"status": 0, "body": repr(error), "retry_after": None}
        return told | {"took_s": time.monotonic() - asked}

    def answer_of(self, name: str) -> str:
        """Its answer in the end, to a caller who comes again when a refusal says so."""
        until_s = time.monotonic() + ANSWERS_WITHIN_S
        while (found := self.call(name))["status"] == 503 and time.monotonic() < until_s:
            time.sleep(float(found["retry_after"]))
        return str(found["body"])


def all_at_once(names: list[str], ask: Callable[[str], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    threads = [threading.Thread(target=lambda name=name: found.update({name: ask(name)})) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def counted(name: str) -> int:
    """Of the whole machine, since it was booted: a line of /proc/vmstat."""
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[0] == name)


def processes(hive: Stack) -> dict[str, int]:
    return {name: hive.pid_of(name) for name in PROCESSES}


# --- what is looked at ----------------------------------------------------------------------------------------------


def asleep(machine: Machine) -> dict[str, Any]:
    available = re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    assert available is not None
    return {
        "memory": read_memory()._asdict(),
        "kernel_available_bytes": int(available[1]) * 1024,
        "states": {name: machine.true_state(name) for name in machine.names},
        "swapped_out_bytes": _swapped_out_by_taking(TAKEN_BYTES),
    }


def _swapped_out_by_taking(size: int) -> int:
    """Bytes that the kernel had to write to swap for a process that takes so much memory."""
    swapped = counted("pswpout")
    taken = f"b'x' * {size}; print(flush=True); input()"
    with subprocess.Popen([PYTHON, "-S", "-c", f"held = {taken}"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pages = counted("pswpout") - swapped
        process.kill()
    note(f"{pages} pages were swapped out for {size // MIB} MiB")
    return pages * mmap.PAGESIZE


def woken_at_once(machine: Machine) -> dict[str, Any]:
    """Asks again for what was refused, when that was said to be worth it."""
    hive, names = machine.hive, machine.names
    before, own, kills = machine.processes(), processes(hive), counted("oom_kill")
    first = all_at_once(names, machine.call)
    note(f"first answers {first}")
    answers = all_at_once(names, machine.answer_of)
    waits = re.findall(r"agent_waits_for_memory agent=(\S+) need_mb=(\d+)", hive.log)
    note(f"answers {answers}, {read_memory()}")
    return {
        "first": first,
        "answers": answers,
        # Its largest: one that was put to sleep again meanwhile has some of its heap in memory still.
        "waited": dict(sorted(waits, key=lambda wait: int(wait[1]))),
        "same_agents": machine.processes() == before,
        "same_hive": processes(hive) == own,
        "oom_kills": counted("oom_kill") - kills,
        "states": {name: machine.true_state(name) for name in names},
    }


def asleep_again(machine: Machine) -> dict[str, Any]:
    """Nobody asks: Hive puts them to sleep, and deep, by its own rules."""

    def all_deep() -> bool:
        return all(view["depth"] == "deep" for view in machine.hive.get("/api/agents")["agents"])

    until(all_deep, within_s=180, what="all are deep asleep again")
    return asleep(machine)


def killed(machine: Machine) -> dict[str, Any]:
    """kill -9 of one process after the other, with all agents asleep but one."""
    hive, found = machine.hive, {}
    for number, process in enumerate(("sandbox", "daemon", "proxy")):
        awake, sleeper = machine.names[number], machine.names[10 + number]
        machine.answer_of(awake)
        before = machine.processes()
        hive.restart(process)
        found[process] = {
            "answers": [machine.answer_of(sleeper), machine.answer_of(awake)],
            "same_agents": machine.processes() == before,
            "states": [machine.true_state(name) for name in machine.names],
        }
        note(f"killed {process}: {found[process]['answers']}")
    return found


def limits(machine: Machine) -> dict[str, Any]:
    hive, kills, swapped = machine.hive, counted("oom_kill"), counted("pswpout")
    bystanders = machine.processes()

    def create(name: str, program: str, **limits: Any) -> None:
        command = [PYTHON, "-S", "-c", program]
        hive.post("/api/agents", {"name": name, "command": command, "limits": limits, "restart": "no", "idle_s": 600})
        hive.post(f"/api/agents/{name}/start")
        machine.ids[name] = hive.get(f"/api/agents/{name}")["id"]

    create("hog", HOG, memory_mb=48)
    until(lambda: hive.get("/api/agents/hog")["status"] not in ("starting", "running"), within_s=120, what="it ended")
    hog = hive.get("/api/agents/hog")
    del machine.ids["hog"]
    note(f"the hog ended; {(counted('pswpout') - swapped) * 4096 // MIB} MiB were written to swap meanwhile")
    create("bomb", BOMB, pids=16)
    until(lambda: hive.agent_log("bomb"), within_s=60, what="it forks no further")
    create("spinner", SPIN, cpu=CPU_SHARE)
    spinner, bomb = machine.group("spinner"), machine.group("bomb")
    told = {
        "hog": hog,
        "hog_log": hive.agent_log("hog"),
        "oom_kills": counted("oom_kill") - kills,
        "bomb_made": int(hive.agent_log("bomb")),
        "bomb_refused": (bomb / "pids.events").read_text(),
        "bomb_holds": len((bomb / "cgroup.procs").read_text().split()),
        "cores": _cores_of(spinner),
        "not_enforced": [hive.get(f"/api/agents/{name}")["limits_not_enforced"] for name in ("bomb", "spinner")],
    }
    for name in ("bomb", "spinner"):
        hive.post(f"/api/agents/{name}/stop")
        del machine.ids[name]
    left = [str(group) for group in (spinner, bomb) if group.exists()]
    return told | {"same_agents": machine.processes() == bystanders, "left": left}


def _cores_of(group: Path) -> float:
    """The number of cores that it uses, over some seconds."""
    since, used_us = time.monotonic(), _used_us(group)
    time.sleep(CPU_WATCHED_S)
    return (_used_us(group) - used_us) / 1e6 / (time.monotonic() - since)


def _used_us(group: Path) -> int:
    return int((group / "cpu.stat").read_text().split()[1])


def templated(machine: Machine) -> dict[str, Any]:
    """Two agents of one template, each of which has read all that they share."""
    hive, names = machine.hive, ["forked0", "forked1"]
    script = hive.programs / "of_template.py"
    script.write_text(OF_TEMPLATE)
    script.chmod(0o755)
    for name in names:
        order = {"name": name, "template": "heap", "command": [str(script)], "egress": [], "idle_s": 600}
        hive.post("/api/agents", order)
        hive.post(f"/api/agents/{name}/start")
    until(lambda: all("ready" in hive.agent_log(name) for name in names), within_s=180, what="they have their heaps")
    views = {name: hive.get(f"/api/agents/{name}") for name in names}
    machine.ids |= {name: view["id"] for name, view in views.items()}
    told = {
        "said": [hive.agent_log(name) for name in names],
        "notes": [view["template_note"] for view in views.values()],
        "resident_bytes": [_resident_bytes(view["pid"]) for view in views.values()],
        "charged_bytes": [int((machine.group(name) / "memory.current").read_text()) for name in names],
        "shown_bytes": [view["held_bytes"] for view in views.values()],
        "template": hive.get("/api/templates/heap"),
    }
    for name in names:
        hive.post(f"/api/agents/{name}/stop")
        del machine.ids[name]
    return told


def _resident_bytes(pid: int) -> int:
    """As tools show it that know nothing of templates."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE


def on_zram() -> dict[str, Any]:
    """Swap is in RAM now. Root without CAP_SYS_NICE may not advise other processes: it asks the agent's group."""
    for swap in read_swaps() or ():
        subprocess.run(["swapoff", swap.path], check=True)
    device = zram.set_up(ZRAM_MIB * MIB)
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_NICE, 0, 0, 0)
    with stack(auto_sleep=True, up_within_s=UP_WITHIN_S) as hive:
        machine = Machine(hive, AGENTS_ON_ZRAM)
        held = read_zram(device)
        return {
            "how": _how_paged_out(machine.group(machine.names[0])),
            "algorithms": Path("/sys/block", Path(device).name, "comp_algorithm").read_text(),
            "zram_bytes": None if held is None else held.memory_bytes,
            "asleep": asleep(machine),
            "woken_at_once": woken_at_once(machine),
        }


def _how_paged_out(group: Path) -> str:
    """As a process sees it that was executed as Hive was, by then without that capability."""
    program = f"from hive.host import paging; print(paging.choose(paging.Path('{group}')).how)"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    told: dict[str, Any] = {
        "controllers": Path("/sys/fs/cgroup/cgroup.controllers").read_text().split(),
        "mounts": [line.split()[2] for line in Path("/proc/mounts").read_text().splitlines() if " cgroup" in line],
    }
    Path("/usr/lib/python3/dist-packages/shared_heap.py").write_text(SHARED_HEAP)
    with stack(auto_sleep=True, up_within_s=UP_WITHIN_S, config=TEMPLATE) as hive:
        note(f"Hive is up: {read_memory()}")
        machine = Machine(hive, AGENTS)
        for look in (asleep, woken_at_once, asleep_again, killed, limits, templated):
            told[look.__name__] = look(machine)
            note(f"{look.__name__} is over: {read_memory()}")
    told["on_zram"] = on_zram()
    note("all is over")
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
