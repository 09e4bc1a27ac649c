"""Why a step's pod ended or did not start, in Kubernetes' own words."""

from collections.abc import Iterator

from stoker.records.base import Document, mapping, mappings, text

# Of a container that nobody ended: its log says more.
_PLAIN_ENDS = ("Completed", "Error")
# On the way to a start.
_PLAIN_WAITS = ("ContainerCreating", "PodInitializing")


def pod_end_words(pod: Document) -> str:
    """Returns why a pod was ended or cannot start; empty: nobody ended it, or it runs."""
    return next((words for words in _ends(mapping(pod, "status")) if words), "")


def _ends(status: Document) -> Iterator[str]:
    # Evicted, DeadlineExceeded, NodeLost, Preempting: of the whole pod.
    yield _words(status)
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in mappings(status, kind):
            yield _container_words(container, is_init=kind.startswith("init"))
    for condition in mappings(status, "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield _words(condition)


def _container_words(container: Document, *, is_init: bool) -> str:
    ended = mapping(container, "state", "terminated")
    waits = mapping(container, "state", "waiting")
    name = f"container {container.get('name')}"
    if ended.get("reason") not in (None, *_PLAIN_ENDS):
        return f"{name}: {_words(ended)} (exit code {ended.get('exitCode')})"
    if is_init and ended.get("exitCode"):
        return f"init {name} ended with exit code {ended['exitCode']}"
    if waits.get("reason") not in (None, *_PLAIN_WAITS):
        return f"{name}: {_words(waits)}"
    return ""


def _words(told: Document) -> str:
    reason, message = (" ".join(text(told, key).split()) for key in ("reason", "message"))
    if reason and message:
        return f"{reason}: {message}"
    return reason
