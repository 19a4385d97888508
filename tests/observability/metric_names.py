"""Names of metrics: those there are, and those of an expression."""

from __future__ import annotations

import re

from hive.control import metrics as of_daemon
from hive.control import runner_counts
from hive.exposition import MetricKind
from hive.proxy import metrics as of_proxy


def known_names() -> set[str]:
    """Every name that a sample of Hive may have."""
    names = {"up"}
    for row in (*of_daemon.TABLE, *of_proxy.TABLE, *runner_counts.TABLE):
        ends = ("_bucket", "_sum", "_count") if row.kind == MetricKind.HISTOGRAM else ("",)
        names |= {row.full_name + end for end in ends}
    return names


def names_in(expression: str) -> set[str]:
    """The metrics of an expression: words that begin with hive_ or vllm_, and `up`, outside of strings."""
    return set(re.findall(r"\b(?:(?:hive|vllm)_\w+|up)\b", re.sub(r'"[^"]*"', "", expression)))
