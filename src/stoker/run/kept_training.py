"""A training run that is shown while it runs, and whose record is kept."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from stoker.catalog import Catalog
from stoker.errors import UsageError
from stoker.host.git import git_state
from stoker.launch.script_python import refuse_unfed_script
from stoker.logs import EventName
from stoker.platforms.base import JobSpec, LogLine, Platform
from stoker.record_words import training_words
from stoker.records import (
    Decision,
    Profile,
    Training,
    Workload,
    read_json,
    sha256_of,
    to_json,
    write_json,
)
from stoker.records.training import Lineage, copied_to
from stoker.run.mlflow_run import keep_tracked, start_tracking
from stoker.run.outputs import Outputs, carried, deliver, told_of_training
from stoker.run.progress import following
from stoker.run.unchanged import code_here
from stoker.run.webhook import warned
from stoker.terminal import ask, is_interactive, relative, say
from stoker.train import train

# Events of a continuing run that go to its webhook.
_ALERTS = (EventName.BATCH_HANGS, EventName.BUDGET_NEARLY_SPENT, EventName.NO_PROGRESS)
# Between two alerts of a kind: all ranks may report the same.
_ALERT_PAUSE_SECONDS = 60.0
# Of the profile that is kept with a job: what its ConfigMap has room for.
_MAX_PROFILE_BYTES = 700 << 10
# Of a training run's record that is kept on the platform.
MAX_KEPT_BYTES = 64 << 10


def records_of_step(
    workload: Workload, decision: Decision | None, profile: Profile | None
) -> dict[str, str]:
    """Returns the records, if any, from which a pipeline's last step can follow a training run."""
    if decision is None:
        return {}
    workload_json, decision_json = to_json(workload), to_json(decision)
    found = {"step": "training", "workload.json": workload_json, "decision.json": decision_json}
    measured = to_json(profile) if profile else ""
    if measured and len(measured.encode()) <= _MAX_PROFILE_BYTES:
        found["profile.json"] = measured
    return found


def train_and_keep(
    job: JobSpec,
    *,
    workload: Workload,
    platform: Platform[object],
    catalog: Catalog,
    decision: Decision | None,
    out: Path | None = None,
    again: str,
    quiet: bool,
    echo: bool,
    on_submit: Callable[[], None] | None = None,
    assume_yes: bool = True,
) -> Training:
    """Trains and shows the progress; keeps the record of a training run that is stopped.

    The step of a pipeline (`job.records`) returns the record of an earlier attempt that succeeded,
    or whose data hosts fed no trainer.

    Args:
        out: Second file for the record of a training run that is stopped.
        again: The command that continues after a stop.
        echo: Whether to show the lines of the script, too.
        assume_yes: Train again without a question though an earlier job's end was not seen.
    """
    is_step = bool(job.records)
    request = platform.plan(job)
    kept = platform.kept(request) if is_step else ""
    found = read_json(kept, Training) if kept else None
    # Data hosts that fed no trainer would not feed one now.
    if found and (found.status == "succeeded" or found.is_unfed):
        say(f"{job.name} has trained before: this is its record", quiet=quiet)
        write_json(job.run_dir / "training.json", found)
        return found
    # A run whose job is gone is trained again only if the user wants it.
    words = platform.vanished(request)
    if words and assume_yes:
        say(f"warning: {words}; it is trained again", quiet=quiet)
    elif words:
        refused = UsageError(
            f"not trained again: {words}",
            where=str(job.run_dir / "submitted.json"),
            fix="choose another --name, or train again with --yes",
        )
        if not is_interactive():
            raise refused
        ask(f"{words}. Train again", assume_yes=False, refused=refused)
    if workload.platform_info.is_this_machine:
        # Elsewhere the leader's host tells, as it starts.
        refuse_unfed_script(job, os.environ)
    state = git_state(Path.cwd())
    lineage = Lineage(
        git=str(state.get("git") or "") or None,
        git_dirty=bool(state.get("git_dirty")),
        workload_sha256=sha256_of(workload),
        # Before it starts, as the training may write files.
        code=code_here(workload).digest or None,
    )
    job = start_tracking(replace(job, lineage=lineage), platform=platform.name, quiet=quiet)
    alerted: dict[str, float] = {}
    steps = workload.training.total_steps()
    with following(quiet=quiet, echo=echo, total_steps=steps) as follow:

        def show(line: LogLine) -> None:
            event = follow.line(line)
            now = time.monotonic()
            if event and event.event in _ALERTS and now >= alerted.get(event.event, now):
                alerted[event.event] = now + _ALERT_PAUSE_SECONDS
                text = event.values.get("text", "")
                warned(workload, run=job.name, step="train", text=text, quiet=quiet)

        record = train(
            job,
            platform=platform,
            catalog=catalog,
            decision=decision,
            on_line=show,
            on_stop=partial(keep_stopped, job=job, out=out, again=again, quiet=quiet),
            on_submit=on_submit,
            may_stop=follow.ask_to_stop,
        )
    if is_step and not record.is_unknown:
        platform.keep(request, carried(record, max_bytes=MAX_KEPT_BYTES))
    return record


def deliver_training(
    record: Training, *, outputs: Outputs, run_dir: Path, model_uri: str | None, as_json: bool
) -> None:
    """Writes and prints a training run's record; by default, in the run's folder."""
    file = outputs.out or run_dir / "training.json"
    # The record may go elsewhere, and its timeline, which it names by a relative path.
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


def keep_stopped(
    record: Training, *, job: JobSpec, out: Path | None, again: str, quiet: bool
) -> None:
    """Copies the record of a stopped training to `out`, and prints how to continue."""
    run_dir = job.run_dir
    files = [run_dir / "training.json", *([out] if out else [])]
    if out:
        write_json(out, copied_to(out, record, run_dir=run_dir))
    say(
        f"{training_words(record)}: all hosts have ended\n"
        f"kept:  {', '.join(map(relative, files))} (status: stopped), "
        f"{relative(run_dir / 'logs')}, and what the script saved\n"
        f"again: {again}",
        quiet=quiet,
    )
    keep_tracked(
        job.tracking,
        run=job.run_name,
        training=record,
        files=[run_dir / "training.json"],
        is_stopped=True,
        quiet=quiet,
    )
