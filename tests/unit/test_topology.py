import json

import pytest

from stoker.errors import UsageError
from stoker.launch.topology import from_resourceconfig, platform_name

# The shape of SageMaker's documentation: unsorted hosts, a leader that is not algo-1.
GPU = {"instance_type": "ml.p4d.24xlarge", "hosts": ["algo-3", "algo-1", "algo-2"]}
HETEROGENEOUS = {
    "current_host": "algo-1",
    "current_instance_type": "ml.p4d.24xlarge",
    "current_group_name": "gpu",
    "hosts": ["algo-1", "algo-2", "algo-3", "algo-4"],
    "instance_groups": [
        {"instance_group_name": "data", "instance_type": "ml.c5.18xlarge", "hosts": ["algo-4"]},
        {"instance_group_name": "gpu", **GPU},
    ],
    "network_interface_name": "eth0",
    "topology": {"network_nodes": ["of no interest"]},
}


def described(tmp_path, config, **environ):
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "resourceconfig.json").write_text(text)
    return from_resourceconfig(tmp_path, environ)


def test_hosts_keep_the_given_order_and_the_first_dnn_host_leads(tmp_path):
    topology = described(tmp_path, HETEROGENEOUS)
    assert topology.dnn_hosts == ("algo-3", "algo-1", "algo-2")
    assert (topology.leader, topology.is_leader) == ("algo-3", False)
    assert topology.data_hosts == ("algo-4",)
    assert topology.hosts == ("algo-3", "algo-1", "algo-2", "algo-4")
    data = described(tmp_path, HETEROGENEOUS | {"current_host": "algo-4"})
    assert (data.role, data.network_interface) == ("data", "eth0")
    assert (data.group.name, data.group.instance_type) == ("data", "ml.c5.18xlarge")


@pytest.mark.parametrize("has_groups", [True, False])
def test_a_homogeneous_cluster_trains_on_all_hosts(tmp_path, has_groups):
    config = {"current_host": "algo-1", "hosts": ["algo-2", "algo-1"]}
    if has_groups:
        group = {"instance_type": "ml.p3.2xlarge", "hosts": config["hosts"]}
        config["instance_groups"] = [{"instance_group_name": "homogeneousCluster", **group}]
    topology = described(tmp_path, config)
    assert topology.group.name == "homogeneousCluster"
    assert topology.dnn_hosts == ("algo-2", "algo-1")
    assert topology.data_hosts == ()


def test_without_any_description_this_is_the_only_host(tmp_path):
    topology = from_resourceconfig(tmp_path, {})
    assert topology.hosts == ("localhost",)
    assert topology.is_leader


def test_the_variable_stands_in_for_the_file_which_wins_over_it(tmp_path):
    environ = {"SM_RESOURCE_CONFIG": json.dumps(HETEROGENEOUS)}
    assert from_resourceconfig(tmp_path, environ).leader == "algo-3"
    alone = json.dumps({"current_host": "other", "hosts": ["other"]})
    assert described(tmp_path, HETEROGENEOUS, SM_RESOURCE_CONFIG=alone).host == "algo-1"


def test_the_toolkits_variables_stand_in_for_both(tmp_path):
    groups = {g["instance_group_name"]: g for g in HETEROGENEOUS["instance_groups"]}  # type: ignore[index,attr-defined]
    environ = {
        "SM_CURRENT_HOST": "algo-2",
        "SM_HOSTS": '["algo-1", "algo-2", "algo-3", "algo-4"]',
        "SM_INSTANCE_GROUPS_DICT": json.dumps(groups),
        "SM_NETWORK_INTERFACE_NAME": "ens5",
    }
    topology = from_resourceconfig(tmp_path, environ)
    assert (topology.host, topology.leader) == ("algo-2", "algo-3")
    assert topology.network_interface == "ens5"


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("data", "dnn_group"), ""),
        (("Data-hosts", "dnn_group"), ""),
        # Where names do not tell.
        (("cpu", "database-gpu"), '{"cpu": "data", "database-gpu": "dnn"}'),
    ],
)
def test_a_group_makes_batches_by_its_name_or_as_given(tmp_path, names, roles):
    groups = [
        {"instance_group_name": name, "instance_type": "", "hosts": [host]}
        for name, host in zip(names, "ab", strict=True)
    ]
    config = {"current_host": "a", "instance_groups": groups}
    topology = described(tmp_path, config, STOKER_ROLES=roles)
    assert (topology.role, topology.leader) == ("data", "b")


@pytest.mark.parametrize(
    ("change", "environ", "words"),
    [
        ("{", {}, "malformed"),
        ({"current_host": "algo-9"}, {}, "algo-9, is in no group"),
        ({}, {"STOKER_ROLES": '{"gpu": "data"}'}, "exactly one group"),
        ({}, {"STOKER_ROLES": '{"data": "dnn"}'}, "exactly one group"),
        ({}, {"STOKER_ROLES": '{"gpus": "dnn"}'}, "no group is called gpus"),
        ({}, {"STOKER_ROLES": '{"gpu": "trainer"}'}, "malformed"),
        ({"instance_groups": HETEROGENEOUS["instance_groups"] * 2}, {}, "exactly one group"),  # type: ignore[operator]
        ({"instance_groups": [{"instance_group_name": "gpu", "hosts": []}]}, {}, "exactly one"),
        ({"instance_groups": "gpu"}, {}, "malformed"),
        (
            {"instance_groups": [{"instance_group_name": "gpu", "hosts": ["algo-1", "algo-1"]}]},
            {},
            "is listed twice",
        ),
    ],
)
def test_a_wrong_description_is_a_usage_error_that_says_what(tmp_path, change, environ, words):
    config = change if isinstance(change, str) else HETEROGENEOUS | change
    with pytest.raises(UsageError, match=words) as caught:
        described(tmp_path, config, **environ)
    assert caught.value.where


@pytest.mark.parametrize(
    ("instance_type", "environ", "platform"),
    [
        ("local.c1", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "local"),
        ("ml.c5.xlarge", {"TRAINING_JOB_NAME": "job"}, "sagemaker"),
        ("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ("", {}, "local"),
    ],
)
def test_the_platform_is_told_by_its_traces(tmp_path, instance_type, environ, platform):
    config = {"current_host": "a", "current_instance_type": instance_type}
    assert platform_name(described(tmp_path, config), environ) == platform
