"""The picture of a density run: one bar a way, as SVG, made without a library. Pure."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from hive.bench.table import heading, shown_step

WIDTH = 760
LEFT = 170
RIGHT = 190
BAR = 26
STEP = 44
TOP = 64
COLOURS = {"none": "#9aa5b1", "kernel": "#5b7083", "hive": "#c98a1b", "templates": "#e0a93b", "ready": "#f0c869"}


def svg(found: dict[str, Any]) -> str:
    """The whole file. A bar ends at the edge, a thin line goes from what fits to what does not."""
    ways = found["ways"]
    most = max((_reach(way) for way in ways), default=0) or 1
    scale = (WIDTH - LEFT - RIGHT) / most
    height = TOP + STEP * len(ways) + 34
    first, _, second = heading(found).partition("\n")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="agents that fit into the box, by way">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 22, f"Agents that fit into {found['asked']['box_mib']} MiB ({found['asked']['agents']})", "bold"),
        _text(12, 42, first.partition("; ")[2], size=11),
    ]
    for number, way in enumerate(ways):
        lines += _bar(way, TOP + number * STEP, scale)
    lines += [_text(12, height - 12, second, size=10), "</svg>"]
    return "\n".join(lines) + "\n"


def _reach(way: dict[str, Any]) -> int:
    edge = way["edge"]
    return 0 if edge is None else max(edge["agents"], edge["fits"], edge["misses"] or 0)


def _bar(way: dict[str, Any], top: int, scale: float) -> list[str]:
    middle = top + BAR / 2
    lines = [_text(12, middle + 4, way["name"])]
    edge = way["edge"]
    if edge is None:
        return [*lines, _text(LEFT, middle + 4, "skipped" if way["skipped"] else "not measured", size=11)]
    wide = edge["agents"] * scale
    lines.append(f'<rect x="{LEFT}" y="{top}" width="{wide:.1f}" height="{BAR}" fill="{COLOURS[way["way"]]}"/>')
    if edge["misses"] is not None:
        begin, end = LEFT + edge["fits"] * scale, LEFT + edge["misses"] * scale
        lines.append(f'<path d="M{begin:.1f} {middle}H{end:.1f}" stroke="#1f2933" stroke-width="2"/>')
    step = shown_step(way["steps"])
    p95 = max((one["p95_s"] for one in step["series"]), default=None) if step else None
    said = {"between": "", "at least": "≥ ", "fewer than": "< "}[edge["bound"]] + str(edge["agents"] or edge["misses"])
    said += f"  ({way['times_said']})" if way["times_said"] else ""
    said += "" if p95 is None else f"  p95 {p95:.2f} s"
    return [*lines, _text(LEFT + max(wide, _reach(way) * scale) + 8, middle + 4, said)]


def _text(x: float, y: float, said: str, weight: str = "normal", *, size: int = 13) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="#1f2933">{escape(said)}</text>'
