"""The helper's policy: what it lets run, what a refusal says, and which files it believes."""

# ruff: noqa: ASYNC240 - as in harness.py
from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import DockerSpec, FirecrackerSpec, Limits, RuntimeKind
from hive.errors import ConfigError, NotPermitted
from hive.host.policy_file import Networks, Policy, load, parse
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.sandbox.allowed import Allowed, check, limited, matches
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.sandbox.harness import SLEEP, A, B, Daemon, HelperProcess, runtimes, spec, uid_of
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]

EXAMPLE = Path(__file__).parents[2] / "conf" / "sandbox.toml"
PLAIN = SandboxSpec(name="a", command=["/usr/bin/agent"], env={}, home="/h", log="/l", uid=70001)
WIDE = Policy(programs=["/usr/bin/*"], networks=Networks(host=True))
CONTAINER = msgspec.structs.replace(
    PLAIN, runtime=RuntimeKind.DOCKER, uid=None, egress=[], docker=DockerSpec(image="debian:12")
)
MACHINE = msgspec.structs.replace(
    PLAIN, runtime=RuntimeKind.FIRECRACKER, firecracker=FirecrackerSpec(kernel="/boot/k", rootfs="/img/a.ext4")
)
TEMPLATE = TemplateSpec(name="lg", python="/usr/bin/python3", first_uid=70000)
FORKED = msgspec.structs.replace(PLAIN, command=["/srv/a.py"], template=TEMPLATE)
IMAGES = Policy(images=["debian:*"], kernels=["/boot/k"], rootfs=["/img/"])


Changed = TypeVar("Changed", SandboxSpec, Policy, TemplateSpec)


def changed(what: Changed, **more: object) -> Changed:
    return msgspec.structs.replace(what, **more)


def the_same(path: str) -> str:
    """No file is a link."""
    return path


# --- the decision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (WIDE, PLAIN),
        (changed(WIDE, networks=Networks()), changed(PLAIN, egress=[])),
        (WIDE, FORKED),
        (changed(WIDE, uids=(70000, 70255)), changed(FORKED, command=["-m", "agent"])),
        (WIDE, changed(FORKED, command=["python3", "-O", "/srv/a.py"])),
        (changed(WIDE, uids=(70000, 70010)), changed(PLAIN, gid=70002)),
        (changed(WIDE, runtimes=[RuntimeKind.PROCESS]), PLAIN),
        (changed(WIDE, copied_files=["/srv/"]), changed(PLAIN, files={"/srv/x/agent.py": "agent.py"})),
        (changed(WIDE, limits=Limits(memory_mb=64, cpu=0.5)), changed(PLAIN, limits=Limits(memory_mb=64, pids=9))),
        (changed(WIDE, networks=Networks(egress=["10.0.0.0/8"])), changed(PLAIN, egress=["10.1.2.0/24", "10.9.9.9"])),
        (IMAGES, CONTAINER),
        (changed(IMAGES, uids=(70000, 70010)), CONTAINER),
        (changed(IMAGES, networks=Networks(bridge=True)), changed(CONTAINER, egress=None)),
        (IMAGES, MACHINE),
        (changed(IMAGES, limits=Limits(memory_mb=256)), MACHINE),
        (
            changed(IMAGES, networks=Networks(taps=["hive-*"])),
            changed(MACHINE, firecracker=FirecrackerSpec(kernel="/boot/k", rootfs="/img/a", tap="hive-3")),
        ),
        (
            changed(IMAGES, mounts={"/etc/ssl/certs": "ro"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/etc/ssl/certs:/c:ro"])),
        ),
        (
            changed(IMAGES, mounts={"/srv": "ro", "/srv/rw": "rw"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/srv/rw/x:/x", "/srv/y:/y:ro"])),
        ),
    ],
)
def test_what_is_named_is_permitted(policy: Policy, asked: SandboxSpec) -> None:
    check(policy, asked, resolve=the_same)


@pytest.mark.parametrize(
    ("policy", "asked", "says", "key"),
    [
        (Policy(), PLAIN, "program /usr/bin/agent", "programs"),
        (Policy(), FORKED, "program /usr/bin/python3", "programs"),
        (
            changed(WIDE, programs=["/usr/bin/agent"]),
            changed(FORKED, command=["/usr/bin/agent"]),
            "template lg: program /usr/bin/python3",
            "programs",
        ),
        (WIDE, changed(FORKED, command=["/srv/other"]), "program /srv/other", "programs"),
        (
            WIDE,
            changed(FORKED, template=changed(TEMPLATE, script="/srv/a.py")),
            "template lg: script /srv/a.py is not permitted",
            "programs",
        ),
        (
            changed(WIDE, uids=(70000, 70254)),
            FORKED,
            "the block of uids 70000 to 70255 of template lg is not permitted by the policy: only 70000 to 70254",
            "uids",
        ),
        (
            changed(WIDE, uids=(70000, 70254)),
            changed(FORKED, template=changed(TEMPLATE, first_uid=None)),
            "template lg without a block of uids",
            "uids",
        ),
        (WIDE, changed(PLAIN, command=["/usr/bin/x/agent"]), "program /usr/bin/x/agent", "programs"),
        (changed(WIDE, networks=Networks()), PLAIN, "the host's network", "networks.host"),
        (changed(WIDE, runtimes=[RuntimeKind.DOCKER]), PLAIN, "runtime process", "runtimes"),
        (changed(WIDE, uids=(70000, 70000)), PLAIN, "uid 70001", "uids"),
        (changed(WIDE, uids=(70000, 70001)), changed(PLAIN, gid=0), "gid 0", "uids"),
        (changed(WIDE, uids=(70000, 70001)), changed(PLAIN, uid=None), "without a uid", "uids"),
        (WIDE, changed(PLAIN, files={"/etc/shadow": "x"}), "file /etc/shadow", "copied_files"),
        (
            changed(WIDE, limits=Limits(memory_mb=64)),
            changed(PLAIN, limits=Limits(memory_mb=65)),
            "memory_mb 65 is not permitted by the policy: at most 64",
            "limits.memory_mb",
        ),
        (changed(WIDE, limits=Limits(cpu=0.5)), changed(PLAIN, limits=Limits(cpu=0.75)), "cpu 0.75", "limits.cpu"),
        (WIDE, changed(PLAIN, egress=["10.0.0.0/8"]), "egress to 10.0.0.0/8", "networks.egress"),
        (
            changed(WIDE, networks=Networks(egress=["0.0.0.0/0"])),
            changed(PLAIN, egress=["127.0.0.1/32"]),
            "egress to 127.0.0.1/32",
            "networks.egress",
        ),
        (
            changed(WIDE, networks=Networks(host=True, egress=["10.0.0.0/24"])),
            changed(PLAIN, egress=["10.0.0.0/8"]),
            "egress to 10.0.0.0/8",
            "networks.egress",
        ),
        (IMAGES, changed(CONTAINER, docker=DockerSpec(image="evil:1")), "image evil:1", "images"),
        (IMAGES, changed(CONTAINER, egress=None), "the engine's bridge network", "networks.bridge"),
        (
            changed(IMAGES, mounts={"/srv": "ro"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/srv/x:/x"])),
            "writing to /srv/x",
            "mounts./srv",
        ),
        (
            changed(IMAGES, mounts={"/etc": "ro", "/etc/ssl": "ro"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/etc/ssl/certs:/c:ro"])),
            "mount of /etc/ssl/certs is not permitted by the policy: below /etc only paths it names",
            "mounts",
        ),
        (
            changed(IMAGES, mounts={"/etc": "ro"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/etc:/c:ro"])),
            "mount of /etc is",
            "mounts",
        ),
        (
            changed(IMAGES, mounts={"/": "rw"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/etc/shadow:/c:ro"])),
            "mount of /etc/shadow",
            "mounts",
        ),
        (
            changed(IMAGES, mounts={"/etc/a": "rw"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/etc/a:/c"])),
            "writing to /etc/a",
            "mounts./etc/a",
        ),
        (
            changed(IMAGES, mounts={"/srv": "rw"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/srv2:/x"])),
            "mount of /srv2",
            "mounts",
        ),
        (
            changed(IMAGES, mounts={"/srv": "rw", "/srv/x/keys": "ro"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/srv/x:/x"])),
            "writing to /srv/x",
            "mounts./srv/x/keys",
        ),
        (
            changed(IMAGES, uids=(70000, 70010)),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", user="1000:70001")),
            "docker: user: uid 1000",
            "uids",
        ),
        (
            changed(IMAGES, uids=(70000, 70010)),
            changed(CONTAINER, uid=70001, docker=DockerSpec(image="debian:12", user="70001:4")),
            "docker: user: gid 4",
            "uids",
        ),
        (changed(IMAGES, kernels=[]), MACHINE, "kernel /boot/k", "kernels"),
        (changed(IMAGES, rootfs=[]), MACHINE, "root file system /img/a.ext4", "rootfs"),
        (
            IMAGES,
            changed(MACHINE, firecracker=FirecrackerSpec(kernel="/boot/k", rootfs="/img/a", initrd="/root/i")),
            "initrd /root/i",
            "kernels",
        ),
        (
            IMAGES,
            changed(MACHINE, firecracker=FirecrackerSpec(kernel="/boot/k", rootfs="/img/a", tap="eth0")),
            "tap device eth0",
            "networks.taps",
        ),
        (changed(IMAGES, limits=Limits(memory_mb=255)), MACHINE, "memory_mb 256", "limits.memory_mb"),
    ],
)
def test_what_is_not_named_is_refused_with_the_key_that_would_permit_it(
    policy: Policy, asked: SandboxSpec, says: str, key: str
) -> None:
    with pytest.raises(NotPermitted) as caught:
        check(policy, asked, resolve=the_same)
    assert caught.value.message.startswith(says) or says in caught.value.message
    assert caught.value.hint == f"sandbox.toml would have to set {key}"
    with pytest.raises(NotPermitted) as caught:
        check(changed(policy, lines={key: 7}), asked, resolve=the_same)
    assert caught.value.hint == f"sandbox.toml line 7 decides this: {key}"


@pytest.mark.parametrize(
    ("policy", "asked", "link"),
    [
        (WIDE, PLAIN, "/usr/bin/agent"),
        (
            changed(WIDE, copied_files=["/srv/"]),
            changed(PLAIN, files={"/srv/agent.py": "agent.py"}),
            "/srv/agent.py",
        ),
        (
            changed(IMAGES, mounts={"/srv": "rw"}),
            changed(CONTAINER, docker=DockerSpec(image="debian:12", mounts=["/srv/x:/x"])),
            "/srv/x",
        ),
        (IMAGES, MACHINE, "/img/a.ext4"),
    ],
)
def test_a_link_out_of_what_is_named_is_refused_and_so_is_one_into_it(
    policy: Policy, asked: SandboxSpec, link: str
) -> None:
    """A user that may move a link must not choose what runs: neither end of it alone is enough."""
    check(policy, asked, resolve=the_same)
    with pytest.raises(NotPermitted, match=f"{link}, which is /etc/shadow,"):
        check(policy, asked, resolve=lambda path: "/etc/shadow" if path == link else path)
    elsewhere = msgspec.json.decode(msgspec.json.encode(asked).replace(link.encode(), b"/home/eve/x"), type=SandboxSpec)
    with pytest.raises(NotPermitted, match="/home/eve/x"):
        check(policy, elsewhere, resolve=lambda path: link if path == "/home/eve/x" else path)


@given(st.text("/ab.", max_size=8))
def test_a_path_that_climbs_out_is_caught_by_where_it_leads(path: str) -> None:
    asked = changed(PLAIN, command=["/srv/" + path])
    policy = changed(WIDE, programs=["/srv/"])
    inside = os.path.normpath("/srv/" + path).startswith("/srv/")
    try:
        check(policy, asked, resolve=os.path.normpath)
    except NotPermitted:
        assert not inside
    else:
        assert inside


@pytest.mark.parametrize("command", [[], ["sh"], [""]])
def test_a_program_without_a_full_path_is_refused(command: list[str]) -> None:
    with pytest.raises(NotPermitted, match="no full path"):
        check(WIDE, changed(PLAIN, command=command), resolve=the_same)


@given(st.from_regex(r"(/[a-z]{1,3}){1,3}", fullmatch=True), st.from_regex(r"(/[a-z]{1,3}){1,2}/", fullmatch=True))
def test_a_directory_names_what_is_below_it_and_nothing_else(path: str, directory: str) -> None:
    assert matches(path, directory) == (
        os.path.commonpath([path, directory]) + "/" == directory and path + "/" != directory
    )


def test_the_maxima_are_what_an_agent_has_that_asks_for_none() -> None:
    policy = Policy(limits=Limits(memory_mb=512, cpu=1.0, files=100))
    assert limited(policy, changed(PLAIN, limits=Limits(cpu=0.5, pids=3))).limits == Limits(
        memory_mb=512, cpu=0.5, pids=3, files=100
    )
    assert limited(policy, MACHINE).limits.memory_mb is None


# --- the file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("programs = [", "no TOML", ""),
        ("\nprogram = []", "line 2: program: no such key", "did you mean `programs`?"),
        ("[limits]\nmemory = 3", "line 2: limits.memory: no such key", "did you mean `memory_mb`?"),
        ("[networks]\n\nbridges = true", "line 3: networks.bridges: no such key", "did you mean `bridge`?"),
        ("zzz = 1", "line 1: zzz: no such key", "known are runtimes"),
        ("programs = 3", "line 1: programs: expected `array`", ""),
        ("\nprograms = ['bin/x']", "line 2: programs: 'bin/x' is no full path", ""),
        ("[mounts]\n'/srv' = 'yes'", "mounts: invalid enum value 'yes'", ""),
        ("[mounts]\n'srv' = 'ro'", "line 1: mounts: 'srv' is no full path", ""),
        ("uids = [5, 3]", "line 1: uids: expected the first and the last", ""),
        ("uids = [5]", "line 1: uids: ", ""),
        ("runtimes = ['vm']", "line 1: runtimes: ", ""),
        ("[networks]\negress = ['10.0.0.1/8']", "line 2: networks.egress: 10.0.0.1/8 has host bits set", ""),
        ("[limits]\ncpu = -1", "line 2: limits.cpu: -1 is not above 0", ""),
        ("path = 'x'", "line 1: path: no such key", ""),
        ("lines = {}", "line 1: lines: no such key", ""),
    ],
)
def test_a_wrong_file_is_refused_with_the_line_and_what_was_meant(text: str, says: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in caught.value.message
    assert hint in caught.value.hint


def test_a_refusal_names_the_line_of_its_key() -> None:
    policy = parse("# mine\nprograms = ['/bin/sh']\n[limits]\ncpu = 2\n\nfiles = 9\n[networks]\nhost = false\n")
    assert policy.lines == {
        "programs": 2,
        "limits": 3,
        "limits.cpu": 4,
        "limits.files": 6,
        "networks": 7,
        "networks.host": 8,
    }


def test_an_agent_that_names_no_networks_is_refused_only_where_that_is_the_hosts() -> None:
    """The README's first agent was refused on an installed Hive, whose agents are units: they have a network of their
    own where they ask for nothing, and none gets the host's. The refusal did not say what to type."""
    policy = changed(WIDE, networks=Networks())
    check(policy, PLAIN, own_networks=True, resolve=the_same)
    with pytest.raises(NotPermitted, match="--no-network"):
        check(policy, PLAIN, resolve=the_same)
    with pytest.raises(NotPermitted, match="egress to"):
        check(policy, changed(PLAIN, egress=["192.0.2.0/24"]), own_networks=True, resolve=the_same)
    with pytest.raises(NotPermitted, match=r"bridge network.*--no-network"):
        check(
            changed(IMAGES, networks=Networks()), changed(CONTAINER, egress=None), own_networks=True, resolve=the_same
        )


def test_the_example_permits_what_it_says_and_no_more() -> None:
    policy = parse(EXAMPLE.read_text())
    agent = changed(PLAIN, command=["/usr/bin/python3.11", "/srv/agents/a.py"], egress=[])
    check(policy, agent, resolve=the_same)
    check(policy, changed(CONTAINER, docker=DockerSpec(image="agents/bob", mounts=["/srv/data:/d:ro"])))
    for beyond in (
        changed(agent, egress=None),
        changed(agent, uid=80000),
        changed(agent, command=["/usr/bin/perl"]),
        changed(agent, limits=Limits(memory_mb=4096)),
        changed(CONTAINER, docker=DockerSpec(image="agents/bob", mounts=["/srv/data:/d"])),
    ):
        with pytest.raises(NotPermitted):
            check(policy, beyond, resolve=the_same)
    assert policy.lines.keys() >= set(Policy.__struct_fields__) - {"path", "lines"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sandbox.toml"
    path.write_text("programs = ['/usr/bin/*']\n")
    path.chmod(0o644)
    return path


def test_a_file_others_may_write_is_not_believed(file: Path) -> None:
    load(file)
    file.chmod(0o664)
    with pytest.raises(ConfigError, match="written by others") as caught:
        load(file)
    assert "chmod go-w" in caught.value.hint
    file.chmod(0o1666)
    with pytest.raises(ConfigError, match="written by others"):
        load(file)


def test_a_file_in_a_directory_others_may_write_is_not_believed(file: Path) -> None:
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        load(file)
    link = file.parent / "link.toml"
    link.symlink_to(file)
    with pytest.raises(ConfigError, match="written by others"):
        load(link)


def test_a_link_in_a_directory_others_may_write_is_not_believed_wherever_it_leads(file: Path) -> None:
    anybodys = file.parent / "anybodys"
    anybodys.mkdir()
    (anybodys / "link.toml").symlink_to(file)
    load(anybodys / "link.toml")
    anybodys.chmod(0o777)
    with pytest.raises(ConfigError, match="written by others"):
        load(anybodys / "link.toml")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_file_of_somebody_else_is_not_believed(file: Path) -> None:
    os.chown(file, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to uid 65534"):
        load(file)


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is no file"):
        load(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"programs = ['/\xff']")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(tmp_path / "latin")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (changed(FORKED, template=changed(TEMPLATE, first_uid=999)), "its block of uids begins below 1000"),
        (changed(FORKED, uid=70000), "uid 70000 is none of its agents'"),
        (changed(FORKED, uid=70256), "uid 70256 is none of its agents'"),
        (changed(FORKED, gid=0), "uid 0 is none of its agents'"),
        (changed(FORKED, uid=None), "uid None is none of its agents'"),
        (changed(FORKED, template=changed(TEMPLATE, uids=2**20)), "a block of 1048576 uids"),
        (changed(FORKED, template=changed(TEMPLATE, first_uid=None)), "an agent with a uid needs a block"),
    ],
)
def test_a_template_maps_its_own_block_and_its_agents_are_of_it_with_a_policy_or_without(
    asked: SandboxSpec, says: str
) -> None:
    with pytest.raises(NotPermitted, match=says):
        Allowed(None).permit(asked)
    Allowed(None).permit(FORKED)


def test_a_templates_python_is_roots_where_there_is_a_policy(file: Path, tmp_path: Path) -> None:
    """Another program in its place would run beside every agent of the template."""
    venv = tmp_path / "venv"
    venv.mkdir()
    python = venv / "python"
    python.write_text("")
    python.chmod(0o755)
    file.write_text(f"programs = ['{venv}/']\n[networks]\nhost = true\n")
    file.chmod(0o644)
    asked = changed(FORKED, template=changed(TEMPLATE, python=str(python)))
    assert Allowed(file).permit(asked) == asked
    python.chmod(0o775)
    with pytest.raises(NotPermitted, match=f"template lg: {python} can be written by others"):
        Allowed(file).permit(asked)
    python.chmod(0o755)
    venv.chmod(0o777)
    with pytest.raises(NotPermitted, match=f"template lg: {venv} can be written by others"):
        Allowed(file).permit(asked)


def test_a_templates_script_is_roots_where_there_is_a_policy(file: Path, tmp_path: Path) -> None:
    """It runs in the template of all its agents, as python does."""
    place = tmp_path / "agents"
    place.mkdir(mode=0o755)
    script = place / "a.py"
    script.write_text("")
    script.chmod(0o644)
    file.write_text(f"programs = ['/usr/bin/', '{place}/']\n[networks]\nhost = true\n")
    file.chmod(0o644)
    asked = changed(FORKED, template=changed(TEMPLATE, python="/usr/bin/env", script=str(script)))
    assert Allowed(file).permit(asked) == asked
    script.chmod(0o664)
    with pytest.raises(NotPermitted, match=f"template lg: {script} can be written by others"):
        Allowed(file).permit(asked)


# --- in the helper -----------------------------------------------------------------------------------------------


async def test_a_spec_outside_the_policy_is_neither_defined_nor_started(
    paths: Paths, freezer: str, file: Path, connect: Connect
) -> None:
    helper = HelperServer(paths, runtimes(paths, freezer), allowed=Allowed(file))
    await helper.open()
    daemon = await connect()
    network: dict[str, Any] = {"egress": [] if os.geteuid() == 0 else None}
    file.write_text("programs = ['/usr/bin/*']\n[networks]\nhost = true\n[limits]\nfiles = 88\n")
    helper.reload()
    with pytest.raises(NotPermitted, match="program /bin/no"):
        await daemon.client.define(A, spec(paths, A, ["/bin/no"]))
    assert await daemon.client.stat() == {}
    assert not paths.home(A).exists()
    await daemon.client.define(A, spec(paths, A, ["/usr/bin/env", "sh", "-c", "ulimit -n"], **network))
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    assert paths.log(A).read_text() == "88\n"
    file.write_text("programs = ['/usr/sbin/*']\n")
    helper.reload()
    with pytest.raises(NotPermitted, match="program /usr/bin/env"):
        await daemon.client.start(A)
    file.write_text("programs = [")
    helper.reload()
    with pytest.raises(NotPermitted, match="program /usr/bin/env"):
        await daemon.client.start(A)
    await helper.leave()


async def test_without_a_policy_every_program_an_operator_asks_for_runs(paths: Paths, daemon: Daemon) -> None:
    await daemon.client.define(B, spec(paths, B, SLEEP))
    assert (await daemon.client.start(B)).pid > 0
    assert repr(Allowed(None)) == "<Allowed by nobody: what is on the built-in list>"


async def test_sighup_reads_the_policy_anew(
    paths: Paths, helper_process: Callable[..., HelperProcess], connect: Connect, file: Path
) -> None:
    file.write_text("programs = ['/usr/bin/*']\nuids = [1, 2]\n[networks]\nhost = true\n")
    helper = helper_process(policy=str(file))
    daemon = await connect()
    asked = spec(paths, A, ["/usr/bin/sleep", "1000"], uid=uid_of(A))
    with pytest.raises(NotPermitted):
        await daemon.client.define(A, asked)
    file.write_text("programs = ['/usr/bin/*']\n[networks]\nhost = true\n")
    helper.process.send_signal(signal.SIGHUP)
    await until_defined(daemon, asked)


async def until_defined(daemon: Daemon, asked: SandboxSpec) -> None:
    for _ in range(1000):
        try:
            await daemon.client.define(A, asked)
        except NotPermitted:
            continue
        return
    pytest.fail("the policy was not read anew")
