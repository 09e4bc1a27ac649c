import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from stoker.host.machine import cpu_limit, cpu_quota, limiting_group, usable_vcpus, vcpu_capacity
from stoker.profile.combine import host_of, note_of_host
from stoker.profile.inventory import cpu_model, instance_type, metadata_type
from stoker.profile.rank_results import Inventory, RankResult
from stoker.records import ProfileSettings, TodaysGroup


def quota(folder: Path, membership: str, files: dict[str, str]) -> float | None:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "membership").write_text(membership)
    return cpu_quota(root=folder / "cgroup", membership=folder / "membership")


def in_version_1(folder: str, quota: str) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000"}


@pytest.mark.parametrize(
    ("membership", "files", "found"),
    [
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        # The container's own group, and a tighter one around it.
        ("0::/pod/app\n", {"pod/app/cpu.max": "max 100000", "pod/cpu.max": "400000 100000"}, 4.0),
        # A path of the host's, seen from inside: the mount is the group.
        ("0::/kubepods/pod1/abc\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/../../other\n", {"cpu.max": "200000 100000"}, 2.0),
        ("4:cpu,cpuacct:/docker/abc\n0::/\n", in_version_1("cpu/docker/abc", "150000"), 1.5),
        ("4:cpu,cpuacct:/\n", in_version_1("cpu,cpuacct", "-1"), None),
        ("1:cpuset:/x\n", {"cpu.max": "rubbish"}, None),
        ("", {"cpu.max": "100000 0"}, None),
    ],
)
def test_a_quota_is_the_tightest_of_the_groups_of_this_process(tmp_path, membership, files, found):
    assert quota(tmp_path, membership, files) == found


@pytest.mark.parametrize(
    ("asked", "quota_vcpus", "capacity", "workers"),
    [
        ("", 1.5, 1.5, 2),
        ("", 0.4, 0.4, 1),
        ("", 9.0, 4.0, 4),
        ("1500", None, 1.5, 2),
        ("1500", 1.0, 1.0, 1),
        *((asked, None, 4.0, 4) for asked in ("64000", "0", "", "a lot")),
    ],
)
def test_a_host_counts_on_its_quota_or_what_its_pod_asks_for_and_not_on_its_node(
    monkeypatch, asked, quota_vcpus, capacity, workers
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr("stoker.host.machine.cpu_quota", lambda: quota_vcpus)
    monkeypatch.setenv("STOKER_CPU_REQUEST_MILLI", asked)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    if capacity == 4.0:
        assert cpu_limit() == "affinity"
    else:
        assert cpu_limit() == ("quota" if quota_vcpus == capacity else "pod")
    assert vcpu_capacity() == capacity
    assert usable_vcpus() == workers


@pytest.mark.parametrize(
    ("own", "above", "asked", "limiting"),
    [
        ("200000", "100000", "", "pod"),
        ("100000", "200000", "", "pod/app"),
        ("900000", "max", "", None),
        # A pod's own CPU-seconds are counted where it asks for less, and none of its neighbours'.
        ("max", "max", "1500", "pod/app"),
    ],
)
def test_the_group_that_limits_is_the_tightest_one_below_the_affinity(
    tmp_path, monkeypatch, own, above, asked, limiting
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setenv("STOKER_CPU_REQUEST_MILLI", asked)
    files = {"pod/app/cpu.max": f"{own} 100000", "pod/cpu.max": f"{above} 100000"}
    quota(tmp_path, "0::/pod/app\n", files)
    root = tmp_path / "cgroup"
    found = limiting_group(root=root, membership=tmp_path / "membership")
    assert found == (root / limiting if limiting else None)


class Metadata(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        is_asked_well = (
            self.path == "/latest/api/token"
            and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
        )
        self.reply(200 if is_asked_well else 400, "secret")

    def do_GET(self) -> None:
        has_token = self.headers["X-aws-ec2-metadata-token"] == "secret"
        is_known = self.path == "/latest/meta-data/instance-type"
        self.reply(200 if has_token and is_known else 401, "g5.8xlarge")

    def reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def metadata():
    with ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(150)


def test_a_metadata_service_that_trickles_is_left_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection:
                while not stop.wait(0.02):
                    try:
                        connection.send(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        begun = time.monotonic()
        assert metadata_type(f"127.0.0.1:{listener.getsockname()[1]}", seconds=0.2) == ""
        # Each byte comes in time, and the whole never would.
        assert time.monotonic() - begun < 30
        stop.set()
        thread.join(150)


SAGEMAKER = {"SM_CURRENT_INSTANCE_TYPE": "ml.g5.xlarge"}
FILE = '{"current_host": "algo-1", "current_instance_type": "ml.p4d.24xlarge"}'
EC2 = "Amazon EC2"


@pytest.mark.parametrize(
    ("given", "environ", "resources", "vendor", "found"),
    [
        ("c7i.8xlarge", SAGEMAKER, FILE, EC2, ("c7i.8xlarge", "given")),
        (None, SAGEMAKER, FILE, EC2, ("ml.g5.xlarge", "environment")),
        (None, {"STOKER_INSTANCE_TYPE": "g6.large"}, FILE, EC2, ("g6.large", "environment")),
        (None, {}, FILE, EC2, ("ml.p4d.24xlarge", "resourceconfig.json")),
        # The service is asked only on EC2, or when it is wanted.
        (None, {}, "{", EC2, ("g5.8xlarge", "metadata")),
        ("auto", {}, "", "QEMU", ("g5.8xlarge", "metadata")),
        (None, {}, "", "QEMU", (None, "")),
    ],
)
def test_the_host_is_named_by_who_knows_it_best(
    tmp_path, metadata, given, environ, resources, vendor, found
):
    (tmp_path / "sys_vendor").write_text(vendor + "\n")
    file = tmp_path / "resourceconfig.json"
    if resources:
        file.write_text(resources)
    places = {"resources": file, "dmi": tmp_path, "metadata": metadata}
    assert instance_type(given=given, environ=environ, **places) == found


def test_the_cpu_is_named_as_the_kernel_spells_it(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: AMD  EPYC 7R32\nflags : a\n")
    assert cpu_model(file) == "AMD EPYC 7R32"
    assert cpu_model(tmp_path / "none") is None


G5 = Inventory(
    accelerators=1, accelerator_model="NVIDIA A10G", instance_type="g5.8xlarge", source="metadata"
)
RANK = RankResult(rank=0, world_size=1, host="h", vcpus=32, ranks_on_host=1, inventory=G5)


@pytest.mark.parametrize(
    ("given", "is_named", "name"),
    [
        (None, True, "local.c2"),
        (None, False, "g5.8xlarge"),
        ("auto", True, "g5.8xlarge"),
        ("g6.8xlarge", True, "g6.8xlarge"),
    ],
)
def test_the_profiled_host_has_the_name_that_says_most(given, is_named, name):
    found = host_of(
        RANK,
        group=TodaysGroup(instance_type="local.c2"),
        settings=ProfileSettings(instance_type=given),
        is_named=is_named,
    )
    assert (found.instance_type, found.vcpus, found.accelerators) == (name, 32, 1)
    note = note_of_host(RANK, found)
    assert (note is None) == (name == "g5.8xlarge")
    if note:
        assert "this host is a g5.8xlarge (metadata)" in note


def test_a_host_that_nothing_is_known_of_keeps_the_name_of_its_group():
    bare = msgspec.structs.replace(RANK, inventory=None)
    group = TodaysGroup(instance_type="ml.g5.8xlarge")
    found = host_of(bare, group=group, settings=ProfileSettings(), is_named=False)
    assert found.instance_type == "ml.g5.8xlarge"
    assert found.accelerators is None
    assert note_of_host(bare, found) is None
