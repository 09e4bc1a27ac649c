"""Events of a run's objects, as a cluster tells them, in lines worth reading."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.platforms.kubernetes.groups import PodGroup
from stoker.platforms.kubernetes.pod_state import seconds_between
from stoker.platforms.kubernetes.reading import Document, mapping, text

# Of those that are no warnings: what tells why a run waits, or has lost a host.
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
# What pods' own states tell better, and what is part of every start or end.
_TOLD_BY_PODS = frozenset(
    ("FailedScheduling", "BackOff", "Failed", "ErrImageNeverPull", "InspectFailed", "Unhealthy")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event.

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
        """In one line."""
        return f"{self.about}: {self.reason}: {self.message}"


class Happenings:
    """Picks what is worth telling, once.

    Args:
        run: Name of its objects.
        groups: Of the run.
        since: When the job was made, ISO 8601: what was told of an earlier one of the name is old.
    """

    def __init__(self, *, run: str, groups: Sequence[PodGroup], since: str) -> None:
        self._since = since
        self._jobs: Mapping[str, str] = {f"{run}-{group.job}-0": group.job for group in groups}
        self._names = (run, *self._jobs)
        # Kueue's.
        self._workloads = (f"jobset-{run}-", f"trainjob-{run}-")
        self._told: set[tuple[str, str, str]] = set()

    def take(self, event: Document) -> Iterator[Happening]:
        """What an event tells; nothing if it is of something else, known, old, or dull."""
        about = mapping(event, "involvedObject")
        kind, name = text(about, "kind"), text(about, "name")
        reason = text(event, "reason")
        if not self._is_ours(kind, name) or not self._is_new(event):
            return
        is_warning = text(event, "type") == "Warning" and reason not in _TOLD_BY_PODS
        if not is_warning and reason not in _TELLING:
            return
        message = " ".join(text(event, "message").split())
        key = (name, reason, message)
        if key in self._told:
            return
        self._told.add(key)
        is_refusal = kind == "Job" and reason == "FailedCreate" and "forbidden" in message
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
        times = [text(event, key) for key in ("lastTimestamp", "eventTime", "firstTimestamp")]
        when = next((time for time in times if time), "")
        age = seconds_between(self._since, when)
        return age is None or age >= 0
