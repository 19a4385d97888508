"""`hive config` and `hive version`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.build import version

Hive = Any
"""conftest.Hive: test modules import no siblings."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hive.conf"
    path.write_text("[inference]\nbackend = ollama\ntier_low_models = x\n[tenant acme]\nweight = 2\n")
    return path


def test_settings_are_shown_with_their_units(no_daemon: Hive, file: Path) -> None:
    said = no_daemon("config", "show", "--config", str(file)).out
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in said.splitlines() if " " in line}
    assert lines["inference.backend"] == "ollama"
    assert lines["inference.tier_low_models"].split(maxsplit=1) == ["x"]
    assert lines["proxy.gate_wait_s"] == "5 s"
    assert "tenant acme.weight" in said


def test_origins_name_line_variable_and_default(no_daemon: Hive, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERENCE_PORT", "8000")
    shown = no_daemon("config", "show", "--origin", "--json", "--config", str(file)).json
    origins = {f"{row['section']}.{row['key']}": row["origin"] for row in shown["settings"]}
    assert origins["inference.backend"] == f"file {file}:2"
    assert origins["inference.port"] == "environment INFERENCE_PORT"
    assert origins["proxy.port"] == "default"
    assert f"file {file}:2" in no_daemon("config", "show", "--origin", "--config", str(file)).out
    named = {f"{row['section']}.{row['key']}": row["variables"] for row in shown["settings"]}
    assert named["inference.port"] == ["INFERENCE_PORT", "HIVE_INFERENCE_PORT"]
    assert named["tenant acme.weight"] == ["TENANT_WEIGHT_acme"]


def test_secrets_are_masked(no_daemon: Hive, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVE_INTERNAL_TOKEN", "sesame")
    monkeypatch.setenv("REDIS_URL", "redis://:open@sesame@redis:6379")
    for words in (("config", "show"), ("config", "show", "--json"), ("config", "show", "--origin")):
        said = no_daemon(*words, "--config", str(file)).out
        assert "sesame" not in said
        assert "redis://****@redis:6379" in said


def test_check_says_ok_or_every_mistake(no_daemon: Hive, file: Path) -> None:
    assert no_daemon("config", "check", str(file)).out == f"{file}: ok\n"
    assert no_daemon("config", "check", "--config", str(file)).out == f"{file}: ok\n"
    two = no_daemon("config", "check", str(file), "--config", f"{file}2")
    assert (two.code, two.err.startswith(f"hive: two files are named, {file} and {file}2  [usage]")) == (2, True)
    file.write_text("[inference]\nprot = 1\nport = x\n")
    said = no_daemon("config", "check", str(file))
    assert said.code == 2
    assert said.err.splitlines()[0] == f"hive: {file}:2: [inference] prot: no such key; did you mean `port`?  [config]"
    assert said.err.splitlines()[1].startswith(f"{file}:3: [inference] port: expected")


def test_check_says_what_is_right_and_has_no_effect(no_daemon: Hive, tmp_path: Path) -> None:
    conf = tmp_path / "sleepy.conf"
    conf.write_text(
        "[pool]\nhost_ram_mb = 4096\n[model a]\nfile = /m/a.gguf\nsleep = true\n[model b]\nfile = /m/b.gguf\n"
    )
    said = no_daemon("config", "check", str(conf)).out.splitlines()
    assert said == [
        f"{conf}: ok",
        "[model a] sleep has no effect: llama-server has no sleep",
        "[pool] host_ram_mb has no effect: no model described here may sleep (a: llama-server has no sleep)",
    ]
    assert no_daemon("config", "check", str(conf), "--json").json["without_effect"] == said[1:]
    conf.write_text("[inference]\nvllm_speculative_model = /d\n")
    said = no_daemon("config", "check", str(conf)).out.splitlines()
    assert said[1:] == ["[inference] vllm_speculative_model has no effect: speculative is none"]
    conf.write_text("[pool]\nhost_ram_mb = 4096\n[model a]\nbackend = vllm\nfile = /m/a\ngpus = cpu\n")
    assert "(a: vLLM sleeps on GPUs only)" in no_daemon("config", "check", str(conf)).out
    conf.write_text("[pool]\nhost_ram_mb = 4096\n[model a]\nbackend = vllm\nfile = /m/a\nsleep = true\n")
    assert no_daemon("config", "check", str(conf)).out == f"{conf}: ok\n"


def test_the_path_is_the_file_that_is_read(no_daemon: Hive, file: Path) -> None:
    assert no_daemon("config", "path", "--config", str(file)).out == f"{file}\n"
    assert no_daemon("config", "path", "--config", "/nonexistent/hive.conf").code == 3


def test_the_version_is_the_packages(no_daemon: Hive) -> None:
    assert no_daemon("version").out == no_daemon("--version").out
    assert no_daemon("version").out.split()[:2] == ["hive", version()]
    assert no_daemon("version", "--json").json["hive"] == version()
