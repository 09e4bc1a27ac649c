"""The body of the profile component: submits the profiled job, follows it, reads what it left."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.errors import StokerError, UsageError, WorkloadError
from stoker.logs import now_utc
from stoker.platforms.base import JobEnd, JobSpec, LogLine, Platform, Run
from stoker.profile.grown_files import with_grown_files
from stoker.profile.measure import combine
from stoker.profile.raw import RankResult, read_ranks
from stoker.profile.timed_profile import keep_timed_timeline, timed_profile, too_few, was_cut_off
from stoker.profile.unmeasured import Heard, read_seen, unmeasured
from stoker.records import Cluster, Group, Profile, TodaysGroup, Workload
from stoker.records.base import Value

RequestT = TypeVar("RequestT")

# From the job's first line to the first batch: imports, data sets, models; and the end of it all.
START_ALLOWANCE_SECONDS = 120.0
_GIT_SECONDS = 5.0
_FIX = "make the command run by itself first"
_MISSING_MODULE = re.compile(r"No module named '([^']+)'.*")
_FIX_OF_REPLAY = (
    f"{_FIX}; if it does, it may not bear the same batch twice: leave checks of indices, labels or "
    "order out of the profiled command"
)


def profile(
    workload: Workload,
    *,
    platform: Platform[RequestT],
    run_dir: Path,
    cluster: Cluster | None = None,
    name: str | None = None,
    on_line: Callable[[LogLine], None] = lambda line: None,
    verdict_on_interrupt: bool = True,
) -> Profile:
    """Runs the workload's command on today's cluster in profiling mode, and says what it found.

    Blocks for about `workload.profile.budget_seconds` after the first batch; 120 s more from the
    first line of a dnn host, and the job is stopped; where no loader was read by then, it is
    stopped after the budget (120 s if that is less). Interrupted (KeyboardInterrupt), it stops the
    job and gives the verdict so far, if there is one. Leaves the steps as is in
    `run_dir`/baseline-timeline.csv.

    Args:
        cluster: Today's; absent: the workload's own.
        name: Of the job; absent: that of `run_dir`.
        on_line: Sees each line of the job's log.
        verdict_on_interrupt: False: an interrupt is raised again, whatever was found by then.

    Raises:
        UnmeasuredError: If the script never read from a DataLoader, or not in time, or ended before
            enough was measured: with what could be observed.
        UsageError: If the workload names no cluster.
        WorkloadError: If the command failed, with its traceback, or the deadline passed.
        PlatformError: If the platform refused or lost the job.
    """
    group = cluster.dnn if cluster else _todays_group(workload)
    job = _job(workload, group=group, run_dir=run_dir, name=name)
    run = platform.submit(platform.plan(job))
    budget = workload.profile.budget_seconds
    heard = Heard()
    deadline = _Deadline(run=run, heard=heard, budget_seconds=budget)
    interrupted: KeyboardInterrupt | None = None
    try:
        with deadline:
            for line in run.lines():
                # Not with what a platform says of itself: hosts, images and data take minutes.
                if line.group == job.groups[0].name:
                    deadline.start()
                    heard.line(line.text)
                on_line(line)
        end = run.wait()
    except KeyboardInterrupt as err:
        interrupted = err
        run.stop()
        end = run.wait()
    finally:
        run.stop()
    output = end.output_dir / "stoker" if end.output_dir else None
    ranks = read_ranks(output) if output else []
    if interrupted and not (verdict_on_interrupt and has_verdict(ranks)):
        raise interrupted
    what = what_of(workload.command)
    timed = timed_profile(output, ranks, what=what) if output else None
    is_whole = end.status != "failed" or deadline.has_passed
    if timed and output and (is_whole or was_cut_off(output)):
        keep_timed_timeline(output, run_dir)
        return timed
    if deadline.has_passed and not deadline.saw_nothing and not has_verdict(ranks):
        raise no_verdict(ranks, budget_seconds=budget)
    if end.status == "failed" and not deadline.has_passed:
        raise _failure(end, ranks, command=workload.command)
    reason = unmeasured(
        ranks,
        seen=read_seen(output) if output else [],
        used=heard.used,
        command=workload.command,
        group=group,
        what=what,
        timed=too_few(output) if output else "",
        cut_off_seconds=deadline.first_seconds if deadline.saw_nothing else None,
    )
    if reason:
        raise reason
    found = combine(
        ranks,
        group=group,
        settings=workload.profile,
        workload_sha256=workload.digest(),
        is_named=workload.cluster is not None,
        what=what,
    )
    if output:
        keep_timeline(output, run_dir)
    return with_grown_files(found, ranks)


def has_verdict(ranks: Sequence[RankResult]) -> bool:
    """Whether the parts were measured without which there is nothing to say."""
    return any(rank.accelerator for rank in ranks)


def no_verdict(ranks: Sequence[RankResult], *, budget_seconds: float) -> WorkloadError:
    """What to say of a profile that was stopped START_ALLOWANCE_SECONDS after its budget."""
    return WorkloadError(
        f"no verdict after {budget_seconds + START_ALLOWANCE_SECONDS:.0f} s "
        f"(profile.budget_seconds {budget_seconds:.0f}, {START_ALLOWANCE_SECONDS:.0f} to start "
        "and end); the job was stopped",
        where=_progress(ranks),
        fix="raise profile.budget_seconds, or make the command reach its first batch sooner",
    )


def what_of(command: Sequence[str]) -> dict[str, Value]:
    """What was profiled, and when, for the record."""
    what: dict[str, Value] = {"command": [*command], "when": now_utc()}
    commit = _git_commit()
    if commit:
        what["git"] = commit
    return what


def keep_timeline(output: Path, folder: Path) -> None:
    """Copies the steps as is from a host's `output` to `folder`/baseline-timeline.csv."""
    source = output / "baseline-timeline-rank0.csv"
    if source.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / "baseline-timeline.csv")


@dataclass(slots=True, kw_only=True)
class _Deadline:
    """Stops the run once it has passed; counts from the first `start`.

    Attributes:
        saw_nothing: It was stopped because nothing had been read that can be measured.
    """

    run: Run
    heard: Heard
    budget_seconds: float
    has_passed: bool = False
    saw_nothing: bool = False
    _timer: threading.Timer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "_Deadline":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._timer:
                self._timer.cancel()

    def start(self) -> None:
        """The clock runs; may be called again."""
        with self._lock:
            if self._timer is None:
                self._wait(self.first_seconds, self._look)

    @property
    def first_seconds(self) -> float:
        """By when a loader must have been read."""
        return max(self.budget_seconds, START_ALLOWANCE_SECONDS)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, then)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            if self.heard.has_begun:
                left = self.budget_seconds + START_ALLOWANCE_SECONDS - self.first_seconds
                self._wait(left, self._expire)
                return
            self.saw_nothing = True
        self._expire()

    def _expire(self) -> None:
        self.has_passed = True
        self.run.stop()


def _todays_group(workload: Workload) -> TodaysGroup:
    if workload.cluster is None:
        raise UsageError(
            "the workload does not say on what it trains today",
            where=f"workload {workload.name}, key cluster.dnn",
            fix="add cluster: {dnn: {instance_type: TYPE, count: 1}}",
        )
    return workload.cluster.dnn


def _job(workload: Workload, *, group: TodaysGroup, run_dir: Path, name: str | None) -> JobSpec:
    return JobSpec.of(
        workload,
        groups=(Group.of_today(group),),
        run_dir=run_dir,
        name=name,
        profile=workload.profile,
    )


def _progress(ranks: Sequence[RankResult]) -> str:
    if not ranks:
        return "before the first batch of a DataLoader"
    first = ranks[0]
    words = f"after {first.steps} steps of rank {first.rank}"
    if first.as_is:
        step, wait = first.as_is.step_seconds.median, first.as_is.wait_seconds.median
        words += f": one took {step:.3g} s, {min(1.0, wait / step):.0%} of it waiting for data"
    return words


class _Failure(msgspec.Struct):
    rank: int = 0
    host: str = ""
    type: str = ""
    message: str = ""
    traceback: str = ""


def fix_of_missing_module(name: str, command: Sequence[str]) -> str:
    """How to install a module that the command lacks: from the requirements next to its script."""
    scripts = [Path(word) for word in command if word.endswith(".py")]
    for requirements in (script.parent / "requirements.txt" for script in scripts[:1]):
        if requirements.is_file():
            return f"{sys.executable} -m pip install -r {requirements}"
    return f"install what holds the module {name.partition('.')[0]} for {sys.executable}"


def _failure(end: JobEnd, ranks: Sequence[RankResult], *, command: Sequence[str]) -> StokerError:
    replayed = max((rank.replayed_steps for rank in ranks), default=0)
    again = (
        f"; the profile was replaying cached batches by then, {replayed} steps long"
        if replayed
        else ""
    )
    fix = _FIX_OF_REPLAY if replayed else _FIX
    code = "" if end.exit_code is None else f" with exit code {end.exit_code}"
    for failure in _failures(end):
        place = [line for line in failure.traceback.splitlines() if line.startswith("  File ")]
        missing = _MISSING_MODULE.fullmatch(failure.message)
        if missing and failure.type == "ModuleNotFoundError":
            fix = fix_of_missing_module(missing[1], command)
        error = WorkloadError(
            f"the command failed{code}: {failure.type}: {failure.message}",
            where=", ".join(
                [f"rank {failure.rank}, host {failure.host}", *map(str.strip, place[-1:])]
            )
            + again,
            fix=fix,
        )
        error.add_note(failure.traceback)
        return error
    return WorkloadError(
        f"the command failed{code}" + (f": {end.failure}" if end.failure else ""),
        where=again.removeprefix("; "),
        fix=f"read its log: {fix}",
    )


def _failures(end: JobEnd) -> Iterator[_Failure]:
    folder = end.output_dir / "stoker" if end.output_dir else None
    for file in sorted(folder.glob("failure-rank*.json")) if folder else []:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            yield msgspec.json.decode(file.read_bytes(), type=_Failure)


def _git_commit() -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", os.getcwd(), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
