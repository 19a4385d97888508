"""The work of test_box.py in its machine, one stage a boot: `python3 box_inside.py STAGE`. Standard library only.

What was seen goes to /out/STAGE.json; what fails on the way is in the console.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

SOURCES = "/srv/src"
SLEEPERS = 50
PAGER = {"SYSTEMD_PAGER": "cat", "SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"}
TOKEN_PROMPT = "SECRETPROMPT"


def run(*command: str, user: str | None = None, limit_s: float = 280.0) -> subprocess.CompletedProcess[str]:
    if user is not None:
        command = ("setpriv", "--reuid", user, "--regid", user, "--init-groups", "--", *command)
    began = time.monotonic()
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, **PAGER},
        timeout=limit_s,
        check=False,
    )
    print(f"$ {' '.join(command)} → {ran.returncode} in {time.monotonic() - began:.1f} s", flush=True)
    if ran.returncode != 0:
        print(ran.stdout[-4000:] + ran.stderr[-4000:], flush=True)
    return ran


def hive(*words: str, user: str | None = None) -> Any:
    """The answer of a command with --json. Raises AssertionError where it fails."""
    noun, *rest = words
    ran = run("hive", noun, *rest[:1], "--json", *rest[1:], user=user)
    assert ran.returncode == 0, f"hive {' '.join(words)}: {ran.returncode} {ran.stderr}"
    return json.loads(ran.stdout)


def until(what: str, holds: Callable[[], bool], limit_s: float = 120.0) -> float:
    """Seconds until it held. Raises AssertionError, and prints how the units are."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > limit_s:
            told = subprocess.run(
                ["systemctl", "status", "--all", "hive-*"], capture_output=True, text=True, check=False
            )
            print(told.stdout[-12_000:], flush=True)
            raise AssertionError(f"not within {limit_s:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - began


def is_frozen(pid: int) -> bool:
    """Whether the group it is in is frozen."""
    group = next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))
    return "frozen 1" in Path("/sys/fs/cgroup", group.lstrip("/"), "cgroup.events").read_text()


def answers(path: str, token: str, body: bytes | None = None, *, limit_s: float = 60.0) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{path}", body, {"authorization": f"Bearer {token}", "content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=limit_s) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
        print(error.code, text[:500], flush=True)
        return error.code, text


def chat(token: str) -> int:
    """The answer to one request for two tokens of whatever model there is; the key is an agent's."""
    status, listed = answers("11435/v1/models", token)
    if status != 200:
        return status
    model = next((model["id"] for model in json.loads(listed)["data"]), "none")
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": TOKEN_PROMPT}]}
    return answers("11435/v1/chat/completions", token, json.dumps(body).encode())[0]


def agents() -> dict[str, dict[str, Any]]:
    return {agent["name"]: agent for agent in hive("agent", "list")["agents"]}


def statuses() -> dict[str, str]:
    return {name: agent["status"] for name, agent in agents().items()}


# --- what is on the machine ----------------------------------------------------------------------------------------

NOT_LOOKED_AT = ("/proc", "/sys", "/dev", "/run", "/tmp", "/out", "/in", "/srv/src", "/opt/wheels")
CHANGES_BY_ITSELF = (
    "/var/lib/apt",
    "/var/cache",
    "/var/log",
    "/var/lib/systemd",
    "/var/lib/dpkg",
    "/etc/passwd-",
    "/etc/shadow-",
    "/etc/group-",
    "/etc/gshadow-",
    "/etc/subuid",
    "/etc/subgid",
    "/etc/ld.so.cache",
    "/root",
    "/var/tmp",
)


def machine() -> dict[str, list[str]]:
    """Files, users, groups, units, swap devices, control groups: what --purge must give back."""
    files = []
    for top, directories, names in os.walk("/"):
        here = [os.path.join(top, name) for name in (*directories, *names)]
        directories[:] = [
            name
            for name in directories
            if not os.path.join(top, name).startswith((*NOT_LOOKED_AT, *CHANGES_BY_ITSELF))
            and not os.path.islink(os.path.join(top, name))
            and name != "__pycache__"
        ]
        files += [
            path
            for path in here
            if not path.startswith((*NOT_LOOKED_AT, *CHANGES_BY_ITSELF)) and "__pycache__" not in path
        ]
    units = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "hive*").stdout.split("\n")
    return {
        "files": sorted(files),
        "users": sorted(entry.pw_name for entry in pwd.getpwall()),
        "groups": sorted(entry.gr_name for entry in grp.getgrall()),
        "units": sorted(line.split()[0] for line in units if line and not line.startswith("hive-test")),
        "swaps": Path("/proc/swaps").read_text().splitlines()[1:],
        "groups of control": [
            str(path) for path in Path("/sys/fs/cgroup").rglob("hive*") if "hive-test" not in path.name
        ],
        "runtime": [str(path) for path in Path("/run").glob("hive*")],
        "packages": run("dpkg-query", "-W", "-f", "${db:Status-Abbrev}${Package}\n").stdout.splitlines(),
    }


# --- stages --------------------------------------------------------------------------------------------------------


def install() -> dict[str, Any]:
    """On a clean Debian with its package sources: installed in one command; the same command again changes nothing."""
    before = machine()
    dry = run(f"{SOURCES}/install.sh", "--dry-run")
    after_dry = machine()
    began = time.monotonic()
    first = run(f"{SOURCES}/install.sh")
    took_s = time.monotonic() - began
    again = run(f"{SOURCES}/install.sh")
    return {
        "before": before,
        "dry": [dry.returncode, dry.stdout + dry.stderr],
        "changed_by_dry_run": sorted(set(after_dry["files"]) ^ set(before["files"])),
        "first": [first.returncode, first.stdout + first.stderr],
        "again": [again.returncode, again.stdout + again.stderr],
        "took_s": took_s,
        "next": try_out(),
        "active": run("systemctl", "is-active", "hive.target").stdout.strip(),
        "failed": run("systemctl", "list-units", "--failed", "--plain", "--no-legend", "hive-[!i]*").stdout,
    }


def documents() -> dict[str, Any]:
    """The agents of README.md and conf/agents/process.toml, word for word; and programs inside one of them."""
    readme = Path(f"{SOURCES}/README.md").read_text()
    (line,) = re.findall(r"^\$ hive (agent create .*)$", readme, re.MULTILINE)
    created = run("hive", *shlex.split(line))
    applied = run("hive", "agent", "apply", f"{SOURCES}/conf/agents/process.toml")
    started = run("hive", "agent", "start", "reporter")
    found: dict[str, Any] = {
        "readme": [created.returncode, created.stderr],
        "described": [applied.returncode, applied.stderr, started.returncode, started.stderr],
    }
    for name in ("echo", "reporter"):
        until(f"{name} answers", lambda name=name: ask(name)[0] == 200)  # type: ignore[misc]
        found[f"{name} without a token"] = answers(f"8480/agents/{name}/", "")[0]
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    found["on the host"] = [port for port in (9000, 9100) if f":{port:04X} " in listening]
    found["inside"] = inside("echo")
    for name in ("echo", "reporter"):
        run("hive", "agent", "remove", name, "--yes")
    return found


def inside(name: str) -> dict[str, Any]:
    """The words of a program inside it, what is refused, and what is left when its caller is killed."""
    program = "import os,sys; print(os.getuid(), open('/proc/self/cgroup').read().strip()); sys.exit(7)"
    told = run("hive", "agent", "exec", name, "--", "python3", "-c", program)
    refused = run("hive", "agent", "exec", name, "--", "/bin/sh")
    waits = [
        "hive",
        "agent",
        "exec",
        name,
        "--",
        "python3",
        "-c",
        "import os, time; print(os.getpid(), flush=True); time.sleep(1000)",
    ]
    with subprocess.Popen(waits, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout is not None
        pid = caller.stdout.readline().strip()
        caller.kill()
    until("it has ended with its caller", lambda: not Path(f"/proc/{pid}").exists())
    return {
        "uid": agents()[name]["uid"],
        "told": [told.returncode, told.stdout, told.stderr],
        "refused": [refused.returncode, refused.stderr],
        "units": run("systemctl", "list-units", "--all", "--plain", "--no-legend", "hive-exec@*").stdout,
    }


def try_out() -> dict[str, Any]:
    """Types what status says to type where there is no inference server, as it stands there."""
    before = hive("status")
    (command,) = [one["command"] for one in before["next"]]
    ran = run("sh", "-c", command.removeprefix("sudo "))  # this machine has none
    after = hive("status")
    return {"problems": before["problems"], "ran": ran.returncode, "status": after["status"], "next": after["next"]}


def boot_s() -> dict[str, float]:
    """Seconds after PID 1 began: multi-user.target's part without Hive, and hive.target."""
    shown = run("systemctl", "show", "hive.target", "basic.target", "-p", "ActiveEnterTimestampMonotonic").stdout
    target, basic = (int(line.partition("=")[2]) / 1e6 for line in shown.splitlines() if line)
    return {"hive.target": target, "basic.target": basic}


def first_day() -> dict[str, Any]:
    """After a boot: doctor, an agent's life, people, secrets, kill -9, fifty sleepers."""
    found: dict[str, Any] = {"boot": boot_s()}
    # Without a choice it took Ollama, whose program is there, too.
    found["chosen"] = [run("hive", "backend", "switch", "llama").returncode, active_units()]
    until("llama-server answers", lambda: hive("status")["status"] == "ok")
    doctor = run("hive", "doctor", "--json")
    found["doctor"] = json.loads(doctor.stdout)
    found["status"] = hive("status")
    # one agent's life
    Path("/srv/agents").mkdir(exist_ok=True)
    Path("/srv/agents/called.py").write_text(Path(f"{SOURCES}/tests/journeys/programs/called.py").read_text())
    hive(*create("eve", restart="on-failure"))
    until("eve answers", lambda: ask("eve")[0] == 200)
    hive("agent", "pause", "eve")
    found["paused"] = statuses()["eve"]
    began = time.monotonic()
    found["woken by a call"] = [ask("eve")[0], time.monotonic() - began]
    found["after the call"] = statuses()["eve"]
    found["logs"] = run("hive", "agent", "logs", "eve").stdout
    found["people"] = people()
    found["api"] = api_on_tcp()
    found["unkillable"] = kill_each()
    for number in range(SLEEPERS):
        hive(*create(f"s{number}", "--autostart", restart="unless-stopped"))
    hive(*create("no-autostart", restart="always"))
    hive(*create("plain", restart="no"))
    hive("agent", "pause", "plain")
    found["woken at a time"] = woken_at_a_time("plain")
    hive(*create("stopped-by-hand", restart="unless-stopped"))
    hive("agent", "stop", "stopped-by-hand")
    for number in range(SLEEPERS):
        hive("agent", "pause", f"s{number}")
    found["asleep"] = sum(status == "paused" for status in statuses().values())
    found["leaks"] = leaks()
    return found


def woken_at_a_time(name: str) -> float:
    """Seconds from its time to its wake."""
    at: float = hive("agent", "wake-at", name, "+3s")["at"]
    until(f"{name} is woken", lambda: statuses()[name] == "running")
    since: float = agents()[name]["since"]
    return since - at


def create(name: str, *options: str, restart: str) -> list[str]:
    own = ["--no-network", "--port", "8000", "--idle", "600", "--restart", restart, *options]
    return ["agent", "create", name, *own, "--", "/usr/bin/python3", "/srv/agents/called.py"]


def ask(name: str) -> tuple[int, bytes]:
    token = hive("agent", "show", name, "--tokens")["access"]["ingress"]
    return answers(f"8480/agents/{name}/t/{token}/", token)


def people() -> dict[str, Any]:
    """Ann is nobody, Ben an operator, Cid an admin."""
    for name, groups in (("ann", ""), ("ben", "hive"), ("cid", "hive,hive-admin")):
        run("useradd", "--create-home", name, *(["--groups", groups] if groups else []))
    reach = "import socket,sys\ns=socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])"
    sockets = [str(path) for path in Path("/run/hive").rglob("*") if path.is_socket()]
    tops = Path("/run/hive-inference"), Path("/run/hive-model")
    backends = [str(path) for top in tops for path in top.rglob("*") if path.is_socket()]
    secrets = [str(path) for path in Path("/etc/hive/secrets").iterdir()]
    return {
        "sockets": sockets,
        "ann reaches": [
            path for path in (*sockets, *backends) if run("python3", "-c", reach, path, user="ann").returncode == 0
        ],
        "read secrets": [
            f"{user} {path}"
            for user in ("ann", "ben", "cid", "hive", "hive-proxy", "hive-redis", "hive-inference")
            for path in (*secrets, "/var/lib/hive/daemon/hive.db", "/var/lib/hive/daemon/hive.db.second")
            if (user, os.path.basename(path)) not in (("hive", "hive.db"), ("hive", "hive.db.second"))
            and run("head", "-c1", path, user=user).returncode == 0
        ],
        "ann operates": run("hive", "ps", user="ann").returncode,
        "ben operates": run("hive", "agent", "pause", "eve", user="ben").returncode,
        "ben resumes": run("hive", "agent", "resume", "eve", user="ben").returncode,
        "ben administers": run("hive", "backend", "switch", "llama", user="ben").returncode,
        "cid operates": run("hive", "ps", user="cid").returncode,
    }


def api_on_tcp() -> dict[str, Any]:
    """Answers to each token there is, and to one made by hand, for a look and for what takes an admin."""
    tokens = {name: Path("/etc/hive/secrets", name).read_text().strip() for name in ("api-token", "internal-token")}
    tokens["made"] = hive("token", "create", "ci", "--role", "viewer", user="cid")["token"]
    paths = ("3000/api/health", "3000/api/tokens")
    found = {name: [answers(path, token)[0] for path in paths] for name, token in tokens.items()}
    hive("token", "revoke", "ci", user="cid")
    found["revoked"] = [answers(path, tokens["made"])[0] for path in paths]
    made_by_ben = run("hive", "token", "create", "ben", "--role", "viewer", user="ben").returncode
    return {**found, "ben makes one": made_by_ben, "where": hive("status")["api"]}


def kill_each() -> dict[str, Any]:
    """kill -9 of each daemon: it is back, and the agent never died."""
    pid = agents()["eve"]["pid"]
    came_back = {}
    for unit in ("hive-proxy", "hive-daemon", "hive-sandbox", "hive-redis"):
        old = main_pid(unit)
        os.kill(int(old), 9)
        came_back[unit] = until(f"{unit} is back", lambda unit=unit, old=old: main_pid(unit) not in (old, "0"))  # type: ignore[misc]
        until("Hive answers", lambda: run("hive", "ps").returncode == 0)
        until("eve answers", lambda: ask("eve")[0] == 200)
    return {"s": came_back, "the agent lives": agents()["eve"]["pid"] == pid}


def main_pid(unit: str) -> str:
    return run("systemctl", "show", "-p", "MainPID", "--value", f"{unit}.service").stdout.strip()


def restart_hive() -> int:
    """The exit code of `systemctl restart hive.target`, once another daemon answers and another proxy is connected.

    The command waits for the target only: for a moment the old ones still answer.
    """
    old = {unit: main_pid(unit) for unit in ("hive-daemon", "hive-proxy")}
    code = run("systemctl", "restart", "hive.target").returncode
    until("all are started anew", lambda: all(main_pid(unit) not in ("0", pid) for unit, pid in old.items()))
    until("hive answers", lambda: run("hive", "pool", "--json").returncode == 0)
    until("the proxy is there", lambda: bool(hive("status")["proxy"]["connected"]))
    return code


def leaks() -> list[str]:
    """Places other than its own in which a secret's value stands."""
    values = {path.name: path.read_bytes().strip() for path in Path("/etc/hive/secrets").iterdir()}
    places: dict[str, bytes] = {
        "the journal": run("journalctl", "--no-pager", "-o", "json").stdout.encode(),
        "systemctl show": run("systemctl", "show", "hive*", "--all").stdout.encode(),
        "hive config show": run("hive", "config", "show", "--json").stdout.encode(),
        "hive secrets list": run("hive", "secrets", "list", "--json").stdout.encode(),
        "hive status": run("hive", "status", "--json").stdout.encode(),
        "hive doctor": run("hive", "doctor", "--json").stdout.encode(),
        "hive agent show": run("hive", "agent", "show", "eve", "--json").stdout.encode(),
    }
    for path in [*Path("/etc/systemd").rglob("*"), *Path("/etc/hive").rglob("*")]:
        if path.is_file() and path.parent.name != "secrets":
            places[str(path)] = path.read_bytes()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            for name in ("cmdline", "environ"):
                try:
                    places[f"/proc/{process.name}/{name}"] = (process / name).read_bytes()
                except OSError:
                    continue
    return [f"{name} in {where}" for where, text in places.items() for name, value in values.items() if value in text]


def second_boot() -> dict[str, Any]:
    """Fifty slept when the machine went down."""
    found: dict[str, Any] = {"boot": boot_s()}
    began = time.monotonic()
    until("all are up", lambda: sum(s == "running" for n, s in statuses().items() if n[1:].isdigit()) == SLEEPERS, 60)
    found["all_up_s"] = time.monotonic() - began
    until("the one without a policy is up", lambda: statuses()["plain"] == "running")
    until("llama-server answers", lambda: hive("status")["status"] == "ok")
    found["backend"] = active_units()
    found["statuses"] = {name: status for name, status in statuses().items() if not name[1:].isdigit()}
    pid = agents()["s0"]["pid"]
    os.kill(pid, 9)
    until("s0 is started again", lambda: agents()["s0"].get("pid") not in (pid, None) and statuses()["s0"] == "running")
    found["s7 answers"] = ask("s7")[0]
    return found


def switches() -> dict[str, Any]:
    """Real llama-server and real vLLM, both with tiny models; Ollama by a stand-in. The last switch fails."""
    token = hive("agent", "show", "eve", "--tokens")["access"]["model"]
    print({name: (agent["status"], agent["why"]) for name, agent in agents().items() if agent["status"] != "running"})
    found: dict[str, Any] = {}
    # Two cores that others use too: vLLM alone takes 25 s of them to come up.
    found["set"] = run("hive", "config", "set", "inference.switch_health_tries", "120").returncode
    run("systemctl", "restart", "hive-daemon.service")
    until("Hive answers", lambda: run("hive", "ps").returncode == 0)
    run("hive", "backend", "switch", "llama")
    for target in ("vllm", "llama", "ollama", "llama"):
        ran = run("hive", "backend", "switch", target)
        found.setdefault(target, []).append([ran.returncode, active_units(), chat(token)])
    Path("/var/lib/hive/models/default").rename("/var/lib/hive/models/elsewhere")
    failing = run("hive", "backend", "switch", "vllm")
    found["failing"] = [failing.returncode, failing.stdout + failing.stderr, active_units(), chat(token)]
    Path("/var/lib/hive/models/elsewhere").rename("/var/lib/hive/models/default")
    found["rotated"] = rotate(token)
    found["usage"] = hive("usage") if run("hive", "usage", "--help").returncode == 0 else None
    return found


def rotate(token: str) -> dict[str, Any]:
    listed = run("hive", "secrets", "list").stdout
    ran = {"redis-daemon": run("hive", "secrets", "rotate", "redis-daemon", "--yes").returncode}
    until("Redis is up for the daemon", lambda: hive("status")["redis"]["up"])
    return {"ran": ran, "listed": listed, "chat": chat(token)}


def active_units() -> list[str]:
    units = ("hive-inference", "hive-inference-vllm", "hive-inference-llama")
    return [unit for unit in units if run("systemctl", "is-active", "-q", f"{unit}.service").returncode == 0]


def asleep(names: tuple[str, ...]) -> dict[str, Any]:
    """Status, number of transitions and main process: the same before and after where nobody touched them."""
    found = agents()
    return {name: [found[name][field] for field in ("status", "depth", "generation", "pid")] for name in names}


def leave() -> dict[str, Any]:
    """An upgrade that works, one that does not, then away: without, then with everything."""
    sleepers = ("plain", "s0", "s1")
    until("Hive answers", lambda: run("hive", "ps").returncode == 0, 60)
    until("they are up", lambda: {statuses()[name] for name in sleepers} <= {"running", "paused"}, 60)
    for name in sleepers:
        hive("agent", "pause", name)
    before = asleep(sleepers)
    init = Path(SOURCES, "hive/__init__.py")
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    dry = run(f"{SOURCES}/install.sh", "--dry-run")
    upgrade = run(f"{SOURCES}/install.sh")
    found: dict[str, Any] = {
        "dry upgrade": [dry.returncode, dry.stdout],
        "upgrade": [upgrade.returncode, upgrade.stdout + upgrade.stderr],
        "version": hive("version")["hive"],
        "agents after": statuses(),
        "asleep": [before, asleep(sleepers)],
    }
    broken = Path(SOURCES, "hive/daemon.py")
    whole = broken.read_text()
    broken.write_text(
        whole.replace(
            "    async def open(self) -> None:",
            "    async def open(self) -> None:\n        raise HiveError('planted')",
            1,
        )
    )
    failed = run(f"{SOURCES}/install.sh")
    found["failed upgrade"] = [failed.returncode, failed.stdout + failed.stderr]
    found["version then"] = hive("version")["hive"]
    run("systemctl", "stop", "hive-sandbox.service")
    found["frozen after a stop"] = [name for name in sleepers if is_frozen(before[name][3])]
    run("systemctl", "start", "hive-sandbox.service")
    found["works then"] = ask("eve")[0]
    broken.write_text(whole)
    away = run(f"{SOURCES}/install.sh", "--uninstall", "--yes")
    found["uninstall"] = [away.returncode, away.stdout + away.stderr]
    kept = machine()
    found["kept"] = [path for path in kept["files"] if "/hive" in path]
    found["kept users"] = [name for name in kept["users"] if name.startswith("hive")]
    back = run(f"{SOURCES}/install.sh")
    found["back"] = [back.returncode, back.stdout + back.stderr]
    found["agents back"] = sorted(statuses())
    for name in ("ann", "ben", "cid"):
        run("userdel", "--remove", name)
    told = run(f"{SOURCES}/install.sh", "--uninstall", "--purge", "--dry-run")
    found["dry purge"] = [told.returncode, told.stdout]
    purged = run(f"{SOURCES}/install.sh", "--uninstall", "--purge", "--yes")
    found["purge"] = [purged.returncode, purged.stdout + purged.stderr]
    found["after"] = machine()
    return found


STAGES = {
    "install": install,
    "documents": documents,
    "first_day": first_day,
    "second_boot": second_boot,
    "switches": switches,
    "leave": leave,
}

if __name__ == "__main__":
    stage = sys.argv[1]
    seen = STAGES[stage]()
    Path("/out", f"{stage}.json").write_text(json.dumps(seen))
