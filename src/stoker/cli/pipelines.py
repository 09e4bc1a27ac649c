"""The verbs of compiled pipelines take files and names, ask the orchestrator, and print words."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.cli.billing import confirm_run
from stoker.cli.edge import EXIT_INTERRUPTED, EXIT_TERMINATED, TerminatedError
from stoker.cli.progress import say
from stoker.cli.workloads import resolve, with_params
from stoker.errors import UsageError
from stoker.orchestrators.base import (
    Orchestrator,
    Pipeline,
    RunState,
    Started,
    StepState,
    Timing,
    UploadPlan,
)
from stoker.orchestrators.cron import checked_zone, cron_expression, rate_expression
from stoker.orchestrators.named import follow_run, orchestrator_named
from stoker.records import Decision, Json, Workload, read_json
from stoker.settings import read_workload

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from stoker.orchestrators.base import RunState, Schedule, StepState
    from stoker.orchestrators.kubeflow.runs import RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The place of the target, as far as the command line names it.

    Attributes:
        host, namespace, token_file, ca_file: Of Kubeflow; absent: as the workload says.
        workload_file: Of the verbs that name a run: a workload with the connection's settings.
        overrides: Of that workload.
    """

    host: str | None = None
    namespace: str | None = None
    token_file: Path | None = None
    ca_file: Path | None = None
    workload_file: str | None = None
    overrides: Sequence[str] = ()

    def target(
        self,
        name: str,
        *,
        workload: Workload | None = None,
        run: str = "",
        options: "RunOptions | None" = None,
    ) -> Orchestrator:
        """Returns the target of that name.

        Raises:
            UsageError: If there is none, or a flag is not for it.
        """
        if name != "kubeflow":
            typed = [*self._typed(), *(["--workload"] if self.workload_file else [])]
            if typed or options is not None:
                flag = typed[0] if typed else "one of the flags"
                raise UsageError(f"{flag} is for kubeflow", fix=f"leave it out for {name}")
            return orchestrator_named(name, workload=workload, run=run)
        from stoker.orchestrators.kubeflow.client import Flags

        if workload is None and self.workload_file:
            workload = read_workload(self.workload_file, overrides=self.overrides)
        flags = Flags(
            host=self.host,
            namespace=self.namespace,
            token_file=self.token_file,
            ca_file=self.ca_file,
        )
        return orchestrator_named(name, workload=workload, run=run, flags=flags, options=options)

    def words(self, target: str, *, file: str = "", overrides: Sequence[str] = ()) -> str:
        """Returns the flags that a next command needs to reach the same place, after a blank.

        Args:
            target: Only kubeflow's commands need anything.
            file: Workload whose settings name the place, for commands that name a run.
            overrides: Of that workload.
        """
        if target != "kubeflow":
            return ""
        named = file or self.workload_file
        words = ["--workload", named] if named else []
        for override in (*overrides, *self.overrides):
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


_NAME = 24
_KIND = 14
_REASON = 400


def tree(state: "RunState", *, target: str, now: datetime, where: str = "") -> Iterator[str]:
    """Yields the run and its steps, one line each; below reasons, pages, and logs of what failed.

    Args:
        state: The run.
        target: Its target.
        now: In UTC.
        where: Flags with which the next commands reach the target, with a blank in front.
    """
    yield f"{state.run}  {state.status}{_took(state.began, state.ended, now)}"
    if state.reason:
        yield f"  why:  {_short(state.reason)}"
    if state.url:
        yield f"  page: {state.url}"
    for name, value in (state.parameters or {}).items():
        yield f"  with: {name} = {_short(value)}"
    for step in state.steps:
        yield from _step(step, now=now)
        if step.status == "failed" and step.job and state.pipeline:
            # A job that a step started is in groups of hosts; a step's own is called as the step.
            own = "" if step.name.startswith("job ") else f" --group {step.name}"
            yield f"{'  ' * step.depth}    logs: stoker logs {target} {state.run}{own}{where}"


def change_line(step: "StepState", *, now: datetime) -> str:
    """Returns a step that changed, in one line."""
    outcome = f", {step.outcome}" if step.outcome else ""
    reason = f": {_short(step.reason)}" if step.reason else ""
    return f"{now.astimezone():%H:%M:%S}  {step.name:<{_NAME}} {step.status}{outcome}{reason}"


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


def document(value: "DataclassInstance") -> dict[str, Json]:
    """Returns a value as JSON: times as ISO 8601."""
    return {key: _plain(item) for key, item in asdict(value).items()}


def duration(seconds: float) -> str:
    """Writes a duration: `48 s`, `3 min 12 s`, `1 h 03 min`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


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
    if step.url:
        yield f"{below}page: {step.url}"


def _took(began: datetime | None, ended: datetime | None, now: datetime) -> str:
    if began is None:
        return ""
    took: timedelta = (ended or now) - began
    return f"  {duration(took.total_seconds())}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _REASON else line[: _REASON - 1] + "…"


def _plain(value: object) -> Json:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else None


def upload_command(
    target_name: str,
    file: str,
    *,
    train_step: str,
    decision_file: Path | None,
    reach: Reach,
    overrides: Sequence[str],
    as_json: bool,
    assume_yes: bool,
) -> None:
    """Runs `stoker upload`."""
    workload = workload_of(file, overrides=overrides)
    target = reach.target(target_name, workload=workload)
    decision = read_json(decision_file, Decision) if decision_file else None
    compiled = _compiled(target.name, workload, train_step=train_step, decision=decision)
    plan = target.plan(compiled)
    for line in _plan_lines(plan):
        say(line, quiet=as_json)
    if plan.exists and plan.changes:
        _confirm(plan, assume_yes=assume_yes or as_json)
    done = target.upload(plan)
    if as_json:
        uploaded: dict[str, Json] = {
            **document(done),
            "name": plan.pipeline.name,
            "changes": list(plan.changes),
            "inputs": list(plan.missing),
        }
        print(json.dumps(uploaded, indent=2))
        return
    print(f"{done.action}: {done.id}")
    if done.version:
        print(f"version: {done.version}  {done.version_id}")
    if done.url:
        print(f"page:    {done.url}" + ("  (Studio, Pipelines)" if "landing" in done.url else ""))
    print(f"next:    stoker start {target.name} {file}{reach.words(target.name)}")


def start_command(
    target_name: str,
    file: str,
    *,
    parameters: Sequence[str],
    is_waiting: bool,
    options: Mapping[str, str | int | bool],
    reach: Reach,
    overrides: Sequence[str],
    as_json: bool,
    assume_yes: bool,
) -> int:
    """Runs `stoker start`; gives the exit code."""
    workload = workload_of(file, overrides=overrides)
    target = reach.target(target_name, workload=workload, options=run_options(options))
    where = reach.words(target.name, file=file, overrides=overrides)
    confirm_run(
        with_params(workload, parameters),
        assume_yes=assume_yes,
        quiet=as_json,
    )
    started = None
    try:
        started = target.start(workload, parameters=parameters)
        for warning in started.warnings:
            say(f"warning: {warning}", quiet=False)
        if as_json and not is_waiting:
            print(json.dumps(document(started), indent=2))
        say(f"started: {started.run}", quiet=as_json)
        if started.url:
            say(f"page:    {started.url}", quiet=as_json)
        if is_waiting:
            return _wait(target, started, as_json=as_json, where=where)
        say(f"next:    stoker status {target.name} {started.run}{where}", quiet=as_json)
        return 0
    except (KeyboardInterrupt, TerminatedError) as err:
        # A run that was started is the service's: it needs nobody to wait for it.
        lines = (
            (
                "the run goes on; nobody waits for it any more",
                f"see:     stoker status {target.name} {started.run}{where}",
                f"stop:    stoker stop {target.name} {started.run}{where}",
            )
            if started
            else (
                "interrupted before the service had answered: a run may have started",
                f"see:     stoker status {target.name} {workload.name}{where}",
            )
        )
        say("\n".join(lines), quiet=False)
        return _code_of(err)


def status_command(target_name: str, run: str, *, as_json: bool, reach: Reach) -> None:
    """Runs `stoker status`."""
    target = reach.target(target_name, run=run)
    where = reach.words(target.name)
    state = target.status(run)
    others = target.runs(run)
    if as_json:
        told: dict[str, Json] = {**document(state)}
        if others:
            told["executions"] = [document(other) for other in others]
        print(json.dumps(told, indent=2))
        return
    for line in tree(state, target=target.name, now=datetime.now(UTC), where=where):
        print(line)
    earlier = [other for other in others if other.run != state.run]
    for other in earlier[:3]:
        began = f"{other.began:%Y-%m-%d %H:%M} UTC" if other.began else ""
        print(f"earlier: {other.run}  {other.status}  {began}")
    if state.steps:
        print(f"logs:  stoker logs {target.name} {state.run}{where}")
    if not state.has_ended:
        print(f"stop:  stoker stop {target.name} {state.run}{where}")


def logs_command(
    target_name: str, run: str, *, group: str | None, as_json: bool, reach: Reach
) -> None:
    """Runs `stoker logs`."""
    target = reach.target(target_name, run=run)
    num_lines = 0
    for line in target.logs(run, group=group):
        num_lines += 1
        if as_json:
            print(json.dumps({"group": line.group, "host": line.host, "text": line.text}))
        else:
            print(f"{line.group}/{line.host} {line.text}")
    if not num_lines:
        say(f"{run} has written no log yet", quiet=as_json)


def stop_command(target_name: str, run: str, *, as_json: bool, reach: Reach) -> int:
    """Runs `stoker stop`; gives the exit code."""
    target = reach.target(target_name, run=run)
    before = target.status(run)
    if before.has_ended:
        after = before
        say(f"{before.run} had ended already: {before.status}", quiet=as_json)
    else:
        say(f"{before.run} is asked to stop", quiet=as_json)
        try:
            after = target.stop(before.id)
        except (KeyboardInterrupt, TerminatedError) as err:
            say(
                f"it was asked to stop; nobody waits for it any more\n"
                f"see:     stoker status {target.name} {before.run}{reach.words(target.name)}",
                quiet=False,
            )
            return _code_of(err)
        say(f"{after.run} has ended: {after.status}", quiet=as_json)
    if as_json:
        print(json.dumps({**document(after), "had_ended": before.has_ended}, indent=2))
    return 0


def workload_of(file: str, *, overrides: Sequence[str]) -> Workload:
    """Reads the workload of a file; raises UsageError where something else is named."""
    if not file.endswith((".yaml", ".yml", ".json")):
        raise UsageError(f"{file} is no workload file", fix="name a .yaml file, as in configs/")
    return resolve([file], overrides=overrides)


def run_options(given: Mapping[str, str | int | bool]) -> "RunOptions | None":
    """Returns the options of a run or schedule on Kubeflow; None where nothing is named."""
    if not given:
        return None
    from stoker.orchestrators.kubeflow.runs import RunOptions

    return msgspec.convert(given, RunOptions)


def _compiled(
    target: str, workload: Workload, *, train_step: str, decision: Decision | None
) -> Pipeline:
    if target == "kubeflow":
        if train_step != "launched" or decision is not None:
            raise UsageError(
                "a native training step is SageMaker's: on Kubeflow each run applies its decision",
                where="--train-step, --decision",
                fix="leave them out",
            )
        from stoker.orchestrators.kubeflow.compile import compile_kubeflow

        return compile_kubeflow(workload, folder=Path.cwd())
    from stoker.orchestrators.sagemaker.compile import compile_pipeline

    return compile_pipeline(workload, train_step=train_step, decision=decision, folder=Path.cwd())


def _plan_lines(plan: UploadPlan) -> list[str]:
    name = plan.pipeline.name
    lines = [f"input:   {uri}" for uri in plan.missing]
    if not plan.exists:
        return [f"pipeline {name} is not there yet", *lines]
    if not plan.changes:
        return [f"pipeline {name}: no change", *lines]
    return [f"pipeline {name} changes:", *(f"  {line}" for line in plan.changes), *lines]


def _confirm(plan: UploadPlan, *, assume_yes: bool) -> None:
    if assume_yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return
    print(f"update {plan.pipeline.name}? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("not updated: you said no", fix="--yes asks nothing")


def _wait(target: Orchestrator, started: Started, *, as_json: bool, where: str) -> int:
    def show(step: StepState) -> None:
        say(change_line(step, now=datetime.now(UTC)), quiet=as_json)

    state = follow_run(target, started.id, on_change=show)
    if as_json:
        print(json.dumps(document(state), indent=2))
    for line in _end_lines(target, state, where=where):
        say(line, quiet=as_json)
    return state.exit_code


def _code_of(end: BaseException) -> int:
    return EXIT_TERMINATED if isinstance(end, TerminatedError) else EXIT_INTERRUPTED


def _end_lines(target: Orchestrator, state: RunState, *, where: str) -> list[str]:
    failed = [step for step in state.steps if step.status == "failed"]
    why = "; ".join(f"{step.name}: {step.reason}" for step in failed) or state.reason
    return [
        f"{state.run} has {'succeeded' if state.status == 'succeeded' else state.status}"
        + (f": {why}" if why and state.status != "succeeded" else ""),
        f"next:    stoker status {target.name} {state.run}{where}",
    ]


def schedule_command(
    target_name: str,
    file: str,
    *,
    cron: str | None,
    every: str | None,
    is_listing: bool,
    delete: str | None,
    name: str | None,
    time_zone: str,
    parameters: Sequence[str],
    options: Mapping[str, str | int | bool],
    reach: Reach,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Does one of --cron, --every, --list and --delete."""
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
    if len(named) != 1:
        raise UsageError(
            f"{' and '.join(named)} exclude each other" if named else "when is it to run?",
            fix="name one of --cron, --every, --list, --delete",
        )
    if cron is None and every is None and (parameters or name or options):
        raise UsageError(
            f"{named[0]} takes no --param, no --name and nothing else of a new schedule",
            fix="leave them out",
        )
    workload = workload_of(file, overrides=overrides)
    target = reach.target(target_name, workload=workload, options=run_options(options))
    if is_listing:
        found = target.schedules(workload)
        if as_json:
            print(json.dumps([document(item) for item in found], indent=2))
        for item in found if not as_json else ():
            print(schedule_line(item))
        if not found:
            say(f"pipeline {workload.name} has no schedule", quiet=as_json)
        return
    if delete is not None:
        deleted = target.unschedule(workload, name=delete)
        print(json.dumps({"deleted": deleted}) if as_json else f"deleted: {deleted}")
        return
    timing = _timing(target.name, cron=cron, every=every or "", time_zone=time_zone)
    made = target.schedule(workload, timing=timing, parameters=parameters, name=name)
    if as_json:
        print(json.dumps(document(made), indent=2))
        return
    print(f"{made.action}: {schedule_line(made)}")
    if made.url:
        print(f"page:    {made.url}")
    where = reach.words(target.name)
    print(f"delete:  stoker schedule {target.name} {file} --delete {made.name}{where}")


def _timing(target: str, *, cron: str | None, every: str, time_zone: str) -> Timing:
    if target == "kubeflow":
        from stoker.orchestrators.kubeflow.schedules import cron_fields, period_seconds, period_text

        if time_zone != "UTC":
            raise UsageError(
                "a schedule on Kubeflow has no time zone: all follow the clock of its scheduler",
                where="--time-zone",
                fix="the time in UTC; its administrator may set another clock for all "
                "(CRON_SCHEDULE_TIMEZONE)",
            )
        if cron is not None:
            return Timing(expression=cron_fields(cron))
        return Timing(expression=period_text(period_seconds(every)))
    return Timing(
        expression=cron_expression(cron) if cron is not None else rate_expression(every),
        time_zone=checked_zone(time_zone),
    )
