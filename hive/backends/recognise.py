"""Recognition of the inference server at an address, by its answers to harmless GETs; no prompt is ever sent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from hive.backends import remote
from hive.backends.ask import FAR_ANSWER_S, get
from hive.backends.conversation import Answers, AskedServer, ControlAnswer, object_in
from hive.backends.kinds import spec_of, specs
from hive.backends.openai_answers import MODELS
from hive.backends.ray_serve import ROUTES, routes_in
from hive.domain import BackendInfo, origin_of
from hive.errors import BackendDown, BackendTimeout
from hive.host.access import NO_ACCESS, RemoteAccess

CANDIDATES = ("127.0.0.1:11434", "127.0.0.1:8000", "127.0.0.1:8080", "127.0.0.1:9931")
"""Default loopback ports: Ollama, vLLM, llama-server of old and of 2026. Servers on unix sockets have no default."""

ALL_WITHIN_S = 1.5
NAME_WHAT_IS_BEHIND = "name the inference server that it stands before; `hive backend status` there shows its address"


class Looked(NamedTuple):
    """Finding at an address: a backend, or a Hive, which is none; else neither."""

    info: BackendInfo | None = None
    is_hive: bool = False


def identify(answers: Answers) -> tuple[str, str] | None:
    """Kind and version of the server that gave these answers (by question), None where it is none we know.

    Hive's own proxy passes some of these questions on, so it would look like the backend behind it: it is told by
    `X-Queue-Wait-Ms`, which it puts on every answer, and by `src: hive` in its refusals.

    >>> kind, version = identify({"/props": ControlAnswer(200, {}, b'{"build_info": "b1-0c1e570"}')})
    >>> str(kind), version
    ('llama', 'b1-0c1e570')
    >>> identify({"/props": ControlAnswer(200, {}, b"<html>It works!</html>")}) is None
    True
    """
    if any(is_hive(answer) for answer in answers.values()):
        return None
    for spec in specs():
        version = spec.recognise(answers)
        if version is not None:
            return spec.kind, version
    return None


def questions_of_all() -> dict[str, None]:
    """Questions of all kinds, each once."""
    return dict.fromkeys(question for spec in specs() for question in spec.questions)


async def recognise(address: str, access: RemoteAccess | None = None) -> BackendInfo | None:
    """The backend at `address` (as `BackendInfo` has it), None where none that we know answers in 1.5 s, on another
    machine in 5 s.

    `access`: given for an address that somebody named. There any server that lists models as OpenAI does is one, of the
    kind `remote`, and it is shown the key. All questions are asked at once; a backend is recognised by those it
    answered. Below a path of its server it is always `remote`.
    """
    return (await look(address, access)).info


async def look(address: str, access: RemoteAccess | None = None) -> Looked:
    """Recognises what is at `address` as `recognise` does, and tells a Hive from what is not known."""
    origin, shown = origin_of(address), (access or NO_ACCESS).shown_to(address)
    within_s = ALL_WITHIN_S if origin.is_here else FAR_ANSWER_S
    questions = (MODELS,) if origin.prefix else tuple(questions_of_all())
    # What runs on this machine and asks for no key is shown none, so it is asked without one first.
    first = shown if origin.tls else NO_ACCESS
    asked = await asyncio.gather(*(_ask(address, question, first, within_s) for question in questions))
    answers = {question: answer for question, answer in zip(questions, asked, strict=True) if answer}
    found = None if origin.prefix else identify(answers)
    if found is None and access is not None:
        listed = answers.get(MODELS)
        if listed is not None and listed.status in (401, 403) and shown != first:
            listed = await _ask(address, MODELS, shown, within_s)
        found = _remote(listed, answers.get(ROUTES))
        answers |= {MODELS: listed} if listed is not None else {}
    if found is None:
        return Looked(is_hive=any(is_hive(answer) for answer in answers.values()))
    kind, version = found
    label = f"{spec_of(kind).label} at {address}"
    return Looked(BackendInfo(kind=kind, address=address, label=label, version=version, up=True))


def _remote(listed: ControlAnswer | None, routes: ControlAnswer | None) -> tuple[str, str] | None:
    """Hive's own proxy lists models, too, and is no backend."""
    version = None if listed is None or is_hive(listed) else remote.listed(listed)
    if version is None:
        return None
    return remote.SPEC.kind, version or ("" if routes_in(routes) is None else remote.RAY_SERVE)


def why_no_hive(address: str) -> str:
    """Sentence that says why a Hive at this address is refused as a backend.

    >>> why_no_hive("h:11435").partition(":")[2].partition(":")[0]
    '11435 is another Hive, and a Hive is no backend of a Hive'
    """
    return (
        f"{address} is another Hive, and a Hive is no backend of a Hive: its queue, limits and bill would take all "
        "agents of this one for a single client, and each request would be counted twice"
    )


async def why_unknown(address: str, access: RemoteAccess) -> str:
    """Sentence that says why what answers at an address that somebody named is no backend."""
    shown = access.shown_to(address)
    try:
        listed = await get(address, MODELS, within_s=FAR_ANSWER_S, access=shown)
    except (BackendDown, BackendTimeout) as error:
        return error.message
    if is_hive(listed):
        return why_no_hive(address)
    if listed.status != 200 and (elsewhere := await _why_elsewhere(address, shown)):
        return elsewhere
    if listed.status != 200:
        withheld = " (a key is not sent over plain HTTP to another host)" if access.key and not shown.key else ""
        return remote.refusal(AskedServer(address, bool(shown.key)), listed.status) + withheld
    return f"{address} answers GET {MODELS} with something else than OpenAI's list of models"


async def _why_elsewhere(address: str, shown: RemoteAccess) -> str:
    """Sentence about a Ray Serve whose applications are not at this address; empty where it is none."""
    routes = None if origin_of(address).prefix else await _ask(address, ROUTES, shown, FAR_ANSWER_S)
    found = routes_in(routes)
    if found is None:
        return ""
    base = address if "://" in address else f"http://{address}"
    prefixes = [route for route in found if route not in ("", "/")]
    if not prefixes:
        return f"{address} is Ray Serve, and no application of it answers GET {MODELS} (serve status tells more)"
    url = f"{base}{prefixes[0]}/v1"
    return f"{address} is Ray Serve with applications at {', '.join(prefixes)}: name one of them, as {url}"


async def find(candidates: Sequence[str] = CANDIDATES) -> BackendInfo | None:
    """The first of `candidates`, in their order, that is a backend; all are asked at once, so 2 s are enough."""
    found = await asyncio.gather(*(recognise(address) for address in candidates))
    return next((info for info in found if info is not None), None)


async def _ask(address: str, question: str, access: RemoteAccess, within_s: float) -> ControlAnswer | None:
    try:
        return await get(address, question, within_s=within_s, access=access)
    except (BackendDown, BackendTimeout):
        return None


def is_hive(answer: ControlAnswer) -> bool:
    """Whether this answer is one of Hive's proxy, or relayed by it."""
    if "x-queue-wait-ms" in answer.headers:
        return True
    refusal = object_in(answer.body)
    error = refusal.get("error")
    return "hive" in (refusal.get("src"), error.get("src") if isinstance(error, dict) else None)
