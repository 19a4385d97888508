"""Every condition can be raised, tells what it should, and is documented.

`python tests/test_conditions.py` writes docs/conditions.md anew.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hive.backends.conversation import ControlAnswer
from hive.backends.entries import ModelEntry
from hive.conditions import TABLE, FoundCondition, Severity, Where, condition, conditions_in, fix_of
from hive.control.health import Facts
from hive.control.health import conditions_of as seen_by_the_daemon
from hive.doctor.checks import (
    adapters,
    backends,
    cluster,
    comfyui,
    docker,
    files,
    governance,
    host,
    leftovers,
    memory,
    parking,
    pool,
    runner_programs,
    running,
    sandboxes,
    speculation,
    stores,
    templates,
    units,
)
from hive.doctor.checks.check import Check, CheckVerdict, Status, passed
from hive.doctor.checks.target import Subject, TargetKind
from hive.doctor.doctor import examine
from hive.doctor.offline_status import DOWN, OfflineStatus, RecordedStatus, ServicePart, UnitStatus
from hive.doctor.offline_status import conditions_of as seen_outside
from hive.domain import BackendInfo, BackendKind, Cluster, ClusterNode
from hive.errors import WrongState
from hive.explain.condition_words import fixes, means, severities
from hive.host.gpu import GpuHardware
from hive.host.memory import MemInfo, Swap
from hive.host.nvml import GpuState, SeenGpus
from hive.settings.pool import ModelRow
from hive.store.anew import Loss

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/conditions.md"
GIB = 1024**3
P = Path("/p")
Case = Callable[[], CheckVerdict | list[FoundCondition]]

# --- one case for each -------------------------------------------------------------------------------------------

LOSS = Loss(at=0.0, why="malformed", aside="/s/d", copy="missing", agents=0, tokens=0)
BACKEND = BackendInfo(kind=BackendKind.VLLM, address="/i/v.sock", up=False)
DEMO = BackendInfo(kind=BackendKind.DEMO, address="/d.sock", up=False)
H200 = GpuHardware(1, "570.86.15", ("NVIDIA H200",), ("nvidia-uvm", "nvidia0", "nvidiactl"), (), True)
KEY = files.PathRow(P, "root", "root", 0o600, is_optional=False)
OWN = files.PathRow(P, None, None, None, 0o077)
VMM = sandboxes.HostProgram("/f", True, True, "Firecracker v1.15.1")
ENGINE = docker.SocketFacts(P, 0o660, "docker", 1, "dockerd", {"CgroupDriver": "systemd"})
RAM = MemInfo(8 * GIB, 4 * GIB, None, None)
ZRAM = Swap("/dev/zram0", "partition", 16 * GIB, 0, 100)
STRAY = leftovers.Leftover("ghost", "unit x", "systemctl stop x")
GROUPS = host.Groups(P, True, host.LIMITED, (), P)
RUNS = {"Id": "a.service", "ActiveState": "active"}
NO = "-NOPERM"


def daemon(**facts: Any) -> Case:
    return lambda: seen_by_the_daemon(Facts(state="/s", **facts))


def outside(code: str = "dependency_down", **facts: Any) -> Case:
    return lambda: seen_outside(
        OfflineStatus(**{"kind": TargetKind.UP, "tried": {}, "state": Path("/s"), **facts}), code
    )


def recorded(**facts: Any) -> Case:
    return outside(recorded=RecordedStatus(P, why="x", **facts))


def gpu(seen: SeenGpus = SeenGpus(), **facts: Any) -> Case:  # noqa: B008 - frozen
    return lambda: backends.judge_gpu(H200._replace(**facts), seen)


def port(ours: int | None, owner: str, *, is_appliance: bool = False) -> Case:
    return lambda: running.judge_ports([running.Port("agents", 11435, ours, owner)], is_appliance=is_appliance)


def acl(stranger: str, *viewer: str) -> Case:
    return lambda: stores.judge_acl(stores.Acl((NO, stranger), viewer))  # type: ignore[arg-type]


def owned(row: files.PathRow, user: str = "root", mode: int | None = 0o600, what: str = "file", **found: Any) -> Case:
    return lambda: files.judge([files.FoundPath(row, user, "root", mode, **found)], what)


def subject(**facts: Any) -> Subject:
    return Subject(**{"kind": TargetKind.UP, "silence": "nobody", **facts})


def version(running_: str, mine: str, installed: str = "", own: str = "/x") -> Case:
    return lambda: running.judge_version(running_, mine, installed, is_appliance=bool(installed), own=Path(own))


def vmm(program: sandboxes.HostProgram, jailer: sandboxes.HostProgram | None = None) -> Case:
    return lambda: sandboxes.judge_firecracker(program, jailer)


def raising(error: BaseException) -> Case:
    """A check that ends so."""

    def look(_: Subject) -> CheckVerdict:
        raise error

    def case() -> CheckVerdict:
        [found] = examine(subject(limit_s=30.0), [Check("a.b", ".", look)])
        return CheckVerdict(found.status, found.reason, found.fix, found.found)

    return case


async def _never(_: Subject) -> CheckVerdict:
    import asyncio

    await asyncio.Event().wait()
    raise AssertionError


def late() -> CheckVerdict:
    [found] = examine(subject(limit_s=0.0), [Check("a.b", ".", _never)])
    return CheckVerdict(found.status, found.reason, found.fix, found.found)


MODEL = ModelEntry(id="m-1", name="qwen3-8b", kind="llama", path=P, row=ModelRow(), origin="[model qwen3-8b]")
SLOT = {"model": "qwen3-8b", "state": "cold", "why": "Nobody has asked for it", "last_error": "", "need_bytes": GIB}
OVERDUE = {
    "id": "l-3",
    "label": "a container",
    "user": "uid:1000",
    "state": "overdue",
    "need_bytes": GIB,
    "grants": [{"account": "GPU-1", "charged_bytes": GIB}],
}
ACCOUNT = {
    "id": "GPU-1",
    "name": "NVIDIA H200",
    "total_bytes": 80 * GIB,
    "reserve_bytes": GIB,
    "used_bytes": GIB,
    "foreign_bytes": 0,
}
ROUTED = Cluster(engine="router", wanted=2, running=1, slots_each=8, nodes=(ClusterNode("10.0.0.2", False, 0),))
OPEN_RAY = ControlAnswer(200, {}, b"{}")
RAY_APP = cluster.ServeApplication(
    {"LLMServer:m": cluster.ServeDeployment(2), "Ingress": cluster.ServeDeployment(1)}, cluster.ServeTopology("Ingress")
)


def clustered(**facts: Any) -> Case:
    return daemon(backend=replace(BACKEND, up=True, cluster=replace(ROUTED, **facts)))


def dashboard(*bound: str) -> cluster.DashboardPlace:
    return cluster.DashboardPlace("10.0.0.1:8265", "10.0.0.1", bound)


CASES: dict[str, Case] = {
    "cluster_none": clustered(running=0, why_none="vLLM Router runs 0 of 2 replicas"),
    "cluster_stuck": clustered(engine="vllm", stuck=("1",)),
    "cluster_short": clustered(),
    "cluster_untold": daemon(backend=replace(BACKEND, up=True, warning="Ray Serve does not tell how many run")),
    "cluster_silent": lambda: cluster.judge_answers("ray", "h:8265", "connection refused"),
    "cluster_token_refused": lambda: cluster.judge_answers("ray", "h:8265", ControlAnswer(403, {}, b"")),
    "ray_without_token": lambda: cluster.judge_token("h:8265", OPEN_RAY),
    "ray_reached_by_agents": lambda: cluster.judge_ways(dashboard(), OPEN_RAY, [cluster.AgentNetwork("a", "process")]),
    "ray_bound_wide": lambda: cluster.judge_ways(dashboard("0.0.0.0"), OPEN_RAY, []),
    "ray_one_ingress": lambda: cluster.judge_ingress({"llm": RAY_APP}),
    "ray_no_limit": lambda: cluster.judge_limits({"llm": RAY_APP}, slots_per_replica=0),
    "router_checks_slow": lambda: cluster.judge_checks([cluster.RouterCommand("r.service", ("vllm-router",))]),
    "database_suspect": daemon(is_suspect=True),
    "database_begun_anew": daemon(loss=LOSS),
    "database_rolled_back": daemon(loss=replace(LOSS, is_rollback=True)),
    "proxy_disconnected": daemon(proxy=False),
    "helper_disconnected": daemon(helper=False),
    "redis_down": daemon(redis=False, redis_at="/r.sock"),
    "redis_of_url_down": lambda: stores.judge_other_redis({"up": False, "at": "redis:6379", "why": "WRONGPASS"}),
    "disk_nearly_full": lambda: stores.judge_disks([stores.Disk("state", P, 5, GIB, None)]),
    "usage_waits_for_disk": daemon(usage_waits="the disk of /s/hive.db is full", is_disk_full=True),
    "usage_waits": daemon(usage_waits="locked"),
    "backend_switching": daemon(switching_to="vllm"),
    "speculation_costs": daemon(costly={"m": 0.1}),
    "no_backend_installed": daemon(not_started=condition("no_backend_installed")),
    "backend_not_started": daemon(not_started=condition("backend_not_started", why="x")),
    "backend_down": daemon(backend=BACKEND),
    "demo_backend_down": daemon(backend=DEMO),
    "unnamed": lambda: conditions_in({"problems": ["it is so"]}),
    "daemon_refuses": outside("not_permitted"),
    "no_hive": outside(kind=TargetKind.NONE),
    "no_state_directory": outside(is_missing=True),
    "restore_cut_short": recorded(is_cut_short=True),
    "database_damaged": lambda: stores.judge_sqlite("row 1 missing", 1, P, 1),
    "database_unreadable": recorded(),
    "daemon_hangs": outside("timeout"),
    "daemon_ended": outside(held_by=7),
    "not_running": lambda: running.judge_answers(subject(named=True)),
    "not_running_as_seen": recorded(may_not=True),
    "unit_not_active": lambda: units.judge_active([{**RUNS, "ActiveState": "failed", "Result": "oom-kill"}]),
    "daemon_stopped": outside(
        units=[UnitStatus("a.service", "active", ""), UnitStatus("hive-daemon.service", "inactive", "")]
    ),
    "part_down": outside(held_by=7, parts=[ServicePart("helper", DOWN, "nobody listens there")]),
    "shown_from_database": lambda: [condition("shown_from_database", how="is down", path=P)],
    "degraded": lambda: running.judge_answers(subject(health={"problems": ["it is so", "so is that"]})),
    "version_not_installed": version("0.2.0", "0.2.0", "0.1.0-1"),
    "command_not_installed": version("0.2.0", "0.2.0", "0.2.0-1"),
    "version_differs": version("0.1.0", "0.2.0"),
    "config_wrong": lambda: running.judge_config(P, "/p:1: no\n/p:2: no", is_appliance=True),
    "config_missing": lambda: running.judge_config(None, "", is_appliance=True),
    "port_moved": port(11436, "nginx (pid 9)"),
    "port_unseen": port(None, running.UNSEEN),
    "port_taken": port(None, "nginx (pid 9)", is_appliance=True),
    "port_taken_here": port(None, "nginx (pid 9)"),
    "secret_missing": owned(KEY, mode=None, what="secret"),
    "file_missing": owned(KEY, mode=None),
    "file_is_link": owned(KEY, is_link=True),
    "file_owner": owned(KEY, user="ann"),
    "file_mode_open": owned(KEY, mode=0o640),
    "file_mode_closed": owned(KEY, mode=0o400),
    "file_readable": owned(OWN, mode=0o644),
    "unit_missing": lambda: units.judge_drift([units.PackagedUnit("/u", b"x", None)]),
    "unit_changed": lambda: units.judge_drift(
        [units.PackagedUnit("/u", b"x", b"y"), units.PackagedUnit("/v", b"x", b"y")]
    ),
    "unit_not_reloaded": lambda: units.judge_active([{**RUNS, "NeedDaemonReload": "yes"}]),
    "unit_restarted": lambda: units.judge_active([{**RUNS, "NRestarts": "3"}]),
    "unit_not_rated": lambda: units.judge_exposure({"hive-proxy.service": None}),
    "unit_exposed": lambda: units.judge_exposure({"hive-proxy.service": 9.6}),
    "redis_open": acl(":0", "+OK", "$-1", NO, NO),
    "redis_viewer_may": acl(NO, "+OK", "$-1", ":0", NO),
    "redis_viewer_missing": acl(NO, "-WRONGPASS", NO, NO, NO),
    "redis_viewer_blind": acl(NO, "+OK", NO, NO, NO),
    "redis_password_in_clear": lambda: stores.judge_acl_file("user ann on >x ~*", "/a") or passed(""),
    "database_newer": lambda: stores.judge_sqlite("ok", 999, P, 1),
    "inodes_low": lambda: stores.judge_disks([stores.Disk("state", P, 50 * GIB, 100 * GIB, 10)]),
    "disk_low": lambda: stores.judge_disks([stores.Disk("state", P, GIB - 1, 100 * GIB, None)]),
    "gpu_without_driver": gpu(driver=""),
    "gpu_without_files": gpu(nodes=()),
    "gpu_closed": gpu(refused=("nvidia0",)),
    "gpu_without_uvm": gpu(nodes=("nvidia0", "nvidiactl")),
    "gpu_without_nvml": gpu(has_nvml=False),
    "gpu_silent": gpu(SeenGpus(why_not="version mismatch")),
    "gpu_fault": gpu(SeenGpus((GpuState(0, fault="GPU is lost"),))),
    "backend_missing": lambda: backends.judge_backend(None, ["a:1", "b:2"], is_needed=False),
    "backend_required": lambda: backends.judge_backend(None, ["a:1", "b:2"], is_needed=True),
    "backend_demo_only": lambda: backends.judge_backend(DEMO, ["/d.sock"], is_needed=False),
    "backend_open": lambda: backends.judge_ways([backends.BackendPath("/i.sock", 0o666, 0o755)], isolation="full"),
    "backend_shared_user": lambda: backends.judge_ways(
        [backends.BackendPath("/i.sock", 0o600, 0o700)], isolation="none"
    ),
    "backend_on_tcp": lambda: backends.judge_ways([backends.BackendPath("127.0.0.1:11434")], isolation="full"),
    "backend_runners_left": lambda: backends.judge_runners([backends.RunningProgram(8, 1, ("ollama", "runner"), GIB)]),
    "pool_file_missing": lambda: pool.judge_files([MODEL], set()),
    "pool_model_failed": lambda: pool.judge_failures(
        {"slots": [{**SLOT, "state": "failed", "last_error": "no tensors"}]}
    ),
    "pool_never_fits": lambda: pool.judge_fit({"accounts": [ACCOUNT], "slots": [{**SLOT, "need_bytes": 90 * GIB}]}),
    "comfyui_no_workflow": lambda: comfyui.judge_workflows("/etc/hive/comfyui", {}),
    "comfyui_workflow_broken": lambda: comfyui.judge_workflows("/w", {"a.json": "it is not JSON", "b.json": "no"}),
    "runner_program_missing": lambda: runner_programs.judge_programs(
        [runner_programs.RunnerProgram("m", "whisper", "/opt/w/bin/hive-runner", "it is not there")]
    ),
    "speculation_without_numba": lambda: speculation.judge_numba(["m"], "/opt/vllm/bin/vllm", lacks=True),
    "speculation_other_vocabulary": lambda: speculation.judge_drafts([("m", "vllm", 32000, 32001)]),
    "adapters_no_dir": lambda: adapters.judge_dir(adapters.FoundDirectory(P, "it is not there"), "required"),
    "adapters_dir_open": lambda: adapters.judge_dir(adapters.FoundDirectory(P, mode=0o777), "required"),
    "adapters_unsigned": lambda: adapters.judge_dir(adapters.FoundDirectory(P, mode=0o755), "warn"),
    "adapter_keys_none": lambda: adapters.judge_keys(P, 0, 1, "required"),
    "adapter_keys_open": lambda: adapters.judge_installed(adapters.FoundDirectory(P, mode=0o775), is_apart=True),
    "adapters_unreadable": lambda: adapters.judge_installed(adapters.FoundDirectory(P, mode=0o700), is_apart=True),
    "agent_failed": daemon(agents_failed={"crash": "exited with 1"}),
    "template_failed": daemon(templates_failed={"lg": "its imports started threads"}),
    "template_stale": lambda: templates.judge_ready([{"name": "lg", "state": "ready", "is_stale": True}]),
    "userns_forbidden": lambda: templates.judge_namespaces(
        ["lg"], {"kernel.apparmor_restrict_unprivileged_userns": "1"}, is_apart=True
    ),
    "slots_not_kept": lambda: parking.judge_directory("/d", "it is so"),
    "lease_overdue": lambda: pool.judge_leases({"leases": [OVERDUE]}),
    "pool_unmeasured": lambda: pool.judge_memory({"accounts": [{**ACCOUNT, "used_bytes": None}]}),
    "pool_foreign_memory": lambda: pool.judge_memory({"accounts": [{**ACCOUNT, "foreign_bytes": 3 * GIB}]}),
    "kvm_missing": lambda: sandboxes.judge_kvm(errno.ENOENT, None, has_vmm=True, is_root=True),
    "kvm_other_api": lambda: sandboxes.judge_kvm(0, 13, has_vmm=True, is_root=True),
    "vsock_missing": lambda: sandboxes.judge_vsock(is_wanted=True, has_vsock=False, has_vhost=False),
    "vhost_missing": lambda: sandboxes.judge_vsock(is_wanted=True, has_vsock=True, has_vhost=False),
    "program_replaceable": vmm(VMM._replace(is_roots=False)),
    "firecracker_unknown": vmm(VMM._replace(said="what?")),
    "firecracker_no_pause": vmm(VMM._replace(said="Firecracker v1.16.0")),
    "firecracker_too_old": vmm(VMM._replace(said="Firecracker v1.9.2")),
    "jailer_unused": vmm(VMM),
    "jailer_missing": vmm(VMM, VMM._replace(is_there=False)),
    "jailer_differs": vmm(VMM, VMM._replace(said="Jailer v1.14.0")),
    "policy_empty": lambda: sandboxes.judge_no_policy(is_appliance=True),
    "docker_open": lambda: docker.judge_docker(ENGINE._replace(mode=0o666), is_root=True),
    "docker_down": lambda: docker.judge_docker(ENGINE._replace(error="it hung up"), is_root=True),
    "docker_no_cgroups": lambda: docker.judge_docker(ENGINE._replace(info={"CgroupDriver": "none"}), is_root=True),
    "docker_no_live_restore": lambda: docker.judge_docker(ENGINE, is_root=True),
    "agents_without_hive": lambda: leftovers.judge_leftovers([STRAY], None),
    "agent_left_over": lambda: leftovers.judge_leftovers([STRAY, STRAY], frozenset()),
    "swap_missing": lambda: memory.judge_swap(RAM, [], []),
    "swap_small": lambda: memory.judge_swap(RAM, [ZRAM._replace(size_bytes=GIB)], []),
    "swap_full": lambda: memory.judge_swap(RAM, [ZRAM._replace(used_bytes=15 * GIB)], []),
    "ksm_on": lambda: memory.judge_ksm("1", 0, is_appliance=True),
    "ksm_merged": lambda: memory.judge_ksm("0", 7000, is_appliance=True),
    "rules_open": lambda: governance.judge_open(P, ["lease-run", "lease-end"]),
    "no_systemd": lambda: host.judge_systemd(None, "init", is_booted=False, is_needed=True),
    "systemd_unknown": lambda: host.judge_systemd(None, "systemd", is_booted=True, is_needed=True),
    "systemd_old": lambda: host.judge_systemd(249, "systemd", is_booted=True, is_needed=True),
    "no_freezer": lambda: host.judge_cgroup(host.Groups(None), is_appliance=True, user_systemd=False),
    "no_cgroup_allowed": lambda: host.judge_cgroup(GROUPS._replace(parent=None), is_appliance=False, user_systemd=True),
    "cgroup_controllers": lambda: host.judge_cgroup(
        GROUPS._replace(controllers=["cpu"]), is_appliance=True, user_systemd=False
    ),
    "cgroup_hybrid": lambda: host.judge_cgroup(
        GROUPS._replace(controllers=["cpu"], v1=["memory", "pids"]), is_appliance=True, user_systemd=False
    ),
    "descriptors_few": lambda: host.judge_descriptors(1000, whose="it", is_appliance=True),
    "descriptors_low": lambda: host.judge_descriptors(4096, whose="it", is_appliance=True),
    "clock_adrift": lambda: host.judge_clock(is_synchronised=False, has_systemd=True),
    "clock_adrift_unmanaged": lambda: host.judge_clock(is_synchronised=False, has_systemd=False),
    "clock_behind": lambda: host.judge_boot(7260.0, P, booted_at=0.0, now=60.0),
    "check_late": late,
    "check_failed": raising(WrongState("it is so", hint="do it")),
    "check_blocked": raising(OSError(errno.EIO, "Input/output error", "/p")),
    "check_broken": raising(ZeroDivisionError("oops")),
}
ELSEWHERE = {
    "units_not_found": "an installation without its shared files",
    "policy_wrong": "tests/doctor/test_doctor.py::test_the_policy_is_read_as_the_helper_reads_it",
    "adapter_keys_wrong": "tests/doctor/test_adapters.py::test_a_key_that_is_not_to_be_believed_is_told",
    "rules_wrong": "tests/doctor/test_governance.py::test_the_rules_are_read_as_the_daemon_reads_them",
    "policy_not_roots": "a policy of another user's on an installed Hive",
}
"""Raised where a file or a host is looked at; what makes it so."""


@pytest.mark.parametrize("code", CASES)
def test_facts_make_the_condition(code: str) -> None:
    found = CASES[code]()
    if isinstance(found, CheckVerdict):
        [one] = [found.found]
        assert one is not None
        assert found.status is (Status.FAIL if one.severity is Severity.ERROR else Status.WARN)
        assert found.reason == one.text
    else:
        [one] = [one for one in found if one.code == code]
    assert one.code == code
    assert one.text
    assert "{" not in one.text + one.fix


def test_every_code_is_raised_by_a_case_or_named_with_what_it_needs() -> None:
    assert CASES.keys() | ELSEWHERE.keys() == TABLE.keys()
    assert not CASES.keys() & ELSEWHERE.keys()


def test_every_code_is_raised_somewhere_in_hive_and_is_a_word() -> None:
    text = "".join(path.read_text() for path in (ROOT / "hive").rglob("*.py") if path.name != "conditions.py")
    assert [code for code in TABLE if f'"{code}"' not in text and code != "unnamed"] == []
    assert [code for code in TABLE if not re.fullmatch("[a-z][a-z_]*[a-z]", code)] == []


def test_a_code_or_a_fact_that_is_not_there_is_a_fault() -> None:
    with pytest.raises(KeyError):
        condition("no_such_code")
    with pytest.raises(KeyError):
        condition("backend_down")


# --- texts and fixes ---------------------------------------------------------------------------------------------


def test_what_a_hive_up_is_told_is_for_a_hive_up() -> None:
    assert condition("ksm_on", why_not="").severity is Severity.ERROR
    assert condition("ksm_on", up=True, why_not="").severity is Severity.WARNING
    assert fix_of("demo_backend_down", {}, Where()) == "hive logs backend"
    assert fix_of("demo_backend_down", {}, Where(installed=True)) == "hive backend list"


def test_where_something_cannot_be_mended_no_command_is_told() -> None:
    one = condition("swap_missing", why_not="no zram here")
    assert (one.text.endswith("; no zram here"), one.fix) == (True, "")


def test_a_path_in_a_command_is_one_word_of_a_shell() -> None:
    assert condition("backend_open", path="/a b").fix == "sudo chmod 660 '/a b'"


# --- docs --------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def document() -> str:
    lines = [
        "# Conditions",
        "",
        "Everything that can be wrong with a Hive has a code, which stays. `hive status`, `hive doctor`, `hive top`,",
        "`GET /api/health` (`conditions`) and `/metrics` (`hive_problem{code,severity}`, of what the daemon sees) tell",
        "the same text and the same command; `--json` has `code`, `severity`, `text`, `fix` and `facts`: the words in",
        "capitals below. What is in brackets is told where there is something to tell. An `error` is something that",
        "does not work, a `warning` something that works less well, or will not for long. After a slash: how it is",
        "under `hive up`.",
        "",
        "Made of `TABLE` in `hive/conditions.py` by `python tests/test_conditions.py`.",
        "",
        "| code | severity | what it means | what to type |",
        "|---|---|---|---|",
    ]
    for code, row in TABLE.items():
        told = " / ".join(f"``{cell(fix)}``" if "`" in fix else f"`{cell(fix)}`" for fix in fixes(row))
        lines.append(f"| `{code}` | {severities(row)} | {cell(means(code))} | {told} |")
    return "\n".join(lines) + "\n"


def test_the_document_is_the_table() -> None:
    assert DOCUMENT.read_text() == document(), "python tests/test_conditions.py"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
