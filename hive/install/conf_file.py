"""hive.conf as the installer writes it: every setting with its sentence, commented out with its default. Pure."""

from __future__ import annotations

import re
import textwrap
from typing import NamedTuple

from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import SECTIONS

WIDTH = 100
SET = {"sandbox.policy": "/etc/hive/sandbox.toml"}
"""Settings of an appliance instead of the default: the helper's rights are bounded from the first day."""
HEAD = """\
# hive.conf - the settings of Hive, hive.conf(5). What stands here behind a # is the default.
# `hive config check` says what is wrong with it, `hive config show --origin` what is in force and where it comes from.
#
# [tenant NAME] is what the agents of one tenant may have together, [task NAME] the models that answer requests for
# task:NAME, [fields TARGET] what becomes of fields of request bodies; all are described in hive.conf(5).
"""
_ANY_KEY = re.compile(r"\s*[#;]?\s*([a-z0-9_]+)\s*[=:]")
_SECTION = re.compile(r"\s*\[([^]]+)\]")


class New(NamedTuple):
    """A setting that a file of an older Hive does not have."""

    name: str
    default: str
    sentence: str


def text() -> str:
    """The whole file."""
    parts = [HEAD]
    for section, struct in SECTIONS.items():
        parts.append(f"\n[{section}]\n")
        parts.extend(_entry(row) for row in rows_of(section, struct).values())
    return "".join(parts)


def _entry(row: SettingRow) -> str:
    """
    >>> print(_entry(rows_of("proxy", SECTIONS["proxy"])["head_s"]), end="")
    <BLANKLINE>
    # A request head must be complete within this. (s)
    #head_s = 10
    """
    unit = f" ({row.unit})" if row.unit not in ("", "port") else ""
    later = "" if row.in_effect else " It has no effect yet."
    sentence = textwrap.fill(
        f"{row.sentence}{unit}{later}", WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False
    )
    chosen = SET.get(f"{row.section}.{row.key}")
    line = f"#{row.key} = {written(row.default)}" if chosen is None else f"{row.key} = {chosen}"
    return f"\n{sentence}\n{line.rstrip()}\n"


def said(name: str) -> str:
    """
    >>> said("sandbox.policy")
    '[sandbox] policy = /etc/hive/sandbox.toml'
    """
    section, _, key = name.partition(".")
    return f"[{section}] {key} = {SET[name]}"


def written(value: object) -> str:
    """A value as the file takes it.

    >>> written(True), written(0.9), written("")
    ('true', '0.9', '')
    """
    return str(value).lower() if isinstance(value, bool) else str(value)


def new_settings(found: str) -> list[New]:
    """The settings that `found`, a hive.conf, names neither as set nor as commented out.

    >>> [new.name for new in new_settings(text().replace("#head_s", "#other"))]
    ['proxy.head_s']
    """
    named: set[str] = set()
    section = ""
    for line in found.splitlines():
        if match := _SECTION.match(line):
            section = match[1].strip()
        elif match := _ANY_KEY.match(line):
            named.add(f"{section}.{match[1]}")
    rows = [row for section, struct in SECTIONS.items() for row in rows_of(section, struct).values()]
    return [
        New(name, written(row.default), row.sentence)
        for row in rows
        if (name := f"{row.section}.{row.key}") not in named
    ]
