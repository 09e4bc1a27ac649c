"""configs/kubernetes has the rights that runs use, and opens the ports that they listen on."""

import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.follower import FOLLOWER_LABELS
from stoker.platforms.kubernetes.jobset import replicated_jobs
from stoker.platforms.kubernetes.rights import rules
from stoker.records import FeedSettings, KubernetesSettings
from stoker.records.engine import PRESETS
from support.cluster_files import FOLDER, objects, rbac
from support.kubernetes_jobs import everything, job
from support.kubernetes_rules import rule_problems

STRANGER = {"app": "web"}


def labels_of_pods(api: str) -> dict[str, dict[str, str]]:
    request = KubernetesPlatform().plan(job(settings=everything(api)))
    jobs = replicated_jobs(request.runtime or request.main)
    labels: list[Any] = [each.template["metadata"]["labels"] for each in jobs]
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


def test_metrics_are_open_to_the_cluster_only_where_they_are_served_to_other_hosts():
    pods = labels_of_pods("jobset")
    assert reaches(STRANGER, pods["dnn"], 9400, is_served=True)
    assert not reaches(STRANGER, pods["dnn"], 9401, is_served=True)
    assert not reaches(STRANGER, pods["dnn"], 9400)


@pytest.mark.parametrize("api", ["jobset", "trainer"])
def test_the_role_has_the_rights_that_are_asked_for(api):
    role, binding = rbac(namespace="team-a", account="runner", api=api)
    assert role["rules"] == rules(KubernetesSettings(api=api))
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_followers_get_the_priority_of_their_class():
    own, policy, binding = objects("priority.yaml")
    assert (own["kind"], own["preemptionPolicy"]) == ("PriorityClass", "Never")
    selector = policy["spec"]["matchConstraints"]["objectSelector"]
    assert selector == {"matchLabels": FOLLOWER_LABELS}
    (mutation,) = policy["spec"]["mutations"]
    expression = mutation["applyConfiguration"]["expression"]
    assert f'"{own["metadata"]["name"]}", priority: {own["value"]}' in expression
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]


@pytest.mark.parametrize("name", ["rbac.yaml", "network-policy.yaml", "priority.yaml"])
def test_no_object_breaks_a_rule(name):
    found = objects(name, is_all=True)
    assert [problem for each in found for problem in rule_problems(each, among=found)] == []


@pytest.mark.skipif(not shutil.which("kubectl"), reason="needs kubectl")
def test_kustomize_names_namespace_and_account_once():
    words = ("kubectl", "kustomize", str(FOLDER))
    made = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found = {each["kind"]: each for each in yaml.safe_load_all(made)}
    assert {each["metadata"]["namespace"] for each in found.values()} == {"kubeflow"}
    assert found["RoleBinding"] == rbac(namespace="kubeflow", account="pipeline-runner")[1]
