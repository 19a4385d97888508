"""The part of an agent that an operator may set: read from TOML, checked at every entrance, written back as TOML."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hive.budgets import BudgetKind
from hive.domain import (
    PROGRAM_PATH,
    AgentSpec,
    DockerSpec,
    FirecrackerSpec,
    Limits,
    RestartPolicy,
    RuntimeKind,
    SleepDepth,
    is_name,
    near_name,
)
from hive.errors import BadRequest, did_you_mean
from hive.link.script_form import PLAIN as PLAIN
from hive.link.script_form import SCRIPT as SCRIPT

COMMAND_MAX_BYTES = 128 * 1024
"""Linux takes 128 KiB for one argument and more for all (execve(2)); an agent needs less."""
ENV_MAX_BYTES = 64 * 1024
PROMPT_MAX_BYTES = 256 * 1024
"""Of a system prompt in UTF-8: some 64,000 tokens, half of the longest context in common use."""
TOML_MAX_BYTES = 1024 * 1024
IDLE_MAX_S = 365 * 24 * 3600.0
TOKENS_MAX = 10**15
CIDS = range(3, 2**32 - 1)
"""0 to 2 are the hypervisor's and this machine's own, the last one stands for any (vsock(7))."""

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODEL = re.compile(r"[!-~]{1,255}")
_INBOX = re.compile(r"/[!-~]{0,254}")
_IMAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._/:@-]{0,254}")
_MOUNT = re.compile(r"/[^:\0]*:/[^:\0]*(:ro)?")
_INTERFACE = re.compile(r"[!-.0-~]{1,15}")
_RESERVED_PREFIXES = ("HIVE_", "OPENAI_")
_RESERVED = frozenset({"OLLAMA_HOST"})
"""Set by Hive itself: they are how an agent reaches the model."""

_SEED_NAMES = {
    "inferenceTier": "tier",
    "inference_tier": "tier",
    "preferredModel": "model",
    "preferred_model": "model",
    "tenantId": "tenant",
    "idleS": "idle_s",
    "autoSleepIdleSeconds": "idle_s",
    "restartPolicy": "restart",
    "vsockCID": "cid",
    "systemPrompt": "system_prompt",
    "prewarmOnStart": "prewarm_on_start",
}
"""Spellings of the original specification."""

_TYPES = {
    "int | null": "a whole number",
    "float | null": "a number",
    "str | null": "a string",
    "array": "an array",
    "object": "a table",
    "str": "a string",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
"""msgspec's names for types → TOML's."""

FindProgram = Callable[[str], str | None]


def find_program(name: str) -> str | None:
    """The absolute path of the executable file `name` stands for, None where there is none."""
    if "/" in name:
        return name if os.path.isabs(name) and os.path.isfile(name) and os.access(name, os.X_OK) else None
    return shutil.which(name, path=PROGRAM_PATH)


def check(spec: AgentSpec, *, find: FindProgram = find_program) -> AgentSpec:
    """`spec` with its program's full path. Raises BadRequest that names the field and what is wrong with it.

    >>> check(AgentSpec(name="Bob", command=["/bin/true"]))
    Traceback (most recent call last):
    hive.errors.BadRequest: name: 'Bob' is no name; a letter a-z, then up to 39 of a-z, 0-9 and -
    """
    _check_name("name", spec.name)
    _check_name("tenant", spec.tenant)
    if spec.template is not None:
        _check_name("template", spec.template)
        if spec.runtime is not RuntimeKind.PROCESS and spec.runtime is not RuntimeKind.EXTERNAL:
            raise BadRequest(f"template: the runtime is {spec.runtime}", hint="only the runtime process takes one")
    if spec.port is not None and not 1 <= spec.port <= 65535:
        raise BadRequest(f"port: {spec.port} is not from 1 to 65535")
    if spec.idle_s is not None and not 0 <= spec.idle_s <= IDLE_MAX_S:
        raise BadRequest(f"idle_s: {spec.idle_s:g} is not from 0 to {IDLE_MAX_S:.0f} seconds; 0 is never")
    if spec.cid is not None and spec.cid not in CIDS:
        raise BadRequest(f"cid: {spec.cid} is not from {CIDS[0]} to {CIDS[-1]}")
    if spec.model is not None and not _MODEL.fullmatch(spec.model):
        raise BadRequest("model: expected 1 to 255 printable characters without spaces")
    for kind in BudgetKind:
        if (limit := getattr(spec, kind.value)) is not None and not 1 <= limit <= TOKENS_MAX:
            raise BadRequest(f"{kind}: {limit} is not from 1 to {TOKENS_MAX} tokens", hint="leave it out for no limit")
    if spec.deepest is SleepDepth.AWAKE:
        raise BadRequest("deepest: light or deep; idle_s = 0 keeps an agent awake")
    if not _INBOX.fullmatch(spec.inbox):
        raise BadRequest(f"inbox: {spec.inbox[:60]!r} is no path; like /inbox")
    _check_limits(spec.limits)
    _check_egress(spec.egress)
    _check_env(spec.env)
    _check_prompt(spec.system_prompt)
    if spec.runtime is RuntimeKind.EXTERNAL:
        spec = _external(spec)
    return msgspec.structs.replace(spec, command=_check_runtime(spec, find))


def _external(spec: AgentSpec) -> AgentSpec:
    """Hive neither starts nor stops nor freezes it: there is nothing to say of how. Whether it may ask outlasts Hive.

    >>> check(AgentSpec(name="a", runtime=RuntimeKind.EXTERNAL, port=80))
    Traceback (most recent call last):
    hive.errors.BadRequest: port: an external agent has none that Hive knows
    """
    taken = AgentSpec(
        name=spec.name,
        runtime=spec.runtime,
        tier=spec.tier,
        tenant=spec.tenant,
        model=spec.model,
        idle_s=0.0,
        restart=RestartPolicy.UNLESS_STOPPED,
        system_prompt=spec.system_prompt,
        prewarm_on_start=spec.prewarm_on_start,
        cloud=spec.cloud,
        tokens_per_day=spec.tokens_per_day,
        tokens_per_month=spec.tokens_per_month,
        cloud_tokens_per_day=spec.cloud_tokens_per_day,
    )
    plain = AgentSpec(name=spec.name)
    for field in changed_fields(taken, spec):
        if getattr(spec, field) != getattr(plain, field):
            raise BadRequest(f"{field}: an external agent has none that Hive knows", hint="remove it")
    return taken


def _check_runtime(spec: AgentSpec, find: FindProgram) -> list[str]:
    """Checks the tables of the runtimes: its own is there and no other. Returns the command as the runtime takes it."""
    for kind, table in ((RuntimeKind.DOCKER, spec.docker), (RuntimeKind.FIRECRACKER, spec.firecracker)):
        if table is None and spec.runtime is kind:
            raise BadRequest(f"{kind}: missing", hint=f"the runtime {kind} needs it")
        if table is not None and spec.runtime is not kind:
            raise BadRequest(f"{kind}: the runtime is {spec.runtime}", hint=f"only the runtime {kind} takes it")
    if spec.docker is not None:
        _check_docker(spec.docker)
        _check_text("command", spec.command)
        return spec.command
    if spec.firecracker is not None:
        _check_firecracker(spec.firecracker)
        if spec.command:
            raise BadRequest("command: a virtual machine runs what its image says", hint="remove it")
        if spec.env:
            raise BadRequest("env: nothing of it reaches a virtual machine", hint="put it into the image")
        return []
    if spec.runtime is RuntimeKind.EXTERNAL:
        return []
    return _check_command(spec.command, find) if spec.template is None else _check_script(spec.command, find)


def _check_docker(docker: DockerSpec) -> None:
    if not _IMAGE.fullmatch(docker.image):
        raise BadRequest(f"docker: image: {docker.image[:80]!r} is no image; like debian:12 or an id")
    for mount in docker.mounts:
        if not _MOUNT.fullmatch(mount) or ".." in mount.split(":")[0].split("/"):
            raise BadRequest(f"docker: mounts: {mount[:80]!r}: expected /host/path:/path/inside or …:ro")
    for path in docker.tmpfs:
        if not path.startswith("/"):
            raise BadRequest(f"docker: tmpfs: {path[:80]!r} is not absolute")
    _check_text("docker: user", [docker.user])


def _check_firecracker(machine: FirecrackerSpec) -> None:
    paths = [("kernel", machine.kernel), ("rootfs", machine.rootfs)]
    for field, path in [*paths, ("initrd", machine.initrd)] if machine.initrd else paths:
        if not os.path.isabs(path):
            raise BadRequest(f"firecracker: {field}: {path[:80]!r} is not absolute")
        _check_text(f"firecracker: {field}", [path])
    if not 1 <= machine.vcpus <= 32:
        raise BadRequest(f"firecracker: vcpus: {machine.vcpus} is not from 1 to 32")
    if not 16 <= machine.memory_mb <= 1 << 20:
        raise BadRequest(f"firecracker: memory_mb: {machine.memory_mb} is not from 16 to {1 << 20}")
    if machine.tap and not _INTERFACE.fullmatch(machine.tap):
        raise BadRequest(f"firecracker: tap: {machine.tap[:40]!r} is no network device")


def _check_limits(limits: Limits) -> None:
    bounds: tuple[tuple[str, float | None, float, float], ...] = (
        ("memory_mb", limits.memory_mb, 4, 1 << 24),
        ("cpu", limits.cpu, 0.01, 4096),
        ("pids", limits.pids, 1, 1 << 22),
        ("files", limits.files, 16, 1 << 20),
    )
    for field, value, least, most in bounds:
        if value is not None and not least <= value <= most:
            raise BadRequest(f"limits: {field}: {value:g} is not from {least:g} to {most:.0f}")


def _check_egress(egress: list[str] | None) -> None:
    if not egress:
        return
    import ipaddress  # 3 ms of start-up that few agents pay

    for network in egress:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise BadRequest(f"egress: {error}", hint="networks like 192.0.2.0/24; [] is nowhere") from None


def from_toml(text: str) -> AgentSpec:
    """The spec a TOML document describes, its values not yet checked beyond their types.

    The camelCase keys of the original specification are accepted, and its JSON: no TOML begins with a brace. Raises
    BadRequest with the line where it knows it.
    """
    if len(text) > TOML_MAX_BYTES:
        raise BadRequest(f"larger than {TOML_MAX_BYTES} bytes")
    fields: dict[str, Any] = {}
    for key, value in _document(text).items():
        name = _SEED_NAMES.get(key, key)
        where = _where(text, key)
        if name not in AgentSpec.__struct_fields__:
            raise BadRequest(f"{where}{key}: no such key{_nearest(key)}")
        if name in fields:
            raise BadRequest(f"{where}{key}: says the same as another key ({name})")
        fields[name] = _unwrapped(name, value)
    try:
        return msgspec.convert(fields, AgentSpec)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        key = re.split(r"[.\[`]", path.lstrip("."))[0]
        raise BadRequest(f"{_where(text, key)}{key + ': ' if key else ''}{_in_words(reason)}") from None


def _document(text: str) -> dict[str, Any]:
    kind = "JSON" if text.lstrip()[:1] == "{" else "TOML"
    try:
        found: dict[str, Any] = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except ValueError as error:  # of either
        raise BadRequest(f"no {kind}: {error}") from None
    except RecursionError:
        raise BadRequest(f"no {kind}: nested too deeply") from None
    return found


def check_toml(text: str) -> AgentSpec:
    """`from_toml`, then `check`. Raises BadRequest, with the line of the field that is wrong."""
    spec = from_toml(text)
    try:
        return check(spec)
    except BadRequest as error:
        field = error.message.partition(":")[0]
        keys = [field, *(key for key, name in _SEED_NAMES.items() if name == field)]
        where = next((found for key in keys if (found := _where(text, key))), "")
        raise BadRequest(f"{where}{error.message}", hint=_in_toml(error)) from None


def _in_toml(error: BadRequest) -> str:
    """Its hint for a reader that writes TOML.

    >>> _in_toml(BadRequest("docker: missing")), _in_toml(BadRequest("port: 0", hint="another"))
    ('runtime = "docker" needs a table [docker]', 'another')
    """
    field, _, wrong = error.message.partition(": ")
    if error.message == "command: empty":
        return "say what to run: command = ['/usr/bin/python3', '/srv/agent.py']"
    if wrong == "missing":
        return f'runtime = "{field}" needs a table [{field}]'
    return f'runtime = "{field}"' if wrong.startswith("the runtime is ") else error.hint


def to_toml(spec: AgentSpec) -> str:
    """TOML that `from_toml` reads back as an equal spec; what has its default is left out."""
    import tomli_w  # only `export` pays for it

    given, defaults = _given(msgspec.to_builtins(spec)), _given(msgspec.to_builtins(AgentSpec(name="")))
    kept = {key: value for key, value in given.items() if key == "name" or value != defaults.get(key)}
    return tomli_w.dumps(kept)


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: what is None is left out, in nested tables too."""
    return {
        key: _given(value) if isinstance(value, dict) else value for key, value in table.items() if value is not None
    }


def changed_fields(old: AgentSpec, new: AgentSpec) -> list[str]:
    """Names of the fields that differ, in the order of the spec.

    >>> changed_fields(AgentSpec(name="a", command=["x"]), AgentSpec(name="a", command=["x"], port=80))
    ['port']
    """
    return [name for name in AgentSpec.__struct_fields__ if getattr(old, name) != getattr(new, name)]


def _check_name(field: str, name: str) -> None:
    if not is_name(name):
        raise BadRequest(
            f"{field}: {name[:60]!r} is no name; a letter a-z, then up to 39 of a-z, 0-9 and -",
            hint=f"`{near_name(name[:60]) or 'alice-2'}` would do",
        )


def _check_command(command: list[str], find: FindProgram) -> list[str]:
    if not command or not command[0]:
        raise BadRequest("command: empty", hint="say what to run, with the program's full path")
    _check_text("command", command)
    if sum(len(_encoded("command", part)) + 1 for part in command) > COMMAND_MAX_BYTES:
        raise BadRequest(f"command: longer than {COMMAND_MAX_BYTES} bytes")
    if "/" in command[0] and not os.path.isabs(command[0]):
        raise BadRequest(
            f"command: {command[0]!r} is relative; agents run in a directory of their own",
            hint="give the program's full path",
        )
    program = find(command[0])
    if program is None:
        raise _no_program(command[0])
    return [program, *command[1:]]


def _check_script(command: list[str], find: FindProgram) -> list[str]:
    """The command of a template's agent, as it is but for the full path of another program than Python."""
    words = command[1:] if command[:1] and command[0] in PLAIN else command
    is_script = len(words) < len(command) or (words[:1] and (words[0].startswith("-") or words[0].endswith(SCRIPT)))
    if not is_script:
        return _check_command(command, find)
    _check_text("command", command)
    if sum(len(_encoded("command", part)) + 1 for part in command) > COMMAND_MAX_BYTES:
        raise BadRequest(f"command: longer than {COMMAND_MAX_BYTES} bytes")
    if words and not words[0].startswith("-"):
        _check_file(words[0])
    return command


def _check_file(script: str) -> None:
    """Raises BadRequest for a script that Python will not find, as far as that can be seen from here."""
    if not os.path.isabs(script):
        raise BadRequest(
            f"command: {script!r} is relative; agents run in a directory of their own",
            hint="give the script's full path",
        )
    try:
        is_directory = stat.S_ISDIR(os.stat(script).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise BadRequest(f"command: there is no {script}") from None
    except OSError:
        return  # the agent's user may read what this one may not
    if is_directory:
        raise BadRequest(f"command: {script!r} is a directory")


def _no_program(name: str) -> BadRequest:
    if "/" not in name:
        return BadRequest(f"command: no such program: {name!r}", hint=f"looked for in {PROGRAM_PATH}")
    if os.path.isdir(name):
        return BadRequest(f"command: {name!r} is a directory")
    if os.path.exists(name):
        return BadRequest(
            f"command: {name!r} is not executable",
            hint="make it so (chmod +x), or name its interpreter first, like /usr/bin/python3",
        )
    return BadRequest(f"command: no such program: {name!r}")


def _check_env(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise BadRequest(f"env: {name[:60]!r} is no environment name")
        if name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
            raise BadRequest(f"env: {name} is set by Hive")
        _check_text(f"env: {name}", [value])
    if sum(len(name) + len(_encoded(f"env: {name}", value)) + 2 for name, value in env.items()) > ENV_MAX_BYTES:
        raise BadRequest(f"env: larger than {ENV_MAX_BYTES} bytes")


def _check_prompt(prompt: str | None) -> None:
    if prompt is None:
        return
    if not prompt:
        raise BadRequest("system_prompt: empty", hint="leave it out where there is none")
    _check_text("system_prompt", [prompt])
    if len(_encoded("system_prompt", prompt)) > PROMPT_MAX_BYTES:
        raise BadRequest(f"system_prompt: longer than {PROMPT_MAX_BYTES} bytes")


def _check_text(field: str, texts: Iterable[str]) -> None:
    if any("\0" in text for text in texts):
        raise BadRequest(f"{field}: contains a NUL")


def _encoded(field: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{field}: not UTF-8") from None


def _unwrapped(name: str, value: object) -> object:
    """The original specification writes `model = { name = "…" }`."""
    if name == "model" and isinstance(value, dict) and set(value) == {"name"}:
        return value["name"]
    return value


def _in_words(reason: str) -> str:
    """msgspec's sentence with TOML's names for types.

    >>> _in_words("Expected `array`, got `str`"), _in_words("Object missing required field `name`")
    ('expected an array, got a string', 'required key `name` is missing')
    """
    if (missing := re.fullmatch("Object missing required field (`.*`)", reason)) is not None:
        return f"required key {missing[1]} is missing"
    reason = reason.replace("Invalid enum value", "unknown value")
    for ours, theirs in _TYPES.items():
        reason = reason.replace(f"`{ours}`", theirs)
    return reason[:1].lower() + reason[1:]


def _where(text: str, key: str) -> str:
    """`line 3: ` of the first line that sets `key` or opens its table; tomllib does not say where a value stood."""
    found = re.search(rf"^\s*(?:\[\s*)?[\"']?{re.escape(key)}[\"']?\s*(?:[=.\]])", text, re.MULTILINE) if key else None
    if found is None:
        return ""
    start = found.start() + len(found[0]) - len(found[0].lstrip())
    return f"line {text.count(chr(10), 0, start) + 1}: "


def _nearest(key: str) -> str:
    fields = AgentSpec.__struct_fields__
    return "; " + (did_you_mean(key, [*fields, *_SEED_NAMES]) or f"known are {', '.join(fields)}")
