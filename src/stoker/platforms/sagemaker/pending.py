"""MaxPendingTimeInSeconds: how long the service keeps a job that waits for capacity.

stoker asks for the wait of on_no_capacity where the service heeds it: for one group, or several
types, with accelerators, and without spot. A queue of AWS Batch waits in its place.
"""

from stoker.platforms.service_limits import service_model
from stoker.records import bare_type
from stoker.records.base import Document, mapping, mappings, text

# Of the families ml.p, ml.g and ml.trn, in the words of the API's reference.
_ACCELERATED = ("p", "g", "trn")


def pending_limit(body: Document, *, wait_seconds: float) -> int | None:
    """Returns the limit of pending time to ask for; None: the service heeds none, or has one.

    Args:
        body: The CreateTrainingJob request.
        wait_seconds: How long the job may wait for hosts.
    """
    has_limit = "MaxPendingTimeInSeconds" in mapping(body, "StoppingCondition")
    has_groups = bool(mappings(body, "ResourceConfig", "InstanceGroups"))
    if has_limit or has_groups or body.get("EnableManagedSpotTraining"):
        return None
    if not any(is_accelerated(name) for name in types_of(body)):
        return None
    limits = service_model("sagemaker").shape_for("MaxPendingTimeInSeconds").metadata
    if wait_seconds < int(limits["min"]):
        return None
    return min(int(wait_seconds), int(limits["max"]))


def is_accelerated(instance_type: str) -> bool:
    """Whether the service counts a type among those whose jobs may be pending."""
    family = bare_type(instance_type).partition(".")[0]
    letters = family.rstrip("abcdefghijklmnopqrstuvwxyz-").rstrip("0123456789")
    return letters in _ACCELERATED


def types_of(body: Document) -> list[str]:
    resources = mapping(body, "ResourceConfig")
    listed = [resources, *mappings(resources, "InstancePreferences")]
    return [text(each, "InstanceType") for each in listed]
