"""A dataset that asks for the environment gets the script's, wherever its batches are made."""

import json

import pytest

from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "environment_script.py"
STARTED_WITH = {"CHANGED_BY_SCRIPT": "before", "DELETED_BY_SCRIPT": "before"}
OF_SCRIPT = {"SET_BY_SCRIPT": "ä", "CHANGED_BY_SCRIPT": "after", "DELETED_BY_SCRIPT": None}


def test_data_hosts_have_what_the_script_changed_and_hold_the_dataset_once():
    with Cluster(agents=1, workers=2) as cluster:
        cluster.wait_for_agents()
        trainers = [
            cluster.train(script=SCRIPT, rank=rank, world=2, local=0, workers=0, env=STARTED_WITH)
            for rank in range(2)
        ]
        lines = [line for trainer in trainers for line in trainer.finish()]
        held = cluster.log_of(0).read_text().count("spec_received")
    assert len(lines) == 16
    for line in lines:
        assert line["at"] == "there"
        assert {name: line[name] for name in OF_SCRIPT} == OF_SCRIPT
        assert (line["MY_TOKEN"], line["LOCAL_RANK"]) == (None, None)
        given = json.loads(line["argv"][0])
        assert given["local"] == 0
    # Though the ranks' arguments are not the same, and neither is LOCAL_RANK.
    assert held == 1


@pytest.mark.parametrize("local", [0, 2])
def test_local_workers_find_the_same(local):
    lines = run_script({"local": local}, script=SCRIPT, env=STARTED_WITH).finish()
    assert [line["index"] for line in lines] == list(range(8))
    for line in lines:
        assert {name: line[name] for name in OF_SCRIPT} == OF_SCRIPT
