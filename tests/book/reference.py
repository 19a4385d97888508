"""The pages of the book that are made from the code: `python -m tests.book.reference` writes them to docs/reference.

Settings from their table, commands from the tree of the command line, the API from its own description. Pure, but for
the writing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hive.api.openapi import TAGS, tag_of
from hive.cli.lazy import CommandTable, HiveCommand, LazyCommand, load
from hive.cli.main import HIVE
from hive.files.conf_edit import applied_by
from hive.settings.edit import Name
from hive.settings.file import NAMED
from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import SECTIONS, VARIABLES
from tests.api.described import WHOLE

REFERENCE = Path(__file__).parents[2] / "docs/reference"
MADE = "by `python -m tests.book.reference`; a test says when it is stale."
Schema = Mapping[str, Any]


def literal(text: str) -> str:
    """A text of ours as Markdown: what is between backticks stays, the rest has no marks and no tags.

    >>> literal("`a*b` is *not* <b>")
    '`a*b` is \\\\*not\\\\* &lt;b>'
    """
    parts = text.split("`")
    return "`".join(
        part if number % 2 else part.replace("*", "\\*").replace("<", "&lt;") for number, part in enumerate(parts)
    )


def code(text: str) -> str:
    """As code, whatever it holds.

    >>> code("a"), code("a`b")
    ('`a`', '`` a`b ``')
    """
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# --- settings ------------------------------------------------------------------------------------------------------

OF_SECTIONS = {
    "tenant": ("tenant NAME", "acme", "One section for each tenant."),
    "model": ("model NAME", "qwen3-8b", "One section for each model of the [pool](../pool.md)."),
    "task": ("task NAME", "summary", "One section for each [task](../tasks.md)."),
    "template": ("template NAME", "openai", "One section for each [template](../templates.md)."),
}
"""Kind of a section with a name → its head, a name that could be, and what there is to say."""


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        "Every key of `/etc/hive/hive.conf`, by section. A flag goes before the environment, that before what was",
        "changed while Hive runs (`hive config runtime`), that before the file, the file before the default.",
        "`hive config show --origin` says what is in force and where it comes from; `hive config set SECTION.KEY",
        "VALUE` changes the file. An installed Hive has the same as a man page, `man hive.conf`.",
        "",
        "*After a change of the file* has what puts it into effect on an installed Hive. Under `hive up` it is always",
        "a new start.",
        "",
        f"Made of the tables in `hive/settings` {MADE}",
    ]
    for section, struct in SECTIONS.items():
        lines += ["", f"## [{section}]"]
        for row in rows_of(section, struct).values():
            lines += _setting(row, section)
    for kind, (head, example, says) in OF_SECTIONS.items():
        lines += ["", f"## [{head}]", "", says]
        for row in rows_of(f"{kind} {example}", NAMED[kind].row).values():
            lines += _setting(row, head)
    lines += [
        "",
        "## [fields TARGET]",
        "",
        "Keys are fields of a request's body, values what becomes of them, for one dialect or kind of backend:",
        "[dialects](../dialects.md) says which words there are. After a change: `systemctl reload hive-proxy`.",
        "",
        "## Names in the environment that are no key's",
    ]
    for variable in VARIABLES:
        effect = "" if variable.in_effect else " It has no effect."
        lines += ["", f"### {variable.name}", "", f"*{literal(variable.expected)}*", ""]
        lines += [f"{literal(variable.sentence)}{effect}"]
    return "\n".join(lines) + "\n"


def _setting(row: SettingRow, head: str) -> Iterator[str]:
    unit = f", in {row.unit}" if row.unit not in ("", "port") else ""
    default = "empty by default" if row.default == "" else f"default {code(_written(row.default))}"
    names = [code(name.replace("acme", "NAME")) for name in row.variables]
    env = f"; {' or '.join(names)}" if names else ""
    yield from ("", f"### {head}.{row.key}" if " " not in head else f"### {head}: {row.key}", "")
    yield f"*{literal(row.expected)}{unit}*; {default}{env}"
    later = "" if row.in_effect else " It has no effect yet."
    yield from ("", f"{literal(row.sentence)}{later}", "")
    commands = applied_by(Name(row.section, row.key))
    after = ", ".join(code(command) for command in commands) or "the next start of what reads it"
    live = f" While Hive runs: `hive config runtime {row.section}.{row.key}=VALUE`." if row.at_runtime else ""
    yield f"After a change of the file: {after}.{live}"


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- commands ------------------------------------------------------------------------------------------------------

COMMON = {"as_json": "--json", "socket": "--socket", "state_dir": "--state-dir"}
"""Described once, at the top."""


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "Every command, as its own `--help` tells it; `hive help agent pause` is `hive agent pause --help`. An",
        "installed Hive has man pages, too (`man hive`, `man hive-agent`). A clone has only their sources: with",
        "`scdoc` on the machine, `scdoc < man/hive-agent.1.scd | man -l -` shows one.",
        "",
        "What reads or writes takes `--json`: one JSON object on stdout with `schema` and `version`; talk is on",
        "stderr. What talks to a Hive takes `--socket PATH` and `--state-dir DIR` (`HIVE_SOCKET`, `HIVE_STATE_DIR`):",
        "which one is meant. Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 not permitted, 5 dependency down,",
        "6 rolled back, 7 timeout, 130 interrupted; [errors](errors.md) has each error with its cause and its cure.",
        "",
        f"Made of the tree in `hive/cli` {MADE}",
    ]
    alone = {name: entry for name, entry in HIVE.entries.items() if isinstance(entry, LazyCommand)}
    lines += ["", "## hive"]
    for name, entry in alone.items():
        lines += _command((name,), entry)
    for name, group in HIVE.entries.items():
        if isinstance(group, CommandTable) and not group.hidden:
            lines += ["", f"## hive {name}", "", literal(group.sentence)]
            if group.default:
                lines += ["", f"`hive {name}` alone is `hive {name} {group.default}`."]
            for path, entry in _within(group, (name,)):
                lines += _command(path, entry)
    return "\n".join(lines) + "\n"


def _within(group: CommandTable, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], LazyCommand]]:
    for name, entry in group.entries.items():
        if isinstance(entry, CommandTable):
            yield from _within(entry, (*path, name))
        else:
            yield (*path, name), entry


def _command(path: tuple[str, ...], entry: LazyCommand) -> Iterator[str]:
    if entry.hidden:
        return
    command = load(path[-1], entry)
    name = f"hive {' '.join(path)}"
    context = command.context_class(command, info_name=name)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield from ("", f"### {name}", "", *_help(command.help or ""), "", "```text", usage, "```")
    if told := list(_options(command, context)):
        yield from ("", *told)
    _, _, examples = (command.epilog or "").partition("Examples:\n")
    yield from ("", "```console", *(_example(line) for line in examples.splitlines()), "```")


def _help(text: str) -> list[str]:
    """Paragraphs, each in one line."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.replace("\b", "").strip())]
    return "\n\n".join(map(literal, paragraphs)).split("\n")


def _options(command: HiveCommand, context: Any) -> Iterator[str]:
    for param, name, says in command.told(context):
        if param.name not in COMMON and "--help" not in param.opts:
            yield f"- {code(name)}: {literal(' '.join(says.split())) or '–'}"


def _example(line: str) -> str:
    """With a prompt, but for what continues the line before."""
    return f"$ {line.strip()}"


# --- API -----------------------------------------------------------------------------------------------------------

SHAPE = "#/components/schemas/"
LEFT_OUT = {"400", "401", "403", "429", "500", "503"}
"""Errors of every operation."""
MOST_FIELDS = 12
"""Of a shape without a name of its own, written within a line."""


def api_page() -> str:
    lines = [
        "# API reference",
        "",
        "Every operation of Hive's REST API and the shapes it takes and answers. [API](../api.md) says how it is used,",
        "who may, and what errors look like. `GET /api/openapi.json` of a running Hive is all of this as OpenAPI 3.1.",
        "",
        "A role may do what the ones before it may: viewer, operator, admin. Each operation may answer 400, 401, 403,",
        "429, 500 and 503; other errors are named. `?` after a field: it may be missing.",
        "",
        f"Made of the API's description {MADE}",
    ]
    by_tag: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, methods in WHOLE["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(tag_of(path), []).append((method.upper(), path, operation))
    for tag in sorted(by_tag):
        lines += ["", f"## {tag}", "", literal(TAGS[tag])]
        for method, path, operation in by_tag[tag]:
            lines += _operation(method, path, operation)
    lines += ["", "## Shapes"]
    for name, schema in WHOLE["components"]["schemas"].items():
        lines += _shape(name, schema)
    return "\n".join(lines) + "\n"


def _operation(method: str, path: str, operation: Schema) -> Iterator[str]:
    yield from ("", f"### {method} {path}", "", f"{literal(operation['summary'])} Role: {operation['x-hive-role']}.")
    if more := operation.get("description"):
        yield from ("", literal(more))
    told = []
    for param in operation.get("parameters", ()):
        if param["in"] != "path":
            where = "" if param["in"] == "query" else f" ({param['in']})"
            told.append(f"- {code(param['name'])}{where}: {brief(param['schema'])}. {literal(param['description'])}")
    if (body := operation.get("requestBody")) is not None:
        [content] = body["content"].values()
        told.append(f"- body: {brief(content['schema'])}{'' if body['required'] else ', or none'}")
    for status, answer in operation["responses"].items():
        if "content" in answer:
            kinds = [
                brief(content["schema"]) if kind == "application/json" else code(kind.partition(";")[0])
                for kind, content in answer["content"].items()
            ]
            told.append(f"- {status}: {' or '.join(kinds)}")
    errors = [status for status, answer in operation["responses"].items() if "content" not in answer]
    if others := [status for status in errors if status not in LEFT_OUT]:
        told.append(f"- errors: {', '.join(others)}")
    yield from ("", *told)


def _shape(name: str, schema: Schema) -> Iterator[str]:
    yield from ("", f"### {name}")
    if says := schema.get("description"):
        yield from ("", literal(says))
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not properties:
        yield from ("", brief(schema))
        return
    width = max(map(len, properties)) + 2
    yield from ("", "```text")
    for field, of in properties.items():
        yield f"{field + ('' if field in required else '?'):{width}}{brief(of, is_code=True)}"
    yield "```"


def brief(schema: Schema, *, is_code: bool = False) -> str:
    """A schema in a few words, as Markdown or within code.

    >>> brief({"type": "array", "items": {"$ref": "#/components/schemas/Event"}}), brief({"type": ["string", "null"]})
    ('list of [Event](#event)', 'string or null')
    >>> brief({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, is_code=True)
    '"a" | "b" or null'
    """
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(SHAPE)
        return name if is_code else f"[{name}](#{name.lower()})"
    for kind in ("anyOf", "oneOf", "allOf"):
        if kind in schema:
            return " or ".join(dict.fromkeys(brief(part, is_code=is_code) for part in schema[kind]))
    if "enum" in schema or "const" in schema:
        values = [json.dumps(value) for value in schema.get("enum", [schema.get("const")])]
        return " | ".join(values) if is_code else " or ".join(map(code, values))
    kinds = schema.get("type", "anything")
    if isinstance(kinds, list):
        return " or ".join(brief({**schema, "type": kind}, is_code=is_code) for kind in kinds)
    if kinds == "array":
        return f"list of {brief(schema['items'], is_code=is_code)}" if schema.get("items") else "list"
    if kinds == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {brief(schema['additionalProperties'], is_code=is_code)}"
    if len(schema.get("properties", ())) > MOST_FIELDS:
        return f"object of {len(schema['properties'])} fields, each of which `GET /api/openapi.json` describes"
    if kinds == "object" and schema.get("properties"):
        parts = (f"{name}: {brief(part, is_code=is_code)}" for name, part in schema["properties"].items())
        return f"object ({', '.join(parts)})"
    return str(kinds)


# --- writing -------------------------------------------------------------------------------------------------------

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "commands.md": commands_page,
    "api-reference.md": api_page,
}

if __name__ == "__main__":
    REFERENCE.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page())
