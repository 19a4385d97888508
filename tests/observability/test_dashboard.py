"""The dashboard: made of its table, and of metrics that exist. What Prometheus answers is in test_watched.py."""

from __future__ import annotations

import json

from conf.observability import make_dashboard
from conf.observability.make_dashboard import COLUMNS, PANELS
from tests.observability.metric_names import known_names, names_in


def test_the_dashboard_is_what_the_table_makes() -> None:
    """`python conf/observability/make_dashboard.py` writes it anew."""
    assert make_dashboard.OUT.read_text() == make_dashboard.text()


def test_every_metric_of_the_panels_exists() -> None:
    for panels in PANELS.values():
        for panel in panels:
            for query in panel.queries:
                assert names_in(query.expression), panel.title
                assert names_in(query.expression) <= known_names(), panel.title


def test_panels_have_names_of_their_own_and_none_lies_on_another() -> None:
    shown = json.loads(make_dashboard.text())["panels"]
    titles = [panel["title"] for panel in shown]
    assert len(titles) == len(set(titles))
    places = [panel["gridPos"] for panel in shown]
    cells = [(place["x"] + x, place["y"] + y) for place in places for x in range(place["w"]) for y in range(place["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < COLUMNS


def test_every_series_can_be_told_from_the_others_of_its_panel() -> None:
    for panels in PANELS.values():
        for panel in panels:
            legends = [query.legend for query in panel.queries]
            assert all(legends), panel.title
            assert len(legends) == len(set(legends)), panel.title
