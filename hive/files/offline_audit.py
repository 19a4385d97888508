"""Notes for the audit table (hive.store.acts) about acts of a `hive` command on a Hive without its daemon."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hive.errors import HiveError, NotFound
from hive.files.backup_contents import place_of
from hive.files.layout import CONF_FILE
from hive.host.accounts import name_of
from hive.store import acts
from hive.store.audit import LOGIN_USER, USER

log = logging.getLogger("hive.acts")

TEXT_MAX = 200
"""Characters of what was named, and of what went wrong, that are kept."""
LOGIN_UID = Path("/proc/self/loginuid")
NOBODY = 2**32 - 1
"""`loginuid` of a process that no login began (audit_setloginuid in the kernel)."""


@contextmanager
def noted(database: Path | None, act: str, *, target: str = "hive", **detail: Any) -> Iterator[dict[str, Any]]:
    """Notes an act: its actor, its subject and its end, an error or a Ctrl-C too. Entries put into the dict are kept.

    `database`: of the Hive that is meant; nothing is noted where there is none, or its directory is not there. What
    cannot be noted is said in the log, and is no failure: what was asked for is done.
    """
    about = dict(detail)
    outcome = "cut_short"
    try:
        yield about
        outcome = "ok"
    except Exception as error:
        outcome = error.code if isinstance(error, HiveError) else HiveError.code
        about["error"] = str(error)[:TEXT_MAX]
        raise
    finally:
        if database is not None and os.path.isdir(database.parent):
            _note(database, act, _kept(target), outcome, about)


def database_of(conf: Path, *, uid: int, env: Mapping[str, str]) -> Path | None:
    """The database of the Hive that reads this hive.conf by default; None where none is known.

    >>> database_of(Path("/home/ann/hive.conf"), uid=1000, env={})
    >>> database_of(Path("/srv/image/etc/hive/hive.conf"), uid=1000, env={})  # nothing is installed there
    """
    path = Path(os.path.abspath(conf))
    if not path.as_posix().endswith(CONF_FILE):
        return None
    try:
        return place_of(state_dir=None, prefix=path.parents[2], uid=uid, env=env).database
    except NotFound:
        return None


def _note(database: Path, act: str, target: str, outcome: str, detail: dict[str, Any]) -> None:
    euid, login = os.geteuid(), login_uid()
    if name := name_of(euid):
        detail = {**detail, USER: name}
    if login is not None and login != euid:
        detail = {**detail, "login": f"uid:{login}", **({LOGIN_USER: name} if (name := name_of(login)) else {})}
    detail = {name: _kept(value) if isinstance(value, str) else value for name, value in detail.items()}
    found = acts.new(at=time.time(), actor=f"uid:{euid}", act=act, target=target, outcome=outcome, detail=detail)
    try:
        acts.append(acts.acts_of(database), found)
    except OSError as error:
        # A user that may not write there could not do the act either, and was told so.
        if outcome == "ok":
            log.warning("this will not be in the audit table: %s", error.strerror or error)


def _kept(text: str) -> str:
    r"""The part of a text that is kept. A path whose bytes are no UTF-8 has signs that no JSON can hold.

    >>> _kept("/b\udcff.tar")
    '/b\\udcff.tar'
    """
    return text.encode(errors="backslashreplace").decode()[:TEXT_MAX]


def login_uid() -> int | None:
    """The uid of the user that logged in, whatever sudo or su made of it since; None where nobody did.

    Only root may change it once it is set, so it says more than SUDO_UID.
    """
    try:
        found = int(LOGIN_UID.read_text())
    except (OSError, ValueError):
        return None
    return None if found == NOBODY else found
