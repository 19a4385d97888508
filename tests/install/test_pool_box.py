"""The pool on a whole box: two pinned models of three, killed, rebooted, and given back. Real llama-servers.

See test_box.py for the machine.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import llama
from tests.host import systemd_machine
from tests.install.test_box import LIBRARIES, Box, Seen

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.llama, pytest.mark.timeout(900)]

BROUGHT = ("libgomp.so.1", "libstdc++.so.6", "libgcc_s.so.1")
FILES = ("var/lib/hive/models/alpha.gguf", "var/lib/hive/models/beta.gguf", "srv/models/gamma.gguf")


def bring(box: Box) -> list[str]:
    """Makes the models, and returns what systemd-nspawn is told so that llama-server is there."""
    for seed, name in enumerate(FILES):
        path = box.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            made = [sys.executable, str(llama.MAKE_MODEL), str(path), "--seed", str(seed)]
            subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
            path.chmod(0o644)
    libraries = [f"--bind-ro={LIBRARIES / name}" for name in BROUGHT]
    return [f"--bind-ro={llama.program()}:/usr/local/bin/llama-server", *libraries]
