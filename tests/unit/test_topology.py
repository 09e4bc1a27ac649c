"""Each host of a run reads the topology from SageMaker's description."""

import json

import pytest

from stoker.errors import UsageError
from stoker.launch.topology import from_resourceconfig, platform_name

# The shape of SageMaker's documentation: unsorted hosts, a leader that is not algo-1.
HETEROGENEOUS = {
    "current_host": "algo-1",
    "current_instance_type": "ml.p4d.24xlarge",
    "current_group_name": "gpu",
    "hosts": ["algo-1", "algo-2", "algo-3", "algo-4"],
    "instance_groups": [
        {"instance_group_name": "data", "instance_type": "ml.c5.18xlarge", "hosts": ["algo-4"]},
        {
            "instance_group_name": "gpu",
            "instance_type": "ml.p4d.24xlarge",
            "hosts": ["algo-3", "algo-1", "algo-2"],
        },
    ],
    "network_interface_name": "eth0",
    "topology": {"network_nodes": ["of no interest"]},
}


def described(tmp_path, config, **environ):
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resourceconfig.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return from_resourceconfig(tmp_path, environ)


def test_hosts_keep_the_given_order_and_the_first_dnn_host_leads(tmp_path):
    topology = described(tmp_path, HETEROGENEOUS)
    assert topology.dnn_hosts == ("algo-3", "algo-1", "algo-2")
    assert topology.leader == "algo-3"
    assert not topology.is_leader
    assert topology.data_hosts == ("algo-4",)
    assert topology.hosts == ("algo-3", "algo-1", "algo-2", "algo-4")


def test_a_host_knows_its_group_type_role_and_interface(tmp_path):
    topology = described(tmp_path, HETEROGENEOUS | {"current_host": "algo-4"})
    assert topology.role == "data"
    assert topology.group.name == "data"
    assert topology.group.instance_type == "ml.c5.18xlarge"
    assert topology.network_interface == "eth0"


def test_a_homogeneous_cluster_trains_on_all_hosts(tmp_path):
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": "ml.p3.2xlarge",
        "hosts": ["algo-2", "algo-1"],
    }
    topology = described(
        tmp_path,
        {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"], "instance_groups": [group]},
    )
    assert topology.dnn_hosts == ("algo-2", "algo-1")
    assert topology.data_hosts == ()


def test_a_description_without_groups_is_a_homogeneous_cluster(tmp_path):
    topology = described(tmp_path, {"current_host": "b", "hosts": ["c", "b"]})
    assert topology.group.name == "homogeneousCluster"
    assert topology.dnn_hosts == ("c", "b")


def test_without_any_description_this_is_the_only_host(tmp_path):
    topology = from_resourceconfig(tmp_path, {})
    assert topology.hosts == ("localhost",)
    assert topology.is_leader


def test_the_variable_stands_in_for_the_file(tmp_path):
    environ = {"SM_RESOURCE_CONFIG": json.dumps(HETEROGENEOUS)}
    assert from_resourceconfig(tmp_path, environ).leader == "algo-3"


def test_the_file_wins_over_the_variables(tmp_path):
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


@pytest.mark.parametrize("name", ["data", "data_group", "data-hosts", "Data"])
def test_a_group_whose_name_begins_with_data_makes_batches(tmp_path, name):
    groups = [
        {"instance_group_name": name, "instance_type": "", "hosts": ["a"]},
        {"instance_group_name": "dnn_group", "instance_type": "", "hosts": ["b"]},
    ]
    topology = described(tmp_path, {"current_host": "a", "instance_groups": groups})
    assert topology.role == "data"


def test_roles_may_be_given_where_names_do_not_tell(tmp_path):
    groups = [
        {"instance_group_name": "cpu", "instance_type": "", "hosts": ["a"]},
        {"instance_group_name": "database-gpu", "instance_type": "", "hosts": ["b"]},
    ]
    config = {"current_host": "a", "instance_groups": groups}
    roles = '{"cpu": "data", "database-gpu": "dnn"}'
    topology = described(tmp_path, config, STOKER_ROLES=roles)
    assert (topology.role, topology.leader) == ("data", "b")


@pytest.mark.parametrize(
    ("change", "environ", "words"),
    [
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
    with pytest.raises(UsageError, match=words) as caught:
        described(tmp_path, HETEROGENEOUS | change, **environ)
    assert caught.value.where


def test_a_file_that_is_no_json_is_a_usage_error_that_names_it(tmp_path):
    with pytest.raises(UsageError) as caught:
        described(tmp_path, "{")
    assert caught.value.where.endswith("resourceconfig.json")


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
