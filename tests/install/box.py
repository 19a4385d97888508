"""A machine with Debian and systemd whose root outlives its reboots; Hive is installed there already, or not yet.

`python -m tests.install.box` makes the installation that all boxes share, and ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests import llama, vllm
from tests.host import package_sources, systemd_machine

SOURCES = "srv/src"
LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
BROUGHT = ("libgomp.so.1", "libnuma.so.1")
"""Software that a person installs beside llama-server and vLLM for the CPU."""
VLLM = """#!/bin/sh
# The command of vLLM's CPU wheel does not start (0.32); this is what it would do, with what a CPU needs besides.
shift; model=$1; shift
export PYTHONPATH=/opt/vllm/packages VLLM_CPU_KVCACHE_SPACE=1
exec /usr/bin/python3 -m vllm.entrypoints.openai.api_server --model "$model" "$@" --enforce-eager --block-size 32 \
  --dtype float32
"""
OLLAMA = "#!/bin/sh\nexec /opt/hive/current/bin/hive demo-backend --port 11434\n"
JOB = """for pair in $(tr '\\0' '\\n' </proc/1/environ | grep '^PIP_'); do export "$pair"; done
python3 /srv/src/tests/install/{inside} {stage}
code=$?
[ "$code" = 0 ] || journalctl -b --no-pager -o cat -u 'hive*' | grep -v '"audit"' | tail -n 60
"""
STAGE_S = 600.0
INSTALLED = "installed-"
"""Begins the name of what `installation` keeps in systemd_machine.CACHE."""

Seen = dict[str, Any]


class Installation(NamedTuple):
    """The layer that installing writes above a clean Debian, and what was seen of it (install_inside.py)."""

    layer: Path
    seen: Seen


class Box:
    """A machine whose root outlives its reboots."""

    def __init__(self, place: Path, *, inside: str, on: Path | None = None) -> None:
        """`inside`: the program whose stages are its boots. `on`: the layer of an `Installation`, above Debian."""
        self._place = place
        self._inside = inside
        self.root = place / "root"
        for name in ("upper", "work", "root", "out"):
            (place / name).mkdir()
        lower = ":".join(str(one) for one in (on, systemd_machine.ROOT) if one is not None)
        options = f"lowerdir={lower},upperdir={place}/upper,workdir={place}/work"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(self.root)], check=True)
        self._folders = package_sources.give(self.root)
        if on is None:
            package_sources.clone(self.root / SOURCES)

    def bring_servers(self) -> list[str]:
        """Models, and what systemd-nspawn is told so that the servers are there."""
        models = self.root / "var/lib/hive/models"
        program, venv = llama.program(), vllm.environment()
        assert program is not None
        assert venv is not None
        subprocess.run(
            [sys.executable, llama.MAKE_MODEL, models / "default.gguf"], check=True, stdout=subprocess.DEVNULL
        )
        if not (models / "default").exists():
            with tempfile.TemporaryDirectory() as made:
                shutil.copytree(vllm.model_for(venv, Path(made)), models / "default", copy_function=shutil.copyfile)
        for path, text in (("opt/vllm/bin/vllm", VLLM), ("usr/local/bin/ollama", OLLAMA)):
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(text)
            (self.root / path).chmod(0o755)
        packages = next(venv.glob("lib/python3*/site-packages"))
        libraries = [f"--bind-ro={LIBRARIES / name}" for name in BROUGHT]
        return [
            f"--bind-ro={program}:/usr/local/bin/llama-server",
            f"--bind-ro={packages}:/opt/vllm/packages",
            *libraries,
        ]

    def boot(self, stage: str, *options: str, online: bool = False) -> Seen:
        """The findings of this stage in one boot."""
        network = ["--private-network"]
        if online:
            network = [f"--bind-ro={folder}" for folder in self._folders]
            network += [f"--setenv={name}={value}" for name, value in package_sources.environment().items()]
        out = self._place / "out"
        (out / "console.txt").unlink(missing_ok=True)
        job = JOB.format(inside=self._inside, stage=stage)
        alone = systemd_machine.one_at_a_time(systemd_machine.ONLINE) if online else contextlib.nullcontext()
        with alone:
            console = systemd_machine.boot(self.root, job, out, *network, *options, limit_s=STAGE_S)
        print(console)
        seen: Seen = json.loads((out / f"{stage}.json").read_text())
        return seen

    def keep_as(self, place: Path) -> None:
        """Puts what it has written above its Debian, and its findings, into `place`. Then it can only be closed."""
        subprocess.run(["umount", str(self.root)], check=True)
        made = place.with_name(f"new-{place.name}")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        for name in ("upper", "out"):
            (self._place / name).rename(made / name)
        made.rename(place)

    def close(self) -> None:
        if self.root.is_mount():
            subprocess.run(["umount", str(self.root)], check=True)
        shutil.rmtree(self._place)


@contextlib.contextmanager
def box_of(inside: str, *, is_installed: bool = True) -> Iterator[Box]:
    """A box for the stages of that program. Needs what `systemd_machine.why_not` tells."""
    systemd_machine.make_root()
    layer = installation().layer if is_installed else None
    place = Path(tempfile.mkdtemp(prefix=f"hive-{Path(inside).stem}-", dir=systemd_machine.CACHE))
    box = Box(place, inside=inside, on=layer)
    try:
        yield box
    finally:
        box.close()


def installation() -> Installation:
    """The installation of this tree, made once for each state of it.

    Every box with a Hive of its own begins with it: installing takes a minute, and the ports of this machine.
    """
    systemd_machine.make_root()
    kept = systemd_machine.CACHE / f"{INSTALLED}{_digest_of_tree()}"
    with systemd_machine.one_at_a_time(systemd_machine.CACHE / "installing"):
        if not kept.exists():
            mounted = Path("/proc/self/mounts").read_text()
            for old in systemd_machine.CACHE.glob(f"{INSTALLED}*"):
                if f"{old}/" not in mounted:
                    shutil.rmtree(old)
            place = Path(tempfile.mkdtemp(prefix="hive-install-", dir=systemd_machine.CACHE))
            box = Box(place, inside="install_inside.py")
            try:
                seen = box.boot("install", online=True)
                code, said = seen["ran"]
                assert code == 0, said
                box.keep_as(kept)
            finally:
                box.close()
    return Installation(kept / "upper", json.loads((kept / "out/install.json").read_text()))


def _digest_of_tree() -> str:
    """A digest of the files that a clone of the tree would hold, and of the Debian below."""
    found = hashlib.sha256(str(systemd_machine.ROOT.stat().st_ctime_ns).encode())
    for path in package_sources.listed():
        found.update(f"{path}\0".encode())
        found.update((package_sources.REPOSITORY / path).read_bytes())
    return found.hexdigest()[:16]


def main() -> int:
    """Makes the installation before any box wants it; prints where it is, or what this machine lacks."""
    lacking = systemd_machine.why_not()
    print(lacking or installation().layer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
