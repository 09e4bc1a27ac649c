"""The first process of a profile job: launches the command and writes the profile."""

import contextlib
import os
import resource
import signal
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.environment import ProcessSettings, from_environment
from stoker.errors import StokerError, UsageError
from stoker.feed import timeline
from stoker.host.machine import vcpu_capacity
from stoker.launch import launch
from stoker.launch.finish import write_failure
from stoker.launch.launcher import output_folder
from stoker.launch.topology import Topology, from_resourceconfig
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.imported import named_code
from stoker.profile.profiled_job import (
    START_ALLOWANCE_SECONDS,
    CommandUsage,
    ProfiledCommand,
    has_verdict,
    keep_timeline,
    no_verdict,
    timed_profile,
    was_cut_off,
    what_of,
    whole_profile,
)
from stoker.profile.rank_results import read_ranks
from stoker.records import Profile, ProfileSettings, TodaysGroup, Training, read_json, write_json
from stoker.records.base import Value
from stoker.records.profile_origin import ProfileOrigin, digests_of
from stoker.records.workload import workload_keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """A command that has ended.

    Attributes:
        used: Its time and CPU on this host.
        has_passed: It was stopped after its time.
    """

    exit_code: int
    used: CommandUsage
    has_passed: bool


def launch_profile(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs this host's part of a profile job, or of a training run; returns the exit code.

    The leader writes the profile to STOKER_PROFILE_FILE, and baseline-timeline.csv into its folder.
    START_ALLOWANCE_SECONDS after the profile's budget, or when the platform stops the job, the
    command is stopped, and the profile is made from what was measured until then.

    Raises:
        StokerError: As `stoker.launch.launch`; on the leader also if the profile cannot be made:
            the reason is then in output/failure, too.
    """
    settings = from_environment(environ)
    topology = from_resourceconfig(settings.base_dir, environ)
    wanted = settings.profile
    file = settings.profile_file
    if wanted is None or file is None or not topology.is_leader:
        return launch(command, environ)
    ended = _run(command, environ, budget_seconds=wanted.budget_seconds)
    words = command
    if len(command) == 1:
        # `stoker launch train`: the command itself is in the job's variables.
        words = settings.command or command
    try:
        profile = _profile_of(ended, settings, topology, command=words, wanted=wanted, file=file)
        if profile is None:
            return ended.exit_code
        origin = ProfileOrigin(
            measured_at=now_utc(),
            image=settings.image,
            code=_code_of(settings.code_file, words),
            code_digest=settings.code_digest,
        )
        write_json(file, msgspec.structs.replace(profile, origin=origin))
    except StokerError as err:
        with contextlib.suppress(UsageError):
            # Platforms show this file as the reason of the failure.
            write_failure(settings.base_dir, str(err))
        raise
    log = Log(run=settings.run_id, host=topology.host)
    step_seconds = profile.timed_step.step_seconds
    log.event(EventName.PROFILE_WRITTEN, file=str(file), step_seconds=step_seconds)
    return 0


def _run(command: Sequence[str], environ: Mapping[str, str], *, budget_seconds: float) -> _Ended:
    """Runs the command to its end, or until its time has passed."""
    # Until the launcher handles it, and afterwards, SIGTERM must not end this process.
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    # As a platform would: the launcher has one way to stop a command.
    deadline = threading.Timer(
        budget_seconds + START_ALLOWANCE_SECONDS, os.kill, (os.getpid(), signal.SIGTERM)
    )
    deadline.daemon = True
    deadline.start()
    began = time.monotonic()
    code = launch(command, environ)
    # Of all descendants that were waited for.
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = CommandUsage(
        wall_seconds=time.monotonic() - began,
        cpu_seconds=children.ru_utime + children.ru_stime,
        vcpus=vcpu_capacity(),
        hosts=1,
    )
    # Before `cancel`, which sets it as well.
    has_passed = deadline.finished.is_set()
    deadline.cancel()
    return _Ended(exit_code=code, used=used, has_passed=has_passed)


def _profile_of(
    ended: _Ended,
    settings: ProcessSettings,
    topology: Topology,
    *,
    command: Sequence[str],
    wanted: ProfileSettings,
    file: Path,
) -> Profile | None:
    """Returns the profile, whose steps are copied into the file's folder; None: it failed."""
    output = output_folder(settings, topology)
    ranks = read_ranks(output)
    what = what_of(command)
    timed = timed_profile(output, ranks, what=what)
    # Ranks that the profile itself killed end with an exit code, too.
    if timed and (not ended.exit_code or ended.has_passed or was_cut_off(output)):
        keep_timeline(output, file.parent, file=timeline.FILE)
        return timed
    if ended.has_passed and not has_verdict(ranks):
        raise no_verdict(ranks, budget_seconds=wanted.budget_seconds)
    is_failed = read_json(output / "training.json", Training).status == "failed"
    is_broken = (is_failed and not ended.has_passed) or not has_verdict(ranks)
    if ended.exit_code and is_broken:
        return None
    subject = _subject(settings, topology, command=command, wanted=wanted, what=what)
    used = None
    if len(topology.dnn_hosts) == 1:
        # It is of this host only.
        used = ended.used
    return whole_profile(
        output,
        ranks,
        folder=file.parent,
        subject=subject,
        used=used,
    )


def _subject(
    settings: ProcessSettings,
    topology: Topology,
    *,
    command: Sequence[str],
    wanted: ProfileSettings,
    what: dict[str, Value],
) -> ProfiledCommand:
    group = TodaysGroup(
        instance_type=topology.dnn.instance_type or "unknown",
        count=len(topology.dnn_hosts),
        processes_per_host=settings.processes_per_host,
    )
    keys = workload_keys(
        command=command,
        strategy=settings.strategy.name,
        engine=settings.engine.name,
        today=group if topology.dnn.instance_type else None,
    )
    return ProfiledCommand(
        command=command,
        group=group,
        settings=wanted,
        what=what,
        workload_sha256=settings.workload_sha256,
        workload_keys=keys,
    )


def _code_of(package: Path | None, command: Sequence[str]) -> dict[str, str]:
    """Returns the digests of a package's files by path; {} where the code is in the image."""
    if package is None:
        return {}
    try:
        return digests_of(named_code(package.read_bytes(), command))
    except (OSError, tarfile.TarError):
        # A profile that was measured is not lost for the names of its files.
        return {}
