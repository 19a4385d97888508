"""The steps of an installation, in the order in which they are done, and what each does at most.

install.sh prints these lines itself where there is no Python yet that could say more: one entry is one line.
"""

from __future__ import annotations

STEPS = {
    "failed versions": "remove environments of /opt/hive/versions that never came up",
    "self-check": "run the new version, its check of hive.conf, an import of all of it, systemd-analyze verify",
    "reload": "",
    "units": "write Hive's units to /etc/systemd/system, /etc/sysusers.d/hive.conf, /etc/tmpfiles.d/hive.conf",
    "users": "create the users and groups of /etc/sysusers.d/hive.conf with systemd-sysusers",
    "directories": "make the directories of /etc/tmpfiles.d/hive.conf with systemd-tmpfiles",
    "configuration": "write /etc/hive/hive.conf and /etc/hive/sandbox.toml, where they are not there",
    "redis": "write /etc/hive/redis/redis.conf",
    "manual": "write the man pages to /usr/local/share/man",
    "completions": "write the completions of bash, zsh and fish to /usr/local/share",
    "secrets": "generate what is missing in /etc/hive/secrets, write /etc/hive/redis/users.acl",
    "version": "link /opt/hive/current and /usr/local/bin/hive to the new version",
    "enable": "link hive.target and its units to be started at boot",
    "start": "systemctl daemon-reload, start hive.target, or start it anew with the new version, wait until it answers",
    "leftovers": "remove files that an earlier version had and this one has not",
    "old versions": "remove earlier environments of /opt/hive/versions",
    "swap": "change nothing; say how sleeping agents can give up their RAM, where this host has no swap",
}
"""Step → what it does at most; empty for one that does something only when Hive is taken away."""
