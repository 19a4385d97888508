"""A switch from one inference server to another: what is done next, and what follows from how that went. Pure.

    close → stop old → memory free → room → start new → health of new → record → open
      any failure ↓
            stop new → memory free → room → start old → health of old  → open

`room` is a step where there is a pool of models: they leave for the new server from `close` on, and nothing else is
loaded until the switch has ended.

The daemon writes each `Switch` down before it does its step, so whoever finds one knows what may have been done.
A server that Hive does not start (`unit` empty) is neither stopped nor started. It is there already, so its health is
looked at first, and nobody waits for one that cannot serve: health → close → record → open.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from hive.backends.kinds import spec_of, whereabouts
from hive.domain import ModelInfo
from hive.settings.table import InferenceSection

RESUMED_MAX = 2
"""A switch over which Hive was ended more often goes back: it may be what ends Hive."""
STOP_GRACE_S = 10.0
"""From SIGTERM to SIGKILL: vLLM that works on a request which is no stream never ends by itself (seen with 0.32)."""
PROBES_MAX = 3
"""Models asked for one token, until one gives it: the smallest ones may be embedding models, which give none."""


class SwitchStep(StrEnum):
    """Step that is being done."""

    CLOSE = "close"
    """Requests wait, those at the old server finish or are cut."""
    STOP = "stop"
    FREE = "free"
    """The GPU's memory is given back."""
    ROOM = "room"
    """Models of the pool have left for it, and what it will take is booked."""
    START = "start"
    HEALTH = "health"
    """It answers, it has models, and one of them gave a token."""
    RECORD = "record"
    """From here on the new one is the chosen one."""
    OPEN = "open"


class SwitchEnd(StrEnum):
    """End of a switch; there is no other. `rolled_back`: the old one is active. `degraded`: neither answers,
    and the old one is still the chosen one."""

    SWITCHED = "switched"
    ROLLED_BACK = "rolled_back"
    DEGRADED = "degraded"


class Target(msgspec.Struct, frozen=True):
    """One server. `address`: `host:port` or a socket path; `unit`: of systemd, empty where Hive does not start it."""

    kind: str
    address: str
    unit: str = ""

    def __str__(self) -> str:
        return str(self.kind) if self.unit else f"{self.kind} at {self.address}"


class Failure(msgspec.Struct, frozen=True):
    """Reason of a failure: code, sentence and hint of its `HiveError`, and the last lines the server wrote."""

    code: str
    message: str
    hint: str = ""
    log: list[str] = []


class Switch(msgspec.Struct, frozen=True, kw_only=True):
    """One switch, as it is written down before `step` is done.

    `back`: on the way back, `why`. `touched`: a server was, or may have been, stopped or started. `then`: what failed
    on the way back. `old_answered`: whether the old one did when the switch began. `resumed`: daemons ended over it.
    `pooled`: there is a pool of models; `loaded`: the ids of those that were loaded, for the way back.
    """

    new: Target
    old: Target | None
    old_answered: bool = True
    step: SwitchStep = SwitchStep.CLOSE
    back: bool = False
    touched: bool = False
    ended: bool = False
    why: Failure | None = None
    then: Failure | None = None
    resumed: int = 0
    pooled: bool = False
    loaded: list[str] = []

    @property
    def comes(self) -> Target | None:
        """Server that is started, checked and let through on this way."""
        return self.old if self.back else self.new

    @property
    def goes(self) -> Target | None:
        """Server that is stopped on this way."""
        return self.new if self.back else self.old

    @property
    def can_be_cancelled(self) -> bool:
        return not (self.ended or self.back or self.step in (SwitchStep.RECORD, SwitchStep.OPEN))


def way(switch: Switch) -> tuple[SwitchStep, ...]:
    """The steps of the way it is on, in order.

    >>> vllm, llama = Target("vllm", "/v", "v.service"), Target("llama", "127.0.0.1:8080")
    >>> "-".join(way(begun(vllm, vllm)))
    'close-stop-free-start-health-record-open'
    >>> "-".join(way(begun(llama, None))), "-".join(way(Switch(new=vllm, old=None, back=True)))
    ('health-close-record-open', 'close-stop-free-open')
    >>> "-".join(way(Switch(new=vllm, old=vllm, pooled=True)))
    'close-stop-free-room-start-health-record-open'
    """
    goes, comes = switch.goes, switch.comes
    has_unit = comes is not None and bool(comes.unit)
    steps = [] if switch.back or has_unit else [SwitchStep.HEALTH]
    steps += [SwitchStep.CLOSE]
    if goes is not None and goes.unit:
        steps += [SwitchStep.STOP, SwitchStep.FREE]
    if has_unit and switch.pooled:
        steps += [SwitchStep.ROOM]
    if has_unit:
        steps += [SwitchStep.START]
    if has_unit and (switch.old_answered or not switch.back):
        steps += [SwitchStep.HEALTH]
    if not switch.back:
        steps += [SwitchStep.RECORD]
    return (*steps, SwitchStep.OPEN)


def begun(
    new: Target, old: Target | None, *, old_answered: bool = True, pooled: bool = False, loaded: Sequence[str] = ()
) -> Switch:
    """A switch before its first step."""
    switch = Switch(new=new, old=old, old_answered=old_answered, pooled=pooled, loaded=list(loaded))
    return msgspec.structs.replace(switch, step=way(switch)[0])


def succeeded(switch: Switch) -> Switch:
    """Its step is done."""
    if switch.step is SwitchStep.OPEN:
        return msgspec.structs.replace(switch, ended=True)
    steps = way(switch)
    step = steps[steps.index(switch.step) + 1]
    return msgspec.structs.replace(
        switch, step=step, touched=switch.touched or step in (SwitchStep.STOP, SwitchStep.START)
    )


def failed(switch: Switch, failure: Failure) -> Switch:
    """Its step did not succeed. Nothing stops the way back: what cannot be done there is noted."""
    if switch.back:
        if switch.step in (SwitchStep.ROOM, SwitchStep.START, SwitchStep.HEALTH):
            return msgspec.structs.replace(switch, step=SwitchStep.OPEN, then=failure)
        if switch.step is SwitchStep.STOP and (switch.old is None or not switch.old.unit):
            switch = msgspec.structs.replace(switch, then=failure)  # else the one that comes back ends it (Conflicts=)
        return succeeded(switch)
    if switch.step is SwitchStep.CLOSE and switch.touched:
        return succeeded(switch)  # no proxy, so nobody asks the server that was stopped
    return _turned_back(switch, failure)


def cancelled(switch: Switch, failure: Failure) -> Switch:
    """Somebody does not want it any more; `can_be_cancelled` says whether that is possible."""
    return _turned_back(switch, failure)


def resumed(switch: Switch) -> Switch:
    """Takes up a switch that a daemon finds: every step can be done again, so it begins anew, either way."""
    if switch.ended or switch.step is SwitchStep.OPEN:
        return switch
    again = msgspec.structs.replace(switch, step=way(switch)[0], resumed=switch.resumed + 1, then=None)
    if not switch.back and again.resumed > RESUMED_MAX:
        why = Failure("internal", f"Hive's daemon ended {again.resumed} times over it")
        return msgspec.structs.replace(again, back=True, why=why, step=SwitchStep.CLOSE)
    return again


def _turned_back(switch: Switch, failure: Failure) -> Switch:
    back = msgspec.structs.replace(switch, back=True, why=failure)
    step = way(back)[1] if switch.touched else SwitchStep.OPEN
    return msgspec.structs.replace(back, step=step)


def end_of(switch: Switch) -> SwitchEnd:
    """End of this switch."""
    if not switch.back:
        return SwitchEnd.SWITCHED
    return SwitchEnd.DEGRADED if switch.then is not None else SwitchEnd.ROLLED_BACK


def active_after(switch: Switch) -> Target | None:
    """The chosen one, as long as this is what is written down."""
    return switch.new if not switch.back and (switch.step is SwitchStep.OPEN or switch.ended) else switch.old


# --- in words ----------------------------------------------------------------------------------------------------


def sentence(switch: Switch) -> str:
    """Sentence that says what is being done.

    >>> llama = Target("llama", "/l", "l.service")
    >>> sentence(Switch(new=llama, old=None)), sentence(Switch(new=llama, old=None, step=SwitchStep.HEALTH))
    ('closing the gate: requests wait from now on', 'llama: waiting until it answers')
    """
    turned = f"going back, because {switch.why.message}: " if switch.back and switch.why is not None else ""
    match switch.step:
        case SwitchStep.CLOSE if switch.old is None:
            return f"{turned}closing the gate: requests wait from now on"
        case SwitchStep.CLOSE:
            return f"{turned}closing the gate: requests at {switch.old} finish, others wait"
        case SwitchStep.STOP:
            return f"{turned}stopping {switch.goes}"
        case SwitchStep.FREE:
            return f"{turned}waiting until its memory is free"
        case SwitchStep.ROOM:
            return f"{turned}waiting until models of the pool have left for {switch.comes}"
        case SwitchStep.START:
            return f"{turned}starting {switch.comes}"
        case SwitchStep.HEALTH:
            return f"{turned}{switch.comes}: waiting until it answers"
        case SwitchStep.RECORD:
            return f"recording {switch.new}"
        case SwitchStep.OPEN:
            return f"{turned}opening the gate"


def outcome(switch: Switch) -> Failure | None:
    """Failure in the end, None where the new one is active.

    >>> old, new = Target("llama", "/l", "l.service"), Target("vllm", "/v", "v.service")
    >>> back = Switch(new=new, old=old, back=True, touched=True, why=Failure("timeout", "it did not answer in 60 s"))
    >>> outcome(back).message
    'vllm: it did not answer in 60 s; llama is active again'
    """
    why = switch.why
    if why is None:
        return None
    tried = f"{switch.new}: {why.message}"
    if switch.then is not None and (switch.old is None or not switch.old.unit):
        active = "no inference server is active" if switch.old is None else f"{switch.old} is active again"
        message = f"{tried}; {active}, and {switch.new} could not be stopped: {switch.then.message}"
        hint = f"it still holds its memory: systemctl stop {switch.new.unit}"
        return Failure("dependency_down", message, hint, [*why.log, *switch.then.log])
    if switch.then is not None:
        again = f"`hive backend logs {switch.old.kind}` says why" if switch.old and switch.old.unit else ""
        message = f"{tried}; and going back failed: {switch.old}: {switch.then.message}"
        return Failure("dependency_down", message, again, [*why.log, *switch.then.log])
    if not switch.touched and switch.old is not None:
        return Failure("rolled_back", f"{tried}; {switch.old} is active as before", why.hint, why.log)
    if switch.old is None:
        return Failure("rolled_back", f"{tried}; no inference server is active, as before", why.hint, why.log)
    active = "is active again" if switch.old_answered else "is chosen again; it did not answer before, either"
    return Failure("rolled_back", f"{tried}; {switch.old} {active}", why.hint, why.log)


# --- what the steps go by ----------------------------------------------------------------------------------------


def waits_for_memory(*, has_gpu: bool, is_free: bool | None, waited_s: float, limit_s: float) -> bool:
    """Whether the next server has to wait for what the last one held. `is_free` None: nobody can tell.

    >>> waits_for_memory(has_gpu=False, is_free=None, waited_s=0, limit_s=10)
    False
    >>> [waits_for_memory(has_gpu=True, is_free=None, waited_s=waited, limit_s=10) for waited in (0, 10)]
    [True, False]
    """
    return has_gpu and not is_free and waited_s < limit_s


def models_to_probe(models: Sequence[ModelInfo], default_model: str, kind: str = "vllm") -> list[str]:
    """Models to ask for one token, until one gives it: the default one, else the small ones first. None of them
    is far: nobody asked for anything to leave the box, and a stub of Ollama's is smaller than every model.

    Somebody else's server may list hundreds, most of which do not chat, and bills a token: there it is the default one
    alone, and without one none where there are more than a few.

    >>> models = [ModelInfo(name="big", size_bytes=9), ModelInfo(name="small", size_bytes=1), ModelInfo(name="m")]
    >>> models_to_probe(models, ""), models_to_probe(models, "m")
    (['small', 'big', 'm'], ['m', 'small', 'big'])
    >>> models_to_probe([*models, ModelInfo(name="s", size_bytes=0, remote_host="https://h")], "s", "ollama")
    ['small', 'big', 'm']
    >>> many = [ModelInfo(name=f"m{number}") for number in range(4)]
    >>> [models_to_probe(many, default, "remote") for default in ("m3", "")]
    [['m3'], []]
    """
    if spec_of(kind).is_remote and len(models) > PROBES_MAX:
        return [model.name for model in models if model.name == default_model]
    where = whereabouts(kind, models)
    near = [model for model in models if where.is_near(model.name)]
    near.sort(key=lambda model: (model.name != default_model, model.size_bytes is None, model.size_bytes or 0))
    return [model.name for model in near[:PROBES_MAX]]


def longest_s(inference: InferenceSection) -> float:
    """Seconds one way may take at most: so long a request waits for the gate before it is refused.

    >>> longest_s(InferenceSection())
    145.0
    """
    health_s = inference.switch_health_tries * inference.switch_health_every_s
    return inference.switch_drain_s + STOP_GRACE_S + inference.switch_free_s + health_s + 5
