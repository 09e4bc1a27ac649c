"""State of a run's pods, and the events and troubles that explain why they do not run."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.api import number, text
from stoker.platforms.kubernetes.objects import (
    COMPLETION_INDEX,
    REPLICATED_JOB_LABEL,
    Layout,
    PodGroup,
)
from stoker.records import bare_type
from stoker.records.base import Document, mapping, mappings
from stoker.text import usd

# Label of newer JobSets.
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
# The taint by which Kubernetes ends the pods of a node that is known to be down.
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
# A registry may be away for a moment, and a secret may come late.
IMAGE_SECONDS = 120.0
CONTAINER_SECONDS = 120.0
# Another run may end and free its quota.
QUOTA_SECONDS = 120.0
# Provisioners of file servers take some minutes until a claim is bound.
CLAIM_SECONDS = 600.0
# After a pod's deletionTimestamp, which includes its grace period.
DEAD_SECONDS = 60.0
# Wait for nodes after which the next best plan is shown.
CAPACITY_SECONDS = 600.0
_TWICE = re.compile(r"\b([a-z][a-z ]+[a-z])(?:[.;,] \1\b)+")
_SHORT = re.compile(r"Insufficient ([A-Za-z0-9./_-]+[A-Za-z0-9])")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
# Waiting does not help.
_IMAGE_FOR_EVER = ("InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# Between two reports of one trouble whose number of hosts changes.
CHANGE_SECONDS = 60.0
# Normal events that explain why a run waits or lost a host.
_TELLING = frozenset(
    (
        "Admitted",
        "NotTriggerScaleUp",
        "Pending",
        "Preempted",
        "QuotaReserved",
        "TriggeredScaleUp",
        "Nominated",
    )
)
# Known from the pods' states, or part of every start or end.
_TOLD_BY_PODS = frozenset(
    ("FailedScheduling", "BackOff", "Failed", "ErrImageNeverPull", "InspectFailed", "Unhealthy")
)
# Part of every start: pods exist before the objects that the job owns.
_TOLD_LATE = frozenset(("FailedMount", "FailedAttachVolume"))
LATE_SECONDS = 60.0
# A JobSet's end, known from its state.
_TOLD_BY_JOB = frozenset(("FailJobSetFailurePolicyAction", "FailedJobs", "ReachedMaxRestarts"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """How a container ended. Times are ISO 8601, and empty if unknown."""

    exit_code: int
    reason: str
    message: str
    at: str
    began_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """State of a pod of the run.

    Attributes:
        name: Name of the pod; its replacement has another.
        host: Stable name of this place in the group.
        image_digest: Digest of the image that its container runs; empty: not known.
        placed_at: When its node took it, ISO 8601, or empty: from then on it is paid for.
        is_started: Whether its container has, or had, a process.
        attempt: Attempt of the whole job.
        ended: How its container ended; None if it is restarted.
        waits_for: Why its container does not run, as Kubernetes' reason: ImagePullBackOff.
        waits_because: Kubernetes' message for that.
        unschedulable: Why no node can run it; empty if one does.
        unschedulable_since: ISO 8601, or empty.
        lost: Why it was lost: evicted, preempted, its node lost.
        is_final: Whether nothing of it runs any more.
        deleted_at: When it should be gone, ISO 8601; empty unless it is deleted.
    """

    name: str
    uid: str
    group: str
    role: str
    host: str
    index: int
    node: str
    created_at: str
    image_digest: str
    placed_at: str
    is_started: bool
    is_running: bool
    restarts: int
    attempt: int
    ended: PodEnd | None
    waits_for: str
    waits_because: str
    unschedulable: str
    unschedulable_since: str
    lost: str
    is_final: bool
    deleted_at: str


def pod_state(document: Document, groups: Mapping[str, PodGroup], *, run: str) -> PodState | None:
    """Returns the state of a pod; None if it is in none of the groups.

    Args:
        groups: Groups of the run, by the name of their replicated job.
        run: Name of the JobSet.
    """
    described, status = mapping(document, "metadata"), mapping(document, "status")
    labels, annotations = mapping(described, "labels"), mapping(described, "annotations")
    group = groups.get(text(labels, REPLICATED_JOB_LABEL))
    if group is None:
        return None
    # An annotation before Kubernetes 1.28, a label since.
    place = text(labels, COMPLETION_INDEX) or text(annotations, COMPLETION_INDEX)
    index = int(place) if place.isdigit() else 0
    container = _container(status, group.job)
    state, last = mapping(container, "state"), mapping(container, "lastState")
    waiting = mapping(state, "waiting")
    attempt = text(labels, _ATTEMPT)
    phase = text(status, "phase")
    unschedulable, since = _unschedulable(status)
    return PodState(
        name=text(described, "name"),
        uid=text(described, "uid"),
        group=group.group.name,
        role=group.group.role,
        host=f"{run}-{group.job}-0-{index}",
        index=index,
        node=text(mapping(document, "spec"), "nodeName"),
        created_at=text(described, "creationTimestamp"),
        image_digest=text(container, "imageID").rpartition("@")[2],
        placed_at=text(status, "startTime"),
        # `last`: it is about to be restarted.
        is_started=bool(mapping(state, "running") or mapping(state, "terminated") or last),
        is_running=bool(mapping(state, "running")),
        restarts=number(container, "restartCount"),
        attempt=int(attempt) if attempt.isdigit() else 0,
        ended=_ended(state),
        waits_for=text(waiting, "reason"),
        waits_because=text(waiting, "message"),
        unschedulable=unschedulable,
        unschedulable_since=since,
        lost=_lost(status),
        is_final=phase in ("Succeeded", "Failed"),
        deleted_at=text(described, "deletionTimestamp"),
    )


def seconds_between(begin: str, end: str) -> float | None:
    """Returns seconds between two of Kubernetes' times; None if one is unknown."""
    try:
        difference = datetime.fromisoformat(end) - datetime.fromisoformat(begin)
    except (ValueError, TypeError):
        return None
    return difference.total_seconds()


def _container(status: Document, name: str) -> Document:
    found = mappings(status, "containerStatuses")
    return next((c for c in found if text(c, "name") == name), found[0] if found else {})


def _ended(state: Document) -> PodEnd | None:
    terminated = mapping(state, "terminated")
    if not terminated:
        return None
    return PodEnd(
        exit_code=number(terminated, "exitCode", -1),
        reason=text(terminated, "reason"),
        message=text(terminated, "message"),
        at=text(terminated, "finishedAt"),
        began_at=text(terminated, "startedAt"),
    )


def _unschedulable(status: Document) -> tuple[str, str]:
    """Returns why no node can run the pod, and since when; empty if one does."""
    for condition in mappings(status, "conditions"):
        if (
            text(condition, "type") == "PodScheduled"
            and condition.get("status") == "False"
            and text(condition, "reason") == "Unschedulable"
        ):
            words = text(condition, "message") or "no node can run it"
            return words, text(condition, "lastTransitionTime")
    return "", ""


def _lost(status: Document) -> str:
    for condition in mappings(status, "conditions"):
        # Since Kubernetes 1.26; for some causes still in the reason.
        if text(condition, "type") == "DisruptionTarget" and condition.get("status") == "True":
            words = (text(condition, "reason"), text(condition, "message"))
            return ": ".join(word for word in words if word)
    if text(status, "reason") in ("Evicted", "NodeLost", "Shutdown", "Preempting", "NodeShutdown"):
        return ": ".join(w for w in (text(status, "reason"), text(status, "message")) if w)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why hosts of a group do not run, what to do, and how long to wait.

    Attributes:
        key: Identity of the trouble over time.
        hosts: Number of waiting hosts; 0 if unknown.
        fix: What to do; may be empty.
        fix_after: Seconds after which `fix` is worth showing.
        fatal_after: Seconds after which waiting ends; None: never.
        since: When it began, ISO 8601; empty: when it is first seen.
        is_capacity: Whether other types or a later retry may help (on_no_capacity).
        is_dead_node: Whether a node that does not answer keeps a pod from ending.
    """

    key: str
    group: str
    what: str
    hosts: int = 0
    fix: str = ""
    fix_after: float = 0.0
    fatal_after: float | None = None
    since: str = ""
    is_capacity: bool = False
    is_dead_node: bool = False


def troubles_of(
    pods: Sequence[PodState], layout: Layout, *, namespace: str, utc: str
) -> Iterator[Trouble]:
    """Yields what is wrong with the pods at the time `utc`: one trouble of a kind per group."""
    by_group: dict[str, list[PodState]] = {}
    for pod in pods:
        if not pod.is_final and not pod.deleted_at:
            by_group.setdefault(pod.group, []).append(pod)
    for group in layout.groups:
        waiting = by_group.get(group.group.name, [])
        yield from _unschedulable_troubles(waiting, group, layout.job)
        yield from _container_troubles(waiting, group, layout.image)
    yield from _dead_nodes(pods, layout, namespace=namespace, utc=utc)


def refused_pods(group: PodGroup, message: str) -> Trouble:
    """Returns the trouble of a group whose pods are refused, with the job controller's message."""
    what, fix = f"pods of {group.group.name} are refused: {message}", "ask who runs the cluster"
    if is_of_quota(message):
        fix = (
            "free some of the namespace's quota, or ask for more (kubectl describe quota); "
            "or plan fewer or smaller hosts"
        )
    elif "must specify" in message and "limits.cpu" in message:
        # The words of a ResourceQuota's admission: `failed quota: q: must specify limits.cpu for:`.
        fix = "set kubernetes.cpu_limit: true, as the namespace's quota wants a CPU limit"
    elif "PodSecurity" in message:
        fix = "remove what the namespace does not allow from kubernetes." + group.group.role
    elif "serviceaccount" in message or "service account" in message:
        fix = "make the service account, or change serviceAccountName in kubernetes.*.pod.spec"
    return Trouble(
        key=f"refused {group.group.name}",
        group=group.group.name,
        what=what,
        fix=fix,
        # A training can run without data hosts, so only dnn troubles end the wait.
        fatal_after=QUOTA_SECONDS if group.is_dnn else None,
        is_capacity=is_of_quota(message),
    )


def is_of_quota(message: str) -> bool:
    return "exceeded quota" in message


def lacks_claim(unschedulable: str) -> bool:
    """Returns whether a pod waits for a volume claim, so that another node would not help."""
    # The scheduler's words: `pod has unbound immediate PersistentVolumeClaims`,
    # `persistentvolumeclaim "datasets" not found`.
    return not short_of(unschedulable) and "persistentvolumeclaim" in unschedulable.lower()


def short_of(message: str) -> list[str]:
    """Returns the resources that the scheduler reports as missing: `nvidia.com/gpu`."""
    return list(dict.fromkeys(_SHORT.findall(message)))


def _unschedulable_troubles(
    pods: Sequence[PodState], group: PodGroup, job: JobSpec
) -> Iterator[Trouble]:
    wait_minutes = job.platform_settings.on_no_capacity.wait_minutes
    without = [pod for pod in pods if pod.unschedulable]
    if not without:
        return
    # The second half explains why preemption does not help, node by node.
    said = " ".join(without[0].unschedulable.split(" preemption:")[0].split())
    # Several plugins report the same: `persistentvolumeclaim "a" not found. not found`.
    said = _TWICE.sub(r"\1", said).rstrip(".; ")
    if lacks_claim(said):
        fix = "make the claim that channels, volumes or kubernetes.output name, or see why it is "
        fix += "not bound: kubectl describe pvc"
        what = f"a claim of volumes: {said}"
        yield _waiting("claim", without, group, what, fix=fix, seconds=CLAIM_SECONDS)
        return
    missing = short_of(said)
    pool = bare_type(group.group.instance_type)
    words = f"{_hosts(without, group)} for a node of {pool}"
    words += f", short of {', '.join(missing)}" if missing else ""
    # A training can run without data hosts, which may come later.
    fix = f"it waits {wait_minutes} min in all (on_no_capacity)" if group.is_dnn else ""
    fix_after = CAPACITY_SECONDS
    if job.next_best:
        fix += f"{'; ' if fix else ''}the next best plan: {job.next_best}"
    # The scheduler's words where no node has the labels that are asked for.
    if not missing and "didn't match" in said:
        fix_after = 0.0
        labels = ", ".join(f"{key}={value}" for key, value in group.node_selector.items())
        fix = f"is there a node with {labels}? kubernetes.pools.{pool}.pod has its nodeSelector"
    yield Trouble(
        key=f"unschedulable {group.group.name}",
        group=group.group.name,
        what=f"{words}: {said}",
        hosts=len(without),
        fix=fix,
        fix_after=fix_after,
        fatal_after=60.0 * wait_minutes if group.is_dnn else None,
        # The first pod's: an attempt that adopts the job does not start the wait again.
        since=min(pod.unschedulable_since for pod in without),
        is_capacity=True,
    )


def _container_troubles(pods: Sequence[PodState], group: PodGroup, image: str) -> Iterator[Trouble]:
    image_seconds = dict.fromkeys(_IMAGE, IMAGE_SECONDS) | dict.fromkeys(_IMAGE_FOR_EVER, 0.0)
    image_fix = "push it, check its name, and set imagePullSecrets in kubernetes.*.pod.spec"
    fix = f"check kubernetes.{group.group.role}.pod (envFrom, volumes) and the entry point"
    for kind, what, seconds, advice in (
        ("image", f"the image {group.settings.image or image}", image_seconds, image_fix),
        ("container", "their containers", dict.fromkeys(_CONTAINER, CONTAINER_SECONDS), fix),
    ):
        found = [pod for pod in pods if pod.waits_for in seconds]
        if found:
            why = f"({found[0].waits_for}): {found[0].waits_because or 'no reason is given'}"
            wait = seconds[found[0].waits_for]
            yield _waiting(kind, found, group, f"{what} {why}", fix=advice, seconds=wait)


def _waiting(
    kind: str, pods: Sequence[PodState], group: PodGroup, what: str, *, fix: str, seconds: float
) -> Trouble:
    return Trouble(
        key=f"{kind} {group.group.name}",
        group=group.group.name,
        what=f"{_hosts(pods, group)} for {what}",
        hosts=len(pods),
        fix=fix,
        fatal_after=seconds if group.is_dnn else None,
    )


def _dead_nodes(
    pods: Sequence[PodState], layout: Layout, *, namespace: str, utc: str
) -> Iterator[Trouble]:
    """Yields the pods that cannot end until their kubelet answers."""
    by_name = {group.group.name: group for group in layout.groups}
    alive = [pod for pod in pods if not pod.is_final and not pod.deleted_at]
    replaced = {pod.host for pod in alive}
    told: set[str] = set()
    for pod in pods:
        overdue = seconds_between(pod.deleted_at, utc) if pod.node and not pod.is_final else None
        key = f"dead node {pod.group} {pod.node}"
        if overdue is None or overdue < DEAD_SECONDS or key in told:
            continue
        told.add(key)
        what = f"{pod.host}: pod {pod.name} should have ended by {pod.deleted_at}, and its node "
        what += f"{pod.node} has not confirmed it"
        fatal_after = None
        # A data host's pod is replaced without waiting for that.
        if by_name[pod.group].is_dnn and pod.host not in replaced:
            what += f"; until then no other pod takes its place{_bill(alive, layout, by_name)}"
            is_waiting = layout.settings.dead_node == "wait"
            fatal_after = 60.0 * layout.settings.dead_node_minutes if is_waiting else 0.0
        yield Trouble(
            key=key,
            group=pod.group,
            what=what,
            hosts=1,
            fix=f"if that node is down: kubectl taint nodes {pod.node} {OUT_OF_SERVICE}, or "
            f"kubectl delete node {pod.node}; if only the pod's processes have certainly ended: "
            f"kubectl delete pod {pod.name} -n {namespace} --force --grace-period=0",
            fatal_after=fatal_after,
            since=pod.deleted_at,
            is_dead_node=True,
        )


def _bill(alive: Sequence[PodState], layout: Layout, groups: Mapping[str, PodGroup]) -> str:
    """Returns the cost of the hosts that have a node meanwhile; empty if there are none."""
    billed = [groups[pod.group].group.instance_type for pod in alive if pod.node]
    if not billed:
        return ""
    words = f", and {len(billed)} other host{'s are' if len(billed) > 1 else ' is'} billed"
    prices = [layout.job.prices.get(name) for name in billed]
    known = [price for price in prices if price is not None]
    return words + (f", {usd(sum(known))} an hour" if len(known) == len(billed) else "")


def _hosts(pods: Sequence[PodState], group: PodGroup) -> str:
    return f"{len(pods)} of {group.group.count} {group.group.name} hosts wait"


@dataclass(slots=True)
class _SeenEvent:
    since: float
    said_at: float | None = None
    said_hosts: int = 0
    fix_is_said: bool = False


class TroubleLog:
    """Reports troubles once, and again at growing intervals while they last.

    Args:
        repeat_seconds: Between two reports; CHANGE_SECONDS if the number of hosts has changed.
    """

    def __init__(self, *, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._seen: dict[str, _SeenEvent] = {}

    def news(
        self, troubles: Iterable[Trouble], *, now: float, utc: str = ""
    ) -> Iterator[tuple[Trouble, str]]:
        """Yields the troubles to report now, with their messages; missing troubles are over.

        Args:
            now: Monotonic seconds.
            utc: The same moment, ISO 8601, for troubles that began before they were seen.
        """
        current = {trouble.key: trouble for trouble in troubles}
        for key in [key for key in self._seen if key not in current]:
            del self._seen[key]
        for key, trouble in current.items():
            if key not in self._seen:
                before = seconds_between(trouble.since, utc) or 0.0
                self._seen[key] = _SeenEvent(since=now - max(0.0, before))
            seen = self._seen[key]
            waited = now - seen.since
            has_fix = bool(trouble.fix) and waited >= trouble.fix_after
            # By the number of hosts: the reasons for the same hosts come and go.
            is_same = seen.said_hosts == trouble.hosts
            rest = self._repeat_seconds if is_same else CHANGE_SECONDS
            is_due = seen.said_at is None or now >= seen.said_at + rest
            if is_due or (has_fix and not seen.fix_is_said):
                seen.said_at, seen.said_hosts, seen.fix_is_said = now, trouble.hosts, has_fix
                words = trouble.what + (f" (for {waited:.0f} s)" if waited >= 1 else "")
                yield trouble, words + (f"; {trouble.fix}" if has_fix else "")

    def over(self, troubles: Iterable[Trouble], *, now: float) -> Trouble | None:
        """Returns a trouble for which waiting has ended, or None."""
        for trouble in troubles:
            seen = self._seen.get(trouble.key)
            limit = trouble.fatal_after
            if seen and limit is not None and now >= seen.since + limit:
                return trouble
        return None


def by_job(groups: Sequence[PodGroup]) -> Mapping[str, PodGroup]:
    """Returns the groups by the name of their replicated job."""
    return {group.job: group for group in groups}


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """A Kubernetes event of one of the run's objects.

    Attributes:
        about: Kind and name of its object.
        job: Replicated job whose pods could not be created; empty in other events.
    """

    about: str
    reason: str
    message: str
    job: str = ""

    @property
    def text(self) -> str:
        return f"{self.about}: {self.reason}: {self.message}"


class Happenings:
    """Filter of the events that users should see, each once.

    Args:
        run: Name of its objects.
        since: Creation time of the job, ISO 8601: earlier events are of another job of that name.
    """

    def __init__(self, *, run: str, groups: Sequence[PodGroup], since: str) -> None:
        self._since = since
        self._jobs: Mapping[str, str] = {f"{run}-{group.job}-0": group.job for group in groups}
        self._names = (run, *self._jobs)
        # Names of Kueue's objects.
        self._workloads = (f"jobset-{run}-", f"trainjob-{run}-")
        self._told: set[tuple[str, str, str, str]] = set()
        # Time of an object's first event of that reason.
        self._began: dict[tuple[str, str], str] = {}

    def take(self, event: Document) -> Iterator[Happening]:
        """Yields an event of this run if it is new and important."""
        about = mapping(event, "involvedObject")
        kind, name = text(about, "kind"), text(about, "name")
        reason = text(event, "reason")
        age = seconds_between(self._since, _time_of(event))
        if not self._is_ours(kind, name) or (age is not None and age < 0):
            return
        is_warning = text(event, "type") == "Warning" and reason not in _TOLD_BY_PODS
        if not is_warning and reason not in _TELLING:
            return
        if kind == "JobSet" and reason in _TOLD_BY_JOB:
            return
        if reason in _TOLD_LATE:
            first = self._began.setdefault((name, reason), _time_of(event, is_first=True))
            lasted = seconds_between(first, _time_of(event))
            if lasted is not None and lasted < LATE_SECONDS:
                return
        message = " ".join(text(event, "message").split())
        # Quota, pod security or a webhook refuses the pods.
        is_refusal = kind == "Job" and reason == "FailedCreate" and "forbidden" in message
        # Each refusal counts, as one may begin again.
        key = (name, reason, message, _time_of(event) if is_refusal else "")
        if key in self._told:
            return
        self._told.add(key)
        yield Happening(
            about=f"{kind} {name}",
            reason=reason,
            message=message,
            job=self._jobs.get(name, "") if is_refusal else "",
        )

    def _is_ours(self, kind: str, name: str) -> bool:
        match kind:
            case "JobSet" | "TrainJob":
                return name == self._names[0]
            case "Job":
                return name in self._jobs
            case "Pod":
                return name.startswith(tuple(f"{job}-" for job in self._jobs))
            case "Workload":
                return name.startswith(self._workloads)
        return False


def _time_of(event: Document, *, is_first: bool = False) -> str:
    # It depends on the event's writer which of them are set.
    times = [text(event, key) for key in ("lastTimestamp", "eventTime", "firstTimestamp")]
    return next((time for time in (reversed(times) if is_first else times) if time), "")
