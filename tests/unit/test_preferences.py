"""Types that a job may get instead of its plan's: architectures, in a catalog of the test."""

import pytest

from stoker.catalog import Catalog, Instance
from stoker.decide.preferences import refuse_preferences
from stoker.errors import UsageError
from support.sagemaker_uploads import workload


def catalog(*types: str) -> Catalog:
    listed = [Instance(type=name, family=name, vcpus=4, usd_per_hour=1.0) for name in types]
    return Catalog(platform="sagemaker", instances=listed, source="the test")


def preferring(today: str, *further: str):
    return workload(
        f"cluster.dnn.instance_type={today}",
        f"sagemaker.further_types=[{', '.join(further)}]",
        "constraints.max_data_hosts=0",
    )


@pytest.mark.parametrize(
    ("today", "other"),
    [
        ("ml.c7i.xlarge", "ml.c7g.xlarge"),
        ("ml.c7g.xlarge", "ml.c7i.xlarge"),
        ("ml.m6i.large", "ml.m6gd.large"),
    ],
)
def test_one_image_does_not_run_on_two_architectures(today, other):
    with pytest.raises(UsageError, match="arm64") as caught:
        refuse_preferences(preferring(today, other), catalog(today, other))
    assert "further_types[0]" in str(caught.value.where)


@pytest.mark.parametrize("other", ["ml.c8g.xlarge", "c7g.2xlarge"])
def test_types_of_one_architecture_may_stand_for_each_other(other):
    refuse_preferences(
        preferring("ml.c7g.xlarge", other),
        catalog("ml.c7g.xlarge", f"ml.{other.removeprefix('ml.')}"),
    )
