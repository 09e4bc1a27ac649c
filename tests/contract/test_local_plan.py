"""Checks what the local platform plans (hosts and their cores), and what it refuses."""

import dataclasses
from pathlib import Path

import pytest

from stoker.errors import PlatformError, UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.local import SHARED_CORES, LocalPlatform, make_job_folder
from stoker.records import Channel, Group
from support.builders import group

CORES = (0, 1, 2, 3)


def job(*groups: Group, **changes: object) -> JobSpec:
    spec = JobSpec(
        name="mnist-1",
        command=("python", "train.py"),
        groups=groups or (group("dnn"), group("data", count=2)),
        run_dir=Path("runs/mnist-1"),
        channels={"train": Channel(uri="data/mnist")},
    )
    return dataclasses.replace(spec, **changes)  # type: ignore[arg-type]


def test_the_plan_of_a_heterogeneous_job_is_as_it_was():
    platform = LocalPlatform(cores=CORES, environ={})
    described = platform.describe(platform.plan(job()))
    assert described.pop("feed")
    assert described == {
        "platform": "local",
        "name": "mnist-1",
        "command": ["python", "train.py"],
        "run_dir": "runs/mnist-1",
        "hosts": [
            {
                "name": name,
                "group": role,
                "role": role,
                "instance_type": "local.c1",
                "cores": [core],
                "processes": 1,
            }
            for name, role, core in (
                ("algo-3", "dnn", 0),
                ("algo-1", "data", 1),
                ("algo-2", "data", 2),
            )
        ],
        "channels": {"train": "data/mnist"},
        "hyperparameters": {},
        "strategy": "auto",
        "comparable": True,
        "not_comparable_because": None,
    }


def test_hosts_get_cores_of_their_own_where_there_are_enough():
    plan = LocalPlatform(cores=CORES, environ={}).plan(
        job(group("dnn", "local.c2"), group("data", count=2))
    )
    assert [host.cores for host in plan.hosts] == [(0, 1), (2,), (3,)]
    assert plan.not_comparable == ""


def test_a_job_of_one_host_may_name_the_type_that_this_machine_is():
    plan = LocalPlatform(cores=CORES, environ={}).plan(job(group("dnn", "ml.p4d.24xlarge")))
    assert [host.cores for host in plan.hosts] == [CORES]
    assert plan.hosts[0].instance_type == "ml.p4d.24xlarge"
    assert plan.not_comparable == ""


@pytest.mark.parametrize("kind", ["local.c2", "ml.local.c2"])
def test_hosts_that_must_share_cores_are_flagged(kind):
    plan = LocalPlatform(cores=(4, 5), environ={}).plan(job(group("dnn", kind), group("data")))
    assert [host.cores for host in plan.hosts] == [(4, 5), (4,)]
    assert plan.not_comparable == SHARED_CORES


def test_a_trainer_larger_than_the_machine_is_refused_and_a_data_host_shares_its_cores():
    platform = LocalPlatform(cores=(0, 1), environ={})
    with pytest.raises(UsageError, match=r"local\.c8 asks for 8 cores; this machine has 2"):
        platform.plan(job(group("dnn", "local.c8")))
    plan = platform.plan(job(group("dnn", "local.c1"), group("data", "local.c8")))
    assert plan.hosts[1].cores == (0, 1)
    assert plan.not_comparable == SHARED_CORES


def test_a_claim_is_refused_with_the_platform_that_mounts_it():
    with pytest.raises(UsageError, match="reads folders, not pvc://data/x") as caught:
        LocalPlatform(cores=CORES).plan(job(channels={"train": Channel(uri="pvc://data/x")}))
    assert caught.value.where == "key channels.train.uri"
    assert "platform: kubernetes" in str(caught.value.fix)


@pytest.mark.parametrize("uri", ["{}", "file://{}", "data"])
def test_what_the_plan_accepts_is_the_folder_that_the_job_gets(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    spec = job(channels={"train": Channel(uri=uri.format(folder))}, run_dir=tmp_path / "run")
    request = LocalPlatform(cores=CORES, environ={}).plan(spec)
    make_job_folder(request, request.leader)
    assert (request.base_dir(request.leader) / "input" / "data" / "train").readlink() == folder


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job(group("dnn", "ml.p4d.24xlarge", 2)), "no instance type ml.p4d.24xlarge"),
        (job(group("dnn", "ml.p4d.24xlarge"), group("data")), "no instance type ml.p4d"),
        (job(group("dnn", "local.c0")), "no instance type local.c0"),
        (job(group("data"), group("dnn")), "as its first group"),
        (job(group("dnn"), group("dnn", name="more")), "exactly one dnn group"),
        (job(group("dnn"), group("data", name="dnn")), "duplicate group name"),
        (job(channels={"train": Channel(uri="s3://bucket/x")}), "reads folders, not s3://"),
        (job(channels={"train": Channel(uri="x", groups=("gpu",))}), "unknown instance group gpu"),
        (job(command=()), "no command"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_anything_starts(spec, words):
    with pytest.raises(UsageError, match=words):
        LocalPlatform(cores=CORES, environ={}).plan(spec)


def test_hosts_of_a_cloud_are_refused_with_the_option_that_starts_them():
    with pytest.raises(UsageError) as caught:
        LocalPlatform(cores=CORES, environ={}).plan(job(group("dnn", "ml.p4d.24xlarge", 2)))
    assert "--platform sagemaker" in caught.value.fix


def test_a_run_whose_folder_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "run").write_text("a file")
    platform = LocalPlatform(cores=CORES, environ={})
    request = platform.plan(job(group("dnn"), run_dir=tmp_path / "run"))
    with pytest.raises(PlatformError, match="the local run cannot start") as caught:
        platform.submit(request)
    assert caught.value.where == str(tmp_path / "run")
