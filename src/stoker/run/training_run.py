"""One life of a training run: submit, follow, record, track, report, exit code.

`stoker train`, `stoker run` and the steps of pipelines lead the same life. A run begins with a
`TrainingOrder` (run/training_order.py).
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.catalog import Catalog
from stoker.environment import pipeline_execution
from stoker.errors import NoCapacityError, StokerError, TerminatedError, UsageError
from stoker.host.git import git_state
from stoker.launch.script_python import refuse_unfed_script
from stoker.logs import EventName
from stoker.notify import RunEnding
from stoker.platforms.base import JobSpec, LogLine, Platform
from stoker.record_words import training_words
from stoker.records import (
    Decision,
    Training,
    Workload,
    read_json,
    sha256_of,
    write_json,
)
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.records.training import Lineage, copied_to
from stoker.run.mlflow_run import keep_tracked, start_tracking
from stoker.run.outputs import Outputs, carried, deliver, kept_model, told_of_training
from stoker.run.progress import Follow, following
from stoker.run.reports import report_of_run
from stoker.run.unchanged import code_here
from stoker.run.webhook import telling, warned
from stoker.terminal import ask, is_interactive, relative, say
from stoker.tracking import TrackedRecords
from stoker.train import JobObserver, train

# Events of a continuing run that go to its webhook.
_ALERTS = (EventName.BATCH_HANGS, EventName.BUDGET_NEARLY_SPENT, EventName.NO_PROGRESS)
# Between two alerts of a kind: all ranks may report the same.
_ALERT_PAUSE_SECONDS = 60.0
# Of a training run's record that is kept on the platform.
MAX_KEPT_BYTES = 64 << 10


@dataclass(slots=True, kw_only=True)
class FollowedTraining:
    """A training run that this process follows, from its job to its record.

    Attributes:
        job: With `records`, it is a pipeline's step, whose later attempts find its record.
        again: The command line that continues after a stop.
        out: Second file for the record of a training run that is stopped.
        quiet: Whether nothing is printed on stderr.
        echo: Whether the lines of the script are shown, too.
        assume_yes: Train again without a question though an earlier job's end was not seen.
        has_submitted: Whether the platform has taken a job of this run.
    """

    job: JobSpec
    workload: Workload
    platform: Platform[object]
    catalog: Catalog
    decision: Decision | None
    again: str = ""
    out: Path | None = None
    quiet: bool = False
    echo: bool = True
    assume_yes: bool = True
    has_submitted: bool = False

    @property
    def folder(self) -> Path:
        return self.job.run_dir

    @property
    def record_file(self) -> Path:
        return self.folder / "training.json"

    def record_so_far(self) -> Training | None:
        """Returns the record in the folder; None without one, or for one of another version."""
        with contextlib.suppress(StokerError):
            return read_json(self.record_file, Training)
        return None

    def track(
        self,
        training: Training | None,
        *,
        files: Sequence[str] = (),
        is_refused: bool = False,
        is_stopped: bool = False,
    ) -> str:
        """Writes a record and `files` of the folder to MLflow; returns the page of the run."""
        records = TrackedRecords(
            run=self.job.run_name,
            training=training,
            files=[self.folder / name for name in files],
            is_refused=is_refused,
        )
        return keep_tracked(self.job.tracking, records, is_stopped=is_stopped, quiet=self.quiet)

    def report(self) -> Path:
        return report_of_run(self.folder, workload=self.workload, command=self.again)


def lead(run: FollowedTraining, *, outputs: Outputs, is_told: bool, always: bool = False) -> int:
    """Leads a training run to its end; returns the exit code.

    Args:
        run: The run, whose folder has its workload and decision.
        outputs: Where its record goes.
        is_told: Whether this process notifies the webhook.
        always: Whether a failed training run ends with 0, as a pipeline's next step judges it.

    Raises:
        NoCapacityError: If there were no hosts, once the record is written.
    """
    run.out = outputs.out
    with telling(
        run.workload, run=run.job.name, step="train", quiet=run.quiet, is_told=is_told
    ) as ending:
        record, shortage = _trained(run)
        page = ""
        if run.job.tracking.mlflow:
            # For MLflow. An error in it is printed below, once the record is safe.
            with contextlib.suppress(StokerError):
                run.report()
            page = run.track(record, files=("decision.json", "training.json", "report.html"))
        code = _told(run, record, page=page, ending=ending)
    deliver_training(run, record, outputs=outputs)
    try:
        report = run.report().resolve().as_uri()
    except StokerError as err:
        report = f"not written: {err.what}"
    say(f"logs: {run.folder / 'logs'}\nreport: {report}", quiet=run.quiet)
    # A pipeline's next step judges a failed training run, so this one must not end the pipeline.
    if always and not record.is_unknown:
        return 0
    if shortage:
        raise shortage
    return code


def _trained(run: FollowedTraining) -> tuple[Training, NoCapacityError | None]:
    """Trains; returns the record, and the error where there were no hosts.

    However it ends, the report and MLflow learn of it.
    """
    # Of this folder before the run, to tell an old record from a new one.
    earlier = run.record_so_far()
    try:
        try:
            return train_and_keep(run), None
        finally:
            after = run.record_so_far()
            # An evaluation goes with the training run that it judged. A refused training run leaves
            # the earlier record, and one that had ended and was followed again is the same.
            if after and not (earlier and after.is_of_same_training(earlier)):
                (run.folder / "evaluation.json").unlink(missing_ok=True)
    except (KeyboardInterrupt, TerminatedError):
        # What was measured until then; a job that continues without stoker has no record yet.
        if after:
            run.report()
        raise
    except NoCapacityError as err:
        # Not raised yet: a further attempt of a pipeline's step would wait as long again.
        return read_json(run.record_file, Training), err
    except StokerError:
        # Ends the run in MLflow, which a further attempt continues. A refused training run leaves
        # it as it was, and one that left no record has failed.
        if run.has_submitted and after == earlier:
            after = None
        run.track(after, is_refused=not run.has_submitted)
        raise


def _told(run: FollowedTraining, record: Training, *, page: str, ending: RunEnding) -> int:
    """Fills in what the webhook is told; returns the exit code."""
    links = {"job": record.job.url, "mlflow": page, "logs": str(run.folder / "logs")}
    ending.links |= {name: link for name, link in links.items() if link}
    ending.warnings = tuple(group.made_words for group in record.useless_groups)
    code = training_exit_code(record)
    if record.is_unknown and pipeline_execution():
        # The next step reads the outputs again.
        code = 0
    if code:
        ending.failed(outcome_of(record).words, exit_code=code)
        # A training run that was stopped has not failed.
        ending.status = record.status
    return code


def train_and_keep(run: FollowedTraining) -> Training:
    """Trains and shows the progress; keeps the record of a training run that is stopped.

    A pipeline's step returns the record of an earlier attempt that succeeded, or whose data hosts
    fed no trainer.
    """
    job = run.job
    platform = run.platform
    is_step = bool(job.records)
    request = platform.plan(job)
    earlier = None
    if is_step and (kept := platform.kept(request)):
        earlier = read_json(kept, Training)
    # Data hosts that fed no trainer would not feed one now.
    if earlier and (earlier.status == "succeeded" or earlier.is_unfed):
        say(f"{job.name} has trained before: this is its record", quiet=run.quiet)
        write_json(run.record_file, earlier)
        return earlier
    # A run whose job is gone is trained again only if the user wants it.
    if words := platform.vanished(request):
        _confirm_again(run, words)
    if run.workload.platform_info.is_this_machine:
        # Elsewhere the leader's host tells, as it starts.
        refuse_unfed_script(job, os.environ)
    job = start_tracking(
        replace(job, lineage=_lineage(run.workload)), platform=platform.name, quiet=run.quiet
    )
    steps = run.workload.training.total_steps()
    with following(quiet=run.quiet, echo=run.echo, total_steps=steps) as follow:
        record = train(
            job,
            platform=platform,
            catalog=run.catalog,
            decision=run.decision,
            observer=_Follower(run, follow),
        )
    if is_step and not record.is_unknown:
        platform.keep(request, carried(record, max_bytes=MAX_KEPT_BYTES))
    return record


def _confirm_again(run: FollowedTraining, words: str) -> None:
    """Asks whether to train again though an earlier job is gone; raises UsageError for no."""
    if run.assume_yes:
        say(f"warning: {words}; it is trained again", quiet=run.quiet)
        return
    refused = UsageError(
        f"not trained again: {words}",
        where=str(run.folder / "submitted.json"),
        fix="choose another --name, or train again with --yes",
    )
    if not is_interactive():
        raise refused
    ask(f"{words}. Train again", assume_yes=False, refused=refused)


def _lineage(workload: Workload) -> Lineage:
    state = git_state(Path.cwd())
    return Lineage(
        git=str(state.get("git") or "") or None,
        git_dirty=bool(state.get("git_dirty")),
        workload_sha256=sha256_of(workload),
        # Before it starts, as the training may write files.
        code=code_here(workload).digest or None,
    )


class _Follower(JobObserver):
    """Shows a training run while it runs, warns its webhook, and keeps the record of a stop."""

    def __init__(self, run: FollowedTraining, follow: Follow) -> None:
        self._run = run
        self._follow = follow
        self._alerted: dict[str, float] = {}

    def submitted(self) -> None:
        self._run.has_submitted = True

    def line(self, line: LogLine) -> None:
        event = self._follow.line(line)
        now = time.monotonic()
        if event and event.event in _ALERTS and now >= self._alerted.get(event.event, now):
            self._alerted[event.event] = now + _ALERT_PAUSE_SECONDS
            run = self._run
            text = event.values.get("text", "")
            warned(run.workload, run=run.job.name, step="train", text=text, quiet=run.quiet)

    def may_stop(self) -> bool:
        return self._follow.ask_to_stop()

    def stopped(self, record: Training) -> None:
        """Copies the record to the run's second file, and prints how to continue."""
        run = self._run
        out = self._run.out
        # This one is written already.
        files = [run.record_file]
        if out:
            write_json(out, copied_to(out, record, run_dir=run.folder))
            files.append(out)
        say(
            f"{training_words(record)}: all hosts have ended\n"
            f"kept:  {', '.join(map(relative, files))} (status: stopped), "
            f"{relative(run.folder / 'logs')}, and what the script saved\n"
            f"again: {run.again}",
            quiet=run.quiet,
        )
        run.track(record, files=("training.json",), is_stopped=True)


def deliver_training(run: FollowedTraining, record: Training, *, outputs: Outputs) -> None:
    """Copies the model, and writes and prints the record; by default, in the run's folder.

    Raises:
        UsageError: In a step of Kubeflow, if a file cannot be written: the next step needs it.
            Elsewhere that is a warning: a training run is worth more than its record.
    """
    model_uri = kept_model(record.model_uri, outputs)
    file = outputs.out or run.record_file
    try:
        # The record may go elsewhere, and its timeline, which it names by a relative path.
        copied = copied_to(file, record, run_dir=run.folder, model_uri=model_uri)
        deliver(
            copied,
            outputs=replace(outputs, out=file),
            name="training",
            explain=training_words,
            as_json=run.quiet,
            told=told_of_training(copied),
            model_uri=copied.model_uri or "",
        )
    except (UsageError, OSError) as err:
        if outputs.executor is not None:
            raise
        print(training_words(record))
        print(f"warning: no record of this training run: {err}", file=sys.stderr)
