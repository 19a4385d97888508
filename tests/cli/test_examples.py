"""The example files of conf/agents/ describe agents that Hive takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.agents.spec import check_toml, from_toml, to_toml
from hive.domain import RuntimeKind

Hive = Any
"""conftest.Hive: test modules import no siblings."""

EXAMPLES = Path(__file__).parents[2] / "conf" / "agents"


def test_there_is_one_for_each_runtime() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.toml")} == set(RuntimeKind)


@pytest.mark.parametrize("kind", list(RuntimeKind))
def test_an_example_passes_the_checks_and_says_its_runtime(kind: RuntimeKind) -> None:
    spec = check_toml((EXAMPLES / f"{kind}.toml").read_text())
    assert spec.runtime is kind
    assert (spec.docker is not None, spec.firecracker is not None) == (
        kind is RuntimeKind.DOCKER,
        kind is RuntimeKind.FIRECRACKER,
    )


@pytest.mark.parametrize("kind", list(RuntimeKind))
def test_a_value_in_a_comment_is_the_default(kind: RuntimeKind) -> None:
    """`# tier = "medium"` promises what leaving it out means. Addresses and devices have no default to promise."""
    text = (EXAMPLES / f"{kind}.toml").read_text()
    given = check_toml(text)
    for line in text.splitlines():
        key = line.removeprefix("# ").partition(" = ")[0]
        if line.startswith("# ") and key.isidentifier() and key not in ("egress", "user", "tap"):
            assert check_toml(text.replace(line, line.removeprefix("# "))) == given, line


@pytest.mark.parametrize("kind", list(RuntimeKind))
def test_what_is_exported_is_read_back_as_the_same_agent(kind: RuntimeKind) -> None:
    spec = check_toml((EXAMPLES / f"{kind}.toml").read_text())
    assert from_toml(to_toml(spec)) == spec


@pytest.mark.parametrize("kind", list(RuntimeKind))
def test_an_example_is_applied_and_exported_and_applied_again(hive: Hive, tmp_path: Path, kind: RuntimeKind) -> None:
    path = EXAMPLES / f"{kind}.toml"
    name = check_toml(path.read_text()).name
    assert hive("agent", "apply", "--dry-run", str(path)).out.startswith(f"{name} would be created\n")
    assert hive("agent", "apply", str(path)).out.startswith(f"{name} is created\n")
    exported = tmp_path / "again.toml"
    exported.write_text(hive("agent", "export", name).out)
    assert hive("agent", "apply", str(exported)).out == f"{name} is unchanged\n"
