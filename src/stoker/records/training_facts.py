"""training.json is made and written here, and nowhere else.

Two processes write one, each its own and each once it knows all that it can know: the leader's
launcher, inside the job, and the process that submitted the job, which reads the leader's record
and knows how the platform saw the job end. Others return facts; `training_record` says why each
field has its value.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from stoker.records.base import write_json
from stoker.records.decision import Group
from stoker.records.training import Event, Host, Job, Measured, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """Holds what one process knows of a run that has ended.

    Attributes:
        job: The platform's name for the run.
        leader: The record that the leader's launcher wrote; None in that launcher itself, and where
            it left none.
        status: How the run ended, as far as this process saw it.
        is_interrupted: Whether the user stopped the run here; what failed thereby is no failure.
        exit_code: As this process saw it: the training command's, or the host's.
        failure: Words of the part that failed.
        last_words: Last lines of the dnn group's log.
        groups: As they were asked for, or as the launcher found them.
        events: Only those that the leader's record does not have.
        release_seconds: From the end of the training to the end of the last data host.
        usd_per_hour: Price of all hosts, where it is known.
        timeline_file: Name of the leader's timeline in the record's own folder.
    """

    job: Job
    status: Literal["succeeded", "failed", "stopped"]
    groups: tuple[Group, ...]
    leader: Training | None = None
    is_interrupted: bool = False
    exit_code: int | None = None
    failure: str | None = None
    last_words: tuple[str, ...] = ()
    hosts: tuple[Host, ...] = ()
    strategy: str = "auto"
    engine: str = "feed"
    measured: Measured | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    release_seconds: float | None = None
    usd_per_hour: float | None = None
    timeline_file: str | None = None
    workload_sha256: str | None = None
    decision_id: str | None = None
    model_uri: str | None = None


def training_record(facts: TrainingFacts) -> Training:
    """Returns the record of a run. Pure."""
    leader = facts.leader
    # Only the leader's launcher sees these; where it left no record, what was asked for has to do.
    inside = leader or facts
    exit_code, release = facts.exit_code, facts.release_seconds
    if leader:
        # The leader knows the training command's own code, a platform often only the host's.
        exit_code = facts.exit_code if leader.exit_code is None else leader.exit_code
        # The platform sees hosts end; the leader sees them say goodbye, which comes earlier.
        release = leader.data_group_release_seconds if release is None else release
    return Training(
        # As they were asked for: the hosts know no more of them.
        workload_sha256=facts.workload_sha256,
        groups=facts.groups,
        decision_id=facts.decision_id,
        # The platform saw more than the leader could write, for one the leader's own death.
        status="stopped" if facts.is_interrupted else facts.status,
        exit_code=exit_code,
        failure=_failure(facts),
        hosts=inside.hosts,
        strategy=inside.strategy,
        engine=inside.engine,
        measured=_measured(inside.measured, facts),
        metrics=dict(inside.metrics),
        model_uri=facts.model_uri,
        # The platform may have had to take another name than was asked for.
        job=facts.job,
        data_group_release_seconds=release,
        events=tuple(
            sorted((*(leader.events if leader else ()), *facts.events), key=lambda each: each.when)
        ),
    )


def write_training(facts: TrainingFacts, *, file: Path) -> Training:
    """Makes the record and writes it.

    Raises:
        UsageError: If it cannot be written.
    """
    record = training_record(facts)
    write_json(file, record)
    return record


def copied_to(
    file: Path, record: Training, *, run_dir: Path, model_uri: str | None = None
) -> Training:
    """Returns the record for another place than its run's folder; its timeline is copied along.

    Args:
        file: Where the record will be written.
        record: As it is in the run's folder.
        run_dir: The run's folder.
        model_uri: Where a copy of the model is.
    """
    if record.measured and record.measured.timeline_file:
        name = _beside(run_dir / record.measured.timeline_file, file)
        record = msgspec.structs.replace(
            record, measured=msgspec.structs.replace(record.measured, timeline_file=name)
        )
    return msgspec.structs.replace(record, model_uri=model_uri or record.model_uri)


def _failure(facts: TrainingFacts) -> str | None:
    """Returns the words of the part that failed: the leader's are nearer to the cause."""
    if facts.is_interrupted:
        return None
    failure = (facts.leader and facts.leader.failure) or facts.failure
    if facts.status == "failed" and facts.last_words and not (facts.leader and facts.leader.hosts):
        # Not even the launcher came to its work: its log is all there is.
        return "\n".join([failure or "", *facts.last_words]).strip()
    return failure


def _measured(measured: Measured | None, facts: TrainingFacts) -> Measured | None:
    """Returns the leader's figures; whoever submitted the job adds cost and place of the steps."""
    if measured is None or facts.leader is None:
        return measured
    usd = None
    if facts.usd_per_hour is not None and measured.steps:
        usd = measured.step_seconds * facts.usd_per_hour / 3600 * 1000
    return msgspec.structs.replace(
        measured, usd_per_1000_steps=usd, timeline_file=facts.timeline_file
    )


def _beside(timeline: Path, record_file: Path) -> str:
    """Returns the timeline's name for its record: copied along if the record is elsewhere."""
    if record_file.parent.resolve() == timeline.parent.resolve():
        return timeline.name
    copied = record_file.with_name(f"{record_file.stem}-timeline.csv")
    record_file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(timeline, copied)
    return copied.name
