"""`stoker decide` ranks the clusters that could run a workload."""

import contextlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from stoker.cli.options import (
    HIDDEN,
    AsJson,
    GroupTexts,
    Overrides,
    PlatformName,
    Prices,
    ReportFiles,
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
    from stoker.records import Calibration, Decision, Profile, TodaysGroup, Workload
    from stoker.run.earlier_runs import Memory
    from stoker.run.outputs import StepInputs

_EXAMPLE_TYPE = "ml.g5.2xlarge"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideFlags:
    """What is decided, by which limits, prices and earlier runs.

    Attributes:
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
        instance_type (T): Without a profile: instance type of today's hosts (default: from
            --workload).
        step_seconds (S): Without a profile: seconds that a step takes today (default: from the
            profile).
        accelerator_step_seconds (S): Without a profile, or with --as: seconds that a step takes
            when it never waits for data (default: unknown).
        vcpus_needed (N): Without a profile: number of vCPUs that feed the accelerator at full speed
            (default: unknown).
        calibrate (DIR): Correct the prediction with the earlier runs in this folder (default:
            none).
        memory (DIR): With --workload: keep the plan of the workload's last run in this folder
            unless another plan is clearly better, and correct the prediction with its runs. The
            folder is runs, or a pipeline's memory (default: none).
        branch (NAME): With a pipeline's memory: name of the branch that this training job belongs
            to.
    """

    workload: str | None = None
    objective: Annotated[str | None, typer.Option(autocompletion=offered("cost", "time"))] = None
    max_usd_per_hour: float | None = None
    groups: GroupTexts = None
    as_type: Annotated[str | None, typer.Option("--as")] = None
    cpu_speed: float | None = None
    instance_type: str | None = None
    step_seconds: float | None = None
    accelerator_step_seconds: float | None = None
    vcpus_needed: float | None = None
    calibrate: Path | None = None
    memory: Path | None = None
    branch: Annotated[str, HIDDEN] = ""
    prices: Prices = None
    platform: PlatformName = None

    def in_step(self, given: "StepInputs") -> Self:
        """Returns the flags with the inputs of a pipeline's step, which they override."""
        memory = self.memory
        if given.memory and memory is None:
            memory = Path(given.memory)
        return replace(self, workload=self.workload or given.workload, memory=memory)

    def take_as(self, profile: Path | None) -> "TakeAs | None":
        """Returns the type to which the profile is scaled."""
        from stoker.decide import TakeAs

        if self.as_type is None:
            if self.cpu_speed is not None:
                raise UsageError("--cpu-speed is only for --as", fix="add --as T")
            return None
        if profile is None:
            fix = f"stoker decide profile.json --as {self.as_type}"
            raise UsageError("--as needs a profile", fix=fix)
        if self.cpu_speed is not None and not 0.01 <= self.cpu_speed <= 100:
            raise UsageError(
                f"{self.cpu_speed:g} is not between 0.01 and 100",
                where="--cpu-speed",
                fix="1 means: as fast as the CPU that was profiled",
            )
        return TakeAs(
            instance_type=self.as_type,
            cpu_speed=self.cpu_speed,
            accelerator_step_seconds=self.accelerator_step_seconds,
        )

    def numbers(self) -> dict[str, str | float]:
        """Returns the user's own numbers, by flag, that are given in place of a profile.

        Raises UsageError for a number that is not above 0.
        """
        values: dict[str, str | float | None] = {
            "--instance-type": self.instance_type,
            "--step-seconds": self.step_seconds,
            "--accelerator-step-seconds": self.accelerator_step_seconds,
            "--vcpus-needed": self.vcpus_needed,
        }
        given = {flag: value for flag, value in values.items() if value is not None}
        for flag, value in given.items():
            if isinstance(value, float) and not 0 < value < math.inf:
                raise UsageError(
                    f"{value:g} is not a number above 0", where=flag, fix=f"for example {flag} 0.5"
                )
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a decision is asked for, before prices and earlier runs are read.

    Attributes:
        flags: As typed, or as the pipeline's step has them.
        file: File of the profile; None: its numbers were typed.
        profile: The profile.
        named: The workload of the file that is named.
        judged: `named`, or a workload that holds what the profile alone knows.
        take_as: The type to which the profile is scaled.
        quiet: Whether nothing is printed.
    """

    flags: DecideFlags
    file: Path | None
    profile: "Profile"
    named: "Workload | None"
    judged: "Workload"
    take_as: "TakeAs | None"
    quiet: bool

    def catalog(self, *, is_step: bool, typed: list[str]) -> "Catalog":
        """Returns types and prices, with the profiled hosts' types.

        Args:
            is_step: Whether a pipeline's next step rents the hosts.
            typed: The words of the command line, for an error.
        """
        from stoker.catalog import catalog_of
        from stoker.platforms.service_limits import is_training_type

        # Its profile was paid: a type that is allowed by a wrong name is reported, and is no error
        # then.
        is_service_type = (lambda name: True) if is_step else is_training_type
        catalog = catalog_of(self.judged, self.flags.prices, is_service_type=is_service_type)
        catalog = with_plan_price(catalog, self.judged, quiet=self.quiet)
        if self.take_as is None and self.file is not None:
            return _with_hosts_of(self.profile, catalog, workload=self.judged, typed=typed)
        return catalog

    def decide(self, catalog: "Catalog", *, package: Path | None) -> "Decision":
        """Ranks the clusters; the last run's plan stays unless another one is clearly better.

        Args:
            catalog: Types and prices.
            package: The code's package, where no folder has the code.
        """
        from stoker.decide import DecisionInputs, decide
        from stoker.run.clusters import parse_groups

        memory, calibration = self._earlier_runs(catalog)
        processes_per_host = None
        if self.judged.cluster:
            processes_per_host = self.judged.cluster.dnn.processes_per_host
        extra_clusters = []
        if self.flags.groups:
            today = self.flags.as_type or self.profile.host.instance_type
            extra_clusters.append(parse_groups(self.flags.groups, default_type=today))
        decision = decide(
            DecisionInputs(
                profile=self.profile,
                catalog=catalog,
                constraints=self.judged.known_constraints,
                training=self.judged.training,
                feed=self.judged.feed,
                extra_clusters=extra_clusters,
                last=memory.last_groups,
                today=date.today(),
                processes_per_host=processes_per_host,
                calibration=calibration,
                take_as=self.take_as,
                subject=_subject(self.flags.workload, self.named),
            )
        )
        return memory.applied(self._with_age(decision, package))

    def _earlier_runs(self, catalog: "Catalog") -> "tuple[Memory, Calibration | None]":
        """Returns what is remembered, and the correction of the prediction."""
        from stoker.run.earlier_runs import Memory, calibration_of, memory_in

        flags, memory, calibration = self.flags, Memory(), None
        if self.take_as and (flags.memory or flags.calibrate):
            flag = "--memory" if flags.memory else "--calibrate"
            raise UsageError(f"{flag} cannot be used with --as", fix="leave one of them out")
        if flags.memory:
            if self.named is None:
                # The folder may have runs of several.
                what = "--memory needs the workload whose runs count"
                raise UsageError(what, fix="add --workload W")
            memory = memory_in(flags.memory, workload=self.named, branch=flags.branch)
            calibration = memory.calibration(like=self.profile, catalog=catalog)
            say(_memory_words(memory, flags.memory), quiet=self.quiet)
        if flags.calibrate:
            with working(f"reading earlier runs in {flags.calibrate}", quiet=self.quiet):
                calibration = calibration_of(flags.calibrate, like=self.profile, catalog=catalog)
        return memory, calibration

    def _with_age(self, decision: "Decision", package: Path | None) -> "Decision":
        """Adds the age of a profile of this workload, and prints it."""
        from stoker.run.earlier_profiles import code_package, with_age

        if self.named is None or self.take_as:
            return decision
        code = None
        if package:
            code = code_package(package, self.named)
        decision = with_age(decision, self.profile, self.named, package=code)
        say(decision.measured, quiet=self.quiet or not decision.measured)
        return decision

    def hint(self) -> str:
        """Returns how to decide for another machine; empty where that is not asked."""
        if self.take_as is None and self.judged.platform_info.is_this_machine:
            return _elsewhere(self.file, self.profile)
        return ""


def decide_verb(
    profile: Path | None = None,
    *,
    context: typer.Context,
    flags: DecideFlags,
    files: ReportFiles,
    package: Annotated[Path | None, HIDDEN] = None,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Rank clusters for the workload by predicted time and cost.

    The record is decision.json, unless --out names another file.

    Args:
        profile ([PROFILE]): The profile.json of the workload.
        package (F): For a pipeline's step that has no folder with the code: the code's package.

    Examples:
        stoker decide profile.json
        stoker decide profile.json --workload configs/mnist.yaml --objective cost
        stoker decide --instance-type ml.g5.2xlarge --step-seconds 0.4
    """
    from stoker.decide import explain, refuse_unfed
    from stoker.run.outputs import (
        DECIDE_PARAMETERS,
        deliver,
        outputs_of,
        step_inputs,
        told_of_decision,
    )

    outputs, given = outputs_of(files, parameters=DECIDE_PARAMETERS), step_inputs(files)
    flags = flags.in_step(given)
    params = [*given.params, *(params or ())]
    question = _question(profile, flags, params=params, overrides=overrides, quiet=as_json)
    is_step = question.named is not None and bool(params or outputs.executor)
    typed = context.obj or ["decide", str(profile)]
    decision = question.decide(question.catalog(is_step=is_step, typed=typed), package=package)
    if hint := question.hint():
        say(hint, quiet=as_json or bool(files.executor_input))
    deliver(
        decision,
        outputs=outputs,
        name="decision",
        explain=explain,
        as_json=as_json,
        told=told_of_decision(decision),
    )
    if is_step:
        # A pipeline's next step rents hosts. The record is written all the same.
        refuse_unfed(question.profile, question.judged)
    if files.report:
        # Imports the templates of the page: only where a report is wanted.
        from stoker.run.reports import report_of_decision

        report_of_decision(
            files.report, workload=question.judged, profile=question.profile, decision=decision
        )


def _question(
    file: Path | None,
    flags: DecideFlags,
    *,
    params: Sequence[str],
    overrides: Sequence[str] | None,
    quiet: bool,
) -> Question:
    """Reads the profile and the workload, and refuses a profile of another workload.

    Args:
        file: File of the profile.
        flags: As typed, or as the pipeline's step has them.
        params: Parameters of the pipeline's run.
        overrides: Keys of the workload that --set sets.
        quiet: Whether nothing is printed.
    """
    from stoker.cli.workloads import read_with_params
    from stoker.records.workload import own_keys, refuse_foreign

    keys = {
        ("constraints.objective", "--objective"): flags.objective,
        ("constraints.max_usd_per_hour", "--max-usd-per-hour"): flags.max_usd_per_hour,
        ("platform", "--platform"): flags.platform,
    }
    key_flags, sets = typed_keys(keys, overrides)
    workload, named = flags.workload, None
    with told_by_flag(key_flags):
        if workload:
            named = read_with_params(workload, overrides=sets, params=params)
    take_as = flags.take_as(file)
    record = _profile_of(file, flags, workload=named)
    if workload:
        # An override asks "what if"; the profile belongs to the workload without it.
        profiled = read_with_params(workload, overrides=(), params=params)
        refuse_foreign(
            "profile",
            keys=own_keys(record.workload_keys, is_elsewhere=take_as is not None),
            digest=record.workload_sha256,
            workload=profiled,
            where=str(file),
            fix=f"profile again: stoker profile {workload}",
        )
    with told_by_flag(key_flags):
        today = flags.as_type or record.host.instance_type
        judged = named or _workload_of(today, record, overrides=sets)
    return Question(
        flags=flags,
        file=file,
        profile=record,
        named=named,
        judged=judged,
        take_as=take_as,
        quiet=quiet,
    )


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
    if Path(file).suffix in (".yaml", ".yml", ".json"):
        return (file,)
    # A pipeline's step has the workload as JSON.
    return (f"{workload.name}.yaml",)


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


def _todays_group(workload: "Workload | None") -> "TodaysGroup | None":
    """Returns today's hosts; None: neither the workload nor this machine tells them."""
    from stoker.run.clusters import todays_cluster

    if workload and (workload.cluster or workload.platform_info.is_this_machine):
        return todays_cluster(workload).dnn
    return None


def _profile_of(file: Path | None, flags: DecideFlags, *, workload: "Workload | None") -> "Profile":
    from stoker.records import Profile, read_json

    given = flags.numbers()
    if flags.as_type is not None:
        # A property of the type that the profile is scaled to.
        given.pop("--accelerator-step-seconds", None)
    if file:
        if given:
            raise UsageError(
                f"{file} cannot be used with {next(iter(given))}", fix="leave one of them out"
            )
        return read_json(file, Profile)
    return _profile_of_numbers(flags, given=tuple(given), workload=workload)


def _profile_of_numbers(
    flags: DecideFlags, *, given: tuple[str, ...], workload: "Workload | None"
) -> "Profile":
    """Returns a profile of what is typed; UsageError if that does not make one.

    Args:
        flags: With the numbers.
        given: Those of them that count, as flags.
        workload: Names today's hosts where no flag does.
    """
    from stoker.records import Profile, ProfiledHost, StepTerms

    step, accelerator = flags.step_seconds, flags.accelerator_step_seconds
    instance_type, num_hosts, global_batch_size = flags.instance_type, 1, None
    if workload:
        global_batch_size = workload.training.global_batch_size
    if today := _todays_group(workload):
        instance_type, num_hosts = instance_type or today.instance_type, today.count
    if not instance_type or step is None:
        what = "no profile to decide on"
        if given:
            lacking = "--step-seconds" if instance_type else "--instance-type"
            what = f"no profile, and no {lacking} either"
        raise UsageError(
            what, fix="stoker decide profile.json, or --instance-type T --step-seconds S"
        )
    needed = flags.vcpus_needed
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
    cpu_seconds_per_step = None
    if needed is not None and accelerator is not None:
        cpu_seconds_per_step = needed * accelerator
    return Profile(
        host=ProfiledHost(instance_type=instance_type, count=num_hosts),
        step=StepTerms(
            step_seconds=step,
            accelerator_step_seconds=accelerator,
            loader_cpu_seconds=cpu_seconds_per_step,
            global_batch_size=global_batch_size,
        ),
    )
