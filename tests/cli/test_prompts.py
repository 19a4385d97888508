"""`hive model prompts`, and the prompt of an agent from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hive.link.messages import Failed
from hive.link.prompts import Prewarmed
from hive.models.prompts import hash_prompt
from tests.cli.conftest import show_backend
from tests.control.box import Box
from tests.waiting import until

Hive = Any
"""conftest.Hive: test modules import no siblings."""
PROMPT = "Be kind. " * 133 + "..."
NOT_READ = "the prompt of dora is not read ahead: no model is named for it"


async def prompts(box: Box) -> None:
    """One that five agents share and that the backend keeps, and one that nobody has read."""
    show_backend(box, "tiny")
    common: dict[str, Any] = {"model": "tiny", "prewarm_on_start": True}
    for name in "abcde":
        await box.create(name, ["/bin/sleep", "1000"], system_prompt=PROMPT, **common)
    await until(lambda: len(box.proxy.prewarms) == 1)
    box.proxy.prewarms[0][1](Prewarmed(model="tiny", tokens_in=300, cached_tokens=0, took_ms=1.0))
    await until(lambda: box.services.prewarmer.view()["prompts"][0]["warm_since"])
    await box.create("f", ["/bin/sleep", "1000"], system_prompt="Short.", **common)
    await until(lambda: len(box.proxy.prewarms) == 2)
    box.proxy.prewarms[1][1](Failed(code="backend_unavailable", message="nobody\x1b answers"))
    await until(lambda: any("nobody" in row["why"] for row in box.services.prewarmer.view()["prompts"]))


def test_prompts_are_listed_by_who_has_them_and_never_with_their_text(hive: Hive) -> None:
    hive.daemon.do(prompts(hive.box))
    said = hive("model", "prompts")
    assert said.code == 0
    headers, warm, cold = said.out.splitlines()
    assert headers.split() == ["PROMPT", "BYTES", "AGENTS", "TENANTS", "MODEL", "WARM", "REUSED", "STATE"]
    assert f"{hash_prompt(PROMPT)}  1,200" in warm
    assert "a, b, c and 2 more" in warm
    assert warm.endswith("kept by the backend")
    assert cold.endswith("nobody\\x1b answers")
    assert hive("model", "prompts", "--json").json["prompts"][0]["hash"] == hash_prompt(PROMPT)
    assert "Be kind." not in said.out


def test_a_prompt_comes_from_a_file_as_it_is(hive: Hive, tmp_path: Path) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"Sei nett.\r\n\n")
    of_file = ("--system-prompt-file", str(file), "--prewarm", "--model", "tiny")
    said = hive("agent", "create", "dora", *of_file, "--json", "--", "sleep", "9")
    assert (said.code, said.err) == (0, "")
    assert (said.json["system_prompt"], said.json["prewarm_on_start"]) == ("Sei nett.\r\n\n", True)
    assert "12 bytes, read by the backend at each start and wake" in hive("agent", "show", "dora").out
    assert "Sei nett." not in hive("agent", "show", "dora").out
    exported = hive("agent", "export", "dora").out
    (tmp_path / "dora.toml").write_text(exported, newline="")
    assert hive("agent", "apply", str(tmp_path / "dora.toml"), "--json").json["changed"] == []


def test_a_prompt_that_no_model_will_read_ahead_is_said(hive: Hive, tmp_path: Path) -> None:
    """`--prewarm` without a model never happened, and said nothing."""
    (tmp_path / "prompt").write_text("Be kind.")
    of_file = ("--system-prompt-file", str(tmp_path / "prompt"), "--prewarm")
    said = hive("agent", "create", "dora", *of_file, "--", "sleep", "9")
    assert (said.code, said.err.partition(", so")[0]) == (0, NOT_READ)
    assert "8 bytes, not read ahead: no model is named for it" in hive("agent", "show", "dora").out


def test_what_cannot_be_a_prompt_is_said(hive: Hive, tmp_path: Path) -> None:
    def tried(*flags: str) -> Any:
        return hive("agent", "create", "dora", *flags, "--", "sleep", "9")

    assert "there is no prompt to be read" in tried("--prewarm").err
    assert "No such file" in tried("--system-prompt-file", str(tmp_path / "none")).err
    for content, said in ((b"\xff", "not UTF-8"), (b"x" * (2**18 + 1), "longer than 262144 bytes"), (b"", "empty")):
        (tmp_path / "prompt").write_bytes(content)
        found = tried("--system-prompt-file", str(tmp_path / "prompt"))
        assert (found.code, said in found.err) == (2, True), found.err
