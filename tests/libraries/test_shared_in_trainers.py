"""What a dataset shares in memory reaches its workers in the trainers of three libraries."""

import importlib.util
import os
from pathlib import Path

import pytest

import stoker
from stoker.logs import parse_line
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.library, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).parent / "scripts" / "shared_in_trainers.py")
STARTUP = Path(stoker.__file__).parent / "startup"
LAUNCHED = {
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "PYTHONPATH": str(STARTUP),
    "STOKER_REPLACE_DATALOADER": "auto",
}
QUIET = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# What is named, by what a dataset shares.
KINDS = {
    "tensor": "dataset.tensor",
    "value": "dataset.value",
    "array": "dataset.array",
    "manager": "dataset.table",
    "queue": "dataset.queue",
}


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=1, feed={"start_deadline_seconds": 120.0}) as made:
        made.wait_for_agents()
        yield made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trainer", ["lightning", "transformers", "accelerate"])
def test_what_is_shared_is_what_the_loop_wrote(cluster, trainer, kind):
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"no {trainer} here: make test-libraries")
    given = {"trainer": trainer, "kind": kind}
    expected = run_script(given, script=SCRIPT, env=QUIET).finish()
    # Each epoch has the level that was set before it.
    levels = [line["values"][0] // 1000 for line in expected]
    assert levels == [0.0] * 4 + [1.0] * 4 + [2.0] * 4
    fed = cluster.train(script=SCRIPT, workers=0, env=QUIET | LAUNCHED, **given)
    assert fed.finish() == expected
    events = filter(None, map(parse_line, fed.errors.splitlines()))
    (said,) = [event.values["text"] for event in events if event.event == "loader_made_here"]
    assert said.startswith(f"{KINDS[kind]} is")
