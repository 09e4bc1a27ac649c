"""The verbs of single components take files in, run the body, and give a file and words out."""

import json
import math
import re
import secrets
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import msgspec

from stoker.catalog import catalog_of
from stoker.cli.outputs import Outputs, deliver, kept_model, told_of_decision, told_of_training
from stoker.cli.workloads import (
    RUNS,
    named_run_dir,
    new_run_dir,
    parse_groups,
    read_with_params,
    region_of,
    resolve,
    todays_cluster,
)
from stoker.errors import FeedError, UsageError
from stoker.platforms.base import JobSpec, Platform, RequestT
from stoker.records import (
    Decision,
    Group,
    Profile,
    ProfiledHost,
    StepTerms,
    Training,
    Workload,
    read_json,
)
from stoker.records.training_facts import copied_to
from stoker.settings import workload_from

# As the first line of a rank's failure, or the last of its traceback, names it.
_ERROR_OF_THE_FEED = re.compile(
    r"^(rank \d+ on \S+: |stoker\.errors\.)(Feed|FeedLost|Shipping|Protocol)Error: ", re.MULTILINE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """The user's own numbers where there is no profile; seconds of a global step."""

    instance_type: str | None
    step_seconds: float | None
    accelerator_step_seconds: float | None
    vcpus_needed: float | None


def decide_command(
    profile_file: Path | None,
    *,
    guess: Guess,
    outputs: Outputs,
    workload_file: str | None,
    prices: Path | None,
    calibrate: str | None,
    report: Path | None,
    groups: Sequence[str],
    overrides: Sequence[str],
    params: Sequence[str],
    as_json: bool,
    today: date,
) -> None:
    """Runs `stoker decide`."""
    from stoker.cli.calibrate import calibration_of
    from stoker.decide import decide, explain

    workload = (
        read_with_params(workload_file, overrides=overrides, params=params)
        if workload_file
        else None
    )
    profile = _profile_of(profile_file, guess, workload=workload)
    if workload_file and workload:
        # An override asks "what if"; the profile belongs to the workload without it.
        profiled = read_with_params(workload_file, overrides=(), params=params)
        if profile.workload_sha256 not in (None, profiled.digest()):
            raise UsageError(
                "the profile was made for another workload",
                where=f"{profile_file}, key workload_sha256",
                fix=f"profile again: stoker profile {workload_file}",
            )
    else:
        local = profile.host.instance_type.startswith("local.")
        workload = workload_from(
            {
                "name": "decide",
                "command": shlex.split(str(profile.what.get("command") or "python train.py")),
                "platform": "local" if local else "sagemaker",
            },
            overrides=overrides,
        )
    asked = [parse_groups(groups, default_type=profile.host.instance_type)] if groups else []
    catalog = catalog_of(workload, prices)
    calibration = None
    if calibrate:
        calibration = calibration_of(
            calibrate, like=profile, catalog=catalog, region=region_of(workload)
        )
    record = decide(
        profile,
        catalog=catalog,
        constraints=workload.constraints,
        training=workload.training,
        feed=workload.feed,
        extra_clusters=asked,
        today=today,
        workload_sha256=profile.workload_sha256,
        processes_per_host=workload.cluster.dnn.processes_per_host if workload.cluster else None,
        calibration=calibration,
    )
    deliver(
        record,
        outputs=outputs,
        name="decision",
        explain=explain,
        as_json=as_json,
        told=told_of_decision(record, workload),
    )
    if report:
        from stoker.cli.report import report_of_decision

        report_of_decision(report, workload=workload, profile=profile, decision=record)


def train_command(
    words: Sequence[str],
    *,
    outputs: Outputs,
    decision_file: Path | None,
    groups: Sequence[str],
    replace_dataloader: bool,
    dry_run: bool,
    name: str | None,
    run_id: str | None,
    always: bool,
    prices: Path | None,
    overrides: Sequence[str],
    params: Sequence[str],
    as_json: bool,
    yes: bool,
    arguments: Sequence[str],
) -> int:
    """Runs `stoker train`; gives the exit code.

    Args:
        arguments: The command line, for whoever wants to go on with a training that was stopped.
    """
    from stoker.cli.billing import confirm
    from stoker.cli.progress import following, say
    from stoker.cli.stopping import command_line, keep_stopped
    from stoker.platforms import platform_named
    from stoker.train import prepare, train

    workload = resolve(words, overrides=overrides, params=params)
    name = name or (workload.run_name(run_id) if run_id else None)
    if decision_file and groups:
        raise UsageError("--decision and --group exclude each other", fix="name one of them")
    decision = read_json(decision_file, Decision) if decision_file else None
    chosen = decision.plan.groups if decision else groups_of(workload, groups)
    platform = platform_named(workload.platform, region=region_of(workload))
    if dry_run:
        job = prepare(
            workload=workload,
            groups=chosen,
            run_dir=RUNS / (name or "dry-run"),
            decision=decision,
            replace_dataloader=replace_dataloader,
        )
        print(dry_run_of(platform, job, as_json=as_json))
        return 0
    catalog = catalog_of(workload, prices)
    confirm(workload, chosen, catalog=catalog, decision=decision, assume_yes=yes, quiet=as_json)
    run_dir = named_run_dir(name) if name else new_run_dir(workload.name)
    job = prepare(
        workload=workload,
        groups=chosen,
        run_dir=run_dir,
        decision=decision,
        replace_dataloader=replace_dataloader,
    )
    platform.plan(job)
    with following(quiet=as_json, echo=True) as follow:
        record = train(
            job,
            platform=platform,
            catalog=catalog,
            decision=decision,
            total_steps=workload.training.total_steps(),
            on_line=follow.line,
            on_progress=follow.progress,
            on_stop=lambda stopped: keep_stopped(
                stopped,
                run_dir=run_dir,
                out=outputs.out,
                again=command_line(arguments),
                quiet=as_json,
            ),
        )
    file = outputs.out or run_dir / "training.json"
    model_uri = kept_model(record.model_uri, outputs)
    record = copied_to(file, record, run_dir=run_dir, model_uri=model_uri)
    deliver(
        record,
        outputs=replace(outputs, out=file),
        name="training",
        explain=training_words,
        as_json=as_json,
        told=told_of_training(record),
        model_uri=record.model_uri or "",
    )
    say(f"logs: {run_dir / 'logs'}", quiet=as_json)
    return 0 if always else exit_code_of(record)


def dry_run_of(platform: Platform[RequestT], job: JobSpec, *, as_json: bool) -> str:
    """Returns the request of `job`: in the platform's own form, where it has one, else as JSON."""
    request = platform.plan(job)
    manifest: Callable[[RequestT], str] | None = getattr(platform, "manifest", None)
    if manifest and not as_json:
        return manifest(request)
    return json.dumps(platform.describe(request), indent=2)


def make_token_command(file: Path) -> None:
    """Runs `stoker train --make-token F`: writes a token for a run that somebody else starts."""
    from stoker.platforms.local import write_secret

    write_secret(file, secrets.token_hex(32))


def training_words(training: Training) -> str:
    """Says what a run did, and whether its times can be compared with other runs'."""
    measured = training.measured
    if training.status != "succeeded":
        code = "" if training.exit_code is None else f" (exit code {training.exit_code})"
        if training.status == "stopped" and not training.failure:
            return f"training stopped{code}{_steps_words(training)}"
        return f"training {training.status}{code}: {training.cause}"
    if measured is None or not measured.steps:
        return "training succeeded; it asked no loader of stoker for a batch"
    step, wait = measured.step_seconds * 1000, measured.wait_seconds * 1000
    metrics = "".join(f", {name} {value:.4g}" for name, value in training.metrics.items())
    # The platform's own words: hosts that share cores, or cores that stand for a cloud's hosts.
    mind = next((e.what for e in training.events if e.what.startswith("not comparable: ")), "")
    mind = f"; {mind}" if mind else ""
    return f"{measured.steps} steps of {step:.1f} ms, {wait:.1f} ms of it waiting{metrics}{mind}"


def _steps_words(training: Training) -> str:
    """Says how many steps were done, with a comma in front; empty where nothing was measured."""
    measured = training.measured
    return f" after {measured.steps} steps" if measured and measured.steps else ""


def exit_code_of(training: Training) -> int:
    """Returns 0, 5 if the feed could not go on, 6 for a failed workload, 143 for a stopped one."""
    if training.status == "failed" and _is_feeds(training):
        return FeedError.exit_code
    return {"succeeded": 0, "failed": 6, "stopped": 143}[training.status]


def _is_feeds(training: Training) -> bool:
    """Returns whether an error of the feed ended the training, and not one of the user's."""
    return training.exit_code == FeedError.exit_code and bool(
        _ERROR_OF_THE_FEED.search(training.failure or "")
    )


def _profile_of(file: Path | None, guess: Guess, *, workload: Workload | None) -> Profile:
    """Returns the profile handed over, or what a guess says of the workload's cluster of today."""
    given = _given(guess)
    if file:
        if given:
            raise UsageError(
                f"{file} and {next(iter(given))} exclude each other",
                fix="decide on a profile, or on what you know instead of one",
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
            "--vcpus-needed says how many vCPUs feed the accelerator at its own pace",
            fix="add --accelerator-step-seconds",
        )
    if accelerator is not None and accelerator > step:
        raise UsageError(
            f"a step that never waits for data takes {accelerator:g} s, and today's {step:g} s: "
            "it cannot be longer",
            where="--accelerator-step-seconds",
            fix="both in seconds, of a global step",
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
            raise UsageError(f"{value:g} is no number above 0", where=flag)
    return given


def groups_of(workload: Workload, texts: Sequence[str]) -> tuple[Group, ...]:
    """Returns the groups named on the command line, else today's dnn group."""
    today = todays_cluster(workload).dnn
    if texts:
        dnn, *data = parse_groups(texts, default_type=today.instance_type)
        if dnn.instance_type == today.instance_type:
            dnn = msgspec.structs.replace(dnn, processes_per_host=today.processes_per_host)
        return (dnn, *data)
    return (Group.of_today(today),)


__all__ = [
    "Guess",
    "decide_command",
    "dry_run_of",
    "exit_code_of",
    "groups_of",
    "make_token_command",
    "train_command",
    "training_words",
]
