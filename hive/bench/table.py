"""The words of a density run: a table for people, and the limits of its honesty. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from hive.bench.search import BUSY, TOLD

HEADERS = ["WAY", "AGENTS", "× KERNEL", "P50", "P95", "MIB EACH", "HIVE MIB", "CORES"]
BUSY_MACHINE = 0.5
"""With more load per core than this before the run, its latencies are of a machine that others use too."""
UNKNOWN = "-"


def rows(found: dict[str, Any]) -> list[list[str]]:
    """One row a way that was measured: its edge, and the figures of the largest step that fits (else of the first)."""
    return [_row(way) for way in found["ways"] if not way["skipped"]]


def _row(way: dict[str, Any]) -> list[str]:
    step = shown_step(way["steps"])
    series = step["series"] if step else []
    last = series[-1] if series else None
    return [
        way["name"],
        way["edge"]["said"] if way["edge"] else UNKNOWN,
        way["times_said"] or UNKNOWN,
        UNKNOWN if last is None else f"{max(one['p50_s'] for one in series):.2f} s",
        UNKNOWN if last is None else f"{max(one['p95_s'] for one in series):.2f} s",
        UNKNOWN if way["agent_mib"] is None else f"{way['agent_mib']:.1f}",
        UNKNOWN if not way["hive_mib"] else f"{way['hive_mib']:.0f}",
        UNKNOWN if last is None else f"{max(one['busy'] for one in series) * 100:.0f} %",
    ]


def shown_step(steps: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The largest step that fits and is not CPU-bound, else the smallest there is.

    >>> steps = [{"agents": 20, "fits": True, "cpu_bound": False}, {"agents": 25, "fits": False, "cpu_bound": False}]
    >>> shown_step(steps)["agents"], shown_step(steps[1:])["agents"], shown_step([]) is None
    (20, 25, True)
    """
    fitting = [step for step in steps if step["fits"] and not step["cpu_bound"]]
    if fitting:
        return max(fitting, key=lambda step: step["agents"])
    return min(steps, key=lambda step: step["agents"], default=None)


def notes(found: dict[str, Any]) -> Iterator[str]:
    """Yields what was skipped, ended early or is not counted."""
    for way in found["ways"]:
        if way["skipped"]:
            yield f"{way['name']}: skipped, {way['skipped']}"
        elif way["note"]:
            yield f"{way['name']}: {way['note']}"
        bound = [str(step["agents"]) for step in way["steps"] if step["cpu_bound"]]
        if bound:
            yield (
                f"{way['name']}: CPU-bound and not counted at {', '.join(bound)}: driver, stub and Hive used more than "
                f"{BUSY:.0%} of the cores".replace("%", " %")
            )


def objective(found: dict[str, Any]) -> str:
    """The objective in words."""
    asked, base = found["asked"], found["never_swapped_p95_s"]
    nobody = "nobody killed, every turn answered"
    if asked["swap"] == "file":
        return f"p95 ≤ {found['objective_s']:.2f} s, {nobody}"
    if base is None:
        return f"p95 ≤ {found['objective_s']:.2f} s (no reference of this run: `no swap` was not measured), {nobody}"
    return f"p95 ≤ {found['objective_s']:.2f} s, 1 s above never swapped ({base:.2f} s in this run), {nobody}"


def limits(found: dict[str, Any]) -> list[str]:
    """Every limit of the honesty of this run."""
    made, asked = found["made"], found["asked"]
    said = [
        f"edges are ± {TOLD * 100:.0f} % at least, p95 ± 20 %: bursts are few turns, and each takes other agents",
        "all of Hive and all agents are in the box, and what zram takes is taken off it; the driver, the model's "
        "stand-in and the kernel's own memory for swap maps are outside",
        f"the model is a stand-in ({asked['turn_s']:g} s a turn); agents sleep after 1 s: minutes stand for a day",
        "under Hive each turn passes ingress and its proxy; plain agents are called directly",
        "plain agents share one user, those of Hive have one each, those of a template a network of their own besides",
    ]
    if asked["quick"]:
        said.append(
            "--quick: each step was measured once, over few turns: a check that it works, not a figure to quote"
        )
    if asked["agents"] == "own":
        said.append(
            "the control: its heaps are random data of their own, which nobody can share or compress: 1.0 × is true"
        )
    else:
        said.append("agents whose memory is their own data gain nothing from templates: see --agents own")
    load = made["load_before"] / (made["cores"] or 1)
    if load > BUSY_MACHINE:
        said.append(
            f"the machine was busy before the run (load {made['load_before']:g} on {made['cores']} cores): latencies, "
            "and edges that they end, are not this machine's; repeat it when it is quiet"
        )
    return said


def heading(found: dict[str, Any]) -> str:
    """Says what was measured, where and when, on two lines."""
    made, asked = found["made"], found["asked"]
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made["at"]))
    return (
        f"agents `{asked['agents']}` in {asked['box_mib']} MiB, swap: {asked['swap']}, bursts of {asked['burst']:.0%}; "
        f"{objective(found)}\n"
        f"{when}, {made['took_s']} s; Hive {made['hive']}, Linux {made['kernel']}, {made['cores']} × {made['cpu']}, "
        f"load {made['load_before']:g} before and {made['load_after']:g} after; {made['python']}"
    )
