"""The double of a cluster does what the real one's controllers do with what stoker makes."""

from typing import Any

import pytest

from stoker.platforms.kubernetes.request import plan_request
from support.kubernetes_api import NAMESPACE, KubernetesApi, Refusal
from support.kubernetes_jobs import job

NAME = "mnist-1"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"
TRAINJOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"


@pytest.fixture
def api():
    return KubernetesApi()


def owner(api: KubernetesApi, plural: str, name: str) -> dict[str, str]:
    found = api.get(plural, name)
    return {
        "apiVersion": found["apiVersion"],
        "kind": found["kind"],
        "name": name,
        "uid": found["metadata"]["uid"],
    }


def secret(*owners: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s", "ownerReferences": [*owners]},
    }


def delete(api: KubernetesApi, path: str, *, policy: str) -> None:
    api.answer("DELETE", f"{path}/{NAME}", {}, {"propagationPolicy": policy})


def deletions(api: KubernetesApi, *plurals: str) -> list[str]:
    happened = []
    for plural in plurals:
        place = api.place("GET", {"jobsets": JOBSETS, "pods": "/api/v1/pods"}[plural])
        for kind, item in api.watched(place, {}, 0):
            if kind == "DELETED":
                happened.append((int(item["metadata"]["resourceVersion"]), plural))
    return [plural for _, plural in sorted(happened)]


def test_an_object_goes_with_the_last_of_its_owners(api):
    for name in ("w1", "w2"):
        api.make_workflow(name)
    api.put("secrets", secret(owner(api, "workflows", "w1"), owner(api, "workflows", "w2")))
    api.remove("workflows", "w1")
    (left,) = api.get("secrets", "s")["metadata"]["ownerReferences"]
    assert left["name"] == "w2"
    api.remove("workflows", "w2")
    assert api.names("secrets") == []


def test_an_object_whose_owner_was_never_there_is_collected(api):
    nobody = {"apiVersion": "v1", "kind": "Pod", "name": "step-1", "uid": "none"}
    api.answer("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", {}, secret(nobody))
    assert api.names("secrets") == []


@pytest.mark.parametrize("policy", ["Foreground", "Background"])
def test_a_deleted_jobset_takes_its_pods_before_or_after_it(api, policy):
    api.put("jobsets", plan_request(job(name=NAME)).main)
    api.run_pods(NAME)
    delete(api, JOBSETS, policy=policy)
    order = deletions(api, "jobsets", "pods")
    assert order == (
        ["pods"] * 3 + ["jobsets"] if policy == "Foreground" else ["jobsets"] + ["pods"] * 3
    )


def test_a_deletion_that_takes_time_marks_the_job_and_its_pods(api):
    api.put("jobsets", plan_request(job(name=NAME)).main)
    api.run_pods(NAME)
    api.is_deletion_held = True
    delete(api, JOBSETS, policy="Foreground")
    assert all("deletionTimestamp" in api.get("pods", n)["metadata"] for n in api.names("pods"))
    assert len(api.names("pods")) == 3
    api.finish_deletions()
    assert api.names("jobsets") + api.names("pods") == []


@pytest.mark.parametrize("kind", ["Completed", "Failed"])
def test_the_ttl_of_a_failed_train_jobs_jobset_makes_it_train_again(api, kind):
    request = plan_request(job(name=NAME, settings={"api": "trainer"}))
    runtime: Any = request.runtime
    runtime["spec"]["template"]["spec"]["ttlSecondsAfterFinished"] = 60
    api.put("trainingruntimes", runtime)
    api.put("trainjobs", request.main)
    api.run_pods(NAME)
    api.end_job(NAME, kind)
    api.pass_seconds_after_end(59)
    assert api.trained_again == []
    api.pass_seconds_after_end(60)
    assert api.trained_again == ([NAME] if kind == "Failed" else [])


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_unknown_field_is_dropped_without_a_word_unless_the_caller_is_strict(api, is_strict):
    main: Any = plan_request(job(name=NAME)).main
    wrong = {**main, "spec": {**main["spec"], "replica": 1}}
    if is_strict:
        with pytest.raises(Refusal, match=r'unknown field "spec\.replica"'):
            api.answer("POST", JOBSETS, {"fieldValidation": "Strict"}, wrong)
        return
    api.answer("POST", JOBSETS, {}, wrong)
    assert "replica" not in api.get("jobsets", NAME)["spec"]


def test_a_call_that_no_rule_of_the_role_allows_is_refused(api):
    api.role = [{"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["list"]}]
    api.answer("GET", JOBSETS, {}, None)
    with pytest.raises(Refusal, match='cannot list resource "trainjobs"'):
        api.answer("GET", TRAINJOBS, {}, None)
    with pytest.raises(Refusal, match='cannot get resource "jobsets"'):
        api.answer("GET", f"{JOBSETS}/{NAME}", {}, None)
    assert api.used == {("list", "jobset.x-k8s.io", "jobsets")}
