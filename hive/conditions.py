"""Everything that can be wrong with a Hive, in one table: code, severity, what is told, what to type.

Parts of Hive find facts; `condition` makes of a code and its facts what a person is told. `hive status`, `hive doctor`,
`hive top`, the API and /metrics tell the same. A program decides by the code and the facts, never by the text.
docs/conditions.md is made of TABLE.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from shlex import quote
from string import Formatter
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

MIB, GIB = 1024**2, 1024**3
DISK_LEAST_BYTES = 100 * MIB
"""Less than this left of the state's disk: a spool, a write-ahead log and agents' logs take it within minutes."""
SYSTEMD = "/run/systemd/system"
"""There if and only if systemd is PID 1 (sd_booted(3))."""


class Severity(StrEnum):
    """`error`: something does not work. `warning`: something works less well, or will not for long."""

    WARNING = "warning"
    ERROR = "error"


class Where(NamedTuple):
    """The form of commands that reach one Hive. `installed`: its services are units of systemd. `composed`: they are
    containers. Neither: it is a `hive up`.

    `option`: what names it on a command line that talks to it, with a space before it; `files`: on one that works on
    its files. `sudo`: before a command that needs root; empty for root. `flags`: those that a `hive up` was started
    with last, with a space before each; empty where nobody knows.
    """

    installed: bool = False
    composed: bool = False
    option: str = ""
    files: str = ""
    sudo: str = "sudo "
    flags: str = ""

    def look(self, service: str) -> str:
        """The command that says what a service does, and why it ended.

        >>> Where(installed=True).look("daemon"), Where(composed=True).look("redis")
        ('systemctl status hive-daemon', 'docker compose logs redis')
        >>> Where(option=" --state-dir /srv/h").look("proxy")
        'hive logs proxy --state-dir /srv/h'
        """
        if self.installed:
            return f"systemctl status hive-{service}"
        return f"docker compose logs {service}" if self.composed else f"hive logs {service}{self.option}"

    def hive(self, words: str) -> str:
        """
        >>> Where(option=" --state-dir /srv/h").hive("backend list")
        'hive backend list --state-dir /srv/h'
        """
        return f"hive {words}{self.option}"

    @property
    def up(self) -> str:
        """The command that starts a `hive up` again.

        >>> Where(files=" --state-dir /srv/h", flags=" --demo").up
        'hive up --demo --state-dir /srv/h'
        """
        return f"hive up{self.flags}{'' if ' --state-dir ' in self.flags else self.files}"

    def typed(self, template: str) -> str:
        """A command as this user types it there: root needs no sudo, and a small Debian has none.

        >>> Where().typed("{sudo}hive doctor redis.acl"), Where(sudo="").typed("{sudo}hive doctor redis.acl")
        ('sudo hive doctor redis.acl', 'hive doctor redis.acl')
        """
        return _template.vformat(template, (), self.named())

    def named(self) -> Mapping[str, Any]:
        """Values for the names in the templates of fixes."""
        root = self.sudo if self.installed else ""
        by_kind = {
            "start": (f"{root}systemctl start hive.target", "docker compose up --detach", self.up),
            "restart": (f"{root}systemctl restart hive-daemon", "docker compose restart daemon", self.look("daemon")),
            "again": (
                f"{root}systemctl restart hive.target",
                "docker compose restart",
                "end that `hive up` and start it again",
            ),
        }
        return {
            **{name: words[0 if self.installed else 1 if self.composed else 2] for name, words in by_kind.items()},
            "finish_restore": f"{root}hive restore --finish{self.files}",
            "restore": f"{root}hive restore FILE{self.files}",  # no daemon may run meanwhile, and it says so
            "look": _Verb(self.look),
            "hive": _Verb(self.hive),
            "sudo": self.sudo,
        }


def where_is(
    *, apart: bool, state_dir: Path | None = None, socket: str = "", is_root: bool = False, flags: str = ""
) -> Where:
    """`apart`: it is installed, or in containers. `state_dir`, `socket`: how it was named, where it was. `flags`: of
    a `hive up`."""
    files = "" if state_dir is None else f" --state-dir {quote(str(state_dir))}"
    option = files or (f" --socket {quote(socket)}" if socket else "")
    installed = apart and os.path.isdir(SYSTEMD)
    return Where(installed, apart and not installed, option, files, "" if is_root else "sudo ", flags)


class FoundCondition(msgspec.Struct, frozen=True):
    """One thing that is not as it should be. `facts`: what was found, as JSON has it."""

    code: str
    severity: Severity
    text: str
    fix: str
    facts: dict[str, Any]

    def at(self, where: Where) -> FoundCondition:
        """The same, with the fix as it is typed there."""
        return replace(self, fix=fix_of(self.code, self.facts, where)) if self.code in TABLE else self


class Row(NamedTuple):
    """One kind of condition. `text`, `fix`: templates over its facts; `fix` also over `Where.named`.

    `up_severity`, `up_fix`: of a `hive up`, where they differ there.
    """

    severity: Severity
    text: str
    fix: str = ""
    up_severity: Severity | None = None
    up_fix: str | None = None


class _Verb:
    """`{hive:backend list}` in a template calls `call` with `backend list`."""

    def __init__(self, call: Callable[[str], str]) -> None:
        self._call = call

    def __format__(self, spec: str) -> str:
        return self._call(spec)


class _Template(Formatter):
    """str.format, and in place of a format:

    `?TEXT` TEXT with the value for its `*`, nothing where there is none; `/ONE/MANY` one of them by a count;
    `MiB`, `GiB` of bytes; `quote` for a shell. A list is joined by its format.
    """

    def format_field(self, value: Any, spec: str) -> str:
        if spec.startswith("?"):
            return spec[1:].replace("*", str(value)) if value else ""
        if spec.startswith("/"):
            return spec.split("/")[1 if value == 1 else 2]
        if spec in ("MiB", "GiB"):
            return f"{value / (MIB if spec == 'MiB' else GIB):.1f} {spec}"
        if isinstance(value, list | tuple):
            return (spec or ", ").join(map(str, value))
        return quote(str(value)) if spec == "quote" else str(super().format_field(value, spec))


_template = _Template()


def condition(code: str, /, *, up: bool = False, **facts: Any) -> FoundCondition:
    """The condition of this code. `up`: of a `hive up`. KeyError where a fact is missing that its text names.

    >>> condition("redis_down", at="redis:6379", why="Authentication required.").text
    'Redis at redis:6379 is down (Authentication required.): its keys get old, all else works'
    """
    row = TABLE[code]
    facts = {name: value if _is_plain(value) else str(value) for name, value in facts.items()}
    severity = row.up_severity if up and row.up_severity else row.severity
    text = _template.vformat(row.text, (), facts)
    return FoundCondition(code, severity, text, fix_of(code, facts, Where(installed=not up)), facts)


def fix_of(code: str, facts: Mapping[str, Any], where: Where) -> str:
    """Command to type; empty where nothing helps, or where `why_not` among the facts says why nothing does here.

    >>> fix_of("usage_waits_for_disk", {"path": "/s"}, Where())
    'df -h /s; du -xh /s | sort -h | tail'
    """
    row = TABLE[code]
    is_up = not (where.installed or where.composed)
    template = row.up_fix if is_up and row.up_fix is not None else row.fix
    return "" if facts.get("why_not") else _template.vformat(template, (), {**facts, **where.named()})


def conditions_in(health: Mapping[str, Any]) -> list[FoundCondition]:
    """The conditions in an answer of `GET /api/health`; a daemon that is older than codes has sentences only."""
    if "conditions" in health:
        return msgspec.convert(health["conditions"], list[FoundCondition])
    return [condition("unnamed", text=problem) for problem in health["problems"]]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | list | tuple)


def _error(text: str, fix: str = "", *, up: Severity | None = None, up_fix: str | None = None) -> Row:
    return Row(Severity.ERROR, text, fix, up, up_fix)


def _warning(text: str, fix: str = "", *, up_fix: str | None = None) -> Row:
    return Row(Severity.WARNING, text, fix, None, up_fix)


_TRY_OUT = "{sudo}hive backend switch demo  # canned text; once a model is there: switch ollama|vllm|llama|URL"
_DISK = "df -h {path:quote}; du -xh {path:quote} | sort -h | tail"
_DAMAGED = "{restore}  # or restart: agents and tokens come from its second copy"
_REPLACE = "{sudo}hive install; changes of yours: systemctl edit UNIT"
_INSTALL = "{sudo}hive install"
_REDIS_DOWN = "Redis at {at} is down{why:? (*)}: its keys get old, all else works"
_PORT = "ss -ltnp 'sport = :{port}'"
_MEND = "{sudo}{hive:doctor {check} --fix}"
_NO_BACKEND = "none answers at any of {count} usual places: agents get 503"
_ZRAM = "{sudo}{hive:doctor memory.swap --fix}"
_KSM = "{sudo}{hive:doctor memory.ksm --fix}"
_FILES = "systemctl edit hive-proxy hive-daemon  # LimitNOFILE=65536"
_ADRIFT = "nothing keeps it right (adjtimex): schedules drift"
_FILES_UP = "ulimit -Hn 65536  # root"

TABLE: dict[str, Row] = {
    # Seen by the daemon: the API, /metrics, `hive status`, `hive top`.
    "database_suspect": _error("the database is damaged: the next start of the daemon begins it anew", "{restart}"),
    "database_begun_anew": _warning(
        "the database was damaged ({why}) and is begun anew, {kept}; usage, messages, schedules, jobs and the audit "
        "table of before are gone, as far as the usage spool has no more{aside:?; told for as long as * is there}",
        "{restore}",
    ),
    "database_rolled_back": _warning(
        "the database lost its last changes ({why}): agents and tokens are as its second copy has them; usage, "
        "messages, schedules, jobs and rows of the audit table may be gone, as far as the usage spool has no more",
        "{restore}",
    ),
    "proxy_disconnected": _error(
        "the proxy is not connected: no request is served, nobody is put to sleep", "{look:proxy}"
    ),
    "helper_disconnected": _error(
        "the helper is not connected: no agent can be started, paused or woken", "{look:sandbox}"
    ),
    "redis_down": _error(_REDIS_DOWN, "{look:redis}"),
    "redis_of_url_down": _error(_REDIS_DOWN, "{hive:doctor redis}"),
    "disk_nearly_full": _error("the disk of {path} has {free_bytes:MiB} left: writes fail soon", _DISK),
    "usage_waits_for_disk": _error("usage waits, it cannot be written: {why}", _DISK),
    "usage_waits": _error("usage waits, it cannot be written: {why}", "{hive:doctor sqlite disk}"),
    "speculation_costs": _warning(
        "speculation of {model} costs more than it gives: {percent} % of its drafted tokens were accepted in 10 minutes"
        "{more:? (and * more)}",
        "hive config show --origin  # another draft, or speculative = none",
    ),
    "template_failed": _warning(
        "agents of template {template} are ordinary programs: {why}{more:? (and * more)}",
        "{hive:template restart {template:quote}}",
    ),
    "agent_failed": _warning(
        "agent {agent} has ended with an error: {why}{more:? (and * more: hive ps --state error)}",
        "{hive:agent logs {agent:quote}}  # then agent start, or agent remove",
    ),
    "backend_switching": _warning("switching to {to}: requests for the model wait", "{hive:backend status}"),
    "cluster_none": _error("{why}: requests wait", "{hive:backend status}"),
    "cluster_stuck": _error(
        "{engine} at {at} has ranks whose tokens stand still ({ranks}): what they are given hangs until first_byte_s",
        "{hive:backend status}  # restart vLLM on every host of it",
    ),
    "cluster_untold": _warning("{why}", "{hive:doctor cluster}"),
    "cluster_short": _warning(
        "{running} of {wanted} replicas of {engine} at {at} run{down:?, down: *}: requests wait longer",
        "{hive:backend status}",
    ),
    "no_backend_installed": _error(
        "no inference server was started: none is installed where hive.conf says "
        "(ollama_program, vllm_program, llama_program)",
        _TRY_OUT,
    ),
    "backend_not_started": _error("no inference server was started: {why}", "{hive:backend list}"),
    "backend_down": _error("the backend at {at} does not answer: agents get 503", "{hive:backend list}"),
    "demo_backend_down": _error(
        "the backend at {at} does not answer: agents get 503", "{hive:backend list}", up_fix="{look:backend}"
    ),
    "unnamed": _warning("{text}", "{hive:doctor}"),
    # Seen without a daemon: `hive status`, `hive doctor`.
    "daemon_refuses": _warning("this user may not ask the daemon", "{sudo}{hive:status}"),
    "no_hive": _error("no Hive runs here, and none is installed", "hive up --demo"),
    "no_state_directory": _error("there is no state directory {path}", "{start}"),
    "restore_cut_short": _error("a restore of {path} was cut short: no daemon opens it", "{finish_restore}"),
    "database_damaged": _error(
        "{path} is damaged: {why}; a daemon that starts moves it aside and begins anew", _DAMAGED
    ),
    "database_unreadable": _warning("{path} cannot be read: {why}", "{hive:doctor sqlite}"),
    "daemon_hangs": _error("the daemon listens, and does not answer{why:? (*)}", "{restart}"),
    "daemon_ended": _error(
        "{holder} runs, and its daemon does not: it is started again within seconds", "{look:daemon}"
    ),
    "not_running": _error("this Hive does not run{why:?: *}", "{start}"),
    "not_running_as_seen": _error("this Hive does not run, as far as this user may see", "{sudo}{hive:status}"),
    "unit_not_active": _error("{unit} is {state}{why:? (*)}", "systemctl status {name}"),
    "daemon_stopped": _error("{unit} is {state}{why:? (*)}", "{start}"),
    "part_down": _error("the {part} is down: {why}", "{look:{service}}"),
    "shown_from_database": _error(
        "the daemon {how}: this is what {path} says, and nothing can be changed", "{hive:status}"
    ),
    # Seen by `hive doctor` alone: Hive itself.
    "degraded": _warning("{named}: {first}{more:? (and * more)}", "{hive:status}"),
    "version_not_installed": _warning("{running} runs, but {installed} is installed", "{again}"),
    "command_not_installed": _warning("this command is not the installed one ({own})", "type /usr/local/bin/hive"),
    "version_differs": _warning("{running} runs, this command is {mine}", "{again}"),
    "config_wrong": _error(
        "{why}{more:? (and * more)}; a Hive that starts now refuses to", "hive config check{file:? *}"
    ),
    "config_missing": _warning("there is no /etc/hive/hive.conf: defaults are in force", _INSTALL),
    "port_moved": _warning("{ours} is for {what}: {owner} has {port}", _PORT),
    "port_unseen": _warning(
        "{port} for {what} is in use, by Hive or by another program: only root sees which",
        "{sudo}{hive:doctor hive.ports}",
    ),
    "port_taken": _error("{port} for {what} is taken by {owner}: Hive cannot listen there", _PORT),
    "port_taken_here": _warning("{port} for {what} is taken by {owner}: hive up takes the next free one", _PORT),
    # Files, units.
    "secret_missing": _warning("{path} is missing{more:? (and * more)}", "{sudo}hive secrets generate"),
    "file_missing": _warning("{path} is missing{more:? (and * more)}", "{sudo}systemd-tmpfiles --create hive.conf"),
    "file_is_link": _error("{path} is a link{more:? (and * more)}", _MEND),
    "file_owner": _error("{path} belongs to {kind} {found}, expected {wanted}{more:? (and * more)}", _MEND),
    "file_mode_open": _error("{path} has mode {mode}, expected {wanted}{more:? (and * more)}", _MEND),
    "file_mode_closed": _warning("{path} has mode {mode}, expected {wanted}{more:? (and * more)}", _MEND),
    "file_readable": _error("{path} has mode {mode}: others may {do} it{more:? (and * more)}", _MEND),
    "units_not_found": _warning("{why}", "{hint}"),
    "unit_missing": _error("{path} is missing{more:? (and * more)}", _REPLACE),
    "unit_changed": _error("{path} is not what this version brings{more:? (and * more)}", _REPLACE),
    "unit_not_reloaded": _warning("systemd has not read {unit} since it was changed", "{sudo}systemctl daemon-reload"),
    "unit_restarted": _warning("{units} restarted by itself since it was started", "journalctl -u {unit}"),
    "unit_not_rated": _warning("systemd-analyze does not rate {unit}"),
    "unit_exposed": _error(
        "{unit} has exposure {score:g}, at most {most:g} was promised",
        "systemd-analyze security {unit}; systemctl revert {unit}",
    ),
    # Redis, SQLite, disks.
    "redis_open": _error("whoever may connect may write: the default user is on", _INSTALL),
    "redis_viewer_may": _error("viewer may {do}", _INSTALL),
    "redis_viewer_missing": _warning("there is no viewer to look with: {why}", _INSTALL),
    "redis_viewer_blind": _warning("viewer may not read: {why}", _INSTALL),
    "redis_password_in_clear": _error("{path} holds the password of {user} itself, not its hash", _INSTALL),
    "database_newer": _error(
        "{path} was written by a newer Hive (its version {version}, known here {known})", "install that version again"
    ),
    "inodes_low": _error("the disk of {path} has room for {inodes} more files: no agent can be made soon", _DISK),
    "disk_low": _warning("the disk of {path} has {free_bytes:GiB} left", _DISK),
    # GPU, inference server.
    "gpu_without_driver": _warning("{count} NVIDIA GPU on the bus, but no driver is loaded", "{sudo}modprobe nvidia"),
    "gpu_without_files": _error(
        "driver {driver}, but no device files: nothing can use a GPU", "{sudo}nvidia-modprobe -c0 -u"
    ),
    "gpu_closed": _warning("driver {driver}; this user may not open /dev/{file}"),
    "gpu_without_uvm": _warning(
        "driver {driver}, but no /dev/nvidia-uvm: CUDA does not start", "{sudo}nvidia-modprobe -c0 -u"
    ),
    "gpu_without_nvml": _warning("driver {driver}, but no libnvidia-ml: free memory cannot be read before a switch"),
    "gpu_silent": _warning("driver {driver}, but its library does not tell anything: {why}"),
    "gpu_fault": _warning("driver {driver}; {faults:; }"),
    "backend_missing": _warning(_NO_BACKEND, _TRY_OUT, up_fix="{hive:backend list}"),
    "backend_required": _error(_NO_BACKEND, _TRY_OUT, up_fix="{hive:backend list}"),
    "backend_demo_only": _warning(
        "only the demo backend: canned text, no model", "{hive:backend switch URL}", up_fix="hive up --backend URL"
    ),
    "backend_open": _error("{path} lets every user in: agents need not ask Hive", "{sudo}chmod 660 {path:quote}"),
    "backend_shared_user": _warning(
        "agents run as the same user as Hive, so its sockets are theirs, too", "start Hive as root"
    ),
    "backend_on_tcp": _warning(
        "{at} is TCP: an agent in the host's network can go there without Hive",
        "{hive:backend list}  # the installed units listen on sockets",
        up_fix="",
    ),
    "backend_runners_left": _warning(
        "{count} {count:/runner/runners} of an Ollama that ended {count:/holds/hold} {held_bytes:GiB}: "
        "{count:/process/processes} {pids}",
        "kill {pids: }",
    ),
    # The pool of models.
    "cluster_silent": _error(
        "{engine} at {at} does not tell what runs: Hive goes by what it told for 10 s, then by the setting; {why}",
        "curl -i {at}/  # backend_cluster_url in hive.conf says where it is asked",
    ),
    "cluster_token_refused": _error(
        "{engine} at {at} answers {status}: it asks for another token, or this user may not read Hive's",
        "hive config show --origin  # backend_cluster_token_file names the file with Ray's token",
    ),
    "ray_without_token": _error(
        "Ray at {at} asks for no token: whoever reaches that, or any other port of it, runs programs on every node",
        "ray get-auth-token --generate  # then RAY_AUTH_MODE=token on every node, and its file as "
        "backend_cluster_token_file",
    ),
    "ray_reached_by_agents": _error(
        "{agent}{more:?, and * more,} can reach Ray's dashboard at {at}, which asks for no token: a program there"
        " starts others on every node",
        "{hive:agent edit {agent:quote}}  # egress = [] or a list without that host; and give Ray a token",
    ),
    "ray_bound_wide": _warning(
        "Ray's dashboard at {at} listens at {bound} and asks for no token: agents with a network reach it",
        "ray start --head --dashboard-host 127.0.0.1  # with RAY_AUTH_MODE=token",
    ),
    "ray_one_ingress": _warning(
        "application {app} hangs by one replica of {ingress}: where its node dies the streams of all nodes break, and "
        "none is answered for half a minute",
        "serve deploy serve.yaml  # num_replicas: 2 for {ingress}, max_replicas_per_node: 1",
    ),
    "ray_no_limit": _warning(
        "{deployment} of {app} sets no limit of requests{most:?, max_ongoing_requests is *}: Hive takes "
        "vllm_max_sequences for it, and what is wrong with that queues inside Ray, first come first served",
        "serve deploy serve.yaml  # max_ongoing_requests: the engine's max_num_seqs; or slots_per_replica in hive.conf",
    ),
    "router_checks_slow": _warning(
        "{what} looks after its workers every {interval_s} s: a worker that has gone is given requests so long",
        "{remedy}  # with --health-check-interval-secs 2",
    ),
    "pool_file_missing": _error(
        "there is no {path} for {model}{more:?, and * more are missing}: requests for it get 503",
        "hive config show --origin  # put the file there, or take {where:quote} out",
    ),
    "pool_model_failed": _error(
        "{model} cannot be loaded: {why}{more:? (and * more)}", "{hive:model logs {model:quote}}"
    ),
    "pool_never_fits": _error(
        "{model} needs {need_bytes:GiB}, and there are {most_bytes:GiB} for all models{more:? (and * more)}",
        "{hive:pool explain {model:quote}}  # another quantization, or a smaller context, needs less",
    ),
    "comfyui_no_workflow": _error(
        "there is no workflow in {path}: no model asks the ComfyUI of [comfyui] url",
        "hive config show --origin  # put NAME.json there (docs/comfyui.md), or take url out",
    ),
    "comfyui_workflow_broken": _error(
        "{path} is no workflow: {why}{more:? (and * more)}", "{hive:doctor comfyui}  # once it is mended"
    ),
    "runner_program_missing": _error(
        "{model} is served by {program}, and {why}[ (and {more} more)]: requests for it get 503",
        "python3 -m venv {folder:quote} && {folder:quote}/bin/pip install '.[{kind}]'  # in a clone of Hive",
    ),
    "speculation_without_numba": _error(
        "{model} is to draft by ngrams, and the vLLM at {program} has no numba: it ends within its start",
        "pip install numba  # into the environment of {program:quote}",
    ),
    "speculation_other_vocabulary": _error(
        "the draft of {model} has a vocabulary of {draft} tokens, and the model one of {tokens}",
        "hive config show --origin  # name a draft of the model's own family",
    ),
    "adapters_no_dir": _error(
        "adapters may be brought from {path}, and {why}",
        "{sudo}mkdir -p {path:quote}  # or another [adapters] dir",
    ),
    "adapters_dir_open": _warning(
        "every user may write to {path}, from where adapters are brought: only their signatures protect it",
        "{sudo}chmod o-w {path:quote}",
    ),
    "adapters_unsigned": _warning(
        "[adapters] signatures = {policy}: whatever lies in {path} can be loaded",
        "hive config set adapters.signatures required",
    ),
    "adapter_keys_wrong": _error("no adapter's signature can be verified: {why}", "{hint}"),
    "adapter_keys_none": _error(
        "[adapters] signatures = required, and no key is trusted in {path}: no adapter can be brought",
        "{sudo}hive adapter trust FILE",
    ),
    "adapter_keys_open": _error(
        "others than {owner} may write to {path}: whoever does says whose adapters are loaded",
        "{sudo}chmod go-w {path:quote}",
    ),
    "adapters_unreadable": _error(
        "the installed adapters in {path} cannot be read by inference servers", "{sudo}chmod a+rX {path:quote}"
    ),
    "slots_not_kept": _warning(
        "slots of llama-servers are not kept although llama_slot_dir is set: {why}",
        "hive config show --origin  # another directory, or none",
    ),
    "lease_overdue": _warning(
        "lease {lease} ({label}) of {user} was not renewed, and its {mb} MiB are not seen to be free"
        "{more:? (and * more)}: they are given to nobody",
        "{hive:lease end {lease}}  # once its holder has ended; a renewal takes it back",
    ),
    "pool_unmeasured": _warning(
        "{gpu} does not tell its memory{more:? (and * more)}: what is loaded there follows the books alone",
        "{hive:doctor gpu}",
    ),
    "pool_foreign_memory": _warning(
        "others hold {foreign_bytes:GiB} of {name} {gpu}{more:? (and * more)}: models have that much less",
        "nvidia-smi  # {hive:pool} shows what is the pool's",
    ),
    # What agents run in.
    "template_stale": _warning(
        "packages or the script of template {template} have changed since it started{more:? (and of * more)}: its "
        "agents have those of before",
        "{hive:template restart {template:quote}}  # for new agents; each other one when it is started again",
    ),
    "userns_forbidden": _warning(
        "{name} is {value}: templates get no user namespace, and their agents are ordinary programs",
        "{sudo}sysctl -w {name}={to}  # and in /etc/sysctl.d, for the next boot",
    ),
    "kvm_missing": _error(
        "{why}: virtual machines cannot run here", "{sudo}modprobe kvm_intel || {sudo}modprobe kvm_amd"
    ),
    "kvm_other_api": _warning("/dev/kvm speaks API {api}, expected {wanted}"),
    "vsock_missing": _error(
        "no /dev/vsock, but [proxy] vsock = true: the proxy cannot listen there", "{sudo}modprobe vsock"
    ),
    "vhost_missing": _warning(
        "no /dev/vhost-vsock: no guest of this host reaches the proxy", "{sudo}modprobe vhost_vsock"
    ),
    "program_replaceable": _error(
        "{path} can be replaced by others than root, who runs it",
        "{sudo}chown root: {path:quote}; {sudo}chmod go-w {path:quote}",
    ),
    "firecracker_unknown": _warning("{path} does not say its version: {said!r}"),
    "firecracker_no_pause": _error("{why}; its agents stay awake"),
    "firecracker_too_old": _error("{why}; no agent can be a virtual machine"),
    "jailer_unused": _warning("Firecracker {version} without a jailer: a guest that breaks out is root's guest"),
    "jailer_missing": _error("Firecracker {version}, but no jailer at {path}: no machine can start"),
    "jailer_differs": _warning("Firecracker {version} with another jailer: {said!r}"),
    "policy_wrong": _error("{why}", "{hint}"),
    "policy_not_roots": _error(
        "{path} belongs to uid {uid}, who may let the helper run anything", "{sudo}chown root: {path:quote}"
    ),
    "policy_empty": _error(
        "[sandbox] policy is empty: the helper runs whatever program an operator asks for",
        "hive config set sandbox.policy /etc/hive/sandbox.toml",
    ),
    "rules_wrong": _error("{why}: nothing governed is done until it is right", "{hint}"),
    "rules_open": _warning(
        "{path} leaves to roles alone: {operations:, }",
        "add [rules.default] to it, and threshold = 0 where a role is enough",
    ),
    "docker_open": _error(
        "every user may write {path}, and so become root",
        "{sudo}chmod o-rw {path:quote}; {sudo}systemctl edit docker.socket",
    ),
    "docker_down": _error("{why}", "{sudo}systemctl start docker"),
    "docker_no_cgroups": _warning("{engine}: it manages no cgroups, so containers cannot be paused"),
    "docker_no_live_restore": _warning(
        "{engine}: a restart of it ends every agent in it",
        'set "live-restore": true in /etc/docker/daemon.json; systemctl reload docker',
    ),
    "agents_without_hive": _warning(
        "{count} {count:/agent lives/agents live} on, and no Hive answers that manages them", "{start}"
    ),
    "agent_left_over": _warning("{what} belongs to no agent{more:?, and * more}", "{remedy}"),
    # Memory.
    "swap_missing": _warning("none: agents sleep light only, and keep all of their RAM{why_not:?; *}", _ZRAM),
    "swap_small": _warning(
        "{swaps:; }; {wanted_bytes:GiB} would let the agents of a full host sleep deep{why_not:?; *}", _ZRAM
    ),
    "swap_full": _warning("{swaps:; }; nearly full: agents sleep light until some wake or stop{why_not:?; *}", _ZRAM),
    "ksm_on": _error(
        "on: by timing, an agent can tell what is in another one's memory{why_not:?; *}", _KSM, up=Severity.WARNING
    ),
    "ksm_merged": _warning("off, but {pages:,} pages are still merged{why_not:?; *}", _KSM),
    # The host.
    "no_systemd": _error("PID 1 is {first}, not systemd: no service can be started"),
    "systemd_unknown": _warning("systemd is PID 1, but systemctl does not say which version"),
    "systemd_old": _error("systemd {version}; an installed Hive needs {oldest} or later", up=Severity.WARNING),
    "no_freezer": _error("{what}: agents are stopped by signals, which they can notice", up=Severity.WARNING),
    "no_cgroup_allowed": _warning(
        "no group may be made below {mount}: agents are stopped by signals",
        "{user_systemd:?systemd-run --user --scope -p Delegate=yes hive up}",
    ),
    "cgroup_controllers": _warning("v2 at {mount}, without {lacking}: such limits of agents are not enforced"),
    "cgroup_hybrid": _warning(
        "freezer in v2 at {mount}; {in_v1} in v1", "boot with systemd.unified_cgroup_hierarchy=1"
    ),
    "descriptors_few": _error("{whose} may open {files:,} files: too few for a Hive", _FILES, up_fix=_FILES_UP),
    "descriptors_low": _warning(
        "{whose} may open {files:,} files: room for some {connections:,} connections", _FILES, up_fix=_FILES_UP
    ),
    "clock_adrift": _warning(_ADRIFT, "{sudo}timedatectl set-ntp true"),
    "clock_adrift_unmanaged": _warning(f"{_ADRIFT}, unless this is a container whose host keeps it right"),
    "clock_behind": _warning(
        "{path} is {ahead_h:.1f} h ahead of the clock: that was set back, or was wrong at boot; "
        "schedules wait until it has caught up",
        "{sudo}timedatectl set-ntp true",
    ),
    # The checks themselves.
    "check_late": _warning("no answer within {limit_s:g} s", "{hive:doctor {check}}"),
    "check_failed": _error("{why}", "{hint}"),
    "check_blocked": _warning("this could not be looked at: {why}"),
    "check_broken": _warning("a fault in this check itself: {why}", "HIVE_DEBUG=1 {hive:doctor {check}}"),
}
