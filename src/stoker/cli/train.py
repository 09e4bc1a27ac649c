"""`stoker train` runs a workload on a cluster, or prints the request for it.

A training run that Ctrl-C or SIGTERM stops keeps its record, and prints what is kept and how to
continue.
"""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.cli.options import (
    HIDDEN,
    AsJson,
    OutputFiles,
    Overrides,
    PlatformName,
    Prices,
    ReplaceDataLoader,
    StepParams,
    Words,
    Yes,
    told_by_flag,
    typed_keys,
)
from stoker.errors import NoCapacityError, StokerError, TerminatedError, UsageError
from stoker.run.plan_price import with_plan_price
from stoker.terminal import relative, say

if TYPE_CHECKING:
    from stoker.platforms.base import JobSpec
    from stoker.records import Training


def train_verb(
    context: typer.Context,
    words: Words = None,
    *,
    platform: PlatformName = None,
    profile: Annotated[Path | None, HIDDEN] = None,
    decision: Path | None = None,
    groups: Annotated[list[str] | None, typer.Option("--group")] = None,
    replace_dataloader: ReplaceDataLoader = None,
    dry_run: bool = False,
    name: str | None = None,
    run_id: Annotated[str | None, HIDDEN] = None,
    finish: Annotated[bool, HIDDEN] = False,
    evaluation: Annotated[Path | None, HIDDEN] = None,
    report: Annotated[Path | None, HIDDEN] = None,
    always: Annotated[bool, HIDDEN] = False,
    files: OutputFiles,
    model: Path | None = None,
    prices: Prices = None,
    max_usd: float | None = None,
    params: StepParams = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> int:
    """Train on the cluster of a decision, or on groups that you name.

    The record is training.json in the run's folder, unless --out names another file. The run's
    folder also has the logs and report.html.

    Args:
        profile (F): The decision's profile.json.
        decision (D): Train on the cluster that this decision.json chose (default: today's cluster).
        groups (ROLE=[TYPE:]HOSTS[:WORKERS]): Train on this instance group, such as dnn=1 or
            data=ml.c7i.8xlarge:2:32 (2 hosts with 32 data workers each); give one for each role,
            may be repeated (default: today's cluster).
        dry_run: Only print the request; do not send it.
        name (NAME): Give the run and its job this name (default: made from the workload and the
            time). If a job of that name exists, stoker follows it and does not start a second one.
        run_id (ID): Id of the pipeline's run.
        finish: As a pipeline's last step: only end the jobs of a run that has ended.
        evaluation (F): As --report: evaluation.json.
        report (F): For --finish: report of a lost step.
        always: Exit with 0 even if the training failed; the record's status says how it ended.
        model (DIR): Copy the trained model to this folder (default: leave it where it is).
        max_usd (X): End the run once it has cost X dollars, including retries; the script gets
            SIGTERM first and can save (default: from the workload, or no limit).

    Examples:
        stoker train configs/mnist.yaml
        stoker train configs/mnist.yaml --decision decision.json
        stoker train --group dnn=1 --group data=local.c1:1 -- python train.py
    """
    from stoker.catalog import catalog_of
    from stoker.cli.workloads import read_with_params, resolve
    from stoker.decide import followed
    from stoker.environment import pipeline_execution, pipeline_run
    from stoker.platforms import platform_named
    from stoker.record_words import training_words
    from stoker.records import Decision, Profile, Training, groups_in_words, read_json, write_json
    from stoker.records.outcome import outcome_of, training_exit_code
    from stoker.run.billing import confirm, say_unused_types
    from stoker.run.clusters import groups_of
    from stoker.run.command_lines import command_line
    from stoker.run.kept_training import deliver_training, records_of_step, train_and_keep
    from stoker.run.mlflow_run import keep_tracked
    from stoker.run.outputs import TRAIN_PARAMETERS, kept_model, outputs_of, step_inputs
    from stoker.run.reports import report_of_run
    from stoker.run.run_folders import RUNS, named_run_dir, new_run_dir, run_base
    from stoker.run.step_finish import FinishOutputs, finish_run
    from stoker.run.webhook import telling
    from stoker.train import prepare

    keys = {("platform", "--platform"): platform, ("constraints.max_usd", "--max-usd"): max_usd}
    flags, sets = typed_keys(keys, overrides)
    sets += [f"feed.replace_dataloader={replace_dataloader}"] if replace_dataloader else []
    given = step_inputs(files)
    words, run_id = words or given.words, run_id or given.run_id
    params = [*given.params, *(params or ())]
    if finish:
        if len(words) != 1 or not run_id:
            raise UsageError(
                "--finish needs a workload and the id of the pipeline's run",
                where="--finish",
                fix="stoker train WORKLOAD --run-id ID --finish",
            )
        finish_run(
            read_with_params(words[0], overrides=sets, params=params),
            run_id=run_id,
            outcome=given.outcome or "{}",
            outputs=FinishOutputs(
                record=outputs_of(files, model=model), evaluation=evaluation, report=report
            ),
            as_json=as_json,
        )
        return 0
    outputs = outputs_of(files, model=model, parameters=TRAIN_PARAMETERS)
    with told_by_flag(flags):
        workload = resolve(words, overrides=sets, params=params, verb="train")
    # A retry of a pipeline's step has the same id, so it follows the job of the first attempt.
    name = name or (workload.run_name(run_id, branch=given.branch) if run_id else None)
    if decision and groups:
        raise UsageError("--decision cannot be used with --group", fix="leave one of them out")
    decided = None
    if decision:
        decided = followed(read_json(decision, Decision), workload.constraints.follow)
    profiled = read_json(profile, Profile) if profile else None
    chosen = decided.plan.groups if decided else groups_of(workload, groups or ())
    runs_on = platform_named(workload.platform, settings=workload)

    def prepared(run_dir: Path) -> "JobSpec":
        job = prepare(workload=workload, groups=chosen, run_dir=run_dir, decision=decided)
        # For a pipeline's last step, which follows the job where this step is lost.
        return replace(job, records=records_of_step(workload, decided, profiled) if run_id else {})

    say_unused_types(workload, chosen, quiet=as_json)
    if dry_run:
        # Without making a folder.
        request = runs_on.plan(prepared(RUNS / (name or "dry-run")))
        described = json.dumps(runs_on.describe(request), indent=2) if as_json else None
        print(described or runs_on.manifest(request))
        return 0
    catalog = with_plan_price(catalog_of(workload, prices), workload, quiet=as_json)
    confirm(workload, chosen, catalog=catalog, decision=decided, assume_yes=yes, quiet=as_json)
    run_dir = named_run_dir(name) if name else new_run_dir(run_base(workload))
    job = prepared(run_dir)
    # Before anything starts: a wrong request is refused here, with its key.
    runs_on.plan(job)
    # A run of that name that still runs keeps its files, and its run in MLflow.
    runs_on.check_free(job)
    # For the report of the run, now and from `stoker report`.
    write_json(run_dir / "workload.json", workload)
    if decided:
        write_json(run_dir / "decision.json", decided)
    if profiled:
        write_json(run_dir / "profile.json", profiled)
    again = command_line(context.obj or ["train", *words])
    say(
        f"train of {workload.name} on {groups_in_words(chosen)}: {relative(run_dir)}", quiet=as_json
    )
    shortage = None
    submitted: list[str] = []
    earlier = _training_in(run_dir / "training.json")
    # A pipeline's last step notifies of its run, or the step that judges the training.
    is_told = not (outputs.executor or run_id or pipeline_run())
    with telling(workload, run=job.name, step="train", quiet=as_json, is_told=is_told) as ending:
        try:
            try:
                record = train_and_keep(
                    job,
                    workload=workload,
                    platform=runs_on,
                    catalog=catalog,
                    decision=decided,
                    out=outputs.out,
                    again=again,
                    quiet=as_json,
                    echo=True,
                    on_submit=lambda: submitted.append(job.name),
                    assume_yes=yes,
                )
            finally:
                after = _training_in(run_dir / "training.json")
                # An evaluation goes with the training that it judged. A refused training leaves
                # the earlier record, and one that had ended and was followed again is the same.
                if after and not (earlier and after.is_of_same_training(earlier)):
                    (run_dir / "evaluation.json").unlink(missing_ok=True)
        except (KeyboardInterrupt, TerminatedError):
            # What was measured until then; a job that continues without stoker has no record yet.
            if after:
                report_of_run(run_dir, workload=workload, command=again)
            raise
        except NoCapacityError as err:
            # Not raised yet: a further attempt of a pipeline's step would wait as long again.
            shortage, record = err, read_json(run_dir / "training.json", Training)
        except StokerError:
            # Ends the run in MLflow, which a further attempt continues. A refused training leaves
            # it as it was, and one that left no record has failed.
            keep_tracked(
                job.tracking,
                run=job.run_name,
                training=None if submitted and after == earlier else after,
                is_refused=not submitted,
                quiet=as_json,
            )
            raise
        if job.tracking.mlflow:
            # For MLflow. An error in it is printed below, once the record is safe.
            with contextlib.suppress(StokerError):
                report_of_run(run_dir, workload=workload, command=again)
        page = keep_tracked(
            job.tracking,
            run=job.run_name,
            training=record,
            files=[run_dir / name for name in ("decision.json", "training.json", "report.html")],
            quiet=as_json,
        )
        links = {"job": record.job.url, "mlflow": page, "logs": str(run_dir / "logs")}
        ending.links |= {name: link for name, link in links.items() if link}
        ending.warnings = tuple(each.made_words for each in record.useless_groups)
        code = training_exit_code(record)
        if record.is_unknown and pipeline_execution():
            # The next step reads the outputs again.
            code = 0
        if code:
            ending.failed(outcome_of(record).words, exit_code=code)
            # A training run that was stopped has not failed.
            ending.status = record.status
    model_uri = kept_model(record.model_uri, outputs)
    try:
        deliver_training(
            record, outputs=outputs, run_dir=run_dir, model_uri=model_uri, as_json=as_json
        )
    except (UsageError, OSError) as err:
        if outputs.executor is not None:
            raise
        # A training run is worth more than its record. A pipeline's next step needs the record.
        print(training_words(record))
        print(f"warning: no record of this training run: {err}", file=sys.stderr)
    try:
        page = report_of_run(run_dir, workload=workload, command=again).resolve().as_uri()
    except StokerError as err:
        page = f"not written: {err.what}"
    say(f"logs: {run_dir / 'logs'}\nreport: {page}", quiet=as_json)
    # A pipeline's next step judges a failed training run, so this one must not end the pipeline.
    if always and not record.is_unknown:
        return 0
    if shortage:
        raise shortage
    return code


def _training_in(file: Path) -> "Training | None":
    # None also for one of another version.
    from stoker.records import Training, read_json

    with contextlib.suppress(StokerError):
        return read_json(file, Training)
    return None
