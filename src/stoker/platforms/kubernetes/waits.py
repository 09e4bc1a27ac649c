"""Why hosts of a group do not run, as the cluster states it, and for how long they are awaited."""

from collections.abc import Callable, Sequence

from stoker.errors import JobStoppedError, NoCapacityError
from stoker.platforms.kubernetes.pods import PodGroup
from stoker.platforms.kubernetes.state import PodStatus

# Of a pod that no node can run now: it may last as long as on_no_capacity says.
UNSCHEDULABLE = "Unschedulable"
# How long hosts are awaited for these reasons. A registry may be away for a moment, and a secret
# may come late.
MAX_SECONDS = {
    "InvalidImageName": 0.0,
    "ErrImageNeverPull": 0.0,
    "ErrImagePull": 120.0,
    "ImagePullBackOff": 120.0,
    "RegistryUnavailable": 120.0,
    "RunContainerError": 120.0,
    "CreateContainerConfigError": 120.0,
    "CreateContainerError": 120.0,
}
# For any other reason, at least: large images take long.
START_SECONDS = 1800.0
# Each start goes through states without a reason, which are told only if they last.
SILENT_SECONDS = 60.0


class GroupWaits:
    """Tells a group's waits when they begin or change, and ends one that lasts too long.

    Args:
        group: The group.
        node_seconds: How long it may wait for nodes.
    """

    def __init__(self, group: PodGroup, *, node_seconds: float) -> None:
        self._group = group
        self._node_seconds = node_seconds
        # What is awaited, and for how long; another wait begins anew.
        self._wait: tuple[bool, float] | None = None
        self._since = 0.0
        self._told = ""

    def look(
        self, pods: Sequence[PodStatus], *, now: float, where: str, last_event: Callable[[str], str]
    ) -> str:
        """Returns what to tell of the group's present wait; empty: nothing new.

        Args:
            pods: Those of the run that exist.
            now: On the cluster's clock.
            where: The job, for errors.
            last_event: Returns the cluster's last warning about an object, by its name.

        Raises:
            NoCapacityError: If it has waited for nodes for as long as on_no_capacity says.
            JobStoppedError: If it has waited too long for anything else.
        """
        group = self._group.group
        hosts = {pod.host: pod for pod in pods if pod.group is self._group}
        waiting = [pod for pod in hosts.values() if not (pod.is_running or pod.is_final)]
        num_missing = group.count - len(hosts) + len(waiting)
        if not num_missing:
            self._wait = None
            self._told = ""
            return ""
        limit = max(self._node_seconds, START_SECONDS)
        has_node = True
        if not waiting:
            has_node = False
            words = "no pod has been made"
            details = last_event(self._group.hosts.partition("-{index}")[0])
        else:
            pod = waiting[0]
            words = f"pod {pod.name}: {pod.reason or 'not started'}"
            if pod.reason == UNSCHEDULABLE:
                has_node = False
                limit = self._node_seconds
            limit = MAX_SECONDS.get(pod.reason, limit)
            details = pod.message or last_event(pod.name)
        if (has_node, limit) != self._wait:
            self._wait = (has_node, limit)
            self._since = now
        seconds = now - self._since
        told = f"{num_missing} of {group.count} {group.name} hosts wait: {words}"
        if details:
            told += f": {' '.join(details.split())}"
        # A job can run without data hosts, which may come later.
        if self._group.is_dnn and seconds >= limit:
            raise self._error(f"{told} (for {seconds:.0f} s)", where=where, has_node=has_node)
        if told == self._told or not (details or seconds >= SILENT_SECONDS):
            return ""
        self._told = told
        return told

    def _error(self, what: str, *, where: str, has_node: bool) -> JobStoppedError:
        if has_node:
            fix = "kubectl describe pods shows more; check the image, its login "
            fix += "(kubernetes.image_pull_secrets), secrets and claims"
            return JobStoppedError(what, where=where, fix=fix)
        fix = "give the cluster such nodes (kubernetes.pools names their labels), or raise "
        fix += "on_no_capacity.wait_minutes"
        error = NoCapacityError(what, where=where, fix=fix)
        error.types = frozenset([self._group.group.instance_type])
        error.may_pass = False
        return error
