"""`sandbox.toml`, the root-owned file that says what the helper may run: what is in it, and whether to trust it."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from hive.domain import Limits, RuntimeKind
from hive.errors import ConfigError, did_you_mean


class Networks(msgspec.Struct, frozen=True, kw_only=True):
    """`[networks]`. `host`: process agents may be in the host's network; `bridge`: containers may have the engine's
    bridge; `taps`: names of tap devices for machines; `egress`: networks an agent's `egress` may be within."""

    host: bool = False
    bridge: bool = False
    taps: list[str] = []
    egress: list[str] = []


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file. A path's pattern that ends in `/` is everything below it; else `*` and `?` stay within one name.

    `programs`, `kernels`, `rootfs`, `copied_files` (source files copied into homes): the path as asked for *and* the
    file it leads to must be named. `mounts`: host path → `ro` or `rw`; the deepest above a mount decides. `uids`:
    first and last; None for any but Hive's own. `runtimes`: None for all. `limits`: what an agent may have at most,
    and has where it asks for none.
    """

    runtimes: list[RuntimeKind] | None = None
    programs: list[str] = []
    copied_files: list[str] = []
    images: list[str] = []
    kernels: list[str] = []
    rootfs: list[str] = []
    uids: tuple[int, int] | None = None
    mounts: dict[str, Literal["ro", "rw"]] = {}
    networks: Networks = Networks()
    limits: Limits = Limits()


class Policy(Document, frozen=True, kw_only=True):
    """The document, where it was read from, and in which line each of its keys stands."""

    path: str = "sandbox.toml"
    lines: dict[str, int] = {}


def load(path: Path) -> Policy:
    """The policy at `path`. Raises ConfigError where it cannot be read, understood, or trusted: it and its directory
    must be root's or this user's, and writable by no other."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot read the policy {path}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"the policy {path} is no file")
        _check_trusted(path, found)
        for directory in (path.parent, path.resolve().parent):  # of the name, and where a link leads
            _check_trusted(directory, os.stat(directory))
        content = file.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None
    return parse(text, path=str(path))


def _check_trusted(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to uid {found.st_uid}", hint=f"chown root: {path}")
    is_sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX  # of a file that bit means nothing
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        raise ConfigError(f"{path} can be written by others than its owner", hint=f"chmod go-w {path}")


def parse(text: str, *, path: str = "sandbox.toml") -> Policy:
    """The policy in a TOML document. Raises ConfigError with the line, and the nearest name of an unknown key."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: no TOML: {error}") from None
    lines = {key: line for key in _keys(document) if (line := _line(text, key))}
    _check_known(document, path, lines)
    try:
        policy = msgspec.convert({**document, "path": path, "lines": lines}, Policy)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`").partition("[")[0]
        raise ConfigError(f"{_at(path, lines, key)}{key}: {reason[:1].lower()}{reason[1:]}") from None
    for key, problem in _problems(policy):
        raise ConfigError(f"{_at(path, lines, key)}{key}: {problem}")
    return policy


def _keys(document: dict[str, Any]) -> Iterator[str]:
    """Every key, those of tables as `table.key` too."""
    for key, value in document.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in value)


def _line(text: str, key: str) -> int:
    """The line that sets `key` or opens its table; 0 where that is not found. tomllib does not say."""
    table, _, name = key.rpartition(".") if key.partition(".")[0] in _TABLES else ("", "", key)
    start = 0
    if table and (opened := re.search(rf"^\s*\[\s*{table}\s*\]", text, re.MULTILINE)):
        start = opened.end()
    dotted = rf"(?:{table}\s*\.\s*)?" if table else ""
    found = re.compile(rf"^\s*(?:\[\s*)?{dotted}[\"']?{re.escape(name)}[\"']?\s*[=.\]]", re.MULTILINE).search(
        text, start
    )
    return text.count("\n", 0, found.end()) + 1 if found else 0


_TABLES: dict[str, type[msgspec.Struct] | None] = {"networks": Networks, "limits": Limits, "mounts": None}
"""Tables of the file → what may be in them; None for paths."""


def _check_known(document: dict[str, Any], path: str, lines: dict[str, int]) -> None:
    for key in _keys(document):
        table, _, name = key.partition(".")
        struct = _TABLES.get(table) if name else Document
        if struct is None or (name or table) in struct.__struct_fields__:
            continue
        known = struct.__struct_fields__
        hint = did_you_mean(name or table, known) or f"known are {', '.join(known)}"
        raise ConfigError(f"{_at(path, lines, key)}{key}: no such key", hint=hint)


def _at(path: str, lines: dict[str, int], key: str) -> str:
    return f"{path} line {lines[key]}: " if key in lines else f"{path}: "


def _problems(policy: Policy) -> Iterator[tuple[str, str]]:
    """(key, what is wrong with it) beyond types."""
    for key in ("programs", "copied_files", "kernels", "rootfs", "mounts"):
        for pattern in getattr(policy, key):
            if not pattern.startswith("/"):
                yield key, f"{pattern!r} is no full path"
    for network in policy.networks.egress:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            yield "networks.egress", str(error)
    if policy.uids is not None and not 0 < policy.uids[0] <= policy.uids[1]:
        yield "uids", "expected the first and the last, both above 0"
    for name in Limits.__struct_fields__:
        value = getattr(policy.limits, name)
        if value is not None and value <= 0:
            yield f"limits.{name}", f"{value:g} is not above 0"
