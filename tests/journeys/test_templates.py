"""Agents forked from a template through a whole Hive: the command line makes them, the unmodified `openai` package asks
the model, and what is seen of them is what is seen of any agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.stack import PYTHON, Stack, stack, until
from tests.nobody import NOBODY, run_as_nobody

SCRIPT = """
import json, signal, sys, time
import openai

def say(**what):
    print(json.dumps(what), flush=True)

def turn(number):
    client = openai.OpenAI()
    chat = [{"role": "user", "content": f"turn {number}"}]
    answer = client.chat.completions.create(model="hive-demo", messages=chat)
    say(turn=number, text=answer.choices[0].message.content, args=sys.argv[1:], main=__name__)

ends = []
signal.signal(signal.SIGUSR1, lambda *_: ends.append(7))
number = 0
while not ends:
    number += 1
    turn(number)
    time.sleep(0.5)
sys.exit(ends[0])
"""
READY = """
import json, os, signal, sys, time
try:
    from hive import ready
except ImportError:  # no template, and no Hive among the packages
    def ready(): pass
import openai

http = openai.DefaultHttpxClient()
keys = sorted(name for name in os.environ if "KEY" in name)
made = {"by": os.getpid(), "keys": keys, "greeting": os.environ.get("GREETING")}
ready()
client = openai.OpenAI(http_client=http)
ends = []
signal.signal(signal.SIGUSR1, lambda *_: ends.append(7))
number = 0
while not ends:
    number += 1
    chat = [{"role": "user", "content": f"turn {number}"}]
    answer = client.chat.completions.create(model="hive-demo", messages=chat)
    print(json.dumps({**made, "turn": number, "text": answer.choices[0].message.content, "args": sys.argv[1:],
        "key": "OPENAI_API_KEY" in os.environ, "home": os.getcwd() == os.environ["HOME"]}), flush=True)
    time.sleep(2)
sys.exit(ends[0])
"""
NO_NETWORK = ["--no-network"] if os.geteuid() == 0 else []
"""As root a template is in no network, and so are its agents; else all are in the host's."""


def why_not() -> str:
    """Says why the system's Python cannot use the packages of this one."""
    told = subprocess.run([PYTHON, "-V"], capture_output=True, text=True, check=False).stdout
    here = sysconfig.get_python_version()
    return "" if f" {here}." in told else f"{PYTHON} is {told.strip()}, the packages here are for {here}"


pytestmark = pytest.mark.skipif(why_not() != "", reason=why_not())


def venv_in(directory: Path) -> Path:
    """A virtual environment of the system's Python with the packages of this one."""
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(directory)], check=True)
    (site,) = directory.glob("lib/python3*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    return directory


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="hive-test-venv-", dir="/var/tmp") as base:
        os.chmod(base, 0o755)
        venv = venv_in(Path(base) / "venv")
        config = f"""
[template oa]
python = {venv}
imports = openai
warm = openai
env = GREETING=hello
[template rd]
python = {venv}
script = {venv}/ready_turns.py
env = GREETING=hello
[template early]
python = {venv}
script = {venv}/early.py
[template threads]
python = {venv}
imports = starts_a_thread
[template others]
python = {venv}
imports = json
owner = acme
"""
        (site,) = venv.glob("lib/python3*/site-packages")
        for name, text in (("ready_turns", READY), ("early", "import os\nif 'OWN' not in os.environ: 1/0\n" + READY)):
            (venv / f"{name}.py").write_text(text)
            (venv / f"{name}.py").chmod(0o644)
        module = site / "starts_a_thread.py"
        module.write_text(
            "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
        )
        module.chmod(0o644)
        with stack(config=config) as found:
            script = found.programs / "openai_turns.py"
            script.write_text(SCRIPT)
            script.chmod(0o755)
            yield found


def command(hive: Stack, *words: str, code: int = 0, cwd: Path | None = None) -> str:
    """Runs a `hive` command, which ends with `code`, and returns what it printed on either output."""
    line = [sys.executable, "-m", "hive", *words[:2], "--state-dir", str(hive.state), *words[2:]]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, cwd=cwd or hive.programs, timeout=180)
    assert ran.returncode == code, (ran.stdout, ran.stderr)
    return ran.stdout + ran.stderr


def refused(hive: Stack, act: str, *words: str, given: str = "") -> str:
    """The error of `hive agent ACT`, which must be one."""
    line = [sys.executable, "-m", "hive", "agent", act, "--state-dir", str(hive.state), *words]
    ran = subprocess.run(line, capture_output=True, text=True, check=False, cwd=hive.programs, timeout=60, input=given)
    assert ran.returncode != 0, ran.stdout
    return ran.stderr


def template(hive: Stack, name: str) -> Any:
    return hive.get(f"/api/templates/{name}")


def turns(hive: Stack, agent: str) -> list[dict[str, Any]]:
    return [line for line in hive.agent_lines(agent) if "turn" in line]


def create(hive: Stack, name: str, *rest: str, **more: Any) -> str:
    made = command(hive, "agent", "create", name, *NO_NETWORK, *rest, **more)
    until(lambda: hive.get(f"/api/agents/{name}")["pid"], within_s=30, what=f"{name} runs")
    return made


def test_two_agents_of_a_template_live_as_agents_do(hive: Stack) -> None:
    for name in ("ann", "ben"):
        create(hive, name, "--template", "oa", "--", "openai_turns.py", name)
    until(lambda: turns(hive, "ann") and turns(hive, "ben"), within_s=60, what="a turn of each")
    for name in ("ann", "ben"):
        first = turns(hive, name)[0]
        assert (first["args"], first["main"]) == ([name], "__main__")
        assert first["text"].startswith("[hive-demo]")
        view = hive.get(f"/api/agents/{name}")
        assert (view["template"], view["template_note"]) == ("oa", "")
        until(lambda name=name: hive.get(f"/api/agents/{name}")["requests"], within_s=60, what="its use")  # type: ignore[misc]
    found = template(hive, "oa")
    assert (found["state"], found["why"], found["agents"], found["older"]) == ("ready", "", ["ann", "ben"], [])
    assert found["held_bytes"] > found["shared_bytes"] > 0
    assert found["saved_bytes"] > 0
    if os.geteuid() == 0:
        block = range(found["first_uid"] + 1, found["first_uid"] + found["uids"] - 1)
        assert all(hive.get(f"/api/agents/{name}")["uid"] in block for name in ("ann", "ben"))
    assert "oa " in command(hive, "template", "list")
    assert "2 of 2" in command(hive, "template", "list")
    assert "Template: oa\n" in command(hive, "agent", "show", "ann")
    shown = json.loads(command(hive, "template", "show", "oa", "--json"))
    assert (shown["schema"], shown["agents"], shown["env"]) == ("template.show", ["ann", "ben"], ["GREETING"])

    command(hive, "agent", "pause", "ann")
    before = len(turns(hive, "ann"))
    time.sleep(1.5)
    assert len(turns(hive, "ann")) == before  # it sleeps
    assert hive.get("/api/agents/ann")["status"] == "paused"
    command(hive, "agent", "resume", "ann")
    until(lambda: len(turns(hive, "ann")) > before, within_s=60, what="a turn after the wake")

    command(hive, "agent", "stop", "ben")
    assert template(hive, "oa")["agents"] == ["ann"]
    pid = hive.get("/api/agents/ann")["pid"]
    os.kill(pid, 10)  # its own end, with the code it chooses
    until(lambda: hive.get("/api/agents/ann")["status"] in ("stopped", "error"), within_s=60, what="its end")
    assert "7" in hive.get("/api/agents/ann")["reason"]
    command(hive, "agent", "remove", "ann", "ben", "--yes")


def test_a_restarted_template_is_for_new_agents_and_the_old_ones_stay(hive: Stack) -> None:
    create(hive, "cid", "--template", "oa", "--", "openai_turns.py")
    old = template(hive, "oa")["pid"]
    told = command(hive, "template", "restart", "oa")
    assert "cid stay with the old one" in told
    create(hive, "dot", "--template", "oa", "--", "openai_turns.py")
    found = template(hive, "oa")
    assert found["pid"] != old
    assert (found["agents"], found["older"]) == (["cid", "dot"], ["cid"])
    count = len(turns(hive, "cid"))
    until(lambda: len(turns(hive, "cid")) > count, within_s=60, what="a turn of the one that stayed")
    log = json.dumps(hive.get("/api/audit", limit=200))
    assert "order.restart_template" in log
    assert "template.restarted" in log
    command(hive, "agent", "remove", "cid", "dot", "--yes")


def test_an_agent_whose_template_starts_threads_is_an_ordinary_program_and_says_so(hive: Stack) -> None:
    said = create(hive, "eve", "--template", "threads", "--", "openai_turns.py")
    assert "eve is no fork of template threads: template threads does not start: its imports started threads" in said
    until(lambda: turns(hive, "eve"), within_s=60, what="a turn of an ordinary program")
    assert "hive: started as a program of its own, not from template threads" in hive.agent_log("eve")
    assert "threads, not used: template threads does not start: its imports started threads" in command(
        hive, "agent", "show", "eve"
    )
    found = template(hive, "threads")
    assert (found["state"], found["agents"], found["named_by"]) == ("failed", [], ["eve"])
    assert "template_not_used" in hive.log
    command(hive, "agent", "remove", "eve", "--yes")


def test_the_reason_why_an_agent_is_not_forked_is_named_after_the_daemon_and_the_helper_were_killed(
    hive: Stack,
) -> None:
    """Its template starts; it is the agent that cannot be forked from it."""
    why = "OMP_NUM_THREADS is read only when an interpreter starts"
    said = create(hive, "jon", "--template", "oa", "--env", "OMP_NUM_THREADS=3", "--", "openai_turns.py")
    assert f"jon is no fork of template oa: {why}" in said
    create(hive, "kay", "--template", "oa", "--", "openai_turns.py")
    for part in ("", "daemon", "sandbox"):
        if part:
            hive.restart(part)
        until(lambda: hive.get("/api/agents/jon")["pid"], within_s=30, what="it is seen again")
        notes = {agent["name"]: agent["template_note"] for agent in hive.get("/api/agents")["agents"]}
        assert notes == {"jon": why, "kay": ""}, part
        assert hive.get("/api/agents/jon")["template_note"] == why
        assert f"Template: oa, not used: {why}\n" in command(hive, "agent", "show", "jon")
        assert "Template: oa\n" in command(hive, "agent", "show", "kay")
    command(hive, "agent", "stop", "jon")
    assert hive.get("/api/agents/jon")["template_note"] == ""
    command(hive, "agent", "remove", "jon", "kay", "--yes")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--template", "nobody", "--", "openai_turns.py"), "there is none named nobody"),
        (("--template", "others", "--", "openai_turns.py"), "others is for agents of tenant acme"),
        (("--template", "oa", "--", "missing.py"), "'missing.py' is relative"),
        (("--template", "oa", "--image", "debian:12"), "template: the runtime is docker"),
    ],
)
def test_what_cannot_be_of_a_template_is_refused_when_it_is_made(
    hive: Stack, words: tuple[str, ...], said: str
) -> None:
    assert said in refused(hive, "create", "fay", *words)
    assert "fay" not in [agent["name"] for agent in hive.get("/api/agents")["agents"]]


def test_the_template_of_an_agent_is_fixed(hive: Stack) -> None:
    create(hive, "gil", "--template", "oa", "--", "openai_turns.py")
    described = command(hive, "agent", "export", "gil")
    assert 'template = "oa"' in described
    for other in ('template = "threads"', ""):
        changed = described.replace('template = "oa"', other).replace('"/', f'"{PYTHON}", "/', not other)
        assert "gil was created with oa, and stays so" in refused(hive, "apply", "-", given=changed)
    moved = described + 'tenant = "acme"\n'
    assert "oa is for agents of tenant default" in refused(hive, "apply", "-", given=moved)
    assert hive.get("/api/agents/gil")["template"] == "oa"
    command(hive, "agent", "remove", "gil", "--yes")


def test_a_template_and_its_agents_outlive_a_killed_daemon_and_a_killed_helper(hive: Stack) -> None:
    create(hive, "hal", "--template", "oa", "--", "openai_turns.py")
    until(lambda: turns(hive, "hal"), within_s=60, what="a turn")
    pid, uid = (hive.get("/api/agents/hal")[key] for key in ("pid", "uid"))
    for part in ("daemon", "sandbox"):
        hive.restart(part)
        count = len(turns(hive, "hal"))
        until(lambda count=count: len(turns(hive, "hal")) > count, within_s=60, what=f"a turn after the {part}'s end")  # type: ignore[misc]
        found = hive.get("/api/agents/hal")
        assert (found["pid"], found["uid"], found["status"]) == (pid, uid, "running")
    create(hive, "ida", "--template", "oa", "--", "openai_turns.py")
    assert "ida" in template(hive, "oa")["agents"]
    command(hive, "agent", "stop", "hal")
    command(hive, "agent", "remove", "hal", "ida", "--yes")


def script_of(hive: Stack, name: str) -> Path:
    return Path(template(hive, name)["script"])


def test_agents_go_on_from_hive_ready_each_as_itself(hive: Stack) -> None:
    """The script ran up to there once, in the template, without any agent's key."""
    script = script_of(hive, "rd")
    for name in ("jon", "kim"):
        create(hive, name, "--template", "rd", "--", str(script), name)
    until(lambda: turns(hive, "jon") and turns(hive, "kim"), within_s=60, what="a turn of each")
    found = template(hive, "rd")
    assert (found["state"], found["stage"], found["agents"]) == ("ready", "ready", ["jon", "kim"])
    for name in ("jon", "kim"):
        first = turns(hive, name)[0]
        assert (first["by"], first["keys"], first["greeting"]) == (found["pid"], [], "hello")
        assert (first["args"], first["key"], first["home"]) == ([name], True, True)
        assert first["text"].startswith("[hive-demo]")
        assert hive.get(f"/api/agents/{name}")["template_note"] == ""
    assert f"Stage: ready, in {script}" in command(hive, "template", "show", "rd")

    command(hive, "agent", "pause", "jon")
    assert hive.get("/api/agents/jon")["status"] == "paused"
    command(hive, "agent", "resume", "jon")
    before = len(turns(hive, "jon"))
    until(lambda: len(turns(hive, "jon")) > before, within_s=60, what="a turn after the wake")
    os.kill(hive.get("/api/agents/kim")["pid"], signal.SIGUSR1)
    until(lambda: hive.get("/api/agents/kim")["status"] in ("stopped", "error"), within_s=60, what="its end")
    assert "7" in hive.get("/api/agents/kim")["reason"]
    command(hive, "agent", "remove", "jon", "kim", "--yes")


@pytest.mark.wide
def test_a_changed_script_is_told_as_stale_until_the_template_is_restarted(hive: Stack) -> None:
    script = script_of(hive, "rd")
    create(hive, "lea", "--template", "rd", "--", str(script))
    assert not template(hive, "rd")["is_stale"]
    script.write_text(READY.replace("ready()\nclient", "made['new'] = 1\nready()\nclient"))
    assert "ready, stale" in command(hive, "template", "list")
    command(hive, "template", "restart", "rd")
    assert not template(hive, "rd")["is_stale"]
    create(hive, "max", "--template", "rd", "--", str(script))
    until(lambda: turns(hive, "lea") and turns(hive, "max"), within_s=60, what="a turn of each")
    assert ("new" in turns(hive, "lea")[0], "new" in turns(hive, "max")[0]) == (False, True)
    command(hive, "agent", "remove", "lea", "max", "--yes")


@pytest.mark.wide
def test_where_a_script_does_not_come_to_ready_or_is_another_agents_are_ordinary_programs(hive: Stack) -> None:
    early = str(script_of(hive, "early"))
    create(hive, "ned", "--template", "early", "--env", "OWN=1", "--", early)
    create(hive, "ora", "--template", "rd", "--", "openai_turns.py")
    until(lambda: turns(hive, "ned") and turns(hive, "ora"), within_s=60, what="a turn of each")
    why = "its script failed before hive.ready(): ZeroDivisionError: division by zero"
    assert why in hive.agent_log("ned")
    assert why in hive.get("/api/agents/ned")["template_note"]
    assert (template(hive, "early")["state"], why in template(hive, "early")["why"]) == ("failed", True)
    assert f"its template stops inside {script_of(hive, 'rd')}" in hive.agent_log("ora")
    assert template(hive, "rd")["agents"] == []
    command(hive, "agent", "remove", "ned", "ora", "--yes")


AS_USER = """
import json, os
from pathlib import Path
from tests.journeys.stack import stack, until

with stack(config="[template rd]\\npython = /usr/bin/python3\\nscript = SCRIPT\\n") as hive:
    hive.post("/api/agents", {"name": "ann", "command": ["SCRIPT", "x"], "env": {}, "template": "rd"})
    hive.post("/api/agents/ann/start")
    until(lambda: "went on" in hive.agent_log("ann"), within_s=60, what="its line")
    found = hive.get("/api/templates/rd")
    print(os.getuid(), found["state"], found["stage"], found["agents"], hive.agent_log("ann").split()[-2:])
    print(int(hive.agent_log("ann").split()[0]) == found["pid"])
"""


@pytest.mark.wide
def test_hive_up_of_a_user_has_a_ready_state_too() -> None:
    with tempfile.TemporaryDirectory(prefix="hive-test-ready-", dir="/var/tmp") as base:
        os.chmod(base, 0o755)
        script = Path(base) / "agent.py"
        script.write_text(
            "import hive, os, sys, time; by = os.getpid(); hive.ready()\n"
            "print(by, 'went on', os.getuid(), sys.argv[1], flush=True); time.sleep(1000)\n"
        )
        script.chmod(0o644)
        said = run_as_nobody(AS_USER.replace("SCRIPT", str(script)))
    assert said.splitlines()[-2:] == [f"{NOBODY} ready ready ['ann'] ['{NOBODY}', 'x']", "True"]
