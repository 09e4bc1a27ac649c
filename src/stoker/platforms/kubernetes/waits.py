"""Why hosts of a group do not run, as the cluster states it, and for how long they are awaited."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.errors import JobStoppedError, NoCapacityError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.pods import PodGroup
from stoker.platforms.kubernetes.state import PodStatus, by_host

# Reasons of a container that cannot start. A registry may be away for a moment, and a secret may
# come late.
BROKEN = frozenset(
    (
        *("InvalidImageName", "ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff"),
        *("RegistryUnavailable", "RunContainerError", "CreateContainerConfigError"),
        "CreateContainerError",
    )
)
BROKEN_SECONDS = 120.0
# These stay as they are.
HOPELESS = ("InvalidImageName", "ErrImageNeverPull")
# For any other reason than a lack of nodes: large images take long.
MIN_WAIT_SECONDS = 1800.0
# Each start goes through states without a reason.
START_SECONDS = 60.0
# A wait that lasts is told again.
REPEAT_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A group that waits for hosts.

    Attributes:
        kind: What is waited for; a wait of another kind begins anew.
        what: The cluster's words.
        limit: Seconds after which it ends the run, if the group trains.
        told_after: Seconds after which it is told.
    """

    kind: str
    what: str
    limit: float
    told_after: float = 0.0


class GroupWaits:
    """Tells a group's waits when they begin, change or last, and ends one that lasts too long."""

    def __init__(self, group: PodGroup, job: JobSpec) -> None:
        self._group = group
        self._job = job
        self._kind = ""
        self._since = 0.0
        self._told = ""
        self._told_at = 0.0

    def look(
        self, pods: Sequence[PodStatus], *, now: float, where: str, last_event: Callable[[str], str]
    ) -> str:
        """Returns what to tell of the group's present wait; empty: nothing new.

        Args:
            pods: Those of the run that exist.
            where: The job, for errors.
            last_event: Returns the cluster's last warning about an object, by its name.

        Raises:
            NoCapacityError: If it has waited for nodes for as long as on_no_capacity says.
            JobStoppedError: If it has waited too long for anything else.
        """
        name, count = self._group.group.name, self._group.group.count
        hosts = [pod for (of_group, _), pod in by_host(pods).items() if of_group == name]
        waiting = [pod for pod in hosts if not pod.is_running and not pod.is_final]
        num_missing = count - len(hosts) + len(waiting)
        if not num_missing:
            self._kind = self._told = ""
            return ""
        pod = next(iter(waiting), None)
        wait = self._wait(pod, last_event)
        if wait.kind != self._kind:
            self._kind = wait.kind
            self._since = now
        seconds = now - self._since
        what = f"{num_missing} of {count} {name} hosts wait: {' '.join(wait.what.split())}"
        # A job can run without data hosts, which may come later.
        if self._group.is_dnn and seconds >= wait.limit:
            is_capacity = pod is None or not pod.node
            raise self._error(f"{what} (for {seconds:.0f} s)", where=where, is_capacity=is_capacity)
        is_known = what == self._told and now < self._told_at + REPEAT_SECONDS
        if is_known or seconds < wait.told_after:
            return ""
        self._told = what
        self._told_at = now
        return f"{what} (for {seconds:.0f} s)" if seconds >= 1 else what

    def _wait(self, pod: PodStatus | None, last_event: Callable[[str], str]) -> Wait:
        seconds = 60.0 * self._job.platform_settings.on_no_capacity.wait_minutes
        if pod and pod.is_unschedulable:
            what = f"pod {pod.name} has no node of {self._group.group.instance_type}: {pod.message}"
            return Wait(kind="nodes", what=what, limit=seconds)
        if pod and pod.waiting in BROKEN:
            what = f"pod {pod.name}: {pod.waiting}: {pod.message}"
            limit = 0.0 if pod.waiting in HOPELESS else BROKEN_SECONDS
            return Wait(kind="container", what=what, limit=limit)
        owner = pod.name if pod else self._group.hosts.partition("-{index}")[0]
        what = f"pod {owner} {pod.waiting or 'has not started'}" if pod else "no pod has been made"
        limit = max(seconds, MIN_WAIT_SECONDS)
        if event := last_event(owner):
            return Wait(kind="start", what=f"{what}: {event}", limit=limit)
        return Wait(kind="start", what=what, limit=limit, told_after=START_SECONDS)

    def _error(self, what: str, *, where: str, is_capacity: bool) -> JobStoppedError:
        if not is_capacity:
            fix = "kubectl describe pods shows more; check the image, its login "
            fix += "(kubernetes.image_pull_secrets), secrets and claims"
            return JobStoppedError(what, where=where, fix=fix)
        fix = "give the cluster such nodes (kubernetes.pools names their labels), or raise "
        fix += "on_no_capacity.wait_minutes"
        error = NoCapacityError(what, where=where, fix=fix)
        error.types = frozenset([self._group.group.instance_type])
        error.may_pass = False
        return error
