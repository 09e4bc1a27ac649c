"""The pipeline on a real Kubeflow Pipelines: its two kinds of decisions, its ends, its followers.

Runs are in the namespace of Kubeflow's steps, and their pipeline is deleted afterwards. A run that
is ended here trains for as long as the jobs' own tests do.
"""

import base64
import contextlib
import json
import uuid
from typing import Any

import pytest

from stoker.workload_file import read_workload
from support.cluster_files import rbac
from support.node_cluster import (
    LOST,
    MINUTES,
    Given,
    NodeCluster,
    PipelinesServer,
    described,
    spellings,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

SECRET = "a-secret-of-the-user-7f3a"
ARTIFACTS = "mlpipeline"
FINISHED = "the training is finished though the run has FAILED"


class PipelineProject:
    def __init__(self, cluster, server, *, has_claims=True):
        self.cluster, self.server = cluster, server
        self.name = f"stoker-test-{uuid.uuid4().hex[:6]}"
        given = cluster.given
        secret = described("v1", "Secret", f"{self.name}-keys")
        keys = [{"secretRef": {"name": f"{self.name}-keys"}}]
        taken = {"pod": {"spec": {"containers": [{"envFrom": keys}]}}}
        kubernetes: dict[str, Any] = {"dnn": taken, "data": taken}
        if has_claims and given.storage_class:
            claim = cluster.claim(f"{self.name}-runs")
            kubernetes |= {"output": f"pvc://{claim}/runs", "champion": f"pvc://{claim}/champions"}
        # Data hosts cost next to nothing: where they save time, they are taken.
        usd = {given.train[1]: 1.0, given.feed[1]: 0.001}
        pools_file = str(cluster.pools_file(usd=usd))
        self.file = cluster.workload(
            self.name,
            profile={"budget_seconds": 60},
            constraints={"objective": "time", "max_data_hosts": 2},
            kubernetes={**kubernetes, "pools_file": pools_file},
        )
        cluster.make("secrets", {**secret, "stringData": {"SECRET_KEY": SECRET}})
        self._allow(given)
        cluster.typed("upload", "kubeflow", str(self.file), "--yes")
        self.runs: list[str] = []

    def _allow(self, given: Given) -> None:
        """Applies step 3's Role, as kubectl does."""
        for each in rbac(namespace=given.namespace, account=given.account):
            plural = f"{each['kind'].lower()}s"
            path = self.cluster.path(plural, each["metadata"]["name"])
            query = "?fieldManager=stoker-test&force=true"
            kind = "application/apply-patch+yaml"
            self.cluster.call("PATCH", path + query, each, kind=kind)

    def start(self, **params: object) -> str:
        flags = [word for name, value in params.items() for word in ("--param", f"{name}={value}")]
        words = ("start", "kubeflow", str(self.file), "--yes", "--json", *flags)
        told = self.cluster.typed(*words)
        self.runs.append(json.loads(told[told.index("{") :])["run"])
        return self.runs[-1]

    def job(self, run: str) -> str:
        return read_workload(self.file).run_name(run)

    def follower(self, run: str) -> str:
        selector = f"pipeline/runid={run},stoker/role=follower"
        (pod,) = self.cluster.running(selector)
        return pod

    def workflow(self, run: str) -> dict[str, Any]:
        (found,) = self.cluster.objects("workflows", f"pipeline/runid={run}")
        return found

    def is_free(self, run: str) -> bool:
        return not any(name.startswith(self.job(run)) for name in self.cluster.names("jobsets"))

    def close(self) -> None:
        for run in self.runs:
            if self.server.state(run) in ("PENDING", "RUNNING"):
                self.cluster.type("stop", "kubeflow", run).ended(10 * MINUTES)
        found = self.server.call("GET", f"pipelines/names/{self.name}")
        # Its versions go with it, where the server knows that.
        with contextlib.suppress(OSError):
            self.server.call("DELETE", f"pipelines/{found['pipeline_id']}?cascade=true")


@pytest.fixture(scope="module")
def project(given, tmp_path_factory):
    server = PipelinesServer()
    cluster = NodeCluster(given, tmp_path_factory.mktemp("project"), namespace=given.namespace)
    made = None
    try:
        made = PipelineProject(cluster, server)
        yield made
    finally:
        if made is not None:
            made.close()
        cluster.close()


@pytest.fixture
def training(project):
    run = project.start(max_data_hosts=0)
    project.cluster.trains(project.job(run))
    return run


def test_a_run_without_data_hosts(project):
    run = project.start(max_data_hosts=0)
    assert project.server.ended(run) == "SUCCEEDED"
    told = project.cluster.typed("status", "kubeflow", run)
    # Its own tasks, and nothing of Argo's.
    assert "driver" not in told
    assert "root" not in told


def test_a_run_whose_decision_has_data_hosts(project):
    run = project.start()
    job = project.job(run)
    data: list[str] = []

    def has_decided() -> bool:
        data[:] = data or project.cluster.pods_of(job, "data")
        return bool(data) or project.server.state(run) not in ("PENDING", "RUNNING")

    wait_for(has_decided, what="it trains", seconds=30 * MINUTES)
    assert project.server.ended(run) == "SUCCEEDED"
    if not data:
        pytest.skip("the decision has no data hosts: this training does not wait for its data here")


def test_a_run_without_claims(project):
    bare = PipelineProject(project.cluster, project.server, has_claims=False)
    try:
        assert bare.server.ended(bare.start(max_data_hosts=0, epochs=1)) == "SUCCEEDED"
    finally:
        bare.close()


def test_stop_ends_the_jobs(project, training):
    project.cluster.typed("stop", "kubeflow", training, seconds=10 * MINUTES)
    wait_for(lambda: project.is_free(training), what="its jobs are gone", seconds=3 * MINUTES)
    assert project.server.ended(training) == "CANCELED"


def test_terminate_in_the_pages_ends_the_jobs(project, training):
    project.server.call("POST", f"runs/{training}:terminate")
    wait_for(lambda: project.is_free(training), what="its jobs are gone", seconds=3 * MINUTES)


def test_a_schedule_starts_runs(project):
    words = ("schedule", "kubeflow", str(project.file))
    before = {run["run_id"] for run in project.server.call("GET", "runs?page_size=100")["runs"]}
    started: list[str] = []

    def has_started() -> bool:
        runs = project.server.call("GET", "runs?page_size=100")["runs"]
        mine = [run for run in runs if project.name in run["display_name"]]
        started[:] = [run["run_id"] for run in mine if run["run_id"] not in before]
        return bool(started)

    project.cluster.typed(*words, "--cron", "@every 1m", "--param", "max_data_hosts=0")
    try:
        wait_for(has_started, what="a run begins", seconds=5 * MINUTES)
    finally:
        project.server.delete_schedules(f"stoker-{project.name}")
    project.runs.extend(started)


def test_a_gate_that_is_not_passed_is_told_by_start(project):
    words = ("start", "kubeflow", str(project.file), "--yes", "--wait")
    flags = ("--param", "max_data_hosts=0", "--param", "epochs=1", "--param", "gate=accuracy>=1.1")
    command = project.cluster.type(*words, *flags)
    assert command.ended(40 * MINUTES) == 3


def test_a_second_model_is_compared_with_the_champion(project):
    why = "the champion is in a claim"
    project.cluster.given.need(project.cluster.given.storage_class, "STORAGE_CLASS", why)
    for gate, state in (
        ("accuracy>=0.1, accuracy>=champion-0.9", "SUCCEEDED"),
        ("accuracy>=champion-0.9", "SUCCEEDED"),
        ("accuracy>=champion+0.9", "FAILED"),
    ):
        run = project.start(max_data_hosts=0, epochs=1, gate=gate)
        assert project.server.ended(run) == state, gate


@pytest.mark.parametrize("how", LOST)
def test_a_training_is_not_lost_with_its_follower(project, training, how):
    cluster, job = project.cluster, project.job(training)
    leader = cluster.trains(job)
    was_let_go = cluster.lose(project.follower(training), how)
    # A disruption budget keeps it, as it keeps the pods that train.
    assert was_let_go == (how != "evicted")
    if project.server.ended(training) == "FAILED":
        # Argo tries again what vanished; after an exit code it may not: Finish has followed it.
        assert how == "killed"
        pods = cluster.names("pods", f"pipeline/runid={training}")
        assert any(FINISHED in cluster.logs(pod) for pod in pods)
        project.server.call("POST", f"runs/{training}:retry")
    state = project.server.state
    wait_for(lambda: state(training) == "SUCCEEDED", what="it succeeds", seconds=30 * MINUTES)
    # One training, and no second one.
    made = [pod for pod in cluster.names("pods") if pod.startswith(f"{job}-dnn-0-0")]
    assert made in ([], [leader])


def test_a_drain_waits_for_the_follower(project, training):
    cluster, pod = project.cluster, project.follower(training)
    node = cluster.node_of(pod)
    assert pod in cluster.drain(node, f"pipeline/runid={training}")
    cluster.uncordon(node)
    assert project.server.ended(training) == "SUCCEEDED"


def test_secrets_are_not_in_the_workflow_its_logs_or_its_artifacts(project, training, tmp_path):
    cluster = project.cluster
    secrets = [*spellings(SECRET), *spellings(cluster.token(project.job(training)))]
    assert project.server.ended(training) == "SUCCEEDED"
    shown = {"the Workflow": json.dumps(project.workflow(training))}
    for pod in cluster.names("pods", f"pipeline/runid={training}"):
        shown[f"log of {pod}"] = cluster.logs(pod)
        shown[f"pod {pod}"] = json.dumps(cluster.get("pods", pod))
    shown["the run"] = json.dumps(project.server.call("GET", f"runs/{training}"))

    def places() -> list[str]:
        return [place for place, text in shown.items() if any(s in text for s in secrets)]

    assert places() == []
    why = "its artifacts are not looked at (the Workflow and its logs were, and have none)"
    shown = artifacts(cluster, project.workflow(training)["metadata"]["name"], training, why=why)
    assert shown
    assert places() == []


def artifacts(cluster: NodeCluster, *marks: str, why: str) -> dict[str, str]:
    import boto3

    address = cluster.given.need(cluster.given.s3, "S3", why)
    keys = cluster.call("GET", cluster.path("secrets", "mlpipeline-minio-artifact"))["data"]
    names = {"aws_access_key_id": "accesskey", "aws_secret_access_key": "secretkey"}
    own = {name: base64.b64decode(keys[key]).decode() for name, key in names.items()}
    store = boto3.client("s3", endpoint_url=address, region_name="us-east-1", **own)
    pages = store.get_paginator("list_objects_v2").paginate(Bucket=ARTIFACTS)
    names = [item["Key"] for page in pages for item in page.get("Contents", [])]
    mine = [name for name in names if any(mark in name for mark in marks)]
    bodies = {name: store.get_object(Bucket=ARTIFACTS, Key=name)["Body"].read() for name in mine}
    return {name: body.decode(errors="replace") for name, body in bodies.items()}
