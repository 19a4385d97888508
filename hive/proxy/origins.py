"""The origin at which a browser sees an agent, and the fields of an agent's answer that would outlive it there. Pure.

Under `/agents/<name>/` all agents are one origin for a browser: a cookie of one is sent to every other, one that clears
site data signs people out of all, one with Alt-Svc or a service worker takes over the requests of others. So such
fields are dropped there, and `X-Hive-Dropped` names them. At `<name>.<ingress_domain>` an agent is an origin of its
own, and all of them pass, except a cookie for the names of others.
"""

from __future__ import annotations

from hive.wire.heads import Fields

COOKIE, SET_COOKIE = b"cookie", b"set-cookie"
SHARED = frozenset(
    {
        b"accept-ch",
        b"alt-svc",
        b"clear-site-data",
        b"expect-ct",
        b"nel",
        b"public-key-pins",
        b"report-to",
        b"service-worker-allowed",
        SET_COOKIE,
        b"set-cookie2",
        b"set-login",
        b"strict-transport-security",
        b"use-as-dictionary",
    }
)
"""Fields of an answer by which a browser changes its behaviour at other paths of the origin."""
TOLD = b"x-hive-dropped"
"""The field of an answer that names the dropped fields; `cookie` is the request's."""
OWN_TOKEN = b"/.hive/t/"
"""A target at an origin of its own may begin with this and the token: a browser sends no X-Hive-Token."""


def agent_of(host: bytes, domain: bytes) -> str | None:
    """The name of the agent with this origin of its own; None for any other host. `domain`: empty if agents have none.

    >>> agent_of(b"Scribe.agents.example.org:8480", b"agents.example.org")
    'scribe'
    >>> [agent_of(host, b"agents.example.org") for host in (b"agents.example.org", b"::1", b"xagents.example.org")]
    [None, None, None]
    >>> agent_of(b"a.b.agents.example.org", b"agents.example.org"), agent_of(b"scribe.", b"")
    ('a.b', None)
    """
    if not domain:
        return None
    name = host.partition(b":")[0].rstrip(b".").lower()
    return name[: -len(domain) - 1].decode("latin-1") if name.endswith(b"." + domain) else None


def split_own(target: bytes) -> tuple[bytes, bytes, bytes]:
    """(token in the path or empty, prefix, what the agent is asked) at an origin of its own.

    >>> split_own(b"/.hive/t/hi_x/turn?q=1"), split_own(b"/turn")
    ((b'hi_x', b'/.hive/t/hi_x', b'/turn?q=1'), (b'', b'', b'/turn'))
    """
    if not target.startswith(OWN_TOKEN):
        return b"", b"", target
    path, question, query = target[len(OWN_TOKEN) :].partition(b"?")
    token, _, rest = path.partition(b"/")
    return token, OWN_TOKEN + token, b"/" + rest + question + query


def dropped(asked: Fields, answered: Fields, *, shared: bool) -> tuple[frozenset[bytes], bytes]:
    """(names of the answer's fields that do not pass, the line that tells of them and of the request's cookies).

    >>> dropped([(b"cookie", b"a=b")], [(b"nel", b"{}"), (b"etag", b"x")], shared=True)[1]
    b'x-hive-dropped: cookie, nel\\r\\n'
    >>> dropped([(b"cookie", b"a=b")], [(b"nel", b"{}")], shared=False)
    (frozenset({b'x-hive-dropped'}), b'')
    """
    found = {name for name, _ in answered if name in SHARED} if shared else set()
    found |= {SET_COOKIE} if not shared and _is_for_others(answered) else set()
    told = sorted(found | ({COOKIE} if shared and any(name == COOKIE for name, _ in asked) else set()))
    line = b"%b: %b\r\n" % (TOLD, b", ".join(told)) if told else b""
    return frozenset(found | {TOLD}), line


def _is_for_others(answered: Fields) -> bool:
    """Whether it sets a cookie for a domain: that is sent to the agents below it as well (RFC 6265 §5.1.3).

    >>> _is_for_others([(b"set-cookie", b"a=b; Path=/; domain=agents.example.org")])
    True
    >>> _is_for_others([(b"set-cookie", b"a=domain=x; Path=/")])
    False
    """
    return any(
        attribute.strip().lower().partition(b"=")[0].strip() == b"domain"
        for name, value in answered
        if name == SET_COOKIE
        for attribute in value.split(b";")[1:]
    )
