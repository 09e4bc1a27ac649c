"""A training that hangs is told with the stacks of all ranks, and ended as the workload says."""

import pytest
from test_launch import told

from stoker.records import FeedSettings
from support.local_job import LocalJob

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

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


def test_stacks_are_in_the_log_before_a_hanging_run_ends_as_failed(tmp_path):
    with LocalJob(tmp_path, HANGING, dnn=2, feed=FEED, watchdog_minutes=AT_ONCE) as job:
        training = job.training()
        assert training.status == "failed"
        assert "no step for" in training.failure
        log = job.log("algo-1")
        told = log.index(" no_progress ")
        assert "in waits_in_native_code" in log[:told]
        # All hosts end with 0: another code would make a platform restart the run.
        codes = {event.host: event.what for event in job.end().events if "exit code" in event.what}
        assert codes == dict.fromkeys(("algo-1", "algo-2"), "host ended with exit code 0")
