"""`[template NAME]` in hive.conf, and the files of templates.d."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.errors import ConfigError
from hive.files.conf_edit import applied_by, set_value
from hive.settings.edit import Name
from hive.settings.file import Loaded, load
from hive.settings.templates import described_env

GOOD = "[template lg]\npython = /srv/venvs/lg\nimports = langgraph.prebuilt, langchain_openai\nwarm = openai\n"


def loaded(directory: Path, conf: str = "", **files: str) -> Loaded:
    (directory / "hive.conf").write_text(conf)
    (directory / "templates.d").mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / "templates.d" / f"{name}.toml").write_text(text)
    return load(directory / "hive.conf", env={})


def test_both_places_describe_templates(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        f"{GOOD}owner = team-a\nmemory_mb = 256\npin = yes\nenv = A=1 'B=two words'\n",
        more='[template.oa]\npython = "/venv/bin/python"\nimports = ["openai", "httpx"]\nwarm = ["openai", "m.n:f"]\n'
        '[template.oa.env]\nA = "1"\nB = "it\'s, quoted"\n',
    )
    assert list(found.settings.templates) == ["lg", "oa"]
    lg, oa = found.settings.templates.values()
    assert (lg.owner, lg.memory_mb, lg.pin, described_env(lg.env)) == (
        "team-a",
        256,
        True,
        {"A": "1", "B": "two words"},
    )
    assert (oa.owner, oa.imports, oa.warm) == ("default", "openai, httpx", "openai, m.n:f")
    assert described_env(oa.env) == {"A": "1", "B": "it's, quoted"}
    alone = loaded(tmp_path, GOOD, more="[template.in]\npython = '/v'\nscript = '/srv/agents/ann.py'\n")
    assert alone.settings.templates["in"].script == "/srv/agents/ann.py"
    assert str(found.origins["template oa.python"]) == f"file {tmp_path}/templates.d/more.toml"


@pytest.mark.parametrize(
    ("conf", "said"),
    [
        ("[template Lg]\n", "a template's name is a letter a-z"),
        ("[template lg]\nimports = openai\n", r":1: \[template lg\] python: missing"),
        ("[template lg]\npython = /venv\n", r":1: \[template lg\] imports: missing"),
        (GOOD.replace("/srv/venvs/lg", "venv"), r":2: .*expected an absolute path, found 'venv'"),
        (GOOD.replace("langchain_openai", "a-b"), "expected names of modules, separated by commas"),
        (GOOD.replace("openai\n", "Open AI\n"), "expected names of recipes or MODULE:FUNCTION"),
        (GOOD + "script = agent.py\n", r":5: .*expected an absolute path, found 'agent.py'"),
        (GOOD + "env = A\n", r":5: \[template lg\] env: expected NAME=VALUE, found 'A'"),
        (GOOD + "env = A='1\n", "env: No closing quotation"),
        (GOOD + "env = HIVE_PROXY_SOCKET=/x\n", "HIVE_PROXY_SOCKET is set by Hive, for each agent its own"),
        (GOOD + "env = OPENAI_API_KEY=x\n", "OPENAI_API_KEY is set by Hive"),
        (GOOD + "env = A=1 A=2\n", "env: A stands there twice"),
        (GOOD + "memory_mb = 3\n", "memory_mb: 3 is not from 16 to"),
        (GOOD + "owner = Team A\n", "expected the name of a tenant"),
        (GOOD + "pyton = /x\n", "did you mean"),
        ("[templat lg]\n", "no such section"),
    ],
)
def test_a_wrong_description_is_said_with_its_line(conf: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, conf)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[template.lg]\npython = '/v'\nimports = 'a'\n", r"described already at .*hive.conf:1"),
        ("[template.x]\npython = '/v'\nimports = [1]\n", "expected names of modules"),
        ("[template.x]\npython = '/v'\nimports = 'a'\nenv = {A = 1}\n", "env: expected text"),
        ("[template.x]\npython = '/v'\nimports = 'a'\npin = 1\n", "pin: expected true or false"),
        ("[templates.x]\n", r"\[templates\]: expected \[model"),
        ("[template\n", "templates.d/one.toml"),
        ("template = 1\n", r'expected tables \[template."NAME"\]'),
    ],
)
def test_a_wrong_file_of_templates_d_is_said(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tmp_path, GOOD, one=text)


def test_a_template_is_changed_where_it_is_described(tmp_path: Path) -> None:
    loaded(tmp_path, GOOD, one='[template.oa]\npython = "/v"\nimports = "openai"\n')
    change = set_value(tmp_path / "hive.conf", "template lg.pin", "yes", dry_run=False)
    assert (change.before, change.after, change.apply) == (None, "yes", ["systemctl restart hive-daemon"])
    assert load(tmp_path / "hive.conf", env={}).settings.templates["lg"].pin
    with pytest.raises(ConfigError, match=r"oa is described in .*templates.d/one.toml"):
        set_value(tmp_path / "hive.conf", "template oa.pin", "yes", dry_run=False)
    assert applied_by(Name("template lg", "pin")) == ["systemctl restart hive-daemon"]
