"""Pods of a run have a state and events, which say why they do not run."""

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

# Newer JobSets count their attempts in this label.
_ATTEMPT = "jobset.sigs.k8s.io/restart-attempt"
# The taint by which Kubernetes ends the pods of a node that is known to be down.
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
# A registry may be away for a moment, and a secret be made a moment late.
IMAGE_SECONDS = 120.0
CONTAINER_SECONDS = 120.0
# Another run may end and free its quota; this is not waited for long.
QUOTA_SECONDS = 120.0
# Provisioners of file servers take some minutes until a claim is bound.
CLAIM_SECONDS = 600.0
# After a pod's deletionTimestamp, which has its grace in it: a kubelet that answers needs seconds.
DEAD_SECONDS = 60.0
# Until the next best plan is named to those who wait for nodes.
CAPACITY_SECONDS = 600.0
_TWICE = re.compile(r"\b([a-z][a-z ]+[a-z])(?:[.;,] \1\b)+")
_SHORT = re.compile(r"Insufficient ([A-Za-z0-9./_-]+[A-Za-z0-9])")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
# No waiting helps: the name is none, or the node may not pull what it does not have.
_IMAGE_FOR_EVER = ("InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_FOR_EVER = 0.0
# Between two lines about one trouble of more and more hosts, as their pods come one by one.
CHANGE_SECONDS = 60.0
# Events that are not warnings but tell why a run waits, or has lost a host.
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
# Pods' own states tell these better, or they are part of every start or end.
_TOLD_BY_PODS = frozenset(
    ("FailedScheduling", "BackOff", "Failed", "ErrImageNeverPull", "InspectFailed", "Unhealthy")
)
# Every start goes through it: pods are there before the objects that the job owns.
_TOLD_LATE = frozenset(("FailedMount", "FailedAttachVolume"))
LATE_SECONDS = 60.0
# A JobSet's end, which its own state tells.
_TOLD_BY_JOB = frozenset(("FailJobSetFailurePolicyAction", "FailedJobs", "ReachedMaxRestarts"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEnd:
    """Tells how a container ended, and when it had begun.

    Both times are ISO 8601, and empty where they are not known.
    """

    exit_code: int
    reason: str
    message: str
    at: str
    began_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodState:
    """Says of a pod of the run whether it runs, and if it does not, why.

    Attributes:
        name: Name of the pod; a pod that takes its place has another.
        group: Group of the plan.
        host: The same for all pods that have this place in the group.
        index: Number of the host in its group.
        is_started: Whether its container has, or had, a process.
        is_running: Whether it has one now.
        restarts: How often the container was started again.
        attempt: Attempt of the whole job.
        ended: How its container ended, if it has; a container that is started again has not.
        waits_for: Why its container does not run, in one word: ImagePullBackOff.
        waits_because: The same in words.
        unschedulable: Why no node can run it; empty where one does.
        unschedulable_since: When that began, ISO 8601; empty where it is not known.
        lost: Why it was taken away: evicted, preempted, its node lost.
        is_final: Whether nothing of it runs any more.
        deleted_at: When it was to be gone at the latest, ISO 8601; empty unless it is deleted.
    """

    name: str
    uid: str
    group: str
    role: str
    host: str
    index: int
    node: str
    created_at: str
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

    @property
    def is_deleted(self) -> bool:
        """Returns whether it is about to go."""
        return bool(self.deleted_at)


def pod_state(document: Document, groups: Mapping[str, PodGroup], *, run: str) -> PodState | None:
    """Returns the state of a pod; None where it is none of the run's groups.

    Args:
        document: The pod.
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
        # `last`: it ran before, and is about to be started again.
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
    """Returns seconds from one time of Kubernetes' to another; None where one is not known."""
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
    """Returns why no node can run the pod, and since when; empty where one does."""
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
        # Kubernetes says it here since 1.26; before, and for some causes still, in the reason.
        if text(condition, "type") == "DisruptionTarget" and condition.get("status") == "True":
            words = (text(condition, "reason"), text(condition, "message"))
            return ": ".join(word for word in words if word)
    if text(status, "reason") in ("Evicted", "NodeLost", "Shutdown", "Preempting", "NodeShutdown"):
        return ": ".join(w for w in (text(status, "reason"), text(status, "message")) if w)
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A trouble says why hosts of a group do not run, what to do, and how long to wait.

    Attributes:
        key: The same while the trouble is the same.
        group: Group of the plan.
        what: Says in words what happened.
        hosts: How many wait; 0 where that is not known.
        fix: What to do; empty where there is nothing but to wait.
        fix_after: Seconds after which that is worth telling.
        fatal_after: Seconds after which waiting is over; None: never.
        since: When it began, ISO 8601; empty: when it is first seen.
        is_capacity: Other types, or another time, may help (on_no_capacity).
        is_dead_node: A node that does not answer keeps a pod from ending.
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
    """Yields what is wrong with the pods now: for each group at most one trouble of a kind.

    Args:
        pods: Those that there are.
        layout: Layout of the run.
        namespace: Namespace of the pods.
        utc: The time now, ISO 8601.
    """
    by_group: dict[str, list[PodState]] = {}
    for pod in pods:
        if not pod.is_final and not pod.is_deleted:
            by_group.setdefault(pod.group, []).append(pod)
    for group in layout.groups:
        waiting = by_group.get(group.group.name, [])
        yield from _unschedulable_troubles(waiting, group, layout.job)
        yield from _not_pulled(waiting, group, layout.image)
        yield from _not_made(waiting, group)
    yield from _dead_nodes(pods, layout, namespace=namespace, utc=utc)


def refused_pods(group: PodGroup, message: str) -> Trouble:
    """Returns the trouble of a job whose pods are all refused: quotas, pod security, webhooks.

    Args:
        group: Group of the pods.
        message: The job controller's.
    """
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
        fix = "take out of kubernetes." + group.group.role + " what the namespace does not allow"
    elif "serviceaccount" in message or "service account" in message:
        fix = "make the service account, or change serviceAccountName in kubernetes.*.pod.spec"
    return Trouble(
        key=f"refused {group.group.name}",
        group=group.group.name,
        what=what,
        fix=fix,
        # A training goes on without data hosts: only trouble of the dnn group ends the waiting.
        fatal_after=QUOTA_SECONDS if group.is_dnn else None,
        is_capacity=is_of_quota(message),
    )


def is_of_quota(message: str) -> bool:
    """Returns whether a quota refuses pods: it may be free later, or other hosts be in it."""
    return "exceeded quota" in message


def lacks_claim(unschedulable: str) -> bool:
    """Returns whether a pod waits for a claim of volumes: no other node would help."""
    # The scheduler's words: `pod has unbound immediate PersistentVolumeClaims`,
    # `persistentvolumeclaim "datasets" not found`.
    return not short_of(unschedulable) and "persistentvolumeclaim" in unschedulable.lower()


def short_of(message: str) -> list[str]:
    """Returns the resources that the scheduler says are missing: `nvidia.com/gpu`."""
    return list(dict.fromkeys(_SHORT.findall(message)))


def _unschedulable_troubles(
    pods: Sequence[PodState], group: PodGroup, job: JobSpec
) -> Iterator[Trouble]:
    wait_minutes = job.platform_settings.on_no_capacity.wait_minutes
    without = [pod for pod in pods if pod.unschedulable]
    if not without:
        return
    # The scheduler's second half says why no other pod could make room, node by node.
    said = " ".join(without[0].unschedulable.split(" preemption:")[0].split())
    # `persistentvolumeclaim "a" not found. not found`: several plugins say the same.
    said = _TWICE.sub(r"\1", said).rstrip(".; ")
    if lacks_claim(said):
        yield _unbound(without, group, said)
        return
    missing = short_of(said)
    pool = bare_type(group.group.instance_type)
    words = f"{_hosts(without, group)} for a node of {pool}"
    words += f", short of {', '.join(missing)}" if missing else ""
    # A training goes on without data hosts: they may come later.
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
        # The first pod's: an attempt that adopts the job does not wait anew.
        since=min(pod.unschedulable_since for pod in without),
        is_capacity=True,
    )


def _unbound(pods: Sequence[PodState], group: PodGroup, said: str) -> Trouble:
    return Trouble(
        key=f"claim {group.group.name}",
        group=group.group.name,
        what=f"{_hosts(pods, group)} for a claim of volumes: {said}",
        hosts=len(pods),
        fix="make the claim that channels, volumes or kubernetes.output name, or see why it is not "
        "bound: kubectl describe pvc",
        fatal_after=CLAIM_SECONDS if group.is_dnn else None,
    )


def _not_pulled(pods: Sequence[PodState], group: PodGroup, image: str) -> Iterator[Trouble]:
    found = [p for p in pods if p.waits_for in (*_IMAGE, *_IMAGE_FOR_EVER)]
    if not found:
        return
    first, image = found[0], group.settings.image or image
    seconds = _FOR_EVER if first.waits_for in _IMAGE_FOR_EVER else IMAGE_SECONDS
    yield Trouble(
        key=f"image {group.group.name}",
        group=group.group.name,
        what=f"{_hosts(found, group)} for the image {image} "
        f"({first.waits_for}): {first.waits_because or 'no reason is given'}",
        hosts=len(found),
        fix="push it, check its name, and set imagePullSecrets in kubernetes.*.pod.spec",
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
        hosts=len(found),
        fix=f"check kubernetes.{group.group.role}.pod (envFrom, volumes) and the entry point",
        fatal_after=CONTAINER_SECONDS if group.is_dnn else None,
    )


def _dead_nodes(
    pods: Sequence[PodState], layout: Layout, *, namespace: str, utc: str
) -> Iterator[Trouble]:
    """Yields the pods that cannot end: until their kubelet answers they stay as they are."""
    by_name = {group.group.name: group for group in layout.groups}
    alive = [pod for pod in pods if not pod.is_final and not pod.is_deleted]
    replaced = {pod.host for pod in alive}
    told: set[str] = set()
    for pod in pods:
        overdue = seconds_between(pod.deleted_at, utc) if pod.node and not pod.is_final else None
        key = f"dead node {pod.group} {pod.node}"
        if overdue is None or overdue < DEAD_SECONDS or key in told:
            continue
        told.add(key)
        what = f"{pod.host}: pod {pod.name} should have ended by {pod.deleted_at}, and its node "
        what += f"{pod.node} does not say that it has"
        fatal_after = None
        # The place of a data host is taken by another pod without waiting for that.
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
            f"kubectl delete node {pod.node}; if only the pod's processes have surely ended: "
            f"kubectl delete pod {pod.name} -n {namespace} --force --grace-period=0",
            fatal_after=fatal_after,
            since=pod.deleted_at,
            is_dead_node=True,
        )


def _bill(alive: Sequence[PodState], layout: Layout, groups: Mapping[str, PodGroup]) -> str:
    """Says what the hosts that have a node cost meanwhile; empty where there is none."""
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
    """Tells a trouble once, and again while it lasts: seldom, or soon when other hosts wait.

    Args:
        repeat_seconds: Between two times that the same is said; CHANGE_SECONDS if the number of
            hosts has changed.
    """

    def __init__(self, *, repeat_seconds: float) -> None:
        self._repeat_seconds = repeat_seconds
        self._seen: dict[str, _SeenEvent] = {}

    def news(
        self, troubles: Iterable[Trouble], *, now: float, utc: str = ""
    ) -> Iterator[tuple[Trouble, str]]:
        """Yields the troubles to tell now, in words; what is not among them is over.

        Args:
            troubles: All there are.
            now: Monotonic seconds.
            utc: The same moment, ISO 8601, for those that began before they were seen.
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
            # "1 of 16 hosts wait" is soon untrue where nodes are short; the reasons that a cluster
            # gives for the same hosts come and go.
            is_same = seen.said_hosts == trouble.hosts
            rest = self._repeat_seconds if is_same else CHANGE_SECONDS
            is_due = seen.said_at is None or now >= seen.said_at + rest
            if is_due or (has_fix and not seen.fix_is_said):
                seen.said_at, seen.said_hosts, seen.fix_is_said = now, trouble.hosts, has_fix
                words = trouble.what + (f" (for {waited:.0f} s)" if waited >= 1 else "")
                yield trouble, words + (f"; {trouble.fix}" if has_fix else "")

    def over(self, troubles: Iterable[Trouble], *, now: float) -> Trouble | None:
        """Returns a trouble for which waiting is over."""
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
    """The cluster reports what happens to its objects as events.

    Attributes:
        about: Kind and name of its object.
        job: Replicated job whose pods could not be made; empty in other events.
    """

    about: str
    reason: str
    message: str
    job: str = ""

    @property
    def text(self) -> str:
        """Returns the event in one line."""
        return f"{self.about}: {self.reason}: {self.message}"


class Happenings:
    """Picks the events that users should see, each once.

    Args:
        run: Name of its objects.
        groups: Groups of the run.
        since: When the job was made, ISO 8601: earlier events are of another job of that name.
    """

    def __init__(self, *, run: str, groups: Sequence[PodGroup], since: str) -> None:
        self._since = since
        self._jobs: Mapping[str, str] = {f"{run}-{group.job}-0": group.job for group in groups}
        self._names = (run, *self._jobs)
        # Names of Kueue's objects.
        self._workloads = (f"jobset-{run}-", f"trainjob-{run}-")
        self._told: set[tuple[str, str, str, str]] = set()
        # When an object's first event of that reason was, whatever its words.
        self._began: dict[tuple[str, str], str] = {}

    def take(self, event: Document) -> Iterator[Happening]:
        """Yields what an event tells; nothing if it is not of this run, known, or unimportant."""
        about = mapping(event, "involvedObject")
        kind, name = text(about, "kind"), text(about, "name")
        reason = text(event, "reason")
        if not self._is_ours(kind, name) or not self._is_new(event):
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
        # The job controller says so where quota, pod security or a webhook refuses its pods.
        is_refusal = kind == "Job" and reason == "FailedCreate" and "forbidden" in message
        # Of refusals each counts: one that was over may begin again.
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

    def _is_new(self, event: Document) -> bool:
        age = seconds_between(self._since, _time_of(event))
        return age is None or age >= 0


def _time_of(event: Document, *, is_first: bool = False) -> str:
    # Which of them is set depends on who wrote the event.
    times = [text(event, key) for key in ("lastTimestamp", "eventTime", "firstTimestamp")]
    return next((time for time in (reversed(times) if is_first else times) if time), "")
