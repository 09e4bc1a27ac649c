"""Data hosts have what the script defines under `__main__`, as its own workers would."""

import functools
import os
import tempfile
from pathlib import Path

import pytest

import stoker
from support import own_classes_script
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "own_classes_script.py"
STARTUP = Path(stoker.__file__).parent / "startup"
FED = {
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "PYTHONPATH": str(STARTUP),
    "STOKER_REPLACE_DATALOADER": "auto",
}
DATASETS = [kind.__name__ for kind in own_classes_script.DATASETS]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=1, workers=1) as made:
        made.wait_for_agents()
        yield made


def by_dataset(lines):
    found = {}
    for line in lines:
        facts = {key: value for key, value in line.items() if key not in ("dataset", "rank")}
        found.setdefault((line["dataset"], line["rank"]), []).append(facts)
    return found


def asked_of(folder, ranks):
    """Returns the script's argument; the word `spawn` has forked what it spawns, 20 processes."""
    given = {"folder": folder, "num_workers": 1, "ranks": ranks}
    return given | {"start": "spawn"} if ranks else given


@functools.cache
def plain(ranks):
    with tempfile.TemporaryDirectory() as folder:
        given = asked_of(folder, ranks)
        return by_dataset(run_script(given, script=SCRIPT, env={"PYTHONPATH": ""}).finish())


@pytest.fixture(scope="module", params=[0, 2], ids=["script", "spawned ranks"])
def fed(request, cluster, tmp_path_factory):
    folder, ranks = str(tmp_path_factory.mktemp("files")), request.param
    given = asked_of(folder, ranks)
    trainer = cluster.train(script=SCRIPT, env=FED, workers=0, **given)
    return by_dataset(trainer.finish()), plain(ranks)


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_data_host_has_what_the_script_defines(fed, dataset):
    found, expected = fed
    ranks = sorted(rank for name, rank in expected if name == dataset)
    if not ranks:
        pytest.skip("its library is not here: make test-libraries")
    for rank in ranks:
        assert found[dataset, rank] == expected[dataset, rank]
