"""The ten steps of the guides work, typed as they stand, as far as that goes without a cloud."""

import contextlib
import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from botocore.awsrequest import AWSResponse

from stoker.logs import Log
from stoker.platforms.kubernetes.pod_outputs import log_files
from stoker.profile.rank_results import (
    AcceleratorOnly,
    AsIs,
    BatchFacts,
    Drain,
    LoaderFacts,
    Quartiles,
    RankResult,
    quartiles,
)
from stoker.records import write_json
from support import sample_records
from support.builders import clusters
from support.guide import LEFT_OUT, TYPED, GuideShell, steps, why_left_out
from support.kfp_server import KfpServer
from support.kubernetes_api import KubernetesApi, kube_config, kubernetes_api

ROOT = Path(__file__).parents[2]
SECONDS = 60.0


def type_all(shell: GuideShell, guide: str) -> None:
    for title, lines in steps((ROOT / "docs" / guide).read_text()):
        for line in lines:
            done = shell.type(line)
            if line.startswith("stoker doctor --aws"):
                # moto has no quotas of SageMaker.
                failed = [words for words in done.stdout.splitlines() if words.startswith("fail")]
                assert [words.split()[1] for words in failed] == ["quota"], done.stdout
                continue
            assert done.returncode == 0, f"{title}: {line}\n{done.stdout}{done.stderr}"


@contextlib.contextmanager
def kubelet(api: KubernetesApi, folder: Path) -> Iterator[None]:
    """Every job runs at once, and its leader leaves the records of `folder`."""
    text = io.StringIO()
    log_files(folder, under="stoker", log=Log(run="guide", host="leader", stream=text))
    lines = text.getvalue().splitlines()
    is_over = threading.Event()

    def play() -> None:
        done: set[str] = set()
        while not is_over.wait(0.02):
            for name in api.names("jobsets"):
                if name not in done and api.has("configmaps", f"{name}-config"):
                    done.add(name)
                    api.run_pods(name)
                    (leader,) = api.pods(name, "dnn")
                    api.say(leader, *lines)
                    api.end_pod(leader)
                    api.end_job(name)

    thread = threading.Thread(target=play, name="kubelet")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(SECONDS)


def at(seconds: float) -> Quartiles:
    return quartiles([seconds] * 60)


# Three cores that feed one GPU: it would take 30 ms a step, and waits for 53 more.
STARVED = RankResult(
    rank=0,
    world_size=1,
    host="algo-1",
    vcpus=3,
    ranks_on_host=1,
    steps=200,
    loaders=1,
    as_is=AsIs(
        step_seconds=at(0.083),
        wait_seconds=at(0.053),
        trainer_cpu_seconds=0.01,
        children_cpu_seconds=0.24,
        receive_seconds=0.0005,
        epoch_batches=234,
    ),
    accelerator=AcceleratorOnly(
        step_seconds=at(0.03), trainer_cpu_seconds=at(0.01), cached_batches=8
    ),
    drains=tuple(
        Drain(
            workers=workers,
            cpu_seconds=at(0.24),
            wall_seconds=at(0.24),
            batches_per_second=workers / 0.24,
        )
        for workers in (1, 3)
    ),
    batch=BatchFacts(samples=256, num_bytes=256 * 96 * 96),
    loader=LoaderFacts(
        num_workers=3, pin_memory=True, persistent_workers=True, dataset="__main__.Digits"
    ),
)


def records(folder: Path, *, host: str, data: str) -> Path:
    folder.mkdir()
    (folder / "profile-rank0.json").write_bytes(msgspec.json.encode(STARVED))
    found = {"groups": clusters(host, data), "metrics": {"accuracy": 0.98}}
    training = msgspec.structs.replace(sample_records.training(), **found)
    write_json(folder / "training.json", training)
    return folder


def archive(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as packed:
        packed.add(folder, arcname="stoker")
    return content.getvalue()


@contextlib.contextmanager
def jobs_leave(content: bytes) -> Iterator[None]:
    """Every training job has left this output by the time that it was made."""
    boto3.setup_default_session()
    session = boto3.DEFAULT_SESSION

    def made(params: Mapping[str, Any], **_: object) -> None:
        body = json.loads(params["body"])
        place = body["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://")
        bucket, _, prefix = place.partition("/")
        key = f"{prefix}/{body['TrainingJobName']}/output/output.tar.gz"
        boto3.Session().client("s3").put_object(Bucket=bucket, Key=key, Body=content)

    def no_steps(**_: object) -> tuple[AWSResponse, object]:
        return AWSResponse("", 200, {}, None), {"PipelineExecutionSteps": []}

    events = session.events
    events.register("before-call.sagemaker.CreateTrainingJob", made)
    # Which moto does not have.
    events.register("before-call.sagemaker.ListPipelineExecutionSteps", no_steps)
    try:
        yield
    finally:
        boto3.setup_default_session()


def claim(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "kubeflow"},
        "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "shared"},
        "status": {"phase": "Bound"},
    }


@pytest.mark.parametrize("guide", ["sagemaker.md", "kubeflow.md"])
def test_a_variable_that_is_not_set_changes_no_file(guide, tmp_path):
    typed = [line for _, lines in steps((ROOT / "docs" / guide).read_text()) for line in lines]
    (line,) = (line for line in typed if line.startswith("sed -i"))
    file = tmp_path / line.split()[-1]
    file.parent.mkdir()
    file.write_text(text := (ROOT / "configs" / file.name).read_text())
    # As interactive shells do, which take a variable that is not set as an empty text.
    for command in (line, f"export ACCOUNT= REGISTRY=; {line}"):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env={}, check=False)
        assert done.returncode != 0
        assert file.read_text() == text


def test_each_line_of_the_ten_steps_is_typed_on_a_cluster_or_named_as_left_out():
    found = dict(steps((ROOT / "docs" / "kubeflow.md").read_text()))
    # What stands before the first step has no title.
    assert [title.partition(".")[0] for title in found] == ["", *map(str, range(1, 11))]
    # Step 5 is the reader's: claims, and data in them.
    assert [title[:2] for title, lines in found.items() if not lines] == ["5."]
    lines = [line for typed in found.values() for line in typed]
    left_out = [line for line in lines if why_left_out(line)]
    assert [line for line in lines if line not in left_out and line.split()[0] not in TYPED] == []
    # Nothing is named that the page does not have.
    assert all(any(line.startswith(words) for line in left_out) for words in LEFT_OUT)


def test_the_sagemaker_guide(tmp_path, aws_server, monkeypatch):
    # Nothing is claimed of how long a log is waited for.
    monkeypatch.setattr("stoker.platforms.sagemaker.job.QUIET_SECONDS", 0.0)
    monkeypatch.setattr("stoker.platforms.sagemaker.job.MIN_INTERVAL_SECONDS", 0.01)
    (tmp_path / "stoker").symlink_to(ROOT)
    shell = GuideShell(tmp_path, env={**aws_server.environ(), "HOME": str(tmp_path)})
    left = records(tmp_path / "records", host="ml.g5.xlarge", data="ml.c7i.4xlarge")
    with jobs_leave(archive(left)):
        type_all(shell, "sagemaker.md")


def test_the_kubeflow_guide(tmp_path, monkeypatch):
    with kubernetes_api() as api, KfpServer() as pipelines:
        api.namespaces.add("kubeflow")
        # Step 5 has no commands: claims and data are the reader's.
        for name in ("datasets", "runs"):
            api.put("persistentvolumeclaims", claim(name))
        (tmp_path / "stoker").symlink_to(ROOT)
        config = kube_config(tmp_path, api.url, namespace="kubeflow")
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "KUBECONFIG": str(config)}
        env["KF_PIPELINES_ENDPOINT"] = pipelines.url
        default = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
        monkeypatch.setattr(default, str(config))
        pipelines.script = [lambda: pipelines.end("SUCCEEDED")]
        shell = GuideShell(tmp_path, env=env)
        with kubelet(api, records(tmp_path / "records", host="gpu", data="cpu")):
            type_all(shell, "kubeflow.md")
        assert pipelines.problems == []
