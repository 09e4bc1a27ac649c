"""`stoker profile` measures what a step of the unchanged training command waits for."""

import shlex
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    HIDDEN,
    AsJson,
    OutputFiles,
    Overrides,
    PlatformName,
    StepParams,
    Words,
    Yes,
    check_writable,
    told_by_flag,
    typed_keys,
)
from stoker.errors import UsageError
from stoker.terminal import (
    program,
    relative,
    say,
)

if TYPE_CHECKING:
    pass


def profile_verb(
    words: Words = None,
    *,
    context: typer.Context,
    budget: float | None = None,
    instance_type: str | None = None,
    platform: PlatformName = None,
    copy: bool = False,
    training_job: str | None = None,
    region: str | None = None,
    find: Annotated[str | None, HIDDEN] = None,
    package: Annotated[Path | None, HIDDEN] = None,
    files: OutputFiles,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Measure what a training step waits for.

    The command runs unchanged and for real, writes its files (with --copy: in a copy of this
    folder), and is stopped after the measurement. The record is profile.json, unless --out names
    another file.

    Args:
        budget (SECONDS): Measure for this many seconds, from the first batch on (default: from the
            workload, or 180).
        instance_type (T): Name the instance type of this host; auto asks the cloud (default: from
            the workload; on EC2, auto).
        copy: Run the command in a temporary copy of this folder, so that no file here changes
            (default: run it here).
        training_job (NAME): Run nothing; read the CPU and GPU load of this SageMaker job (default:
            run the command).
        region (R): AWS region (default: as boto3 finds it).
        find (RUN): Measure nothing; look for a kept profile of the same cost, for this run of a
            pipeline.
        package (F): With --find: the code's package.

    Examples:
        stoker profile -- python train.py --epochs 10
        stoker profile configs/mnist.yaml --budget 60
    """
    from stoker.catalog import catalog_of
    from stoker.cli.workloads import resolve
    from stoker.environment import own_pod
    from stoker.platforms import platform_named
    from stoker.profile.profiled_job import COPY, UnmeasuredError, notebook_refusal, scratch_copy
    from stoker.records import Group, to_json, write_json
    from stoker.run.billing import confirm, say_unused_types
    from stoker.run.clusters import todays_cluster
    from stoker.run.earlier_profiles import earlier_profile, kept_profiles
    from stoker.run.outputs import outputs_of, step_inputs
    from stoker.run.profiling import deliver_profile, observe, profile_and_keep, tell_earlier
    from stoker.run.run_folders import named_run_dir, new_run_dir, run_base

    if region and not training_job:
        raise typer.BadParameter("only together with --training-job", param_hint="--region")
    outputs, given = outputs_of(files), step_inputs(files)
    if training_job:
        if words or platform or copy or budget is not None:
            raise UsageError(
                "--training-job runs nothing, so it takes no command, --platform, --copy or "
                "--budget",
                where="command line",
                fix=f"stoker profile --training-job {training_job}",
            )
        observe(training_job, region=region, outputs=outputs, as_json=as_json)
        return
    keys = {
        ("profile.budget_seconds", "--budget"): budget,
        ("platform", "--platform"): platform,
        ("profile.instance_type", "--instance-type"): instance_type or None,
    }
    flags, sets = typed_keys(keys, overrides)
    # First: a notebook is a file that exists and that cannot be run.
    refused = notebook_refusal(words, where="command line") if words else None
    if refused:
        raise refused
    params = [*given.params, *(params or ())]
    with told_by_flag(flags):
        workload = resolve(words or given.words, overrides=sets, params=params, verb="profile")
    service = platform_named(workload.platform, settings=workload)
    kept_before = kept_profiles(workload, platform=service, span=given.cache_key)
    earlier = earlier_profile(
        workload, params=params, kept=kept_before, run=find or "", package=package, outputs=outputs
    )
    if earlier.is_answer:
        tell_earlier(earlier, workload, outputs=outputs, as_json=as_json)
        return
    is_here = workload.platform_info.is_this_machine
    if copy and not is_here:
        raise UsageError(
            f"--copy cannot be used on {workload.platform}: the command runs in a container there",
            where="command line",
            fix="leave --copy out",
        )
    # Before minutes are spent on a measurement that could not be kept.
    check_writable(outputs.out or Path("profile.json"), flag="--out")
    cluster = todays_cluster(workload, all_cores=workload.command == tuple(words or ()))
    today = [Group.of_today(cluster.dnn)]
    say_unused_types(workload, today, quiet=as_json)
    confirm(
        workload,
        today,
        catalog=catalog_of(workload),
        decision=None,
        assume_yes=yes,
        quiet=as_json,
        is_profile=True,
    )
    pod = own_pod()
    # A retry of a pipeline's step follows the job of the first attempt.
    is_step = pod and pod.run_id and not is_here
    branch = given.branch
    name = f"{workload.run_name(pod.run_id, branch=branch)}-profile" if pod and is_step else None
    run_dir = named_run_dir(name) if name else new_run_dir(run_base(workload, kind="profile"))
    folder: AbstractContextManager[object] = nullcontext()
    how = " and writes its files"
    how += "; --copy runs it in a copy of this folder" if is_here else ""
    if copy:
        # The measurement has another working directory.
        run_dir = run_dir.absolute()
        # A channel of this machine is a folder, which the script reads.
        data = [Path(each.uri.removeprefix("file://")) for each in workload.channels.values()]
        folder = scratch_copy(Path.cwd(), run_dir / COPY, linked=data)
        how = ", in a copy of this folder"
    say(f"the command runs for real{how}", quiet=as_json)
    say(
        f"profile of {workload.name}: measures {workload.profile.budget_seconds:.0f} s from the "
        f"first batch on, then stops the command; its output: {relative(run_dir / 'logs')}",
        quiet=as_json,
    )
    try:
        with folder:
            record = profile_and_keep(
                workload,
                cluster=cluster,
                platform=service,
                run_dir=run_dir,
                records={"step": "profile", "workload.json": to_json(workload)} if name else {},
                quiet=as_json,
            )
    except KeyboardInterrupt:
        # The parser ends with 130 and prints nothing.
        again = shlex.join([program(), *(context.obj or ["profile", *(words or ())])])
        say(
            f"stopped before there was a verdict\nkept:  {relative(run_dir / 'logs')}\n"
            f"again: {again}",
            quiet=as_json,
        )
        raise
    except UnmeasuredError as err:
        if err.observed:
            # `decide` can make a guess of it, so it is written although this is an error.
            out = outputs.out or Path("profile.json")
            write_json(out, err.observed)
            say(
                f"not enough was measured for a verdict; what was observed is in {out}",
                quiet=as_json,
            )
        raise
    kept_before.keep(record)
    deliver_profile(record, outputs=outputs, as_json=as_json)
