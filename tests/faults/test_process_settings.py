"""A dataset finds the script's settings wherever its batches are made, as in torch's workers."""

import importlib.util
import re

import pytest

from support.cluster import SUPPORT, Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "settings_script.py"
# The keys of the script's table.
TABLE = re.findall(r'^    "([\w ]+)": \(', (SUPPORT / SCRIPT).read_text(), re.MULTILINE)
LIBRARIES = {"pandas": "pandas", "pyarrow": "pyarrow", "cv2": "cv2", "sklearn": "sklearn"}
NAMES = [
    name
    for name in TABLE
    if name not in LIBRARIES or importlib.util.find_spec(LIBRARIES[name]) is not None
]
# Other settings cannot be seen with these.
ALONE = ("inference", "autocast")
TOGETHER = [name for name in NAMES if name not in ALONE]
SETS = [TOGETHER, *([name] for name in ALONE)]


def found_by(lines):
    return {name: value for line in lines for name, value in line["seen"].items()}


def in_torchs_workers(names):
    return found_by(run_script({"names": names, "torch": True}, script=SCRIPT).finish())


@pytest.mark.parametrize("names", SETS, ids=lambda names: names[0])
def test_data_hosts_have_the_settings_of_torchs_forked_workers(names):
    wanted = in_torchs_workers(names)
    with Cluster(agents=2, workers=1) as cluster:
        cluster.wait_for_agents()
        lines = cluster.train(script=SCRIPT, workers=0, names=names).finish()
    assert [line["index"] for line in lines] == list(range(4))
    assert {line["at"] for line in lines} == {"there"}
    for line in lines:
        assert line["seen"] == wanted


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_local_workers_of_every_start_method_have_them(context):
    wanted = in_torchs_workers(TOGETHER)
    with Cluster(agents=1, workers=0) as cluster:
        given = {"names": TOGETHER, "context": context, "local": 2}
        lines = cluster.train(script=SCRIPT, workers=2, **given).finish()
    assert len(lines) == 4
    for line in lines:
        assert line["seen"] == wanted


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_worker_that_takes_a_killed_ones_place_has_them_in_every_epoch(tmp_path, context):
    # Cheap ones of each table: what needs no library but torch and NumPy.
    names = ["csv", "decimal", "zone", "logging", "warnings", "dtype", "safe", "values"]
    wanted = in_torchs_workers(names)
    with Cluster(agents=1, workers=1) as cluster:
        cluster.wait_for_agents()
        given = {"names": names, "persistent": True, "epochs": 2, "context": context}
        given["kills"] = str(tmp_path / "killed")
        lines = cluster.train(script=SCRIPT, workers=0, **given).finish()
        loaded = cluster.log_of(0).read_text().count("spec_received")
    assert (tmp_path / "killed").exists()
    assert [line["index"] for line in lines] == [*range(4), *range(4)]
    assert all(line["seen"] == wanted for line in lines)
    assert loaded == 1


def test_ranks_that_log_and_print_differently_share_a_dataset():
    of_ranks = (["csv", "logging", "warnings", "numpy prints", "torch prints"], ["csv"])
    with Cluster(agents=1, workers=1) as cluster:
        cluster.wait_for_agents()
        trainers = [
            cluster.train(script=SCRIPT, rank=rank, world=2, workers=0, names=["csv"], sets=sets)
            for rank, sets in enumerate(of_ranks)
        ]
        lines = [line for trainer in trainers for line in trainer.finish()]
        held = cluster.log_of(0).read_text().count("spec_received")
    assert [line["seen"]["csv"] for line in lines] == [1 << 30] * 8
    assert held == 1


@pytest.mark.parametrize("own", [False, True], ids=["torch's class", "stoker's class"])
def test_a_script_whose_warnings_are_errors_is_not_ended_by_workers_that_nobody_starts(own):
    with Cluster(agents=1, workers=1) as cluster:
        cluster.wait_for_agents()
        lines = cluster.train(script="warned_script.py", workers=0, own=own).finish()
    # The dataset's own warnings are errors there, too.
    assert lines == [{"index": n, "found": "error"} for n in range(4)]


def test_what_a_data_host_has_not_is_named_once():
    with Cluster(agents=1, workers=1) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(script=SCRIPT, workers=0, names=["unsent"], epochs=3)
        assert len(trainer.finish()) == 12
    (line,) = (line for line in trainer.errors.splitlines() if "settings_not_sent" in line)
    assert "logging.FileHandler" in line
