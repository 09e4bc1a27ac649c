"""`stoker launch` on hosts that SageMaker describes: when one of them ends, how do the others?"""

import contextlib
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from support.forked_tree import COLD
from support.namespaces import Hosts

pytestmark = [pytest.mark.root, pytest.mark.fault]

# Hosts of a group need not be sorted, and the leader need not be algo-1.
GROUPS = {"gpu": ["algo-3", "algo-1"], "data_group": ["algo-2"]}
SMALL = {"gpu": ["algo-3"], "data_group": ["algo-2"]}
SAY = "print('has trained', flush=True)"
WAIT = "import time; print('trains', flush=True); time.sleep(300)"
PATIENT = '{"lease_seconds": 60, "start_deadline_seconds": 1800}'
FED = """
import torch
from stoker import DataLoader
for batch in DataLoader(torch.arange(8), batch_size=2):
    print(batch, flush=True)
"""
# A host that is started again when it fails, as a pod is.
POD = {"STOKER_COMES_BACK": "1"}


def start(hosts, host, code, *, launcher=("-m", "stoker.launch"), **environ):
    command = (sys.executable, *launcher, "--", "python", "-c", code)
    hosts.start(host, *command, **{"STOKER_STRATEGY": "none", **environ})


def test_the_leader_waits_for_followers_that_have_more_to_do(tmp_path):
    with Hosts(tmp_path, GROUPS) as hosts:
        start(hosts, "algo-3", SAY)
        start(hosts, "algo-2", SAY)
        hosts.wait_for_log("algo-3", "command_ended")
        start(hosts, "algo-1", "import time; time.sleep(2.5); " + SAY)
        assert set(hosts.codes().values()) == {0}
        assert "has trained" in hosts.log("algo-1")


def test_a_killed_leader_ends_all_hosts_and_only_a_data_pod_is_started_again(tmp_path):
    groups = {**GROUPS, "data_group": ["algo-2", "algo-4"]}
    with Hosts(tmp_path, groups) as hosts:
        for host in hosts.names:
            start(hosts, host, WAIT, **(POD if host == "algo-4" else {}))
        hosts.wait_for_log("algo-1", "trains")
        for host in groups["data_group"]:
            hosts.wait_for_log(host, "run_joined")
        hosts.started["algo-3"].kill()
        assert [hosts.code(host) for host in ("algo-1", "algo-2", "algo-4")] == [75, 0, 5]
        assert "data_host_restarting" in hosts.log("algo-4")


def test_a_data_host_that_nobody_ever_calls_ends_with_5(tmp_path):
    quick = '{"lease_seconds": 1.5, "start_deadline_seconds": 1}'
    with Hosts(tmp_path, GROUPS) as hosts:
        start(hosts, "algo-2", WAIT, STOKER_FEED=quick)
        assert hosts.code("algo-2") == 5
        assert "did not answer within 1 s" in hosts.log("algo-2")


def test_a_data_pod_that_is_evicted_with_all_others_does_not_count_as_done(tmp_path):
    with Hosts(tmp_path, SMALL) as hosts:
        start(hosts, "algo-2", WAIT, **POD)
        start(hosts, "algo-3", WAIT)
        hosts.wait_for_log("algo-3", "trains")
        hosts.wait_for_log("algo-2", "run_joined")
        hosts.first_process("algo-2").send_signal(signal.SIGTERM)
        hosts.wait_for_log("algo-2", "signal_received")
        hosts.first_process("algo-3").send_signal(signal.SIGTERM)
        assert hosts.codes() == {"algo-2": 143, "algo-3": 143}


def test_a_data_group_without_a_token_is_a_usage_error(tmp_path):
    with Hosts(tmp_path, SMALL) as hosts:
        start(hosts, "algo-3", SAY, STOKER_TOKEN_FILE="")
        assert hosts.code("algo-3") == 2
        assert "STOKER_TOKEN_FILE" in hosts.log("algo-3")
        assert "token" in (hosts.ml("algo-3") / "output" / "failure").read_text()


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


def test_a_kill_for_memory_is_named_with_the_limit(tmp_path, small_memory):
    into = f"open({str(small_memory / 'cgroup.procs')!r}, 'w').write('0')"
    code = f"import os; {into}; x = b'x' * (1 << 30)"
    # The launcher moves, too: its counter is that of its own group.
    moved = tmp_path / "moved.py"
    moved.write_text(
        f"import os, runpy, sys; {into}; runpy.run_module('stoker.launch', run_name='__main__')"
    )
    with Hosts(tmp_path, {"gpu": ["algo-3"]}) as hosts:
        # What a fork has of its parent's memory is not counted.
        start(hosts, "algo-3", code, launcher=(str(moved),), **COLD)
        assert hosts.code("algo-3") == 137
        failure = (hosts.ml("algo-3") / "output" / "failure").read_text()
    assert "out of memory" in failure
    assert "limit 134 MB" in failure


def test_a_data_host_with_another_runs_token_is_told_at_once(tmp_path):
    with Hosts(tmp_path, SMALL) as hosts:
        other = hosts.ml("algo-2") / "other"
        other.write_text("ab" * 32)
        start(hosts, "algo-3", WAIT)
        hosts.wait_for_log("algo-3", "trains")
        start(hosts, "algo-2", WAIT, STOKER_TOKEN_FILE="/opt/ml/other", STOKER_FEED=PATIENT)
        # Not after PATIENT's deadline of half an hour.
        assert hosts.code("algo-2") == 5
        assert "algo-3 refuses the key of this host" in hosts.log("algo-2")
        assert 1 <= hosts.log("algo-3").count("connections_rejected") <= 3


def test_what_accepts_connections_before_a_leader_is_there_refuses_no_key(tmp_path):
    def hang_up():
        with contextlib.suppress(OSError):
            while True:
                proxy.accept()[0].close()

    with Hosts(tmp_path, SMALL) as hosts, socket.create_server(("127.0.2.1", 0)) as proxy:
        threading.Thread(target=hang_up, daemon=True).start()
        quick = '{"lease_seconds": 3, "start_deadline_seconds": 45}'
        address = f"algo-3:{proxy.getsockname()[1]}"
        start(hosts, "algo-2", WAIT, STOKER_COORDINATOR=address, STOKER_FEED=quick)
        assert hosts.code("algo-2") == 5
        assert "did not answer within 45 s" in hosts.log("algo-2")


@pytest.mark.parametrize("files", [24, 40])
def test_a_data_host_without_file_descriptors_ends_with_words_and_tells_the_trainer(
    tmp_path, files
):
    with Hosts(tmp_path, SMALL) as hosts:
        start(hosts, "algo-3", FED, STOKER_FEED=PATIENT, PYTHONPATH="")
        command = ("sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", sys.executable, "-m")
        hosts.start("algo-2", *command, "stoker.launch", "--", "true", STOKER_FEED=PATIENT)
        assert hosts.code("algo-2") == 5
        assert "ulimit -n" in hosts.log("algo-2")
        # Not after PATIENT's deadline of half an hour.
        assert hosts.code("algo-3") == 5
        assert f"reason='failed: at most {files} files may be open" in hosts.log("algo-3")
