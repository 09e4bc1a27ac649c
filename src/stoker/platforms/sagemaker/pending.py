"""MaxPendingTimeInSeconds: how long the service keeps a job that waits for capacity.

stoker asks for the wait of on_no_capacity where the service heeds it: for one group, or several
types, with accelerators, and without spot. A queue of AWS Batch waits in its place.
"""

from collections.abc import Iterator

from stoker.errors import UsageError
from stoker.platforms.service_limits import service_model
from stoker.records import bare_type
from stoker.records.base import Document, mapping, mappings

_KEY = "key sagemaker.request.StoppingCondition.MaxPendingTimeInSeconds"
# Of the families ml.p, ml.g and ml.trn, in the words of the API's reference.
_ACCELERATED = ("p", "g", "trn")


def pending_rules(body: Document) -> Iterator[UsageError]:
    """Yields what is wrong with the request's limit of pending time, if it has one."""
    seconds = mapping(body, "StoppingCondition").get("MaxPendingTimeInSeconds")
    if not isinstance(seconds, int):
        return
    limits = service_model("sagemaker").shape_for("MaxPendingTimeInSeconds").metadata
    least, most = int(limits["min"]), int(limits["max"])
    if not least <= seconds <= most:
        what = f"a job may be pending for {least} to {most} s, not {seconds} s"
        yield UsageError(
            what, where=_KEY, fix=f"set {min(max(seconds, least), most)}, or remove it"
        )
    if body.get("EnableManagedSpotTraining"):
        what = "managed spot waits for capacity within MaxWaitTimeInSeconds"
        fix = "remove MaxPendingTimeInSeconds, or do without spot"
        yield UsageError(what, where=_KEY, fix=fix)
    if mappings(body, "ResourceConfig", "InstanceGroups"):
        what = "a pending limit with instance groups is not documented"
        fix = "remove it: on_no_capacity.wait_minutes repeats the plan"
        yield UsageError(what, where=_KEY, fix=fix)
    elif not any(is_accelerated(name) for name in _types(body)):
        what = "a pending limit has no effect on hosts without accelerators"
        fix = "remove it: on_no_capacity.wait_minutes repeats the plan"
        yield UsageError(what, where=_KEY, fix=fix)


def pending_limit(body: Document, *, wait_seconds: float) -> int | None:
    """Returns the limit of pending time to ask for; None: the service heeds none, or has one.

    Args:
        body: The CreateTrainingJob request.
        wait_seconds: How long the job may wait for hosts.
    """
    limits = service_model("sagemaker").shape_for("MaxPendingTimeInSeconds").metadata
    least, most = int(limits["min"]), int(limits["max"])
    has_limit = "MaxPendingTimeInSeconds" in mapping(body, "StoppingCondition")
    has_groups = bool(mappings(body, "ResourceConfig", "InstanceGroups"))
    if has_limit or has_groups or body.get("EnableManagedSpotTraining") or wait_seconds < least:
        return None
    is_heeded = any(is_accelerated(name) for name in _types(body))
    if is_heeded:
        return min(int(wait_seconds), most)
    return None


def is_accelerated(instance_type: str) -> bool:
    """Whether the service counts a type among those whose jobs may be pending."""
    family = bare_type(instance_type).partition(".")[0]
    letters = family.rstrip("abcdefghijklmnopqrstuvwxyz-").rstrip("0123456789")
    return letters in _ACCELERATED


def _types(body: Document) -> list[str]:
    resources = mapping(body, "ResourceConfig")
    listed = [resources, *mappings(resources, "InstancePreferences")]
    return [str(each.get("InstanceType") or "") for each in listed]
