"""`stoker decide` ranks the clusters that could run a workload."""

import contextlib
import math
import shlex
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    HIDDEN,
    AsJson,
    OutFile,
    OutputFiles,
    Overrides,
    PlatformName,
    Prices,
    StepParams,
    offered,
    told_by_flag,
    typed_keys,
)
from stoker.errors import UsageError
from stoker.run.plan_price import with_plan_price
from stoker.terminal import say, working

if TYPE_CHECKING:
    from stoker.catalog import Catalog
    from stoker.decide import TakeAs
    from stoker.records import Calibration, Profile, Workload
    from stoker.run.earlier_runs import Memory

_EXAMPLE_TYPE = "ml.g5.2xlarge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The user's own numbers instead of a profile; times are in seconds per global step.

    Attributes:
        instance_type (T): Without a profile: instance type of today's hosts (default: from
            --workload).
        step_seconds (S): Without a profile: seconds that a step takes today (default: from the
            profile).
        accelerator_step_seconds (S): Without a profile, or with --as: seconds that a step takes
            when it never waits for data (default: unknown).
        vcpus_needed (N): Without a profile: number of vCPUs that feed the accelerator at full speed
            (default: unknown).
    """

    instance_type: str | None = None
    step_seconds: float | None = None
    accelerator_step_seconds: float | None = None
    vcpus_needed: float | None = None


def decide_verb(
    profile: Path | None = None,
    *,
    context: typer.Context,
    workload: str | None = None,
    objective: Annotated[str | None, typer.Option(autocompletion=offered("cost", "time"))] = None,
    max_usd_per_hour: float | None = None,
    groups: Annotated[list[str] | None, typer.Option("--group")] = None,
    as_type: Annotated[str | None, typer.Option("--as")] = None,
    cpu_speed: float | None = None,
    guess: Guess,
    calibrate: Path | None = None,
    memory: Path | None = None,
    branch: Annotated[str, HIDDEN] = "",
    prices: Prices = None,
    platform: PlatformName = None,
    files: OutputFiles,
    report: OutFile = None,
    package: Annotated[Path | None, HIDDEN] = None,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Rank clusters for the workload by predicted time and cost.

    The record is decision.json, unless --out names another file.

    Args:
        profile ([PROFILE]): The profile.json of the workload.
        workload (W): Read constraints and number of steps from this workload file (default: as
            profiled).
        objective (O): Rank by cost or by time (default: from the workload, or cost).
        max_usd_per_hour (X): Leave out clusters that cost more than X dollars an hour (default:
            from the workload, or no limit).
        groups (ROLE=[TYPE:]HOSTS[:WORKERS]): Also rank the cluster of these instance groups, such
            as dnn=1 and data=ml.c7i.8xlarge:2:32; may be repeated (default: only the clusters found
            by the search).
        as_type (T): Scale the profile to this instance type by the speed of its CPUs (default: the
            profiled type).
        cpu_speed (X): With --as: relative speed of a vCPU of that type (default: from the catalog
            if it knows the CPU model, or 1).
        calibrate (DIR): Correct the prediction with the earlier runs in this folder (default:
            none).
        memory (DIR): With --workload: keep the plan of the workload's last run in this folder
            unless another plan is clearly better, and correct the prediction with its runs. The
            folder is runs, or a pipeline's memory (default: none).
        branch (NAME): With a pipeline's memory: name of the branch that this training job belongs
            to.
        report (F): Also write an HTML report to this file (default: none).
        package (F): For a pipeline's step that has no folder with the code: the code's package.

    Examples:
        stoker decide profile.json
        stoker decide profile.json --workload configs/mnist.yaml --objective cost
        stoker decide --instance-type ml.g5.2xlarge --step-seconds 0.4
    """
    from stoker.catalog import catalog_of
    from stoker.cli.workloads import read_with_params
    from stoker.decide import DecisionInputs, decide, explain, refuse_unfed
    from stoker.platforms.service_limits import is_training_type
    from stoker.records.workload import own_keys, refuse_foreign
    from stoker.run.clusters import parse_groups
    from stoker.run.earlier_profiles import code_package, with_age
    from stoker.run.outputs import (
        DECIDE_PARAMETERS,
        deliver,
        outputs_of,
        step_inputs,
        told_of_decision,
    )

    outputs, given = outputs_of(files, parameters=DECIDE_PARAMETERS), step_inputs(files)
    workload, params = workload or given.workload, [*given.params, *(params or ())]
    memory = Path(given.memory) if given.memory and memory is None else memory
    keys = {
        ("constraints.objective", "--objective"): objective,
        ("constraints.max_usd_per_hour", "--max-usd-per-hour"): max_usd_per_hour,
        ("platform", "--platform"): platform,
    }
    flags, sets = typed_keys(keys, overrides)
    with told_by_flag(flags):
        named = read_with_params(workload, overrides=sets, params=params) if workload else None
    take_as = _take_as(as_type, cpu_speed, guess, profile=profile)
    record = _profile_of(profile, guess, workload=named, is_taken=take_as is not None)
    if workload and named:
        # An override asks "what if"; the profile belongs to the workload without it.
        profiled = read_with_params(workload, overrides=(), params=params)
        refuse_foreign(
            "profile",
            keys=own_keys(record.workload_keys, is_elsewhere=take_as is not None),
            digest=record.workload_sha256,
            workload=profiled,
            where=str(profile),
            fix=f"profile again: stoker profile {workload}",
        )
    with told_by_flag(flags):
        today = as_type or record.host.instance_type
        judged = named or _workload_of(today, record, overrides=sets)
    # Its profile was paid: a type that is allowed by a wrong name is reported, and is no error
    # then.
    is_step = bool(named and (params or outputs.executor))
    is_service_type = (lambda name: True) if is_step else is_training_type
    catalog = catalog_of(judged, prices, is_service_type=is_service_type)
    catalog = with_plan_price(catalog, judged, quiet=as_json)
    if take_as is None and profile is not None:
        catalog = _with_hosts_of(
            record, catalog, workload=judged, typed=context.obj or ["decide", str(profile)]
        )
    earlier, calibration = _earlier_runs(
        EarlierFolders(calibrate=calibrate, memory=memory, branch=branch),
        workload=named,
        like=None if take_as else record,
        catalog=catalog,
        quiet=as_json,
    )
    decision = decide(
        DecisionInputs(
            profile=record,
            catalog=catalog,
            constraints=judged.known_constraints,
            training=judged.training,
            feed=judged.feed,
            extra_clusters=[parse_groups(groups, default_type=today)] if groups else [],
            last=earlier.last_groups,
            today=date.today(),
            processes_per_host=judged.cluster.dnn.processes_per_host if judged.cluster else None,
            calibration=calibration,
            take_as=take_as,
            subject=_subject(workload, named),
        )
    )
    if named and take_as is None:
        packed = code_package(package, named) if package else None
        decision = with_age(decision, record, named, package=packed)
        say(decision.measured, quiet=as_json or not decision.measured)
    decision = earlier.applied(decision)
    is_here = take_as is None and judged.platform_info.is_this_machine
    if is_here and (hint := _elsewhere(profile, record)):
        say(hint, quiet=as_json or bool(files.executor_input))
    deliver(
        decision,
        outputs=outputs,
        name="decision",
        explain=explain,
        as_json=as_json,
        told=told_of_decision(decision),
    )
    if named and is_step:
        # A pipeline's next step rents hosts. The record is written all the same.
        refuse_unfed(record, named)
    if report:
        # Imports the templates of the page: only where a report is wanted.
        from stoker.run.reports import report_of_decision

        report_of_decision(report, workload=judged, profile=record, decision=decision)


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierFolders:
    """Folders of earlier runs, as typed; `branch` is of a pipeline's memory."""

    calibrate: Path | None
    memory: Path | None
    branch: str


def _earlier_runs(
    folders: EarlierFolders,
    *,
    workload: "Workload | None",
    like: "Profile | None",
    catalog: "Catalog",
    quiet: bool,
) -> "tuple[Memory, Calibration | None]":
    """Returns what is remembered, and the correction of the prediction.

    Args:
        folders: As typed.
        workload: Whose runs count. None: it is not named.
        like: The profile. None: it is scaled, and earlier runs are compared with their own.
        catalog: Types and prices.
        quiet: Whether nothing is printed.
    """
    from stoker.run.earlier_runs import Memory, memory_in

    memory, calibration = Memory(), None
    flag = "--memory" if folders.memory else "--calibrate"
    if like is None and (folders.memory or folders.calibrate):
        raise UsageError(f"{flag} cannot be used with --as", fix="leave one of them out")
    if folders.memory and workload is None:
        # The folder may have runs of several.
        raise UsageError("--memory needs the workload whose runs count", fix="add --workload W")
    if folders.memory and workload and like:
        memory = memory_in(folders.memory, workload=workload, branch=folders.branch)
        calibration = memory.calibration(like=like, catalog=catalog)
        say(_memory_words(memory, folders.memory), quiet=quiet)
    if folders.calibrate and like:
        with working(f"reading earlier runs in {folders.calibrate}", quiet=quiet):
            calibration = calibration_of(folders.calibrate, like=like, catalog=catalog)
    return memory, calibration


def _memory_words(memory: "Memory", folder: Path) -> str:
    """Returns a line on what is remembered."""
    if memory.why_not:
        return f"warning: decided without the last run's plan: {memory.why_not}"
    if memory.last is None:
        return f"memory: no run of this workload in {folder} yet"
    return f"memory: the last run was {memory.last.run}"


def _subject(file: str | None, workload: "Workload | None") -> tuple[str, ...]:
    """Returns the training as words of stoker's commands; empty: the profile's own command."""
    if file is None or workload is None:
        return ()
    # A pipeline's step has the workload as JSON.
    return (file if Path(file).suffix in (".yaml", ".yml", ".json") else f"{workload.name}.yaml",)


def _elsewhere(file: Path | None, profile: "Profile") -> str:
    """Returns how to decide for another machine; empty where this profile cannot be scaled."""
    if file is None or profile.step is None or profile.data:
        return ""
    seconds = profile.step.accelerator_step_seconds or profile.step.step_seconds
    command = ["stoker", "decide", str(file), "--as", _EXAMPLE_TYPE, "--accelerator-step-seconds"]
    return (
        f"to decide for another machine: {shlex.join(command)} {seconds:.3g}\n"
        f"  with its type (see stoker catalog) for {_EXAMPLE_TYPE}, and for {seconds:.3g} the "
        "seconds of a step there\n  without any wait for data; else nothing that costs money is "
        "recommended"
    )


def _workload_of(today: str, profile: "Profile", *, overrides: list[str]) -> "Workload":
    """Returns a workload that holds what a profile alone knows; today: an instance type."""
    from stoker.workload_file import workload_from

    # A profile has no platform: its type names it, but for Kubernetes, which has to be named.
    local = today.startswith("local.")
    return workload_from(
        {
            "name": "decide",
            "command": profile.command or ["python", "train.py"],
            "platform": "local" if local else "sagemaker",
        },
        overrides=overrides,
    )


def _take_as(
    as_type: str | None, cpu_speed: float | None, guess: Guess, *, profile: Path | None
) -> "TakeAs | None":
    from stoker.decide import TakeAs

    if as_type is None:
        if cpu_speed is not None:
            raise UsageError("--cpu-speed is only for --as", fix="add --as T")
        return None
    if profile is None:
        raise UsageError("--as needs a profile", fix=f"stoker decide profile.json --as {as_type}")
    if cpu_speed is not None and not 0.01 <= cpu_speed <= 100:
        raise UsageError(
            f"{cpu_speed:g} is not between 0.01 and 100", where="--cpu-speed", fix="1: as fast"
        )
    return TakeAs(
        instance_type=as_type,
        cpu_speed=cpu_speed,
        accelerator_step_seconds=guess.accelerator_step_seconds,
    )


def _with_hosts_of(
    profile: "Profile", catalog: "Catalog", *, workload: "Workload", typed: list[str]
) -> "Catalog":
    """Returns the catalog with the profiled hosts' types.

    Raises UsageError where the platform has no such hosts: a profile from a workstation is for a
    cloud only where it is scaled.
    """
    from stoker.catalog import local_instance
    from stoker.decide import with_profiled

    try:
        return with_profiled(profile, catalog)
    except UsageError as err:
        is_of_workstation = local_instance(profile.host.instance_type) is not None
        if profile.step is None or profile.data or not is_of_workstation:
            # A price file completes the catalog; such a profile cannot be scaled.
            raise
        priced = [each for each in catalog.instances if each.usd_per_hour is not None]
        # The workload's own type, else the cheapest with one accelerator.
        named = []
        if workload.cluster:
            with contextlib.suppress(UsageError):
                named = [catalog.get(workload.cluster.dnn.instance_type).type]
        named += [
            each.type
            for each in sorted(priced, key=lambda each: (each.accelerators != 1, each.usd_per_hour))
        ]
        if not named:
            raise
        command = ["stoker", *typed, "--as", named[0]]
        raise UsageError(
            f"{err.what}, which the profile was taken on",
            where=shlex.join(typed),
            fix=f"scale it to a type that is known, with a wider band: {shlex.join(command)}",
        ) from None


def _profile_of(
    file: Path | None, guess: Guess, *, workload: "Workload | None", is_taken: bool = False
) -> "Profile":
    from stoker.records import Profile, ProfiledHost, StepTerms, read_json
    from stoker.run.clusters import todays_cluster

    given = _given(guess)
    if is_taken:
        # A property of the type that the profile is scaled to.
        given.pop("--accelerator-step-seconds", None)
    if file:
        if given:
            raise UsageError(
                f"{file} cannot be used with {next(iter(given))}", fix="leave one of them out"
            )
        return read_json(file, Profile)
    step, accelerator = guess.step_seconds, guess.accelerator_step_seconds
    is_named = workload and (workload.cluster or workload.platform_info.is_this_machine)
    today = todays_cluster(workload).dnn if workload and is_named else None
    instance_type = guess.instance_type or (today.instance_type if today else None)
    if not instance_type or step is None:
        lacking = "--step-seconds" if instance_type else "--instance-type"
        what = f"no profile, and no {lacking} either" if given else "no profile to decide on"
        raise UsageError(
            what, fix="stoker decide profile.json, or --instance-type T --step-seconds S"
        )
    needed = guess.vcpus_needed
    if needed is not None and accelerator is None:
        raise UsageError(
            "--vcpus-needed needs the accelerator's speed", fix="add --accelerator-step-seconds"
        )
    if accelerator is not None and accelerator > step:
        raise UsageError(
            f"a step without any wait for data ({accelerator:g} s) cannot be longer than today's "
            f"step ({step:g} s)",
            where="--accelerator-step-seconds",
            fix="give both in seconds per global step",
        )
    # CPU-seconds a step.
    cpu = needed * accelerator if needed is not None and accelerator is not None else None
    return Profile(
        host=ProfiledHost(instance_type=instance_type, count=today.count if today else 1),
        step=StepTerms(
            step_seconds=step,
            accelerator_step_seconds=accelerator,
            loader_cpu_seconds=cpu,
            global_batch_size=workload.training.global_batch_size if workload else None,
        ),
    )


def _given(guess: Guess) -> dict[str, str | float]:
    """Returns the given values, by flag; raises UsageError for a number that is not positive."""
    values: dict[str, str | float | None] = asdict(guess)
    given = {f"--{n.replace('_', '-')}": value for n, value in values.items() if value is not None}
    for flag, value in given.items():
        if isinstance(value, float) and not 0 < value < math.inf:
            raise UsageError(f"{value:g} is not a number above 0", where=flag)
    return given


def calibration_of(folder: Path, *, like: "Profile", catalog: "Catalog") -> "Calibration":
    """Returns constants that fit the runs in `folder` (ID/{profile,decision,training}.json).

    A run that did not end, or whose records cannot be read, is left out.
    """
    from stoker.decide import EarlierRun, calibrate
    from stoker.records import Decision, Profile, Training, read_json

    if not folder.is_dir():
        raise UsageError(
            f"no runs in {folder}", where="--calibrate", fix="name the folder of the runs: runs"
        )
    found = []
    for run in sorted(folder.iterdir()):
        with contextlib.suppress(UsageError):
            earlier = EarlierRun(
                profile=read_json(run / "profile.json", Profile),
                decision=read_json(run / "decision.json", Decision),
                training=read_json(run / "training.json", Training),
            )
            found.append(earlier)
    return calibrate(found, like=like, catalog=catalog)
