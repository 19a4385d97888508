"""hive.conf, the environment and the flags become `Settings`; whatever is wrong is said with file, line and key.

configparser does the same syntax but forgets where a value stood, so the lines are read here.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hive.budgets import zone_of
from hive.domain import is_name
from hive.errors import ConfigError, did_you_mean
from hive.settings.field_rules import EVERYWHERE, TARGETS, field_name, parse_line
from hive.settings.pool import OLLAMA, REMOTE, ModelRow, as_ollama, slot_id, why_no_draft, why_not_described
from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import NO_SETTINGS, SECTIONS, VARIABLES, Settings, TenantRow
from hive.settings.tasks import NO_TASK, TASK_NAME, TaskRow, wrong_tasks
from hive.settings.templates import NO_TEMPLATE, TemplateRow, env_line, why_not_template

QUEUE_TIMEOUT, TENANT_DEFAULT, RATE_DEFAULT = "QUEUE_TIMEOUT_MS", "TENANT_RATE_LIMIT_default", "DEFAULT_RATE_LIMIT"
"""Names of the original specification that are translated."""
_TENANT_VARIABLE = re.compile(rf"TENANT_({'|'.join(rows_of('tenant', TenantRow)).upper()})_(.*)")
"""The environment's name for what one tenant may have: `TENANT_RATE_LIMIT_acme`."""
NO_TENANT = "a tenant's name is a letter a-z, then up to 39 of a-z, 0-9 and -"
NO_MODEL = "a model's name is a letter or digit, then up to 199 of A-Z, a-z, 0-9 and . _ - : / @ +"
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,199}")
DEFAULT_FILE = Path("/etc/hive/hive.conf")
MODELS_D = "models.d"
"""Directory beside hive.conf with descriptions of models and tasks, in TOML."""
TEMPLATES_D = "templates.d"
"""The same of templates."""
IN_TOML = ("model", "task", "template")
"""Kinds of sections that a file of these two may have."""
LISTS = {
    ("model", "gpus"): ", ",
    ("task", "models"): " | ",
    ("task", "step_down_on"): ", ",
    ("template", "imports"): ", ",
    ("template", "warm"): ", ",
}
"""Keys that may be a list of words there, and what stands between these in hive.conf."""
FILE_MAX_BYTES = 1024 * 1024

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_KEY = re.compile(r"([^=:\s][^=:]*?)\s*[=:]\s*(.*)")


class ConfLine(msgspec.Struct, frozen=True):
    """One `key = value` of a file, with the section it stands in."""

    number: int
    section: str
    key: str
    value: str


class SettingOrigin(msgspec.Struct, frozen=True):
    """The origin of a value. `source`: default, file, environment or flag; `where`: its line or name."""

    source: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.source} {self.where}".rstrip()


DEFAULT = SettingOrigin("default")


RULES = "governance.toml"
"""Beside hive.conf: who signs operations."""


def rules_file(file: Path | None) -> Path:
    """The file of the rules that belongs to this hive.conf; None: to the installed one."""
    return (file or DEFAULT_FILE).with_name(RULES)


class Loaded(msgspec.Struct, frozen=True):
    """Settings with the origin of each value by `section.key`; `file` is None where none was read."""

    settings: Settings
    origins: dict[str, SettingOrigin]
    file: Path | None = None


def load(
    file: Path | None = None,
    *,
    env: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """The settings in force: flag > environment > file > default.

    `file` None reads /etc/hive/hive.conf where there is one. `flags` are values by `section.key`; None is unset.
    Raises ConfigError that names every problem, one a line.
    """
    path = file if file is not None else (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
    text = "" if path is None else _text(path)
    more = [] if path is None else described_files(path.parent)
    return load_text(text, path=path, env=env, flags=flags, model_files=more)


def load_text(
    text: str,
    *,
    path: Path | None = None,
    env: Mapping[str, str],
    flags: Mapping[str, object] | None = None,
    model_files: Iterable[Path] = (),
) -> Loaded:
    """`load` where the file's text is already here; `path` only names it in messages. `model_files`: of models.d and
    templates.d."""
    draft = _Draft(str(path) if path is not None else "hive.conf")
    draft.take_file(text)
    for file in model_files:
        for kind, tables in _tables_in(file, draft.problems).items():
            draft.take_tables(kind, tables, str(file))
    draft.check_models()
    draft.check_templates()
    draft.take_environment(env)
    draft.take_flags(flags or {})
    draft.check_zone()
    draft.check_tasks()
    if draft.problems:
        raise ConfigError("\n".join(sorted(draft.problems, key=_line_of)))
    return Loaded(draft.settings(), draft.origins, path)


def described_files(directory: Path) -> list[Path]:
    """The files of models.d, then of templates.d, in the directory of a hive.conf."""
    return [file for name in (MODELS_D, TEMPLATES_D) for file in model_files(directory / name)]


def model_files(directory: Path) -> list[Path]:
    """The files of one of these, by name: regular ones that end with .toml and do not begin with a dot."""
    try:
        found = sorted(directory.iterdir())
        return [path for path in found if path.suffix == ".toml" and path.name[0] != "." and path.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{directory}: {error.strerror}", hint="it must be readable, or not there") from None


def _tables_in(file: Path, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The tables `[model."NAME"]`, `[task."NAME"]` and `[template."NAME"]` of a file, by kind; what is wrong with it
    is added to `problems`."""
    try:
        tables = tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        problems.append(f"{file}: {error}")
        return {}
    except ConfigError as error:
        problems.append(error.message)
        return {}
    for key in tables.keys() - set(IN_TOML):
        problems.append(f'{file}: [{key}]: expected [model."NAME"], [task."NAME"] or [template."NAME"]')
    found: dict[str, dict[str, Any]] = {}
    for kind in IN_TOML:
        if isinstance(named := tables.get(kind, {}), dict):
            found[kind] = named
        else:
            problems.append(f'{file}: {kind}: expected tables [{kind}."NAME"]')
    return found


def _line_of(problem: str) -> int:
    """Problems are told in the order of their lines, what is not in the file behind them."""
    found = re.match(r".*?:([0-9]+): ", problem)
    return int(found[1]) if found else 1 << 30


class NamedSection(NamedTuple):
    """A kind of section that there may be many of, each with a name: `[tenant NAME]`, `[model NAME]` …"""

    row: type[msgspec.Struct]
    is_name: Callable[[str], object]
    expected: str


NAMED = {
    "tenant": NamedSection(TenantRow, is_name, NO_TENANT),
    "model": NamedSection(ModelRow, _MODEL_NAME.fullmatch, NO_MODEL),
    "task": NamedSection(TaskRow, TASK_NAME.fullmatch, NO_TASK),
    "template": NamedSection(TemplateRow, is_name, NO_TEMPLATE),
}


class _Draft:
    """Settings while they are put together: what was said so far, where, and what is wrong with it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tables = {section: rows_of(section, struct) for section, struct in SECTIONS.items()}
        self._values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        self._named: dict[str, list[str]] = {kind: [] for kind in NAMED}
        """The names by kind, in the order in which they were told."""
        self._told: dict[str, str] = {}
        """The place where each of them was told first, by section."""
        self._fields: dict[str, dict[str, str]] = {}
        self.origins: dict[str, SettingOrigin] = {}
        self.problems: list[str] = []

    def take_file(self, text: str) -> None:
        lines, sections = read(text, self._name, self.problems)
        for number, section in sections:
            kind, name = named_section(section)
            if kind in NAMED and NAMED[kind].is_name(name):
                self._know(kind, name, f"{self._name}:{number}")
            elif (target := _target_of(section)) in (EVERYWHERE, *TARGETS):
                self._fields.setdefault(target, {})
            elif section not in SECTIONS:
                self.problems.append(f"{self._name}:{number}: [{section}]: {_no_section(section, kind, target)}")
        for line in lines:
            where = f"{self._name}:{line.number}"
            table = " ".join(line.section.split())
            if (target := _target_of(line.section)) in self._fields:
                self._take_field(target, line, where)
                continue
            known = self._tables.get(table)
            if known is None:
                continue  # its section is reported already
            if line.key not in known:
                self.problems.append(f"{where}: [{line.section}] {line.key}: no such key{_nearest(line.key, known)}")
                continue
            self._put(
                known[line.key], line.value, f"{where}: [{line.section}] {line.key}", SettingOrigin("file", where)
            )

    def _take_field(self, target: str, line: ConfLine, where: str) -> None:
        """A row of `[fields TARGET]`; names are compared as bodies' names are, so `N` and `n` are one."""
        said = f"{where}: [{line.section}] {line.key}"
        try:
            name = field_name(line.key)
            parse_line(line.value)
        except ValueError as error:
            self.problems.append(f"{said}: {error}")
            return
        if name in self._fields[target]:
            self.problems.append(f"{said}: already set as {name}")
        self._fields[target][name] = line.value
        self.origins[f"fields {target}.{name}"] = SettingOrigin("file", where)

    def take_environment(self, env: Mapping[str, str]) -> None:
        """An empty variable is an unset one: compose files write `NAME=`."""
        given = {name: value for name, value in env.items() if value}
        self._know_tenants_of(given)
        rows = self._rows()
        given_too = self._also(given)
        for row in rows:
            for name in row.variables:
                if name in given_too:
                    self._put(row, given_too[name], name, SettingOrigin("environment", name))
        self._refuse_unknown(given, {name for row in rows for name in row.variables})
        for variable in VARIABLES:
            value = given.get(variable.name)
            if value is not None and not re.fullmatch(variable.pattern, value):
                self.problems.append(f"{variable.name}: expected {variable.expected}")

    def _also(self, given: Mapping[str, str]) -> dict[str, str]:
        """With names of the original specification that are a setting's in another unit, or by another name. A
        contradiction is a problem."""
        found = dict(given)
        if re.fullmatch("[1-9][0-9]{0,8}", milliseconds := given.get(QUEUE_TIMEOUT, "")):
            found.setdefault("HIVE_PROXY_QUEUE_WAIT_S", f"{int(milliseconds) / 1000:g}")
        default = given.get(TENANT_DEFAULT)
        if default and found.setdefault(RATE_DEFAULT, default) != default:
            self.problems.append(
                f"{TENANT_DEFAULT}: it contradicts {RATE_DEFAULT}={given[RATE_DEFAULT]}: leave one out"
            )
        return found

    def _know_tenants_of(self, given: Iterable[str]) -> None:
        """`TENANT_RATE_LIMIT_acme=100req/min` is `rate_limit` of `[tenant acme]`."""
        for name in given:
            if (match := _TENANT_VARIABLE.fullmatch(name)) is None:
                continue
            if is_name(match[2]):
                self._know("tenant", match[2], name)
            else:
                self.problems.append(f"{name}: {NO_TENANT}")

    def _refuse_unknown(self, given: Iterable[str], known: set[str]) -> None:
        """A name that is spelled like a setting's: what somebody meant to set must not be left at its default."""
        sections = tuple(f"HIVE_{section.upper()}_" for section in SECTIONS)
        for name in given:
            if name.startswith(sections) and name not in known | NO_SETTINGS:
                near = did_you_mean(name, sorted(known)) or "hive config show lists them"
                self.problems.append(f"{name}: no such setting; {near}")

    def _know(self, kind: str, name: str, where: str) -> None:
        section = f"{kind} {name}"
        if section in self._tables:
            return
        self._told[section] = where
        self._tables[section] = rows_of(section, NAMED[kind].row)
        self._values[section] = {}
        self._named[kind].append(name)

    def take_tables(self, kind: str, tables: Mapping[str, Any], where: str) -> None:
        """The models, tasks or templates of one file: name -> its keys, with the types of TOML. `where` names it."""
        for name, values in tables.items():
            section, said = f"{kind} {name}", f"{where}: [{kind}.{name!r}]"
            if not isinstance(values, dict):
                self.problems.append(f"{said}: expected a table of settings")
            elif not NAMED[kind].is_name(name):
                self.problems.append(f"{said}: {NAMED[kind].expected}")
            elif section in self._tables:
                self.problems.append(f"{said}: described already at {self._told[section]}")
            else:
                self._know(kind, name, where)
                self._take_table(section, values, said, where)

    def _take_table(self, section: str, values: Mapping[str, Any], said: str, where: str) -> None:
        known = self._tables[section]
        for key, value in values.items():
            row = known.get(key)
            if row is None:
                self.problems.append(f"{said} {key}: no such key{_nearest(key, known)}")
                continue
            kind = section.partition(" ")[0]
            separator = LISTS.get((kind, key))
            is_list = separator and isinstance(value, list) and all(isinstance(one, str) for one in value)
            try:
                if (kind, key) == ("template", "env") and isinstance(value, dict):
                    value = env_line(value)
                self._values[section][key] = _of_toml(row, separator.join(value) if separator and is_list else value)
            except ValueError:
                self.problems.append(f"{said} {key}: expected {row.expected}, found {value!r}")
            self.origins[f"{section}.{key}"] = SettingOrigin("file", where)

    def take_flags(self, flags: Mapping[str, object]) -> None:
        for row in self._rows():
            name = f"{row.section}.{row.key}"
            if flags.get(name) is None:
                continue
            try:
                self._values[row.section][row.key] = _bounded(row, flags[name])
            except ValueError:
                self.problems.append(f"{name}: expected {row.expected}, found {flags[name]!r}")
            self.origins[name] = SettingOrigin("flag")

    def settings(self) -> Settings:
        sections: dict[str, Any] = {name: struct(**self._values[name]) for name, struct in SECTIONS.items()}
        named: dict[str, dict[str, Any]] = {
            kind: {name: NAMED[kind].row(**self._values[f"{kind} {name}"]) for name in names}
            for kind, names in self._named.items()
        }
        return Settings(
            **sections,
            tenants=named["tenant"],
            models=named["model"],
            tasks=named["task"],
            templates=named["template"],
            fields=self._fields,
        )

    def check_models(self) -> None:
        """A model that cannot be started as it is described is a problem of the file."""
        names: dict[str, str] = {}
        at_ollama: dict[str, str] = {}
        for name in self._named["model"]:
            values, where = self._values[f"model {name}"], self._told[f"model {name}"]
            said = f"{where}: [model {name}]"
            if (first := names.setdefault(slot_id(name), name)) != name:
                told = self._told[f"model {first}"]
                self.problems.append(f"{said}: its slot's id is that of {first} at {told}: rename one")
            is_ollamas, has_file = values.get("backend") == OLLAMA, f"model {name}.file" in self.origins
            if not has_file and not is_ollamas and values.get("backend") != REMOTE:
                self.problems.append(f"{said}: file is missing: its GGUF file, or vLLM's directory")
            elif values.get("category") in ("image", "audio"):
                self.problems.append(f"{said} category: no server here makes images or sound yet")
            elif has_file and "file" not in values:
                continue  # what is wrong with it has been said
            elif (wrong := why_not_described(name, values))[0]:
                at = self.origins.get(f"model {name}.{wrong[0]}", SettingOrigin("file", where)).where
                self.problems.append(f"{at}: [model {name}] {wrong[0]}: {wrong[1]}")
            elif no_draft := why_no_draft(
                values, {other: self._values[f"model {other}"] for other in self._named["model"]}
            ):
                self.problems.append(f"{said} draft: {no_draft}")
            elif is_ollamas and (first := at_ollama.setdefault(as_ollama(values.get("file") or name), name)) != name:
                aliased = "it has one description, and more names by aliases of [inference]"
                self.problems.append(f"{said}: it is the model of [model {first}] at Ollama: {aliased}")

    def check_templates(self) -> None:
        """A template that can never start as it is described is a problem of the file."""
        for name in self._named["template"]:
            values, where = self._values[f"template {name}"], self._told[f"template {name}"]
            key, wrong = why_not_template(values)
            origin = self.origins.get(f"template {name}.{key}")
            if key and (origin is None or key in values):  # else it has been said
                at = where if origin is None else origin.where
                self.problems.append(f"{at}: [template {name}] {key}: {wrong}")

    def check_zone(self) -> None:
        name = self._values["budget"].get("zone")
        if name and zone_of(name) is None:
            where = self.origins["budget.zone"].where
            expected = rows_of("budget", SECTIONS["budget"])["zone"].expected
            self.problems.append(
                f"{where}: [budget] zone: expected {expected}, and this host knows none named {name!r}"
            )

    def check_tasks(self) -> None:
        """A ladder that leads nowhere, or into itself, is a problem of the file."""
        told = {kind: {name: self._values[f"{kind} {name}"] for name in names} for kind, names in self._named.items()}
        ladders = {name: values.get("models", "") for name, values in told["task"].items()}
        limits = {name: values.get("models", "") for name, values in told["tenant"].items()}
        aliases = self._values["inference"].get("aliases", "")
        for wrong in wrong_tasks(ladders, aliases, models=self._named["model"], tenants=limits):
            origin = self.origins.get(f"{wrong.section}.{wrong.key}")
            if (
                not wrong.key
                and f"{wrong.section}.models" in self.origins
                and "models" not in self._values[wrong.section]
            ):
                continue  # what is wrong with it has been said
            where = origin.where if origin is not None else self._told.get(wrong.section, self._name)
            said = f"[{wrong.section}] {wrong.key}".rstrip()
            self.problems.append(f"{where}: {said}: {wrong.what}")

    def _rows(self) -> list[SettingRow]:
        return [row for table in self._tables.values() for row in table.values()]

    def _put(self, row: SettingRow, text: str, where: str, origin: SettingOrigin) -> None:
        try:
            self._values[row.section][row.key] = parse(row, text)
        except ValueError:
            self.problems.append(f"{where}: expected {row.expected}, found {text!r}")
        self.origins[f"{row.section}.{row.key}"] = origin


def read(text: str, name: str, problems: list[str]) -> tuple[list[ConfLine], list[tuple[int, str]]]:
    """The lines and the sections (line number, name) of INI text; what is no INI is added to `problems`.

    Comments are whole lines that begin with `#` or `;`. A value ends with its line.

    >>> read("[proxy]\\nport = 1\\n", "hive.conf", [])
    ([ConfLine(number=2, section='proxy', key='port', value='1')], [(1, 'proxy')])
    """
    lines: list[ConfLine] = []
    sections: list[tuple[int, str]] = []
    seen: dict[tuple[str, str], int] = {}
    section: str | None = None
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        line = raw.strip()
        where = f"{name}:{number}"
        if not line or line[0] in "#;":
            continue
        if not line.replace("\t", " ").isprintable():
            problems.append(f"{where}: a control character")
        elif line[0] == "[":
            section = line[1:-1].strip()
            if line[-1] != "]" or not section:
                problems.append(f"{where}: expected [section]")
            else:
                sections.append((number, section))
        elif section is None:
            problems.append(f"{where}: expected a [section] before the first key")
        elif (match := _KEY.fullmatch(line)) is None:
            problems.append(f"{where}: expected `key = value`")
        elif (first := seen.setdefault((section, match[1]), number)) != number:
            problems.append(f"{where}: [{section}] {match[1]}: already set in line {first}")
        else:
            lines.append(ConfLine(number, section, match[1], match[2]))
    return lines, sections


def parse(row: SettingRow, text: str) -> object:
    """The value `text` stands for. Raises ValueError where it is not what `row.expected` says.

    >>> port = rows_of("proxy", SECTIONS["proxy"])["port"]
    >>> parse(port, "8080")
    8080
    """
    value: object = text
    if row.kind is bool:
        word = text.lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(row.expected)
        value = word in _TRUE
    elif row.kind is int:
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise ValueError(row.expected)
        value = int(text)
    elif row.kind is float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(row.expected)
    return _bounded(row, value)


def _bounded(row: SettingRow, value: object) -> object:
    try:
        return msgspec.convert(value, row.annotation)
    except msgspec.ValidationError:
        raise ValueError(row.expected) from None


def _of_toml(row: SettingRow, value: object) -> object:
    """The value as TOML has it: numbers are no truth values, and 4.0 is no whole number."""
    if row.kind is int and type(value) is not int:
        raise ValueError(row.expected)
    if row.kind is float and (isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))):
        raise ValueError(row.expected)
    return _bounded(row, value)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint="name another file with --config") from None
    if len(data) > FILE_MAX_BYTES:
        raise ConfigError(f"{path}: larger than {FILE_MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{number}: not UTF-8") from None


def named_section(section: str) -> tuple[str, str]:
    """The kind and the name of `[tenant acme]`; an empty name for a section without one.

    >>> named_section("model  qwen3:8b"), named_section("proxy")
    (('model', 'qwen3:8b'), ('proxy', ''))
    """
    kind, _, name = section.partition(" ")
    return kind, name.strip()


def _target_of(section: str) -> str:
    """The endpoint of `[fields TARGET]`, empty for another section."""
    kind, _, target = section.partition(" ")
    return target.strip() if kind == "fields" else ""


def _no_section(section: str, kind: str, target: str) -> str:
    if kind in NAMED:
        return NAMED[kind].expected
    if target:
        return "no endpoint with fields" + _nearest(target, [EVERYWHERE, *TARGETS])
    return "no such section" + _nearest(section, [*SECTIONS, *(f"{kind} NAME" for kind in NAMED), "fields TARGET"])


def _nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?`, or the names there are where none is near."""
    names = list(known)
    return "; " + (did_you_mean(word, names) or f"known are {', '.join(names)}")
