"""Stops a run: Kubeflow ends its pods, and what these own goes with them."""

from stoker.errors import PlatformError
from stoker.targets.base import RunState
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.deployed import run_url
from stoker.targets.kubeflow.errors import KubeflowError
from stoker.targets.kubeflow.runs import Found, find_run, state_of_run
from stoker.targets.kubeflow.status import state_of

# A pod has its grace period, and the exit handler runs behind it.
STOP_SECONDS = 600.0
POLL_SECONDS = 3.0
# Refusals of a run that ended while it was asked to stop.
_TOO_LATE = (400, 409, 500)


def stop_run(kubeflow: Kubeflow, found: Found) -> RunState:
    """Terminates the run and waits until it has ended; one that has ended stays as it is.

    Raises:
        PlatformError: If it has not ended after `STOP_SECONDS`; it goes on ending.
    """
    deadline = kubeflow.clock() + STOP_SECONDS
    if not _has_ended(found):
        try:
            kubeflow.call("run", "terminate_run", run_id=found.id)
        except KubeflowError as err:
            found = find_run(kubeflow, found.id)
            if err.status not in _TOO_LATE or not _has_ended(found):
                raise
    while True:
        found = find_run(kubeflow, found.id)
        if _has_ended(found):
            return state_of(kubeflow, found)
        if kubeflow.clock() >= deadline:
            raise PlatformError(
                f"{found.id} is {state_of_run(found.document)} after {STOP_SECONDS:.0f} s",
                where=run_url(kubeflow, found.id),
                fix=f"it was asked to stop; see later: stoker status kubeflow {found.id}",
            )
        kubeflow.sleep(POLL_SECONDS)


def _has_ended(found: Found) -> bool:
    return state_of_run(found.document) in ("succeeded", "failed", "stopped")


__all__ = ["STOP_SECONDS", "stop_run"]
