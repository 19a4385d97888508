"""The inference servers to choose from: services of this host, or a server at a known address."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from hive.backends.ask import parse_address
from hive.backends.kinds import SPECS, spec_of
from hive.backends.launch import SERVICES, STARTED, socket_of, unit_of
from hive.backends.recognise import CANDIDATES, NAME_WHAT_IS_BEHIND, look, recognise, why_no_hive, why_unknown
from hive.backends.switch import STOP_GRACE_S, Target
from hive.domain import BackendInfo, origin_of
from hive.errors import DependencyDown, HiveError, LinkLost, NotSupported, UsageError, did_you_mean
from hive.host.access import NO_ACCESS, RemoteAccess
from hive.link.helper import BackendIs
from hive.sandbox.client import SandboxClient
from hive.settings.table import InferenceSection
from hive.terminal_text import counted

AccessOf = Callable[[], RemoteAccess]
log = logging.getLogger("hive.daemon")
Result = TypeVar("Result")

HELPER_WITHIN_S = 30.0
"""A helper that is restarted is there again within seconds; a switch waits for it."""
LOOK_AGAIN_S = 0.1
RESTARTS_MAX = 2
"""A service systemd has started again this often will not come up by itself: it is not waited for any longer."""


class BackendCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One server that could be switched to. `state`: in systemd's words, or `running`, `silent`; `answers`: now."""

    target: Target
    state: str
    answers: bool
    version: str = ""


class Choices(Protocol):
    """The servers to switch to, and the way to bring one up. Every method raises HiveError that says what is wrong."""

    async def find(self, asked: str) -> Target:
        """The one an operator means: a kind, or an address. Raises UsageError, DependencyDown."""
        ...

    async def listed(self, active: Target | None) -> list[BackendCandidate]:
        """All of them, as they are now; nothing is started for that."""
        ...

    async def start(self, target: Target) -> None: ...

    async def stop(self, target: Target) -> None: ...

    async def why_dead(self, target: Target) -> str:
        """The reason that it will never answer, however long the wait; empty where it may."""
        ...

    async def log(self, kind: str, lines: int, *, last_run: bool = False) -> str:
        """The last lines written by the server of this kind. Raises NotSupported where Hive does not have it."""
        ...


class ServiceCandidates:
    """The services of an installed Hive, through the helper; besides them what somebody else started."""

    def __init__(self, helper: SandboxClient, access: AccessOf = lambda: NO_ACCESS) -> None:
        self._helper = helper
        self._access = access

    def __repr__(self) -> str:
        return f"<ServiceCandidates {', '.join(SERVICES)}>"

    async def find(self, asked: str) -> Target:
        return await at_address(asked, self._access()) if set(asked) & set(":./") else service(asked)

    async def listed(self, active: Target | None) -> list[BackendCandidate]:
        choices = list(await asyncio.gather(*(self._choice(kind) for kind in SERVICES)))
        if active is None or active.unit:
            return choices
        info = await recognise(active.address, readable(self._access))
        state, version = ("silent", "") if info is None else ("running", info.version)
        return [BackendCandidate(target=active, state=state, answers=info is not None, version=version), *choices]

    async def _choice(self, kind: str) -> BackendCandidate:
        target, found = service(kind), await self._helper.look_at_backend(kind)
        info = await recognise(target.address) if found.state == "active" else None
        return BackendCandidate(
            target=target, state=found.state, answers=info is not None, version="" if info is None else info.version
        )

    async def start(self, target: Target) -> None:
        await self._with_helper(lambda: self._helper.start_backend(target.kind))

    async def stop(self, target: Target) -> None:
        await self._with_helper(lambda: self._helper.stop_backend(target.kind, grace_s=STOP_GRACE_S))

    async def why_dead(self, target: Target) -> str:
        if not target.unit:
            return ""
        try:
            return _why_dead(await self._helper.look_at_backend(target.kind))
        except LinkLost:
            return ""

    async def log(self, kind: str, lines: int, *, last_run: bool = False) -> str:
        return await self._helper.backend_log(service(kind).kind, lines=lines, last_run=last_run)

    async def first(self, inference: InferenceSection) -> Target | None:
        """The default choice: the server that runs, else the first with its program installed, else none."""
        for kind in SERVICES:
            found = await self._with_helper(lambda kind=kind: self._helper.look_at_backend(kind))  # type: ignore[misc]
            if found.state in ("active", "activating"):
                return service(kind)
        programs = ((kind, spec_of(kind).program) for kind in STARTED)
        installed = (kind for kind, program in programs if program and os.access(program(inference), os.X_OK))
        return next((service(kind) for kind in installed), None)

    async def _with_helper(self, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Every verb may be asked again: what is started is started, what is stopped is stopped."""
        until = asyncio.get_running_loop().time() + HELPER_WITHIN_S
        while True:
            try:
                return await work()
            except LinkLost:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(LOOK_AGAIN_S)


def readable(access: AccessOf) -> RemoteAccess:
    """None of it where it cannot be read: then a server that asks for a key is one that does not answer."""
    try:
        return access()
    except HiveError as error:
        log.error("backend_key_not_read error=%s", error.message)
        return NO_ACCESS


async def at_address(asked: str, access: RemoteAccess) -> Target:
    """The server that answers at an address somebody named. Raises UsageError, DependencyDown with the reason,
    NotSupported for a Hive, and the errors of reading the authorities."""
    address = parse_address(asked)
    looked = await look(address, access)
    if looked.is_hive:
        raise NotSupported(why_no_hive(address), hint=NAME_WHAT_IS_BEHIND)
    found = looked.info
    if found is None:
        why = await why_unknown(address, access)
        is_here = origin_of(address).is_here
        hint = "start it first" if is_here else "backend_api_key_file and backend_ca_file of [inference] may be needed"
        raise DependencyDown(f"no inference server that Hive knows answers at {address}: {why}", hint=hint)
    return Target(found.kind, address)


def service(asked: str) -> Target:
    """The service of this kind. Raises UsageError.

    >>> service("vllm").unit, service("vllm").address
    ('hive-inference-vllm.service', '/run/hive-inference/vllm.sock')
    """
    if asked not in SERVICES:
        hint = did_you_mean(asked, SERVICES) or f"it is one of {', '.join(SERVICES)}"
        raise UsageError(f"{asked[:80]!r} is no inference server of this Hive", hint=hint)
    return Target(asked, str(socket_of(asked)), unit_of(asked))


def _why_dead(found: BackendIs) -> str:
    """The reason that a service will never answer, as a clause; empty where it may.

    >>> _why_dead(BackendIs(unit="u", state="failed", result="exit-code"))
    'u failed (exit-code)'
    >>> _why_dead(BackendIs(unit="u", state="active", restarts=1))
    ''
    """
    if found.state == "missing":
        return f"there is no {found.unit}"
    if found.state == "failed":
        return f"{found.unit} failed ({found.result})"
    if found.state == "inactive":
        return f"{found.unit} has ended"
    if found.restarts >= RESTARTS_MAX:
        return f"{found.unit} ended {counted(found.restarts + 1, 'time')} ({found.result or 'no reason is known'})"
    return ""


class RunningCandidates:
    """Servers that somebody else started: recognised by their answers, never started or stopped."""

    def __init__(self, known: Sequence[str], named: Sequence[str] = (), access: AccessOf = lambda: NO_ACCESS) -> None:
        """`known`: addresses to look at before the default ones; `named`: those of them that somebody named, where any
        server of OpenAI's dialect may answer. `access`: the key and the authorities, read anew; raises HiveError."""
        self._known = list(dict.fromkeys([*named, *known, *CANDIDATES]))
        self._named = set(named)
        self._access = access

    def __repr__(self) -> str:
        return f"<RunningCandidates {', '.join(self._known)}>"

    async def find(self, asked: str) -> Target:
        if asked in SPECS:
            return await self._of_kind(asked)
        if not set(asked) & set(":./"):
            kinds = ", ".join(SPECS)
            hint = did_you_mean(asked, SPECS) or f"it is one of {kinds}, or http://HOST:PORT"
            raise UsageError(f"{asked[:80]!r} is no inference server", hint=hint)
        target = await at_address(asked, self._access())
        self._named.add(target.address)
        if target.address not in self._known:
            self._known.insert(0, target.address)
        return target

    async def _of_kind(self, kind: str) -> Target:
        for info in await self._recognised(self._known):
            if info is not None and info.kind == kind:
                return Target(kind, info.address)
        url = "https://HOST/v1" if spec_of(kind).is_remote else "http://HOST:PORT"
        hint = f"start it, or name its address: hive backend switch {url}"
        raise DependencyDown(f"no {kind} answers at {', '.join(self._known)}", hint=hint)

    async def listed(self, active: Target | None) -> list[BackendCandidate]:
        addresses = list(dict.fromkeys([*([] if active is None else [active.address]), *self._known]))
        found = await self._recognised(addresses, active)
        choices = [
            BackendCandidate(
                target=Target(info.kind, info.address), state="running", answers=True, version=info.version
            )
            for info in found
            if info is not None
        ]
        if active is not None and active.address not in {choice.target.address for choice in choices}:
            choices.insert(0, BackendCandidate(target=active, state="silent", answers=False))
        return choices

    async def _recognised(self, addresses: Sequence[str], active: Target | None = None) -> list[BackendInfo | None]:
        access = readable(self._access)
        named = self._named | ({active.address} if active is not None else set())
        asking = (recognise(address, access if address in named else None) for address in addresses)
        return list(await asyncio.gather(*asking))

    async def start(self, target: Target) -> None:
        raise NotSupported(f"{target} is not started by this Hive")

    async def stop(self, target: Target) -> None:
        raise NotSupported(f"{target} is not stopped by this Hive")

    async def why_dead(self, target: Target) -> str:  # noqa: ARG002 - somebody may be starting it
        return ""

    async def log(self, kind: str, lines: int, *, last_run: bool = False) -> str:  # noqa: ARG002
        if spec_of(kind).is_canned:
            raise NotSupported("the demo backend of `hive up` is no service", hint="hive logs backend")
        raise NotSupported(
            f"{kind} was not started by this Hive as a service, so its output is where it was started",
            hint="an installed Hive starts its inference servers itself: sudo ./install.sh",
        )


async def last_lines(choices: Choices, target: Target, lines: int) -> list[str]:
    """The last lines of its last run, for an error; none where they cannot be had."""
    try:
        return (await choices.log(target.kind, lines, last_run=True)).splitlines()[-lines:]
    except HiveError as error:
        log.debug("backend_log_not_read backend=%s error=%s", target, error.message)
        return []
