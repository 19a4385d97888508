"""The paths of an installed Hive, below a root directory: `/`, or the root of an image.

Paths as the installed Hive sees them are absolute (`/etc/hive/hive.conf`); `Layout.at` says where they are from here.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

CODE = "/opt/hive"
VERSIONS = f"{CODE}/versions"
CURRENT = f"{CODE}/current"
PROGRAM = "/usr/local/bin/hive"
CONFIGURATION = "/etc/hive"
CONF_FILE = f"{CONFIGURATION}/hive.conf"
POLICY_FILE = f"{CONFIGURATION}/sandbox.toml"
RULES_FILE = f"{CONFIGURATION}/governance.toml"
MODELS_D = f"{CONFIGURATION}/models.d"
"""Descriptions of models, which belong to hive.conf; an operator makes it."""
TEMPLATES_D = f"{CONFIGURATION}/templates.d"
"""The same of templates."""
ADAPTER_KEYS = f"{CONFIGURATION}/adapter-keys"
"""Keys that adapters may be signed with; `hive adapter trust` makes it."""
SECRETS = f"{CONFIGURATION}/secrets"
REDIS = f"{CONFIGURATION}/redis"
REDIS_CONF = f"{REDIS}/redis.conf"
REDIS_ACL = f"{REDIS}/users.acl"
STATE = "/var/lib/hive"
SLOTS = (f"{STATE}/slots/kept", f"{STATE}/slots/engine")
"""Directories of slots that llama-servers saved for agents: of use to nobody but this Hive while it runs."""
MANIFEST = f"{STATE}/install.json"
PACKAGES = f"{STATE}/packages"
"""Written by install.sh: the packages it installed, a line each."""
UNITS = "/etc/systemd/system"
SYSUSERS = "/etc/sysusers.d/hive.conf"
TMPFILES = "/etc/tmpfiles.d/hive.conf"
RUNTIMES = ("/run/hive", "/run/hive-inference", "/run/hive-model", "/run/hive-jobs")
MAN = "/usr/local/share/man"
COMPLETIONS = {
    "bash": "/usr/local/share/bash-completion/completions/hive",
    "zsh": "/usr/local/share/zsh/site-functions/_hive",
    "fish": "/usr/local/share/fish/vendor_completions.d/hive.fish",
}
"""Directories each shell searches by default (XDG_DATA_DIRS, fpath); /usr/share itself is the package manager's."""
TARGET = "hive.target"


class Layout(msgspec.Struct, frozen=True):
    """One root. `live` is false for an image: nothing is started there, and no password file is touched."""

    root: Path = Path("/")

    @property
    def live(self) -> bool:
        return self.root == Path("/")

    def at(self, path: str) -> Path:
        """The path from here of `path` of the installed Hive.

        >>> Layout(Path("/srv/image")).at("/etc/hive").as_posix()
        '/srv/image/etc/hive'
        """
        return self.root / path.lstrip("/")

    def version(self, name: str) -> str:
        return f"{VERSIONS}/{name}"

    def version_of(self, venv: Path) -> str | None:
        """The name of the version with the environment `venv`; None where that is no installed one.

        >>> Layout().version_of(Path("/opt/hive/versions/0.1.0-1")), Layout().version_of(Path("/home/ann/hive/.venv"))
        ('0.1.0-1', None)
        """
        return venv.name if venv.parent == self.at(VERSIONS) else None
