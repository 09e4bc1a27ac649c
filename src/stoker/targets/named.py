"""The target of a name."""

from stoker.errors import UsageError
from stoker.records import Workload, nearest
from stoker.targets.base import Target

TARGETS = ("kubeflow", "sagemaker")


def target_named(name: str, *, workload: Workload | None = None, run: str = "") -> Target:
    """The target of that name, for a workload or for a run that exists.

    Args:
        name: As on the command line.
        workload: Whose pipeline it is; it gives settings and region.
        run: An ARN gives the region, too.

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
    if name in TARGETS:
        raise UsageError(
            f"pipelines on {name} cannot be handled yet", fix="stoker upload sagemaker WORKLOAD"
        )
    raise UsageError(f"there is no target {name}", fix=nearest(name, TARGETS))


__all__ = ["TARGETS", "target_named"]
