"""Why hosts of a run do not run, and for how long they are waited for.

One rule for all waits: each is reported when it begins, when its reason changes, after ten minutes
and then every hour, and it ends with that reason. Kubernetes' own times are never compared with
this host's: one monotonic clock counts all waits, from when this process made or adopted the job.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.events import Happenings
from stoker.platforms.kubernetes.layout import Layout, PodGroup
from stoker.platforms.kubernetes.pods import PodState, by_attempt
from stoker.platforms.kubernetes.state import ObjectState
from stoker.records import bare_type
from stoker.records.platforms import amount
from stoker.units import usd

# The taint by which Kubernetes ends the pods of a node that is known to be down.
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
# A registry may be away for a moment, and a secret may come late.
IMAGE_SECONDS = 120.0
CONTAINER_SECONDS = 120.0
# Another run may end and free its quota.
QUOTA_SECONDS = 120.0
# Provisioners of file servers take some minutes until a claim is bound.
CLAIM_SECONDS = 600.0
# After the grace period of a deleted pod.
DEAD_SECONDS = 60.0
# For any other reason: on_no_capacity.wait_minutes, but at least this: large images take long.
MIN_WAIT_SECONDS = 1800.0
# Each start goes through states that last for seconds.
START_SECONDS = 60.0
# Nodes without a fitting label or taint, of which the autoscaler has no group either.
UNFIT_SECONDS = 120.0
# A wait is reported again after this time, and then every hour.
FIRST_REPEAT_SECONDS = 600.0
REPEAT_SECONDS = 3600.0
# Restarts of a data host after which its crashes are reported.
CRASHES = 3
# Wait for nodes after which the next best plan is shown.
CAPACITY_SECONDS = 600.0
_TWICE = re.compile(r"\b([a-z][a-z ]+[a-z])(?:[.;,] \1\b)+")
_SHORT = re.compile(r"Insufficient ([A-Za-z0-9./_-]+[A-Za-z0-9])")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable")
# Waiting does not help.
_IMAGE_FOR_EVER = ("InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_CONTAINER = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
# A quota's message: `exceeded quota: q, requested: cpu=4,memory=8Gi, used: ..., limited: ...`.
_QUOTA = re.compile(r"requested: (?P<requested>\S+), used: \S+, limited: (?P<limited>\S+)")
# The autoscaler's reasons against a group, of which no time changes anything.
_UNFIT = re.compile(
    r"(?:\d+ )?(?:node\(s\) (?:didn't match|had (?:untolerated )?taint)[^,]*"
    r"(?:, that the pod didn't tolerate)?|Insufficient [^,]*|"
    r"it wouldn't fit if a new node is added)"
)
# Between two reports of one trouble whose number of hosts changes.
CHANGE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why hosts of a group do not run, what to do, and how long to wait.

    Attributes:
        key: Identity of the trouble over time.
        hosts: Number of waiting hosts; 0 if unknown.
        told_after: Seconds after which it is first told.
        fix_after: Seconds after which `fix` is worth showing.
        fatal_after: Seconds after which waiting ends; None: never.
        is_capacity: Whether other types or a later retry may help (on_no_capacity).
        may_pass: Whether a later retry of the same plan may help.
        is_dead_node: Whether a node that does not answer keeps a pod from ending.
        is_finished: Whether all dnn hosts have succeeded.
    """

    key: str
    group: str
    what: str
    hosts: int = 0
    fix: str = ""
    told_after: float = 0.0
    fix_after: float = 0.0
    fatal_after: float | None = None
    is_capacity: bool = False
    may_pass: bool = False
    is_dead_node: bool = False
    is_finished: bool = False


def troubles_of(
    pods: Sequence[PodState],
    layout: Layout,
    *,
    namespace: str,
    deleted_seconds: Mapping[str, float],
    unfit: Mapping[str, str],
) -> Iterator[Trouble]:
    """Yields what is wrong with the pods: one trouble of a kind per group.

    Args:
        deleted_seconds: Time since the deletion of pods was seen, by their uids.
        unfit: The autoscaler's words on pods for which none of its groups has nodes, by name.
    """
    alive = [pod for pod in pods if not pod.is_final and not pod.deleted_at]
    for group in layout.groups:
        waiting = [pod for pod in alive if pod.group == group.group.name]
        yield from _unschedulable_troubles(waiting, group, layout.job, unfit)
        yield from _container_troubles(waiting, group, layout.image)
        if not group.is_dnn:
            yield from _crashes(waiting, group, _bill(waiting, layout))
    yield from _dead_nodes(pods, alive, layout, namespace, deleted_seconds)


def refused_pods(group: PodGroup, message: str) -> Trouble:
    """Returns the trouble of a group whose pods are refused, with the job controller's message."""
    what = f"pods of {group.group.name} are refused: {message}"
    fix = "ask who runs the cluster"
    is_for_ever = is_of_quota(message) and exceeds(message, times=group.group.count)
    if is_for_ever:
        fix = "the quota is smaller than the request: ask for more, or plan fewer or smaller hosts"
    elif is_of_quota(message):
        fix = "free some of the namespace's quota, or ask for more (kubectl describe quota); "
        fix += "or plan fewer or smaller hosts"
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
        fatal_after=_fatal_after(group, 0.0 if is_for_ever else QUOTA_SECONDS),
        is_capacity=is_of_quota(message),
        may_pass=not is_for_ever,
    )


def exceeds(message: str, *, times: int) -> bool:
    """Returns whether a quota's whole limit is below `times` the request that it refused."""
    match = _QUOTA.search(message)
    if match is None:
        return False
    requested = _amounts(match["requested"])
    limited = _amounts(match["limited"])
    try:
        return any(
            times * amount(requested[key]) > amount(limited[key])
            for key in requested.keys() & limited.keys()
        )
    except ArithmeticError:
        return False


def _amounts(listed: str) -> dict[str, str]:
    """Returns amounts by resource: `cpu=4,memory=1Gi`."""
    return dict(part.partition("=")[::2] for part in listed.split(","))


def is_of_quota(message: str) -> bool:
    return "exceeded quota" in message


def lacks_claim(unschedulable: str) -> bool:
    """Whether a pod waits for a volume claim, so that another node would not help."""
    # The scheduler's words: `pod has unbound immediate PersistentVolumeClaims`,
    # `persistentvolumeclaim "datasets" not found`.
    return not short_of(unschedulable) and "persistentvolumeclaim" in unschedulable.lower()


def short_of(message: str) -> list[str]:
    """Returns the resources that the scheduler reports as missing: `nvidia.com/gpu`."""
    return list(dict.fromkeys(_SHORT.findall(message)))


def has_no_group(message: str) -> bool:
    """Returns whether the autoscaler says of all its groups that their nodes never fit the pod."""
    reason = message.partition("scale-up")[2].strip(" :().")
    return bool(reason) and not _UNFIT.sub("", reason).strip(", ")


def _unschedulable_troubles(
    pods: Sequence[PodState], group: PodGroup, job: JobSpec, unfit: Mapping[str, str]
) -> Iterator[Trouble]:
    without_node = [pod for pod in pods if pod.unschedulable]
    if not without_node:
        return
    reason = _scheduler_reason(without_node[0])
    if lacks_claim(reason):
        fix = "make the claim that channels, volumes or kubernetes.output name, or see why it is "
        fix += "not bound: kubectl describe pvc"
        what = f"a claim of volumes: {reason}"
        yield _waiting("claim", without_node, group, what, fix, CLAIM_SECONDS)
        return
    refusals = [unfit[pod.name] for pod in without_node if pod.name in unfit]
    yield _without_node(without_node, group, job, reason=reason, refusals=refusals)


def _scheduler_reason(pod: PodState) -> str:
    # The second half explains why preemption does not help, node by node.
    reason = " ".join(pod.unschedulable.split(" preemption:")[0].split())
    # Several plugins report the same: `persistentvolumeclaim "a" not found. not found`.
    return _TWICE.sub(r"\1", reason).rstrip(".; ")


def _without_node(
    pods: Sequence[PodState], group: PodGroup, job: JobSpec, *, reason: str, refusals: Sequence[str]
) -> Trouble:
    """Returns the wait for nodes.

    Args:
        pods: All without a node.
        reason: The scheduler's.
        refusals: Why the autoscaler has no group of nodes for them; empty if it may have one.
    """
    wait_minutes = job.platform_settings.on_no_capacity.wait_minutes
    kind = "unschedulable"
    seconds = 60.0 * wait_minutes
    pool = bare_type(group.group.instance_type)
    what = f"{_hosts(pods, group)} for a node of {pool}"
    missing = short_of(reason)
    if missing:
        what += f", short of {', '.join(missing)}"
    what += f": {reason}"
    # A node that is only full may get free, and the autoscaler does not know all nodes.
    if refusals and not missing:
        kind = "unfit"
        seconds = UNFIT_SECONDS
        what += f"; {refusals[0]}"
    fix = job.next_best_advice
    fix_after = CAPACITY_SECONDS
    if group.is_dnn:
        limit = f"it waits {wait_minutes} min in all (on_no_capacity)"
        fix = "; ".join(filter(None, (limit, fix)))
    # The scheduler's words where no node has the labels that are asked for.
    if not missing and "didn't match" in reason:
        fix_after = 0.0
        labels = ", ".join(f"{key}={value}" for key, value in group.node_selector.items())
        fix = f"is there a node with {labels}? kubernetes.pools.{pool}.pod has its nodeSelector"
    return Trouble(
        key=f"{kind} {group.group.name}",
        group=group.group.name,
        what=what,
        hosts=len(pods),
        fix=fix,
        fix_after=fix_after,
        fatal_after=_fatal_after(group, seconds),
        is_capacity=True,
    )


def _fatal_after(group: PodGroup, seconds: float) -> float | None:
    """Returns seconds after which a group's trouble ends the wait; None: never.

    A job can run without data hosts, which may come later.
    """
    if group.is_dnn:
        return seconds
    return None


def _container_troubles(pods: Sequence[PodState], group: PodGroup, image: str) -> Iterator[Trouble]:
    image_seconds = dict.fromkeys(_IMAGE, IMAGE_SECONDS) | dict.fromkeys(_IMAGE_FOR_EVER, 0.0)
    image_fix = "push it, check its name, and name its login in kubernetes.image_pull_secrets"
    fix = f"check secrets, kubernetes.{group.group.role}.pod (envFrom, volumes) and the entry point"
    for kind, what, seconds, advice in (
        ("image", f"the image {group.settings.image or image}", image_seconds, image_fix),
        ("container", "their containers", dict.fromkeys(_CONTAINER, CONTAINER_SECONDS), fix),
    ):
        waiting = [pod for pod in pods if pod.waits_for in seconds]
        if waiting:
            why = f"({waiting[0].waits_for}): {waiting[0].waits_because or 'no reason is given'}"
            wait = seconds[waiting[0].waits_for]
            yield _waiting(kind, waiting, group, f"{what} {why}", advice, wait)


def _waiting(
    kind: str, pods: Sequence[PodState], group: PodGroup, what: str, fix: str, seconds: float
) -> Trouble:
    return Trouble(
        key=f"{kind} {group.group.name}",
        group=group.group.name,
        what=f"{_hosts(pods, group)} for {what}",
        hosts=len(pods),
        fix=fix,
        fatal_after=_fatal_after(group, seconds),
    )


def _crashes(pods: Sequence[PodState], group: PodGroup, bill: str) -> Iterator[Trouble]:
    """Yields the data hosts that crash at each start: they cost as much as others."""
    crashing = [pod for pod in pods if pod.restarts >= CRASHES and not pod.is_running]
    if not crashing:
        return
    most = max(pod.restarts for pod in crashing)
    name = group.group.name
    yield Trouble(
        key=f"crashes {name}",
        group=name,
        what=f"{len(crashing)} of {group.group.count} {name} hosts crash at each start, up to "
        f"{most} times{bill}: {crashing[0].waits_for}",
        hosts=len(crashing),
        fix=f"see the last lines of {crashing[0].host}; the training does not wait for them if it "
        "loads samples itself",
    )


def _dead_nodes(
    pods: Sequence[PodState],
    alive: Sequence[PodState],
    layout: Layout,
    namespace: str,
    deleted_seconds: Mapping[str, float],
) -> Iterator[Trouble]:
    """Yields the pods that cannot end until their kubelet answers: one for a group and node."""
    replaced = {pod.host for pod in alive}
    leaving = {
        (pod.group, pod.node): pod
        for pod in reversed(pods)
        if pod.node and pod.deleted_at and not pod.is_final
    }
    for pod in reversed(leaving.values()):
        seconds = deleted_seconds.get(pod.uid, 0.0)
        # A data host's pod is replaced without waiting for its node.
        is_held = pod.role == "dnn" and pod.host not in replaced
        if seconds >= pod.grace_seconds + DEAD_SECONDS:
            yield _dead_node(pod, alive, layout, namespace, is_held=is_held)
        elif is_held and pod.is_node_unready:
            yield _dying_node(pod, alive, layout, namespace)


def _dead_node(
    pod: PodState,
    alive: Sequence[PodState],
    layout: Layout,
    namespace: str,
    *,
    is_held: bool,
) -> Trouble:
    what = f"{pod.host}: pod {pod.name} should have ended by {pod.deleted_at}, and its node "
    what += f"{pod.node} has not confirmed it"
    fatal_after = None
    if is_held:
        what += f"; until then no other pod takes its place{_bill(alive, layout, 'other ')}"
        fatal_after = 0.0
        if layout.settings.dead_node == "wait":
            fatal_after = 60.0 * layout.settings.dead_node_minutes
    return Trouble(
        key=f"dead node {pod.group} {pod.node}",
        group=pod.group,
        what=what,
        hosts=1,
        fix=_freed(pod, namespace),
        fatal_after=fatal_after,
        is_dead_node=True,
    )


def _dying_node(
    pod: PodState, alive: Sequence[PodState], layout: Layout, namespace: str
) -> Trouble:
    """Returns what is to come of a pod that is deleted on a node that is not ready.

    It ends nothing: the node may come back within the pod's grace period.
    """
    due = f"{pod.grace_seconds + DEAD_SECONDS:.0f} s after its deletion"
    then = "the run fails"
    if layout.settings.dead_node == "wait":
        then = f"the run waits {layout.settings.dead_node_minutes} min more, and then fails"
    what = f"{pod.host}: node {pod.node} is not ready, and pod {pod.name} is being deleted; no "
    what += f"other pod takes its place until the node confirms it{_bill(alive, layout, 'other ')}"
    what += f"; if it has not {due}, {then} (kubernetes.dead_node)"
    return Trouble(
        key=f"dying node {pod.group} {pod.node}",
        group=pod.group,
        what=what,
        hosts=1,
        fix=_freed(pod, namespace),
    )


def _freed(pod: PodState, namespace: str) -> str:
    return (
        f"if that node is down: kubectl taint nodes {pod.node} {OUT_OF_SERVICE}, or "
        f"kubectl delete node {pod.node}; if only the pod's processes have certainly ended: "
        f"kubectl delete pod {pod.name} -n {namespace} --force --grace-period=0"
    )


def idle_wait(
    pods: Sequence[PodState],
    layout: Layout,
    *,
    state: ObjectState,
    events: Happenings,
    namespace: str,
) -> Trouble | None:
    """Returns why not all dnn hosts have a process, where `troubles_of` has no reason.

    The rule for all other waits, whatever their cause: a controller, webhook, scheduler, kubelet or
    registry that is down, an object that is missing, a queue. `pods` exist, or have succeeded.
    """
    if state.phase == "suspended":
        return _admission(layout, events, namespace=namespace)
    name = layout.dnn.group.name
    count = layout.dnn.group.count
    hosts = {pod.index: pod for pod in by_attempt(pods) if pod.group == name}
    idle = [pod for pod in hosts.values() if not (pod.is_running or pod.has_succeeded)]
    told_after = START_SECONDS
    why = events.last_of("Job", f"-{layout.dnn.job}-0") or events.last_of("JobSet")
    if idle:
        number_of = len(idle)
        kind, words = _idleness(idle[0])
        what = f"wait: pod {idle[0].name} {words}"
        why = events.last_of("Pod", idle[0].name)
        # A pod that is deleted may still be there for its grace period.
        told_after += idle[0].grace_seconds
    elif len(hosts) != count:
        number_of = count - len(hosts)
        kind = "unmade"
        what = "have no pod"
    elif all(pod.has_succeeded for pod in hosts.values()):
        number_of = count
        kind = "unended"
        what = "have succeeded, and their job does not end"
    else:
        return None
    wait_minutes = layout.job.platform_settings.on_no_capacity.wait_minutes
    return Trouble(
        key=f"{kind} {name}",
        group=name,
        what=f"{number_of} of {count} {name} hosts {what}{_last(why)}",
        hosts=number_of,
        fix=f"kubectl describe jobsets,jobs,pods -n {namespace} shows what hinders it; are "
        "all nodes (kubectl get nodes), JobSet's controller and its webhook up (kubectl get pods "
        "-n jobset-system)?",
        told_after=told_after,
        fatal_after=max(60.0 * wait_minutes, MIN_WAIT_SECONDS),
        is_finished=kind == "unended",
    )


def _admission(layout: Layout, events: Happenings, *, namespace: str) -> Trouble:
    """Returns the wait for a queue's admission, which may last for days and costs nothing."""
    name = layout.dnn.group.name
    by = f" by queue {layout.queue}" if layout.queue else ": its JobSet is suspended"
    why = events.last_of("Workload") or events.last_of("JobSet")
    return Trouble(
        key=f"admission {name}",
        group=name,
        what=f"the job waits for admission{by}{_last(why)}",
        fix=f"see whether the queue has quota: kubectl describe workloads -n {namespace}",
        told_after=FIRST_REPEAT_SECONDS,
        fatal_after=60.0 * layout.settings.queue_wait_minutes,
        is_capacity=True,
    )


def _last(event: str) -> str:
    return f"; last event: {event}" if event else ""


def _idleness(pod: PodState) -> tuple[str, str]:
    """Returns the kind of a wait for a pod's process, and its message."""
    if pod.is_final:
        code = f" with exit code {pod.ended.exit_code}" if pod.ended else ""
        return "unreplaced", f"has ended{code}, and the job neither ends nor restarts"
    if pod.deleted_at:
        return "deleted", "is deleted, and still exists"
    if pod.gates:
        return "gated", f"is held by scheduling gates: {', '.join(pod.gates)}"
    if not pod.node:
        return "unseen", "has no node, and no scheduler says why"
    return "container", f"on node {pod.node} has no process ({pod.waits_for or 'without a state'})"


def _bill(pods: Sequence[PodState], layout: Layout, other: str = "") -> str:
    """Returns the cost of the hosts that have a node during that time; empty if there are none."""
    groups = {group.group.name: group.group for group in layout.groups}
    billed = [groups[pod.group].instance_type for pod in pods if pod.node]
    if not billed:
        return ""
    hosts = f"{len(billed)} {other}hosts are"
    if len(billed) == 1:
        hosts = f"1 {other}host is"
    prices = [layout.job.prices[name] for name in billed if name in layout.job.prices]
    if len(prices) < len(billed):
        return f", and {hosts} billed"
    return f", and {hosts} billed, {usd(sum(prices))} an hour"


def _hosts(pods: Sequence[PodState], group: PodGroup) -> str:
    return f"{len(pods)} of {group.group.count} {group.group.name} hosts wait"


@dataclass(slots=True)
class _Wait:
    seconds: float = 0.0
    told_at: float | None = None
    told_hosts: int = 0
    fix_is_told: bool = False

    def is_due(self, trouble: Trouble) -> bool:
        if self.told_at is None:
            return self.seconds >= trouble.told_after
        # By the number of hosts: the reasons for the same hosts come and go.
        if self.told_hosts != trouble.hosts:
            return self.seconds >= self.told_at + CHANGE_SECONDS
        is_first = self.told_at < FIRST_REPEAT_SECONDS
        rest = FIRST_REPEAT_SECONDS if is_first else REPEAT_SECONDS
        return self.seconds >= self.told_at + rest


class TroubleLog:
    """Tells troubles when they begin, and at growing intervals while they last.

    A trouble that alternates with others of its group lasts: its times add up.
    """

    def __init__(self) -> None:
        # By group and key.
        self._waits: dict[tuple[str, str], _Wait] = {}
        self._current: dict[tuple[str, str], Trouble] = {}
        self._looked_at = 0.0

    def news(self, troubles: Iterable[Trouble], *, now: float) -> Iterator[tuple[Trouble, str]]:
        """Yields the troubles to tell now (monotonic seconds), with their messages."""
        before = self._current
        self._current = {(trouble.group, trouble.key): trouble for trouble in troubles}
        troubled = {group for group, _ in self._current}
        self._waits = {key: wait for key, wait in self._waits.items() if key[0] in troubled}
        seconds = now - self._looked_at
        self._looked_at = now
        for key in before.keys() & self._waits.keys():
            self._waits[key].seconds += seconds
        for key, trouble in self._current.items():
            wait = self._waits.setdefault(key, _Wait())
            has_fix = bool(trouble.fix) and wait.seconds >= trouble.fix_after
            # A fix is shown as soon as it is due, not with the next repeat.
            is_new_fix = wait.told_at is not None and has_fix and not wait.fix_is_told
            if not (wait.is_due(trouble) or is_new_fix):
                continue
            wait.told_at = wait.seconds
            wait.told_hosts = trouble.hosts
            wait.fix_is_told = has_fix
            words = trouble.what
            if wait.seconds >= 1:
                words += f" (for {wait.seconds:.0f} s)"
            if has_fix:
                words += f"; {trouble.fix}"
            yield trouble, words

    def over(self) -> Trouble | None:
        """Returns a current trouble for which waiting has ended, or None."""
        for key, trouble in self._current.items():
            limit = trouble.fatal_after
            if limit is not None and self._waits[key].seconds >= limit:
                return trouble
        return None
