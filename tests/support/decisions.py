"""Decisions on profiles, with no more said than a test needs."""

from datetime import date

from stoker.catalog import load_catalog
from stoker.decide import DecisionInputs, decide
from stoker.records import Constraints

# No price of the catalogs is old then.
TODAY = date(2026, 11, 20)
OF_DECIDE = {
    *("training", "feed", "extra_clusters", "fallback", "last"),
    *("calibration", "take_as", "subject"),
}


def decided(profile, *, catalog=None, constraints=None, today=TODAY, **given):
    """Decides on a profile, on SageMaker unless it is said; other keys are constraints."""
    own = {name: given.pop(name) for name in OF_DECIDE & given.keys()}
    return decide(
        DecisionInputs(
            profile=profile,
            catalog=catalog or load_catalog("sagemaker"),
            constraints=constraints or Constraints(**given),
            today=today,
            **own,
        )
    )
