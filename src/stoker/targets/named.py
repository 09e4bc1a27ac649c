"""The target of a name."""

from typing import TYPE_CHECKING

from stoker.errors import UsageError
from stoker.records import Workload, nearest
from stoker.settings import kubeflow_environment
from stoker.targets.base import Target

if TYPE_CHECKING:
    from stoker.targets.kubeflow.connection import Flags
    from stoker.targets.kubeflow.start import RunOptions

TARGETS = ("kubeflow", "sagemaker")


def target_named(
    name: str,
    *,
    workload: Workload | None = None,
    run: str = "",
    flags: "Flags | None" = None,
    options: "RunOptions | None" = None,
) -> Target:
    """The target of that name, for a workload or for a run that exists.

    Args:
        name: As on the command line.
        workload: Whose pipeline it is; it gives settings and region.
        run: An ARN gives the region, too.
        flags: Of the connection to Kubeflow; sagemaker has none.
        options: Of runs and schedules on Kubeflow.

    Raises:
        UsageError: If there is none, or the workload has no settings for it.
    """
    if name == "sagemaker":
        from stoker.targets.sagemaker import SageMakerTarget
        from stoker.targets.sagemaker.runs import region_in

        if workload is not None and workload.sagemaker is None:
            raise UsageError(
                f"workload {workload.name} has no settings for SageMaker",
                where="key sagemaker",
                fix="add sagemaker: {role: arn:aws:iam::..., output_uri: s3://...}",
            )
        return SageMakerTarget(
            settings=workload.sagemaker if workload else None, region=region_in(run)
        )
    if name == "kubeflow":
        from stoker.targets.kubeflow import KubeflowTarget
        from stoker.targets.kubeflow.connection import Flags, connection_of

        connection = connection_of(
            workload, flags=flags or Flags(), environment=kubeflow_environment()
        )
        return KubeflowTarget(connection, options=options)
    raise UsageError(f"there is no target {name}", fix=nearest(name, TARGETS))


__all__ = ["TARGETS", "target_named"]
