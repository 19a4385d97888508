"""Start of a server: its command, its environment, and what has to be there before. Pure."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hive.settings.table import InferenceSection


class Needed(msgspec.Struct, frozen=True):
    """One path that must exist. `key`: the setting it comes from; `hint`: what to do where it does not."""

    key: str
    path: Path
    hint: str
    is_program: bool = False


class Launch(msgspec.Struct, frozen=True):
    """One server's start. `socket`: where it listens once it is up; None where it has none of its own making."""

    command: tuple[str, ...]
    environment: dict[str, str]
    needed: tuple[Needed, ...]
    socket: Path | None


class Order(msgspec.Struct, frozen=True):
    """Settings and places of a start. `environment`: as the server may see it; `state`: where it caches; `max_rank`: of
    adapters that it takes. Of a runner's start (hive.runner): `name`, `model`: of its entry, and the file or directory;
    `gpus`: UUIDs, none for the CPU, `gpu_mb`: what is granted on each; `most_audio_s`: of one file; `steps`: of an
    image, 0 for the pipeline's own; `url`: of the ComfyUI that it stands before."""

    inference: InferenceSection
    environment: dict[str, str]
    socket: Path
    state: Path
    max_rank: int = 64
    name: str = ""
    model: str = ""
    gpus: tuple[str, ...] = ()
    most_audio_s: float = 7200
    url: str = ""
    gpu_mb: tuple[int, ...] = ()
    steps: int = 0


def served_name(default_model: str, path: str) -> str:
    """Name of the one model of a server: as requests without a model ask for it, else after its file.

    >>> served_name("", "/var/lib/hive/models/qwen3-8b.gguf"), served_name("llama3.2", "/var/lib/hive/models/default")
    ('qwen3-8b', 'llama3.2')
    """
    return default_model or Path(path).name.removesuffix(".gguf")


def program(key: str, path: str) -> Needed:
    """The program that a setting names."""
    return Needed(key, Path(path), f"install it there, or set inference.{key} in hive.conf", is_program=True)


def model(key: str, path: str) -> Needed:
    """The model that a setting names."""
    return Needed(key, Path(path), f"put a model there, or set inference.{key} in hive.conf")
