"""The TrainingRuntime of a TrainJob: made for the run, or applied by others before it."""

from collections.abc import Sequence

from stoker.errors import PlatformError
from stoker.logs import Log
from stoker.platforms.kubernetes.api import Cluster
from stoker.platforms.kubernetes.api_errors import ApiError
from stoker.platforms.kubernetes.names import REQUEST_ANNOTATION
from stoker.platforms.kubernetes.owner import owned, owners_of
from stoker.platforms.kubernetes.reading import Document, mapping, name_of, text
from stoker.platforms.kubernetes.request import KubernetesRequest
from stoker.platforms.kubernetes.resources import RUNTIMES
from stoker.platforms.kubernetes.state import job_state

# A runtime goes when the last TrainJob that uses it has gone.
GONE_SECONDS = 120.0
LOOK_SECONDS = 1.0


def provide_runtime(
    cluster: Cluster, request: KubernetesRequest, owners: Sequence[Document], *, log: Log
) -> bool:
    """Makes the runtime unless it is there; gives whether it was made now.

    Args:
        cluster: That is to have it.
        request: With the runtime.
        owners: Of a runtime that is made, until the TrainJob owns it.
        log: For what is worth telling.

    Raises:
        PlatformError: If there is another one of that name, or none where one should be.
    """
    wanted = request.runtime
    assert wanted is not None
    name, digest = name_of(wanted), _digest(wanted)
    if not request.runtime_is_ours:
        found = cluster.find(RUNTIMES, name)
        if found is None or _digest(found) != digest:
            what = "is of another plan or workload" if found else "is not there"
            raise PlatformError(
                f"TrainingRuntime {name} {what}",
                where=f"namespace {cluster.namespace}, key kubernetes.runtime",
                fix="let an administrator apply what stoker render runtime prints for this plan, "
                "or leave kubernetes.runtime out",
            )
        return False
    deadline = cluster.clock() + GONE_SECONDS
    while True:
        try:
            cluster.create(RUNTIMES, owned(wanted, owners))
            return True
        except ApiError as err:
            if not err.is_taken:
                raise
        found = cluster.find(RUNTIMES, name)
        if found is None:
            continue
        if not job_state(found).is_deleted:
            if _digest(found) == digest:
                return False
            if any(text(owner, "kind") == "TrainJob" for owner in owners_of(found)):
                _refuse_runtime(name, cluster.namespace)
            log.event("runtime_is_replaced", runtime=name)
            cluster.delete(RUNTIMES, name)
        if cluster.clock() >= deadline:
            _refuse_runtime(name, cluster.namespace)
        cluster.sleep(LOOK_SECONDS)


def _refuse_runtime(name: str, namespace: str) -> None:
    raise PlatformError(
        f"there is another TrainingRuntime {name}, and a TrainJob that uses it",
        where=f"namespace {namespace}",
        fix="choose another --name",
    )


def _digest(document: Document) -> str:
    return text(mapping(document, "metadata", "annotations"), REQUEST_ANNOTATION)
