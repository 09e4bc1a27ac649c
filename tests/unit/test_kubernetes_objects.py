"""The objects of a run keep their promises, whatever the workload says."""

import dataclasses
import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import PlatformError, UsageError
from stoker.host.machine import CPU_REQUEST
from stoker.launch.topology import Topology, from_resourceconfig
from stoker.platforms import platform_named
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform, KubernetesRequest
from stoker.platforms.kubernetes.objects import MAX_NAME, is_dns_label, object_name, verbatim
from stoker.platforms.kubernetes.request import NO_TOKEN
from support.kubernetes_jobs import CPU, DATA, DNN, EVERYTHING, GPU, POOLS, everything, job
from support.kubernetes_rules import security_problems as insecurities

BOTH = pytest.mark.parametrize("api", ["jobset", "trainer"])


def plan(spec: JobSpec) -> KubernetesRequest:
    return KubernetesPlatform().plan(spec)


def template(request: KubernetesRequest) -> Any:
    if request.runtime is None:
        return request.main["spec"]
    return request.runtime["spec"]["template"]["spec"]


def jobs(request: KubernetesRequest) -> dict[str, Any]:
    return {
        "data" if found["name"] == "data" else "dnn": found["template"]["spec"]
        for found in template(request)["replicatedJobs"]
    }


def pods(request: KubernetesRequest) -> dict[str, Any]:
    return {role: found["template"]["spec"] for role, found in jobs(request).items()}


def container(request: KubernetesRequest, role: str) -> Any:
    return pods(request)[role]["containers"][0]


def environment(request: KubernetesRequest, role: str) -> dict[str, str]:
    found = container(request, role)["env"]
    return {v["name"]: expand(v["value"]) for v in found if "value" in v}


def expand(text: str) -> str:
    def replace(match: re.Match[str]) -> str:
        return "$" if match.group() == "$$" else f"<{match.group()}>"

    return re.sub(r"\$\$|\$\([^)]*\)", replace, text)


@BOTH
def test_success_is_the_dnn_groups_alone(api):
    spec = template(plan(job(settings={"api": api})))
    trains = {"jobset": "dnn", "trainer": "node"}[api]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [trains]}


@BOTH
def test_the_data_groups_job_never_fails_and_the_dnn_groups_fails_at_once(api):
    request = plan(job(settings={"api": api, "max_run_seconds": 60}))
    found = jobs(request)
    assert found["data"]["backoffLimit"] == 2**31 - 1
    assert "activeDeadlineSeconds" not in found["data"]
    assert found["data"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert found["dnn"]["backoffLimit"] == 0
    assert found["dnn"]["template"]["spec"]["restartPolicy"] == "Never"
    # Trainer's own is the TrainJob's; a later one refuses a Job's in its template.
    limited = found["dnn"] if api == "jobset" else request.main["spec"]
    assert limited["activeDeadlineSeconds"] == 60
    assert ("activeDeadlineSeconds" in found["dnn"]) == (api == "jobset")


@BOTH
def test_a_dnn_host_that_is_taken_away_restarts_the_run_where_checkpoints_are_kept(api):
    settings = {"api": api, "output": "pvc://runs", "max_restarts": 2, "max_run_seconds": 60}
    request = plan(job(settings=settings))
    trains = {"jobset": "dnn", "trainer": "node"}[api]
    policy = template(request)["failurePolicy"]
    assert policy["rules"][-1] == {
        "name": "disrupted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [trains],
    }
    (rule,) = jobs(request)["dnn"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert "podFailurePolicy" not in jobs(request)["data"]
    # Kubernetes refuses any other policy next to a failure policy.
    assert "podReplacementPolicy" not in jobs(request)["dnn"]


@BOTH
def test_a_data_pod_that_is_told_to_end_is_replaced_before_it_has(api):
    found = jobs(plan(job(settings={"api": api})))
    assert found["data"]["podReplacementPolicy"] == "TerminatingOrFailed"


@BOTH
def test_the_leader_knows_how_often_it_was_started_again_where_that_counts_as_no_failure(api):
    settings = {"api": api, "output": "pvc://runs", "max_restarts": 2, "max_fresh_starts": 4}
    request = plan(job(settings=settings))
    assert environment(request, "dnn")["STOKER_MAX_FRESH_STARTS"] == "6"
    (restarts,) = [v for v in container(request, "dnn")["env"] if v["name"] == "STOKER_RESTARTS"]
    path = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert restarts["valueFrom"] == {"fieldRef": {"fieldPath": path}}
    assert "STOKER_RESTARTS" not in str(container(request, "data"))
    assert "FRESH" not in str(container(plan(job(settings={"api": api})), "dnn"))


@BOTH
def test_pods_ask_for_cpus_and_have_a_limit_only_where_the_workload_says_so(api):
    free = container(plan(job(settings={"api": api})), "data")["resources"]
    assert free["requests"]["cpu"] == "15"
    assert free["limits"] == {"memory": "28Gi"}
    for role, cpu in (("dnn", "7"), ("data", "15")):
        bound = container(plan(job(settings={"api": api, "cpu_limit": True})), role)["resources"]
        assert bound["limits"]["cpu"] == bound["requests"]["cpu"] == cpu


@BOTH
@pytest.mark.parametrize("role", ["dnn", "data"])
def test_a_container_is_told_what_it_asks_for_of_the_nodes_cpus(api, role):
    variables = container(plan(job(settings={"api": api})), role)["env"]
    (asked,) = [own for own in variables if own["name"] == CPU_REQUEST]
    assert asked["valueFrom"] == {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}


@BOTH
def test_a_further_plan_of_a_run_goes_on_in_the_runs_folder(api):
    first = job(settings={"api": api, "output": "pvc://claim/runs"}, name="mnist-1")
    second = dataclasses.replace(first, name="mnist-1-plan2", run="mnist-1")
    paths = [mount.get("subPathExpr") for mount in container(plan(second), "dnn")["volumeMounts"]]
    assert "runs/mnist-1/checkpoints" in paths
    # Of a first plan the kubelet fills in the same name.
    paths = [mount.get("subPathExpr") for mount in container(plan(first), "dnn")["volumeMounts"]]
    assert "runs/$(STOKER_RUN_ID)/checkpoints" in paths


@BOTH
def test_without_checkpoints_a_dnn_host_that_is_taken_away_is_a_failure_like_any(api):
    request = plan(job(settings={"api": api}))
    assert template(request)["failurePolicy"] == {"maxRestarts": 0}
    assert "podFailurePolicy" not in jobs(request)["dnn"]


def test_a_jobset_goes_by_its_ttl_and_a_train_jobs_has_none():
    assert template(plan(job()))["ttlSecondsAfterFinished"] == 86400
    ttl = {"jobset": {"spec": {"ttlSecondsAfterFinished": 60}}}
    assert template(plan(job(settings=ttl)))["ttlSecondsAfterFinished"] == 60
    assert "ttlSecondsAfterFinished" not in template(plan(job(settings={"api": "trainer"})))
    with pytest.raises(UsageError, match="a TrainJob has no TTL"):
        plan(job(settings={"api": "trainer", **ttl}))


@pytest.mark.parametrize("minutes", [1, 4])
def test_a_lease_that_is_too_short_to_be_renewed_is_refused(minutes):
    with pytest.raises(UsageError, match="must be 0 or at least 5") as caught:
        plan(job(settings={"follower_lease_minutes": minutes}))
    assert "follower_lease_minutes" in caught.value.where


def test_a_data_pod_ends_well_only_when_the_run_is_over_and_trainers_wait_for_it():
    request = plan(job())
    assert environment(request, "data")["STOKER_COMES_BACK"] == "1"
    assert environment(request, "dnn")["STOKER_COMES_BACK"] == "1"
    assert "STOKER_COMES_BACK" not in environment(plan(job(DNN)), "dnn")


@BOTH
def test_only_dnn_pods_get_gpus_and_tolerate_their_nodes(api):
    request = plan(job(settings={"api": api}))
    assert container(request, "dnn")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in container(request, "data")["resources"]["limits"]
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pods(request)["dnn"]["tolerations"] == [gpu]
    assert pods(request)["data"]["tolerations"] == []


def test_a_training_on_cpus_asks_for_no_gpu():
    request = plan(job(settings={"dnn": {"gpus": 0}}))
    assert "nvidia.com/gpu" not in container(request, "dnn")["resources"]["limits"]
    assert pods(request)["dnn"]["tolerations"] == []
    assert environment(request, "dnn")["NVIDIA_VISIBLE_DEVICES"] == "void"


@BOTH
@pytest.mark.parametrize("is_full", [False, True])
def test_a_hardened_namespace_lets_all_pods_in(api, is_full):
    for spec in pods(plan(job(settings=everything(api) if is_full else {"api": api}))).values():
        assert list(insecurities(spec)) == []


@BOTH
def test_a_plan_holds_no_token(api):
    request = plan(job(settings={"api": api}))
    assert request.secret["stringData"] == {"token": NO_TOKEN}
    text = json.dumps([*request.objects])
    own = re.findall(r"[0-9a-f]{64}", text)
    digests = {request.request_sha256, request.job.settings.workload_sha256}
    if request.runtime:
        digests.add(request.runtime["metadata"]["annotations"]["stoker/request-sha256"])
    assert set(own) == digests


def test_the_token_is_a_file_that_only_the_pods_user_reads():
    for role in ("dnn", "data"):
        spec = pods(plan(job()))[role]
        volume = next(v for v in spec["volumes"] if v["name"] == "token")
        assert volume["secret"]["defaultMode"] == 0o400
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
        path = environment(plan(job()), role)["STOKER_TOKEN_FILE"]
        mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
        assert path == f"{mounts['token']}/{volume['secret']['items'][0]['path']}"


@given(st.text())
def test_words_reach_the_container_as_they_are(word):
    assert expand(verbatim(word)) == word


def test_commands_variables_and_paths_are_not_expanded():
    request = plan(job(settings=EVERYTHING))
    assert [expand(word) for word in container(request, "dnn")["args"]] == [*request.job.command]
    assert environment(request, "data")["PRICE"] == "5$(x)"


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_fit_differ_and_stay(run, other):
    name = object_name(run)
    assert is_dns_label(f"{name}-data-0-9999-abcde")
    assert len(name) <= MAX_NAME
    assert object_name(run) == name
    assert run == other or object_name(other) != name


def test_a_good_name_is_kept():
    assert object_name("mnist-20261120-110000") == "mnist-20261120-110000"


def seen_by(request: KubernetesRequest, role: str, index: int, tmp_path: Any) -> Topology:
    variables = {**environment(request, role), "JOB_COMPLETION_INDEX": str(index)}
    return from_resourceconfig(tmp_path, variables)


def test_every_pod_knows_itself_and_all_others(tmp_path):
    request = plan(job(msgspec.structs.replace(DNN, count=2), DATA, name="mnist-1"))
    hosts = [("dnn", 0), ("dnn", 1), ("data", 0), ("data", 1)]
    seen = [seen_by(request, role, index, tmp_path) for role, index in hosts]
    assert [topology.host for topology in seen] == [
        "mnist-1-dnn-0-0.mnist-1",
        "mnist-1-dnn-0-1.mnist-1",
        "mnist-1-data-0-0.mnist-1",
        "mnist-1-data-0-1.mnist-1",
    ]
    assert [topology.role for topology in seen] == ["dnn", "dnn", "data", "data"]
    assert len({topology.groups for topology in seen}) == 1
    assert [topology.is_leader for topology in seen] == [True, False, False, False]
    assert seen[2].group.instance_type == CPU


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JOB_COMPLETION_INDEX": "2"}, "expected this pod's number, 0 to 1, found '2'"),
        ({}, "expected this pod's number, 0 to 1, found ''"),
        ({"STOKER_GROUP": "cpu", "JOB_COMPLETION_INDEX": "0"}, "'cpu', is not one of the run's"),
    ],
)
def test_a_pod_that_cannot_know_itself_says_so(tmp_path, variables, words):
    known = environment(plan(job()), "data")
    with pytest.raises(UsageError, match=re.escape(words)):
        from_resourceconfig(tmp_path, {**known, **variables})


def test_the_dns_names_are_those_that_jobset_gives():
    request = plan(job(name="mnist-1"))
    spec = template(request)
    assert spec["network"]["enableDNSHostnames"]
    assert spec["network"]["publishNotReadyAddresses"]
    groups = json.loads(environment(request, "dnn")["STOKER_GROUPS"])
    for group, found in zip(groups, spec["replicatedJobs"], strict=True):
        pattern = f"mnist-1-{found['name']}-0-{{index}}.{spec['network']['subdomain']}"
        assert group["hosts"] == pattern
        assert group["count"] == found["template"]["spec"]["completions"]
        assert found["template"]["spec"]["parallelism"] == group["count"]


def inputs(request: KubernetesRequest, role: str) -> dict[str, str]:
    spec = pods(request)[role]
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"]
        for v in spec["volumes"]
        if "persistentVolumeClaim" in v
    }
    prefix = "/opt/ml/input/data/"
    return {
        mount["mountPath"].removeprefix(prefix): f"{claims[mount['name']]}/{mount['subPath']}"
        for mount in spec["containers"][0]["volumeMounts"]
        if mount["mountPath"].startswith(prefix) and mount["readOnly"]
    }


@BOTH
def test_channels_are_claims_mounted_read_only_for_their_groups(api):
    request = plan(job(settings={"api": api}))
    everything = {"labels": "datasets/mnist/labels", "train": "datasets/mnist/train"}
    assert inputs(request, "dnn") == everything
    assert inputs(request, "data") == {"train": "datasets/mnist/train"}


def test_launchers_read_the_groups_channels_and_hyperparameters():
    request = plan(job())
    data: Any = request.config["data"]
    assert json.loads(data["hyperparameters.json"]) == {"answer": "yes", "epochs": "3"}
    for role in ("dnn", "data"):
        volume = next(v for v in pods(request)[role]["volumes"] if v["name"] == "config")
        paths = {item["path"]: item["key"] for item in volume["configMap"]["items"]}
        assert sorted(json.loads(data[paths["inputdataconfig.json"]])) == sorted(
            inputs(request, role)
        )


def test_a_claim_is_one_volume_however_often_it_is_mounted():
    pod = {
        "volumes": [
            {"name": "more", "persistentVolumeClaim": {"claimName": "datasets", "readOnly": True}}
        ],
        "containers": [
            {
                "volumeMounts": [
                    {"name": "more", "mountPath": "/more", "subPath": "more", "readOnly": True}
                ]
            }
        ],
    }
    settings = {"output": "pvc://datasets/out", **patched(dnn=pod)}
    spec = pods(plan(job(settings=settings)))["dnn"]
    claims = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [{"name": "job", "persistentVolumeClaim": {"claimName": "datasets"}}]
    mounts = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "job"]
    assert len(mounts) == 6
    assert {m["mountPath"] for m in mounts if m.get("readOnly")} == {
        "/opt/ml/input/data/labels",
        "/opt/ml/input/data/train",
        "/more",
    }


@BOTH
def test_outputs_of_the_dnn_group_are_kept_in_the_runs_folder(api):
    request = plan(job(settings={"api": api, "output": "pvc://outputs/a$b"}))
    mounts = {m["mountPath"]: m for m in container(request, "dnn")["volumeMounts"]}
    assert mounts["/opt/ml/model"]["subPathExpr"] == "a$$b/$(STOKER_RUN_ID)/model"
    index = "/$(JOB_COMPLETION_INDEX)"
    assert mounts["/opt/ml/output"]["subPathExpr"].endswith(f"/output{index}")
    data = {m["mountPath"]: m for m in container(request, "data")["volumeMounts"]}
    assert "subPathExpr" not in data["/opt/ml/output"]


def test_the_images_own_job_folder_is_not_hidden():
    for role in ("dnn", "data"):
        mounts = [m["mountPath"] for m in container(plan(job()), role)["volumeMounts"]]
        assert not {"/opt/ml", "/opt/ml/input", "/opt/ml/code"} & set(mounts)


def test_the_job_says_what_an_earlier_attempt_is_known_by():
    request = plan(job())
    assert plan(job()).request_sha256 == request.request_sha256
    changes: list[dict[str, Any]] = [
        {"hyperparameters": {"epochs": 4}},
        {"command": ["python", "other.py"]},
        {"settings": {"zone": "any"}},
    ]
    for change in changes:
        assert plan(job(**change)).request_sha256 != request.request_sha256


def test_a_changed_pool_is_another_request_with_trainer_too():
    pools = {**POOLS, CPU: {"cpu": 14, "memory": "28Gi"}}
    first = plan(job(settings={"api": "trainer"}))
    assert plan(job(settings={"api": "trainer", "pools": pools})).request_sha256 != (
        first.request_sha256
    )


def test_a_runtime_is_the_same_for_all_runs_of_a_plan():
    def spec(name: str, **how: object) -> object:
        runtime = plan(job(name=name, settings={"api": "trainer"}, **how)).runtime
        assert runtime is not None
        return runtime["spec"], runtime["metadata"]["annotations"]

    first = spec("run-1")
    assert spec("run-2", hyperparameters={}) == first
    assert "run-1" not in json.dumps(first)


def test_a_runtime_that_is_there_already_is_not_made_again():
    settings = {"api": "trainer", "runtime": "stoker-mnist"}
    request = plan(job(settings=settings))
    kinds = ["Secret", "ConfigMap", "PodDisruptionBudget", "TrainJob"]
    assert [o["kind"] for o in request.objects] == kinds
    own = plan(job(settings={"api": "trainer"}))
    assert own.runtime is not None
    assert request.runtime is not None
    assert request.runtime["spec"] == own.runtime["spec"]
    assert request.runtime["metadata"]["name"] == "stoker-mnist"


def run_patches(request: KubernetesRequest) -> dict[str, Any]:
    (patch,) = request.main["spec"]["runtimePatches"]
    spec = patch["trainingRuntimeSpec"]["template"]["spec"]
    return {
        "data" if found["name"] == "data" else "dnn": found["template"]["spec"]["template"]["spec"]
        for found in spec["replicatedJobs"]
    }


def test_runtime_and_train_job_make_the_pods_that_a_jobset_has():
    direct, trainer = plan(job()), plan(job(settings={"api": "trainer"}))
    main: Any = trainer.main
    for role, patch in run_patches(trainer).items():
        spec = pods(trainer)[role]
        (ours,), (theirs,) = spec["containers"], patch["containers"]
        run = main["spec"]["trainer"]["env"] if role == "dnn" else theirs["env"]
        merged = {
            **spec,
            "volumes": [*spec["volumes"], *patch["volumes"]],
            "affinity": {**spec.get("affinity", {}), **patch["affinity"]},
            "containers": [
                {
                    **ours,
                    "env": [*ours["env"], *run],
                    "volumeMounts": [*ours["volumeMounts"], *theirs["volumeMounts"]],
                }
            ],
        }
        text = json.dumps(merged, sort_keys=True)
        as_direct = text.replace("-node-0-", "-dnn-0-").replace('"node"', '"dnn"')
        as_direct = as_direct.replace("inputdataconfig.node.json", "inputdataconfig.dnn.json")
        assert json.loads(as_direct) == json.loads(json.dumps(pods(direct)[role]))


def test_a_train_jobs_patch_mounts_each_volume_once():
    for patch in run_patches(plan(job(settings={"api": "trainer"}))).values():
        names = [mount["name"] for mount in patch["containers"][0]["volumeMounts"]]
        assert len(names) == len(set(names))
        assert {"token", "config"} <= set(names)


def test_kueue_sees_the_object_that_it_admits():
    for api in ("jobset", "trainer"):
        jobset = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "training"}}}
        request = plan(job(settings={"api": api, "jobset": jobset}))
        labels: Any = request.main["metadata"]
        assert labels["labels"]["kueue.x-k8s.io/queue-name"] == "training"
        assert "training" not in json.dumps([request.config, pods(request)])


def test_a_profile_leaves_its_file_with_the_outputs():
    variables = environment(plan(job(DNN, profile=True)), "dnn")
    assert json.loads(variables["STOKER_PROFILE"])["budget_seconds"] == 180
    assert variables["STOKER_PROFILE_FILE"].startswith("/opt/ml/output/")


def test_one_host_alone_wants_no_neighbours():
    assert "affinity" not in pods(plan(job(DNN)))["dnn"]


def test_a_type_without_a_selector_is_found_by_kubernetes_own_label():
    assert pods(plan(job()))["data"]["nodeSelector"] == {"node.kubernetes.io/instance-type": CPU}


def test_data_pods_may_have_an_image_of_their_own():
    found = pods(plan(job(settings={"data": {"image": "registry.example/mnist:cpu"}})))
    images = {name: spec["containers"][0]["image"] for name, spec in found.items()}
    assert images == {"dnn": "registry.example/mnist:1", "data": "registry.example/mnist:cpu"}


def patched(**specs: Any) -> dict[str, Any]:
    return {role: {"pod": {"spec": spec}} for role, spec in specs.items()}


def own(**container: Any) -> dict[str, Any]:
    return {"containers": [container]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"image": None}, "no image"),
    ({"settings": {"dnn": {"image": "i"}}}, "uses the key image"),
    ({"settings": {"pools": {}}}, f"kubernetes.pools.{GPU}"),
    ({"settings": {"pools": {GPU: POOLS[GPU]}}}, "what a pod requests of its node"),
    ({"settings": {"pools": {**POOLS, GPU: POOLS[CPU]}}}, "how many GPUs a pod gets"),
    ({"settings": {"pools": {**POOLS, CPU: POOLS[GPU]}}}, "do not tolerate GPU nodes"),
    ({"settings": {"data": {"gpus": 1}}}, "the data group has no GPUs"),
    ({"settings": {"entrypoint": ["stoker", "launch"]}}, "add -- as its last word"),
    ({"settings": {"runtime": "stoker-mnist"}}, "set kubernetes.api to trainer"),
    (
        {"settings": patched(dnn=own(resources={"limits": {"memory": "1Gi"}}))},
        "the memory limit is below",
    ),
    ({"settings": patched(dnn=own(resources={"limits": {"memory": "many"}}))}, "or not a quantity"),
    ({"settings": {"output": "pvc://outputs/../other"}}, "pods mount claims"),
    ({"channels": {"train": {"uri": "s3://bucket/mnist"}}}, "hyperparameter"),
    (
        {"channels": {"train": {"uri": "pvc://x/y", "mode": "Pipe"}}},
        "mode Pipe exists on SageMaker only",
    ),
    ({"channels": {"train": {"uri": "pvc://x", "groups": ["gpu"]}}}, "unknown instance group gpu"),
    (
        {"channels": {"train": {"uri": "pvc://x", "distribution": "ShardedByS3Key"}}},
        "sharding by key",
    ),
    (
        {"settings": {"api": "trainer", **patched(data={"priorityClassName": "low"})}},
        "kubernetes.data.pod.spec.priorityClassName",
    ),
]


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_what_the_cluster_would_refuse_is_refused_first(change, words):
    with pytest.raises(UsageError) as caught:
        plan(job(**change))
    assert words in str(caught.value)
    assert caught.value.where
    assert caught.value.fix or "group" in caught.value.where


RESERVED: list[tuple[dict[str, Any], str]] = [
    (own(command=["sh"]), "spec.containers[dnn].command"),
    (own(args=[]), "spec.containers[dnn].args"),
    (own(image="other"), "spec.containers[dnn].image"),
    (own(env=[{"name": "STOKER_FEED", "value": ""}]), "spec.containers[dnn].env[STOKER_FEED]"),
    (own(ports=[{"containerPort": 1}]), "spec.containers[dnn].ports"),
    (own(resources={"requests": {"cpu": 1}}), "spec.containers[dnn].resources.requests.cpu"),
    (
        own(resources={"limits": {"nvidia.com/gpu": 2}}),
        "spec.containers[dnn].resources.limits.nvidia.com/gpu",
    ),
    (
        own(volumeMounts=[{"name": "x", "mountPath": "/var/run/secrets/stoker"}]),
        "spec.containers[dnn].volumeMounts[/var/run/secrets/stoker]",
    ),
    (
        own(volumeMounts=[{"name": "x", "mountPath": "/dev/shm"}]),
        "spec.containers[dnn].volumeMounts[/dev/shm]",
    ),
    ({"volumes": [{"name": "token", "emptyDir": {}}]}, "spec.volumes[token]"),
    ({"restartPolicy": "Always"}, "spec.restartPolicy"),
    ({"subdomain": "x"}, "spec.subdomain"),
    ({"securityContext": {"runAsUser": 0}}, "spec.securityContext.runAsUser"),
    ({"securityContext": None}, "spec.securityContext"),
    ({"containers": None}, "spec.containers"),
    (
        own(securityContext={"runAsNonRoot": False}),
        "spec.containers[dnn].securityContext.runAsNonRoot",
    ),
]


@BOTH
@pytest.mark.parametrize(("spec", "path"), RESERVED)
def test_what_stoker_sets_in_a_pod_cannot_be_patched(api, spec, path):
    path = path.replace("dnn", {"jobset": "dnn", "trainer": "node"}[api])
    pools = {**POOLS, GPU: {**POOLS[GPU], "pod": {"spec": spec}}}
    for key, settings in {"dnn": patched(dnn=spec), f"pools.{GPU}": {"pools": pools}}.items():
        with pytest.raises(UsageError, match="is set by stoker") as caught:
            plan(job(settings={"api": api, **settings}))
        assert caught.value.where == f"key kubernetes.{key}.pod.{path}"


@pytest.mark.parametrize(
    ("patch", "path"),
    [
        ({"spec": {"successPolicy": None}}, "spec.successPolicy"),
        ({"spec": {"failurePolicy": {"maxRestarts": 3}}}, "spec.failurePolicy"),
        ({"spec": {"network": {"subdomain": "x"}}}, "spec.network"),
        ({"spec": {"coordinator": {"replicatedJob": "data"}}}, "spec.coordinator"),
        ({"spec": {"replicatedJobs": []}}, "spec.replicatedJobs"),
        ({"metadata": {"name": "mine"}}, "metadata.name"),
        ({"metadata": {"annotations": {"stoker/run": "x"}}}, "metadata.annotations.stoker/run"),
    ],
)
def test_what_stoker_sets_in_a_jobset_cannot_be_patched(patch, path):
    for api in ("jobset", "trainer"):
        with pytest.raises(UsageError, match="is set by stoker") as caught:
            plan(job(settings={"api": api, "jobset": patch}))
        assert caught.value.where == f"key kubernetes.jobset.{path}"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"volumes": {"name": "x"}}, "spec.volumes must be a list, found a mapping"),
        ({"nodeSelector": ["a"]}, "spec.nodeSelector must be a mapping, found a list"),
        ({"volumes": [{"name": "a"}, {"name": "a"}]}, "a occurs twice"),
        ({"volumes": [{"emptyDir": {}}]}, "an item has no name"),
        (own(volumeMounts=[{"name": "x"}]), "an item has no mountPath"),
    ],
)
def test_a_patch_of_the_wrong_shape_is_refused(spec, words):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        plan(job(settings=patched(data=spec)))
    assert caught.value.where.startswith("key kubernetes.data.pod.spec")


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
    assert list(spec["tolerations"]) == [*taints, gpu]
    assert spec["hostAliases"] == [3]
    assert "enableServiceLinks" not in spec
    assert request.layout.grace_seconds == spec["terminationGracePeriodSeconds"] == 300
    ours, mesh = spec["containers"]
    assert mesh == {"name": "mesh", "image": "mesh:1"}
    assert ours["resources"]["limits"]["memory"] == "40Gi"
    assert environment(request, "dnn")["HOME"] == "/"
    assert [v["name"] for v in ours["env"]].count("HOME") == 1
    if api == "trainer":
        trainer: Any = request.main["spec"]
        assert trainer["trainer"]["resourcesPerNode"] == ours["resources"]
    assert "hostAliases" not in pods(request)["data"]


def test_names_of_groups_are_parts_of_names_of_hosts():
    with pytest.raises(UsageError, match="cannot be part of a host's name"):
        plan(job(DNN, msgspec.structs.replace(DATA, name="data_1")))
    with pytest.raises(UsageError, match="63 at most"):
        plan(job(DNN, msgspec.structs.replace(DATA, name="data-" + "x" * 30), name="m" * 40))


def test_the_dnn_group_comes_first_and_alone():
    for groups in ((DATA, DNN), (DNN, msgspec.structs.replace(DNN, name="more"))):
        with pytest.raises(UsageError, match="exactly one dnn group"):
            plan(job(*groups))


def test_the_platform_is_known_by_its_name_and_cannot_submit_yet():
    platform = platform_named("kubernetes")
    request = platform.plan(job())
    assert request == plan(job())
    with pytest.raises(PlatformError):
        platform.submit(request)


@pytest.mark.parametrize(
    ("pool", "labels"),
    [("spare", {"pool": "spare", "kubernetes.io/arch": "arm64"}), ("c7gn.4xlarge", None)],
)
def test_data_pods_on_arm64_nodes_need_an_image_that_is_named_for_them(pool, labels):
    group = msgspec.structs.replace(DATA, instance_type=pool)
    node_pool = {"cpu": 15, "memory": "28Gi", "gpus": 0}
    settings: dict[str, Any] = {
        "pools": {
            **POOLS,
            pool: {**node_pool, **({"pod": {"spec": {"nodeSelector": labels}}} if labels else {})},
        }
    }
    with pytest.raises(UsageError, match="are arm64") as refused:
        plan(job(DNN, group, settings=settings))
    assert refused.value.where == "key kubernetes.data.image"
    image = "registry.example/data@sha256:" + "0" * 64
    request = plan(job(DNN, group, settings={**settings, "data": {"image": image}}))
    assert container(request, "data")["image"] == image


@BOTH
def test_an_attempt_for_which_mlflow_was_away_is_the_same_job(api):
    told = {"MLFLOW_TRACKING_URI": "https://mlflow", "MLFLOW_RUN_ID": "0a1b"}
    spec = job(settings={"api": api}, tracking={"tensorboard": True})
    with_run = plan(dataclasses.replace(spec, environment=told))
    assert with_run.request_sha256 == plan(spec).request_sha256
    # What Trainer's runtime has is the same for all runs: these are in what is this run's alone.
    of_run = json.dumps(with_run.main["spec"])
    assert '{"name": "MLFLOW_RUN_ID", "value": "0a1b"}' in of_run
    assert '"/opt/ml/output/tensorboard"' in of_run
