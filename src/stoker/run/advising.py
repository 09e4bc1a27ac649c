"""The profile of a run (given to it, kept, or measured now), and the decision that it leads to."""

from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import cast

from msgspec import structs

from stoker.catalog import Catalog, catalog_of, load_catalog
from stoker.decide import DecisionInputs, TakeAs, decide, explain, with_profiled
from stoker.errors import PlatformError, UsageError
from stoker.pipelines.base import given_profile, kept_profiles
from stoker.platforms import platform_named
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.submit import find_job
from stoker.profile import profile
from stoker.profile.explain import SUSPECTS
from stoker.records import (
    Cluster,
    Decision,
    Group,
    Json,
    Observed,
    Profile,
    ProfiledHost,
    StepTerms,
    Workload,
    read_json,
)
from stoker.records.base import mapping, text
from stoker.records.workload import own_keys, refuse_foreign
from stoker.run.cost import confirm, parse_groups, todays_cluster
from stoker.run.folders import run_dir_of
from stoker.run.outputs import KubeflowStep, deliver
from stoker.run.progress import Follow
from stoker.run.workloads import is_file_of_workload, read_with_params
from stoker.terminal import print_result, relative, say
from stoker.units import capital, known_mean, percent
from stoker.workload_file import workload_from

# CloudWatch keeps points of five minutes for 63 days.
LOAD_PERIOD_SECONDS = 300
LOAD_METRICS = ("CPUUtilization", "GPUUtilization")


def measure(
    workload: Workload,
    *,
    cluster: Cluster,
    run_dir: Path,
    name: str | None = None,
    may_go_on: bool = False,
    is_alone: bool = False,
    catalog: Catalog | None = None,
    assume_yes: bool,
) -> Profile:
    """Asks for the price, runs the command and measures it; blocks until the command ended.

    Args:
        workload: Whose command is measured.
        cluster: Today's.
        run_dir: For its logs.
        name: Name of the job; None: the folder's.
        may_go_on: Whether a later attempt finds the job by its name.
        is_alone: Whether a verdict is wanted after Ctrl-C, too: no further step follows.
        catalog: Prices; None: the workload's.
        assume_yes: Whether nothing is asked.

    Raises:
        DeclinedError: If the answer is no.
        UsageError: If not enough was measured.
    """
    confirm(
        workload,
        [Group.of_today(cluster.dnn)],
        catalog=catalog or catalog_of(workload),
        decision=None,
        assume_yes=assume_yes,
        is_profile=True,
    )
    say(
        f"profile of {workload.name}: the command runs for real and writes its files, until "
        f"{workload.profile.budget_seconds:.0f} s after its first batch; its output: "
        f"{relative(run_dir / 'logs')}"
    )
    with closing(Follow(echo=False, title="profile")) as follow:
        return profile(
            workload,
            cluster=cluster,
            platform=platform_named(workload.platform, settings=workload),
            run_dir=run_dir,
            name=name,
            may_go_on=may_go_on,
            on_line=follow.line,
            verdict_on_interrupt=is_alone,
        )


def profile_of_run(workload: Workload, *, given: str, name: str | None) -> Profile:
    """Returns the profile of a pipeline's run: the given one, a kept one, or a measured one.

    Args:
        workload: With the values of the run's parameters.
        given: The parameter reuse_profile; empty: none is given.
        name: Name of the run, by which a later attempt finds its job.
    """
    kept = kept_profiles(workload)
    found = kept.find() if kept else None
    if given:
        found = read_json(given_profile(workload, given), Profile)
        refuse_foreign(
            "profile",
            found.workload_keys,
            workload=workload,
            where="--param reuse_profile",
        )
    if found:
        say(f"nothing is run: {'; '.join(age_of(found)) or 'the profile is given'}")
        return found
    found = measure(
        workload,
        cluster=todays_cluster(workload),
        run_dir=run_dir_of(workload, name=name and f"{name}-profile", kind="profile"),
        may_go_on=bool(name),
        is_alone=True,
        assume_yes=True,
    )
    if kept:
        kept.keep(found)
    return found


def age_of(profile: Profile) -> list[str]:
    """Returns when a profile was measured, and why it should be measured again; empty: unknown."""
    if profile.measured_at is None:
        return []
    age = profile.too_old(datetime.now(UTC).date())
    return [f"profile of {profile.measured_at[:16]}", *filter(None, [age])]


def with_age(decision: Decision, profile: Profile) -> Decision:
    """Returns the decision with the age of its profile."""
    age = age_of(profile)
    warnings = (*decision.warnings, *age[1:])
    return structs.replace(decision, measured="; ".join(age), warnings=warnings)


def observed_load(aws: Aws, name: str) -> tuple[str, Observed]:
    """Returns the hosts of a SageMaker job of one group and their mean load, by CloudWatch.

    Raises:
        PlatformError: If there is no such job, it has not trained, it has several groups, or there
            are no points.
    """
    job = find_job(aws, name)
    hosts = mapping(job, "ResourceConfig")
    kind = load_catalog("sagemaker").find(text(hosts, "InstanceType"))
    cpu, gpu = (_mean_load(aws, name, job, metric) for metric in LOAD_METRICS)
    if not kind or (cpu is None and gpu is None):
        raise PlatformError(
            f"{name} has not trained on one group of hosts, or CloudWatch has no points of it",
            where=f"sagemaker:DescribeTrainingJob, region {aws.region}",
            fix="name a job of one group that trained for some minutes, or: stoker profile",
        )
    # CloudWatch gives percent of one vCPU, or of one GPU; a sample may be above the maximum.
    load = Observed(
        cpu_utilization=None if cpu is None else min(1.0, cpu / 100 / kind.vcpus),
        gpu_utilization=None if gpu is None else min(1.0, gpu / 100 / max(1, kind.accelerators)),
    )
    return f"{text(hosts, 'InstanceCount')} x {kind.type}", load


def _mean_load(aws: Aws, name: str, job: Json, metric: str) -> float | None:
    """Returns the mean of a load over the hosts of a job of one group, in percent."""
    count = int(text(job, "ResourceConfig", "InstanceCount") or 0)
    begin = text(job, "TrainingStartTime")
    if not begin or not count:
        return None
    queries = []
    for number in range(1, count + 1):
        of = {
            "Namespace": "/aws/sagemaker/TrainingJobs",
            "MetricName": metric,
            "Dimensions": [{"Name": "Host", "Value": f"{name}/algo-{number}"}],
        }
        measured = {"Metric": of, "Period": LOAD_PERIOD_SECONDS, "Stat": "Average"}
        queries.append({"Id": f"host{number}", "MetricStat": measured})
    points: list[float] = []
    for result in aws.pages(
        "cloudwatch",
        "GetMetricData",
        items="MetricDataResults",
        MetricDataQueries=queries,
        StartTime=begin,
        EndTime=datetime.now(UTC) + timedelta(seconds=LOAD_PERIOD_SECONDS),
    ):
        points += cast(list[float], result["Values"])
    return known_mean(points)


def observe(name: str, *, as_json: bool) -> None:
    """Prints the load of a training job's hosts, as CloudWatch has it; runs nothing."""
    hosts, load = observed_load(Aws(), name)
    words = f"{hosts}   CPU {percent(load.cpu_utilization)}   GPU {percent(load.gpu_utilization)}"
    words += f"\n{capital(SUSPECTS[load.suspect])}. What steps wait for: stoker profile."
    print_result({"hosts": hosts, **structs.asdict(load)}, words, as_json=as_json)


def typed_profile(workload: Workload | None, instance_type: str | None, step: StepTerms) -> Profile:
    """Returns a profile of a step that is typed in its place.

    Args:
        workload: Whose hosts today they are, without a type.
        instance_type: Of today's hosts.
        step: Its times; 0 seconds: none is typed.
    """
    today = workload.cluster.dnn if workload and workload.cluster else None
    instance_type = instance_type or (today.instance_type if today else None)
    if not instance_type or not step.step_seconds:
        raise UsageError(
            "no profile to decide on",
            fix="stoker decide profile.json, or --instance-type T --step-seconds S",
        )
    if (step.accelerator_step_seconds or 0) > step.step_seconds or step.loader_cpu_seconds == 0:
        raise UsageError(
            "a step without any wait for data is at most as long as today's, and --vcpus-needed "
            "needs it",
            where="--accelerator-step-seconds",
            fix="give both in seconds per global step",
        )
    size = workload.training.global_batch_size if workload else None
    return Profile(
        host=ProfiledHost(instance_type=instance_type, count=today.count if today else 1),
        step=structs.replace(step, global_batch_size=size),
    )


def decide_for(
    file: Path | None,
    *,
    workload_file: str | None,
    instance_type: str | None,
    step: StepTerms,
    take_as: TakeAs | None,
    groups: Sequence[str],
    prices: Path | None,
    overrides: Sequence[str],
    out: Path | None,
    kubeflow: KubeflowStep,
    as_json: bool,
) -> None:
    """Ranks the clusters, writes and prints the decision; refuses another workload's profile.

    Args:
        file: Of the profile; None: its step is typed.
        workload_file: With constraints and number of steps.
        instance_type: Of today's hosts, where the step is typed.
        step: The typed step.
        take_as: Type to which the profile is scaled.
        groups: Further cluster that is ranked.
        prices: File of prices that adds to the catalog.
        overrides: Keys of the workload that are set.
        out: File of the record.
        kubeflow: The step of a pipeline there.
        as_json: Whether JSON is printed.
    """
    named = read_with_params(workload_file, overrides=overrides) if workload_file else None
    profile = read_json(file, Profile) if file else typed_profile(named, instance_type, step)
    if workload_file:
        # An override asks "what if"; the profile belongs to the workload without it.
        refuse_foreign(
            "profile",
            own_keys(profile.workload_keys, is_elsewhere=take_as is not None),
            workload=read_with_params(workload_file, overrides=()),
            where=str(file),
            fix="profile again: stoker profile WORKLOAD",
        )
    today = take_as.instance_type if take_as else profile.host.instance_type
    # A profile has no platform: its type names it, but for Kubernetes, which has to be named.
    made_up = {
        "name": "decide",
        "command": profile.command or ["python", "train.py"],
        "platform": "local" if today.startswith("local.") else "sagemaker",
    }
    workload = named or workload_from(made_up, overrides=overrides)
    catalog = catalog_of(workload, prices)
    if file and take_as is None:
        try:
            with_profiled(profile, catalog)
        except UsageError as err:
            err.fix += "; or scale the profile to a type there: --as T"
            raise
    dnn = workload.cluster.dnn if workload.cluster else None
    subject = (workload_file or "",)
    decision = decide(
        DecisionInputs(
            profile=profile,
            catalog=catalog,
            constraints=workload.known_constraints,
            training=workload.training,
            feed=workload.feed,
            extra_clusters=[parse_groups(groups, default_type=today)] if groups else [],
            today=date.today(),
            processes_per_host=dnn.processes_per_host if dnn else None,
            take_as=take_as,
            subject=subject if is_file_of_workload(subject) else (),
        )
    )
    if named and take_as is None:
        decision = with_age(decision, profile)
    deliver(
        decision,
        out=out,
        step=kubeflow,
        explain=explain,
        as_json=as_json,
        parameters={"action": decision.action, "verdict": decision.verdict},
    )
