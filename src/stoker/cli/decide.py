"""`stoker decide` ranks the clusters that could run a workload."""

import math
import shlex
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    Groups,
    OutputFiles,
    Overrides,
    Params,
    PlatformName,
    Prices,
    Report,
)
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.records import Profile, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The user's own numbers, in place of a profile; times are in seconds per global step."""

    instance_type: Annotated[
        str | None,
        typer.Option(
            "--instance-type", metavar="T", help="Without a profile: today's instance type."
        ),
    ] = None
    step_seconds: Annotated[
        float | None,
        typer.Option(
            "--step-seconds", metavar="S", help="Without a profile: how long a step takes today."
        ),
    ] = None
    accelerator_step_seconds: Annotated[
        float | None,
        typer.Option(
            "--accelerator-step-seconds",
            metavar="S",
            help="Without a profile: how long a step takes if it never waits for data.",
        ),
    ] = None
    vcpus_needed: Annotated[
        float | None,
        typer.Option(
            "--vcpus-needed",
            metavar="N",
            help="Without a profile: how many vCPUs feed the accelerator at its full speed.",
        ),
    ] = None


def decide_verb(
    profile: Annotated[
        Path | None,
        typer.Argument(
            metavar="PROFILE", help="The profile.json of the workload.", show_default=False
        ),
    ] = None,
    *,
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="W",
            help="Workload file, for its constraints and the number of steps.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            "--objective",
            metavar="O",
            help="Ranks by cost or by time (default: as in the workload, or cost).",
        ),
    ] = None,
    max_usd_per_hour: Annotated[
        float | None,
        typer.Option(
            "--max-usd-per-hour",
            metavar="X",
            help="Limit for the cost of all hosts per hour (default: as in the workload, or none).",
        ),
    ] = None,
    groups: Groups = None,
    guess: Guess,
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="DIR",
            help="Corrects the prediction by earlier runs: their folder or tar file, here or at s3://.",
        ),
    ] = None,
    prices: Prices = None,
    platform: PlatformName = None,
    files: OutputFiles,
    report: Report = None,
    params: Params = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Ranks clusters for the workload by predicted time and cost.

    The record is decision.json, unless --out names another file.
    """
    from stoker.catalog import catalog_of
    from stoker.cli.outputs import DECIDE_PARAMETERS, deliver, outputs_of, told_of_decision
    from stoker.cli.workloads import parse_groups, read_with_params, region_of
    from stoker.decide import decide, explain

    outputs = outputs_of(files, parameters=DECIDE_PARAMETERS)
    sets = list(overrides or ())
    if objective:
        sets.append(f"constraints.objective={objective}")
    if max_usd_per_hour is not None:
        sets.append(f"constraints.max_usd_per_hour={max_usd_per_hour}")
    if platform:
        sets.append(f"platform={platform}")
    named = read_with_params(workload, overrides=sets, params=params or ()) if workload else None
    record = _profile_of(profile, guess, workload=named)
    if workload and named:
        # An override asks "what if"; the profile belongs to the workload without it.
        profiled = read_with_params(workload, overrides=(), params=params or ())
        if record.workload_sha256 not in (None, profiled.digest()):
            raise UsageError(
                "the profile was made for another workload",
                where=f"{profile}, key workload_sha256",
                fix=f"profile again: stoker profile {workload}",
            )
    judged = named or _workload_of(record, overrides=sets)
    catalog = catalog_of(judged, prices)
    calibration = None
    if calibrate:
        from stoker.cli.calibrate import calibration_of

        calibration = calibration_of(
            calibrate, like=record, catalog=catalog, region=region_of(judged)
        )
    decision = decide(
        record,
        catalog=catalog,
        constraints=judged.constraints,
        training=judged.training,
        feed=judged.feed,
        extra_clusters=(
            [parse_groups(groups, default_type=record.host.instance_type)] if groups else []
        ),
        today=date.today(),
        workload_sha256=record.workload_sha256,
        processes_per_host=judged.cluster.dnn.processes_per_host if judged.cluster else None,
        calibration=calibration,
    )
    deliver(
        decision,
        outputs=outputs,
        name="decision",
        explain=explain,
        as_json=as_json,
        told=told_of_decision(decision, judged),
    )
    if report:
        # Imports the templates of the page: only where a report is wanted.
        from stoker.cli.report_files import report_of_decision

        report_of_decision(report, workload=judged, profile=record, decision=decision)


def _workload_of(profile: "Profile", *, overrides: list[str]) -> "Workload":
    """Returns a workload that holds what a profile alone tells."""
    from stoker.settings import workload_from

    local = profile.host.instance_type.startswith("local.")
    return workload_from(
        {
            "name": "decide",
            "command": shlex.split(str(profile.what.get("command") or "python train.py")),
            "platform": "local" if local else "sagemaker",
        },
        overrides=overrides,
    )


def _profile_of(file: Path | None, guess: Guess, *, workload: "Workload | None") -> "Profile":
    """Returns the profile in `file`, or one made from the user's own numbers."""
    from stoker.cli.workloads import todays_cluster
    from stoker.records import Profile, ProfiledHost, StepTerms, read_json

    given = _given(guess)
    if file:
        if given:
            raise UsageError(
                f"{file} and {next(iter(given))} exclude each other",
                fix="leave one of them out",
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
            "--vcpus-needed says how many vCPUs feed the accelerator at its full speed: the speed "
            "is missing",
            fix="add --accelerator-step-seconds",
        )
    if accelerator is not None and accelerator > step:
        raise UsageError(
            f"a step that never waits for data ({accelerator:g} s) cannot be longer than today's "
            f"step ({step:g} s)",
            where="--accelerator-step-seconds",
            fix="give both in seconds per global step",
        )
    cpu = needed * accelerator if needed is not None and accelerator is not None else None
    return Profile(
        host=ProfiledHost(instance_type=instance_type, count=today.count if today else 1),
        step=StepTerms(
            step_seconds=step,
            accelerator_step_seconds=accelerator,
            loader_cpu_seconds=cpu,
            global_batch_size=(workload.training.global_batch_size if workload else None) or 1,
        ),
    )


def _given(guess: Guess) -> dict[str, str | float]:
    """Returns the given values, by flag; raises UsageError for a number that is not positive."""
    flags: dict[str, str | float | None] = {
        "--instance-type": guess.instance_type,
        "--step-seconds": guess.step_seconds,
        "--accelerator-step-seconds": guess.accelerator_step_seconds,
        "--vcpus-needed": guess.vcpus_needed,
    }
    given = {flag: value for flag, value in flags.items() if value is not None}
    for flag, value in given.items():
        if isinstance(value, float) and not 0 < value < math.inf:
            raise UsageError(f"{value:g} is not a number above 0", where=flag)
    return given
