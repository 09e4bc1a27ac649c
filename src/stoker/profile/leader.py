"""The first process of a profile job: launches the command and writes the profile."""

import os
import shutil
import signal
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mode

import msgspec

from stoker.environment import PROFILE_ENDED_FILE, ProcessSettings, from_environment
from stoker.errors import StokerError, WorkloadError
from stoker.feed import timeline
from stoker.feed.step_times import longest_waiting_file, read_timelines
from stoker.feed.timeline import FIRST_SOURCE
from stoker.figures.progress import BASELINE_TIMELINE
from stoker.host.machine import usable_vcpus
from stoker.launch import launch
from stoker.launch.failures import write_failure
from stoker.launch.launcher import output_folder
from stoker.launch.topology import Topology, from_resourceconfig, is_job_pod
from stoker.logs import Log, now_utc
from stoker.profile.combine import combine
from stoker.profile.rank_results import read_ranks
from stoker.profile.unmeasured import (
    FAILURE_FILE,
    START_ALLOWANCE_SECONDS,
    ProcessReport,
    why_failed,
    why_unmeasured,
    write_reason,
)
from stoker.records import (
    Observed,
    Profile,
    ProfiledHost,
    ProfiledLoader,
    StepTerms,
    TodaysGroup,
    Training,
    read_json,
    write_json,
)
from stoker.records.profile import busy_share

FILE = "profile.json"
TIMELINE_FILE = "baseline-timeline.csv"
# Unknown where batches come from no DataLoader.
UNMEASURED = ("accelerator", "loader")
_NOTE = (
    "only the steps as they are: stoker does not make the batches, so that neither a step "
    "without loading nor the cost of loading could be measured, and no plan is advised"
)
# Fewer steps are no basis for a decision.
_MIN_STEPS = 10


def launch_profile(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs this host's part of a profile job, or of a training run; returns the exit code.

    The leader writes the profile and its steps into its output folder, and to STOKER_PROFILE_FILE.
    START_ALLOWANCE_SECONDS after the profile's budget, or when the platform stops the job, the
    command is stopped, and the profile is made from what was measured until then.

    Raises:
        StokerError: As `stoker.launch.launch`; on the leader also if the profile cannot be made:
            the reason is then in output/failure, too.
    """
    settings = from_environment(environ)
    topology = from_resourceconfig(settings.base_dir, environ)
    wanted = settings.profile
    if wanted is None or not topology.is_leader:
        return launch(command, environ)
    output = output_folder(settings.base_dir, topology)
    log = Log(run=settings.run_id, host=topology.host)
    seconds = wanted.budget_seconds + START_ALLOWANCE_SECONDS
    code, has_passed = _run(command, environ, seconds=seconds)
    files = [FILE, TIMELINE_FILE]
    try:
        profile = _profile_of(
            output, settings, topology, exit_code=code, seconds=seconds, has_passed=has_passed
        )
        write_json(output / FILE, profile)
        if settings.profile_file:
            for name in files:
                keep_file(output / name, settings.profile_file.with_name(name))
        return 0
    except StokerError as err:
        files = [FAILURE_FILE]
        write_reason(output, err)
        # The command's own failure is written already.
        if not code or not isinstance(err, WorkloadError) or has_passed:
            # Platforms show this file as the reason of the failure.
            write_failure(settings.base_dir, str(err), log)
            raise
        return code
    finally:
        for name in files:
            if is_job_pod(environ) and (output / name).is_file():
                # A pod's disk is gone with it. Here: only hosts in a pod load the platform.
                from stoker.platforms.kubernetes.pod_log import log_file

                log_file(output / name, under="stoker", log=log)


def _run(command: Sequence[str], environ: Mapping[str, str], *, seconds: float) -> tuple[int, bool]:
    """Runs the command for so many seconds at most; returns its exit code, and whether they passed.

    The end is SIGTERM, as a platform would: the launcher has one way to stop a command.
    """
    # Until the launcher handles it, and afterwards, SIGTERM must not end this process.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    has_passed = threading.Event()

    def stop() -> None:
        has_passed.set()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        return launch(command, environ), has_passed.is_set()
    finally:
        timer.cancel()


def keep_file(file: Path | None, copy: Path) -> None:
    """Copies a file, if it is there."""
    if file is not None and file.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


def _profile_of(
    output: Path,
    settings: ProcessSettings,
    topology: Topology,
    *,
    exit_code: int,
    seconds: float,
    has_passed: bool,
) -> Profile:
    """Returns the profile of a command that ended, and copies its steps; raises why there is none.

    Args:
        output: The ranks' results and records.
        settings: Of this process.
        topology: Of the job.
        exit_code: The launcher's, of the command.
        seconds: That the command had.
        has_passed: It was stopped after them.
    """
    record = read_json(output / "training.json", Training)
    ranks = read_ranks(output)
    # Ranks that the profile itself killed end with an exit code, too.
    was_cut_off = has_passed or (output / PROFILE_ENDED_FILE).exists()
    is_whole = bool(ranks) and all(rank.has_verdict for rank in ranks)
    if not was_cut_off and (record.status == "failed" or (exit_code and not is_whole)):
        raise why_failed(output, exit_code=record.exit_code, failure=record.failure)
    group = TodaysGroup(
        instance_type=topology.dnn.instance_type or "unknown",
        count=len(topology.dnn_hosts),
        processes_per_host=settings.processes_per_host,
    )
    file = BASELINE_TIMELINE
    if is_whole:
        assert settings.profile is not None
        wanted = settings.profile
        what = {"when": now_utc()}
        profile = combine(ranks, group=group, settings=wanted, what=what, gpus=record.gpus)
    else:
        files = sorted(output.glob("seen-*.json"))
        seen = [msgspec.json.decode(each.read_bytes(), type=ProcessReport) for each in files]
        timed = _timed_profile(output, record, seen, group=group)
        if timed is None:
            raise why_unmeasured(ranks, seen, seconds=seconds, has_passed=has_passed)
        profile = timed
        file = timeline.FILE
    keep_file(longest_waiting_file(output, file=file), output / TIMELINE_FILE)
    return profile


def _timed_profile(
    output: Path, record: Training, seen: Sequence[ProcessReport], *, group: TodaysGroup
) -> Profile | None:
    """Returns the profile by `stoker.timed`; None where the script used none, or too few steps.

    Args:
        output: The ranks' results and records.
        record: Of the run.
        seen: What the command's processes worked with.
        group: Today's hosts.
    """
    timelines = read_timelines(output)
    measured = record.measured
    last = max((step.loader for steps in timelines.values() for step in steps), default=0)
    if measured is None or measured.steps < _MIN_STEPS or last < FIRST_SOURCE:
        return None
    dnn = record.groups[0]
    world = dnn.count * (dnn.processes_per_host or 1)
    samples = [step.samples for steps in timelines.values() for step in steps if step.samples]
    loads = record.gpus
    # Loaders that data hosts cannot feed.
    names = [*chain.from_iterable(process.loaders for process in seen)]
    return Profile(
        host=ProfiledHost(
            instance_type=group.instance_type, count=group.count, vcpus=usable_vcpus()
        ),
        step=StepTerms(
            step_seconds=measured.step_seconds,
            wait_seconds=min(measured.wait_seconds, measured.step_seconds),
            global_batch_size=mode(samples) * world if samples else None,
        ),
        observed=Observed(gpu_utilization=busy_share(loads), gpus=loads) if loads else None,
        spread={name: part for name, part in measured.spread.items() if name != "compute_seconds"},
        loader=ProfiledLoader(class_name=names[0], reach="own") if names else None,
        epochs=measured.epochs,
        unmeasured=UNMEASURED,
        what={"when": now_utc(), "ranks": world, "steps": measured.steps, "notes": [_NOTE]},
    )
