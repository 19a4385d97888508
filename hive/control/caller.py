"""Who asked this request."""

from __future__ import annotations

from starlette.requests import Request

from hive.control.auth import Person

PERSON = "hive.person"
ABOUT = "hive.about"
"""Where in the scope a handler leaves what the audit table shall know of its body."""


def person(request: Request) -> Person:
    """Whoever it is; known once the request has been admitted."""
    found: Person = request.scope[PERSON]
    return found


def actor(request: Request) -> str:
    """Its name, for the audit table."""
    return person(request).name


def note(request: Request, **about: object) -> None:
    """What the audit table shall know of this request's body."""
    request.scope[ABOUT].update(about)
