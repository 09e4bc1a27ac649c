"""Node pools work from end to end: with the real kubernetes client, decide and plan.

The cluster is a small server on loopback that checks what it is asked.
"""

import importlib.util
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from stoker.records import Decision, read_json
from support import command
from support.kubernetes_nodes import EKS, pod

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("kubernetes"), reason="needs the client of Kubernetes"
)

_PAGE = 4
_DAEMONS = [pod({"cpu": "300m", "memory": "500Mi"}), pod({"cpu": "8"}, owner="Job")]


@dataclass
class FakeCluster:
    """Serves nodes and their pods, page by page, to whoever has the token."""

    token: str = "t0ken"
    denied: frozenset[str] = frozenset()
    is_garbage: bool = False
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, authorization: str | None) -> tuple[int, Any]:
        self.asked.append(path)
        if authorization != f"Bearer {self.token}":
            return 401, _status(401, "Unauthorized", "Unauthorized")
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path.rpartition("/")[2] in self.denied:
            plural = url.path.rpartition("/")[2]
            text = f'{plural} is forbidden: User "ann" cannot list resource "{plural}" in API group'
            return 403, _status(403, "Forbidden", text)
        if self.is_garbage:
            return 200, "<html>a proxy's login page</html>"
        if url.path == "/api/v1/nodes":
            return 200, _page(list(EKS), query)
        if url.path == "/api/v1/pods":
            key, _, node = query["fieldSelector"].partition("=")
            assert key == "spec.nodeName"
            assert node in [each["metadata"]["name"] for each in EKS]
            return 200, _page(_DAEMONS, query)
        return 404, _status(404, "NotFound", "the server could not find the requested resource")


def _status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
    }


def _page(items: list[Any], query: dict[str, str]) -> dict[str, Any]:
    # Fewer than were asked for: a server may always give less.
    assert int(query["limit"]) >= 1
    first = int(query.get("continue", "0"))
    following = first + _PAGE
    token = {"continue": str(following)} if following < len(items) else {}
    metadata = {"resourceVersion": "7", **token}
    return {"kind": "List", "metadata": metadata, "items": items[first:following]}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    fake = FakeCluster()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            code, document = fake.answer(self.path, self.headers.get("Authorization"))
            body = (document if isinstance(document, str) else json.dumps(document)).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "other",
        "clusters": [
            {"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}},
            {"name": "gone", "cluster": {"server": "http://127.0.0.1:1"}},
        ],
        "users": [{"name": "u", "user": {"token": fake.token}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team-a"}},
            {"name": "other", "context": {"cluster": "gone", "user": "u"}},
        ],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    yield fake
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def environ(folder: Path) -> dict[str, str]:
    return {"KUBECONFIG": str(folder / "config"), "PATH": "/usr/bin:/bin", "HOME": str(folder)}


def stoker(folder: Path, *arguments: str) -> command.Done:
    """Runs the command in this process."""
    with (
        mock.patch.dict(os.environ, environ(folder), clear=True),
        # The client reads KUBECONFIG when it is imported.
        mock.patch(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(folder / "config")
        ),
    ):
        return command.stoker(*arguments, cwd=folder)


REFRESH = ("catalog", "refresh", "--from-cluster", "--context", "here")


def test_refresh_writes_the_pools_of_the_cluster(cluster: FakeCluster, tmp_path: Path) -> None:
    arguments = (*REFRESH, "--out", "pools.csv")
    done = stoker(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "pools.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == [
        "cpu-c7i.2xlarge",
        "cpu-c7i.4xlarge",
        "cpu-c7i.4xlarge-spot",
        "gpu",
    ]
    assert "4 pools of 11 nodes" in done.stdout
    assert "note: cpu-c7i.4xlarge-spot has no price" in done.stderr
    # All pages of the nodes, and the pods of one node a pool.
    assert sum(path.startswith("/api/v1/nodes") for path in cluster.asked) == 3
    assert sum(path.startswith("/api/v1/pods") for path in cluster.asked) == 4


def test_without_a_file_the_table_is_the_only_output(cluster: FakeCluster, tmp_path: Path) -> None:
    done = stoker(tmp_path, *REFRESH)
    assert done.stdout.startswith("instance_type,family,vcpus,")
    assert len(done.stdout.splitlines()) == 5
    document = json.loads(stoker(tmp_path, *REFRESH, "--json").stdout)
    assert [row["instance_type"] for row in document["pools"]][-1] == "gpu"
    assert any("cordoned" in note for note in document["notes"])


def test_who_may_not_see_pods_gets_a_table_with_a_margin(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.denied = frozenset({"pods"})
    done = stoker(tmp_path, *REFRESH, "--json")
    document = json.loads(done.stdout)
    gpu = document["pools"][-1]
    assert (gpu["vcpus"], gpu["memory_gib"]) == ("3", "13")
    assert any("half a core and 1 GiB" in note for note in document["notes"])


def test_who_may_not_see_nodes_is_told_the_right(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.denied = frozenset({"nodes"})
    done = stoker(tmp_path, *REFRESH, "--out", "pools.csv")
    assert done.returncode == 4
    assert "ann may not list the nodes" in done.stderr
    assert "--resource=nodes,pods" in done.stderr
    assert not (tmp_path / "pools.csv").exists()


def test_wrong_credentials_are_named_and_the_old_file_stays(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    (tmp_path / "pools.csv").write_text("instance_type,vcpus,usd_per_hour\nold,4,1\n")
    cluster.token = "another"
    done = stoker(tmp_path, *REFRESH, "--out", "pools.csv")
    assert done.returncode == 4
    assert "does not accept these credentials" in done.stderr
    assert "t0ken" not in done.stderr + done.stdout
    assert "old,4,1" in (tmp_path / "pools.csv").read_text()


def test_a_context_that_there_is_not_is_named(cluster: FakeCluster, tmp_path: Path) -> None:
    done = stoker(tmp_path, "catalog", "refresh", "--from-cluster", "--context", "heer")
    assert done.returncode == 4
    assert "heer" in done.stderr
    assert cluster.asked == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["catalog", "--region", "eu-west-1"], "stoker catalog refresh --region eu-west-1"),
        (["catalog", "refresh", "--region", "x", "--from-cluster"], "exclude each other"),
        (["catalog", "refresh", "--context", "here"], "--context is only for --from-cluster"),
        (["catalog", "--from-cluster"], "stoker catalog refresh --from-cluster"),
        (["catalog", "refersh", "--from-cluster"], "stoker catalog refresh"),
    ],
)
def test_refresh_says_what_it_needs(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = stoker(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


# From the cluster's nodes to the pods of the plan.


@pytest.fixture
def project(cluster: FakeCluster, tmp_path: Path) -> Path:
    assert stoker(tmp_path, *REFRESH, "--out", "pools.csv").returncode == 0
    workload = {
        "name": "mnist",
        "command": ["python", "train.py"],
        "image": "registry.example/mnist:1",
        "platform": "kubernetes",
        "cluster": {"dnn": {"instance_type": "gpu"}},
        "kubernetes": {"pools_file": "pools.csv", "namespace": "team-a"},
    }
    (tmp_path / "mnist.yaml").write_text(yaml.safe_dump(workload))
    # What the profile of a starved GPU says: a quarter of the step computes.
    profile = {
        "schema": "stoker.profile/v1",
        "host": {"instance_type": "gpu", "count": 1, "vcpus": 3},
        "step": {
            "step_seconds": 0.4,
            "wait_seconds": 0.3,
            "accelerator_step_seconds": 0.1,
            "loader_cpu_seconds": 1.0,
            "trainer_cpu_seconds": 0.05,
            "num_workers": 3,
            "global_batch_size": 256,
            "batch_bytes": 800000,
        },
    }
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    return tmp_path


def decided(project: Path, *options: str) -> Decision:
    arguments = ("decide", "profile.json", "--workload", "mnist.yaml", "--out", "decision.json")
    done = stoker(project, *arguments, *options)
    assert done.returncode == 0, done.stderr
    return read_json(project / "decision.json", Decision)


def test_a_decision_is_made_of_pools_and_its_pods_go_to_their_nodes(project: Path) -> None:
    decision = decided(project)
    assert decision.action == "heterogeneous"
    types = {group.instance_type for plan in decision.plans for group in plan.groups}
    assert types == {"gpu", "cpu-c7i.2xlarge", "cpu-c7i.4xlarge"}
    done = stoker(project, "train", "--dry-run", "mnist.yaml", "--decision", "decision.json")
    assert done.returncode == 0, done.stderr
    *_, jobset = yaml.safe_load_all(done.stdout)
    pods = {
        job["name"]: job["template"]["spec"]["template"]["spec"]
        for job in jobset["spec"]["replicatedJobs"]
    }
    assert pods["dnn"]["nodeSelector"] == {
        "eks.amazonaws.com/nodegroup": "gpu",
        "node.kubernetes.io/instance-type": "g5.xlarge",
        "eks.amazonaws.com/capacityType": "ON_DEMAND",
    }
    assert {t["key"] for t in pods["dnn"]["tolerations"]} == {"team", "nvidia.com/gpu"}
    assert pods["dnn"]["containers"][0]["resources"] == {
        "requests": {"cpu": "3", "memory": "13Gi"},
        "limits": {"memory": "13Gi", "nvidia.com/gpu": "1"},
    }
    (data,) = [group for group in decision.plan.groups if group.role == "data"]
    assert pods["data"]["nodeSelector"]["karpenter.sh/nodepool"] == "cpu"
    selected = pods["data"]["nodeSelector"]["node.kubernetes.io/instance-type"]
    assert f"cpu-{selected}" == data.instance_type
    assert pods["data"]["nodeSelector"]["karpenter.sh/capacity-type"] == "on-demand"


def test_a_spot_pool_is_part_of_plans_once_it_has_a_price(project: Path) -> None:
    file = project / "pools.csv"
    (line,) = [x for x in file.read_text().splitlines() if x.startswith("cpu-c7i.4xlarge-spot")]
    priced = line.replace(",,,karpenter", ",0.05,2026-11-19,karpenter")
    file.write_text(file.read_text().replace(line, priced))
    decision = decided(project)
    (data,) = [group for group in decision.plan.groups if group.role == "data"]
    assert data.instance_type == "cpu-c7i.4xlarge-spot"
    done = stoker(project, "train", "--dry-run", "mnist.yaml", "--decision", "decision.json")
    *_, jobset = yaml.safe_load_all(done.stdout)
    job = next(j for j in jobset["spec"]["replicatedJobs"] if j["name"] == "data")
    assert job["template"]["spec"]["template"]["spec"]["tolerations"] == [
        {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    ]


def test_a_type_that_is_no_pool_is_refused_where_it_is_allowed(project: Path) -> None:
    done = stoker(
        project,
        *("decide", "profile.json", "--workload", "mnist.yaml"),
        *("--set", "constraints.allowed_instance_types=[c5.4xlarge]"),
    )
    assert done.returncode == 2
    assert "key constraints.allowed_instance_types[0]" in done.stderr
    assert "kubernetes.pools_file" in done.stderr


def test_a_pipelines_run_may_bring_pools_of_its_own(project: Path) -> None:
    table = (
        "instance_type,vcpus,memory_gib,gpus,gpu_model,usd_per_hour,node_selector\n"
        "gpu,3,12,1,A10G,1,pool=a\n"
        "lots,60,100,0,,0.9,pool=b\n"
    )
    decision = decided(project, "--param", f"pools_file={table}")
    assert {g.instance_type for plan in decision.plans for g in plan.groups} == {"gpu", "lots"}


def test_an_answer_that_is_no_kubernetes_is_an_error_in_words(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.is_garbage = True
    done = stoker(tmp_path, *REFRESH)
    assert done.returncode == 4
    assert "Traceback" not in done.stderr
