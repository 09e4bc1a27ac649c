"""The verbs of compiled pipelines take files and names, ask the target, and print words."""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from stoker.cli.billing import confirm_run
from stoker.cli.edge import EXIT_INTERRUPTED, EXIT_TERMINATED, TerminatedError
from stoker.cli.progress import say
from stoker.cli.reaching import Reach
from stoker.cli.run_words import change_line, document, tree
from stoker.cli.workloads import resolve, with_params
from stoker.errors import UsageError
from stoker.orchestrators.base import Pipeline, RunState, Started, StepState, Target, UploadPlan
from stoker.orchestrators.named import follow_run
from stoker.records import Decision, Json, Workload, read_json

if TYPE_CHECKING:
    from stoker.orchestrators.kubeflow.runs import RunOptions


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


def _wait(target: Target, started: Started, *, as_json: bool, where: str) -> int:
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


def _end_lines(target: Target, state: RunState, *, where: str) -> list[str]:
    failed = [step for step in state.steps if step.status == "failed"]
    why = "; ".join(f"{step.name}: {step.reason}" for step in failed) or state.reason
    return [
        f"{state.run} has {'succeeded' if state.status == 'succeeded' else state.status}"
        + (f": {why}" if why and state.status != "succeeded" else ""),
        f"next:    stoker status {target.name} {state.run}{where}",
    ]
