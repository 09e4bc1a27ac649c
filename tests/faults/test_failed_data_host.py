"""A data host that fails before it is a member: the training's failure has its reason."""

import json
import sys

import pytest

from stoker.launch.trainer_host import with_failed_hosts
from support.namespaces import Hosts

pytestmark = pytest.mark.fault

SCRIPT = """
from stoker import DataLoader
for batch in DataLoader(range(64), batch_size=2, num_workers=0):
    pass
"""
NO_WORKER = "FeedLostError: no data worker came within 2 s: 1 data hosts expected, none seen"


@pytest.mark.root
def test_a_data_host_with_too_few_files_is_named_in_the_trainings_failure(tmp_path):
    with Hosts(tmp_path, {"data_group": ["algo-1"], "gpu": ["algo-2"]}) as hosts:
        launch = f"exec {sys.executable} -m stoker.cli launch -- python -c '{SCRIPT}'"
        feed = json.dumps({"start_deadline_seconds": 20.0, "lease_seconds": 5.0})
        hosts.start("algo-1", "sh", "-c", f"ulimit -n 40; {launch}", STOKER_FEED=feed)
        hosts.start("algo-2", "sh", "-c", launch, STOKER_FEED=feed)
        hosts.wait_for_log("algo-2", "training_ended")
        failure = (hosts.ml("algo-2") / "output" / "failure").read_text()
    assert "no data worker came" in failure
    assert "data hosts: algo-1 failed: at most 40 files may be open" in failure


@pytest.mark.parametrize(
    ("failure", "gone", "words"),
    [
        (NO_WORKER, {"d1": "failed: port 7600 cannot be bound"}, "(data hosts: d1 failed: port"),
        (
            f"{NO_WORKER}\nmore",
            {"d1": "failed: few files\nwhere: x"},
            "d1 failed: few files)\nmore",
        ),
        (NO_WORKER, {"d1": "12 batches sent"}, ""),
        ("ValueError: shapes differ", {"d1": "failed: port 7600 cannot be bound"}, ""),
        (NO_WORKER, {}, ""),
    ],
)
def test_only_failures_of_the_feed_get_the_reasons_of_hosts_that_failed(failure, gone, words):
    found = with_failed_hosts(failure, gone)
    assert words in found
    assert (found == failure) == (not words)
