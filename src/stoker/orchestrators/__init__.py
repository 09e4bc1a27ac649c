"""Orchestrators are found by their names, and one of their runs is followed to its end."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from stoker.errors import PlatformError, UsageError
from stoker.orchestrators.base import Orchestrator, RunState, StepState
from stoker.records import Workload, nearest
from stoker.settings import kubeflow_environment

if TYPE_CHECKING:
    from stoker.orchestrators.kubeflow.api import Flags
    from stoker.orchestrators.kubeflow.runs import RunOptions


TARGETS = ("kubeflow", "sagemaker")


def orchestrator_named(
    name: str,
    *,
    workload: Workload | None = None,
    run: str = "",
    flags: "Flags | None" = None,
    options: "RunOptions | None" = None,
) -> Orchestrator:
    """Returns the orchestrator of that name, for a workload or for a run that exists.

    Args:
        name: Name as on the command line.
        workload: The one whose pipeline it is; it gives settings and region.
        run: An ARN gives the region, too.
        flags: Flags of the connection to Kubeflow; sagemaker has none.
        options: Options of runs and schedules on Kubeflow.

    Raises:
        UsageError: If there is none, or the workload has no settings for it.
    """
    # Imported here, so that one target needs nothing of the other, and help waits for neither.
    if name == "sagemaker":
        from stoker.orchestrators.sagemaker import SageMakerOrchestrator
        from stoker.orchestrators.sagemaker.runs import region_in

        if workload is not None and workload.sagemaker is None:
            raise UsageError(
                f"workload {workload.name} has no settings for SageMaker",
                where="key sagemaker",
                fix="add sagemaker: {role: arn:aws:iam::..., output_uri: s3://...}",
            )
        return SageMakerOrchestrator(
            settings=workload.sagemaker if workload else None, region=region_in(run)
        )
    if name == "kubeflow":
        from stoker.orchestrators.kubeflow import KubeflowOrchestrator
        from stoker.orchestrators.kubeflow.api import Flags, connection_of

        connection = connection_of(
            workload, flags=flags or Flags(), environment=kubeflow_environment()
        )
        return KubeflowOrchestrator(connection, options=options)
    raise UsageError(f"there is no target {name}", fix=nearest(name, TARGETS))


POLL_SECONDS = 10.0
# The service's longest job runs for 28 days; a run has a few steps around it.
FOLLOW_SECONDS = 30 * 86400.0
# A run that was just started may not be shown for a while.
EVENTUAL_SECONDS = 60.0
# A service or network that is away for longer ends the following, never the run.
PATIENCE_SECONDS = 900.0


def follow_run(
    target: Orchestrator,
    run: str,
    *,
    on_change: Callable[[StepState], None],
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> RunState:
    """Asks for the state until the run has ended; `on_change` gets each step that began or ended.

    Raises:
        PlatformError: If the orchestrator cannot be asked for `PATIENCE_SECONDS`, or the run has
            not ended after `FOLLOW_SECONDS`; the run itself goes on.
    """
    began = heard = clock()
    is_seen = False
    seen: dict[str, tuple[str, int]] = {}
    while True:
        try:
            state = target.status(run)
        except PlatformError as err:
            if not _may_pass(err, is_seen=is_seen, silent=clock() - heard):
                raise
        else:
            is_seen, heard = True, clock()
            for step in state.steps:
                # Not the times and reasons: those of a running step change with each look.
                mark = (step.status, step.attempts)
                is_news = step.status not in ("waiting", "not run") and step.kind != "Group"
                if is_news and seen.get(step.name) != mark:
                    seen[step.name] = mark
                    on_change(step)
            if state.has_ended:
                return state
        if clock() >= began + FOLLOW_SECONDS:
            raise PlatformError(
                f"run {run} has not ended after {FOLLOW_SECONDS / 86400:.0f} days",
                fix=f"stoker stop {target.name} {run}",
            )
        sleep(POLL_SECONDS)


def _may_pass(error: PlatformError, *, is_seen: bool, silent: float) -> bool:
    """Returns whether asking again a little later may help."""
    # Each target has an error class of its own; both have these two properties.
    if getattr(error, "is_unreachable", False):
        return silent < PATIENCE_SECONDS
    return not is_seen and getattr(error, "is_missing", False) and silent < EVENTUAL_SECONDS
