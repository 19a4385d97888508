"""Access to a backend on another machine: the key it asks for, and the check of its certificate.

The key is never in an argument, a log or an answer. It goes to a server over TLS, or to one of this machine that is
`remote`: in the clear to another host it would be everybody's.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from hive.domain import origin_of
from hive.errors import ConfigError, NotPermitted
from hive.host.credentials import credential
from hive.settings.pool import ModelRow
from hive.settings.table import InferenceSection

CREDENTIAL = "backend-api-key"
CLUSTER_CREDENTIAL = "backend-cluster-token"
KEY_MAX_BYTES = 4096


class RemoteAccess(msgspec.Struct, frozen=True):
    """`ca_file`: empty for the system's authorities. Printed without the key."""

    key: str = ""
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"<RemoteAccess {'with a key' if self.key else 'without a key'}, {self.ca_file or 'the system CAs'}>"

    def shown_to(self, address: str, *, may_ask: bool = True) -> RemoteAccess:
        """The same, without the key where this server is not to see it. `may_ask`: whether it may ask for one on this
        machine: a remote server, and one of which it is not known yet.

        >>> access = RemoteAccess("sk-1")
        >>> access.shown_to("https://api.example.com").key
        'sk-1'
        >>> [access.shown_to(address).key for address in ("127.0.0.1:80", "http://10.0.0.9/x")]
        ['sk-1', '']
        >>> access.shown_to("127.0.0.1:80", may_ask=False).key
        ''
        """
        origin = origin_of(address)
        is_for_it = origin.tls or (origin.is_here and may_ask)
        return self if is_for_it or not self.key else RemoteAccess("", self.ca_file)


NO_ACCESS = RemoteAccess()


def access_of(inference: InferenceSection, env: Mapping[str, str]) -> RemoteAccess:
    """The access by the settings and the service manager, read anew.

    Raises ConfigError where the key or the authorities cannot be read or are none, NotPermitted where somebody else can
    get at the key.
    """
    given = credential(CREDENTIAL, env) or None  # empty: a unit names one that nobody has put there
    where = f"the credential {CREDENTIAL}"
    if given is None and inference.backend_api_key_file:
        where = inference.backend_api_key_file
        given = _read(Path(where))
    return RemoteAccess(_key_in(given, where), inference.backend_ca_file)


def cluster_access_of(inference: InferenceSection, env: Mapping[str, str]) -> RemoteAccess:
    """The access to who tells of a cluster: its token is another one than the backend's key. It is shown whole, over
    plain HTTP to another host as well: Ray has no TLS there. Raises as `access_of`."""
    given = credential(CLUSTER_CREDENTIAL, env) or None
    where = f"the credential {CLUSTER_CREDENTIAL}"
    if given is None and inference.backend_cluster_token_file:
        where = inference.backend_cluster_token_file
        given = _read(Path(where))
    return RemoteAccess(_key_in(given, where), inference.backend_ca_file)


def access_of_model(row: ModelRow) -> RemoteAccess:
    """The access to the server of a remote model of the pool: its own key alone, never the one of `[inference]`, which
    is for another server. Raises as `access_of`."""
    given = _read(Path(row.api_key_file)) if row.api_key_file else None
    return RemoteAccess(_key_in(given, row.api_key_file), row.ca_file)


def _key_in(given: bytes | None, where: str) -> str:
    key = "" if given is None else given.decode("latin-1").strip()
    if not key.isascii() or not key.isprintable() or " " in key or (given is not None and not key):
        raise ConfigError(f"{where} holds no key", hint="one line of printable ASCII characters without spaces")
    return key


def _read(path: Path) -> bytes:
    """Reads a file of this user or of root that no other user can read or change."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            is_ours = os.geteuid() == 0 or found.st_uid in (0, os.geteuid())
            if not is_ours or found.st_mode & 0o077:
                raise NotPermitted(
                    f"{path} is a secret, but others can get at it: it belongs to uid {found.st_uid}, "
                    f"mode {stat.S_IMODE(found.st_mode):o}",
                    hint=f"chown {os.geteuid()} {path}; chmod 600 {path}",
                )
            return file.read(KEY_MAX_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read the backend's key: {error.strerror}: {path}") from error


def context(access: RemoteAccess) -> ssl.SSLContext:
    """The TLS context for HTTP/1.1, with the check of the other end. Raises ConfigError.

    Reading the system's authorities takes some 20 ms, so it is made once for each state of the file.
    """
    try:
        changed_at = os.stat(access.ca_file).st_mtime_ns if access.ca_file else 0
        return _context(access.ca_file, changed_at)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"[inference] backend_ca_file {access.ca_file} cannot be used: {error.strerror or error}",
            hint="a file of certificates in PEM",
        ) from None


@lru_cache(maxsize=4)
def _context(ca_file: str, changed_at: int) -> ssl.SSLContext:  # noqa: ARG001 - another file has another time
    made = ssl.create_default_context(cafile=ca_file or None)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_alpn_protocols(["http/1.1"])
    return made


def why_untrusted(error: BaseException) -> str:
    """The fault in a server's certificate or its TLS, a sentence; empty where `error` is about something else."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    return f"no TLS could be agreed on: {error.reason or error}" if isinstance(error, ssl.SSLError) else ""
