"""One profile of a run: measured, or kept by an earlier attempt, and delivered."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from stoker.catalog import load_catalog
from stoker.errors import UsageError, WorkloadError
from stoker.platforms.aws import Aws
from stoker.platforms.base import Platform
from stoker.platforms.sagemaker.observed_job import describe_job, observe_job
from stoker.profile import explain, profile
from stoker.profile.combine import observed_profile
from stoker.profile.profiled_job import profiled_job
from stoker.records import Cluster, Profile, Workload, read_json, to_json
from stoker.run.earlier_profiles import EarlierProfile, reused_words
from stoker.run.outputs import Outputs, deliver, told_of_profile
from stoker.run.profile_progress import following_profile
from stoker.terminal import (
    say,
    working,
)


def deliver_profile(record: Profile, *, outputs: Outputs, as_json: bool) -> None:
    summary = told_of_profile(record)
    deliver(record, outputs=outputs, name="profile", explain=explain, as_json=as_json, told=summary)


def tell_earlier(
    earlier: EarlierProfile, workload: Workload, *, outputs: Outputs, as_json: bool
) -> None:
    """Says what is used in place of a measurement, and delivers it.

    Args:
        earlier: What was found.
        workload: As this run has it.
        outputs: Where the profile goes.
        as_json: Whether JSON is printed instead of text.
    """
    say(f"profile of {workload.name}: {earlier.words}", quiet=as_json)
    if earlier.profile is not None:
        age = reused_words(earlier.profile, workload, package=earlier.package)
        say(age.words if age else "", quiet=as_json or age is None)
        deliver_profile(earlier.profile, outputs=outputs, as_json=as_json)


def profile_and_keep(
    workload: Workload,
    *,
    cluster: Cluster,
    platform: Platform[object],
    run_dir: Path,
    records: Mapping[str, str],
    quiet: bool,
) -> Profile:
    """Profiles and shows the progress; in a pipeline, returns what an earlier attempt measured."""
    job = profiled_job(workload, group=cluster.dnn, run_dir=run_dir, records=records)
    request = platform.plan(job)
    kept = platform.kept(request) if records else ""
    if kept:
        say(f"{job.name} has measured before: this is its record", quiet=quiet)
        return read_json(kept, Profile)
    try:
        with following_profile(workload, quiet=quiet) as followed:
            record = profile(
                workload,
                cluster=cluster,
                platform=platform,
                run_dir=run_dir,
                records=records,
                on_line=followed.line,
            )
    except (UsageError, WorkloadError):
        if records:
            platform.keep(request, "")
        raise
    if records:
        platform.keep(request, to_json(record))
    return record


def observe(name: str, *, region: str | None, outputs: Outputs, as_json: bool) -> None:
    """Makes a profile of a training job's load; runs nothing.

    Args:
        name: Name of the training job on SageMaker.
        region: AWS region of the job.
        outputs: Where the profile goes.
        as_json: Whether JSON is printed instead of text.
    """
    aws = Aws(region=region)
    say(f"profile of training job {name}: reading CloudWatch", quiet=as_json)
    with working(f"reading training job {name}", quiet=as_json):
        state = describe_job(aws, name)
    catalog = load_catalog("sagemaker")
    sizes = {}
    for kind, _ in state.groups.values():
        instance = catalog.get(kind)
        # CloudWatch gives percent of one vCPU, or of one GPU.
        sizes[kind] = (instance.vcpus, instance.accelerators)
    with working(f"reading the load of {name}", quiet=as_json):
        job = observe_job(aws, state, sizes=sizes, now=datetime.now(UTC))
    record = observed_profile(job, sizes=sizes)
    deliver_profile(record, outputs=outputs, as_json=as_json)
