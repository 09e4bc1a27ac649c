"""The verbs of compiled pipelines: upload, start, schedule, status and stop.

A run, its steps and its schedules are shown in lines, or as JSON.
"""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    AsJson,
    Overrides,
    Params,
    TargetName,
    WorkloadFile,
    Yes,
)
from stoker.cli.progress import ask, say, working
from stoker.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    PlatformError,
    TerminatedError,
    UsageError,
)
from stoker.text import duration

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stoker.orchestrators.base import (
        Orchestrator,
        RunState,
        Schedule,
        Started,
        StepState,
        Timing,
        UploadPlan,
    )
    from stoker.orchestrators.kubeflow.runs import RunOptions
    from stoker.records import Json, Workload


RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run, a pipeline (for its newest run), a training job, an ARN, or a run's URL.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Says where the target is, as far as the command line names it."""

    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            metavar="URL",
            help="Kubeflow: its URL, such as https://SITE/pipeline (default: as in the workload).",
        ),
    ] = None
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="N",
            help="Kubeflow with many users: your namespace (default: as in the workload).",
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="F",
            help="Kubeflow: file with your token (default: as in the workload, or none).",
        ),
    ] = None
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            metavar="F",
            help="Kubeflow: file with the certificates to trust (default: as in the workload, or "
            "the system's).",
        ),
    ] = None

    def target(
        self,
        name: str,
        *,
        workload: "Workload | None" = None,
        run: str = "",
        options: "RunOptions | None" = None,
    ) -> "Orchestrator":
        """Returns the target of that name.

        Raises:
            UsageError: If there is none, or a flag is not for it.
        """
        from stoker.orchestrators import orchestrator_named

        if name != "kubeflow":
            typed = self._typed()
            if typed or options is not None:
                flag = typed[0] if typed else "one of the flags"
                raise _not_for(name, flag)
            return orchestrator_named(name, workload=workload, run=run)
        from stoker.orchestrators.kubeflow.api import Flags

        flags = Flags(
            host=self.host,
            namespace=self.namespace,
            token_file=self.token_file,
            ca_file=self.ca_file,
        )
        return orchestrator_named(name, workload=workload, run=run, flags=flags, options=options)

    def words(self, target: str, *, file: str | None = None, overrides: Sequence[str] = ()) -> str:
        """Returns the flags with which the next command reaches the same place, after a blank.

        Args:
            target: Only commands for kubeflow need flags.
            file: Workload file that tells the place, for commands that name a run.
            overrides: Overrides of that workload.
        """
        if target != "kubeflow":
            return ""
        words = ["--workload", file] if file else []
        for override in overrides:
            # The place of Kubeflow is in these; others change the run, not the way to it.
            words += ["--set", override] if override.startswith("kubernetes.") else []
        return "".join(f" {shlex.quote(word)}" for word in (*words, *self._typed()))

    def _typed(self) -> list[str]:
        pairs = (
            ("--host", self.host),
            ("--namespace", self.namespace),
            ("--token-file", self.token_file),
            ("--ca-file", self.ca_file),
        )
        return [word for flag, value in pairs if value is not None for word in (flag, str(value))]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReach(Reach):
    """Options of verbs that name a run say where the target is; a workload file may say it, too."""

    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            metavar="W",
            help="Workload file whose settings say where Kubeflow is (default: --host says it).",
        ),
    ] = None
    overrides: Overrides = None

    def target_of(self, name: str, *, run: str) -> "Orchestrator":
        """Returns the target of that name, for a run.

        Raises:
            UsageError: If there is none, or a flag is not for it.
        """
        from stoker.settings import read_workload

        workload = None
        if self.workload and name == "kubeflow":
            workload = read_workload(self.workload, overrides=self.overrides or ())
        elif self.workload and not self._typed():
            raise _not_for(name, "--workload")
        return self.target(name, workload=workload, run=run)

    def words_of(self, target: str) -> str:
        """Returns the flags with which the next command reaches the same place, after a blank."""
        return self.words(target, file=self.workload, overrides=self.overrides or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowRun:
    """Holds the options of runs and schedules that only Kubeflow has."""

    experiment: Annotated[
        str | None,
        typer.Option(
            "--experiment",
            metavar="E",
            help="Kubeflow: experiment of the run (default: as in the workload, or its name).",
        ),
    ] = None
    service_account: Annotated[
        str | None,
        typer.Option(
            "--service-account",
            metavar="A",
            help="Kubeflow: account of the steps' pods (default: as in the workload, or Kubeflow's "
            "own).",
        ),
    ] = None
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            metavar="V",
            help="Version of the pipeline (default: the latest at each start). Kubeflow: by name "
            "or id; SageMaker, at a start: by number or alias.",
        ),
    ] = None
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache",
            help="Kubeflow: makes a new profile, also where one of the same inputs is there.",
        ),
    ] = False

    def options(self, **more: str | int | bool | None) -> "RunOptions | None":
        """Returns these options and `more` of them; None if the command line names none."""
        import msgspec

        from stoker.orchestrators.kubeflow.runs import RunOptions

        every = {
            "experiment": self.experiment,
            "service_account": self.service_account,
            "version": self.version,
            "no_cache": self.no_cache or None,
            **more,
        }
        named = {name: value for name, value in every.items() if value is not None}
        # None, not an empty one: targets without such options refuse any.
        return msgspec.convert(named, RunOptions) if named else None


def _not_for(target: str, flag: str) -> UsageError:
    return UsageError(f"{flag} is only for kubeflow", fix=f"leave it out for {target}")


def upload_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Creates or updates the pipeline, after showing what changes.

    Examples:
        stoker upload kubeflow configs/mnist-kubeflow.yaml
        stoker upload sagemaker configs/mnist-sagemaker.yaml --yes
    """
    from stoker.cli.compile import again_words, compiled_for

    of = workload_of(workload, overrides=overrides or ())
    service = reach.target(target, workload=of)
    with working(f"comparing {of.name} with what is there", quiet=as_json):
        compiled = compiled_for(service.name, of)
        plan = service.plan(compiled)
    for line in (*plan.notes, *_plan_lines(plan)):
        say(line, quiet=as_json)
    if plan.exists and plan.changes:
        refused = UsageError(
            "not updated: you said no", fix="use --yes to update without this question"
        )
        # A new pipeline harms nobody; an update changes what schedules of others will run.
        ask(f"update {plan.pipeline.name}", assume_yes=yes or as_json, refused=refused)
    with working(f"uploading {plan.pipeline.name}", quiet=as_json):
        done = service.upload(plan)
    if as_json:
        uploaded: dict[str, Json] = {
            **document(done),
            "name": plan.pipeline.name,
            "changes": list(plan.changes),
            "inputs": list(plan.missing),
            "notes": [*plan.notes, *done.notes],
        }
        print(json.dumps(uploaded, indent=2))
        return
    print(f"{done.action}: {done.id}")
    if done.version:
        print(f"version: {done.version}  {done.version_id}")
    for note in done.notes:
        print(f"note:    {note}")
    if done.url:
        # Studio has no address of a single pipeline: the words say where to go from its first page.
        print(f"page:    {done.url}" + ("  (Studio, Pipelines)" if "landing" in done.url else ""))
    again = again_words(overrides=overrides or ())
    print(f"next:    stoker start {service.name} {workload}{again}{reach.words(service.name)}")


def start_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    params: Params = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Waits until the run has ended; Ctrl-C does not stop the run."),
    ] = False,
    run_name: Annotated[
        str | None,
        typer.Option(
            "--run-name",
            metavar="N",
            help="Kubeflow: name of the run on its pages (default: the pipeline's and the time).",
        ),
    ] = None,
    kubeflow: KubeflowRun,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Starts a run of the uploaded pipeline.

    Examples:
        stoker start kubeflow configs/mnist-kubeflow.yaml --param epochs=3 --wait
        stoker start sagemaker configs/mnist-sagemaker.yaml
    """
    from stoker.cli.billing import confirm_run
    from stoker.cli.workloads import with_params

    of = workload_of(workload, overrides=overrides or ())
    # Both have versions; all other options of runs are Kubeflow's.
    version = kubeflow.version if target == "sagemaker" else None
    options = (replace(kubeflow, version=None) if version else kubeflow).options(run_name=run_name)
    # Before the service is reached: a wrong value needs no credentials to be seen.
    told = with_params(of, params or ())
    service = reach.target(target, workload=of, options=options)
    where = reach.words(service.name, file=workload, overrides=overrides or ())
    confirm_run(told, assume_yes=yes, quiet=as_json)
    started = None
    try:
        with working(f"starting {of.name}", quiet=as_json):
            started = _started(service, of, params or (), version=version)
        for warning in started.warnings:
            say(f"warning: {warning}", quiet=False)
        # With --wait the one document is that of the end.
        if as_json and not wait:
            print(json.dumps(document(started), indent=2))
        if not as_json:
            # For scripts: run=$(stoker start ...). All words are on stderr.
            print(started.run, flush=True)
        if started.url:
            say(f"page:    {started.url}", quiet=as_json)
        if wait:
            return _wait(service, started, as_json=as_json, where=where)
        say(f"next:    stoker status {service.name} {started.run}{where}", quiet=as_json)
        return 0
    except (KeyboardInterrupt, TerminatedError) as err:
        # The service runs a started run to its end, whether or not someone waits for it.
        lines = (
            (
                "stopped waiting; the run goes on",
                f"see:     stoker status {service.name} {started.run}{where}",
                f"stop:    stoker stop {service.name} {started.run}{where}",
            )
            if started
            else (
                "interrupted before the service answered: a run may have started",
                f"see:     stoker status {service.name} {of.name}{where}",
            )
        )
        say("\n".join(lines), quiet=False)
        return _code_of(err)


def _started(
    service: "Orchestrator",
    workload: "Workload",
    parameters: Sequence[str],
    *,
    version: str | None,
) -> "Started":
    from stoker.orchestrators.sagemaker import SageMakerOrchestrator

    if isinstance(service, SageMakerOrchestrator):
        return service.start(workload, parameters=parameters, version=version)
    return service.start(workload, parameters=parameters)


def schedule_verb(
    target: TargetName,
    workload: WorkloadFile,
    *,
    cron: Annotated[
        str | None,
        typer.Option(
            "--cron",
            metavar="E",
            help="Times as a cron expression: minute hour day month weekday (SageMaker: and year). "
            "One of --cron, --every, --list and --delete is required.",
        ),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="D",
            help="Time between two runs, such as 1d, 12h or 30m (required: see --cron).",
        ),
    ] = None,
    is_listing: Annotated[bool, typer.Option("--list", help="Only lists the schedules.")] = False,
    delete: Annotated[
        str | None,
        typer.Option(
            "--delete",
            metavar="NAME",
            help="Only deletes this schedule (default: deletes none).",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            metavar="N",
            help="Name of an additional schedule, such as nightly (default: the pipeline's only "
            "one).",
        ),
    ] = None,
    time_zone: Annotated[
        str,
        typer.Option(
            "--time-zone",
            metavar="Z",
            help="SageMaker: time zone of --cron, such as Europe/Berlin (default: UTC).",
            show_default=False,
        ),
    ] = "UTC",
    params: Params = None,
    catch_up: Annotated[
        bool, typer.Option("--catch-up", help="Kubeflow: also starts the runs that were missed.")
    ] = False,
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency", metavar="N", help="Kubeflow: most runs at a time (default: 1)."
        ),
    ] = None,
    kubeflow: KubeflowRun,
    reach: Reach,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Starts runs of the uploaded pipeline at regular times.

    Examples:
        stoker schedule kubeflow configs/mnist-kubeflow.yaml --every 1d
        stoker schedule sagemaker configs/mnist-sagemaker.yaml --list
    """
    from stoker.cli.compile import again_words
    from stoker.cli.workloads import with_params

    named = [
        flag
        for flag, is_there in (
            ("--cron", cron is not None),
            ("--every", every is not None),
            ("--list", is_listing),
            ("--delete", delete is not None),
        )
        if is_there
    ]
    # Each of them is another command; two of them at once have no meaning.
    if len(named) != 1:
        raise UsageError(
            f"{' and '.join(named)} exclude each other" if named else "nothing says when to run",
            fix="name one of --cron, --every, --list, --delete",
        )
    # None where it is not given: False would count as an option of Kubeflow's.
    options = kubeflow.options(catch_up=catch_up or None, max_concurrency=max_concurrency)
    if cron is None and every is None and (params or name or options):
        raise UsageError(
            f"{named[0]} does not take --param, --name or other options of a new schedule",
            fix="leave them out",
        )
    of = workload_of(workload, overrides=overrides or ())
    timing = None
    if not is_listing and delete is None:
        # Before the service is reached: a wrong value needs no credentials to be seen.
        timing = _timing(target, cron=cron, every=every or "", time_zone=time_zone)
        with_params(of, params or ())
    service = reach.target(target, workload=of, options=options)
    if is_listing:
        with working("reading the schedules", quiet=as_json):
            found = service.schedules(of)
        if as_json:
            print(json.dumps([document(item) for item in found], indent=2))
        for item in found if not as_json else ():
            print(schedule_line(item))
        if not found:
            say(f"pipeline {of.name} has no schedule", quiet=as_json)
        return
    if timing is None:
        deleted = service.unschedule(of, name=delete or "")
        print(json.dumps({"deleted": deleted}) if as_json else f"deleted: {deleted}")
        return
    kept = [*(params or ()), *(["cache_days=0"] if kubeflow.no_cache else [])]
    _ask_for_parameters(service, of, kept, name=name, assume_yes=yes)
    with working(f"scheduling {of.name}", quiet=as_json):
        made = service.schedule(of, timing=timing, parameters=params or (), name=name)
    if as_json:
        print(json.dumps(document(made), indent=2))
        return
    print(f"{made.action}: {schedule_line(made)}")
    if made.url:
        print(f"page:    {made.url}")
    # The pipeline's name and region may be in any override.
    where = again_words(overrides=overrides or ()) + reach.words(service.name)
    print(f"delete:  stoker schedule {service.name} {workload} --delete {made.name}{where}")


def status_verb(
    target: TargetName,
    run: RunName,
    *,
    besides: Annotated[
        str | None,
        typer.Option(
            "--besides",
            metavar="ID",
            help="Only fails with 4 if a run of the pipeline RUN that began before this one is "
            "under way.",
            hidden=True,
        ),
    ] = None,
    reach: RunReach,
    as_json: AsJson = False,
) -> None:
    """Shows the steps of a run, with times, errors and links.

    Examples:
        stoker status sagemaker RUN
        stoker status kubeflow RUN --workload configs/mnist-kubeflow.yaml
    """
    service = reach.target_of(target, run=run)
    where = reach.words_of(service.name)
    if besides is not None:
        _refuse_overlap(service, run, besides=besides)
        return
    with working(f"reading {run}", quiet=as_json):
        state = service.status(run)
        others = service.runs(run)
    if as_json:
        told: dict[str, Json] = {**document(state)}
        if others:
            told["executions"] = [document(other) for other in others]
        print(json.dumps(told, indent=2))
        return
    for line in tree(state, now=datetime.now(UTC)):
        print(line)
    # A name of a pipeline stands for its newest run: here is how to name an earlier one.
    earlier = [other for other in others if other.run != state.run]
    for other in earlier[:3]:
        began = f"{other.began:%Y-%m-%d %H:%M} UTC" if other.began else ""
        print(f"earlier: {other.run}  {other.status}  {began}")
    if not state.has_ended:
        print(f"stop:  stoker stop {service.name} {state.run}{where}")


def _refuse_overlap(service: "Orchestrator", pipeline: str, *, besides: str) -> None:
    """Checks that no run of a pipeline that began before `besides` is still under way.

    Raises:
        PlatformError: If there is one.
    """
    from stoker.orchestrators.sagemaker import SageMakerOrchestrator

    if not isinstance(service, SageMakerOrchestrator):
        raise UsageError("--besides is only for sagemaker", fix="leave it out")
    others = service.under_way_before(pipeline, besides)
    if others:
        raise PlatformError(
            f"another run of {pipeline} is under way: {', '.join(others)}",
            where="the workload says overlap: refuse",
            fix=f"start again when it has ended, or: stoker stop {service.name} {others[0]}",
        )
    print(f"no run of {pipeline} that began earlier is under way")


def stop_verb(
    target: TargetName,
    run: RunName,
    *,
    reach: RunReach,
    as_json: AsJson = False,
) -> int:
    """Stops a run or a training job, and waits until it has ended.

    On Kubeflow the job that a step of the run follows is deleted, too.

    Examples:
        stoker stop sagemaker RUN
    """
    service = reach.target_of(target, run=run)
    with working(f"reading {run}", quiet=as_json):
        before = service.status(run)
    # Not an error: who wants it to have ended has what he wants.
    if before.has_ended:
        # Its jobs may be left, where its last step could not delete them.
        after = service.stop(before.id) if service.name == "kubeflow" else before
        say(f"{before.run} had already ended: {before.status}", quiet=as_json)
    else:
        say(f"stopping {before.run}", quiet=as_json)
        try:
            # By its id: a name may stand for a newer run by now.
            with working(f"waiting until {before.run} has ended", quiet=as_json):
                after = service.stop(before.id)
        except (KeyboardInterrupt, TerminatedError) as err:
            say(
                f"stopped waiting; the run was asked to stop\n"
                f"see:     stoker status {service.name} {before.run}{reach.words_of(service.name)}",
                quiet=False,
            )
            return _code_of(err)
        say(f"{after.run} has ended: {after.status}", quiet=as_json)
    for note in after.notes:
        say(note, quiet=as_json)
    if as_json:
        print(json.dumps({**document(after), "had_ended": before.has_ended}, indent=2))
    return 0


def workload_of(file: str, *, overrides: Sequence[str]) -> "Workload":
    """Reads the workload of a file; raises UsageError where something else is named."""
    from stoker.cli.workloads import resolve

    if not file.endswith((".yaml", ".yml", ".json")):
        raise UsageError(f"{file} is not a workload file", fix="name a .yaml file, as in configs/")
    return resolve([file], overrides=overrides)


def _plan_lines(plan: "UploadPlan") -> list[str]:
    name = plan.pipeline.name
    lines = [f"input:   {uri}" for uri in plan.missing]
    if not plan.exists:
        return [f"pipeline {name} does not exist yet", *lines]
    if not plan.changes:
        return [f"pipeline {name}: no change", *lines]
    return [f"pipeline {name} changes:", *(f"  {line}" for line in plan.changes), *lines]


def _wait(target: "Orchestrator", started: "Started", *, as_json: bool, where: str) -> int:
    from stoker.orchestrators import follow_run

    def show(step: "StepState") -> None:
        say(change_line(step, now=datetime.now(UTC)), quiet=as_json)

    with working(f"waiting until {started.run} has ended", quiet=as_json):
        state = follow_run(target, started.id, on_change=show)
    if as_json:
        print(json.dumps(document(state), indent=2))
    for line in _end_lines(target, state, where=where):
        say(line, quiet=as_json)
    return state.exit_code


def _code_of(end: BaseException) -> int:
    return EXIT_TERMINATED if isinstance(end, TerminatedError) else EXIT_INTERRUPTED


def _end_lines(target: "Orchestrator", state: "RunState", *, where: str) -> Iterator[str]:
    failed = [s for s in state.steps if s.status == "failed" and (s.reason or s.cause)]
    why = "; ".join(f"{s.name}: {s.reason}" if s.reason else s.name for s in failed)
    why = (why or state.reason) if state.status != "succeeded" else ""
    yield f"{state.run} has {state.status}" + (f": {_short(why)}" if why else "")
    for step in failed:
        if step.lines:
            yield f"the last lines of {step.name}:"
            yield from (f"    {_short(line)}" for line in step.lines)
    yield f"next:    stoker status {target.name} {state.run}{where}"


def _ask_for_parameters(
    service: "Orchestrator",
    workload: "Workload",
    parameters: Sequence[str],
    *,
    name: str | None,
    assume_yes: bool,
) -> None:
    """Asks before a schedule's parameters give way to the pipeline's defaults.

    Raises:
        UsageError: If the answer is no.
    """
    from stoker.orchestrators.base import schedule_name

    full_name = schedule_name(workload, name)
    there = next((each for each in service.schedules(workload) if each.name == full_name), None)
    # Written as the console shows them, or as the workload has them.
    named = {text.partition("=")[0].strip().replace("_", "").lower() for text in parameters}
    lost = [
        f"{key}={value}"
        for key, value in (there.parameters if there else {}).items()
        if key.replace("_", "").lower() not in named
    ]
    if lost:
        again = " ".join(f"--param {_typed_again(each)}" for each in lost)
        meant = " (...: as in the schedule)" if "=..." in again else ""
        refused = UsageError(
            "not scheduled: you said no", fix=f"add {again} to keep them{meant}, or --yes"
        )
        # In a script nobody is asked: what is lost is named in any case.
        say(f"replaced by the pipeline's defaults: {', '.join(map(_short, lost))}", quiet=False)
        ask(f"schedule {full_name} without them", assume_yes=assume_yes, refused=refused)


def _timing(target: str, *, cron: str | None, every: str, time_zone: str) -> "Timing":
    from stoker.orchestrators.base import Timing
    from stoker.orchestrators.cron import checked_zone, cron_expression, rate_expression

    if target == "kubeflow":
        from stoker.orchestrators.kubeflow.schedules import cron_fields, period_seconds, period_text

        if time_zone != "UTC":
            raise UsageError(
                "a schedule on Kubeflow has no time zone: all of them follow the clock of Kubeflow",
                where="--time-zone",
                fix="give the time in UTC; the administrator may set another zone for all of them "
                "(CRON_SCHEDULE_TIMEZONE)",
            )
        if cron is not None:
            return Timing(expression=cron_fields(cron))
        return Timing(expression=period_text(period_seconds(every)))
    return Timing(
        expression=cron_expression(cron) if cron is not None else rate_expression(every),
        time_zone=checked_zone(time_zone),
    )


_NAME = 24
_KIND = 14
_REASON = 400
_TYPED = 200


def tree(state: "RunState", *, now: datetime) -> Iterator[str]:
    """Yields the run and its steps, one line each, with reasons, last lines and pages below."""
    yield f"{state.run}  {state.status}{_took(state.began, state.ended, now)}"
    if state.reason:
        yield f"  why:  {_short(state.reason)}"
    if state.url:
        yield f"  page: {state.url}"
    for name, value in (state.parameters or {}).items():
        yield f"  with: {name} = {_short(value)}"
    for step in state.steps:
        yield from _step(step, now=now)


def change_line(step: "StepState", *, now: datetime) -> str:
    """Returns a step that changed, in one line."""
    outcome = f", {step.outcome}" if step.outcome else ""
    again = f" (attempt {step.attempts})" if step.attempts > 1 else ""
    took = _took(step.began, step.ended, now) if step.ended else ""
    reason = f": {_short(step.reason)}" if step.reason else ""
    return (
        f"{now.astimezone():%H:%M:%S}  {step.name:<{_NAME}} "
        f"{step.status}{again}{outcome}{took}{reason}"
    )


def schedule_line(schedule: "Schedule") -> str:
    """Describes a schedule: its name, when it runs, next when, and with what."""
    zone = schedule.timing.time_zone
    if not schedule.is_on:
        following = "off"
    elif schedule.next_run is None:
        following = "next: see the console"
    else:
        following = f"next {schedule.next_run:%Y-%m-%d %H:%M} UTC"
    values = ", ".join(f"{name}={value}" for name, value in schedule.parameters.items())
    note = f"  ({schedule.note})" if schedule.note else ""
    return (
        f"{schedule.name:<{_NAME}} {schedule.timing.expression}  {zone}  {following}"
        f"  {values or 'defaults'}{note}"
    )


def document(value: "DataclassInstance") -> "dict[str, Json]":
    """Returns a value as JSON: times as ISO 8601."""
    return {key: _plain(item) for key, item in asdict(value).items()}


def _step(step: "StepState", *, now: datetime) -> Iterator[str]:
    indent = "  " * step.depth
    name = f"{indent}{step.name}"
    words: list[str] = [step.status]
    if step.outcome:
        words.append(f"→ {step.outcome}")
    if step.is_cached:
        words.append("(an earlier run's result)")
    if step.attempts > 1:
        words.append(f"(attempt {step.attempts})")
    text = f"{name:<{_NAME}} {step.kind:<{_KIND}} {' '.join(words)}"
    yield text.rstrip() + _took(step.began, step.ended, now)
    below = f"{indent}    "
    if step.reason:
        yield f"{below}why:  {_short(step.reason)}"
    for line in step.lines:
        yield f"{below}      {_short(line)}"
    if step.url:
        yield f"{below}page: {step.url}"


def _took(began: datetime | None, ended: datetime | None, now: datetime) -> str:
    if began is None:
        return ""
    took: timedelta = (ended or now) - began
    return f"  {duration(took.total_seconds())}"


def _typed_again(parameter: str) -> str:
    """Returns a parameter as it is typed, or its name where it is too long: a whole profile."""
    if len(parameter) <= _TYPED and "\n" not in parameter:
        return shlex.quote(parameter)
    return f"{parameter.partition('=')[0]}=..."


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON else line[: _REASON - 1] + "…"


def _plain(value: object) -> "Json":
    if isinstance(value, datetime):
        # As all other times of records and logs are written.
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None
