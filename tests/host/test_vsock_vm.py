"""AF_VSOCK that leads somewhere: Debian's own kernel in a virtual machine whose loopback (CID 1) calls Hive's proxy.

Hive, the packages it needs and the guest's program (vsock_guest.py) are carried in, and the results out.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests import virtual_machine

PACKAGES = "python3,linux-image-cloud-amd64,kmod"
BOOTS_WITHIN_S = 200

INIT = """#!/bin/sh
mount -t tmpfs tmpfs /tmp
mount /dev/vdb /mnt
/bin/sh /mnt/go >/mnt/console.txt 2>&1
umount /mnt
echo o >/proc/sysrq-trigger
sleep 60
"""
"""The guest's first and only service. `o`: power off."""
GO = """
modprobe vsock_loopback
cat /proc/uptime
PYTHONPATH=/mnt/packages timeout 150 python3 /mnt/vsock_guest.py /mnt/results.json
cat /proc/uptime
"""

pytestmark = [pytest.mark.vsock, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def system() -> Path:
    return virtual_machine.system("vsock", PACKAGES, size_mb=900, prepare=_add_init)


def _add_init(root: Path) -> None:
    (root / "sbin/hive-test-init").write_text(INIT)
    (root / "sbin/hive-test-init").chmod(0o755)


@pytest.fixture(scope="module")
def results(system: Path) -> dict[str, Any]:
    """The answers that the guest's callers got."""
    with tempfile.TemporaryDirectory(prefix="hive-vsock-") as name:
        content = Path(name) / "content"
        virtual_machine.copy_packages(content / "packages")
        shutil.copy(Path(__file__).with_name("vsock_guest.py"), content)
        (content / "go").write_text(GO)
        append = "ro init=/sbin/hive-test-init"
        console, found = virtual_machine.run(system, content, size_mb=300, append=append, limit_s=BOOTS_WITHIN_S)
        print(console)
    assert found, console
    told: dict[str, Any] = json.loads(found)
    assert "failed" not in told, f"{told['failed']}\n{console}"
    return told


def test_the_agent_of_a_cid_can_chat(results: dict[str, Any]) -> None:
    for what in ("chat", "with a key", "large", "its cid again"):
        answer = results[what]
        assert answer.get("status") == "HTTP/1.1 200 OK", (what, answer)
        assert json.loads(answer["text"])["choices"][0]["message"]["content"], what
        assert answer["backend got"] > 0
    assert results["large"]["backend got"] > 4_000_000
    assert results["uvloop"], "the loop whose own transports do not work here"


def test_the_agent_of_a_cid_can_stream_alone_and_with_others(results: dict[str, Any]) -> None:
    answer = results["stream"]
    assert answer.get("status") == "HTTP/1.1 200 OK", answer
    assert '"content":"' in answer["text"].replace(" ", "")
    assert "data: [DONE]" in answer["text"]
    assert answer["text"].endswith("0\r\n\r\n")
    assert results["together"] == ["HTTP/1.1 200 OK"] * 10


def test_a_guest_that_leaves_in_the_middle_stops_the_backend(results: dict[str, Any]) -> None:
    assert results["cut"] == [0, 1]
    assert results["proxy still runs"]
    assert results["exit codes"][0] == 0


@pytest.mark.parametrize("what", ["another cid", "removed"])
def test_a_cid_that_is_no_agents_is_refused_and_the_backend_gets_nothing(results: dict[str, Any], what: str) -> None:
    answer = results[what]
    refused = "error" in answer or answer["bytes"] == 0 or answer["status"].startswith("HTTP/1.1 403")
    assert refused, answer
    assert answer["backend got"] == 0
