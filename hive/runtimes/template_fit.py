"""Decides before there is a process whether an agent can be forked from its template. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from hive.link.script_form import script_of
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes.runtime import Run

READ_LATER = frozenset(
    {
        *("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER"),
        *("PYTHONPYCACHEPREFIX", "PYTHONBREAKPOINT", "PYTHONASYNCIODEBUG", "PYTHONSTARTUP"),
    }
)
"""Variables of Python that a child can still heed: the first six by reset.py, the others Python reads when it asks."""
READ_AT_START = ("PYTHON", "LD_", "MALLOC_", "LC_", "OPENBLAS_", "OMP_", "MKL_")
"""Beginnings of names that the interpreter, the loader or a library reads once; and whole names."""
READ_AT_START_TOO = frozenset({"LANG", "GLIBC_TUNABLES"})
HOME = "/nonexistent"
"""A template has no home: nothing of an agent is there yet."""
FORK_UID = 1
"""The first of a block is the template's own."""


FOUND = "a helper that was killed meanwhile started it: the agent's log says why"
"""The note of an agent that a later helper found, and that may be a fork as well as a program."""
OWN_PROGRAM = "hive: started as a program of its own"
"""Begins the line of `said_of`: Hive's own word in the log of an agent."""


def said_of(spec: SandboxSpec, why: str) -> str:
    """The line in the log of an agent that is no fork of its template."""
    name = "" if spec.template is None else spec.template.name
    return f"{OWN_PROGRAM}, not from template {name}: {why}"


def note_of(spec: SandboxSpec, run: Run) -> str:
    """The reason why this running agent is no fork of the template it names, as a clause; empty where it is one.

    >>> from hive.host.process import Identity
    >>> template = TemplateSpec(name="t", python="/v/python")
    >>> spec = SandboxSpec(name="a", command=["/a.py"], env={}, home="/h", log="/l", template=template)
    >>> run = Run(main=Identity(1, 2, "boot"), leaf=None, since=0.0, template="t 7 99")
    >>> note_of(spec, run)
    ''
    >>> note_of(spec, Run(main=run.main, leaf=None, since=0.0, template_note="LANG is read only once"))
    'LANG is read only once'
    """
    if spec.template is None or run.template:
        return ""
    return run.template_note or FOUND


def why_not_forked(spec: SandboxSpec, env: Mapping[str, str], template_env: Mapping[str, str], *, is_root: bool) -> str:
    """The reason why this agent has to be an ordinary program, as a clause; empty where it can be forked.

    `env`, `template_env`: complete, of the agent and of its template.

    >>> import msgspec
    >>> from hive.link.specs import TemplateSpec
    >>> template = TemplateSpec(name="t", python="/v/python")
    >>> spec = SandboxSpec(name="a", command=["/a.py"], env={}, home="/h", log="/l", template=template)
    >>> why_not_forked(spec, {"LANG": "C"}, {"LANG": "C"}, is_root=False)
    ''
    >>> why_not_forked(spec, {"PYTHONHASHSEED": "0"}, {}, is_root=False)
    'PYTHONHASHSEED is read only when an interpreter starts'
    >>> inside = TemplateSpec(name="t", python="/v/python", script="/b.py")
    >>> why_not_forked(msgspec.structs.replace(spec, template=inside), {}, {}, is_root=False)
    'its template stops inside /b.py, and this is /a.py'
    """
    template = spec.template
    assert template is not None
    script = script_of(spec.command, template.python)
    if script is None:
        return f"a template runs FILE.py, -m MODULE or -c CODE, not {' '.join(spec.command)[:60]}"
    if template.script and script[0] != template.script:
        return f"its template stops inside {template.script}, and this is {' '.join(script)[:60]}"
    if differing := _read_at_start(env, template_env):
        verb = "is" if len(differing) == 1 else "are"
        return f"{', '.join(differing)} {verb} read only when an interpreter starts"
    return _why_not_as(spec, template, is_root=is_root)


def _read_at_start(env: Mapping[str, str], template_env: Mapping[str, str]) -> list[str]:
    """Those that the agent has otherwise: what the template alone has is meant for its imports."""
    return [
        name
        for name, value in sorted(env.items())
        if (name.startswith(READ_AT_START) or name in READ_AT_START_TOO)
        and name not in READ_LATER
        and value != template_env.get(name)
    ]


def _why_not_as(spec: SandboxSpec, template: TemplateSpec, *, is_root: bool) -> str:
    """As root a template is nobody in particular, in a user namespace: from there it reaches no network of the host."""
    if not is_root:
        return ""
    if spec.uid is None or template.first_uid is None:
        return "as root an agent is forked only where it and its template have uids of their own"
    if not template.first_uid + FORK_UID <= spec.uid < template.first_uid + template.uids:
        return f"uid {spec.uid} is none of its template's"
    if spec.gid is not None and spec.gid != spec.uid:
        return f"gid {spec.gid} is none of its template's"
    if spec.egress != []:
        return "it is in the host's network, which a template cannot enter (create it with --no-network)"
    return ""
