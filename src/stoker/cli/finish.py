"""A pipeline's last step ends what is left of a run that is over, and says how the run ended.

Jobs of a failed run that nobody has ended, and whose steps were lost, are followed to their end.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.cli.progress import say
from stoker.errors import PlatformError, StokerError, TerminatedError

if TYPE_CHECKING:
    from stoker.cli.outputs import Outputs
    from stoker.platforms.base import RecoveringPlatform
    from stoker.records import Json, PlatformSettings, Workload

# As Kubeflow's pages say it, and as its driver hands it to an exit handler.
_FAILED = ("failed", "error", "system_error")
# Of a step whose driver failed or whose pod was killed nothing is published: to Kubeflow it still
# runs when the run is over.
_UNTOLD = ("running", "new")
_SUCCEEDED = ("succeeded", "success", "complete", "cached")


_NO_REPORT = "<p>No training of this run was lost: the report of the run is Evaluate's.</p>\n"


class _CleanUp(Protocol):
    """A platform ends the jobs of a run by this function."""

    def __call__(self, name: str, settings: "PlatformSettings", *, run_id: str = "") -> str:
        """Returns in words what it ended."""
        ...


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


def finish_run(
    workload: "Workload",
    *,
    run_id: str,
    outcome: str,
    outputs: FinishOutputs,
    as_json: bool,
) -> None:
    """Ends the jobs of a run that still exist, and says how the run ended, to a webhook as well.

    A job that a failed run has lost is followed to its end before.

    Args:
        workload: The workload of the run.
        run_id: Id of the run.
        outcome: How the run ended: JSON as of Kubeflow's PipelineTaskFinalStatus.
        outputs: As for `follow_lost`.
        as_json: Prints JSON.

    Raises:
        PlatformError: If the platform does not answer, or refuses.
        TerminatedError: If this process is told to end while it follows a job, which is left.
    """
    from stoker.cli.notify import telling
    from stoker.platforms import platform_named
    from stoker.platforms.base import RecoveringPlatform
    from stoker.records import write_text

    run = workload.run_name(run_id)
    state, why = _state(outcome)
    platform = platform_named(workload.platform, settings=workload)
    if state not in _SUCCEEDED and isinstance(platform, RecoveringPlatform):
        if platform.is_cancelled(workload):
            state = "cancelled"
        elif state in _UNTOLD:
            state = "failed"
    followed: list[FollowedJob] = []
    ended = ""
    with telling(workload, run=run, step="the pipeline", quiet=as_json) as ending:
        # Before it may fail itself: that the run failed is the greater news.
        if state in _FAILED:
            ending.failed(why)
        elif state not in _SUCCEEDED:
            # Cancelled, or a word that Kubeflow did not fill in.
            ending.status = "stopped"
        if state not in (*_SUCCEEDED, "cancelled") and isinstance(platform, RecoveringPlatform):
            for each in follow_lost(
                workload,
                run_id=run_id,
                platform=platform,
                outputs=outputs,
                quiet=as_json,
            ):
                followed.append(each)
                say(each.words, quiet=as_json)
        # Only platforms whose jobs outlive stoker have it.
        clean_up: _CleanUp | None = getattr(platform, "clean_up", None)
        if clean_up and not any(each.is_left for each in followed):
            ended = clean_up(run, workload, run_id=run_id)
    if outputs.report and not outputs.report.exists():
        # Kubeflow shows the page of each declared report.
        outputs.report.parent.mkdir(parents=True, exist_ok=True)
        write_text(outputs.report, _NO_REPORT)
    words = [each.words for each in followed]
    if as_json:
        document = {"run": run, "state": state, "reason": why, "ended": ended, "followed": words}
        print(json.dumps(document))
        return
    print(f"run {run}: {state}" + (f": {why}" if why else ""))
    print("\n".join([ended or "no job of the run was left", *words]))


def _state(outcome: str) -> tuple[str, str]:
    """Returns how the run ended, and why, of what Kubeflow hands an exit handler."""
    from stoker.records.base import mapping

    try:
        document: Json = json.loads(outcome)
    except ValueError:
        # A placeholder that a server before 2.14 does not fill in.
        document = {}
    error = mapping(document, "error")
    return (
        str(mapping(document).get("state") or "unknown").lower(),
        str(error.get("message") or ""),
    )


def follow_lost(
    workload: "Workload",
    *,
    run_id: str,
    platform: "RecoveringPlatform[object]",
    outputs: FinishOutputs,
    quiet: bool,
) -> Iterator[FollowedJob]:
    """Follows the jobs of a failed run to their end, and writes what the lost steps would have.

    The jobs' own bounds hold. Yields nothing where somebody has ended the run, or no job was lost.

    Args:
        workload: The workload of the run.
        run_id: Id of the run.
        platform: The platform of the jobs.
        outputs: Where the results go.
        quiet: Whether to show nothing.

    Raises:
        PlatformError: If the platform cannot be asked which jobs there are.
        TerminatedError: If this process is told to end: the job is left.
    """
    run = workload.run_name(run_id)
    for records in platform.lost(run, workload, run_id=run_id):
        step = records.get("step", "")
        try:
            if step == "profile":
                words = _follow_profile(
                    records, run=run, platform=platform, outputs=outputs, quiet=quiet
                )
            else:
                words = _follow_training(
                    records,
                    workload=workload,
                    run=run,
                    platform=platform,
                    outputs=outputs,
                    quiet=quiet,
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
    outputs: FinishOutputs,
    quiet: bool,
) -> str:
    """Follows a profile; returns what to say of it."""
    from stoker.cli.outputs import deliver, told_of_profile
    from stoker.cli.profile import profile_and_keep
    from stoker.cli.workloads import named_run_dir, todays_cluster
    from stoker.profile import explain
    from stoker.records import Workload, read_json

    workload = read_json(records["workload.json"], Workload)
    cluster, run_dir = todays_cluster(workload), named_run_dir(f"{run}-profile")
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
    workload: "Workload",
    run: str,
    platform: "RecoveringPlatform[object]",
    outputs: FinishOutputs,
    quiet: bool,
) -> str:
    """Follows a training; returns what to say of it."""
    import msgspec

    from stoker.catalog import catalog_of
    from stoker.cli.evaluate import judged
    from stoker.cli.kept_training import train_and_keep
    from stoker.cli.outputs import (
        Outputs,
        deliver,
        kept_model,
        told_of_training,
    )
    from stoker.cli.tracking import keep_tracked
    from stoker.cli.workloads import named_run_dir
    from stoker.records import Decision, Workload, read_json, write_text
    from stoker.records.outcome import outcome_of, training_exit_code
    from stoker.records.training import copied_to
    from stoker.train import prepare
    from stoker.words import training_words

    # As Train had it, with the parameters of the run.
    asked = read_json(records["workload.json"], Workload)
    decided = read_json(records["decision.json"], Decision)
    run_dir = named_run_dir(run)
    for name, text in records.items():
        if name.endswith(".json"):
            write_text(run_dir / name, text)
    job = prepare(workload=asked, groups=decided.plan.groups, run_dir=run_dir, decision=decided)
    job = replace(job, records=records)
    record = train_and_keep(
        job,
        platform=platform.adopting(),
        catalog=catalog_of(asked, None),
        decision=decided,
        total_steps=asked.training.total_steps(),
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
        # The claim of champions is not mounted here: the step that frees hosts must not wait for a
        # volume. A retry judges by all gates.
        gates = tuple(gate for gate in workload.gate if not gate.needs_champion)
        judged(
            msgspec.structs.replace(asked, gate=gates),
            records=(run_dir / "profile.json", run_dir / "decision.json", str(file)),
            may_be_lost=False,
            champion=None,
            destinations=Outputs(out=outputs.evaluation or run_dir / "evaluation.json"),
            report=outputs.report or run_dir / "report.html",
            links={},
            as_json=quiet,
        )
    if training_exit_code(record):
        return f"{outcome_of(record).words}; the step that followed it was lost before"
    return (
        "the training is finished though the run has FAILED: Retry takes it up, "
        "and trains no second time"
    )
