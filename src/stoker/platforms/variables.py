"""The STOKER_* variables that every platform sets for a job's launchers."""

import json

import msgspec

from stoker.platforms.base import JobSpec
from stoker.records import FeedSettings, StrategySettings, to_document


def job_variables(job: JobSpec, *, feed: FeedSettings | None = None) -> dict[str, str]:
    """What a launcher must know of `job` wherever it runs; paths and names are the platform's.

    Args:
        job: The job.
        feed: Instead of the job's own settings.
    """
    workers = {
        group.role: group.workers_per_host
        for group in job.groups
        if group.workers_per_host is not None
    }
    variables = {
        "STOKER_FEED": json.dumps(to_document(feed or job.feed)),
        "STOKER_WORKERS": json.dumps(workers),
        "STOKER_STRATEGY": _strategy(job.strategy),
        "STOKER_ROLES": json.dumps({group.name: group.role for group in job.groups}),
    }
    decided = job.groups[0].processes_per_host
    if decided is not None:
        variables["STOKER_PROCESSES_PER_HOST"] = str(decided)
    if job.engine.name != "feed":
        # Without what is as it is by default: SageMaker allows 512 characters.
        variables["STOKER_ENGINE"] = msgspec.json.encode(job.engine).decode()
    if job.profile:
        variables["STOKER_PROFILE"] = json.dumps(to_document(job.profile))
    if job.workload_sha256:
        variables["STOKER_WORKLOAD_SHA256"] = job.workload_sha256
    if job.replace_dataloader:
        variables["STOKER_REPLACE_DATALOADER"] = "1"
    return variables


def _strategy(strategy: StrategySettings) -> str:
    """Its name, where all else is as it is by default."""
    if strategy == StrategySettings(name=strategy.name):
        return strategy.name
    return json.dumps(to_document(strategy))
