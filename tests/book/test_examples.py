"""Every example of hive.conf, of models.d and of an agent's file in the book is one that Hive takes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from hive.agents.spec import from_toml
from hive.settings.field_rules import EVERYWHERE, TARGETS
from hive.settings.file import IN_TOML, NAMED, load_text
from hive.settings.table import SECTIONS
from tests.book.blocks import PAGES, CodeBlock, blocks_of


def begins_as_hive_conf(text: str) -> bool:
    """Whether its first line, comments aside, is a section that Hive knows."""
    first = next((line.strip() for line in text.splitlines() if line.strip() and line.strip()[0] not in "#;"), "")
    kind, _, name = first[1:-1].partition(" ")
    return first[:1] == "[" and (first[1:-1] in SECTIONS or (kind in {*NAMED, "fields"} and bool(name)))


def describes(text: str) -> bool:
    """Whether a table is Hive's: of models, tasks and templates, or of an agent. Clients have files of their own."""
    told = tomllib.loads(text)
    return told.keys() <= set(IN_TOML) or bool({"command", "runtime"} & told.keys())


CONFIGURATIONS = blocks_of("ini") + [block for block in blocks_of("") if begins_as_hive_conf(block.text)]
TABLES = [block for block in blocks_of("toml") if describes(block.text)]


def test_there_are_examples_and_each_page_is_looked_at() -> None:
    assert len(CONFIGURATIONS) > 10
    assert len(TABLES) > 1
    assert {"docs/pool.md", "docs/how-to/many-models.md", "docs/coming-from/litellm.md"} <= set(PAGES)


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=str)
def test_every_example_of_hive_conf_is_taken_as_it_stands(block: CodeBlock) -> None:
    """A comment behind a value was a part of the value: five pages had one."""
    loaded = load_text(block.text, env={})
    assert loaded.origins, f"{block} sets nothing"


@pytest.mark.parametrize("block", TABLES, ids=str)
def test_every_example_in_toml_describes_models_or_an_agent(block: CodeBlock, tmp_path: Path) -> None:
    if tomllib.loads(block.text).keys() <= set(IN_TOML):
        file = tmp_path / "example.toml"
        file.write_text(block.text)
        assert load_text("", env={}, model_files=[file]).origins
    else:
        assert from_toml(block.text).name


def test_a_wrong_key_fails() -> None:
    from hive.errors import ConfigError

    for wrong in ("[proxy]\nprot = 1\n", "[model m]\nfile = /m.gguf  # the file\nparallel = 2  # at once\n"):
        with pytest.raises(ConfigError):
            load_text(wrong, env={})


def test_targets_of_fields_are_known_here() -> None:
    assert begins_as_hive_conf(f"[fields {EVERYWHERE}]")
    assert begins_as_hive_conf(f"# a comment\n[fields {next(iter(TARGETS))}]")
    assert not begins_as_hive_conf("[signers]")
