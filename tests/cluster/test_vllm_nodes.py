"""Hive before one real vLLM over two hosts (`--nnodes 2`, tensor parallel), and the loss of one of them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cluster.namespaces import Host, hosts, wait_for, why_not
from tests.cluster.seen import inference
from tests.cluster.streams import LYING, WHOLE, Caller, ended
from tests.cluster.units import tail
from tests.journeys.stack import Stack, stack
from tests.vllm import MODEL, UP_WITHIN_S, cache_for, environment, model_for

pytestmark = [pytest.mark.vllm, pytest.mark.root, pytest.mark.redis, pytest.mark.timeout(900)]

SERVE = Path(__file__).parents[1] / "tools" / "serve_vllm_nodes.py"
PORT, MASTER_PORT = 8001, 29501


class Nodes:
    """The two hosts of one vLLM; `a` has its API."""

    def __init__(self, a: Host, b: Host) -> None:
        self.a, self.b = a, b
        self.url = f"http://{a.address}:{PORT}"


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    venv = environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    if said := why_not():
        pytest.skip(said)
    with hosts("a", "b") as (a, b):
        command = [str(venv / "bin" / "python"), str(SERVE), "serve", str(model_for(venv, folder))]
        command += ["--served-model-name", MODEL, "--port", str(PORT), "--max-num-seqs", "4", "--dtype", "float32"]
        command += ["--enforce-eager", "--block-size", "32", "--scheduling-policy", "priority"]
        command += ["--tensor-parallel-size", "2", "--nnodes", "2"]
        command += ["--master-addr", a.address, "--master-port", str(MASTER_PORT)]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": "eth0"}  # else it takes the address of the host's name, which is another one's
        env |= {"HF_HUB_OFFLINE": "1", "HOME": str(folder), "VLLM_CACHE_ROOT": str(cache_for(venv, folder))}
        for rank, host in enumerate((a, b)):
            more = ["--host", host.address, "--node-rank", str(rank), *(["--headless"] if rank else [])]
            host.start([*command, *more], folder / f"{host.name}.log", {**env, "VLLM_HOST_IP": host.address})
        nodes = Nodes(a, b)
        try:
            is_up = lambda: httpx.get(f"{nodes.url}/health", trust_env=False).is_success  # noqa: E731
            wait_for(is_up, UP_WITHIN_S, "vLLM is up")
        except AssertionError:
            print(tail(folder / "a.log"), tail(folder / "b.log"))
            raise
        yield nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Its folder is not below /tmp, of which each host has its own."""
    with tempfile.TemporaryDirectory(prefix="hive-nodes-", dir="/var/tmp") as folder, two_nodes(Path(folder)) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def hive(nodes: Nodes) -> Iterator[Stack]:
    with stack(url=nodes.url) as hive:
        yield hive


def test_it_is_one_vllm_until_a_host_is_lost_and_then_all_of_it_is(hive: Stack, nodes: Nodes) -> None:
    """Its streams end honestly, nothing of it hangs, and Hive says that it is down: both hosts have to start again."""
    told = inference(hive)
    assert (told["backend"], told["cluster"]) == ("vllm", None)
    assert Caller(hive).ask(4).json()["usage"]["completion_tokens"] <= 4

    async def loss() -> None:
        await asyncio.sleep(1)
        assert nodes.b.kill()

    ends = asyncio.run(ended(Caller(hive, ignore_eos=True), streams=4, at_once=4, words=1000, losses=loss))
    assert ends[LYING] == ends[WHOLE] == 0
    wait_for(lambda: not nodes.a.pids("serve_vllm_nodes"), 120, "its API has ended, too")
    refused = Caller(hive).ask()
    assert refused.status_code in (502, 503)
    assert refused.json()["error"]["message"]
