"""The output of `hive up` once it is up. Pure."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

from hive.backends.kinds import SPECS
from hive.build import number_of
from hive.domain import Isolation
from hive.files import log_file
from hive.settings.table import Paths
from hive.terminal_text import counted

ISOLATES = {
    Isolation.NONE: "agents run as you: nothing keeps them from your files or from each other",
    Isolation.UID: "each agent has a uid of its own; the backend and loopback can be reached past Hive",
    Isolation.FULL: "agents reach the model through Hive only",
}
FREEZERS = {"cgroup": "by the cgroup freezer", "signal": "by SIGSTOP to every process (no writable cgroup v2 here)"}


def banner(
    health: Mapping[str, object],
    paths: Paths,
    *,
    command: str,
    default_state: bool,
    why_not_deep: str = "",
    redis: str = "",
    width: int | None = None,
) -> str:
    """The text, from what `GET /api/health` says; `command` is how to type `hive` here. Wrapped to `width` columns.

    `why_not_deep`: why no agent can sleep deep here, a sentence. `redis`: where the Redis of REDIS_URL is, if one is
    used.
    """
    proxy, backend = _table(health.get("proxy")), _table(health.get("backend"))
    isolation = Isolation(str(health.get("isolation", "none")))
    which = "" if default_state else f" --state-dir {shlex.quote(str(paths.state))}"
    local = "http://127.0.0.1"
    rows = {
        "model": f"{local}:{proxy.get('port')}/v1, for agents, with their token",
        "callers": f"{local}:{proxy.get('ingress_port')}/agents/NAME/, with that agent's token",
        "api": f"{paths.api_socket}{_at(_table(health.get('api')))}",
        "backend": _backend(backend),
    }
    if pool := _table(health.get("pool")):
        models = counted(int(str(pool.get("models"))), "model")
        rows["pool"] = f"{models}, each loaded when it is asked for: `{command} pool{which}`"
    if redis:
        rows["redis"] = f"{redis} (REDIS_URL); none is started here"
    rows |= {
        "isolation": f"{isolation}: {ISOLATES[isolation]}",
        "limits": str(health.get("limits", "not enforced")),
        "sleep": f"{FREEZERS.get(str(health.get('freezer')), str(health.get('freezer')))}; {_deep(why_not_deep)}",
        "state": f"{paths.state}, with the log, {log_file.NAME}",
    }
    told = "\n".join(f"  {name:<10} {_wrapped(text, width)}" for name, text in rows.items())
    commands = "\n".join(f"  {command} {words}{which}" for words in NEXT)
    return f"Hive {health.get('version')} is up; Ctrl-C ends it\n\n{told}\n\nType in another terminal:\n{commands}\n"


def headline(health: Mapping[str, object]) -> str:
    """The line that stays on the screen while everything else scrolls by.

    >>> headline({"version": "0.1.0", "proxy": {"port": 11435, "ingress_port": 8480}})
    'Hive 0.1.0 · Ctrl-C ends it · model 127.0.0.1:11435 · callers 127.0.0.1:8480'
    """
    proxy = _table(health.get("proxy"))
    ports = f"model 127.0.0.1:{proxy.get('port')} · callers 127.0.0.1:{proxy.get('ingress_port')}"
    return f"Hive {number_of(str(health.get('version')))} · Ctrl-C ends it · {ports}"


def farewell(did: Mapping[str, object], *, command: str, which: str) -> str:
    """The closing sentence of `hive up`. `did`: `supervisor.summary`. `which`: the flags that it was started with.

    >>> did = {"agents": 1, "requests": 12, "tokens_in": 300, "tokens_out": 45, "wakes": 1}
    >>> farewell(did, command="hive", which="")
    'Hive has ended: 12 requests, 345 tokens, 1 wake; 1 agent is kept. `hive up` goes on where it ended.'
    """
    agents, requests, wakes = (int(str(did[name])) for name in ("agents", "requests", "wakes"))
    tokens = int(str(did["tokens_in"])) + int(str(did["tokens_out"]))
    told = f"{counted(requests, 'request')}, {counted(tokens, 'token')}, {counted(wakes, 'wake')}"
    kept = counted(agents, "agent is kept", "agents are kept")
    return f"Hive has ended: {told}; {kept}. `{command} up{which}` goes on where it ended."


INDENT = 13
"""Columns before a text."""


def _wrapped(text: str, width: int | None) -> str:
    """
    >>> _wrapped("files and signals are apart", 30)
    'files and signals\\n             are apart'
    """
    if width is None or width < 2 * INDENT:
        return text
    lines = textwrap.wrap(text, width - INDENT, break_long_words=False, break_on_hyphens=False)
    return ("\n" + " " * INDENT).join(lines)


NEXT = ("status", "ps", "logs -f")


def command_here() -> str:
    """The word to type for `hive`: the word alone where the shell finds this one, else its path."""
    ours = Path(sys.executable).with_name("hive")
    if not ours.exists():
        return f"{sys.executable} -m hive"
    found = shutil.which("hive")
    if found is not None and Path(found).resolve() == ours.resolve():
        return "hive"
    with_cwd = Path.cwd()
    return f"./{ours.relative_to(with_cwd)}" if ours.is_relative_to(with_cwd) else str(ours)


def _backend(backend: Mapping[str, object]) -> str:
    if not backend:
        return "none"
    label = str(backend.get("label") or backend.get("address"))
    spec = SPECS.get(str(backend.get("kind")))
    if spec is not None and spec.is_canned:
        label = label.partition(" at ")[0]
        return f"DEMO: {label}. With an Ollama, vLLM or llama-server on loopback, the next `hive up` uses that"
    return f"{label} {backend.get('version') or ''}".rstrip()


def _deep(why_not: str) -> str:
    """
    >>> _deep("deep sleep: this host has no swap"), _deep("")
    ('not deep: this host has no swap', "deep: a sleeper's memory goes to swap after a while")
    """
    reason = why_not.removeprefix("deep sleep: ")
    return f"not deep: {reason}" if reason else "deep: a sleeper's memory goes to swap after a while"


def _at(api: Mapping[str, object]) -> str:
    """
    >>> _at({"listen": "127.0.0.1", "port": 3000}), _at({"listen": "127.0.0.1", "port": None})
    (', http://127.0.0.1:3000 with a token', ', on TCP nowhere')
    """
    if api.get("port") is None:
        return ", on TCP nowhere"
    listen = str(api.get("listen"))
    address = f"[{listen}]" if ":" in listen else listen
    return f", http://{address}:{api['port']} with a token"


def _table(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
