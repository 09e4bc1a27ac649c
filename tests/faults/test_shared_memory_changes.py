"""What a script changes in shared memory reaches the makers of its batches, as under torch."""

import json

import pytest

from stoker.logs import parse_line
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

CASES = ["tensor", "module", "value", "raw", "numpy", "segment", "stream of tensor"]
PATHS = {"module": "dataset.part._parameters['weight']"}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2) as running:
        running.wait_for_agents()
        yield running


def trained(cluster, **given):
    trainer = cluster.train(script="shared_script.py", **given)
    found = trainer.finish()
    assert found == run_script(given, script="shared_script.py").finish()
    return found, [line for line in trainer.errors.splitlines() if "loader_made_here" in line]


@pytest.mark.parametrize(
    "options",
    [
        {"cases": CASES, "loader": "torch", "persistent": True},
        {"cases": CASES, "loader": "stoker", "persistent": False},
        {"cases": CASES[:3:2], "num_workers": 1, "start": "spawn"},
    ],
    ids=["persistent", "each epoch", "spawn"],
)
def test_changes_in_shared_memory_are_seen(cluster, options):
    found, said = trained(cluster, **options)
    last = [sorted(line["batches"]) for line in found if line["epoch"] == 2]
    assert last == [[float(200 + index) for index in range(16)]] * len(options["cases"])
    # Other loaders of that line are made here because they are short, and say nothing of their own.
    assert said
    paths = [PATHS.get(case, "dataset.part") for case in options["cases"]]
    for line in said:
        event = parse_line(line)
        assert event is not None
        text = event.values["text"]
        assert any(text.startswith(f"{path} is ") for path in paths), text
        assert "torch's local workers make the batches of that loader" in text


@pytest.mark.parametrize("loader", ["torch", "stoker"])
def test_without_workers_changes_between_two_batches_are_seen(cluster, loader):
    found, said = trained(cluster, cases=CASES, loader=loader, num_workers=0, within=True)
    assert found[0]["batches"][4:8] == [4.0, 5.0, 6.0, 7.0]
    assert found[0]["batches"][8:12] == [108.0, 109.0, 110.0, 111.0]
    assert len(said) >= 2
    assert all("the trainer itself makes" in line for line in said)


def test_shared_memory_that_is_only_read_may_be_copied(cluster):
    feed = {"STOKER_FEED": json.dumps(cluster.settings | {"shared_memory": "copy"})}
    trainer = cluster.train(script="shared_script.py", cases=["tensor"], persistent=False, env=feed)
    last = trainer.finish()[-1]["batches"]
    assert last == [float(200 + index) for index in range(16)]
    assert "loader_made_here" not in trainer.errors
    assert "agent_ready" in trainer.errors
