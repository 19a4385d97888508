"""The start of a `process` agent as a child of its template, and how one is found whose start nobody wrote down."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from hive.domain import INNER_PORT
from hive.errors import NotPermitted, NotSupported
from hive.host import netns
from hive.host.cgroup import Subtree
from hive.host.limits import Fence, Fences
from hive.host.process import ProcessStat, ProcessTable, differing_limits, limits_of_spawned, own_umask, write_control
from hive.link.script_form import script_of
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes.log_pipes import AgentOutput, LogPipes
from hive.runtimes.runtime import Run
from hive.runtimes.template import ForkOrder
from hive.runtimes.template_check import namespaces_of
from hive.runtimes.templates import TemplateTable, label


class ForkGround(NamedTuple):
    """The parts of the runtime that a start takes."""

    templates: TemplateTable
    pipes: LogPipes
    subtree: Subtree | None
    fences: Fences


class ForkedAgent(NamedTuple):
    """An agent that was released; all of it is the caller's."""

    run: Run
    ended_fd: int
    fence: Fence
    output: AgentOutput
    inner: socket.socket | None


async def fork(agent: str, spec: SandboxSpec, env: Mapping[str, str], ground: ForkGround) -> ForkedAgent:
    """Starts it; `env` is complete. Where it raises (HiveError, OSError) nothing was started and nothing is left."""
    assert spec.template is not None, "looked at before"
    template = await ground.templates.get(spec.template)
    if isinstance(template, str):
        raise NotSupported(template)
    with contextlib.ExitStack() as unused, contextlib.ExitStack() as made:
        output = ground.pipes.make(agent)
        made.callback(output.remove)
        log_fd = output.writing_end()
        unused.callback(os.close, log_fd)
        child = await ground.templates.fork(template, order_of(agent, spec, spec.template, env), log_fd=log_fd)
        unused.callback(child.close)
        try:
            leaf = ground.subtree.leaf(agent) if ground.subtree else None
            if leaf is not None:
                await leaf.let_go()
                # No await from here until it is in: `close` of an earlier start may yet remove a group that is empty.
                leaf.make()
                made.callback(leaf.remove)
            fence = ground.fences.make(agent, spec.limits, leaf)
            made.callback(fence.remove)
            for directory in (*([leaf.path] if leaf else []), *fence.dirs):
                write_control(directory / "cgroup.procs", str(child.pid).encode())
            if differing := differing_limits(child.pid, spec.limits.files):
                raise NotPermitted(f"its child has other limits than were asked for: {', '.join(differing)}")
            inner = None
            if spec.egress == []:
                inner = netns.listen_inside(child.pidfd, INNER_PORT)
                if inner is None:
                    raise NotPermitted("its template made no network for it")
                made.callback(inner.close)
            await child.release()
        except BaseException:
            await child.end()
            raise
        made.pop_all()
        ended_fd = child.take_pidfd()
    run = Run(
        main=child.main,
        leaf=str(leaf.path) if leaf else None,
        since=time.time(),
        template=label(template.spec.name, template.process.main),
    )
    return ForkedAgent(run, ended_fd, fence, output, inner)


def order_of(agent: str, spec: SandboxSpec, template: TemplateSpec, env: Mapping[str, str]) -> ForkOrder:
    """The child that is asked for; `env`: complete."""
    argv = script_of(spec.command, template.python)
    assert argv is not None, "looked at by why_not_forked"
    is_apart = template.first_uid is not None
    return ForkOrder(
        run=agent,
        argv=argv,
        env=dict(env),
        cwd=spec.home,
        uid=spec.uid if is_apart else None,
        gid=(spec.uid if spec.gid is None else spec.gid) if is_apart else None,
        umask=own_umask(),
        limits=limits_of_spawned(spec.limits.files),
        own_network=spec.egress == [],
    )


def forked_from(spec: SandboxSpec, pid: int) -> str:
    """`Run.template` of an agent whose start nobody wrote down, by its user namespace: that of a template that is over.

    Empty where it is an ordinary program, and where agents are this user and the namespace says nothing.
    """
    with contextlib.suppress(OSError):
        if spec.template is not None and namespaces_of(pid).get("user") != namespaces_of("self").get("user"):
            return spec.template.name
    return ""


def leading(pids: list[int], snapshot: ProcessTable, mark: str) -> list[ProcessStat]:
    """The leaders of sessions among them that none of them has started, oldest first: in an agent's cgroup, the agent.

    For a template's child on a kernel that shows the template's environment as its own: without any mark.
    """
    name = mark.partition("=")[0].encode() + b"="
    marked = {pid for pid in pids if any(each.startswith(name) for each in snapshot.environments.get(pid, ()))}
    stats = [snapshot.processes[pid] for pid in pids if pid in snapshot.processes and pid not in marked]
    found = [stat for stat in stats if stat.pid == stat.session and stat.parent not in pids]
    return sorted(found, key=lambda stat: stat.start_ticks)
