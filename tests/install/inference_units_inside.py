"""Run as root under a real systemd: the units of the inference servers with stand-ins for the three programs.

Writes what it saw as JSON to the file it is given; test_inference_units.py judges that.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HIVE, SOCKETS, HOME = Path("/srv/hive"), Path("/run/hive-inference"), Path("/var/lib/hive/inference")
STAND_IN = f"""#!/usr/bin/python3
# A stand-in for Ollama, vLLM and llama-server: it listens where the real one would, and takes a second to end.
import os, signal, socket, subprocess, sys, time
def note(what):
    with open("{HOME}/life", "a") as life:
        print(what, os.path.basename(sys.argv[0]), time.monotonic(), file=life)
def end(*_):
    time.sleep(1)
    note("ended")
    os._exit(0)
paths = [word for word in sys.argv if word.endswith(".sock")]
server = socket.socket(socket.AF_UNIX if paths else socket.AF_INET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if paths:
    server.bind(paths[0])
else:
    host, port = os.environ["OLLAMA_HOST"].split(":")
    server.bind((host, int(port)))
server.listen()
signal.signal(signal.SIGTERM, end)
if sys.argv[0].endswith("ollama"):  # its runner, which outlives it where nobody sees to that
    runner = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    with open("{HOME}/runners", "a") as runners:
        print(runner.pid, file=runners)
note("started")
while True:
    caller, _ = server.accept()
    caller.sendall(os.path.basename(sys.argv[0]).encode())
    caller.close()
"""


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def state(unit: str) -> str:
    return run("systemctl", "is-active", unit)


def ask(name: str) -> str:
    """The server that answers at this socket, or the reason that none does."""
    until = time.monotonic() + 10
    while True:
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(5)
            try:
                caller.connect(str(SOCKETS / f"{name}.sock"))
                if answer := caller.recv(100):
                    return answer.decode()
                why = "hung up"  # the relay is there before the server behind it
            except OSError as error:
                why = type(error).__name__
        if state(unit(name)) != "active" or time.monotonic() > until:
            return why
        time.sleep(0.05)


def alive(pids: list[int]) -> list[int]:
    """Those of them that run, 5 s after which none is given up."""
    until = time.monotonic() + 5
    while left := [pid for pid in pids if Path("/proc", str(pid)).exists()]:
        if time.monotonic() > until:
            return left
        time.sleep(0.05)
    return []


def runners() -> list[int]:
    """Every runner that an Ollama started, by the pid it had."""
    return [int(line) for line in (HOME / "runners").read_text().split()]


def kill_main(name: str) -> None:
    """The server alone, as the kernel does where memory is short. Returns when systemd has started it again."""
    before = run("systemctl", "show", unit(name), "--property=MainPID", "--value")
    os.kill(int(before), signal.SIGKILL)
    while run("systemctl", "show", unit(name), "--property=MainPID", "--value") in (before, "0"):
        time.sleep(0.05)


def ask_as_nobody(name: str) -> str:
    program = "import socket,sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    command = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "python3", "-c", program]
    ended = subprocess.run([*command, str(SOCKETS / f"{name}.sock")], capture_output=True, text=True, check=False)
    return ended.stderr.strip().splitlines()[-1].partition(":")[0] if ended.returncode else "connected"


def at_the_hosts_loopback() -> str:
    try:
        socket.create_connection(("127.0.0.1", 11434), 5).close()
    except OSError as error:
        return type(error).__name__
    return "connected"


def crash(name: str) -> None:
    """Returns when systemd has started it again."""
    run("systemctl", "kill", "--signal=KILL", unit(name))
    while (
        run("systemctl", "show", unit(name), "--property=NRestarts") != "NRestarts=1" or state(unit(name)) != "active"
    ):
        time.sleep(0.05)


def unit(name: str) -> str:
    return "hive-inference.service" if name == "ollama" else f"hive-inference-{name}.service"


def install() -> None:
    for directory, place in (("", "system"), ("sysusers.d", ""), ("tmpfiles.d", "")):
        there = Path("/etc/systemd/system") if place else Path("/etc", directory)
        there.mkdir(exist_ok=True)
        for path in (HIVE / "systemd" / directory).iterdir():
            if path.is_file():
                shutil.copy(path, there)
    program = Path("/opt/hive/current/bin/hive")
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nPYTHONPATH=/srv/packages:/srv/hive exec python3 -P -m hive "$@"\n')
    program.chmod(0o755)
    Path("/etc/hive").mkdir()
    run("systemd-sysusers")
    run("systemd-tmpfiles", "--create", "/etc/tmpfiles.d/hive.conf")
    for stand_in in ("/usr/local/bin/ollama", "/opt/vllm/bin/vllm", "/usr/local/bin/llama-server"):
        Path(stand_in).parent.mkdir(parents=True, exist_ok=True)
        Path(stand_in).write_text(STAND_IN)
        Path(stand_in).chmod(0o755)
    Path("/var/lib/hive/models/default").mkdir()
    Path("/var/lib/hive/models/default.gguf").touch()
    run("systemctl", "daemon-reload")


def main(report: Path) -> None:
    install()
    seen: dict[str, object] = {}
    run("systemctl", "start", unit("ollama"))
    seen["ollama"] = ask("ollama")
    seen["relay"] = state("hive-inference-ollama-relay.service")
    seen["loopback"] = at_the_hosts_loopback()
    seen["nobody"] = [ask_as_nobody("ollama")]
    crash("ollama")
    seen["after a crash"] = ask("ollama")
    [*earlier, last] = runners()
    kill_main("ollama")
    ask("ollama")
    seen["runners"] = {"started": len(earlier) + 1, "after a crash": alive([*earlier, last])}
    for name in ("vllm", "llama", "ollama", "llama"):
        run("systemctl", "start", unit(name))
        answers = {other: ask(other) for other in ("ollama", "vllm", "llama")}
        states = {other: state(unit(other)) for other in ("ollama", "vllm", "llama")}
        seen.setdefault("switches", []).append({"to": name, "answers": answers, "states": states})  # type: ignore[attr-defined]
    seen["runners"]["after all"] = alive(runners())  # type: ignore[index]
    seen["nobody"].append(ask_as_nobody("llama"))  # type: ignore[attr-defined]
    crash("llama")
    seen["over its own socket"] = ask("llama")
    Path("/opt/vllm/bin/vllm").unlink()
    run("systemctl", "start", unit("vllm"))
    while state(unit("vllm")) not in ("failed", "inactive"):
        time.sleep(0.05)
    shown = run("systemctl", "show", unit("vllm"), "--property=ExecMainStatus,NRestarts")
    seen["missing"] = {"shown": sorted(shown.split()), "said": run("journalctl", "-o", "cat", "-u", unit("vllm"))}
    seen["life"] = [line.split() for line in (HOME / "life").read_text().splitlines()]
    seen["journal"] = run("journalctl", "--boot", "--no-pager", "-o", "cat")
    report.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
