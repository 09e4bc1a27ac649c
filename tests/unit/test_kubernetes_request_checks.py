"""Each of a cluster's rules is broken once, in an object that keeps all others."""

import copy
import gzip
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker.errors import UsageError
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.request import check_objects, problems_of
from support.kubernetes_jobs import EVERYTHING, everything, job
from support.kubernetes_rules import CRDS, rule_problems, schema_problems
from support.kubernetes_rules import security_problems as insecurities

TRAINER = everything("trainer")


def objects(settings: Any) -> dict[str, Any]:
    request = KubernetesPlatform().plan(job(settings=settings))
    return {str(o["kind"]): json.loads(json.dumps(o)) for o in request.objects}


@pytest.fixture
def jobset():
    return objects(EVERYTHING)["JobSet"]


@pytest.fixture
def trainer():
    return objects(TRAINER)


# Keys of these are the user's: any name will do.
_FREE = ("labels", "annotations", "nodeSelector", "requests", "limits", "matchLabels")


def _fields(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(node, dict):
        for key, value in node.items():
            if not path or path[-1] not in _FREE:
                yield (*path, key)
            yield from _fields(value, (*path, key))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _fields(value, (*path, index))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        document = document[step]
    return document


@pytest.mark.parametrize("kind", ["JobSet", "TrainJob", "TrainingRuntime"])
def test_no_field_can_be_misspelt_or_of_another_type(kind):
    document = objects(EVERYTHING if kind == "JobSet" else TRAINER)[kind]
    assert list(schema_problems(document)) == []
    fields = [path for path in _fields(document) if path not in (("apiVersion",), ("kind",))]
    assert len(fields) > 100
    for path in fields:
        changed = copy.deepcopy(document)
        parent = _at(changed, path[:-1])
        # No field takes a list of lists.
        value, parent[path[-1]] = parent[path[-1]], [[]]
        assert list(schema_problems(changed)), path
        if isinstance(path[-1], str):
            del parent[path[-1]]
            parent[f"{path[-1]}s"] = value
            found = list(schema_problems(changed))
            assert any(f"{path[-1]}s: no such field" in words for words in found), path


def set_to(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        _at(document, path[:-1])[path[-1]] = value

    return change


def pods(index: int, *path: Any) -> tuple[Any, ...]:
    return ("spec", "replicatedJobs", index, "template", "spec", "template", "spec", *path)


def _twice(*path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        items = _at(document, path)
        items.append(copy.deepcopy(items[0]))

    return change


POLICY = ("spec", "failurePolicy")
RULES = (*POLICY, "rules")
JOB = ("spec", "replicatedJobs")
# What users write: checked in each run.
WRITTEN: list[tuple[str, Callable[[Any], None], str]] = [
    ("long name", set_to("m" * 60, "metadata", "name"), "63 at most"),
    ("name with a dot", set_to("a.b", "metadata", "name"), "is not a host name"),
    ("name with a digit first", set_to("1-run", "metadata", "name"), "a letter first"),
]
# What stoker writes: checked by its tests alone.
OWN: list[tuple[str, Callable[[Any], None], str]] = [
    (
        "folder outside",
        set_to("../x", *pods(0, "containers", 0, "volumeMounts", 0, "subPathExpr")),
        "not a folder inside a volume",
    ),
    (
        "variable",
        set_to("A=B", *pods(0, "containers", 0, "env", 1, "name")),
        "'A=B' is not a variable",
    ),
    ("image", set_to(" x", *pods(0, "containers", 0, "image")), "not an image"),
    (
        "half a GPU",
        set_to("500m", *pods(0, "containers", 0, "resources", "limits", "nvidia.com/gpu")),
        "needs a whole number",
    ),
    (
        "resource",
        set_to("1", *pods(0, "containers", 0, "resources", "limits", "gpu")),
        "there is no resource gpu",
    ),
    ("label", set_to("a b", "metadata", "labels", "team"), "not a label value"),
    ("label's key", set_to("x", "metadata", "labels", "my team"), "'my team' is not a key"),
    ("selector", set_to("a b", *pods(0, "nodeSelector", "pool")), "not a label value"),
    (
        "restarts",
        set_to(2**31, *POLICY, "maxRestarts"),
        "does not fit into int32",
    ),
    ("unknown target", set_to(["gpu"], "spec", "successPolicy", "targetReplicatedJobs"), "gpu"),
    ("operator", set_to("Most", "spec", "successPolicy", "operator"), "not one of All, Any"),
    ("alpha action", set_to("RestartJob", *RULES, 0, "action"), "RestartJob is an alpha feature"),
    ("alpha restart", set_to("InPlaceRestart", *POLICY, "restartStrategy"), "alpha feature"),
    ("rule's name", set_to("out-of-time", *RULES, 0, "name"), "not a name for a rule"),
    ("rule twice", _twice(*RULES), "two rules are called out_of_time"),
    ("rule's reason", set_to(["Tired"], *RULES, 0, "onJobFailureReasons"), "reason Tired"),
    ("rule's target", set_to(["gpu"], *RULES, 0, "targetReplicatedJobs"), "no replicated job gpu"),
    ("subdomain", set_to("a.b", "spec", "network", "subdomain"), "not a name for a service"),
    ("job twice", _twice(*JOB), "stands there twice: ['dnn']"),
    ("too many pods", set_to(2**31 - 1, *JOB, 1, "replicas"), "too many pods"),
    (
        "replacement",
        set_to("TerminatingOrFailed", *JOB, 0, "template", "spec", "podReplacementPolicy"),
        "must be Failed",
    ),
    ("int32", set_to(2**31, *JOB, 0, "template", "spec", "backoffLimit"), "does not fit"),
    ("negative", set_to(-1, *JOB, 0, "template", "spec", "backoffLimit"), "is negative"),
    (
        "first depends",
        set_to([{"name": "data", "status": "Ready"}], *JOB, 0, "dependsOn"),
        "the first replicated job depends on none",
    ),
    (
        "depends on a later one",
        set_to([{"name": "other", "status": "Ready"}], *JOB, 1, "dependsOn"),
        "does not come before it",
    ),
    ("restart", set_to("Always", *pods(0, "restartPolicy")), "Never or OnFailure"),
    (
        "failure policy of pods",
        set_to({"rules": []}, *JOB, 1, "template", "spec", "podFailurePolicy"),
        "needs the restart policy Never",
    ),
    (
        "mount of nothing",
        set_to("other", *pods(0, "containers", 0, "volumeMounts", 0, "name")),
        "there is no volume other",
    ),
    ("container", set_to("A", *pods(0, "containers", 0, "name")), "not a container name"),
    (
        "limit",
        set_to("1Gi", *pods(0, "containers", 0, "resources", "limits", "memory")),
        "the limit of memory is below",
    ),
    (
        "quantity",
        set_to("1 GB", *pods(0, "containers", 0, "resources", "limits", "memory")),
        "does not match",
    ),
    (
        "host's network",
        set_to(True, *pods(0, "hostNetwork")),
        "hostNetwork: shares the node's",
    ),
    (
        "host's folder",
        set_to({"name": "job", "hostPath": {"path": "/"}}, *pods(0, "volumes", 0)),
        "hostPath: pods must not have",
    ),
]


@pytest.mark.parametrize(("what", "change", "words"), WRITTEN, ids=[b[0] for b in WRITTEN])
def test_what_users_wrote_and_no_cluster_takes_is_told(jobset, what, change, words):
    assert list(problems_of(jobset)) == []
    change(jobset)
    found = list(problems_of(jobset))
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(("what", "change", "words"), OWN, ids=[b[0] for b in OWN])
def test_a_jobset_that_breaks_a_rule_is_told(jobset, what, change, words):
    assert list(rule_problems(jobset)) == []
    change(jobset)
    found = list(rule_problems(jobset))
    assert any(words in problem for problem in found), found


def test_startup_in_order_and_dependencies_exclude_each_other(jobset):
    jobset["spec"]["replicatedJobs"][1]["dependsOn"] = [{"name": "dnn", "status": "Ready"}]
    assert list(rule_problems(jobset)) == []
    jobset["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    assert any("exclude each other" in found for found in rule_problems(jobset))


INSECURE: list[tuple[Callable[[Any], None], str]] = [
    (set_to(True, "hostPID"), "hostPID"),
    (set_to(False, "securityContext", "runAsNonRoot"), "must not run as root"),
    (set_to(0, "securityContext", "runAsUser"), "must not run as user 0"),
    (set_to({"type": "Unconfined"}, "securityContext", "seccompProfile"), "seccomp"),
    (set_to({}, "containers", 0, "securityContext"), "must not let its processes gain"),
    (set_to([], "containers", 0, "securityContext", "capabilities", "drop"), "must drop all"),
    (set_to(["SYS_ADMIN"], "containers", 0, "securityContext", "capabilities", "add"), "not add"),
    (set_to(True, "containers", 0, "securityContext", "privileged"), "must not be privileged"),
    (set_to([{"containerPort": 1, "hostPort": 1}], "containers", 0, "ports"), "a port of the node"),
]


@pytest.mark.parametrize(("change", "words"), INSECURE)
def test_what_the_restricted_profile_refuses_is_told(jobset, change, words):
    spec = _at(jobset, pods(1))
    assert list(insecurities(spec)) == []
    change(spec)
    assert any(words in found for found in insecurities(spec))


RUNTIME = ("spec", "template", "spec", "replicatedJobs")
RUNTIME_POD = ("template", "spec", "template", "spec")
PATCH = ("spec", "runtimePatches", 0)
PATCHED = (*PATCH, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
TRAINER_BROKEN: list[tuple[str, Callable[[Any], None], str]] = [
    ("TrainingRuntime", set_to(2, *RUNTIME, 0, "replicas"), "is always 1"),
    (
        "TrainingRuntime",
        set_to("train", *RUNTIME, 0, *RUNTIME_POD, "containers", 0, "name"),
        "has no container node",
    ),
    ("TrainingRuntime", set_to({"torch": {}, "jax": {}}, "spec", "mlPolicy"), "can have one"),
    ("TrainJob", set_to("stoker", *PATCH, "manager"), "no domain with a path"),
    ("TrainJob", set_to("cpu", *PATCHED, 1, "name"), "has no replicated job cpu"),
    (
        "TrainJob",
        set_to("feed", *PATCHED, 1, *RUNTIME_POD, "containers", 0, "name"),
        "has no container feed",
    ),
    (
        "TrainJob",
        set_to([{"name": "A"}], *PATCHED, 0, *RUNTIME_POD, "containers", 0, "env"),
        "spec.trainer.env only",
    ),
]
TRAINER_WRITTEN: list[tuple[str, Callable[[Any], None], str]] = [
    (
        "TrainingRuntime",
        set_to("low", *RUNTIME, 1, *RUNTIME_POD, "priorityClassName"),
        "only the job that trains",
    ),
    ("TrainJob", set_to("a.b", "metadata", "name"), "not a host name"),
    ("TrainJob", set_to("m" * 50, "metadata", "name"), "63 at most"),
]


@pytest.mark.parametrize(("kind", "change", "words"), TRAINER_WRITTEN)
def test_what_users_wrote_and_trainer_does_not_take_is_told(trainer, kind, change, words):
    among = list(trainer.values())
    assert [found for o in among for found in problems_of(o, among=among)] == []
    change(trainer[kind])
    found = list(problems_of(trainer[kind], among=among))
    assert any(words in problem for problem in found), found


@pytest.mark.parametrize(("kind", "change", "words"), TRAINER_BROKEN)
def test_trainers_objects_that_break_a_rule_are_told(trainer, kind, change, words):
    among = list(trainer.values())
    assert [found for o in among for found in rule_problems(o, among=among)] == []
    change(trainer[kind])
    found = list(rule_problems(trainer[kind], among=among))
    assert any(words in problem for problem in found), found


def test_an_error_names_the_object_and_all_that_is_wrong(jobset):
    jobset["metadata"]["name"] = "m" * 60
    with pytest.raises(UsageError) as caught:
        check_objects([jobset])
    assert caught.value.where == f"JobSet {'m' * 60}"
    assert caught.value.what.count(" is not a host name") > 2


def test_a_likely_spelling_is_named(jobset):
    jobset["spec"]["succesPolicy"] = jobset["spec"].pop("successPolicy")
    assert list(schema_problems(jobset)) == [
        "spec.succesPolicy: no such field; did you mean successPolicy?"
    ]


def test_the_schemas_are_whole_and_hold_no_words():
    packed = [entry for entry in CRDS.iterdir() if entry.name.endswith(".gz")]
    assert len(packed) == 3
    for entry in packed:
        document = json.loads(gzip.decompress(entry.read_bytes()))
        assert document["kind"] == "CustomResourceDefinition"
        assert len(entry.read_bytes()) < 10_000
