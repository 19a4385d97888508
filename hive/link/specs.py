"""What daemon and helper tell each other of an agent and of a runtime, inside their messages."""

from __future__ import annotations

import msgspec

from hive.domain import DockerSpec, FirecrackerSpec, Limits, RuntimeKind


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the helper needs to run an agent. `uid`/`gid` None: as the helper's own user.

    `port`: where the agent will listen for callers. `proxy_port`: where an agent in the host's network finds the proxy
    on the loopback, None for one with a network of its own. `egress`, `limits`, `docker`, `firecracker`: as in
    `AgentSpec`.

    `env` is complete (nothing is inherited but PATH, HOME, LANG, TZ set by the helper). `home` is created 0700 and
    owned by the agent. `files`: source path → name in the home, copied at define where missing or changed.
    """

    name: str
    command: list[str]
    env: dict[str, str]
    home: str
    log: str
    uid: int | None = None
    gid: int | None = None
    files: dict[str, str] = {}
    runtime: RuntimeKind = RuntimeKind.PROCESS
    port: int | None = None
    proxy_port: int | None = None
    egress: list[str] | None = None
    limits: Limits = Limits()
    docker: DockerSpec | None = None
    firecracker: FirecrackerSpec | None = None


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a runtime can do on this host. Each `why_not…` is a sentence, empty where it can.

    `why_not`: why no agent can be started at all (no engine, no permission). `why_not_egress`: what of an agent's
    `egress` it does not take. `why_not_exec`: why no other program can be run inside. `limits`: what of the limits it
    does not enforce here. `journal`: the unit in whose journal an agent's output is, with `{}` for its id; empty where
    it is in `SandboxSpec.log`.
    """

    why_not: str = ""
    why_not_freeze: str = ""
    why_not_page_out: str = ""
    why_not_egress: str = ""
    why_not_exec: str = ""
    limits: str = ""
    journal: str = ""
