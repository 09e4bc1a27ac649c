"""Each of a cluster's rules is broken once, in an object that keeps all others."""

import json
from typing import Any

import pytest

from stoker.errors import UsageError
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.request import check_objects
from support.kubernetes_jobs import EVERYTHING, everything, job
from support.kubernetes_rules import rule_problems

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


def pods(index: int, *path: Any) -> tuple[Any, ...]:
    return at(index, *POD, *path)


def container(*path: Any) -> tuple[Any, ...]:
    return pods(0, "containers", 0, *path)


def runtime(*path: Any) -> tuple[Any, ...]:
    return ("spec", "template", *at(*path))


SPEC = at(0, "template", "spec")
POLICY = ("spec", "failurePolicy")
RULES = (*POLICY, "rules")
LIMITS = container("resources", "limits")
MOUNT = container("volumeMounts", 0)
SECURITY = container("securityContext")
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
    ("JobSet", container("imagePolicy"), "Always", "containers[0].imagePolicy: no such field"),
    ("JobSet", container("image"), [], "is not of type 'string'"),
    ("TrainingRuntime", ("spec", "policy"), {}, "spec.policy: no such field"),
    ("TrainJob", ("spec", "trainer", "nodes"), 2, "spec.trainer.nodes: no such field"),
    ("TrainJob", ("spec", "trainer", "numNodes"), "2", "is not of type 'integer'"),
    ("JobSet", (*MOUNT, "subPathExpr"), "../x", "not a folder inside a volume"),
    ("JobSet", (*MOUNT, "name"), "other", "there is no volume other"),
    ("JobSet", container("env", 1, "name"), "A=B", "'A=B' is not a variable"),
    ("JobSet", container("image"), " x", "not an image"),
    ("JobSet", container("name"), "A", "not a container name"),
    ("JobSet", (*LIMITS, "nvidia.com/gpu"), "500m", "needs a whole number"),
    ("JobSet", (*LIMITS, "gpu"), "1", "there is no resource gpu"),
    ("JobSet", (*LIMITS, "memory"), "1Gi", "the limit of memory is below"),
    ("JobSet", (*LIMITS, "memory"), "1 GB", "does not match"),
    ("JobSet", ("metadata", "labels", "team"), "a b", "not a label value"),
    ("JobSet", ("metadata", "labels", "my team"), "x", "'my team' is not a key"),
    ("JobSet", pods(0, "nodeSelector", "pool"), "a b", "not a label value"),
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
    ("JobSet", pods(0, "restartPolicy"), "Always", "Never or OnFailure"),
    (
        "JobSet",
        at(1, *POD[:2], "podFailurePolicy"),
        {"rules": []},
        "needs the restart policy Never",
    ),
    # The restricted profile.
    ("JobSet", pods(0, "hostNetwork"), True, "hostNetwork: shares the node's"),
    ("JobSet", pods(0, "hostPID"), True, "hostPID"),
    (
        "JobSet",
        pods(0, "volumes", 0),
        {"name": "job", "hostPath": {"path": "/"}},
        "hostPath: pods",
    ),
    ("JobSet", pods(0, "securityContext", "runAsNonRoot"), False, "must not run as root"),
    ("JobSet", pods(0, "securityContext", "runAsUser"), 0, "must not run as user 0"),
    ("JobSet", pods(0, "securityContext", "seccompProfile"), {"type": "Unconfined"}, "seccomp"),
    ("JobSet", SECURITY, {}, "must not let its processes gain"),
    ("JobSet", (*SECURITY, "capabilities", "drop"), [], "must drop all"),
    ("JobSet", (*SECURITY, "capabilities", "add"), ["SYS_ADMIN"], "not add"),
    ("JobSet", (*SECURITY, "privileged"), True, "must not be privileged"),
    ("JobSet", container("ports"), [{"containerPort": 1, "hostPort": 1}], "a port of the node"),
    # Trainer.
    ("TrainingRuntime", runtime(0, "replicas"), 2, "is always 1"),
    (
        "TrainingRuntime",
        runtime(0, *POD, "containers", 0, "name"),
        "train",
        "no container node",
    ),
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
