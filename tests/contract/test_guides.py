"""The ten steps of the guides work, typed as they stand, as far as that goes without a cloud."""

import contextlib
import io
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.logs import Log
from stoker.platforms.kubernetes.pod_outputs import log_files
from support.guide import LEFT_OUT, TYPED, GuideShell, steps, why_left_out
from support.guides import archive, jobs_leave, records
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
