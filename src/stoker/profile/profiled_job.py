"""The profile component: submits the profiled job, follows it, and reads its results.

`scratch_copy` makes the copy of the user's folder in which `stoker profile --copy` runs it.
"""

import contextlib
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from stoker.environment import PROFILE_ENDED_FILE, own_pod
from stoker.errors import PlatformError, StokerError, UsageError, WorkloadError
from stoker.failure_reasons import fix_of_shared_memory, with_cause
from stoker.feed import timeline
from stoker.feed.resource_usage import read_usage
from stoker.feed.training_steps import longest_waiting_file
from stoker.figures import gpu_log
from stoker.figures.passive_profile import FILE, MIN_STEPS
from stoker.host.git import git_state
from stoker.launch.finish import read_failures
from stoker.logs import EventName, now_utc, parse_line
from stoker.platforms.base import (
    JobEnd,
    JobSpec,
    LogLine,
    Platform,
    Run,
    leader_record,
    leave_or_stop,
)
from stoker.platforms.imported import imported_files
from stoker.profile.combine import LONGER, combine
from stoker.profile.rank_results import AsIs, RankResult, read_ranks
from stoker.profile.steps import NO_BATCH
from stoker.records import (
    Cluster,
    Group,
    Observed,
    Profile,
    ProfiledHost,
    ProfiledLoader,
    ProfileSettings,
    TodaysGroup,
    Workload,
    read_json,
)
from stoker.records.base import Value
from stoker.records.gpu import GpuLoads, busy_share
from stoker.records.profile_origin import ProfileOrigin, digests_of
from stoker.units import percentage, size, step_words

NOTE = (
    "only the steps as they are: stoker does not make the batches, so that neither a step with "
    "cached batches nor the cost of loading could be measured, and no plan is advised"
)
_CPU_NOTE = "the CPU time covers the script's processes and all their descendants"
# Packages that have loaders, in the words of their users.
_OTHER_LOADERS = {
    "tensorflow": "tf.data",
    "jax": "jax",
    "nvidia.dali": "DALI",
    "ffcv": "FFCV",
    "ray": "Ray Data",
    "torchdata.nodes": "torchdata's nodes",
    "fastai": "fastai's DataLoader",
    "litdata": "litdata's StreamingDataLoader",
    "mxnet": "MXNet",
    "xgboost": "XGBoost",
    "sklearn": "scikit-learn",
}
_NOTEBOOK_PROGRAMS = ("jupyter", "jupyter-nbconvert", "jupyter-execute", "papermill", "ipython")
_COPY = (
    "stoker profile --copy runs the script in a copy of its folder; or let the script save to "
    "another folder, or less often"
)
_TIMED = (
    "have the script iterate over stoker.timed(batches), or stoker.keras.timed in model.fit: then "
    "the step, its wait and the CPU are measured, though not what loading alone costs"
)
_AS_SCRIPT = "jupyter nbconvert --to script NOTEBOOK, then: stoker profile -- python SCRIPT"
# To start (imports, data sets, models), from the job's first line to the first batch, and end.
START_ALLOWANCE_SECONDS = 120.0
_FIX = "make the command run without stoker first"
_MISSING_MODULE = re.compile(r"No module named '([^']+)'.*")
_FIX_OF_REPLAY = (
    f"{_FIX}; if it does, it may not allow the same batch twice: leave checks of indices, "
    "labels or order out of the profiled command"
)
# Below the folder of a run: the user's folder, where the script runs in a copy of it.
COPY = "copy"
# More takes longer to copy than to measure; data sets belong in another folder.
MAX_BYTES = 2 << 30
# Neither of them is read by a training run.
_LEFT_OUT = frozenset({".git", "runs", "__pycache__", ".mypy_cache", ".ruff_cache"})
# They are large, and no script writes there.
_LINKED = frozenset({".venv", "venv", "node_modules"})


def timed_profile(
    output: Path, ranks: Sequence[RankResult], *, what: Mapping[str, Value]
) -> Profile | None:
    """Returns the profile by `stoker.timed`, if any; raises UsageError if it is malformed."""
    file = output / FILE
    # A rank that was measured whole says more than its steps alone.
    if any(rank.accelerator for rank in ranks) or not file.exists():
        return None
    profile = read_json(file, Profile)
    if not profile.unmeasured:
        return None
    whole = {**profile.what, **what, "notes": [NOTE, _CPU_NOTE]}
    # It is the record of a profile now, no by-product of a training run.
    whole = {name: value for name, value in whole.items() if name not in ("passive", "status")}
    return msgspec.structs.replace(profile, what=whole)


def was_cut_off(output: Path) -> bool:
    """Whether the profile ended the leader's ranks: then their exit codes mean nothing."""
    return (output / PROFILE_ENDED_FILE).exists()


def too_few(output: Path) -> str:
    steps: list[int] = []
    for usage in read_usage(output):
        steps += [loader.steps for loader in usage.loaders.values() if loader.is_elsewhere]
    # Other loaders, as a validation's, are shorter: the longest is the training's.
    if not steps or max(steps) >= MIN_STEPS:
        return ""
    return f"the script ended too soon: after {max(steps) + 1} batches of stoker.timed"


class UnmeasuredError(UsageError):
    """Raised if no profile could be made; `observed` holds what was learned anyway."""

    def __init__(
        self, what: str, *, where: str = "", fix: str = "", observed: Profile | None = None
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.observed = observed


class ProcessReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process of a profiled command worked with, written at its end.

    `problem`: why the profiler could not be put in. `loaders`: those that data hosts cannot feed.
    """

    packages: tuple[str, ...] = ()
    problem: str = ""
    loaders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandUsage:
    """Time of the slowest host, CPU of the command on all of them, and the vCPUs of one host."""

    wall_seconds: float
    cpu_seconds: float
    vcpus: float
    hosts: int

    @property
    def utilization(self) -> float:
        # Starts and ends are counted at slightly different times: never more than all vCPUs.
        return min(1.0, self.cpu_seconds / max(1e-9, self.wall_seconds * self.vcpus * self.hosts))


class Heard:
    """The hosts' log lines about the command's end, and whether a loader to measure was read."""

    def __init__(self) -> None:
        self.has_begun = False
        self._hosts: dict[str, tuple[float, float, float]] = {}

    def line(self, text: str) -> None:
        # From the log: every platform passes it on while a job runs.
        if "profile_started" not in text and "command_ended" not in text:
            return
        event = parse_line(text)
        if event and event.event == EventName.PROFILE_STARTED:
            self.has_begun = True
        elif event and event.event == EventName.COMMAND_ENDED:
            values = event.values
            with contextlib.suppress(KeyError, ValueError):
                wall = float(values["wall_seconds"])
                cpu = float(values["cpu_seconds"])
                self._hosts[event.host] = (wall, cpu, float(values["vcpus"]))

    @property
    def used(self) -> CommandUsage | None:
        if not self._hosts:
            return None
        walls, cpus, vcpus = zip(*self._hosts.values(), strict=True)
        # They run at the same time: CPU-seconds add up, wall-clock seconds do not.
        # Hosts of the dnn group are of one type.
        return CommandUsage(
            wall_seconds=max(walls), cpu_seconds=sum(cpus), vcpus=vcpus[0], hosts=len(vcpus)
        )


def read_seen(folder: Path) -> list[ProcessReport]:
    seen = []
    for file in sorted(folder.glob("seen-*.json")):
        with contextlib.suppress(OSError, msgspec.DecodeError):
            # A process that is killed may leave half a file: the others' still count.
            seen.append(msgspec.json.decode(file.read_bytes(), type=ProcessReport))
    return seen


def own_loader_in(seen: Sequence[ProcessReport]) -> ProfiledLoader | None:
    names = [*chain.from_iterable(process.loaders for process in seen)]
    if not names:
        return None
    return ProfiledLoader(class_name=names[0], reach="own")


def notebook_refusal(command: Sequence[str], *, where: str) -> UsageError | None:
    names = [word for word in command[1:] if word.endswith(".ipynb")]
    program = os.path.basename(command[0])
    if not names or not program.startswith("python") or "-m" in command:
        return None
    return UsageError(
        f"{names[0]} is a notebook, which Python cannot run as a script",
        where=where,
        fix=_AS_SCRIPT.replace("NOTEBOOK", names[0]).replace("SCRIPT", names[0][:-6] + ".py"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCommand:
    """A command that was profiled, as its profile says.

    Attributes:
        group: Today's hosts; where not `is_named`, their type is a guess.
    """

    command: Sequence[str]
    group: TodaysGroup
    settings: ProfileSettings
    what: dict[str, Value]
    workload_sha256: str | None
    workload_keys: Mapping[str, str]
    is_named: bool = True


def unmeasured(
    ranks: Sequence[RankResult],
    *,
    subject: ProfiledCommand,
    seen: Sequence[ProcessReport],
    used: CommandUsage | None,
    timed: str = "",
    cut_off_seconds: float | None = None,
    gpus: GpuLoads = (),
) -> UnmeasuredError | None:
    """Returns why there is no profile of a command; None if there is one.

    Args:
        ranks: Results of the ranks.
        subject: The command.
        seen: What its processes worked with.
        used: Time and CPU of the command; None: not known.
        timed: Why the steps of `stoker.timed` are not enough.
        cut_off_seconds: When it was stopped, as no loader had been read.
        gpus: Loads of the leader's GPUs.
    """
    if ranks and all(rank.accelerator for rank in ranks):
        return None
    notes = _observations(ranks, used)
    problem, fix = _problem(
        ranks, seen=seen, command=subject.command, cut_off_seconds=cut_off_seconds
    )
    loader = None
    if not ranks:
        loader = own_loader_in(seen)
        if timed:
            problem = timed
            fix = LONGER
    if loader:
        problem += (
            f"; {loader.class_name} makes batches in its own way, so that data hosts cannot help it"
        )
    observed = None
    if used:
        observed = _observed(used, gpus, loader, subject=subject, notes=[problem, *notes])
    where = ""
    if notes:
        where = f"what was observed: {'; '.join(notes)}"
    return UnmeasuredError(problem, where=where, fix=fix, observed=observed)


def _observed(
    used: CommandUsage,
    gpus: GpuLoads,
    loader: ProfiledLoader | None,
    *,
    subject: ProfiledCommand,
    notes: Sequence[str],
) -> Profile:
    """Returns a profile without a step: how busy the hosts were, of which `decide` can guess."""
    group = subject.group
    return Profile(
        host=ProfiledHost(
            instance_type=group.instance_type, count=group.count, vcpus=max(1, int(used.vcpus))
        ),
        observed=Observed(
            cpu_utilization=used.utilization,
            gpu_utilization=busy_share(gpus),
            gpus=gpus,
            hosts=used.hosts,
        ),
        loader=loader,
        what={
            **subject.what,
            "source": "process tree",
            "wall_seconds": round(used.wall_seconds, 3),
            "cpu_seconds": round(used.cpu_seconds, 3),
            "notes": [*notes],
        },
    )


def _problem(
    ranks: Sequence[RankResult],
    *,
    seen: Sequence[ProcessReport],
    command: Sequence[str],
    cut_off_seconds: float | None,
) -> tuple[str, str]:
    packages = {*chain.from_iterable(process.packages for process in seen)}
    others = ", ".join(title for name, title in _OTHER_LOADERS.items() if name in packages)
    uses = ""
    if others:
        uses = f"; it uses {others}"
    if cut_off_seconds is not None:
        return (
            f"no DataLoader of torch was read within {cut_off_seconds:.0f} s of the start, so the "
            f"command was stopped{uses}",
            f"if it trains, on batches of another loader: {_TIMED}; if it was still preparing its "
            "data: raise profile.budget_seconds (--budget)",
        )
    if (
        "ipykernel" in packages
        or os.path.basename(command[0]) in _NOTEBOOK_PROGRAMS
        or any(word.endswith(".ipynb") for word in command)
    ):
        if ranks:
            return (f"a notebook ran, and ended too soon: {_too_soon(ranks)}", _AS_SCRIPT)
        return ("a notebook ran, in which no DataLoader of torch was read", _AS_SCRIPT)
    if ranks:
        return _problem_of_ranks(ranks)
    problems = [process.problem for process in seen if process.problem]
    if problems:
        return (
            f"the profiler could not be put into the script: {problems[0]}",
            "install stoker for the Python that runs the script, or name the Python that has it",
        )
    if not seen:
        return (
            "no Python process of the command could be profiled",
            "name a Python script, without -I, -S and -E; the script must not clear PYTHONPATH",
        )
    if "torch" not in packages:
        return (
            f"the script never imported torch{uses}",
            f"{_TIMED}; for a job on SageMaker, --training-job NAME reads the load",
        )
    never = "the script imported torch and never read from a DataLoader of torch"
    if others:
        return f"{never}, but uses {others}", _TIMED
    return (
        never,
        "profile a script that trains with a DataLoader of torch or stoker; a loop over a "
        "dataset gets one with DataLoader(dataset, batch_size=..., num_workers=...)",
    )


def _problem_of_ranks(ranks: Sequence[RankResult]) -> tuple[str, str]:
    """Returns why ranks that read a loader left no profile, and what to do."""
    for rank in ranks:
        if rank.ended_before:
            return (
                f"the profile ended too soon: the script was about to {rank.ended_before} in "
                f"step {rank.replayed_steps} on batches that the profile repeats",
                _COPY,
            )
    for rank in ranks:
        if rank.needed_seconds is not None:
            return (
                f"the profile needs a longer budget: {rank.missing}",
                f"--budget {rank.needed_seconds:.0f} (profile.budget_seconds)",
            )
    if any(rank.missing == NO_BATCH for rank in ranks):
        return (f"the script ended, and {_too_soon(ranks)}", "is the dataset empty?")
    return (f"the script ended too soon: {_too_soon(ranks)}", LONGER)


def _too_soon(ranks: Sequence[RankResult]) -> str:
    # The rank that lacks something tells more than rank 0, which may be complete.
    first = next((rank for rank in ranks if not rank.accelerator), ranks[0])
    words = first.missing.removeprefix("the script ended ") or "it was cut off"
    if first.world_size == 1:
        return words
    return f"{words} (rank {first.rank})"


def _observations(ranks: Sequence[RankResult], used: CommandUsage | None) -> list[str]:
    notes = []
    if used:
        vcpus = f"{used.vcpus:g} vCPUs"
        if used.hosts > 1:
            vcpus = f"{used.hosts} hosts of {vcpus}"
        notes.append(
            f"it ran {used.wall_seconds:.1f} s and used {used.cpu_seconds:.1f} CPU-seconds: "
            f"{percentage(used.utilization)} of {vcpus}"
        )
    for rank in ranks[:1]:
        if rank.as_is:
            notes.append(f"a step took {_step_words(rank.as_is)}")
        if rank.loader:
            notes.append(f"num_workers={rank.loader.num_workers}")
    return notes


def _step_words(as_is: AsIs) -> str:
    return step_words(
        step_seconds=as_is.step_seconds.median, wait_seconds=as_is.wait_seconds.median
    )


RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True, kw_only=True)
class _EndedJob:
    """A profile job that has ended, and what was seen of it on the way.

    Attributes:
        interrupted: The interrupt that stopped it; None: none did.
    """

    end: JobEnd
    heard: Heard
    deadline: "_Deadline"
    interrupted: KeyboardInterrupt | None

    @property
    def output(self) -> Path | None:
        """The folder of the ranks' results; None: there is none."""
        if self.end.output_dir is None:
            return None
        return self.end.output_dir / "stoker"

    @property
    def has_failed(self) -> bool:
        # A job that the deadline stopped looks like a failed one.
        return self.end.status == "failed" and not self.deadline.has_passed


def profile(
    workload: Workload,
    *,
    platform: Platform[RequestT],
    run_dir: Path,
    cluster: Cluster | None = None,
    name: str | None = None,
    records: Mapping[str, str] | None = None,
    on_line: Callable[[LogLine], None] = lambda line: None,
    verdict_on_interrupt: bool = True,
) -> Profile:
    """Runs the workload's command on today's cluster in profiling mode; returns the profile.

    Blocks for about `workload.profile.budget_seconds` after the first batch. 120 s more from the
    first line of a dnn host, and the job is stopped; where no loader was read by then, it is
    stopped after the budget (120 s if that is less). Interrupted (KeyboardInterrupt), it stops the
    job and gives the verdict so far, if there is one; after SIGTERM or an error it leaves a job
    that the next attempt can adopt (one with `records`). Copies the steps as is to
    `run_dir`/baseline-timeline.csv.

    Args:
        cluster: Today's; absent: the workload's own.
        name: Name of the job; None: the name of `run_dir`.
        records: Documents by which another process can follow the job, as in `JobSpec`.
        on_line: Called with each line of the job's log.
        verdict_on_interrupt: False: an interrupt is raised again, even if there is a verdict.

    Raises:
        UnmeasuredError: If the script never read from a DataLoader, or not in time, or ended before
            enough was measured: with what could be observed.
        UsageError: If the workload names no cluster.
        WorkloadError: If the command failed, with its traceback, or the deadline passed.
        PlatformError: If the platform refused or lost the job.
    """
    group = _todays_group(workload, cluster)
    job = profiled_job(workload, group=group, run_dir=run_dir, name=name, records=records or {})
    run = platform.submit(platform.plan(job))
    budget = workload.profile.budget_seconds
    ended = _follow(
        run,
        dnn_group=job.groups[0].name,
        budget_seconds=budget,
        on_line=on_line,
        may_go_on=bool(records),
    )
    run.clean_up()
    # Without its files a run looks like one that measured nothing.
    if ended.end.unfetched and not ended.interrupted:
        words = "the job has ended, but what it measured could not be read"
        raise PlatformError(words, where=ended.end.unfetched, fix="see its log, and profile again")
    ranks = read_ranks(ended.output) if ended.output else []
    if ended.interrupted and not (verdict_on_interrupt and has_verdict(ranks)):
        raise ended.interrupted
    subject = _subject(workload, group)
    record = _profile_of(ended, ranks, subject=subject, folder=run_dir)
    return msgspec.structs.replace(record, origin=origin_here(workload))


def _todays_group(workload: Workload, cluster: Cluster | None) -> TodaysGroup:
    cluster = cluster or workload.cluster
    if cluster is None:
        raise UsageError(
            "the workload has no cluster to profile on",
            where=f"workload {workload.name}, key cluster.dnn",
            fix="add cluster: {dnn: {instance_type: TYPE, count: 1}}",
        )
    return cluster.dnn


def _subject(workload: Workload, group: TodaysGroup) -> ProfiledCommand:
    return ProfiledCommand(
        command=workload.command,
        group=group,
        settings=workload.profile,
        what=what_of(workload.command),
        workload_sha256=workload.digest(),
        workload_keys=workload.profile_keys(today=group),
        is_named=workload.cluster is not None,
    )


def _follow(
    run: Run,
    *,
    dnn_group: str,
    budget_seconds: float,
    on_line: Callable[[LogLine], None],
    may_go_on: bool,
) -> _EndedJob:
    """Follows a profile job to its end; stops it at the deadline, or if it is interrupted.

    Args:
        dnn_group: Name of the group whose first line starts the deadline.
        budget_seconds: Seconds of the profile.
        on_line: Called with each line of the job's log.
        may_go_on: A later attempt can follow the job, so that an error does not stop it.
    """
    heard = Heard()
    deadline = _Deadline(run=run, heard=heard, budget_seconds=budget_seconds)
    interrupted: KeyboardInterrupt | None = None
    try:
        with contextlib.closing(deadline):
            for line in run.lines():
                # Not with what a platform says of itself: hosts, images and data take minutes.
                if line.group == dnn_group:
                    deadline.start()
                    heard.line(line.text)
                on_line(line)
        end = run.wait()
    except KeyboardInterrupt as err:
        interrupted = err
        run.stop()
        end = run.wait()
    except BaseException as err:
        if may_go_on:
            leave_or_stop(run, err)
        raise
    finally:
        run.stop()
    return _EndedJob(end=end, heard=heard, deadline=deadline, interrupted=interrupted)


def _profile_of(
    ended: _EndedJob, ranks: Sequence[RankResult], *, subject: ProfiledCommand, folder: Path
) -> Profile:
    """Returns the profile of a job that has ended, or raises why there is none."""
    output = ended.output
    deadline = ended.deadline
    # Where the script iterates over `stoker.timed` and reads no loader, its steps are the profile.
    timed = timed_profile(output, ranks, what=subject.what) if output else None
    if timed and output and (not ended.has_failed or was_cut_off(output)):
        keep_timeline(output, folder, file=timeline.FILE)
        return msgspec.structs.replace(timed, loader=own_loader_in(read_seen(output)))
    if deadline.has_passed and not deadline.saw_nothing and not has_verdict(ranks):
        raise no_verdict(ranks, budget_seconds=subject.settings.budget_seconds)
    if ended.has_failed:
        raise _failure(ended.end, output, ranks, command=subject.command)
    return whole_profile(
        output,
        ranks,
        folder=folder,
        subject=subject,
        used=ended.heard.used,
        cut_off_seconds=deadline.first_seconds if deadline.saw_nothing else None,
    )


def origin_here(workload: Workload) -> ProfileOrigin:
    """Returns what a profile of the workload is measured with now; its code is of this folder."""
    return ProfileOrigin(
        measured_at=now_utc(),
        image=workload.image,
        code=code_here(workload),
        data={name: channel.uri for name, channel in workload.channels.items()},
    )


def code_here(workload: Workload) -> dict[str, str]:
    """Returns digests of the script and what it imports, by path; {} where it is not here.

    A step on Kubeflow runs in the image of the jobs, which has the code, unless the workload names
    another image for its steps.
    """
    pods = workload.kubernetes
    has_own_image = pods is not None and pods.control.image is not None
    is_in_image = workload.platform == "kubernetes" and own_pod() is not None and not has_own_image
    if not workload.platform_info.is_this_machine and not is_in_image:
        return {}
    return digests_of(imported_files(Path.cwd(), workload.command))


def whole_profile(
    output: Path | None,
    ranks: Sequence[RankResult],
    *,
    folder: Path,
    subject: ProfiledCommand,
    used: CommandUsage | None,
    cut_off_seconds: float | None = None,
) -> Profile:
    """Returns the profile of a command that ended, and copies its steps.

    Args:
        output: The ranks' results and records; None: there is no such folder.
        ranks: Results of the ranks.
        folder: Where the steps are copied to.
        subject: The command.
        used: Time and CPU of the command; None: not known.
        cut_off_seconds: When it was stopped, as no loader had been read; None: it was not.

    Raises:
        UnmeasuredError: If not enough was measured.
    """
    leader = leader_record(output.parent) if output else None
    gpus = leader.gpus if leader else ()
    reason = unmeasured(
        ranks,
        subject=subject,
        seen=read_seen(output) if output else [],
        used=used,
        timed=too_few(output) if output else "",
        cut_off_seconds=cut_off_seconds,
        gpus=gpus,
    )
    if reason:
        raise reason
    whole = combine(
        ranks,
        group=subject.group,
        settings=subject.settings,
        workload_sha256=subject.workload_sha256,
        workload_keys=subject.workload_keys,
        is_named=subject.is_named,
        what=subject.what,
        gpus=gpus,
    )
    if output:
        keep_timeline(output, folder)
        keep_gpu_load(output, folder)
    return whole


def has_verdict(ranks: Sequence[RankResult]) -> bool:
    return any(rank.accelerator for rank in ranks)


def no_verdict(ranks: Sequence[RankResult], *, budget_seconds: float) -> WorkloadError:
    fix = "raise profile.budget_seconds, or make the command reach its first batch sooner"
    if any(rank.steps for rank in ranks):
        # Whatever the first steps took is part of the time that is allowed. Twice the budget is a
        # guess: how long they would have taken is not known.
        longer = 2 * budget_seconds + START_ALLOWANCE_SECONDS
        fix = (
            f"--budget {longer:.0f} (profile.budget_seconds): its first steps, which may "
            "compile, took all of the time"
        )
    return WorkloadError(
        f"profile timed out after {budget_seconds + START_ALLOWANCE_SECONDS:.0f} s "
        f"(profile.budget_seconds {budget_seconds:.0f}, {START_ALLOWANCE_SECONDS:.0f} to start "
        "and end); the job was stopped",
        where=_progress(ranks),
        fix=fix,
    )


def what_of(command: Sequence[str]) -> dict[str, Value]:
    return {"command": [*command], "when": now_utc(), **git_state(Path.cwd())}


def keep_timeline(
    output: Path, folder: Path, *, file: str = "baseline-timeline-rank{rank}.csv"
) -> None:
    """Copies the steps of the rank that waits longest to `folder`/baseline-timeline.csv."""
    source = longest_waiting_file(output, file=file)
    if source:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / "baseline-timeline.csv")


def keep_gpu_load(output: Path, folder: Path) -> None:
    """Copies the samples of the leader's GPUs to `folder`/baseline-gpu.csv, if there are any."""
    source = output / gpu_log.FILE
    if source.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / "baseline-gpu.csv")


@dataclass(slots=True, kw_only=True)
class _Deadline:
    """Stops the run once it has passed, or where nothing had been read that can be measured."""

    run: Run
    heard: Heard
    budget_seconds: float
    has_passed: bool = False
    saw_nothing: bool = False
    _timer: threading.Timer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        with self._lock:
            if self._timer:
                self._timer.cancel()

    def start(self) -> None:
        """Starts the clock at the first call."""
        with self._lock:
            if self._timer is None:
                self._wait(self.first_seconds, self._look)

    @property
    def first_seconds(self) -> float:
        return max(self.budget_seconds, START_ALLOWANCE_SECONDS)

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._timer = threading.Timer(seconds, then)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        with self._lock:
            if self.heard.has_begun:
                # Both count from the first line of the job's log.
                left = self.budget_seconds + START_ALLOWANCE_SECONDS - self.first_seconds
                self._wait(left, self._expire)
                return
            self.saw_nothing = True
        self._expire()

    def _expire(self) -> None:
        self.has_passed = True
        self.run.stop()


def profiled_job(
    workload: Workload,
    *,
    group: TodaysGroup,
    run_dir: Path,
    name: str | None = None,
    records: Mapping[str, str],
) -> JobSpec:
    job = JobSpec.of(
        workload,
        groups=(Group.of_today(group),),
        run_dir=run_dir,
        name=name,
        profile=workload.profile,
    )
    return replace(job, records=records)


def _progress(ranks: Sequence[RankResult]) -> str:
    if not ranks:
        return "before the first batch of a DataLoader"
    first = ranks[0]
    words = f"after {first.steps} steps of rank {first.rank}"
    if first.as_is is None:
        return words
    return f"{words}: one took {_step_words(first.as_is)}"


def fix_of_missing_module(name: str, command: Sequence[str]) -> str:
    """Returns how to install a module that the command lacks, from its script's requirements."""
    scripts = [Path(word) for word in command if word.endswith(".py")]
    for requirements in (script.parent / "requirements.txt" for script in scripts[:1]):
        if requirements.is_file():
            return f"{sys.executable} -m pip install -r {requirements}"
    return f"install the package of module {name.partition('.')[0]} for {sys.executable}"


def _failure(
    end: JobEnd, output: Path | None, ranks: Sequence[RankResult], *, command: Sequence[str]
) -> StokerError:
    again = ""
    fix = _FIX
    # Only cached batches change what the script sees.
    if replayed := max((rank.replayed_steps for rank in ranks), default=0):
        again = f"; the profile was replaying cached batches by then, {replayed} steps long"
        fix = _FIX_OF_REPLAY
    what = "the command failed"
    if end.exit_code:
        # It may have ended well, and its host not.
        what += f" with exit code {end.exit_code}"
    for failure in read_failures(output) if output else ():
        where = [f"rank {failure.rank}, host {failure.host}"]
        place = [line for line in failure.traceback.splitlines() if line.startswith("  File ")]
        where += [line.strip() for line in place[-1:]]
        missing = _MISSING_MODULE.fullmatch(failure.message)
        if missing and failure.type == "ModuleNotFoundError":
            fix = fix_of_missing_module(missing[1], command)
        raised = f"{failure.type}: {failure.message}"
        error = WorkloadError(
            f"{what}: {raised}",
            where=", ".join(where) + again,
            fix=fix_of_shared_memory(with_cause(raised, lines=failure.lines)) or fix,
        )
        error.add_note(failure.traceback)
        return error
    if end.failure:
        what += f": {end.failure}"
    return WorkloadError(what, where=again.removeprefix("; "), fix=f"read its log: {fix}")


@contextlib.contextmanager
def scratch_copy(
    folder: Path, copy: Path, *, linked: Sequence[Path] = (), max_bytes: int = MAX_BYTES
) -> Iterator[int]:
    """Makes `copy`, runs the block in it, and deletes it then; yields the number of bytes copied.

    Not copied are .git and earlier runs. Links to folders stay links; environments and the `linked`
    folders, whose data is only read, are linked.

    Raises:
        UsageError: If the folder holds more than `max_bytes`, or cannot be copied.
    """
    folder = folder.resolve()
    copy = copy.absolute()
    links = {os.path.realpath(path) for path in linked}
    sizes: dict[str, int] = {}
    try:
        for file, top in _files(folder, links):
            sizes[top] = sizes.get(top, 0) + os.stat(file).st_size
            if sum(sizes.values()) > max_bytes:
                largest = max(sizes, key=sizes.__getitem__)
                raise UsageError(
                    f"--copy copies {size(max_bytes)} at most, and {folder} holds more, "
                    f"{size(sizes[largest])} and more of it in {largest}",
                    fix=f"move {largest} out of the folder, with a link in its place, or profile "
                    "without --copy: the script then writes its files for real",
                )
        _copy(folder, copy, links)
    except OSError as err:
        shutil.rmtree(copy, ignore_errors=True)
        raise UsageError(
            f"the folder cannot be copied: {err}", where=str(folder), fix="profile without --copy"
        ) from None
    before = Path.cwd()
    os.chdir(copy)
    try:
        yield sum(sizes.values())
    finally:
        os.chdir(before)
        shutil.rmtree(copy, ignore_errors=True)


def _is_linked(entry: "os.DirEntry[str]", links: set[str]) -> bool:
    if not entry.is_dir():
        return False
    return entry.is_symlink() or entry.name in _LINKED or os.path.realpath(entry) in links


def _files(folder: Path, links: set[str]) -> Iterator[tuple[str, str]]:
    waiting = [(str(folder), "")]
    while waiting:
        path, top = waiting.pop()
        for entry in list(os.scandir(path)):
            if entry.name in _LEFT_OUT or _is_linked(entry, links):
                continue
            if entry.is_dir():
                waiting.append((entry.path, top or entry.name))
            elif entry.is_file():
                yield entry.path, top or entry.name


def _copy(folder: Path, copy: Path, links: set[str]) -> None:
    copy.mkdir(parents=True)
    for entry in list(os.scandir(folder)):
        target = copy / entry.name
        if entry.name in _LEFT_OUT:
            continue
        if _is_linked(entry, links):
            target.symlink_to(os.path.realpath(entry))
        elif entry.is_dir():
            _copy(Path(entry.path), target, links)
        elif entry.is_file():
            # A link to a file is copied as what it leads to: the script may write there.
            shutil.copy2(entry.path, target)
