"""The folder that all runs of a pipeline share: a file for each run that passed.

On SageMaker it is a prefix in S3, which steps get as a folder; on Kubeflow it lies on a volume.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from stoker.environment import pipeline_execution
from stoker.errors import UsageError
from stoker.logs import now_utc
from stoker.records import (
    Comparison,
    Decision,
    Profile,
    RememberedRun,
    Training,
    Workload,
    read_json,
    write_json,
)
from stoker.records.memory import remembered_run
from stoker.terminal import say

# More would be of another time: other data, other drivers.
MOST_RUNS = 20
# A prefix in S3 grows by a file a run; these are enough for the runs of some branches.
_MOST_READ = 400
# What a writer leaves on a volume, of all branches.
_MOST_KEPT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RememberedRuns:
    """Runs that a pipeline remembers.

    Attributes:
        runs: Newest first, MOST_RUNS at most.
        why_not: Why the newest file is not used; empty: it is, or there is none.
    """

    runs: tuple[RememberedRun, ...] = ()
    why_not: str = ""


def remembered_runs(folder: Path, *, workload: Workload, branch: str = "") -> RememberedRuns:
    """Returns the runs of a workload's pipeline in its memory; none where there is no folder.

    Where the newest file cannot be read, there is no memory: an older run is not the last one.

    Args:
        folder: The memory.
        workload: Its name is the pipeline's.
        branch: Which of the pipeline's training jobs it is; empty: its only one.
    """
    runs: list[RememberedRun] = []
    other = ""
    for file in _files(folder)[:_MOST_READ]:
        try:
            run = read_json(file, RememberedRun)
        except UsageError as err:
            if not runs:
                return RememberedRuns(why_not=f"{file.name} cannot be read: {err.what}")
            continue
        if run.pipeline != workload.name:
            other = run.pipeline
        # A step that was repeated may have written its run twice.
        elif run.branch == branch and run.run not in [earlier.run for earlier in runs]:
            runs.append(run)
        if len(runs) == MOST_RUNS:
            break
    if other and not runs:
        why = f"{folder} is the memory of {other}, not of {workload.name}"
        return RememberedRuns(why_not=why)
    return RememberedRuns(runs=tuple(runs))


def is_memory(folder: Path) -> bool:
    """Whether a folder has files of runs, as pipelines write them."""
    return bool(_files(folder))


def why_unwritable(folder: Path) -> str:
    """Returns why no run can be kept in a folder, which need not exist; empty: it can."""
    # The nearest folder that exists: those below it would be made there.
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return ""
    return f"user {os.getuid()} cannot write to {there}, so no run is remembered"


def keep_run(folder: Path, run: RememberedRun) -> Path:
    """Writes a run to a memory, and removes the oldest of very many; returns its file.

    Raises:
        UsageError: If the file cannot be written.
    """
    file = folder / _file_name(run)
    write_json(file, run)
    for old in _files(folder)[_MOST_KEPT:]:
        # Another run may remove it, too.
        with contextlib.suppress(OSError):
            old.unlink()
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceInMemory:
    """Where a pipeline's memory gets a run.

    Attributes:
        folder: The memory.
        branch: Which of the pipeline's training jobs it is; empty: its only one.
        comparison: File of the run's comparison, or its text. None, or empty: it had none, and no
            later run is skipped for it.
    """

    folder: Path
    branch: str = ""
    comparison: Path | str | None = None


def keep_remembered(
    place: PlaceInMemory,
    *,
    workload: Workload,
    run: str,
    records: tuple[Path, Path],
    training: Training,
    quiet: bool,
) -> None:
    """Adds a run that passed to its pipeline's memory; only prints why it could not.

    Args:
        place: The memory.
        workload: Its name is the pipeline's.
        run: Name of the run.
        records: Files of its profile and decision.
        training: Its training.
        quiet: Whether nothing is printed.
    """
    made_of: dict[str, str] = {}
    try:
        if place.comparison:
            made_of = read_json(place.comparison, Comparison).made_of
    except UsageError as err:
        say(f"memory: the next run will train: {err.what}", quiet=quiet)
    profile, decision = records
    try:
        read = (read_json(profile, Profile), read_json(decision, Decision), training)
        remembered = remembered_run(
            workload=workload,
            branch=place.branch,
            run=run,
            execution=pipeline_execution(),
            now=now_utc(),
            made_of=made_of,
            records=read,
        )
        file = keep_run(place.folder, remembered)
    except UsageError as err:
        say(f"memory: this run is not remembered: {err.what}", quiet=quiet)
        return
    say(f"memory: {file.name}", quiet=quiet)


def _files(folder: Path) -> list[Path]:
    """Returns the files of a memory, by their names newest first."""
    try:
        files = [file for file in folder.glob("[0-9]*--*.json") if file.is_file()]
    except OSError:
        return []
    return sorted(files, reverse=True)


def _file_name(run: RememberedRun) -> str:
    # The time in front: names are sorted by it.
    moment = re.sub(r"[^0-9TZ]", "", run.ended_at.partition(".")[0])
    return f"{moment}--{run.run}.json"
