"""The caller of a request, as the admission left it."""

from __future__ import annotations

from starlette.requests import Request

from hive.audit.auth import Person

PERSON, ORIGIN = "hive.person", "hive.origin"
"""Keys in the scope of the caller and of the request's origin, left by the admission."""
SOCKET = "socket"
"""The origin of callers on the unix socket; others come from `tcp:` and their address."""
ABOUT = "hive.about"
"""Key in the scope for a handler's note to the audit table about the body."""


def person(request: Request) -> Person:
    """The caller; known once the request has been admitted."""
    found: Person = request.scope[PERSON]
    return found


def actor(request: Request) -> str:
    """Its name, for the audit table."""
    return person(request).name


def origin(request: Request) -> str:
    """The origin of the request, for the audit table."""
    return str(request.scope[ORIGIN])


def note(request: Request, **about: object) -> None:
    """Notes for the audit table a part of this request's body."""
    request.scope[ABOUT].update(about)
