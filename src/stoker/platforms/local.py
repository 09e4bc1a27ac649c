"""The local platform: every host of a run is a process tree of its own on this machine.

A host has a directory in SageMaker's layout, its own resourceconfig.json, ports, set of cores and
log file: the heterogeneous local mode that SageMaker does not have. Linux; macOS unpinned.

Instance types are local.c1, local.c2, ... A job of one host may name any other type: it then has
all of this machine, which is what that name stands for (a GPU host, the pod of a pipeline's step).
"""

import os
import re
from collections.abc import Mapping, Sequence

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec, groups_of_channel, hyperparameters
from stoker.platforms.local_plan import LocalHost, LocalRequest
from stoker.platforms.local_run import LocalRun
from stoker.platforms.strategies import check_strategy
from stoker.records import Group, Json, to_document

_TYPE = re.compile(r"^(?:ml\.)?local\.c(\d+)$")
_NAME = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?$")
_CHANNEL = re.compile(r"^[A-Za-z0-9._-]+$")

SHARED_CORES = "hosts share cores"
UNPINNED = "this system cannot pin processes to cores"


class LocalPlatform:
    """Runs jobs on this machine.

    Args:
        cores: That hosts may use; absent: all that this process may use.
        environ: Of the hosts' processes; absent: this process's.
    """

    name = "local"

    def __init__(
        self, *, cores: Sequence[int] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._can_pin = hasattr(os, "sched_setaffinity")
        self._cores = tuple(cores) if cores is not None else _usable_cores()
        # Handed on as it is, never looked into: settings of this process are no business of jobs.
        self._environ = dict(os.environ if environ is None else environ)

    def plan(self, job: JobSpec) -> LocalRequest:
        """The hosts of `job` with their cores.

        Raises:
            UsageError: If a name, group, instance type or channel is none this platform can run.
        """
        _check(job)
        sizes = [(group, self._num_cores(group, job)) for group in job.groups]
        wanted = sum(group.count * size for group, size in sizes)
        # Numbered from the last group on, so that nobody comes to rely on algo-1 leading.
        number = sum(group.count for group in job.groups)
        offset = 0
        hosts = []
        for group, size in sizes:
            number -= group.count
            for index in range(group.count):
                hosts.append(
                    LocalHost(
                        name=f"algo-{number + index + 1}",
                        group=group.name,
                        role=group.role,
                        instance_type=group.instance_type,
                        cores=self._slice(offset, size) if self._can_pin else (),
                        num_cores=size,
                        processes=group.processes_per_host or 1,
                    )
                )
                offset += size
        reason = SHARED_CORES if wanted > len(self._cores) else ""
        return LocalRequest(
            job=job,
            hosts=tuple(hosts),
            not_comparable=reason if self._can_pin else UNPINNED,
        )

    def describe(self, request: LocalRequest) -> dict[str, Json]:
        """The request as `--dry-run` prints it."""
        job = request.job
        engine = {"engine": to_document(job.engine)} if job.engine.name != "feed" else {}
        return {
            "platform": self.name,
            "name": job.name,
            "command": list(job.command),
            "run_dir": str(job.run_dir),
            "hosts": [
                {
                    "name": host.name,
                    "group": host.group,
                    "role": host.role,
                    "instance_type": host.instance_type,
                    "cores": list(host.cores),
                    "processes": host.processes,
                }
                for host in request.hosts
            ],
            "channels": {name: channel.uri for name, channel in job.channels.items()},
            "hyperparameters": hyperparameters(job.hyperparameters),
            "strategy": job.strategy.name,
            "feed": to_document(job.feed),
            **engine,
            "comparable": not request.not_comparable,
            "not_comparable_because": request.not_comparable or None,
        }

    def submit(self, request: LocalRequest) -> LocalRun:
        """Starts all hosts; from a thread that outlives the run, for they end with it.

        Raises:
            UsageError: If a channel's folder is not there.
            PlatformError: If a host cannot be started.
        """
        return LocalRun(request, environ=self._environ)

    def _num_cores(self, group: Group, job: JobSpec) -> int:
        found = _TYPE.match(group.instance_type)
        if found and int(found.group(1)):
            return int(found.group(1))
        is_this_machine = sum(each.count for each in job.groups) == 1
        if is_this_machine and not group.instance_type.startswith(("local.", "ml.local.")):
            return len(self._cores)
        raise UsageError(
            f"the local platform has no instance type {group.instance_type}",
            where=f"group {group.name}",
            fix="use local.c1 for one core, local.c2 for two, ...; "
            "a job of one host may name the type that this machine is",
        )

    def _slice(self, offset: int, size: int) -> tuple[int, ...]:
        count = len(self._cores)
        chosen = {self._cores[(offset + i) % count] for i in range(min(size, count))}
        return tuple(sorted(chosen))


def _check(job: JobSpec) -> None:
    if not _NAME.match(job.name):
        raise UsageError(f"{job.name!r} is no name for a run", fix="use letters, digits and dashes")
    if not job.command:
        raise UsageError("no command to run", where=f"job {job.name}")
    dnn = [group for group in job.groups if group.role == "dnn"]
    if len(dnn) != 1 or job.groups[0].role != "dnn":
        raise UsageError("a job has exactly one dnn group, and it comes first", where=job.name)
    check_strategy(job.strategy, job.groups)
    names = [group.name for group in job.groups]
    if len(set(names)) != len(names):
        raise UsageError("two groups have one name: " + ", ".join(names), where=job.name)
    for channel, described in job.channels.items():
        uri = described.uri
        if not _CHANNEL.match(channel):
            raise UsageError(
                f"{channel!r} is no name for a channel", fix="use letters, digits, . _ and -"
            )
        if "://" in uri and not uri.startswith("file://"):
            raise UsageError(
                f"the local platform reads folders, not {uri}",
                where=f"channel {channel}",
                fix="copy the data to a folder and name that",
            )
        groups_of_channel(channel, described, job.groups)


def _usable_cores() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not on macOS
        return tuple(range(os.cpu_count() or 1))


__all__ = ["LocalHost", "LocalPlatform", "LocalRequest", "LocalRun"]
