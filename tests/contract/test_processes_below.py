"""The processes below this one are found, and their CPU time counts."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from stoker.feed.resource_usage import LoaderUsage, _Span
from stoker.feed.workers.worker_handle import OwnChild
from stoker.host import processes
from stoker.host.counters import children_cpu_seconds
from support.cluster import wait_until


def test_all_below_are_found_the_children_of_other_threads_too(monkeypatch):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with ThreadPoolExecutor() as pool:
        words = [sys.executable, "-c", script]
        started = pool.submit(subprocess.Popen, words, stdin=subprocess.PIPE)
    with started.result() as child:
        below = psutil.Process(child.pid)
        wait_until(lambda: bool(below.children()), "it has a child")
        pids = {child.pid, below.children()[0].pid}
        assert pids <= set(processes.descendant_pids())
        monkeypatch.setattr(processes.os.path, "exists", lambda path: False)
        assert pids <= set(processes.descendant_pids())
        child.communicate(timeout=150)
    assert not pids & set(processes.descendant_pids())


def test_the_cpu_of_all_processes_below_counts():
    # Not one of multiprocessing's: a server that the script has started.
    burn = "import sys, time\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        try:
            own = LoaderUsage(is_elsewhere=True)
            assert _Span(steps=0, trainer_cpu=0.0, is_elsewhere=own.is_elsewhere).num_children >= 1
            assert _Span(steps=0, trainer_cpu=0.0, is_elsewhere=False).num_children == 0
        finally:
            child.kill()


def test_children_that_have_ended_are_not_counted_where_their_end_is_not_known():
    number = _Span(steps=0, trainer_cpu=0.0, is_elsewhere=False).num_children
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        OwnChild(process).join()
        assert process in multiprocessing.active_children()
        assert _Span(steps=0, trainer_cpu=0.0, is_elsewhere=False).num_children == number
    finally:
        signal.signal(signal.SIGCHLD, before)
        vars(multiprocessing.process)["_children"].discard(process)


BURN = """
import os, sys, time
cpus = [int(cpu) for cpu in sys.argv[1].split(",")]
os.sched_setaffinity(0, cpus)
while time.process_time() < 0.5:
    pass
print(flush=True)
input()
"""
STRAY = f"""
import json, os, subprocess, sys
from stoker.host.counters import StrayProcesses, children_cpu_seconds
os.sched_setaffinity(0, [int(sys.argv[1])])
stray = StrayProcesses()
assert stray.cpu_seconds().seconds == 0.0
words = [sys.executable, "-c", {BURN!r}, sys.argv[2]]
with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as helper:
    helper.stdout.readline()
    found = stray.cpu_seconds()
    print(json.dumps([found.seconds, found.inside, children_cpu_seconds()]))
    helper.communicate(b"end")
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no CPU affinity here")
@pytest.mark.parametrize(
    ("of_helper", "outside"), [([1], 1.0), ([0, 1], 0.5), ([0], 0.0)], ids=["left", "wider", "same"]
)
def test_a_helper_that_leaves_the_affinity_is_seen_to_use_other_vcpus(of_helper, outside):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("one vCPU, which no process can leave")
    theirs = ",".join(str(cpus[place]) for place in of_helper)
    words = [sys.executable, "-c", STRAY, str(cpus[0]), theirs]
    printed = subprocess.run(words, check=True, capture_output=True, timeout=150).stdout
    seconds, inside, children = json.loads(printed)
    assert children >= 0.5
    assert seconds == (pytest.approx(children, rel=0.2) if outside else 0.0)
    assert seconds - inside == pytest.approx(outside * seconds)


CHAIN = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.5: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
print(flush=True)
input()
"""


def test_a_helpers_children_count_when_they_run_and_not_when_the_helper_ends():
    before = children_cpu_seconds()
    words = [sys.executable, "-c", CHAIN]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as helper:
        helper.stdout.readline()
        running = children_cpu_seconds()
        helper.communicate(b"end", timeout=150)
    ended = children_cpu_seconds()
    assert running - before >= 0.5
    assert ended - running <= 0.25
