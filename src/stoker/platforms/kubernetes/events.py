"""Kubernetes' events that explain why a run's pods do not run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.platforms.kubernetes.api import text
from stoker.platforms.kubernetes.layout import PodGroup
from stoker.platforms.kubernetes.pods import seconds_between
from stoker.records.base import Document, mapping

# Normal events that explain why a run waits or lost a host.
_TELLING = (
    "Admitted",
    "NotTriggerScaleUp",
    "Pending",
    "Preempted",
    "QuotaReserved",
    "TriggeredScaleUp",
    "Nominated",
)
# Known from the pods' states, or part of every start or end.
_TOLD_BY_PODS = (
    "FailedScheduling",
    "BackOff",
    "Failed",
    "ErrImageNeverPull",
    "InspectFailed",
    "Unhealthy",
)
# Part of every start: pods exist before the objects that the job owns.
_TOLD_LATE = ("FailedMount", "FailedAttachVolume")
LATE_SECONDS = 60.0
# A JobSet's end, known from its state.
_TOLD_BY_JOB = ("FailJobSetFailurePolicyAction", "FailedJobs", "ReachedMaxRestarts")


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

    Those before `since` (ISO 8601), the job's creation, are of another job of its name.
    """

    def __init__(self, *, run: str, groups: Sequence[PodGroup], since: str) -> None:
        self._run = run
        self._since = since
        self._jobs: Mapping[str, str] = {f"{run}-{group.job}-0": group.job for group in groups}
        # Names of Kueue's objects.
        self._workloads = (f"jobset-{run}-", f"trainjob-{run}-")
        self._told: set[tuple[str, str, str, str]] = set()
        # Time of an object's first event of that reason.
        self._began: dict[tuple[str, str], str] = {}
        # Time and text of an object's last event.
        self._last: dict[tuple[str, str], tuple[str, str]] = {}

    def last_of(self, kind: str, name: str = "") -> str:
        """Returns reason and message of the latest event for these objects, reported or not."""
        latest = [last for key, last in self._last.items() if key[0] == kind and name in key[1]]
        return max(latest, default=("", ""))[1]

    def take(self, event: Document) -> Iterator[Happening]:
        """Yields an event of this run if it is new and important."""
        about = mapping(event, "involvedObject")
        kind = text(about, "kind")
        name = text(about, "name")
        reason = text(event, "reason")
        age = seconds_between(self._since, _time_of(event))
        if not self._is_ours(kind, name) or (age is not None and age < 0):
            return
        message = " ".join(text(event, "message").split())
        last = (_time_of(event), f"{reason}: {message}")
        self._last[kind, name] = max(last, self._last.get((kind, name), last))
        # Kubernetes grades events as Normal or Warning; the normal ones that matter are listed.
        is_warning = text(event, "type") == "Warning" and reason not in _TOLD_BY_PODS
        is_told = kind == "JobSet" and reason in _TOLD_BY_JOB
        if is_told or not (is_warning or reason in _TELLING):
            return
        if reason in _TOLD_LATE:
            first = self._began.setdefault((name, reason), _time_of(event, is_first=True))
            lasted = seconds_between(first, _time_of(event))
            if lasted is not None and lasted < LATE_SECONDS:
                return
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
                return name == self._run
            case "Job":
                return name in self._jobs
        begins = {"Pod": tuple(f"{job}-" for job in self._jobs), "Workload": self._workloads}
        return name.startswith(begins.get(kind, ()))


def _time_of(event: Document, *, is_first: bool = False) -> str:
    # It depends on the event's writer which of them are set.
    first = text(event, "firstTimestamp")
    last = text(event, "lastTimestamp")
    only = text(event, "eventTime")
    if is_first:
        return first or only or last
    return last or only or first
