"""Settings of an agent's unit, by table; what systemd makes of them is in tests/host/test_unit.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.domain import Limits
from hive.errors import BadRequest, DependencyDown, HiveError, NotFound, NotPermitted, WrongState
from hive.host import systemd
from hive.host.systemd import ServiceEnd
from hive.link.specs import SandboxSpec
from hive.runtimes import unit_plan
from hive.runtimes.unit_plan import Network, Places

SPEC = SandboxSpec(
    name="ann", command=["sleep", "9"], env={}, home="/var/lib/hive/agents/a1", log="/var/lib/hive/logs/a1", uid=70001
)
PLACES = Places(
    home=Path("/var/lib/hive/agents/a1"),
    state=Path("/var/lib/hive"),
    runtime=Path("/run/hive"),
    sockets=Path("/run/hive/a"),
    cgroup=Path("/sys/fs/cgroup/hive.slice/hive-agents.slice/hive-agent@a1.service"),
    cgroups=Path("/sys/fs/cgroup"),
    root_step=Path("/run/hive/start/root_step"),
    script=Path("/run/hive/start/a1"),
    hidden=(Path("/etc/hive"),),
)
OWN = Network("/proc/7/fd/9", 4026532000)
EXPOSURE_MAX = 2.5
"""Exposure that `systemd-analyze security` may count for an agent's unit, of 10; 9.6 is a plain service."""


def said(name: str, spec: SandboxSpec = SPEC, network: Network | None = OWN, places: Places = PLACES) -> list[str]:
    return [value for key, value in unit_plan.properties(spec, places, network) if key == name]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (Limits(), {}),
        (Limits(memory_mb=64), {"MemoryMax": "64M", "MemorySwapMax": "64M"}),
        (Limits(cpu=0.5), {"CPUQuota": "50.00%"}),
        (Limits(cpu=0.015), {"CPUQuota": "1.50%"}),
        (Limits(cpu=12), {"CPUQuota": "1200.00%"}),
        (Limits(pids=100, files=64), {"TasksMax": "100", "LimitNOFILE": "64"}),
        (Limits(pids=1), {"TasksMax": "2"}),  # the shell and a program it waits for come before the agent
    ],
    ids=str,
)
def test_limits_are_properties(limits: Limits, expected: dict[str, str]) -> None:
    found = dict(unit_plan.properties(msgspec.structs.replace(SPEC, limits=limits), PLACES, OWN))
    assert {
        name: found[name]
        for name in ("MemoryMax", "MemorySwapMax", "CPUQuota", "TasksMax", "LimitNOFILE")
        if name in found
    } == expected


def test_its_network_is_its_own_or_filtered() -> None:
    own = dict(unit_plan.properties(SPEC, PLACES, OWN))
    assert own["NetworkNamespacePath"] == "/proc/7/fd/9"
    assert unit_plan.command(SPEC, PLACES, OWN, None)[-2:] == [str(OWN.inode), ""]
    listed = msgspec.structs.replace(SPEC, egress=["192.0.2.0/24", "2001:db8::/32"])
    assert "NetworkNamespacePath" not in dict(unit_plan.properties(listed, PLACES, None))
    assert unit_plan.command(listed, PLACES, None, 4711)[-2:] == ["", "4711"]


def test_only_its_home_its_socket_and_its_group_are_put_back() -> None:
    emptied = ['"/run":ro,mode=0755', '"/sys/fs/cgroup":ro,mode=0755', '"/var/lib/hive":ro,mode=0755']
    assert said("TemporaryFileSystem") == [*emptied, "/dev/shm:rw,mode=1777"]
    assert said("BindPaths") == [f'"{PLACES.home}"', f'"{PLACES.cgroup}"']
    assert said("BindReadOnlyPaths") == ['"/run/hive/a"', '"-/run/hive/start/root_step"', '"-/run/hive/start/a1"']
    assert said("InaccessiblePaths") == ['"-/etc/hive"']


def test_a_runtime_directory_outside_of_run_is_emptied_too() -> None:
    elsewhere = msgspec.structs.replace(PLACES, runtime=Path("/srv/hive/r"), sockets=Path("/srv/hive/r/a"))
    assert '"/srv/hive/r":ro,mode=0755' in said("TemporaryFileSystem", places=elsewhere)


@pytest.mark.parametrize("name", ["User", "Group", "DynamicUser", "Environment", "EnvironmentFile", "PrivateNetwork"])
def test_what_would_give_something_away_is_not_in_it(name: str) -> None:
    """`User=` with `Delegate=` gives the agent its group, `Environment=` shows its tokens to everybody, and
    `PrivateNetwork=` is passed over in silence where it cannot be made."""
    env = msgspec.structs.replace(SPEC, env={"OPENAI_API_KEY": "sesame"})
    assert said(name, env) == []


def test_the_root_step_knows_nothing_of_command_environment_or_home() -> None:
    """LD_LIBRARY_PATH into a home its agent can write would be code with CAP_SETUID."""
    odd = msgspec.structs.replace(SPEC, command=["sesame", "$(sesame)"], env={"LD_PRELOAD": "sesame"}, gid=8)
    words = unit_plan.command(odd, PLACES, OWN, None)
    assert words[:2] == ["/usr/bin/env", "-i"]
    assert "sesame" not in " ".join(words)
    assert words[-6:] == [str(PLACES.cgroup), "70001", "8", "/run/hive/start/a1", "4026532000", ""]


def test_no_word_of_it_is_changed_by_systemd_not_even_at_a_daemon_reload() -> None:
    """252 writes `\\$` and `\\;` into transient units, which it does not know when it reads them; and properties of the
    `…Ex` kind, to which a `+` leads, under a name that is none in unit files."""
    for word in [*unit_plan.command(SPEC, PLACES, OWN, None), *unit_plan.command(SPEC, PLACES, None, 4711)]:
        assert re.fullmatch(r"[\w/.:=@-]*", word), word
    (stop,) = said("ExecStop")
    assert re.match(r"-/bin/sh -c \"[^$;%\\\"]+\"$", stop), stop


text = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), max_size=20)


ECHO = [
    sys.executable,
    "-S",
    "-X",
    "utf8",
    "-c",
    "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))",
]


@settings(max_examples=20, deadline=None)
@given(st.lists(text, max_size=4), st.dictionaries(st.sampled_from(["A", "B_1", "_c"]), text))
def test_every_argument_and_variable_passes_the_shell_unchanged(arguments: list[str], env: dict[str, str]) -> None:
    script = unit_plan.script([*ECHO, *arguments], env).encode()
    ran = subprocess.run(["/bin/sh", "-s"], input=script, capture_output=True, env={"PWD": "/"}, check=True)
    found_arguments, found_env = json.loads(ran.stdout)
    assert found_arguments == arguments
    assert {name: value for name, value in found_env.items() if name != "LC_CTYPE"} == env


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "Failed to start transient service unit: Unit a.service was already loaded or has a fragment file.",
            WrongState,
        ),
        ("Failed to stop a.service: Unit a.service not loaded.", NotFound),
        ("Failed to connect to bus: No such file or directory", DependencyDown),
        ("System has not been booted with systemd as init system (PID 1). Can't operate.", DependencyDown),
        ("Failed to start transient service unit: Access denied", NotPermitted),
        ("Failed to parse MemoryMax=much: Invalid argument", BadRequest),
        ("Job for a.service failed because the control process exited with error code.\nSee …", HiveError),
        ("", HiveError),
    ],
)
def test_what_systemd_prints_becomes_an_error(text: str, error: type[HiveError]) -> None:
    found = systemd.error_of(["systemctl"], text)
    assert type(found) is error
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("code", "status", "result", "expected"),
    [
        ("1", "0", "success", ServiceEnd(0, "success")),
        ("1", "7", "exit-code", ServiceEnd(7, "exit-code")),
        ("2", "15", "signal", ServiceEnd(143, "signal")),
        ("3", "11", "core-dump", ServiceEnd(139, "core-dump")),
        ("2", "9", "oom-kill", ServiceEnd(137, "oom-kill")),
        ("0", "0", "success", None),
    ],
)
def test_how_it_ended_is_counted_as_a_shell_does(
    code: str, status: str, result: str, expected: ServiceEnd | None
) -> None:
    shown = {"MainPID": "0", "ExecMainPID": "7", "ExecMainCode": code, "ExecMainStatus": status, "Result": result}
    assert systemd.ended_of(shown, 7) == expected
    assert systemd.ended_of(shown, 8) is None, "of another start"


@pytest.mark.parametrize("spec", [SPEC, msgspec.structs.replace(SPEC, egress=["192.0.2.0/24"])], ids=["own", "list"])
def test_systemd_finds_little_to_expose(spec: SandboxSpec, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    network = None if spec.egress else OWN
    unit = tmp_path / "hive-agent@a1.service"
    own = [
        f"{name}={value}" for name, value in unit_plan.properties(spec, PLACES, network) if name not in NOT_A_SERVICES
    ]
    command = " ".join(
        systemd.quoted(word) for word in unit_plan.command(spec, PLACES, network, None if network else 4711)
    )
    unit.write_text("\n".join(["[Service]", *own, f"ExecStart={command}", ""]))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not [line for line in verified.stderr.splitlines() if unit.name in line], verified.stderr
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", unit], capture_output=True, text=True, check=True
    )
    print(judged.stdout)
    exposure = re.search(r"exposure level for .*: ([0-9.]+)", judged.stdout)
    assert exposure is not None
    assert float(exposure[1]) <= EXPOSURE_MAX, judged.stdout


NOT_A_SERVICES = {"Before", "StartLimitIntervalSec"}
"""Properties of every unit: another section."""
