"""`hive config set` and `unset`: a changed hive.conf is checked as a whole, then put in place of the old one."""

from __future__ import annotations

import difflib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hive.errors import AS_ROOT, ConfigError, NotFound, NotPermitted, UsageError, did_you_mean
from hive.files.offline_audit import database_of, noted
from hive.host.files import KEEP, write_whole
from hive.settings.edit import Name, known_names, name_of, row_of, value_in, with_value, without_value
from hive.settings.file import FILE_MAX_BYTES, described_files, load_text

NEW_MODE = 0o644
PROXY, DAEMON, SANDBOX = "hive-proxy", "hive-daemon", "hive-sandbox"
BOUND = frozenset(
    {
        *("proxy.port", "proxy.ingress_port", "proxy.vsock", "proxy.listen", "inference.vsock_port"),
        *("runner.port", "runner.listen"),
    }
)
"""Settings of the proxy's listeners; on SIGHUP it takes over all others that it reads."""
ALSO_DAEMON = frozenset(
    {
        *("proxy.backend_concurrency", "proxy.cache_isolation", "proxy.first_byte_s"),
        *("proxy.responses_kept_mb", "proxy.responses_kept_days"),
    }
)
ALSO_PROXY = frozenset(
    {
        "inference.first_byte_s",
        *("inference.default_model", "inference.token_tracking", "inference.backend_limit_name", "inference.cloud"),
        *("pool.load_depth", "pool.load_wait_s"),
    }
)
DAEMONS = frozenset(
    {
        *(
            "inference",
            "sleep",
            "agents",
            "daemon",
            "api",
            "pool",
            "model",
            "lease",
            "jobs",
            "registry",
            "governance",
            "runner",
            "comfyui",
            "template",
        ),
        "adapters",
    }
)
ALSO_SANDBOX = frozenset({"agents.log_max_bytes"})


class Change(NamedTuple):
    """A change made, or to be made. `before`, `after`: as the file has them, None where it does not set it."""

    file: Path
    name: Name
    before: str | None
    after: str | None
    diff: str
    apply: list[str]


def set_value(file: Path, text: str, value: str, *, dry_run: bool) -> Change:
    """Sets `SECTION.KEY` in `file`, which is made where it is not there and its directory is.

    Raises UsageError (no such setting), ConfigError (the file would be wrong), NotPermitted, NotFound (its directory),
    StoreFull.
    """
    with _noted(file, "set_config", text, dry_run=dry_run) as about:
        name = _known(text)
        if not value.replace("\t", " ").isprintable():
            raise UsageError(f"{name}: a value is one line without control characters")
        change = _change(file, name, lambda before: with_value(before, name, value.strip()), dry_run=dry_run)
        about |= {"before": change.before, "after": change.after}
    return change


def unset_value(file: Path, text: str, *, dry_run: bool) -> Change:
    """Takes `SECTION.KEY` out of `file`: its default is in force again. Raises as `set_value` does."""
    with _noted(file, "unset_config", text, dry_run=dry_run) as about:
        name = _known(text)
        change = _change(file, name, lambda before: without_value(before, name), dry_run=dry_run)
        about |= {"before": change.before, "after": change.after}
    return change


def _noted(file: Path, act: str, setting: str, *, dry_run: bool) -> AbstractContextManager[dict[str, Any]]:
    """Notes a change of the file that a Hive reads by default; the owner of another file is not known here."""
    database = None if dry_run else database_of(file, uid=os.geteuid(), env=os.environ)
    return noted(database, act, target=setting, file=str(file))


def _elsewhere(name: Name) -> str:
    """Says what to do where the file has no place: no Hive is installed, and `hive up` reads none or another."""
    row = row_of(name)
    hint = "name another file with --config"
    if row is None or not row.at_runtime:
        return hint
    return f"{hint}, or change it in the Hive that runs: hive config runtime {name}=VALUE"


def _change(file: Path, name: Name, edit: Callable[[str], str], *, dry_run: bool) -> Change:
    real = Path(os.path.realpath(file))  # a link stays one
    if not real.parent.is_dir():
        raise NotFound(f"there is no directory {real.parent}", hint=_elsewhere(name))
    with _alone(real.parent, dry_run=dry_run):
        before, mode, owner = _read(real)
        after = edit(before)
        _refuse_elsewhere(file, name, is_new=f"[{name.section}]" not in before)
        load_text(after, path=file, env={}, model_files=described_files(file.parent))
        if after != before and not dry_run:
            write_whole(real, after.encode(), mode=mode, owner=owner)
    diff = "".join(
        difflib.unified_diff(before.splitlines(True), after.splitlines(True), str(file), f"{file} (new)", n=1)
    )
    return Change(file, name, value_in(before, name), value_in(after, name), diff, applied_by(name))


def _refuse_elsewhere(file: Path, name: Name, *, is_new: bool) -> None:
    """Raises ConfigError for a model or template that another file describes: no section of hive.conf adds to that."""
    kind, _, called = name.section.partition(" ")
    if kind not in ("model", "template") or not is_new:
        return
    found = load_text("", env={}, model_files=described_files(file.parent))
    described = found.settings.models if kind == "model" else found.settings.templates
    if called in described:
        key = "file" if kind == "model" else "python"
        where = found.origins[f"{name.section}.{key}"].where
        is_pin = name.key == "pin" and kind == "model"
        hint = f"set it there, or: hive model pin {called}" if is_pin else "set it there"
        raise ConfigError(f"{name}: {called} is described in {where}", hint=hint)


def applied_by(name: Name) -> list[str]:
    """The commands that put a change into effect on an installed Hive.

    >>> applied_by(Name("proxy", "queue_depth")), applied_by(Name("sleep", "check_s"))
    (['systemctl reload hive-proxy'], ['systemctl restart hive-daemon'])
    >>> applied_by(Name("inference", "speculative"))[1:]
    ['systemctl try-restart hive-inference-vllm', 'systemctl try-restart hive-inference-llama']
    """
    full, section = str(name), name.section.partition(" ")[0]
    servers = [kind for kind in ("vllm", "ollama", "llama") if name.key.startswith(f"{kind}_")]
    if name.key in ("speculative", "speculative_draft_tokens") and section == "inference":
        servers = ["vllm", "llama"]
    reload_proxy = (
        section in ("tenant", "fields", "budget", "task", "images")
        or section.startswith("grammar_")
        or full in ALSO_PROXY
        or (section == "model" and name.key == "first_byte_s")
    )
    reload_proxy = reload_proxy or (section == "proxy" and full not in BOUND)
    restarted = [
        (PROXY, full in BOUND),
        (SANDBOX, section == "sandbox" or full in ALSO_SANDBOX),
        (
            DAEMON,
            full in ALSO_DAEMON | {"sandbox.enabled"} or (section in DAEMONS and full not in BOUND),
        ),
        *(("hive-inference" if server == "ollama" else f"hive-inference-{server}", True) for server in servers),
    ]
    commands = [f"systemctl reload {PROXY}"] if reload_proxy else []
    commands += [f"systemctl reload {DAEMON}"] if section in ("budget", "task", "tenant") else []
    verb = "try-restart"  # an inference server that is not the chosen one stays stopped
    for unit, is_it in restarted:
        if is_it:
            commands.append(f"systemctl {verb if unit.startswith('hive-inference') else 'restart'} {unit}")
    return commands


def _known(text: str) -> Name:
    """Raises UsageError with the nearest name there is."""
    try:
        name = name_of(text)
    except ValueError:
        near = [known for known in known_names() if known.endswith(f".{text.strip()}")]
        hint = f"did you mean `{near[0]}`?" if near else "hive config show lists them"
        raise UsageError(f"{text!r} names no setting: expected SECTION.KEY", hint=hint) from None
    if row_of(name) is None and not name.section.startswith("fields "):
        hint = did_you_mean(str(name), known_names()) or "hive config show lists them"
        raise UsageError(f"there is no setting {name}", hint=hint)
    return name


def _read(file: Path) -> tuple[str, int, tuple[int, int]]:
    """Text, mode and owner. Raises ConfigError, NotPermitted."""
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            data = opened.read(FILE_MAX_BYTES + 1)
    except FileNotFoundError:
        return "", NEW_MODE, KEEP
    except PermissionError as error:
        raise NotPermitted(f"{file} cannot be read: {error.strerror}", hint=AS_ROOT) from None
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or len(data) > FILE_MAX_BYTES:
        raise ConfigError(f"{file} is no file of settings")
    try:
        # Kept byte for byte: no line end is translated.
        return data.decode(), stat.S_IMODE(found.st_mode), (found.st_uid, found.st_gid)
    except UnicodeDecodeError:
        raise ConfigError(f"{file}: not UTF-8") from None


@contextmanager
def _alone(directory: Path, *, dry_run: bool) -> Iterator[None]:
    """Makes two changes at once go one after the other: neither loses the other's."""
    if dry_run:
        yield
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
