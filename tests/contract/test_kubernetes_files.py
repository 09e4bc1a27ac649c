"""configs/kubernetes has the rights that runs use, and opens the ports that they listen on."""

from collections.abc import Mapping
from typing import Any

import pytest

from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.records import FeedSettings
from stoker.records.engine import PRESETS
from support.cluster_files import objects
from support.kubernetes_jobs import everything, job
from support.kubernetes_rules import rule_problems

STRANGER = {"app": "web"}


def labels_of_pods(api: str) -> dict[str, dict[str, str]]:
    request = KubernetesPlatform().plan(job(settings=everything(api)))
    labels: list[Any] = [group.template["metadata"]["labels"] for group in request.groups]
    return {each["stoker/role"]: each for each in labels}


def is_selected(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted = {key: (value,) for key, value in selector.get("matchLabels", {}).items()}
    wanted |= {each["key"]: each["values"] for each in selector.get("matchExpressions", ())}
    return all(labels.get(key) in values for key, values in wanted.items())


Labels = Mapping[str, str]


def reaches(source: Labels, target: Labels, port: int, *, is_served: bool = False) -> bool:
    """Whether a pod reaches a port of another one; `is_served`: with metrics for other hosts."""
    policies = objects("network-policy.yaml", is_all=is_served)
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
def test_pods_of_a_run_reach_each_other_and_strangers_reach_none(api):
    pods = labels_of_pods(api)
    for port in (7600, 7601):
        assert reaches(pods["dnn"], pods["data"], port)
        assert not reaches(STRANGER, pods["data"], port)
    for port in (7600, 7602, 41234):
        assert reaches(pods["dnn"], pods["dnn"], port)
        assert not reaches(STRANGER, pods["dnn"], port)
    assert reaches(pods["data"], pods["dnn"], 7600)


def test_a_data_host_shows_the_ports_of_feed_and_engine_and_no_others():
    pods, feed = labels_of_pods("jobset"), FeedSettings()
    ports = {feed.port, feed.port + 1, *PRESETS["tf.data.service"].ports.values()}
    near = {22, *(port + step for port in ports for step in (-1, 0, 1))}
    assert {port for port in near if reaches(pods["dnn"], pods["data"], port)} == ports
    # Of the others, Ray alone has ports: those it chooses itself are none to be listed.
    assert {name for name, preset in PRESETS.items() if preset.ports} == {"tf.data.service", "ray"}


@pytest.mark.parametrize("name", ["rbac.yaml", "network-policy.yaml"])
def test_no_object_breaks_a_rule(name):
    found = objects(name, is_all=True)
    assert [problem for each in found for problem in rule_problems(each, among=found)] == []
