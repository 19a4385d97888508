"""The manual: what is there is in it, what is in it is there, and every page renders without a complaint.

`python tests/test_man.py` writes the parts that are tables of ours anew: settings, and error codes.
"""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_type_hints

import msgspec
import pytest

from hive import errors
from hive.cli.lazy import CommandTable, LazyCommand, load
from hive.cli.main import HIVE, root
from hive.domain import AgentSpec, DockerSpec, FirecrackerSpec, Limits
from hive.errors import HiveError
from hive.settings.file import load_text
from hive.settings.pool import ModelRow
from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import SECTIONS, VARIABLES, TenantRow
from hive.settings.tasks import TaskRow
from hive.settings.templates import TemplateRow
from hive.store import channels, keys

MAN = Path(__file__).parents[1] / "man"
PAGES = sorted(path.name.removesuffix(".scd") for path in MAN.glob("*.scd"))
ELSEWHERE = {
    "install": "hive-install.1",
    "uninstall": "hive-install.1",
    "backup": "hive-install.1",
    "restore": "hive-install.1",
    "top": "hive-top.1",
    **dict.fromkeys(
        ("proxy", "daemon", "sandbox", "sandbox-thaw", "demo-backend", "run-backend", "run-model", "jobs"),
        "hive-services.1",
    ),
}
"""Commands without a noun of their own whose page is not hive.1."""
COMMON = {"--json", "--socket", "--state-dir", "--help"}
"""Described once, in hive.1."""

Command = tuple[tuple[str, ...], LazyCommand]


def text_of(page: str) -> str:
    return (MAN / f"{page}.scd").read_text()


def plain(text: str) -> str:
    return text.replace("\\", "")


# --- commands and options ------------------------------------------------------------------------------------------


def commands(group: CommandTable = HIVE, path: tuple[str, ...] = ()) -> Iterator[Command]:
    for name, entry in group.entries.items():
        if isinstance(entry, CommandTable):
            yield from commands(entry, (*path, name))
        else:
            yield (*path, name), entry


def page_of(path: tuple[str, ...]) -> str:
    return ELSEWHERE.get(path[0], "hive.1") if len(path) == 1 else f"hive-{path[0]}.1"


def flags_of(path: tuple[str, ...], entry: LazyCommand) -> set[str]:
    return {
        flag
        for param in load(path[-1], entry).params
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("-")
    }


ALL = list(commands())
OF_COMMANDS = sorted({page_of(path) for path, _ in ALL})


@pytest.mark.parametrize(("path", "entry"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_every_command_is_in_its_page_with_its_options(path: tuple[str, ...], entry: LazyCommand) -> None:
    page = plain(text_of(page_of(path)))
    assert re.search(rf"\*hive {' '.join(path)}\*", page), f"*hive {' '.join(path)}* is not in {page_of(path)}"
    missing = {flag for flag in flags_of(path, entry) - COMMON if f"*{flag}*" not in page}
    assert not missing, f"{page_of(path)} says nothing of {missing}"


@pytest.mark.parametrize("page", OF_COMMANDS)
def test_no_page_describes_a_command_that_is_not_there(page: str) -> None:
    here = {" ".join(path) for path, _ in ALL if page_of(path) == page}
    nouns = {name for name, entry in HIVE.entries.items() if isinstance(entry, CommandTable)}
    everywhere = {" ".join(path) for path, _ in ALL} | nouns
    described = set(re.findall(r"^\*hive ([a-z -]+)\*", plain(text_of(page)), re.MULTILINE))
    named = set(re.findall(r"\*hive ([a-z-]+(?: [a-z-]+)?)\*", plain(text_of(page))))
    assert described <= here | {"hive up"} | _begin_sentences(page), described - here
    assert named <= everywhere, named - everywhere


def _begin_sentences(page: str) -> set[str]:
    """`*hive up* starts …` is a sentence, no description: no indented text follows."""
    found = re.findall(r"^\*hive ([a-z -]+)\* [^\n]*\n(?!\t)", plain(text_of(page)), re.MULTILINE)
    return set(found)


@pytest.mark.parametrize("page", OF_COMMANDS)
def test_no_page_describes_an_option_that_is_not_there(page: str) -> None:
    there = set().union(*(flags_of(path, entry) for path, entry in ALL if page_of(path) == page)) | COMMON
    there |= {flag for param in root().params for flag in param.opts}
    described = set(re.findall(r"\*(--?[a-z][a-z-]*)\*", plain(text_of(page))))
    assert described <= there, described - there


def test_every_page_of_commands_is_there_and_no_other() -> None:
    assert set(PAGES) == {*OF_COMMANDS, "hive.conf.5", "hive-agent.toml.5", "hive.7"}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_points_to_is_there(page: str) -> None:
    ours = set(re.findall(r"\*(hive[a-z.-]*)\*\(([0-9])\)", plain(text_of(page))))
    missing = {f"{name}.{section}" for name, section in ours} - set(PAGES)
    assert not missing


# --- exit codes and errors -----------------------------------------------------------------------------------------


def test_exit_codes_are_those_there_are() -> None:
    _, _, after = text_of("hive.1").partition("# EXIT STATUS\n")
    listed = {int(code) for code in re.findall(r"^\*([0-9]+)\*$", after.partition("\n# ")[0], re.MULTILINE)}
    used = {cls.exit_code for cls in classes()} | {0, 130}
    assert listed == used
    words = dict(re.findall(r"^\*([0-9]+)\*\n\t(.*)$", after.partition("\n# ")[0], re.MULTILINE))
    told = inspect.getdoc(errors) or ""
    assert all(f"{code} {word}" in " ".join(told.split()) for code, word in words.items())


def classes() -> list[type[HiveError]]:
    found = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, HiveError)]
    return sorted(found, key=lambda cls: (cls.exit_code, cls.code))


def error_lines() -> str:
    rows = {(cls.code, cls.status): (cls.exit_code, (cls.__doc__ or "").split("\n")[0]) for cls in classes()}
    return "".join(
        f"*{escaped(code)}* ({status}, {exit_code})\n\t{escaped(said)}\n"
        for (code, status), (exit_code, said) in rows.items()
    )


# --- settings ------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """As scdoc takes it literally; what is between backticks becomes bold."""
    return re.sub(r"`([^`]*)`", r"*\1*", re.sub(r"([_*\\])", r"\\\1", text))


def written(value: object) -> str:
    return escaped(str(value).lower() if isinstance(value, bool) else str(value))


def setting(row: SettingRow) -> str:
    unit = f", in {row.unit}" if row.unit not in ("", "port") else ""
    default = f"default *{written(row.default)}*" if row.default != "" else "empty by default"
    later = " It has no effect yet." if not row.in_effect else ""
    seeds = f" Also *{escaped(row.env)}* in the environment." if row.env else ""
    return f"*{escaped(row.key)}* ({escaped(row.expected)}{unit}; {default})\n\t{escaped(row.sentence)}{later}{seeds}\n"


def settings_part() -> str:
    parts = []
    for section, struct in SECTIONS.items():
        rows = rows_of(section, struct).values()
        parts.append(f"# [{section.upper()}]\n\n" + "".join(setting(row) for row in rows))
    return "\n".join(parts)


def tenant_part() -> str:
    return "".join(setting(row) for row in rows_of("tenant", TenantRow).values())


def task_part() -> str:
    return "".join(setting(row) for row in rows_of("task", TaskRow).values())


def template_part() -> str:
    return "".join(setting(row) for row in rows_of("template", TemplateRow).values())


def model_part() -> str:
    return "".join(setting(row) for row in rows_of("model", ModelRow).values())


# --- examples ------------------------------------------------------------------------------------------------------


def examples_part(page: str) -> str:
    """Of each command of the page what its help shows first and last."""
    told = []
    for path, entry in ALL:
        if page_of(path) != page or entry.hidden:
            continue
        _, _, after = (load(path[-1], entry).epilog or "").partition("Examples:\n")
        lines = [line.strip() for line in after.splitlines()]
        kept = "\n".join(dict.fromkeys((lines[0], lines[-1])))
        told.append(f"{escaped(entry.sentence)}\n\n```\n{kept}\n```\n")
    return "\n".join(told)


@pytest.mark.parametrize("page", OF_COMMANDS)
def test_every_page_of_commands_ends_with_examples_of_each(page: str) -> None:
    _, _, after = text_of(page).partition("\n# EXAMPLES\n")
    for path, entry in ALL:
        if page_of(path) == page and not entry.hidden:
            assert escaped(entry.sentence) in after, path


WRITTEN: Mapping[tuple[str, str], str] = {
    **{(page, "examples"): examples_part(page) for page in OF_COMMANDS},
    ("hive.conf.5", "settings"): settings_part(),
    ("hive.conf.5", "tenant settings"): tenant_part(),
    ("hive.conf.5", "model settings"): model_part(),
    ("hive.conf.5", "task settings"): task_part(),
    ("hive.conf.5", "template settings"): template_part(),
    ("hive.7", "errors"): error_lines(),
}


def part_of(page: str, part: str) -> re.Match[str]:
    found = re.search(rf"^; {part} \([^\n]*\)\n(.*?)^; end of {part}\n", text_of(page), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no part `{part}`"
    return found


@pytest.mark.parametrize(("page", "part"), WRITTEN, ids=[part for _, part in WRITTEN])
def test_the_parts_that_are_tables_of_ours_say_what_these_say(page: str, part: str) -> None:
    assert part_of(page, part)[1].strip() == WRITTEN[page, part].strip(), "type: python tests/test_man.py"


def test_every_setting_is_there_with_sentence_default_and_unit() -> None:
    """A sentence is looked for as a reader would, whatever wrote it."""
    page = " ".join(plain(text_of("hive.conf.5")).replace("*", "").split())
    structs: dict[str, type[msgspec.Struct]] = {**SECTIONS, "tenant": TenantRow}
    for section, struct in structs.items():
        for row in rows_of(section, struct).values():
            sentence = row.sentence.replace("`", "").replace("*", "").replace("\\", "")
            assert f"{row.key} (" in page
            assert " ".join(sentence.split()) in page, row.key
            assert (
                f"default {str(row.default).lower() if isinstance(row.default, bool) else row.default}"
            ) in page or (row.default == "")


def test_the_example_is_a_file_that_hive_takes() -> None:
    example = text_of("hive.conf.5").partition("```\n")[2].partition("```")[0]
    assert load_text(example, env={}).settings.tenants["acme"].rate_limit == "100/min"


def test_every_variable_is_named() -> None:
    pages = "".join(plain(text_of(page)) for page in PAGES)
    for variable in VARIABLES:
        assert f"*{variable.name}*" in pages


# --- agents --------------------------------------------------------------------------------------------------------

TABLES: dict[str, type[msgspec.Struct]] = {
    "KEYS": AgentSpec,
    "[LIMITS]": Limits,
    "[DOCKER]": DockerSpec,
    "[FIRECRACKER]": FirecrackerSpec,
}


@pytest.mark.parametrize("section", TABLES)
def test_every_key_of_an_agents_file_is_there_and_no_other(section: str) -> None:
    text = plain(text_of("hive-agent.toml.5"))
    _, _, after = text.partition(f"# {section}\n")
    described = set(re.findall(r"^\*([a-z_]+)\*$", after.partition("\n# ")[0], re.MULTILINE))
    tables = {name for name, kind in get_type_hints(AgentSpec).items() if name in ("limits", "docker", "firecracker")}
    wanted = {field.name for field in msgspec.structs.fields(TABLES[section])}
    assert described == wanted - (tables if section == "KEYS" else set())


# --- Redis ---------------------------------------------------------------------------------------------------------


def redis_names() -> set[str]:
    """Every key and channel; what stands for an id is left out."""
    found = {
        value
        for name, value in vars(keys).items()
        if name.isupper() and isinstance(value, str) and value.startswith("hive:") and "*" not in value
    }
    for name, function in inspect.getmembers(keys, inspect.isfunction):
        if name != "keys_of_agent":
            found.add(function("").rpartition(":")[0] + ":")
    return found


def test_every_redis_key_and_channel_is_there_and_no_other() -> None:
    _, _, after = text_of("hive.7").partition("# REDIS\n")
    described = set(re.findall(r"^\*(hive:[a-z:]+)\*", after.partition("\n# ")[0], re.MULTILINE))
    assert described == redis_names()


def test_lives_of_keys_are_those_they_are_written_with() -> None:
    _, _, after = text_of("hive.7").partition("# REDIS\n")
    lives = dict(re.findall(r"^\*(hive:[a-z:]+)\*\S*\n\t[^;]*?(24 h|300 s|no end|channel)", after, re.MULTILINE))
    assert (keys.DAY_S, keys.MODELS_S) == (24 * 3600, 300)
    assert lives.pop(keys.MODELS_AVAILABLE) == "300 s"
    endless = {keys.USAGE_STREAM, keys.INFERENCE_BACKEND, keys.CONFIG_RUNTIME, keys.agent_tokens("")}
    assert {name for name, life in lives.items() if life == "no end"} == endless
    assert {name for name, life in lives.items() if life == "channel"} == set(channels.CHANNELS.values())
    assert {life for name, life in lives.items() if name not in endless} == {"24 h", "channel"}


@pytest.mark.parametrize("shape", channels.CHANNELS, ids=lambda shape: shape.__name__)
def test_what_is_published_is_described_field_by_field(shape: type[msgspec.Struct]) -> None:
    _, _, after = text_of("hive.7").partition(f"*{channels.CHANNELS[shape]}*\n\t")
    described = re.findall(r"_([a-z]+)_", after.partition("\n*")[0].partition("\n#")[0])
    assert described == [field.encode_name for field in msgspec.structs.fields(shape)]


# --- rendering -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_it_renders_without_a_complaint(page: str, tmp_path: Path) -> None:
    if shutil.which("scdoc") is None:
        pytest.skip("scdoc is not installed")
    made = subprocess.run(["scdoc"], input=text_of(page).encode(), capture_output=True, check=False)
    assert (made.returncode, made.stderr) == (0, b"")
    if shutil.which("groff") is None:
        return
    (tmp_path / page).write_bytes(made.stdout)
    words = ["groff", "-t", "-man", "-Kutf8", "-Tutf8", "-wall", "-z", str(tmp_path / page)]
    assert subprocess.run(words, capture_output=True, check=True).stderr == b""
    shown = subprocess.run(
        ["groff", "-t", "-man", "-Kutf8", "-Tutf8", str(tmp_path / page)], capture_output=True, check=True
    )
    assert b"\\" not in shown.stdout, "an escape that was none"


def rewrite() -> None:
    for (page, part), text in WRITTEN.items():
        found = part_of(page, part)
        whole, (first, last) = text_of(page), found.span(1)
        (MAN / f"{page}.scd").write_text(f"{whole[:first]}\n{text}\n{whole[last:]}")


if __name__ == "__main__":
    rewrite()
