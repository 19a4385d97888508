"""The appliance's units as files: systemd takes them, they are as locked up as promised, and what they start exists."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.backends.launch import RUNTIME, STARTED, socket_of, unit_of
from hive.backends.launch import SERVICES as INFERENCE_KINDS
from hive.backends.ollama import ADDRESS as OLLAMA_ADDRESS
from hive.cli.lazy import LazyGroup
from hive.cli.main import root
from hive.files.secrets import SECRETS
from hive.proxy.server import HANDED
from hive.settings.pool import slot_id
from hive.settings.table import Paths, Settings
from hive.slots.slot_units import unit_of_slot

SYSTEMD = Path(__file__).parents[2] / "systemd"
UNITS = {path.name: path for path in sorted(SYSTEMD.iterdir()) if path.suffix in (".service", ".socket", ".target")}
SERVICES = [name for name in UNITS if name.endswith(".service")]
INFERENCE = [unit_of(kind) for kind in INFERENCE_KINDS]
PROGRAM = "/opt/hive/current/bin/hive"
PATHS = Paths(Path("/var/lib/hive"), Path("/run/hive"), apart=True)

EXPOSURE = {
    "hive-proxy.service": 1.2,
    "hive-daemon.service": 1.4,
    "hive-redis.service": 0.2,
    "hive-jobs.service": 0.2,
    "hive-inference.service": 0.9,
    "hive-inference-vllm.service": 0.9,
    "hive-inference-llama.service": 0.6,
    "hive-inference-demo.service": 0.4,
    "hive-model@.service": 0.9,
    "hive-inference-ollama-relay.service": 0.5,
    "hive-first-boot.service": 1.2,
    "hive-sandbox.service": 4.3,
    "hive-thaw.service": 1.8,
}
"""Exposure that `systemd-analyze security` of systemd 252 tells, at most. Promises: 1.3 for the proxy, 1.5 for daemon
and Redis, 2.0 for inference servers; the helper's is what its work needs."""
HARDENING = re.findall(
    r"\w+",
    """
User NoNewPrivileges CapabilityBoundingSet ProtectSystem ProtectHome PrivateTmp PrivateDevices PrivateNetwork
PrivateIPC PrivateUsers ProtectProc ProcSubset ProtectClock ProtectControlGroups ProtectHostname
ProtectKernelLogs ProtectKernelModules ProtectKernelTunables RestrictNamespaces RestrictRealtime RestrictSUIDSGID
LockPersonality MemoryDenyWriteExecute KeyringMode IPAddressDeny RestrictAddressFamilies SystemCallArchitectures
SystemCallFilter UMask LimitCORE
""",
)


class Unit(NamedTuple):
    """One file: (name, value) of every line that sets something, and its text."""

    settings: list[tuple[str, str]]
    text: str

    def all(self, name: str) -> list[str]:
        """The words of every line of this name, in order."""
        return [word for key, value in self.settings if key == name for word in value.split()]

    def lines(self, name: str) -> list[str]:
        return [value for key, value in self.settings if key == name]


def read(name: str) -> Unit:
    text = UNITS[name].read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith(("#", "["))]
    return Unit([(key, value) for key, _, value in (line.partition("=") for line in lines)], text)


each_service = pytest.mark.parametrize("name", SERVICES)


# --- systemd takes them ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the units, systemd's own, and stand-ins for the programs they start."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    top = tmp_path_factory.mktemp("root")
    own = next(path for path in (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")) if path.is_dir())
    shutil.copytree(own, top / "usr/lib/systemd/system", symlinks=True)
    there = top / "etc/systemd/system"
    there.mkdir(parents=True)
    for path in UNITS.values():
        shutil.copy(path, there)
    for command in {line.split()[0].lstrip("-+!@:") for name in SERVICES for line in commands(name)}:
        program = top / command.lstrip("/")
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return top


def commands(name: str) -> list[str]:
    """Every command line of a service."""
    return [value for key, value in read(name).settings if re.fullmatch(r"Exec(Start|Stop|Reload)(Pre|Post)?", key)]


def verify(top: Path, *names: str) -> str:
    """Faults that systemd-analyze finds in units of ours, empty where there are none."""
    found = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", f"--root={top}", *names], capture_output=True, text=True, check=False
    )
    said = [line for line in found.stderr.splitlines() if "hive" in line]
    return "\n".join(said or ([f"exit code {found.returncode}"] if found.returncode else []))


@pytest.mark.parametrize("name", list(UNITS))
def test_systemd_takes_the_unit(installed: Path, name: str) -> None:
    assert verify(installed, name) == ""


def test_what_systemd_does_not_take_is_seen(installed: Path) -> None:
    wrong = installed / "etc/systemd/system/hive-wrong.service"
    wrong.write_text(UNITS["hive-daemon.service"].read_text().replace("PrivateIPC", "PrivatIPC"))
    assert "Unknown key 'PrivatIPC'" in verify(installed, wrong.name)


@each_service
def test_the_exposure_is_no_more_than_promised(name: str) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", UNITS[name]],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said.stdout)
    assert found is not None, said.stdout
    assert float(found[1]) <= EXPOSURE[name]


@each_service
def test_a_hardening_directive_that_is_missing_says_why(name: str) -> None:
    unit = read(name)
    without = [directive for directive in HARDENING if not unit.lines(directive)]
    justified = set(re.findall(r"(\w+)=", " ".join(re.findall(r"^#.*", unit.text, re.MULTILINE))))
    assert [directive for directive in without if directive not in justified] == []


@each_service
def test_what_can_go_wrong_is_watched_and_tried_again(name: str) -> None:
    unit = read(name)
    if unit.all("Type") == ["oneshot"]:
        assert unit.lines("TimeoutStartSec") + unit.lines("TimeoutStopSec")
        return
    assert unit.all("Type") == ["notify"] or "# Type=notify:" in unit.text
    assert unit.lines("WatchdogSec") or "# WatchdogSec=:" in unit.text
    assert unit.lines("Restart") or unit.lines("PartOf")


# --- what they start ---------------------------------------------------------------------------------------------


def hive_commands() -> Iterator[tuple[str, list[str]]]:
    for name in SERVICES:
        for line in commands(name):
            program, *words = shlex.split(line.lstrip("-+!@:"))
            if program == PROGRAM:
                yield name, words


@pytest.mark.parametrize(("name", "words"), list(hive_commands()), ids=lambda value: str(value)[:60])
def test_the_command_exists_and_takes_its_options(name: str, words: list[str]) -> None:
    command: Any = root()
    context = command.make_context("hive", ["--help"], resilient_parsing=True)
    while isinstance(command, LazyGroup):
        verb, *words = words
        command = command.get_command(context, verb)
        assert command is not None, f"{name}: there is no `hive {verb}`"
    command.make_context(command.name, words)


def test_every_service_of_hive_keeps_its_things_where_the_appliance_has_them() -> None:
    for name, words in hive_commands():
        if words[0] in ("proxy", "daemon", "sandbox", "sandbox-thaw"):
            assert "--appliance" in words, name
            assert words[words.index("--state-dir") + 1] == str(PATHS.state), name
            assert words[words.index("--runtime-dir") + 1] == str(PATHS.runtime), name


def test_no_secret_is_in_any_unit() -> None:
    for name, unit in ((name, read(name)) for name in UNITS):
        assert not unit.lines("Environment"), name
        assert not unit.lines("EnvironmentFile"), name
        assert not unit.lines("SetCredential"), name
        assert not re.search(r"[0-9a-fA-F]{32}|[A-Za-z0-9_-]{43}", " ".join(value for _, value in unit.settings)), name


def test_a_service_is_handed_the_secrets_it_reads_and_no_others() -> None:
    handed = {name: {line.partition(":")[0] for line in read(name).lines("LoadCredential")} for name in SERVICES}
    wanted = {name: {secret.name for secret in SECRETS.values() if name in secret.readers} for name in SERVICES}
    wanted["hive-redis.service"] = set()  # it has their digests
    assert handed == wanted
    for name in SERVICES:
        for line in read(name).lines("LoadCredential"):
            secret, _, path = line.partition(":")
            assert path == f"/etc/hive/secrets/{secret}"


# --- sockets -----------------------------------------------------------------------------------------------------


def sockets_of_the_proxy() -> list[str]:
    found = [name for name in UNITS if name.endswith(".socket") and name.startswith("hive-proxy")]
    for name in found:
        assert name == "hive-proxy.socket" or read(name).all("Service") == ["hive-proxy.service"]
    return found


def test_the_sockets_are_those_the_proxy_knows_at_the_ports_it_has() -> None:
    found = {read(name).all("FileDescriptorName")[0]: read(name).all("ListenStream") for name in sockets_of_the_proxy()}
    settings = Settings()
    assert found == {
        "model": [f"127.0.0.1:{settings.proxy.port}"],
        "ingress": [f"127.0.0.1:{settings.proxy.ingress_port}"],
        "admin": [str(PATHS.admin_socket)],
        "runner": [str(PATHS.runner_socket)],
        "jobs": [str(PATHS.job_entry_socket)],
        "vsock": [f"vsock::{settings.inference.vsock_port}"],
    }
    assert found.keys() == HANDED.keys()


def test_the_proxy_requires_what_every_host_has() -> None:
    required = {name for name in read("hive-proxy.service").all("Requires") if name.endswith(".socket")}
    assert required == set(sockets_of_the_proxy()) - {"hive-proxy-vsock.socket"}


# --- inference servers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), list(combinations(INFERENCE, 2)))
def test_two_inference_servers_never_run_and_never_overlap(one: str, other: str) -> None:
    assert other in read(one).all("Conflicts")
    assert one in read(other).all("Conflicts")
    ordered = [one in read(other).all("After"), other in read(one).all("After")]
    assert sorted(ordered) == [False, True], "once: in both directions it would be a circle"


def test_the_target_wants_no_inference_server() -> None:
    target = read("hive.target")
    wanted = {name for key in ("Wants", "Requires", "Upholds", "BindsTo") for name in target.all(key)}
    assert wanted == UNITS.keys() - {
        "hive.target",
        "hive-proxy-vsock.socket",
        "hive-jobs.service",  # its socket starts it, at the first job
        *(name for name in UNITS if name.startswith(("hive-inference", "hive-model@"))),
    }
    for name in INFERENCE:
        assert not [line for line in read(name).settings if line[0] in ("WantedBy", "RequiredBy")]


@pytest.mark.parametrize("name", INFERENCE)
def test_an_inference_server_is_reached_by_its_socket_only(name: str) -> None:
    unit = read(name)
    assert unit.all("PrivateNetwork") == ["yes"]
    assert str(RUNTIME) in unit.all("ReadWritePaths")
    assert unit.all("UMask") == ["0007"]
    assert unit.all("ExecStart")[1] == ("demo-backend" if "demo" in name else "run-backend")


def test_a_model_of_the_pool_is_started_by_the_helper_alone_and_never_again_by_systemd() -> None:
    """One authority starts servers: systemd must neither start one with the box nor after its end."""
    unit = read("hive-model@.service")
    assert unit.all("Restart") == ["no"]
    assert not [line for line in unit.settings if line[0] in ("WantedBy", "RequiredBy", "Conflicts")]
    assert (unit.all("Type"), unit.all("NotifyAccess"), unit.all("MemoryAccounting")) == (["notify"], ["main"], ["yes"])
    words = unit.all("ExecStart")
    assert words[1:3] == ["run-model", "%i"]
    assert words[words.index("--grant") + 1] == str(PATHS.slot_grant("%i"))
    assert words[words.index("--socket") + 1] == str(PATHS.slot_socket("%i"))
    assert words[words.index("--state-dir") + 1] == str(PATHS.slot_state)
    assert unit_of_slot("a") == "hive-model@a.service"


def test_a_model_of_the_pool_may_write_in_the_directory_of_its_own_socket_and_of_no_other() -> None:
    """All of them run as one user: a server that was taken over could have listened in another one's place."""
    model = read("hive-model@.service")
    assert model.all("ProtectSystem") == ["strict"]
    assert [Path("/run", name) for name in model.all("RuntimeDirectory")] == [PATHS.slot_socket("%i").parent]
    assert model.all("ReadWritePaths") == [str(PATHS.slot_state), f"-{PATHS.slots}/engine"]
    assert model.lines("TemporaryFileSystem") == [f"{PATHS.slot_sockets}:ro"]
    assert model.lines("BindPaths") == [str(PATHS.slot_socket("%i").parent)]
    assert model.lines("InaccessiblePaths") == [f"-{PATHS.slot_socket_before('x').parent}"]
    for unit in (name for name in SERVICES if name.startswith(("hive-inference", "hive-proxy"))):
        written = read(unit).all("ReadWritePaths")
        assert not [path for path in written if PATHS.slot_sockets.is_relative_to(path.lstrip("-"))], unit


def test_a_model_of_the_pool_has_the_gpus_that_vllm_has() -> None:
    model, vllm = read("hive-model@.service"), read("hive-inference-vllm.service")
    assert model.lines("DeviceAllow") == vllm.lines("DeviceAllow")
    assert model.all("UMask") == ["0007"]
    assert model.all("PrivateNetwork") == ["yes"]


def test_of_all_models_of_the_pool_the_runner_before_comfyui_alone_has_the_loopback_of_the_host() -> None:
    """ComfyUI knows no unix socket. Whatever else is reached is refused by the unit's IPAddressDeny=."""
    drop_in = SYSTEMD / f"{unit_of_slot(slot_id('comfyui'))}.d" / "network.conf"
    lines = [line for line in drop_in.read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["[Service]", "PrivateNetwork=no"]
    assert list(SYSTEMD.glob("hive-model@*.d")) == [drop_in.parent]
    model = read("hive-model@.service")
    assert (model.all("IPAddressDeny"), model.all("IPAddressAllow")) == (["any"], ["localhost"])


def test_the_relay_is_in_ollamas_network_and_starts_nothing() -> None:
    relay, socket = read("hive-inference-ollama-relay.service"), read("hive-inference-ollama-relay.socket")
    assert relay.all("JoinsNamespaceOf") == ["hive-inference.service"]
    assert relay.all("PrivateNetwork") == ["yes"]
    assert relay.all("ExecStart")[-1] == OLLAMA_ADDRESS
    assert socket.all("ListenStream") == [str(socket_of(STARTED[0]))]
    for unit in (relay, socket):
        # A late caller would end the server that runs by now.
        assert not [key for key, _ in unit.settings if key in ("Requires", "Wants", "BindsTo", "Upholds")]
    assert "hive-inference-ollama-relay.socket" in read("hive-inference.service").all("Wants")


# --- going down --------------------------------------------------------------------------------------------------


def test_at_a_shutdown_who_could_freeze_leaves_first_then_all_are_thawed_then_the_engine_goes() -> None:
    """A unit that is started after another is stopped before it."""
    assert {"hive-sandbox.service", "hive-thaw.service"} <= set(read("hive-daemon.service").all("After"))
    assert {"hive-thaw.service", "docker.service"} <= set(read("hive-sandbox.service").all("After"))
    thaw = read("hive-thaw.service")
    assert "docker.service" in thaw.all("After")
    assert thaw.all("RemainAfterExit") == ["yes"]
    assert thaw.all("ExecStop")


# --- users and directories ---------------------------------------------------------------------------------------


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A root in which systemd has made the users and the directories."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("systemd-tmpfiles") is None or shutil.which("systemd-sysusers") is None:
        pytest.skip("systemd-tmpfiles and systemd-sysusers are not installed")
    (tmp_path / "etc/hive").mkdir(parents=True)
    for tool, arguments in (("sysusers", []), ("tmpfiles", ["--create"])):
        command = [f"systemd-{tool}", f"--root={tmp_path}", *arguments, str(SYSTEMD / f"{tool}.d/hive.conf")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert not [line for line in done.stderr.splitlines() if not line.startswith("Creating ")], done.stderr
    return tmp_path


def names_of(top: Path, file: str) -> dict[int, str]:
    rows = [line.split(":") for line in (top / "etc" / file).read_text().splitlines()]
    return {int(row[2]): row[0] for row in rows} | {0: "root"}


@pytest.mark.root
def test_users_cannot_log_in_and_have_no_home(system: Path) -> None:
    rows = [line.split(":") for line in (system / "etc/passwd").read_text().splitlines()]
    found = {row[0]: (row[5], row[6]) for row in rows}
    assert found == dict.fromkeys(
        ("hive", "hive-proxy", "hive-redis", "hive-jobs", "hive-inference"), ("/nonexistent", "/usr/sbin/nologin")
    )
    groups = {line.partition(":")[0] for line in (system / "etc/group").read_text().splitlines()}
    assert groups == {*found, "hive-admin"}


@pytest.mark.root
def test_every_directory_is_there_and_its_owners_alone(system: Path) -> None:
    users, groups = names_of(system, "passwd"), names_of(system, "group")

    def look(path: Path) -> tuple[str, str, str]:
        found = (system / path.relative_to("/")).stat()
        return users[found.st_uid], groups[found.st_gid], f"{stat.S_IMODE(found.st_mode):04o}"

    services = {
        PATHS.database.parent: ("hive", "hive", "0700"),
        PATHS.spool: ("hive-proxy", "hive-proxy", "0700"),
        PATHS.redis_dir: ("hive-redis", "hive-redis", "0700"),
        PATHS.sandbox_table.parent: ("root", "root", "0700"),
        PATHS.home("x").parent: ("root", "root", "0711"),
        PATHS.log("x").parent: ("root", "hive", "0750"),
        PATHS.state / "models": ("root", "hive-inference", "0755"),
        PATHS.state / "inference": ("hive-inference", "hive-inference", "0700"),
        PATHS.runtime: ("root", "root", "0755"),
        PATHS.api_socket.parent: ("hive", "hive", "0755"),
        PATHS.link_socket.parent: ("hive", "hive", "0755"),
        PATHS.admin_socket.parent: ("hive-proxy", "hive-proxy", "0755"),
        PATHS.sandbox_socket.parent: ("root", "root", "0755"),
        PATHS.job_link_socket.parent: ("root", "root", "0755"),
        PATHS.redis_socket.parent: ("hive-redis", "hive", "2750"),
        PATHS.agent_socket("x").parent: ("root", "root", "0711"),
        RUNTIME: ("hive-inference", "hive-inference", "0750"),
        Path(Settings().inference.ollama_models): ("hive-inference", "hive-inference", "0755"),
        Path(Settings().sandbox.chroot_base): ("root", "root", "0711"),
    }
    assert {path: look(path) for path in services} == services


def test_of_the_gpus_the_daemon_has_what_tells_of_them_and_not_what_computes() -> None:
    unit = read("hive-daemon.service")
    assert unit.all("PrivateDevices") == ["yes"]
    assert unit.all("BindPaths") == ["-/dev/nvidiactl", *(f"-/dev/nvidia{number}" for number in range(8))]


@each_service
def test_a_service_writes_only_where_a_directory_is_made_for_it(name: str) -> None:
    lines = (SYSTEMD / "tmpfiles.d/hive.conf").read_text().splitlines()
    made = {line.split()[1] for line in lines if line[:2] in ("d ", "D ")}
    unit = read(name)
    made |= {f"/run/{directory}" for directory in unit.all("RuntimeDirectory")}
    named = [path.lstrip("-") for key in ("ReadWritePaths", "BindPaths") for path in unit.all(key)]
    written = [path for path in named if not re.fullmatch(r"/dev/nvidia(ctl|\d)", path)]
    assert unit.all("ProtectSystem") == ["strict"]
    assert [path for path in written if path not in made | {"/etc/hive"}] == []
    assert all(name in ("hive-sandbox.service", "hive-thaw.service") or path != "/run/hive" for path in written)
