"""The client of the REST API: what the CLI, `hive up` and `hive top` know of the daemon.

The standard library and llhttp alone (http.client takes 8 ms to import): commands start faster than a person notices.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from hive.errors import DependencyDown, HiveError, NotPermitted, TimedOut, UsageError, by_code
from hive.http_answer import AnswerTooLarge, CallFailed, HttpAnswer, encode_request
from hive.paths import APPLIANCE_RUNTIME, INSTALLED

if TYPE_CHECKING:
    from hive.client.exec_caller import ExecCaller

Answer = dict[str, Any]
Query = str | int | float | bool | Sequence[str] | None
"""A sequence: the parameter is given as often as it has words."""

NO_HEADERS: Mapping[str, str] = {}
OP_TOKEN = "X-Hive-Op-Token"
"""Header: the word of an operation's signers, where the box has rules for it (docs/governance.md)."""
CONNECT_S = 2.0
PIECE_BYTES = 65536
SWITCHED = 101
PAGE = 500
"""Agents asked for at a time: the daemon is never long in answering, however many there are."""
ANSWER_MAX_BYTES = 256 * 1024 * 1024
NOT_RUNNING = "start one with `hive up`, or name its socket with --socket"
INSTALLED_NOT_RUNNING = "`hive status` says how the installed one is; sudo systemctl start hive.target starts it"
GROUP = "hive"
"""Members of it steer the installed Hive."""


class Client:
    """One Hive by its socket. Every call is a connection of its own; errors come back as the `HiveError` they were.

    `timeout_s` bounds the silence before an answer; a call may have its own. `op_token`: as `hive op sign` leaves it in
    its file, for an order that is governed.
    """

    def __init__(self, path: Path, *, timeout_s: float = 60.0) -> None:
        self.path = path
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<Client {self.path}>"

    def answers(self, *, within_s: float = 1.0) -> bool:
        """Whether a server listens at the socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(within_s)
            try:
                sock.connect(os.fspath(self.path))
            except OSError:
                return False
        return True

    def get(self, path: str, *, timeout_s: float | None = None, **query: Query) -> Answer:
        return self._ask("GET", path, None, query, timeout_s)

    def post(
        self,
        path: str,
        body: object = None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        op_token: str = "",
    ) -> Answer:
        return self._ask("POST", path, body, {}, timeout_s, signed(headers, op_token))

    def put(self, path: str, body: object, *, timeout_s: float | None = None, **query: Query) -> Answer:
        return self._ask("PUT", path, body, query, timeout_s)

    def delete(
        self,
        path: str,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
        op_token: str = "",
        **query: Query,
    ) -> Answer:
        return self._ask("DELETE", path, None, query, timeout_s, signed(headers, op_token))

    def agents(self, *, limit: int = PAGE, short: bool = False, timeout_s: float | None = None) -> Iterator[Answer]:
        """All agents by name, a page at a time: `{"agents", "next", "total"}`."""
        after: str | None = None
        while True:
            page = self.get("/api/agents", timeout_s=timeout_s, limit=limit, short=int(short), after=after)
            yield page
            if (after := page["next"]) is None:
                return

    def agents_in_short(self, *, timeout_s: float | None = None) -> list[Answer]:
        """Id, name, status … of every agent, by name: what costs no look at the agent."""
        return [agent for page in self.agents(short=True, timeout_s=timeout_s) for agent in page["agents"]]

    def lines(self, path: str, *, silence_s: float | None = None, **query: Query) -> Generator[bytes, None, None]:
        """The lines of a text answer as they come, with their newline. `silence_s` None waits for ever.

        Raises DependencyDown where the daemon is gone before it has ended its answer.
        """
        with self._sent("GET", path, None, query, self._timeout_s, silence_s) as response:
            pending: list[bytes] = []
            for piece in response.pieces():
                first, *rest = piece.split(b"\n")
                pending.append(first)
                for line in rest:
                    yield b"".join(pending) + b"\n"
                    pending = [line]
            if last := b"".join(pending):
                yield last

    def events(
        self, agent: str | None = None, *, tail: int = 20, follow: bool = False
    ) -> Generator[Answer, None, None]:
        """Events, oldest first, of one agent or of all; with `follow` also those to come, until the daemon ends."""
        path = "/api/events" if agent is None else path_of(agent, "events")
        for line in self.lines(path, tail=tail, follow=int(follow)):
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def job_output(self, job: str, *, after: int = 0, follow: bool = False) -> Generator[Answer, None, None]:
        """Events of a job's output behind number `after`; with `follow` also those to come, until it has ended."""
        if not job:
            raise UsageError("an empty id names no job")
        path, mark = f"/api/jobs/{quote(job, safe='')}/output", b"data: " if follow else b""
        for line in self.lines(path, after=after, follow=int(follow)):
            if line.startswith(mark):
                yield json.loads(line[len(mark) :])

    def execute(self, ref: str, command: Sequence[str], **query: Query) -> ExecCaller:
        """A program inside an agent, begun; the caller closes it. Raises the error the answer carries."""
        from hive.client.exec_caller import ExecCaller, begin

        with contextlib.ExitStack() as undone, _translated(self.path):
            sock = undone.enter_context(_connected(self.path, self._timeout_s))
            given = [("command", word) for word in command] + [(name, str(value)) for name, value in query.items()]
            status, body, rest = begin(sock, f"{quote(path_of(ref, 'exec'))}?{urlencode(given)}")
            if status != SWITCHED:
                raise _error_of(status, body)
            sock.settimeout(None)
            undone.pop_all()
            return ExecCaller(sock, rest, lambda: _translated(self.path))

    def _ask(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, Query],
        timeout_s: float | None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> Answer:
        timeout_s = timeout_s or self._timeout_s
        with self._sent(method, path, body, query, timeout_s, timeout_s, headers) as response:
            data = response.body()
        try:
            answer = json.loads(data)
        except ValueError:
            raise DependencyDown(f"what answers at {self.path} is no Hive") from None
        if not isinstance(answer, dict):
            raise DependencyDown(f"what answers at {self.path} is no Hive")
        return answer

    @contextlib.contextmanager
    def _sent(
        self,
        method: str,
        path: str,
        body: object,
        query: Mapping[str, Query],
        timeout_s: float,
        silence_s: float | None,
        more: Mapping[str, str] = NO_HEADERS,
    ) -> Iterator[_Response]:
        """The answer once its head came, `timeout_s` for that, `silence_s` for what follows.

        Raises the error the answer carries; translates what goes wrong while it is read.
        """
        target = quote(path)
        given = {name: value for name, value in query.items() if value is not None}
        if given:
            target += "?" + urlencode(given, doseq=True)
        data = None if body is None else json.dumps(body).encode()
        headers = {"Host": "hive", "Connection": "close", "Accept": "application/json", **more}
        if data is not None:
            headers["Content-Type"] = "application/json"
        elif method != "GET":
            data = b""
        with _translated(self.path), _connected(self.path, timeout_s) as sock:
            with contextlib.suppress(BrokenPipeError):  # answered before it had read all: the answer says why
                sock.sendall(encode_request(method, target, headers, data))
            response = _Response(sock)
            if (status := response.status()) >= 400:
                raise _error_of(status, response.body())
            sock.settimeout(silence_s)
            yield response


class _Response:
    """An answer as it is read. Every method raises OSError and CallFailed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._answer = HttpAnswer()

    def status(self) -> int:
        """The status, as soon as the head is there."""
        while not self._answer.headed:
            self._answer.feed(self._sock.recv(PIECE_BYTES))
        return self._answer.status

    def pieces(self) -> Iterator[bytes]:
        """The body as it comes."""
        while True:
            if piece := self._answer.take():
                yield piece
            elif self._answer.complete:
                return
            else:
                self._answer.feed(self._sock.recv(PIECE_BYTES))

    def body(self) -> bytes:
        """The whole body."""
        content = bytearray()
        for piece in self.pieces():
            content += piece
            if len(content) > ANSWER_MAX_BYTES:
                raise AnswerTooLarge(ANSWER_MAX_BYTES)
        return bytes(content)


def signed(headers: Mapping[str, str], op_token: str) -> Mapping[str, str]:
    """The headers of an order, with the word of its signers where there is one. Raises UsageError for what is no token.

    >>> signed({}, ""), signed({"A": "b"}, "eyJ...\\n")
    ({}, {'A': 'b', 'X-Hive-Op-Token': 'eyJ...'})
    """
    if not op_token:
        return headers
    token = op_token.strip()
    if not token.isascii() or not token.isprintable() or not token:
        raise UsageError("an operation token is one line of ASCII, as hive op sign leaves it in its file")
    return {**headers, OP_TOKEN: token}


def find(sockets: list[Path]) -> Client:
    """The client of the first socket with a listener.

    Raises NotPermitted where there is one that is closed to this user, else DependencyDown that names them all.

    A single socket is taken as it is: its own error says more.
    """
    clients = [Client(path) for path in sockets]
    if len(clients) == 1:
        return clients[0]
    for client in clients:
        if client.answers():
            return client
    for path in sockets:
        if path.exists() and not os.access(path, os.W_OK):
            raise NotPermitted(f"this user may not use {path}", hint=_not_yours(path))
    raise DependencyDown(f"no Hive answers at {' or '.join(map(str, sockets))}", hint=_not_running(sockets))


def _not_running(sockets: Sequence[Path]) -> str:
    """Starts what should listen there: an installed Hive, where one of them would be its socket."""
    is_meant = any(APPLIANCE_RUNTIME in path.parents for path in sockets)
    return INSTALLED_NOT_RUNNING if is_meant and INSTALLED.exists() else NOT_RUNNING


def _not_yours(path: Path) -> str:
    """Opens that socket to this user; the installed Hive's are open to a group."""
    if APPLIANCE_RUNTIME not in path.parents:
        return "ask as the user who runs this Hive or as root"
    import grp
    import pwd

    try:
        return membership(pwd.getpwuid(os.geteuid()).pw_name, grp.getgrnam(GROUP).gr_mem)
    except KeyError:
        return f"ask as root, or as a member of the group {GROUP}"


def membership(user: str, members: Sequence[str]) -> str:
    """Command that lets this user use the installed Hive. A session may be older than a membership in the group.

    >>> membership("ann", [])
    'ask as root, or be made a member: sudo usermod -aG hive ann, then log in again'
    >>> membership("ann", ["ann"])
    'log in again: ann is in the group hive, but this session is older than that'
    """
    if user in members:
        return f"log in again: {user} is in the group {GROUP}, but this session is older than that"
    return f"ask as root, or be made a member: sudo usermod -aG {GROUP} {user}, then log in again"


def path_of(ref: str, *below: str) -> str:
    """The path of an agent, or of what is below it. Raises UsageError where something of it is empty.

    >>> path_of("alice", "pause"), path_of("../x", "messages", "a/b")
    ('/api/agents/alice/pause', '/api/agents/..%2Fx/messages/a%2Fb')
    """
    if not all((ref, *below)):
        raise UsageError("an empty name or id names nothing")
    return "/".join(["/api/agents", *(quote(part, safe="") for part in (ref, *below))])


def _connected(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(os.fspath(path))
        sock.settimeout(timeout_s)
    except BaseException:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Turns what a socket and an answer raise into what a person can act on."""
    try:
        yield
    except PermissionError:
        raise NotPermitted(f"this user may not use {path}", hint=_not_yours(path)) from None
    except TimeoutError:
        raise TimedOut(f"Hive at {path} did not answer in time") from None
    except ConnectionRefusedError:
        raise DependencyDown(
            f"no Hive answers at {path}",
            hint="a daemon that was killed is started again within seconds; if not, " + _not_running([path]),
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise DependencyDown(f"no Hive answers at {path}", hint=_not_running([path])) from None
    except CallFailed:
        raise DependencyDown(f"Hive at {path} broke off its answer", hint="`hive status` says how it is") from None
    except OSError as error:
        raise DependencyDown(f"Hive at {path} broke off: {error or type(error).__name__}") from None


def _error_of(status: int, data: bytes) -> HiveError:
    """The error that an answer carries, as the class it had in the daemon."""
    try:
        found = json.loads(data)
        if "error" in found:  # as the runner API says it
            found = {"detail": found["error"]["message"], **found["error"]}
        code, detail, hint = found["code"], found["detail"], found.get("hint", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return HiveError(f"the answer was {status}")
    return error_of({"status": status, "code": code, "detail": detail, "hint": hint})


def error_of(told: Answer) -> HiveError:
    """The error that is told by `status`, `code`, `detail` and `hint`, as the class it had in the daemon."""
    error = by_code(told["code"], told["status"])(told["detail"])
    error.code, error.status = told["code"], told["status"]
    if told["hint"]:
        error.hint = told["hint"]
    return error
