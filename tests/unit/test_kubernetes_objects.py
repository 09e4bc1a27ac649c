"""The objects of a run keep their promises and a cluster's rules, whatever the workload says."""

import dataclasses
import json
import re
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.launch.topology import from_resourceconfig
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform, KubernetesRequest
from stoker.platforms.kubernetes.checks import checked_job
from stoker.platforms.kubernetes.jobset import check_objects
from stoker.platforms.kubernetes.layout import (
    MAX_NAME,
    TOKEN_FOLDER,
    is_dns_label,
    lay_out,
    object_name,
)
from stoker.platforms.kubernetes.manifest import manifest
from stoker.platforms.kubernetes.pod_template import verbatim
from stoker.records.training import Budget
from support.kubernetes_jobs import CPU, DATA, DNN, EVERYTHING, GPU, POOLS, everything, job
from support.kubernetes_rules import rule_problems

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


@BOTH
def test_pods_have_a_limit_of_cpus_where_the_workload_says_so(api):
    for role, cpu in (("dnn", "7"), ("data", "15")):
        bound = container(plan(job(settings={"api": api, "cpu_limit": True})), role)["resources"]
        assert bound["limits"]["cpu"] == bound["requests"]["cpu"] == cpu


@BOTH
def test_all_plans_of_a_run_keep_their_outputs_in_the_runs_folder(api):
    first = job(settings={"api": api, "output": "pvc://claim/a$b"}, name="mnist-1")
    second = dataclasses.replace(first, name="mnist-1-plan2", run="mnist-1")
    # Of a first plan the kubelet fills in the same name.
    for spec, run in ((first, "$(STOKER_RUN_ID)"), (second, "mnist-1")):
        mounts = container(plan(spec), "dnn")["volumeMounts"]
        assert f"a$$b/{run}/checkpoints" in [mount.get("subPathExpr") for mount in mounts]


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


@given(st.text())
def test_words_reach_the_container_as_they_are(word):
    assert expand(verbatim(word)) == word


@given(st.text(min_size=1), st.text(min_size=1))
def test_names_fit_differ_and_stay(run, other):
    name = object_name(run)
    assert is_dns_label(f"{name}-data-0-9999-abcde")
    assert len(name) <= MAX_NAME
    assert object_name(run) == name
    assert run == other or object_name(other) != name


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


def test_a_claim_is_one_volume_however_often_it_is_mounted():
    more = {"name": "more", "persistentVolumeClaim": {"claimName": "datasets", "readOnly": True}}
    mount = {"name": "more", "mountPath": "/more", "subPath": "more", "readOnly": True}
    patches = patched(dnn={"volumes": [more], **own(volumeMounts=[mount])})
    spec = pods(plan(job(settings={"output": "pvc://datasets/out", **patches})))["dnn"]
    claims = [v for v in spec["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [{"name": "job", "persistentVolumeClaim": {"claimName": "datasets"}}]
    mounts = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "job"]
    assert len(mounts) == 6
    assert {m["mountPath"] for m in mounts if m.get("readOnly")} == {
        "/opt/ml/input/data/labels",
        "/opt/ml/input/data/train",
        "/more",
    }


CHANGES: list[dict[str, Any]] = [
    {"hyperparameters": {"epochs": 4}},
    {"command": ["python", "other.py"]},
    {"settings": {"zone": "any"}},
    {"settings": {"pools": {**POOLS, CPU: {"cpu": 14, "memory": "28Gi"}}}},
]


@BOTH
def test_an_earlier_attempt_s_job_is_known_by_all_that_was_asked_for(api):
    known = plan(job(settings={"api": api})).request_sha256
    assert plan(job(settings={"api": api})).request_sha256 == known
    for change in CHANGES:
        settings = {"api": api, **change.get("settings", {})}
        assert plan(job(**{**change, "settings": settings})).request_sha256 != known


def test_a_runtime_is_the_same_for_all_runs_of_a_plan():
    def spec(name: str, **how: object) -> object:
        runtime = plan(job(name=name, settings={"api": "trainer"}, **how)).runtime
        return runtime["spec"], runtime["metadata"]["annotations"]

    first = spec("run-1")
    assert spec("run-2", hyperparameters={}) == first
    assert "run-1" not in json.dumps(first)


def test_runtime_and_train_job_make_the_pods_that_a_jobset_has():
    labels = {"kueue.x-k8s.io/queue-name": "training"}
    queued = {"jobset": {"metadata": {"labels": labels}}}
    direct, trainer = plan(job(settings=queued)), plan(job(settings={"api": "trainer", **queued}))
    for request in (direct, trainer):
        # Kueue admits this object, and no pod of its own.
        assert request.main["metadata"]["labels"].items() >= labels.items()
        assert "kueue" not in json.dumps([request.config, pods(request)])
    main: Any = trainer.main
    (patches,) = main["spec"]["runtimePatches"]
    for role, patch in by_role(patches["trainingRuntimeSpec"]["template"]["spec"]).items():
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
    ({"settings": patched(dnn=own(resources={"limits": {"memory": "1"}}))}, "limit is below"),
    ({"settings": patched(dnn=own(resources={"limits": {"memory": "many"}}))}, "or not a quantity"),
    ({"settings": {"output": "pvc://outputs/../other"}}, "pods mount claims"),
    ({"channels": {"train": {"uri": "s3://bucket/mnist"}}}, "hyperparameter"),
    ({"channels": {"train": {"uri": "pvc://x/y", "mode": "Pipe"}}}, "Pipe exists on SageMaker"),
    ({"channels": {"train": {"uri": "pvc://x", "groups": ["gpu"]}}}, "unknown instance group gpu"),
    ({"channels": {"train": {"uri": "pvc://x", "distribution": "ShardedByS3Key"}}}, "by key"),
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


OF_CONTAINER: list[tuple[dict[str, Any], str]] = [
    ({"command": ["sh"]}, "command"),
    ({"args": []}, "args"),
    ({"image": "other"}, "image"),
    ({"env": [{"name": "STOKER_FEED", "value": ""}]}, "env[STOKER_FEED]"),
    ({"ports": [{"containerPort": 1}]}, "ports"),
    ({"resources": {"requests": {"cpu": 1}}}, "resources.requests.cpu"),
    ({"resources": {"limits": {"nvidia.com/gpu": 2}}}, "resources.limits.nvidia.com/gpu"),
    ({"volumeMounts": [{"mountPath": TOKEN_FOLDER}]}, f"volumeMounts[{TOKEN_FOLDER}]"),
    ({"volumeMounts": [{"mountPath": "/dev/shm"}]}, "volumeMounts[/dev/shm]"),
    ({"securityContext": {"runAsNonRoot": False}}, "securityContext.runAsNonRoot"),
]
RESERVED: list[tuple[dict[str, Any], str]] = [
    *((own(**changed), f"containers[dnn].{path}") for changed, path in OF_CONTAINER),
    ({"volumes": [{"name": "token", "emptyDir": {}}]}, "volumes[token]"),
    ({"restartPolicy": "Always"}, "restartPolicy"),
    ({"subdomain": "x"}, "subdomain"),
    ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser"),
    ({"securityContext": None}, "securityContext"),
    ({"containers": None}, "containers"),
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


@pytest.mark.parametrize(
    ("pool", "patch"),
    [
        ("spare", {"pod": {"spec": {"nodeSelector": {"kubernetes.io/arch": "arm64"}}}}),
        ("c7gn.4xlarge", {}),
    ],
)
def test_data_pods_on_arm64_nodes_need_an_image_that_is_named_for_them(pool, patch):
    group = msgspec.structs.replace(DATA, instance_type=pool)
    node_pool = {"cpu": 15, "memory": "28Gi", "gpus": 0, **patch}
    settings: dict[str, Any] = {"pools": {**POOLS, pool: node_pool}}
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
    budget = dataclasses.replace(spec.settings, budget=Budget(max_usd=9.0))
    limited = plan(dataclasses.replace(spec, settings=budget))
    assert "STOKER_BUDGET" in json.dumps(limited.main["spec"])
    assert limited.request_sha256 == plan(spec).request_sha256
    # What Trainer's runtime has is the same for all runs: these are in what is this run's alone.
    of_run = json.dumps(with_run.main["spec"])
    assert '{"name": "MLFLOW_RUN_ID", "value": "0a1b"}' in of_run
    assert '"/opt/ml/output/tensorboard"' in of_run


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [None, None]),
        ({"scratch": "100Gi"}, [101, 101]),
        # Its folder is in the claim.
        ({"scratch": "100Gi", "output": "pvc://outputs"}, [None, 101]),
    ],
)
def test_pods_request_the_disk_that_their_volumes_may_take(settings, sizes):
    gib = [str(size << 30) if size else None for size in sizes]
    groups = lay_out(checked_job(job(settings=settings))).groups
    assert [group.requests.get("ephemeral-storage") for group in groups] == gib
    assert not any("ephemeral-storage" in group.limits for group in groups)


def test_volumes_of_patches_are_requested_of_the_disk_unless_they_are_memory():
    folders = [{"sizeLimit": "2Gi"}, {"sizeLimit": "4Gi", "medium": "Memory"}, {}]
    volumes = [{"name": f"v{i}", "emptyDir": folder} for i, folder in enumerate(folders)]
    dnn = {"pod": {"spec": {"volumes": volumes}}}
    (group, _) = lay_out(checked_job(job(settings={"dnn": dnn}))).groups
    assert group.requests["ephemeral-storage"] == str(3 << 30)


TRAINER = everything("trainer")


def objects(settings: Any) -> dict[str, Any]:
    request = KubernetesPlatform().plan(job(settings=settings))
    return {str(o["kind"]): json.loads(json.dumps(o)) for o in request.objects}


def inside(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


POD = ("template", "spec", "template", "spec")


def at(*path: Any) -> tuple[Any, ...]:
    """Returns the path of a replicated job of the JobSet, or of what is in it."""
    return ("spec", "replicatedJobs", *path)


def in_pod(index: int, *path: Any) -> tuple[Any, ...]:
    return at(index, *POD, *path)


def in_container(*path: Any) -> tuple[Any, ...]:
    return in_pod(0, "containers", 0, *path)


def runtime(*path: Any) -> tuple[Any, ...]:
    return ("spec", "template", *at(*path))


SPEC = at(0, "template", "spec")
POLICY = ("spec", "failurePolicy")
RULES = (*POLICY, "rules")
LIMITS = in_container("resources", "limits")
MOUNT = in_container("volumeMounts", 0)
SECURITY = in_container("securityContext")
PATCH = ("spec", "runtimePatches", 0)
PATCHED = (*PATCH, "trainingRuntimeSpec", "template", *at())
RULE, TARGETS = {"name": "out_of_time", "action": "FailJobSet"}, "targetReplicatedJobs"
READY = {"status": "Ready"}
# What users write: checked in each run.
WRITTEN: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("JobSet", ("metadata", "name"), "m" * 60, "63 at most"),
    ("JobSet", ("metadata", "name"), "a.b", "is not a host name"),
    ("JobSet", ("metadata", "name"), "1-run", "a letter first"),
    ("TrainingRuntime", runtime(1, *POD, "priorityClassName"), "low", "only the job that trains"),
    ("TrainJob", ("metadata", "name"), "a.b", "not a host name"),
    ("TrainJob", ("metadata", "name"), "m" * 50, "63 at most"),
]
# What stoker writes: checked by its tests alone.
OWN: list[tuple[str, tuple[Any, ...], Any, str]] = [
    ("JobSet", at(0, "replica"), 1, "spec.replicatedJobs[0].replica: no such field"),
    ("JobSet", in_container("imagePolicy"), "Always", "containers[0].imagePolicy: no such field"),
    ("JobSet", in_container("image"), [], "is not of type 'string'"),
    ("TrainingRuntime", ("spec", "policy"), {}, "spec.policy: no such field"),
    ("TrainJob", ("spec", "trainer", "nodes"), 2, "spec.trainer.nodes: no such field"),
    ("TrainJob", ("spec", "trainer", "numNodes"), "2", "is not of type 'integer'"),
    ("JobSet", (*MOUNT, "subPathExpr"), "../x", "not a folder inside a volume"),
    ("JobSet", (*MOUNT, "name"), "other", "there is no volume other"),
    ("JobSet", in_container("env", 1, "name"), "A=B", "'A=B' is not a variable"),
    ("JobSet", in_container("image"), " x", "not an image"),
    ("JobSet", in_container("name"), "A", "not a container name"),
    ("JobSet", (*LIMITS, "nvidia.com/gpu"), "500m", "needs a whole number"),
    ("JobSet", (*LIMITS, "gpu"), "1", "there is no resource gpu"),
    ("JobSet", (*LIMITS, "memory"), "1Gi", "the limit of memory is below"),
    ("JobSet", (*LIMITS, "memory"), "1 GB", "does not match"),
    ("JobSet", ("metadata", "labels", "team"), "a b", "not a label value"),
    ("JobSet", ("metadata", "labels", "my team"), "x", "'my team' is not a key"),
    ("JobSet", in_pod(0, "nodeSelector", "pool"), "a b", "not a label value"),
    ("JobSet", (*POLICY, "maxRestarts"), 2**31, "is not a 'int32'"),
    ("JobSet", ("spec", "successPolicy", TARGETS), ["gpu"], "gpu"),
    ("JobSet", ("spec", "successPolicy", "operator"), "Most", "'Most' is not one of"),
    ("JobSet", (*RULES, 0, "action"), "RestartJob", "RestartJob is an alpha feature"),
    ("JobSet", (*POLICY, "restartStrategy"), "InPlaceRestart", "alpha feature"),
    ("JobSet", (*RULES, 0, "name"), "out-of-time", "not a name for a rule"),
    ("JobSet", RULES, [RULE, RULE], "two rules are called out_of_time"),
    ("JobSet", (*RULES, 0, "onJobFailureReasons"), ["Tired"], "reason Tired"),
    ("JobSet", (*RULES, 0, TARGETS), ["gpu"], "no replicated job gpu"),
    ("JobSet", ("spec", "network", "subdomain"), "a.b", "not a name for a service"),
    ("JobSet", at(1, "name"), "dnn", "stands there twice: ['dnn']"),
    ("JobSet", at(1, "replicas"), 2**31 - 1, "too many pods"),
    ("JobSet", (*SPEC, "podReplacementPolicy"), "TerminatingOrFailed", "must be Failed"),
    ("JobSet", (*SPEC, "backoffLimit"), 2**31, "is not a 'int32'"),
    ("JobSet", (*SPEC, "backoffLimit"), -1, "is negative"),
    ("JobSet", at(0, "dependsOn"), [{"name": "data", **READY}], "first replicated job depends on"),
    ("JobSet", at(1, "dependsOn"), [{"name": "other", **READY}], "does not come before it"),
    ("JobSet", in_pod(0, "restartPolicy"), "Always", "Never or OnFailure"),
    ("JobSet", at(1, *POD[:2], "podFailurePolicy"), {"rules": []}, "the restart policy Never"),
    # The restricted profile.
    ("JobSet", in_pod(0, "hostNetwork"), True, "hostNetwork: shares the node's"),
    ("JobSet", in_pod(0, "hostPID"), True, "hostPID"),
    ("JobSet", in_pod(0, "volumes", 0), {"name": "a", "hostPath": {"path": "/"}}, "hostPath: pods"),
    ("JobSet", in_pod(0, "securityContext", "runAsNonRoot"), False, "must not run as root"),
    ("JobSet", in_pod(0, "securityContext", "runAsUser"), 0, "must not run as user 0"),
    ("JobSet", in_pod(0, "securityContext", "seccompProfile"), {"type": "Unconfined"}, "seccomp"),
    ("JobSet", SECURITY, {}, "must not let its processes gain"),
    ("JobSet", (*SECURITY, "capabilities", "drop"), [], "must drop all"),
    ("JobSet", (*SECURITY, "capabilities", "add"), ["SYS_ADMIN"], "not add"),
    ("JobSet", (*SECURITY, "privileged"), True, "must not be privileged"),
    ("JobSet", in_container("ports"), [{"containerPort": 1, "hostPort": 1}], "a port of the node"),
    # Trainer.
    ("TrainingRuntime", runtime(0, "replicas"), 2, "is always 1"),
    ("TrainingRuntime", runtime(0, *POD, "containers", 0, "name"), "train", "no container node"),
    ("TrainingRuntime", ("spec", "mlPolicy"), {"torch": {}, "jax": {}}, "can have one"),
    ("TrainJob", (*PATCH, "manager"), "stoker", "no domain with a path"),
    ("TrainJob", (*PATCHED, 1, "name"), "cpu", "has no replicated job cpu"),
    ("TrainJob", (*PATCHED, 1, *POD, "containers", 0, "name"), "feed", "has no container feed"),
    ("TrainJob", (*PATCHED, 0, *POD, "containers", 0, "env"), [{"name": "A"}], "trainer.env only"),
]


def with_change(kind: str, path: tuple[Any, ...], value: Any) -> tuple[Any, list[Any]]:
    """Returns the object of the kind with one value set, and all objects of its run."""
    found = objects(EVERYTHING if kind == "JobSet" else TRAINER)
    among = [*found.values()]
    assert [problem for each in among for problem in rule_problems(each, among=among)] == []
    inside(found[kind], path[:-1])[path[-1]] = value
    return found[kind], among


@pytest.mark.parametrize(("kind", "path", "value", "words"), WRITTEN)
def test_what_users_wrote_and_no_cluster_takes_is_told_with_its_object(kind, path, value, words):
    document, among = with_change(kind, path, value)
    with pytest.raises(UsageError, match=words) as caught:
        check_objects(among)
    assert caught.value.where == f"{kind} {document['metadata']['name']}"


@pytest.mark.parametrize(("kind", "path", "value", "words"), OWN)
def test_an_object_that_breaks_a_rule_is_told(kind, path, value, words):
    document, among = with_change(kind, path, value)
    found = list(rule_problems(document, among=among))
    assert any(words in problem for problem in found), found


def test_startup_in_order_and_dependencies_exclude_each_other():
    jobset, _ = with_change("JobSet", at(1, "dependsOn"), [{"name": "dnn", **READY}])
    assert list(rule_problems(jobset)) == []
    jobset["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    assert any("exclude each other" in found for found in rule_problems(jobset))


# What YAML 1.1 or 1.2, by their letter or by the parsers that kubectl has had, take for no text.
_NO_TEXT = re.compile(
    r"""^(~|null|true|false|yes|no|on|off|y|n|<<|=
    |[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-f_]+|[0-9][0-9_]*(:[0-5]?[0-9])*)
    |[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)(e[-+]?[0-9]+)?
    |[-+]?\.(inf|nan)|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}.*|)$""",
    re.VERBOSE | re.IGNORECASE,
)

texts = st.text(st.characters(exclude_categories=["Cs"]))
trees: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda children: st.lists(children) | st.dictionaries(texts, children),
    max_leaves=6,
)


@given(st.dictionaries(texts, trees))
def test_a_manifest_reads_as_it_was_written(document):
    assert yaml.safe_load(manifest([document])) == document


@given(texts | st.from_regex(_NO_TEXT, fullmatch=True))
def test_a_text_is_never_taken_for_something_else(text):
    written = manifest([{"a": text}]).removeprefix("a:").strip()
    if _NO_TEXT.match(text):
        assert written[0] in "'\"|", written
