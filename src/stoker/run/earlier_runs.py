"""Earlier runs of a workload, in runs/ or in a pipeline's memory: the last plan, a calibration."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.catalog import Catalog
from stoker.decide import EarlierRun, LastRun, calibrate, remembered
from stoker.errors import UsageError
from stoker.records import (
    Calibration,
    Decision,
    Evaluation,
    Group,
    Profile,
    RememberedRun,
    Training,
    Workload,
    read_json,
)
from stoker.records.workload import refuse_foreign
from stoker.run.pipeline_memory import MOST_RUNS, is_memory, remembered_runs, why_unwritable


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What earlier runs of a workload say for its next decision.

    Attributes:
        last: The newest run that succeeded. None: there is none, or it cannot be read.
        runs: Runs that succeeded, newest first.
        why_not: Why the newest run is not used; empty: it is, or there is none.
    """

    last: LastRun | None = None
    runs: tuple[EarlierRun, ...] = ()
    why_not: str = ""

    @property
    def last_groups(self) -> tuple[Group, ...]:
        """The last run's instance groups; () if there is none."""
        if self.last:
            return self.last.decision.plan.groups
        return ()

    def calibration(self, *, like: Profile, catalog: Catalog) -> Calibration | None:
        """Returns constants that fit the runs; None where they are too few to correct one."""
        calibration = calibrate(self.runs, like=like, catalog=catalog)
        if calibration.runs:
            return calibration
        return None

    def applied(self, decision: Decision) -> Decision:
        """Returns the decision with the last run's plan where no other is clearly better."""
        if self.why_not:
            text = f"decided without the last run's plan: {self.why_not}"
            return msgspec.structs.replace(decision, warnings=(*decision.warnings, text))
        if self.last is None:
            return decision
        return remembered(decision, self.last)


def memory_of(workload: Workload, *, runs: Path, besides: Path) -> Memory:
    """Returns the memory of the workload's runs in the folder `runs`.

    A run counts if it trained with the same command, strategy and engine on the same cluster (a
    learning rate or epochs may differ), if it succeeded, and passed its gates. Where the newest of
    them cannot be read, there is no memory: an older plan is not the last one.

    Args:
        besides: Folder of the run that asks.
    """
    earlier_runs: list[EarlierRun] = []
    last: LastRun | None = None
    for folder in _folders(workload, runs=runs, besides=besides):
        try:
            run = _run_in(folder)
        except UsageError as err:
            if last is None:
                return Memory(why_not=f"{folder.name} cannot be read: {err.what}")
            continue
        # The folders come newest first.
        last = last or LastRun(run=folder.name, decision=run.decision, training=run.training)
        earlier_runs.append(run)
        if len(earlier_runs) == MOST_RUNS:
            break
    return Memory(last=last, runs=tuple(earlier_runs))


def memory_in(folder: Path, *, workload: Workload, branch: str = "") -> Memory:
    """Returns what a folder says of a workload's earlier runs: a pipeline's memory, or runs/.

    A folder that is missing or empty is a pipeline's before its first run.

    Args:
        folder: The memory, or the folder of the runs.
        workload: As for `memory_of`.
        branch: Which of the pipeline's training jobs it is; empty: its only one.
    """
    if not is_memory(folder):
        memory = memory_of(workload, runs=folder, besides=Path())
        if memory.last or workload.platform != "kubernetes":
            return memory
        # Else nobody would see why no run is ever remembered on the volume.
        if why_not := why_unwritable(folder):
            return Memory(why_not=why_not)
        return memory
    kept = remembered_runs(folder, workload=workload, branch=branch)
    runs = [run for run in kept.runs if _is_of(run, workload)]
    earlier = tuple(
        EarlierRun(profile=run.profile, decision=run.decision, training=run.training)
        for run in runs
    )
    if not runs:
        return Memory(why_not=kept.why_not)
    newest = runs[0]
    last = LastRun(run=newest.run, decision=newest.decision, training=newest.training)
    return Memory(last=last, runs=earlier)


def _is_of(run: RememberedRun, workload: Workload) -> bool:
    """Whether a run trained with the same command, strategy and engine on the same cluster."""
    decision = run.decision
    try:
        refuse_foreign(
            "decision",
            keys=decision.workload_keys,
            digest=decision.workload_sha256,
            workload=workload,
        )
    except UsageError:
        return False
    return run.training.job.platform == workload.platform


def last_run(workload: Workload, *, runs: Path) -> Path | None:
    """Returns the folder of the workload's newest run that passed; None if there is none."""
    return next(_folders(workload, runs=runs, besides=Path()), None)


def _folders(workload: Workload, *, runs: Path, besides: Path) -> Iterator[Path]:
    """Yields the folders of the workload's runs that were judged as good, newest first."""
    files = [file for file in runs.glob("*/evaluation.json") if file.parent.name != besides.name]
    for file in sorted(files, key=_time, reverse=True):
        folder = file.parent
        with contextlib.suppress(UsageError):
            ran = read_json(folder / "workload.json", Workload)
            if ran.name != workload.name or ran.platform != workload.platform:
                continue
            refuse_foreign(
                "decision", keys=ran.profile_keys(), digest=ran.digest(), workload=workload
            )
            # One of another version is reported by `memory_of`.
            if not _is_refused(file):
                yield folder


def _is_refused(file: Path) -> bool:
    try:
        return not read_json(file, Evaluation).passed
    except UsageError:
        return False


def _time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        # Deleted by now.
        return 0.0


def calibration_of(folder: Path, *, like: Profile, catalog: Catalog) -> Calibration:
    """Returns constants that fit the runs in `folder` (ID/{profile,decision,training}.json).

    A run that did not end, or whose records cannot be read, is left out.

    Args:
        folder: The folder of the runs.
        like: The profile whose prediction is corrected.
        catalog: Types and prices.

    Raises:
        UsageError: There is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"no runs in {folder}", where="--calibrate", fix="name the folder of the runs: runs"
        )
    runs = []
    for run in sorted(folder.iterdir()):
        with contextlib.suppress(UsageError):
            runs.append(_run_in(run))
    return calibrate(runs, like=like, catalog=catalog)


def _run_in(folder: Path) -> EarlierRun:
    return EarlierRun(
        profile=read_json(folder / "profile.json", Profile),
        decision=read_json(folder / "decision.json", Decision),
        training=read_json(folder / "training.json", Training),
    )
