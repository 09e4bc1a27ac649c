"""A run that has spent constraints.max_usd is ended by its leader, and may save before."""

from dataclasses import replace

import pytest

from stoker.records.outcome import outcome_of
from stoker.records.training import Budget
from support.local_job import LocalJob

pytestmark = pytest.mark.fault

# Each host saves when it is told to end, and then ends with an error, as ranks without a peer do.
SAVES = """
import os, pathlib, signal, sys, time
host = os.environ["STOKER_HOST"]
def save(*_):
    pathlib.Path(os.environ["STOKER_TEST_DIR"], f"saved-{host}").write_text("x")
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
pathlib.Path(os.environ["STOKER_TEST_DIR"], f"ready-{host}").write_text("x")
time.sleep(300)
"""


def test_a_run_over_its_budget_saves_on_all_dnn_hosts_and_is_not_restarted(tmp_path):
    job = LocalJob(tmp_path, SAVES, dnn=2, data=1, strategy="none", has_torch=False)
    # $3 a second: 10 s, in which the script starts.
    budget = Budget(usd_per_hour={"dnn": 3600.0, "data": 3600.0}, max_usd=30.0, predicted_usd=9.0)
    job.spec = replace(job.spec, settings=replace(job.spec.settings, budget=budget))
    with job:
        trainers = [host.name for host in job.request.hosts if host.group == "dnn"]
        assert [job.wait_for_file(f"ready-{name}") for name in trainers] == ["x", "x"]
        end = job.end()
        # Another code than 0 of any dnn host would make a platform restart the run.
        assert (end.status, end.exit_code) == ("succeeded", 0)
        assert [job.wait_for_file(f"saved-{name}") for name in trainers] == ["x", "x"]
        training = job.training()
        assert training.status == "failed"
        assert training.failure.startswith("max_usd reached: $")
        assert "constraints.max_usd is $30.00" in training.failure
        assert outcome_of(training).exit_code == 6
        # Nothing is billed here: what the leader counted.
        assert training.spent_usd >= 30
        by_group = {each.group: each.usd for each in training.spending}
        assert by_group["dnn"] == pytest.approx(2 * by_group["data"])
        log = job.log(job.leader)
        assert log.count(" budget_nearly_spent ") == log.count(" budget_spent ") == 1
