"""A heterogeneous training job runs in containers on a Docker engine, laid out as on SageMaker."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from support.docker_engine import Cluster, Engine, seconds_of

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

# Hosts of a group need not be sorted, and the leader need not be algo-1.
GROUPS = {"data": ["algo-4", "algo-2"], "dnn": ["algo-3", "algo-1"]}
DATA, LEADER, FOLLOWER = GROUPS["data"], *GROUPS["dnn"]
ENVIRONMENT = {"STOKER_WORKERS": '{"dnn": 0, "data": 1}', "OMP_NUM_THREADS": "1"}
MNIST = ("python", "examples/mnist/train.py", "--workers", "0", "--samples", "1280", "--epochs")
COUNT = 400
FAILURE = Path("output", "failure")
# What a busy engine may take to notice that a container has ended.
ENGINE_SECONDS = 2.0


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


def batches_sent(record: Mapping[str, list[dict[str, str]]]) -> dict[str, int]:
    sent = re.compile(r"(\d+) batches sent")
    said = {event["host"]: sent.search(event["what"]) for event in record["events"]}
    return {host: int(found[1]) for host, found in said.items() if found}


def test_mnist_trains_on_four_hosts_and_all_end_well_with_the_leader(cluster):
    with cluster:
        cluster.start(*MNIST, "8")
        assert cluster.wait(seconds=180) == dict.fromkeys(cluster.hosts, 0)
        end = seconds_of(cluster.event(LEADER, "command_ended").when)
        late = {host: cluster.ended_at(host) - end for host in cluster.hosts}
        print(f"ended after the training: { {h: round(s, 2) for h, s in late.items()} } s")
        assert max(late.values()) < 3.0 + ENGINE_SECONDS
        roles = {host: cluster.event(host, "host_role").values["role"] for host in cluster.hosts}
    assert roles == {"algo-4": "data", "algo-2": "data", "algo-3": "dnn", "algo-1": "dnn"}
    record = cluster.record(LEADER)
    assert record["status"] == "succeeded"
    assert record["metrics"]["accuracy"] > 0.8
    assert record["strategy"] == "torchrun"
    ranks = {each["host"]: each.get("rank") for each in record["hosts"]}
    assert ranks == {LEADER: 0, FOLLOWER: 1, DATA[0]: None, DATA[1]: None}
    sent = batches_sent(record)
    print(f"batches sent: {sent}, measured: {record['measured']['step_seconds']} s a step")
    assert sorted(sent) == sorted(DATA)
    assert min(sent.values()) > 0
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
    # Two ranks, batches of five: all of them came from data hosts, each at least once.
    assert sum(batches_sent(record).values()) >= COUNT / 5


@pytest.mark.parametrize(
    ("verb", "code", "status"), [(("kill",), 137, None), (("stop", "--time=120"), 143, "stopped")]
)
def test_all_hosts_end_with_the_leader(cluster, verb, code, status):
    with cluster:
        cluster.start(*MNIST, "1000")
        cluster.wait_for_log(LEADER, r" progress steps=\d")
        struck = time.time()
        cluster.docker(verb[0], LEADER, *verb[1:])
        codes = cluster.wait(seconds=60)
        late = {host: cluster.ended_at(host) - struck for host in cluster.hosts}
    print(f"ended after docker {verb[0]}: { {h: round(s, 1) for h, s in late.items()} } s")
    assert max(late.values()) < 30.0
    assert codes[LEADER] == code
    assert codes[FOLLOWER] != 0
    assert [codes[host] for host in DATA] == [0, 0]
    if status:
        assert cluster.record(LEADER)["status"] == status


def test_doctor_in_a_running_job_knows_the_run_and_its_peers(cluster):
    with cluster:
        cluster.start(*MNIST, "1000")
        cluster.wait_for_log(LEADER, r" progress steps=\d")
        found = {
            peer: cluster.execute(DATA[0], "stoker", "doctor", "--json", "--peer", peer)
            for peer in (DATA[1], LEADER, FOLLOWER)
        }
    codes = {peer: done.returncode for peer, done in found.items()}
    assert codes == {DATA[1]: 0, LEADER: 0, FOLLOWER: 4}, found
    role = f"data, group data, host 1 of 2, ml.c5.xlarge, led by {LEADER}"
    for peer, done in found.items():
        said = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        assert role in said["role"]["text"]
        assert said["names"]["text"] == "3 other hosts are known by name"
        assert said["port"]["text"] == "7600 is used by this run's launcher"
        assert said["peer"]["state"] == ("fail" if peer == FOLLOWER else "ok")
