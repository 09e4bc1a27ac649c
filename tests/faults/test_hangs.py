"""A training that hangs is told with the stacks of all ranks, and ended as the workload says."""

import pytest
from test_launch import TELL, told

from stoker.errors import EXIT_PEER_LOST
from stoker.records import FeedSettings, WatchdogSettings
from support.local_job import LocalJob

pytestmark = pytest.mark.fault

AT_ONCE = 0.03
# None of them is lost where a busy machine stands still for seconds.
FEED = FeedSettings(lease_seconds=20.0, start_deadline_seconds=40.0)

# Steps of a loader that stoker times, until batch 4 of rank HANGS. Then native code waits with the
# GIL held, as a collective of C code may.
HANGING = told("""
import ctypes, torch
from stoker import DataLoader
def waits_in_native_code():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
def waits_for_its_peer():
    wait_for("never")
if __name__ == "__main__":
    rank = os.environ.get("RANK", "0")
    for number, _ in enumerate(DataLoader(list(range(64)), batch_size=2)):
        time.sleep(0.1)
        if number == 16:
            tell(f"hangs-{rank}")
            waits_in_native_code() if rank == "0" else waits_for_its_peer()
""")


def watched(then, minutes=AT_ONCE):
    return WatchdogSettings(no_progress_minutes=minutes, then=then)


def test_stacks_of_all_ranks_are_in_the_log_before_a_hanging_run_is_stopped(tmp_path):
    with LocalJob(tmp_path, HANGING, dnn=2, feed=FEED, watchdog=watched("stop")) as job:
        training = job.training()
        assert training.status == "failed"
        assert "no step for" in training.failure
        assert "watchdog.then: stop" in training.failure
        log = job.log("algo-1")
        told = log.index(" no_progress ")
        assert "in waits_in_native_code" in log[:told]
        assert "in waits_for_its_peer" in job.log("algo-2")
        assert "stacks_written" in job.log("algo-2")
        # All hosts end with 0: another code would make a platform restart the run.
        codes = {event.host: event.what for event in job.end().events if "exit code" in event.what}
        assert codes == dict.fromkeys(("algo-1", "algo-2"), "host ended with exit code 0")


def test_a_hanging_run_that_may_restart_ends_with_the_code_for_it(tmp_path):
    with LocalJob(tmp_path, HANGING, feed=FEED, watchdog=watched("restart")) as job:
        end = job.end()
        assert end.status == "failed"
        told = f"host ended with exit code {EXIT_PEER_LOST}"
        assert ("algo-1", told) in [(event.host, event.what) for event in end.events]


STUCK = """
import threading, time, torch
from stoker import DataLoader
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return self.never_returns() if index == 40 else index
    def never_returns(self):
        threading.Event().wait()
if __name__ == "__main__":
    for _ in DataLoader(Numbers(), batch_size=2, num_workers=1):
        time.sleep(0.1)
"""


def test_the_stack_of_a_data_worker_shows_where_its_sample_hangs(tmp_path):
    # A worker is told from its rank by their command lines.
    cold = {"watchdog": watched("restart"), "is_cold": True}
    with LocalJob(tmp_path, STUCK, feed=FEED, **cold) as job:
        assert job.end().status == "failed"
        assert "in never_returns" in job.log("algo-1")


PAUSING = told("""
import signal, torch
from stoker import DataLoader
def own(*_):
    tell("handled")
if __name__ == "__main__":
    signal.signal(signal.SIGURG, own)
    for number, _ in enumerate(DataLoader(list(range(64)), batch_size=2)):
        time.sleep(0.1)
        if number == 16:
            wait_for("go")
    assert signal.getsignal(signal.SIGURG) is own
""")


def test_a_run_that_was_only_warned_of_goes_on_with_its_own_handlers(tmp_path):
    with LocalJob(tmp_path, PAUSING, feed=FEED, watchdog=watched("warn")) as job:
        job.wait_for_log("algo-1", " no_progress ")
        (tmp_path / "go").touch()
        assert job.end().status == "succeeded"
        log = job.log("algo-1")
        assert log.count(" no_progress ") == 1
        assert log.count(" progress_resumed ") == 1


def test_a_script_without_steps_is_told_once_that_nothing_is_watched(tmp_path):
    script = TELL + "wait_for('go')"
    feed = FeedSettings(lease_seconds=20.0, start_deadline_seconds=3.0)
    with LocalJob(tmp_path, script, feed=feed, watchdog=watched("stop"), has_torch=False) as job:
        job.wait_for_log("algo-1", " watchdog_idle ")
        (tmp_path / "go").touch()
        assert job.end().status == "succeeded"
        assert job.log("algo-1").count(" watchdog_idle ") == 1
