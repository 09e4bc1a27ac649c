"""A cluster with nodes, driven through its API and the `stoker` command, as users do.

Nothing here is a double, and nothing is asked of stoker's own modules but a job's name. What a
stranger sets in the environment is explained in tests/cluster/README.md.
"""

import base64
import contextlib
import csv
import functools
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import node_pools
from support.control_planes import RealNamespace, account_config, described, restricted_spec
from support.processes import started, until

# A pod that needs an image is started within it; a training of the tests ends within it.
MINUTES = 60.0
POLL_SECONDS = 2.0
LOST = ("deleted", "evicted", "killed")
PLATFORM_ERROR, FAILED_TRAINING = 4, 6
# What is run in a container to end it: all its processes but the first, which ends then; too much
# memory, for which the kernel ends the container.
_ENDS = {
    "killed": ["sh", "-c", "kill -9 -1"],
    "out of memory": ["python", "-c", "k = [b'x' * (1 << 26) for _ in range(1 << 20)]"],
}


wait_for = functools.partial(until, seconds=10 * MINUTES, pause_seconds=POLL_SECONDS)


@dataclass(frozen=True)
class Given:
    """What the environment says of the cluster: tests/cluster/README.md explains each variable."""

    image: str
    # Labels (key, value) of the nodes that train, and of those for data hosts: of one key.
    train: tuple[str, str]
    feed: tuple[str, str]
    gpus: int = 0
    cpu: str = "1"
    memory: str = "2Gi"
    # Some minutes, so that there is time to interrupt it.
    epochs: int = 30
    storage_class: str = ""
    namespace: str = "kubeflow"
    account: str = "pipeline-runner"
    # Shell commands of an administrator.
    cut_off: str = ""
    rejoin: str = ""
    kill: str = ""
    restart_service: str = ""
    restart: str = ""
    # Not empty: a node's memory may be filled.
    pressure: str = ""
    # Address of the store of Kubeflow's artifacts.
    s3: str = ""

    @classmethod
    def found(cls) -> "Given":
        """Returns what is set; skips the test if the least of it is not."""
        said = {
            each.name: each.type(os.environ[f"STOKER_TEST_{each.name.upper()}"])
            for each in fields(cls)
            if f"STOKER_TEST_{each.name.upper()}" in os.environ
        }
        labels = os.environ.get("STOKER_TEST_POOLS", "").split()
        if not (os.environ.get("KUBECONFIG") and said.get("image") and len(labels) == 2):
            pytest.skip("KUBECONFIG, STOKER_TEST_IMAGE, STOKER_TEST_POOLS: no cluster with nodes")
        train, feed = (tuple(label.split("=")) for label in labels)
        assert train[0] == feed[0], "STOKER_TEST_POOLS: one key, as in pool=gpu pool=cpu"
        return cls(train=train, feed=feed, **said)

    def need(self, value: str, variable: str, why: str) -> str:
        """Returns a value that a scenario needs; skips it, and says why, where it is not set."""
        if not value:
            pytest.skip(f"STOKER_TEST_{variable} is not set: {why}")
        return value


class TypedCommand:
    """A `stoker` command that runs as users start it, whose words are kept."""

    def __init__(self, words: Sequence[str], *, folder: Path, config: Path | None = None) -> None:
        self.words = words
        self._file = folder / f"{uuid.uuid4().hex[:6]}.txt"
        environ = {**os.environ, **({"KUBECONFIG": str(config)} if config else {})}
        command = [sys.executable, "-m", "stoker.cli", *words]
        self._process = started(command, self._file, cwd=folder, env=environ)

    @property
    def text(self) -> str:
        return self._file.read_text()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ended(self, seconds: float = 20 * MINUTES) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{shlex.join(self.words)}: not over after {seconds:.0f} s\n{self.tail}")

    @property
    def tail(self) -> str:
        return self.text[-3000:]

    def signal(self, number: signal.Signals) -> None:
        if not self.has_ended:
            self._process.send_signal(number)


class NodeCluster(RealNamespace):
    """One namespace, and what users, administrators and failures do to it."""

    def __init__(self, given: Given, folder: Path, *, namespace: str | None = None) -> None:
        from kubernetes import client

        super().__init__(namespace)
        self.given, self.folder = given, folder
        self._core = client.CoreV1Api(self._client)
        self._commands: list[TypedCommand] = []
        self._made = [] if namespace else [f"api/v1/namespaces/{self.namespace}"]
        self._cordoned: set[str] = set()

    def close(self) -> None:
        """Ends what still runs, and deletes what was made; the cluster does the rest in time."""
        for command in self._commands:
            command.signal(signal.SIGKILL)
        for node in [*self._cordoned]:
            self.uncordon(node)
        for path in reversed(self._made):
            with contextlib.suppress(Exception):
                self.call("DELETE", path, {"propagationPolicy": "Foreground"})

    # --- objects

    def make(self, plural: str, body: Mapping[str, Any]) -> str:
        """Makes an object that `close` deletes; returns its name."""
        name: str = body["metadata"]["name"]
        self.call("POST", self.path(plural), body)
        self._made.append(self.path(plural, name))
        return name

    def quota(self, hard: Mapping[str, str]) -> None:
        body = {**described("v1", "ResourceQuota", "test"), "spec": {"hard": hard}}
        path = self.path("resourcequotas", self.make("resourcequotas", body))
        wait_for(lambda: "hard" in self.call("GET", path).get("status", {}), what="a quota counts")

    def claim(self, name: str) -> str:
        """Makes a claim that several nodes can write; skips where there is no class for it."""
        storage = self.given.need(self.given.storage_class, "STORAGE_CLASS", "it needs a claim")
        spec = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage,
            "resources": {"requests": {"storage": "1Gi"}},
        }
        body = described("v1", "PersistentVolumeClaim", name)
        return self.make("persistentvolumeclaims", {**body, "spec": spec})

    # --- pods and nodes

    def pods_of(self, run: str, group: str) -> list[str]:
        selector = f"jobset.sigs.k8s.io/jobset-name={run},stoker/role={group}"
        return self.running(selector, phases=("Pending", "Running"))

    def running(self, selector: str, *, phases: Sequence[str] = ("Running",)) -> list[str]:
        found = self.objects("pods", selector)
        return sorted(p["metadata"]["name"] for p in found if p["status"]["phase"] in phases)

    def logs(self, pod: str) -> str:
        found = []
        for container in self.get("pods", pod)["spec"]["containers"]:
            with contextlib.suppress(Exception):
                words = {"name": pod, "namespace": self.namespace, "container": container["name"]}
                found.append(self._core.read_namespaced_pod_log(**words))
        return "\n".join(map(str, found))

    def lose(self, pod: str, how: str) -> bool:
        """Deletes or evicts a pod, or ends its container; says whether it was let go."""
        from kubernetes.stream import stream

        if how == "deleted":
            self.delete("pods", pod)
        elif how == "evicted":
            return self.evict(pod)
        else:
            # A step's pod has two: Argo's own, and the step.
            names = [each["name"] for each in self.get("pods", pod)["spec"]["containers"]]
            # The connection ends with the container.
            with contextlib.suppress(Exception):
                container = "main" if "main" in names else names[0]
                given = {"container": container, "command": _ENDS[how], "stdout": True}
                given |= {"stderr": True, "_preload_content": False}
                exec_ = self._core.connect_get_namespaced_pod_exec
                session = stream(exec_, pod, self.namespace, **given)
                try:
                    session.run_forever(timeout=2 * MINUTES)
                finally:
                    # Its own `close` does nothing once the server has ended the session.
                    session.sock.shutdown()
        return True

    def kill_container(self, pod: str) -> None:
        """Kills a pod's container with its first process, which gets no SIGKILL from within."""
        command = self.given.need(self.given.kill, "KILL", "it needs a command on the nodes")
        (status,) = self.get("pods", pod)["status"]["containerStatuses"]
        container = status["containerID"].partition("://")[2]
        assert os.system(command.format(node=self.node_of(pod), container=container)) == 0

    def restart_service(self, service: str, node: str) -> None:
        why = "it needs a command on the nodes"
        command = self.given.need(self.given.restart_service, "RESTART_SERVICE", why)
        assert os.system(command.format(node=node, service=service)) == 0

    @contextlib.contextmanager
    def preempting(self, pod: str) -> Iterator[None]:
        """Takes a pod's place on its node by a pod of a higher priority, while the block runs."""
        # The scheduler would rather take others than a pod that a budget keeps.
        for name in self.names("poddisruptionbudgets"):
            self.delete("poddisruptionbudgets", name)
        node = self.node_of(pod)
        name = f"{self.namespace}-first"
        path = "apis/scheduling.k8s.io/v1/priorityclasses"
        priority = described("scheduling.k8s.io/v1", "PriorityClass", name)
        self.call("POST", path, {**priority, "value": 1000})
        try:
            milli = self._free_milli(node, without=pod)
            spec = self._idle_spec(node, ["sleep", "3600"], cpu=f"{milli}m")
            body = {**described("v1", "Pod", name), "spec": {**spec, "priorityClassName": name}}
            self.make("pods", body)
            yield
            self.delete("pods", name)
            wait_for(lambda: name not in self.names("pods"), what="there is room again")
        finally:
            self.call("DELETE", f"{path}/{name}")

    def hog(self, node: str) -> str:
        self.given.need(self.given.pressure, "PRESSURE", "it fills the memory of a node")
        spec = self._idle_spec(node, _ENDS["out of memory"])
        return self.make("pods", {**described("v1", "Pod", "hog"), "spec": spec})

    def _free_milli(self, node: str, *, without: str) -> int:
        from kubernetes.utils import parse_quantity

        allocatable = self.call("GET", f"api/v1/nodes/{node}")["status"]["allocatable"]["cpu"]
        pods = self.call("GET", f"api/v1/pods?fieldSelector=spec.nodeName={node}")["items"]
        asked = [
            container.get("resources", {}).get("requests", {}).get("cpu", "0")
            for pod in pods
            if pod["status"]["phase"] in ("Pending", "Running")
            if (pod["metadata"]["namespace"], pod["metadata"]["name"]) != (self.namespace, without)
            for container in pod["spec"]["containers"]
        ]
        return int(1000 * (parse_quantity(allocatable) - sum(map(parse_quantity, asked))))

    def _idle_spec(self, node: str, command: Sequence[str], *, cpu: str = "") -> dict[str, Any]:
        labels = self.call("GET", f"api/v1/nodes/{node}")["metadata"]["labels"]
        resources = {"requests": {"cpu": cpu}} if cpu else {}
        return {
            **restricted_spec(self.given.image, command=[*command], resources=resources),
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/hostname": labels["kubernetes.io/hostname"]},
            # Those of the nodes that train are not the test's to know.
            "tolerations": [{"operator": "Exists", "effect": "NoSchedule"}],
        }

    def container_restarts(self, pod: str) -> int:
        return sum(
            each["restartCount"] for each in self.get("pods", pod)["status"]["containerStatuses"]
        )

    def node_of(self, pod: str) -> str:
        return str(self.get("pods", pod)["spec"]["nodeName"])

    def cordon(self, node: str, *, is_on: bool = True) -> None:
        self.patch(f"api/v1/nodes/{node}", {"spec": {"unschedulable": is_on}})
        (self._cordoned.add if is_on else self._cordoned.discard)(node)

    def uncordon(self, node: str) -> None:
        self.cordon(node, is_on=False)

    def drain(self, node: str, selector: str) -> list[str]:
        """Cordons a node and evicts a run's pods there; returns those that a budget keeps."""
        self.cordon(node)
        there = [name for name in self.running(selector) if self.node_of(name) == node]
        return [name for name in there if not self.lose(name, "evicted")]

    @contextlib.contextmanager
    def cut_off(self, node: str) -> Iterator[None]:
        why = "it needs commands that cut a node off, and undo this"
        command = self.given.need(self.given.cut_off, "CUT_OFF", why)
        undo = self.given.need(self.given.rejoin, "REJOIN", why)
        assert os.system(command.format(node=node)) == 0
        try:
            yield
        finally:
            assert os.system(undo.format(node=node)) == 0

    @contextlib.contextmanager
    def without_node(self, node: str) -> Iterator[None]:
        """Deletes a Node, as a cloud does with a machine that is gone, while the block runs."""
        why = "a kubelet registers its node only when it starts"
        self.given.need(self.given.restart_service, "RESTART_SERVICE", why)
        path = f"api/v1/nodes/{node}"
        before = self.call("GET", path)
        taints = before["spec"].get("taints", [])
        self.call("DELETE", path)
        try:
            yield
        finally:
            self.restart_service("kubelet", node)
            nodes = "api/v1/nodes"
            wait_for(
                lambda: node in [n["metadata"]["name"] for n in self.call("GET", nodes)["items"]],
                what=f"{node} is back",
            )
            # Its pool's label, and taints that keep other pods away.
            labels = before["metadata"]["labels"]
            self.patch(path, {"metadata": {"labels": labels}, "spec": {"taints": taints}})

    # --- the cluster's own services

    def _jobset_service(self) -> dict[str, Any]:
        """Returns the Service of JobSet's webhook, which its controller's pods serve."""
        path = "apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        for each in self.call("GET", path)["items"]:
            for webhook in each.get("webhooks", []):
                found = webhook["clientConfig"].get("service", {})
                if "jobset" in found.get("name", ""):
                    namespace, name = found["namespace"], found["name"]
                    path = f"api/v1/namespaces/{namespace}/services/{name}"
                    return self.call("GET", path)
        pytest.skip("JobSet's webhook is no Service with jobset in its name")

    @contextlib.contextmanager
    def without_webhook(self) -> Iterator[None]:
        service = self._jobset_service()
        described, selector = service["metadata"], service["spec"]["selector"]
        place = f"api/v1/namespaces/{described['namespace']}"
        path = f"{place}/services/{described['name']}"
        nobody: dict[str, object] = {"stoker-test": "nobody"}
        self.patch(path, {"spec": {"selector": nobody}})
        # The API server keeps its connections to a pod: the next pod gets none.
        of_jobset = ",".join(f"{key}={value}" for key, value in selector.items())
        self.call("DELETE", f"{place}/pods?labelSelector={of_jobset}")
        slices = f"apis/discovery.k8s.io/v1/namespaces/{described['namespace']}/endpointslices"
        mine = f"{slices}?labelSelector=kubernetes.io/service-name={described['name']}"

        def num_endpoints() -> int:
            return sum(len(each["endpoints"] or ()) for each in self.call("GET", mine)["items"])

        try:
            wait_for(lambda: num_endpoints() == 0, what="the webhook has no pod")
            yield
        finally:
            nobody["stoker-test"] = None
            self.patch(path, {"spec": {"selector": nobody}})
            wait_for(lambda: num_endpoints() > 0, what="the webhook answers again")

    @contextlib.contextmanager
    def without_jobset(self) -> Iterator[None]:
        service = self._jobset_service()
        place = f"apis/apps/v1/namespaces/{service['metadata']['namespace']}/deployments"
        selector = service["spec"]["selector"].items()
        found = [
            each
            for each in self.call("GET", place)["items"]
            if selector <= each["spec"]["template"]["metadata"]["labels"].items()
        ]
        if len(found) != 1:
            pytest.skip("JobSet's controller is no Deployment")
        path = f"{place}/{found[0]['metadata']['name']}"

        def scale(count: int) -> None:
            self.patch(path, {"spec": {"replicas": count}})

        def num_pods(key: str) -> int:
            return self.call("GET", path)["status"].get(key, 0)

        scale(0)
        try:
            wait_for(lambda: num_pods("replicas") == 0, what="JobSet's controller is gone")
            yield
        finally:
            scale(found[0]["spec"]["replicas"])
            wait_for(lambda: num_pods("readyReplicas") > 0, what="JobSet's controller is back")

    def account_config(self, objects: Sequence[Mapping[str, Any]]) -> Path:
        file = self.folder / "runner"
        account_config(self._client, objects, namespace=self.namespace, file=file)
        return file

    def let_pass(self, seconds: float, command: TypedCommand) -> None:
        """Lets a time pass in which a command must not end."""
        end = time.monotonic() + seconds
        over = seconds + MINUTES

        def is_over() -> bool:
            return command.has_ended or time.monotonic() >= end

        wait_for(is_over, what="time passes", seconds=over)
        assert not command.has_ended, command.tail

    # --- stoker

    def workload(self, name: str = "t", **changed: Any) -> Path:
        """Writes a workload that trains on this cluster; `kubernetes` is added to its own."""
        given = self.given
        least = {"cpu": given.cpu, "memory": given.memory}

        def selected(label: tuple[str, str]) -> dict[str, object]:
            return {"pod": {"spec": {"nodeSelector": dict([label])}}}

        train = {**least, **selected(given.train), "gpus": given.gpus}
        feed = {**least, **selected(given.feed), "gpus": 0}
        pools = {given.train[1]: train, given.feed[1]: feed}
        kubernetes = {"namespace": self.namespace, "pools": pools}
        workload = {
            "schema": "stoker.workload/v1",
            "name": name,
            "command": ["python", "/app/train.py", "--workers", "1"],
            "image": given.image,
            "platform": "kubernetes",
            "cluster": {"dnn": {"instance_type": given.train[1], "count": 1}},
            "hyperparameters": {"epochs": given.epochs},
            **changed,
            "kubernetes": {**kubernetes, **changed.get("kubernetes", {})},
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(workload))
        return file

    def groups(self, *, dnn: int = 1, data: int = 0) -> list[str]:
        flags = ["--group", f"dnn={self.given.train[1]}:{dnn}"]
        return flags + (["--group", f"data={self.given.feed[1]}:{data}"] if data else [])

    def type(self, *words: str, config: Path | None = None) -> TypedCommand:
        self._commands.append(TypedCommand(words, folder=self.folder, config=config))
        return self._commands[-1]

    def typed(self, *words: str, seconds: float = 5 * MINUTES) -> str:
        command = self.type(*words)
        assert command.ended(seconds) == 0, command.tail
        return command.text

    def train(self, file, *flags, run="t", config=None) -> TypedCommand:
        """Starts `stoker train`, whose record is RUN.json; by default with KUBECONFIG."""
        named = ("--name", run, "--out", f"{run}.json")
        return self.type("train", str(file), "--yes", *named, *flags, config=config)

    def record(self, run: str = "t") -> dict[str, Any]:
        return json.loads((self.folder / f"{run}.json").read_text())

    def trains(self, run: str = "t", *, epoch: int = 1) -> str:
        pods: list[str] = []

        def is_training() -> bool:
            pods[:] = self.pods_of(run, "dnn")
            return bool(pods) and f"epoch {epoch}/" in self.logs(pods[0])

        wait_for(is_training, what=f"{run} trains", seconds=15 * MINUTES)
        return pods[0]

    def restarted(self, before: Sequence[str]) -> list[str]:
        """Waits until other dnn pods stand for all of `before`; returns them, the leader first."""
        selector = "jobset.sigs.k8s.io/jobset-name=t,stoker/role=dnn"
        found: list[str] = []

        def are_new() -> bool:
            # Also those that have ended already.
            found[:] = self.names("pods", selector)
            return len(found) == len(before) and not {*found} & {*before}

        wait_for(are_new, what="all dnn hosts are started again")
        return found

    def restarts(self, key: str = "restarts") -> int:
        return self.get("jobsets", "t").get("status", {}).get(key, 0)

    def restarts_counted(self) -> int:
        """Returns the restarts that count towards kubernetes.max_restarts."""
        return self.restarts("restartsCountTowardsMax")

    def token(self, run: str = "t") -> str:
        secret = self.get("secrets", f"{run}-token")
        return base64.b64decode(secret["data"]["token"]).decode()

    def pools_file(self, *, usd: Mapping[str, float]) -> Path:
        """Writes the pools of the cluster with these prices, as steps 6 says."""
        file = self.folder / "pools.csv"
        key = self.given.train[0]
        nodes = io.StringIO(json.dumps({"items": self.call("GET", "api/v1/nodes")["items"]}))
        with file.open("w") as out:
            node_pools.main(["--pool-label", key], nodes=nodes, out=out)
        put_prices(file, usd)
        return file


class PipelinesServer:
    """Kubeflow Pipelines, asked what its pages ask (KF_PIPELINES_ENDPOINT)."""

    def __init__(self) -> None:
        self._host = os.environ.get("KF_PIPELINES_ENDPOINT", "").rstrip("/")
        if not self._host:
            pytest.skip("KF_PIPELINES_ENDPOINT names no Kubeflow Pipelines")

    def call(self, method: str, path: str) -> dict[str, Any]:
        request = urllib.request.Request(f"{self._host}/apis/v2beta1/{path}", method=method)
        if token := os.environ.get("STOKER_KUBEFLOW_TOKEN"):
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read() or "{}")

    def state(self, run: str) -> str:
        return str(self.call("GET", f"runs/{run}").get("state", ""))

    def delete_schedules(self, name: str) -> None:
        for each in self.call("GET", "recurringruns?page_size=100").get("recurringRuns", []):
            if each["display_name"] == name:
                self.call("DELETE", f"recurringruns/{each['recurring_run_id']}")

    def ended(self, run: str, seconds: float = 40 * MINUTES) -> str:
        over = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
        wait_for(lambda: self.state(run) in over, what=f"run {run} ends", seconds=seconds)
        return self.state(run)


def put_prices(pools: Path, usd: Mapping[str, float]) -> None:
    """Fills in what the pools cost an hour; others have no price, and no plan uses them."""
    with pools.open() as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["ec2_usd_per_hour_us_east_1"] = str(usd.get(row["instance_type"], ""))
        row["priced_on"] = "2026-11-23" if row["instance_type"] in usd else ""
    with pools.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def succeeds(cluster: NodeCluster, command: TypedCommand, run: str = "t") -> None:
    assert command.ended() == 0, command.tail
    assert cluster.record(run)["status"] == "succeeded"


def fails(cluster: NodeCluster, command: TypedCommand, *words: str, code: int) -> None:
    assert command.ended() == code, command.tail
    assert [word for word in words if word not in command.tail] == [], command.tail


def are_gone(cluster: NodeCluster, run: str = "t") -> None:
    kinds = ("jobsets", "secrets", "configmaps", "services", "poddisruptionbudgets", "pods")

    def left() -> list[str]:
        names = [name for kind in kinds for name in cluster.names(kind)]
        return [name for name in names if name == run or name.startswith(f"{run}-")]

    wait_for(lambda: not left(), what=f"nothing of {run} is left", seconds=3 * MINUTES)


def spellings(secret: str) -> list[str]:
    """Returns how a secret would be written where it must not be."""
    raw = [secret.encode()]
    with contextlib.suppress(ValueError):
        raw.append(bytes.fromhex(secret))
    return [secret, *(base64.b64encode(each).decode().rstrip("=") for each in raw)]
