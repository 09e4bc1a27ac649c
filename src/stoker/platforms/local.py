"""Local platform: each host of a run is a process tree on this machine.

A host has a folder in SageMaker's layout, with its own resourceconfig.json, ports, cores and log
file. Linux; unpinned on macOS. Instance types are local.c1, local.c2, ... A job of one host may
name any other type, and then gets the whole machine.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import queue
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType

from stoker.errors import PlatformError, UsageError
from stoker.failure_reasons import reason_of_failure
from stoker.host import spawn
from stoker.host.processes import (
    KILL_SECONDS,
    ended_words,
    free_ports,
    kill_all,
    loopback,
    with_port,
)
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.base import (
    PLAIN_CHANNEL,
    JobEnd,
    JobSpec,
    LogLine,
    Platform,
    Run,
    channels_by_group,
    check_job,
    leader_record,
    run_environment,
)
from stoker.platforms.log_files import FileTail, full_disk
from stoker.platforms.project import Project
from stoker.records import Event, Group, Json, Role, to_document
from stoker.records.engine import EngineHost, completed
from stoker.records.hyperparameters import encoded
from stoker.records.training import NOT_COMPARABLE, EndState

# Variables of an outer job, if this process is part of one.
_FOREIGN = ("STOKER_", "SM_", "TORCHELASTIC_", "MASTER_")
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_FOREIGN_NAMES = frozenset((*_TORCHRUN, "TRAINING_JOB_NAME", "SAGEMAKER_BASE_DIR"))
# Once the leader has ended, the others notice within 10 s: its port is closed.
AFTER_LEADER_SECONDS = 30.0
# Asked to stop, a trainer may save its state.
STOP_SECONDS = 30.0
# The same, asked a second time.
HURRY_SECONDS = 10.0
# The leader tells the others; in case it cannot reach them they get a SIGTERM, too.
STOP_OTHERS_SECONDS = 1.0
_POLL_SECONDS = 0.05
# End of a host's log that is searched for the reason of a failure.
_LAST_BYTES = 16 << 10
_TYPE = re.compile(r"^(?:ml\.)?local\.c(\d+)$")
# What `--dry-run` shows of a host.
_SHOWN = ("name", "group", "role", "instance_type", "processes")
PROJECT = Project(
    workload="""\
# Where it trains today: local.cN is N cores of this machine.
cluster:
  dnn: {{instance_type: local.c{cores}, count: {hosts}{processes}}}
"""
)
SHARED_CORES = "hosts share cores"
UNPINNED = "this system cannot pin processes to cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalHost:
    """A host of a local run.

    Attributes:
        cores: Cores that it is pinned to; empty if unpinned.
        num_cores: Number of cores of its instance type.
    """

    name: str
    group: str
    role: Role
    instance_type: str
    cores: tuple[int, ...]
    num_cores: int
    processes: int = 1


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


def channel_folder(name: str, uri: str) -> Path:
    """Returns the folder of a local channel, which need not exist."""
    scheme, _, path = uri.rpartition("://")
    if scheme not in ("", "file"):
        what = f"the local platform reads folders, not {uri}"
        fix = "copy the data to a folder and name that"
        if scheme == "pvc":
            fix = "set platform: kubernetes, whose pods mount the claim, or name a folder"
        raise UsageError(what, where=f"key channels.{name}.uri", fix=fix)
    return Path(path).absolute()


def make_job_folder(request: LocalRequest, host: LocalHost) -> None:
    """Creates the folder of `host` in SageMaker's layout, without what an earlier run left."""
    job = request.job
    base = request.base_dir(host)
    shutil.rmtree(base, ignore_errors=True)
    for folder in ("input/config", "input/data", "model", "output/data", "checkpoints", "code"):
        (base / folder).mkdir(parents=True)
    channels: dict[str, Json] = {}
    for name, channel in channels_by_group(job)[host.group].items():
        data = channel_folder(name, channel.uri)
        fix = "check the channel's uri"
        if not data.is_dir():
            raise UsageError(f"no such folder: {data}", where=f"channel {name}", fix=fix)
        (base / "input" / "data" / name).symlink_to(data)
        channels[name] = PLAIN_CHANNEL
    documents: dict[str, Json] = {
        "inputdataconfig": channels,
        "hyperparameters": encoded(job.hyperparameters),
        "resourceconfig": resource_config(request, host),
    }
    for name, document in documents.items():
        path = base / "input" / "config" / f"{name}.json"
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def resource_config(request: LocalRequest, host: LocalHost) -> dict[str, Json]:
    """Returns the resourceconfig.json that SageMaker would write for `host`."""
    groups: list[Json] = []
    for group in request.job.groups:
        hosts = [other.name for other in request.hosts if other.group == group.name]
        groups.append(
            {
                "instance_group_name": group.name,
                "instance_type": group.instance_type,
                "hosts": hosts,
            }
        )
    return {
        "current_host": host.name,
        "current_instance_type": host.instance_type,
        "current_group_name": host.group,
        "hosts": [other.name for other in request.hosts],
        "instance_groups": groups,
        # For NCCL, gloo and Open MPI.
        "network_interface_name": "lo",
    }


def lock_run_folder(folder: Path, *, run: str) -> int:
    """Locks the run's folder and returns the descriptor that holds the lock; may raise OSError.

    Raises:
        PlatformError: If hosts of this run still run, or links in the folder lead out of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # What is written or emptied below them would be another folder's.
    written = (folder / "hosts", folder / "logs", *folder.glob("hosts/*"), *folder.glob("logs/*"))
    link = next((path for path in written if path.is_symlink()), None)
    if link is not None:
        raise PlatformError(
            f"{link} is a link, which a run does not follow",
            where=f"folder {folder}",
            fix="remove the link, or choose another --name",
        )
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


def _cannot_start(err: OSError, request: LocalRequest) -> PlatformError:
    what = f"the local run cannot start: {err.strerror or err}"
    where = err.filename
    is_full = err.errno in (errno.ENOSPC, errno.EDQUOT)
    fix = "free some space there, or start it from a folder on another disk" if is_full else ""
    return PlatformError(what, where=str(where or request.job.run_dir), fix=fix)


@dataclass(slots=True)
class StartedHost:
    """A host whose launcher was started."""

    host: LocalHost
    process: "subprocess.Popen[bytes]"
    marker: bytes
    ended_at: float | None = None


def start_host(
    request: LocalRequest, host: LocalHost, environ: Mapping[str, str], *, lock: int
) -> StartedHost:
    """Starts the launcher of `host` in a new session, with its output in the log file.

    It inherits the descriptor `lock`, see `lock_run_folder`. May raise OSError.
    """
    log_file = request.log_file(host)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # -P: a module in the working directory must not stand in for one of ours.
    launcher = (sys.executable, "-P", "-m", "stoker.launch", "--", *request.job.command)
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            # SIGTERM, so that hosts drain when this process is killed.
            spawn.wrapped(launcher, signal_number=signal.SIGTERM, cores=host.cores),
            env=dict(environ),
            stdin=_standard_input() if host == request.leader else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C then reaches only this process, which stops the leader first.
            start_new_session=True,
            pass_fds=(lock,),
        )
    # Finds processes of the host that left its session.
    return StartedHost(
        host=host, process=process, marker=f"\0STOKER_BASE_DIR={request.base_dir(host)}\0".encode()
    )


def _standard_input() -> int | None:
    """Returns the standard input of the leader's script: None to inherit ours, or DEVNULL."""
    try:
        # In the background a script would read what the user types for the shell.
        is_others = os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
        os.fstat(0)
    except OSError:
        return subprocess.DEVNULL
    if is_others:
        return subprocess.DEVNULL
    return None


def host_variables(
    request: LocalRequest,
    host: LocalHost,
    *,
    environ: Mapping[str, str],
    ports: Mapping[str, int],
    engine: Mapping[str, EngineHost],
    token_file: Path,
) -> dict[str, str]:
    """Returns the environment of a host's launcher: `environ` without variables of an outer run.

    `ports` are each host's first one, `engine` the addresses of the engine's servers.
    """
    job = request.job
    environment = replace(
        run_environment(job),
        run_id=job.name,
        base_dir=request.base_dir(host),
        token_file=token_file,
        advertise=loopback(),
        port=ports[host.name],
        coordinator=with_port(loopback(), ports[request.leader.name]),
        host=host.name,
        group=host.group,
        engine_hosts=engine,
        tensorboard=(job.run_dir / "tensorboard").absolute() if job.tracking.tensorboard else None,
    )
    # Otherwise each rank would start as many threads as its host has cores. First: what the
    # workload or the user says counts.
    threads = {"OMP_NUM_THREADS": str(max(1, host.num_cores // host.processes))}
    inherited = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_FOREIGN) and name not in _FOREIGN_NAMES
    }
    for name, source in job.secrets.items():
        if not source.is_for(host.role):
            inherited.pop(name, None)
    return {**threads, **inherited, **job.environment, **environment.to_environ()}


def check_secrets(job: JobSpec, environ: Mapping[str, str]) -> None:
    """Raises UsageError for secrets of a job that the caller's environment does not have."""
    missing = sorted(name for name in job.secrets if not environ.get(name))
    if missing:
        raise UsageError(
            f"the secret {', '.join(missing)} is not set: on this machine secrets come from the "
            "environment of the command",
            where=f"key secrets.{missing[0]}",
            fix=f"export {missing[0]}=...",
        )


def engine_hosts(request: LocalRequest, taken: set[int]) -> dict[str, EngineHost]:
    """Returns each host's engine servers: free ports of loopback, which are added to `taken`."""
    names = sorted(completed(request.job.settings.engine).ports)
    hosts_of_engine = {}
    for host in request.hosts if names else ():
        first = free_ports(taken, count=len(names))
        numbers = {name: first + index for index, name in enumerate(names)}
        hosts_of_engine[host.name] = EngineHost(address=loopback(), ports=numbers)
    return hosts_of_engine


class LocalRun(Run):
    """A job on this machine: creating it starts the hosts, `stop` ends them.

    Raises:
        UsageError: If a channel's folder does not exist.
        PlatformError: If a run of this folder still runs, or a host cannot be started.
    """

    def __init__(self, request: LocalRequest, *, environ: Mapping[str, str]) -> None:
        self.name = request.job.name
        self.not_comparable = request.not_comparable
        self._request = request
        try:
            self._lock: int | None = lock_run_folder(request.job.run_dir, run=request.job.name)
        except OSError as err:
            raise _cannot_start(err, request) from None
        self._token_file = (request.job.run_dir / "token").absolute()
        self._events: list[Event] = []
        self._failure = ""
        self._is_stopping = threading.Event()
        self._stopped_by_caller = False
        # While it stops.
        self._interrupts = 0
        self._has_ended = threading.Event()
        self._end: JobEnd | None = None
        self._error: BaseException | None = None
        self._hosts: list[StartedHost] = []
        self._said: queue.SimpleQueue[LogLine] = queue.SimpleQueue()
        if request.not_comparable:
            self._note(f"{NOT_COMPARABLE}: {request.not_comparable}")
            self._say(
                request.leader,
                EventName.HOSTS_NOT_COMPARABLE,
                text=f"{request.not_comparable}: its times cannot be compared with others",
            )
        self._start(environ)
        self._monitor = threading.Thread(target=self._watch, name=f"run {self.name}", daemon=True)
        self._monitor.start()

    @property
    def launchers(self) -> Mapping[str, int]:
        """Host name to the pid of its launcher."""
        return {started.host.name: started.process.pid for started in self._hosts}

    def lines(self) -> Iterator[LogLine]:
        tails = [(host, FileTail(self._request.log_file(host))) for host in self._request.hosts]
        try:
            is_last = is_full = False
            while not is_last:
                # Before reading, so that the last lines are read, too.
                is_last = self._has_ended.is_set()
                if not is_full and (words := full_disk(self._request.job.run_dir / "logs")):
                    is_full = True
                    yield LogLine(group="local", host="status", text=words)
                while not self._said.empty():
                    yield self._said.get()
                for host, tail in tails:
                    for text in tail.read(is_last=is_last):
                        yield LogLine(group=host.group, host=host.name, text=text)
                if not is_last:
                    self._has_ended.wait(_POLL_SECONDS)
        finally:
            for _, tail in tails:
                tail.close()

    def wait(self) -> JobEnd:
        self._has_ended.wait()
        self._monitor.join()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return self._end

    def stop(self) -> None:
        """Stops the job; blocks for STOP_SECONDS plus the time to kill.

        An interrupt during this asks the hosts a second time, which end at once; a third one kills.
        """
        if not self._has_ended.is_set():
            self._stopped_by_caller = True
            self._is_stopping.set()
        limit = STOP_SECONDS + KILL_SECONDS * (len(self._hosts) + 1)
        with self._interrupts_counted():
            self._has_ended.wait(limit)

    @contextlib.contextmanager
    def _interrupts_counted(self) -> Iterator[None]:
        """Counts signals in place of raising them: one that is raised may strike anywhere."""

        def count(number: int, frame: FrameType | None) -> None:
            self._interrupts += 1

        # Only the main thread has handlers.
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
        before = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)

    def _start(self, environ: Mapping[str, str]) -> None:
        request = self._request
        lock = self._lock
        assert lock is not None
        try:
            for host in request.hosts:
                make_job_folder(request, host)
            self._token_file.unlink(missing_ok=True)
            self._token_file.touch(mode=0o600, exist_ok=False)
            self._token_file.write_text(secrets.token_hex(32), encoding="ascii")
            taken: set[int] = set()
            ports = {host.name: free_ports(taken) for host in request.hosts}
            engine = engine_hosts(request, taken)
            of_run = partial(host_variables, environ=environ, token_file=self._token_file)
            # Processes of a killed launcher become children of this process, which kills them.
            spawn.adopt_orphans()
            for host in request.hosts:
                variables = of_run(request, host, ports=ports, engine=engine)
                self._hosts.append(start_host(request, host, variables, lock=lock))
        except BaseException as err:
            self._clean_up()
            if isinstance(err, OSError):
                raise _cannot_start(err, request) from None
            raise

    def _watch(self) -> None:
        try:
            self._follow()
            self._end = self._conclude()
        except BaseException as err:
            self._error = err  # raised by `wait`, in the caller's thread
        finally:
            self._clean_up()
            self._has_ended.set()

    def _follow(self) -> None:
        leader = self._hosts[0]
        stop_at: float | None = None
        is_hurried = False
        others = self._hosts[1:]
        while not self._look_for_ended():
            now = time.monotonic()
            if self._is_stopping.is_set() and stop_at is None:
                stop_at = now
                leader.process.terminate()
            if stop_at is not None:
                # Once each: a second SIGTERM ends a host at once.
                while others and now > stop_at + STOP_OTHERS_SECONDS:
                    others.pop().process.terminate()
                if self._interrupts and not is_hurried:
                    is_hurried = True
                    stop_at = min(stop_at, now + HURRY_SECONDS - STOP_SECONDS)
                    for started in self._hosts:
                        started.process.terminate()
                if self._interrupts > 1:
                    self._kill_rest("it was interrupted again")
                elif now > stop_at + STOP_SECONDS:
                    self._kill_rest(f"did not stop within {STOP_SECONDS:g} s")
            if leader.ended_at is not None and now > leader.ended_at + AFTER_LEADER_SECONDS:
                self._kill_rest(f"did not end within {AFTER_LEADER_SECONDS:g} s of the leader")
            time.sleep(_POLL_SECONDS)

    def _look_for_ended(self) -> bool:
        for started in self._hosts:
            if started.ended_at is None and started.process.poll() is not None:
                started.ended_at = time.monotonic()
                self._clean_host(started)
                self._judge(started)
        return all(started.ended_at is not None for started in self._hosts)

    def _judge(self, started: StartedHost) -> None:
        code = started.process.returncode
        host = started.host
        leader = self._hosts[0]
        how = f"exit code {code}" if code >= 0 else f"signal {-code}"
        self._note(f"host ended with {how}", host.name)
        # The outcome is decided with the leader's end.
        if leader.ended_at is not None and started is not leader:
            return
        if code < 0 and host.role == "data" and not self._is_stopping.is_set():
            self._say(host, EventName.HOST_ENDED, how=ended_words(code))
        if started is leader:
            if code < 0:
                who = f"the launcher of dnn host {host.name} (group {host.group}, the leader)"
                self._failure = self._reason(host, who, code)
        # A killed data host is replaced by the others; an exit code means that it cannot serve.
        elif host.role == "data" and code > 0 and not self._is_stopping.is_set():
            log = self._request.log_file(host)
            self._failure = f"{self._reason(host, f'data host {host.name}', code)}, see {log}"
            self._is_stopping.set()

    def _reason(self, host: LocalHost, who: str, code: int) -> str:
        lines = _last_lines(self._request.log_file(host))
        return reason_of_failure(lines, who=who, exit_code=code)

    def _kill_rest(self, why: str) -> None:
        for started in self._hosts:
            if started.ended_at is None:
                self._note(f"killed: {why}", started.host.name)
                started.process.kill()

    def _clean_host(self, started: StartedHost) -> None:
        if not kill_all(started.process.pid, started.marker):
            self._note("has processes that cannot be killed", started.host.name)

    def _clean_up(self) -> None:
        for started in self._hosts:
            if started.process.poll() is None:
                started.process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.process.wait(KILL_SECONDS)
            self._clean_host(started)
        self._token_file.unlink(missing_ok=True)
        if self._lock is not None:
            # Last: now another run may take the folder.
            os.close(self._lock)
            self._lock = None

    def _conclude(self) -> JobEnd:
        leader = self._hosts[0]
        assert leader.ended_at is not None
        data_ends = [s.ended_at for s in self._hosts if s.host.role == "data" and s.ended_at]
        release = None
        if data_ends:
            release = max(0.0, max(data_ends) - leader.ended_at)
        base = self._request.base_dir(leader.host)
        code = leader.process.returncode
        training = leader_record(base / "output" / "data")
        exit_code: int | None = None
        failure: str | None = self._failure
        if training:
            exit_code = training.exit_code
            failure = failure or training.failure
        elif code >= 0:
            exit_code = code
        status: EndState = "succeeded"
        is_stopped = training is not None and training.status == "stopped" and not self._failure
        if self._stopped_by_caller or is_stopped:
            status = "stopped"
        elif code != 0 or self._failure:
            status = "failed"
        model = base / "model"
        if status == "failed" and not failure:
            with contextlib.suppress(OSError):
                failure = (base / "output" / "failure").read_text("utf-8", errors="replace")
            failure = failure or self._reason(leader.host, "the leader", code)
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure if status == "failed" else None,
            output_dir=base / "output" / "data",
            model_uri=str(model) if model.is_dir() and any(model.iterdir()) else None,
            data_group_release_seconds=release,
            events=tuple(self._events),
        )

    def _say(self, host: LocalHost, event: EventName, **values: str) -> None:
        line = io.StringIO()
        Log(run=self.name, host=host.name, stream=line).event(event, **values)
        self._said.put(LogLine(group=host.group, host=host.name, text=line.getvalue().rstrip()))

    def _note(self, what: str, host: str | None = None) -> None:
        self._events.append(Event(when=now_utc(), what=what, host=host))


def _last_lines(path: Path) -> list[str]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = path.stat().st_size
        file.seek(max(0, size - _LAST_BYTES))
        # In a longer file the first line is cut.
        return file.read().decode(errors="replace").splitlines()[size > _LAST_BYTES :]
    return []


def _shown_host(host: LocalHost) -> dict[str, Json]:
    shown: dict[str, Json] = {name: getattr(host, name) for name in _SHOWN}
    shown["cores"] = list(host.cores)
    return shown


class LocalPlatform(Platform[LocalRequest]):
    """Runs jobs on this machine.

    Args:
        cores: Cores that hosts may use; absent: all that this process may use.
        environ: Environment of the hosts' processes; absent: this process's.
    """

    name = "local"
    project = PROJECT

    def __init__(
        self, *, cores: Sequence[int] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self._can_pin = hasattr(os, "sched_setaffinity")
        self._cores = tuple(cores) if cores is not None else _usable_cores()
        self._environ = dict(os.environ if environ is None else environ)

    def plan(self, job: JobSpec) -> LocalRequest:
        check_job(job)
        for name, channel in job.channels.items():
            # It refuses what the run could not use.
            channel_folder(name, channel.uri)
        # Numbered from the last group: algo-1 need not lead on SageMaker either.
        number = sum(group.count for group in job.groups)
        offset = 0
        hosts = []
        for group in job.groups:
            number -= group.count
            size = self._num_cores(group, job)
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
        reason = ""
        if not self._can_pin:
            reason = UNPINNED
        elif offset > len(self._cores):
            reason = SHARED_CORES
        return LocalRequest(job=job, hosts=tuple(hosts), not_comparable=reason)

    def describe(self, request: LocalRequest) -> dict[str, Json]:
        job = request.job
        settings = job.settings
        engine: dict[str, Json] = {}
        if settings.engine.name != "feed":
            engine["engine"] = to_document(settings.engine)
        return {
            "platform": self.name,
            "name": job.name,
            "command": list(job.command),
            "run_dir": str(job.run_dir),
            "hosts": [_shown_host(host) for host in request.hosts],
            "channels": {name: channel.uri for name, channel in job.channels.items()},
            "hyperparameters": encoded(job.hyperparameters),
            "strategy": settings.strategy.name,
            "feed": to_document(settings.feed),
            **engine,
            "comparable": not request.not_comparable,
            "not_comparable_because": request.not_comparable or None,
        }

    def check_free(self, job: JobSpec) -> None:
        """Raises a PlatformError if a run of the job's folder still runs, whose files stay."""
        # Taken and released.
        os.close(lock_run_folder(job.run_dir, run=job.name))

    def submit(self, request: LocalRequest) -> LocalRun:
        """Starts all hosts; they end with the calling thread, which must outlive the run."""
        check_secrets(request.job, self._environ)
        return LocalRun(request, environ=self._environ)

    def _num_cores(self, group: Group, job: JobSpec) -> int:
        match = _TYPE.match(group.instance_type)
        most = len(self._cores)
        where = f"group {group.name}"
        if match and (number := int(match.group(1))):
            # Times on fewer cores would be wrong for this type; data hosts may share cores.
            if group.role == "dnn" and number > most:
                raise UsageError(
                    f"{group.instance_type} asks for {number} cores; this machine has {most}",
                    where=where,
                    fix=f"use local.c{most}, or fewer cores",
                )
            return number
        fix = "use local.c1 for one core, local.c2 for two, ...; a job of one host may name the "
        fix += "type that this machine is"
        if not group.instance_type.startswith(("local.", "ml.local.")):
            if sum(each.count for each in job.groups) == 1:
                return most
            fix = f"start it by --platform sagemaker or kubernetes; here {fix}"
        raise UsageError(
            f"the local platform has no instance type {group.instance_type}", where=where, fix=fix
        )

    def _slice(self, offset: int, size: int) -> tuple[int, ...]:
        count = len(self._cores)
        # Wraps around: then hosts share cores, which `plan` reports.
        chosen = {self._cores[(offset + i) % count] for i in range(min(size, count))}
        return tuple(sorted(chosen))


def _usable_cores() -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except AttributeError:  # not on macOS
        return tuple(range(os.cpu_count() or 1))
