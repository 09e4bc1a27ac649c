"""Addresses of the console's pages, made from ARNs."""

_HOSTS = {"aws-cn": "console.amazonaws.cn", "aws-us-gov": "console.amazonaws-us-gov.com"}
_PAGES = {"training-job": "jobs", "processing-job": "processing-jobs"}


def job_url(arn: str) -> str:
    """The page of a training or processing job; empty for anything else."""
    kind, _, name = arn.rpartition(":")[2].partition("/")
    page = _PAGES.get(kind)
    return f"{_home(arn)}#/{page}/{name}" if page and name else ""


def pipeline_url(arn: str, *, domain: str = "") -> str:
    """The page of a pipeline, or of one of its runs.

    Pipelines are shown in Studio only, which has an address of its own for each domain. Where the
    domain is not known it is the page on which people choose one.

    Args:
        arn: Of the pipeline or of the run.
        domain: Id of the Studio domain.
    """
    if not domain.startswith("d-"):
        return f"{_home(arn)}#/studio-landing"
    region = arn.split(":")[3]
    name, _, execution = arn.rpartition(":pipeline/")[2].partition("/execution/")
    page = f"https://{domain}.studio.{region}.sagemaker.aws/pipelines/view/{name}"
    return f"{page}/executions/{execution}/graph" if execution else f"{page}/executions"


def _home(arn: str) -> str:
    _, partition, _, region, *_ = arn.split(":")
    host = _HOSTS.get(partition, f"{region}.console.aws.amazon.com")
    return f"https://{host}/sagemaker/home?region={region}"


__all__ = ["job_url", "pipeline_url"]
