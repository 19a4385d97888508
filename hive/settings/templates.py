"""The settings of templates: `[template NAME]`, one for each, and what is wrong with their descriptions. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from hive.settings.meta import setting_meta as _s

NO_TEMPLATE = "a template's name is a letter a-z, then up to 39 of a-z, 0-9 and -"
_MODULE = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_RECIPE = rf"([a-z][a-z0-9_-]*|{_MODULE}:[A-Za-z_]\w*)"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OF_AGENTS = ("HIVE_", "OPENAI_", "OLLAMA_HOST")
"""Beginnings of the names that Hive sets for each agent: a template has none of them."""


class TemplateRow(msgspec.Struct, frozen=True, kw_only=True):
    """`[template NAME]`: one Python process with its packages imported, which agents are forked from."""

    python: Annotated[
        str,
        _s(
            "Its interpreter, or the directory of its virtual environment.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    imports: Annotated[
        str,
        _s(
            "Modules that it imports, separated by commas.",
            pattern=rf"^( *{_MODULE} *(, *{_MODULE} *)*)?$",
            expected="names of modules, separated by commas",
        ),
    ] = ""
    warm: Annotated[
        str,
        _s(
            "What it does once after that, separated by commas: a recipe of Hive's, like `openai`, or a function of a "
            "module, `MODULE:FUNCTION`.",
            pattern=rf"^( *{_RECIPE} *(, *{_RECIPE} *)*)?$",
            expected="names of recipes or MODULE:FUNCTION, separated by commas",
        ),
    ] = ""
    script: Annotated[
        str,
        _s(
            "The script of its agents that it runs until `hive.ready()`, where they go on: the ready state. Empty: it "
            "stops after its imports.",
            pattern="^(/.*)?$",
            expected="an absolute path",
        ),
    ] = ""
    env: Annotated[
        str,
        _s(
            "Its environment while it imports, `NAME=VALUE` with blanks between, quoted as in a shell. No secrets: "
            "every agent of it can read them."
        ),
    ] = ""
    owner: Annotated[
        str,
        _s(
            "The tenant whose agents may use it, and nobody else's.",
            pattern="^[a-z][a-z0-9-]{0,39}$",
            expected="the name of a tenant",
        ),
    ] = "default"
    memory_mb: Annotated[
        int, _s("Memory of the template itself at most; 0: no limit of its own.", unit="MiB", ge=0)
    ] = 0
    pin: Annotated[bool, _s("Its memory stays in RAM, which all its agents share.")] = False


def described_env(text: str) -> dict[str, str]:
    """The variables that `env` names. Raises ValueError.

    >>> described_env("LANGSMITH_TRACING=false GREETING='good day'")
    {'LANGSMITH_TRACING': 'false', 'GREETING': 'good day'}
    """
    found: dict[str, str] = {}
    for word in shlex.split(text):
        name, is_one, value = word.partition("=")
        if not is_one or not _ENV_NAME.fullmatch(name):
            raise ValueError(f"expected NAME=VALUE, found {word!r}")
        if name.startswith(OF_AGENTS):
            raise ValueError(f"{name} is set by Hive, for each agent its own: leave it out")
        if name in found:
            raise ValueError(f"{name} stands there twice")
        found[name] = value
    return found


def env_line(table: Mapping[str, object]) -> str:
    """A table of variables as `env` has them. Raises ValueError where a value is no string.

    >>> env_line({"A": "1", "B": "two words"})
    "A=1 'B=two words'"
    """
    if not all(isinstance(value, str) and value.replace("\t", " ").isprintable() for value in table.values()):
        raise ValueError("expected strings")
    return shlex.join(f"{name}={value}" for name, value in table.items())


def listed(text: str) -> list[str]:
    """
    >>> listed("openai, langgraph.prebuilt")
    ['openai', 'langgraph.prebuilt']
    """
    return [item for part in text.split(",") if (item := part.strip())]


def why_not_template(values: Mapping[str, Any]) -> tuple[str, str]:
    """(the key, what is wrong with it) of a description whose keys are right by themselves; two empty texts where
    nothing is.

    >>> why_not_template({"imports": "openai"})
    ('python', 'missing: its interpreter, or the directory of its virtual environment')
    >>> why_not_template({"python": "/venv"})
    ('imports', 'missing: without modules, or a script, there is nothing to share')
    >>> why_not_template({"python": "/venv", "script": "/srv/agents/alice.py"})
    ('', '')
    >>> why_not_template({"python": "/venv", "imports": "openai", "env": "OPENAI_API_KEY=x"})
    ('env', 'OPENAI_API_KEY is set by Hive, for each agent its own: leave it out')
    """
    if not values.get("python"):
        return "python", "missing: its interpreter, or the directory of its virtual environment"
    if not values.get("imports") and not values.get("script"):
        return "imports", "missing: without modules, or a script, there is nothing to share"
    if not 0 <= values.get("memory_mb", 0) < 1 << 24 or 0 < values.get("memory_mb", 0) < 16:
        return "memory_mb", f"{values['memory_mb']} is not from 16 to {1 << 24}; 0: no limit of its own"
    try:
        described_env(values.get("env", ""))
    except ValueError as error:
        return "env", str(error)
    return "", ""
