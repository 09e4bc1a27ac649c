"""`stoker launch` on hosts that SageMaker describes: when one of them ends, how do the others?"""

import os
import signal
import sys
from pathlib import Path

import pytest

from support.namespaces import Hosts

pytestmark = [pytest.mark.root, pytest.mark.fault]

# Hosts of a group need not be sorted, and the leader need not be algo-1.
GROUPS = {"gpu": ["algo-3", "algo-1"], "data_group": ["algo-2"]}
SMALL = {"gpu": ["algo-3"], "data_group": ["algo-2"]}
WAIT = "import time; print('trains', flush=True); time.sleep(300)"
PATIENT = '{"lease_seconds": 60, "start_deadline_seconds": 1800}'
# A host that is started again when it fails, as a pod is.
POD = {"RUN_COMES_BACK": "true"}


def start(hosts, host, code, *, launcher=("-m", "stoker.cli", "launch"), **environ):
    command = (sys.executable, *launcher, "--", "python", "-c", code)
    usual = {"RUN_STRATEGY": "none", "RUN_FEED": '{"lease_seconds": 5}'}
    hosts.start(host, *command, **{**usual, **environ})


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
        f"import os, runpy, sys; {into}; runpy.run_module('stoker.cli', run_name='__main__')"
    )
    with Hosts(tmp_path, {"gpu": ["algo-3"]}) as hosts:
        start(hosts, "algo-3", code, launcher=(str(moved), "launch"))
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
        # In a usual run it gives up after 20 s.
        quick = "import runpy, stoker.launch.host_client as it; it.REFUSED_SECONDS = 1.0;"
        launcher = ("-c", f"{quick} runpy.run_module('stoker.cli', run_name='__main__')", "launch")
        token = "/opt/ml/other"
        start(hosts, "algo-2", WAIT, launcher=launcher, RUN_TOKEN=token, RUN_FEED=PATIENT)
        # Not after PATIENT's deadline of half an hour.
        assert hosts.code("algo-2") == 5
        assert "refuses this host: the leader has another run" in hosts.log("algo-2")
        assert 1 <= hosts.log("algo-3").count("connections_rejected") <= 3
