"""A heterogeneous training job runs in containers on a Docker engine, laid out as on SageMaker."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.docker_engine import Cluster, Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

# Hosts of a group need not be sorted, and the leader need not be algo-1.
GROUPS = {"data": ["algo-4", "algo-2"], "dnn": ["algo-3", "algo-1"]}
DATA, LEADER, FOLLOWER = GROUPS["data"], *GROUPS["dnn"]
ENVIRONMENT = {"RUN_WORKERS": '{"dnn": 0, "data": 1}', "OMP_NUM_THREADS": "1"}
MNIST = ("python", "examples/mnist/train.py", "--workers", "0", "--samples", "1280", "--epochs")
COUNT = 400
FAILURE = Path("output", "failure")


def new_cluster(
    engine: Engine,
    folder: Path,
    channels: Mapping[str, tuple[Path, Sequence[str]]] | None = None,
    images: Mapping[str, str] | None = None,
) -> Cluster:
    about = {"image": "job", "images": images, "groups": GROUPS, "channels": channels}
    return Cluster(engine, folder, **about, environment=ENVIRONMENT)


@pytest.fixture
def cluster(engine, tmp_path):
    return new_cluster(engine, tmp_path)


def test_mnist_trains_on_four_hosts_and_all_end_well_with_the_leader(cluster):
    with cluster:
        cluster.start(*MNIST, "8")
        assert cluster.wait(seconds=400) == dict.fromkeys(cluster.hosts, 0)
        roles = {host: cluster.event(host, "host_role").values["role"] for host in cluster.hosts}
    assert roles == {"algo-4": "data", "algo-2": "data", "algo-3": "dnn", "algo-1": "dnn"}
    record = cluster.record(LEADER)
    assert record["status"] == "succeeded"
    assert record["metrics"]["accuracy"] > 0.8
    assert record["strategy"] == "torchrun"
    assert {each["host"] for each in record["hosts"]} == {*cluster.hosts}
    written = {host: list((cluster.base_dir(host) / "model").iterdir()) for host in cluster.hosts}
    assert [host for host, files in written.items() if files] == [LEADER]
    assert not [host for host in cluster.hosts if (cluster.base_dir(host) / FAILURE).exists()]


def test_a_dataset_is_built_on_data_hosts_alone_in_their_own_image(engine, data_image, tmp_path):
    numbers = tmp_path / "numbers"
    numbers.mkdir()
    (numbers / "numbers.txt").write_text("\n".join(map(str, range(COUNT))))
    channels, images = {"numbers": (numbers, ["data"])}, {"data": data_image}
    with new_cluster(engine, tmp_path, channels, images) as cluster:
        cluster.start("python", "job.py")
        assert cluster.wait(seconds=120) == dict.fromkeys(cluster.hosts, 0)
    record = cluster.record(LEADER)
    assert record["metrics"] == {"total": sum(range(COUNT)), "channel_is_here": 0}


@pytest.mark.parametrize(
    ("verb", "code", "status"), [(("kill",), 137, None), (("stop", "--time=120"), 143, "stopped")]
)
def test_all_hosts_end_with_the_leader(cluster, verb, code, status):
    with cluster:
        cluster.start(*MNIST, "1000")
        cluster.wait_for_log(LEADER, r" interval row=.*\"steps\":\d")
        cluster.docker(verb[0], LEADER, *verb[1:])
        codes = cluster.wait(seconds=60)
    assert codes[LEADER] == code
    assert codes[FOLLOWER] != 0
    assert [codes[host] for host in DATA] == [0, 0]
    if status:
        assert cluster.record(LEADER)["status"] == status
