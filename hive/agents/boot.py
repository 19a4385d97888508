"""The agents to start when the machine has come up again, or Hive after it went down by itself. Pure."""

from __future__ import annotations

from hive.domain import ALIVE, Agent, AgentStatus, RestartPolicy


def why_started(agent: Agent, *, is_new_boot: bool) -> str:
    """The reason to start it without a request for it, in words; empty where there is none.

    What Hive itself stopped when it went down ran until then, and comes back whatever its policy. `is_new_boot`: the
    machine was started since Hive looked last, and none of its processes can live; only then autostart and policy are
    asked.

    >>> from hive.domain import AgentSpec
    >>> spec = AgentSpec(name="bob", restart=RestartPolicy.UNLESS_STOPPED)
    >>> stopped = Agent(id="a1", spec=spec, status=AgentStatus.STOPPED, stopped_by="operator")
    >>> why_started(stopped, is_new_boot=True), why_started(Agent(id="a1", spec=spec, status=AgentStatus.PAUSED),
    ...     is_new_boot=True)
    ('', 'it ran when the machine went down')
    """
    if agent.status in ALIVE:
        return "it ran when the machine went down" if is_new_boot else ""
    if agent.stopped_by == "hive":
        return "it ran when Hive went down"
    if not is_new_boot:
        return ""
    if agent.spec.autostart:
        return "autostart"
    match agent.spec.restart:
        case _ if agent.status is AgentStatus.CREATED:
            return ""  # what was never started has nothing to come back to
        case RestartPolicy.ALWAYS:
            return "restart = always"
        case RestartPolicy.UNLESS_STOPPED if agent.stopped_by != "operator":
            return "restart = unless-stopped"
        case _:
            return ""
