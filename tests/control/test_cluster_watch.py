"""The daemon's watch over a cluster behind the backend's address, before servers that play an engine's answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from hive.control.backends import BackendWatch
from hive.domain import BackendInfo, BackendKind, ClusterNode
from hive.errors import LinkLost
from hive.settings.table import InferenceSection, Proxy, Settings
from tests.control.played_engine import PlayedEngine, playing
from tests.waiting import until

PROPS = b'{"build_info":"b1","total_slots":4}'
RANKS = (
    b'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 1\n'
    b'vllm:generation_tokens_total{engine="0"} %d\nvllm:generation_tokens_total{engine="1"} 7\n'
)


class Watched:
    """A watch over one played engine, and all that it told of."""

    def __init__(
        self, engine: PlayedEngine, kind: BackendKind, *, tokens: bool | None = None, **inference: str | float
    ) -> None:
        self.told: list[bool] = []
        self.tokens = tokens
        set_so = {"slots_per_replica": 4} | inference
        self.settings = Settings(inference=msgspec.structs.replace(InferenceSection(), **set_so))
        self.watch = BackendWatch(
            kind,
            engine.address,
            settings=lambda: self.settings,
            on_checked=self.told.append,
            tokens_come=self._tokens_come,
        )

    async def _tokens_come(self) -> bool:
        if self.tokens is None:
            raise LinkLost("no proxy")
        return self.tokens

    @property
    def info(self) -> BackendInfo:
        assert self.watch.info is not None
        return self.watch.info

    async def places(self) -> int | None:
        """Those after one more look."""
        await self.watch.look_at_cluster()
        return self.info.places


async def test_a_router_that_loses_a_worker_and_has_it_back_is_8_then_4_then_8_places() -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM)
        await seen.watch.check()
        assert (seen.info.places, seen.info.places_from) == (8, "2 of 2 replicas x 4, told by vLLM Router")
        assert seen.told == [True]
        engine.route(True, False)
        assert await seen.places() == 4
        assert seen.info.cluster is not None
        assert seen.info.cluster.nodes[1] == ClusterNode("10.0.0.2", up=False, replicas=0)
        engine.route(True, True)
        assert [await seen.places() for _ in range(3)] == [4, 8, 8]
        assert seen.told == [True, True, True, True, False]  # the second look shows the node, the third the places


async def test_a_router_that_lost_one_of_two_workers_is_up_although_its_health_is_503() -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM)
        await seen.watch.check()
        engine.route(True, False)
        await seen.watch.look_at_cluster()
        await seen.watch.check()
        assert (seen.watch.up, seen.info.places) == (True, 4)
        engine.route(False, False)
        await seen.watch.look_at_cluster()
        await seen.watch.check()
        assert (seen.watch.up, seen.info.places) == (False, 0)
        assert seen.info.cluster is not None
        assert seen.info.cluster.why_none == "vLLM Router runs 0 of 2 replicas"


async def test_ray_tells_at_its_dashboard_what_runs_behind_the_ingress() -> None:
    async with playing() as engine:
        engine.serve("RUNNING", "RUNNING")
        url = f"http://{engine.address}"
        seen = Watched(engine, BackendKind.REMOTE, backend_cluster_url=url, slots_per_replica=0)
        await seen.watch.check()
        assert (seen.info.places, seen.info.places_from) == (8, "2 of 2 replicas x 4, told by Ray Serve")
        assert seen.info.cluster is not None
        assert seen.info.cluster.notes == ("no_token",)
        engine.serve("RUNNING", "STARTING")
        assert await seen.places() == 4
        engine.serve("RUNNING", "RUNNING", ingress=False)
        assert await seen.places() == 0
        assert "OpenAiIngress runs 0 of 2 replicas" in seen.info.cluster.why_none if seen.info.cluster else False


async def test_a_ray_whose_dashboard_is_away_is_found_once_and_told_of_once_it_is_there() -> None:
    async with playing() as backend, playing() as dashboard:
        backend.serve("RUNNING", "RUNNING")
        seen = Watched(backend, BackendKind.REMOTE, backend_cluster_url=f"http://{dashboard.address}")
        for _ in range(3):
            await seen.watch.check()
            await seen.watch.look_at_cluster()
        assert backend.asked.count("/readiness") == 1
        assert "does not tell how many replicas run" in seen.info.warning
        dashboard.serve("RUNNING", "RUNNING")
        assert [await seen.places(), seen.info.warning] == [8, ""]
        assert seen.info.cluster is not None
        assert seen.info.cluster.notes == ("no_token",)


async def test_rays_token_is_shown_and_without_it_the_warning_says_which_setting_names_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    async with playing() as backend, playing() as dashboard:
        backend.serve("RUNNING")
        dashboard.token = "s3cret"
        dashboard.serve("RUNNING", "RUNNING")
        url = f"http://{dashboard.address}"
        without = Watched(backend, BackendKind.REMOTE, backend_cluster_url=url)
        await without.watch.check()
        assert (without.info.places, without.info.cluster) == (None, None)
        assert "asks for a token (401): backend_cluster_token_file names its file" in without.info.warning
        shown = Watched(backend, BackendKind.REMOTE, backend_cluster_token_file=str(token), backend_cluster_url=url)
        await shown.watch.check()
        assert (shown.info.places, shown.info.warning) == (8, "")
        assert shown.info.cluster is not None
        assert shown.info.cluster.notes == ()
        assert "s3cret" not in repr(shown.info)


async def test_a_token_file_that_others_may_read_is_not_used_and_said(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o644)
    async with playing() as engine:
        engine.serve("RUNNING", "RUNNING")
        seen = Watched(
            engine,
            BackendKind.REMOTE,
            backend_cluster_url=f"http://{engine.address}",
            backend_cluster_token_file=str(token),
        )
        await seen.watch.check()
        assert seen.info.places is None
        assert "is a secret, but others can get at it" in seen.info.warning


async def test_data_parallel_ranks_are_found_by_their_labels_and_one_engine_is_no_cluster() -> None:
    async with playing() as engine:
        engine.answers = {"/health": b"", "/version": b'{"version":"0.32.0"}', "/metrics": RANKS % 1}
        engine.answers["/v1/models"] = b'{"data":[{"id":"tiny","owned_by":"vllm"}]}'
        ranks = Watched(engine, BackendKind.VLLM)
        await ranks.watch.check()
        assert (ranks.info.places, ranks.info.places_from) == (
            8,
            "2 of 2 replicas x 4, told by vLLM's data parallelism",
        )
        engine.answers["/metrics"] = b'vllm:num_requests_running{engine="0"} 1\n'
        one = Watched(engine, BackendKind.VLLM)
        await one.watch.check()
        assert (one.info.places, one.info.cluster) == (64, None)
        asked = len(engine.asked)
        await one.watch.look_at_cluster()
        assert len(engine.asked) == asked


async def test_an_engine_that_is_away_for_ten_seconds_is_warned_of_and_the_static_number_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM)
        await seen.watch.check()
        workers = engine.answers.pop("/workers")
        assert [await seen.places(), seen.info.warning] == [8, ""]
        monkeypatch.setattr("hive.backends.capacity.KNOWN_FOR_S", -1.0)  # ten seconds later
        assert await seen.places() == 64
        assert seen.info.places_from == "vllm_max_sequences in hive.conf"
        assert seen.info.warning.startswith("vLLM Router does not tell how many replicas run: 127.0.0.1:")
        await seen.places()
        assert len([line for line in caplog.messages if line.startswith("cluster_silent")]) == 1
        engine.answers["/workers"] = workers
        assert [await seen.places(), seen.info.warning] == [8, ""]


async def test_what_waits_inside_the_engine_is_told_apart_and_warned_of() -> None:
    async with playing() as engine:
        engine.route(True, True, load=7)
        seen = Watched(engine, BackendKind.VLLM)
        for _ in range(2):
            await seen.watch.check()
            await seen.watch.look_at_cluster()
        assert seen.info.cluster is not None
        assert seen.info.cluster.waiting == 6
        assert seen.info.warning.startswith(
            "the backend queues 6 requests itself although Hive sends at most 8 at once"
        )
        engine.answers["/workers"] = (500, b"")
        await seen.watch.look_at_cluster()
        assert seen.info.warning.startswith("the backend queues 6 requests itself")


async def test_what_an_operator_sets_comes_before_what_the_cluster_tells() -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM)
        seen.settings = msgspec.structs.replace(seen.settings, proxy=Proxy(backend_concurrency=3))
        await seen.watch.check()
        assert (seen.info.places, seen.info.places_from) == (3, "backend_concurrency in hive.conf")
        assert seen.info.cluster is not None
        assert seen.info.cluster.running == 2


@pytest.mark.parametrize(("tokens", "places"), [(True, 4), (False, 0), (None, 0)])
async def test_a_cluster_that_says_nothing_runs_has_places_only_while_tokens_come(
    tokens: bool | None, places: int
) -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM, tokens=tokens)
        await seen.watch.check()
        engine.route(False, False)
        assert await seen.places() == places


@pytest.mark.parametrize("kind", [BackendKind.OLLAMA, BackendKind.LLAMA])
async def test_a_server_that_is_no_cluster_is_not_asked_although_settings_name_one(kind: BackendKind) -> None:
    """Hive may have been switched to it."""
    async with playing() as engine:
        engine.route(True, True)
        engine.answers |= {"/api/version": b'{"version":"0.32"}', "/api/tags": b'{"models":[]}', "/props": PROPS}
        seen = Watched(engine, kind, backend_cluster="router")
        await seen.watch.check()
        assert (seen.watch.up, seen.info.cluster) == (True, None)
        assert "/workers" not in engine.asked


@pytest.mark.parametrize(("chosen", "asked"), [("none", False), ("router", True), ("auto", True)])
async def test_nothing_is_asked_where_settings_want_no_cluster(chosen: str, asked: bool) -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM, backend_cluster=chosen)
        await seen.watch.check()
        assert ("/workers" in engine.asked) is asked
        assert (seen.info.cluster is not None) is asked


async def test_the_engine_is_looked_at_by_itself_every_cluster_poll_s() -> None:
    async with playing() as engine:
        engine.route(True, True)
        seen = Watched(engine, BackendKind.VLLM, cluster_poll_s=0.1)
        running = asyncio.create_task(seen.watch.run())
        try:
            await until(lambda: seen.info.places == 8)
            engine.route(True, False)
            await until(lambda: seen.info.places == 4)
            engine.route(True, True)
            await until(lambda: seen.info.places == 8)
        finally:
            running.cancel()
            await asyncio.wait([running])
        asked = len(engine.asked)
        await asyncio.sleep(0.3)
        assert len(engine.asked) == asked


async def test_an_engine_that_did_not_answer_when_the_backend_came_up_is_found_at_the_next_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a router that was slow once would be one server until the models are read anew, five minutes later."""
    async with playing() as engine:
        engine.route(True, True)
        monkeypatch.setattr("hive.control.cluster_watch.LOOK_S", 0.0)
        seen = Watched(engine, BackendKind.VLLM)
        await seen.watch.check()
        assert (seen.watch.up, seen.info.places, seen.info.cluster) == (True, 64, None)
        monkeypatch.undo()
        await seen.watch.check()
        assert seen.info.places == 8
        asked = engine.asked.count("/readiness")
        await seen.watch.check()
        assert engine.asked.count("/readiness") == asked


async def test_a_dashboard_on_another_host_is_not_asked_where_nothing_may_leave() -> None:
    async with playing() as engine:
        engine.serve("RUNNING", "RUNNING")
        seen = Watched(engine, BackendKind.REMOTE, cloud="never", backend_cluster_url="http://192.0.2.1:8265")
        await seen.watch.check()
        assert seen.info.places is None
        assert "192.0.2.1:8265 is not asked: cloud = never" in seen.info.warning
