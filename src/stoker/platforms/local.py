"""Local platform: each host of a run is a process tree on this machine.

A host has a folder in SageMaker's layout, with its own resourceconfig.json, ports, cores and log
file. Linux; unpinned on macOS. Instance types are local.c1, local.c2, ... A job of one host may
name any other type, and then gets the whole machine.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from stoker.environment import RUN_FILE, RUN_VARIABLE, TOKEN_FILE, ProcessSettings
from stoker.errors import PlatformError, TerminatedError, UsageError
from stoker.failure_reasons import reason_of_failure
from stoker.host import spawn
from stoker.host.processes import (
    KILL_SECONDS,
    LOOPBACK,
    ended_words,
    free_ports,
    kill_all,
    with_port,
)
from stoker.logs import now_utc
from stoker.platforms.base import (
    PLAIN_CHANNEL,
    JobEnd,
    JobSpec,
    LogLine,
    Platform,
    Run,
    channels_of_group,
    check_job,
    leader_record,
    run_settings,
)
from stoker.platforms.follow import FileTail
from stoker.records import Event, Group, Json, Role
from stoker.records.engine import EngineHost, completed
from stoker.records.hyperparameters import encoded
from stoker.records.training import NOT_COMPARABLE, EndState

# Variables of an outer job, if this process is part of one.
_FOREIGN = re.compile(
    r"(STOKER|SM|TORCHELASTIC|MASTER)_.*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK"
    r"|TRAINING_JOB_NAME"
)
# Once the leader has ended, the others notice within 10 s: its port is closed. And asked to stop, a
# trainer may save its state.
GRACE_SECONDS = 30.0
# The leader tells the others; in case it cannot reach them they get a SIGTERM, too.
STOP_OTHERS_SECONDS = 1.0
_POLL_SECONDS = 0.05
# End of a host's log that is searched for the reason of a failure.
_LAST_LINES = 200
_TYPE = re.compile(r"(?:ml\.)?local\.c([1-9]\d*)")
SHARED_CORES = "hosts share cores"
UNPINNED = "this system cannot pin processes to cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """A host of a local run.

    Attributes:
        cores: Cores that it is pinned to, where the system can.
    """

    name: str
    group: str
    role: Role
    instance_type: str
    processes: int
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRequest:
    """The hosts of a local job, with their cores.

    Attributes:
        hosts: The dnn group first; the first host leads.
        not_comparable: Why its times cannot be compared with other runs; empty if they can.
    """

    job: JobSpec
    hosts: tuple[LocalHost, ...]
    not_comparable: str

    @property
    def leader(self) -> LocalHost:
        return self.hosts[0]

    def base_dir(self, host: LocalHost) -> Path:
        """Returns the host's counterpart of /opt/ml in a container."""
        return (self.job.run_dir / "hosts" / host.name).absolute()

    def log_file(self, host: LocalHost) -> Path:
        return (self.job.run_dir / "logs" / f"{host.group}-{host.name}.log").absolute()


class LocalPlatform(Platform[LocalRequest]):
    """Runs jobs on this machine.

    Args:
        cores: Cores that hosts may use; absent: all that this process may use.
        environ: Environment of the hosts' processes; absent: this process's.
    """

    name = "local"

    def __init__(
        self, *, cores: Sequence[int] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._can_pin = hasattr(os, "sched_setaffinity")
        usable = os.sched_getaffinity(0) if self._can_pin else range(os.cpu_count() or 1)
        self._cores = tuple(sorted(usable) if cores is None else cores)
        self._environ = dict(os.environ if environ is None else environ)

    def plan(self, job: JobSpec) -> LocalRequest:
        check_job(job)
        for name, channel in job.channels.items():
            channel_folder(name, channel.uri)
        # Numbered from the last group: algo-1 need not lead on SageMaker either.
        number = sum(group.count for group in job.groups)
        num_used = 0
        # Begins again after the last one: then hosts share cores.
        ring = itertools.cycle(self._cores)
        hosts: list[LocalHost] = []
        for group in job.groups:
            number -= group.count
            size = self._num_cores(group, job)
            hosts += [
                LocalHost(
                    name=f"algo-{number + index + 1}",
                    group=group.name,
                    role=group.role,
                    instance_type=group.instance_type,
                    cores=tuple(sorted(set(itertools.islice(ring, size)))),
                    processes=group.processes_per_host or 1,
                )
                for index in range(group.count)
            ]
            num_used += size * group.count
        reason = SHARED_CORES if num_used > len(self._cores) else ""
        if not self._can_pin:
            reason = UNPINNED
        return LocalRequest(job=job, hosts=tuple(hosts), not_comparable=reason)

    def describe(self, request: LocalRequest) -> dict[str, Json]:
        job = request.job
        return {
            "platform": self.name,
            "name": job.name,
            "command": list(job.command),
            "run_dir": str(job.run_dir),
            "hosts": [asdict(host) for host in request.hosts],
            "channels": {name: channel.uri for name, channel in job.channels.items()},
            "hyperparameters": encoded(job.hyperparameters),
            "not_comparable_because": request.not_comparable or None,
        }

    def submit(self, request: LocalRequest) -> "LocalRun":
        """Starts all hosts; they end with the calling thread, which must outlive the run."""
        missing = sorted(name for name in request.job.secrets if not self._environ.get(name))
        if missing:
            raise UsageError(
                f"the secret {', '.join(missing)} is not set: on this machine secrets come from "
                "the environment of the command",
                where=f"key secrets.{missing[0]}",
                fix=f"export {missing[0]}=...",
            )
        try:
            return LocalRun(request, environ=self._environ)
        except OSError as err:
            what = f"the local run cannot start: {err.strerror or err}"
            where = str(err.filename or request.job.run_dir)
            raise PlatformError(what, where=where) from None

    def _num_cores(self, group: Group, job: JobSpec) -> int:
        most = len(self._cores)
        where = f"group {group.name}"
        if match := _TYPE.fullmatch(group.instance_type):
            number = int(match[1])
            # Times on fewer cores would be wrong for this type; data hosts may share cores.
            if group.role == "dnn" and number > most:
                raise UsageError(
                    f"{group.instance_type} asks for {number} cores; this machine has {most}",
                    where=where,
                    fix=f"use local.c{most}, or fewer cores",
                )
            return number
        if "local." not in group.instance_type and sum(each.count for each in job.groups) == 1:
            return most
        raise UsageError(
            f"the local platform has no instance type {group.instance_type}",
            where=where,
            fix="start it by --platform sagemaker or kubernetes; here use local.c1 for one core, "
            "local.c2 for two, ...; a job of one host may name the type that this machine is",
        )


@dataclass(slots=True)
class StartedHost:
    """A host whose launcher was started.

    Attributes:
        marker: In the environment of all its processes; some may leave its session.
    """

    host: LocalHost
    process: "subprocess.Popen[bytes]"
    marker: bytes

    def kill(self) -> None:
        """Kills all its processes; blocks for KILL_SECONDS twice, at most."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)
        kill_all(self.process.pid, self.marker)


class LocalRun(Run):
    """A job on this machine: creating it starts the hosts, `stop` ends them.

    Its hosts are looked at only while `lines`, `wait` or `stop` runs.

    Raises:
        UsageError: If a channel's folder does not exist.
        PlatformError: If a run of this folder still runs.
        OSError: If a host cannot be started.
    """

    def __init__(self, request: LocalRequest, *, environ: Mapping[str, str]) -> None:
        job = request.job
        self.name = job.name
        self._request = request
        self._token_file = (job.run_dir / TOKEN_FILE).absolute()
        self._events: list[Event] = []
        # Why the run ends, if its leader did not end it; and whether `stop` asked for that.
        self._failure: str | None = None
        self._is_stopped = False
        # When the hosts that still run are to end: other hosts than the leader, and all of them.
        self._stop_others_at = self._kill_at = math.inf
        # Any thread may call `stop`.
        self._looking = threading.Lock()
        self._end: JobEnd | None = None
        self._hosts: list[StartedHost] = []
        if request.not_comparable:
            self._note(f"{NOT_COMPARABLE}: {request.not_comparable}")
        # Held until all hosts have ended: they inherit it.
        self._lock = lock_run_folder(job.run_dir, run=job.name)
        try:
            self._start(environ)
        except BaseException:
            self._clean_up()
            raise

    def lines(self) -> Iterator[LogLine]:
        tails = [(host, FileTail(self._request.log_file(host))) for host in self._request.hosts]
        is_last = False
        while not is_last:
            # Before reading, so that the last lines are read, too.
            is_last = self._has_ended()
            for host, tail in tails:
                for text in tail.read(is_last=is_last):
                    yield LogLine(group=host.group, host=host.name, text=text)
            if not is_last:
                time.sleep(_POLL_SECONDS)
        for _, tail in tails:
            tail.close()

    def wait(self) -> JobEnd:
        while not self._has_ended():
            time.sleep(_POLL_SECONDS)
        assert self._end
        return self._end

    def stop(self) -> None:
        """Stops the job; blocks for GRACE_SECONDS plus the time to kill; an interrupt kills it."""
        if not self._has_ended() and not self._is_stopped:
            self._is_stopped = True
            if self._failure is None:
                self._begin_end()
        while True:
            try:
                self.wait()
                return
            except (KeyboardInterrupt, TerminatedError):
                self._kill_at = -math.inf

    def _start(self, environ: Mapping[str, str]) -> None:
        request = self._request
        for host in request.hosts:
            make_job_folder(request, host)
        self._token_file.unlink(missing_ok=True)
        self._token_file.touch(mode=0o600, exist_ok=False)
        self._token_file.write_text(secrets.token_hex(32), encoding="ascii")
        taken: set[int] = set()
        ports = {host.name: free_ports(taken) for host in request.hosts}
        settings = replace(run_settings(request.job), engine_hosts=_engine_hosts(request, taken))
        (request.job.run_dir / RUN_FILE).write_text(settings.to_json(), encoding="utf-8")
        # Processes of a killed launcher become children of this process, which kills them.
        spawn.adopt_orphans()
        for host in request.hosts:
            variables = host_variables(request, host, environ=environ, ports=ports)
            log_file = request.log_file(host)
            log_file.parent.mkdir(parents=True, exist_ok=True)
            # -P: a module in the working directory must not stand in for one of ours.
            launcher = (sys.executable, "-P", "-m", "stoker.cli", "launch", "--")
            with log_file.open("wb") as log:
                process = subprocess.Popen(
                    # SIGTERM, so that hosts drain when this process is killed.
                    spawn.wrapped(
                        (*launcher, *request.job.command),
                        signal_number=signal.SIGTERM,
                        cores=host.cores,
                    ),
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    # Ctrl-C then reaches only this process, which stops the leader first.
                    start_new_session=True,
                    pass_fds=(self._lock,),
                )
            marker = f"\0STOKER_BASE_DIR={request.base_dir(host)}\0".encode()
            self._hosts.append(StartedHost(host, process, marker))

    def _has_ended(self) -> bool:
        """Looks at the hosts, and ends those that are to end; returns whether all have."""
        with self._looking:
            if self._end is None:
                self._look()
            return self._end is not None

    def _begin_end(self) -> None:
        """Asks the leader to end; `_look` asks the others. Once: a second SIGTERM ends at once."""
        self._hosts[0].process.terminate()
        now = time.monotonic()
        self._stop_others_at = now + STOP_OTHERS_SECONDS
        self._kill_at = min(self._kill_at, now + GRACE_SECONDS)

    def _look(self) -> None:
        leader, *others = self._hosts
        for started in self._hosts:
            if started.process.returncode is not None:
                continue
            if started.process.poll() is not None:
                self._take_end(started)
            elif time.monotonic() >= self._kill_at:
                self._note("killed: it did not end in time", started.host)
                started.kill()
        if time.monotonic() >= self._stop_others_at:
            self._stop_others_at = math.inf
            for started in others:
                started.process.terminate()
        if all(started.process.returncode is not None for started in self._hosts):
            self._end = self._conclude(leader)
            self._clean_up()

    def _take_end(self, started: StartedHost) -> None:
        """Notes how a host ended, and whether its end is the run's."""
        started.kill()
        code = started.process.returncode
        host = started.host
        self._note(f"host ended with {ended_words(code)}", host)
        if started is self._hosts[0]:
            self._kill_at = min(self._kill_at, time.monotonic() + GRACE_SECONDS)
        # The leader's end decides. A killed data host is replaced by the others; an exit code means
        # that it cannot serve.
        elif host.role == "data" and code > 0 and self._kill_at == math.inf:
            log = self._request.log_file(host)
            self._failure = f"{self._reason(started)}, see {log}"
            self._begin_end()

    def _reason(self, started: StartedHost) -> str:
        host = started.host
        with self._request.log_file(host).open(errors="replace") as log:
            lines = [line.rstrip() for line in deque(log, _LAST_LINES)]
        who = f"{host.role} host {host.name}"
        return reason_of_failure(lines, who=who, exit_code=started.process.returncode)

    def _clean_up(self) -> None:
        for started in self._hosts:
            started.kill()
        self._token_file.unlink(missing_ok=True)
        # Last: now another run may take the folder.
        os.close(self._lock)

    def _conclude(self, leader: StartedHost) -> JobEnd:
        base = self._request.base_dir(leader.host)
        outputs, model = base / "output" / "data", base / "model"
        training = leader_record(outputs)
        code = leader.process.returncode
        exit_code = code if code >= 0 else None
        if training:
            exit_code = training.exit_code
        status: EndState = "succeeded"
        failure = self._failure or (training.failure if training else None)
        if self._is_stopped or (training and training.status == "stopped" and not self._failure):
            status = "stopped"
        elif code != 0 or self._failure:
            status = "failed"
            failure = failure or self._reason(leader)
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure if status == "failed" else None,
            output_dir=outputs,
            model_uri=str(model) if model.is_dir() and any(model.iterdir()) else None,
            events=tuple(self._events),
        )

    def _note(self, what: str, host: LocalHost | None = None) -> None:
        self._events.append(Event(when=now_utc(), what=what, host=host.name if host else None))


def _engine_hosts(request: LocalRequest, taken: set[int]) -> dict[str, EngineHost]:
    """Returns free ports for the engine's servers of each host, which are added to `taken`."""
    servers = sorted(completed(request.job.settings.engine).ports)
    hosts = {}
    for host in request.hosts if servers else ():
        first = free_ports(taken, count=len(servers))
        ports = {name: first + index for index, name in enumerate(servers)}
        hosts[host.name] = EngineHost(address=LOOPBACK, ports=ports)
    return hosts


def channel_folder(name: str, uri: str) -> Path:
    """Returns the folder of a local channel, which need not exist."""
    scheme, _, path = uri.rpartition("://")
    if scheme not in ("", "file"):
        raise UsageError(
            f"the local platform reads folders, not {uri}",
            where=f"key channels.{name}.uri",
            fix="copy the data to a folder and name that; or set platform: kubernetes or sagemaker",
        )
    return Path(path).absolute()


def make_job_folder(request: LocalRequest, host: LocalHost) -> None:
    """Creates the folder of `host` in SageMaker's layout, without what an earlier run left."""
    job = request.job
    base = request.base_dir(host)
    shutil.rmtree(base, ignore_errors=True)
    for folder in ("input/config", "input/data", "model", "output/data", "checkpoints", "code"):
        (base / folder).mkdir(parents=True)
    channels: dict[str, Json] = {}
    for name, channel in channels_of_group(job, host.group).items():
        data = channel_folder(name, channel.uri)
        if not data.is_dir():
            where = f"key channels.{name}.uri"
            raise UsageError(f"no such folder: {data}", where=where, fix="check its spelling")
        (base / "input" / "data" / name).symlink_to(data)
        channels[name] = PLAIN_CHANNEL
    groups: list[Json] = [
        {
            "instance_group_name": group.name,
            "instance_type": group.instance_type,
            "hosts": [other.name for other in request.hosts if other.group == group.name],
        }
        for group in job.groups
    ]
    documents: dict[str, Json] = {
        "inputdataconfig": channels,
        "hyperparameters": encoded(job.hyperparameters),
        "resourceconfig": {
            "current_host": host.name,
            "current_instance_type": host.instance_type,
            "current_group_name": host.group,
            "hosts": [other.name for other in request.hosts],
            "instance_groups": groups,
            # For NCCL, gloo and Open MPI.
            "network_interface_name": "lo",
        },
    }
    for name, document in documents.items():
        path = base / "input" / "config" / f"{name}.json"
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def lock_run_folder(folder: Path, *, run: str) -> int:
    """Locks the run's folder and returns the descriptor that holds the lock; may raise OSError.

    Raises:
        PlatformError: If hosts of this run still run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Launchers inherit the open folder: the lock holds until all have ended, even if this
        # process is killed.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise PlatformError(
            f"run {run} is still running on this machine",
            where=f"folder {folder}",
            fix="wait for its end, stop it, or choose another --name",
        ) from None
    except OSError:
        pass  # this file system has no locks
    return lock


def host_variables(
    request: LocalRequest,
    host: LocalHost,
    *,
    environ: Mapping[str, str],
    ports: Mapping[str, int],
) -> dict[str, str]:
    """Returns the environment of a host's launcher: `environ` without variables of an outer run.

    `ports` are each host's first one.
    """
    job = request.job
    process = ProcessSettings(
        base_dir=request.base_dir(host),
        advertise=LOOPBACK,
        port=ports[host.name],
        coordinator=with_port(LOOPBACK, ports[request.leader.name]),
        host=host.name,
    )
    hidden = {name for name, source in job.secrets.items() if not source.is_for(host.role)}
    inherited = {
        name: value
        for name, value in environ.items()
        if not _FOREIGN.fullmatch(name) and name not in hidden
    }
    return {
        # Otherwise each rank would start as many threads as its host has cores. First: what the
        # workload or the user says counts.
        "OMP_NUM_THREADS": str(max(1, len(host.cores) // host.processes)),
        **inherited,
        **job.environment,
        **process.to_environ("base_dir", "advertise", "port", "coordinator", "host"),
        RUN_VARIABLE: str((job.run_dir / RUN_FILE).absolute()),
    }
