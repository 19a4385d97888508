"""`hive template`: what the daemon says of them as tables, and a check that starts them without a daemon."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hive.cli.templates import orders as template
from hive.settings.templates import TemplateRow

Hive = Any
"""conftest.Hive: test modules import no siblings."""

NOW = time.time()
MIB = 1 << 20
VIEW = {
    "name": "lg",
    "owner": "team-a",
    "python": "/srv/venvs/lg/bin/python",
    "imports": ["langgraph.prebuilt", "openai"],
    "warm": ["openai"],
    "script": "",
    "stage": "packages",
    "env": ["LANGSMITH_TRACING"],
    "memory_mb": 256,
    "pin": True,
    "first_uid": 70000,
    "uids": 256,
    "state": "ready",
    "why": "",
    "pid": 4711,
    "since": NOW - 90,
    "agents": ["ann", "ben", "cid"],
    "older": ["cid"],
    "named_by": ["ann", "ben", "cid", "dot"],
    "held_bytes": 80 * MIB,
    "shared_bytes": 70 * MIB,
    "saved_bytes": 60 * MIB,
    "packages_at": NOW - 7300,
    "is_stale": True,
}


@pytest.fixture
def described(hive: Hive) -> Hive:
    """A daemon with a template, whose helper runs none."""
    hive.box.daemon._templates._rows = {"lg": TemplateRow(python="/venv/bin/python", imports="openai", owner="team-a")}
    return hive


def test_a_template_is_shown_with_what_it_shares_and_who_is_older() -> None:
    shown = template._shown({**VIEW, "since": time.time() - 90.5})
    for line in (
        "State: ready, stale for 1m 3",
        "Users: 70000 to 70255\n",
        "Held: 80 MiB, 256 MiB at most, pinned\n",
        "Shared: 70 MiB\n",
        "Saved: 60 MiB\n",
        "Stale: hive template restart lg\n",
        "Agents: ann, ben, cid\n",
        "Of an older: cid\n",
        "Ordinary: dot",
    ):
        assert line in shown


def test_a_template_that_stops_in_a_script_is_shown_with_it() -> None:
    ready = {**VIEW, "script": "/srv/agents/ann.py", "stage": "ready"}
    assert "Stage: ready, in /srv/agents/ann.py\n" in template._shown(ready)
    assert "Stage: packages\n" in template._shown(VIEW)
    assert " ready, stale  ready " in template._listed([ready]).splitlines()[1]


def test_the_list_says_how_many_of_those_that_name_it_were_forked_from_it() -> None:
    head, line = template._listed([VIEW]).splitlines()
    assert head.split() == [*template.HEADERS]
    assert line.split("  ")[0] == "lg"
    assert "3 of 4, 1 older" in line


def test_a_restart_says_who_stays() -> None:
    assert template._restarted(VIEW) == "lg is ready, for agents that start from now on; cid stay with the old one"
    failed = {**VIEW, "state": "failed", "why": "its imports started threads"}
    assert "lg does not start: its imports started threads" in template._restarted(failed)


def test_without_a_template_the_list_says_where_they_are_described(hive: Hive) -> None:
    assert "hive.conf describes them, [template NAME]" in hive("template").out
    said = hive("template", "show", "lg")
    assert (said.code, said.err.splitlines()) == (
        3,
        [
            "hive: there is no template lg  [not_found]",
            "hint: none is described: [template NAME] in hive.conf, or a file of /etc/hive/templates.d",
        ],
    )


def test_where_the_helper_runs_none_that_is_said(described: Hive) -> None:
    (one,) = described("template", "list", "--json").json["templates"]
    assert (one["state"], one["why"], one["owner"]) == ("unknown", "this helper runs no templates", "team-a")
    assert described("template", "show", "nobody").err.splitlines()[1] == "hint: there are lg"
    said = described("template", "restart", "lg")
    assert said.code != 0
    assert "this helper runs no templates" in said.err


@pytest.mark.breadth(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--template", "nobody", "--", "-m", "agent"), "template: there is none named nobody"),
        (("--template", "lg", "--", "-m", "agent"), "template: lg is for agents of tenant team-a, and x is one of"),
        (("--template", "lg", "--", "agent.py"), "command: 'agent.py' is relative"),
        (("--template", "lg", "--", "/nowhere/agent.py"), "command: there is no /nowhere/agent.py"),
        (("--template", "lg", "--", "/tmp/x.py/y.py"), "command: there is no /tmp/x.py/y.py"),
        (("--template", "lg"), "command: empty"),
        (("--template", "lg", "--image", "debian:12"), "template: the runtime is docker"),
        (("--template", "No", "--", "-m", "agent"), "template: 'No' is no name"),
    ],
)
def test_what_cannot_be_of_a_template_is_refused(described: Hive, words: tuple[str, ...], said: str) -> None:
    found = described("agent", "create", "x", *words)
    assert found.code != 0
    assert said in found.err
    assert described("agent", "show", "x").code == 3


def test_a_template_is_checked_by_starting_it_without_a_daemon(
    no_daemon: Hive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.cli.templates.check.NOBODY", None)  # packages of this test are this user's alone
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True).start()\n"
    )
    (modules / "ends.py").write_text("import os\nprint('no licence', flush=True)\nos._exit(3)\n")
    (modules / "warming.py").write_text("def all():\n    raise RuntimeError('it is cold')\n")
    conf = tmp_path / "hive.conf"
    sections = {"good": "json", "threads": "threads", "ends": "ends", "gone": "nosuch", "cold": "warming"}
    text = "".join(
        f"[template {name}]\npython = {sys.executable}\nimports = {module}\nenv = PYTHONPATH={modules}\n"
        for name, module in sections.items()
    )
    for name, body in (("stops", "import hive\nhive.ready()\n"), ("over", "print('over')\n")):
        script = modules / f"{name}.py"
        script.write_text(body)
        text += f"[template {name}]\npython = {sys.executable}\nscript = {script}\n"
    text = text.replace("imports = warming\n", "imports = warming\nwarm = warming:all\n")
    conf.write_text(f"{text}[template none]\npython = /nowhere\nimports = json\n")
    said = no_daemon("template", "check", "--config", str(conf))
    assert said.code == 1
    good, threads, ends, gone, cold, stops, over, none = said.out.splitlines()
    assert good.startswith(f"good starts: Python {sys.version_info.major}.")
    assert "threads does not start: its imports started threads" in threads
    assert ends == "ends does not start: it ended: no licence; its agents would be ordinary programs"
    assert "import nosuch failed" in gone
    assert "it is cold" in cold
    assert f", ready in {modules}/stops.py after " in stops
    assert "over does not start: its script ended before hive.ready()" in over
    assert "/nowhere" in none
    alone = no_daemon("template", "check", "good", "--json", "--config", str(conf))
    assert (alone.code, [one["ok"] for one in alone.json["templates"]]) == (0, [True])
    unknown = no_daemon("template", "check", "god", "--config", str(conf))
    assert (unknown.code, unknown.err.splitlines()[1]) == (3, "hint: did you mean `good`?")
