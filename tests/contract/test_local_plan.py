"""Checks what the local platform plans (hosts and their cores), and what it refuses."""

import dataclasses
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.local import (
    SHARED_CORES,
    LocalPlatform,
    host_variables,
)
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


def reads(uri: str) -> JobSpec:
    return job(channels={"train": Channel(uri=uri)})


@pytest.mark.parametrize(
    ("of_workload", "of_user", "threads"),
    [
        ({}, {}, "2"),
        ({}, {"OMP_NUM_THREADS": "3"}, "3"),
        ({"OMP_NUM_THREADS": "5"}, {}, "5"),
        ({"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": "3"}, "5"),
    ],
)
def test_a_rank_begins_threads_for_its_cores_unless_somebody_says_how_many(
    tmp_path, of_workload, of_user, threads
):
    platform = LocalPlatform(cores=CORES, environ=of_user)
    dnn = group("dnn", "local.c4", processes_per_host=2)
    request = platform.plan(job(dnn, environment=of_workload, run_dir=tmp_path))
    variables = host_variables(
        request,
        request.leader,
        environ=of_user,
        ports={request.leader.name: 7000},
    )
    assert variables["OMP_NUM_THREADS"] == threads


def test_a_dry_run_shows_the_hosts_with_their_cores():
    platform = LocalPlatform(cores=CORES, environ={})
    described = platform.describe(platform.plan(job()))
    assert described["hosts"] == [
        {"name": name, "group": role, "role": role, "cores": (core,)}
        | {"instance_type": "local.c1", "processes": 1}
        for name, role, core in (("algo-3", "dnn", 0), ("algo-1", "data", 1), ("algo-2", "data", 2))
    ]
    assert described["command"] == ["python", "train.py"]
    assert described["channels"] == {"train": "data/mnist"}
    assert described["not_comparable_because"] is None


@pytest.mark.parametrize(
    ("groups", "cores", "words"),
    [
        ((group("dnn", "local.c2"), group("data", count=2)), [(0, 1), (2,), (3,)], ""),
        # One host may have the type that this machine is.
        ((group("dnn", "ml.p4d.24xlarge"),), [CORES], ""),
        ((group("dnn", "ml.local.c4"), group("data")), [CORES, (0,)], SHARED_CORES),
        ((group("dnn"), group("data", "local.c8")), [(0,), CORES], SHARED_CORES),
    ],
)
def test_hosts_get_cores_of_their_own_or_are_flagged(groups, cores, words):
    plan = LocalPlatform(cores=CORES, environ={}).plan(job(*groups))
    assert [host.cores for host in plan.hosts] == cores
    assert plan.not_comparable == words


@pytest.mark.parametrize(
    ("spec", "words", "fix"),
    [
        (job(group("dnn", "ml.p4d.24xlarge", 2)), "no instance type ml.p4d", "platform sagemaker"),
        (job(group("dnn", "ml.p4d.24xlarge"), group("data")), "no instance type ml.p4d", ""),
        (job(group("dnn", "local.c0")), "no instance type local.c0", ""),
        (job(group("dnn", "local.c8")), r"local\.c8 asks for 8 cores; this machine has 4", ""),
        (reads("s3://bucket/x"), "reads folders, not s3://", ""),
        (reads("pvc://data/x"), "reads folders, not pvc://data/x", "platform: kubernetes"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_anything_starts(spec, words, fix):
    with pytest.raises(UsageError, match=words) as caught:
        LocalPlatform(cores=CORES, environ={}).plan(spec)
    assert fix in (caught.value.fix or "")
