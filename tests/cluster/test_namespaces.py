"""Hosts made of namespaces: they reach each other until a link is cut, and nothing is left of them at the end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.loopback import Loopback, machines
from tests.cluster.namespaces import Host, hosts, wait_for, why_not

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.root]
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
while True:
    server.accept()[0].close()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
MAKER = """
import sys, time
from pathlib import Path
from tests.cluster.namespaces import hosts
with hosts("a", "b") as (a, b):
    a.start([sys.executable, "-c", "import time; time.sleep(1000)"], Path("/dev/null"))
    while not a.pids("1000"):
        time.sleep(0.01)
    print(a.address, a.pids("1000")[0], flush=True)
    time.sleep(1000)
"""


def reaches(one: Host, other: Host) -> bool:
    words = one.command([sys.executable, "-c", CONNECT, other.address, str(other.port(9000))])
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def links_to(address: str) -> set[str]:
    """Links of this machine into the network of the host with that address; a suite beside this one has its own."""
    told = subprocess.run(["ip", "-brief", "address"], capture_output=True, text=True, check=True).stdout
    network = address.rpartition(".")[0]
    return {line.partition("@")[0] for line in told.splitlines() if f" {network}." in line}


@needs_namespaces
def test_hosts_reach_each_other_until_a_link_is_cut_and_again_when_it_is_mended(tmp_path: Path) -> None:
    with hosts("a", "b") as (a, b):
        for host in (a, b):
            host.start([sys.executable, "-c", LISTEN, host.address, "9000"], tmp_path / host.name)
        wait_for(lambda: reaches(a, b) and reaches(b, a), 60, "they reach each other")
        b.cut()
        assert not reaches(a, b)
        assert not reaches(b, a)
        b.mend()
        wait_for(lambda: reaches(a, b), 60, "they reach each other again")
        assert b.kill("9000") == 1
        wait_for(lambda: not reaches(a, b), 60, "its program is gone")
        assert reaches(b, a), "the other one's is not"
        assert len(links_to(a.address)) == 1
    assert not links_to(a.address)


@needs_namespaces
def test_nothing_is_left_after_kill_9_of_who_made_them() -> None:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True, cwd=ROOT) as maker:
        assert maker.stdout is not None
        address, pid = maker.stdout.readline().split()
        inside = psutil.Process(int(pid))
        assert len(links_to(address)) == 1
        maker.send_signal(signal.SIGKILL)
    wait_for(lambda: not inside.is_running(), 60, "what ran there has ended")
    wait_for(lambda: not links_to(address), 60, "its link is gone")


def test_without_namespaces_each_host_is_a_part_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVE_CLUSTER_LOOPBACK", "1")
    with machines("a", "b") as (a, b):
        assert isinstance(a, Loopback)
        assert a.port(9000) == a.port(9000) != b.port(9000)
        for host in (a, b):
            host.start([sys.executable, "-c", LISTEN, host.address, str(host.port(9000))], tmp_path / host.name)
        wait_for(lambda: reaches(a, b) and reaches(b, a), 60, "they reach each other")
        assert a.kill() == 1
        wait_for(lambda: not reaches(b, a), 60, "its program is gone")
        assert reaches(a, b), "the other one's is not"
        with pytest.raises(pytest.skip.Exception, match="no link can be cut"):
            a.cut()
