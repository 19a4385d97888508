"""One order to several agents: each is tried, and the first failure is the exit code."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from hive.cli.agents import steer
from hive.cli.call import CommandCall
from hive.errors import HiveError, WrongState

Hive = Any
"""conftest.Hive: test modules import no siblings."""


@pytest.mark.parametrize(
    ("verb", "status"), [("stop", "stopped"), ("restart", "running"), ("resume", "running"), ("start", "running")]
)
def test_several_take_one_order(hive: Hive, verb: str, status: str) -> None:
    """`hive agent stop a1 a2` was `Got unexpected extra argument (a2)`."""
    said = hive("agent", verb, "busy-bob", "alice", "busy-bob")
    assert (said.code, said.err) == (0, "")
    assert said.out == f"busy-bob is {status}\nalice is {status}\n"


def test_a_failure_ends_nothing_and_the_first_one_is_the_exit_code(hive: Hive) -> None:
    said = hive("agent", "pause", "busy-bob", "alicia", "alice", "--timeout", "0.1")
    assert (said.code, said.out) == (7, "alice is paused (light)\n")
    busy = "hive: busy-bob could not be put to sleep within 0.1 s: 1 request in flight; it is awake  [timeout]"
    assert said.err.splitlines()[:2] == ["hive: there is no agent 'alicia'  [not_found]", busy]
    said = hive("agent", "pause", "alicia", "busy-bob", "--now")
    assert said.code == 3
    assert said.err.endswith("hive: there is no agent 'alicia'  [not_found]\nhint: did you mean `alice`?\n")


def test_json_of_one_is_as_it_was_and_of_several_a_list(hive: Hive) -> None:
    assert hive("agent", "stop", "alice", "--json").json["name"] == "alice"
    said = hive("agent", "start", "alice", "zzz", "--json")
    assert (said.code, said.error["code"]) == (3, "not_found")
    assert [(one["name"], one["status"]) for one in said.json["agents"]] == [("alice", "running")]
    assert [(one["agent"], one["code"]) for one in said.json["failed"]] == [("zzz", "not_found")]
    assert hive("agent", "stop", "--all", "--json").json["failed"] == []


def test_all_means_those_to_whom_it_says_something(hive: Hive) -> None:
    """None that is stopped is an error of `pause --all`, and `restart --all` starts none that an operator stopped."""
    assert hive("agent", "stop", "alice").code == 0
    assert hive("agent", "restart", "--all").out == "busy-bob is running\n"
    assert hive("agent", "start", "-a").out == "alice is running\n"
    assert hive("agent", "stop", "--all").out == "alice is stopped\nbusy-bob is stopped\n"
    said = hive("agent", "stop", "--all")
    assert (said.code, said.out, said.err) == (0, "", "there is no agent to stop\n")
    assert hive("agent", "pause", "--all", "--json").json["agents"] == []


@pytest.mark.parametrize("verb", ["start", "stop", "restart", "resume", "pause"])
def test_none_or_both_is_a_usage_error(hive: Hive, verb: str) -> None:
    assert hive("agent", verb).err == "hive: which agent?  [usage]\nhint: NAME..., or --all for each of them\n"
    assert hive("agent", verb, "alice", "--all").code == 2


@pytest.mark.usefixtures("ends_at_once")
def test_a_start_that_fails_is_one_of_several_failures(hive: Hive) -> None:
    hive("agent", "create", "crasher", "--", "/bin/false")
    said = hive("agent", "start", "crasher", "alice")
    assert (said.code, said.out) == (1, "alice is running\n")
    assert "crasher ended at once: exited with 1" in said.err


def test_each_failure_of_several_says_whose_it_is() -> None:
    """`hive agent start crawler lab` said what the policy refuses twice, and not to whom."""
    said: list[str] = []

    class Heard(Anyone):
        def say(self, text: str) -> None:
            said.append(text)

    refused = [("crawler", HiveError("image x is not permitted")), ("lab", HiveError("runtime y is not permitted"))]
    down = [(f"a{number}", HiveError("no Hive answers")) for number in range(9)]
    with pytest.raises(HiveError) as raised:
        steer._fail(Heard(), [*refused, *down, ("zoe", HiveError("there is no agent 'zoe'"))])
    assert raised.value.message == "crawler: image x is not permitted"
    assert said == [
        "hive: lab: runtime y is not permitted  [internal]",
        "hive: no Hive answers  [internal]",
        "hive: there is no agent 'zoe'  [internal]",
    ]


class Anyone(CommandCall):
    def __init__(self) -> None:
        pass


def outcomes(order: steer.Order, count: int) -> Iterator[dict[str, Any] | HiveError]:
    return steer._outcomes(Anyone(), [f"a{number}" for number in range(count)], order)


def test_orders_to_many_go_out_beside_each_other() -> None:
    """A thousand agents that take their ten seconds to end were three hours, one by one."""

    def slow(name: str) -> dict[str, Any]:
        time.sleep(0.2)
        return {"name": name}

    begun = time.monotonic()
    assert [one["name"] for one in outcomes(slow, 48)] == [f"a{number}" for number in range(48)]  # type: ignore[index]
    assert time.monotonic() - begun < 48 * 0.2 / 3


def test_a_fault_of_hives_own_is_raised_and_a_refusal_is_an_outcome() -> None:
    def strange(name: str) -> dict[str, Any]:
        raise WrongState("stopped") if name == "a0" else KeyError(name)

    found = outcomes(strange, 2)
    assert isinstance(next(found), WrongState)
    with pytest.raises(KeyError):
        next(found)
