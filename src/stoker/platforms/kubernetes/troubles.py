"""Why pods do not run, in words that tell what to do, and whether waiting may help."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.platforms.kubernetes.groups import PodGroup
from stoker.platforms.kubernetes.pod_state import PodState

# A registry may be away for a moment, and a secret be made a moment late.
IMAGE_SECONDS = 120.0
CONTAINER_SECONDS = 120.0
# Somebody else's run may give a quota back; not for long while this one is waited for.
QUOTA_SECONDS = 120.0
# Until the next best plan is named to those who wait for nodes.
CAPACITY_SECONDS = 600.0

_SHORT = re.compile(r"Insufficient ([A-Za-z0-9./_-]+[A-Za-z0-9])")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
_IMAGE_FOR_EVER = ("InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_FOR_EVER = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why hosts of a group do not run.

    Attributes:
        key: The same while the trouble is the same.
        group: Of the plan.
        what: In words.
        fix: What to do; empty where there is nothing but to wait.
        fix_after: Seconds after which that is worth telling.
        fatal_after: Seconds after which waiting is over; None: never.
    """

    key: str
    group: str
    what: str
    fix: str = ""
    fix_after: float = 0.0
    fatal_after: float | None = None


def troubles_of(
    pods: Iterable[PodState], groups: Sequence[PodGroup], *, image: str, next_best: str
) -> Iterator[Trouble]:
    """What is wrong with the pods as they are now: for each group at most one trouble of a kind.

    Args:
        pods: Those that there are.
        groups: Of the run.
        image: That all pods run.
        next_best: The plan to take instead.
    """
    by_group: dict[str, list[PodState]] = {}
    for pod in pods:
        if not pod.is_final and not pod.is_deleted:
            by_group.setdefault(pod.group, []).append(pod)
    for group in groups:
        waiting = by_group.get(group.group.name, [])
        yield from _unschedulable(waiting, group, next_best)
        yield from _not_pulled(waiting, group, image)
        yield from _not_made(waiting, group)


def refused_pods(group: PodGroup, message: str) -> Trouble:
    """The cluster lets a job be, but none of its pods: quotas, pod security, webhooks.

    Args:
        group: Of the pods.
        message: The job controller's.
    """
    what, fix = f"pods of {group.group.name} are refused: {message}", "ask who runs the cluster"
    if "exceeded quota" in message:
        fix = (
            "free some of the namespace's quota, or ask for more (kubectl describe quota); "
            "or plan fewer or smaller hosts"
        )
    elif "PodSecurity" in message:
        fix = "take out of kubernetes." + group.group.role + " what the namespace does not allow"
    elif "serviceaccount" in message or "service account" in message:
        fix = "make the service account, or change kubernetes.service_account"
    return Trouble(
        key=f"refused {group.group.name}",
        group=group.group.name,
        what=what,
        fix=fix,
        fatal_after=QUOTA_SECONDS if group.is_dnn else None,
    )


def short_of(message: str) -> list[str]:
    """The resources that the scheduler says are missing: `nvidia.com/gpu`."""
    return list(dict.fromkeys(_SHORT.findall(message)))


def _unschedulable(pods: Sequence[PodState], group: PodGroup, next_best: str) -> Iterator[Trouble]:
    without = [pod for pod in pods if pod.unschedulable]
    if not without:
        return
    said = " ".join(without[0].unschedulable.split(" preemption:")[0].split())
    missing = short_of(said)
    pool = group.group.instance_type.removeprefix("ml.")
    words = f"{_hosts(without, group)} for a node of {pool}"
    words += f", short of {', '.join(missing)}" if missing else ""
    fix, fix_after = f"it waits on; or take the next best plan: {next_best}", CAPACITY_SECONDS
    if not missing and "didn't match" in said:
        fix_after = 0.0
        labels = ", ".join(f"{key}={value}" for key, value in group.node_selector.items())
        fix = f"is there a node with {labels}? kubernetes.pools.{pool} says which are meant"
    elif not missing and "persistentvolumeclaim" in said:
        fix, fix_after = "make the claim that channels or kubernetes.output name", 0.0
    elif not next_best:
        fix = ""
    yield Trouble(
        key=f"unschedulable {group.group.name}",
        group=group.group.name,
        what=f"{words}: {said}",
        fix=fix,
        fix_after=fix_after,
    )


def _not_pulled(pods: Sequence[PodState], group: PodGroup, image: str) -> Iterator[Trouble]:
    found = [p for p in pods if p.waits_for in (*_IMAGE, *_IMAGE_FOR_EVER)]
    if not found:
        return
    first = found[0]
    seconds = _FOR_EVER if first.waits_for in _IMAGE_FOR_EVER else IMAGE_SECONDS
    yield Trouble(
        key=f"image {group.group.name}",
        group=group.group.name,
        what=f"{_hosts(found, group)} for the image {image} "
        f"({first.waits_for}): {first.waits_because or 'no reason is given'}",
        fix="push it, check its name, and let kubernetes.image_pull_secrets open its registry",
        fatal_after=seconds if group.is_dnn else None,
    )


def _not_made(pods: Sequence[PodState], group: PodGroup) -> Iterator[Trouble]:
    found = [pod for pod in pods if pod.waits_for in _CONTAINER]
    if not found:
        return
    first = found[0]
    yield Trouble(
        key=f"container {group.group.name}",
        group=group.group.name,
        what=f"{_hosts(found, group)} for their containers "
        f"({first.waits_for}): {first.waits_because or 'no reason is given'}",
        fix=f"check kubernetes.{group.group.role}: env_from_secrets, volumes; and the entry point",
        fatal_after=CONTAINER_SECONDS if group.is_dnn else None,
    )


def _hosts(pods: Sequence[PodState], group: PodGroup) -> str:
    return f"{len(pods)} of {group.group.count} {group.group.name} hosts wait"


@dataclass(slots=True)
class _Seen:
    since: float
    said_at: float | None = None
    fix_is_said: bool = False


class TroubleLog:
    """Says a trouble once, and again ever so seldom while it lasts.

    Args:
        repeat_seconds: Between two times that the same is said.
    """

    def __init__(self, *, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._seen: dict[str, _Seen] = {}

    def news(self, troubles: Iterable[Trouble], *, now: float) -> Iterator[tuple[Trouble, str]]:
        """The troubles to tell now, in words; what is not among them is over.

        Args:
            troubles: All there are.
            now: Monotonic seconds.
        """
        current = {trouble.key: trouble for trouble in troubles}
        for key in [key for key in self._seen if key not in current]:
            del self._seen[key]
        for key, trouble in current.items():
            seen = self._seen.setdefault(key, _Seen(since=now))
            waited = now - seen.since
            has_fix = bool(trouble.fix) and waited >= trouble.fix_after
            is_due = seen.said_at is None or now >= seen.said_at + self._repeat_seconds
            if is_due or (has_fix and not seen.fix_is_said):
                seen.said_at, seen.fix_is_said = now, has_fix
                words = trouble.what + (f" (for {waited:.0f} s)" if waited >= 1 else "")
                yield trouble, words + (f"; {trouble.fix}" if has_fix else "")

    def over(self, troubles: Iterable[Trouble], *, now: float) -> Trouble | None:
        """A trouble for which waiting is over."""
        for trouble in troubles:
            seen = self._seen.get(trouble.key)
            limit = trouble.fatal_after
            if seen and limit is not None and now >= seen.since + limit:
                return trouble
        return None


def by_job(groups: Sequence[PodGroup]) -> Mapping[str, PodGroup]:
    """The groups by the name of their replicated job."""
    return {group.job: group for group in groups}
