"""The content of a template's systemd unit, and of the stub that an agent of a template begins as. Pure.

**The template** has an agent's sandbox, because its children inherit it: mounts, filters of system calls, no new
privileges. It differs where it sets its children up: it may make namespaces and move mounts, and its network is empty.
It has no home.

**The stub** is an agent's unit with an agent's properties, but its program only waits. systemd makes the control group,
the limits and the /tmp for it; then the helper names the child of the template as the unit's main process
(`MAINPID=`, sd_notify(3)) and ends the stub.
"""

from __future__ import annotations

from pathlib import Path

from hive.domain import PROGRAM_PATH, Limits
from hive.host.systemd import Properties, quoted
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes import unit_plan
from hive.runtimes.unit_plan import Places

UNIT = "hive-template@{}.service"
STUB_S = 20
"""The stub ends by itself after as many seconds: TimeoutStartSec= of an agent's unit."""
STUB = ["/bin/sleep", str(STUB_S)]
FILES = 524288
"""Descriptors of a template: no agent of it can get more."""
WRITTEN_BY_ANYBODY = ("/tmp", "/var/tmp")
SHARED_MEMORY = "/dev/shm"
_OTHERWISE = {
    "Type": "exec",
    "RemainAfterExit": "no",
    "TimeoutStopSec": "2s",
    "RestrictNamespaces": "user net mnt ipc uts",
    "SystemCallFilter": "@system-service mount move_mount",
    "Delegate": "no",
}
_BESIDES: Properties = [
    ("CollectMode", "inactive-or-failed"),
    ("PrivateNetwork", "yes"),
    ("LimitMEMLOCK", "infinity"),
    ("LimitNOFILE", str(FILES)),
    ("WorkingDirectory", "/"),
]


def template_unit_of(name: str) -> str:
    """
    >>> template_unit_of("lg")
    'hive-template@lg.service'
    """
    return UNIT.format(name)


def template_properties(spec: TemplateSpec, places: Places, socket_dir: Path) -> Properties:
    """All properties of the template's unit. `places`: of an agent; its own parts are left out here.

    `socket_dir`: the directory with the socket by which it is handed its end of the control socket.
    """
    always = [(name, _OTHERWISE.get(name, value)) for name, value in unit_plan.always()]
    return [
        ("SyslogIdentifier", f"hive-template-{spec.name}"),
        *always,
        *_BESIDES,
        *unit_plan.limits_of(Limits(memory_mb=spec.memory_mb)),
        *unit_plan.emptied_of(places),
        ("BindReadOnlyPaths", quoted(places.sockets)),
        ("BindReadOnlyPaths", quoted(socket_dir)),
    ]


def template_command(spec: TemplateSpec, connect: Path, socket_path: Path) -> list[str]:
    """The command line of its unit. Nothing of its environment is there: the helper sends it.

    setpriv, as `User=` takes no uid without an entry in passwd(5).
    """
    assert spec.first_uid is not None
    uid = spec.first_uid
    become = ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    become += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all", "--"]
    python = [spec.python, "-I", "-S", str(connect), str(socket_path)]
    words = ["/usr/bin/env", "-i", f"PATH={PROGRAM_PATH}", *become, *python]
    return [word.replace("$", "$$") for word in words]


def stub_properties(spec: SandboxSpec, places: Places) -> Properties:
    """An agent's properties, of a unit whose main process is named later on.

    The network is the child's own; so is IPC, and what is put into the root step's view is not needed.
    """
    kept = [(name, value) for name, value in unit_plan.properties(spec, places, None) if name != "Type"]
    return [("Type", "notify"), ("NotifyAccess", "main"), *kept]


def is_stub(cmdline: bytes) -> bool:
    """Whether a process with this command line (`/proc/<pid>/cmdline`) is one.

    >>> is_stub(b"/bin/sleep\\x0020\\0"), is_stub(b"/usr/bin/python3\\0a.py\\0")
    (True, False)
    """
    return cmdline == b"\0".join(word.encode() for word in STUB) + b"\0"


def place_of(places: Places) -> dict[str, list[str]]:
    """Steps that hive/templates/unit_setup.py takes in the child; the mounts of `trees` are handed to it in this order.

    The directory of Hive's that is emptied in its template's view, and has its home in its own.
    """
    above = [path for path in (places.state, places.runtime) if places.home.is_relative_to(path)]
    return {
        "empty": [str(path) for path in above[:1]],
        "fresh": [SHARED_MEMORY],
        "trees": [str(places.home), *WRITTEN_BY_ANYBODY],
    }
