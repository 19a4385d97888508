"""The content of an agent's systemd unit: pure, from the spec to the properties and to what becomes the agent.

A unit is transient: it is never written to /etc, survives `daemon-reload`, and needs none to be made. It must not share
its name with a template on disk, so none is installed.

**One root step.** systemd hands the control group of a delegated unit with `User=` to that user, which could then move
out of the group that is frozen. So the unit begins as root, with three capabilities and no environment: a program that
never changes goes into a group of its own below the unit's, and gives up its user, groups and every capability. Only
then, as the agent's user, a script sets the environment and becomes the agent: nothing an operator or an agent may
write (LD_LIBRARY_PATH, a file in the home) is looked at by anything that has a right.

**Networks.** An agent has a network namespace of its own, made by the helper with a socket to Hive at 127.0.0.1 in
it; nothing else is there. With a list in `egress` it has the host's network and a packet filter of Hive's on the group
it runs in (hive/host/packet_filter.py), put there by the helper before the unit starts. Not systemd's IPAddressDeny=:
that knows no ports, so to let the proxy's through would let through every backend on the loopback too. Such an agent
sees the host's abstract unix sockets, as every process in that network does.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import msgspec

from hive.domain import PROGRAM_PATH, Limits
from hive.host.systemd import Properties, quoted
from hive.link.specs import SandboxSpec

SLICE = "hive-agents.slice"
SLICE_PATH = "hive.slice/hive-agents.slice"
"""Its control group: a dash in a slice's name is a level (systemd.slice(5))."""
LEAF = "agent"
"""The group below the unit's own in which the agent is, and is frozen."""
WRAPPER_TASKS = 2
"""The shell and a program it waits for, before the agent is there."""
FAILED = 125
"""Exit code of the root step where it cannot do its part; the agent's program never ran."""
NOT_EXECUTABLE, NO_PROGRAM = 126, 127
"""As every shell has it."""
ROOT_STEP = f"""\
fail() {{ echo "hive: $1" >&2; exit {FAILED}; }}
mkdir -p "$1/{LEAF}/$7" && echo 0 >"$1/{LEAF}/$7/cgroup.procs" || fail 'no control group of its own'
[ -z "$5" ] || [ "$(readlink /proc/self/ns/net)" = "net:[$5]" ] || fail 'not in its own network'
[ -z "$6" ] || [ "$(stat -c %i "$1/{LEAF}")" = "$6" ] || fail 'not in the group that is filtered'
exec setpriv --reuid="$2" --regid="$3" --clear-groups --no-new-privs --inh-caps=-all --ambient-caps=-all \\
    --bounding-set=-all -- /bin/sh -s hive-becomes-the-agent 3<&0 <"$4"
"""
"""Arguments: control group of the unit, uid, gid, script, inode of the network namespace or nothing, inode of the
control group that has the agent's packet filter or nothing, and of a program that is run inside an agent the name of a
group of its own below the agent's. Descriptor 3 is the unit's own stdin: the script takes its place.

systemd goes on without a namespace where it may not make one; the checks do not. The agent's user may not open the
script, it is handed to it open. A file, not a `-c`: systemd 252 reads its transient units again at a daemon-reload, and
not as it wrote them where there is a line break, `$` or `;`.
"""

UMASK = 0o077

_ALWAYS: Properties = [
    ("Type", "exec"),
    # The unit stays after a good end too, until the helper has read how it ended.
    ("RemainAfterExit", "yes"),
    ("StartLimitIntervalSec", "0"),
    # What is started before another is stopped after it: at a shutdown daemon and helper leave first, and do not take
    # the end of every agent for an end of its own.
    ("Before", "hive-thaw.service"),
    ("TimeoutStartSec", "20s"),
    ("TimeoutStopSec", "10s"),
    ("Delegate", "yes"),
    ("KillMode", "control-group"),
    ("OOMPolicy", "kill"),
    ("StandardOutput", "journal"),
    ("StandardError", "inherit"),
    ("UMask", f"{UMASK:04o}"),
    ("CapabilityBoundingSet", "CAP_SETUID CAP_SETGID CAP_SETPCAP"),
    ("NoNewPrivileges", "yes"),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "tmpfs"),
    ("PrivateTmp", "yes"),
    ("PrivateDevices", "yes"),
    ("DevicePolicy", "closed"),
    ("PrivateIPC", "yes"),
    ("ProtectProc", "invisible"),
    ("ProtectClock", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("RestrictNamespaces", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("LockPersonality", "yes"),
    ("KeyringMode", "private"),
    ("RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6"),
    ("SystemCallArchitectures", "native"),
    ("SystemCallFilter", "@system-service"),
    ("SystemCallErrorNumber", "EPERM"),
]


class Places(msgspec.Struct, frozen=True, kw_only=True):
    """Directories and files of this host the unit is about.

    `state`, `runtime`: Hive's own, not to be seen from inside; `sockets`: the one in `runtime` with the agents'
    sockets, of which each may only be opened by its own agent; `hidden`: more that is nobody's business. `cgroup`: of
    the unit; `root_step`, `script`: files of the first and the last step.
    """

    home: Path
    state: Path
    runtime: Path
    sockets: Path
    cgroup: Path
    cgroups: Path
    """The mount point of control groups."""
    root_step: Path
    script: Path
    hidden: tuple[Path, ...] = ()


class Network(msgspec.Struct, frozen=True):
    """A network namespace: `path` leads PID 1 to it, `inode` tells it from others (`net:[…]`)."""

    path: str
    inode: int


def unit_of(agent: str) -> str:
    """The unit of an agent id.

    >>> unit_of("a1b2")
    'hive-agent@a1b2.service'
    """
    return f"hive-agent@{agent}.service"


EXEC_UNITS = "hive-exec@*.service"


def exec_unit_of(run: str) -> str:
    """The unit of a program that is run inside an agent.

    >>> exec_unit_of("0a1b")
    'hive-exec@0a1b.service'
    """
    return EXEC_UNITS.replace("*", run)


def agent_of(directory: str) -> str | None:
    """The agent id in the name of a unit's control group, None where it is another unit's.

    >>> agent_of("hive-agent@a1b2.service"), agent_of("ssh.service")
    ('a1b2', None)
    """
    agent = directory.removeprefix("hive-agent@").removesuffix(".service")
    return agent if agent and unit_of(agent) == directory else None


def has_own_network(egress: list[str] | None) -> bool:
    """Whether the agent is in a network of its own: always, but where it may reach other networks.

    >>> has_own_network(None), has_own_network([]), has_own_network(["192.0.2.0/24"])
    (True, True, False)
    """
    return not egress


def properties(spec: SandboxSpec, places: Places, network: Network | None) -> Properties:
    """All properties of the unit. `network` None: the host's."""
    leaf = places.cgroup / LEAF
    return [
        ("SyslogIdentifier", spec.name),
        ("WorkingDirectory", str(places.home)),
        # For every stop of the unit, at shutdown too: a frozen process would not hear SIGTERM.
        ("ExecStop", f'-/bin/sh -c "test ! -d {leaf} || echo 0 >{leaf}/cgroup.freeze"'),
        *_ALWAYS,
        *limits_of(spec.limits),
        *([] if network is None else [("NetworkNamespacePath", network.path)]),
        *_files(places),
    ]


def always() -> Properties:
    """The properties that every agent's unit has, whatever its spec says."""
    return list(_ALWAYS)


def limits_of(limits: Limits) -> Properties:
    """The properties by which systemd keeps these limits."""
    found: list[tuple[str, str]] = []
    if limits.memory_mb is not None:
        found += [("MemoryMax", f"{limits.memory_mb}M"), ("MemorySwapMax", f"{limits.memory_mb}M")]
    if limits.cpu is not None:
        found.append(("CPUQuota", f"{limits.cpu * 100:.2f}%"))
    if limits.pids is not None:
        found.append(("TasksMax", str(max(limits.pids, WRAPPER_TASKS))))
    if limits.files is not None:
        found.append(("LimitNOFILE", str(limits.files)))
    return found


def _files(places: Places) -> Properties:
    """Emptied: /run with every service's sockets, Hive's directories, other units' control groups. Put back: the
    agent's home, the directory of agents' sockets (its socket may be made anew at any time, under the same name), and
    its own unit's control group and the script, which only the root step can open."""
    return [
        *emptied_of(places),
        ("BindPaths", quoted(places.home)),
        ("BindPaths", quoted(places.cgroup)),
        ("BindReadOnlyPaths", quoted(places.sockets)),
        # `ExecStop` has the same mounts, when the script is long gone, and does without.
        ("BindReadOnlyPaths", quoted(f"-{places.root_step}")),
        ("BindReadOnlyPaths", quoted(f"-{places.script}")),
    ]


def emptied_of(places: Places) -> Properties:
    """The properties that hide what is nobody's business: see `_files`."""
    emptied = [Path("/run"), places.cgroups, places.state, places.runtime]
    emptied = [path for path in emptied if not any(path.is_relative_to(other) for other in emptied if other != path)]
    return [
        *(("TemporaryFileSystem", f"{quoted(path)}:ro,mode=0755") for path in dict.fromkeys(emptied)),
        ("TemporaryFileSystem", "/dev/shm:rw,mode=1777"),
        *(("InaccessiblePaths", quoted(f"-{path}")) for path in places.hidden),
    ]


def command(
    spec: SandboxSpec, places: Places, network: Network | None, filtered: int | None, *, group: str = ""
) -> list[str]:
    """The command line of the unit: the root step, with none of systemd's variables (its INVOCATION_ID, the manager's).

    `filtered`: inode of the leaf that has the agent's packet filter, None where it needs none. `group`: of a program
    inside an agent, below that leaf.
    """
    gid = spec.uid if spec.gid is None else spec.gid
    inode = str(network.inode) if network else ""
    arguments = [str(places.cgroup), str(spec.uid), str(gid), str(places.script), inode, str(filtered or "")]
    arguments += [group] if group else []
    return ["/usr/bin/env", "-i", f"PATH={PROGRAM_PATH}", "/bin/sh", str(places.root_step), *arguments]


def properties_inside(
    spec: SandboxSpec,
    places: Places,
    network: Network | None,
    *,
    unit: str,
    helper: str,
    stdio: list[str],
    terminal: str,
    private: dict[str, str] | None = None,
) -> Properties:
    """The properties of a program inside the agent of `unit`: the same sandbox, that agent's /tmp and IPC, other
    input and output. It is in the agent's control group, so its limits are that unit's, but for open files.

    `stdio`: files for stdin, stdout and stderr; `terminal`: the one it has instead, empty for none. `helper`: the
    service with which it ends, empty where that is none. `private`: directories of this host by where the agent has
    them, for one that was forked: its network is not its unit's, and joined is all of a unit or nothing. IPC is its own
    then.
    """
    left_out = {"ExecStop", "StandardOutput", "StandardError", "MemoryMax", "MemorySwapMax", "CPUQuota", "TasksMax"}
    if private is not None:
        left_out.add("PrivateTmp")
    kept = [(name, value) for name, value in properties(spec, places, network) if name not in left_out]
    if terminal:
        streams = [("TTYPath", terminal), *((f"Standard{way}", "tty") for way in ("Input", "Output", "Error"))]
    else:
        ways = zip(("Input", "Output", "Error"), stdio, strict=True)
        streams = [(f"Standard{way}", f"file:{path}") for way, path in ways]
    ends_with = [("BindsTo", helper)] if helper else []
    shared = [("JoinsNamespaceOf", unit)]
    if private is not None:
        shared = [("BindPaths", f"{quoted(source)}:{quoted(target)}") for target, source in private.items()]
    return [*kept, *shared, *ends_with, *streams]


def script(command: list[str], env: dict[str, str], *, stdin: str = "</dev/null", said: str = "") -> str:
    """The last step, as the agent's user. Anything may be in a value or an argument: systemd reads, shows and keeps
    none of it, and it is in no list of processes but the agent's own. `said`: a line of Hive's into its log.

    >>> print(script(["echo", "it's"], {"HOME": "/x y"}), end="")
    unset PWD OLDPWD
    export HOME='/x y'
    exec echo 'it'"'"'s' </dev/null 3<&-
    """
    variables = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    told = [f"printf '%s\\n' {shlex.quote(said)} >&2"] if said else []
    return "\n".join(["unset PWD OLDPWD", *told, *variables, f"exec {shlex.join(command)} {stdin} 3<&-", ""])


def has_become_the_agent(cmdline: bytes, root_step: Path) -> bool:
    """Whether a process with this command line (`/proc/<pid>/cmdline`) has the steps before the agent behind it.

    >>> has_become_the_agent(b"/bin/sh\\0/x\\0", Path("/x")), has_become_the_agent(b"/bin/sh\\0/y\\0", Path("/x"))
    (False, True)
    """
    first = (b"/usr/bin/env\0-i\0PATH=", b"/bin/sh\0" + os.fsencode(root_step) + b"\0")
    return not cmdline.startswith((*first, b"setpriv\0--reuid=", b"/bin/sh\0-s\0hive-becomes-the-agent\0"))
