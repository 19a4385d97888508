"""`hive pool` and the orders about models in memory, on real llama-servers; and how it all looks to a person."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hive.backends.entries import entries_of
from hive.cli import model, pool
from hive.cli.call import COMPLETED_WITHIN_S
from hive.cli.following import error_of
from hive.domain import RuntimeKind
from hive.link.requests import QueueIs, QueueView, UnderWay
from hive.runtimes.process import ProcessRuntime, log_pipes_of
from hive.sandbox.server import HelperServer
from hive.sandbox.slot_sessions import SlotSessions
from hive.settings.pool import ModelRow, PoolSection
from hive.slots.model_slots import ModelSlots
from tests import llama
from tests.cli.conftest import SETTINGS
from tests.control.box import Box
from tests.control.threaded_box import ThreadedBox, threaded_box
from tests.sandbox.model_servers import SUPERVISOR

Hive = Any
"""conftest.Hive: test modules import no siblings."""
GIB = 1 << 30


class PoolOfTwo(Box):
    """A helper that starts a real llama-server for `meta/tiny`; the file of `gone` is not there."""

    async def open(self, file: Path) -> None:
        models = {"meta/tiny": ModelRow(file=str(file)), "gone": ModelRow(file="/nowhere/gone.gguf")}
        inference = replace(SETTINGS.inference, aliases="small = meta/tiny", quantization_routing=False)
        settings = replace(SETTINGS, inference=inference, models=models, pool=PoolSection(reserve_mb=0, cpu_mb=1000))
        ids = {entry.name: entry.id for entry in entries_of(settings).values()}

        def command(slot: str) -> Sequence[str]:
            socket = str(self.paths.slot_socket(slot))
            server = [str(llama.program()), "-m", str(file), "--host", socket, "--ctx-size", "256", "--no-warmup"]
            return [sys.executable, "-P", "-c", SUPERVISOR, str(self.paths.slot_grant(slot)), "60", socket, *server]

        pipes = log_pipes_of(self.paths, 100_000)
        self.helper = HelperServer(
            self.paths,
            {RuntimeKind.PROCESS: ProcessRuntime(self.paths, subtree=None, log_max_bytes=100_000)},
            slots=ModelSlots(self.paths, SlotSessions(self.paths, pipes, subtree=None, command=command), ids.values),
        )
        await self.helper.open()
        await self.start_daemon(settings)
        await self.start_real_proxy()

    async def end(self) -> None:
        """Ends what was started, too."""
        if self.daemon is not None:
            for slot in self.services.pool.view()["slots"]:
                await self.daemon._helper.slot_stop(slot["id"], grace_s=0)
        await super().end()


@pytest.fixture(scope="module")
def pool_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadedBox]:
    if llama.program() is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    with threaded_box(PoolOfTwo) as daemon:
        assert isinstance(daemon.box, PoolOfTwo)
        file = tmp_path_factory.mktemp("models") / "tiny.gguf"
        subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(file)], check=True)
        daemon.do(daemon.box.open(file))
        yield daemon


@pytest.fixture
def hive(pool_daemon: ThreadedBox, monkeypatch: pytest.MonkeyPatch, no_daemon: Hive) -> Hive:
    monkeypatch.setenv("HIVE_SOCKET", str(pool_daemon.socket))
    return type(no_daemon)(pool_daemon.socket, no_daemon._capture, pool_daemon)


def slot_of(hive: Hive, model: str = "meta/tiny") -> dict[str, Any]:
    found = {slot["model"]: slot for slot in hive("pool", "--json").json["slots"]}
    return dict(found[model])


# orders to a real pool ------------------------------------------------------------------------------------------------


def test_a_model_is_loaded_and_unloaded_and_each_time_it_is_said_how_that_went(hive: Hive) -> None:
    hive("model", "unload", "meta/tiny", "--force")
    said = hive("model", "load", "meta/tiny")
    assert (said.code, re.sub(r"[0-9]+", "N", said.out)) == (0, "meta/tiny is loaded, after Ns\n"), said.err
    assert "loading meta/tiny" in said.err
    slot = slot_of(hive)
    assert (slot["state"], slot["loading_s"]) == ("ready", None)
    assert slot["grants"][0]["account"] == "cpu"
    assert hive("model", "load", "meta/tiny").out == "meta/tiny was loaded already\n"
    said = hive("model", "unload", "meta/tiny")
    assert (said.code, said.out.split(",")[0].strip()) == (0, "meta/tiny is unloaded")
    assert slot_of(hive)["state"] == "cold"
    assert hive("model", "unload", "meta/tiny").out == "meta/tiny was unloaded already\n"


def test_a_load_says_what_leaves_for_it_and_what_it_has_to_take(hive: Hive) -> None:
    hive("model", "unload", "meta/tiny", "--force")
    for words, code, why in (
        (("--context", "99999999"), 2, "maxContextLength"),
        (("--quantization", "awq-4bit"), 2, "awq-4bit"),
        (("--evict", "nobody"), 3, "nobody"),
        (("--context", "0"), 2, "--context"),
        (("--context", "16", "--break-glass", "fire"), 2, "--break-glass"),
    ):
        said = hive("model", "load", "meta/tiny", *words)
        assert (said.code, why in said.err) == (code, True), (words, said.err)
    assert slot_of(hive)["state"] == "cold"
    said = hive("model", "load", "meta/tiny", "--context", "16", "--evict", "gone")
    assert (said.code, said.out.split(",")[0]) == (0, "meta/tiny is loaded"), said.err
    assert hive("model", "load", "meta/tiny", "--context", "16").out == "meta/tiny was loaded already\n"


def test_a_pinned_model_is_unloaded_by_force_alone_which_ends_the_pin(hive: Hive) -> None:
    assert hive("model", "pin", "meta/tiny").out.startswith("meta/tiny is pinned; it is ")
    assert hive("model", "load", "meta/tiny").code == 0
    assert "ready, pinned" in hive("pool").out
    refused = hive("model", "unload", "meta/tiny")
    assert (refused.code, refused.out) == (1, "")
    assert "is pinned" in refused.err
    assert "hive model unpin meta/tiny" in refused.err
    assert hive("model", "unload", "meta/tiny", "--force").code == 0
    assert slot_of(hive)["pinned"] is False
    assert hive("model", "unpin", "meta/tiny").out.startswith("meta/tiny is unpinned; it is ")


def test_one_that_cannot_be_loaded_says_why_and_an_unknown_one_what_there_is(hive: Hive) -> None:
    said = hive("model", "load", "gone")
    assert (said.code, said.out) == (1, "")
    assert "/nowhere/gone.gguf" in said.err
    for words in (("load",), ("unload",), ("pin",), ("unpin",), ("logs",)):
        said = hive("model", *words, "meta/tin")
        assert (said.code, "did you mean `meta/tiny`?" in said.err) == (3, True), (words, said.err)
    assert hive("pool", "explain", "meta/tin").code == 3
    for group in (("model", "load"), ("pool", "explain")):
        assert hive(*group, "").code == 2


def test_a_model_may_be_named_by_its_alias(hive: Hive) -> None:
    hive("model", "unload", "meta/tiny", "--force")
    assert hive("model", "load", "small").out.startswith("meta/tiny is loaded, after ")
    assert hive("pool", "explain", "small", "--json").json["model"] == "meta/tiny"
    assert hive("model", "unload", "small").out.startswith("meta/tiny is unloaded")


def test_the_pool_has_a_line_for_the_memory_and_one_for_each_model(hive: Hive) -> None:
    said = hive("pool")
    memory, _, models = said.out.partition("\n\n")
    assert memory.splitlines()[0].split() == ["MEMORY", "USE", "MODELS", "BOOKED", "LEASES", "OTHERS", "FREE", "TOTAL"]
    assert memory.splitlines()[1].startswith("host memory  ")
    assert memory.splitlines()[1].endswith("  1.0 GiB")
    assert "unmeasured" not in memory
    assert [line.split()[0] for line in models.splitlines()] == ["MODEL", "meta/tiny", "gone"]
    assert "/nowhere/gone.gguf" in models
    found = hive("pool", "--json").json
    assert (found["schema"], found["enabled"], len(found["slots"])) == ("pool.show", True, 2)


def test_why_a_model_is_where_it_is_is_explained_for_each_band(hive: Hive) -> None:
    hive("model", "unload", "meta/tiny", "--force")
    said = hive("pool", "explain", "meta/tiny")
    assert (said.code, said.out.splitlines()[0]) == (0, "meta/tiny is cold")
    assert hive("pool", "explain", "meta/tiny", "--band", "high", "--json").json["fits"] is True
    assert hive("pool", "explain", "meta/tiny", "--band", "highest").code == 2
    assert "/nowhere/gone.gguf" in hive("pool", "explain", "gone").out


def test_what_the_server_of_a_model_wrote_is_kept_after_its_end(hive: Hive) -> None:
    hive("model", "load", "meta/tiny")
    hive("model", "unload", "meta/tiny", "--force")
    said = hive("model", "logs", "meta/tiny", "-n", "500")
    assert (said.code, "the supervisor begins" in said.out) == (0, True), said.err
    assert len(hive("model", "logs", "meta/tiny", "-n", "2", "--json").json["lines"]) == 2


def test_models_of_the_pool_are_in_the_list_with_their_state(hive: Hive) -> None:
    hive("model", "load", "meta/tiny")
    said = hive("model", "list")
    rows = {line.split()[0]: line for line in said.out.splitlines()}
    assert "POOL" in rows["MODEL"]
    assert "ready" in rows["meta/tiny"]
    assert "cold" in rows["gone"] or "failed" in rows["gone"]
    assert said.err == ""
    assert {slot["model"] for slot in hive("model", "list", "--json").json["pool"]} == {"meta/tiny", "gone"}


def test_loads_are_counted_for_prometheus(hive: Hive) -> None:
    hive("model", "unload", "meta/tiny", "--force")
    before = _metric(hive, 'hive_pool_loads_total{model="meta/tiny"')
    hive("model", "load", "meta/tiny")
    assert _metric(hive, 'hive_pool_loads_total{model="meta/tiny"') == before + 1
    assert _metric(hive, 'hive_pool_slots{state="ready"}') == 1
    assert _metric(hive, 'hive_pool_charged_bytes{gpu="cpu",kind="llama"}') > 0


def _metric(hive: Hive, begin: str) -> float:
    text = hive.daemon.do(hive.box.services.scraper.scrape()).decode()
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(begin))


def test_doctor_names_the_file_that_is_not_there(hive: Hive, tmp_path: Path) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text("[model gone]\nfile = /nowhere/gone.gguf\n")
    said = hive("doctor", "pool", "--config", str(conf), "--json")
    found = {check["name"]: check for check in said.json["checks"]}
    assert (said.code, found["pool.files"]["status"]) == (1, "fail")
    assert found["pool.files"]["reason"].startswith("there is no /nowhere/gone.gguf for gone")
    assert {found[name]["status"] for name in ("pool.models", "pool.memory")} <= {"pass", "skip"}


def test_names_are_completed_from_the_pool(hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
    from hive.cli import call

    monkeypatch.setattr(call, "COMPLETED_WITHIN_S", 100 * COMPLETED_WITHIN_S)

    class Context:
        socket, state_dir = hive.socket, None

    assert call.pool_model_names(Context(), "me") == ["meta/tiny"]  # type: ignore[arg-type]
    assert call.loadable_names(Context(), "") == ["meta/tiny", "gone"]  # type: ignore[arg-type]


def test_without_models_it_says_that_there_is_no_pool_and_why(shared_hive: Hive) -> None:
    said = shared_hive("pool")
    assert (said.code, said.out) == (0, "there is no pool: no model is described: [model NAME] in hive.conf\n")
    assert shared_hive("pool", "explain", "tiny").code == 3


def test_ollama_loads_and_unloads_what_is_none_of_the_pool_s(shared_hive: Hive) -> None:
    assert shared_hive("model", "load", "tiny").out.startswith("tiny:latest is loaded, after ")
    assert shared_hive("model", "load", "tiny").out == "tiny:latest was loaded already\n"
    assert shared_hive("model", "unload", "tiny").out.startswith("tiny:latest is unloaded, after ")
    assert shared_hive("model", "load", "gpt-9").code == 3
    assert shared_hive("model", "pin", "tiny").code == 3


def test_watching_wants_a_terminal(no_daemon: Hive) -> None:
    said = no_daemon("pool", "--watch")
    assert (said.code, "draws on a terminal" in said.err) == (2, True)


# how it looks ---------------------------------------------------------------------------------------------------------


def slot(model: str, **fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "id": f"{model}-0",
        "model": model,
        "backend": "llama",
        "state": "cold",
        "why": "Nobody has asked for it",
        "grants": [],
        "need_bytes": 22 * GIB,
        "pinned": False,
        **dict.fromkeys(("in_flight", "waiting", "audience", "failures"), 0),
        "turn_ends_in_s": None,
        "load_s": 47.2,
        "loading_s": None,
        "wake_s": None,
        "no_sleep": [],
        "retry_in_s": None,
        "last_error": "",
    }
    return given | fields


GPU = {
    "id": "GPU-5a1c2b3d-0000-1111",
    "name": "NVIDIA H200",
    "total_bytes": 140 * GIB,
    "charged_bytes": 60 * GIB,
    "leased_bytes": 18 * GIB,
    "measured_bytes": 40 * GIB,
    "used_bytes": 55 * GIB,
    "foreign_bytes": 10 * GIB,
    "free_bytes": 51 * GIB,
}


def view(*slots: dict[str, Any], **account: Any) -> dict[str, Any]:
    return {
        "enabled": True,
        "why_not": "",
        "accounts": [{**GPU, **account}],
        "slots": [*slots],
        "backends": [],
        "leases": [],
    }


def test_memory_is_drawn_by_who_holds_it() -> None:
    lines = pool.shown(view(slot("a"))).splitlines()
    assert lines[1] == "H200 GPU-5a1c2b3d  ███████▓▓▓▚▚▚▒▒░░░░░░░░░  40 GiB  60 GiB  18 GiB  10 GiB  51 GiB  140 GiB"
    assert lines[2] == "█ models  ▓ booked  ▚ leases  ▒ others  ░ free"


def test_leases_stand_below_the_models_with_what_they_hold_or_wait_for() -> None:
    grants = [{"account": "GPU-1", "charged_bytes": 18 * GIB}]
    held = {"id": "l-3", "label": "train", "state": "running", "why": "it is held", "need_bytes": 9, "grants": grants}
    waits = held | {"id": "l-4", "label": "", "state": "waiting", "why": "1 lease is before it", "grants": []}
    lines = pool.shown(view(slot("a")) | {"leases": [held, waits | {"need_bytes": 2 * GIB}]}).splitlines()
    assert lines[-2].split() == ["lease", "l-3", "train", "running", "18", "GiB", *"-----", "it", "is", "held"]
    assert lines[-1].split()[:5] == ["lease", "l-4", "waiting", "(2.0", "GiB)"]


def test_memory_that_nobody_measures_and_memory_that_is_overdrawn_are_said() -> None:
    text = pool.shown(view(slot("a"), used_bytes=None, measured_bytes=None, free_bytes=-3 * GIB))
    assert "unmeasured, so that the books alone decide: H200 GPU-5a1c2b3d" in text
    assert "-3.0 GiB" in text


@pytest.mark.parametrize(
    ("fields", "cells"),
    [
        ({}, ["cold", "(22 GiB)", "0", "0", "0", "-", "47s", "Nobody has asked for it"]),
        (
            {"state": "loading", "loading_s": 14.0, "waiting": 3, "grants": [{"charged_bytes": 23 * GIB}]},
            ["loading 14s of 47s", "23 GiB", "0", "3", "0", "-", "47s", "Nobody has asked for it"],
        ),
        (
            {"state": "asleep", "wake_s": 2.4, "grants": [{"charged_bytes": GIB}]},
            ["asleep, wakes in 2s", "1.0 GiB", "0", "0", "0", "-", "47s", "Nobody has asked for it"],
        ),
        (
            {"state": "ready", "pinned": True, "audience": 2, "turn_ends_in_s": 63.0, "load_s": 1.25, "need_bytes": 0},
            ["ready, pinned", "(-)", "0", "0", "2", "1m 3s", "1.2s", "Nobody has asked for it"],
        ),
        (
            {"state": "failed", "why": "4 loads in a row have failed", "last_error": "no tensors", "retry_in_s": 60.0},
            [
                "failed",
                "(22 GiB)",
                "0",
                "0",
                "0",
                "-",
                "47s",
                "4 loads in a row have failed, again in 1m: no tensors",
            ],
        ),
    ],
)
def test_a_model_is_told_with_what_matters_of_it(fields: dict[str, Any], cells: list[str]) -> None:
    line = pool.shown(view(slot("qwen3-32b", **fields))).splitlines()[-1]
    assert re.split(r" {2,}", line) == ["qwen3-32b", *cells]


def test_what_a_server_wrote_cannot_steer_the_terminal() -> None:
    assert "\x1b" not in pool.shown(view(slot("a", state="failed", last_error="\x1b[2Jboo")))


def test_a_request_that_waits_for_a_load_says_so(hive: Hive) -> None:
    hive("model", "unload", "meta/tiny", "--force")
    found = _waiting(hive, "meta/tiny")
    assert found["waits_for"] == "waiting for meta/tiny to be loaded"
    assert _waiting(hive, "of-no-pool")["waits_for"] == ""


def _waiting(hive: Hive, model: str) -> dict[str, Any]:
    from hive.control.request_views import queue_view

    told = QueueIs(
        queue=QueueView(0, 1, 4, None, []),
        requests=[
            UnderWay(
                id="p1-1",
                agent="a" * 32,
                name="alice",
                tenant="acme",
                model=model,
                endpoint="/api/chat",
                state="queued",
                age_ms=9.0,
                queue_ms=8.0,
            )
        ],
        left_out=0,
    )
    view = hive.daemon.call(queue_view, told, hive.box.services.pool.progress)
    return dict(view["requests"][0])


@pytest.mark.parametrize("pooled", [[], [{"model": "qwen3-8b", "state": "ready", "pinned": True}]])
def test_the_list_of_models_gives_way_on_a_narrow_terminal(
    pooled: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a fault of Hive's own: the column of the tiers was to give way, and without routing there is none."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setenv("NO_COLOR", "1")
    found = {"name": "a-long-name:8b", "size_bytes": GIB, "quantization": "Q4_0", "parameters": 7, "leaves": ""}
    found |= {"loaded": True, "aliases": ["fast"], "tiers": [], "parent": ""}
    text = model._listed({"routing": False, "models": [found], "files": {}, "pool": pooled})
    assert [line.split()[0] for line in text.splitlines()] == ["MODEL", "a-long-name:8b", *(p["model"] for p in pooled)]


def test_a_load_that_failed_is_told_with_the_last_lines_of_its_server() -> None:
    error = error_of({"code": "dependency_down", "message": "m: its server ended", "hint": "", "log": ["no tensors"]})
    assert error.message.splitlines() == ["m: its server ended", "its last lines:", "  no tensors"]
