"""Leftovers of agents: units, control groups and containers that belong to no agent, or to a Hive that is gone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, unseen, wrong
from hive.doctor.checks.target import Subject
from hive.errors import HiveError
from hive.host.cgroup import Leaf, choose_parents, find_mount, own_cgroup, state_label, subtree_name
from hive.host.engine import Engine, filters

TRANSIENT = Path("/run/systemd/transient")
UNIT = "hive-agent@"


class Leftover(NamedTuple):
    """One thing of an agent's. `remedy`: the command that takes it away."""

    agent: str
    what: str
    remedy: str


async def look_at_leftovers(subject: Subject) -> CheckVerdict:
    if subject.paths is None:
        return skipped("there is no Hive whose leftovers they could be")
    if subject.may_not:
        return unseen(subject.silence, "sandbox.leftovers", group="hive")
    if subject.health is None and subject.socket is not None:
        return skipped("the daemon does not say which agents there are; see hive.answers")
    state = subject.paths.state
    found = await asyncio.to_thread(lambda: [*_units(TRANSIENT, state), *_groups(state)])
    found += await _containers(Path(subject.settings.sandbox.docker_socket), state)
    known = await asyncio.to_thread(_known, subject)
    living = next((one.facts["count"] for one in subject.offline if one.code == "agents_without_hive"), 0)
    return judge_leftovers(found, known, living=living)


def _known(subject: Subject) -> frozenset[str] | None:
    """Ids of the agents there are; None where nobody says."""
    if subject.client is None:
        return None
    return frozenset(str(agent["id"]) for agent in subject.client.agents_in_short(timeout_s=0.6))


def _units(directory: Path, state: Path) -> list[Leftover]:
    """Transient units of agents of this state directory, which their text names."""
    found = []
    for path in directory.glob(f"{UNIT}*.service"):
        try:
            is_ours = os.fspath(state) in path.read_text(errors="replace")
        except OSError:
            continue
        if is_ours:
            agent = path.name.removeprefix(UNIT).removesuffix(".service")
            found.append(Leftover(agent, f"unit {path.name}", f"systemctl stop {path.name}"))
    return found


def _groups(state: Path) -> list[Leftover]:
    """Control groups of `hive up` with living processes in them."""
    mount = find_mount(Path("/proc/self/mounts").read_text())
    if mount is None:
        return []
    found = []
    for parent in choose_parents(mount, own_cgroup(Path("/proc/self/cgroup").read_text())):
        subtree = parent / subtree_name(state)
        for leaf in map(Leaf, (entry for entry in subtree.glob("*") if entry.is_dir())):
            if pids := leaf.pids():
                words = " ".join(map(str, pids))
                found.append(Leftover(leaf.path.name, f"processes {words} in {leaf.path}", f"kill {words}"))
    return found


async def _containers(engine: Path, state: Path) -> list[Leftover]:
    """None where no engine answers: that is sandbox.docker's business."""
    query = {"all": "1", **filters(f"hive.state={state_label(state)}")}
    try:
        listed = await Engine(engine).ask("GET", "/containers/json", query=query)
    except HiveError:
        return []
    return [
        Leftover(str(one["Labels"].get("hive.agent", "")), f"container {name}", f"docker rm -f {name}")
        for one in listed
        for name in [str(one["Names"][0]).lstrip("/")]
    ]


def judge_leftovers(found: list[Leftover], known: frozenset[str] | None, *, living: int = 0) -> CheckVerdict:
    """`known`: ids of agents; None where no Hive says which there are. `living`: how many agents of a Hive that does
    not answer have a process; one without a control group is seen by that alone.

    >>> judge_leftovers([Leftover("a1", "unit x", "systemctl stop x")], frozenset({"a1"})).reason
    'nothing is left of agents that are gone'
    """
    if known is None:
        if count := max(living, len(found)):
            return wrong("agents_without_hive", count=count)
        return passed("no agent's process, unit or container is left")
    strays = [one for one in found if one.agent not in known]
    if strays:
        return wrong("agent_left_over", **strays[0]._asdict(), more=len(strays) - 1)
    return passed("nothing is left of agents that are gone")


CHECKS = (Check("sandbox.leftovers", "No unit, process or container without an agent.", look_at_leftovers),)
