from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from stoker.doctor import Finding
from stoker.doctor.cluster import RETRY_LINES, examine_cluster
from stoker.platforms.kubernetes.rights import rules
from stoker.records import Json, KubernetesSettings
from stoker.workload_file import workload_from
from support.command import succeeds
from support.kfp_server import KfpServer
from support.kubernetes_api import NAMESPACE, Fault, kube_config, kubernetes_api
from support.kubernetes_jobs import GPU, POOLS
from support.platform_jobs import use_kube_config

WORKLOAD: Mapping[str, Json] = {
    "name": "mnist",
    "command": ["python", "train.py"],
    "image": "registry.example/mnist:1",
    "cluster": {"dnn": {"instance_type": GPU}},
    "channels": {"training": {"uri": "pvc://datasets/mnist"}},
    "kubernetes": {"namespace": NAMESPACE, "pools": POOLS, "output": "pvc://runs/stoker"},
}


@pytest.fixture
def api(tmp_path, monkeypatch):
    with kubernetes_api() as found:
        use_kube_config(monkeypatch, kube_config(tmp_path, found.url))
        found.role = rules(KubernetesSettings())
        # Of the namespace's own roles: stoker needs neither.
        for plural in ("persistentvolumeclaims", "configmaps"):
            found.role.append({"apiGroups": [""], "resources": [plural], "verbs": ["get"]})
        found.put("persistentvolumeclaims", claim("datasets", "ReadOnlyMany"))
        found.put("persistentvolumeclaims", claim("runs", "ReadWriteOnce"))
        found.put("configmaps", argo_settings(yaml.safe_load(RETRY_LINES)))
        yield found


@pytest.fixture(autouse=True)
def kubeflow(monkeypatch):
    with KfpServer() as server:
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
        yield server


def claim(name, *modes, phase="Bound"):
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"accessModes": [*modes], "storageClassName": "shared"},
        "status": {"phase": phase},
    }


def argo_settings(retries: Mapping[str, str] | None) -> dict[str, Any]:
    """Returns the settings of Argo's controller, as the manifests of Kubeflow 2.17 write them."""
    defaults = {"retryStrategy": {"limit": "2", **retries}} if retries is not None else {}
    spec = {"ttlStrategy": {"secondsAfterCompletion": 3600}, "templateDefaults": defaults}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "workflow-controller-configmap", "namespace": "kubeflow"},
        "data": {"workflowDefaults": yaml.safe_dump({"spec": spec})},
    }


def found(*overrides: str) -> list[Finding]:
    return list(examine_cluster(workload_from(WORKLOAD, overrides=overrides)))


def one(findings: list[Finding], name: str) -> Finding:
    (finding,) = (each for each in findings if each.name == name)
    return finding


def test_a_cluster_that_has_what_a_workload_needs_is_told_line_by_line(api, kubeflow):
    findings = found()
    assert [(each.state, each.name) for each in findings] == [
        *(("ok", "cluster"), ("ok", "api"), ("ok", "rights"), ("ok", "job")),
        *(("ok", "claim"), ("ok", "claim"), ("ok", "kubeflow"), ("ok", "argo")),
    ]
    assert one(findings, "cluster").text == f"Kubernetes v1.34.1, namespace {NAMESPACE}"
    assert one(findings, "api").text == "jobsets.jobset.x-k8s.io, v1alpha2"
    assert one(findings, "kubeflow").text == "Kubeflow Pipelines 2.17"
    # It asked, and made nothing.
    assert not api.names("jobsets")
    assert not api.has("configmaps", "mnist-doctor-follower")
    posts = [call for call in api.calls if not call.startswith("GET")]
    assert all(" /apis/authorization" in call or "dryRun=All" in call for call in posts)


def test_rights_are_asked_as_the_role_gives_them(api):
    api.denied = {("create", "secrets"), ("list", "events")}
    rights = one(found(), "rights")
    assert rights.state == "fail"
    assert rights.text.endswith(f"in namespace {NAMESPACE}: create secrets, list events")
    assert rights.fix.startswith("kubectl apply -k configs/kubernetes")
    # A run does without it.
    api.denied = {("list", "events")}
    assert one(found(), "rights").state == "warn"
    api.reviews_work = False
    unasked = one(found(), "rights")
    assert unasked.state == "warn"
    assert "cannot be checked" in unasked.text


@pytest.mark.parametrize(
    ("api_name", "group"), [("jobset", "jobset.x-k8s.io"), ("trainer", "trainer.kubeflow.org")]
)
def test_an_api_that_is_not_there_or_speaks_another_version_fails(api, api_name, group):
    api.other_versions[group] = "v9"
    findings = [each for each in found(f"kubernetes.api={api_name}") if each.name == "api"]
    assert {each.state for each in findings} == {"fail"}
    assert all("has version v9; stoker needs" in each.text for each in findings)
    api.other_versions.clear()
    api.installed.remove(group)
    findings = [each for each in found(f"kubernetes.api={api_name}") if each.name == "api"]
    assert all("the cluster has no" in each.text and "install" in each.fix for each in findings)


@pytest.mark.parametrize(
    ("plural", "code", "message", "state", "words"),
    [
        ("jobsets", 403, 'admission webhook "v" denied the request: no', "fail", "denied"),
        ("jobsets", 403, "exceeded quota: gpus, limited: 0", "fail", "the namespace's quota"),
        ("trainjobs", 422, '"mnist" is invalid: spec.trainer: Invalid', "fail", ""),
        ("trainjobs", 403, 'admission webhook "v" denied the request: no', "fail", "denied"),
        ("trainjobs", 403, 'User "u" cannot create resource "trainjobs"', "warn", ""),
    ],
)
def test_a_job_that_the_cluster_would_refuse_is_no_ok(api, plural, code, message, state, words):
    api.role = None
    api.faults.append(Fault("POST", plural, code, message=message, reason="Forbidden"))
    name = "jobset" if plural == "jobsets" else "trainer"
    job = one(found(f"kubernetes.api={name}"), "job")
    assert job.state == state
    assert words in job.text
    assert "would take" not in job.text


def test_a_trainers_runtime_stands_for_its_job(api):
    api.role = None
    findings = found("kubernetes.api=trainer")
    assert one(findings, "job").text == "the cluster would take its TrainingRuntime (dry run)"
    assert not api.names("trainingruntimes")
    assert not api.names("trainjobs")
    api.unknown_fields = {"spec.runtimePatches"}
    older = one(found("kubernetes.api=trainer"), "job")
    assert (older.state, "spec.runtimePatches" in older.text) == ("fail", True)
    assert "update Kubeflow Trainer to 2.2 or newer" in older.fix
    runtime = one(found("kubernetes.api=trainer", "kubernetes.runtime=theirs"), "job")
    assert (runtime.state, runtime.text) == ("fail", "TrainingRuntime theirs does not exist")


def test_a_claim_that_fewer_pods_can_mount_than_need_it_is_found(api):
    def claims(*overrides: str) -> list[tuple[str, str]]:
        of_claims = [each for each in found(*overrides) if each.name == "claim"]
        return [(each.state, each.text.partition(" ")[0]) for each in of_claims]

    assert claims() == [("ok", "datasets"), ("ok", "runs")]
    assert claims("cluster.dnn.count=2") == [("ok", "datasets"), ("fail", "runs")]
    api.put("persistentvolumeclaims", claim("datasets", "ReadWriteOnce"))
    assert claims() == [("warn", "datasets"), ("ok", "runs")]
    assert claims("constraints.max_data_hosts=0") == [("ok", "datasets"), ("ok", "runs")]
    volume = "{name: x, persistentVolumeClaim: {claimName: runs}}"
    assert claims(f"kubernetes.data.pod.spec.volumes=[{volume}]")[2:] == [("warn", "runs")]
    assert claims("kubernetes.memory=pvc://runs/memory")[2:] == [("ok", "runs")]
    assert claims("kubernetes.memory=pvc://absent/memory")[2:] == [("fail", "claim")]
    api.remove("persistentvolumeclaims", "runs")
    assert claims()[1] == ("fail", "claim")


def test_a_claim_that_is_not_bound_names_the_command_that_says_why(api):
    def runs(phase: str) -> Finding:
        api.put("persistentvolumeclaims", claim("runs", "ReadWriteMany", phase=phase))
        return next(each for each in found() if "kubernetes.output" in each.text)

    assert runs("Pending").state == "warn"
    assert "kubectl describe pvc runs" in runs("Pending").fix
    assert runs("Lost").state == "fail"


@pytest.mark.parametrize(
    ("retries", "words"),
    [
        # Stock 2.17.
        ({"retryPolicy": "OnError"}, "OnError: a lost follower is tried again if its pod vanishes"),
        ({"retryPolicy": "Always"}, "Always: a lost follower is tried again; so is each DAG"),
        ({"retryPolicy": "OnTransientError"}, "OnTransientError: a lost follower is tried again o"),
        # Argo's own default.
        (None, "OnFailure: a lost follower is tried again after an exit"),
    ],
)
def test_what_a_lost_follower_means_is_told_with_lines_that_have_it_retried(api, retries, words):
    api.put("configmaps", argo_settings(retries))
    argo = one(found(), "argo")
    assert argo.state == "warn"
    assert argo.text.startswith(words)
    assert argo.fix.endswith(f"templateDefaults.retryStrategy:\n{RETRY_LINES}")


def test_an_argo_whose_expression_decides_is_in_order(api):
    expression = "asInt(lastRetry.exitCode) > 128"
    # A policy that is not said is `Always` then.
    api.put("configmaps", argo_settings({"expression": expression}))
    argo = one(found(), "argo")
    assert (argo.state, argo.text) == ("ok", f"a lost follower is tried again if {expression}")
    api.put("configmaps", argo_settings({"expression": expression, "retryPolicy": "OnError"}))
    assert one(found(), "argo").state == "warn"
    api.remove("configmaps", "workflow-controller-configmap")
    assert "ConfigMap workflow-controller-configmap" in one(found(), "argo").text
    api.installed.remove("argoproj.io")
    assert one(found(), "argo").state == "ok"


def test_what_may_not_be_looked_at_is_no_failure_and_names_the_right(api):
    api.role = rules(KubernetesSettings())
    # The Role is of one namespace: in another one it gives no right to read Argo's settings.
    api.denied = {("get", "/version"), ("get", "configmaps")}
    findings = found()
    assert one(findings, "cluster").text.startswith("Kubernetes of unknown version")
    unasked = [each for each in findings if "cannot be checked" in each.text]
    assert [(each.state, each.name) for each in unasked] == [
        *(("warn", "claim"), ("warn", "claim"), ("warn", "argo"))
    ]
    assert "the right get persistentvolumeclaims is missing" in unasked[0].text
    assert "the right get configmaps is missing" in unasked[2].text


def test_a_cluster_that_does_not_answer_is_the_only_finding(api, tmp_path, monkeypatch):
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url, token="another"))
    (finding,) = found()
    assert (finding.state, finding.name) == ("fail", "cluster")
    assert "log in again" in finding.fix


@pytest.mark.parametrize(
    ("version", "state", "words"),
    [
        ("2.3.0", "fail", "pipelines need 2.14 or later"),
        ("2.15.2", "warn", "steps run as the user of their image"),
        ("2.16.0", "warn", "a schedule may start two runs at once"),
        ("unknown", "warn", "of unknown version: pipelines need 2.14"),
    ],
)
def test_an_older_kubeflow_is_told_with_what_it_cannot_do(api, kubeflow, version, state, words):
    kubeflow.version = version
    finding = one(found(), "kubeflow")
    assert finding.state == state
    assert words in f"{finding.text}; {finding.fix}"


def test_no_kubeflow_is_a_failure_only_where_the_workload_names_one(api, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://127.0.0.1:9")
    assert one(found(), "kubeflow").state == "warn"
    named = "kubernetes.kubeflow.host=http://127.0.0.1:9"
    assert one(found(named), "kubeflow").state == "fail"


def test_a_cluster_is_looked_at_without_this_host(api, tmp_path):
    file = tmp_path / "workload.yaml"
    file.write_text(yaml.safe_dump({**WORKLOAD, "schema": "stoker.workload/v1"}))
    api.put("configmaps", argo_settings({"retryPolicy": "OnError"}))
    done = succeeds("doctor", "--cluster", str(file))
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line[0] != " "]
    assert rows[0] == ["ok", "cluster"]
    assert {name for _, name in rows}.isdisjoint({"python", "torch", "vcpus", "memory", "port"})
    # What is to be pasted keeps its lines, below each other.
    assert f"\n{'':<15}retryPolicy: Always\n{'':<15}expression: " in done.stdout
