"""Parts of the messages between daemon and helper about an agent and about a runtime."""

from __future__ import annotations

import msgspec

from hive.domain import DockerSpec, FirecrackerSpec, Limits, RuntimeKind


class TemplateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The template an agent is forked from: one Python process with its packages imported and warmed.

    `python`: absolute path of the interpreter, of a virtual environment or not. `imports`: names of modules; `warm`:
    recipes (`openai`) or functions (`module:function`). `script`: path of the agents' script in which it stops, at
    `hive.ready()`; empty where it stops after these. `env`: set while it imports. `memory_mb`: limit of the template
    itself, None for none. `pin`: its memory stays in RAM. `first_uid`, `uids`: the block of uids that is its own and
    its agents', None where agents run as the helper's user.
    """

    name: str
    python: str
    imports: list[str] = []
    warm: list[str] = []
    script: str = ""
    env: dict[str, str] = {}
    memory_mb: int | None = None
    pin: bool = False
    first_uid: int | None = None
    uids: int = 256


class SandboxSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The specification by which the helper runs an agent. `uid`/`gid` None: as the helper's own user.

    `port`: the one on which the agent will listen for callers. `proxy_port`: the proxy's on the loopback, for an agent
    in the host's network; None for one with a network of its own. `egress`, `limits`, `docker`, `firecracker`: as in
    `AgentSpec`. `template`: the one it is forked from where that can be, None for an ordinary program.

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
    template: TemplateSpec | None = None


class RuntimeCapabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The capabilities of a runtime on this host. Each `why_not…` is a sentence, empty if it can.

    `why_not`: no agent can be started at all (no engine, no permission). `why_not_egress`: a part of an agent's
    `egress` is not taken. `why_not_exec`: no other program can be run inside. `limits`: the limits it does not enforce
    here. `journal`: the unit that has an agent's output in its journal, with `{}` for its id; empty if the output is in
    `SandboxSpec.log`.
    """

    why_not: str = ""
    why_not_freeze: str = ""
    why_not_page_out: str = ""
    why_not_egress: str = ""
    why_not_exec: str = ""
    limits: str = ""
    journal: str = ""
