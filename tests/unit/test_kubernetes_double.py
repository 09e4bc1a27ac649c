"""The double of a cluster does what the real one's controllers do with what stoker makes."""

from typing import Any

import pytest

from stoker.platforms.kubernetes.request import plan_request
from support.kubernetes_api import NAMESPACE, KubernetesApi, Refusal
from support.kubernetes_jobs import job

NAME = "mnist-1"
JOBSETS = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{NAMESPACE}/jobsets"


@pytest.fixture
def api():
    return KubernetesApi()


def test_an_object_whose_owner_was_never_there_is_collected(api):
    nobody = {"apiVersion": "v1", "kind": "Pod", "name": "step-1", "uid": "none"}
    secret = {"apiVersion": "v1", "kind": "Secret"}
    secret |= {"metadata": {"name": "s", "ownerReferences": [nobody]}}
    api.answer("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", {}, secret)
    assert api.names("secrets") == []


@pytest.mark.parametrize("policy", ["Foreground", "Background"])
def test_a_deleted_jobset_takes_its_pods_before_or_after_it(api, policy):
    api.put("jobsets", plan_request(job(name=NAME)).main)
    api.run_pods(NAME)
    api.answer("DELETE", f"{JOBSETS}/{NAME}", {}, {"propagationPolicy": policy})
    happened = []
    for path, plural in ((JOBSETS, "jobsets"), ("/api/v1/pods", "pods")):
        for kind, item in api.watched(api.place("GET", path), {}, 0):
            if kind == "DELETED":
                happened.append((int(item["metadata"]["resourceVersion"]), plural))
    assert [plural for _, plural in sorted(happened)] == (
        ["pods"] * 3 + ["jobsets"] if policy == "Foreground" else ["jobsets"] + ["pods"] * 3
    )


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
