"""An installation on a clean Debian with its package sources, for tests/install/box.py. Standard library only; what was
seen goes to /out/install.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.install.box_inside import SOURCES, machine, run

if __name__ == "__main__":
    before = machine()
    ran = run(f"{SOURCES}/install.sh")
    described = Path("/etc/hive/models.d").exists()
    seen = {"before": before, "ran": [ran.returncode, ran.stdout + ran.stderr], "models.d": described}
    Path("/out/install.json").write_text(json.dumps(seen))
