"""Decisions on profiles, with no more said than a test needs."""

from datetime import date

from stoker.catalog import Catalog, load_catalog
from stoker.decide import DecisionInputs, decide
from stoker.records import Constraints

# No price of the catalogs is old then.
TODAY = date(2026, 11, 20)
AWS = load_catalog("sagemaker")
# Types with accelerators, and three families of data types. A decision on all types of SageMaker
# takes four times as long, and what holds for any profile does not depend on the rows.
FEW = Catalog(
    platform="sagemaker",
    instances=[
        instance
        for instance in AWS.instances
        if instance.accelerators or instance.family in ("c5", "c7i", "m5")
    ],
    source=AWS.source,
    region=AWS.region,
)
OF_DECIDE = {"training", "feed", "extra_clusters", "take_as", "subject"}


def decided(profile, *, catalog=None, constraints=None, today=TODAY, **given):
    """Decides on a profile, on a few types of SageMaker unless it is said; else constraints."""
    own = {name: given.pop(name) for name in OF_DECIDE & given.keys()}
    return decide(
        DecisionInputs(
            profile=profile,
            catalog=catalog or FEW,
            constraints=constraints or Constraints(**given),
            today=today,
            **own,
        )
    )
