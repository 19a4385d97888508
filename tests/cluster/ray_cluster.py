"""A real Ray with Serve on two hosts, as the units of conf/cluster start it; skipped with the reason without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.namespaces import Host, hosts, wait_for, why_not
from tests.cluster.units import Service, running, tail

FAKES = Path(__file__).parents[1] / "fakes"
TOKEN = "0123456789abcdef0123456789abcdef"
AT_ONCE = 4
UP_WITHIN_S = 240.0
"""20 s on an idle machine, 54 s were seen on a busy one."""
SERVE = """
proxy_location: EveryNode
http_options: {{host: 0.0.0.0, port: 8000}}
applications:
  - name: llm
    route_prefix: /
    import_path: serve_app:app
    deployments:
      - name: Chat
        num_replicas: 2
        max_replicas_per_node: 1
        max_ongoing_requests: {at_once}
        health_check_period_s: 1
        health_check_timeout_s: 2
        graceful_shutdown_timeout_s: 1
"""


def environment() -> Path:
    """The environment that tests/tools/setup_ray.sh left; skips the test without."""
    venv = Path(os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")) / "ray" / "venv"
    if not os.access(venv / "bin" / "ray", os.X_OK):
        pytest.skip("no Ray: run tests/tools/setup_ray.sh")
    return venv


class RayCluster:
    """Two hosts: `a` with the head, `b`. `head` and `node` are their services."""

    def __init__(self, a: Host, b: Host, head: Service, node: Service) -> None:
        self.a, self.b, self.head, self.node = a, b, head, node

    @property
    def dashboard(self) -> str:
        return f"http://{self.a.address}:8265"

    def url(self, host: Host) -> str:
        """The address at which Serve is asked by way of this host."""
        return f"http://{host.address}:8000"

    def told(self) -> Any:
        """Ray's own words on its application."""
        answer = httpx.get(
            f"{self.dashboard}/api/serve/applications/",
            headers={"authorization": f"Bearer {TOKEN}"},
            trust_env=False,
            timeout=5,
        )
        return answer.raise_for_status().json()

    def replicas(self) -> dict[str, str]:
        """Address of the node → state of the replica there."""
        found = self.told()["applications"]["llm"]["deployments"]["Chat"]["replicas"]
        return {replica.get("node_ip") or "": replica["state"] for replica in found}

    def replica_ids(self) -> set[str]:
        """Those that run."""
        found = self.told()["applications"]["llm"]["deployments"]["Chat"]["replicas"]
        return {replica["replica_id"] for replica in found if replica["state"] == "RUNNING"}

    def is_whole(self) -> bool:
        """Whether both replicas run and both hosts let requests in."""
        ways = [httpx.get(f"{self.url(host)}/v1/models", trust_env=False, timeout=5) for host in (self.a, self.b)]
        both = {self.a.address: "RUNNING", self.b.address: "RUNNING"}
        return self.replicas() == both and all(answer.status_code == 200 for answer in ways)

    def wait_until_whole(self, within_s: float = UP_WITHIN_S) -> float:
        return wait_for(self.is_whole, within_s, f"both replicas run\n{tail(self.head.log)}\n{tail(self.node.log)}")

    def kill_replica(self, host: Host) -> int:
        """kill -9 of the replica's process there."""
        return host.kill("ray::ServeReplica")

    def kill_raylet(self, host: Host) -> int:
        return host.kill("/raylet/raylet ")

    def kill_head(self) -> int:
        """kill -9 of the server that knows the cluster (GCS)."""
        return self.a.kill("/gcs/gcs_server ")


@contextmanager
def ray_cluster(folder: Path) -> Iterator[RayCluster]:
    """Ray on two hosts, whole."""
    venv = environment()
    if said := why_not():
        pytest.skip(said)
    (folder / "serve.yaml").write_text(SERVE.format(at_once=AT_ONCE))
    (folder / "ray-token").write_text(TOKEN)
    (folder / "ray-token").chmod(0o600)
    places = {"/opt/ray/bin": f"{venv}/bin", "/etc/cluster/serve.yaml": f"{folder}/serve.yaml", "%d": str(folder)}
    places["%S/ray"] = str(folder)
    more = {"PYTHONPATH": str(FAKES), "PATH": f"{venv}/bin:{os.environ['PATH']}", "RAY_MORE": RAY_MORE}
    with hosts("a", "b") as (a, b), ExitStack() as made:
        services = []
        for host, name in ((a, "ray-head.service"), (b, "ray-node.service")):
            env = {**more, "ADDRESS": host.address, "HEAD": a.address}
            service = Service(host, name, env, places, folder / f"{name}.log")
            services.append(made.enter_context(running(service)))
        cluster = RayCluster(a, b, *services)
        cluster.wait_until_whole()
        yield cluster


RAY_MORE = "--num-cpus=2 --object-store-memory=80000000"
"""Less than Ray would take of the machine."""
