"""Both pipelines compile without a network to what their files hold.

That other processes compile the same bytes, `upload --check` says: test_pipeline_verbs.py.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.black_box import as_json
from support.goldens import check_golden, shown
from support.sagemaker_execution import checked_steps
from support.workloads import write

SAGEMAKER: dict[str, Any] = yaml.safe_load("""
name: mnist
platform: sagemaker
command: [python, train.py]
image: 123456789012.dkr.ecr.eu-west-1.amazonaws.com/stoker:1.0
cluster: {dnn: {instance_type: ml.g5.2xlarge}}
channels: {train: {uri: "s3://bucket/mnist/"}}
hyperparameters: {epochs: 3, lr: 0.1}
gate: [{metric: accuracy, min: 0.94}]
sagemaker:
  role: arn:aws:iam::123456789012:role/stoker-train
  output_uri: s3://bucket/out
""")
KUBEFLOW: dict[str, Any] = yaml.safe_load("""
name: digits
command: [python, train.py, --workers, "4"]
platform: kubernetes
image: registry/stoker:digits
cluster: {dnn: {instance_type: g5.xlarge, count: 1}}
channels: {train: {uri: "pvc://datasets/digits"}}
hyperparameters: {epochs: 10}
constraints: {objective: cost, max_usd_per_hour: 6, max_data_hosts: 4}
gate: [{metric: accuracy, min: 0.97}]
kubernetes:
  namespace: team-a
  context: admin@cluster
  kubeflow: {host: "https://kubeflow.internal", token_file: /home/me/token}
  shm: 8Gi
  pools:
    g5.xlarge:
      pod:
        spec:
          nodeSelector: {pool: gpu}
          tolerations: [{key: reserved, operator: Equal, value: training}]
      cpu: 3500m
      memory: 14.5Gi
      gpus: 1
  dnn:
    pod:
      spec:
        imagePullSecrets: [{name: registry}]
        containers:
        - imagePullPolicy: IfNotPresent
          env: [{name: NCCL_DEBUG, value: WARN}]
          volumeMounts: [{name: key, mountPath: /key}]
        volumes: [{name: key, secret: {secretName: key}}]
""")
CASES = {"sagemaker": (SAGEMAKER, "json"), "kubeflow": (KUBEFLOW, "yaml")}
# Nothing answers there.
NOWHERE = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "AWS_ENDPOINT_URL"), "http://127.0.0.1:9")
OFFLINE = {**os.environ, **NOWHERE, "NO_PROXY": "", "no_proxy": ""}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles each pipeline once, in a process whose hash seed is any."""
    found = {}

    def of(target: str):
        pytest.importorskip({"sagemaker": "sagemaker", "kubeflow": "kfp"}[target])
        if target not in found:
            folder = tmp_path_factory.mktemp(target)
            workload, suffix = CASES[target]
            write(folder, workload)
            words = ("compile", target, "workload.yaml", "--out", f"made.{suffix}")
            told = as_json(*words, cwd=folder, env=OFFLINE)
            found[target] = (folder / f"made.{suffix}", told)
        return found[target]

    return of


@pytest.mark.parametrize("target", CASES)
def test_the_definition_is_as_it_was(compiled, target):
    made, _ = compiled(target)
    text = re.sub(r"(?m)^sdkVersion: .*$", "sdkVersion: kfp", made.read_text(encoding="utf-8"))
    documents = [shown(each) for each in yaml.load_all(text, Loader=yaml.CSafeLoader)]
    check_golden(f"pipelines/{target}.yaml", yaml.safe_dump_all(documents, sort_keys=False))


def test_sagemaker_takes_every_step(compiled):
    made, _ = compiled("sagemaker")
    assert len(checked_steps(made.read_text())) >= 5


@pytest.mark.parametrize("target", CASES)
def test_nothing_secret_and_nothing_of_this_machine_is_in_a_definition(compiled, target):
    made, _ = compiled(target)
    text = made.read_text()
    assert str(made.parent) not in text
    assert not re.search(r"\b[0-9a-f]{64}\b", text)
    # Where Kubeflow is, and who uploads.
    for words in ("kubeflow.internal", "/home/me", "admin@cluster"):
        assert words not in text


@pytest.mark.parametrize("target", CASES)
def test_hyperparameters_are_parameters_of_a_run_with_the_workload_s_values(compiled, target):
    _, told = compiled(target)
    for name, value in CASES[target][0]["hyperparameters"].items():
        assert told["parameters"][name] == value


def test_each_component_is_a_file_that_kfp_loads():
    pytest.importorskip("kfp")
    from kfp import components

    files = Path(__file__).parents[2].glob("components/*/*.yaml")
    names = {components.load_component_from_file(str(file)).name for file in files}
    assert names == {"profile", "decide", "train", "evaluate", "gate", "finish"}
