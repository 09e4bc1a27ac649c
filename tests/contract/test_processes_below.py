"""The processes below this one are found, and their CPU time counts."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

from stoker.feed.resource_usage import LoaderUsage, _Span
from stoker.host import processes
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
        child.communicate(timeout=60)
    assert not pids & set(processes.descendant_pids())


def test_the_cpu_of_all_processes_below_counts():
    # Not one of multiprocessing's: a server that the script has started.
    burn = "import sys, time\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        try:
            own = LoaderUsage(is_elsewhere=True)
            assert _Span(own).num_children >= 1
            assert _Span(LoaderUsage()).num_children == 0
        finally:
            child.kill()
