"""What makes a profile, a decision or a training another workload's, key by key."""

import os
from pathlib import Path

import pytest

from stoker.cli.workloads import latest_run_dir
from stoker.errors import UsageError
from stoker.records import Json, TodaysGroup, write_json
from stoker.records.workload import own_keys, refuse_foreign
from stoker.settings import workload_from

DOCUMENT: dict[str, Json] = {
    "name": "digits",
    "command": ["python", "train.py"],
    "cluster": {"dnn": {"instance_type": "local.c2"}},
}
# `stoker profile -- python train.py` on two cores.
BARE = workload_from({"name": "train", "command": ["python", "train.py"]})
BARE_KEYS = BARE.profile_keys(today=TodaysGroup(instance_type="local.c2"))


def changed(**keys):
    return workload_from({**DOCUMENT, **keys})


def refused(workload, other):
    try:
        refuse_foreign(
            "profile", keys=workload.profile_keys(), digest=workload.digest(), workload=other
        )
    except UsageError as err:
        return err.what
    return ""


@pytest.mark.parametrize(
    "keys",
    [
        {"name": "numbers"},
        {"gate": [{"metric": "accuracy", "min": 0.9}]},
        {"constraints": {"max_usd_per_hour": 3.0}, "training": {"steps": 9}},
        {"feed": {"credits": 4, "port": 7700}},
        {"hyperparameters": {"epochs": 3}},
        {"channels": {"train": {"uri": "data"}}},
        {"image": "registry/other:2"},
        {"cluster": {"dnn": {"instance_type": "local.c2", "processes_per_host": 1}}},
    ],
)
def test_what_does_not_change_a_step_voids_no_profile(keys):
    assert refused(changed(), changed(**keys)) == ""


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"command": ["python", "b.py"]}, "command: python train.py -> python b.py"),
        ({"strategy": "torchrun"}, "strategy: auto -> torchrun"),
        (
            {"cluster": {"dnn": {"instance_type": "local.c1", "count": 2}}},
            "cluster.dnn.instance_type: local.c2 -> local.c1; cluster.dnn.count: 1 -> 2",
        ),
        (
            {"cluster": {"dnn": {"instance_type": "local.c2", "processes_per_host": 2}}},
            "cluster.dnn.processes_per_host: 1 -> 2",
        ),
    ],
)
def test_what_changes_a_step_is_named_with_both_values(keys, words):
    found = refused(changed(), changed(**keys))
    assert found == f"the profile was made for another workload: {words}"


def test_a_profile_of_the_same_command_serves_with_and_without_a_cluster_and_arguments():
    for workload in (changed(), workload_from({**DOCUMENT, "cluster": None})):
        refuse_foreign("profile", keys=BARE_KEYS, digest=BARE.digest(), workload=workload)
    keys = {**changed().profile_keys(), "command": "python train.py --epochs 3"}
    refuse_foreign("profile", keys=keys, digest=changed().digest(), workload=changed())


def test_a_profile_taken_for_other_hosts_is_not_held_to_its_own():
    cloud = changed(cluster={"dnn": {"instance_type": "ml.g5.2xlarge"}})
    with pytest.raises(UsageError, match=r"instance_type: local\.c2 -> g5\.2xlarge"):
        refuse_foreign("profile", keys=BARE_KEYS, digest=BARE.digest(), workload=cloud)
    keys = own_keys(BARE_KEYS, is_elsewhere=True)
    refuse_foreign("profile", keys=keys, digest=BARE.digest(), workload=cloud)


def run_of(workload, *, at):
    folder = Path("runs") / f"{workload.name}-{at}"
    folder.mkdir(parents=True)
    write_json(folder / "workload.json", workload)
    (folder / "profile.json").touch()
    os.utime(folder / "workload.json", (at, at))
    return folder


def test_from_takes_the_newest_run_whose_keys_are_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(changed(), at=1)
    newest = run_of(changed(gate=[{"metric": "m", "min": 0.5}]), at=2)
    run_of(changed(command=["python", "b.py"]), at=3)
    renamed = run_of(changed(name="numbers"), at=4)
    assert latest_run_dir(changed(), needs=["profile.json"]) == newest
    assert latest_run_dir(changed(name="new"), needs=["profile.json"]) == renamed


def test_from_names_what_differs_from_the_last_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_of(changed(), at=1)
    with pytest.raises(UsageError, match=r"command: python train\.py -> python b\.py") as caught:
        latest_run_dir(changed(command=["python", "b.py"]), needs=["profile.json"])
    assert "digits-1" in caught.value.where
    with pytest.raises(UsageError, match=r"no earlier run of this workload has decision\.json"):
        latest_run_dir(changed(), needs=["decision.json"])
