import json

import pytest

from stoker.errors import UsageError
from stoker.launch.topology import from_resourceconfig
from support.run_file import in_run

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
    return from_resourceconfig(tmp_path, in_run(environ))


def test_hosts_keep_the_given_order_and_the_first_dnn_host_leads(tmp_path):
    topology = described(tmp_path, HETEROGENEOUS)
    assert topology.dnn_hosts == ("algo-3", "algo-1", "algo-2")
    assert (topology.leader, topology.is_leader) == ("algo-3", False)
    assert topology.data_hosts == ("algo-4",)
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


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("data", "dnn_group"), "{}"),
        (("Data-hosts", "dnn_group"), "{}"),
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
    topology = described(tmp_path, config, RUN_ROLES=roles)
    assert (topology.role, topology.leader) == ("data", "b")


@pytest.mark.parametrize(
    ("change", "environ", "words"),
    [
        ("{", {}, "malformed"),
        ({}, {"RUN_ROLES": '{"data": "dnn"}'}, "exactly one group"),
    ],
)
def test_a_wrong_description_is_a_usage_error_that_says_what(tmp_path, change, environ, words):
    config = change if isinstance(change, str) else HETEROGENEOUS | change
    with pytest.raises(UsageError, match=words) as caught:
        described(tmp_path, config, **environ)
    assert caught.value.where
