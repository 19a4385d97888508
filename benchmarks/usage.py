"""Time of a question about usage beside 3.6 million hourly sums: `python benchmarks/usage.py [--dir D]`.

1,000 agents with 5 models in 20 tenants, each used every hour for 30 days, in a real database made in bulk: all sums,
and single requests (one an hour, agent and model) where a question reads them. Every question of `hive usage` and of
the API is asked of a new connection whose file the kernel was told to forget, at the worst time there is: half a week,
half a day and half an hour from where sums begin. Then what the sums cost a commit of 100 events. Ends by itself;
exit 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE)]

from build_line import build_line

from hive.domain import Agent, AgentSpec, By, UsageEvent
from hive.store import agents, rollups, usage
from hive.store.migrations import migrate
from hive.store.rollups import DAY_S, HOUR_S
from hive.store.usage import UsageFilter

PROMISED_MS = 100.0
NOW = 20_004 * DAY_S + DAY_S // 2 + HOUR_S // 2 - 1.0
"""Unix seconds: 30 days before, half a week, half a day and half an hour from where sums begin."""
HOURS = 30 * 24
PERIODS_S = {"1h": HOUR_S, "6h": 6 * HOUR_S, "24h": DAY_S, "7d": 7 * DAY_S, "30d": 30 * DAY_S}
RUNS = 3
BATCH, COMMITS = 100, 60

Question = Callable[[sqlite3.Connection], Any]


def agent_id(number: int) -> str:
    return f"{number:08x}-a7b1-4c1e-9d0f-{number * 7919:012x}"


def model_name(number: int) -> str:
    return f"llama3.{number}:8b-instruct-q4_0"


def tenant_name(number: int) -> str:
    return f"tenant-{number}"


# The database -------------------------------------------------------------------------------------------------------


def connect(path: Path) -> sqlite3.Connection:
    conn = sqlite3.connect(path, isolation_level=None)
    conn.row_factory = sqlite3.Row
    conn.execute("PRAGMA journal_mode = WAL")
    return conn


@contextmanager
def transaction(conn: sqlite3.Connection) -> Iterator[None]:
    conn.execute("BEGIN IMMEDIATE")
    yield
    conn.execute("COMMIT")


def make(path: Path, given: argparse.Namespace) -> None:
    """Fills a new database as HOURS hours of use would have."""
    conn = connect(path)
    conn.execute("PRAGMA synchronous = OFF")
    migrate(conn)
    with transaction(conn):
        for number in range(given.agents):
            spec = AgentSpec(name=f"agent-{number:05}", command=["true"], tenant=tenant_name(number % given.tenants))
            agents.insert(conn, Agent(id=agent_id(number), spec=spec))
        names = [agent_id(number) for number in range(given.agents)]
        names += [tenant_name(number) for number in range(given.tenants)]
        names += [model_name(number) for number in range(given.models)] + ["vllm"]
        conn.executemany(
            "INSERT INTO usage_names (name, last_day) VALUES (?, ?)", [(name, NOW // DAY_S) for name in names]
        )
        conn.execute(
            "CREATE TEMP TABLE series AS SELECT a.id AS agent, t.id AS tenant, m.id AS model, b.id AS backend,"
            " a.name AS agent_name, t.name AS tenant_name, m.name AS model_name, a.id * 10 + m.id AS used"
            " FROM usage_names a, usage_names t, usage_names m, usage_names b WHERE a.id <= :agents"
            " AND t.id = :agents + 1 + (a.id - 1) % :tenants AND m.id BETWEEN :agents + :tenants + 1 AND :agents +"
            " :tenants + :models AND b.name = 'vllm' ORDER BY m.id, a.id",
            vars(given),
        )
        conn.execute("CREATE TEMP TABLE hours (begins INTEGER)")
        last = int(NOW) // HOUR_S * HOUR_S
        conn.executemany("INSERT INTO hours VALUES (?)", [(last - HOUR_S * back,) for back in range(HOURS, -1, -1)])
        conn.execute(f"CREATE TEMP VIEW used AS SELECT {USED} FROM temp.hours h CROSS JOIN temp.series s")
        for scope in rollups.Scope:
            for of_each in (False, True):
                add_sums(conn, scope, of_each=of_each)
        add_longer(conn)
        add_requests(conn, last)
    conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    conn.close()


USED = """h.begins, s.agent, s.tenant, s.model, s.backend, 1 + (h.begins / 3600 + s.used) % 3 AS requests,
    100 + (s.used * 7 + h.begins) % 4000 AS tokens_in, 20 + (s.used * 3) % 900 AS tokens_out,
    s.used % 64 AS cached_tokens, 0 AS unknown, s.used % 100 = 0 AS cut"""
SUMS = ("requests", "tokens_in", "tokens_out", "cached_tokens", "unknown", "cut")
TOTALS = ", ".join(f"sum({name})" for name in SUMS)


def add_sums(conn: sqlite3.Connection, scope: rollups.Scope, *, of_each: bool) -> None:
    """The hours of one scope: of all models together, or of each."""
    agent = "agent" if scope is rollups.Scope.AGENT else "0"
    tenant = "0" if scope is rollups.Scope.BOX else "tenant"
    model = "model" if of_each else "0"
    told_apart = ", ".join(column for column in ("begins", model, agent, tenant, "backend") if column != "0")
    conn.execute(
        f"INSERT INTO usage_hours SELECT {scope:d}, begins, {model}, {agent}, {tenant}, backend, {TOTALS}"
        f" FROM temp.used GROUP BY {told_apart}"
    )


def add_longer(conn: sqlite3.Connection) -> None:
    """Days and weeks, of the hours."""
    for table, span_s in rollups.SUMS[1:]:
        conn.execute(
            f"INSERT INTO {table} SELECT scope, begins / {span_s} * {span_s} AS longer, model, agent, tenant, backend,"
            f" {TOTALS} FROM usage_hours GROUP BY scope, longer, model, agent, tenant, backend"
        )


def add_requests(conn: sqlite3.Connection, last: int) -> None:
    """One of each agent and model: in each of the last 25 hours, and around the beginnings of longer periods."""
    hours = {last - HOUR_S * back for back in range(25)}
    hours |= {last - PERIODS_S[period] + HOUR_S * off for period in ("7d", "30d") for off in (0, 1)}
    for hour in sorted(hours):
        conn.execute(
            "INSERT INTO inference_usage (id, agent_id, tenant, model, backend, endpoint, unit, tokens_in, tokens_out,"
            " cached_tokens, estimated, cut, queue_ms, ttft_ms, duration_ms, status, created_at, rolled_up)"
            " SELECT printf('65f1c2a3b4c5-%d-%d-%d', :hour, agent, model), agent_name, tenant_name, model_name, 'vllm',"
            " '/v1/chat/completions', 'tokens', 1200, 300, 64, 0, 0, 1.25, 33.5, 812.25, 200,"
            " :hour + 3600.0 * (row_number() OVER (ORDER BY (agent * 7919 + model) % 10007) - 1) / :series, 1"
            " FROM temp.series ORDER BY (agent * 7919 + model) % 10007",
            {"hour": hour, "series": conn.execute("SELECT count(*) FROM temp.series").fetchone()[0]},
        )


# Questions ----------------------------------------------------------------------------------------------------------


def questions() -> dict[str, dict[str, Question]]:
    """Of `hive usage` and `GET /api/usage`, by what is filtered; then the API's others. Each by period."""
    found: dict[str, dict[str, Question]] = {}
    filters = {"": {}, "--agent": {"agent": agent_id(7)}, "--tenant": {"tenant": tenant_name(7)}}
    filters |= {
        "--model": {"model": model_name(3)},
        "--tenant --model": {"tenant": tenant_name(7), "model": model_name(3)},
    }
    for by in By:
        for name, of in filters.items():
            found[f"hive usage --by {by} {name}".strip()] = {
                period: _usage(by, UsageFilter(NOW - span_s, **of)) for period, span_s in PERIODS_S.items()
            }
    for limit in (100, 10_000):
        found[f"GET /api/agents/ID/usage?limit={limit}"] = {
            period: _of_one(span_s, limit) for period, span_s in PERIODS_S.items()
        }
    found["GET /api/system/inference/stats"] = {
        period: lambda conn, since=NOW - PERIODS_S[period]: usage.spent_since(conn, since) for period in ("1h", "24h")
    }
    found["used in all (the daemon's start)"] = {"": usage.used_in_all}
    return found


def _usage(by: By, asked: UsageFilter) -> Question:
    if by is By.AGENT:
        return lambda conn: usage.usage_since(conn, asked)
    return lambda conn: usage.usage_by(conn, by, asked)


def _of_one(span_s: float, limit: int) -> Question:
    return lambda conn: usage.agent_usage(conn, agent_id(7), since=NOW - span_s, limit=limit)


def forget(path: Path) -> None:
    """Nothing of the file is in memory."""
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


class Took(NamedTuple):
    """Milliseconds of a new connection's first answer, what of that was CPU time, and of its second."""

    cold: float
    cpu: float
    warm: float


def took_ms(path: Path, question: Question) -> Took:
    """The best of RUNS, for others may be at work on this machine."""
    took = []
    for _ in range(RUNS):
        forget(path)
        began, cpu_s = time.perf_counter(), time.process_time()
        conn = connect(path)
        question(conn)
        cold, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        question(conn)
        warm = time.perf_counter()
        conn.close()
        took.append(Took(1000 * (cold - began), 1000 * cpu_s, 1000 * (warm - cold)))
    return Took(*(min(figures) for figures in zip(*took, strict=True)))


def agree(path: Path) -> bool:
    """Whether everything it can be added up by is the same in all."""
    conn = connect(path)
    asked = UsageFilter(NOW - PERIODS_S["30d"])
    sums = {usage.total(usage.usage_by(conn, by, asked)) for by in By if by is not By.AGENT}
    sums.add(usage.usage_since(conn, asked).totals)
    conn.close()
    return len(sums) == 1


# Commits ------------------------------------------------------------------------------------------------------------


def commit_ms(path: Path, given: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a commit of BATCH events, each of another agent: with the sums and without, in turns."""
    conn = connect(path)
    took: dict[str, list[float]] = {"with": [], "without": []}
    add = rollups.add
    for number in range(2 * COMMITS):
        how = ("with", "without")[number % 2]
        rollups.add = add if how == "with" else lambda *_: None
        events = [event(f"{os.getpid():x}", number * BATCH + at, given) for at in range(BATCH)]
        began = time.perf_counter()
        with transaction(conn):
            usage.insert(conn, events)
        took[how].append(1000 * (time.perf_counter() - began))
    rollups.add = add
    conn.close()
    return {how: statistics.median(times) for how, times in took.items()}


def event(epoch: str, number: int, given: argparse.Namespace) -> UsageEvent:
    agent = number * 37 % given.agents
    return UsageEvent(
        id=f"{epoch}-{number}",
        epoch=epoch,
        event_no=number + 1,
        agent_id=agent_id(agent),
        tenant=tenant_name(agent % given.tenants),
        model=model_name(number % given.models),
        backend="vllm",
        endpoint="/v1/chat/completions",
        tokens_in=1200,
        tokens_out=300,
        cached_tokens=64,
        status=200,
        created_at=NOW + number / 1000,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--models", type=int, default=5)
    parser.add_argument("--tenants", type=int, default=20)
    parser.add_argument("--dir", type=Path, help="keep the database there, or use the one that is there")
    given = parser.parse_args()
    print(build_line())
    with tempfile.TemporaryDirectory(prefix="hive-", dir="/var/tmp") as directory:
        path = (given.dir or Path(directory)) / "hive.db"
        if not path.exists():
            make(path, given)
        conn = connect(path)
        rows = {table: conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in rollups.UsageTable}
        conn.close()
        print(f"{given.agents} agents × {given.models} models × 30 days, {given.tenants} tenants")
        print(", ".join(f"{table}: {count:,} rows" for table, count in rows.items()), end="")
        print(f", {path.stat().st_size / 1e6:.0f} MB")
        slowest, which = Took(0, 0, 0), ""
        print(f"\n{'milliseconds, cold (warm)':48}" + "".join(f"{period:>15}" for period in PERIODS_S))
        for name, asked in questions().items():
            cells = []
            for period, question in asked.items():
                took = took_ms(path, question)
                slowest, which = max((slowest, which), (took, f"{name} {period}"))
                cells.append(f"{took.cold:7.1f} ({took.warm:5.1f})")
            print(f"{name:48}" + "".join(f"{cell:>15}" for cell in cells))
        is_sound = agree(path)
        commits = commit_ms(path, given)
    print(f"\nthe slowest             {slowest.cold:6.1f} ms   promised < {PROMISED_MS:.0f} ms")
    print(
        f"                        {slowest.cpu:6.1f} ms of CPU: {which}; {os.getloadavg()[0]:.1f} others at work here"
    )
    print(f"however it is added up  {'the same in all' if is_sound else 'NOT THE SAME'}")
    print(f"a commit of {BATCH} events  {commits['with']:6.2f} ms with the sums, {commits['without']:.2f} ms without")
    return 0 if is_sound and slowest.cold < PROMISED_MS else 1


if __name__ == "__main__":
    sys.exit(main())
