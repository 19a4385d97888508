"""The table, the notes and the picture of a density run."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from hive.bench.density import WAY_NAMES, compared
from hive.bench.picture import svg
from hive.bench.search import Edge, Series
from hive.bench.table import heading, limits, notes, objective, rows

LATE = Series(0.5, 2.0, 40, 0, 0, 0.2)


def step(agents: int, p95_s: float, *, fits: bool, cpu_bound: bool = False) -> dict[str, Any]:
    series = [LATE._replace(p95_s=p95_s)._asdict()] * 2
    return {"agents": agents, "fits": fits, "cpu_bound": cpu_bound, "series": series}


def way(name: str, edge: Edge | None, *steps: dict[str, Any], skipped: str = "", note: str = "") -> dict[str, Any]:
    return {
        "way": name,
        "name": WAY_NAMES[name],
        "skipped": skipped,
        "hive_mib": 120.0 if name == "hive" else 0.0,
        "agent_mib": None if skipped else 15.3,
        "first_guess": 20,
        "steps": list(steps),
        "edge": None if edge is None else {**edge._asdict(), "said": edge.said},
        "note": note,
    }


def run(**asked: Any) -> dict[str, Any]:
    ways = [
        way("kernel", Edge(22, 20, 25, "between"), step(20, 0.9, fits=True), step(25, 2.0, fits=False)),
        way(
            "hive",
            Edge(33, 33, None, "at least"),
            step(33, 0.8, fits=True),
            step(60, 0.7, fits=True, cpu_bound=True),
            note="no time for another step (at 70)",
        ),
        way("templates", None, skipped="this Hive has no templates"),
    ]
    made = {"at": 0, "took_s": 9, "hive": "1", "kernel": "6", "cpu": "A & B", "cores": 2, "python": "/p"}
    order = {"box_mib": 300, "swap": "zram", "agents": "openai", "burst": 0.1, "quick": False, "turn_s": 0.3}
    return {
        "made": {**made, "load_before": 0.1, "load_after": 0.2},
        "asked": {**order, **asked},
        "never_swapped_p95_s": 0.55,
        "objective_s": 1.55,
        "ways": compared(ways),
    }


def test_each_way_that_was_measured_is_a_row_with_its_edge_and_its_largest_step_that_fits() -> None:
    kernel, hive = rows(run())
    assert kernel == [
        "kernel alone",
        "22 ± 12 % (20 fit, 25 do not)",
        "1.00 ×",
        "0.50 s",
        "0.90 s",
        "15.3",
        "-",
        "20 %",
    ]
    assert hive[:5] == ["Hive", "at least 33", "≥ 1.50 ×", "0.50 s", "0.80 s"]


def test_what_was_skipped_ended_early_or_cpu_bound_is_said() -> None:
    assert list(notes(run())) == [
        "Hive: no time for another step (at 70)",
        "Hive: CPU-bound and not counted at 60: driver, stub and Hive used more than 90 % of the cores",
        "Hive, templates: skipped, this Hive has no templates",
    ]


def test_the_objective_names_its_reference() -> None:
    assert objective(run()).startswith("p95 ≤ 1.55 s, 1 s above never swapped (0.55 s in this run)")
    assert objective(run(swap="file")) == "p95 ≤ 1.55 s, nobody killed, every turn answered"
    assert "no reference" in objective({**run(), "never_swapped_p95_s": None})


def test_a_busy_machine_a_quick_run_and_the_control_are_among_the_limits() -> None:
    busy = run(quick=True, agents="own")
    busy["made"]["load_before"] = 9.0
    said = "\n".join(limits(busy))
    assert "not a figure to quote" in said
    assert "the machine was busy" in said
    assert "1.0 × is true" in said
    assert "busy" not in "\n".join(limits(run()))


def test_the_picture_is_svg_with_a_bar_for_each_way_that_has_an_edge() -> None:
    tree = ElementTree.fromstring(svg(run()))
    space = {"s": "http://www.w3.org/2000/svg"}
    assert len(tree.findall("s:rect", space)) == 1 + 2
    texts = [text.text or "" for text in tree.findall("s:text", space)]
    assert "22  (1.00 ×)  p95 0.90 s" in texts
    assert "≥ 33  (≥ 1.50 ×)  p95 0.80 s" in texts
    assert "skipped" in texts
    assert any("A & B" in text for text in texts)


def test_a_run_without_any_edge_is_a_picture_too() -> None:
    empty = {**run(), "ways": compared([way("kernel", None, skipped="no")])}
    ElementTree.fromstring(svg(empty))
    assert rows(empty) == []


def test_the_heading_says_when_where_and_on_what() -> None:
    assert "1970-01-01 00:00 UTC, 9 s; Hive 1, Linux 6, 2 × A & B, load 0.1 before and 0.2 after; /p" in heading(run())
