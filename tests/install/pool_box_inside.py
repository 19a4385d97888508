"""The work of test_pool_box.py in its machine, one stage a boot: `python3 pool_box_inside.py STAGE`. Standard library
only; what was seen goes to /out/STAGE.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.install.box_inside import SOURCES, answers, hive, machine, main_pid, restart_hive, run, until

CONF = Path("/etc/hive/hive.conf")
MODELS_D = Path("/etc/hive/models.d")
LOAD_S = 120.0
"""Two cores that others use too."""
DESCRIBED = """
[model alpha]
file = /var/lib/hive/models/alpha.gguf
context = 65536
parallel = 4
vram_mb = 80
pin = true

[model beta]
file = /var/lib/hive/models/beta.gguf
context = 65536
parallel = 4
vram_mb = 80
"""
GAMMA = """[model."gamma"]
file = "/srv/models/gamma.gguf"
context = 65536
parallel = 4
vram_mb = 80
"""
LEASE_MB, LEASE_S = 17, 3600
POOL = {
    "pool.reserve_mb": "0",
    "pool.cpu_mb": "180",
    "pool.patience_normal_s": "0.5",
    "pool.audience_s": "1",
    "lease.max_mb": str(LEASE_MB),
    "lease.max_s": str(LEASE_S),
    "registry.restore": "true",
}
"""Room for two of the three, and limits of a user who is no admin."""
SHOWN = ("ActiveState", "User", "Restart", "Slice", "ControlGroup", "NRestarts")
LOOKED_AT = (*SHOWN, "MainPID")


def slots() -> dict[str, dict[str, Any]]:
    return {slot["model"]: slot for slot in hive("pool")["slots"]}


def states() -> dict[str, str]:
    """Of each model; empty while nobody answers."""
    ran = run("hive", "pool", "--json")
    return {slot["model"]: slot["state"] for slot in json.loads(ran.stdout)["slots"]} if ran.returncode == 0 else {}


def units() -> dict[str, dict[str, str]]:
    """The units of all models, by the model."""
    found = {}
    for model, slot in slots().items():
        named = [f"--property={name}" for name in LOOKED_AT]
        lines = run("systemctl", "show", f"hive-model@{slot['id']}.service", *named).stdout.splitlines()
        found[model] = dict(line.split("=", 1) for line in lines)
    return found


def main_pids() -> dict[str, str]:
    return {model: unit["MainPID"] for model, unit in units().items()}


def loaded_pids(wanted: dict[str, str]) -> dict[str, str]:
    """The same of those that are to be loaded: a cold one may have a supervisor that waits."""
    return {model: pid for model, pid in main_pids().items() if wanted[model] == "ready"}


def chat(model: str) -> list[Any]:
    """Status and answer of one request for three tokens of this model, as the operator."""
    token = Path("/etc/hive/secrets/internal-token").read_text().strip()
    body = {"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}]}
    status, answer = answers("11435/v1/chat/completions", token, json.dumps(body).encode(), limit_s=LOAD_S)
    return [status, json.loads(answer)]


def answered(model: str) -> tuple[int, str]:
    status, answer = chat(model)
    return status, answer.get("model") or str(answer.get("error", ""))


def are(wanted: dict[str, str]) -> Callable[[], bool]:
    return lambda: states() == wanted


def describe() -> dict[str, Any]:
    """An operator's first day with a pool: hive.conf, models.d, `hive config set`, and what each tells to do."""
    CONF.write_text(CONF.read_text() + DESCRIBED)
    MODELS_D.mkdir(mode=0o755)
    (MODELS_D / "gamma.toml").write_text(GAMMA)
    (MODELS_D / "gamma.toml").chmod(0o644)
    for name, value in POOL.items():
        hive("config", "set", name, value)
    told = hive("config", "set", "model beta.pin", "true")
    checked = run("hive", "config", "check")
    applied = [run("sh", "-c", command).returncode for command in told["apply"]]
    return {"checked": [checked.returncode, checked.stdout + checked.stderr], "apply": told["apply"], "ran": applied}


def pool() -> dict[str, Any]:
    """Two pinned models of three, with room for two; then everything that holds them is killed."""
    found: dict[str, Any] = {"described": describe()}
    two = {"alpha": "ready", "beta": "ready", "gamma": "cold"}
    found["loaded_s"] = until("the pinned ones are loaded", are(two), LOAD_S)
    found["units"] = units()
    found["uids"] = {
        model: os.stat(f"/proc/{unit['MainPID']}").st_uid
        for model, unit in found["units"].items()
        if unit["MainPID"] != "0"
    }
    found["user"] = int(run("id", "-u", "hive-inference").stdout)
    found["alpha"] = answered("alpha")
    found["refused"] = chat("gamma")
    found["explained"] = hive("pool", "explain", "gamma")["lines"]
    found["unpinned"] = hive("model", "unpin", "beta")["pinned"]
    found["gamma"] = answered("gamma")
    found["after gamma"] = states()
    found["pinned"] = hive("model", "pin", "beta")["pinned"]
    until("beta is back", are(two), LOAD_S)
    found["doctor"] = hive("doctor", "pool")
    found["leases"] = leases()
    found["crashed"] = crashed(two)
    found["unkillable"] = kill_each(two)
    found["backup"] = backed_up()
    found["restarted"] = restarted(two)
    hive("model", "unpin", "beta")
    found["ordered"] = hive("model", "load", "beta")["state"]
    found["deployed"] = deployed()
    return found


def deployed() -> dict[str, list[Any]]:
    """State and actor of each model that was ordered to be loaded."""
    return {row["name"]: [row["state"], row["deployed_by"]] for row in hive("model", "deployed")["deployed"]}


AS_ANN = ("setpriv", "--reuid", "ann", "--regid", "ann", "--init-groups", "--")


def lease_run(*command: str, user: str = "ann") -> subprocess.CompletedProcess[str]:
    return run("hive", "lease", "run", "--vram", "15M", "--", *command, user=user)


def leases() -> dict[str, Any]:
    """A member of the group hive runs programs in the room that two models leave, and one who is none does not."""
    run("useradd", "--groups", "hive", "ann")
    run("useradd", "bob")
    done = lease_run("sh", "-c", "cat /proc/self/cgroup; id -un; exit 5")
    found: dict[str, Any] = {"ran": [done.returncode, done.stdout, done.stderr]}
    stranger = lease_run("true", user="bob")
    found["stranger"] = [stranger.returncode, stranger.stderr]
    found["limits"] = limits()
    sock = Path("/run/hive/sandbox/lease.sock")
    found["socket"] = [oct(sock.stat().st_mode)[-3:], sock.group()]
    inner = "hive lease run --vram 15M --grace 20s -- sh -c 'echo begins; exec sleep 1000'"
    typed = Path("/root/typed")
    with typed.open("w") as output:
        at_terminal = [*AS_ANN, "script", "--quiet", "--return", "--command", inner, "/dev/null"]
        holder = subprocess.Popen(at_terminal, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    until("the program begins", lambda: "begins" in typed.read_text())
    (held,) = hive("lease", "list")["leases"]
    found["held"] = held
    old = main_pid("hive-sandbox")
    os.kill(int(old), 9)
    until("the helper is back", is_another("hive-sandbox", old))
    found["after kill -9"] = [one["state"] for one in hive("lease", "list")["leases"]]
    # The terminal was the killed helper's: a new holder has the new one's.
    hive("lease", "end", held["id"])
    found["code"] = holder.wait(60)
    with typed.open("w") as output:
        holder = subprocess.Popen(at_terminal, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    until("the program begins", lambda: "begins" in typed.read_text())
    hive("lease", "end", hive("lease", "list")["leases"][0]["id"])
    holder.wait(60)
    until("no lease is left", lambda: hive("lease", "list")["leases"] == [])
    found["typed"] = typed.read_text()
    said = run("journalctl", "-u", "hive-sandbox", "--no-pager", "-o", "cat").stdout
    lines = [json.loads(line) for line in said.splitlines() if '"audit"' in line and '"lease_' in line]
    found["audited"] = [line["fields"] for line in lines]
    found["units"] = run("systemctl", "list-units", "--plain", "--no-legend", "hive-lease-*.scope").stdout
    for user in ("ann", "bob"):
        run("userdel", user)
    return found


def limits() -> dict[str, Any]:
    """More than `[lease]` lets a user have, as one and as root: exit codes, and the codes of the errors."""
    large, long = ("--vram", f"{LEASE_MB + 2}M"), ("--vram", "15M", "--max", f"{LEASE_S + 60}s")
    asked = {
        "run large": ("run", *large, "--no-wait", "--", "true"),
        "run long": ("run", *long, "--", "true"),
        "take large": ("take", *large),
        "take long": ("take", *long),
    }
    found: dict[str, Any] = {}
    for name, words in asked.items():
        ran = run("hive", "lease", words[0], "--json", *words[1:], user="ann")
        found[name] = [ran.returncode, json.loads(ran.stderr.splitlines()[-1])["code"]]
    words = asked["run long"]
    found["root"] = run("hive", "lease", *words).returncode
    found["within"] = lease_run("true").returncode
    until("the leases of what ended are over", lambda: hive("lease", "list")["leases"] == [])
    return found


def crashes() -> list[str]:
    """The models that have crashed, by the audit table."""
    return [row["target"] for row in hive("audit", "list")["rows"] if row["act"] == "model.crashed"]


def crashed(two: dict[str, str]) -> dict[str, Any]:
    """Everything of one model's unit is killed at once."""
    before = main_pids()
    run("systemctl", "kill", "--signal=KILL", f"hive-model@{slots()['alpha']['id']}.service")
    until("alpha has ended", lambda: main_pids()["alpha"] != before["alpha"])
    until("alpha is loaded again", are(two), LOAD_S)
    after = units()
    return {
        "another": after["alpha"]["MainPID"] != before["alpha"],
        "beta": after["beta"]["MainPID"] == before["beta"],
        "NRestarts": after["alpha"]["NRestarts"],
        "answers": answered("alpha"),
        "audited": crashes(),
    }


def is_another(unit: str, pid: str) -> Callable[[], bool]:
    return lambda: main_pid(unit) not in (pid, "0")


def kill_each(two: dict[str, str]) -> dict[str, Any]:
    """kill -9 of what decides, starts and relays: the models go on, and the pool is known again."""
    found = {}
    before = loaded_pids(two)
    for unit in ("hive-daemon", "hive-sandbox", "hive-proxy"):
        old = main_pid(unit)
        os.kill(int(old), 9)
        until(f"{unit} is back", is_another(unit, old))
        until("the pool is known", are(two))
        until("alpha answers", lambda: answered("alpha") == (200, "alpha"))
        found[unit] = loaded_pids(two) == before
    return found


def backed_up() -> dict[str, Any]:
    ran = run("hive", "backup", "/root/kept.tar")
    with tarfile.open("/root/kept.tar") as kept:
        return {"ran": ran.returncode, "names": kept.getnames()}


def restarted(two: dict[str, str]) -> dict[str, Any]:
    """A restart of the whole of Hive ends the models, and brings those that are pinned back."""
    before = main_pids()
    code = restart_hive()
    took_s = until("both are back", are(two), LOAD_S)
    after = main_pids()
    return {"ran": code, "took_s": took_s, "new": all(after[m] != before[m] for m in ("alpha", "beta"))}


def second_boot() -> dict[str, Any]:
    """Nobody does anything: what was pinned is loaded, and what was ordered and is no longer pinned."""
    two = {"alpha": "ready", "beta": "ready", "gamma": "cold"}
    took_s = until("both are back", are(two), LOAD_S)
    there = deployed()
    hive("model", "pin", "beta")
    found = {"deployed": there, "took_s": took_s, "answers": [answered("alpha"), answered("beta")], "units": units()}
    return found | {"crashed": crashes(), "switched": switched(two)}


def services() -> list[str]:
    """The services of `hive backend` that run."""
    kinds = {"hive-inference-demo": "demo", "hive-inference-llama": "llama"}
    return [
        kind for unit, kind in kinds.items() if run("systemctl", "is-active", "-q", f"{unit}.service").returncode == 0
    ]


def switch(kind: str) -> list[Any]:
    """Exit code and words of a switch, the services that run after it, and what the pool has booked for them."""
    ran = run("hive", "backend", "switch", kind)
    booked = {one["kind"]: sum(g["charged_bytes"] for g in one["grants"]) >> 20 for one in hive("pool")["backends"]}
    said = ran.stdout + ran.stderr
    if ran.returncode:
        said += run("journalctl", "-u", "hive-daemon", "-n", "100", "-o", "cat", "--no-pager").stdout
    return [ran.returncode, said, services(), booked]


def switched(two: dict[str, str]) -> dict[str, Any]:
    """`hive backend switch` where models of llama-server's kind share the memory: room for two and a service."""
    shutil.copy("/srv/models/gamma.gguf", "/var/lib/hive/models/default.gguf")
    hive("config", "set", "inference.llama_context", "65536")
    hive("config", "set", "pool.cpu_mb", "280")
    run("systemctl", "restart", "hive-daemon.service")
    until("the pool is known", are(two), LOAD_S)
    before = loaded_pids(two)
    found: dict[str, Any] = {"demo": switch("demo")}
    until("the pinned ones are back", are(two), LOAD_S)
    found["left for it"] = [loaded_pids(two)[model] != before[model] for model in ("alpha", "beta")]
    before = loaded_pids(two)
    found["llama"] = switch("llama")
    found["kept"] = loaded_pids(two) == before
    found["alpha"] = answered("alpha")
    os.kill(int(main_pid("hive-daemon")), 9)
    until("the pool is known", are(two), LOAD_S)
    until(
        "the service is booked", lambda: [one["kind"] for one in hive("pool")["backends"] if one["grants"]] == ["llama"]
    )
    found["back to demo"] = switch("demo")
    until("both are back", are(two), LOAD_S)
    return found


def red() -> str:
    """State of the slot of the adapter, empty where it has none."""
    return next((state for model, state in states().items() if model.startswith("red@")), "")


def adapters() -> dict[str, Any]:
    """An adapter on alpha: its key is trusted, it is brought, loaded and asked; the daemon is killed; the key is
    revoked, and all of it goes."""
    two = {"alpha": "ready", "beta": "ready", "gamma": "cold"}
    until("both are back", are(two), LOAD_S)
    told = hive("config", "set", "adapters.dir", "/srv/adapters")
    found: dict[str, Any] = {"ran": [run("sh", "-c", command).returncode for command in told["apply"]]}
    until("the pool is known", are(two), LOAD_S)
    early = run("hive", "adapter", "pull", "red.gguf", "--base", "alpha", "--json")
    found["early"] = [early.returncode, json.loads(early.stderr.splitlines()[-1])["code"]]
    key = hive("adapter", "trust", "/srv/keys/team.pub")["key_id"]
    found["pulled"] = hive("adapter", "pull", "red.gguf", "--base", "alpha")["state"]
    found["loaded"] = hive("adapter", "load", "red")["state"]
    found["chat"] = chat("red")
    found["alpha"] = answered("alpha")
    unit = next(unit for model, unit in units().items() if model.startswith("red@"))
    found["unit"] = unit
    os.kill(int(main_pid("hive-daemon")), 9)
    until("the adapter is known", lambda: red() == "ready", LOAD_S)
    until("it answers", lambda: chat("red")[0] == 200, LOAD_S)
    found["kept"] = (
        next(one for model, one in units().items() if model.startswith("red@"))["MainPID"] == unit["MainPID"]
    )
    found["doctor"] = hive("doctor", "adapters")
    found["revoked"] = hive("adapter", "revoke", key)["unloaded"]
    found["after"] = chat("red")
    until("its server is gone", lambda: red() == "", LOAD_S)
    hive("adapter", "remove", "red", "--yes")
    until("the two serve on", are(two), LOAD_S)
    return found


def servers() -> list[str]:
    """The command lines of servers of the pool, and of what supervises them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        found += [words] if "llama-server" in words or "run-model" in words else []
    return found


def upgrade() -> dict[str, Any]:
    """Another version while two models are loaded; then it loads the third, and unloads one that the old one began."""
    two = {"alpha": "ready", "beta": "ready", "gamma": "cold"}
    until("both are loaded", are(two), LOAD_S)
    before = loaded_pids(two)
    init = Path(SOURCES, "hive/__init__.py")
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9.'))
    ran = run(f"{SOURCES}/install.sh")
    until("the pool is known", are(two))
    found = {"ran": [ran.returncode, ran.stdout + ran.stderr], "version": hive("version")["hive"]}
    found["kept"] = loaded_pids(two) == before
    found["alpha"] = answered("alpha")
    hive("model", "unpin", "beta")
    hive("model", "unload", "beta")
    return found | {"gamma": answered("gamma"), "after": states()}


def leave() -> dict[str, Any]:
    upgraded = upgrade()
    told = run(f"{SOURCES}/install.sh", "--uninstall", "--purge", "--dry-run")
    away = run(f"{SOURCES}/install.sh", "--uninstall", "--purge", "--yes")
    return {
        "upgraded": upgraded,
        "told": told.stdout,
        "purge": [away.returncode, away.stdout + away.stderr],
        "after": machine(),
        "servers": servers(),
    }


STAGES = {"pool": pool, "second_boot": second_boot, "adapters": adapters, "leave": leave}

if __name__ == "__main__":
    stage = sys.argv[1]
    seen = STAGES[stage]()
    Path("/out", f"{stage}.json").write_text(json.dumps(seen))
