"""A pipeline's last step follows the jobs that the run's other steps have lost, to their end."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import PlatformError, StokerError, TerminatedError

if TYPE_CHECKING:
    from stoker.cli.outputs import Outputs
    from stoker.platforms.base import RecoveringPlatform
    from stoker.records import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedJob:
    """The end of a job that was lost, and followed from here.

    Attributes:
        words: In a line.
        is_left: Whether it could not be followed, and may still run.
    """

    words: str
    is_left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishOutputs:
    """Places for the results of a job that was lost.

    Attributes:
        record: Place of the record, and of the model.
        evaluation: File for the evaluation.
        report: File for the report.
    """

    record: "Outputs"
    evaluation: Path | None
    report: Path | None


def follow_lost(
    workload: "Workload",
    *,
    run_id: str,
    platform: "RecoveringPlatform[object]",
    champion: str | None,
    outputs: FinishOutputs,
    quiet: bool,
) -> Iterator[FollowedJob]:
    """Follows the jobs of a failed run to their end, and writes what the lost steps would have.

    The jobs' own bounds hold. Yields nothing where somebody has ended the run, or no job was lost.

    Args:
        workload: The workload of the run.
        run_id: Id of the run.
        platform: The platform of the jobs.
        champion: The model in use, for gates; None: there is none.
        outputs: Where the results go.
        quiet: Whether to show nothing.

    Raises:
        PlatformError: If the platform cannot be asked which jobs there are.
        TerminatedError: If this process is told to end: the job is left.
    """
    run = workload.run_name(run_id)
    for records in platform.lost(run, workload, run_id=run_id):
        step = records.get("step", "")
        follow = _follow_profile if step == "profile" else _follow_training
        try:
            words = follow(
                records, run=run, platform=platform, champion=champion, outputs=outputs, quiet=quiet
            )
        except TerminatedError as err:
            # With words it is left: then nobody has ended the run.
            if err.args:
                raise
            words = f"somebody has ended the run: the job of the {step} is ended, too"
        except StokerError as err:
            is_left = isinstance(err, PlatformError)
            yield FollowedJob(
                words=f"the step that followed the {step} was lost, and {_failure(err)}",
                is_left=is_left,
            )
            continue
        if words:
            yield FollowedJob(words=words)


def _failure(err: StokerError) -> str:
    if not isinstance(err, PlatformError):
        return f"it failed: {err.what}"
    return f"it cannot be followed: {err.what}; `stoker stop` ends what still runs"


def _follow_profile(
    records: Mapping[str, str],
    *,
    run: str,
    platform: "RecoveringPlatform[object]",
    champion: str | None,
    outputs: FinishOutputs,
    quiet: bool,
) -> str:
    """Follows a profile; returns what to say of it, empty where its own step has told it."""
    from stoker.cli.outputs import deliver, told_of_profile
    from stoker.cli.profile import profile_and_keep
    from stoker.cli.workloads import named_run_dir, todays_cluster
    from stoker.profile import explain
    from stoker.profile.profiled_job import profiled_job
    from stoker.records import Workload, read_json

    workload = read_json(records["workload.json"], Workload)
    cluster, run_dir = todays_cluster(workload), named_run_dir(f"{run}-profile")
    job = profiled_job(workload, group=cluster.dnn, run_dir=run_dir, records=records)
    if platform.kept(platform.plan(job)):
        return ""
    record = profile_and_keep(
        workload,
        cluster=cluster,
        platform=platform.adopting(),
        run_dir=run_dir,
        records=records,
        quiet=quiet,
    )
    deliver(
        record,
        outputs=replace(outputs.record, out=outputs.record.out or run_dir / "profile.json"),
        name="profile",
        explain=explain,
        as_json=quiet,
        told=told_of_profile(record),
    )
    return (
        "the profile is finished though the run has FAILED: Retry takes it up, "
        "and measures no second time"
    )


def _follow_training(
    records: Mapping[str, str],
    *,
    run: str,
    platform: "RecoveringPlatform[object]",
    champion: str | None,
    outputs: FinishOutputs,
    quiet: bool,
) -> str:
    """Follows a training; returns what to say of it, empty where its own step has told it."""
    from stoker.catalog import catalog_of
    from stoker.cli.evaluate import judged
    from stoker.cli.outputs import (
        Outputs,
        deliver,
        kept_model,
        told_of_training,
        training_words,
    )
    from stoker.cli.tracking import keep_tracked
    from stoker.cli.train import train_and_keep
    from stoker.cli.workloads import named_run_dir
    from stoker.records import Decision, Workload, read_json, write_text
    from stoker.records.training import copied_to
    from stoker.train import prepare

    workload = read_json(records["workload.json"], Workload)
    decided = read_json(records["decision.json"], Decision)
    run_dir = named_run_dir(run)
    for name, text in records.items():
        if name.endswith(".json"):
            write_text(run_dir / name, text)
    job = prepare(workload=workload, groups=decided.plan.groups, run_dir=run_dir, decision=decided)
    job = replace(job, records=records)
    if platform.kept(platform.plan(job)):
        return ""
    record = train_and_keep(
        job,
        platform=platform.adopting(),
        catalog=catalog_of(workload, None),
        decision=decided,
        total_steps=workload.training.total_steps(),
        out=None,
        again="",
        quiet=quiet,
        echo=True,
        on_submit=lambda: None,
    )
    keep_tracked(
        job.tracking,
        run=job.run_name,
        training=record,
        files=[run_dir / "decision.json", run_dir / "training.json"],
        quiet=quiet,
    )
    file = outputs.record.out or run_dir / "training.json"
    model_uri = kept_model(record.model_uri, outputs.record)
    record = copied_to(file, record, run_dir=run_dir, model_uri=model_uri)
    deliver(
        record,
        outputs=replace(outputs.record, out=file),
        name="training",
        explain=training_words,
        as_json=quiet,
        told=told_of_training(record),
        model_uri=record.model_uri or "",
    )
    if "profile.json" in records:
        judged(
            workload,
            records=(run_dir / "profile.json", run_dir / "decision.json", str(file)),
            outputs_uri=None,
            may_be_lost=False,
            champion=champion,
            destinations=Outputs(out=outputs.evaluation or run_dir / "evaluation.json"),
            report=outputs.report or run_dir / "report.html",
            links={},
            as_json=quiet,
        )
    if record.status != "succeeded":
        return f"the training has {record.status}, after the step that followed it was lost"
    return (
        "the training is finished though the run has FAILED: Retry takes it up, "
        "and trains no second time"
    )
