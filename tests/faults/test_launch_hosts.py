"""`stoker launch` runs on hosts that SageMaker describes: no platform, one launcher per host."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stoker.host.processes import free_ports
from support.local_job import (
    WITHOUT_TORCH,
    assert_nothing_left,
    is_running,
    marked_processes,
    resource_config,
    until,
)
from support.tokens import new_token

pytestmark = pytest.mark.fault

# Hosts of a group need not be sorted, and the leader need not be algo-1.
GROUPS = {"gpu": ["algo-3", "algo-1"], "data_group": ["algo-2"]}
SAY = (
    "import os, sys; print('host', os.environ['SM_CURRENT_HOST'], 'of',"
    " os.environ['SM_CURRENT_INSTANCE_GROUP'], 'got', sys.argv[1:], flush=True)"
)
WAIT = (
    "import os, pathlib, time; pathlib.Path(os.environ['HERE'], os.environ['STOKER_HOST'])"
    ".write_text(str(os.getpid())); time.sleep(300)"
)


class Hosts:
    """Starts launchers of hosts as SageMaker would, with one loopback port each."""

    def __init__(self, tmp_path, groups):
        self.tmp_path = tmp_path
        self.groups = groups
        self.launcher: tuple[str, ...] = ("-m", "stoker.launch")
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.pids: set[int] = set()
        taken: set[int] = set()
        self._ports = {h: free_ports(taken) for hosts in groups.values() for h in hosts}
        (tmp_path / "secret").write_text(new_token())

    def start(self, host, code, **environ):
        base = self.tmp_path / "hosts" / host
        (base / "input" / "config").mkdir(parents=True)
        config = base / "input" / "config"
        (config / "resourceconfig.json").write_text(resource_config(host, self.groups))
        (config / "hyperparameters.json").write_text('{"epochs": "2"}')
        leader = next(hosts[0] for name, hosts in self.groups.items() if name == "gpu")
        variables = {
            "PATH": os.environ["PATH"],
            "TRAINING_JOB_NAME": "job-1",
            "SAGEMAKER_BASE_DIR": str(base),
            "STOKER_BASE_DIR": str(base),
            "STOKER_TOKEN_FILE": str(self.tmp_path / "secret"),
            "STOKER_ADVERTISE": "127.0.0.1",
            "STOKER_PORT": str(self._ports[host]),
            "STOKER_COORDINATOR": f"127.0.0.1:{self._ports[leader]}",
            "STOKER_STRATEGY": "none",
            "STOKER_WORKERS": '{"data": 1}',
            "STOKER_FEED": '{"lease_seconds": 1.5, "start_deadline_seconds": 60}',
            "HERE": str(self.tmp_path),
            **WITHOUT_TORCH,
        }
        command = [sys.executable, *self.launcher, "--", "python", "-c", code]
        with (self.tmp_path / f"{host}.log").open("wb") as log:
            self.started[host] = subprocess.Popen(
                command, env=variables | environ, stdout=log, stderr=subprocess.STDOUT
            )

    def code(self, host):
        return self.started[host].wait(60)

    def log(self, host):
        return (self.tmp_path / f"{host}.log").read_text(errors="replace")

    def wait_for(self, name):
        path = self.tmp_path / name
        until(lambda: path.exists() and path.read_text() != "", what=f"{name} is written")
        self.pids |= marked_processes(self.tmp_path / "hosts")
        return int(path.read_text())

    def wait_for_log(self, host, words):
        until(lambda: words in self.log(host), what=f"{host} logs {words}")

    def output(self, host):
        return self.tmp_path / "hosts" / host / "output"


@contextlib.contextmanager
def ended(hosts):
    try:
        yield hosts
    finally:
        for process in hosts.started.values():
            process.kill()
            process.wait()
    folder = hosts.tmp_path
    until(lambda: not marked_processes(folder / "hosts"), what="all ends with the launchers")
    assert_nothing_left(folder, hosts.pids)


@pytest.fixture
def hosts(tmp_path):
    with ended(Hosts(tmp_path, GROUPS)) as hosts:
        yield hosts


# The second data host is started again when it fails, as a pod is.
TWO_DATA_HOSTS = {"gpu": ["algo-3", "algo-1"], "data_group": ["algo-2", "algo-4"]}
POD = {"STOKER_COMES_BACK": "1"}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    with ended(Hosts(tmp_path_factory.mktemp("played"), TWO_DATA_HOSTS)) as hosts:
        hosts.start("algo-4", SAY, **POD)
        for host in ("algo-2", "algo-1", "algo-3"):
            hosts.start(host, SAY)
        assert [hosts.code(host) for host in GROUPS["gpu"]] == [0, 0]
        yield hosts


def test_hosts_play_their_roles_and_all_end_well(played):
    assert [played.code(host) for host in ("algo-1", "algo-2", "algo-3")] == [0, 0, 0]
    assert "host algo-3 of gpu got ['--epochs', '2']" in played.log("algo-3")
    assert "host algo-1 of gpu got ['--epochs', '2']" in played.log("algo-1")
    assert "got" not in played.log("algo-2")
    record = json.loads((played.output("algo-3") / "data/stoker/training.json").read_text())
    assert record["job"] == {"platform": "sagemaker", "name": "job-1"}
    assert [host["host"] for host in record["hosts"]] == ["algo-3", "algo-1", "algo-2", "algo-4"]
    assert not (played.output("algo-1") / "data/stoker/training.json").exists()


def test_a_data_pod_ends_well_when_the_dnn_group_has_decided(played):
    assert played.code("algo-4") == 0


def test_the_leader_waits_for_followers_that_have_more_to_do(hosts):
    hosts.start("algo-3", SAY)
    hosts.start("algo-2", SAY)
    hosts.wait_for_log("algo-3", "command_ended")
    hosts.start("algo-1", "import time; time.sleep(2.5); " + SAY)
    assert [hosts.code(host) for host in ("algo-1", "algo-2", "algo-3")] == [0, 0, 0]
    assert "host algo-1 of gpu" in hosts.log("algo-1")


def test_a_failing_follower_ends_all_hosts_and_data_hosts_end_with_0(hosts):
    hosts.start("algo-3", WAIT)
    hosts.start("algo-2", WAIT)
    hosts.wait_for("algo-3")
    hosts.start("algo-1", "raise OSError('no disk')")
    assert [hosts.code(host) for host in ("algo-1", "algo-3", "algo-2")] == [1, 1, 0]
    for host in ("algo-1", "algo-3"):
        assert "OSError: no disk" in (hosts.output(host) / "failure").read_text()
    assert not (hosts.output("algo-2") / "failure").exists()


@dataclass(frozen=True, kw_only=True)
class Leaderless:
    """Holds hosts that have ended, whose leader was killed, and the processes that trained."""

    hosts: Hosts
    trainers: Sequence[int]


@pytest.fixture(scope="module")
def leaderless(tmp_path_factory):
    with ended(Hosts(tmp_path_factory.mktemp("leaderless"), TWO_DATA_HOSTS)) as hosts:
        hosts.start("algo-4", WAIT, **POD)
        hosts.start("algo-2", WAIT)
        for host in GROUPS["gpu"]:
            hosts.start(host, WAIT)
        trainers = [hosts.wait_for("algo-1"), hosts.wait_for("algo-3")]
        for host in TWO_DATA_HOSTS["data_group"]:
            hosts.wait_for_log(host, "run_joined")
        hosts.pids |= marked_processes(hosts.tmp_path / "hosts")
        hosts.started["algo-3"].kill()
        yield Leaderless(hosts=hosts, trainers=trainers)


def test_a_data_host_ends_with_0_when_the_leader_is_killed(leaderless):
    assert leaderless.hosts.code("algo-2") == 0
    assert leaderless.hosts.code("algo-1") == 4
    assert not any(map(is_running, leaderless.trainers))


def test_a_data_pod_whose_leader_fell_silent_is_started_again(leaderless):
    assert leaderless.hosts.code("algo-4") == 5
    assert "data_host_restarting" in leaderless.hosts.log("algo-4")


def test_a_data_host_that_nobody_ever_calls_ends_with_5(hosts):
    quick = '{"lease_seconds": 1.5, "start_deadline_seconds": 1}'
    hosts.start("algo-2", WAIT, STOKER_FEED=quick)
    assert hosts.code("algo-2") == 5
    assert "did not answer within 1 s" in hosts.log("algo-2")


def test_a_data_host_that_is_asked_to_stop_drains_and_tells_the_leader(hosts):
    for host in GROUPS["gpu"] + GROUPS["data_group"]:
        hosts.start(host, WAIT)
    hosts.wait_for("algo-1")
    hosts.wait_for_log("algo-2", "run_joined")
    hosts.started["algo-2"].send_signal(signal.SIGTERM)
    assert hosts.code("algo-2") == 143
    hosts.wait_for_log("algo-3", "host_left")
    assert "command_ended" not in hosts.log("algo-3")


def test_sigterm_to_all_hosts_stops_all(hosts):
    for host in GROUPS["gpu"] + GROUPS["data_group"]:
        hosts.start(host, WAIT)
    hosts.wait_for("algo-1")
    hosts.wait_for("algo-3")
    hosts.wait_for_log("algo-2", "run_joined")
    for process in hosts.started.values():
        process.send_signal(signal.SIGTERM)
    assert hosts.code("algo-3") == 143
    assert hosts.code("algo-1") == 143
    assert hosts.code("algo-2") in (0, 143)
    record = json.loads((hosts.output("algo-3") / "data/stoker/training.json").read_text())
    assert record["status"] == "stopped"


def test_a_data_pod_that_is_evicted_with_all_others_does_not_count_as_done(hosts):
    hosts.groups = {"gpu": ["algo-3"], "data_group": ["algo-2"]}
    hosts.start("algo-2", WAIT, **POD)
    hosts.start("algo-3", WAIT)
    hosts.wait_for("algo-3")
    hosts.wait_for_log("algo-2", "run_joined")
    hosts.started["algo-2"].send_signal(signal.SIGTERM)
    hosts.wait_for_log("algo-2", "signal_received")
    hosts.started["algo-3"].send_signal(signal.SIGTERM)
    assert hosts.code("algo-3") == 143
    assert hosts.code("algo-2") == 143


def test_a_data_group_without_a_token_is_a_usage_error(hosts):
    hosts.start("algo-3", SAY, STOKER_TOKEN_FILE="")
    assert hosts.code("algo-3") == 2
    assert "STOKER_TOKEN_FILE" in hosts.log("algo-3")
    assert "token" in (hosts.output("algo-3") / "failure").read_text()


def test_another_runs_host_is_refused(hosts):
    hosts.start("algo-3", WAIT)
    hosts.wait_for("algo-3")
    hosts.start("algo-2", WAIT, TRAINING_JOB_NAME="job-2")
    assert hosts.code("algo-2") == 5
    assert "this is run job-1, not job-2" in hosts.log("algo-2")


@pytest.fixture
def small_memory():
    for root in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        group = root / f"stoker-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        limits = [group / "memory.max", group / "memory.limit_in_bytes"]
        known = [limit for limit in limits if limit.exists()]
        if known:
            known[0].write_text(str(128 << 20))
            yield group
            group.rmdir()
            return
        group.rmdir()
    pytest.skip("no memory cgroup can be made here")


@pytest.mark.root
def test_a_kill_for_memory_is_named_with_the_limit(hosts, small_memory):
    hosts.groups = {"gpu": ["algo-3"]}
    into = f"open({str(small_memory / 'cgroup.procs')!r}, 'w').write('0')"
    code = f"import os; {into}; x = b'x' * (1 << 30)"
    # The launcher moves, too: its counter is that of its own group.
    (hosts.tmp_path / "moved.py").write_text(
        f"import os, runpy, sys; {into}; runpy.run_module('stoker.launch', run_name='__main__')"
    )
    hosts.launcher = (str(hosts.tmp_path / "moved.py"),)
    hosts.start("algo-3", code)
    assert hosts.code("algo-3") == 137
    assert "out of memory" in (hosts.output("algo-3") / "failure").read_text()
    assert "limit 0.1 GiB" in (hosts.output("algo-3") / "failure").read_text()


def test_the_launcher_itself_ends_what_its_command_left_behind(hosts):
    hosts.groups = {"gpu": ["algo-3"]}
    code = (
        "import os, pathlib, signal, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "        pathlib.Path(os.environ['HERE'], 'left').write_text(str(os.getpid()))\n"
        "        time.sleep(300)\n"
        "    os._exit(0)\n"
        "while not pathlib.Path(os.environ['HERE'], 'left').exists(): time.sleep(0.02)\n"
    )
    hosts.start("algo-3", code)
    assert hosts.code("algo-3") == 0
    assert not is_running(int((hosts.tmp_path / "left").read_text()))
