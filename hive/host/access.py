"""How a backend on another machine is reached: the key it asks for, and how its certificate is checked.

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

from hive.domain import BackendKind, origin_of
from hive.errors import ConfigError, NotPermitted
from hive.host.credentials import credential
from hive.settings import Inference

CREDENTIAL = "backend-api-key"
KEY_MAX_BYTES = 4096


class Access(msgspec.Struct, frozen=True):
    """`ca_file`: empty for the system's authorities. Printed without the key."""

    key: str = ""
    ca_file: str = ""

    def __repr__(self) -> str:
        return f"<Access {'with a key' if self.key else 'without a key'}, {self.ca_file or 'the system CAs'}>"

    def shown_to(self, kind: BackendKind | None, address: str) -> Access:
        """The same, without the key where this server is not to see it. `kind` None: it is not known yet.

        >>> access = Access("sk-1")
        >>> access.shown_to(None, "https://api.example.com").key
        'sk-1'
        >>> [access.shown_to(BackendKind.REMOTE, address).key for address in ("127.0.0.1:80", "http://10.0.0.9/x")]
        ['sk-1', '']
        >>> access.shown_to(BackendKind.LLAMA, "127.0.0.1:80").key
        ''
        """
        origin = origin_of(address)
        is_for_it = origin.tls or (origin.is_here and kind in (None, BackendKind.REMOTE))
        return self if is_for_it or not self.key else Access("", self.ca_file)


NO_ACCESS = Access()


def access_of(inference: Inference, env: Mapping[str, str]) -> Access:
    """As the settings and the service manager have it, read anew.

    Raises ConfigError where the key or the authorities cannot be read or are none, NotPermitted where somebody else can
    get at the key.
    """
    given = credential(CREDENTIAL, env) or None  # empty: a unit names one that nobody has put there
    where = f"the credential {CREDENTIAL}"
    if given is None and inference.backend_api_key_file:
        where = inference.backend_api_key_file
        given = _read(Path(where))
    key = "" if given is None else given.decode("latin-1").strip()
    if not key.isascii() or not key.isprintable() or " " in key or (given is not None and not key):
        raise ConfigError(f"{where} holds no key", hint="one line of printable ASCII characters without spaces")
    return Access(key, inference.backend_ca_file)


def _read(path: Path) -> bytes:
    """Of this user or of root, and nobody else's to read or to change."""
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


def context(access: Access) -> ssl.SSLContext:
    """How a TLS connection of HTTP/1.1 is made and its other end checked. Raises ConfigError.

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
    """What is wrong with a server's certificate or its TLS, a sentence; empty where `error` is about something else.

    httpx wraps the error of `ssl`, so its causes are looked at as well.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {seen.verify_message}"
        if isinstance(seen, ssl.SSLError):
            return f"no TLS could be agreed on: {seen.reason or seen}"
        seen = seen.__cause__ or seen.__context__
    return ""
