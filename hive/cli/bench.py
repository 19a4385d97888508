"""`hive bench sleep`: what sleep costs and gains on this host, measured on the operator's own agents.

Everything goes through the API and ingress, as in daily work, and each agent is left as it was found. `hive bench
density` needs no Hive that runs: it makes a box, a Hive in it and agents of its own (hive/bench).
"""

from __future__ import annotations

import contextlib
import re
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.terminal import fitted
from hive.cli.text import UNKNOWN, milliseconds, size, status, table
from hive.client.client import path_of
from hive.errors import BackendDown, HiveError, NotSupported, Saturated, UsageError

if TYPE_CHECKING:
    from hive.client.client import Client

PAUSE_S = 30.0
DEEP_S = 300.0
ACT_S = 60.0
TURN_S = 60.0
ANSWER_MAX_BYTES = 65536
BY_HIVE = b'"src":"hive"'
"""In every error the proxy itself answers with."""
AWAKE_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
DEPTHS = ("light", "deep")
KINDS = ("openai", "langgraph", "node", "data", "own")
LEAST_BOX_MIB = 128
"""Hive alone takes more than a hundred."""


def sleep(
    call: CommandCall,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Agents; if none is named all that run or sleep.")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How often each is put to sleep.")] = 5,
) -> None:
    """Measures what sleep gains here: each agent is put to sleep, light and deep, and woken again.

    An agent with a port is woken by a `GET /` through ingress, every other one by resume. Afterwards each is as it was.
    RAM is what its processes hold and what its swapped pages take in zram; `k` is that asleep by that awake, and
    `1 / (a + (1 - a) k)` agents fit where one did, if a share `a` is awake.

    Examples:
      hive bench sleep
      hive bench sleep alice bob --rounds 20
      hive bench sleep --json | jq .density
    """
    client = call.client
    chosen = names or [agent["name"] for agent in client.get("/api/agents")["agents"] if _lives(agent)]
    measured: list[Answer] = []
    for name in chosen:
        with call.about(name):
            view = client.get(path_of(name))
        call.say(f"measuring {name} …")
        why_not = "" if _lives(view) else f"it is {status(view['status'])}"
        measured.append(_skipped(name, why_not) if why_not else _measured(client, view, rounds))
    answer = {"rounds": rounds, "agents": measured, **summary(measured)}
    call.show("bench.sleep", answer, lambda: _told(answer))


def measure_density(
    call: CommandCall,
    box: Annotated[
        str, typer.Option(metavar="MIB", help="Memory of the box, like 1200M or 2G; 300M with --quick.")
    ] = "",
    swap: Annotated[str, typer.Option(metavar="zram|file", help="Where the box swaps to.")] = "zram",
    agents: Annotated[
        str, typer.Option(metavar="openai|langgraph|node|data|own", help="Kind of agent; own: the control.")
    ] = "openai",
    burst: Annotated[
        str, typer.Option(metavar="PERCENT", help="Share of the agents that has a turn at a time.")
    ] = "10%",
    quick: Annotated[bool, typer.Option("--quick", help="A small box and few turns: 6 minutes at most.")] = False,
    ways: Annotated[
        str, typer.Option(metavar="WAY,…", help="Of none, kernel, hive, templates, ready; all by default.")
    ] = "",
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="The agents' Python; by default Hive's, if it has the package.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Where a picture (SVG) is written.")] = None,
) -> None:
    """Measures how many real agents a box of fixed memory holds: the kernel alone, and with Hive.

    The box is a memory cgroup with all of Hive and all agents inside. In bursts, a share of the agents has a turn; the
    edge is the most agents of which none is killed and whose p95 stays within the objective. Needs root. Several
    minutes; on a machine that does nothing else.

    Examples:
      hive bench density --quick
      hive bench density --box 1200M --swap file --agents langgraph --python /srv/agents/bin/python
      hive bench density --agents own --ways kernel,hive
      hive bench density --json --picture density.svg > density.json
    """
    from hive.bench.density import WAYS, DensityOrder, measured
    from hive.bench.picture import svg
    from hive.bench.table import HEADERS, heading, limits, notes, rows

    chosen = _one_of("--ways", ways.split(","), WAYS) if ways else WAYS
    (kind,) = _one_of("--agents", [agents], KINDS)
    (swap_kind,) = _one_of("--swap", [swap], ("zram", "file"))
    box_mib = mib_of(box or ("300M" if quick else "1200M"))
    order = DensityOrder(box_mib, swap_kind, kind, share_of(burst), quick, python, chosen)
    if picture is not None:
        _try_to_write(picture, "")
    answer = measured(order, say=call.say)
    answer["limits"] = limits(answer)
    if picture is not None:
        _try_to_write(picture, svg(answer))

    def told() -> str:
        found = rows(answer)
        said = [heading(answer), *([table(HEADERS, found)] if found else []), "\n".join(notes(answer))]
        return "\n\n".join(filter(None, [*said, "\n".join(f"- {line}" for line in answer["limits"])]))

    call.show("bench.density", answer, told)


def _try_to_write(path: Path, text: str) -> None:
    """Raises UsageError where it cannot be written: known before a run of minutes."""
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(
            f"--picture {path}: {error.strerror}", hint="name a file in a directory that is there"
        ) from None


def _one_of(option: str, words: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """The words, each of them known. Raises UsageError."""
    for word in words:
        if word not in known:
            raise UsageError(f"{option}: no {word!r}", hint=f"there are {', '.join(known)}")
    return words


def mib_of(text: str) -> int:
    """MiB of a box. Raises UsageError.

    >>> mib_of("1200M"), mib_of("2G"), mib_of("300")
    (1200, 2048, 300)
    """
    found = re.fullmatch(r"(\d{1,7})(M|MiB|MB|G|GiB|GB)?", text.strip(), re.IGNORECASE)
    mib = 0 if found is None else int(found[1]) * (1024 if (found[2] or "").upper().startswith("G") else 1)
    if mib < LEAST_BOX_MIB:
        raise UsageError(f"--box {text}: a number of MiB, {LEAST_BOX_MIB} or more", hint="like 1200M or 2G")
    return mib


def share_of(text: str) -> float:
    """A share of 1. Raises UsageError.

    >>> share_of("10%"), share_of("0.3"), share_of("100 %")
    (0.1, 0.3, 1.0)
    """
    try:
        share = float(text.rstrip("% ")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 1:
        raise UsageError(f"--burst {text}: from 1% to 100%", hint="like 10%")
    return share


def density(awake: float, k: float) -> float:
    """Number of agents in the memory of one, if a share `awake` is awake and the others keep `k` of their RAM.

    >>> density(0.1, 1.0), round(density(0.1, 0.1), 2)
    (1.0, 5.26)
    """
    return 1 / (awake + (1 - awake) * k)


def summary(agents: Sequence[Answer]) -> Answer:
    """`k` by depth, over all agents that were measured at it, and the density that follows; None where none was.

    >>> one = {"awake_bytes": 100, "light": {"bytes": 100}, "deep": {"bytes": 20}, "skipped": ""}
    >>> found = summary([one])
    >>> found["k"], found["density"][1]
    ({'light': 1.0, 'deep': 0.2}, {'awake': 0.1, 'light': 1.0, 'deep': 3.571})
    """
    k: dict[str, float | None] = {}
    for depth in DEPTHS:
        both = [(agent[depth]["bytes"], agent["awake_bytes"]) for agent in agents if agent.get(depth)]
        awake = sum(before for _, before in both)
        k[depth] = round(sum(after for after, _ in both) / awake, 4) if awake else None
    rows = [
        {"awake": share, **{depth: _rounded_density(share, k[depth]) for depth in DEPTHS}} for share in AWAKE_SHARES
    ]
    return {"k": k, "density": rows}


def _rounded_density(awake: float, k: float | None) -> float | None:
    return None if k is None else round(density(awake, k), 3)


def held(view: Answer) -> int:
    """Bytes of memory an agent has, in RAM or swap: what it would take awake, and what light sleep leaves it.

    By its PSS: a charge has what it alone touched first, and the swap cache twice.
    """
    return _ram(view) + int(view["swap_bytes"] or 0)


def kept(view: Answer, memory: Answer) -> int:
    """Bytes of RAM an agent takes: what its processes hold, and its swapped pages' share of what zram takes.

    >>> zram = {"original_bytes": 100, "memory_bytes": 25}
    >>> host = {"swap_total_bytes": 1000, "swap_free_bytes": 800, "zram": [zram]}
    >>> kept({"pss_bytes": 10, "swap_bytes": 80}, host)
    20
    """
    swapped = (memory["swap_total_bytes"] or 0) - (memory["swap_free_bytes"] or 0)
    in_zram = sum(zram["memory_bytes"] for zram in memory["zram"])
    a_byte = min(1.0, in_zram / swapped) if swapped > 0 else 0.0
    return _ram(view) + round((view["swap_bytes"] or 0) * a_byte)


def _ram(view: Answer) -> int:
    return int((view["held_bytes"] if view["pss_bytes"] is None else view["pss_bytes"]) or 0)


def _lives(view: Answer) -> bool:
    return view["status"] in ("running", "paused")


def _skipped(name: str, why: str) -> Answer:
    return {"name": name, "skipped": why, "awake_bytes": None, "light": None, "deep": None, "deep_note": ""}


def _measured(client: Client, before: Answer, rounds: int) -> Answer:
    """One agent, at both depths."""
    with _put_back(client, before):
        try:
            subject = _Subject(client, before)
            subject.wake()
            awake = subject.ram(deep=False)
            light = subject.measure(rounds, deep=False)
            deep, note = None, ""
            try:
                deep = subject.measure(rounds, deep=True)
            except (NotSupported, Saturated) as error:
                note = error.message
        except HiveError as error:
            return _skipped(before["name"], error.message)
    return {
        "name": before["name"],
        "skipped": "",
        "awake_bytes": awake,
        "light": light,
        "deep": deep,
        "deep_note": note,
    }


@contextlib.contextmanager
def _put_back(client: Client, before: Answer) -> Iterator[None]:
    """Awake or asleep as deep as before, also after Ctrl-C. An agent that is busy by then stays awake."""
    was_awake = before["status"] == "running"
    path = path_of(before["name"], "resume" if was_awake else "pause")
    order = None if was_awake else {"deep": before["depth"] == "deep"}
    try:
        yield
    finally:
        with contextlib.suppress(HiveError):
            client.post(path, order, timeout_s=DEEP_S)


class _Subject:
    """The agent that is being measured."""

    def __init__(self, client: Client, view: Answer) -> None:
        self._client = client
        self._name: str = view["name"]
        self._ingress: str | None = None
        if view["port"] is not None:
            self._ingress = client.get(path_of(self._name, "tokens"))["ingress_url"]

    def wake(self) -> None:
        self._client.post(path_of(self._name, "resume"), timeout_s=ACT_S)

    def ram(self, *, deep: bool) -> int:
        """The RAM held. Awake or in light sleep, pages that an earlier deep sleep left in swap count as RAM."""
        view = self._client.get(path_of(self._name))
        return kept(view, self._client.get("/api/system/memory")) if deep else held(view)

    def measure(self, rounds: int, *, deep: bool) -> Answer:
        """Medians over the rounds. Raises NotSupported, Saturated where it cannot sleep so deep."""
        times: dict[str, list[float]] = {"pause_ms": [], "wake_ms": [], "first_turn_ms": [], "awake_turn_ms": []}
        asleep: list[int] = []
        for _ in range(rounds):
            begun = time.perf_counter()
            self._client.post(
                path_of(self._name, "pause"), {"timeout_s": PAUSE_S, "deep": deep}, timeout_s=DEEP_S + PAUSE_S
            )
            times["pause_ms"].append(_since_ms(begun))
            asleep.append(self.ram(deep=deep))
            if self._ingress is None:
                self.wake()
            else:
                times["first_turn_ms"].append(turn_ms(self._ingress))
                times["awake_turn_ms"].append(turn_ms(self._ingress))
            times["wake_ms"].append(self._client.get(path_of(self._name))["last_wake_ms"] or 0.0)
        medians: dict[str, Any] = {
            name: round(statistics.median(found), 3) if found else None for name, found in times.items()
        }
        return {"bytes": round(statistics.median(asleep)), **medians}


def turn_ms(url: str) -> float:
    """`GET` of `url` (loopback, plain HTTP) on a new connection: milliseconds from last byte out to first byte in.

    Whatever the agent answers is an answer. Raises BackendDown where the answer is not the agent's.
    """
    found = urlsplit(url)
    request = f"GET {found.path} HTTP/1.1\r\nHost: {found.netloc}\r\nConnection: close\r\n\r\n".encode()
    try:
        with socket.create_connection((found.hostname or "", found.port or 80), TURN_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            begun = time.perf_counter()
            sock.sendall(request)
            answer = sock.recv(ANSWER_MAX_BYTES)
            took_ms = _since_ms(begun)
            while piece := sock.recv(ANSWER_MAX_BYTES):
                answer = (answer + piece)[:ANSWER_MAX_BYTES]
    except OSError as error:
        raise BackendDown(f"ingress does not answer: {error}") from None
    if not answer:
        raise BackendDown("ingress hung up without an answer")
    if BY_HIVE in answer:
        raise BackendDown(f"ingress answers {answer.split(b' ', 2)[1].decode()} instead of the agent")
    return took_ms


def _since_ms(begun: float) -> float:
    return (time.perf_counter() - begun) * 1e3


def _told(answer: Answer) -> str:
    headers = ["NAME", "DEPTH", "PAUSE", "WAKE", "FIRST TURN", "AWAKE TURN", "RAM AWAKE", "RAM ASLEEP", "KEPT"]
    rows = [_row(agent, depth) for agent in answer["agents"] for depth in DEPTHS if agent[depth]]
    said = [fitted(headers, rows, drop=("RAM ASLEEP", "AWAKE TURN", "RAM AWAKE", "PAUSE"))] if rows else []
    noted = [(agent["name"], agent["skipped"] or agent["deep_note"]) for agent in answer["agents"]]
    said += [f"{name}: {note}" for name, note in noted if note]
    shares = [
        [f"{found['awake']:.0%}", *(UNKNOWN if found[depth] is None else f"{found[depth]:.2f} ×" for depth in DEPTHS)]
        for found in answer["density"]
    ]
    if rows:
        said.append(table(["AWAKE", "LIGHT", "DEEP"], shares))
    k = answer["k"]["deep"]
    if k is not None:
        said.append(f"as many agents fit where one did; 1 / (a + (1 - a) k) with k = {k:g} deep")
    return "\n\n".join(said) or "no agent runs or sleeps"


def _row(agent: Answer, depth: str) -> list[str]:
    found = agent[depth]
    share = f"{found['bytes'] / agent['awake_bytes']:.0%}" if agent["awake_bytes"] else UNKNOWN
    return [
        agent["name"],
        depth,
        *(milliseconds(found[key]) for key in ("pause_ms", "wake_ms", "first_turn_ms", "awake_turn_ms")),
        size(agent["awake_bytes"]),
        size(found["bytes"]),
        share,
    ]
