"""Claude Code and Codex, the real programs, through a whole Hive before the demo backend, with the settings that
docs/how-to/coding-agents.md gives.

tests/tools/setup_coding_agents.sh installs them; they are skipped where it did not. HIVE_CODING_AGENTS names another
`node_modules` that has both.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.stack import Stack, stack, until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]
PAGE = (Path(__file__).parents[2] / "docs/how-to/coding-agents.md").read_text()
MODEL = "hive-demo"
CANNED = "[hive-demo] This is canned text"
RUNS_S = 120.0


def program(name: str) -> str:
    cache = os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")
    path = Path(os.environ.get("HIVE_CODING_AGENTS", f"{cache}/coding/node_modules"), ".bin", name)
    if not os.access(path, os.X_OK):
        pytest.skip(f"no {name}: run tests/tools/setup_coding_agents.sh or set HIVE_CODING_AGENTS")
    return str(path)


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with stack(url=None, auto_sleep=False) as hive:
        yield hive


def external(hive: Stack, name: str) -> Any:
    """The addresses and token of an agent that lives elsewhere, as the page makes one."""
    hive.post("/api/agents", {"name": name, "runtime": "external", "tier": "high", "model": MODEL})
    return hive.get(f"/api/agents/{name}/tokens")


def put(text: str, access: Any) -> str:
    """The page's settings with the port, the token and the model of this run."""
    base = access["openai_base_url"].removesuffix("/v1")
    text = text.replace("http://127.0.0.1:11435", base).replace("hm_…", access["model"])
    return re.sub(r"qwen3-\w+", MODEL, text)


def variables(access: Any) -> dict[str, str]:
    """Every `export` of the page."""
    return dict(re.findall(r"^export (\w+)=(\S+)$", put(PAGE, access), re.MULTILINE))


def ran(home: Path, command: list[str], env: dict[str, str]) -> str:
    """The output of a program, in a directory and with an environment of its own. It has to end well."""
    (home / "work").mkdir()
    done = subprocess.run(
        command,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        cwd=home / "work",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUNS_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def requests(hive: Stack, name: str) -> list[Any]:
    """Its requests as they are counted, once there are two."""

    def told() -> list[Any]:
        recent: list[Any] = hive.get(f"/api/agents/{name}/usage", period="1h", limit=100)["recent"]
        return recent if len(recent) > 1 else []

    found: list[Any] = until(told, within_s=20, what="two requests are counted")
    return found


def test_claude_code_is_answered_and_counted(hive: Stack, tmp_path: Path) -> None:
    claude, access = program("claude"), external(hive, "claude")
    said = ran(tmp_path, [claude, "-p", "Say hello", "--max-turns", "3"], variables(access))
    assert CANNED in said
    assert all(row["model"] == MODEL and row["tokensIn"] > 100 for row in requests(hive, "claude"))


def test_codex_runs_its_shell_tool_and_is_answered_and_counted(hive: Stack, tmp_path: Path) -> None:
    """The demo backend calls the first tool that it is offered; what came of that is told to it by the next request."""
    codex, access = program("codex"), external(hive, "codex")
    (settings,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(put(settings, access))
    said = ran(tmp_path, [codex, "exec", "--skip-git-repo-check", "Say hello"], variables(access))
    assert "exec\n" in said
    assert CANNED in said
    assert all(row["model"] == MODEL and row["tokensIn"] > 1000 for row in requests(hive, "codex"))
