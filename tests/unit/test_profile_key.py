"""A kept profile is found again by what a step costs, for so many days."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from stoker.logs import now_utc
from stoker.pipelines.base import kept_profiles, profile_key
from stoker.records import to_document
from stoker.workload_file import workload_from
from support import kubeflow_pipeline, sagemaker_pipeline, sample_records

WORKLOAD = sagemaker_pipeline.WORKLOAD


def with_sets(*overrides):
    return workload_from(to_document(WORKLOAD), overrides=overrides)


@pytest.mark.parametrize(
    "change",
    [
        "gate=[{metric: accuracy, min: 0.9}]",
        "constraints.objective=time",
        "hyperparameters.lr=0.3",
        "hyperparameters.epochs=90",
        "sagemaker.max_run_seconds=3600",
        "notify.on=always",
    ],
)
def test_a_change_that_leaves_a_steps_cost_finds_the_profile_again(change):
    assert profile_key(with_sets(change)) == profile_key(WORKLOAD)


@pytest.mark.parametrize(
    "change",
    [
        "image=registry/mine:2",
        "command=[python, train.py, --width, '32']",
        "cluster.dnn.instance_type=ml.g6.2xlarge",
        "cluster.dnn.count=2",
        "channels.train.uri=s3://bucket/other/",
        "hyperparameters.depth=4",
        "sagemaker.source=s3://bucket/inputs/1/code.tar.gz",
    ],
)
def test_a_change_that_may_cost_measures_again(change):
    assert profile_key(with_sets(change)) != profile_key(WORKLOAD)


class Cluster:
    """The ConfigMap of kept profiles."""

    def __init__(self) -> None:
        self.map = None

    def find(self, resource, name):
        return self.map

    def create(self, document):
        self.map = document

    def patch(self, resource, name, change):
        self.map = {**self.map, "data": {**self.map["data"], **change["data"]}}


def test_a_profile_is_used_for_so_many_days():
    week = "kubernetes.kubeflow={cache_days: 7}"
    workload = workload_from(kubeflow_pipeline.DOCUMENT, overrides=[week])
    kept = kept_profiles(workload, cluster=Cluster())
    assert kept.find() is None
    profile = structs.replace(sample_records.profile(), measured_at=now_utc())
    kept.keep(profile)
    assert kept.find() == profile
    assert kept.find(now=datetime.now(UTC) + timedelta(days=6)) is not None
    assert kept.find(now=datetime.now(UTC) + timedelta(days=8)) is None


def test_without_days_nothing_is_kept():
    assert kept_profiles(WORKLOAD) is None
    never = "kubernetes.kubeflow={cache_days: 0}"
    assert kept_profiles(workload_from(kubeflow_pipeline.DOCUMENT, overrides=[never])) is None
    assert kept_profiles(workload_from({"name": "here", "command": ["train"]})) is None
