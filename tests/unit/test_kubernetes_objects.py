"""The objects of a run keep their promises and a cluster's rules, whatever the workload says."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform, KubernetesRequest
from stoker.platforms.kubernetes.pods import MAX_NAME, TOKEN_FOLDER, object_name
from support.kubernetes_jobs import CPU, GPU, POOLS, job

BOTH = pytest.mark.parametrize("api", ["jobset", "trainer"])


def plan(spec: JobSpec) -> KubernetesRequest:
    return KubernetesPlatform().plan(spec)


def template(request: KubernetesRequest) -> Any:
    if request.runtime is None:
        return request.main["spec"]
    return request.runtime["spec"]["template"]["spec"]


def pods(request: KubernetesRequest) -> dict[str, Any]:
    return by_role(template(request))


def by_role(jobset: Any) -> dict[str, Any]:
    return {
        "data" if found["name"] == "data" else "dnn": found["template"]["spec"]["template"]["spec"]
        for found in jobset["replicatedJobs"]
    }


def container(request: KubernetesRequest, role: str) -> Any:
    return pods(request)[role]["containers"][0]


def environment(request: KubernetesRequest, role: str) -> dict[str, str]:
    found = container(request, role)["env"]
    return {v["name"]: expand(v["value"]) for v in found if "value" in v}


def expand(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else f"<{match.group()}>"

    return re.sub(r"\$\$|\$\([^)]*\)", replace, text)


def test_a_jobset_goes_by_its_ttl_and_a_train_jobs_has_none():
    assert template(plan(job()))["ttlSecondsAfterFinished"] == 86400
    ttl = {"jobset": {"spec": {"ttlSecondsAfterFinished": 60}}}
    assert template(plan(job(settings=ttl)))["ttlSecondsAfterFinished"] == 60
    assert "ttlSecondsAfterFinished" not in template(plan(job(settings={"api": "trainer"})))
    with pytest.raises(UsageError, match="a TrainJob has no TTL"):
        plan(job(settings={"api": "trainer", **ttl}))


def test_a_training_on_cpus_asks_for_no_gpu():
    request = plan(job(settings={"dnn": {"gpus": 0}}))
    assert "nvidia.com/gpu" not in container(request, "dnn")["resources"]["limits"]
    assert pods(request)["dnn"]["tolerations"] == []
    assert environment(request, "dnn")["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_the_token_is_a_file_that_only_the_pods_user_reads():
    for spec in pods(plan(job())).values():
        volume = next(v for v in spec["volumes"] if v["name"] == "token")
        assert volume["secret"]["defaultMode"] == 0o400
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_fit_differ_and_stay(run, other):
    name = object_name(run)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) <= MAX_NAME
    assert object_name(run) == name
    assert run == other or object_name(other) != name


def test_a_train_job_s_runtime_makes_the_pods_that_a_jobset_has():
    labels = {"kueue.x-k8s.io/queue-name": "training"}
    queued = {"jobset": {"metadata": {"labels": labels}}}
    direct, trainer = plan(job(settings=queued)), plan(job(settings={"api": "trainer", **queued}))
    for request in (direct, trainer):
        # Kueue admits this object, and no pod of its own.
        assert request.main["metadata"]["labels"].items() >= labels.items()
        assert "kueue" not in json.dumps([request.config, pods(request)])
    text = json.dumps(pods(trainer)).replace("-node-0-", "-dnn-0-").replace('"node"', '"dnn"')
    text = text.replace("inputdataconfig.node.json", "inputdataconfig.dnn.json")
    assert json.loads(text) == json.loads(json.dumps(pods(direct)))


def patched(**specs: Any) -> dict[str, Any]:
    return {role: {"pod": {"spec": spec}} for role, spec in specs.items()}


def own(**container: Any) -> dict[str, Any]:
    return {"containers": [container]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "no image"),
    ({"settings": {"pools": {}}}, f"kubernetes.pools.{GPU}"),
    ({"settings": {"pools": {**POOLS, GPU: POOLS[CPU]}}}, "gpus (0: training on CPUs)"),
    ({"settings": {"entrypoint": ["stoker", "launch"]}}, "add -- as its last word"),
    ({"channels": {"train": {"uri": "s3://bucket/mnist"}}}, "hyperparameter"),
    ({"channels": {"train": {"uri": "pvc://x/y", "mode": "Pipe"}}}, "mode Pipe exist on SageMaker"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_the_cluster_would_refuse_is_refused_first(change, words):
    with pytest.raises(UsageError) as caught:
        plan(job(**change))
    assert words in str(caught.value)
    assert caught.value.where
    assert caught.value.fix or "group" in caught.value.where


OF_CONTAINER: list[tuple[dict[str, Any], str]] = [
    ({"command": ["sh"]}, "command"),
    ({"env": [{"name": "STOKER_FEED", "value": ""}]}, "env[STOKER_FEED]"),
    ({"volumeMounts": [{"mountPath": TOKEN_FOLDER}]}, f"volumeMounts[{TOKEN_FOLDER}]"),
]
RESERVED: list[tuple[dict[str, Any], str]] = [
    *((own(**changed), f"containers[dnn].{path}") for changed, path in OF_CONTAINER),
    ({"volumes": [{"name": "token", "emptyDir": {}}]}, "volumes[token]"),
    ({"restartPolicy": "Always"}, "restartPolicy"),
]


@BOTH
@pytest.mark.parametrize(("spec", "path"), RESERVED)
def test_what_stoker_sets_in_a_pod_cannot_be_patched(api, spec, path):
    path = path.replace("dnn", {"jobset": "dnn", "trainer": "node"}[api])
    pools = {**POOLS, GPU: {**POOLS[GPU], "pod": {"spec": spec}}}
    for key, settings in {"dnn": patched(dnn=spec), f"pools.{GPU}": {"pools": pools}}.items():
        with pytest.raises(UsageError, match="is set by stoker") as caught:
            plan(job(settings={"api": api, **settings}))
        assert caught.value.where == f"key kubernetes.{key}.pod.spec.{path}"


@BOTH
def test_a_pod_has_the_patches_of_its_pool_and_its_role(api):
    taints = [{"key": "a", "operator": "Exists"}, {"key": "b", "operator": "Exists"}]
    pool = {"nodeSelector": {"pool": "x"}, "tolerations": taints[:1], "hostAliases": [1, 2]}
    role = {
        "tolerations": taints[1:],
        "hostAliases": [3],
        "enableServiceLinks": None,
        "terminationGracePeriodSeconds": 300,
        "containers": [
            {"name": "mesh", "image": "mesh:1"},
            {"resources": {"limits": {"memory": "40Gi"}}, "env": [{"name": "HOME", "value": "/"}]},
        ],
    }
    pools = {**POOLS, GPU: {**POOLS[GPU], "pod": {"spec": pool}}}
    request = plan(job(settings={"api": api, "pools": pools, **patched(dnn=role)}))
    spec = pods(request)["dnn"]
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert spec["nodeSelector"] == {"pool": "x"}
    assert list(spec["tolerations"]) == [gpu, *taints]
    assert spec["hostAliases"] == [3]
    assert "enableServiceLinks" not in spec
    assert request.dnn.grace_seconds == spec["terminationGracePeriodSeconds"] == 300
    ours, mesh = spec["containers"]
    assert mesh == {"name": "mesh", "image": "mesh:1"}
    assert ours["resources"]["limits"]["memory"] == "40Gi"
    assert environment(request, "dnn")["HOME"] == "/"
    assert [v["name"] for v in ours["env"]].count("HOME") == 1
    assert "hostAliases" not in pods(request)["data"]
