import json
import socket
from collections.abc import Mapping

import pytest
import yaml

from stoker.cli.main import run
from stoker.doctor import host
from stoker.doctor.host import Finding, examine_host
from stoker.doctor.services import examine_cluster
from stoker.host.processes import free_ports
from stoker.records import Json
from stoker.workload_file import workload_from
from support.cluster_files import rbac
from support.command import succeeds
from support.kubernetes_api import NAMESPACE, Fault, kube_config, kubernetes_api
from support.kubernetes_jobs import GPU, POOLS
from support.platform_jobs import use_kube_config


@pytest.fixture
def port(monkeypatch):
    port = free_ports(set())
    monkeypatch.setenv("STOKER_RUN", json.dumps({"feed": {"port": port}}))
    return port


def test_a_host_is_healthy(port):
    found = [*examine_host({"STOKER_RUN": json.dumps({"feed": {"port": port}})})]
    assert [check for check in found if check.state == "fail"] == []
    names = ["python", "torch", "shm", "port"]
    assert [check.name for check in found] == names


def test_a_port_is_free_or_taken(port):
    assert host.port_check(port).state == "ok"
    with socket.create_server(("", port)):
        assert host.port_check(port).state == "fail"


def test_a_host_without_torch_is_a_warning(monkeypatch):
    assert host.torch_check().state == "ok"
    monkeypatch.setattr("torch.__version__", "2.3.1")
    assert host.torch_check().state == "fail"
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    assert host.torch_check().state == "warn"


def test_the_verb_ends_with_4_where_something_fails(port, capsys):
    assert run(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"]
    with socket.create_server(("", port)):
        assert run(["doctor"]) == 4
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("fail")]
    assert failed == [f"fail  port     {port}: Address already in use"]
    assert any(line.strip().startswith("try: ") for line in lines)


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
        found.role = rbac(namespace=NAMESPACE, account="runner")[0]["rules"]
        # Of the namespace's own roles: stoker does not need it.
        claims = {"resources": ["persistentvolumeclaims"], "verbs": ["get"]}
        found.role.append({"apiGroups": [""], **claims})
        found.put("persistentvolumeclaims", claim("datasets", "ReadOnlyMany"))
        found.put("persistentvolumeclaims", claim("runs", "ReadWriteOnce"))
        yield found


def claim(name, *modes, phase="Bound"):
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"accessModes": [*modes], "storageClassName": "shared"},
        "status": {"phase": phase},
    }


def found(*overrides: str) -> list[Finding]:
    return list(examine_cluster(workload_from(WORKLOAD, overrides=overrides)))


def one(findings: list[Finding], name: str) -> Finding:
    (finding,) = (each for each in findings if each.name == name)
    return finding


def test_a_cluster_that_has_what_a_workload_needs_is_told_line_by_line(api, tmp_path):
    file = tmp_path / "workload.yaml"
    file.write_text(yaml.safe_dump({**WORKLOAD, "platform": "kubernetes"}))
    done = succeeds("doctor", str(file))
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        *(["ok", "cluster"], ["ok", "job"], ["ok", "claim"], ["ok", "claim"]),
    ]
    assert f"namespace {NAMESPACE} has jobsets" in done.stdout
    # It asked, and made nothing.
    assert not api.names("jobsets")
    posts = [call for call in api.calls if not call.startswith("GET")]
    assert all("dryRun=All" in call for call in posts)


@pytest.mark.parametrize(
    ("message", "state", "words"),
    [
        ("exceeded quota: gpus, limited: 0", "fail", "exceeded quota: gpus"),
        ('User "u" cannot create resource "jobsets"', "warn", "cannot be checked"),
    ],
)
def test_a_job_that_the_cluster_would_refuse_is_no_ok(api, message, state, words):
    api.role = None
    api.faults.append(Fault("POST", "jobsets", 403, message=message, reason="Forbidden"))
    job = one(found(), "job")
    assert job.state == state
    assert words in job.text


def test_a_cluster_that_does_not_answer_is_the_only_finding(api, tmp_path, monkeypatch):
    use_kube_config(monkeypatch, kube_config(tmp_path, api.url, token="another"))
    (finding,) = found()
    assert (finding.state, finding.name) == ("fail", "cluster")
    assert "log in again" in finding.fix
