"""`systemctl restart hive.target` under a real systemd, again and again: everything is there each time."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.host import systemd_machine

RESTARTS = 8
HIVE = f"""#!/bin/sh
export PYTHONPATH={systemd_machine.PACKAGES_THERE}:{systemd_machine.HIVE_THERE}
exec python3 -P -m hive "$@"
"""
JOB = f"""
export PYTHONPATH={systemd_machine.PACKAGES_THERE}:{systemd_machine.HIVE_THERE} PYTHONDONTWRITEBYTECODE=1
cd {systemd_machine.HIVE_THERE}
python3 - <<'PLACE'
from pathlib import Path
from hive.files import share
for one in share.units(share.directory()):
    Path(one.path).parent.mkdir(parents=True, exist_ok=True)
    Path(one.path).write_bytes(one.content)
PLACE
mkdir -p /opt/hive/current/bin
cat >/opt/hive/current/bin/hive <<'HIVE'
{HIVE}
HIVE
chmod 755 /opt/hive/current/bin/hive
systemd-sysusers
systemd-tmpfiles --create /etc/tmpfiles.d/hive.conf
systemctl daemon-reload
systemctl start hive.target
for number in $(seq {RESTARTS}); do
    sleep 2
    systemctl reset-failed # or it is too many within 10 s
    systemctl restart hive.target
    for look in $(seq 100); do
        systemctl is-active -q hive-proxy.service && break
        systemctl is-failed -q hive-proxy.socket hive-proxy-ingress.socket && break
        sleep 0.2
    done
    systemctl is-active hive-proxy.socket hive-proxy-ingress.socket hive-proxy.service | tr '\\n' ' ' >>/out/active
    echo >>/out/active
done
systemctl --no-pager status hive-proxy.socket hive-proxy-ingress.socket
"""
pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(400)]


def test_a_restart_of_all_leaves_the_proxy_listening() -> None:
    """PID 1 opens a port anew in a child of its own, while another child may hold the old one still."""
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    systemd_machine.make_root()
    with tempfile.TemporaryDirectory(prefix="hive-restart-") as name:
        console = systemd_machine.run(JOB, Path(name), limit_s=300)
        assert Path(name, "active").read_text().splitlines() == ["active active active "] * RESTARTS, console
