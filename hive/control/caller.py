"""Who asked this request."""

from __future__ import annotations

from starlette.requests import Request

from hive.control.auth import Person

PERSON, ORIGIN = "hive.person", "hive.origin"
"""Where in the scope the admission leaves who asks, and from where."""
SOCKET = "socket"
"""The origin of who asks on the unix socket; others come from `tcp:` and their address."""
ABOUT = "hive.about"
"""Where in the scope a handler leaves what the audit table shall know of its body."""


def person(request: Request) -> Person:
    """Whoever it is; known once the request has been admitted."""
    found: Person = request.scope[PERSON]
    return found


def actor(request: Request) -> str:
    """Its name, for the audit table."""
    return person(request).name


def origin(request: Request) -> str:
    """Where it came from, for the audit table."""
    return str(request.scope[ORIGIN])


def note(request: Request, **about: object) -> None:
    """What the audit table shall know of this request's body."""
    request.scope[ABOUT].update(about)
