"""What a cluster says of a job: the status of its JobSet or TrainJob."""

from dataclasses import dataclass
from typing import Literal

from stoker.platforms.kubernetes.reading import Document, mapping, mappings, text

Phase = Literal["suspended", "running", "succeeded", "failed"]

# Of a JobSet, and of a TrainJob.
_SUCCEEDED = ("Completed", "Complete")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as its cluster sees it.

    Attributes:
        phase: running also while its pods wait for nodes.
        reason: Kubernetes' own word for the phase, such as FailedJobs; empty where there is none.
        message: The same in words.
        since: When the phase began, ISO 8601 in UTC; empty where it is not known.
        restarts: How often all pods were started again.
        is_deleted: Whether it is about to go.
    """

    uid: str
    phase: Phase
    reason: str = ""
    message: str = ""
    since: str = ""
    restarts: int = 0
    is_deleted: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will run any more, by itself."""
        return self.phase in ("succeeded", "failed")


def job_state(document: Document) -> JobState:
    """The state of a JobSet or TrainJob."""
    described, status = mapping(document, "metadata"), mapping(document, "status")
    restarts = status.get("restarts")
    phase, condition = _phase(document)
    return JobState(
        uid=text(described, "uid"),
        phase=phase,
        reason=text(condition, "reason"),
        message=text(condition, "message"),
        since=text(condition, "lastTransitionTime"),
        restarts=restarts if isinstance(restarts, int) else 0,
        is_deleted="deletionTimestamp" in described,
    )


def _phase(document: Document) -> tuple[Phase, Document]:
    status = mapping(document, "status")
    held = {
        text(condition, "type"): condition
        for condition in mappings(status, "conditions")
        if condition.get("status") == "True"
    }
    for kind in _SUCCEEDED:
        if kind in held:
            return "succeeded", held[kind]
    if "Failed" in held:
        return "failed", held["Failed"]
    match text(status, "terminalState"):
        case "Completed":
            return "succeeded", {}
        case "Failed":
            return "failed", {}
    if "Suspended" in held or mapping(document, "spec").get("suspend") is True:
        return "suspended", held.get("Suspended", {})
    return "running", {}
