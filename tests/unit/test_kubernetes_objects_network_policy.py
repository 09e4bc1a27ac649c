"""Checks who reaches a run's pods under the rendered NetworkPolicies, as Kubernetes reads these."""

from collections.abc import Mapping
from typing import Any

import pytest

from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.objects import network_policies
from stoker.platforms.kubernetes.request import replicated_jobs
from stoker.records import Json
from stoker.settings import workload_from
from support.kubernetes_jobs import EVERYTHING, job

STRANGER = {"app": "web"}


def labels_of_pods(api: str) -> dict[str, dict[str, str]]:
    """Returns the labels of a planned run's pods, by role."""
    request = KubernetesPlatform().plan(job(settings={**EVERYTHING, "api": api}))
    documents = request.objects
    main: Any = next(d for d in documents if d["kind"] in ("JobSet", "TrainingRuntime"))
    found = {}
    for replicated in replicated_jobs(main):
        labels: Any = replicated.template["metadata"]["labels"]  # type: ignore[index, call-overload]
        found[labels["stoker/role"]] = labels
    return found


def is_selected(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and all(
        labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", ())
    )


def reaches(
    source: Mapping[str, str], target: Mapping[str, str], port: int, **workload: Json
) -> bool:
    """Says whether a pod of the namespace reaches a TCP port of another one."""
    policies: Any = network_policies(
        workload_from({"name": "mnist", "command": ["python", "train.py"], **workload})
    )
    isolating = [p["spec"] for p in policies if is_selected(p["spec"]["podSelector"], target)]
    assert isolating, "no policy selects the pod: everybody reaches it"
    return any(
        any(
            "namespaceSelector" in peer or is_selected(peer["podSelector"], source)
            for peer in rule["from"]
        )
        and ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
        for spec in isolating
        for rule in spec["ingress"]
    )


@pytest.mark.parametrize("api", ["jobset", "trainer"])
def test_pods_of_a_run_reach_each_other_and_strangers_reach_none(api: str) -> None:
    pods = labels_of_pods(api)
    for port in (7600, 7601):
        assert reaches(pods["dnn"], pods["data"], port)
        assert not reaches(STRANGER, pods["data"], port)
    for port in (7600, 7602, 41234):
        assert reaches(pods["dnn"], pods["dnn"], port)
        assert not reaches(STRANGER, pods["dnn"], port)
    assert reaches(pods["data"], pods["dnn"], 7600)


def test_a_data_host_shows_the_feeds_ports_and_no_others() -> None:
    pods = labels_of_pods("jobset")
    assert not reaches(pods["dnn"], pods["data"], 22)
    assert reaches(pods["dnn"], pods["data"], 8601, feed={"port": 8600})


def test_a_data_host_shows_the_ports_of_its_engine() -> None:
    pods = labels_of_pods("jobset")
    assert reaches(pods["dnn"], pods["data"], 5051, engine="tf.data.service")
    assert reaches(pods["dnn"], pods["data"], 41234, engine="ray")


def test_metrics_are_open_to_the_cluster_only_where_they_are_served_to_other_hosts() -> None:
    pods = labels_of_pods("jobset")
    served: Json = {"metrics_port": 9400, "metrics_address": "0.0.0.0"}
    assert reaches(STRANGER, pods["dnn"], 9400, feed=served)
    assert not reaches(STRANGER, pods["dnn"], 9401, feed=served)
    assert not reaches(STRANGER, pods["dnn"], 9400, feed={"metrics_port": 9400})
