"""One setting changed in the text of a hive.conf; every other line stays as it is. Pure.

What counts as a section and as a key is what `file.read` says: comments are whole lines.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hive.settings.file import NAMED, ConfLine, named_section, read
from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import SECTIONS

_KEY_LINE = re.compile(r"(\s*[^=:\s][^=:]*?\s*[=:]\s*)(.*?)(\s*)")
_COMMENTED = re.compile(r"\s*[#;]\s*([^=:\s][^=:]*?)\s*[=:].*")


class Name(NamedTuple):
    """`section.key`: `proxy.port`, `tenant acme.weight`, `fields /v1/messages.stream_options.x`."""

    section: str
    key: str

    def __str__(self) -> str:
        return f"{self.section}.{self.key}"


def name_of(text: str) -> Name:
    """Takes a name apart: the section stands before the first dot; of a model or a task, whose name may have dots,
    before the last. Raises ValueError where there is none.

    >>> name_of("tenant acme.weight"), name_of("model llama-3.1.pin")
    (Name(section='tenant acme', key='weight'), Name(section='model llama-3.1', key='pin'))
    """
    text = text.strip()
    section, dot, key = (
        text.rpartition(".") if text.startswith(("model ", "task ", "template ")) else text.partition(".")
    )
    if not (dot and section.strip() and key.strip()):
        raise ValueError("expected SECTION.KEY")
    return Name(" ".join(section.split()), key.strip())


def row_of(name: Name) -> SettingRow | None:
    """Its row in the table of settings; None where there is none, as for `fields`."""
    kind, named = named_section(name.section)
    struct = NAMED[kind].row if named and kind in NAMED else SECTIONS.get(name.section)
    return None if struct is None else rows_of(name.section, struct).get(name.key)


def known_names() -> list[str]:
    """Every `section.key` there is, those of tenants, models, tasks and templates apart."""
    return [f"{section}.{key}" for section, struct in SECTIONS.items() for key in rows_of(section, struct)]


def value_in(text: str, name: Name) -> str | None:
    """Its value as the text has it; None where it does not."""
    found = _line_of(text, name)
    return None if found is None else found.value


def with_value(text: str, name: Name, value: str) -> str:
    """The text in which `name` is `value`: in its line, in place of its commented default, or at its section's end.

    >>> with_value("[proxy]\\n# The port.\\n#port = 1\\n", Name("proxy", "port"), "2")
    '[proxy]\\n# The port.\\nport = 2\\n'
    """
    lines = text.split("\n")
    if (found := _line_of(text, name)) is not None:
        match = _KEY_LINE.fullmatch(lines[found.number - 1])
        assert match is not None
        lines[found.number - 1] = f"{match[1].rstrip()} {value}".rstrip() + _end(lines[found.number - 1])
        return "\n".join(lines)
    line = f"{name.key} = {value}".rstrip()
    spans = _spans(text, name.section)
    for first, last in spans:
        for number in range(first, last):
            if (match := _COMMENTED.fullmatch(lines[number])) and match[1] == name.key:
                lines[number] = line + _end(lines[number])
                return "\n".join(lines)
    if not spans:
        return (
            text
            + ("" if not text or text.endswith("\n") else "\n")
            + ("\n" if text else "")
            + f"[{name.section}]\n{line}\n"
        )
    first, last = spans[-1]
    while last > first and not lines[last - 1].strip():
        last -= 1
    lines.insert(last, line + _end(lines[first - 1]))
    return "\n".join(lines) if last < len(lines) - 1 else "\n".join(lines) + "\n"


def without_value(text: str, name: Name) -> str:
    """The text that does not set `name`: its line becomes the commented default where a comment explains it, else goes.

    >>> without_value("[proxy]\\n# The port.\\nport = 2\\n", Name("proxy", "head_s"))
    '[proxy]\\n# The port.\\nport = 2\\n'
    """
    found = _line_of(text, name)
    if found is None:
        return text
    lines, number = text.split("\n"), found.number - 1
    row = row_of(name)
    if row is not None and name.section in SECTIONS and number and lines[number - 1].lstrip()[:1] in ("#", ";"):
        default = str(row.default).lower() if isinstance(row.default, bool) else str(row.default)
        lines[number] = f"#{name.key} = {default}".rstrip() + _end(lines[number])
    else:
        del lines[number]
    return "\n".join(lines)


def _line_of(text: str, name: Name) -> ConfLine | None:
    lines, _ = read(text, "", [])
    return next((line for line in lines if (_same(line.section), line.key) == name), None)


def _same(section: str) -> str:
    return " ".join(section.split())


def _spans(text: str, section: str) -> list[tuple[int, int]]:
    """Spans of the section, one per place: its first line behind the head, and the line behind its last; from 0."""
    _, sections = read(text, "", [])
    count = len(text.split("\n"))
    starts = [number for number, _ in sections]
    ends = [number - 1 for number in starts[1:]] + [count] * bool(starts)
    return [(number, end) for (number, name), end in zip(sections, ends, strict=True) if _same(name) == section]


def _end(line: str) -> str:
    """The part of a line end before the newline, in files with Windows line ends."""
    return "\r" if line.endswith("\r") else ""
