"""Launchers run in the environment that a Kubernetes plan gives its pods; pods are processes."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from stoker.host.processes import free_ports
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.pod_log import OutputParts
from support.kubernetes_jobs import job
from support.local_job import marked_processes, until
from support.processes import started
from support.tokens import new_token

pytestmark = [pytest.mark.fault, pytest.mark.e2e]

SAY = (
    "import json, os, sys; print(json.dumps({'args': sys.argv[1:],"
    " 'channels': json.loads(os.environ['SM_CHANNELS']), 'train': os.environ['SM_CHANNEL_TRAIN'],"
    " 'group': os.environ['SM_CURRENT_INSTANCE_GROUP']}), flush=True)"
)


class Pods:
    """Starts pods of a plan; loopback addresses stand for their names in the cluster's DNS."""

    def __init__(self, tmp_path, *groups, script=SAY, **feed):
        self.tmp_path = tmp_path
        # Nobody is lost here, however busy the machine is.
        feed = {"port": free_ports(set()), "lease_seconds": 20.0, **feed}
        spec = job(*groups, name="mnist-1", command=["python", "-c", script], feed=feed)
        self.spec = dataclasses.replace(spec, run_dir=tmp_path / "run")
        self.request = KubernetesPlatform().plan(self.spec)
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        (tmp_path / "token").write_text(new_token())

    def start(self, name, index):
        main: Any = self.request.main
        config: Any = self.request.config["data"]
        (pods,) = [
            found["template"]["spec"]["template"]["spec"]
            for found in main["spec"]["replicatedJobs"]
            if found["name"] == name
        ]
        (container,) = pods["containers"]
        base = self.tmp_path / "pods" / f"{name}-{index}"
        folder = base / "input" / "config"
        folder.mkdir(parents=True)
        volume = next(v for v in pods["volumes"] if v["name"] == "config")
        for item in volume["configMap"]["items"]:
            (folder / item["path"]).write_text(config[item["key"]])
        variables = {v["name"]: v["value"] for v in container["env"] if "value" in v}
        own = {"dnn": "127.1.2.1", "data": "127.1.3.1"}[name] + str(index)
        run = self.request.secret["stringData"]["run.json"]
        run = run.replace("mnist-1-dnn-0-{index}.mnist-1", "127.1.2.1{index}")
        run = run.replace("mnist-1-data-0-{index}.mnist-1", "127.1.3.1{index}")
        secret = base / "secret"
        secret.mkdir()
        settings = json.loads(run) | {"workers": {"data": 1}}
        (secret / "run.json").write_text(json.dumps(settings))
        (secret / "token").write_text((self.tmp_path / "token").read_text())
        variables |= {
            "PATH": os.environ["PATH"],
            "KUBERNETES_SERVICE_HOST": "10.0.0.1",
            "JOB_COMPLETION_INDEX": str(index),
            "STOKER_RUN": str(secret / "run.json"),
            "STOKER_RUN_ID": "mnist-1",
            "STOKER_BASE_DIR": str(base),
            # All pods share this machine's ports: each listens at its own address.
            "STOKER_ADVERTISE": own,
        }
        words = [sys.executable, "-m", "stoker.cli", "launch", "--", *container["args"]]
        pod = f"{name}-{index}"
        self.started[pod] = started(words, self.tmp_path / f"{pod}.log", env=variables)

    def code(self, pod):
        return self.started[pod].wait(150)

    def log(self, pod):
        return (self.tmp_path / f"{pod}.log").read_text(errors="replace")


@contextlib.contextmanager
def ended(pods):
    try:
        yield pods
    finally:
        for process in pods.started.values():
            process.kill()
            process.wait()
    until(lambda: not marked_processes(pods.tmp_path / "pods"), what="all ends with the launchers")


# Saves when it is told to end, and ends well.
SAVES = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (print('saved', flush=True)"
    ", sys.exit(0))); print('trains', flush=True); time.sleep(300)"
)


@pytest.fixture
def saving(tmp_path):
    with ended(Pods(tmp_path, script=SAVES)) as pods:
        for name, index in (("data", 0), ("data", 1), ("dnn", 0)):
            pods.start(name, index)
        until(lambda: "trains" in pods.log("dnn-0"), what="it trains")
        yield pods


def record_of(pods):
    base = pods.tmp_path / "pods" / "dnn-0" / "output"
    return json.loads((base / "data" / "stoker" / "training.json").read_text())


def test_a_pod_that_is_told_to_end_is_not_taken_for_one_that_is_done(saving):
    saving.started["dnn-0"].terminate()
    assert [saving.code(pod) for pod in ("dnn-0", "data-0", "data-1")] == [143, 0, 0]
    assert "saved" in saving.log("dnn-0")
    assert record_of(saving)["status"] == "stopped"


def test_pods_of_a_plan_play_their_roles_and_the_leaders_log_has_its_record(tmp_path):
    with ended(Pods(tmp_path)) as pods:
        for name, index in (("data", 0), ("data", 1), ("dnn", 0)):
            pods.start(name, index)
        assert [pods.code(pod) for pod in pods.started] == [0, 0, 0]
    said = json.loads(next(x for x in pods.log("dnn-0").splitlines() if x.startswith("{")))
    base = tmp_path / "pods" / "dnn-0"
    assert said == {
        "args": ["--answer", "yes", "--epochs", "3"],
        "channels": ["labels", "train"],
        "train": str(base / "input" / "data" / "train"),
        "group": "dnn",
    }
    record = record_of(pods)
    assert record["job"] == {"platform": "kubernetes", "name": "mnist-1"}
    assert [host["host"] for host in record["hosts"]] == ["127.1.2.10", "127.1.3.10", "127.1.3.11"]
    assert [group["instance_type"] for group in record["groups"]] == ["g5.2xlarge", "c7i.4xlarge"]
    # It outlives the pod there.
    parts = OutputParts()
    for line in pods.log("dnn-0").splitlines():
        parts.take(line)
    kept = base / "output" / "data" / "stoker" / "training.json"
    assert parts.files["stoker/training.json"] == kept.read_bytes()
    assert "output_part" not in pods.log("data-0") + pods.log("data-1")
